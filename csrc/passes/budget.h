// How much a training step may hold, or what of it is made again by name, and what was done about
// it: the words between the pass recompute_to_budget and those who ask for it.
#pragma once

#include "ir/type.h"

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

namespace torch_ort::passes {

struct Clusters;

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
  int64_t list_bytes = 0;    // kept free for lists of rows (row_sparsity.h), made after the plan
  Speeds speeds;

  int64_t bytes(int64_t dense_bytes) const;
};

// What is to be made again whatever a step holds: by layers, or by clusters (passes/clusters.h).
struct Selection {
  enum class Level : uint8_t {
    kChosen,      // what `chosen` names
    kLayers,      // what backward reads of each layer, from what enters the layer
    kCompromise,  // and what takes a part of it to be held
  };
  // 0: not again; 1: of what crosses anyway; 2: of that and of what is smaller. The first `count`
  // clusters of that name, or all of them if that is -1.
  struct Chosen {
    std::string name;
    int type = 0;
    int64_t count = 0;
  };

  Level level = Level::kChosen;
  std::vector<Chosen> chosen;   // each name once
  bool is_extended = true;      // clusters may hold products, norms and attention
  bool ends_at_layers = false;  // what enters a layer is held, as where layers are made again
  bool lists_all = false;       // the report has all clusters, and not those alone that are on
  Speeds speeds;

  bool is_empty() const { return level == Level::kChosen && chosen.empty(); }
};

// A kind of cluster in a graph, and what making it again saves of what crosses the border.
struct ClusterReport {
  std::string name;  // its ops in order, each with a plus behind it: "Dropout+"
  int type = 1;
  int64_t count = -1;  // of those that are made again; of those that could be, if it is off
  int64_t frequency = 0;
  int64_t saved_bytes = 0;       // by all of them, where nothing else is made again
  std::string saved_expression;  // the same in symbols
  bool is_on = false;
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
  // Of lists of rows at the border, with or without recomputation: in all of the above.
  int64_t list_bytes = 0;
  struct Made {
    std::string name, op, origin;
    int64_t bytes;  // that do not cross on its account
    double us;
  };
  std::vector<Made> made;  // in the order of the forward half; views and parts of regions left out
  // Of a Selection.
  int64_t dense_held_bytes = 0;         // at the border, with nothing made again
  int num_layers = 0;                   // that were recognized
  std::vector<ClusterReport> clusters;  // by bytes, most first
};

// In force on this thread while it lives.
class BudgetInForce {
 public:
  BudgetInForce(const Budget* budget, const Selection* selection, BudgetReport* report);
  ~BudgetInForce();
  BudgetInForce(const BudgetInForce&) = delete;
  BudgetInForce& operator=(const BudgetInForce&) = delete;

  static const Budget* budget();  // nullptr: none
  static const Selection* selection();
  static BudgetReport* report();  // nullptr: nobody asks
  // Of the graph that the pipeline runs on, as find_clusters has left them. nullptr: no Selection.
  static Clusters* clusters();

 private:
  const Budget* budget_before_;
  const Selection* selection_before_;
  Clusters* clusters_before_;
  std::unique_ptr<Clusters> found_;
  BudgetReport* report_before_;
};

}  // namespace torch_ort::passes
