// Convolutions of one dim, and what stands between them -> those of images with one row
//
//   y = Conv(x, weight)                      x (N, C, L), weight (O, C, K)
//
//   x1 = Unsqueeze(x, 2)                     (N, C, 1, L)
//   y1 = Conv(x1, Unsqueeze(weight, 2))
//   y = Squeeze(y1, 2)
//
// This is what PyTorch's kernels do, too. Passes that choose layouts and kernels for images then
// find these, and the engine's kernels compute them. So that no views stand between convolutions,
// nodes that are connected with one by images (N, C, L) get images with one row, too: point-wise
// nodes, norms, reductions, expansions, and what cuts, pads and joins them. Poolings have such
// images already, between views that are left out here.
//
// Where a model transposes (N, L, C) itself, to apply a layer to the channels of each place and
// back, the image is a view of (N, 1, L, C), as passes that choose layouts expect.
//
// Declines all where the library's convolutions are fast, and other dtypes than float32, for which
// the engine has none.

#include "ir/edit.h"
#include "ops/aten_names.h"
#include "ops/channels_last.h"
#include "ops/fusion.h"
#include "ops/op.h"
#include "ops/shapes.h"
#include "ops/writer.h"
#include "passes/arguments.h"
#include "passes/context.h"
#include "passes/halves.h"
#include "passes/memory.h"
#include "passes/unread.h"
#include "region/codegen.h"

#include <algorithm>
#include <map>
#include <optional>
#include <string_view>
#include <unordered_map>
#include <unordered_set>

namespace torch_ort::passes {

namespace {

using ir::Dim;
using ir::Graph;
using ir::Node;
using ir::Shape;
using ir::Type;
using ir::Value;

constexpr size_t kRank = 3;    // of images without rows
constexpr int64_t kRow = 2;    // the axis that is added
constexpr int64_t kPlace = 2;  // the axis of places, which becomes the one behind it

// The ops whose nodes are rewritten, beside point-wise ones and reductions.
enum class Kind {
  kNone,
  kConvolution,
  kKernel,  // of any images
  kPointwise,
  kReduction,
  kExpand,
  kConcat,
  kSlice,
  kSliceBackward,
  kGlu,
  kPad,
  kSqueeze,    // makes an image without rows of one with a row
  kUnsqueeze,  // and the other way round
};

bool is_output(const Value& value) {
  return std::any_of(value.uses.begin(), value.uses.end(),
                     [](const ir::Use& use) { return use.node == nullptr; });
}

// Whether operands of fewer or other dims are repeated.
bool broadcasts(Kind kind) { return kind == Kind::kPointwise || kind == Kind::kExpand; }

bool makes_view(Kind kind) {
  return kind == Kind::kExpand || kind == Kind::kSlice || kind == Kind::kSqueeze;
}

bool has_rank(const Value* value, size_t rank) {
  return value != nullptr && value->type.is_known() && value->type.shape->size() == rank;
}

bool is_image(const Value* value) { return has_rank(value, kRank); }

bool knows_ints(const Node& node, size_t slot) {
  return ops::has_input(node, slot) && ops::has_known_ints(node.inputs[slot]);
}

// Whether a Squeeze or Unsqueeze is of the axis of rows alone.
bool is_of_rows(const Node& node) {
  if (!knows_ints(node, 1)) return false;
  const Shape axes = ops::known_ints(node.inputs[1]);
  const auto rank = static_cast<int64_t>(kRank) + 1;
  return axes.size() == 1 && (axes[0] == Dim(kRow) || axes[0] == Dim(kRow - rank));
}

Dim widen_axis(const Node& node, const Dim& axis) {
  const int64_t found = ops::wrap_axis(node, axis.constant(), kRank);
  return found < kPlace ? found : found + 1;
}

Shape widen_shape(Shape shape, const Dim& row = 1) {
  shape.insert(shape.begin() + kRow, row);
  return shape;
}

// Whether a Slice has positive steps, so that it is a view.
bool goes_forward(const Node& node) {
  if (!ops::has_input(node, 4)) return true;
  if (!knows_ints(node, 4)) return false;
  const Shape steps = ops::known_ints(node.inputs[4]);
  return std::all_of(steps.begin(), steps.end(),
                     [](const Dim& step) { return step.is_constant() && step.constant() > 0; });
}

// Whether all operands of a point-wise node broadcast to its images by their last dims.
bool has_operands(const Node& node) {
  return std::all_of(node.inputs.begin(), node.inputs.end(), [](const Value* value) {
    return value == nullptr || (value->type.is_known() && value->type.shape->size() <= kRank);
  });
}

bool is_convolution(const Node& node) {
  const std::string pad = ir::string_attr(node.attrs, "auto_pad", "NOTSET");
  return pad == "NOTSET" && node.inputs.size() > 1 &&
         node.inputs[0]->type.dtype == ir::DType::kFloat &&
         region::prefers_own_convolutions(node.inputs[0]);
}

Kind kind_of_image(const Node& node) {
  if (!ops::is_pure(node) || node.inputs.empty() || node.inputs[0] == nullptr) return Kind::kNone;
  const auto is = [&](const char* op) { return ir::is(&node, op); };
  const std::string kind = kind_of(node);
  const ops::ImageRule& rule = ops::work_of(node).image;
  if (rule.is_convolution) return is_convolution(node) ? Kind::kConvolution : Kind::kNone;
  if (rule.takes_any_rank) return Kind::kKernel;
  if (is("Squeeze")) {
    const Value& image = *node.inputs[0];
    const bool is_plain =
        has_rank(&image, kRank + 1) && !image.type.strides && (*image.type.shape)[kRow] == Dim(1);
    return is_plain && is_of_rows(node) ? Kind::kSqueeze : Kind::kNone;
  }
  if (is("Unsqueeze")) return is_of_rows(node) ? Kind::kUnsqueeze : Kind::kNone;
  if (is("Expand")) return Kind::kExpand;
  if (is("Concat")) return Kind::kConcat;
  if (is("Slice")) return knows_ints(node, 3) && goes_forward(node) ? Kind::kSlice : Kind::kNone;
  if (is("Pad")) {
    const bool knows = knows_ints(node, 1) && !ops::has_input(node, 3) &&
                       ops::known_ints(node.inputs[1]).size() == 2 * kRank;
    return knows ? Kind::kPad : Kind::kNone;
  }
  if (kind == ops::aten::kSliceBackward) {
    const bool knows = ir::ints_attr(node.attrs, "input_sizes", {}).size() == kRank;
    return knows ? Kind::kSliceBackward : Kind::kNone;
  }
  if (kind == ops::aten::kGlu || kind == ops::aten::kGluBackward) return Kind::kGlu;
  switch (ops::image_form(node).kind) {
    case ops::ImageForm::Kind::kPointwise:
      return has_operands(node) ? Kind::kPointwise : Kind::kNone;
    case ops::ImageForm::Kind::kReduction: {
      const auto axes = ops::reduction_axes(node);
      return node.op.domain.empty() && axes && !axes->empty() ? Kind::kReduction : Kind::kNone;
    }
    default: return Kind::kNone;
  }
}

// The sets of nodes that are connected by images.
class Clusters {
 public:
  int add() {
    parents_.push_back(static_cast<int>(parents_.size()));
    return parents_.back();
  }
  int find(int i) {
    while (parents_[i] != i) i = parents_[i] = parents_[parents_[i]];
    return i;
  }
  void join(int a, int b) { parents_[find(a)] = find(b); }

