#include "capture/size_symbols.h"

#include "base/error.h"

#include <c10/core/SymNodeImpl.h>

#include <algorithm>
#include <atomic>
#include <cmath>
#include <numeric>

namespace torch_ort::capture {
namespace {

using c10::SymNode;
using ir::Dim;
using ir::DimOp;

bool is_relation(DimOp op) { return op >= DimOp::kEq && op <= DimOp::kGe; }

// The relation that is true exactly where `op` is false.
DimOp opposite(DimOp op) {
  switch (op) {
    case DimOp::kEq: return DimOp::kNe;
    case DimOp::kNe: return DimOp::kEq;
    case DimOp::kLt: return DimOp::kGe;
    case DimOp::kLe: return DimOp::kGt;
    case DimOp::kGt: return DimOp::kLe;
    case DimOp::kGe: return DimOp::kLt;
    default: throw InternalError("sizes: got no relation");
  }
}

// The negation of a condition, without negations of relations in it.
Dim negated(const Dim& condition) {
  const DimOp op = condition.op();
  if (is_relation(op)) return Dim::make(opposite(op), condition.lhs(), condition.rhs());
  if (op == DimOp::kAnd) {
    return Dim::make(DimOp::kOr, negated(condition.lhs()), negated(condition.rhs()));
  }
  if (op == DimOp::kOr) {
    return Dim::make(DimOp::kAnd, negated(condition.lhs()), negated(condition.rhs()));
  }
  return Dim::logical_not(condition);
}

bool contains(const Dim& dim, const std::string& name) {
  std::vector<std::string> names;
  dim.collect_symbols(names);
  return std::find(names.begin(), names.end(), name) != names.end();
}

void collect_factors(const Dim& dim, std::vector<Dim>& factors) {
  if (dim.op() == DimOp::kMul) {
    collect_factors(dim.lhs(), factors);
    collect_factors(dim.rhs(), factors);
  } else {
    factors.push_back(dim);
  }
}

Dim substitute(const Dim& dim, const std::unordered_map<std::string, Dim>& values) {
  if (dim.is_constant()) return dim;
  if (dim.is_symbol()) {
    auto found = values.find(dim.name());
    return found == values.end() ? dim : substitute(found->second, values);
  }
  if (dim.op() == DimOp::kNot) return Dim::logical_not(substitute(dim.lhs(), values));
  return Dim::make(dim.op(), substitute(dim.lhs(), values), substitute(dim.rhs(), values));
}

// Whether a quotient is the same for all sizes as for those of the recorded call.
bool is_constant_quotient(const Dim& a, const Dim& b, int64_t value_a, int64_t value_b) {
  // Products of this and of factors fit into 64 bits.
  constexpr int64_t kLargest = 1 << 20;
  const int64_t common = std::gcd(value_a, value_b);
  const int64_t over = value_a / common, under = value_b / common;
  if (std::max(std::abs(over), std::abs(under)) > kLargest) return false;
  return Dim::make(DimOp::kMul, a, under) == Dim::make(DimOp::kMul, b, over);
}

enum Kind { kInteger, kCondition, kFloat };

constexpr double kLargestFloat = 9007199254740992;  // doubles up to 2^53 are exact

std::optional<int64_t> integer_in(double value) {
  if (value != std::floor(value) || std::abs(value) > kLargestFloat) return std::nullopt;
  return static_cast<int64_t>(value);
}

double apply(DimOp op, double a, double b) {
  switch (op) {
    case DimOp::kAdd: return a + b;
    case DimOp::kSub: return a - b;
    case DimOp::kMul: return a * b;
    case DimOp::kPow: return std::pow(a, b);
    case DimOp::kMin: return std::min(a, b);
    case DimOp::kMax: return std::max(a, b);
    case DimOp::kEq: return a == b;
    case DimOp::kNe: return a != b;
    case DimOp::kLt: return a < b;
    case DimOp::kLe: return a <= b;
    case DimOp::kGt: return a > b;
    case DimOp::kGe: return a >= b;
    default: throw Unsupported("sizes: got a fraction, want an integer");
  }
}

// The name of PyTorch's method for an operation on floats.
const char* method_of(DimOp op) {
  switch (op) {
    case DimOp::kAdd: return "add";
    case DimOp::kSub: return "sub";
    case DimOp::kMul: return "mul";
    case DimOp::kFloorDiv: return "floordiv";
    case DimOp::kMod: return "mod";
    case DimOp::kPow: return "pow";
    case DimOp::kMin: return "sym_min";
    case DimOp::kMax: return "sym_max";
    case DimOp::kEq: return "eq";
    case DimOp::kNe: return "ne";
    case DimOp::kLt: return "lt";
    case DimOp::kLe: return "le";
    case DimOp::kGt: return "gt";
    case DimOp::kGe: return "ge";
    case DimOp::kAnd: return "sym_and";
    case DimOp::kOr: return "sym_or";
    default: throw InternalError("sizes: got an operation that floats do not have");
  }
}

std::atomic<FloatFunction> float_function = nullptr;

SymNode computed(const char* method, const SymNode& a, const SymNode& b) {
  const FloatFunction function = float_function;
  ORT_CHECK(function != nullptr, "sizes: nobody computes floats that depend on them");
  return function(method, a, b);
}

// Operations on floats of which at least one is no integer of sizes.
using Sizes = c10::intrusive_ptr<SizeSymbols>;
SymNode combine(const Sizes& sizes, DimOp op, const SymNode& a, const SymNode& b);
SymNode divide(const Sizes& sizes, const SymNode& a, const SymNode& b);
SymNode compare(const Sizes& sizes, DimOp op, const SymNode& a, const SymNode& b);
SymNode make_float(const Sizes& sizes, double number);
SymNode make_integer(const Sizes& sizes, int64_t number);

// A SymFloat that is the same number for all sizes, and no integer, such as 0.5.
class Fraction : public c10::SymNodeImpl {
 public:
  Fraction(Sizes sizes, double number) : sizes_(std::move(sizes)), number_(number) {}

