// How a graph is compiled, planned and run.
#pragma once

#include "ir/graph.h"
#include "region/codegen.h"

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

namespace torch_ort::run {

// Whether kernels are chosen by measuring, and for how long.
struct Tuning {
  bool is_on = false;
  double most_ms = 0;  // that a choice may take; 0: as long as it needs
};

struct SessionOptions {
  bool reorder = true;
  bool in_place = true;
  bool place_parts = true;  // of concatenations
  bool products = true;     // of matrices by kernels of the engine, where these are faster
  Tuning tuning;            // of products
  // Graph outputs that are gradients of leaf parameters: these may leave in engine memory.
  std::vector<int> parameter_gradients;
  // By graph output that is a gradient: the graph input it is of; -1: not known. Beyond the end:
  // so.
  std::vector<int> gradient_inputs;
  // Of gradients that leave together where they leave early (early_gradients.h); 0: all.
  int64_t segment_bytes = 0;
  bool verify = false;  // check every plan, the sizes of inputs, and those of every result
  // Wait for each step on a device that works on its own, so that an error tells which it was.
  bool synchronize = false;
  bool spoil = false;  // fill memory with garbage before results are written into it
  // Nothing that the types and attributes of the graph say is believed; wants `verify` as well.
  bool is_from_file = false;
  // Values of the forward half that are there when backward begins, whether it reads them or not;
  // by name.
  std::vector<std::string> keep;
  // What a training graph goes through when its backward half has been cut down, before it is
  // compiled (partial_backward.h). It leaves values of the forward half alone. May be empty.
  std::function<void(ir::Graph&)> after_cut;
  size_t max_bindings = 64;  // sizes, and sets of outputs with gradients, that are remembered
  region::CodegenOptions regions;
  // What runs a region: its kernel, that and the nodes of its body to compare with, or these alone.
  enum class RegionMode : uint8_t { kKernel, kChecked, kNodes } region_mode = RegionMode::kKernel;
};

}  // namespace torch_ort::run
