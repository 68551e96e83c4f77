// Products by the kernels of the CPU, for tests and benchmarks.
#include "cpu/caches.h"
#include "cpu/product.h"
#include "python/bind.h"
#include "run/dtype.h"

#include <torch/csrc/utils/pybind.h>

#include <optional>
#include <string>
#include <utility>

namespace py = pybind11;

namespace torch_ort::python {

namespace {

region::Layout layout_of(const at::Tensor& tensor) {
  return {run::dtype(tensor.scalar_type()), tensor.sizes().vec(), tensor.strides().vec()};
}

// A product that is bound to given tensors.
class BoundProduct {
 public:
  BoundProduct(const at::Tensor& result, const at::Tensor& a, const at::Tensor& b,
               const std::optional<at::Tensor>& start, const std::string& isa,
               const std::optional<at::Tensor>& rows, bool sums)
      : tensors_{result, a, b} {
    region::Product product{layout_of(result), layout_of(a), layout_of(b), std::nullopt};
    if (start) {
      product.start = layout_of(*start);
      tensors_.push_back(*start);
    }
    const cpu::Isa chosen = cpu::isa_or_best(isa);
    is_preferred_ = cpu::is_preferred(product, chosen);
    if (!rows) {
      kernel_ = cpu::make_product(product, chosen);
      return;
    }
    kernel_ = cpu::make_rows_product(product, layout_of(*rows), sums, chosen);
    tensors_.push_back(*rows);
  }

  void run() const {
    std::vector<const void*> inputs;
    for (size_t i = 1; i < tensors_.size(); ++i) inputs.push_back(tensors_[i].const_data_ptr());
    void* const output = tensors_[0].mutable_data_ptr();
    kernel_->run(inputs.data(), &output);
  }
  bool is_preferred() const { return is_preferred_; }
  std::string str() const { return kernel_->str(); }

 private:
  std::vector<at::Tensor> tensors_;  // the result is first
  bool is_preferred_ = false;
  std::unique_ptr<const region::Kernel> kernel_;
};

}  // namespace

void bind_product(py::module_& module) {
  using namespace py::literals;
  py::class_<BoundProduct>(module, "Product",
                           "result <- start + a @ b, by the engine's own kernel, of tensors of one "
                           "floating-point dtype on the CPU. All dims but the last two are a "
                           "batch's, and a and b broadcast there; so does the start, everywhere. "
                           "`rows`: an int64 of one more than there are rows, how many are listed "
                           "and their numbers, which increase: only these rows of a and of the "
                           "result take part, or with `sums` columns of a and rows of b. "
                           "InternalError where sizes do not fit; IndexError of run() on a list "
                           "that does not increase.")
      .def(py::init<const at::Tensor&, const at::Tensor&, const at::Tensor&,
                    const std::optional<at::Tensor>&, const std::string&,
                    const std::optional<at::Tensor>&, bool>(),
           "result"_a, "a"_a, "b"_a, "start"_a = py::none(), "isa"_a = "", "rows"_a = py::none(),
           "sums"_a = false)
      .def("run", &BoundProduct::run, py::call_guard<py::gil_scoped_release>())
      .def_property_readonly("is_preferred", &BoundProduct::is_preferred,
                             "Whether the engine runs such a product itself.")
      .def("__str__", &BoundProduct::str);
  module.attr("testing").attr("plant_caches") = py::cpp_function(
      [](std::optional<std::pair<int64_t, int64_t>> bytes) {
        cpu::plant_caches(bytes ? std::optional<cpu::Caches>({bytes->first, bytes->second})
                                : std::nullopt);
      },
      "bytes"_a,
      py::doc("Lets products that are made from now on believe in caches of the first "
              "and second level of so many bytes; None: in the processor's own."));
}

}  // namespace torch_ort::python
