// Who makes code of regions: one generator for each kind of device that has one. Passes ask it what
// may stand in a region; run/ has it make kernels and runs these, and knows no generator by name.
#pragma once

#include "region/schedule.h"

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

namespace torch_ort::region {

// A tensor as it lies in memory. Strides in elements.
struct Layout {
  ir::DType dtype = ir::DType::kUndefined;
  std::vector<int64_t> sizes, strides;
};

// result <- start + a * b: matrices in the last two dims, m x n, m x k and k x n; the dims before
// these are a batch's. There a and b may have one element where the result has more; so may the
// start in any dim.
struct Product {
  Layout result, a, b;
  std::optional<Layout> start;
};

// How it is multiplied, in words: equal for products that a kernel takes the same time for.
// "float32 2*128x64x256 NT + N": two of 128 x 64 by 64 x 256, what is added as large as the result.
// N says that rows lie one behind the other, T that columns do; else strides in elements stand
// there, from the outermost dim on, as "(0,1)" of a row that is added to each. "-> T" is of a
// result that does not lie by rows.
std::string text_of(const Product& product);

// How many rows a list has, and of how many.
struct ListedRows {
  int64_t count = 0, num_rows = 0;
};

// A node over one set of sizes, ready to run.
class Kernel {
 public:
  virtual ~Kernel() = default;
  // Addresses of the first element of each input and output, in the order of the node. Raises
  // IndexError for a class label that is no column. Thread safe.
  virtual void run(const void* const* inputs, void* const* outputs) const = 0;
  // What it does, one instruction a line, for dumps and tests.
  virtual std::string str() const = 0;
  // The list of rows that it made last; nothing if it makes none, or has not run.
  virtual std::optional<ListedRows> listed() const { return std::nullopt; }
};

struct CodegenOptions {
  std::string target;  // an instruction set or architecture by name; empty: the best there is
  // Rounds each bfloat16 and float16 value of a body, as operators do that run one by one. Else
  // only what leaves is rounded.
  bool round_short_floats = false;
  int device = -1;           // by number, where there are several of a kind; -1: the current one
  bool synchronize = false;  // wait for each kernel, so that an error tells which it was
  std::string dump_dir;      // where texts of kernels are written, if they have any; empty: nowhere
};

class Codegen {
 public:
  virtual ~Codegen() = default;

  // Whether a region may read or make values of this type, which is known.
  virtual bool takes(const ir::Type& type) const = 0;
  // Whether an op of the domain torch_ort, such as "Attention", is a kernel as it is. "Attention"
  // stands for its gradient too, "Take" for that of it, and "Rows" for all that works on lists.
  // "WideMatMul" is a kernel of the device's library.
  virtual bool has_kernel(std::string_view op) const = 0;

  // InternalError on layouts that do not fit the schedule, Unsupported on an operand of a dtype
  // that kernels do not read.
  virtual std::unique_ptr<const Kernel> compile(const Schedule& schedule,
                                                const ir::SymbolLookup& lookup,
                                                const std::vector<Layout>& inputs,
                                                const std::vector<Layout>& outputs,
                                                const CodegenOptions& options) const = 0;
  // An op that is a kernel as it is: Casts, EmbeddingGrad, Take, TakeGrad, Attention,
  // AttentionGrad, LinearCrossEntropy, Rows, RowsProduct, ZeroRows. Inputs are those that there
  // are. InternalError on layouts that do not fit.
  virtual std::unique_ptr<const Kernel> compile(const ir::Node& node,
                                                const std::vector<Layout>& inputs,
                                                const std::vector<Layout>& outputs,
                                                const CodegenOptions& options) const = 0;
  // Inputs are a, b and the start if there is one. nullptr: there is no kernel for these dtypes.
  virtual std::unique_ptr<const Kernel> compile(const Product& product,
                                                const CodegenOptions& options) const = 0;
  // Whether that kernel is taken to be faster than the device's own library: a function of the
  // product and of the device.
  virtual bool prefers(const Product& product, const CodegenOptions& options) const = 0;
  // What kernels are compiled for: the target of the options, or the one that stands for none.
  virtual std::string target(const CodegenOptions& options) const = 0;
};

// Called when the module is loaded, and by tests while nothing is compiled. The generator stays for
// good; nullptr: there is none any more.
void set_codegen(const std::string& device_kind, const Codegen* codegen);
// nullptr: this kind of device has none, and nothing is fused there.
const Codegen* codegen_for(const ir::Device& device);

// Whether the value stands on a device with a generator that takes it; false if its type is not
// known, or if there is no value.
bool takes(const ir::Value* value);
// The same, where an op has a kernel too.
bool has_kernel(const ir::Value* value, std::string_view op);

}  // namespace torch_ort::region
