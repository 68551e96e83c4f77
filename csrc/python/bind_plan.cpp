// Memory plans. Programs and plans pass as plain dicts and lists, so that tests can make them up.
#include "base/error.h"
#include "plan/plan.h"
#include "python/bind.h"

#include <pybind11/stl.h>

#include <algorithm>
#include <string>
#include <vector>

namespace py = pybind11;

namespace torch_ort::python {
namespace {

const std::vector<std::string> kKinds = {"input", "constant", "planned", "output", "adopted"};
const std::vector<std::string> kAreas = {"none", "context", "scratch"};

int index_in(const std::vector<std::string>& names, const std::string& name, const char* what) {
  auto found = std::find(names.begin(), names.end(), name);
  if (found != names.end()) return static_cast<int>(found - names.begin());
  std::string known;
  for (const std::string& each : names) known += (known.empty() ? "" : ", ") + each;
  throw UserError(concat("plan: ", what, ": got '", name, "', want one of ", known));
}

template <typename T>
T get(const py::dict& fields, const char* name, T otherwise) {
  return fields.contains(name) ? fields[name].cast<T>() : otherwise;
}

// Without this check a misspelled key would be ignored.
void check_keys(const py::dict& fields, const std::vector<std::string>& known, const char* what) {
  for (auto item : fields) index_in(known, item.first.cast<std::string>(), what);
}

plan::Tensor to_tensor(const py::dict& fields) {
  check_keys(fields, {"kind", "bytes", "root", "delivered"}, "field of a tensor");
  std::string kind = get<std::string>(fields, "kind", "planned");
  return {
      .kind = static_cast<plan::Kind>(index_in(kKinds, kind, "kind of a tensor")),
      .bytes = get<int64_t>(fields, "bytes", 0),
      .root = get<int>(fields, "root", -1),
      .delivered = get<bool>(fields, "delivered", false),
  };
}

plan::Step to_step(const py::dict& fields) {
  check_keys(fields, {"reads", "writes", "in_place", "effect", "workspace", "workspace_bytes"},
             "field of a step");
  return {
      .reads = get<std::vector<int>>(fields, "reads", {}),
      .writes = get<std::vector<int>>(fields, "writes", {}),
      .in_place = get<std::vector<int>>(fields, "in_place", {}),
      .effect = get<bool>(fields, "effect", false),
      .workspace = get<bool>(fields, "workspace", false),
      .workspace_bytes = get<int64_t>(fields, "workspace_bytes", -1),
  };
}

// If `num_forward` is not given, all steps are in the forward half.
plan::Program to_program(const py::dict& fields) {
  check_keys(fields,
             {"tensors", "steps", "num_forward", "outputs", "gradients", "gradients_leave_early"},
             "field of a program");
  plan::Program program;
  for (auto tensor : fields["tensors"]) {
    program.tensors.push_back(to_tensor(tensor.cast<py::dict>()));
  }
  for (auto step : fields["steps"]) program.steps.push_back(to_step(step.cast<py::dict>()));
  program.num_forward = get<int>(fields, "num_forward", static_cast<int>(program.steps.size()));
  program.outputs = get<std::vector<int>>(fields, "outputs", {});
  program.gradients = get<std::vector<int>>(fields, "gradients", {});
  program.gradients_leave_early = get<bool>(fields, "gradients_leave_early", false);
  return program;
}

plan::PlanOptions to_options(const py::dict& fields) {
  check_keys(fields,
             {"reorder", "in_place", "alignment", "discard_bytes", "discard_gain",
              "workspace_bytes", "chunk_bytes"},
             "option");
  plan::PlanOptions options;
  options.reorder = get(fields, "reorder", options.reorder);
  options.in_place = get(fields, "in_place", options.in_place);
  options.alignment = get(fields, "alignment", options.alignment);
  options.discard_bytes = get(fields, "discard_bytes", options.discard_bytes);
  options.discard_gain = get(fields, "discard_gain", options.discard_gain);
  options.workspace_bytes = get(fields, "workspace_bytes", options.workspace_bytes);
  options.chunk_bytes = get(fields, "chunk_bytes", options.chunk_bytes);
  return options;
}

py::dict from_plan(const plan::Plan& plan) {
  py::list placements;
  for (const plan::Placement& placement : plan.placements) {
    py::dict fields;
    fields["area"] = kAreas[static_cast<size_t>(placement.area)];
    fields["offset"] = placement.offset;
    fields["in_place_of"] = placement.in_place_of;
    placements.append(fields);
  }
  py::list discards;
  for (const plan::Discard& discard : plan.discards) {
    discards.append(py::make_tuple(discard.position, discard.offset, discard.bytes));
  }
  py::list workspaces;
  for (const plan::Workspace& space : plan.workspaces) {
    workspaces.append(py::make_tuple(space.position, kAreas[static_cast<size_t>(space.area)],
                                     space.offset, space.bytes));
  }
  py::list chunks;
  for (const plan::Chunk& chunk : plan.chunks) {
    chunks.append(py::make_tuple(chunk.offset, chunk.bytes, chunk.position));
  }
  py::dict fields;
  fields["chunks"] = chunks;
  fields["discards"] = discards;
  fields["workspaces"] = workspaces;
  fields["order"] = plan.order;
  fields["placements"] = placements;
  fields["release"] = plan.release;
  fields["crossing"] = plan.crossing;
  fields["context_bytes"] = plan.context_bytes;
  fields["crossing_bytes"] = plan.crossing_bytes;
  fields["forward_scratch_bytes"] = plan.forward_scratch_bytes;
  fields["backward_scratch_bytes"] = plan.backward_scratch_bytes;
  fields["saved_bytes"] = plan.saved_bytes;
  fields["peak_bytes"] = plan.peak_bytes;
  return fields;
}

plan::Plan to_plan(const py::dict& fields) {
  plan::Plan plan;
  for (auto item : fields["placements"]) {
    py::dict placement = item.cast<py::dict>();
    int area = index_in(kAreas, placement["area"].cast<std::string>(), "area of a placement");
    plan.placements.push_back({
        .area = static_cast<plan::Area>(area),
        .offset = placement["offset"].cast<int64_t>(),
        .in_place_of = placement["in_place_of"].cast<int>(),
    });
  }
  for (auto item : fields["discards"]) {
    const auto [position, offset, bytes] = item.cast<std::tuple<int, int64_t, int64_t>>();
    plan.discards.push_back({position, offset, bytes});
  }
  for (auto item : fields["workspaces"]) {
    const auto [position, area, offset, bytes] =
        item.cast<std::tuple<int, std::string, int64_t, int64_t>>();
    const int number = index_in(kAreas, area, "area of a workspace");
    plan.workspaces.push_back({position, static_cast<plan::Area>(number), offset, bytes});
  }
  for (auto item : fields["chunks"]) {
    const auto [offset, bytes, position] = item.cast<std::tuple<int64_t, int64_t, int>>();
    plan.chunks.push_back({offset, bytes, position});
  }
  plan.order = fields["order"].cast<std::vector<int>>();
  plan.release = fields["release"].cast<std::vector<std::vector<int>>>();
  plan.crossing = fields["crossing"].cast<std::vector<int>>();
  plan.context_bytes = fields["context_bytes"].cast<int64_t>();
  plan.crossing_bytes = fields["crossing_bytes"].cast<int64_t>();
  plan.forward_scratch_bytes = fields["forward_scratch_bytes"].cast<int64_t>();
  plan.backward_scratch_bytes = fields["backward_scratch_bytes"].cast<int64_t>();
  plan.saved_bytes = fields["saved_bytes"].cast<int64_t>();
  plan.peak_bytes = fields["peak_bytes"].cast<int64_t>();
  return plan;
}

}  // namespace

void bind_plan(py::module_& module) {
  module.def(
      "plan",
      [](const py::dict& program, const py::dict& options) {
        return from_plan(plan::make_plan(to_program(program), to_options(options)));
      },
      py::arg("program"), py::arg("options") = py::dict(),
      "Plan the memory of a program: a dict with the fields of plan::Program.");
  module.def(
      "verify_plan",
      [](const py::dict& program, const py::dict& plan, const py::dict& options) {
        plan::verify_plan(to_program(program), to_plan(plan), to_options(options));
      },
      py::arg("program"), py::arg("plan"), py::arg("options") = py::dict(),
      "Raise InternalError if the plan breaks a rule of memory or of order.");
  module.def(
      "choose_order",
      [](const py::dict& program) { return plan::choose_order(to_program(program)); },
      py::arg("program"), "Return the order of the steps with the lowest peak that is found.");
}

}  // namespace torch_ort::python
