// The gradient of an embedding: rows of the incoming gradient added up by their id.
#include "base/error.h"
#include "cpu/program.h"

#include <ATen/Parallel.h>
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
  EmbeddingGrad(const Layout& grad, const Layout& ids, const Layout& table, int64_t padding)
      : num_rows_(table.sizes.at(0)),
        width_(table.sizes.at(1)),
        padding_(padding),
        grad_(access_of(grad, Space::kFull, width_)),
        ids_(access_of(ids, Space::kRow, width_)) {
    for (int64_t size : ids.sizes) num_ids_ *= size;
    if (!grad_.is_one_run()) find_column_offsets();
  }

  void run(const void* const* inputs, void* const* outputs) const override {
    const auto* grad = static_cast<const T*>(inputs[0]);
    const auto* ids = static_cast<const int64_t*>(inputs[1]);
    auto* table = static_cast<T*>(outputs[0]);
    check_ids(ids);
    const int64_t grain = std::max<int64_t>(1, kWorkPerThread / std::max<int64_t>(width_, 1));
    at::parallel_for(0, num_rows_, grain, [&](int64_t begin, int64_t end) {
      std::fill_n(table + begin * width_, (end - begin) * width_, T(0));
      for (int64_t i = 0; i < num_ids_; ++i) {
        const int64_t id = ids[ids_.row_offset(i)];
        if (id < begin || id >= end || id == padding_) continue;
        add(table + id * width_, grad + grad_.row_offset(i));
      }
    });
  }

  std::string str() const override {
    return concat("embedding gradient, ", num_ids_, " ids, table ", num_rows_, " x ", width_, "\n");
  }

 private:
  void check_ids(const int64_t* ids) const {
    for (int64_t i = 0; i < num_ids_; ++i) {
      const int64_t id = ids[ids_.row_offset(i)];
      TORCH_CHECK_INDEX(id >= 0 && id < num_rows_, "index out of range in self");
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
  Access grad_, ids_;
  std::vector<int64_t> column_offsets_;  // empty if columns are contiguous
};

}  // namespace

std::unique_ptr<const Kernel> make_embedding_grad(const ir::Node& node,
                                                  const std::vector<Layout>& inputs,
                                                  const std::vector<Layout>& outputs) {
  const Layout &grad = inputs.at(0), &ids = inputs.at(1), &table = outputs.at(0);
  ORT_CHECK(table.sizes.size() == 2, "EmbeddingGrad: got a table of ", table.sizes.size(),
            " dims, want 2");
  const int64_t num_rows = table.sizes[0], width = table.sizes[1];
  const bool is_row_major =
      (num_rows <= 1 || table.strides[0] == width) && (width <= 1 || table.strides[1] == 1);
  std::vector<int64_t> row_of_each_id = ids.sizes;
  row_of_each_id.push_back(width);
  ORT_CHECK(is_row_major && grad.sizes == row_of_each_id && ids.dtype == ir::DType::kInt64 &&
                grad.dtype == table.dtype,
            "EmbeddingGrad: the operands do not fit together");
  const int64_t padding = ir::int_attr(node.attrs, "padding_idx", -1);
  if (grad.dtype == ir::DType::kDouble) {
    return std::make_unique<const EmbeddingGrad<double>>(grad, ids, table, padding);
  }
  ORT_CHECK(grad.dtype == ir::DType::kFloat, "EmbeddingGrad: got ", ir::name(grad.dtype),
            ", want float32 or float64");
  return std::make_unique<const EmbeddingGrad<float>>(grad, ids, table, padding);
}

}  // namespace torch_ort::cpu
