// Sizes as symbols, and what is watched, while a module is recorded.
#include "base/error.h"
#include "capture/overlapping_writes.h"
#include "capture/size_symbols.h"
#include "ops/viewed_strides.h"
#include "python/bind.h"

#include <c10/core/impl/LocalDispatchKeySet.h>
#include <pybind11/functional.h>
#include <pybind11/stl.h>
#include <torch/csrc/utils/pybind.h>

namespace py = pybind11;

namespace torch_ort::python {
namespace {

using capture::SizeSymbols;
using ir::Dim;
using ir::DimOp;

py::object integer_or_text(const Dim& dim) {
  if (dim.is_constant()) return py::int_(dim.constant());
  return py::str(dim.str());
}

// As a context manager.
class OverlappingWritesBlock {
 public:
  explicit OverlappingWritesBlock(capture::OverlappingWrites::Report report)
      : report_(std::move(report)) {}

  void enter() { writes_.emplace(report_); }
  void exit() { writes_.reset(); }

 private:
  capture::OverlappingWrites::Report report_;
  std::optional<capture::OverlappingWrites> writes_;
};

ir::Shape dims_of(const std::vector<c10::SymInt>& sizes) {
  ir::Shape dims;
  for (const c10::SymInt& size : sizes) {
    const std::optional<Dim> dim = capture::dim_of(size);
    if (!dim) throw Unsupported("sizes: got a symbol of another trace, want one of this recording");
    dims.push_back(*dim);
  }
  return dims;
}

// torch's own conversion assumes that every SymBool is implemented in Python.
c10::SymBool condition_in(const py::object& condition) {
  if (py::isinstance<py::bool_>(condition)) return condition.cast<bool>();
  const py::object node = condition.attr("node");
  if (!py::isinstance<c10::SymNodeImpl>(node)) return condition.cast<c10::SymBool>();
  return c10::SymBool(node.cast<c10::SymNode>());
}

// An expression as Python text.
std::string python_text(const Dim& dim) {
  const DimOp op = dim.op();
  if (dim.is_constant() || dim.is_symbol()) return dim.str();
  if (op == DimOp::kNot) return "(not " + python_text(dim.lhs()) + ")";
  const std::string left = python_text(dim.lhs()), right = python_text(dim.rhs());
  switch (op) {
    case DimOp::kMin: return "min(" + left + ", " + right + ")";
    case DimOp::kMax: return "max(" + left + ", " + right + ")";
    case DimOp::kAdd: return "(" + left + " + " + right + ")";
    case DimOp::kSub: return "(" + left + " - " + right + ")";
    case DimOp::kMul: return "(" + left + " * " + right + ")";
    case DimOp::kFloorDiv: return "(" + left + " // " + right + ")";
    case DimOp::kMod: return "(" + left + " % " + right + ")";
    case DimOp::kPow: return "(" + left + " ** " + right + ")";
    case DimOp::kEq: return "(" + left + " == " + right + ")";
    case DimOp::kNe: return "(" + left + " != " + right + ")";
    case DimOp::kLt: return "(" + left + " < " + right + ")";
    case DimOp::kLe: return "(" + left + " <= " + right + ")";
    case DimOp::kGt: return "(" + left + " > " + right + ")";
    case DimOp::kGe: return "(" + left + " >= " + right + ")";
    case DimOp::kAnd: return "(" + left + " and " + right + ")";
    default: return "(" + left + " or " + right + ")";
  }
}

}  // namespace

void bind_capture(py::module_& module) {
  using namespace py::literals;
  py::class_<SizeSymbols, c10::intrusive_ptr<SizeSymbols>>(module, "SizeSymbols")
      .def(py::init([] { return c10::make_intrusive<SizeSymbols>(); }))
      .def("symbol", &SizeSymbols::symbol, "name"_a, "value"_a, "is_size"_a, "low"_a = std::nullopt,
           "high"_a = std::nullopt,
           "A symbol for an integer of the recorded call; a size is no less than 0.")
      .def("unbacked", &SizeSymbols::unbacked, "name"_a, "value"_a, "high"_a = std::nullopt,
           "A symbol for an unbacked size, which only data decides, and which is at most `high`: "
           "what depends on it raises Unsupported.")
      .def(
          "expression",
          [](SizeSymbols& sizes, const std::string& text) {
            return sizes.expression(Dim::parse(text));
          },
          "text"_a, "An expression over symbols that were made here.")
      .def(
          "guards",
          [](SizeSymbols& sizes) {
            std::vector<std::string> texts;
            for (const Dim& guard : sizes.guards()) texts.push_back(python_text(guard));
            return texts;
          },
          "Conditions in Python under which the same is recorded.");
  py::class_<OverlappingWritesBlock>(module, "OverlappingWrites")
      .def(py::init<capture::OverlappingWrites::Report>(), "report"_a,
           "In its block, `report` is called with the name of each operator of this thread that "
           "writes into a tensor of which several elements are one number in memory.")
      .def("__enter__", &OverlappingWritesBlock::enter)
      .def("__exit__", [](OverlappingWritesBlock& block, const py::args&) { block.exit(); });
  module.def(
      "size_text",
      [](const c10::SymInt& size) -> py::object {
        std::optional<Dim> dim = capture::dim_of(size);
        return dim ? integer_or_text(*dim) : py::none();
      },
      "size"_a, "An integer, or the text of a recording's expression; None for other tracers'.");
  module.def(
      "condition_text",
      [](const py::object& condition) -> py::object {
        std::optional<Dim> dim = capture::condition_of(condition_in(condition));
        return dim ? integer_or_text(*dim) : py::none();
      },
      "condition"_a, "0, 1 or the text of a recording's condition; None for other tracers'.");
  module.def(
      "contiguous_strides",
      [](const std::vector<c10::SymInt>& sizes) {
        std::vector<c10::SymInt> strides(sizes.size(), 1);
        for (size_t i = sizes.size(); i-- > 1;) {
          // PyTorch counts a dim of size 0 as 1. A symbol is 0 only in empty tensors, where strides
          // do not matter.
          const std::optional<int64_t> size = sizes[i].maybe_as_int();
          strides[i - 1] = size ? strides[i] * std::max<int64_t>(*size, 1) : strides[i] * sizes[i];
        }
        return strides;
      },
      "sizes"_a, "Row-major strides.");
  module.def(
      "viewed_strides",
      [](const std::vector<c10::SymInt>& sizes, const std::vector<c10::SymInt>& strides,
         const std::vector<c10::SymInt>& to) -> std::optional<std::vector<c10::SymInt>> {
        const auto seen = ops::viewed_strides(dims_of(sizes), dims_of(strides), dims_of(to));
        if (!seen) return std::nullopt;
        std::vector<c10::SymInt> all = sizes, result;
        for (const auto* more : {&strides, &to}) all.insert(all.end(), more->begin(), more->end());
        for (const Dim& stride : *seen) result.push_back(capture::size_over(stride, all));
        return result;
      },
      "sizes"_a, "strides"_a, "to"_a,
      "Strides of a recording's tensor seen in another shape of as many elements; None if it takes "
      "a copy for some sizes.");
  module.def("plain_strides", &capture::plain_strides, "strides"_a,
             "Strides as of tensors without a size of 0: max(N, 1) is N.");
  module.def(
      "same_sizes",
      [](const std::vector<c10::SymInt>& a, const std::vector<c10::SymInt>& b) {
        if (a.size() != b.size()) return false;
        for (size_t i = 0; i < a.size(); ++i) {
          const std::optional<Dim> left = capture::dim_of(a[i]), right = capture::dim_of(b[i]);
          if (!left || !right || !(*left == *right)) return false;
        }
        return true;
      },
      "a"_a, "b"_a, "Whether sizes are equal whatever the symbols are.");
  module.def(
      "known_condition",
      [](const py::object& condition) {
        return capture::known_without_guard(condition_in(condition));
      },
      "condition"_a,
      "Whether a condition of a recording holds for all its sizes; None if not known.");
  module.def(
      "forbid_numbers",
      [](const at::Tensor& tensor) {
        if (!tensor.has_storage()) return;
        tensor.storage().unsafeGetStorageImpl()->set_throw_on_mutable_data_ptr();
      },
      "tensor"_a, "Let whoever asks where the numbers of a tensor are get an error.");
  module.def(
      "evaluate_size",
      [](const c10::SymInt& size, const std::unordered_map<std::string, int64_t>& symbols) {
        const std::optional<Dim> dim = capture::dim_of(size);
        ORT_CHECK(dim, "evaluate_size: got a size of another tracer");
        const std::optional<int64_t> value =
            dim->evaluate([&](const std::string& name) -> std::optional<int64_t> {
              auto found = symbols.find(name);
              return found == symbols.end() ? std::nullopt : std::optional(found->second);
            });
        ORT_CHECK(value, "evaluate_size: ", dim->str(), " has a symbol without a value");
        return *value;
      },
      "size"_a, "symbols"_a, "The value of a recording's size for values of its symbols.");
  module.def(
      "symbols_in_size",
      [](const c10::SymInt& size) -> std::optional<std::unordered_map<std::string, int64_t>> {
        return capture::symbols_in(size);
      },
      "size"_a, "The symbols of a recording's size with their values; None for other tracers'.");
  module.def(
      "call_plainly",
      [](const py::object& function) {
        const c10::impl::ForceDispatchKeyGuard guard(
            c10::impl::LocalDispatchKeySet(c10::impl::PODLocalDispatchKeySet{}));
        return function();
      },
      "function"_a, "Call something as if no kernel and no trace stood around it.");
  module.def(
      "python_text",
      [](const c10::SymInt& size) {
        const std::optional<Dim> dim = capture::dim_of(size);
        ORT_CHECK(dim, "python_text: got a size of another tracer");
        return python_text(*dim);
      },
      "size"_a, "The expression of a recording's size in Python.");
  module.def("depends_on_data", &capture::depends_on_data, "size"_a,
             "Whether a recording's size has a symbol whose value only data tells.");
  module.def(
      "known_float",
      [](const py::object& number) -> std::optional<double> {
        const py::object node = number.attr("node");
        if (!py::isinstance<c10::SymNodeImpl>(node)) return std::nullopt;
        return capture::known_float(node.cast<c10::SymNode>());
      },
      "number"_a,
      "The number that a SymFloat of a recording is for all sizes; None if it depends.");
  module.def("size_value", &capture::value_of, "size"_a,
             "The value in the recorded call; None for other tracers' sizes.");
}

}  // namespace torch_ort::python
