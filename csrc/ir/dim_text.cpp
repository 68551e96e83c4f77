// Dims as text: the printer, with as few parentheses as the parser needs, and the parser.
#include "base/error.h"
#include "ir/dim.h"

#include <charconv>
#include <limits>

namespace torch_ort::ir {

namespace {

// Precedence of operators, in Python's order.
enum Level { kCompare, kOr, kAnd, kSum, kProduct, kUnary, kPower, kAtom };

bool is_negation(const Dim& dim) { return dim.lhs().is_constant() && dim.lhs().constant() == -1; }

Level level_of(const Dim& dim) {
  switch (dim.op()) {
    case DimOp::kConstant: return dim.constant() < 0 ? kUnary : kAtom;
    case DimOp::kSymbol:
    case DimOp::kMin:
    case DimOp::kMax: return kAtom;
    case DimOp::kAdd:
    case DimOp::kSub: return kSum;
    case DimOp::kMul: return is_negation(dim) && level_of(dim.rhs()) >= kPower ? kUnary : kProduct;
    case DimOp::kFloorDiv:
    case DimOp::kMod: return kProduct;
    case DimOp::kPow: return kPower;
    case DimOp::kNot: return kUnary;
    case DimOp::kAnd: return kAnd;
    case DimOp::kOr: return kOr;
    default: return kCompare;
  }
}

const char* sign_of(DimOp op) {
  switch (op) {
    case DimOp::kAdd: return " + ";
    case DimOp::kSub: return " - ";
    case DimOp::kMul: return "*";
    case DimOp::kFloorDiv: return " // ";
    case DimOp::kMod: return " % ";
    case DimOp::kPow: return "**";
    case DimOp::kEq: return " == ";
    case DimOp::kNe: return " != ";
    case DimOp::kLt: return " < ";
    case DimOp::kLe: return " <= ";
    case DimOp::kGt: return " > ";
    case DimOp::kGe: return " >= ";
    case DimOp::kAnd: return " & ";
    case DimOp::kOr: return " | ";
    default: return "";
  }
}

void print(const Dim& dim, std::string& out);

void print_operand(const Dim& dim, bool needs_parentheses, std::string& out) {
  if (needs_parentheses) out += '(';
  print(dim, out);
  if (needs_parentheses) out += ')';
}

void print_operand(const Dim& dim, Level lowest, std::string& out) {
  print_operand(dim, level_of(dim) < lowest, out);
}

// `a // b*c` would be correct without parentheses, but easy to misread.
void print_factor(const Dim& dim, std::string& out) {
  print_operand(dim, level_of(dim) <= kProduct && dim.op() != DimOp::kMul, out);
}

void print_product(const Dim& dim, std::string& out) {
  if (is_negation(dim)) {
    out += '-';
  } else {
    print_factor(dim.lhs(), out);
    out += '*';
  }
  // The parser moves the constant factor of `2*N*T` to the front, so `N*T` needs no parentheses.
  print_factor(dim.rhs(), out);
}

void print(const Dim& dim, std::string& out) {
  const Level level = level_of(dim);
  switch (dim.op()) {
    case DimOp::kConstant: out += std::to_string(dim.constant()); return;
    case DimOp::kSymbol: out += dim.name(); return;
    case DimOp::kMul: print_product(dim, out); return;
    case DimOp::kMin:
    case DimOp::kMax:
      out += dim.op() == DimOp::kMin ? "min(" : "max(";
      print(dim.lhs(), out);
      out += ", ";
      print(dim.rhs(), out);
      out += ')';
      return;
    case DimOp::kNot:
      out += '!';
      print_operand(dim.lhs(), kUnary, out);
      return;
    case DimOp::kPow:
      print_operand(dim.lhs(), kAtom, out);
      out += "**";
      print_operand(dim.rhs(), kUnary, out);
      return;
    default: break;
  }
  // Operators group from the left; comparisons do not chain.
  print_operand(dim.lhs(), level == kCompare ? kOr : level, out);
  out += sign_of(dim.op());
  print_operand(dim.rhs(), static_cast<Level>(level + 1), out);
}

// Limits the depth of recursion, here and in everything that walks over an expression.
constexpr size_t kMaxLength = 4096;
constexpr int kMaxDepth = 200;

class Parser {
 public:
  explicit Parser(std::string_view text) : text_(text) {}

  Dim parse() {
    if (text_.size() > kMaxLength) {
      throw UserError(concat("dim: expression too long: got ", text_.size(),
                             " characters, want at most ", kMaxLength));
    }
    Dim dim = comparison();
    skip_spaces();
    if (position_ < text_.size()) fail("an operator or the end");
    return dim;
  }

 private:
  // Counts the depth of parentheses and unary operators.
  struct Nested {
    explicit Nested(Parser& parser) : depth(parser.depth_) {
      if (++depth > kMaxDepth) {
        throw UserError(concat("dim: nested too deep: got more than ", kMaxDepth,
                               " levels, want a simpler expression"));
      }
    }
    ~Nested() { --depth; }
    int& depth;
  };

  [[noreturn]] void fail(std::string_view want) const {
    std::string got = position_ < text_.size()
                          ? concat("'", text_.substr(position_, 1), "' at ", position_)
                          : std::string("the end of the text");
    throw UserError(concat("dim: bad expression '", text_, "': got ", got, ", want ", want));
  }

  void skip_spaces() {
    while (position_ < text_.size() && (text_[position_] == ' ' || text_[position_] == '\t')) {
      ++position_;
    }
  }

