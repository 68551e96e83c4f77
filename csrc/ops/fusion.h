// What a node does in a fused region. The language that the code generators (cpu/, cuda/) speak is
// small: point-wise operations, reductions, labels that name a column, rows of a table, and random
// masks. Other nodes take part once passes/expand.cpp has written them in this language.
#pragma once

#include "ir/graph.h"

#include <cstdint>
#include <optional>
#include <vector>

namespace torch_ort::ops {

enum class Pointwise : uint8_t {
  // one operand
  kCopy,
  kNeg,
  kAbs,
  kExp,
  kLog,
  kSqrt,
  kReciprocal,
  kTanh,
  kErf,
  kSigmoid,
  kRelu,
  kFloor,
  kCeil,
  kRound,
  kTrunc,
  kSign,
  kSin,
  kCos,
  kNot,
  kIsNan,
  kToBool,
  kToBFloat16,  // rounded, and still a wide number
  kToHalf,
  kGelu,
  kGeluTanh,
  kSilu,
  // two operands
  kAdd,
  kSub,
  kMul,
  kDiv,
  kPow,
  kMax,
  kMin,
  kEqual,
  kLess,
  kLessOrEqual,
  kGreater,
  kGreaterOrEqual,
  kAnd,
  kOr,
  kXor,
  kGeluGrad,      // gradient, input
  kGeluTanhGrad,  // gradient, input
  kSiluGrad,      // gradient, input
  kTanhGrad,      // gradient, result
  kSigmoidGrad,   // gradient, result
  // three operands
  kThresholdGrad,  // gradient, input, threshold
  kWhere,          // condition, x, y
  kMulAdd,         // a * b + c
  kCount,
};

constexpr int num_operands(Pointwise op) {
  if (op < Pointwise::kAdd) return 1;
  return op < Pointwise::kThresholdGrad ? 2 : 3;
}

// Whether it costs so much that a region is faster than PyTorch's kernel even for it alone.
bool is_costly(Pointwise op);

const char* name(Pointwise op);  // "Add", as dumps of programs show it

struct FusedForm {
  enum class Kind : uint8_t {
    kNone,  // cannot be part of a region
    kPass,  // the same elements in the same order: Reshape, Identity, a cast that keeps numbers
    kPointwise,  // `op` over the inputs, then `constants`
    kSum,        // along axes (known integers)
    kMean,
    kMax,
    kMin,
    kPick,     // RowPick
    kScatter,  // RowScatter
    kValid,    // RowValid
    kRandom,   // PhiloxMask
    kConcat,   // equal parts side by side along an axis; it leaves the region
    kGather,   // rows of a table, which integers name
  } kind = Kind::kNone;
  Pointwise op = Pointwise::kCopy;
  std::vector<double> constants;

  bool is_reduction() const { return kind >= Kind::kSum && kind <= Kind::kMin; }
  bool has_label() const { return kind >= Kind::kPick && kind <= Kind::kValid; }
};

// By op, dtypes and attributes of a node whose types are known; nothing is said about shapes.
FusedForm fused_form(const ir::Node& node);

// Whether a region with this node computes in float64: it reads or makes numbers that a float does
// not hold.
bool wants_double(const ir::Node& node, const FusedForm& form);

// Axes of a reduction, counted from the front and sorted. Nothing if data tells them.
std::optional<std::vector<int64_t>> reduction_axes(const ir::Node& node);

// The number that an initializer without elements but one holds.
std::optional<double> known_double(const ir::Value* value);

// What a torch_ort.SizeRatio node says: factor * numerator / denominator.
struct SizeRatio {
  double factor = 1;
  ir::Dim numerator = 1, denominator = 1;
};
SizeRatio size_ratio(const ir::Node& node);

// The body of a torch_ort.Region node. InternalError if it has none.
const ir::Graph& region_body(const ir::Node& region);

}  // namespace torch_ort::ops
