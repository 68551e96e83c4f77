// torch_ort.Dims as standard nodes. Every size is an int64 vector of one element, made where it is
// read first, from the shape of the first tensor that has it.
#include "convert/portable.h"
#include "ir/edit.h"
#include "ops/writer.h"

#include <algorithm>

namespace torch_ort::convert {

namespace {

using ir::Dim;
using ir::DimOp;
using ir::Graph;
using ir::Node;
using ir::Type;
using ir::Value;

const char* op_of(DimOp op) {
  switch (op) {
    case DimOp::kAdd: return "Add";
    case DimOp::kSub: return "Sub";
    case DimOp::kMul: return "Mul";
    case DimOp::kFloorDiv: return "Div";
    case DimOp::kMod: return "Mod";
    case DimOp::kPow: return "Pow";
    case DimOp::kMin: return "Min";
    case DimOp::kMax: return "Max";
    default: return nullptr;
  }
}

bool has_node(const Dim& dim) {
  if (dim.is_constant() || dim.is_symbol()) return true;
  return op_of(dim.op()) != nullptr && has_node(dim.lhs()) && has_node(dim.rhs());
}

class SizeWriter {
 public:
  explicit SizeWriter(Graph& graph) : graph_(graph) {
    for (Value* input : graph.inputs) note_sizes(input);
    std::erase_if(graph.symbol_inputs, [&](const auto& name) { return sources_.contains(name); });
  }

  int run() {
    int rewrites = 0;
    for (Node& node : graph_.nodes) {
      if (node.is_erased()) continue;
      if (ir::is(&node, "Dims", ir::kTorchOrtDomain)) {
        if (expand(node)) ++rewrites;
        continue;
      }
      // A closed body gets what it reads as inputs of its node, so only other bodies are rewritten.
      if (node.op.domain.empty()) {
        for (const auto& body : ir::bodies(node)) rewrites += SizeWriter(*body, *this, node).run();
      }
      for (Value* output : node.outputs) {
        if (output != nullptr) note_sizes(output);
      }
    }
    return rewrites;
  }

 private:
  // Writes sizes in a body of `node`.
  SizeWriter(Graph& graph, SizeWriter& outer, Node& node)
      : graph_(graph), outer_(&outer), node_(&node) {
    for (Value* input : graph.inputs) note_sizes(input);
  }

  void note_sizes(Value* value) {
    if (!value->type.shape) return;
    for (size_t axis = 0; axis < value->type.shape->size(); ++axis) {
      const Dim& dim = (*value->type.shape)[axis];
      if (dim.is_symbol()) sources_.try_emplace(dim.name(), Source{value, axis});
    }
  }

  bool expand(Node& dims) {
    const ir::Shape sizes = ir::ints_attr(dims.attrs, "dims", {});
    if (!std::all_of(sizes.begin(), sizes.end(), [&](auto& dim) { return can_write(dim); })) {
      return false;
    }
    at_ = &dims;
    std::vector<Value*> parts;
    for (const Dim& dim : sizes) parts.push_back(size(dim));
    Value* result = parts.size() == 1 ? parts[0] : make("Concat", parts, {{"axis", Dim(0)}});
    ir::replace_uses(*dims.outputs[0], *result, graph_);
    ir::erase(graph_, dims);
    return true;
  }

  struct Source {
    Value* input;
    size_t axis;
  };

  bool can_write(const Dim& dim) const {
    std::vector<std::string> names;
    dim.collect_symbols(names);
    return has_node(dim) && std::all_of(names.begin(), names.end(),
                                        [&](const auto& name) { return can_write(name); });
  }

  bool can_write(const std::string& name) const {
    const auto& given = graph_.symbol_inputs;
    return sizes_.contains(name) || sources_.contains(name) ||
           std::find(given.begin(), given.end(), name) != given.end() ||
           (outer_ != nullptr && outer_->can_write(name));
  }

  // Nodes are named for people who read the file.
  Value* make(const char* op, std::vector<Value*> inputs, ir::Attrs attrs = {},
              std::string_view name = "size") {
    return ops::Writer(graph_, at_)
        .add_named(name, {"", op}, std::move(inputs), {Type()}, std::move(attrs))
        .outputs[0];
  }

  Value* ints(int64_t number) { return ops::Writer(graph_, at_).ints({number}); }

  Value* size(const Dim& dim) {
    const std::string text = dim.str();
    if (const auto known = sizes_.find(text); known != sizes_.end()) return known->second;
    Value* value = dim.is_constant() ? ints(dim.constant())
                   : dim.is_symbol() ? symbol(dim.name())
                                     : expression(dim);
    sizes_[text] = value;
    return value;
  }

  Value* expression(const Dim& dim) {
    Value *a = size(dim.lhs()), *b = size(dim.rhs());
    // Div rounds towards zero. Without the remainder the quotient is exact.
    if (dim.op() == DimOp::kFloorDiv) a = make("Sub", {a, make("Mod", {a, b})});
    return make(op_of(dim.op()), {a, b});
  }

  Value* symbol(const std::string& name) {
    if (const auto source = sources_.find(name); source != sources_.end()) {
      const auto& [input, axis] = source->second;
      Value*& shape = shapes_[input];
      if (shape == nullptr) shape = make("Shape", {input}, {}, input->name + "_shape");
      return make("Gather", {shape, ints(static_cast<int64_t>(axis))}, {}, name);
    }
    if (outer_ != nullptr) {
      outer_->at_ = node_;
      return &ir::capture(*node_, graph_, *outer_->size(Dim::symbol(name)));
    }
    std::erase(graph_.symbol_inputs, name);
    Value& given = ir::add_input(graph_, name, {.dtype = ir::DType::kInt64, .shape = ir::Shape{}});
    return make("Reshape", {&given, ints(1)});
  }

  Graph& graph_;
  SizeWriter* outer_ = nullptr;
  Node* node_ = nullptr;  // in the outer graph
  Node* at_ = nullptr;
  std::unordered_map<std::string, Source> sources_;
  std::unordered_map<std::string, Value*> sizes_;  // by their text
  std::unordered_map<const Value*, Value*> shapes_;
};

}  // namespace

int expand_sizes(Graph& graph) { return SizeWriter(graph).run(); }

}  // namespace torch_ort::convert
