#include "cpu/rows.h"

#include "base/error.h"
#include "cpu/parallel.h"
#include "cpu/program.h"

#include <c10/util/BFloat16.h>
#include <c10/util/Exception.h>
#include <c10/util/Half.h>

#include <algorithm>
#include <atomic>
#include <cstring>
#include <limits>
#include <numeric>
#include <string>

namespace torch_ort::cpu {

namespace {

constexpr int64_t kWorkPerThread = 1 << 15;  // in elements

// ---- Rows

// Marks rows of sequences. `marks` has one byte for each row, [sequences, length].
class Source {
 public:
  virtual ~Source() = default;
  virtual void mark(const void* input, uint8_t* marks) const = 0;
};

// Marks the rows whose label is not the ignored one.
template <typename T>
class Labels final : public Source {
 public:
  Labels(const Layout& labels, int64_t num_rows, int64_t ignored)
      : access_(access_of(labels, Space::kRow, 1)), num_rows_(num_rows), ignored_(ignored) {
    ORT_CHECK(region::num_elements(labels) == num_rows, "Rows: got ", region::num_elements(labels),
              " labels, want ", num_rows);
  }

  void mark(const void* input, uint8_t* marks) const override {
    const T* labels = static_cast<const T*>(input);
    for (int64_t row = 0; row < num_rows_; ++row) {
      marks[row] |= labels[access_.row_offset(row)] != ignored_;
    }
  }

 private:
  Access access_;
  int64_t num_rows_, ignored_;
};

// Marks the keys that a mask [batch, heads, queries, keys] does not hide from all queries. True in
// a boolean mask means that another number replaces the score; a mask of numbers is added. A number
// of at most half of the lowest one hides a key. If a query attends to no key at all, the hidden
// keys of its sequence have weights after all, so all of them are marked.
template <typename T>
class Mask final : public Source {
 public:
  Mask(const Layout& mask, int64_t num_sequences, int64_t length, bool is_causal)
      : num_sequences_(num_sequences), length_(length), is_causal_(is_causal) {
    ORT_CHECK(!mask.sizes.empty() && mask.sizes.size() <= 4, "Rows: mask: got ", mask.sizes.size(),
              " dims, want 1 to 4");
    const size_t missing = 4 - mask.sizes.size();
    for (size_t i = 0; i < mask.sizes.size(); ++i) {
      sizes_[missing + i] = mask.sizes[i];
      strides_[missing + i] = mask.sizes[i] == 1 ? 0 : mask.strides[i];
    }
    ORT_CHECK(
        (sizes_[0] == num_sequences || sizes_[0] == 1) && (sizes_[3] == length || sizes_[3] == 1),
        "Rows: mask: got ", sizes_[0], " sequences of ", sizes_[3], " keys, want ", num_sequences,
        " of ", length);
  }

  void mark(const void* input, uint8_t* marks) const override {
    const T* mask = static_cast<const T*>(input);
    const int64_t work = std::max<int64_t>(1, sizes_[1] * sizes_[2] * length_);
    parallel_for(0, num_sequences_, std::max<int64_t>(1, kWorkPerThread / work),
                 [&](int64_t begin, int64_t end) {
                   for (int64_t i = begin; i < end; ++i) {
                     mark_sequence(mask + i * strides_[0], marks + i * length_);
                   }
                 });
  }

 private:
  static bool shows(T number) {
    if constexpr (std::is_same_v<T, bool>) {
      return !number;
    } else {
      return number > std::numeric_limits<T>::lowest() / 2;
    }
  }

  void mark_sequence(const T* mask, uint8_t* marks) const {
    bool all_see = true;
    for (int64_t head = 0; head < sizes_[1]; ++head) {
      for (int64_t query = 0; query < sizes_[2]; ++query) {
        const T* row = mask + head * strides_[1] + query * strides_[2];
        // A mask that all queries share must leave a key to the first of them, which sees the
        // fewest.
        const int64_t seen = is_causal_ ? std::min(length_, query + 1) : length_;
        uint8_t any = 0;
        for (int64_t key = 0; key < seen; ++key) any |= shows(row[key * strides_[3]]);
        all_see = all_see && any != 0;
        for (int64_t key = 0; key < length_; ++key) marks[key] |= shows(row[key * strides_[3]]);
      }
    }
    if (!all_see) std::fill_n(marks, length_, uint8_t{1});
  }

