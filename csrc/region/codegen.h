// The interface of code generators, one for each kind of device that has one. Passes ask a
// generator what a region may contain; run/ asks it for kernels and runs them. Neither knows a
// generator by name.
#pragma once

#include "region/schedule.h"

#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

namespace torch_ort::region {

// The dtype, sizes and strides of a tensor; strides are in elements.
struct Layout {
  ir::DType dtype = ir::DType::kUndefined;
  std::vector<int64_t> sizes, strides;
};

// The product result <- start + a * b. The last two dims are matrices: m x n, m x k and k x n. The
// dims before them are batch dims, in which a and b may be broadcast. `start` may be broadcast in
// any dim.
struct Product {
  Layout result, a, b;
  std::optional<Layout> start;
};

// A text that is equal for products for which a kernel takes the same time: "float32 2*128x64x256
// NT + N" is a batch of two products of 128 x 64 by 64 x 256, to which a tensor as large as the
// result is added. N is a factor whose rows are contiguous, T one whose columns are. Other layouts
// are given by their strides in elements from the outermost dim on, such as "(0,1)" for one row
// that is added to every row. "-> T" marks a result that is not row-major.
std::string text_of(const Product& product);

// How many rows a list of rows has, and how many it could have at most.
struct ListedRows {
  int64_t count = 0, num_rows = 0;
};

// A node compiled for one set of sizes and strides. Whoever compiles it owns it.
class Kernel {
 public:
  virtual ~Kernel() = default;
  // Runs on the addresses of the first element of each input and output, in the order of the node.
  // Throws IndexError for a class label that is not a column. Several threads may call it at once.
  virtual void run(const void* const* inputs, void* const* outputs) const = 0;
  // A listing of the kernel, one instruction a line, for dumps and tests.
  virtual std::string str() const = 0;
  // The list of rows that the last run made; nothing if the kernel makes none or has not run.
  virtual std::optional<ListedRows> listed() const { return std::nullopt; }
};

struct CodegenOptions {
  // The name of an instruction set or architecture; empty: the best one available.
  std::string target;
  // Round every bfloat16 and float16 value of a body, as operators do that run one by one.
  // Otherwise only outputs are rounded.
  bool round_short_floats = false;
  // The index among several devices of a kind; -1: the current one.
  int device = -1;
  // Wait for each kernel, so that an error names the kernel that failed.
  bool synchronize = false;
  // Where the source texts of kernels are written, if there are any; empty: nowhere.
  std::string dump_dir;
};

// A node of the domain torch_ort that is one kernel, with all that the kernel is compiled for.
// `inputs` leaves out the optional inputs that the node does not have.
struct BoundNode {
  const ir::Node& node;
  const std::vector<Layout>& inputs;
  const std::vector<Layout>& outputs;
  const CodegenOptions& options;
};

// A generator's kernel for an op. What holds for the op on all devices is in its row in ops/.
struct KernelRow {
  std::string_view op;
  // Throws InternalError on layouts that do not fit.
  std::unique_ptr<const Kernel> (*make)(const BoundNode& bound);
  // Sums of rows by their ids, which the kernel sorts first: the node has a workspace, its second
  // result, and may have short floats and int32 ids (ops/sorted_sums.h).
  bool sorts_ids = false;
  // Products by the library of the device, with kernels in between (region/library.h).
  bool uses_library = false;
};

class Codegen {
 public:
  virtual ~Codegen() = default;

  // Whether a region may read and produce values of this type. The type is known.
  virtual bool takes(const ir::Type& type) const = 0;
  // The kernels for nodes that are not part of a region.
  virtual std::span<const KernelRow> kernels() const = 0;
  // Whether the device's own library multiplies short floats into float32 (WideMatMul).
  virtual bool has_wide_products() const = 0;
  // Whether that library computes convolutions and their gradients about as fast as the engine's
  // kernels do.
  virtual bool has_fast_convolutions() const = 0;

  // Compiles a region. Throws InternalError on layouts that do not fit the schedule, and
  // Unsupported on an operand of a dtype that kernels do not read.
  virtual std::unique_ptr<const Kernel> compile(const Schedule& schedule,
                                                const ir::SymbolLookup& lookup,
                                                const std::vector<Layout>& inputs,
                                                const std::vector<Layout>& outputs,
                                                const CodegenOptions& options) const = 0;
  // Compiles a product. The kernel's inputs are a, b and the start if there is one. Returns nullptr
  // if there is no kernel for these dtypes.
  virtual std::unique_ptr<const Kernel> compile(const Product& product,
                                                const CodegenOptions& options) const = 0;
  // Compiles a copy between tensors of one dtype and of the same sizes, which must not overlap.
  // Returns nullptr if PyTorch's copy is as fast, or if there is no kernel for the dtype.
  virtual std::unique_ptr<const Kernel> compile_copy(const Layout& from, const Layout& to,
                                                     const CodegenOptions& options) const = 0;
  // Whether the kernel of a product is expected to be faster than the device's own library. The
  // answer depends on the product and the device alone.
  virtual bool prefers(const Product& product, const CodegenOptions& options) const = 0;
  // The target that kernels are compiled for: that of the options, or the default one.
  virtual std::string target(const CodegenOptions& options) const = 0;
};

// Registers the generator of a kind of device, which has to live until the process ends; nullptr
// removes it. Called when the module is loaded, and by tests while nothing is compiled.
void set_codegen(const std::string& device_kind, const Codegen* codegen);
// Returns the generator of the device, or nullptr: then nothing is fused there.
const Codegen* codegen_for(const ir::Device& device);

// Whether the value is on a device whose generator takes its type. False for nullptr and for values
// of unknown type.
bool takes(const ir::Value* value);
// The kernel of that generator for an op of the domain torch_ort; nullptr if there is none.
const KernelRow* kernel_for(const ir::Value* value, std::string_view op);
inline bool has_kernel(const ir::Value* value, std::string_view op) {
  return kernel_for(value, op) != nullptr;
}
// Whether the library of that device multiplies short floats into float32.
bool has_wide_products(const ir::Value* value);
// Whether the generator of that device has kernels for these that are faster than the library's.
bool prefers_own_convolutions(const ir::Value* value);

// Compiles a node by its op's row. Throws Unsupported if the generator has none.
std::unique_ptr<const Kernel> compile(const Codegen& codegen, const BoundNode& bound);

}  // namespace torch_ort::region