 private:
  std::vector<int> parents_;
};

class Widener {
 public:
  explicit Widener(Graph& graph) : graph_(graph), memory_(graph) {}

  int run(PassContext& context) {
    const std::vector<std::pair<Node*, Kind>> chosen = choose();
    int rewrites = 0;
    for (const auto& [node, kind] : chosen) {
      if (kind != Kind::kSqueeze && !context.may_rewrite()) break;
      is_backward_ = is_backward_ || backward_.contains(node);
      rewrites += kind == Kind::kSqueeze ? 0 : 1;
      rewrite(*node, kind);
    }
    erase_unread(graph_, views_);
    return rewrites;
  }

 private:
  // Whether the value may be replaced by an image with a row.
  bool can_widen(const Value& value) const {
    return !memory_.is_written(&value) &&
           std::none_of(value.uses.begin(), value.uses.end(),
                        [](const ir::Use& use) { return use.index == ir::kCaptured; });
  }

  // The images of a node that connect it with others; nothing if it cannot be rewritten.
  std::optional<std::vector<const Value*>> images_of(const Node& node, Kind kind) const {
    std::vector<const Value*> found;
    const bool is_gradient = kind == Kind::kConvolution && node.outputs.size() > 1;
    for (size_t i = 0; i < node.inputs.size(); ++i) {
      // Weights are no images.
      if (kind == Kind::kConvolution && i > (is_gradient ? 1 : 0)) break;
      if (is_image(node.inputs[i])) found.push_back(node.inputs[i]);
    }
    const bool reads = !found.empty() || kind == Kind::kSqueeze || kind == Kind::kExpand;
    if (broadcasts(kind) && is_image(node.outputs[0])) {
      // Operands that are repeated connect nothing: a mask may also be one of attention.
      const Shape& shape = *node.outputs[0]->type.shape;
      std::erase_if(found, [&](const Value* each) { return !(*each->type.shape == shape); });
    }
    if (kind == Kind::kUnsqueeze && is_output(*node.outputs[0])) return std::nullopt;
    for (const Value* output : node.outputs) {
      if (output == nullptr || !output->type.is_known()) continue;
      // Kernels that give an image the strides of an operand may do so for other dims.
      if (is_image(output) && output->type.strides && !makes_view(kind)) return std::nullopt;
      const bool is_weight = is_gradient && output != node.outputs[0];
      if (is_image(output) && !is_weight) found.push_back(output);
    }
    if (!reads || found.empty()) return std::nullopt;
    const Value* first = node.outputs[0];
    const bool makes_images = kind != Kind::kReduction && kind != Kind::kUnsqueeze;
    // An unread gradient of an image has no type.
    if (makes_images && !is_image(first) && !is_gradient) return std::nullopt;
    const bool can = std::all_of(found.begin(), found.end(),
                                 [&](const Value* each) { return can_widen(*each); });
    return can ? std::optional(found) : std::nullopt;
  }