  int64_t num_sequences_, length_;
  bool is_causal_;
  int64_t sizes_[4] = {1, 1, 1, 1}, strides_[4] = {0, 0, 0, 0};
};

std::unique_ptr<const Source> make_labels(const Layout& layout, int64_t num_rows, int64_t ignored) {
  if (layout.dtype == ir::DType::kInt32) {
    return std::make_unique<const Labels<int32_t>>(layout, num_rows, ignored);
  }
  ORT_CHECK(layout.dtype == ir::DType::kInt64, "Rows: labels: got ", ir::name(layout.dtype),
            ", want int64 or int32");
  return std::make_unique<const Labels<int64_t>>(layout, num_rows, ignored);
}

std::unique_ptr<const Source> make_mask(const Layout& layout, int64_t num, int64_t length,
                                        bool is_causal) {
  switch (layout.dtype) {
    case ir::DType::kBool: return std::make_unique<Mask<bool>>(layout, num, length, is_causal);
    case ir::DType::kFloat: return std::make_unique<Mask<float>>(layout, num, length, is_causal);
    case ir::DType::kDouble: return std::make_unique<Mask<double>>(layout, num, length, is_causal);
    case ir::DType::kHalf: return std::make_unique<Mask<c10::Half>>(layout, num, length, is_causal);
    case ir::DType::kBFloat16:
      return std::make_unique<Mask<c10::BFloat16>>(layout, num, length, is_causal);
    default: break;
  }
  throw InternalError(concat("Rows: mask: got ", ir::name(layout.dtype), ", want bool or floats"));
}

class Rows final : public Kernel {
 public:
  Rows(const ir::Node& node, const std::vector<Layout>& inputs, const Layout& list)
      : is_all_(ir::int_attr(node.attrs, "is_all", 0) != 0),
        is_closed_(ir::int_attr(node.attrs, "is_closed", 0) != 0) {
    ORT_CHECK(list.dtype == ir::DType::kInt64 && list.sizes.size() == 2 && lies_by_rows(list),
              "Rows: got ", list.sizes.size(), " dims of ", ir::name(list.dtype),
              " for the list, want 2 of int64 in one run");
    num_sequences_ = list.sizes[0];
    length_ = list.sizes[1] - 1;
    const std::vector<std::string> kinds = ir::strings_attr(node.attrs, "kinds", {});
    const ir::Shape ignored = ir::ints_attr(node.attrs, "ignored", {});
    const ir::Shape causal = ir::ints_attr(node.attrs, "is_causal", {});
    ORT_CHECK(kinds.size() == inputs.size() && ignored.size() == inputs.size() &&
                  causal.size() == inputs.size(),
              "Rows: got ", kinds.size(), " kinds for ", inputs.size(), " inputs");
    for (size_t i = 0; i < inputs.size(); ++i) {
      ORT_CHECK(kinds[i] == "labels" || kinds[i] == "mask", "Rows: kind: got '", kinds[i],
                "', want labels or mask");
      sources_.push_back(
          kinds[i] == "labels"
              ? make_labels(inputs[i], num_rows(), ignored[i].constant())
              : make_mask(inputs[i], num_sequences_, length_, causal[i].constant() != 0));
    }
    for (const ir::Dim& place : ir::ints_attr(node.attrs, "places", {})) {
      const int64_t at = place.constant() < 0 ? place.constant() + length_ : place.constant();
      ORT_CHECK(at >= 0 && at < length_, "Rows: place: got ", place.constant(), ", want one of ",
                length_);
      places_.push_back(at);
    }
  }

  std::string str() const override {
    return concat("rows, ", num_sequences_, " sequences of ", length_, ", ", sources_.size(),
                  " sources, ", places_.size(), " places", is_closed_ ? ", closed" : "", "\n");
  }

  void run(const void* const* inputs, void* const* outputs) const override {
    thread_local std::vector<uint8_t> marks;
    marks.assign(static_cast<size_t>(num_rows()), is_all_ ? 1 : 0);
    for (size_t i = 0; i < sources_.size(); ++i) sources_[i]->mark(inputs[i], marks.data());
    for (int64_t sequence = 0; sequence < num_sequences_; ++sequence) {
      uint8_t* of_sequence = marks.data() + sequence * length_;
      for (int64_t place : places_) of_sequence[place] = 1;
      if (!is_closed_) continue;
      int64_t last = length_;
      while (last > 0 && of_sequence[last - 1] == 0) --last;
      std::fill_n(of_sequence, last, uint8_t{1});
    }
    auto* list = static_cast<int64_t*>(outputs[0]);
    int64_t count = 0;
    for (int64_t row = 0; row < num_rows(); ++row) {
      list[1 + count] = row;
      count += marks[static_cast<size_t>(row)];
    }
    // Leaving out so few rows gains nothing. If one list contains another, it reaches this limit
    // first, so that it still contains the other.
    if (10 * count >= 9 * num_rows()) {
      count = num_rows();
      std::iota(list + 1, list + 1 + count, int64_t{0});
    }
    list[0] = count;
    last_count_.store(count, std::memory_order_relaxed);
  }

