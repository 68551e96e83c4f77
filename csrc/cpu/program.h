// What a tile program is made of; internal to cpu/.
#pragma once

#include "cpu/region.h"
#include "region/bound_schedule.h"

#include <string>
#include <vector>

namespace torch_ort::cpu {

using region::Access;
using region::access_of;
using region::lies_by_rows;
using region::Space;  // the first four, of values that instructions work on

enum class Kind : uint8_t {
  kElementwise,
  kLoad,       // d <- input
  kGather,     // d <- the rows of input `index` that input `ids` names
  kStore,      // output <- a
  kExpandRow,  // full d <- row value a, one number all along its row
  kSumRows,    // row value d <- d + sum of each row of a
  kMaxRows,
  kMinRows,
  kPick,        // row value d <- a[row, b[row]], nothing where b is `ignored`
  kScatter,     // full d <- 0, but b[row] where the column is a[row]
  kRandom,      // d <- 1 with the probability `keep`, else 0
  kAddColumns,  // accumulator <- accumulator + sum of all rows of a
  kAddAll,      // accumulator <- accumulator + sum of row value a
};

// Operands are values, by number.
struct Instruction {
  Kind kind = Kind::kElementwise;
  Space space = Space::kFull;  // of what it makes, or of the operand that it stores or adds up
  Opcode op = Opcode::kCopy;
  uint8_t scalars = 0;  // see kNumVariants
  int d = -1, a = -1, b = -1, c = -1;
  int index = -1;       // of the input, output or accumulator
  int ids = -1;         // of kGather: of another input
  bool stays = false;   // of kLoad: d keeps what it has while rows have the same columns
  int64_t ignored = 0;  // of kPick and kScatter
  bool has_ignored = false;
  int64_t stream = 0;  // of kRandom: masks of one seed differ by it
  double keep = 1;
};

// Where a value stands while a tile is worked on.
struct Place {
  enum class Kind : uint8_t {
    kNone,
    kRegister,  // at `offset` of the worker's memory
    kWide,      // the same, but a whole row long: moves on with the chunks
    kInput,     // in the input's own memory
    kOutput,    // in the output's own memory
  } kind = Kind::kNone;
  int64_t offset = 0;
  int index = -1;
};

// What lies between two reductions along rows. Row instructions run first, once a tile; the others
// for each chunk of its columns.
struct Phase {
  std::vector<Instruction> row, full;
  struct Start {
    int value;
    double number;
  };
  std::vector<Start> starts;  // row values that the reductions of this phase begin with
};

struct Accumulator {
  int output = -1;
  int64_t offset = 0, size = 1;  // in a block's accumulators
};

struct Program {
  Isa isa = Isa::kPortable;
  int64_t num_rows = 0, num_columns = 0;
  int64_t tile_rows = 1;  // rows of a tile
  int64_t chunk = 1;      // columns of a tile: all of them, or tile_rows is 1
  std::vector<Access> inputs, outputs;
  std::vector<Place> places;                      // by value
  std::vector<Instruction> prologue;              // once a worker: scalars, columns
  std::vector<std::pair<int, double>> constants;  // value, number
  std::vector<Phase> phases;
  std::vector<Accumulator> accumulators;
  int64_t worker_size = 0, accumulators_size = 0;  // in numbers
  int64_t num_groups = 1;                          // of rows, each with sums of its own
  // Behind the inputs stands a list of rows (cpu/rows.h): others are left alone.
  bool has_row_list = false;
  // Of the rows of a group, each with accumulators of its own; from the sizes alone.
  int64_t num_blocks = 1;

  bool is_double = false;
  size_t num_instructions() const;
  std::string str() const;
};

template <typename T>
std::unique_ptr<const Kernel> make_runner(Program program);

std::unique_ptr<const Kernel> make_embedding_grad(const ir::Node& node,
                                                  const std::vector<Layout>& inputs,
                                                  const std::vector<Layout>& outputs);
std::unique_ptr<const Kernel> make_take(const ir::Node& node, const std::vector<Layout>& inputs,
                                        const std::vector<Layout>& outputs);
std::unique_ptr<const Kernel> make_take_grad(const ir::Node& node,
                                             const std::vector<Layout>& inputs,
                                             const std::vector<Layout>& outputs,
                                             const CompileOptions& options);
std::unique_ptr<const Kernel> make_rows_product(const ir::Node& node,
                                                const std::vector<Layout>& inputs,
                                                const std::vector<Layout>& outputs,
                                                const CompileOptions& options);
// Attention and AttentionGrad.
std::unique_ptr<const Kernel> make_attention(const ir::Node& node,
                                             const std::vector<Layout>& inputs,
                                             const std::vector<Layout>& outputs,
                                             const CompileOptions& options);

std::unique_ptr<const Kernel> make_linear_loss(const ir::Node& node,
                                               const std::vector<Layout>& inputs,
                                               const std::vector<Layout>& outputs,
                                               const CompileOptions& options);

}  // namespace torch_ort::cpu
