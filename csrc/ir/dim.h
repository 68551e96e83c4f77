// A dim of a shape: an integer, or an expression over named symbols and integers.
// The text form is infix (`2*N + T // 4`, `max(N, 1)`), as dumps and ONNX dim names hold it.
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
  // Conditions (1 or 0), for runtime asserts.
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

// Gives the value of a symbol, or nothing if it is not bound yet.
using SymbolLookup = std::function<std::optional<int64_t>(const std::string&)>;

// An immutable expression; copies share their nodes. Equality is structural.
class Dim {
 public:
  Dim(int64_t value = 0) : constant_(value) {}  // NOLINT: an integer is a dim
  static Dim symbol(std::string name);
  // Brings sums and products into one order, with like terms and constant factors collected, and
  // cancels exact divisions; folds constants. Raises UserError if a constant leaves 64 bits.
  static Dim make(DimOp op, Dim a, Dim b);
  static Dim logical_not(Dim a);
  // Precedence is that of Python, `!` binds like unary minus. parse(d.str()) == d.
  // Raises UserError on text that is no expression.
  static Dim parse(std::string_view text);

  bool is_constant() const { return node_ == nullptr; }
  bool is_symbol() const { return op() == DimOp::kSymbol; }
  int64_t constant() const;
  const std::string& name() const;  // of a symbol
  DimOp op() const;
  const Dim& lhs() const;
  const Dim& rhs() const;

  // Nothing if a symbol is not bound. Raises UserError on a division by zero or an overflow.
  std::optional<int64_t> evaluate(const SymbolLookup& lookup) const;
  void collect_symbols(std::vector<std::string>& names) const;  // each once, in order of appearance
  std::string str() const;

  bool operator==(const Dim& other) const;
  // A total order by structure alone: symbols by name, then expressions, then integers.
  static int compare(const Dim& a, const Dim& b);
  size_t hash() const;

 private:
  struct Node;
  friend Dim make_raw(DimOp op, Dim a, Dim b);

  int64_t constant_ = 0;
  std::shared_ptr<const Node> node_;
};

// A node without any simplification, for dim.cpp.
Dim make_raw(DimOp op, Dim a, Dim b);

using Shape = std::vector<Dim>;

std::string to_string(const Shape& shape);  // "[N,128]"
Shape parse_shape(std::string_view text);   // its inverse; UserError on other text
bool is_constant(const Shape& shape);
// Product of the dims.
Dim numel(const Shape& shape);
// Row-major strides of a shape, in elements, as PyTorch counts them: a dim of size 0 counts as 1.
// A symbol is taken as it is; it stands for 0 only in an empty tensor, whose strides nothing reads.
Shape contiguous_strides(const Shape& shape);

}  // namespace torch_ort::ir
