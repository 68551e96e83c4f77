// The interpreter of tile programs.
#include "base/rounding.h"
#include "cpu/parallel.h"
#include "cpu/program.h"
#include "cpu/rows.h"
#include "cpu/thread_memory.h"

#include <c10/util/Exception.h>

#include <algorithm>
#include <cmath>
#include <utility>
#include <vector>

namespace torch_ort::cpu {

namespace {

// Work below this, in numbers times instructions, is not worth another thread.
constexpr int64_t kWorkPerThread = 1 << 17;
// Sums over many rows are sums of partial sums, on up to kMaxLevels levels, so that rounding errors
// do not grow with the number of rows.
constexpr int64_t kRowsPerPart = 32, kPartsPerPart = 32;
constexpr int kMaxLevels = 3;

const void* element(const void* base, int64_t index, ir::DType dtype) {
  return static_cast<const char*>(base) + index * ir::size_bytes(dtype);
}

void* element(void* base, int64_t index, ir::DType dtype) {
  return static_cast<char*>(base) + index * ir::size_bytes(dtype);
}

// Calls visit(offset, position, runs) for the elements [begin, begin + count), as many at a time as
// are in runs. `offset` is from the first element of the axes, `position` from `begin`.
template <typename Visit>
void for_each_run(const std::vector<Access::Axis>& axes, int64_t begin, int64_t count,
                  Visit visit) {
  const Access::Axis& inner = axes.back();
  if (axes.size() == 1) {
    return visit(begin * inner.stride, int64_t{0}, Runs{.n = count, .stride = inner.stride});
  }
  for (int64_t done = 0; done < count;) {
    const int64_t element = begin + done;
    const int64_t at = element % inner.size, outer = axes[axes.size() - 2].size;
    int64_t rest = element / inner.size, offset = at * inner.stride;
    // Whole runs along the second axis are visited at once.
    Runs runs{.n = std::min(inner.size - at, count - done), .stride = inner.stride};
    if (runs.n == inner.size) {
      runs.count = std::min(outer - rest % outer, (count - done) / inner.size);
      runs.distance = axes[axes.size() - 2].stride;
    }
    for (size_t axis = axes.size() - 1; axis-- > 0;) {
      offset += rest % axes[axis].size * axes[axis].stride;
      rest /= axes[axis].size;
    }
    visit(offset, done, runs);
    done += runs.n * runs.count;
  }
}

template <typename T>
class Runner final : public Kernel {
 public:
  explicit Runner(Program program)
      : program_(std::move(program)), kernels_(kernels<T>(program_.isa)) {
    for (Phase& phase : program_.phases) {
      work_ += static_cast<int64_t>(phase.full.size());
      for (const Instruction& each : phase.full) has_row_results_ |= makes_row_result(each);
    }
    has_row_results_ |= program_.phases.size() > 1;
    for (size_t value = 0; value < program_.places.size(); ++value) {
      const Place& place = program_.places[value];
      if (place.kind != Place::Kind::kRegister && place.kind != Place::Kind::kNone) {
        moving_.push_back({static_cast<int>(value), place});
      }
    }
  }

  std::string str() const override { return program_.str(); }

  void run(const void* const* inputs, void* const* outputs) const override {
    const Operands operands{inputs, outputs};
    if (program_.has_row_list) {
      const RowList list(inputs[program_.inputs.size()], program_.num_rows);
      if (list.count() < program_.num_rows) {
        check_ids(operands);
        return run_rows(operands, &list);
      }
    }
    run_rows(operands, nullptr);
  }

 private:
  struct Operands {
    const void* const* inputs;
    void* const* outputs;
  };
  struct Moving {
    int value;
    Place place;
  };

  // The levels of partial sums. Tiles are added to the first level, and what a part has on one
  // level is added to the next when the part is complete.
  struct Levels {
    Levels(int64_t tiles, int64_t tiles_per_part) : tiles_per_part(tiles_per_part) {
      for (int64_t parts = ceil_div(tiles, tiles_per_part); parts > 1 && count < kMaxLevels;
           parts = ceil_div(parts, kPartsPerPart)) {
        ++count;
      }
    }
    // How many levels are complete after so many tiles.
    int num_full(int64_t tiles) const {
      int num = 0;
      for (int64_t unit = tiles_per_part; num + 1 < count && tiles % unit == 0;
           unit *= kPartsPerPart) {
        ++num;
      }
      return num;
    }
    int64_t tiles_per_part;
    int count = 1;
  };

