// What a node does in a fused region. The language that the code generators (cpu/, cuda/) speak is
// small: point-wise words (ops/words.h), reductions, labels that name a column, rows of a table,
// and random masks. Other nodes take part once passes/expand.cpp has written them in this language.
#pragma once

#include "ir/graph.h"
#include "ops/words.h"

#include <cstdint>
#include <optional>
#include <variant>
#include <vector>

namespace torch_ort::ops {

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

// What a row says of it: a word over all inputs, a kind, or a function that tells the form of a
// node with one output whose types are known.
using FusedFunction = FusedForm (*)(const ir::Node& node);
using FusedRule = std::variant<std::monostate, Pointwise, FusedForm::Kind, FusedFunction>;

// By op, dtypes and attributes of a node whose types are known; nothing is said about shapes.
FusedForm fused_form(const ir::Node& node);

// For functions of rows: a word over all inputs and `constants`, if it takes so many, and such
// dtypes.
FusedForm pointwise_form(const ir::Node& node, Pointwise op, std::vector<double> constants = {});

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