  double number() const { return number_; }

  bool is_int() override { return false; }
  bool is_bool() override { return false; }
  bool is_float() override { return true; }

  SymNode add(const SymNode& other) override { return combine(sizes_, DimOp::kAdd, self(), other); }
  SymNode sub(const SymNode& other) override { return combine(sizes_, DimOp::kSub, self(), other); }
  SymNode mul(const SymNode& other) override { return combine(sizes_, DimOp::kMul, self(), other); }
  SymNode pow(const SymNode& other) override { return combine(sizes_, DimOp::kPow, self(), other); }
  SymNode sym_min(const SymNode& other) override {
    return combine(sizes_, DimOp::kMin, self(), other);
  }
  SymNode sym_max(const SymNode& other) override {
    return combine(sizes_, DimOp::kMax, self(), other);
  }
  SymNode truediv(const SymNode& other) override { return divide(sizes_, self(), other); }
  SymNode floordiv(const SymNode& other) override {
    return combine(sizes_, DimOp::kFloorDiv, self(), other);
  }
  SymNode mod(const SymNode& other) override { return combine(sizes_, DimOp::kMod, self(), other); }
  SymNode eq(const SymNode& other) override { return compare(sizes_, DimOp::kEq, self(), other); }
  SymNode ne(const SymNode& other) override { return compare(sizes_, DimOp::kNe, self(), other); }
  SymNode lt(const SymNode& other) override { return compare(sizes_, DimOp::kLt, self(), other); }
  SymNode le(const SymNode& other) override { return compare(sizes_, DimOp::kLe, self(), other); }
  SymNode gt(const SymNode& other) override { return compare(sizes_, DimOp::kGt, self(), other); }
  SymNode ge(const SymNode& other) override { return compare(sizes_, DimOp::kGe, self(), other); }
  SymNode neg() override { return make_float(sizes_, -number_); }
  SymNode floor() override { return rounded(std::floor(number_)); }
  SymNode ceil() override { return rounded(std::ceil(number_)); }
  SymNode sym_float() override { return self(); }
  SymNode clone() override { return self(); }
  SymNode wrap_int(int64_t value) override { return make_integer(sizes_, value); }
  SymNode wrap_float(double value) override { return make_float(sizes_, value); }

  double guard_float(const char*, int64_t) override { return number_; }
  bool bool_() override { return number_ != 0; }
  bool has_hint() override { return true; }
  // PyTorch accepts no SymFloat that is a constant.
  bool is_constant() override { return false; }
  bool is_symbolic() override { return true; }
  std::string str() override { return concat(number_); }

 private:
  SymNode self() { return c10::intrusive_ptr<Fraction>::reclaim_copy(this); }
  SymNode rounded(double value) const {
    const std::optional<int64_t> integer = integer_in(value);
    if (!integer) throw Unsupported(concat("sizes: got ", value, ", want an integer"));
    return make_integer(sizes_, *integer);
  }

  Sizes sizes_;
  const double number_;  // never an integer
};

// A SymInt or SymBool; or a SymFloat that is an integer, such as a factor of an upsampling.
class Node : public c10::SymNodeImpl {
 public:
  Node(c10::intrusive_ptr<SizeSymbols> sizes, Dim dim, Kind kind)
      : sizes_(std::move(sizes)), dim_(std::move(dim)), kind_(kind) {}

  Dim dim() const { return sizes_->simplified(dim_); }
  const c10::intrusive_ptr<SizeSymbols>& sizes() const { return sizes_; }

  std::optional<double> number() const {
    const Dim now = dim();
    return now.is_constant() ? std::optional(static_cast<double>(now.constant())) : std::nullopt;
  }

  c10::SymInt with(Dim dim) const {
    if (dim.is_constant()) return dim.constant();
    return c10::SymInt(make(std::move(dim), kInteger));
  }

