// CUDA's driver, NVRTC and the kernels built by it: settings for the package, the rest for tests.
#include "cuda/build.h"
#include "cuda/driver.h"
#include "cuda/nvrtc.h"
#include "cuda/pool.h"
#include "cuda/settings.h"
#include "cuda/stream.h"
#include "python/bind.h"

#include <pybind11/stl.h>

#include <array>
#include <cstdint>
#include <memory>
#include <string>
#include <utility>
#include <vector>

namespace py = pybind11;

namespace torch_ort::python {

namespace {

using Sizes = std::array<uint32_t, 3>;

cuda::Dim3 dim3_of(const Sizes& sizes) { return {sizes[0], sizes[1], sizes[2]}; }

void* address_of(uintptr_t address) { return reinterpret_cast<void*>(address); }

uintptr_t number_of(const void* address) { return reinterpret_cast<uintptr_t>(address); }

void bind_libraries(py::module_& module) {
  using namespace py::literals;
  module.def(
      "configure",
      [](std::string libcuda, std::string nvrtc, std::vector<std::string> nvrtc_folders,
         std::string cache_dir, int64_t cache_bytes, std::string dump_dir) {
        cuda::configure({std::move(libcuda), std::move(nvrtc), std::move(nvrtc_folders),
                         std::move(cache_dir), cache_bytes, std::move(dump_dir)});
      },
      "libcuda"_a = "", "nvrtc"_a = "", "nvrtc_folders"_a = std::vector<std::string>(),
      "cache_dir"_a = "", "cache_bytes"_a = 0, "dump_dir"_a = "",
      "Set the paths of the libraries (empty: they are looked for, NVRTC in these folders too), "
      "where built kernels are kept and how many bytes of them (0: none), and where texts of "
      "optimizers are written (empty: nowhere). Raises UserError if other libraries are open.");
  module.def("set_wide_products", &cuda::set_wide_products, "are_there"_a,
             "Say whether PyTorch multiplies short floats into float32 on GPUs.");
  module.def("missing", &cuda::Driver::missing, py::call_guard<py::gil_scoped_release>(),
             "Say why no kernels run on CUDA; empty if they do.");
  module.def("missing_compiler", &cuda::Nvrtc::missing, py::call_guard<py::gil_scoped_release>(),
             "Say why no kernels can be compiled; empty if they can.");
  module.def("stop_working", &cuda::stop_working, py::call_guard<py::gil_scoped_release>(),
             "End the threads that build kernels; before the process ends.");
  module.def(
      "compiler",
      [] {
        const cuda::Nvrtc& nvrtc = cuda::Nvrtc::get();
        return py::make_tuple(nvrtc.path(), nvrtc.version());
      },
      "Give path and version of NVRTC. Raises Unsupported.");
}

void bind_devices(py::module_& module) {
  using namespace py::literals;
  py::class_<cuda::DeviceInfo>(module, "DeviceInfo", "What a device says of itself.")
      .def_readonly("name", &cuda::DeviceInfo::name)
      .def_readonly("num_multiprocessors", &cuda::DeviceInfo::num_multiprocessors)
      .def_readonly("max_shared_bytes", &cuda::DeviceInfo::max_shared_bytes)
      .def_property_readonly("architecture", &cuda::DeviceInfo::architecture);
  py::class_<cuda::FunctionInfo>(module, "FunctionInfo", "What a kernel needs.")
      .def_readonly("num_registers", &cuda::FunctionInfo::num_registers)
      .def_readonly("local_bytes", &cuda::FunctionInfo::local_bytes)
      .def_readonly("shared_bytes", &cuda::FunctionInfo::shared_bytes)
      .def_readonly("max_threads", &cuda::FunctionInfo::max_threads);
  py::class_<cuda::HostWord>(module, "HostWord",
                             "A word of host memory that kernels of a device write.")
      .def(py::init<int>(), "device"_a = 0)
      .def_property_readonly("device",
                             [](const cuda::HostWord& self) { return number_of(self.device()); })
      .def("take", &cuda::HostWord::take, "Give what stands there, and set it to 0.");
  py::class_<cuda::Scratch>(module, "Scratch", "Memory of PyTorch's allocator.")
      .def(py::init<int64_t, int>(), "num_bytes"_a, "device"_a = 0)
      .def_property_readonly("data",
                             [](const cuda::Scratch& self) { return number_of(self.data()); });
  module.def(
      "device", [](int index) { return cuda::Driver::get().device(index); }, "index"_a = 0,
      "Describe a device. Raises Unsupported if there is no driver.");
  module.def(
      "current_stream", [](int device) { return number_of(cuda::current_stream(device)); },
      "device"_a = 0, "Give the CUstream of the calling thread.");
  module.def(
      "synchronize",
      [](int device, uintptr_t stream, const std::string& what) {
        cuda::Driver::get().synchronize(device, address_of(stream), what);
      },
      "device"_a = 0, "stream"_a = 0, "what"_a = "kernels",
      py::call_guard<py::gil_scoped_release>(),
      "Wait for a stream. Raises DeviceError, which names `what`, if a kernel has failed.");
}

// Each argument is the bytes of one value.
void launch(const cuda::Module& module, const std::string& kernel, const Sizes& grid,
            const Sizes& block, std::vector<std::string> arguments, uint32_t shared_bytes,
            uintptr_t stream) {
  std::vector<void*> pointers;
  pointers.reserve(arguments.size());
  for (std::string& argument : arguments) pointers.push_back(argument.data());
  cuda::Driver::get().launch(module.function(kernel),
                             {dim3_of(grid), dim3_of(block), shared_bytes, address_of(stream)},
                             pointers.data());
}

void bind_builds(py::module_& module) {
  using namespace py::literals;
  // pybind11's holders require types that are not const. Nothing that is bound here writes.
  using Image = cuda::Image;
  using Module = cuda::Module;
  py::class_<Image, std::shared_ptr<Image>>(module, "Image", "A text for one architecture.")
      .def(
          "wait",
          [](const Image& self) {
            const cuda::Compiled* compiled = nullptr;
            {
              const py::gil_scoped_release release;
              compiled = &self.wait();
            }
            return py::make_tuple(py::bytes(compiled->cubin), compiled->log);
          },
          "Wait until it is compiled, and give the cubin and what ptxas says. Raises Unsupported "
          "if it does not compile.");
  py::class_<Module, std::shared_ptr<Module>>(module, "Module",
                                              "A text for one architecture, on a device.")
      .def("is_ready", &Module::is_ready)
      .def(
          "wait", [](const Module& self) { self.wait(); }, py::call_guard<py::gil_scoped_release>(),
          "Wait until it is compiled and loaded. Raises Unsupported if it cannot be.")
      .def(
          "info",
          [](const Module& self, const std::string& kernel) {
            return cuda::Driver::get().info(self.function(kernel));
          },
          "kernel"_a, py::call_guard<py::gil_scoped_release>(),
          "Say what a kernel needs. Raises InternalError if there is none of this name.")
      .def("launch", &launch, "kernel"_a, "grid"_a, "block"_a, "arguments"_a, "shared_bytes"_a = 0,
           "stream"_a = 0, py::call_guard<py::gil_scoped_release>(),
           "Queue a kernel; arguments are the bytes of one value each.");
  module.def(
      "compile",
      [](const std::string& name, const std::string& text, const std::string& architecture,
         std::vector<std::string> flags, std::string dump_dir) {
        return std::const_pointer_cast<Image>(
            cuda::compile(name, text, {.flags = std::move(flags), .dump_dir = std::move(dump_dir)},
                          architecture));
      },
      "name"_a, "text"_a, "architecture"_a, "flags"_a = std::vector<std::string>(),
      "dump_dir"_a = "", py::call_guard<py::gil_scoped_release>(),
      "Begin to compile a text of CUDA C++ for an architecture (sm_90).");
  module.def(
      "build",
      [](const std::string& name, const std::string& text, int device,
         std::vector<std::string> flags, std::string dump_dir) {
        return std::const_pointer_cast<Module>(cuda::build(
            name, text, {.flags = std::move(flags), .dump_dir = std::move(dump_dir)}, device));
      },
      "name"_a, "text"_a, "device"_a = 0, "flags"_a = std::vector<std::string>(), "dump_dir"_a = "",
      py::call_guard<py::gil_scoped_release>(),
      "Begin to compile a text of CUDA C++ for a device, and to load it there.");
  module.def(
      "build_counts",
      [] {
        const cuda::BuildCounts counts = cuda::build_counts();
        return py::dict("compiled"_a = counts.compiled, "found_on_disk"_a = counts.found_on_disk);
      },
      "Count the texts that were compiled and those that were found in the cache.");
  module.def("disk_cache_problem", &cuda::disk_cache_problem,
             "Say why built kernels are not kept; empty if they are, or shall not be.");
  module.def("forget_builds", &cuda::forget_builds, py::call_guard<py::gil_scoped_release>(),
             "From now on all kernels are built anew.");
}

}  // namespace

void bind_cuda(py::module_& module) {
  py::module_ room = module.def_submodule("cuda", "The driver of CUDA, and kernels from text.");
  bind_libraries(room);
  bind_devices(room);
  bind_builds(room);
}

}  // namespace torch_ort::python
