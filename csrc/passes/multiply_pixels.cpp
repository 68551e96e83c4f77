// Writes convolutions of single pixels as products of matrices. Where the channels of an image lie
// side by side, its pixels are the rows of a matrix x, and a kernel of 1x1 is a matrix w:
//
//   convolution(x, w, bias)                   -> x * w^T + bias
//   its gradient dy, towards x, w and bias    -> dy * w, dy^T * x, and the sum of the rows of dy
//
// Images become matrices, and results images, by views. Declines other strides, padding, dilation
// and groups, images whose pixels are no rows, and products of float32 of so many multiplications
// that oneDNN's convolution is as fast. Where sizes are symbols, those of the captured call decide.

#include "ir/edit.h"
#include "ops/aten_names.h"
#include "ops/channels_last.h"
#include "ops/op.h"
#include "ops/writer.h"
#include "passes/arguments.h"
#include "passes/context.h"
#include "passes/known_sizes.h"
#include "passes/unread.h"
#include "region/codegen.h"

#include <algorithm>
#include <optional>

namespace torch_ort::passes {

namespace {

using ir::Dim;
using ir::DType;
using ir::Graph;
using ir::Node;
using ir::Shape;
using ir::Value;

// Of float32. Up to here oneDNN's convolution takes longer, several times as long for few
// multiplications. Beyond, neither is faster for all shapes with AVX-512, and with AVX2 the product
// is (region::prefers_own_convolutions). Of bfloat16 the product is as fast for large ones, which
// oneDNN computes by its product anyway, and much faster on processors without instructions for
// bfloat16 (benchmarks/results/decisions.md).
constexpr int64_t kMostMultiplications = 1 << 26;

// A convolution or its gradient. What is not there is nullptr.
struct Convolution {
  Value *gradient, *x, *weight, *bias;
  Value *y, *dx, *dweight, *dbias;
};

bool is_all(const ops::Arg& arg, int64_t number) {
  const auto& list = std::get<ops::ArgList>(arg.value);
  return std::all_of(list.begin(), list.end(), [&](const ops::Arg& each) {
    const auto* dim = std::get_if<Dim>(&each.value);
    return dim != nullptr && *dim == Dim(number);
  });
}

// Stride, padding, dilation, whether it is transposed, padding of the result, groups.
bool moves_no_pixel(const ops::Call& call, size_t stride) {
  const auto* groups = std::get_if<Dim>(&call.args.at(stride + 5).value);
  return is_all(call.args.at(stride), 1) && is_all(call.args.at(stride + 1), 0) &&
         is_all(call.args.at(stride + 2), 1) && !std::get<bool>(call.args.at(stride + 3).value) &&
         groups != nullptr && *groups == Dim(1);
}

std::optional<Convolution> find_convolution(const Node& node) {
  if (node.is_erased() || !ops::work_of(node).image.is_convolution) return std::nullopt;
  ops::CallList list;
  ops::registry().find(node.op)->lower(node, list);
  // More calls pad the image before.
  if (list.calls.size() != 1) return std::nullopt;
  const ops::Call& call = list.calls[0];
  const auto argument = [&](size_t i) { return tensor(call.args.at(i)); };
  if (call.op == ops::aten::kConvolution) {
    if (!moves_no_pixel(call, 3)) return std::nullopt;
    return Convolution{.gradient = nullptr,
                       .x = argument(0),
                       .weight = argument(1),
                       .bias = argument(2),
                       .y = node.outputs[0],
                       .dx = nullptr,
                       .dweight = nullptr,
                       .dbias = nullptr};
  }
  if (!moves_no_pixel(call, 4)) return std::nullopt;
  const auto read_output = [&](size_t i) { return is_read(node, i) ? node.outputs[i] : nullptr; };
  return Convolution{.gradient = argument(0),
                     .x = argument(1),
                     .weight = argument(2),
                     .bias = nullptr,
                     .y = nullptr,
                     .dx = read_output(0),
                     .dweight = read_output(1),
                     .dbias = read_output(2)};
}

// Whether the pixels of an image are the rows of a matrix in its memory.
bool has_rows(const Value& image) {
  const ir::Type& type = image.type;
  if (!type.is_known() || type.shape->size() != ops::kImageRank) return false;
  return type.strides ? ops::has_channels_last(type) : ops::is_either_layout(*type.shape);
}

class Multiplier {
 public:
  explicit Multiplier(Graph& graph) : graph_(graph), sizes_(graph) {}

