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
#include "ops/channels_last.h"
#include "ops/shapes.h"
#include "passes/context.h"
#include "passes/convolutions.h"
#include "region/codegen.h"

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
// multiplications. Beyond, neither is faster for all shapes on some processors, and on the others
// the product is (region::prefers_own_convolutions). Of bfloat16 the product is as fast for large
// ones, which oneDNN computes by its product anyway, and much faster on processors without
// instructions for bfloat16 (benchmarks/results/decisions.md).
constexpr int64_t kMostMultiplications = 1 << 26;

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
    return is_fast && has_pixels_as_rows(value->type) && sizes_.are_known(*value);
  }

  bool can_multiply(const Convolution& found) const {
    const bool is_padded = !(found.pads == Shape(found.pads.size(), Dim(0)));
    if (found.moves() || is_padded || !found.has_windows_of(1)) return false;
    for (const Value* matrix : {found.x, found.weight}) {
      if (!is_matrix(matrix)) return false;
    }
    for (const Value* matrix : {found.gradient, found.y, found.dx, found.dweight}) {
      if (matrix != nullptr && !is_matrix(matrix)) return false;
    }
    const Shape &image = *found.x->type.shape, &weight = *found.weight->type.shape;
    if (!(weight[1] == image[1])) return false;
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
      last = write.transpose(&image, ops::to_last(shape.size()));
    }
    const Dim pixels = ir::numel(Shape(shape.begin() + 2, shape.end()));
    return write.reshape(last, {ops::times(shape[0], pixels), shape[1]});
  }

  // `matrix` has the pixels of `image` as rows.
  void replace(ops::Writer& write, Value& image, Value& matrix) {
    ir::replace_uses(image, *image_of_rows(write, matrix, image.type), graph_);
  }

  Graph& graph_;
  const KnownSizes sizes_;
};

}  // namespace

int multiply_pixels(Graph& graph, PassContext& context) { return Multiplier(graph).run(context); }

}  // namespace torch_ort::passes
