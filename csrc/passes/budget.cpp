#include "passes/budget.h"

#include <cmath>

namespace torch_ort::passes {

namespace {

// Graphs are compiled on several threads.
thread_local const Budget* budget_in_force = nullptr;
thread_local BudgetReport* report_in_force = nullptr;

}  // namespace

double Speeds::flops(ir::DType dtype) const {
  if (dtype == ir::DType::kDouble) return flops_of_double;
  return ir::size_bytes(dtype) == 2 ? flops_of_short : flops_of_float;
}

int64_t Budget::bytes(int64_t dense_bytes) const {
  return std::llround(is_fraction ? amount * static_cast<double>(dense_bytes) : amount);
}

BudgetInForce::BudgetInForce(const Budget* budget, BudgetReport* report)
    : budget_before_(budget_in_force), report_before_(report_in_force) {
  budget_in_force = budget;
  report_in_force = report;
}

BudgetInForce::~BudgetInForce() {
  budget_in_force = budget_before_;
  report_in_force = report_before_;
}

const Budget* BudgetInForce::budget() { return budget_in_force; }
BudgetReport* BudgetInForce::report() { return report_in_force; }

}  // namespace torch_ort::passes
