// Sizes that nodes compute from the shapes of tensors -> torch_ort.Dims, which holds them as
// expressions, since the engine computes no size by nodes. Files for other programs have such nodes
// (convert/expand_sizes.cpp). Only inputs that are read as integers change; nodes that become
// unread are erased. An input of one integer that is read in this way becomes a symbol of its name,
// whose value each call passes. If a file has no types for bodies of If and Loop, they come from
// the values that are passed to them.

#include "base/error.h"
#include "ir/edit.h"
#include "ops/broadcast.h"
#include "ops/control_flow.h"
#include "ops/op.h"
#include "ops/shapes.h"
#include "ops/writer.h"
#include "passes/context.h"
#include "passes/memory.h"

#include <algorithm>
#include <unordered_map>
#include <unordered_set>

namespace torch_ort::passes {

namespace {

using ir::Dim;
using ir::DimOp;
using ir::Graph;
using ir::Node;
using ir::Shape;
using ir::Type;
using ir::Value;
// Nothing if the integers depend on data.
using Sizes = std::optional<Shape>;

// A longer list of integers is taken for data.
constexpr int64_t kMostSizes = 64;
constexpr int kDeepest = 1000;

const std::unordered_map<std::string_view, DimOp> kArithmetic = {
    {"Add", DimOp::kAdd},      {"Sub", DimOp::kSub}, {"Mul", DimOp::kMul}, {"Pow", DimOp::kPow},
    {"Div", DimOp::kFloorDiv}, {"Mod", DimOp::kMod}, {"Min", DimOp::kMin}, {"Max", DimOp::kMax}};
const std::unordered_map<std::string_view, DimOp> kReductions = {{"ReduceSum", DimOp::kAdd},
                                                                 {"ReduceProd", DimOp::kMul},
                                                                 {"ReduceMin", DimOp::kMin},
                                                                 {"ReduceMax", DimOp::kMax}};

bool is_few_integers(const ir::Type& type) {
  const bool is_integer = type.dtype == ir::DType::kInt64 || type.dtype == ir::DType::kInt32;
  return is_integer && type.shape && type.shape->size() <= 1 && ir::is_constant(*type.shape) &&
         ir::numel(*type.shape).constant() <= kMostSizes;
}

// x if the division has the form (x - x % b) / b, which rounds down; nullptr otherwise.
const Value* rounded_down(const Node& division) {
  const Node* sub = division.inputs[0]->producer;
  if (!ir::is(sub, "Sub") || !ops::has_input(*sub, 1)) return nullptr;
  const Node* mod = sub->inputs[1]->producer;
  const bool is_rest = ir::is(mod, "Mod") && ops::has_input(*mod, 1) &&
                       mod->inputs[0] == sub->inputs[0] && mod->inputs[1] == division.inputs[1];
  return is_rest ? sub->inputs[0] : nullptr;
}

class SizeReader {
 public:
  explicit SizeReader(Graph& graph, bool names_sizes = false)
      : graph_(graph), names_sizes_(names_sizes), memory_(graph) {
    for (const Value& value : graph.values) {
      if (!value.type.shape) continue;
      for (const Dim& dim : *value.type.shape) dim.collect_symbols(symbols_);
    }
  }

  int run() {
    int rewrites = 0;
    for (Node& node : graph_.nodes) {
      if (node.is_erased()) continue;
      rewrites += rewrite_reads(node);
      if (ops::is_closed(node)) rewrites += read_bodies(node);
      // A file may lack types, and never has strides. Sizes that have become known determine more
      // types, and types more sizes.
      if (graph_.opset > 0) ops::infer_types(graph_, node);
      if (names_sizes_) name_sizes(node);
    }
    if (rewrites > 0) erase_unread();
    return rewrites;
  }

 private:
  // Reads a closed body of `node`. The inputs of the body may be sizes, which `outer` reads.
  SizeReader(Graph& body, SizeReader& outer, const Node& node)
      : SizeReader(body, outer.names_sizes_) {
    outer_ = &outer;
    node_ = &node;
  }