  bool is_int() override { return kind_ == kInteger; }
  bool is_bool() override { return kind_ == kCondition; }
  bool is_float() override { return kind_ == kFloat; }

  SymNode add(const SymNode& other) override { return binary(DimOp::kAdd, other); }
  SymNode sub(const SymNode& other) override { return binary(DimOp::kSub, other); }
  SymNode mul(const SymNode& other) override { return binary(DimOp::kMul, other); }
  SymNode floordiv(const SymNode& other) override { return binary(DimOp::kFloorDiv, other); }
  SymNode truediv(const SymNode& other) override {
    const std::optional<double> number =
        is_of_sizes(other) ? quotient(operand(other)) : std::nullopt;
    return number ? make_float(sizes_, *number) : divide(sizes_, self(), other);
  }
  SymNode mod(const SymNode& other) override { return binary(DimOp::kMod, other); }
  SymNode pow(const SymNode& other) override { return binary(DimOp::kPow, other); }
  SymNode sym_min(const SymNode& other) override { return binary(DimOp::kMin, other); }
  SymNode sym_max(const SymNode& other) override { return binary(DimOp::kMax, other); }
  SymNode eq(const SymNode& other) override { return relation(DimOp::kEq, other); }
  SymNode ne(const SymNode& other) override { return relation(DimOp::kNe, other); }
  SymNode gt(const SymNode& other) override { return relation(DimOp::kGt, other); }
  SymNode lt(const SymNode& other) override { return relation(DimOp::kLt, other); }
  SymNode le(const SymNode& other) override { return relation(DimOp::kLe, other); }
  SymNode ge(const SymNode& other) override { return relation(DimOp::kGe, other); }
  SymNode sym_and(const SymNode& other) override { return relation(DimOp::kAnd, other); }
  SymNode sym_or(const SymNode& other) override { return relation(DimOp::kOr, other); }
  SymNode sym_not() override { return make(negated(dim()), kCondition); }
  SymNode neg() override { return make(Dim::make(DimOp::kSub, 0, dim()), kInteger); }
  SymNode ceil() override { return make(dim_, kInteger); }
  SymNode floor() override { return make(dim_, kInteger); }
  SymNode clone() override { return make(dim_, kind_); }
  SymNode wrap_int(int64_t value) override { return make(value, kInteger); }
  SymNode wrap_float(double value) override { return make_float(sizes_, value); }
  SymNode wrap_bool(bool value) override { return make(value, kCondition); }

  SymNode sym_float() override { return make(dim_, kFloat); }
  double guard_float(const char*, int64_t) override {
    return static_cast<double>(sizes_->specialize(dim_));
  }
  int64_t guard_int(const char*, int64_t) override { return sizes_->specialize(dim_); }
  int64_t int_() override { return sizes_->specialize(dim_); }
  bool guard_bool(const char*, int64_t) override { return sizes_->decide(dim_, Asker::kOperator); }
  bool expect_true(const char*, int64_t) override { return sizes_->decide(dim_, Asker::kUser); }
  bool bool_() override { return sizes_->decide(dim_, Asker::kUser); }
  bool guard_size_oblivious(const char*, int64_t) override { return known().value_or(false); }
  bool guard_or_false(const char*, int64_t) override { return known().value_or(false); }
  bool guard_or_true(const char*, int64_t) override { return known().value_or(true); }
  bool statically_known_true(const char*, int64_t) override { return known().value_or(false); }
  std::optional<bool> known() { return sizes_->known(dim_); }

  bool has_hint() override { return true; }
  std::string str() override { return dim().str(); }
  // PyTorch accepts no SymFloat that is a constant.
  bool is_constant() override { return kind_ != kFloat && dim().is_constant(); }
  bool is_symbolic() override { return !dim().is_constant(); }
  std::optional<int64_t> constant_int() override { return maybe_as_int(); }
  std::optional<bool> constant_bool() override {
    const Dim now = dim();
    if (kind_ != kCondition || !now.is_constant()) return std::nullopt;
    return now.constant() != 0;
  }
  std::optional<int64_t> maybe_as_int() override {
    const Dim now = dim();
    if (kind_ != kInteger || !now.is_constant()) return std::nullopt;
    return now.constant();
  }