  // The nodes that are connected with a convolution, in their order.
  std::vector<std::pair<Node*, Kind>> choose() {
    struct Found {
      Node* node;
      Kind kind;
      int cluster;
    };
    Clusters clusters;
    std::vector<Found> found;
    std::unordered_map<const Value*, int> of_value;
    for (Node& node : graph_.nodes) {
      if (node.is_erased()) continue;
      const Kind kind = kind_of_image(node);
      if (kind == Kind::kNone) continue;
      const auto images = images_of(node, kind);
      if (!images) continue;
      found.push_back({&node, kind, clusters.add()});
      for (const Value* image : *images) {
        const auto [other, is_new] = of_value.try_emplace(image, found.back().cluster);
        if (!is_new) clusters.join(found.back().cluster, other->second);
      }
    }
    std::unordered_set<int> wanted;
    for (const Found& each : found) {
      if (each.kind == Kind::kConvolution) wanted.insert(clusters.find(each.cluster));
    }
    std::vector<std::pair<Node*, Kind>> chosen;
    for (const Found& each : found) {
      if (wanted.contains(clusters.find(each.cluster))) chosen.emplace_back(each.node, each.kind);
    }
    if (!chosen.empty()) backward_ = backward_nodes(graph_);
    return chosen;
  }

  void rewrite(Node& node, Kind kind) {
    if (kind == Kind::kSqueeze) {
      wide_.emplace(node.outputs[0], node.inputs[0]);
      views_.push_back(&node);
      return;
    }
    if (kind == Kind::kUnsqueeze) {
      ir::replace_uses(*node.outputs[0], *widen(*node.inputs[0], node), graph_);
      return ir::erase(graph_, node);
    }
    ops::Writer write(graph_, &node);
    std::vector<Value*> inputs = node.inputs;
    for (Value*& input : inputs) {
      if (input == nullptr || !input->type.shape) continue;
      const size_t rank = input->type.shape->size();
      // Other operands of fewer dims are numbers of channels, or of no images.
      if (rank == kRank) input = widen(*input, node);
      if (rank == kRank - 1 && broadcasts(kind)) {
        input = write.make("Unsqueeze", {input, write.ints({Dim(1)})});
      }
    }
    std::vector<Type> types;
    for (const Value* output : node.outputs) types.push_back(widened_type(output));
    ir::Attrs attrs = node.attrs;
    switch (kind) {
      case Kind::kConvolution: widen_steps(attrs); break;
      case Kind::kReduction: inputs = {inputs[0], write.ints(widen_reduced(node))}; break;
      case Kind::kExpand: {
        const Shape shape = widen_shape(*node.outputs[0]->type.shape);
        inputs[1] = write.ints(shape);
        types = {ops::expanded_type(inputs[0]->type, shape)};
        break;
      }
      case Kind::kConcat:
        attrs["axis"] = widen_axis(node, ir::int_attr(node.attrs, "axis", 0));
        break;
      case Kind::kSlice: {
        Shape axes;
        for (const Dim& axis : ops::known_ints(node.inputs[3])) {
          axes.push_back(widen_axis(node, axis));
        }
        inputs[3] = write.ints(axes);
        types = {sliced_type(node, *inputs[0], axes)};
        break;
      }
      case Kind::kSliceBackward:
        attrs["dim"] = widen_axis(node, ir::int_attr(node.attrs, "dim", 0));
        attrs["input_sizes"] = widen_shape(ir::ints_attr(node.attrs, "input_sizes", {}));
        break;
      case Kind::kGlu: attrs["dim"] = widen_axis(node, ir::int_attr(node.attrs, "dim", -1)); break;
      case Kind::kPad: {
        const Shape pads = ops::known_ints(node.inputs[1]);
        const auto middle = pads.begin() + kRank;
        Shape wide = widen_shape(Shape(pads.begin(), middle), 0);
        const Shape behind = widen_shape(Shape(middle, pads.end()), 0);
        wide.insert(wide.end(), behind.begin(), behind.end());
        inputs[1] = write.ints(wide);
        break;
      }
      default: break;
    }
    Node& made = write.copy(node, std::move(inputs), types);
    made.attrs = std::move(attrs);
    for (size_t i = 0; i < node.outputs.size(); ++i) {
      Value* old = node.outputs[i];
      if (old == nullptr || old->uses.empty()) continue;
      Value* with = made.outputs[i];
      if (is_image(old)) {
        with = write.make("Squeeze", {made.outputs[i], write.ints({Dim(kRow)})});
        wide_.emplace(with, made.outputs[i]);
        views_.push_back(with->producer);
      }
      ir::replace_uses(*old, *with, graph_);
    }
    ir::erase(graph_, node);
  }

