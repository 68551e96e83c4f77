// Sessions, counters and memory.
#include "base/error.h"
#include "base/failpoint.h"
#include "build_info.h"
#include "cpu/kernels.h"
#include "ir/edit.h"
#include "ir/onnx_proto.h"
#include "ops/file_check.h"
#include "ops/op.h"
#include "passes/pass.h"
#include "python/bind.h"
#include "python/torch_errors.h"
#include "run/autograd/early_gradients.h"
#include "run/counters.h"
#include "run/out_forms.h"
#include "run/session.h"

#include <ATen/ops/add.h>
#include <ATen/ops/zeros.h>
#include <ATen/record_function.h>
#include <torch/csrc/utils/pybind.h>

#include <chrono>
#include <optional>
#include <set>

namespace py = pybind11;

namespace torch_ort::python {

namespace {

using run::Session;

std::shared_ptr<Session> compile(const ir::Graph& graph,
                                 const std::unordered_map<std::string, at::Tensor>& constants,
                                 const run::SessionOptions& options) {
  auto copy = ir::clone(graph);
  py::gil_scoped_release release;
  return Session::compile(std::move(copy), constants, options);
}

using OptionalTensors = std::vector<std::optional<at::Tensor>>;

// An effect token is None when the graph runs; it becomes an undefined tensor.
Session::Tensors defined_or_empty(const OptionalTensors& tensors) {
  Session::Tensors result;
  result.reserve(tensors.size());
  for (const auto& tensor : tensors) result.push_back(tensor.value_or(at::Tensor()));
  return result;
}

Session::Tensors run_forward(int64_t session, const OptionalTensors& given,
                             const std::vector<int64_t>& symbols, bool packs, bool always_early) {
  const Session::Tensors inputs = defined_or_empty(given);
  return with_errors_of_calls([&] {
    py::gil_scoped_release release;
    RECORD_FUNCTION("torch_ort::run_forward", c10::ArrayRef<const c10::IValue>{});
    const std::shared_ptr<Session> found = run::find_session(session);
    const bool may_cut = found->is_training() && found->compiled().options.segment_bytes > 0;
    const bool early = may_cut && (always_early || run::are_waited_for(inputs));
    return found->forward(inputs, symbols, packs, early);
  });
}

// If `early`, gradients may leave with nodes behind that of the graph.
Session::Tensors run_backward(const at::Tensor& token, const Session::Tensors& saved,
                              const OptionalTensors& given, bool early) {
  const Session::Tensors tangents = defined_or_empty(given);
  return with_torch_errors([&] {
    py::gil_scoped_release release;
    RECORD_FUNCTION("torch_ort::run_backward", c10::ArrayRef<const c10::IValue>{});
    // AOTAutograd passes zeros for these.
    run::NoGradient without;
    return run::run_backward_of_node(token, saved, tangents, early ? &without : nullptr);
  });
}

// Lets gradients leave early behind an autograd node that AOTAutograd has made. `result` is a
// result of that node, or a view of one. `edges` gives for each gradient its number among the
// tensors that the node is a function of.
void let_leave_early(const at::Tensor& result, const std::vector<int>& segments,
                     const std::vector<int>& edges, size_t num_edges) {
  torch::autograd::Node* node = result.grad_fn().get();
  while (node != nullptr && node->name() != "CompiledFunctionBackward") {
    node = node->num_outputs() > 0 ? node->next_edge(0).function.get() : nullptr;
  }
  // If tensor subclasses are taken apart, the node has fewer tensors than the graph.
  if (node == nullptr || node->num_outputs() != num_edges) return;
  run::let_leave_early(*node, segments, edges);
}

// Runs a graph with inputs and outputs by name. A training graph also gets the gradients of its
// outputs, under the names of the YieldOp's results.
py::dict run_by_name(Session& session, const std::unordered_map<std::string, at::Tensor>& given) {
  const ir::Graph& graph = session.graph();
  const auto take = [&](const ir::Value* value) {
    auto found = given.find(value->name);
    if (found == given.end()) throw UserError(concat("run: input '", value->name, "' is missing"));
    return found->second;
  };
  Session::Tensors inputs, tangents;
  for (const ir::Value* value : graph.inputs) inputs.push_back(take(value));
  std::vector<int64_t> symbols;
  for (const std::string& name : graph.symbol_inputs) {
    auto found = given.find(name);
    if (found == given.end()) throw UserError(concat("run: symbol '", name, "' is missing"));
    symbols.push_back(found->second.item<int64_t>());
  }
  const ir::Node* yield = nullptr;
  for (const ir::Node& node : graph.nodes) {
    if (ir::is(&node, "YieldOp", ir::kMicrosoftDomain)) yield = &node;
  }
  if (yield != nullptr) {
    for (const ir::Value* value : yield->outputs) {
      if (value != nullptr) tangents.push_back(take(value));
    }
  }
  Session::Tensors outputs, gradients;
  {
    py::gil_scoped_release release;
    outputs = session.forward(inputs, symbols, false);
    if (yield != nullptr) {
      const size_t count = session.num_outputs();
      Session::Tensors saved;
      for (int index : session.saved_inputs()) saved.push_back(inputs[index]);
      for (int index : session.saved_outputs()) saved.push_back(outputs[index]);
      gradients = Session::backward(outputs[count], saved, tangents, false);
    }
  }
  py::dict results;
  const auto& forward_values = yield != nullptr ? yield->inputs : graph.outputs;
  for (size_t i = 0; i < forward_values.size(); ++i) {
    results[py::str(forward_values[i]->name)] = outputs[i];
  }
  for (size_t i = 0; i < gradients.size(); ++i) {
    results[py::str(graph.outputs[i]->name)] = gradients[i];
  }
  return results;
}

// Compiles a graph that may come from a file: it may lack types and have ops of other programs.
std::shared_ptr<Session> compile_foreign(std::unique_ptr<ir::Graph> graph,
                                         run::SessionOptions options) {
  options.verify = options.is_from_file = true;
  passes::prepare_file(*graph);
  return Session::compile(std::move(graph), {}, options);
}

std::shared_ptr<Session> session_from_onnx(const py::bytes& bytes,
                                           const std::vector<std::string>& allow) {
  std::unique_ptr<ir::Graph> graph = ir::from_onnx(std::string_view(bytes), "");
  ops::check_file(*graph, allow);
  return compile_foreign(std::move(graph), {});
}

// The seconds of `repeats` passes over n additions of preallocated tensors: the cost of a plain
// loop of calls in C++.
std::vector<double> bench_add_loop(int64_t n, int64_t size, int64_t repeats) {
  py::gil_scoped_release release;
  std::vector<at::Tensor> results;
  for (int64_t i = 0; i <= n; ++i) results.push_back(at::zeros({size}));
  const at::Tensor one = at::zeros({size});
  std::vector<double> seconds;
  for (int64_t repeat = 0; repeat < repeats; ++repeat) {
    const auto start = std::chrono::steady_clock::now();
    for (int64_t i = 0; i < n; ++i) at::add_out(results[i + 1], results[i], one);
    seconds.push_back(
        std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count());
  }
  return seconds;
}

// Calls a function with the name of each place in base/failpoint.h; None removes it.
void set_failpoint(const py::object& function) {
  // Never destroyed, because a place may be passed while the process ends.
  static Failpoint* installed = new Failpoint;
  failpoint.store(nullptr);
  if (function.is_none()) {
    *installed = nullptr;
    return;
  }
  *installed = [function](std::string_view place) {
    const py::gil_scoped_acquire gil;
    function(std::string(place));
  };
  failpoint.store(installed);
}

py::object plan_report(const Session& session) {
  const auto report = session.followed()->graph->plan_report();
  if (!report) return py::none();
  py::dict fields;
  fields["steps_forward"] = report->steps_forward;
  fields["steps_backward"] = report->steps_backward;
  fields["steps_out"] = report->steps_out;
  fields["steps_functional"] = report->steps_functional;
  fields["steps_view"] = report->steps_view;
  fields["in_place"] = report->in_place;
  fields["context_bytes"] = report->context_bytes;
  fields["scratch_bytes"] = report->scratch_bytes;
  fields["saved_bytes"] = report->saved_bytes;
  fields["peak_bytes"] = report->peak_bytes;
  fields["segments"] = report->segments;
  fields["plan_ms"] = report->plan_ms;
  return fields;
}

py::list plan_table(const Session& session) {
  const auto number = [](int step) { return step < 0 ? py::object(py::none()) : py::int_(step); };
  const auto text = [](const std::string& name) {
    return name.empty() ? py::object(py::none()) : py::str(name);
  };
  py::list rows;
  for (const auto& tensor : session.followed()->graph->plan_table()) {
    py::dict row;
    row["name"] = tensor.name;
    row["kind"] = tensor.kind;
    row["area"] = tensor.area;
    row["offset"] = tensor.offset;
    row["bytes"] = tensor.bytes;
    row["element_bytes"] = tensor.element_bytes;
    row["first_step"] = number(tensor.first_step);
    row["last_step"] = number(tensor.last_step);
    row["shares"] = text(tensor.shares);
    row["in_place_of"] = text(tensor.in_place_of);
    rows.append(row);
  }
  return rows;
}

// The name of the overload, and where its results may be, in the words of the list of proofs.
std::optional<std::pair<std::string, std::set<std::string>>> out_form(const std::string& op,
                                                                      const std::string& overload,
                                                                      bool on_cpu) {
  const auto functional = run::find_op(op, overload);
  const auto form = functional ? run::find_out_form(*functional, on_cpu) : std::nullopt;
  if (!form) return std::nullopt;
  std::set<std::string> words;
  if (form->any_strides) words.insert("strides");
  if (form->over_operands) words.insert("over");
  if (form->over_rows) words.insert("rows");
  if (form->with_gaps) words.insert("parts");
  return std::pair(toString(form->op.operator_name()), std::move(words));
}

}  // namespace

void bind_run(py::module_& module) {
  py::class_<Session, std::shared_ptr<Session>>(module, "Session")
      .def_static("compile", &compile, py::arg("graph"), py::arg("constants"),
                  py::arg("options") = run::SessionOptions())
      .def_static("from_onnx", &session_from_onnx, py::arg("bytes"),
                  py::arg("allow") = std::vector<std::string>())
      .def_property_readonly("id", &Session::id)
      .def_property_readonly("is_training", &Session::is_training)
      .def_property_readonly("saved_inputs", &Session::saved_inputs)
      .def_property_readonly("saved_outputs", &Session::saved_outputs)
      .def_property_readonly("num_outputs", &Session::num_outputs)
      .def("prepare_like", &Session::prepare_like, py::call_guard<py::gil_scoped_release>())
      .def("run", &run_by_name)
      .def("plan_report", &plan_report)
      .def("plan_table", &plan_table,
           "Where each tensor of the plan used last lives, and from which step to which, counted "
           "in the order of execution.")
      .def("steps",
           [](const Session& session) {
             py::list steps;
             for (const auto& step : session.whole()->graph->steps_report()) {
               steps.append(
                   py::make_tuple(step.name, step.op, step.form, step.backward, step.origin));
             }
             return steps;
           })
      .def("programs",
           [](const Session& session) { return session.followed()->graph->programs_report(); })
      .def(
          "row_lists",
          [](const Session& session) {
            std::vector<std::tuple<std::string, int64_t, int64_t>> lists;
            for (const auto& [name, count, num_rows] : session.followed()->graph->row_lists()) {
              lists.emplace_back(name, count, num_rows);
            }
            return lists;
          },
          "(name, rows in it, rows in all) of each list of rows that count, as the plan used last "
          "has made it last.");
  module.def("run_forward", &run_forward, py::arg("session"), py::arg("inputs"), py::arg("symbols"),
             py::arg("packs"), py::arg("always_early") = false);
  module.def("run_backward", &run_backward, py::arg("token"), py::arg("saved"), py::arg("tangents"),
             py::arg("early") = false);
  module.def("segments", &Session::segments, py::arg("token"),
             "By gradient: in which segment of the backward half it becomes ready. Empty: all are "
             "ready together.");
  module.def("let_leave_early", &let_leave_early, py::arg("result"), py::arg("segments"),
             py::arg("edges"), py::arg("num_edges"));
  module.def(
      "run",
      [](const ir::Graph& graph, const std::unordered_map<std::string, at::Tensor>& inputs,
         run::SessionOptions options) {
        return with_torch_errors([&] {
          options.spoil = true;
          return run_by_name(*compile_foreign(ir::clone(graph), std::move(options)), inputs);
        });
      },
      py::arg("graph"), py::arg("inputs"), py::arg("options") = run::SessionOptions(),
      "Compile a graph, run it once, and give its outputs by name.");
  module.def(
      "isa_names",
      [] {
        std::vector<std::string> names;
        for (cpu::Isa isa : cpu::available_isas()) names.emplace_back(cpu::name(isa));
        return names;
      },
      "Instruction sets that this processor runs and that regions are built for, the widest last.");
  module.def(
      "proved_out_forms", &run::proved_out_forms, py::arg("device"),
      py::arg("version") = TORCH_ORT_TORCH_VERSION,
      "The `out=` overloads that are used on a device, each with the layouts of results that "
      "are proved besides row-major memory.");
  module.attr("testing").attr("out_form") = py::cpp_function(&out_form);
  module.def("required_opset", [](const ir::Graph& graph) { return ops::required_opset(graph); });
  module.def("infer_types", [](ir::Graph& graph) { ops::infer_types(graph); });
  module.def("is_live", &run::is_live,
             "Whether the forward call of this token waits for its backward.");
  module.def("count_sharing", [] { run::counters().sessions_shared.fetch_add(1); });
  module.def("counters", [] {
    py::dict values;
    for (const auto& [name, value] : run::counters().snapshot()) values[py::str(name)] = value;
    return values;
  });
  module.def("forward_runs_of_thread", [] { return run::forward_runs_of_thread(); });
  module.def("reset_counters", [] { run::counters().reset(); });
  module.def("set_failpoint", &set_failpoint, py::arg("function"),
             "For tests: call a function with the name of each place at which the engine may fail; "
             "what it raises is raised there. None: none any more.");
  module.def("empty_cache", &run::empty_cache, py::call_guard<py::gil_scoped_release>());
  module.def("bench_add_loop", &bench_add_loop, py::arg("n"), py::arg("size"), py::arg("repeats"));
}

}  // namespace torch_ort::python
