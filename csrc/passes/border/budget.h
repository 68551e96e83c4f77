// The interface of the pass recompute_to_budget: how much memory a training step may hold, or what
// to recompute by name, and a report of what the pass did.
#pragma once

#include "passes/border/costs.h"

#include <cmath>
#include <cstdint>
#include <string>
#include <vector>

namespace torch_ort::passes {

// The limit for the results of the forward half, saved or recomputed, that are live at one time
// between the end of the forward half and the end of the backward half. Memory of the caller does
// not count: inputs, parameters and outputs of the graph.
struct Budget {
  double amount = 0;
  // Whether `amount` is a fraction of what a step holds that recomputes nothing; else it is in
  // bytes.
  bool is_fraction = false;
  // Reserved for lists of rows (row_sparsity.cpp), which are made after the plan.
  int64_t list_bytes = 0;
  Speeds speeds;

  int64_t bytes(int64_t dense_bytes) const {
    return std::llround(is_fraction ? amount * static_cast<double>(dense_bytes) : amount);
  }
};

// What to recompute regardless of memory: layers, or clusters (passes/border/clusters.h).
struct Selection {
  enum class Level : uint8_t {
    kChosen,  // what `chosen` names
    // All that backward reads of each layer, from the inputs of the layer.
    kLayers,
    // The same, but a smaller value of the layer may be saved instead of a larger one.
    kCompromise,
  };
  // `type` is 0 to recompute nothing, 1 to recompute from values that are saved anyway, or 2 to
  // recompute from these and from smaller values that are saved for the purpose. `count` is how
  // many clusters of that name to recompute, the first ones; -1 is all.
  struct Chosen {
    std::string name;
    int type = 0;
    int64_t count = 0;
  };

  Level level = Level::kChosen;
  std::vector<Chosen> chosen;  // each name once
  bool is_extended = true;     // clusters may contain products, norms and attention
  // The inputs of a layer are saved, as when whole layers are recomputed.
  bool ends_at_layers = false;
  // The report lists all clusters, not only those that are recomputed.
  bool lists_all = false;
  Speeds speeds;

  bool is_empty() const { return level == Level::kChosen && chosen.empty(); }
};

// The clusters of one name in a graph, and what recomputing them saves at the border.
struct ClusterReport {
  std::string name;  // its ops in order, each followed by a plus: "Dropout+"
  int type = 1;
  // How many are recomputed or, if `is_on` is false, could be. -1: all.
  int64_t count = -1;
  int64_t frequency = 0;
  int64_t saved_bytes = 0;       // by all of them, if nothing else is recomputed
  std::string saved_expression;  // the same as an expression over symbols
  bool is_on = false;
};

// What the pass has planned for one graph, in bytes as Budget counts them. Where sizes are symbols,
// these are the bytes of the captured call.
struct BudgetReport {
  int64_t dense_bytes = 0;    // if nothing is recomputed
  int64_t allowed_bytes = 0;  // by the budget
  int64_t peak_bytes = 0;     // of the plan that was chosen
  int64_t held_bytes = 0;     // of the chosen plan, at the border
  double again_us = 0;        // estimated time of the recomputation
  double plan_ms = 0;
  // The bytes of lists of rows at the border, with or without recomputation. The fields above
  // include them.
  int64_t list_bytes = 0;
  struct Made {
    std::string name, op, origin;
    int64_t bytes;  // that need not be saved because of it
    double us;
  };
  // In the order of the forward half, without views and nodes inside of regions.
  std::vector<Made> made;
  // The fields of a Selection.
  int64_t dense_held_bytes = 0;         // at the border, if nothing is recomputed
  int num_layers = 0;                   // that were recognized
  std::vector<ClusterReport> clusters;  // most bytes first
};

}  // namespace torch_ort::passes