  using Nodes = c10::ArrayRef<SymNode>;
  SymNode is_contiguous(Nodes sizes, Nodes strides) override {
    std::vector<size_t> order(sizes.size());
    for (size_t i = 0; i < order.size(); ++i) order[i] = i;
    return wrap_bool(is_dense_in(order, dims(sizes), dims(strides)));
  }
  SymNode is_channels_last_contiguous_2d(Nodes sizes, Nodes strides) override {
    return wrap_bool(sizes.size() == 4 && is_dense_in({0, 2, 3, 1}, dims(sizes), dims(strides)));
  }
  SymNode is_channels_last_contiguous_3d(Nodes sizes, Nodes strides) override {
    return wrap_bool(sizes.size() == 5 && is_dense_in({0, 2, 3, 4, 1}, dims(sizes), dims(strides)));
  }
  SymNode is_channels_last_strides_2d(Nodes sizes, Nodes strides) override {
    return is_channels_last_contiguous_2d(sizes, strides);
  }
  SymNode is_channels_last_strides_3d(Nodes sizes, Nodes strides) override {
    return is_channels_last_contiguous_3d(sizes, strides);
  }
  SymNode is_non_overlapping_and_dense(Nodes sizes, Nodes strides) override {
    const ir::Shape size = dims(sizes), stride = dims(strides);
    std::vector<size_t> order(size.size());
    for (size_t i = 0; i < order.size(); ++i) order[i] = i;
    std::stable_sort(order.begin(), order.end(), [&](size_t a, size_t b) {
      return sizes_->value(stride[a]) > sizes_->value(stride[b]);
    });
    return wrap_bool(is_dense_in(order, size, stride));
  }

 private:
  SymNode self() { return c10::intrusive_ptr<Node>::reclaim_copy(this); }
  SymNode make(Dim dim, Kind kind) const {
    return c10::make_intrusive<Node>(sizes_, std::move(dim), kind);
  }
  // Whether a node is an integer of sizes or a constant.
  static bool is_of_sizes(const SymNode& node) {
    return dynamic_cast<const Node*>(node.get()) != nullptr || !node->is_symbolic();
  }
  SymNode binary(DimOp op, const SymNode& other) {
    if (!is_of_sizes(other)) return combine(sizes_, op, self(), other);
    const bool is_float = kind_ == kFloat || other->is_float();
    return make(Dim::make(op, dim(), operand(other)), is_float ? kFloat : kInteger);
  }
  SymNode relation(DimOp op, const SymNode& other) {
    if (!is_of_sizes(other)) return compare(sizes_, op, self(), other);
    return make(Dim::make(op, dim(), operand(other)), kCondition);
  }
  // The quotient; nothing if it depends on sizes, or if Python raises because the divisor is 0.
  std::optional<double> quotient(const Dim& divisor) const {
    const Dim now = dim();
    const int64_t over = sizes_->value(now), under = sizes_->value(divisor);
    if (under == 0 || !is_constant_quotient(now, divisor, over, under)) return std::nullopt;
    std::vector<Dim> factors;
    collect_factors(divisor, factors);
    for (const Dim& each : factors) sizes_->decide(Dim::make(DimOp::kNe, each, 0), Asker::kUser);
    return static_cast<double>(over) / static_cast<double>(under);
  }

  Dim operand(const SymNode& other) const {
    auto* node = dynamic_cast<Node*>(other.get());
    if (node != nullptr && node->sizes_ == sizes_) return node->dim();
    if (std::optional<int64_t> constant = other->constant_int()) return *constant;
    if (std::optional<bool> constant = other->constant_bool()) return *constant;
    throw Unsupported("sizes: got a symbol of another trace, want one of this recording");
  }

  ir::Shape dims(Nodes nodes) const {
    ir::Shape shape;
    for (const SymNode& node : nodes) shape.push_back(operand(node));
    return shape;
  }

  // Whether the strides are those of dims in this order without gaps, for all sizes.
  static bool is_dense_in(const std::vector<size_t>& order, const ir::Shape& sizes,
                          const ir::Shape& strides) {
    Dim expected = 1;
    for (size_t i = order.size(); i-- > 0;) {
      const size_t d = order[i];
      if (sizes[d] == Dim(1)) continue;
      if (strides[d] != expected) return false;
      expected = Dim::make(DimOp::kMul, expected, sizes[d]);
    }
    return true;
  }

