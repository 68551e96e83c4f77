// Floats that depend on sizes, for C++ that computes with them while a graph is recorded, as
// PyTorch's formulas for gradients do. They are Numbers of torch_ort/rules/numbers.py.
#include "base/error.h"
#include "capture/size_symbols.h"
#include "python/bind.h"

#include <torch/csrc/utils/python_symnode.h>

namespace py = pybind11;

namespace torch_ort::python {
namespace {

using c10::SymNode;
using torch::impl::PythonSymNodeImpl;

SymNode compute(const char* method, const SymNode& a, const SymNode& b);

// The module of Python that has Numbers.
py::module_ numbers() { return py::module_::import("torch_ort.rules.numbers"); }

// A Number as the node of a SymFloat, SymInt or SymBool. PyTorch's own class for nodes that are
// implemented in Python combines them with each other alone, and not with sizes.
class NumberNode final : public PythonSymNodeImpl {
 public:
  using PythonSymNodeImpl::PythonSymNodeImpl;

  SymNode add(const SymNode& other) override { return compute("add", self(), other); }
  SymNode sub(const SymNode& other) override { return compute("sub", self(), other); }
  SymNode mul(const SymNode& other) override { return compute("mul", self(), other); }
  SymNode truediv(const SymNode& other) override { return compute("truediv", self(), other); }
  SymNode float_truediv(const SymNode& other) override { return truediv(other); }
  SymNode int_truediv(const SymNode& other) override { return truediv(other); }
  SymNode floordiv(const SymNode& other) override { return compute("floordiv", self(), other); }
  SymNode int_floordiv(const SymNode& other) override { return floordiv(other); }
  SymNode mod(const SymNode& other) override { return compute("mod", self(), other); }
  SymNode pow(const SymNode& other) override { return compute("pow", self(), other); }
  SymNode float_pow(const SymNode& other) override { return pow(other); }
  SymNode pow_by_natural(const SymNode& other) override { return pow(other); }
  SymNode sym_min(const SymNode& other) override { return compute("sym_min", self(), other); }
  SymNode sym_max(const SymNode& other) override { return compute("sym_max", self(), other); }
  SymNode eq(const SymNode& other) override { return compute("eq", self(), other); }
  SymNode ne(const SymNode& other) override { return compute("ne", self(), other); }
  SymNode lt(const SymNode& other) override { return compute("lt", self(), other); }
  SymNode le(const SymNode& other) override { return compute("le", self(), other); }
  SymNode gt(const SymNode& other) override { return compute("gt", self(), other); }
  SymNode ge(const SymNode& other) override { return compute("ge", self(), other); }
  SymNode sym_and(const SymNode& other) override { return compute("sym_and", self(), other); }
  SymNode sym_or(const SymNode& other) override { return compute("sym_or", self(), other); }
  SymNode neg() override { return made("neg"); }
  SymNode floor() override { return made("floor"); }
  SymNode ceil() override { return made("ceil"); }
  SymNode sym_float() override { return made("sym_float"); }
  SymNode sym_not() override { return made("sym_not"); }
  SymNode clone() override { return self(); }
  SymNode wrap_int(int64_t value) override { return made("wrap_int", value); }
  SymNode wrap_float(double value) override { return made("wrap_float", value); }
  SymNode wrap_bool(bool value) override { return made("wrap_bool", value); }

 private:
  SymNode self() { return c10::intrusive_ptr<NumberNode>::reclaim_copy(this); }

  template <typename... Values>
  SymNode made(const char* method, Values... values) {
    const py::gil_scoped_acquire gil;
    return c10::make_intrusive<NumberNode>(getPyObj().attr(method)(values...));
  }
};

// An operand as what torch_ort/rules/numbers.py takes: a Number, or a constant of Python's.
py::object operand(const SymNode& node) {
  if (const auto* held = dynamic_cast<const PythonSymNodeImpl*>(node.get())) {
    return py::reinterpret_borrow<py::object>(held->getPyObj());
  }
  if (const std::optional<int64_t> integer = node->constant_int()) return py::int_(*integer);
  if (const std::optional<bool> truth = node->constant_bool()) return py::bool_(*truth);
  if (const std::optional<double> number = capture::known_float(node)) return py::float_(*number);
  // A float that is no constant is an integer of sizes.
  const bool is_float = node->is_float();
  return numbers().attr("of_size")(c10::SymInt(is_float ? node->floor() : node), is_float);
}

SymNode compute(const char* method, const SymNode& a, const SymNode& b) {
  const py::gil_scoped_acquire gil;
  return c10::make_intrusive<NumberNode>(
      numbers().attr("computed")(method, operand(a), operand(b)));
}

// Makes the node of C++ for a Number of Python's, which a binding of PyTorch's got beside a node of
// C++; nullptr for other objects.
PyObject* node_of_number(PyObject* object, PyTypeObject* /*type*/) {
  const py::handle number(object);
  if (!py::isinstance(number, numbers().attr("Number"))) return nullptr;
  SymNode node = c10::make_intrusive<NumberNode>(py::reinterpret_borrow<py::object>(number));
  return py::cast(std::move(node)).release().ptr();
}

}  // namespace

void bind_numbers(py::module_& module) {
  using namespace py::literals;
  capture::compute_floats_by(compute);
  py::detail::get_type_info(typeid(c10::SymNodeImpl), true)
      ->implicit_conversions.push_back(node_of_number);
  module.def(
      "number_in",
      [](const py::object& node) -> py::object {
        if (!py::isinstance<c10::SymNodeImpl>(node)) return py::none();
        const auto held = node.cast<SymNode>();
        const auto* number = dynamic_cast<const NumberNode*>(held.get());
        if (number == nullptr) return py::none();
        return py::reinterpret_borrow<py::object>(number->getPyObj());
      },
      "node"_a, "The Number that a node of C++ stands for; None if it stands for another value.");
}

}  // namespace torch_ort::python
