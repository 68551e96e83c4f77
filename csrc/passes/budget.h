// How much a training step may hold, and what was done about it: the words between the pass
// recompute_to_budget and those who ask for it.
#pragma once

#include "ir/type.h"

#include <cstdint>
#include <string>
#include <vector>

namespace torch_ort::passes {

// What the machine does at most, as measured.
struct Speeds {
  double flops_of_float = 50e9;  // operations of products a second
  double flops_of_double = 25e9;
  double flops_of_short = 50e9;  // of bfloat16 and float16
  double bytes = 10e9;           // that copies read and write a second

  double flops(ir::DType dtype) const;
};

// What may be held at one time of the results of the forward half, made first or made again, from
// the end of that half to the end of the backward one. Memory of the caller's counts for nothing:
// inputs, parameters, and outputs of the graph.
struct Budget {
  double amount = 0;
  bool is_fraction = false;  // of what the step holds that makes nothing again; else bytes
  Speeds speeds;

  int64_t bytes(int64_t dense_bytes) const;
};

// What a pass has planned for one graph, in bytes as Budget counts them. Where sizes are symbols,
// of the call that was captured.
struct BudgetReport {
  int64_t dense_bytes = 0;    // with nothing made again
  int64_t allowed_bytes = 0;  // by the budget
  int64_t peak_bytes = 0;     // of the plan that was chosen
  int64_t held_bytes = 0;     // of that, at the border
  double again_us = 0;        // what is made again takes, by the speeds
  double plan_ms = 0;
  struct Made {
    std::string name, op, origin;
    int64_t bytes;  // that do not cross on its account
    double us;
  };
  std::vector<Made> made;  // in the order of the forward half; views and parts of regions left out
};

// In force on this thread while it lives.
class BudgetInForce {
 public:
  BudgetInForce(const Budget* budget, BudgetReport* report);
  ~BudgetInForce();
  BudgetInForce(const BudgetInForce&) = delete;
  BudgetInForce& operator=(const BudgetInForce&) = delete;

  static const Budget* budget();  // nullptr: none
  static BudgetReport* report();  // nullptr: nobody asks

 private:
  const Budget* budget_before_;
  BudgetReport* report_before_;
};

}  // namespace torch_ort::passes