  // PyTorch's operators raise for an id in any row, also in one that the list leaves out.
  void check_ids(const Operands& operands) const {
    for (const Phase& phase : program_.phases) {
      for (const Instruction& each : phase.full) {
        if (each.kind != Kind::kGather) continue;
        const int64_t size = program_.inputs[each.index].rows[0].size;
        for (int64_t row = 0; row < program_.num_rows; ++row) {
          check_id(integer(operands.inputs[each.ids], program_.inputs[each.ids], row), size);
        }
      }
    }
  }

  static void check_id(int64_t id, int64_t size) {
    TORCH_CHECK_INDEX(id >= 0 && id < size, "index out of range in self");
  }

  static int64_t integer(const void* base, const Access& access, int64_t row) {
    const int64_t at = access.row_offset(row);
    return access.dtype == ir::DType::kInt32 ? static_cast<const int32_t*>(base)[at]
                                             : static_cast<const int64_t*>(base)[at];
  }

  // `list`: nullptr stands for all rows.
  void run_rows(const Operands& operands, const RowList* list) const {
    if (!program_.accumulators.empty()) return run_blocks(operands, list);
    const int64_t rows = list == nullptr ? program_.num_rows : list->count();
    // Without reductions along rows, the chunks of a row are independent.
    const bool by_chunk = !has_row_results_ && program_.tile_rows == 1;
    const int64_t chunks = by_chunk ? ceil_div(program_.num_columns, program_.chunk) : 1;
    const int64_t items = ceil_div(rows, program_.tile_rows) * chunks;
    const int64_t numbers = by_chunk ? program_.chunk : program_.tile_rows * program_.num_columns;
    parallel_for(0, items, grain(numbers), [&](int64_t begin, int64_t end) {
      Worker worker(*this, operands, nullptr);
      for (int64_t item = begin; item < end; ++item) {
        if (by_chunk) {
          const int64_t at = item / chunks, column = item % chunks * program_.chunk;
          worker.run_tile(list == nullptr ? at : list->rows()[at], 1, column,
                          std::min(program_.chunk, program_.num_columns - column));
        } else {
          const int64_t row = item * program_.tile_rows;
          worker.run_rows(list, row, std::min(program_.tile_rows, rows - row));
        }
      }
    });
  }

  static bool makes_row_result(const Instruction& each) {
    return each.kind == Kind::kSumRows || each.kind == Kind::kMaxRows ||
           each.kind == Kind::kMinRows || each.kind == Kind::kPick;
  }

  int64_t grain(int64_t numbers_per_item) const {
    return std::max<int64_t>(
        1, kWorkPerThread / std::max<int64_t>(1, numbers_per_item * std::max<int64_t>(work_, 1)));
  }

  // Each group has a fixed number of blocks of rows, whose sums are added in order, so that the
  // result is the same for any number of threads.
  void run_blocks(const Operands& operands, const RowList* list) const {
    const int64_t size = program_.accumulators_size, blocks = program_.num_blocks;
    const int64_t groups = program_.num_groups;
    const int64_t rows =
        list == nullptr ? program_.num_rows / std::max<int64_t>(1, groups) : list->count();
    const int64_t tiles = ceil_div(rows, program_.tile_rows);
    const int64_t tiles_per_block = ceil_div(tiles, blocks);
    const Levels levels(tiles_per_block, ceil_div(kRowsPerPart, program_.tile_rows));
    T* sums = thread_memory<T, Use::kSums>(size * blocks * groups);
    const int64_t numbers = tiles_per_block * program_.tile_rows * program_.num_columns;
    parallel_for(0, blocks * groups, grain(numbers), [&](int64_t begin, int64_t end) {
      T* parts = thread_memory<T, Use::kParts>((levels.count - 1) * size);
      for (int64_t block = begin; block < end; ++block) {
        T* level[kMaxLevels];
        for (int i = 0; i < levels.count; ++i) {
          level[i] = i + 1 == levels.count ? sums + block * size : parts + i * size;
          std::fill_n(level[i], size, T(0));
        }
        const int64_t first = block % blocks * tiles_per_block;
        const int64_t last = std::min(tiles, first + tiles_per_block);
        const int64_t first_row = block / blocks * rows;
        if (first >= last) continue;  // a Worker starts at a row, of which there may be none
        Worker worker(*this, operands, level[0]);
        for (int64_t tile = first; tile < last; ++tile) {
          const int64_t row = tile * program_.tile_rows;
          worker.run_rows(list, first_row + row, std::min(program_.tile_rows, rows - row));
          const int num_full =
              tile + 1 < last ? levels.num_full(tile + 1 - first) : levels.count - 1;
          for (int i = 0; i < num_full; ++i) {
            kernels_.add_rows(level[i + 1], level[i], 1, size);
            std::fill_n(level[i], size, T(0));
          }
        }
      }
    });
    for (int64_t group = 0; group < groups; ++group, sums += blocks * size) {
      kernels_.add_rows(sums, sums + size, blocks - 1, size);
      for (const Accumulator& each : program_.accumulators) {
        if (each.size == 0) continue;  // there are no columns
        const Access& access = program_.outputs[each.output];
        void* to = element(operands.outputs[access.result], access.row_offset(group), access.dtype);
        store_run(access.dtype, access.columns, to, sums + each.offset, 0, each.size);
      }
    }
  }