  // Takes `sign` if it comes next and is not the beginning of `longer`.
  bool take(std::string_view sign, std::string_view longer = "") {
    skip_spaces();
    std::string_view rest = text_.substr(position_);
    if (!rest.starts_with(sign) || (!longer.empty() && rest.starts_with(longer))) return false;
    position_ += sign.size();
    return true;
  }

  void expect(std::string_view sign) {
    if (!take(sign)) fail(concat("'", sign, "'"));
  }

  Dim comparison() {
    static constexpr std::pair<std::string_view, DimOp> kSigns[] = {
        {"==", DimOp::kEq}, {"!=", DimOp::kNe}, {"<=", DimOp::kLe},
        {">=", DimOp::kGe}, {"<", DimOp::kLt},  {">", DimOp::kGt}};
    Dim left = disjunction();
    for (auto [sign, op] : kSigns) {
      if (take(sign)) return Dim::make(op, left, disjunction());
    }
    return left;
  }

  Dim disjunction() {
    Dim left = conjunction();
    while (take("|")) left = Dim::make(DimOp::kOr, left, conjunction());
    return left;
  }

  Dim conjunction() {
    Dim left = sum();
    while (take("&")) left = Dim::make(DimOp::kAnd, left, sum());
    return left;
  }

  Dim sum() {
    Dim left = product();
    while (true) {
      if (take("+")) {
        left = Dim::make(DimOp::kAdd, left, product());
      } else if (take("-")) {
        left = Dim::make(DimOp::kSub, left, product());
      } else {
        return left;
      }
    }
  }

  Dim product() {
    Dim left = unary();
    while (true) {
      if (take("*", "**")) {
        left = Dim::make(DimOp::kMul, left, unary());
      } else if (take("//")) {
        left = Dim::make(DimOp::kFloorDiv, left, unary());
      } else if (take("%")) {
        left = Dim::make(DimOp::kMod, left, unary());
      } else {
        return left;
      }
    }
  }

  Dim unary() {
    Nested nested(*this);
    if (take("!")) return Dim::logical_not(unary());
    if (!take("-")) return raised();
    // The lowest integer has no positive counterpart.
    static constexpr std::string_view kLowestDigits = "9223372036854775808";
    if (take(kLowestDigits)) {
      if (position_ < text_.size() && is_name_character(text_[position_])) fail("a 64-bit integer");
      return std::numeric_limits<int64_t>::min();
    }
    return Dim::make(DimOp::kMul, -1, unary());
  }

  Dim raised() {
    Dim base = atom();
    return take("**") ? Dim::make(DimOp::kPow, base, unary()) : base;
  }

  Dim atom() {
    skip_spaces();
    if (take("(")) {
      Dim inner = comparison();
      expect(")");
      return inner;
    }
    const char first = position_ < text_.size() ? text_[position_] : '\0';
    if (first >= '0' && first <= '9') return integer();
    if (first == '.' || !is_name_character(first)) fail("an integer, a symbol or '('");
    return symbol_or_function();
  }

  Dim integer() {
    int64_t value = 0;
    const char* begin = text_.data() + position_;
    auto [end, error] = std::from_chars(begin, text_.data() + text_.size(), value);
    if (error != std::errc()) fail("a 64-bit integer");
    position_ += end - begin;
    if (position_ < text_.size() && is_name_character(text_[position_])) {
      fail("an operator or the end");
    }
    return value;
  }

  Dim symbol_or_function() {
    const size_t begin = position_;
    while (position_ < text_.size() && is_name_character(text_[position_])) ++position_;
    std::string_view name = text_.substr(begin, position_ - begin);
    if (!take("(")) return Dim::symbol(std::string(name));
    if (name != "min" && name != "max") {
      throw UserError(
          concat("dim: unknown function in '", text_, "': got '", name, "', want min or max"));
    }
    Dim left = comparison();
    expect(",");
    Dim right = comparison();
    expect(")");
    return Dim::make(name == "min" ? DimOp::kMin : DimOp::kMax, left, right);
  }

  // std::isalnum depends on the locale.
  static bool is_name_character(char c) {
    return (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') || (c >= '0' && c <= '9') || c == '_' ||
           c == '.';
  }

  std::string_view text_;
  size_t position_ = 0;
  int depth_ = 0;
};

}  // namespace

std::string Dim::str() const {
  std::string out;
  print(*this, out);
  return out;
}

Dim Dim::parse(std::string_view text) { return Parser(text).parse(); }

std::string to_string(const Shape& shape) {
  std::string out = "[";
  for (const Dim& dim : shape) {
    if (out.size() > 1) out += ',';
    print(dim, out);
  }
  return out + "]";
}

Shape parse_shape(std::string_view text) {
  if (text.size() < 2 || text.front() != '[' || text.back() != ']') {
    throw UserError(concat("dim: bad list: got '", text, "', want dims in brackets"));
  }
  text = text.substr(1, text.size() - 2);
  Shape shape;
  if (text.empty()) return shape;
  int depth = 0;
  size_t begin = 0;
  for (size_t i = 0; i <= text.size(); ++i) {
    // Commas in parentheses, such as that of min(a, b), do not separate sizes.
    if (i < text.size() && text[i] == '(') ++depth;
    if (i < text.size() && text[i] == ')') --depth;
    if (i < text.size() && (text[i] != ',' || depth > 0)) continue;
    shape.push_back(Dim::parse(text.substr(begin, i - begin)));
    begin = i + 1;
  }
  return shape;
}

}  // namespace torch_ort::ir
