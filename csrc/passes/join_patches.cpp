// Convolutions whose windows lie side by side in rows, such as those that cut images into patches,
// -> the engine's of images that have as channels what lies in a row of a window. With images of
// shape (N, C, H, W) and windows of K columns that move by K:
//
//   x (N, C, H, W)         -> (N, K * C, H, W / K), a view where channels lie side by side
//   weight (O, C, KH, K)   -> (O, K * C, KH, 1), as well, or else a copy
//   y = torch_ort.Convolution(x, weight, bias)
//   dx = torch_ort.Convolution(dy, weight), transposed
//   dweight = torch_ort.ConvolutionWeightGrad(dy, x)
//
// First layers have so few channels that neither oneDNN's kernels nor the engine's are fast
// otherwise. Declines images with as many channels as those take, weights that are views of others,
// and sizes that are not known to be multiples of K, of which the rest of a row would lie between
// two rows. With few numbers in the row of a window, the gradients towards weight and bias are left
// to PyTorch.

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
using ir::Graph;
using ir::Node;
using ir::Shape;
using ir::Type;
using ir::Value;

// With more channels oneDNN's kernels are about as fast, and convolution_products.cpp takes images
// of 16 as they are.
constexpr int64_t kMostChannels = 8;
// The numbers in a row of a window: for the gradient of the weight, and for all else; and the
// channels of results. Figures are in benchmarks/results/decisions.md.
constexpr int64_t kLeastOfWeights = 12, kLeastInRow = 8, kLeastRows = 16;

class Joiner {
 public:
  explicit Joiner(Graph& graph) : graph_(graph), sizes_(graph) {}

  int run(PassContext& context) {
    int rewrites = 0;
    for (Node& node : graph_.nodes) {
      const std::optional<Convolution> found = find_convolution(node);
      if (!found || !can_join(*found)) continue;
      if (found->y == nullptr && found->dx == nullptr && !joins_weight(*found)) continue;
      if (!context.may_rewrite()) return rewrites;
      if (found->y != nullptr) {
        convolve(node, *found);
      } else {
        convolve_gradients(node, *found);
      }
      ++rewrites;
    }
    return rewrites;
  }

 private:
  bool can_join(const Convolution& it) const {
    const Shape& weight = *it.weight->type.shape;
    const Dim &columns = weight.back(), &channels = weight[1];
    if (it.is_transposed || !(it.groups == Dim(1)) || !weight[0].is_constant() ||
        !channels.is_constant()) {
      return false;
    }
    const bool is_side_by_side = columns.constant() > 1 && it.strides.back() == columns &&
                                 it.dilations.back() == Dim(1) && it.pads.back() == Dim(0);
    const bool is_worth_it =
        channels.constant() <= kMostChannels && numbers_in_row(it) >= kLeastInRow &&
        weight[0].constant() >= kLeastRows && region::prefers_own_convolutions(it.x);
    if (!is_side_by_side || !is_worth_it || !it.pads_within_windows() || !it.has_plain_bias()) {
      return false;
    }
    for (const Value* image : {it.x, it.dx, it.dweight}) {
      if (image == nullptr) continue;
      const bool is_taken = image->type.dtype == ir::DType::kFloat && sizes_.are_known(*image) &&
                            has_pixels_as_rows(image->type);
      if (!is_taken) return false;
    }
    if (!it.has_plain_weight() || it.weight->type.dtype != ir::DType::kFloat) return false;
    const Value* result = it.y != nullptr ? it.y : it.gradient;
    return is_channels_last(result, sizes_) &&
           ops::times(result->type.shape->back(), columns) == it.x->type.shape->back();
  }

  static int64_t numbers_in_row(const Convolution& it) {
    const Shape& weight = *it.weight->type.shape;
    return weight[1].constant() * weight.back().constant();
  }

  static bool joins_weight(const Convolution& it) {
    return it.dweight != nullptr && numbers_in_row(it) >= kLeastOfWeights;
  }

  void convolve(Node& node, const Convolution& it) {
    ops::Writer write(graph_, &node);
    std::vector<Value*> operands = {joined(write, *it.x, it), joined(write, *it.weight, it)};
    if (it.bias != nullptr) operands.push_back(it.bias);
    Value* made = write.make_ours("Convolution", std::move(operands), it.y->type, attrs_of(it));
    ir::replace_uses(*it.y, *made, graph_);
    ir::erase(graph_, node);
  }

  void convolve_gradients(Node& node, const Convolution& it) {
    ops::Writer write(graph_, &node);
    if (it.dx != nullptr) {
      ir::Attrs attrs = attrs_of(it);
      attrs["transposed"] = Dim(1);
      Value* made = write.make_ours("Convolution", {it.gradient, joined(write, *it.weight, it)},
                                    joined_type(it.dx->type, it), std::move(attrs));
      replace(write, *it.dx, *made);
    }
    if (joins_weight(it)) {
      Value* made =
          write.make_ours("ConvolutionWeightGrad", {it.gradient, joined(write, *it.x, it)},
                          joined_type(it.dweight->type, it), attrs_of(it));
      replace(write, *it.dweight, *made);
      if (it.dbias != nullptr) {
        ir::replace_uses(*it.dbias, *sum_pixels(write, *it.gradient), graph_);
      }
    }
    compute_what_is_read(graph_, node);
  }

  static ir::Attrs attrs_of(const Convolution& it) {
    Shape strides = it.strides;
    strides.back() = Dim(1);
    return {{"dilations", it.dilations},
            {"groups", it.groups},
            {"pads", it.pads},
            {"strides", std::move(strides)}};
  }

  static Shape joined_shape(const Shape& image, const Convolution& it) {
    const Dim& columns = it.strides.back();
    const Shape& result = *(it.y != nullptr ? it.y : it.gradient)->type.shape;
    Shape shape = image;
    shape[1] = ops::times(columns, image[1]);
    // A window has one column then, and an image those of the result.
    shape.back() = image.back() == columns ? Dim(1) : result.back();
    return shape;
  }

  static Type joined_type(Type type, const Convolution& it) {
    type.shape = joined_shape(*type.shape, it);
    type.strides.reset();
    if (!ops::is_either_layout(*type.shape)) type.strides = ops::channels_last_strides(*type.shape);
    return type;
  }

  // A view of an image, or of a weight whose channels lie side by side; a copy of others.
  static Value* joined(ops::Writer& write, Value& image, const Convolution& it) {
    return image_of_rows(write, *as_rows(write, image), joined_type(image.type, it));
  }

  void replace(ops::Writer& write, Value& image, Value& joined) {
    Value* made = image_of_rows(write, *as_rows(write, joined), image.type);
    ir::replace_uses(image, *made, graph_);
  }

  // A view (N, H, W, C).
  static Value* as_rows(ops::Writer& write, Value& image) {
    const Shape& shape = *image.type.shape;
    const bool is_plain = !image.type.strides && ops::is_either_layout(shape);
    return is_plain ? write.reshape(&image, ops::channels_last_shape(shape))
                    : write.transpose(&image, ops::to_last(shape.size()));
  }

  Graph& graph_;
  const KnownSizes sizes_;
};

}  // namespace

int join_patches(Graph& graph, PassContext& context) { return Joiner(graph).run(context); }

}  // namespace torch_ort::passes
