// What a node computes in a fused region. The code generators (cpu/, cuda/) know a small language:
// point-wise words (ops/words.h), reductions, class labels that select a column, rows of a table,
// and random masks. Composite nodes such as norms and losses take part after
// passes/expand_composites.cpp has expressed them in this language.
#pragma once

#include "ir/graph.h"
#include "ops/call.h"
#include "ops/words.h"

#include <cstdint>
#include <optional>
#include <variant>
#include <vector>

namespace torch_ort::ops {

struct FusedForm {
  enum class Kind : uint8_t {
    kNone,  // it cannot be part of a region
    // The same elements in the same order: Reshape, Identity, a cast that preserves the numbers.
    kPass,
    kPointwise,  // `op` applied to the inputs, then to `constants`
    kSum,        // along axes that are constant
    kMean,
    kMax,
    kMin,
    kPick,     // RowPick
    kScatter,  // RowScatter
    kValid,    // RowValid
    kRandom,   // PhiloxMask
    // Equal parts, concatenated along an axis. The result is an output of the region.
    kConcat,
    kGather,  // rows of a table that integers select
  } kind = Kind::kNone;
  Pointwise op = Pointwise::kCopy;
  std::vector<double> constants;

  bool is_reduction() const { return kind >= Kind::kSum && kind <= Kind::kMin; }
  bool has_label() const { return kind >= Kind::kPick && kind <= Kind::kValid; }
};

// How the row of an op gives the form: one word over all inputs, a kind, or a function of a node
// that has one output and known types.
using FusedFunction = FusedForm (*)(const ir::Node& node);
using FusedRule = std::variant<std::monostate, Pointwise, FusedForm::Kind, FusedFunction>;

// The form of a node whose types are known, by its op, dtypes and attributes. Shapes are not looked
// at.
FusedForm fused_form(const ir::Node& node);

// For the functions in rows: the form of `op` over all inputs and `constants`; kNone if the word
// takes another number of operands, or not these dtypes.
FusedForm pointwise_form(const ir::Node& node, Pointwise op, std::vector<double> constants = {});

// Whether a region with this node computes in float64, because the node reads or produces numbers
// that a float cannot represent.
bool wants_double(const ir::Node& node, const FusedForm& form);

// The axes of a reduction, counted from the front and sorted. Nothing if they depend on data.
std::optional<std::vector<int64_t>> reduction_axes(const ir::Node& node);

// The number that an initializer of one element holds; nothing for any other value.
std::optional<double> known_double(const ir::Value* value);
// The number of an argument; nothing if it is none, or one that is known only when the graph runs.
std::optional<double> as_double(const Arg& number);

// The value of a torch_ort.SizeRatio node: factor * numerator / denominator.
struct SizeRatio {
  double factor = 1;
  ir::Dim numerator = 1, denominator = 1;
};
SizeRatio size_ratio(const ir::Node& node);

// The body of a torch_ort.Region node. InternalError if it has none.
const ir::Graph& region_body(const ir::Node& region);

}  // namespace torch_ort::ops