  std::optional<region::ListedRows> listed() const override {
    const int64_t count = last_count_.load(std::memory_order_relaxed);
    if (count < 0) return std::nullopt;
    return region::ListedRows{.count = count, .num_rows = num_rows()};
  }

 private:
  int64_t num_rows() const { return num_sequences_ * length_; }

  int64_t num_sequences_ = 0, length_ = 0;
  bool is_all_, is_closed_;
  std::vector<std::unique_ptr<const Source>> sources_;
  std::vector<int64_t> places_;
  mutable std::atomic<int64_t> last_count_ = -1;  // of the last call on any thread
};

// ---- ZeroRows

// The first dims of `x` are those of rows.
class ZeroRows final : public Kernel {
 public:
  ZeroRows(const Layout& x, const Layout& list, const Layout& result)
      : num_rows_(list.sizes.at(0) * (list.sizes.at(1) - 1)),
        num_columns_(num_rows_ == 0 ? 0 : region::num_elements(x) / num_rows_),
        x_(access_of(x, Space::kFull, num_columns_)),
        result_(access_of(result, Space::kFull, num_columns_)),
        size_(ir::size_bytes(x.dtype)) {
    check_row_list(list, num_rows_);
    ORT_CHECK(x.sizes == result.sizes && x.dtype == result.dtype, "ZeroRows: got a result of ",
              ir::name(result.dtype), ", want what it reads, ", ir::name(x.dtype));
  }

  std::string str() const override {
    return concat("zero rows, ", num_rows_, " x ", num_columns_, "\n");
  }

  void run(const void* const* inputs, void* const* outputs) const override {
    const RowList list(inputs[1], num_rows_);
    const auto* x = static_cast<const char*>(inputs[0]);
    auto* result = static_cast<char*>(outputs[0]);
    const int64_t grain = std::max<int64_t>(1, kWorkPerThread / std::max<int64_t>(1, num_columns_));
    parallel_for(0, num_rows_, grain, [&](int64_t begin, int64_t end) {
      const int64_t* at = std::lower_bound(list.rows(), list.rows() + list.count(), begin);
      for (int64_t row = begin; row < end; ++row) {
        const bool is_listed = at != list.rows() + list.count() && *at == row;
        if (is_listed) ++at;
        if (is_listed && x == result) continue;
        write(result, is_listed ? x : nullptr, row);
      }
    });
  }

 private:
  // Writes a row of the result; zeros if there is nothing to copy.
  void write(char* result, const char* x, int64_t row) const {
    for (int64_t column = 0; column < num_columns_;) {
      int64_t count = num_columns_ - column;
      if (!result_.is_one_run() || (x != nullptr && !x_.is_one_run())) count = 1;
      char* to = result + offset(result_, row, column) * size_;
      if (x == nullptr) {
        std::memset(to, 0, static_cast<size_t>(count * size_));
      } else {
        std::memcpy(to, x + offset(x_, row, column) * size_, static_cast<size_t>(count * size_));
      }
      column += count;
    }
  }

  static int64_t offset(const Access& access, int64_t row, int64_t column) {
    return access.row_offset(row) + access.column_offset(column);
  }

  int64_t num_rows_, num_columns_;
  Access x_, result_;
  int64_t size_;
};

}  // namespace

RowList::RowList(const void* list, int64_t num_rows)
    : count_(static_cast<const int64_t*>(list)[0]), rows_(static_cast<const int64_t*>(list) + 1) {
  TORCH_CHECK_INDEX(count_ >= 0 && count_ <= num_rows, "rows: got ", count_, " of them, want 0 to ",
                    num_rows);
  int64_t least = 0;
  for (int64_t i = 0; i < count_; least = rows_[i++] + 1) {
    TORCH_CHECK_INDEX(rows_[i] >= least && rows_[i] < num_rows, "rows: got ", rows_[i], " at ", i,
                      ", want ", least, " or more, and less than ", num_rows);
  }
}

void check_row_list(const Layout& list, int64_t num_rows) {
  ORT_CHECK(list.dtype == ir::DType::kInt64 && lies_by_rows(list) &&
                region::num_elements(list) > num_rows,
            "rows: got ", region::num_elements(list), " ", ir::name(list.dtype), ", want ",
            num_rows + 1, " int64 one after the other");
}

std::unique_ptr<const Kernel> make_rows(const BoundNode& bound) {
  return std::make_unique<const Rows>(bound.node, bound.inputs, bound.outputs.at(0));
}

std::unique_ptr<const Kernel> make_zero_rows(const BoundNode& bound) {
  return std::make_unique<const ZeroRows>(bound.inputs.at(0), bound.inputs.at(1),
                                          bound.outputs.at(0));
}

}  // namespace torch_ort::cpu
