// Optimizer steps.
#include "optim/on_cuda.h"
#include "optim/optimizer.h"
#include "python/bind.h"

#include <torch/csrc/utils/pybind.h>

namespace py = pybind11;

namespace torch_ort::python {

namespace {

// Binds a rule whose fields are given as keywords.
template <typename Rule>
class RuleClass {
 public:
  RuleClass(py::module_& module, const char* name, const char* doc) : class_(module, name, doc) {
    class_.def(py::init([](const py::kwargs& fields) {
      py::object rule = py::cast(Rule{});
      for (const auto& [field, value] : fields) py::setattr(rule, field, value);
      return py::cast<Rule>(rule);
    }));
  }
  RuleClass& field(const char* name, double Rule::* member) {
    class_.def_readwrite(name, member);
    return *this;
  }

 private:
  py::class_<Rule> class_;
};

void bind_rules(py::module_& module) {
  RuleClass<cpu::AdamRule>(module, "AdamRule", "What a step of Adam does; see cpu/kernels.h.")
      .field("step_size", &cpu::AdamRule::step_size)
      .field("inverse_correction", &cpu::AdamRule::inverse_correction)
      .field("beta1", &cpu::AdamRule::beta1)
      .field("beta2", &cpu::AdamRule::beta2)
      .field("eps", &cpu::AdamRule::eps)
      .field("weight_decay", &cpu::AdamRule::weight_decay)
      .field("keep", &cpu::AdamRule::keep)
      .field("gradient_factor", &cpu::AdamRule::gradient_factor);
  RuleClass<cpu::LambRule>(module, "LambRule", "What a step of LAMB does; see cpu/kernels.h.")
      .field("lr", &cpu::LambRule::lr)
      .field("mean_correction", &cpu::LambRule::mean_correction)
      .field("inverse_correction", &cpu::LambRule::inverse_correction)
      .field("beta1", &cpu::LambRule::beta1)
      .field("beta2", &cpu::LambRule::beta2)
      .field("eps", &cpu::LambRule::eps)
      .field("weight_decay", &cpu::LambRule::weight_decay)
      .field("ratio_min", &cpu::LambRule::ratio_min)
      .field("ratio_max", &cpu::LambRule::ratio_max)
      .field("gradient_factor", &cpu::LambRule::gradient_factor);
}

template <typename Rule>
using UpdateByRules = std::vector<int64_t> (*)(const optim::RuledTensors&, const std::vector<Rule>&,
                                               cpu::Isa);

template <typename Rule>
void bind_update(py::module_& module, const char* name, UpdateByRules<Rule> update) {
  using namespace py::literals;
  module.def(
      name,
      [update](const optim::Tensors& parameters, const optim::Tensors& gradients,
               const optim::Tensors& means, const optim::Tensors& squares,
               const std::vector<int64_t>& rule_of, const std::vector<Rule>& rules,
               const std::string& isa) {
        const cpu::Isa chosen = cpu::isa_or_best(isa);
        py::gil_scoped_release release;
        return update({parameters, gradients, means, squares, rule_of}, rules, chosen);
      },
      "parameters"_a, "gradients"_a, "means"_a, "squares"_a, "rule_of"_a, "rules"_a, py::kw_only(),
      "isa"_a, "Indices of the parameters that no kernel takes.");
}

// Binds settings whose fields are set one by one, or given as keywords.
void bind_cuda_settings(py::module_& module) {
  using Settings = optim::CudaSettings;
  using Numbers = cuda::StepSettings;
  using Decay = Numbers::Decay;
  py::enum_<Decay>(module, "StepDecay", "Where the weight decay of Adam acts.")
      .value("GRADIENT", Decay::kGradient)
      .value("BEFORE", Decay::kBefore)
      .value("AFTER", Decay::kAfter);
  py::class_<Settings> settings(
      module, "StepSettings",
      "What a group of parameters follows on a GPU; see csrc/cuda/optimizer.h. The learning rate "
      "and the steps taken are numbers, or tensors (`lr_tensor`, `taken_tensor`).");
  settings.def(py::init([](const py::kwargs& fields) {
    py::object made = py::cast(Settings{});
    for (const auto& [field, value] : fields) py::setattr(made, field, value);
    return py::cast<Settings>(made);
  }));
  const auto number = [&](const char* name, auto Numbers::* member) {
    using Value = std::decay_t<decltype(Numbers{}.*member)>;
    settings.def_property(
        name, [member](const Settings& self) { return self.numbers.*member; },
        [member](Settings& self, Value value) { self.numbers.*member = value; });
  };
  number("lr", &Numbers::lr);
  number("beta1", &Numbers::beta1);
  number("beta2", &Numbers::beta2);
  number("eps", &Numbers::eps);
  number("weight_decay", &Numbers::weight_decay);
  number("momentum", &Numbers::momentum);
  number("dampening", &Numbers::dampening);
  number("ratio_min", &Numbers::ratio_min);
  number("ratio_max", &Numbers::ratio_max);
  number("taken", &Numbers::taken);
  number("corrects", &Numbers::corrects);
  number("plain_root", &Numbers::plain_root);
  number("maximize", &Numbers::maximize);
  number("nesterov", &Numbers::nesterov);
  number("decay", &Numbers::decay);
  settings.def_readwrite("lr_tensor", &Settings::lr)
      .def_readwrite("taken_tensor", &Settings::taken);
}

void bind_on_cuda(py::module_& module) {
  using namespace py::literals;
  bind_cuda_settings(module);
  module.def(
      "step_on_cuda",
      [](const std::string& rule, const optim::Tensors& parameters, const optim::Tensors& gradients,
         const std::vector<optim::Tensors>& states, const std::vector<int64_t>& settings_of,
         const std::vector<optim::CudaSettings>& settings, const optim::Tensors& steps,
         const std::vector<uint8_t>& is_first, double scale,
         const std::optional<at::Tensor>& scale_tensor, const std::optional<at::Tensor>& found_inf,
         bool looks, std::optional<double> max_norm) {
        optim::CudaOutcome outcome;
        {
          const py::gil_scoped_release release;
          outcome = optim::step_on_cuda(
              cuda::optimizer_rule_from_name(rule),
              {parameters, gradients, states, settings_of, steps, is_first}, settings,
              {.scale = scale,
               .scale_at = scale_tensor.value_or(at::Tensor()),
               .found_inf = found_inf.value_or(at::Tensor()),
               .looks = looks,
               .max_norm = max_norm});
        }
        return py::make_tuple(outcome.left, outcome.norm, outcome.skipped);
      },
      "rule"_a, "parameters"_a, "gradients"_a, "states"_a, "settings_of"_a, "settings"_a,
      py::kw_only(), "steps"_a = optim::Tensors(), "is_first"_a = std::vector<uint8_t>(),
      "scale"_a = 1.0, "scale_tensor"_a = py::none(), "found_inf"_a = py::none(), "looks"_a = false,
      "max_norm"_a = py::none(),
      "Indices of the parameters that no kernel takes, and, where they are looked at, the norm of "
      "the gradients and whether nothing was updated, as tensors on the device.");
  module.def(
      "left_by_cuda",
      [](const optim::Tensors& parameters, const optim::Tensors& gradients,
         const std::vector<optim::Tensors>& states) {
        return optim::left_by_cuda({parameters, gradients, states, {}, {}, {}});
      },
      "parameters"_a, "gradients"_a, "states"_a,
      "Indices of the parameters that no kernel of CUDA takes.");
  module.def(
      "optimizer_texts",
      [](const std::string& rule, const std::vector<std::string>& dtypes) {
        std::vector<ir::DType> found;
        for (const std::string& each : dtypes) found.push_back(ir::dtype_from_name(each));
        return cuda::optimizer_texts(cuda::optimizer_rule_from_name(rule), found);
      },
      "rule"_a, "dtypes"_a,
      "The texts of a step's kernels by name, for arrays of these dtypes; for tests.");
}

}  // namespace

void bind_optim(py::module_& module) {
  using namespace py::literals;
  bind_rules(module);
  bind_on_cuda(module);
  bind_update<cpu::AdamRule>(module, "adam_update", &optim::adam_update);
  bind_update<cpu::LambRule>(module, "lamb_update", &optim::lamb_update);
  module.def(
      "sum_squares",
      [](const optim::Tensors& tensors, const std::string& isa) {
        const cpu::Isa chosen = cpu::isa_or_best(isa);
        py::gil_scoped_release release;
        optim::SumOfSquares result = optim::sum_squares(tensors, chosen);
        return std::make_pair(result.sum, std::move(result.left));
      },
      "tensors"_a, py::kw_only(), "isa"_a,
      "The sum of the squares of all numbers, and indices of the tensors that no kernel takes.");
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
