// What Python says of how a graph is compiled and run: run::SessionOptions, a row for each field.
#include "base/error.h"
#include "cpu/kernels.h"
#include "python/bind.h"
#include "python/region_writer.h"
#include "run/options.h"

#include <pybind11/stl.h>

#include <algorithm>
#include <functional>
#include <iterator>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

namespace py = pybind11;

namespace torch_ort::python {

namespace {

using run::SessionOptions;
using Mode = SessionOptions::RegionMode;

constexpr std::pair<const char*, Mode> kModes[] = {
    {"kernel", Mode::kKernel}, {"checked", Mode::kChecked}, {"nodes", Mode::kNodes}};

// ---- values of Python: `load` is false for those of another type

template <typename T>
bool load(py::handle value, T& field) {
  // A number may be an integer; nothing else is converted.
  constexpr bool kMayConvert = std::is_same_v<T, double>;
  py::detail::make_caster<T> caster;
  if (!caster.load(value, kMayConvert)) return false;
  field = py::detail::cast_op<T>(std::move(caster));
  return true;
}

bool load(py::handle value, Mode& field) {
  std::string name;
  if (!load(value, name)) return false;
  const auto* found = std::find_if(std::begin(kModes), std::end(kModes),
                                   [&](const auto& mode) { return mode.first == name; });
  if (found == std::end(kModes)) return false;
  field = found->second;
  return true;
}

using Writer = std::shared_ptr<const region::RegionWriter>;

bool load(py::handle value, Writer& field) {
  if (!value.is_none() && PyCallable_Check(value.ptr()) == 0) return false;
  field = value.is_none() ? nullptr : region_writer(py::reinterpret_borrow<py::object>(value));
  return true;
}

py::object give(const Writer& field) { return function_of(field.get()); }

template <typename T>
py::object give(const T& field) {
  return py::cast(field);
}

py::object give(const Mode& field) { return py::str(kModes[static_cast<size_t>(field)].first); }

const char* wanted(bool) { return "a bool"; }
const char* wanted(int64_t) { return "an integer"; }
const char* wanted(double) { return "a number"; }
const char* wanted(const std::string&) { return "a string"; }
const char* wanted(const std::vector<int>&) { return "a list of integers"; }
const char* wanted(Mode) { return "one of kernel, checked, nodes"; }
const char* wanted(const Writer&) { return "a function or None"; }
const char* wanted(const std::vector<std::string>&) { return "a list of strings"; }

// ---- the fields

struct Field {
  const char* name;
  const char* doc;
  std::function<py::object(SessionOptions&)> get;
  std::function<void(SessionOptions&, py::handle)> set;
};

void nothing_more(SessionOptions& /*options*/) {}

// `place` gives a reference to the field; `also` runs when it has been set.
template <typename Place>
Field field(const char* name, const char* doc, Place place,
            void (*also)(SessionOptions&) = nothing_more) {
  const auto get = [place](SessionOptions& options) { return give(std::invoke(place, options)); };
  const auto set = [name, place, also](SessionOptions& options, py::handle value) {
    auto& known = std::invoke(place, options);
    if (!load(value, known)) {
      throw UserError(
          concat(name, ": got ", py::repr(value).cast<std::string>(), ", want ", wanted(known)));
    }
    also(options);
  };
  return {name, doc, get, set};
}

const std::vector<Field>& fields() {
  using Options = SessionOptions;
  static const std::vector<Field> all = {
      field("reorder", "Run steps in the order that needs the least memory.", &Options::reorder),
      field("in_place", "Write a result over an input that nobody reads later.",
            &Options::in_place),
      field("place_parts", "Write operands of concatenations in place.", &Options::place_parts),
      field("products", "Use the engine's kernels for products where these are faster.",
            &Options::products),
      field("tune", "Time kernels of products, and choose the faster ones.",
            [](Options& options) -> bool& { return options.tuning.is_on; }),
      field("most_tuning_ms", "The time limit for one choice; 0: none.",
            [](Options& options) -> double& { return options.tuning.most_ms; }),
      field("cuda_graphs", "Run forward and backward as CUDA graphs.", &Options::cuda_graphs),
      field("search_convs", "Have cuDNN time its algorithms for each convolution.",
            &Options::search_convs),
      field("parameter_gradients", "The graph outputs that are gradients of leaf parameters.",
            &Options::parameter_gradients),
      field("gradient_inputs", "By gradient the graph input that it is of; -1: unknown.",
            &Options::gradient_inputs),
      field("segment_bytes", "Bytes of gradients to return together if they leave early; 0: all.",
            &Options::segment_bytes),
      field("verify", "Check plans and sizes, and fill memory with garbage before it is written.",
            &Options::verify, [](Options& options) { options.spoil = options.verify; }),
      field("synchronize", "Wait for each step on an asynchronous device.", &Options::synchronize,
            [](Options& options) { options.regions.synchronize = options.synchronize; }),
      field(
          "isa", "The instruction set of the regions; empty: the best one.",
          [](Options& options) -> std::string& { return options.regions.target; },
          // This raises if the processor lacks it.
          [](Options& options) { cpu::isa_or_best(options.regions.target); }),
      field("emulate_eager_casts", "Round short floats in regions as operators do.",
            [](Options& options) -> bool& { return options.regions.round_short_floats; }),
      field("region_mode",
            "How a region runs: by its kernel, by its kernel with its nodes to compare with "
            "(checked), or by its nodes.",
            &Options::region_mode),
      field("region_writer",
            "Called with what a region computes, for one set of sizes (python/region_writer.h). It "
            "gives the kernel, or None if the engine's is to run.",
            &Options::region_writer),
      field("kernel_dump_dir", "The folder of the source texts of kernels; empty: none.",
            [](Options& options) -> std::string& { return options.regions.dump_dir; }),
      field("disabled_passes", "Names of passes that do not run on variants of the graph either.",
            &Options::disabled_passes),
      field("rows_by_labels", "Labels may say which rows nobody reads, in variants as well.",
            [](Options& options) -> bool& { return options.row_sources.labels; }),
      field("rows_by_padding", "Masks may say which rows nobody reads, in variants as well.",
            [](Options& options) -> bool& { return options.row_sources.padding; }),
  };
  return all;
}

SessionOptions make(const py::kwargs& given) {
  SessionOptions options;
  for (const auto& [key, value] : given) {
    const auto name = key.cast<std::string>();
    const auto found = std::find_if(fields().begin(), fields().end(),
                                    [&](const Field& each) { return name == each.name; });
    if (found == fields().end()) {
      std::string names;
      for (const Field& each : fields()) names += concat(names.empty() ? "" : ", ", each.name);
      throw UserError(
          concat("session options: unknown option: got '", name, "', want one of ", names));
    }
    found->set(options, value);
  }
  return options;
}

}  // namespace

void bind_options(py::module_& module) {
  py::class_<SessionOptions> options(module, "SessionOptions",
                                     "How a graph is compiled, planned and run: fields by name.");
  options.def(py::init(&make));
  for (const Field& each : fields()) {
    options.def_property_readonly(each.name, py::cpp_function(each.get), each.doc);
  }
}

}  // namespace torch_ort::python
