// Leaves out logits that torch_ort.LinearCrossEntropy would write only because they are outputs.
// The rows of the linear layer become outputs in their place. From these, with the weight and the
// bias, the caller computes the logits when somebody reads them (LazyLogits).
//
// This is the only pass that changes what a graph returns, so it runs only where
// PassContext::lazy_logits asks for it. If logits are read and have a gradient, the gradient enters
// the backward half as before.
//
// Declines where a node of the graph reads the logits, where an output does not hold all rows of
// them, and where the weight or the bias is not an input of the graph, since the caller has no
// other values at hand.
#include "passes/lazy_logits.h"

#include "ir/edit.h"
#include "ops/linear_loss.h"
#include "ops/op.h"
#include "ops/shapes.h"
#include "ops/writer.h"
#include "passes/attention_words.h"
#include "passes/context.h"
#include "passes/halves.h"
#include "passes/known_sizes.h"
#include "passes/loss_words.h"
#include "passes/memory.h"
#include "passes/unread.h"

#include <algorithm>
#include <optional>

namespace torch_ort::passes {

namespace {

using attention::shape_of;
using attention::swaps_last_dims;
using ir::DType;
using ir::Graph;
using ir::Node;
using ir::Shape;
using ir::Type;
using ir::Value;

// Logits, or a view or cast of them, as an output of the graph or of its forward half.
struct LogitsOutput {
  Value* value;
  ir::Use use;
  // The dtypes that the logits are cast to on the way to the value, beginning with their own dtype.
  std::vector<DType> dtypes;
};

struct Found {
  std::vector<LogitsOutput> outputs;
  // The views and casts between the logits and the outputs.
  std::vector<Node*> made;
  // The fields that are the same for all outputs.
  LazyLogits form;
};

class Finder {
 public:
  explicit Finder(const Graph& graph) : graph_(graph), memory_(graph) {}

  std::optional<Found> find(const Node& loss) const {
    const ops::LinearLoss form = ops::linear_loss(loss);
    if (!form.has_logits) return std::nullopt;
    Value& logits = *loss.outputs[ops::LinearLoss::kLogits];
    Found found;
    found.form.soft_cap = form.soft_cap;
    if (!is_fusible_float(&logits) || !shape_of(logits)[1].is_constant()) return std::nullopt;
    found.form.classes = shape_of(logits)[1].constant();
    const std::optional<Source> weight = source(loss.inputs[1]);
    const std::optional<Source> bias =
        form.has_bias ? source(loss.inputs[3]) : Source{.input = -1, .is_turned = false};
    if (!weight || !bias || bias->is_turned) return std::nullopt;
    found.form.weight = weight->input;
    found.form.is_turned = weight->is_turned;
    found.form.bias = bias->input;
    if (!follow(logits, {logits.type.dtype}, found) || found.outputs.empty()) return std::nullopt;
    return found;
  }

 private:
  struct Source {
    int input;
    bool is_turned;
  };

  // The input of the graph that a value is, perhaps transposed, and cast at most once.
  std::optional<Source> source(const Value* value) const {
    Source found{.input = -1, .is_turned = false};
    bool is_cast = false;
    for (; value->producer != nullptr; value = value->producer->inputs[0]) {
      if (losses::is_cast(*value->producer) && !is_cast) {
        is_cast = true;
      } else if (swaps_last_dims(value->producer)) {
        found.is_turned = !found.is_turned;
      } else {
        return std::nullopt;
      }
    }
    const auto at = std::find(graph_.inputs.begin(), graph_.inputs.end(), value);
    if (at == graph_.inputs.end() || memory_.is_written(value)) return std::nullopt;
    found.input = static_cast<int>(at - graph_.inputs.begin());
    return found;
  }

  bool follow(Value& value, const std::vector<DType>& dtypes, Found& found) const {
    if (memory_.is_written(&value)) return false;
    for (const ir::Use& use : value.uses) {
      if (use.node == nullptr || is_border(use.node)) {
        found.outputs.push_back({&value, use, dtypes});
        continue;
      }
      Node& node = *use.node;
      if (use.index != 0 || !losses::keeps_rows(node)) return false;
      std::vector<DType> next = dtypes;
      if (losses::is_cast(node)) next.push_back(node.outputs[0]->type.dtype);
      found.made.push_back(&node);
      if (!follow(*node.outputs[0], next, found)) return false;
    }
    return true;
  }

  const Graph& graph_;
  const SharedMemory memory_;
};

void rewrite(Graph& graph, Node& loss, Found& found, std::vector<LazyLogits>& left_out) {
  Value* rows = loss.inputs[0];
  for (LogitsOutput& output : found.outputs) {
    ops::Writer write(graph, output.use.node);
    Shape shape = shape_of(*output.value);
    shape.back() = shape_of(*rows).back();
    Value* returned = shape == shape_of(*rows) ? rows : write.reshape(rows, shape);
    if (output.use.node == nullptr) {
      ir::set_output(graph, output.use.index, *returned);
    } else {
      ir::set_input(*output.use.node, output.use.index, returned);
    }
    LazyLogits made = found.form;
    made.output = output.use.index;
    made.dtypes = std::move(output.dtypes);
    left_out.push_back(std::move(made));
  }
  erase_unread(graph, found.made);
  ops::LinearLoss form = ops::linear_loss(loss);
  form.has_logits = false;
  ir::Attrs attrs;
  ops::write(form, attrs);
  std::vector<Value*> old = loss.outputs;
  old.erase(old.begin() + ops::LinearLoss::kLogits);
  std::vector<Type> types;
  for (const Value* value : old) types.push_back(value->type);
  ops::Writer write(graph, &loss);
  Node& made = write.add(loss.op, loss.inputs, types, attrs);
  for (size_t i = 0; i < old.size(); ++i) ir::replace_uses(*old[i], *made.outputs[i], graph);
  ir::erase(graph, loss);
}

}  // namespace

int lazy_logits(Graph& graph, PassContext& context) {
  if (context.lazy_logits == nullptr) return 0;
  int rewrites = 0;
  for (Node& node : graph.nodes) {
    if (!ir::is(&node, "LinearCrossEntropy", ir::kTorchOrtDomain)) continue;
    std::optional<Found> found = Finder(graph).find(node);
    if (!found) continue;
    if (!context.may_rewrite()) break;
    rewrite(graph, node, *found, *context.lazy_logits);
    ++rewrites;
  }
  return rewrites;
}

}  // namespace torch_ort::passes