  static Type widened_type(const Value* output) {
    if (output == nullptr) return {};
    return is_image(output) ? ops::with_shape(output->type, widen_shape(*output->type.shape))
                            : output->type;
  }

  // A view of the image with a row. Its sizes may be expressions that no rule would infer again.
  static Type sliced_type(const Node& node, const Value& image, const Shape& axes) {
    Shape strides = ops::strides_of(image.type);
    if (ops::has_input(node, 4)) {
      const Shape steps = ops::known_ints(node.inputs[4]);
      for (size_t i = 0; i < axes.size(); ++i) {
        Dim& stride = strides[axes[i].constant()];
        stride = ops::times(stride, steps[i]);
      }
    }
    return ops::view_type(image.type, widen_shape(*node.outputs[0]->type.shape), strides);
  }

  // What a convolution says of its one dim.
  static void widen_steps(ir::Attrs& attrs) {
    const auto put = [&](const char* name, int64_t number) {
      Shape numbers = ir::ints_attr(attrs, name, {});
      if (numbers.empty()) return;
      const bool has_both_ends = std::string_view(name) == "pads";
      numbers.insert(numbers.begin(), number);
      if (has_both_ends) numbers.insert(numbers.begin() + 2, number);
      attrs[name] = numbers;
    };
    for (const char* name : {"strides", "stride", "dilations", "dilation", "kernel_shape"}) {
      put(name, 1);
    }
    for (const char* name : {"pads", "padding", "output_padding"}) put(name, 0);
    put("output_shape", 1);
  }

  // The axes of a reduction. One that removes its axes removes the row as well.
  static Shape widen_reduced(const Node& node) {
    Shape axes;
    bool has_row = ir::int_attr(node.attrs, "keepdims", 1) != 0;
    const std::vector<int64_t> reduced = *ops::reduction_axes(node);
    for (const int64_t axis : reduced) {
      if (!has_row && axis >= kPlace) {
        axes.push_back(kRow);
        has_row = true;
      }
      axes.push_back(axis < kPlace ? axis : axis + 1);
    }
    if (!has_row) axes.push_back(kRow);
    return axes;
  }

  // The image with a row for one without, for a reader.
  Value* widen(Value& value, Node& reader) {
    if (const auto found = wide_.find(&value); found != wide_.end()) return found->second;
    // A view that one half makes is not for the other.
    Value*& view = made_views_[{&value, is_backward_}];
    if (view == nullptr) {
      ops::Writer write(graph_, &reader);
      if (Value* last = transposed(value)) {
        Value* with_row = write.make("Unsqueeze", {last, write.ints({Dim(1)})});
        view = write.transpose(with_row, ops::to_first(kRank + 1));
      } else {
        view = write.make("Unsqueeze", {&value, write.ints({Dim(kRow)})});
      }
    }
    return view;
  }

  // The row-major tensor (N, L, C) that an image is a view of; nullptr if it is none.
  static Value* transposed(const Value& value) {
    if (!ir::is(value.producer, "Transpose")) return nullptr;
    Value* last = value.producer->inputs[0];
    const Shape perm = ir::ints_attr(value.producer->attrs, "perm", {});
    return perm == ops::to_first(kRank) && is_image(last) && !last->type.strides ? last : nullptr;
  }

  Graph& graph_;
  const SharedMemory memory_;
  std::unordered_set<const Node*> backward_;
  bool is_backward_ = false;
  std::unordered_map<const Value*, Value*> wide_;
  std::map<std::pair<const Value*, bool>, Value*> made_views_;
  std::vector<Node*> views_;  // that nothing may read
};

}  // namespace

int widen_convolutions(Graph& graph, PassContext& context) { return Widener(graph).run(context); }

}  // namespace torch_ort::passes
