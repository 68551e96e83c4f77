// Casts of parameters -> one torch_ort.Casts for all of the same dtypes, if the device has a kernel
// for it. Autocast casts each weight just before the product that reads it, which on a GPU is a
// launch for each. Only in training graphs, and only for casts that backward reads as well, or that
// have at most one dim: all results live from the first reader to the last, as they do in
// autocast's own cache.

#include "ir/edit.h"
#include "ops/op.h"
#include "ops/writer.h"
#include "passes/context.h"
#include "passes/halves.h"
#include "passes/memory.h"
#include "region/codegen.h"

#include <algorithm>
#include <map>

namespace torch_ort::passes {

namespace {

using ir::Node;
using ir::Value;

bool lies_by_rows(const ir::Type& type) {
  return type.is_known() && (!type.strides || *type.strides == ir::contiguous_strides(*type.shape));
}

class Finder {
 public:
  explicit Finder(const ir::Graph& graph) : memory_(graph), backward_(backward_nodes(graph)) {}

  bool is_one(const Node& node) const {
    if (node.is_erased() || !ir::is(&node, "Cast") || backward_.contains(&node)) return false;
    const Value *from = node.inputs[0], *to = node.outputs[0];
    if (to == nullptr || from->producer != nullptr || from->data != nullptr) return false;
    if (!ir::is_float(from->type.dtype) || !ir::is_float(to->type.dtype)) return false;
    if (!lies_by_rows(from->type) || !lies_by_rows(to->type)) return false;
    if (memory_.is_written(from) || memory_.is_written(to) || memory_.leaves(to)) return false;
    if (!region::has_kernel(from, "Casts") || !region::has_kernel(to, "Casts")) return false;
    return to->type.shape->size() <= 1 || is_read_by_backward(*to);
  }

 private:
  // Whether backward reads the value, directly or through a view.
  bool is_read_by_backward(const Value& value) const {
    return std::any_of(value.uses.begin(), value.uses.end(), [this](const ir::Use& use) {
      if (use.node == nullptr || backward_.contains(use.node)) return true;
      if (use.index != 0 || !ops::is_view(*use.node)) return false;
      const auto& views = use.node->outputs;
      return std::any_of(views.begin(), views.end(), [this](const Value* view) {
        return view != nullptr && is_read_by_backward(*view);
      });
    });
  }

  const SharedMemory memory_;
  const std::unordered_set<const Node*> backward_;
};

void join(ir::Graph& graph, const std::vector<Node*>& casts) {
  std::vector<Value*> inputs;
  std::vector<ir::Type> types;
  for (const Node* cast : casts) {
    inputs.push_back(cast->inputs[0]);
    types.push_back(cast->outputs[0]->type);
  }
  ops::Writer write(graph, casts.front());
  const Node& joined = write.add({ir::kTorchOrtDomain, "Casts"}, std::move(inputs), types,
                                 {{"to", ir::Dim(static_cast<int64_t>(types.front().dtype))}});
  for (size_t i = 0; i < casts.size(); ++i) {
    ir::replace_uses(*casts[i]->outputs[0], *joined.outputs[i], graph);
    ir::erase(graph, *casts[i]);
  }
}

}  // namespace

int join_casts(ir::Graph& graph, PassContext& context) {
  if (backward_nodes(graph).empty()) return 0;
  const Finder finder(graph);
  std::map<std::pair<ir::DType, ir::DType>, std::vector<Node*>> found;
  for (Node& node : graph.nodes) {
    if (!finder.is_one(node)) continue;
    found[{node.inputs[0]->type.dtype, node.outputs[0]->type.dtype}].push_back(&node);
  }
  int rewrites = 0;
  for (const auto& [dtypes, casts] : found) {
    if (casts.size() < 2) continue;
    if (!context.may_rewrite()) break;
    join(graph, casts);
    ++rewrites;
  }
  return rewrites;
}

}  // namespace torch_ort::passes
