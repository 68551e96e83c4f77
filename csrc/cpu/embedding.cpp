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
class TableGrad {
 public:
  // `start` is nullptr if the sums start with zeros.
  TableGrad(const Layout& grad, const Layout& ids, const Layout* start, const Layout& table,
            int64_t padding)
      : num_rows_(table.sizes.at(0)),
        width_(table.sizes.at(1)),
        padding_(padding),
        has_start_(start != nullptr),
        grad_(access_of(grad, Space::kFull, width_)),
        ids_(access_of(ids, Space::kRow, width_)),
        column_offsets_(grad_.scattered_columns(width_)) {
    for (int64_t size : ids.sizes) num_ids_ *= size;
    if (has_start_) {
      start_row_ = start->strides.at(0);
      start_column_ = start->strides.at(1);
    }
  }

  int64_t num_rows() const { return num_rows_; }
  int64_t width() const { return width_; }
  // The work in elements, of which each is cleared or added.
  int64_t work() const { return (num_rows_ + num_ids_) * std::max<int64_t>(width_, 1); }

  // Computes the rows [begin, end) of the table. `inputs` are the gradient, the ids and the start.
  void compute(const void* const* inputs, void* result, int64_t begin, int64_t end) const {
    const auto* grad = static_cast<const T*>(inputs[0]);
    const auto* ids = static_cast<const int64_t*>(inputs[1]);
    const auto* start = has_start_ ? static_cast<const T*>(inputs[2]) : nullptr;
    auto* table = static_cast<T*>(result);
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
  }

  std::string str() const {
    return concat("embedding gradient, ", num_ids_, " ids, table ", num_rows_, " x ", width_,
                  has_start_ ? ", added to" : "", "\n");
  }

  void check_ids(const void* given) const {
    const auto* ids = static_cast<const int64_t*>(given);
    for (int64_t i = 0; i < num_ids_; ++i) {
      const int64_t id = ids[ids_.row_offset(i)];
      TORCH_CHECK_INDEX(id >= 0 && id < num_rows_, "index out of range in self");
    }
  }

 private:
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

template <typename T>
class EmbeddingGrad final : public Kernel {
 public:
  explicit EmbeddingGrad(TableGrad<T> table) : table_(std::move(table)) {}

  void run(const void* const* inputs, void* const* outputs) const override {
    table_.check_ids(inputs[1]);
    const int64_t width = std::max<int64_t>(table_.width(), 1);
    parallel_for(
        0, table_.num_rows(), std::max<int64_t>(1, kWorkPerThread / width),
        [&](int64_t begin, int64_t end) { table_.compute(inputs, outputs[0], begin, end); });
  }
  std::string str() const override { return table_.str(); }

 private:
  TableGrad<T> table_;
};

// Threads share the rows of all tables. A part of them has rows of one table, and about as much
// work as the others, so that small tables cost no start of threads and large ones are divided.
template <typename T>
class EmbeddingGrads final : public Kernel {
 public:
  explicit EmbeddingGrads(std::vector<TableGrad<T>> tables) : tables_(std::move(tables)) {
    int64_t whole = 0;
    for (const TableGrad<T>& table : tables_) whole += table.work();
    const int64_t most = std::max(kWorkPerThread, whole / kParts);
    for (size_t i = 0; i < tables_.size(); ++i) {
      const int64_t rows = tables_[i].num_rows();
      const int64_t count = std::max<int64_t>(1, tables_[i].work() / most);
      for (int64_t part = 0; part < count; ++part) {
        parts_.push_back({i, rows * part / count, rows * (part + 1) / count});
      }
    }
    work_ = whole / std::max<int64_t>(1, static_cast<int64_t>(parts_.size()));
  }