  // Where rules leave the shape of a point-wise result open, since symbols meet in it.
  static void name_sizes(const Node& node) {
    if (!ops::work_of(node).elementwise || node.outputs.size() != 1) return;
    Value* result = node.outputs[0];
    if (result == nullptr || result->type.shape) return;
    if (result->type.dtype == ir::DType::kUndefined) return;
    result->type.shape = ops::broadcast_with_symbols(node);
  }

  int rewrite_reads(Node& node) {
    int rewrites = 0;
    for (const int slot : ops::int_inputs(node)) {
      if (!ops::has_input(node, slot) || ops::has_known_ints(node.inputs[slot])) continue;
      const Value* value = node.inputs[slot];
      if (const Sizes sizes = read(value, 0)) {
        ir::set_input(node, slot, dims(value, *sizes, node));
        ++rewrites;
      }
    }
    return rewrites;
  }

  int read_bodies(Node& node) {
    ops::check_bodies(node);
    int rewrites = 0;
    for (const auto& body : ir::bodies(node)) {
      if (graph_.opset > 0) give_types(node, *body);
      rewrites += SizeReader(*body, *this, node).run();
    }
    return rewrites;
  }

  static void add_symbols(Graph& body, const std::unordered_set<std::string>& symbols) {
    const std::unordered_set<std::string> given(body.symbol_inputs.begin(),
                                                body.symbol_inputs.end());
    for (const std::string& name : symbols) {
      if (!given.contains(name)) body.symbol_inputs.push_back(name);
    }
    std::sort(body.symbol_inputs.begin(), body.symbol_inputs.end());
  }

  // Gives the inputs of a body the types of what the node passes to them, where the body states
  // none.
  void give_types(const Node& node, Graph& body) {
    const size_t offset = node.inputs.size() - body.inputs.size();
    const size_t own = ops::num_own_inputs(node);
    std::unordered_set<std::string> symbols;
    for (size_t i = std::max(own, offset); i < node.inputs.size(); ++i) {
      Value& inner = *body.inputs[i - offset];
      if (inner.type.is_known() || node.inputs[i] == nullptr) continue;
      inner.type = node.inputs[i]->type;
      ops::collect_symbols(inner.type, symbols);
    }
    add_symbols(body, symbols);
    if (own > 1) settle_carried(node, body);
  }

  // A value that a Loop carries may change its size from round to round. Dims that do become
  // symbols, which the tensor of each round determines.
  void settle_carried(const Node& node, Graph& body) {
    const std::vector<Type> own = {{.dtype = ir::DType::kInt64, .shape = Shape()},
                                   {.dtype = ir::DType::kBool, .shape = Shape()}};
    const size_t carried = ops::num_carried(node);
    std::vector<bool> is_declared;
    std::vector<Type> types;
    for (size_t i = 0; i < carried + 2; ++i) {
      is_declared.push_back(body.inputs[i]->type.is_known());
      const Type& given = i < 2 ? own[i] : ops::input(node, i).type;
      types.push_back(is_declared[i] ? body.inputs[i]->type : ops::with_shape(given, given.shape));
    }
    while (true) {
      const auto trial = ir::clone(body);
      for (size_t i = 0; i < types.size(); ++i) trial->inputs[i]->type = types[i];
      SizeReader(*trial, *this, node).run();
      bool is_settled = true;
      for (size_t i = 2; i < types.size(); ++i) {
        if (is_declared[i]) continue;
        const Type made = ops::common_type(node, body.inputs[i]->name, types[i],
                                           trial->outputs[i - 1]->type, known_in(*trial));
        const Type next = ops::with_shape(made, made.shape);
        is_settled = is_settled && next == types[i];
        types[i] = next;
      }
      if (is_settled) break;
    }
    for (size_t i = 0; i < types.size(); ++i) body.inputs[i]->type = types[i];
  }

  // The symbols whose value is the same in all rounds.
  static std::unordered_set<std::string> known_in(const Graph& body) {
    std::unordered_set<std::string> known(body.symbol_inputs.begin(), body.symbol_inputs.end());
    for (const Value* input : body.inputs) ops::collect_symbols(input->type, known);
    return known;
  }

