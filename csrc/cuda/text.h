// The text of a region's kernel in CUDA C++. No size stands in it: one text serves all sizes that
// ask for the same geometry and the same kinds of layout.
#pragma once

#include "cuda/body.h"
#include "cuda/schema.h"

#include <cstdint>
#include <string>
#include <vector>

namespace torch_ort::cuda {

// What a text is written for.
struct Plan {
  const Body& body;
  Geometry geometry;
  bool is_double = false;
  bool wide_index = false;  // offsets do not fit into 32 bits
  // Whether vectors of an input or of a store are read or written at once: such addresses have to
  // be multiples of 16 bytes, or of the vector where that has fewer.
  std::vector<bool> input_vectors, store_vectors;
};

// An argument of a kernel.
struct Parameter {
  enum class Kind : uint8_t {
    kInput,   // the address of region input `index`
    kOutput,  // the address of region output `index`, and `number` elements on
    kColumnSums,
    kTotals,   // partial sums, in memory of the call
    kFault,    // a word that the host sees
    kInteger,  // `number`
    kWide,     // `real`, as the kernel computes
  } kind = Kind::kInteger;
  std::string type, name;
  int index = -1;
  int64_t number = 0;
  double real = 0;
};

struct KernelText {
  std::string name;
  std::string text;     // all that NVRTC gets
  std::string listing;  // the kernels, with the nodes that each line comes from
  std::vector<Parameter> parameters, finish_parameters;
  uint32_t shared_numbers = 0;  // that a block shares, in which the kernel computes
  int64_t partial_columns = 0, partial_totals = 0;  // numbers of a line of partial sums

  // Of the kernel that adds up partial sums, if there are any.
  std::string finish_name() const { return name + "_finish"; }
};

const char* prelude();  // prelude.cuh

// The type of elements as the prelude names it. InternalError for a dtype that kernels do not read.
const char* element(ir::DType dtype);
// What stands in front of the prelude: the types that a kernel computes and counts in.
std::string type_head(bool is_double, bool wide_index = false);

// Numbers that change with the sizes are parameters; the result's own are those of the plan.
KernelText write_kernel(const Plan& plan, int64_t rows, int64_t columns, int64_t groups);

}  // namespace torch_ort::cuda