  // Stores elements [begin, begin + count) of `axes`: columns of a row, or rows of a row value.
  void store_run(ir::DType dtype, const std::vector<Access::Axis>& axes, void* to, const T* from,
                 int64_t begin, int64_t count) const {
    const auto store = kernels_.store[static_cast<size_t>(dtype)];
    for_each_run(axes, begin, count, [&](int64_t offset, int64_t at, const Runs& runs) {
      store(element(to, offset, dtype), from + at, runs);
    });
  }

  void load_run(ir::DType dtype, const std::vector<Access::Axis>& axes, const void* from, T* to,
                int64_t begin, int64_t count) const {
    const auto load = kernels_.load[static_cast<size_t>(dtype)];
    for_each_run(axes, begin, count, [&](int64_t offset, int64_t at, const Runs& runs) {
      load(to + at, element(from, offset, dtype), runs);
    });
  }

  // Computes one tile after the other, in memory of its thread.
  class Worker {
   public:
    Worker(const Runner& runner, const Operands& operands, T* sums)
        : runner_(runner),
          program_(runner.program_),
          kernels_(runner.kernels_),
          operands_(operands),
          sums_(sums),
          memory_(thread_memory<T, Use::kRegisters>(program_.worker_size)),
          at_(thread_memory<T*, Use::kRegisters>(static_cast<int64_t>(program_.places.size()))),
          group_of_(thread_memory<int64_t, Use::kRegisters>(
              static_cast<int64_t>(program_.places.size()))) {
      std::fill_n(group_of_, program_.places.size(), int64_t{-1});
      for (size_t value = 0; value < program_.places.size(); ++value) {
        at_[value] = memory_ + program_.places[value].offset;
      }
      for (const auto& [value, number] : program_.constants) *at_[value] = static_cast<T>(number);
      move_to(0);
      for (const Instruction& each : program_.prologue) execute(each, 0, program_.num_columns);
    }

    // Computes `count` whole rows from `row` on, or those at these positions of the list.
    void run_rows(const RowList* list, int64_t row, int64_t count) {
      if (list == nullptr) return run_tile(row, count, 0, program_.num_columns);
      list->for_each_run(row, row + count, count, [this](int64_t first, int64_t length) {
        run_tile(first, length, 0, program_.num_columns);
      });
    }

    void run_tile(int64_t row, int64_t num_rows, int64_t column, int64_t num_columns) {
      row_ = row;
      num_rows_ = num_rows;
      for (const Phase& phase : program_.phases) {
        for (const Instruction& each : phase.row) execute(each, 0, 1);
        for (const auto& start : phase.starts) {
          std::fill_n(at_[start.value], num_rows_, static_cast<T>(start.number));
        }
        if (phase.full.empty()) continue;
        const int64_t end = column + num_columns;
        for (int64_t begin = column; begin < end; begin += program_.chunk) {
          move_to(begin);
          const int64_t count = std::min(program_.chunk, end - begin);
          for (const Instruction& each : phase.full) execute(each, begin, count);
        }
      }
    }

   private:
    void move_to(int64_t column) {
      for (const Moving& moving : runner_.moving_) {
        const Place& place = moving.place;
        if (place.kind == Place::Kind::kWide) {
          at_[moving.value] = memory_ + place.offset + column;
        } else if (place.kind == Place::Kind::kInput) {
          const int64_t offset = program_.inputs[place.index].row_offset(row_) + column;
          // An input is only written through an output that the planner placed in its memory.
          at_[moving.value] =
              const_cast<T*>(static_cast<const T*>(operands_.inputs[place.index])) + offset;
        } else {
          const Access& access = program_.outputs[place.index];
          at_[moving.value] =
              static_cast<T*>(operands_.outputs[access.result]) + access.row_offset(row_) + column;
        }
      }
    }

    T* at(int value) const { return value < 0 ? nullptr : at_[value]; }

