// The gradient of an embedding: rows of the incoming gradient added up by their id, to zeros or to
// a tensor to start from, which may be where the result is written.
#include "base/error.h"
#include "cpu/parallel.h"
#include "cpu/program.h"

#include <c10/util/Exception.h>

#include <algorithm>

namespace torch_ort::cpu {

namespace {

constexpr int64_t kWorkPerThread = 1 << 15;  // in elements

// Each thread computes a range of the table and looks for ids in it. So the sums of a row are in
// the order of the ids, whatever the number of threads.
template <typename T>
class EmbeddingGrad final : public Kernel {
 public:
  // `start` is nullptr if the sums start with zeros.
  EmbeddingGrad(const Layout& grad, const Layout& ids, const Layout* start, const Layout& table,
                int64_t padding)
      : num_rows_(table.sizes.at(0)),
        width_(table.sizes.at(1)),
        padding_(padding),
        has_start_(start != nullptr),
        grad_(access_of(grad, Space::kFull, width_)),
        ids_(access_of(ids, Space::kRow, width_)) {
    for (int64_t size : ids.sizes) num_ids_ *= size;
    if (has_start_) {
      start_row_ = start->strides.at(0);
      start_column_ = start->strides.at(1);
    }
    if (!grad_.is_one_run()) find_column_offsets();
  }

  void run(const void* const* inputs, void* const* outputs) const override {
    const auto* grad = static_cast<const T*>(inputs[0]);
    const auto* ids = static_cast<const int64_t*>(inputs[1]);
    const auto* start = has_start_ ? static_cast<const T*>(inputs[2]) : nullptr;
    auto* table = static_cast<T*>(outputs[0]);
    check_ids(ids);
    const int64_t grain = std::max<int64_t>(1, kWorkPerThread / std::max<int64_t>(width_, 1));
    parallel_for(0, num_rows_, grain, [&](int64_t begin, int64_t end) {
      if (start == nullptr) {
        std::fill_n(table + begin * width_, (end - begin) * width_, T(0));
      } else if (start != table) {
        copy_start(start, begin, end, table);
      }
      for (int64_t i = 0; i < num_ids_; ++i) {
        const int64_t id = ids[ids_.row_offset(i)];
        if (id < begin || id >= end || id == padding_) continue;
        add(table + id * width_, grad + grad_.row_offset(i));
      }
    });
  }

  std::string str() const override {
    return concat("embedding gradient, ", num_ids_, " ids, table ", num_rows_, " x ", width_,
                  has_start_ ? ", added to" : "", "\n");
  }

 private:
  void check_ids(const int64_t* ids) const {
    for (int64_t i = 0; i < num_ids_; ++i) {
      const int64_t id = ids[ids_.row_offset(i)];
      TORCH_CHECK_INDEX(id >= 0 && id < num_rows_, "index out of range in self");
    }
  }

  // Copies the rows [begin, end) of the start.
  void copy_start(const T* start, int64_t begin, int64_t end, T* table) const {
    for (int64_t row = begin; row < end; ++row) {
      const T* from = start + row * start_row_;
      T* to = table + row * width_;
      if (start_column_ == 1) {
        std::copy_n(from, width_, to);
      } else {
        for (int64_t i = 0; i < width_; ++i) to[i] = from[i * start_column_];
      }
    }
  }

  void find_column_offsets() {
    for (int64_t column = 0; column < width_; ++column) {
      int64_t rest = column, offset = 0;
      for (size_t axis = grad_.columns.size(); axis-- > 0;) {
        offset += rest % grad_.columns[axis].size * grad_.columns[axis].stride;
        rest /= grad_.columns[axis].size;
      }
      column_offsets_.push_back(offset);
    }
  }

  void add(T* to, const T* from) const {
    if (column_offsets_.empty()) {
      for (int64_t i = 0; i < width_; ++i) to[i] += from[i];
    } else {
      for (int64_t i = 0; i < width_; ++i) to[i] += from[column_offsets_[i]];
    }
  }

  int64_t num_ids_ = 1, num_rows_, width_, padding_;
  bool has_start_;
  int64_t start_row_ = 0, start_column_ = 0;  // strides
  Access grad_, ids_;
  std::vector<int64_t> column_offsets_;  // empty if columns are contiguous
};

}  // namespace

std::unique_ptr<const Kernel> make_embedding_grad(const BoundNode& bound) {
  const auto& [node, inputs, outputs, options] = bound;
  const Layout &grad = inputs.at(0), &ids = inputs.at(1), &table = outputs.at(0);
  ORT_CHECK(table.sizes.size() == 2, "EmbeddingGrad: got a table of ", table.sizes.size(),
            " dims, want 2");
  const int64_t num_rows = table.sizes[0], width = table.sizes[1];
  const bool is_row_major =
      (num_rows <= 1 || table.strides[0] == width) && (width <= 1 || table.strides[1] == 1);
  const Layout* start = inputs.size() > 2 ? &inputs[2] : nullptr;
  const bool start_fits =
      start == nullptr || (start->sizes == table.sizes && start->dtype == table.dtype);
  std::vector<int64_t> row_of_each_id = ids.sizes;
  row_of_each_id.push_back(width);
  ORT_CHECK(is_row_major && start_fits && grad.sizes == row_of_each_id &&
                ids.dtype == ir::DType::kInt64 && grad.dtype == table.dtype,
            "EmbeddingGrad: the operands do not fit together");
  const int64_t padding = ir::int_attr(node.attrs, "padding_idx", -1);
  if (grad.dtype == ir::DType::kDouble) {
    return std::make_unique<const EmbeddingGrad<double>>(grad, ids, start, table, padding);
  }
  ORT_CHECK(grad.dtype == ir::DType::kFloat, "EmbeddingGrad: got ", ir::name(grad.dtype),
            ", want float32 or float64");
  return std::make_unique<const EmbeddingGrad<float>>(grad, ids, start, table, padding);
}

}  // namespace torch_ort::cpu
