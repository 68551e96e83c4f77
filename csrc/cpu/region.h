// Compiles fused regions for the CPU: a tile program for one set of sizes.
//
// The elements of a region are arranged in rows and columns. A value of its body is *full* (rows x
// columns), a *row* value (one number for each row), a *column* value (one for each column) or a
// *scalar*. A program takes a tile of a few rows at a time, whose values fit into the first-level
// cache, and runs all nodes of the body on it. A Concat is written as an output of which each full
// operand is a part.
//
// A program is made for each binding, in microseconds, when all sizes and strides are known;
// numbers that depend on sizes (torch_ort.SizeRatio) are constants of it. Rows that are too long
// are processed in chunks, once for each phase, which is the work between two reductions along the
// row. Operands are read and written in place if their strides allow it.
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
  int64_t tile_bytes = 4096;        // for one value in a tile, unless one row is longer
  bool round_short_floats = false;  // see region::CodegenOptions
};

// Whether tile programs read operands of this dtype.
bool can_load(ir::DType dtype);

// See region::Codegen::compile().
std::unique_ptr<const Kernel> compile(const region::Schedule& schedule,
                                      const ir::SymbolLookup& lookup,
                                      const std::vector<Layout>& inputs,
                                      const std::vector<Layout>& outputs,
                                      const CompileOptions& options);

// The code generator of the CPU. Its targets are the names of instruction sets (kernels.h).
const region::Codegen& codegen();

}  // namespace torch_ort::cpu