  c10::intrusive_ptr<SizeSymbols> sizes_;
  const Dim dim_;
  const Kind kind_;
};

Node* node_in(const SymNode& node) { return dynamic_cast<Node*>(node.get()); }

// The number that a float is for all sizes; nothing if it depends on them.
std::optional<double> number_in(const SymNode& node) {
  if (const auto* fraction = dynamic_cast<const Fraction*>(node.get())) return fraction->number();
  const Node* held = node_in(node);
  return held ? held->number() : std::nullopt;
}

SymNode make_float(const Sizes& sizes, double number) {
  const std::optional<int64_t> integer = integer_in(number);
  if (integer) return c10::make_intrusive<Node>(sizes, *integer, kFloat);
  return c10::make_intrusive<Fraction>(sizes, number);
}

SymNode make_integer(const Sizes& sizes, int64_t number) {
  return c10::make_intrusive<Node>(sizes, number, kInteger);
}

SymNode combine(const Sizes& sizes, DimOp op, const SymNode& a, const SymNode& b) {
  const std::optional<double> x = number_in(a), y = number_in(b);
  const bool is_division = op == DimOp::kFloorDiv || op == DimOp::kMod;
  return x && y && !is_division ? make_float(sizes, apply(op, *x, *y))
                                : computed(method_of(op), a, b);
}

SymNode divide(const Sizes& sizes, const SymNode& a, const SymNode& b) {
  const std::optional<double> x = number_in(a), y = number_in(b);
  return x && y && *y != 0 ? make_float(sizes, *x / *y) : computed("truediv", a, b);
}

SymNode compare(const Sizes& sizes, DimOp op, const SymNode& a, const SymNode& b) {
  const std::optional<double> x = number_in(a), y = number_in(b);
  if (!x || !y) return computed(method_of(op), a, b);
  return c10::make_intrusive<Node>(sizes, apply(op, *x, *y) != 0, kCondition);
}

}  // namespace

void compute_floats_by(FloatFunction function) { float_function = function; }

c10::SymInt SizeSymbols::symbol(const std::string& name, int64_t value, bool is_size,
                                std::optional<int64_t> low, std::optional<int64_t> high) {
  std::scoped_lock lock(mutex_);
  Bounds bounds{low, high};
  if (is_size) bounds.low = std::max<int64_t>(low.value_or(0), 0);
  const bool is_new =
      symbols_.try_emplace(name, Symbol{value, is_size, symbols_.size(), bounds}).second;
  ORT_CHECK(is_new, "sizes: got symbol '", name, "' twice");
  auto self = c10::intrusive_ptr<SizeSymbols>::reclaim_copy(this);
  return c10::SymInt(
      SymNode(c10::make_intrusive<Node>(std::move(self), Dim::symbol(name), kInteger)));
}

c10::SymInt SizeSymbols::unbacked(const std::string& name, int64_t value,
                                  std::optional<int64_t> high) {
  c10::SymInt made = symbol(name, value, true, std::nullopt, high);
  std::scoped_lock lock(mutex_);
  symbols_.at(name).is_unbacked = true;
  return made;
}

c10::SymInt SizeSymbols::expression(const Dim& dim) {
  // This raises for symbols of another recording.
  value(dim);
  if (dim.is_constant()) return dim.constant();
  auto self = c10::intrusive_ptr<SizeSymbols>::reclaim_copy(this);
  return c10::SymInt(SymNode(c10::make_intrusive<Node>(std::move(self), dim, kInteger)));
}

Dim SizeSymbols::simplified(const Dim& dim) {
  std::scoped_lock lock(mutex_);
  return simplified_locked(dim);
}

Dim SizeSymbols::simplified_locked(const Dim& dim) {
  return replaced_.empty() ? dim : substitute(dim, replaced_);
}

std::optional<bool> SizeSymbols::known(const Dim& condition) {
  std::scoped_lock lock(mutex_);
  return known_locked(simplified_locked(condition));
}

std::optional<bool> SizeSymbols::known_locked(const Dim& condition) {
  if (condition.is_constant()) return condition.constant() != 0;
  for (const auto& [fact, holds] : facts_) {
    if (fact == condition) return holds;
  }
  const DimOp op = condition.op();
  if (op == DimOp::kNot) {
    std::optional<bool> inner = known_locked(condition.lhs());
    return inner ? std::optional<bool>(!*inner) : std::nullopt;
  }
  if (op == DimOp::kAnd || op == DimOp::kOr) {
    const std::optional<bool> left = known_locked(condition.lhs());
    const std::optional<bool> right = known_locked(condition.rhs());
    const bool decisive = op == DimOp::kOr;
    if (left == decisive || right == decisive) return decisive;
    if (left && right) return !decisive;
    return std::nullopt;
  }
  if (!is_relation(op)) return std::nullopt;
  const Bounds range = bounds(Dim::make(DimOp::kSub, condition.lhs(), condition.rhs()));
  const bool never_below = range.low && *range.low >= 0, above = range.low && *range.low > 0;
  const bool never_above = range.high && *range.high <= 0, below = range.high && *range.high < 0;
  switch (op) {
    case DimOp::kEq:
      if (above || below) return false;
      break;
    case DimOp::kNe:
      if (above || below) return true;
      break;
    case DimOp::kLt:
      if (below) return true;
      if (never_below) return false;
      break;
    case DimOp::kLe:
      if (never_above) return true;
      if (above) return false;
      break;
    case DimOp::kGt:
      if (above) return true;
      if (never_above) return false;
      break;
    case DimOp::kGe:
      if (never_below) return true;
      if (below) return false;
      break;
    default: break;
  }
  return std::nullopt;
}

bool SizeSymbols::decide(const Dim& condition, Asker asker) {
  std::scoped_lock lock(mutex_);
  const Dim asked = simplified_locked(condition);
  if (std::optional<bool> answer = known_locked(asked)) return *answer;
  if (asker == Asker::kOperator && is_layout_question(asked)) return asked.op() == DimOp::kNe;
  const bool holds = value_locked(asked) != 0;
  const Dim fact = holds ? asked : negated(asked);
  guard(fact);
  return holds;
}

// Operators compare sizes with 0 and 1 to choose among ways that give the same numbers. A
// comparison with another constant may be a requirement, for instance that the channels of an image
// are those of a norm. So is one of a remainder with 0.
bool SizeSymbols::is_layout_question(const Dim& condition) const {
  const DimOp op = condition.op();
  if (op != DimOp::kEq && op != DimOp::kNe) return false;
  const Dim &lhs = condition.lhs(), &rhs = condition.rhs();
  if (lhs.is_constant() == rhs.is_constant()) return false;
  const int64_t constant = lhs.is_constant() ? lhs.constant() : rhs.constant();
  if (constant > 1 && value_locked(lhs) == value_locked(rhs)) return false;
  if ((lhs.is_constant() ? rhs : lhs).op() == DimOp::kMod) return false;
  std::vector<std::string> names;
  condition.collect_symbols(names);
  return std::all_of(names.begin(), names.end(),
                     [&](const std::string& name) { return symbols_.at(name).is_size; });
}

bool SizeSymbols::is_unbacked(const Dim& dim) {
  std::vector<std::string> names;
  dim.collect_symbols(names);
  std::scoped_lock lock(mutex_);
  return std::any_of(names.begin(), names.end(),
                     [&](const std::string& name) { return symbols_.at(name).is_unbacked; });
}

int64_t SizeSymbols::value(const Dim& dim) {
  std::scoped_lock lock(mutex_);
  return value_locked(dim);
}

int64_t SizeSymbols::value_locked(const Dim& dim) const {
  auto lookup = [&](const std::string& name) -> std::optional<int64_t> {
    auto found = symbols_.find(name);
    return found == symbols_.end() ? std::nullopt : std::optional(found->second.value);
  };
  const std::optional<int64_t> value = dim.evaluate(lookup);
  ORT_CHECK(value, "sizes: ", dim.str(), " has a symbol that was not made here");
  return *value;
}

int64_t SizeSymbols::specialize(const Dim& dim) {
  std::scoped_lock lock(mutex_);
  const Dim now = simplified_locked(dim);
  if (now.is_constant()) return now.constant();
  const int64_t value = value_locked(now);
  guard(Dim::make(DimOp::kEq, now, value));
  return value;
}

std::vector<Dim> SizeSymbols::guards() {
  std::scoped_lock lock(mutex_);
  return guards_;
}

void SizeSymbols::guard(const Dim& condition) {
  std::vector<std::string> names;
  condition.collect_symbols(names);
  for (const std::string& name : names) {
    if (!symbols_.at(name).is_unbacked) continue;
    throw Unsupported(concat("sizes: what is done depends on ", condition.str(), ", and ", name,
                             " is unbacked: its value depends on data"));
  }
  guards_.push_back(condition);
  facts_.emplace_back(condition, true);
  facts_.emplace_back(negated(condition), false);
  learn(condition);
}

void SizeSymbols::learn(const Dim& condition) {
  const DimOp op = condition.op();
  if (op == DimOp::kAnd) {
    learn(condition.lhs());
    learn(condition.rhs());
  } else if (op == DimOp::kEq) {
    learn_equal(condition.lhs(), condition.rhs());
  } else if (is_relation(op)) {
    learn_bound(op, condition.lhs(), condition.rhs());
  }
}

void SizeSymbols::learn_equal(const Dim& a, const Dim& b) {
  for (const auto& [x, y] : equal_factors(a, b)) guard(Dim::make(DimOp::kEq, x, y));
  if (const auto rest = without_common_factors(a, b)) {
    guard(Dim::make(DimOp::kEq, rest->first, rest->second));
  }
  const Dim left = simplified_locked(a), right = simplified_locked(b);
  if (left == right) return;
  auto position = [&](const Dim& dim) { return symbols_.at(dim.name()).position; };
  const bool can_left = left.is_symbol() && !contains(right, left.name());
  const bool can_right = right.is_symbol() && !contains(left, right.name());
  // The later symbol is replaced by the earlier one.
  if (can_left && !(can_right && position(right) > position(left))) {
    replaced_.emplace(left.name(), right);
  } else if (can_right) {
    replaced_.emplace(right.name(), left);
  } else if (left.op() == DimOp::kMul && right.is_constant()) {
    // 8 * N == 32
    const bool is_first = left.lhs().is_symbol();
    const Dim& symbol = is_first ? left.lhs() : left.rhs();
    const Dim& factor = is_first ? left.rhs() : left.lhs();
    if (symbol.is_symbol() && factor.is_constant() && right.constant() % factor.constant() == 0) {
      replaced_.emplace(symbol.name(), right.constant() / factor.constant());
    }
  }
}

void SizeSymbols::learn_bound(DimOp op, const Dim& a, const Dim& b) {
  auto raise = [&](const Dim& symbol, int64_t low) {
    std::optional<int64_t>& bound = symbols_.at(symbol.name()).bounds.low;
    bound = std::max(bound.value_or(low), low);
  };
  auto lower = [&](const Dim& symbol, int64_t high) {
    std::optional<int64_t>& bound = symbols_.at(symbol.name()).bounds.high;
    bound = std::min(bound.value_or(high), high);
  };
  const Dim& symbol = a.is_symbol() ? a : b;
  const Dim& other = a.is_symbol() ? b : a;
  if (!symbol.is_symbol() || !other.is_constant()) return;
  const int64_t value = other.constant();
  if (op == DimOp::kNe) {
    const Bounds& range = symbols_.at(symbol.name()).bounds;
    if (range.low == value) raise(symbol, value + 1);
    return;
  }
  const bool is_mirrored = !a.is_symbol();  // 3 < N
  const bool is_less = (op == DimOp::kLt || op == DimOp::kLe) != is_mirrored;
  const int64_t gap = op == DimOp::kLt || op == DimOp::kGt ? 1 : 0;
  if (is_less) {
    lower(symbol, value - gap);
  } else {
    raise(symbol, value + gap);
  }
}

// Equations between sizes that follow from one between their products, if these are rows of tokens
// and rows of their labels. The products alone do not imply them, but the engine needs them to fuse
// nodes. A call in which only the products are equal is recorded again.
std::vector<std::pair<Dim, Dim>> SizeSymbols::equal_factors(const Dim& a, const Dim& b) const {
  std::vector<Dim> left, right;
  collect_factors(a, left);
  collect_factors(b, right);
  if (left.size() < 2 || left.size() != right.size()) return {};
  auto are_symbols = [](const std::vector<Dim>& dims) {
    return std::all_of(dims.begin(), dims.end(), [](const Dim& dim) { return dim.is_symbol(); });
  };
  if (!are_symbols(left) || !are_symbols(right)) return {};
  auto key = [&](const Dim& dim) {
    const Symbol& symbol = symbols_.at(dim.name());
    return std::pair(symbol.value, symbol.position);
  };
  auto before = [&](const Dim& x, const Dim& y) { return key(x) < key(y); };
  std::sort(left.begin(), left.end(), before);
  std::sort(right.begin(), right.end(), before);
  std::vector<std::pair<Dim, Dim>> pairs;
  for (size_t i = 0; i < left.size(); ++i) {
    if (key(left[i]).first != key(right[i]).first) return {};
    if (left[i] != right[i]) pairs.emplace_back(left[i], right[i]);
  }
  return pairs;
}

// N * C == N * 4 becomes C == 4, as long as N is not 0. Nothing if there are no common factors.
std::optional<std::pair<Dim, Dim>> SizeSymbols::without_common_factors(const Dim& a,
                                                                       const Dim& b) const {
  std::vector<Dim> left, right;
  collect_factors(a, left);
  collect_factors(b, right);
  const size_t all = left.size();
  std::erase_if(left, [&](const Dim& factor) {
    const auto found = std::find(right.begin(), right.end(), factor);
    if (factor.is_constant() || found == right.end()) return false;
    right.erase(found);
    return true;
  });
  if (left.size() == all) return std::nullopt;
  std::pair<Dim, Dim> rest = {ir::numel(left), ir::numel(right)};
  if (rest.first == rest.second || value_locked(rest.first) != value_locked(rest.second)) {
    return std::nullopt;
  }
  return rest;
}

SizeSymbols::Bounds SizeSymbols::bounds(const Dim& dim) const {
  if (dim.is_constant()) return {dim.constant(), dim.constant()};
  if (dim.is_symbol()) {
    auto found = symbols_.find(dim.name());
    return found == symbols_.end() ? Bounds{} : found->second.bounds;
  }
  if (dim.op() == DimOp::kNot || dim.op() >= DimOp::kEq) return {0, 1};
  const Bounds a = bounds(dim.lhs()), b = bounds(dim.rhs());
  // Bounds beyond this are treated as unknown, so that sums and products of two bounds fit into 64
  // bits.
  constexpr int64_t kFar = int64_t{1} << 30;
  auto near = [](std::optional<int64_t> value) {
    return value && *value > -kFar && *value < kFar ? value : std::nullopt;
  };
  const std::optional<int64_t> a_low = near(a.low), a_high = near(a.high);
  const std::optional<int64_t> b_low = near(b.low), b_high = near(b.high);
  auto sum = [](std::optional<int64_t> x, std::optional<int64_t> y, int64_t sign) {
    return x && y ? std::optional(*x + sign * *y) : std::nullopt;
  };
  switch (dim.op()) {
    case DimOp::kAdd: return {sum(a_low, b_low, 1), sum(a_high, b_high, 1)};
    case DimOp::kSub: return {sum(a_low, b_high, -1), sum(a_high, b_low, -1)};
    case DimOp::kMul: {
      const bool same_sign = a_low && b_low && *a_low >= 0 && *b_low >= 0;
      if (same_sign) {
        return {*a_low * *b_low,
                a_high && b_high ? std::optional(*a_high * *b_high) : std::nullopt};
      }
      auto times_negative = [](std::optional<int64_t> low, std::optional<int64_t> high,
                               int64_t factor) -> Bounds {
        return {high ? std::optional(*high * factor) : std::nullopt,
                low ? std::optional(*low * factor) : std::nullopt};
      };
      if (b_low && b_low == b_high && *b_low < 0) return times_negative(a_low, a_high, *b_low);
      if (a_low && a_low == a_high && *a_low < 0) return times_negative(b_low, b_high, *a_low);
      return {};
    }
    case DimOp::kFloorDiv:
      if (a_low && *a_low >= 0 && b_low && *b_low > 0) {
        return {b_high ? *a_low / *b_high : 0,
                a_high ? std::optional(*a_high / *b_low) : std::nullopt};
      }
      return {};
    case DimOp::kMod:
      if (b_low && *b_low > 0) {
        return {0, b_high ? std::optional(*b_high - 1) : std::nullopt};
      }
      return {};
    case DimOp::kMax: {
      if (!a_low || !b_low) return {a_low ? a_low : b_low, std::nullopt};
      return {std::max(*a_low, *b_low),
              a_high && b_high ? std::optional(std::max(*a_high, *b_high)) : std::nullopt};
    }
    case DimOp::kMin: {
      if (!a_high || !b_high) return {std::nullopt, a_high ? a_high : b_high};
      return {a_low && b_low ? std::optional(std::min(*a_low, *b_low)) : std::nullopt,
              std::min(*a_high, *b_high)};
    }
    default: return {};
  }
}

namespace {

Dim without_max(const Dim& dim) {
  if (dim.is_constant() || dim.is_symbol()) return dim;
  if (dim.op() == DimOp::kMax) {
    if (dim.lhs() == Dim(1)) return without_max(dim.rhs());
    if (dim.rhs() == Dim(1)) return without_max(dim.lhs());
  }
  if (dim.op() == DimOp::kNot) return dim;
  return Dim::make(dim.op(), without_max(dim.lhs()), without_max(dim.rhs()));
}

}  // namespace

std::vector<c10::SymInt> plain_strides(const std::vector<c10::SymInt>& strides) {
  std::vector<c10::SymInt> plain;
  for (const c10::SymInt& stride : strides) {
    if (!stride.is_heap_allocated()) {
      plain.push_back(stride);
      continue;
    }
    const SymNode held = stride.toSymNode();
    const Node* node = node_in(held);
    plain.push_back(node ? node->with(without_max(node->dim())) : stride);
  }
  return plain;
}

c10::SymInt size_over(const Dim& dim, const std::vector<c10::SymInt>& sizes) {
  if (dim.is_constant()) return dim.constant();
  for (const c10::SymInt& size : sizes) {
    if (!size.is_heap_allocated()) continue;
    const SymNode held = size.toSymNode();
    if (const Node* node = node_in(held)) return node->sizes()->expression(dim);
  }
  throw InternalError(concat("sizes: ", dim.str(), " is over symbols that no size is made of"));
}

std::optional<Dim> dim_of(const c10::SymInt& size) {
  if (!size.is_heap_allocated()) return Dim(size.as_int_unchecked());
  const SymNode held = size.toSymNode();
  if (const Node* node = node_in(held)) return node->dim();
  return std::nullopt;
}

std::optional<Dim> condition_of(const c10::SymBool& condition) {
  if (std::optional<bool> constant = condition.maybe_as_bool()) return Dim(*constant);
  const SymNode held = condition.toSymNodeImpl();
  if (const Node* node = node_in(held)) return node->dim();
  return std::nullopt;
}

std::optional<bool> known_without_guard(const c10::SymBool& condition) {
  if (std::optional<bool> constant = condition.maybe_as_bool()) return constant;
  const SymNode held = condition.toSymNodeImpl();
  if (Node* node = node_in(held)) return node->known();
  return std::nullopt;
}

std::optional<double> known_float(const SymNode& number) { return number_in(number); }

std::optional<int64_t> value_of(const c10::SymInt& size) {
  if (!size.is_heap_allocated()) return size.as_int_unchecked();
  const SymNode held = size.toSymNode();
  if (const Node* node = node_in(held)) return node->sizes()->value(node->dim());
  return std::nullopt;
}

bool depends_on_data(const c10::SymInt& size) {
  if (!size.is_heap_allocated()) return false;
  const SymNode held = size.toSymNode();
  const Node* node = node_in(held);
  return node != nullptr && node->sizes()->is_unbacked(node->dim());
}

std::optional<std::unordered_map<std::string, int64_t>> symbols_in(const c10::SymInt& size) {
  std::unordered_map<std::string, int64_t> values;
  if (!size.is_heap_allocated()) return values;
  const SymNode held = size.toSymNode();
  const Node* node = node_in(held);
  if (node == nullptr) return std::nullopt;
  std::vector<std::string> names;
  node->dim().collect_symbols(names);
  for (const std::string& name : names) {
    values.emplace(name, node->sizes()->value(Dim::symbol(name)));
  }
  return values;
}

}  // namespace torch_ort::capture
