#include "run/memory/aligned_products.h"

#include "base/rounding.h"
#include "run/memory/padded_rows.h"

#include <algorithm>

namespace torch_ort::run {

namespace {

// Smaller products take about as long as the kernels that write zeros beside them.
constexpr int64_t kLeastMultiplications = int64_t{1} << 30;
// What is copied for a product should be used often in it: a factor for this many rows, ...
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
  int64_t even_rows, even_depth, even_columns;  // those of the aligned product

  // Nothing if the sizes fit no product of two matrices, as may happen with those of a file, or if
  // the product is too small.
  static std::optional<Sizes> of(const ProductSlots& slots, const Description& description) {
    if (slots.result < 0) return std::nullopt;
    const TensorSpec &a = description.specs[slots.a], &b = description.specs[slots.b];
    const TensorSpec& result = description.specs[slots.result];
    if (!is_matrix(a) || !is_matrix(b) || !is_matrix(result)) return std::nullopt;
    if (!c10::isFloatingType(a.dtype) || b.dtype != a.dtype) return std::nullopt;
    const int64_t rows = a.sizes[0], depth = a.sizes[1], columns = b.sizes[1];
    if (b.sizes[0] != depth || result.sizes != std::vector<int64_t>{rows, columns})
      return std::nullopt;
    if (rows < kLeastRows || depth == 0 || rows * columns < kLeastMultiplications / depth)
      return std::nullopt;
    const int64_t unit = elements_at_once(a);
    return Sizes{
        rows, depth, columns, round_up(rows, unit), round_up(depth, unit), round_up(columns, unit)};
  }

  bool has_odd_rows() const { return rows != even_rows; }
  bool has_odd_columns() const { return columns != even_columns; }
  bool has_odd_depth() const { return depth != even_depth; }
  std::vector<int64_t> of_b() const { return {even_depth, even_columns}; }
};

ProductAligner::ProductAligner(const CompiledGraph& graph, Description& description,
                               const RootUses& uses)
    : graph_(graph), result_(description), uses_(uses) {}

bool ProductAligner::pays_for_result(const ProductSlots& slots, const Description& description) {
  const std::optional<Sizes> sizes = Sizes::of(slots, description);
  return sizes && sizes->has_odd_columns() && sizes->depth >= kLeastDepth;
}

void ProductAligner::run() {
  for (size_t i = 0; i < graph_.steps.size(); ++i) {
    std::optional<AlignedProduct> found;
    const Step* step = graph_.steps[i].get();
    if (const auto* product = dynamic_cast<const ProductStep*>(step)) {
      found = aligned(product->slots);
    } else if (const auto* wide = dynamic_cast<const WideProductStep*>(step)) {
      found = aligned_wide(wide->slots);
    }
    if (found) result_.aligned[static_cast<int>(i)] = *std::move(found);
  }
}

// More columns, and a greater depth. The latter helps if the rows of `a` run along it; these are as
// much as what is multiplied, and so are not copied.
std::optional<AlignedProduct> ProductAligner::aligned(const ProductSlots& slots) {
  std::optional<Sizes> sizes = Sizes::of(slots, result_);
  // A matrix that is added has no more columns than the result.
  if (!sizes || (slots.start >= 0 && result_.specs[slots.start].sizes.size() != 1))
    return std::nullopt;
  AlignedProduct aligned;
  if (sizes->has_odd_depth() && aligned_dim(result_.specs[slots.a]) == 1) {
    aligned.a = in_own_memory(slots.a, {sizes->rows, sizes->even_depth});
  }
  if (!aligned.a) sizes->even_depth = sizes->depth;
  if (sizes->has_odd_columns()) aligned.result = widened_result(slots.result, *sizes);
  if (!aligned.result) sizes->even_columns = sizes->columns;
  if (!aligned.a && !aligned.result) return std::nullopt;
  aligned.b = widened_b(slots.b, *sizes);
  return aligned;
}

// More rows, and more columns, which have to be cut off: these are gradients of weights. Their
// depth is the number of rows of a batch, along which neither factor runs.
std::optional<AlignedProduct> ProductAligner::aligned_wide(const ProductSlots& slots) {
  std::optional<Sizes> sizes = Sizes::of(slots, result_);
  if (!sizes || sizes->depth < kLeastDepth) return std::nullopt;
  sizes->even_depth = sizes->depth;
  AlignedProduct aligned;
  if (sizes->has_odd_rows() && aligned_dim(result_.specs[slots.a]) == 0) {
    aligned.a = in_own_memory(slots.a, {sizes->even_rows, sizes->depth});
  }
  if (!aligned.a) sizes->even_rows = sizes->rows;
  if (sizes->has_odd_columns()) aligned.b = widened_b(slots.b, *sizes);
  if (!aligned.a && !aligned.b) return std::nullopt;
  const std::vector<int64_t> made = {sizes->even_rows, sizes->even_columns};
  aligned.result = Widened{Widened::Place::kCopy, made, dense_strides(made, 1)};
  return aligned;
}

std::optional<Widened> ProductAligner::in_own_memory(int slot, const std::vector<int64_t>& sizes) {
  const TensorSpec& spec = result_.specs[slot];
  const std::optional<int> dim = aligned_dim(spec);
  if (!dim || !is_at_start_of_planned(slot) || spec.strides[1 - *dim] < sizes[*dim])
    return std::nullopt;
  make_room(slot, sizes, spec.strides);
  return Widened{Widened::Place::kOwn, sizes, spec.strides};
}

Widened ProductAligner::widened_b(int slot, const Sizes& sizes) {
  if (std::optional<Widened> own = in_own_memory(slot, sizes.of_b())) return *std::move(own);
  const int dim = result_.specs[slot].strides[0] == 1 ? 0 : 1;
  return {Widened::Place::kCopy, sizes.of_b(), dense_strides(sizes.of_b(), dim)};
}

std::optional<Widened> ProductAligner::widened_result(int slot, const Sizes& sizes) {
  const TensorSpec& spec = result_.specs[slot];
  const std::vector<int64_t> wanted = {sizes.rows, sizes.even_columns};
  if (aligned_dim(spec) == 1 && spec.strides[0] == sizes.even_columns) {
    if (std::optional<Widened> own = in_own_memory(slot, wanted)) return own;
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

// The gaps after rows need none: the plan rounds the size of each tensor up to their end.
void ProductAligner::make_room(int slot, const std::vector<int64_t>& sizes,
                               const std::vector<int64_t>& strides) {
  const int root = result_.roots[slot];
  TensorSpec widened = result_.specs[root];
  widened.sizes = sizes;
  widened.strides = strides;
  const int64_t behind = span_bytes(widened) - result_.specs[root].bytes;
  if (behind < kRowAlignment) return;
  int64_t& tail = result_.tails[root];
  tail = std::max(tail, behind);
}

}  // namespace torch_ort::run
