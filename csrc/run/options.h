// Options for compiling, planning and running a graph.
#pragma once

#include "passes/context.h"
#include "region/codegen.h"
#include "region/writer.h"

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

namespace torch_ort::run {

// Whether kernels are chosen by timing them, and for how long.
struct Tuning {
  bool is_on = false;
  double most_ms = 0;  // the time limit for one choice; 0: none
};

struct SessionOptions {
  bool reorder = true;
  bool in_place = true;
  bool place_parts = true;  // write operands of concatenations in place
  // Use the engine's own kernels for products of matrices where these are faster.
  bool products = true;
  Tuning tuning;  // of products
  // Have cuDNN time its algorithms for each convolution (conv_search.h).
  bool search_convs = false;
  // The graph outputs that are gradients of leaf parameters; these may be returned in engine
  // memory.
  std::vector<int> parameter_gradients;
  // By gradient: the graph input that it is the gradient of; -1: unknown, as are those beyond the
  // end.
  std::vector<int> gradient_inputs;
  // How many bytes of gradients to return together if they leave early (early_gradients.h); 0: all.
  int64_t segment_bytes = 0;
  bool verify = false;  // check all plans, sizes of inputs and sizes of results
  // Wait for each step on an asynchronous device, so that an error names the step that failed.
  bool synchronize = false;
  bool cuda_graphs = false;  // run halves as CUDA graphs (replay.h)
  bool spoil = false;        // fill memory with garbage before a kernel writes it
  // Do not trust the types and attributes of the graph; needs `verify` as well.
  bool is_from_file = false;
  // What was said of passes when they ran on the graph, and holds for its variants (variant.h): the
  // names of those that do not run, and what may tell which rows nobody reads.
  std::vector<std::string> disabled_passes;
  passes::RowSources row_sources;
  // How many sets of sizes, and of outputs with gradients, are remembered.
  size_t max_bindings = 64;
  region::CodegenOptions regions;
  // Asked for the kernel of a region before the generator; may be nullptr.
  std::shared_ptr<const region::RegionWriter> region_writer;
  // How a region runs: by its kernel, by its kernel with the nodes of its body to compare with, or
  // by the nodes alone.
  enum class RegionMode : uint8_t { kKernel, kChecked, kNodes } region_mode = RegionMode::kKernel;
};

}  // namespace torch_ort::run
