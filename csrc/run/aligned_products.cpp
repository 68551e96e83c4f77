#include "run/aligned_products.h"

#include "base/rounding.h"
#include "run/padded_rows.h"

#include <algorithm>

namespace torch_ort::run {

namespace {

// Smaller products take about as long as the kernels that write zeros beside them.
constexpr int64_t kLeastMultiplications = int64_t{1} << 30;
// What is copied for a product should be read often in it: a factor by this many rows, ...
constexpr int64_t kLeastRows = 512;
// ... and an element of the result should be a sum of this many terms.
constexpr int64_t kLeastDepth = 256;

bool is_matrix(const TensorSpec& spec) { return spec.known && spec.sizes.size() == 2; }

// The dim along which the matrix is contiguous, with rows of it beginning at multiples of 16 bytes;
// nothing if there is none.
std::optional<int> aligned_dim(const TensorSpec& spec) {
  const int64_t unit = elements_at_once(spec);
  for (const int dim : {1, 0}) {
    if (spec.strides[dim] == 1 && spec.strides[1 - dim] % unit == 0 &&
        spec.strides[1 - dim] >= spec.sizes[dim]) {
      return dim;
    }
  }
  return std::nullopt;
}

std::vector<int64_t> dense_strides(const std::vector<int64_t>& sizes, int contiguous_dim) {
  return contiguous_dim == 1 ? std::vector<int64_t>{sizes[1], 1}
                             : std::vector<int64_t>{1, sizes[0]};
}

}  // namespace

struct ProductAligner::Sizes {
  int64_t rows, depth, columns;
  int64_t even_depth, even_columns;

  // Nothing if the sizes fit no product of two matrices, as may happen with those of a file, or if
  // the product is too small.
  static std::optional<Sizes> of(const ProductStep& step, const Description& description) {
    const TensorSpec &a = description.specs[step.a], &b = description.specs[step.b];
    const TensorSpec& result = description.specs[step.outputs[0]];
    if (!is_matrix(a) || !is_matrix(b) || !is_matrix(result)) return std::nullopt;
    if (!c10::isFloatingType(a.dtype) || b.dtype != a.dtype || result.dtype != a.dtype)
      return std::nullopt;
    const int64_t rows = a.sizes[0], depth = a.sizes[1], columns = b.sizes[1];
    if (b.sizes[0] != depth || result.sizes != std::vector<int64_t>{rows, columns})
      return std::nullopt;
    if (rows == 0 || depth == 0 || columns == 0) return std::nullopt;
    if (rows * columns < kLeastMultiplications / depth) return std::nullopt;
    const int64_t unit = elements_at_once(a);
    return Sizes{rows, depth, columns, round_up(depth, unit), round_up(columns, unit)};
  }

  bool has_odd_columns() const { return columns != even_columns; }
  bool has_odd_depth() const { return depth != even_depth; }
};

ProductAligner::ProductAligner(const CompiledGraph& graph, Description& description,
                               const RootUses& uses)
    : graph_(graph), result_(description), uses_(uses) {}

bool ProductAligner::pays_for_result(const ProductStep& step, const Description& description) {
  const std::optional<Sizes> sizes = Sizes::of(step, description);
  return sizes && sizes->has_odd_columns() && sizes->rows >= kLeastRows &&
         sizes->depth >= kLeastDepth;
}

void ProductAligner::run() {
  for (size_t i = 0; i < graph_.steps.size(); ++i) {
    if (const auto* step = dynamic_cast<const ProductStep*>(graph_.steps[i].get())) align(*step, i);
  }
}

void ProductAligner::align(const ProductStep& step, size_t index) {
  std::optional<Sizes> sizes = Sizes::of(step, result_);
  if (!sizes || sizes->rows < kLeastRows) return;
  // A matrix that is added has no more columns than the result.
  if (step.start >= 0 && result_.specs[step.start].sizes.size() != 1) return;
  AlignedProduct aligned;
  if (sizes->has_odd_depth()) aligned.a = widened_a(step, *sizes);
  if (!aligned.a) sizes->even_depth = sizes->depth;
  if (sizes->has_odd_columns()) aligned.result = widened_result(step, *sizes);
  if (!aligned.result) sizes->even_columns = sizes->columns;
  if (!aligned.a && !aligned.result) return;
  aligned.b = widened_b(step, *sizes);
  result_.aligned[static_cast<int>(index)] = std::move(aligned);
}

// A factor whose rows run along the depth. It is as large as what is multiplied, so it is not
// copied.
std::optional<Widened> ProductAligner::widened_a(const ProductStep& step, const Sizes& sizes) {
  const TensorSpec& a = result_.specs[step.a];
  if (aligned_dim(a) != 1 || a.strides[0] < sizes.even_depth || !is_at_start_of_planned(step.a))
    return std::nullopt;
  return Widened{Widened::Place::kOwn, {sizes.rows, sizes.even_depth}, a.strides};
}

// The other factor: in most cases a weight, with rows that run along the depth in forward and along
// the columns in backward.
Widened ProductAligner::widened_b(const ProductStep& step, const Sizes& sizes) {
  const TensorSpec& b = result_.specs[step.b];
  const std::vector<int64_t> wanted = {sizes.even_depth, sizes.even_columns};
  const std::optional<int> dim = aligned_dim(b);
  if (dim && is_at_start_of_planned(step.b) && b.strides[1 - *dim] >= wanted[*dim]) {
    make_room(step.b, wanted, b.strides);
    return {Widened::Place::kOwn, wanted, b.strides};
  }
  return {Widened::Place::kCopy, wanted, dense_strides(wanted, b.strides[0] == 1 ? 0 : 1)};
}

std::optional<Widened> ProductAligner::widened_result(const ProductStep& step, const Sizes& sizes) {
  const int slot = step.outputs[0];
  const TensorSpec& spec = result_.specs[slot];
  const std::vector<int64_t> wanted = {sizes.rows, sizes.even_columns};
  if (aligned_dim(spec) == 1 && spec.strides[0] == sizes.even_columns &&
      is_at_start_of_planned(slot)) {
    return Widened{Widened::Place::kOwn, wanted, spec.strides};
  }
  if (sizes.depth < kLeastDepth || spec.strides[1] != 1) return std::nullopt;
  return Widened{Widened::Place::kCopy, wanted, dense_strides(wanted, 1)};
}

bool ProductAligner::is_at_start_of_planned(int slot) const {
  const int root = result_.roots[slot];
  if (result_.parts[slot].whole >= 0 || result_.parts[root].whole >= 0) return false;
  const Step* maker = uses_.maker_of(root);
  return maker != nullptr && maker->writes_given_memory() &&
         result_.specs[slot].bytes == result_.specs[root].bytes;
}

void ProductAligner::make_room(int slot, const std::vector<int64_t>& sizes,
                               const std::vector<int64_t>& strides) {
  const int root = result_.roots[slot];
  const int64_t end = (sizes[0] - 1) * strides[0] + (sizes[1] - 1) * strides[1] + 1;
  const auto size = static_cast<int64_t>(c10::elementSize(result_.specs[root].dtype));
  int64_t& tail = result_.tails[root];
  tail = std::max(tail, end * size - result_.specs[root].bytes);
}

}  // namespace torch_ort::run
