// Rows of several tables, and tensors beside them, written side by side.
//
// A batch of a recommender names a row in each of its tables. One step for each table would cost
// more than the rows: threads are started, and each row of 64 bytes is fetched from memory on its
// own. Here a thread has some rows of the batch, asks for the rows of the tables in advance, and
// copies them to their places.
#include "base/error.h"
#include "cpu/parallel.h"
#include "cpu/program.h"

#include <c10/util/Exception.h>

#include <algorithm>
#include <atomic>
#include <cstring>
#include <functional>
#include <numeric>

namespace torch_ort::cpu {

namespace {

constexpr int64_t kBytesPerThread = 1 << 16;
// Rows of the result whose parts are all asked for before the first is copied.
constexpr int64_t kBlock = 16;

int64_t product(const std::vector<int64_t>& sizes, size_t begin, size_t end) {
  return std::accumulate(sizes.begin() + static_cast<int64_t>(begin),
                         sizes.begin() + static_cast<int64_t>(end), int64_t{1},
                         std::multiplies<>());
}

class Lookups final : public Kernel {
 public:
  explicit Lookups(const BoundNode& bound) {
    const Layout& result = bound.outputs.at(0);
    const auto axis = static_cast<size_t>(ir::int_attr(bound.node.attrs, "axis", 0));
    ORT_CHECK(axis < result.sizes.size() && lies_by_rows(result), "Lookups: got axis ", axis,
              " of a result of ", result.sizes.size(),
              " dims, want one of it, and a result in one run");
    num_rows_ = product(result.sizes, 0, axis);
    size_ = ir::size_bytes(result.dtype);
    size_t input = 0;
    for (const ir::Dim& is_table : ir::ints_attr(bound.node.attrs, "tables", {})) {
      ORT_CHECK(input + (is_table.constant() != 0 ? 2 : 1) <= bound.inputs.size(), "Lookups: got ",
                bound.inputs.size(), " inputs, want one for each part and ids for each table");
      add(bound.inputs, input, is_table.constant() != 0, result, axis);
      input += is_table.constant() != 0 ? 2 : 1;
    }
    const int64_t columns = product(result.sizes, axis, result.sizes.size());
    ORT_CHECK(input == bound.inputs.size() && (num_rows_ == 0 || columns == num_columns_),
              "Lookups: got parts of ", num_columns_, " columns, want ", columns);
  }

  std::string str() const override {
    return concat("lookups, ", num_rows_, " x ", num_columns_, " of ", parts_.size(), " parts\n");
  }

  void run(const void* const* inputs, void* const* outputs) const override {
    auto* result = static_cast<char*>(outputs[0]);
    std::atomic<bool> is_out = false;
    const int64_t row_bytes = std::max<int64_t>(1, num_columns_ * size_);
    parallel_for(0, num_rows_, std::max<int64_t>(1, kBytesPerThread / row_bytes),
                 [&](int64_t begin, int64_t end) {
                   std::vector<const char*> from(parts_.size() * kBlock);
                   for (int64_t row = begin; row < end; row += kBlock) {
                     const int64_t last = std::min(end, row + kBlock);
                     if (find(inputs, row, last, from)) {
                       write(from, row, last, result);
                     } else {
                       is_out = true;
                     }
                   }
                 });
    TORCH_CHECK_INDEX(!is_out, "index out of range in self");
  }

 private:
  // The next `width` columns of the result.
  struct Part {
    size_t input;
    bool is_table;
    int64_t width, num_table_rows;
    Access from, ids;
    std::vector<int64_t> column_offsets;  // empty if columns are contiguous
  };

  void add(const std::vector<Layout>& inputs, size_t input, bool is_table, const Layout& result,
           size_t axis) {
    const Layout& from = inputs[input];
    const int64_t rows = is_table ? (from.sizes.empty() ? 1 : from.sizes[0]) : num_rows_;
    const int64_t count = region::num_elements(from);
    const size_t rank = from.sizes.size();
    Part part{.input = input, .is_table = is_table};
    part.width = is_table ? product(from.sizes, std::min<size_t>(1, rank), rank)
                          : product(from.sizes, std::min(axis, rank), rank);
    part.num_table_rows = rows;
    ORT_CHECK(from.dtype == result.dtype && rank > 0 && part.width * rows == count,
              "Lookups: got a part of ", count, " ", ir::name(from.dtype), ", want ", rows,
              " rows of ", ir::name(result.dtype));
    part.from = access_of(from, Space::kFull, part.width);
    part.column_offsets = part.from.scattered_columns(part.width);
    if (is_table) {
      const Layout& ids = inputs[input + 1];
      ORT_CHECK(ids.dtype == ir::DType::kInt64 && region::num_elements(ids) == num_rows_,
                "Lookups: got ", region::num_elements(ids), " ids of ", ir::name(ids.dtype),
                ", want ", num_rows_, " of int64");
      part.ids = access_of(ids, Space::kRow, 1);
    }
    num_columns_ += part.width;
    parts_.push_back(std::move(part));
  }

  // Finds what the rows [begin, end) consist of: addresses by row and part. Returns false if an id
  // is out of bounds.
  bool find(const void* const* inputs, int64_t begin, int64_t end,
            std::vector<const char*>& from) const {
    for (size_t at = 0; at < parts_.size(); ++at) {
      const Part& part = parts_[at];
      const auto* first = static_cast<const char*>(inputs[part.input]);
      const auto* ids =
          part.is_table ? static_cast<const int64_t*>(inputs[part.input + 1]) : nullptr;
      for (int64_t row = begin; row < end; ++row) {
        int64_t place = row;
        if (ids != nullptr) {
          place = ids[part.ids.row_offset(row)];
          if (place < 0 || place >= part.num_table_rows) return false;
        }
        const char* found = first + part.from.row_offset(place) * size_;
        __builtin_prefetch(found);
        from[(row - begin) * parts_.size() + at] = found;
      }
    }
    return true;
  }

  void write(const std::vector<const char*>& from, int64_t begin, int64_t end, char* result) const {
    char* to = result + begin * num_columns_ * size_;
    size_t next = 0;
    for (int64_t row = begin; row < end; ++row) {
      for (const Part& part : parts_) {
        const char* found = from[next++];
        if (part.column_offsets.empty()) {
          copy(found, to, part.width * size_);
          to += part.width * size_;
          continue;
        }
        for (const int64_t offset : part.column_offsets) {
          std::memcpy(to, found + offset * size_, static_cast<size_t>(size_));
          to += size_;
        }
      }
    }
  }

  // Rows of one or two cache lines are common, and a call of memcpy costs as much as they do.
  static void copy(const char* from, char* to, int64_t bytes) {
    switch (bytes) {
      case 32: std::memcpy(to, from, 32); return;
      case 64: std::memcpy(to, from, 64); return;
      case 128: std::memcpy(to, from, 128); return;
      default: std::memcpy(to, from, static_cast<size_t>(bytes));
    }
  }

  int64_t num_rows_ = 0, num_columns_ = 0, size_ = 1;
  std::vector<Part> parts_;
};

}  // namespace

std::unique_ptr<const Kernel> make_lookups(const BoundNode& bound) {
  return std::make_unique<const Lookups>(bound);
}

}  // namespace torch_ort::cpu
