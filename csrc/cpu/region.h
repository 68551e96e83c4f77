// A fused group of nodes on CPU: a tile program over one set of sizes.
//
// The elements of a region stand in rows and columns. A value of its body is *full* (rows x
// columns), a *row* value (one number for each row), a *column* value (one for each column) or a
// *scalar*. A program takes a tile of a few rows at a time, whose values stay in the first cache,
// and runs all nodes of the body over it. A Concat ends in an output that full values are parts of.
#pragma once

#include "cpu/kernels.h"
#include "ir/graph.h"
#include "region/codegen.h"

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

namespace torch_ort::cpu {

using region::Kernel;
using region::Layout;

struct CompileOptions {
  Isa isa = best_isa();
  int64_t tile_bytes = 4096;        // of one value in a tile, unless a single row is longer
  bool round_short_floats = false;  // see region::CodegenOptions
};

// Whether tile programs read operands of this dtype.
bool can_load(ir::DType dtype);

// As region::Codegen says of each.
std::unique_ptr<const Kernel> compile(const region::Schedule& schedule,
                                      const ir::SymbolLookup& lookup,
                                      const std::vector<Layout>& inputs,
                                      const std::vector<Layout>& outputs,
                                      const CompileOptions& options);
std::unique_ptr<const Kernel> compile(const ir::Node& node, const std::vector<Layout>& inputs,
                                      const std::vector<Layout>& outputs,
                                      const CompileOptions& options);

// The generator of this room: targets are the names of instruction sets (kernels.h).
const region::Codegen& codegen();

}  // namespace torch_ort::cpu
