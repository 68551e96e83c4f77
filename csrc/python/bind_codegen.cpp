// The code generators of fused regions, and one that tests plant.
#include "base/error.h"
#include "cpu/kernels.h"
#include "cpu/parallel.h"
#include "cpu/region.h"
#include "cuda/region.h"
#include "cuda/schema.h"
#include "cuda/text.h"
#include "python/bind.h"
#include "region/codegen.h"
#include "run/library.h"

#include <pybind11/stl.h>

#include <algorithm>
#include <functional>
#include <mutex>
#include <optional>
#include <string>
#include <thread>
#include <tuple>
#include <utility>
#include <vector>

namespace py = pybind11;

namespace torch_ort::python {

namespace {

using region::Kernel;
using region::Layout;

// A kernel that changes the first floating-point number of its first result to one between 32 and
// 128, or to a far larger one.
class WrongKernel final : public Kernel {
 public:
  WrongKernel(std::unique_ptr<const Kernel> right, const Layout& output)
      : right_(std::move(right)), num_bytes_(ir::size_bytes(output.dtype)) {
    const bool is_empty =
        std::find(output.sizes.begin(), output.sizes.end(), 0) != output.sizes.end();
    is_wrong_ = !is_empty && ir::is_float(output.dtype);
  }

  void run(const void* const* inputs, void* const* outputs) const override {
    right_->run(inputs, outputs);
    // The byte that has the sign and most of the exponent.
    if (is_wrong_) static_cast<char*>(outputs[0])[num_bytes_ - 1] = 0x42;
  }
  std::string str() const override { return right_->str(); }

 private:
  std::unique_ptr<const Kernel> right_;
  int64_t num_bytes_;
  bool is_wrong_ = false;
};

// The CPU's generator, for others to change.
class CpuCodegen : public region::Codegen {
 public:
  bool takes(const ir::Type& type) const override { return cpu::codegen().takes(type); }
  std::span<const region::KernelRow> kernels() const override { return cpu::codegen().kernels(); }
  bool has_wide_products() const override { return cpu::codegen().has_wide_products(); }
  bool has_fast_convolutions() const override { return cpu::codegen().has_fast_convolutions(); }

  std::unique_ptr<const Kernel> compile(const region::Schedule& schedule,
                                        const ir::SymbolLookup& lookup,
                                        const std::vector<Layout>& inputs,
                                        const std::vector<Layout>& outputs,
                                        const region::CodegenOptions& options) const override {
    return cpu::codegen().compile(schedule, lookup, inputs, outputs, options);
  }
  std::unique_ptr<const Kernel> compile(const region::Product& product,
                                        const region::CodegenOptions& options) const override {
    return cpu::codegen().compile(product, options);
  }
  std::unique_ptr<const Kernel> compile_copy(const Layout& from, const Layout& to,
                                             const region::CodegenOptions& options) const override {
    return cpu::codegen().compile_copy(from, to, options);
  }
  bool prefers(const region::Product& product,
               const region::CodegenOptions& options) const override {
    return cpu::codegen().prefers(product, options);
  }
  std::string target(const region::CodegenOptions& options) const override {
    return cpu::codegen().target(options);
  }
};

// Makes wrong kernels for regions that contain a node of a given name, or for all products.
class WrongCodegen final : public CpuCodegen {
 public:
  explicit WrongCodegen(std::string node) : node_(std::move(node)) {}

  std::unique_ptr<const Kernel> compile(const region::Schedule& schedule,
                                        const ir::SymbolLookup& lookup,
                                        const std::vector<Layout>& inputs,
                                        const std::vector<Layout>& outputs,
                                        const region::CodegenOptions& options) const override {
    auto kernel = CpuCodegen::compile(schedule, lookup, inputs, outputs, options);
    for (const region::Schedule::Step& step : schedule.steps) {
      if (step.node->name != node_) continue;
      return std::make_unique<WrongKernel>(std::move(kernel), outputs.at(0));
    }
    return kernel;
  }
  std::unique_ptr<const Kernel> compile(const region::Product& product,
                                        const region::CodegenOptions& options) const override {
    auto kernel = CpuCodegen::compile(product, options);
    if (kernel == nullptr || node_ != "product") return kernel;
    return std::make_unique<WrongKernel>(std::move(kernel), product.result);
  }

 private:
  std::string node_;
};

// Judges oneDNN as on a processor with few registers, or as on one of Intel's with many, whatever
// this one has.
class RegistersCodegen final : public CpuCodegen {
 public:
  explicit RegistersCodegen(bool has_many) : has_many_(has_many) {}
  bool has_fast_convolutions() const override { return has_many_; }