    // Executes an instruction on `columns` columns from `column` on. A row value has one column.
    void execute(const Instruction& each, int64_t column, int64_t columns) {
      switch (each.kind) {
        case Kind::kElementwise:
          kernels_.elementwise[static_cast<size_t>(each.op)][each.scalars](
              at_[each.d], at(each.a), at(each.b), at(each.c), count(each.space, columns));
          return;
        case Kind::kWithGradient:
          kernels_.with_gradient[static_cast<size_t>(each.op)](at_[each.d], at_[each.gradient],
                                                               at_[each.a], at_[each.b],
                                                               count(each.space, columns));
          return;
        case Kind::kLoad: load(each, column, columns); return;
        case Kind::kGather: gather(each, column, columns); return;
        case Kind::kStore: store(each, column, columns); return;
        case Kind::kExpandRow:
          kernels_.expand_rows(at_[each.d], at_[each.a], num_rows_, columns);
          return;
        case Kind::kSumRows:
          kernels_.sum_rows(at_[each.d], at_[each.a], num_rows_, columns);
          return;
        case Kind::kMaxRows:
          kernels_.max_rows(at_[each.d], at_[each.a], num_rows_, columns);
          return;
        case Kind::kMinRows:
          kernels_.min_rows(at_[each.d], at_[each.a], num_rows_, columns);
          return;
        case Kind::kPick: pick(each, column, columns); return;
        case Kind::kScatter: scatter(each, column, columns); return;
        case Kind::kRandom: draw(each, column, columns); return;
        case Kind::kAddColumns:
          kernels_.add_rows(sums_ + program_.accumulators[each.index].offset + column, at_[each.a],
                            num_rows_, columns);
          return;
        case Kind::kAddAll:
          kernels_.sum_rows(sums_ + program_.accumulators[each.index].offset, at_[each.a], 1,
                            num_rows_);
          return;
      }
    }

    int64_t count(Space space, int64_t columns) const {
      if (space == Space::kFull) return num_rows_ * columns;
      if (space == Space::kColumn) return program_.tile_rows * columns;
      return space == Space::kRow ? num_rows_ : 1;
    }

    void load(const Instruction& each, int64_t column, int64_t columns) {
      const Access& access = program_.inputs[each.index];
      const void* base = operands_.inputs[each.index];
      T* to = at_[each.d];
      if (each.space == Space::kRow) {
        return runner_.load_run(access.dtype, access.rows, base, to, row_, num_rows_);
      }
      if (each.space == Space::kScalar) {
        kernels_.load[static_cast<size_t>(access.dtype)](to, base, {.n = 1});
        return;
      }
      if (each.space == Space::kColumn) {
        runner_.load_run(access.dtype, access.columns, base, to, column, columns);
        // Kernels read operands of equal length, so each row of a tile has a copy of the columns.
        for (int64_t r = 1; r < program_.tile_rows; ++r) std::copy_n(to, columns, to + r * columns);
        return;
      }
      if (access.is_grid()) {
        const Access::Axis &row = access.rows[0], &inner = access.columns[0];
        kernels_.load[static_cast<size_t>(access.dtype)](
            to, element(base, access.row_offset(row_) + column * inner.stride, access.dtype),
            {.n = columns, .stride = inner.stride, .count = num_rows_, .distance = row.stride});
        return;
      }
      if (each.stays) return load_group(each, access, base, to);
      if (access.columns.size() == 1) return load_rows(access, base, to, column, columns);
      for (int64_t r = 0; r < num_rows_; ++r) {
        runner_.load_run(access.dtype, access.columns,
                         element(base, access.row_offset(row_ + r), access.dtype), to + r * columns,
                         column, columns);
      }
    }

    // Loads the row that a group of rows repeats, once for all tiles in the group. It is copied for
    // tile_rows rows, since a later tile may have more rows than the first.
    void load_group(const Instruction& each, const Access& access, const void* base, T* to) {
      const int64_t size = access.rows.back().size, group = row_ / size;
      if ((row_ + num_rows_ - 1) / size != group) {
        group_of_[each.d] = -1;
        return load_rows(access, base, to, 0, program_.num_columns);
      }
      if (group_of_[each.d] == group) return;
      group_of_[each.d] = group;
      kernels_.load[static_cast<size_t>(access.dtype)](
          to, element(base, access.row_offset(row_), access.dtype),
          {.n = program_.num_columns,
           .stride = access.columns[0].stride,
           .count = program_.tile_rows});
    }

