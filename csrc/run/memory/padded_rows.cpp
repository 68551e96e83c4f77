#include "run/memory/padded_rows.h"

#include "base/rounding.h"
#include "ops/product.h"
#include "run/memory/aligned_products.h"

#include <c10/util/strides.h>

#include <algorithm>

namespace torch_ort::run {

namespace {

// Of narrower tensors gaps would be a larger part. And point-wise regions read dense tensors as one
// row, 16 bytes at once, but rows with gaps of an odd number of columns by single elements.
constexpr int64_t kLeastColumns = 1024;

// Row-major strides with gaps after the rows, so that each begins at a multiple of kRowAlignment.
// Nothing if there is no need, or if it does not pay.
std::optional<std::vector<int64_t>> padded_strides(const TensorSpec& spec) {
  if (spec.sizes.size() < 2 || !c10::isFloatingType(spec.dtype) || !is_row_major(spec))
    return std::nullopt;
  const auto size = static_cast<int64_t>(c10::elementSize(spec.dtype));
  if (size >= kRowAlignment || spec.bytes == 0) return std::nullopt;
  const int64_t columns = spec.sizes.back();
  const int64_t padded = round_up(columns, elements_at_once(spec));
  const bool is_one_row = spec.bytes == columns * size;
  if (padded == columns || columns < kLeastColumns || is_one_row) return std::nullopt;
  std::vector<int64_t> sizes = spec.sizes;
  sizes.back() = padded;
  const auto strides = c10::contiguous_strides(sizes);
  return std::vector<int64_t>(strides.begin(), strides.end());
}

// Whether a library can use the matrix as it is: its rows, or its columns, are contiguous.
bool is_matrix(const TensorSpec& spec) {
  return spec.sizes.size() == 2 && (spec.strides[0] == 1 || spec.strides[1] == 1);
}

}  // namespace

int64_t elements_at_once(const TensorSpec& spec) {
  return std::max<int64_t>(kRowAlignment / static_cast<int64_t>(c10::elementSize(spec.dtype)), 1);
}

RowPadder::RowPadder(const CompiledGraph& graph, Description& description, const RootUses& uses)
    : graph_(graph), result_(description), uses_(uses) {}

void RowPadder::run() {
  for (size_t slot = 0; slot < result_.roots.size(); ++slot) {
    const auto root = static_cast<int>(slot);
    if (result_.roots[slot] == root && may_have_gaps(root)) pad(root);
  }
}

// Whether the tensor is planned, its maker and all of its readers use memory with gaps as it is,
// and a product is among them.
bool RowPadder::may_have_gaps(int root) const {
  const Step* maker = uses_.maker_of(root);
  if (maker == nullptr || !maker->writes_given_memory()) return false;
  const size_t producer = graph_.facts[root].producer;
  if (!(is_product(producer) || maker->writes_strided_memory()) || wants_dense_result(producer)) {
    return false;
  }
  const std::vector<size_t>& readers = uses_.readers[root];
  const bool is_multiplied =
      is_product(producer) ||
      std::any_of(readers.begin(), readers.end(), [this](size_t step) { return is_product(step); });
  return is_multiplied && std::all_of(readers.begin(), readers.end(), [this](size_t step) {
           return is_product(step) || graph_.steps[step]->reads_gaps(result_);
         });
}

void RowPadder::pad(int root) {
  const auto strides = padded_strides(result_.specs[root]);
  if (!strides) return;
  const auto specs = uses_.with_strides(root, *strides);
  if (!specs) return;
  const std::vector<int>& sharers = uses_.sharers[root];
  const auto spec_of_slot = [&](int slot) -> const TensorSpec& {
    return (*specs)[std::find(sharers.begin(), sharers.end(), slot) - sharers.begin()];
  };
  const auto fits = [&](size_t step) {
    if (!is_product(step)) return true;
    std::vector<int> operands = graph_.steps[step]->reads();
    const std::vector<int>& results = graph_.steps[step]->outputs;
    operands.insert(operands.end(), results.begin(), results.end());
    return std::all_of(operands.begin(), operands.end(), [&](int slot) {
      return slot < 0 || result_.roots[slot] != root || is_matrix(spec_of_slot(slot));
    });
  };
  const std::vector<size_t>& readers = uses_.readers[root];
  if (!fits(graph_.facts[root].producer) || !std::all_of(readers.begin(), readers.end(), fits)) {
    return;
  }
  for (size_t i = 0; i < sharers.size(); ++i) result_.specs[sharers[i]] = (*specs)[i];
}

bool RowPadder::is_product(size_t step) const {
  return ops::multiplies_matrices(graph_.calls.calls[step]);
}

// Whether it is a product that starts from a vector. PyTorch has cuBLASLt add a vector only to
// dense results; otherwise it first copies the vector to all rows of the result. With the columns
// that aligned_products.h adds, rows with gaps are dense.
bool RowPadder::wants_dense_result(size_t step) const {
  const std::optional<ops::ProductArgs> args = ops::find_product(graph_.calls.calls[step]);
  if (!args || args->start == nullptr || !args->start->type.shape ||
      args->start->type.shape->size() != 1) {
    return false;
  }
  const auto* product = dynamic_cast<const ProductStep*>(graph_.steps[step].get());
  return product == nullptr || !ProductAligner::pays_for_result(product->slots, result_);
}

}  // namespace torch_ort::run
