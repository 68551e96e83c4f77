// Canonical form and evaluation of dims. Their text form is in dim_text.cpp.
#include "ir/dim.h"

#include "base/error.h"

#include <algorithm>
#include <limits>
#include <numeric>
#include <utility>

namespace torch_ort::ir {

struct Dim::Node {
  DimOp op;
  std::string name;  // of a symbol
  Dim lhs, rhs;
  size_t hash;
};

namespace {

constexpr int64_t kLowest = std::numeric_limits<int64_t>::min();
constexpr int kMaxUnrolledPower = 4;

size_t mix(size_t seed, size_t value) {
  return seed ^ (value + 0x9e3779b97f4a7c15ULL + (seed << 6) + (seed >> 2));
}

[[noreturn]] void raise_overflow(int64_t a, const char* op, int64_t b) {
  throw UserError(concat("dim: overflow: got ", a, " ", op, " ", b, ", want a result of 64 bits"));
}

int64_t add(int64_t a, int64_t b) {
  int64_t result;
  if (__builtin_add_overflow(a, b, &result)) raise_overflow(a, "+", b);
  return result;
}

int64_t subtract(int64_t a, int64_t b) {
  int64_t result;
  if (__builtin_sub_overflow(a, b, &result)) raise_overflow(a, "-", b);
  return result;
}

int64_t multiply(int64_t a, int64_t b) {
  int64_t result;
  if (__builtin_mul_overflow(a, b, &result)) raise_overflow(a, "*", b);
  return result;
}

// Division rounds down, and the remainder has the sign of the divisor, as in Python.
int64_t floor_divide(int64_t a, int64_t b) {
  if (b == 0)
    throw UserError(concat("dim: division by zero: got ", a, " // 0, want another divisor"));
  if (b == -1) return subtract(0, a);
  int64_t quotient = a / b;
  return (a % b != 0 && (a < 0) != (b < 0)) ? quotient - 1 : quotient;
}

int64_t modulo(int64_t a, int64_t b) {
  if (b == 0)
    throw UserError(concat("dim: division by zero: got ", a, " % 0, want another divisor"));
  if (b == -1) return 0;
  int64_t remainder = a % b;
  return (remainder != 0 && (remainder < 0) != (b < 0)) ? remainder + b : remainder;
}

int64_t power(int64_t base, int64_t exponent) {
  if (exponent < 0) {
    throw UserError(concat("dim: negative power: got ", base, "**", exponent, ", want an integer"));
  }
  int64_t result = 1;
  while (exponent > 0) {
    if (exponent & 1) result = multiply(result, base);
    exponent >>= 1;
    // The last square is not needed, and may not fit into 64 bits.
    if (exponent > 0) base = multiply(base, base);
  }
  return result;
}

int64_t apply(DimOp op, int64_t a, int64_t b) {
  switch (op) {
    case DimOp::kAdd: return add(a, b);
    case DimOp::kSub: return subtract(a, b);
    case DimOp::kMul: return multiply(a, b);
    case DimOp::kFloorDiv: return floor_divide(a, b);
    case DimOp::kMod: return modulo(a, b);
    case DimOp::kPow: return power(a, b);
    case DimOp::kMin: return std::min(a, b);
    case DimOp::kMax: return std::max(a, b);
    case DimOp::kEq: return a == b;
    case DimOp::kNe: return a != b;
    case DimOp::kLt: return a < b;
    case DimOp::kLe: return a <= b;
    case DimOp::kGt: return a > b;
    case DimOp::kGe: return a >= b;
    case DimOp::kAnd: return a != 0 && b != 0;
    case DimOp::kOr: return a != 0 || b != 0;
    case DimOp::kNot: return a == 0;
    case DimOp::kConstant:
    case DimOp::kSymbol: break;
  }
  throw InternalError(
      concat("dim: got operator ", static_cast<int>(op), ", want one of two operands"));
}

bool is_constant_of(const Dim& dim, int64_t value) {
  return dim.is_constant() && dim.constant() == value;
}

bool is_sum(const Dim& dim) { return dim.op() == DimOp::kAdd || dim.op() == DimOp::kSub; }

bool is_condition(const Dim& dim) { return dim.op() >= DimOp::kEq; }

// The canonical form of a sum is  c1*base1 + c2*base2 + ... + constant, with different bases in
// order. A base is neither an integer nor a sum, and has no constant factor. The tree is nested to
// the left.
struct Term {
  int64_t factor;
  Dim base;
};

struct Sum {
  std::vector<Term> terms;
  int64_t constant = 0;
};

void collect_terms(const Dim& dim, int64_t sign, Sum& sum) {
  switch (dim.op()) {
    case DimOp::kConstant:
      sum.constant =
          sign > 0 ? add(sum.constant, dim.constant()) : subtract(sum.constant, dim.constant());
      return;
    case DimOp::kAdd:
    case DimOp::kSub:
      collect_terms(dim.lhs(), sign, sum);
      collect_terms(dim.rhs(), dim.op() == DimOp::kAdd ? sign : -sign, sum);
      return;
    case DimOp::kMul:
      if (dim.lhs().is_constant()) {
        sum.terms.push_back({multiply(sign, dim.lhs().constant()), dim.rhs()});
        return;
      }
      [[fallthrough]];
    default: sum.terms.push_back({sign, dim});
  }
}

void merge_like_terms(Sum& sum) {
  std::stable_sort(sum.terms.begin(), sum.terms.end(),
                   [](const Term& a, const Term& b) { return Dim::compare(a.base, b.base) < 0; });
  std::vector<Term> merged;
  for (Term& term : sum.terms) {
    if (!merged.empty() && merged.back().base == term.base) {
      merged.back().factor = add(merged.back().factor, term.factor);
    } else {
      merged.push_back(std::move(term));
    }
  }
  std::erase_if(merged, [](const Term& term) { return term.factor == 0; });
  sum.terms = std::move(merged);
}

Sum sum_of(const Dim& dim) {
  Sum sum;
  collect_terms(dim, 1, sum);
  return sum;
}

Dim scaled(int64_t factor, const Dim& base) {
  return factor == 1 ? base : make_raw(DimOp::kMul, factor, base);
}

Dim build_sum(const Sum& sum) {
  if (sum.terms.empty()) return sum.constant;
  Dim result = scaled(sum.terms[0].factor, sum.terms[0].base);
  auto append = [&](int64_t sign_of, auto&& make_term) {
    // The lowest integer has no positive counterpart, so it is added rather than subtracted.
    bool is_negative = sign_of < 0 && sign_of != kLowest;
    result = make_raw(is_negative ? DimOp::kSub : DimOp::kAdd, result,
                      make_term(is_negative ? -sign_of : sign_of));
  };
  for (size_t i = 1; i < sum.terms.size(); ++i) {
    append(sum.terms[i].factor, [&](int64_t factor) { return scaled(factor, sum.terms[i].base); });
  }
  if (sum.constant != 0) append(sum.constant, [](int64_t value) { return Dim(value); });
  return result;
}

Dim make_sum(DimOp op, const Dim& a, const Dim& b) {
  Sum sum;
  collect_terms(a, 1, sum);
  collect_terms(b, op == DimOp::kAdd ? 1 : -1, sum);
  merge_like_terms(sum);
  return build_sum(sum);
}

// The largest integer that divides all parts of a sum, with the sign of the first part; 1 if there
// is a part that cannot be negated.
int64_t common_factor(const Sum& sum) {
  int64_t factor = 0;
  for (const Term& term : sum.terms) {
    if (term.factor == kLowest) return 1;
    factor = std::gcd(factor, term.factor);
  }
  if (sum.constant == kLowest) return 1;
  factor = std::gcd(factor, sum.constant);
  return sum.terms[0].factor < 0 ? -factor : factor;
}

void divide_exactly(Sum& sum, int64_t divisor) {
  for (Term& term : sum.terms) term.factor = floor_divide(term.factor, divisor);
  sum.constant = floor_divide(sum.constant, divisor);
}

// The canonical form of a product is an integer times factors in order. A factor that is a sum has
// no common factor, since that is part of the integer. If there is only one factor and it is a sum,
// the integer is multiplied into its terms.
struct Product {
  int64_t factor = 1;
  std::vector<Dim> factors;
};

void collect_factors(const Dim& dim, Product& product) {
  if (dim.is_constant()) {
    product.factor = multiply(product.factor, dim.constant());
  } else if (dim.op() == DimOp::kMul) {
    collect_factors(dim.lhs(), product);
    collect_factors(dim.rhs(), product);
  } else if (is_sum(dim)) {
    Sum sum = sum_of(dim);
    int64_t factor = common_factor(sum);
    product.factor = multiply(product.factor, factor);
    if (factor != 1) divide_exactly(sum, factor);
    product.factors.push_back(factor == 1 ? dim : build_sum(sum));
  } else {
    product.factors.push_back(dim);
  }
}

Product product_of(const Dim& dim) {
  Product product;
  collect_factors(dim, product);
  auto is_before = [](const Dim& a, const Dim& b) { return Dim::compare(a, b) < 0; };
  std::stable_sort(product.factors.begin(), product.factors.end(), is_before);
  return product;
}

Dim build_product(const Product& product) {
  if (product.factor == 0 || product.factors.empty()) return product.factor;
  if (product.factors.size() == 1 && is_sum(product.factors[0])) {
    Sum sum = sum_of(product.factors[0]);
    for (Term& term : sum.terms) term.factor = multiply(term.factor, product.factor);
    sum.constant = multiply(sum.constant, product.factor);
    return build_sum(sum);
  }
  Dim result = product.factors[0];
  for (size_t i = 1; i < product.factors.size(); ++i) {
    result = make_raw(DimOp::kMul, result, product.factors[i]);
  }
  return scaled(product.factor, result);
}

Dim make_product(const Dim& a, const Dim& b) {
  Product product = product_of(a);
  Product other = product_of(b);
  product.factor = multiply(product.factor, other.factor);
  auto middle =
      product.factors.insert(product.factors.end(), other.factors.begin(), other.factors.end());
  std::inplace_merge(product.factors.begin(), middle, product.factors.end(),
                     [](const Dim& x, const Dim& y) { return Dim::compare(x, y) < 0; });
  return build_product(product);
}

// a / b if the quotient is an expression for all values of the symbols; nothing otherwise.
std::optional<Dim> exact_quotient(const Dim& a, const Dim& b) {
  if (is_constant_of(b, 0)) return std::nullopt;
  if (b.is_constant()) {
    const int64_t divisor = b.constant();
    Sum sum = sum_of(a);
    auto divides = [&](int64_t value) { return modulo(value, divisor) == 0; };
    if (!divides(sum.constant)) return std::nullopt;
    for (const Term& term : sum.terms) {
      if (!divides(term.factor)) return std::nullopt;
    }
    divide_exactly(sum, divisor);
    return build_sum(sum);
  }
  if (is_constant_of(a, 0)) return Dim(0);
  Product product = product_of(a);
  const Product divisor = product_of(b);
  if (modulo(product.factor, divisor.factor) != 0) return std::nullopt;
  for (const Dim& factor : divisor.factors) {
    auto found = std::find(product.factors.begin(), product.factors.end(), factor);
    if (found == product.factors.end()) return std::nullopt;
    product.factors.erase(found);
  }
  product.factor = floor_divide(product.factor, divisor.factor);
  return build_product(product);
}

Dim make_quotient(const Dim& a, const Dim& b) {
  if (std::optional<Dim> quotient = exact_quotient(a, b)) return *quotient;
  return make_raw(DimOp::kFloorDiv, a, b);
}

Dim make_remainder(const Dim& a, const Dim& b) {
  if (exact_quotient(a, b)) return 0;
  return make_raw(DimOp::kMod, a, b);
}

Dim make_power(const Dim& a, const Dim& b) {
  if (is_constant_of(b, 0)) return 1;
  if (!b.is_constant() || b.constant() < 0 || b.constant() > kMaxUnrolledPower) {
    return make_raw(DimOp::kPow, a, b);
  }
  // Products have one order, so N**2 and N*N become equal.
  Dim result = a;
  for (int64_t i = 1; i < b.constant(); ++i) result = make_product(result, a);
  return result;
}

// The dim as a condition, which is 1 or 0.
Dim truth(const Dim& dim) { return is_condition(dim) ? dim : Dim::make(DimOp::kNe, dim, 0); }

Dim make_condition(DimOp op, const Dim& a, const Dim& b) {
  const bool are_equal = a == b;
  switch (op) {
    case DimOp::kEq:
    case DimOp::kLe:
    case DimOp::kGe:
      if (are_equal) return 1;
      break;
    case DimOp::kNe:
    case DimOp::kLt:
    case DimOp::kGt:
      if (are_equal) return 0;
      break;
    case DimOp::kAnd:
    case DimOp::kOr:
      if (are_equal) return truth(a);
      if (b.is_constant()) {
        const bool keeps_other = (op == DimOp::kAnd) == (b.constant() != 0);
        return keeps_other ? truth(a) : Dim(b.constant() != 0);
      }
      break;
    default: break;
  }
  return make_raw(op, a, b);
}

bool is_commutative(DimOp op) {
  switch (op) {
    case DimOp::kMin:
    case DimOp::kMax:
    case DimOp::kEq:
    case DimOp::kNe:
    case DimOp::kAnd:
    case DimOp::kOr: return true;
    // Sums and products are brought into order elsewhere.
    default: return false;
  }
}

// Whether constants may be computed now. An operation that would raise is left to evaluate().
bool can_fold(DimOp op, int64_t rhs) {
  if (op == DimOp::kFloorDiv || op == DimOp::kMod) return rhs != 0;
  return op != DimOp::kPow || rhs >= 0;
}

}  // namespace

Dim Dim::symbol(std::string name) {
  const size_t hash = mix(static_cast<size_t>(DimOp::kSymbol), std::hash<std::string>{}(name));
  Dim dim;
  dim.node_ = std::make_shared<const Node>(Node{DimOp::kSymbol, std::move(name), 0, 0, hash});
  return dim;
}

Dim make_raw(DimOp op, Dim a, Dim b) {
  const size_t hash = mix(mix(static_cast<size_t>(op), a.hash()), b.hash());
  Dim dim;
  dim.node_ = std::make_shared<const Dim::Node>(
      Dim::Node{op, std::string(), std::move(a), std::move(b), hash});
  return dim;
}

Dim Dim::make(DimOp op, Dim a, Dim b) {
  if (a.is_constant() && b.is_constant() && can_fold(op, b.constant_)) {
    return apply(op, a.constant_, b.constant_);
  }
  if (is_commutative(op) && compare(b, a) < 0) std::swap(a, b);
  switch (op) {
    case DimOp::kAdd:
    case DimOp::kSub:
      if (is_constant_of(b, 0)) return a;
      return make_sum(op, a, b);
    case DimOp::kMul:
      if (is_constant_of(b, 1)) return a;
      if (is_constant_of(a, 1)) return b;
      return make_product(a, b);
    case DimOp::kFloorDiv: return make_quotient(a, b);
    case DimOp::kMod: return make_remainder(a, b);
    case DimOp::kPow: return make_power(a, b);
    case DimOp::kMin:
    case DimOp::kMax: return a == b ? a : make_raw(op, a, b);
    case DimOp::kNot: return logical_not(a);
    default: return make_condition(op, a, b);
  }
}

Dim Dim::logical_not(Dim a) {
  if (a.is_constant()) return a.constant_ == 0;
  if (a.op() == DimOp::kNot) return truth(a.lhs());
  return make_raw(DimOp::kNot, std::move(a), 0);
}

int64_t Dim::constant() const {
  ORT_CHECK(is_constant(), "dim: got '", str(), "', want an integer");
  return constant_;
}

const std::string& Dim::name() const {
  ORT_CHECK(is_symbol(), "dim: got '", str(), "', want a symbol");
  return node_->name;
}

DimOp Dim::op() const { return node_ ? node_->op : DimOp::kConstant; }

const Dim& Dim::lhs() const {
  ORT_CHECK(node_ && node_->op != DimOp::kSymbol, "dim: got '", str(), "', want an expression");
  return node_->lhs;
}

const Dim& Dim::rhs() const {
  ORT_CHECK(node_ && node_->op != DimOp::kSymbol, "dim: got '", str(), "', want an expression");
  return node_->rhs;
}

std::optional<int64_t> Dim::evaluate(const SymbolLookup& lookup) const {
  if (!node_) return constant_;
  if (node_->op == DimOp::kSymbol) return lookup(node_->name);
  std::optional<int64_t> a = node_->lhs.evaluate(lookup);
  if (!a) return std::nullopt;
  std::optional<int64_t> b = node_->rhs.evaluate(lookup);
  if (!b) return std::nullopt;
  return apply(node_->op, *a, *b);
}

void Dim::collect_symbols(std::vector<std::string>& names) const {
  if (!node_) return;
  if (node_->op != DimOp::kSymbol) {
    node_->lhs.collect_symbols(names);
    node_->rhs.collect_symbols(names);
  } else if (std::find(names.begin(), names.end(), node_->name) == names.end()) {
    names.push_back(node_->name);
  }
}

size_t Dim::hash() const { return node_ ? node_->hash : std::hash<int64_t>{}(constant_); }

bool Dim::operator==(const Dim& other) const {
  if (node_ == other.node_) return node_ != nullptr || constant_ == other.constant_;
  if (!node_ || !other.node_ || node_->hash != other.node_->hash) return false;
  return compare(*this, other) == 0;
}

int Dim::compare(const Dim& a, const Dim& b) {
  if (a.node_ == b.node_) {
    if (a.node_) return 0;
    return a.constant_ < b.constant_ ? -1 : a.constant_ > b.constant_;
  }
  auto rank = [](const Dim& dim) {
    return dim.is_constant() ? 2 : dim.node_->op == DimOp::kSymbol ? 0 : 1;
  };
  if (rank(a) != rank(b)) return rank(a) - rank(b);
  if (a.node_->op != b.node_->op) return a.node_->op < b.node_->op ? -1 : 1;
  if (int order = a.node_->name.compare(b.node_->name)) return order;
  if (int order = compare(a.node_->lhs, b.node_->lhs)) return order;
  return compare(a.node_->rhs, b.node_->rhs);
}

bool is_constant(const Shape& shape) {
  return std::all_of(shape.begin(), shape.end(), [](const Dim& dim) { return dim.is_constant(); });
}

Dim numel(const Shape& shape) {
  Dim product = 1;
  for (const Dim& dim : shape) product = Dim::make(DimOp::kMul, product, dim);
  return product;
}

Shape contiguous_strides(const Shape& shape) {
  Shape strides(shape.size());
  Dim stride = 1;
  for (size_t i = shape.size(); i-- > 0;) {
    strides[i] = stride;
    if (!is_constant_of(shape[i], 0)) stride = Dim::make(DimOp::kMul, stride, shape[i]);
  }
  return strides;
}

}  // namespace torch_ort::ir
