#include "passes/convolutions.h"

#include "ir/edit.h"
#include "ops/aten_names.h"
#include "ops/channels_last.h"
#include "ops/op.h"
#include "ops/shapes.h"
#include "passes/arguments.h"
#include "passes/unread.h"
#include "region/codegen.h"

#include <algorithm>
#include <iterator>

namespace torch_ort::passes {

namespace {

using ir::Dim;
using ir::Graph;
using ir::Node;
using ir::Shape;
using ir::Value;

constexpr size_t kNumGradients = 3;  // of the image, the weight and the bias

// Of Winograd's convolutions: half of the channels on both sides, if these are as many, and tiles.
// Volumes are transformed once for three depths of the windows.
constexpr int64_t kLeastChannels = 16, kLeastChannelsOfVolumes = 8, kLeastTiles = 32;

// One number for each dim of the pixels.
std::optional<Shape> numbers(const ops::Arg& arg, size_t count) {
  Shape found;
  for (const ops::Arg& each : std::get<ops::ArgList>(arg.value)) {
    const auto* dim = std::get_if<Dim>(&each.value);
    if (dim == nullptr || !dim->is_constant()) return std::nullopt;
    found.push_back(*dim);
  }
  return found.size() == count ? std::optional(found) : std::nullopt;
}

bool are_all(const Shape& list, int64_t number) {
  return std::all_of(list.begin(), list.end(), [&](const Dim& dim) { return dim == Dim(number); });
}

// Reads what follows the tensors of the call.
bool read_steps(const ops::Call& call, size_t first, Convolution& found) {
  const size_t dims = found.x->type.shape->size() - 2;
  const auto strides = numbers(call.args.at(first), dims),
             pads = numbers(call.args.at(first + 1), dims),
             dilations = numbers(call.args.at(first + 2), dims),
             output_pads = numbers(call.args.at(first + 4), dims);
  const auto* is_transposed = std::get_if<bool>(&call.args.at(first + 3).value);
  const auto* groups = std::get_if<Dim>(&call.args.at(first + 5).value);
  if (!strides || !pads || !dilations || !output_pads || is_transposed == nullptr ||
      groups == nullptr) {
    return false;
  }
  found.strides = *strides;
  found.pads = *pads;
  found.dilations = *dilations;
  found.output_pads = *output_pads;
  found.is_transposed = *is_transposed;
  found.groups = *groups;
  return true;
}

bool is_known_image(const Value* value) {
  return value != nullptr && value->type.is_known() &&
         ops::is_image_rank(value->type.shape->size());
}

bool can_convolve(const Convolution& it, const KnownSizes& sizes) {
  // Neither pixels of a transposed result that no window reaches, nor wider pads are worth a case
  // in the kernels.
  for (size_t dim = 0; it.is_transposed && dim < it.strides.size(); ++dim) {
    if (it.output_pads[dim].constant() >= it.strides[dim].constant()) return false;
  }
  return it.x->type.dtype == it.weight->type.dtype && it.pads_within_windows() &&
         is_channels_last(it.y != nullptr ? it.x : it.gradient, sizes) &&
         is_channels_last(it.y != nullptr ? it.y : it.dx, sizes);
}

void convolve(Graph& graph, Node& node, const Convolution& it, const char* op, ir::Attrs attrs) {
  ops::Writer write(graph, &node);
  std::vector<Value*> operands = {it.y != nullptr ? it.x : it.gradient, it.weight};
  if (it.bias != nullptr) operands.push_back(it.bias);
  attrs.insert({{"dilations", it.dilations}, {"pads", it.pads}, {"strides", it.strides}});
  if ((it.y != nullptr) == it.is_transposed) attrs["transposed"] = Dim(1);
  Value& result = it.y != nullptr ? *it.y : *it.dx;
  Value* made = write.make_ours(op, std::move(operands), result.type, std::move(attrs));
  ir::replace_uses(result, *made, graph);
  if (it.y != nullptr) return ir::erase(graph, node);
  compute_what_is_read(graph, node);
}

}  // namespace

bool Convolution::moves() const {
  return is_transposed || !are_all(strides, 1) || !are_all(dilations, 1) || !(groups == Dim(1));
}

bool Convolution::suits_depthwise() const {
  const Shape& window = *weight->type.shape;
  const Dim& channels = (*x->type.shape)[1];
  const ir::DType dtype = x->type.dtype;
  const bool has_dtype = dtype == ir::DType::kFloat || ir::is_short_float(dtype);
  return has_dtype && !is_of_volumes() && groups == channels && window[0] == channels &&
         window[1] == Dim(1);
}

bool Convolution::pads_within_windows() const {
  const Shape& window = *weight->type.shape;
  for (size_t dim = 0; dim < pads.size(); ++dim) {
    const int64_t reach = dilations[dim].constant() * (window[2 + dim].constant() - 1);
    if (pads[dim].constant() < 0 || pads[dim].constant() > reach) return false;
  }
  return true;
}

bool Convolution::has_plain_weight() const {
  return !weight->type.strides || ops::has_channels_last(weight->type);
}

bool Convolution::has_windows_of(int64_t size) const {
  const Shape& shape = *weight->type.shape;
  return are_all(Shape(shape.begin() + 2, shape.end()), size);
}

std::optional<Convolution> find_convolution(const Node& node) {
  if (node.is_erased() || !ops::work_of(node).image.is_convolution) return std::nullopt;
  ops::CallList list;
  ops::registry().find(node.op)->lower(node, list);
  // More calls pad the image before.
  if (list.calls.size() != 1) return std::nullopt;
  const ops::Call& call = list.calls[0];
  const auto argument = [&](size_t i) { return tensor(call.args.at(i)); };
  Convolution found;
  if (call.op == ops::aten::kConvolution) {
    found.x = argument(0);
    found.weight = argument(1);
    found.bias = argument(2);
    found.y = node.outputs[0];
    if (!is_known_image(found.x) || !is_known_image(found.y) || !read_steps(call, 3, found)) {
      return std::nullopt;
    }
  } else {
    const auto result = [&](size_t i) { return is_read(node, i) ? node.outputs[i] : nullptr; };
    found.gradient = argument(0);
    found.x = argument(1);
    found.weight = argument(2);
    found.dx = result(0);
    found.dweight = result(1);
    found.dbias = result(2);
    if (!is_known_image(found.x) || !is_known_image(found.gradient) ||
        !read_steps(call, 4, found)) {
      return std::nullopt;
    }
    for (const Value* value : {found.dx, found.dweight}) {
      if (value != nullptr && !is_known_image(value)) return std::nullopt;
    }
  }
  if (!is_known_image(found.weight)) return std::nullopt;
  const Shape& window = *found.weight->type.shape;
  const bool is_constant = std::all_of(window.begin() + 2, window.end(),
                                       [](const Dim& dim) { return dim.is_constant(); });
  return is_constant ? std::optional(found) : std::nullopt;
}

bool is_channels_last(const Value* value, const KnownSizes& sizes) {
  return is_known_image(value) && sizes.are_known(*value) && ops::has_channels_last(value->type);
}

bool has_pixels_as_rows(const ir::Type& type) {
  return type.strides ? ops::has_channels_last(type) : ops::is_either_layout(*type.shape);
}

Value* image_of_rows(ops::Writer& write, Value& rows, const ir::Type& type) {
  const Shape& shape = *type.shape;
  if (!type.strides) return write.reshape(&rows, shape);
  Value* last = write.reshape(&rows, ops::channels_last_shape(shape));
  return write.transpose(last, ops::to_first(shape.size()));
}

Value* sum_pixels(ops::Writer& write, Value& image) {
  const size_t rank = image.type.shape->size();
  Value* last = write.transpose(&image, ops::to_last(rank));
  Shape axes;
  for (size_t axis = 0; axis + 1 < rank; ++axis) axes.push_back(static_cast<int64_t>(axis));
  return write.reduce("ReduceSum", last, axes, false);
}

int convolve_by(Graph& graph, PassContext& context, const char* op,
                std::optional<ir::Attrs> (*attrs_of)(const Convolution& it)) {
  int rewrites = 0;
  const KnownSizes sizes(graph);
  for (Node& node : graph.nodes) {
    const std::optional<Convolution> it = find_convolution(node);
    if (!it || !can_convolve(*it, sizes)) continue;
    std::optional<ir::Attrs> attrs = attrs_of(*it);
    if (!attrs) continue;
    if (!context.may_rewrite()) return rewrites;
    convolve(graph, node, *it, op, std::move(*attrs));
    ++rewrites;
  }
  return rewrites;
}

void compute_what_is_read(Graph& graph, Node& gradient) {
  std::vector<std::string> mask(kNumGradients, "false");
  for (size_t i = 0; i < kNumGradients && i < gradient.outputs.size(); ++i) {
    if (is_read(gradient, i)) {
      mask[i] = "true";
    } else if (gradient.outputs[i] != nullptr) {
      gradient.outputs[i]->type = ir::Type{.device = gradient.outputs[i]->type.device};
    }
  }
  if (std::find(mask.begin(), mask.end(), "true") == mask.end()) {
    ir::erase(graph, gradient);
  } else {
    gradient.attrs["output_mask"] = std::move(mask);
  }
}

bool suits_winograd(const Graph& graph, const Convolution& it) {
  const Shape& weight = *it.weight->type.shape;
  // Less cuts pixels off, and beyond are results of windows that lie in the padding alone.
  const auto is_odd = [](const Dim& pad) { return pad.constant() < 0 || pad.constant() > 2; };
  if (it.moves() || !it.has_windows_of(3) || it.x->type.dtype != ir::DType::kFloat ||
      it.weight->type.dtype != ir::DType::kFloat ||
      std::any_of(it.pads.begin(), it.pads.end(), is_odd) ||
      !region::has_kernel(it.x, "WinogradConvolution")) {
    return false;
  }
  if (!weight[0].is_constant() || !weight[1].is_constant()) return false;
  const int64_t rows = weight[0].constant(), channels = weight[1].constant();
  const Shape& result = *(it.y != nullptr ? it.y : it.gradient)->type.shape;
  const size_t rank = result.size();
  const Dim all = ir::numel(Shape(result.begin() + 2, result.end() - 2));  // planes of a volume
  const auto images = hinted_size(graph, ops::times(result[0], all)),
             height = hinted_size(graph, result[rank - 2]),
             width = hinted_size(graph, result[rank - 1]);
  if (!images || !height || !width) return false;
  // Transforms take longer than what they save with few channels on either side; and where many
  // tiles hang over the edges of images; and that of the weight with few tiles. Figures are in
  // benchmarks/results/decisions.md.
  const int64_t tiles = *images * ((*height + 1) / 2) * ((*width + 1) / 2);
  const int64_t least = it.is_of_volumes() ? kLeastChannelsOfVolumes : kLeastChannels;
  const bool has_channels = rows * channels >= least * (rows + channels);
  return has_channels && tiles >= kLeastTiles && 8 * tiles <= 3 * *images * *height * *width;
}

}  // namespace torch_ort::passes