  void run(const void* const* inputs, void* const* outputs) const override {
    for (size_t i = 0; i < tables_.size(); ++i) tables_[i].check_ids(inputs[2 * i + 1]);
    const int64_t grain = std::max<int64_t>(1, kWorkPerThread / std::max<int64_t>(work_, 1));
    parallel_for(0, static_cast<int64_t>(parts_.size()), grain, [&](int64_t begin, int64_t end) {
      for (int64_t at = begin; at < end; ++at) {
        const Part& part = parts_[at];
        tables_[part.table].compute(inputs + 2 * part.table, outputs[part.table], part.begin,
                                    part.end);
      }
    });
  }

  std::string str() const override {
    std::string text;
    for (const TableGrad<T>& table : tables_) text += table.str();
    return text;
  }

 private:
  static constexpr int64_t kParts = 64;
  struct Part {
    size_t table;
    int64_t begin, end;  // rows
  };

  std::vector<TableGrad<T>> tables_;
  std::vector<Part> parts_;
  int64_t work_ = 0;  // of a part
};

// Checks that the operands of a gradient fit together, and takes them.
template <typename T>
TableGrad<T> make_table_grad(const Layout& grad, const Layout& ids, const Layout* start,
                             const Layout& table, int64_t padding) {
  ORT_CHECK(table.sizes.size() == 2, "EmbeddingGrad: got a table of ", table.sizes.size(),
            " dims, want 2");
  const int64_t num_rows = table.sizes[0], width = table.sizes[1];
  const bool is_row_major =
      (num_rows <= 1 || table.strides[0] == width) && (width <= 1 || table.strides[1] == 1);
  const bool start_fits =
      start == nullptr || (start->sizes == table.sizes && start->dtype == table.dtype);
  std::vector<int64_t> row_of_each_id = ids.sizes;
  row_of_each_id.push_back(width);
  ORT_CHECK(is_row_major && start_fits && grad.sizes == row_of_each_id &&
                ids.dtype == ir::DType::kInt64 && grad.dtype == table.dtype,
            "EmbeddingGrad: the operands do not fit together");
  return TableGrad<T>(grad, ids, start, table, padding);
}

template <typename T>
std::unique_ptr<const Kernel> make_one(const BoundNode& bound) {
  const Layout* start = bound.inputs.size() > 2 ? &bound.inputs[2] : nullptr;
  return std::make_unique<const EmbeddingGrad<T>>(
      make_table_grad<T>(bound.inputs.at(0), bound.inputs.at(1), start, bound.outputs.at(0),
                         ir::int_attr(bound.node.attrs, "padding_idx", -1)));
}

template <typename T>
std::unique_ptr<const Kernel> make_several(const BoundNode& bound) {
  const ir::Shape paddings = ir::ints_attr(bound.node.attrs, "padding_idxs", {});
  const size_t count = bound.outputs.size();
  ORT_CHECK(bound.inputs.size() == 2 * count && paddings.size() == count, "EmbeddingGrads: got ",
            bound.inputs.size(), " inputs and ", paddings.size(), " paddings for ", count,
            " tables");
  std::vector<TableGrad<T>> tables;
  for (size_t i = 0; i < count; ++i) {
    tables.push_back(make_table_grad<T>(bound.inputs[2 * i], bound.inputs[2 * i + 1], nullptr,
                                        bound.outputs[i], paddings[i].constant()));
  }
  return std::make_unique<const EmbeddingGrads<T>>(std::move(tables));
}

bool is_double(const BoundNode& bound) {
  const ir::DType dtype = bound.outputs.at(0).dtype;
  ORT_CHECK(dtype == ir::DType::kFloat || dtype == ir::DType::kDouble, "EmbeddingGrad: got ",
            ir::name(dtype), ", want float32 or float64");
  return dtype == ir::DType::kDouble;
}

}  // namespace

std::unique_ptr<const Kernel> make_embedding_grad(const BoundNode& bound) {
  return is_double(bound) ? make_one<double>(bound) : make_one<float>(bound);
}

std::unique_ptr<const Kernel> make_embedding_grads(const BoundNode& bound) {
  return is_double(bound) ? make_several<double>(bound) : make_several<float>(bound);
}

}  // namespace torch_ort::cpu