  Value* dims(const Value* of, const Shape& sizes, Node& before) {
    Value*& made = made_[of];
    if (made != nullptr) return made;
    const Type type{.dtype = ir::DType::kInt64, .shape = Shape{static_cast<int64_t>(sizes.size())}};
    return made = ops::Writer(graph_, &before).make_ours("Dims", {}, type, {{"dims", sizes}});
  }

  Sizes read(const Value* value, int depth) {
    if (value == nullptr || memory_.is_written(value)) return std::nullopt;
    if (const auto found = read_.find(value); found != read_.end()) return found->second;
    if (!is_few_integers(value->type) || depth == kDeepest) return std::nullopt;
    Sizes sizes;
    if (ops::has_known_ints(value)) {
      sizes = ops::known_ints(value);
    } else if (value->producer != nullptr) {
      sizes = computed(*value->producer, depth + 1);
    } else {
      sizes = outside(*value, depth + 1);
      if (!sizes) sizes = given(*value);
    }
    return read_[value] = sizes;
  }

  Sizes outside(const Value& value, int depth) {
    const auto found = std::find(graph_.inputs.begin(), graph_.inputs.end(), &value);
    if (outer_ == nullptr || found == graph_.inputs.end()) return std::nullopt;
    const size_t place = static_cast<size_t>(found - graph_.inputs.begin()) + node_->inputs.size() -
                         graph_.inputs.size();
    if (place < ops::num_own_inputs(*node_)) return std::nullopt;
    Sizes sizes = outer_->read(node_->inputs[place], depth);
    if (!sizes) return std::nullopt;
    std::unordered_set<std::string> symbols;
    ops::collect_symbols(Type{.shape = sizes}, symbols);
    add_symbols(graph_, symbols);
    return sizes;
  }

  Sizes given(const Value& value) {
    const bool is_input =
        value.data == nullptr && std::count(graph_.inputs.begin(), graph_.inputs.end(), &value) > 0;
    const bool is_other = std::count(symbols_.begin(), symbols_.end(), value.name) > 0;
    if (!is_input || is_other || !(ir::numel(*value.type.shape) == Dim(1))) return std::nullopt;
    auto& symbols = graph_.symbol_inputs;
    if (std::count(symbols.begin(), symbols.end(), value.name) == 0) symbols.push_back(value.name);
    return Shape{Dim::symbol(value.name)};
  }

  Sizes computed(const Node& node, int depth) {
    if (!node.op.domain.empty() || node.inputs.empty()) return std::nullopt;
    const std::string& op = node.op.name;
    if (op == "Concat") return joined(node, depth);
    if (op == "Gather") return gathered(node, depth);
    if (op == "Slice") return sliced(node, depth);
    if (ops::work_of(node).keeps_elements) return read(node.inputs[0], depth);
    if (const auto reduction = kReductions.find(op); reduction != kReductions.end())
      return reduced(node, reduction->second, depth);
    const auto arithmetic = kArithmetic.find(op);
    if (arithmetic == kArithmetic.end()) return std::nullopt;
    const bool takes_any_number = op == "Min" || op == "Max";
    if (node.inputs.size() != 2 && !takes_any_number) return std::nullopt;
    return calculated(node, arithmetic->second, depth);
  }

  Sizes joined(const Node& node, int depth) {
    Shape all;
    for (const Value* input : node.inputs) {
      const Sizes part = read(input, depth);
      if (!part) return std::nullopt;
      all.insert(all.end(), part->begin(), part->end());
    }
    return all;
  }

  Sizes gathered(const Node& node, int depth) {
    const Sizes from = read(&ops::input(node, 0), depth), at = read(&ops::input(node, 1), depth);
    if (!from || !at || !ir::is_constant(*at)) return std::nullopt;
    Shape picked;
    for (int64_t i : ops::wrap_axes(node, *at, static_cast<int64_t>(from->size())))
      picked.push_back((*from)[i]);
    return picked;
  }