    // Loads rows whose dims are not contiguous, such as a row that is repeated for each group.
    void load_rows(const Access& access, const void* base, T* to, int64_t column, int64_t columns) {
      const auto load = kernels_.load[static_cast<size_t>(access.dtype)];
      const int64_t stride = access.columns[0].stride;
      for_each_run(access.rows, row_, num_rows_, [&](int64_t offset, int64_t at, const Runs& runs) {
        for (int64_t i = 0; i < runs.count; ++i) {
          const int64_t from = offset + i * runs.distance + column * stride;
          load(to + (at + i * runs.n) * columns, element(base, from, access.dtype),
               {.n = columns, .stride = stride, .count = runs.n, .distance = runs.stride});
        }
      });
    }

    void gather(const Instruction& each, int64_t column, int64_t columns) {
      const Access &table = program_.inputs[each.index], &ids = program_.inputs[each.ids];
      const void* base = operands_.inputs[each.index];
      const int64_t size = table.rows[0].size, stride = table.rows[0].stride;
      for (int64_t r = 0; r < num_rows_; ++r) {
        const int64_t id = integer(operands_.inputs[each.ids], ids, row_ + r);
        check_id(id, size);
        runner_.load_run(table.dtype, table.columns, element(base, id * stride, table.dtype),
                         at_[each.d] + r * columns, column, columns);
      }
    }

    void store(const Instruction& each, int64_t column, int64_t columns) {
      const Access& access = program_.outputs[each.index];
      void* base = operands_.outputs[access.result];
      const T* from = at_[each.a];
      if (each.space == Space::kRow) {
        return runner_.store_run(access.dtype, access.rows, base, from, row_, num_rows_);
      }
      if (access.is_grid()) {
        const Access::Axis &row = access.rows[0], &inner = access.columns[0];
        kernels_.store[static_cast<size_t>(access.dtype)](
            element(base, access.row_offset(row_) + column * inner.stride, access.dtype), from,
            {.n = columns, .stride = inner.stride, .count = num_rows_, .distance = row.stride});
        return;
      }
      for (int64_t r = 0; r < num_rows_; ++r) {
        runner_.store_run(access.dtype, access.columns,
                          element(base, access.row_offset(row_ + r), access.dtype),
                          from + r * columns, column, columns);
      }
    }

    // The column that a label names; -1 for the ignored one.
    int64_t label(const Instruction& each, T number) const {
      const auto column = static_cast<int64_t>(number);
      if (each.has_ignored && number == static_cast<T>(each.ignored)) return -1;
      TORCH_CHECK_INDEX(column >= 0 && column < program_.num_columns, "Target ", column,
                        " is out of bounds.");
      return column;
    }

    void pick(const Instruction& each, int64_t begin, int64_t columns) {
      for (int64_t r = 0; r < num_rows_; ++r) {
        const int64_t column = label(each, at_[each.b][r]) - begin;
        if (column >= 0 && column < columns) at_[each.d][r] = at_[each.a][r * columns + column];
      }
    }

    void draw(const Instruction& each, int64_t column, int64_t columns) {
      const auto seed = *static_cast<const uint64_t*>(operands_.inputs[each.index]);
      const bool is_full = each.space == Space::kFull;
      const int64_t begin = is_full ? row_ * program_.num_columns + column : row_;
      kernels_.random_mask(at_[each.d], seed, static_cast<uint64_t>(each.stream), begin,
                           is_full ? num_rows_ * columns : num_rows_, each.keep);
    }

    void scatter(const Instruction& each, int64_t begin, int64_t columns) {
      std::fill_n(at_[each.d], num_rows_ * columns, T(0));
      for (int64_t r = 0; r < num_rows_; ++r) {
        const int64_t column = label(each, at_[each.a][r]);
        if (column < begin || column >= begin + columns) continue;
        at_[each.d][r * columns + column - begin] = at_[each.b][(each.scalars & 2) != 0 ? 0 : r];
      }
    }

    const Runner& runner_;
    const Program& program_;
    const Kernels<T>& kernels_;
    const Operands& operands_;
    T* sums_;
    T* memory_;
    T** at_;
    int64_t* group_of_;  // by value: the group of rows whose numbers its register holds
    int64_t row_ = 0, num_rows_ = 0;
  };

  Program program_;
  const Kernels<T>& kernels_;
  std::vector<Moving> moving_;
  int64_t work_ = 0;
  bool has_row_results_ = false;
};

}  // namespace

template <typename T>
std::unique_ptr<const Kernel> make_runner(Program program) {
  return std::make_unique<const Runner<T>>(std::move(program));
}

template std::unique_ptr<const Kernel> make_runner<float>(Program);
template std::unique_ptr<const Kernel> make_runner<double>(Program);

}  // namespace torch_ort::cpu
