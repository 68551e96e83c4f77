// The parts of a tile program; internal to cpu/.
#pragma once

#include "cpu/region.h"
#include "region/bound_schedule.h"

#include <optional>
#include <string>
#include <vector>

namespace torch_ort::cpu {

using region::Access;
using region::access_of;
using region::BoundNode;
using region::lies_by_rows;
using region::Space;  // the values of instructions have one of the first four

enum class Kind : uint8_t {
  kElementwise,
  kWithGradient,  // gradient <- op of a and b; d <- word_of_gradient(op) of b
  kLoad,          // d <- input
  kGather,        // d <- those rows of input `index` that input `ids` selects
  kStore,         // output <- a
  kExpandRow,     // full d <- row value a, repeated along each row
  kSumRows,       // row value d <- d + sum of each row of a
  kMaxRows,
  kMinRows,
  kPick,        // row value d <- a[row, b[row]], or 0 where b is `ignored`
  kScatter,     // full d <- b[row] in column a[row], 0 elsewhere
  kRandom,      // d <- 1 with probability `keep`, else 0
  kAddColumns,  // accumulator <- accumulator + sum of all rows of a
  kAddAll,      // accumulator <- accumulator + sum of row value a
};

// One instruction. Operands are values, by number.
struct Instruction {
  Kind kind = Kind::kElementwise;
  // The space of the result, or of the operand that is stored or summed.
  Space space = Space::kFull;
  Opcode op = Opcode::kCopy;
  uint8_t scalars = 0;  // the variant; see kNumVariants
  int d = -1, a = -1, b = -1, c = -1;
  int gradient = -1;  // of kWithGradient: the second result
  int index = -1;     // the input, output or accumulator
  int ids = -1;       // of kGather: the input with the ids
  // Of kLoad: d is loaded once for all rows that have the same columns.
  bool stays = false;
  int64_t ignored = 0;  // of kPick and kScatter
  bool has_ignored = false;
  int64_t stream = 0;  // of kRandom: tells masks of one seed apart
  double keep = 1;
};

// The word that is computed together with its gradient, because most of the work is the same.
inline std::optional<Opcode> word_of_gradient(Opcode gradient) {
  switch (gradient) {
    case Opcode::kGeluGrad: return Opcode::kGelu;
    case Opcode::kGeluTanhGrad: return Opcode::kGeluTanh;
    case Opcode::kSiluGrad: return Opcode::kSilu;
    default: return std::nullopt;
  }
}

// Where a value is while a tile is computed.
struct Place {
  enum class Kind : uint8_t {
    kNone,
    kRegister,  // at `offset` in the worker's memory
    // The same, but a whole row long; each chunk uses its part.
    kWide,
    kInput,   // in the memory of the input
    kOutput,  // in the memory of the output
  } kind = Kind::kNone;
  int64_t offset = 0;
  int index = -1;
};

// The work between two reductions along rows. `row` instructions run first, once for each tile;
// `full` ones run for each chunk of its columns.
struct Phase {
  std::vector<Instruction> row, full;
  struct Start {
    int value;
    double number;
  };
  // The row values with which the reductions of this phase start.
  std::vector<Start> starts;
};

struct Accumulator {
  int output = -1;
  int64_t offset = 0, size = 1;  // in the accumulators of a block
};

struct Program {
  Isa isa = Isa::kPortable;
  int64_t num_rows = 0, num_columns = 0;
  int64_t tile_rows = 1;  // rows of a tile
  // The columns that are computed at a time: all of them, unless tile_rows is 1.
  int64_t chunk = 1;
  std::vector<Access> inputs, outputs;
  std::vector<Place> places;                      // by value
  std::vector<Instruction> prologue;              // once for each worker: scalars and columns
  std::vector<std::pair<int, double>> constants;  // value, number
  std::vector<Phase> phases;
  std::vector<Accumulator> accumulators;
  int64_t worker_size = 0, accumulators_size = 0;  // in numbers
  int64_t num_groups = 1;                          // of rows; each group has its own sums
  // The last input is a list of rows (cpu/rows.h); other rows are not computed.
  bool has_row_list = false;
  // The blocks into which the rows of a group are divided. Each has its own accumulators. The
  // number depends on the sizes alone.
  int64_t num_blocks = 1;

  bool is_double = false;
  size_t num_instructions() const;
  std::string str() const;
};

template <typename T>
std::unique_ptr<const Kernel> make_runner(Program program);

// The instruction set that a node is compiled for.
inline Isa isa_of(const BoundNode& bound) { return isa_or_best(bound.options.target); }

// See region::Codegen::compile_copy().
std::unique_ptr<const Kernel> make_copy(const Layout& from, const Layout& to, Isa isa);

// The kernels of single nodes, which codegen.cpp lists (see region::KernelRow).
std::unique_ptr<const Kernel> make_attention(const BoundNode& bound);
std::unique_ptr<const Kernel> make_attention_grad(const BoundNode& bound);
std::unique_ptr<const Kernel> make_convolution(const BoundNode& bound);
std::unique_ptr<const Kernel> make_convolution_weight_grad(const BoundNode& bound);
std::unique_ptr<const Kernel> make_depthwise_convolution(const BoundNode& bound);
std::unique_ptr<const Kernel> make_depthwise_weight_grad(const BoundNode& bound);
std::unique_ptr<const Kernel> make_embedding_grad(const BoundNode& bound);
std::unique_ptr<const Kernel> make_embedding_grads(const BoundNode& bound);
std::unique_ptr<const Kernel> make_linear_loss(const BoundNode& bound);
std::unique_ptr<const Kernel> make_lookups(const BoundNode& bound);
std::unique_ptr<const Kernel> make_rows(const BoundNode& bound);
std::unique_ptr<const Kernel> make_rows_product(const BoundNode& bound);
std::unique_ptr<const Kernel> make_take(const BoundNode& bound);
std::unique_ptr<const Kernel> make_take_grad(const BoundNode& bound);
std::unique_ptr<const Kernel> make_winograd_convolution(const BoundNode& bound);
std::unique_ptr<const Kernel> make_winograd_weight_grad(const BoundNode& bound);
std::unique_ptr<const Kernel> make_zero_rows(const BoundNode& bound);

}  // namespace torch_ort::cpu