  Sizes sliced(const Node& node, int depth) {
    const Sizes from = read(node.inputs[0], depth), start = read(&ops::input(node, 1), depth),
                end = read(&ops::input(node, 2), depth);
    const Sizes step = ops::has_input(node, 4) ? read(node.inputs[4], depth) : Shape{1};
    const auto is_number = [](const Sizes& sizes) {
      return sizes && sizes->size() == 1 && sizes->front().is_constant();
    };
    if (!from || !is_number(start) || !is_number(end) || step != Shape{1}) return std::nullopt;
    const auto size = static_cast<int64_t>(from->size());
    const auto place = [size](const Sizes& at) {
      const int64_t given = at->front().constant();
      return std::clamp<int64_t>(given < 0 ? given + size : given, 0, size);
    };
    const int64_t first = place(start), last = std::max(first, place(end));
    return Shape(from->begin() + first, from->begin() + last);
  }

  Sizes reduced(const Node& node, DimOp op, int depth) {
    // The list has one dim, so that axes can only be that one.
    if (ir::int_attr(node.attrs, "noop_with_empty_axes", 0) != 0) return std::nullopt;
    const Sizes from = read(node.inputs[0], depth);
    if (!from || from->empty()) return std::nullopt;
    Dim result = from->front();
    for (size_t i = 1; i < from->size(); ++i) result = Dim::make(op, result, (*from)[i]);
    return Shape{result};
  }

  Sizes calculated(const Node& node, DimOp op, int depth) {
    if (op == DimOp::kMod && ir::int_attr(node.attrs, "fmod", 0) != 0) return std::nullopt;
    const Value* whole = op == DimOp::kFloorDiv ? rounded_down(node) : nullptr;
    Sizes result = read(node.inputs[0], depth);
    if (result && whole != nullptr) result = read(whole, depth);
    for (size_t i = 1; result && i < node.inputs.size(); ++i) {
      const Sizes next = read(node.inputs[i], depth);
      if (!next) return std::nullopt;
      // A division of Dims rounds down, whereas Div rounds towards zero. They differ if a number is
      // negative.
      const bool may_differ = op == DimOp::kFloorDiv && whole == nullptr;
      result = combined(*result, *next, op, may_differ);
    }
    return result;
  }

  Sizes combined(const Shape& a, const Shape& b, DimOp op, bool must_be_natural) const {
    const bool fits = a.size() == b.size() || a.size() == 1 || b.size() == 1;
    if (a.empty() || b.empty() || !fits) return std::nullopt;
    Shape result;
    for (size_t i = 0; i < std::max(a.size(), b.size()); ++i) {
      const Dim &x = a[a.size() == 1 ? 0 : i], &y = b[b.size() == 1 ? 0 : i];
      if (must_be_natural && !(is_natural(x) && is_natural(y))) return std::nullopt;
      result.push_back(Dim::make(op, x, y));
    }
    return result;
  }

  bool is_natural(const Dim& dim) const {
    if (dim.is_constant()) return dim.constant() >= 0;
    if (dim.is_symbol()) {
      const auto& given = graph_.symbol_inputs;
      return std::find(given.begin(), given.end(), dim.name()) == given.end();
    }
    return dim.op() != DimOp::kSub && is_natural(dim.lhs()) && is_natural(dim.rhs());
  }

  void erase_unread() {
    for (auto node = graph_.nodes.rbegin(); node != graph_.nodes.rend(); ++node) {
      if (node->is_erased() || node->outputs.size() != 1 || !read_.contains(node->outputs[0]))
        continue;
      if (node->outputs[0]->uses.empty()) ir::erase(graph_, *node);
    }
  }

  Graph& graph_;
  const bool names_sizes_;
  SizeReader* outer_ = nullptr;
  const Node* node_ = nullptr;  // the node of `outer` whose body this is
  const SharedMemory memory_;
  std::vector<std::string> symbols_;  // those in the shapes of the graph
  std::unordered_map<const Value*, Sizes> read_;
  std::unordered_map<const Value*, Value*> made_;
};

}  // namespace

int read_sizes(Graph& graph, PassContext& context) {
  return SizeReader(graph, context.names_sizes).run();
}

}  // namespace torch_ort::passes