 private:
  bool has_many_;
};

// A planted generator is never destroyed, because its kernels live as long as any session.
void plant_codegen(const std::string& kind, const std::string& node) {
  if (kind == "own") return region::set_codegen("cpu", &cpu::codegen());
  if (kind == "none") return region::set_codegen("cpu", nullptr);
  if (kind == "wrong") return region::set_codegen("cpu", new WrongCodegen(node));
  if (kind == "few_registers") return region::set_codegen("cpu", new RegistersCodegen(false));
  if (kind == "many_registers") return region::set_codegen("cpu", new RegistersCodegen(true));
  throw UserError(concat("testing: got '", kind,
                         "', want one of own, none, wrong, few_registers, many_registers"));
}

using Part = std::tuple<int64_t, int64_t, size_t>;

// The parts of a range of work that threads take: begin, end, and a number of the thread. The part
// with the item `failing` throws. With `nested` each part is divided once more.
std::vector<Part> parallel_parts(int64_t begin, int64_t end, int64_t grain,
                                 std::optional<int64_t> failing, bool nested) {
  const py::gil_scoped_release release;
  std::mutex mutex;
  std::vector<Part> parts;
  const auto note = [&](int64_t first, int64_t last) {
    if (failing && first <= *failing && *failing < last) {
      throw UserError(concat("testing: item ", *failing));
    }
    const size_t thread = std::hash<std::thread::id>()(std::this_thread::get_id());
    const std::lock_guard lock(mutex);
    parts.emplace_back(first, last, thread);
  };
  cpu::parallel_for(begin, end, grain, [&](int64_t first, int64_t last) {
    if (nested) return cpu::parallel_for(first, last, grain, note);
    note(first, last);
  });
  std::sort(parts.begin(), parts.end());
  return parts;
}

// The geometry of a kernel for CUDA, as a dict.
py::dict cuda_geometry(int64_t rows, int64_t columns, int64_t groups, bool reduces_rows,
                       bool sums_columns, bool sums_all, int vector, int shift, int kept_bytes,
                       int bytes_of_number) {
  const cuda::Geometry shape = cuda::choose_geometry({.rows = rows,
                                                      .columns = columns,
                                                      .groups = groups,
                                                      .reduces_rows = reduces_rows,
                                                      .sums_columns = sums_columns,
                                                      .sums_all = sums_all,
                                                      .vector = vector,
                                                      .shift = shift,
                                                      .kept_bytes = kept_bytes,
                                                      .bytes_of_number = bytes_of_number});
  using namespace py::literals;
  return py::dict(
      "threads_x"_a = shape.threads_x, "threads_y"_a = shape.threads_y, "vector"_a = shape.vector,
      "vectors"_a = shape.vectors, "loops"_a = shape.loops, "strips"_a = shape.strips,
      "is_split"_a = shape.is_split, "columns_per_strip"_a = shape.columns_per_strip,
      "rows_per_block"_a = shape.rows_per_block, "blocks_per_group"_a = shape.blocks_per_group,
      "has_tail"_a = shape.has_tail, "shift"_a = shape.shift);
}

}  // namespace

void bind_codegen(py::module_& module) {
  plant_codegen("own", "");
  region::set_codegen("cuda", &cuda::codegen());
  region::set_library(&run::torch_library());
  module.attr("testing").attr("plant_codegen") = py::cpp_function(
      &plant_codegen, py::arg("kind"), py::arg("node") = "",
      "From now on the CPU has the code generator that it should have (own), none, or one whose "
      "kernels give a wrong number for regions that hold the node of this name, or for products if "
      "it is 'product' (wrong).");
  module.attr("testing").attr("plant_isa") = py::cpp_function(
      [](const std::optional<std::string>& name) {
        cpu::plant_isa(name ? std::optional<cpu::Isa>(cpu::isa_from_name(*name)) : std::nullopt);
      },
      py::arg("name"),
      py::doc("Lets kernels that are chosen from now on be those of an instruction set; None: of "
              "the widest that the processor has."));
  module.attr("testing").attr("parallel_parts") = py::cpp_function(
      &parallel_parts, py::arg("begin"), py::arg("end"), py::arg("grain"),
      py::arg("failing") = py::none(), py::arg("nested") = false,
      "(begin, end, thread) of the parts of a range that PyTorch's threads take. The part with the "
      "item `failing` raises an error. With `nested` each part is divided once more.");
  module.attr("testing").attr("cuda_geometry") = py::cpp_function(
      &cuda_geometry, py::arg("rows"), py::arg("columns"), py::arg("groups") = 1,
      py::arg("reduces_rows") = false, py::arg("sums_columns") = false, py::arg("sums_all") = false,
      py::arg("vector") = 1, py::arg("shift") = 0, py::arg("kept_bytes") = 0,
      py::arg("bytes_of_number") = 4, "Choose the shape of a kernel, as csrc/cuda/schema.h does.");
  module.attr("testing").attr("cuda_factor_and_shift") =
      py::cpp_function(&cuda::factor_and_shift, py::arg("divisor"),
                       "Give what kernels divide with: a factor, and a shift in the high word.");
}

}  // namespace torch_ort::python
