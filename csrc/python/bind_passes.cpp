// The pipeline of rewrites, and single passes for tests.
#include "base/error.h"
#include "ir/edit.h"
#include "ops/attributes.h"
#include "ops/op.h"
#include "passes/border/budget.h"
#include "passes/border/network.h"
#include "passes/layouts.h"
#include "passes/lazy_logits.h"
#include "passes/min_cut.h"
#include "passes/pass.h"
#include "python/bind.h"

#include <pybind11/functional.h>
#include <pybind11/stl.h>

#include <algorithm>
#include <map>
#include <tuple>
#include <vector>

namespace py = pybind11;

namespace torch_ort::python {

namespace {

std::vector<bool> min_cut(int num_nodes, const std::vector<std::tuple<int, int, int64_t>>& arcs) {
  passes::MinCut cut;
  for (int node = passes::MinCut::kSink + 1; node < num_nodes; ++node) cut.add_node();
  for (const auto& [from, to, capacity] : arcs) {
    ORT_CHECK(std::min(from, to) >= 0 && std::max(from, to) < num_nodes && capacity >= 0,
              "min_cut: got an arc from ", from, " to ", to, " of ", capacity,
              ", want nodes below ", num_nodes);
    cut.add_arc(from, to, capacity);
  }
  return cut.sink_side();
}

std::vector<bool> cheapest_reruns(const std::vector<std::tuple<double, std::vector<int>>>& nodes,
                                  const std::vector<std::tuple<int, double, bool>>& values) {
  std::vector<passes::Rerun> reruns;
  std::vector<passes::Save> saves;
  for (const auto& [cost, inputs] : nodes) reruns.push_back({cost, inputs});
  for (const auto& [producer, cost, is_wanted] : values) {
    saves.push_back({producer, cost, is_wanted});
  }
  return passes::cheapest_reruns(reruns, saves);
}

// (name, rewrites, milliseconds) of each pass that ran.
using Report = std::tuple<std::string, int, double>;

// The logits that lazy_logits has left for the caller to compute.
struct LeftOut {
  std::vector<passes::LazyLogits> logits;
};

std::vector<Report> run_pipeline(ir::Graph& graph, std::vector<std::string> disabled,
                                 int64_t bisect, int check,
                                 std::optional<std::function<void(std::string)>> dump,
                                 const passes::Budget* budget, const passes::Selection* selection,
                                 passes::BudgetReport* budget_report,
                                 passes::RowSources row_sources,
                                 passes::Communication communication, LeftOut* lazy_logits) {
  passes::PipelineOptions options;
  options.disabled = std::move(disabled);
  options.check = check;
  passes::PassContext context{
      .rewrites_left = bisect,
      .budget = budget,
      .selection = selection,
      .budget_report = budget_report,
      .row_sources = row_sources,
      .communication = communication,
      .lazy_logits = lazy_logits == nullptr ? nullptr : &lazy_logits->logits,
  };
  // Python has the graph already, so the callback gets only the name of the pass.
  if (dump) {
    options.dump = [&](const char* name, const ir::Graph&) {
      py::gil_scoped_acquire acquire;
      (*dump)(name);
    };
  }
  py::gil_scoped_release release;
  std::vector<Report> reports;
  for (const passes::PassReport& report : passes::run_pipeline(graph, options, context)) {
    reports.emplace_back(report.name, report.rewrites, report.ms);
  }
  return reports;
}

passes::Speeds speeds_of(const std::map<std::string, double>& flops, double bytes) {
  return {.flops_of_float = flops.at("float32"),
          .flops_of_double = flops.at("float64"),
          .flops_of_short = flops.at("bfloat16"),
          .bytes = bytes};
}

void bind_selection(py::module_& module) {
  using passes::Selection;
  using Chosen = std::tuple<std::string, int, int64_t>;
  py::class_<Selection>(module, "Selection")
      .def(py::init([](int level, const std::vector<Chosen>& chosen, bool is_extended,
                       bool ends_at_layers, bool lists_all) {
             Selection selection{.level = static_cast<Selection::Level>(level),
                                 .is_extended = is_extended,
                                 .ends_at_layers = ends_at_layers,
                                 .lists_all = lists_all};
             for (const auto& [name, type, count] : chosen) {
               selection.chosen.push_back({name, type, count});
             }
             return selection;
           }),
           py::arg("level"), py::arg("chosen"), py::arg("is_extended"), py::arg("ends_at_layers"),
           py::arg("lists_all"),
           "What is to be made again: level 0 what is chosen by (name, type, count), 1 and 2 the "
           "layers of a transformer.")
      .def(
          "set_speeds",
          [](Selection& selection, const std::map<std::string, double>& flops, double bytes) {
            selection.speeds = speeds_of(flops, bytes);
          },
          py::arg("flops_per_second"), py::arg("bytes_per_second"));
}

void bind_budget(py::module_& module) {
  using passes::Budget, passes::BudgetReport;
  py::class_<Budget>(module, "Budget")
      .def(py::init([](double amount, bool is_fraction, std::map<std::string, double> flops,
                       double bytes) {
             Budget budget{.amount = amount, .is_fraction = is_fraction};
             budget.speeds = speeds_of(flops, bytes);
             return budget;
           }),
           py::arg("amount"), py::arg("is_fraction"), py::arg("flops_per_second"),
           py::arg("bytes_per_second"),
           "What a step may hold of forward's results: bytes, or a fraction of what it holds "
           "without recomputation; and what the machine does a second, flops by dtype: float32, "
           "float64, bfloat16.")
      .def_readwrite("list_bytes", &Budget::list_bytes);
  py::class_<BudgetReport>(module, "BudgetReport")
      .def(py::init<>())
      .def_readonly("dense_bytes", &BudgetReport::dense_bytes)
      .def_readonly("allowed_bytes", &BudgetReport::allowed_bytes)
      .def_readonly("peak_bytes", &BudgetReport::peak_bytes)
      .def_readonly("held_bytes", &BudgetReport::held_bytes)
      .def_readonly("again_us", &BudgetReport::again_us)
      .def_readonly("plan_ms", &BudgetReport::plan_ms)
      .def_readonly("list_bytes", &BudgetReport::list_bytes)
      .def_readonly("dense_held_bytes", &BudgetReport::dense_held_bytes)
      .def_readonly("num_layers", &BudgetReport::num_layers)
      .def_property_readonly(
          "clusters",
          [](const BudgetReport& report) {
            py::list rows;
            for (const passes::ClusterReport& each : report.clusters) {
              py::dict row;
              row["name"] = each.name;
              row["type"] = each.type;
              row["count"] = each.count;
              row["frequency"] = each.frequency;
              row["saved_bytes"] = each.saved_bytes;
              row["saved_expression"] = each.saved_expression;
              row["is_on"] = each.is_on;
              rows.append(row);
            }
            return rows;
          },
          "Of a Selection, what could be made again by name, most bytes first.")
      .def_property_readonly(
          "made",
          [](const BudgetReport& report) {
            std::vector<std::tuple<std::string, std::string, std::string, int64_t, double>> rows;
            for (const auto& each : report.made) {
              rows.emplace_back(each.name, each.op, each.origin, each.bytes, each.us);
            }
            return rows;
          },
          "(name, op, origin, bytes that cross no more, microseconds) of what is made again.");
}

void bind_lazy_logits(py::module_& module) {
  using passes::LazyLogits;
  py::class_<LazyLogits>(module, "LazyLogits",
                         "How logits that a graph has left out are made (passes/lazy_logits.h).")
      .def_readonly("output", &LazyLogits::output)
      .def_readonly("weight", &LazyLogits::weight)
      .def_readonly("bias", &LazyLogits::bias)
      .def_readonly("is_turned", &LazyLogits::is_turned)
      .def_readonly("classes", &LazyLogits::classes)
      .def_readonly("soft_cap", &LazyLogits::soft_cap)
      .def_property_readonly("dtypes", [](const LazyLogits& lazy) {
        std::vector<std::string> names;
        for (ir::DType dtype : lazy.dtypes) names.emplace_back(ir::name(dtype));
        return names;
      });
  py::class_<LeftOut>(module, "LeftOut", "What the pass lazy_logits has left to the caller.")
      .def(py::init<>())
      .def_readonly("logits", &LeftOut::logits);
}

// (name, kind, whether it is required) of each attribute; None if the op may have any.
py::object attributes_of(const ops::Op& op) {
  if (op.any_attributes) return py::none();
  py::list found;
  for (const ops::AttrRule& rule : op.attributes) {
    found.append(py::make_tuple(rule.name, ops::text_of(rule.kind), rule.is_required));
  }
  return found;
}

py::list op_facts() {
  py::list facts;
  for (const ops::Op* op : ops::registry().all()) {
    py::dict fact;
    fact["domain"] = op->domain;
    fact["name"] = op->name;
    fact["since"] = op->since;
    fact["bfloat16_since"] = op->bfloat16_since;
    fact["min_inputs"] = op->min_inputs;
    fact["max_inputs"] = op->max_inputs;
    fact["pure"] = op->pure;
    fact["attributes"] = attributes_of(*op);
    facts.append(fact);
  }
  return facts;
}

}  // namespace

void bind_passes(py::module_& module) {
  py::class_<passes::Pass>(module, "Pass", "What is known of a pass (csrc/passes/pass.h).")
      .def_readonly("name", &passes::Pass::name)
      .def_readonly("is_needed", &passes::Pass::is_needed)
      .def_readonly("is_on_request", &passes::Pass::is_on_request)
      .def_readonly("is_for_gpus", &passes::Pass::is_for_gpus)
      .def_readonly("tells_strides", &passes::Pass::tells_strides)
      .def_readonly("writes_engine_ops", &passes::Pass::writes_engine_ops)
      .def_readonly("moves_border", &passes::Pass::moves_border)
      .def_readonly("for_regions", &passes::Pass::for_regions)
      .def_readonly("rounds_elsewhere", &passes::Pass::rounds_elsewhere)
      .def_readonly("adds_to_budget", &passes::Pass::adds_to_budget)
      .def_readonly("decides_by_rank", &passes::Pass::decides_by_rank)
      .def_readonly("own_kernels", &passes::Pass::own_kernels)
      .def_readonly("needs_products", &passes::Pass::needs_products)
      .def_readonly("needs_region_kernels", &passes::Pass::needs_region_kernels)
      .def_readonly("only_with", &passes::Pass::only_with)
      .def_readonly("not_with", &passes::Pass::not_with)
      .def_readonly("only_under", &passes::Pass::only_under);
  module.def("passes", &passes::pipeline, "The passes in their order.");
  module.def("run_pass", &passes::run_pass, py::arg("name"), py::arg("graph"),
             "Run one pass on a graph; give the number of rewrites.");
  py::class_<passes::RowSources>(module, "RowSources",
                                 "Which inputs may tell what rows nobody reads: labels that a loss "
                                 "ignores, keys that masks hide.")
      .def(py::init([](bool labels, bool padding) {
             return passes::RowSources{.labels = labels, .padding = padding};
           }),
           py::arg("labels") = true, py::arg("padding") = true);
  py::class_<passes::Communication>(module, "Communication",
                                    "How ranks communicate: what a collective takes that moves "
                                    "nothing, in microseconds, and the bytes that it moves in a "
                                    "second. 0: what is assumed of the device.")
      .def(py::init([](double collective_us, double collective_bytes) {
             return passes::Communication{.collective_us = collective_us,
                                          .collective_bytes = collective_bytes};
           }),
           py::arg("collective_us") = 0, py::arg("collective_bytes") = 0);
  bind_selection(module);
  bind_budget(module);
  bind_lazy_logits(module);
  module.def("run_pipeline", &run_pipeline, py::arg("graph"),
             py::arg("disabled") = std::vector<std::string>(), py::arg("bisect") = -1,
             py::arg("check") = 0, py::arg("dump") = py::none(), py::arg("budget") = py::none(),
             py::arg("selection") = py::none(), py::arg("budget_report") = py::none(),
             py::arg("row_sources") = passes::RowSources(),
             py::arg("communication") = passes::Communication(),
             py::arg("lazy_logits") = py::none());
  module.def("pass_names", [] {
    std::vector<std::string> names;
    for (const passes::Pass& pass : passes::pipeline()) names.emplace_back(pass.name);
    return names;
  });
  py::module_ testing = module.attr("testing");
  testing.def("op_facts", &op_facts);
  testing.def("min_cut", &min_cut, py::arg("num_nodes"), py::arg("arcs"),
              "By node of a network whether it stands with the sink, node 1, and not with the "
              "source, node 0. An arc is (from, to, capacity).");
  testing.def("cheapest_reruns", &cheapest_reruns, py::arg("nodes"), py::arg("values"),
              "By node whether it runs again. A node is (microseconds, values that it reads), a "
              "value (node, microseconds to save it, whether it is wanted).");
  testing.def("operator_names", [] { return ops::registry().operator_names(); });
  testing.def("takes_any_layout", [](ir::Graph& graph, const std::string& value) {
    return passes::takes_any_layout(*ir::find_value(graph, value));
  });
  py::class_<passes::CountedStrides>(testing, "CountedStrides")
      .def(py::init<const ir::Graph&>())
      .def("verify", &passes::CountedStrides::verify, py::arg("graph"), py::arg("pass_name"));
}

}  // namespace torch_ort::python
