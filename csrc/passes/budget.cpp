#include "passes/budget.h"

#include "passes/clusters.h"

#include <cmath>

namespace torch_ort::passes {

namespace {

// One for each thread, because graphs are compiled on several threads at once.
thread_local const Budget* budget_in_force = nullptr;
thread_local const Selection* selection_in_force = nullptr;
thread_local Clusters* clusters_in_force = nullptr;
thread_local BudgetReport* report_in_force = nullptr;

}  // namespace

double Speeds::flops(ir::DType dtype) const {
  if (dtype == ir::DType::kDouble) return flops_of_double;
  return ir::size_bytes(dtype) == 2 ? flops_of_short : flops_of_float;
}

int64_t Budget::bytes(int64_t dense_bytes) const {
  return std::llround(is_fraction ? amount * static_cast<double>(dense_bytes) : amount);
}

BudgetInForce::BudgetInForce(const Budget* budget, const Selection* selection, BudgetReport* report)
    : budget_before_(budget_in_force),
      selection_before_(selection_in_force),
      clusters_before_(clusters_in_force),
      found_(selection == nullptr ? nullptr : std::make_unique<Clusters>()),
      report_before_(report_in_force) {
  budget_in_force = budget;
  selection_in_force = selection;
  clusters_in_force = found_.get();
  report_in_force = report;
}

BudgetInForce::~BudgetInForce() {
  budget_in_force = budget_before_;
  selection_in_force = selection_before_;
  clusters_in_force = clusters_before_;
  report_in_force = report_before_;
}

const Budget* BudgetInForce::budget() { return budget_in_force; }
const Selection* BudgetInForce::selection() { return selection_in_force; }
Clusters* BudgetInForce::clusters() { return clusters_in_force; }
BudgetReport* BudgetInForce::report() { return report_in_force; }

}  // namespace torch_ort::passes
