// A fused group of nodes on CPU: a tile program over one set of sizes.
//
// The elements of a region stand in rows and columns. A value of its body is *full* (rows x
// columns), a *row* value (one number for each row), a *column* value (one for each column) or a
// *scalar*. A program takes a tile of a few rows at a time, whose values stay in the first cache,
// and runs all nodes of the body over it. A Concat ends in an output that full values are parts of.
#pragma once

#include "cpu/kernels.h"
#include "ir/graph.h"

#include "region/schedule.h"

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

namespace torch_ort::cpu {

// A tensor as it lies in memory. Strides in elements.
struct Layout {
  ir::DType dtype = ir::DType::kUndefined;
  std::vector<int64_t> sizes, strides;
};

class TileProgram {
 public:
  virtual ~TileProgram() = default;
  // Addresses of the first element of each input and output, in the order of the node. Raises
  // IndexError for a class label that is no column. Thread safe; runs on the threads of ATen.
  virtual void run(const void* const* inputs, void* const* outputs) const = 0;
  // One instruction a line, for dumps and tests.
  virtual std::string str() const = 0;
};

struct CompileOptions {
  Isa isa = best_isa();
  int64_t tile_bytes = 4096;  // of one value in a tile, unless a single row is longer
  // Rounds each bfloat16 and float16 value of a body, as operators do that run one by one. Else
  // only what leaves is rounded.
  bool round_short_floats = false;
};

// InternalError on layouts that do not fit the schedule, Unsupported on an operand of a dtype that
// tile programs do not read.
std::unique_ptr<const TileProgram> compile(const region::Schedule& schedule,
                                           const ir::SymbolLookup& lookup,
                                           const std::vector<Layout>& inputs,
                                           const std::vector<Layout>& outputs,
                                           const CompileOptions& options);

// The ops of the domain torch_ort that are kernels of this room as they are: EmbeddingGrad,
// Attention, AttentionGrad. InternalError on layouts that do not fit.
std::unique_ptr<const TileProgram> compile(const ir::Node& node, const std::vector<Layout>& inputs,
                                           const std::vector<Layout>& outputs,
                                           const CompileOptions& options);

}  // namespace torch_ort::cpu
