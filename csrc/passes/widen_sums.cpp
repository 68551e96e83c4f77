// Cast(ReduceSum(x)) of short floats to float32 -> ReduceSum(Cast(x)). These are gradients of
// biases under autocast, whose parameters are float32. The region that computes x, or else one that
// reads it, adds in float32 in any case, and so writes what the parameter gets: a kernel and a
// tensor less for each bias, and digits that the shorter dtype would lose. On CUDA alone, where a
// kernel costs more than its few numbers.

#include "ir/edit.h"
#include "ops/fusion.h"
#include "ops/op.h"
#include "ops/writer.h"
#include "passes/context.h"
#include "passes/known_sizes.h"
#include "passes/memory.h"
#include "passes/unread.h"
#include "region/codegen.h"

#include <optional>
#include <vector>

namespace torch_ort::passes {

namespace {

using ir::DType;
using ir::Value;

bool is_short(const Value& value) {
  return value.type.is_known() && ir::is_short_float(value.type.dtype);
}

// The views between a value and what they view, each read by nothing but the next; outermost first.
std::vector<ir::Node*> only_views_of(const Value& value) {
  std::vector<ir::Node*> views;
  const Value* at = &value;
  while (at->uses.size() == 1 && ir::is(at->producer, "Reshape")) {
    views.push_back(at->producer);
    at = at->producer->inputs[0];
  }
  return views;
}

// A sum of short floats that only this cast reads, through views.
struct ShortSum {
  ir::Node* sum;
  std::vector<ir::Node*> views;  // outermost first
};

std::optional<ShortSum> widened(const ir::Node& cast, const SharedMemory& memory,
                                const KnownSizes& sizes) {
  if (!ir::is(&cast, "Cast") || cast.outputs[0] == nullptr) return std::nullopt;
  if (cast.outputs[0]->type.dtype != DType::kFloat) return std::nullopt;
  ShortSum found{nullptr, only_views_of(*cast.inputs[0])};
  const Value& summed = found.views.empty() ? *cast.inputs[0] : *found.views.back()->inputs[0];
  found.sum = summed.producer;
  if (!ir::is(found.sum, "ReduceSum") || summed.uses.size() != 1) return std::nullopt;
  // Only a region casts what it adds without writing it to memory.
  if (!ops::fused_form(*found.sum).is_reduction()) return std::nullopt;
  const Value& x = *found.sum->inputs[0];
  const bool fits = is_short(x) && is_short(summed) && !ir::is_host(x.type.device) &&
                    region::takes(&x) && sizes.are_known(x) && !memory.is_written(&x) &&
                    !memory.is_written(&summed);
  return fits ? std::optional(found) : std::nullopt;
}

void widen(ir::Graph& graph, ir::Node& cast, const ShortSum& found) {
  ops::Writer write(graph, &cast);
  const auto copy = [&](const ir::Node& node, Value* x) {
    std::vector<Value*> inputs = node.inputs;
    inputs[0] = x;
    ir::Type type = node.outputs[0]->type;
    type.dtype = DType::kFloat;
    return write.copy(node, std::move(inputs), {type}).outputs[0];
  };
  Value* wide = copy(*found.sum, write.cast(found.sum->inputs[0], DType::kFloat));
  for (auto view = found.views.rbegin(); view != found.views.rend(); ++view) {
    wide = copy(**view, wide);
  }
  ir::replace_uses(*cast.outputs[0], *wide, graph);
  std::vector<ir::Node*> replaced = {&cast, found.sum};
  replaced.insert(replaced.end(), found.views.begin(), found.views.end());
  erase_unread(graph, replaced);
}

}  // namespace

int widen_sums(ir::Graph& graph, PassContext& context) {
  const SharedMemory memory(graph);
  const KnownSizes sizes(graph);
  int rewrites = 0;
  for (ir::Node& node : graph.nodes) {
    if (node.is_erased()) continue;
    const std::optional<ShortSum> sum = widened(node, memory, sizes);
    if (!sum) continue;
    if (!context.may_rewrite()) return rewrites;
    widen(graph, node, *sum);
    ++rewrites;
  }
  return rewrites;
}

}  // namespace torch_ort::passes
