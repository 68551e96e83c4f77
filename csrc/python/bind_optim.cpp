// Optimizer steps.
#include "optim/optimizer.h"
#include "python/bind.h"

#include <torch/csrc/utils/pybind.h>

namespace py = pybind11;

namespace torch_ort::python {

void bind_optim(py::module_& module) {
  using namespace py::literals;
  module.def(
      "sgd_step",
      [](const optim::Tensors& parameters, const optim::Tensors& gradients,
         const optim::Tensors& buffers, const std::vector<uint8_t>& is_first, double lr,
         double momentum, double dampening, double weight_decay, bool nesterov, bool maximize,
         const std::string& isa) {
        const cpu::SgdRule rule{.lr = lr,
                                .momentum = momentum,
                                .dampening = dampening,
                                .weight_decay = weight_decay,
                                .nesterov = nesterov,
                                .maximize = maximize};
        const cpu::Isa chosen = cpu::isa_or_best(isa);
        py::gil_scoped_release release;
        return optim::sgd_step(parameters, gradients, buffers, is_first, rule, chosen);
      },
      "parameters"_a, "gradients"_a, "buffers"_a, "is_first"_a, py::kw_only(), "lr"_a, "momentum"_a,
      "dampening"_a, "weight_decay"_a, "nesterov"_a, "maximize"_a, "isa"_a,
      "Indices of the parameters that no program takes.");
  module.def(
      "adam_step",
      [](const optim::Tensors& parameters, const optim::Tensors& gradients,
         const optim::Tensors& means, const optim::Tensors& squares, const optim::Tensors& largest,
         const optim::Tensors& steps, double lr, double beta1, double beta2, double eps,
         double weight_decay, bool amsgrad, bool maximize, bool decoupled_weight_decay,
         const std::string& isa) {
        const optim::AdamOptions options{.lr = lr,
                                         .beta1 = beta1,
                                         .beta2 = beta2,
                                         .eps = eps,
                                         .weight_decay = weight_decay,
                                         .amsgrad = amsgrad,
                                         .maximize = maximize,
                                         .decoupled_weight_decay = decoupled_weight_decay};
        const optim::AdamTensors tensors{parameters, gradients, means, squares, largest, steps};
        const cpu::Isa chosen = cpu::isa_or_best(isa);
        py::gil_scoped_release release;
        return optim::adam_step(tensors, options, chosen);
      },
      "parameters"_a, "gradients"_a, "means"_a, "squares"_a, "largest"_a, "steps"_a, py::kw_only(),
      "lr"_a, "beta1"_a, "beta2"_a, "eps"_a, "weight_decay"_a, "amsgrad"_a, "maximize"_a,
      "decoupled_weight_decay"_a, "isa"_a, "Indices of the parameters that no program takes.");
}

}  // namespace torch_ort::python
