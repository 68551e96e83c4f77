// Writes the source text of a region's kernel in CUDA C++. It contains no sizes: one text serves
// all sizes that have the same geometry and the same kinds of layout.
#pragma once

#include "cuda/body.h"
#include "cuda/schema.h"

#include <cstdint>
#include <string>
#include <vector>

namespace torch_ort::cuda {

// What a text is specialized for.
struct Plan {
  const Body& body;
  Geometry geometry;
  bool is_double = false;
  bool wide_index = false;  // offsets need more than 32 bits
  // By input and by store: whether it is accessed by whole vectors. Its address then has to be a
  // multiple of 16 bytes, or of the size of a vector if that is smaller.
  std::vector<bool> input_vectors, store_vectors;
  // By input: by how many elements a row begins further into a vector than the row before it, while
  // rows of results begin with one. 0: it lies as the results do.
  std::vector<int> input_shifts;

  // Whether blockIdx.x is a strip of rows; otherwise it is a line of blocks.
  bool has_strips() const { return geometry.is_split || !body.reduces_rows(); }
};

// An argument of a kernel.
struct Parameter {
  enum class Kind : uint8_t {
    kInput,   // the address of region input `index`
    kOutput,  // the address of region output `index`, plus `number` elements
    kColumnSums,
    // Partial sums, in memory that a call allocates. kColumnSums has one for each column.
    kTotals,
    kParts,    // reductions of the strips of rows that are split, in such memory too
    kFault,    // the word for errors (faults.h)
    kInteger,  // `number`
    kWide,     // `real`, in the dtype in which the kernel computes
  } kind = Kind::kInteger;
  std::string type, name;
  int index = -1;
  int64_t number = 0;
  double real = 0;
};

struct KernelText {
  std::string name;
  std::string text;     // the whole text for NVRTC
  std::string listing;  // the kernels, with the node that each line comes from
  std::vector<Parameter> parameters, finish_parameters;
  // The numbers of shared memory of a block, in the dtype in which it computes.
  uint32_t shared_numbers = 0;
  int64_t partial_columns = 0, partial_totals = 0;  // numbers in a row of partial sums
  // If rows are split: the number of kernels, and of reductions along a row.
  int stages = 1;
  int64_t reductions = 0;

  // The name of the kernel of a stage, also if `of` is still the name of all.
  std::string stage_name(int stage) const;
  std::string stage_name(int stage, const std::string& of) const;
  // The name of the kernel that adds the partial sums, if there are any.
  std::string finish_name() const { return name + "_finish"; }
};

const char* prelude();  // prelude.cuh

// What kernels divide numbers below 2^31 with, in place of the number itself: the low word is a
// factor, the high word a shift (see `quotient` in the prelude).
uint64_t factor_and_shift(int64_t divisor);

// The prelude's name for an element type. Throws InternalError for a dtype that kernels do not
// read.
const char* element(ir::DType dtype);
// The text before the prelude: the types in which a kernel computes and counts.
std::string type_head(bool is_double, bool wide_index = false);

// Writes the text. Numbers that change with sizes are parameters; those in the result are the
// values for the given sizes.
KernelText write_kernel(const Plan& plan, int64_t rows, int64_t columns, int64_t groups);

}  // namespace torch_ort::cuda
