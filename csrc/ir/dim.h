// A dim of a shape: an integer, or an expression over named symbols and integers. Its text form is
// infix (`2*N + T // 4`, `max(N, 1)`); dumps and the dim names of ONNX files hold that text.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

namespace torch_ort::ir {

enum class DimOp : uint8_t {
  kConstant,
  kSymbol,
  kAdd,
  kSub,
  kMul,
  kFloorDiv,
  kMod,
  kPow,
  kMin,
  kMax,
  // Conditions, whose value is 1 or 0. Runtime asserts and guards use them.
  kEq,
  kNe,
  kLt,
  kLe,
  kGt,
  kGe,
  kAnd,
  kOr,
  kNot,
};

// Returns the value of a symbol, or nothing if the symbol is not bound yet.
using SymbolLookup = std::function<std::optional<int64_t>(const std::string&)>;

// An immutable expression. Copies share its nodes. Two Dims are equal if their expressions have the
// same structure.
class Dim {
 public:
  Dim(int64_t value = 0) : constant_(value) {}  // NOLINT: an integer is a dim
  static Dim symbol(std::string name);
  // Builds an expression and simplifies it: sums and products get a canonical order, like terms and
  // constant factors are collected, exact divisions are cancelled, constants are folded. Throws
  // UserError if a constant does not fit into 64 bits.
  static Dim make(DimOp op, Dim a, Dim b);
  static Dim logical_not(Dim a);
  // Parses the text form, with Python's precedence; `!` binds like unary minus. parse(d.str()) ==
  // d. Throws UserError on text that is not an expression.
  static Dim parse(std::string_view text);

  bool is_constant() const { return node_ == nullptr; }
  bool is_symbol() const { return op() == DimOp::kSymbol; }
  int64_t constant() const;
  const std::string& name() const;  // of a symbol; InternalError otherwise
  DimOp op() const;
  const Dim& lhs() const;
  const Dim& rhs() const;

  // Returns nothing if a symbol is not bound. Throws UserError on a division by zero or an
  // overflow.
  std::optional<int64_t> evaluate(const SymbolLookup& lookup) const;
  // Appends the names of the symbols, each once, in order of appearance.
  void collect_symbols(std::vector<std::string>& names) const;
  std::string str() const;

  bool operator==(const Dim& other) const;
  // A total order by structure: symbols by name come first, then expressions, then integers.
  static int compare(const Dim& a, const Dim& b);
  size_t hash() const;

 private:
  struct Node;
  friend Dim make_raw(DimOp op, Dim a, Dim b);

  int64_t constant_ = 0;
  std::shared_ptr<const Node> node_;
};

// Makes a node without simplifying it; for dim.cpp.
Dim make_raw(DimOp op, Dim a, Dim b);

using Shape = std::vector<Dim>;

std::string to_string(const Shape& shape);  // "[N,128]"
Shape parse_shape(std::string_view text);   // its inverse; UserError on other text
bool is_constant(const Shape& shape);
// Product of the dims.
Dim numel(const Shape& shape);
// Returns the row-major strides of a shape in elements. As in PyTorch, a dim of size 0 counts as 1.
// A symbol is taken as it is: where it stands for 0 the tensor is empty, and nothing reads its
// strides.
Shape contiguous_strides(const Shape& shape);

}  // namespace torch_ort::ir
