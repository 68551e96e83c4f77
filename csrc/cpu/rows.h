// Lists of rows to compute: an int64 tensor with the number of rows, followed by their indices in
// increasing order. The rest of the tensor is unspecified. A tensor of N + 1 numbers holds any list
// of up to N rows, so that a new number of rows needs no new plan.
#pragma once

#include "cpu/region.h"

#include <cstdint>
#include <memory>
#include <vector>

namespace torch_ort::cpu {

class RowList {
 public:
  // Throws IndexError unless `list` is valid: its numbers may come from a file.
  RowList(const void* list, int64_t num_rows);

  int64_t count() const { return count_; }
  const int64_t* rows() const { return rows_; }
  // Whether the rows are consecutive.
  bool is_run() const { return count_ == 0 || rows_[count_ - 1] - rows_[0] == count_ - 1; }

  // Calls visit(first row, count) for runs of consecutive rows, of no more than `longest` rows
  // each, among the entries [begin, end) of the list.
  template <typename Visit>
  void for_each_run(int64_t begin, int64_t end, int64_t longest, Visit visit) const {
    for (int64_t at = begin; at < end;) {
      int64_t length = 1;
      while (length < longest && at + length < end && rows_[at + length] == rows_[at] + length) {
        ++length;
      }
      visit(rows_[at], length);
      at += length;
    }
  }

 private:
  int64_t count_;
  const int64_t* rows_;
};

// Throws InternalError unless the layout is that of a list of up to `num_rows` rows.
void check_row_list(const Layout& list, int64_t num_rows);

}  // namespace torch_ort::cpu
