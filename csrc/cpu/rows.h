// Rows that count: a tensor of int64 with how many there are, and then their numbers, increasing.
// What stands behind these is not said. One tensor of N + 1 numbers serves any count up to N, so
// that a new count asks for no new plan.
#pragma once

#include "cpu/region.h"

#include <cstdint>
#include <memory>
#include <vector>

namespace torch_ort::cpu {

class RowList {
 public:
  // IndexError for a list that is none: its numbers may come from a file.
  RowList(const void* list, int64_t num_rows);

  int64_t count() const { return count_; }
  const int64_t* rows() const { return rows_; }
  // One after the other, from rows()[0] on.
  bool is_run() const { return count_ == 0 || rows_[count_ - 1] - rows_[0] == count_ - 1; }

  // Calls visit(first row, count) for rows that follow each other, no more than `longest` of them
  // at once, among those at [begin, end) of the list.
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

// InternalError unless the layout is that of a list of up to `num_rows` rows.
void check_row_list(const Layout& list, int64_t num_rows);

// torch_ort.Rows and torch_ort.ZeroRows. InternalError on layouts that do not fit.
std::unique_ptr<const Kernel> make_rows(const ir::Node& node, const std::vector<Layout>& inputs,
                                        const std::vector<Layout>& outputs);
std::unique_ptr<const Kernel> make_zero_rows(const std::vector<Layout>& inputs,
                                             const std::vector<Layout>& outputs);

}  // namespace torch_ort::cpu