  int run(PassContext& context) {
    int rewrites = 0;
    for (Node& node : graph_.nodes) {
      const std::optional<Convolution> found = find_convolution(node);
      if (!found || !can_multiply(*found)) continue;
      if (!context.may_rewrite()) return rewrites;
      if (found->y != nullptr)
        multiply(node, *found);
      else
        multiply_gradients(node, *found);
      ir::erase(graph_, node);
      ++rewrites;
    }
    return rewrites;
  }

 private:
  bool is_matrix(const Value* value) const {
    const bool is_fast =
        value != nullptr && value->type.is_known() &&
        (value->type.dtype == DType::kFloat || value->type.dtype == DType::kBFloat16) &&
        ops::prefers_channels_last(value->type.device);
    return is_fast && has_rows(*value) && sizes_.are_known(*value);
  }

  bool can_multiply(const Convolution& found) const {
    for (const Value* matrix : {found.x, found.weight}) {
      if (!is_matrix(matrix)) return false;
    }
    for (const Value* matrix : {found.gradient, found.y, found.dx, found.dweight}) {
      if (matrix != nullptr && !is_matrix(matrix)) return false;
    }
    const Shape &image = *found.x->type.shape, &weight = *found.weight->type.shape;
    if (!(weight[2] == Dim(1)) || !(weight[3] == Dim(1)) || !(weight[1] == image[1])) return false;
    const std::optional<int64_t> numbers = hinted_size(graph_, ir::numel(image));
    const std::optional<int64_t> channels = hinted_size(graph_, weight[0]);
    if (!numbers || !channels || *numbers <= 0 || *channels <= 0) return false;
    return found.x->type.dtype != DType::kFloat || region::prefers_own_convolutions(found.x) ||
           *numbers <= kMostMultiplications / *channels;
  }

  void multiply(Node& node, const Convolution& found) {
    ops::Writer write(graph_, &node);
    Value *x = rows(write, *found.x), *weight = rows(write, *found.weight);
    Value* product = found.bias == nullptr
                         ? write.make("MatMul", {x, write.transpose(weight, {1, 0})})
                         : write.make("Gemm", {x, weight, found.bias}, {{"transB", Dim(1)}});
    replace(write, *found.y, *product);
  }

  void multiply_gradients(Node& node, const Convolution& found) {
    ops::Writer write(graph_, &node);
    Value* gradient = rows(write, *found.gradient);
    if (found.dx != nullptr) {
      replace(write, *found.dx, *write.make("MatMul", {gradient, rows(write, *found.weight)}));
    }
    if (found.dweight != nullptr) {
      Value* columns = write.transpose(gradient, {1, 0});
      replace(write, *found.dweight, *write.make("MatMul", {columns, rows(write, *found.x)}));
    }
    if (found.dbias != nullptr) {
      ir::replace_uses(*found.dbias, *write.reduce("ReduceSum", gradient, {0}, false), graph_);
    }
  }

  // A view with a row for each pixel.
  static Value* rows(ops::Writer& write, Value& image) {
    const Shape& shape = *image.type.shape;
    Value* last = &image;
    if (image.type.strides) {
      last = write.transpose(&image, Shape(std::begin(ops::kToLast), std::end(ops::kToLast)));
    }
    return write.reshape(last, {ir::numel({shape[0], shape[2], shape[3]}), shape[1]});
  }

  // `matrix` has the pixels of `image` as rows.
  void replace(ops::Writer& write, Value& image, Value& matrix) {
    const ir::Type& type = image.type;
    Value* made = nullptr;
    if (type.strides) {
      Value* last = write.reshape(&matrix, ops::channels_last_shape(*type.shape));
      made = write.transpose(last, Shape(std::begin(ops::kToFirst), std::end(ops::kToFirst)));
    } else {
      made = write.reshape(&matrix, *type.shape);
    }
    ir::replace_uses(image, *made, graph_);
  }

  Graph& graph_;
  const KnownSizes sizes_;
};

}  // namespace

int multiply_pixels(Graph& graph, PassContext& context) { return Multiplier(graph).run(context); }

}  // namespace torch_ort::passes
