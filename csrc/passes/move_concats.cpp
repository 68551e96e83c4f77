// Moves concatenations behind the point-wise nodes that read them, and slices before the point-wise
// nodes whose results they cut. The work in between is then done on parts, and a region writes each
// part into its place in the whole. So rotary embeddings, gated activations and their gradients
// need no additional pass over memory.
//
//   Mul(Concat(Neg(b), a), s)  ->  Concat(Mul(Neg(b), Slice(s)), Mul(a, Slice(s)))
//
// Declines if a part would have to be read from memory that now stays in the cache.

#include "ir/edit.h"
#include "ops/aten.h"
#include "ops/aten_names.h"
#include "ops/fusion.h"
#include "ops/op.h"
#include "ops/shapes.h"
#include "ops/writer.h"
#include "passes/context.h"
#include "passes/halves.h"
#include "passes/known_sizes.h"
#include "passes/memory.h"
#include "region/codegen.h"

#include <algorithm>
#include <map>
#include <optional>

namespace torch_ort::passes {

namespace {

using ir::Dim;
using ir::Graph;
using ir::Node;
using ir::Shape;
using ir::Type;
using ir::Value;
using Kind = ops::FusedForm::Kind;

// One part of an axis. Axes are counted from the end: -1 is the last one.
struct Part {
  int64_t axis, begin, size;
  bool operator<(const Part& other) const {
    return std::tie(axis, begin, size) < std::tie(other.axis, other.begin, other.size);
  }
};

// The size of an axis that is counted from the end; 1 if the value has no such axis.
Dim dim_at(const Value& value, int64_t axis) {
  const int64_t at = ops::rank_of(value) + axis;
  return at < 0 ? Dim(1) : (*value.type.shape)[at];
}

// Whether the node computes element by element and can be in a region.
bool is_pointwise(const Node* node) {
  if (node == nullptr || !ops::is_pure(*node)) return false;
  const Kind kind = ops::fused_form(*node).kind;
  return kind == Kind::kPointwise || (kind == Kind::kPass && ir::is(node, "Cast"));
}

bool is_fusible_concat(const Node* node) {
  return ir::is(node, "Concat") && ops::fused_form(*node).kind == Kind::kConcat;
}

// Whether a region passes the result of the node on without writing it to memory.
bool stays_in_cache(const Node* node) {
  if (node == nullptr) return false;
  const ops::FusedForm form = ops::fused_form(*node);
  if (form.kind == Kind::kNone || form.kind == Kind::kConcat) return false;
  if (!form.is_reduction()) return true;
  return ops::reduction_axes(*node)->back() + 1 ==
         static_cast<int64_t>(node->inputs[0]->type.shape->size());
}

bool is_only_use(const Value& value) { return value.uses.size() == 1; }

// The parts that a concatenation is made of, in order. Their sizes along the axis must be
// constants.
std::vector<Part> parts_of(const Node& concat) {
  const int64_t rank = ops::rank_of(*concat.outputs[0]);
  const int64_t axis = ops::wrap_axis(concat, ir::int_attr(concat.attrs, "axis", 0), rank) - rank;
  std::vector<Part> parts;
  int64_t begin = 0;
  for (const Value* input : concat.inputs) {
    const Dim size = dim_at(*input, axis);
    if (!size.is_constant()) return {};
    parts.push_back({axis, begin, size.constant()});
    begin += size.constant();
  }
  return parts;
}

class Mover {
 public:
  Mover(Graph& graph, PassContext& context)
      : graph_(graph),
        context_(context),
        memory_(graph),
        sizes_(graph),
        backward_(backward_nodes(graph)) {}

  int run() {
    int rewrites = 0;
    // Readers come after what they read, so one walk moves a concatenation behind any number of
    // nodes.
    for (Node& node : graph_.nodes) {
      if (node.is_erased()) continue;
      if (join_gradients_of_slices(node) || drop_copy(node) || sink(node)) ++rewrites;
    }
    for (auto node = graph_.nodes.rbegin(); node != graph_.nodes.rend(); ++node) {
      if (!node->is_erased() && raise_slices(*node)) ++rewrites;
    }
    return rewrites;
  }

 private:
  // ---- parts of values

  bool is_in_reach(const Value& value) const {
    return region::takes(&value) && sizes_.are_known(value) && !memory_.is_written(&value);
  }

  bool is_same_half(const Node& a, const Node& b) const {
    return backward_.contains(&a) == backward_.contains(&b);
  }

  // Whether a part of the value can be read at no cost. It can if the value is broadcast along the
  // axis, if it is in memory in any case, or if only `reader` reads it, so that it can be computed
  // in parts.
  bool can_cut(const Value& value, int64_t axis, const Node& reader) const {
    if (!is_in_reach(value)) return false;
    if (dim_at(value, axis) == Dim(1)) return true;
    // A size that is a symbol may turn out to be 1.
    if (!dim_at(value, axis).is_constant()) return false;
    const Node* maker = value.producer;
    if (is_pointwise(maker)) {
      return is_only_use(value) && is_same_half(*maker, reader) && can_cut_inputs(*maker, axis);
    }
    return !stays_in_cache(SharedMemory::root(&value)->producer);
  }

  bool can_cut_inputs(const Node& node, int64_t axis, const Value* but = nullptr) const {
    return std::all_of(node.inputs.begin(), node.inputs.end(), [&](const Value* input) {
      return input != nullptr && (input == but || can_cut(*input, axis, node));
    });
  }

  Value* cut(Value& value, const Part& part, Node& before) {
    if (dim_at(value, part.axis) == Dim(1)) return &value;
    if (Value* piece = piece_of_concat(value, part, before)) return piece;
    const auto [found, is_new] = cuts_.try_emplace({&value, part}, nullptr);
    if (!is_new) return found->second;
    if (is_pointwise(value.producer) && is_only_use(value)) {
      return cuts_[{&value, part}] = copy_on_part(*value.producer, part, nullptr, nullptr, before);
    }
    const std::vector<Value*> inputs = {&value, ints(part.begin), ints(part.begin + part.size),
                                        ints(ops::rank_of(value) + part.axis)};
    Node& slice = note(write(before).add({"", "Slice"}, inputs, {Type()}), before);
    return cuts_[{&value, part}] = slice.outputs[0];
  }

  Value* piece_of_concat(const Value& value, const Part& part, const Node& before) const {
    if (!is_fusible_concat(value.producer) || !is_same_half(*value.producer, before)) {
      return nullptr;
    }
    const std::vector<Part> parts = parts_of(*value.producer);
    for (size_t i = 0; i < parts.size(); ++i) {
      if (!(parts[i] < part) && !(part < parts[i])) return value.producer->inputs[i];
    }
    return nullptr;
  }

  // The node on one part of its operands. `piece` is this part of the operand `whole`.
  Value* copy_on_part(const Node& node, const Part& part, const Value* whole, Value* piece,
                      Node& before) {
    std::vector<Value*> inputs;
    for (Value* input : node.inputs) {
      inputs.push_back(input == whole ? piece : cut(*input, part, before));
    }
    Shape shape = *node.outputs[0]->type.shape;
    shape[ops::rank_of(*node.outputs[0]) + part.axis] = part.size;
    const Type type = ops::with_shape(node.outputs[0]->type, shape);
    return note(write(before).copy(node, inputs, {type}), before).outputs[0];
  }

  Value* ints(int64_t number) {
    Value*& made = ints_[number];
    if (made == nullptr) made = ops::Writer(graph_, nullptr).ints({Dim(number)});
    return made;
  }

  ops::Writer write(Node& before) { return ops::Writer(graph_, &before); }

  // A new node is in the same half as the node that it was written in front of.
  Node& note(Node& made, const Node& before) {
    if (backward_.contains(&before)) backward_.insert(&made);
    return made;
  }

  // Erases a node that nobody reads, and then its inputs if nobody reads these any more.
  void erase_unread(Node& node) {
    for (const Value* output : node.outputs) {
      if (output != nullptr && !output->uses.empty()) return;
    }
    const std::vector<Value*> inputs = node.inputs;
    ir::erase(graph_, node);
    for (const Value* input : inputs) {
      Node* maker = input == nullptr ? nullptr : input->producer;
      if (maker != nullptr && ops::is_pure(*maker) && is_in_reach(*input)) erase_unread(*maker);
    }
  }

  // ---- rewrites

  // Concat(a, b) in front of a point-wise node -> the node on each part, with the Concat after it.
  bool sink(Node& node) {
    if (!is_pointwise(&node)) return false;
    const auto slot = std::find_if(node.inputs.begin(), node.inputs.end(), [&](const Value* input) {
      return input != nullptr && can_sink(*input, node);
    });
    if (slot == node.inputs.end()) return false;
    Value& whole = **slot;
    const std::vector<Part> parts = parts_of(*whole.producer);
    if (parts.empty() || !can_cut_inputs(node, parts[0].axis, &whole) || !context_.may_rewrite()) {
      return false;
    }
    cuts_.clear();
    std::vector<Value*> pieces;
    for (size_t i = 0; i < parts.size(); ++i) {
      Value* piece = whole.producer->inputs[i];
      pieces.push_back(copy_on_part(node, parts[i], &whole, piece, node));
    }
    replace_by_concat(node, pieces, parts[0].axis);
    return true;
  }

  bool can_sink(const Value& whole, const Node& reader) const {
    const Node* concat = whole.producer;
    return is_fusible_concat(concat) && is_only_use(whole) && is_in_reach(whole) &&
           is_same_half(*concat, reader) && is_in_reach(*reader.outputs[0]) &&
           *whole.type.shape == *reader.outputs[0]->type.shape &&
           std::all_of(concat->inputs.begin(), concat->inputs.end(),
                       [this](const Value* part) { return is_in_reach(*part); });
  }

  void replace_by_concat(Node& node, const std::vector<Value*>& pieces, int64_t axis) {
    const Type type = node.outputs[0]->type;
    const int64_t rank = ops::rank_of(*node.outputs[0]);
    Node& concat =
        note(write(node).add({"", "Concat"}, pieces, {type}, {{"axis", Dim(rank + axis)}}), node);
    ir::replace_uses(*node.outputs[0], *concat.outputs[0], graph_);
    erase_unread(node);
  }

  // Slices of the result of a point-wise node -> the node on each part, if the readers of the
  // slices are nodes of regions.
  bool raise_slices(Node& node) {
    if (!is_pointwise(&node) || node.outputs[0]->uses.empty()) return false;
    Value& whole = *node.outputs[0];
    if (!is_in_reach(whole)) return false;
    const std::vector<std::pair<Part, Value*>> slices = slices_of(node);
    if (slices.empty()) return false;
    if (!can_cut_inputs(node, slices[0].first.axis) || !context_.may_rewrite()) return false;
    cuts_.clear();
    for (const auto& [part, slice] : slices) {
      Value* piece = copy_on_part(node, part, nullptr, nullptr, *slice->producer);
      ir::replace_uses(*slice, *piece, graph_);
    }
    const std::vector<ir::Use> uses = whole.uses;
    for (const ir::Use& use : uses) {
      if (!use.node->is_erased()) erase_unread(*use.node);
    }
    return true;
  }

  // The slices that read a node, if all its readers are slices along the same axis without common
  // elements. None of them may be empty: an operand of size 1 along the axis is not cut, whether it
  // is broadcast or as large as the result.
  std::vector<std::pair<Part, Value*>> slices_of(const Node& node) const {
    std::vector<std::pair<Part, Value*>> slices;
    for (const ir::Use& use : node.outputs[0]->uses) {
      if (use.node == nullptr || use.index != 0 || !is_same_half(*use.node, node)) return {};
      if (!add_slices(*use.node, slices)) return {};
    }
    std::sort(slices.begin(), slices.end(),
              [](const auto& a, const auto& b) { return a.first < b.first; });
    for (size_t i = 1; i < slices.size(); ++i) {
      const Part &before = slices[i - 1].first, &part = slices[i].first;
      if (part.axis != before.axis || part.begin < before.begin + before.size) return {};
    }
    return slices;
  }

  bool add_slices(const Node& reader, std::vector<std::pair<Part, Value*>>& slices) const {
    const bool is_split = ir::is(&reader, "Split");
    if (!is_split && !ir::is(&reader, "Slice")) return false;
    const Value& whole = *reader.inputs[0];
    std::optional<int64_t> axis, begin;
    if (is_split) {
      const int64_t at =
          ops::wrap_axis(reader, ir::int_attr(reader.attrs, "axis", 0), ops::rank_of(whole));
      axis = at - ops::rank_of(whole);
      begin = 0;
    } else {
      std::tie(axis, begin) = bounds_of(reader);
    }
    if (!axis) return false;
    for (Value* slice : reader.outputs) {
      const Dim size = slice == nullptr ? Dim(0) : dim_at(*slice, *axis);
      if (slice == nullptr || !size.is_constant()) return false;
      if (!slice->uses.empty()) {
        if (size == Dim(0) || !is_read_by_regions(*slice, reader)) return false;
        slices.emplace_back(Part{*axis, *begin, size.constant()}, slice);
      }
      *begin += size.constant();
    }
    return true;
  }

  // Axis and begin of a Slice along one axis of constant size with step 1.
  static std::pair<std::optional<int64_t>, std::optional<int64_t>> bounds_of(const Node& slice) {
    const Value& whole = *slice.inputs[0];
    for (size_t slot = 1; slot < slice.inputs.size(); ++slot) {
      if (!ops::has_known_ints(slice.inputs[slot])) return {};
    }
    if (slice.inputs.size() < 4) return {};
    const Shape starts = ops::known_ints(slice.inputs[1]), axes = ops::known_ints(slice.inputs[3]);
    const bool has_step =
        slice.inputs.size() > 4 && !(ops::known_ints(slice.inputs[4]) == Shape{1});
    if (axes.size() != 1 || has_step || !starts[0].is_constant()) return {};
    const int64_t axis =
        ops::wrap_axis(slice, axes[0].constant(), ops::rank_of(whole)) - ops::rank_of(whole);
    const Dim size = dim_at(whole, axis);
    if (!size.is_constant()) return {};
    const int64_t start = starts[0].constant();
    return {axis,
            std::clamp<int64_t>(start < 0 ? start + size.constant() : start, 0, size.constant())};
  }

  // Parts are row-major. If the whole was not, an operator of PyTorch that reads a part would now
  // give its results in another order.
  bool is_read_by_regions(const Value& slice, const Node& reader) const {
    const bool is_permuted = reader.inputs[0]->type.strides.has_value();
    return std::all_of(slice.uses.begin(), slice.uses.end(), [&](const ir::Use& use) {
      return use.node != nullptr && use.index >= 0 && is_same_half(*use.node, reader) &&
             (is_pointwise(use.node) || is_fusible_concat(use.node)) &&
             !(is_permuted && use.node->op.domain == ir::kAtenDomain);
    });
  }

  // A sum of the gradients of slices that divide an axis -> a concatenation: each place gets a
  // nonzero number from only one of them.
  bool join_gradients_of_slices(Node& node) {
    if (!ir::is(&node, "Add") || !is_in_reach(*node.outputs[0])) return false;
    // A sum of sums is rewritten as a whole, from the outermost sum.
    const auto& uses = node.outputs[0]->uses;
    if (uses.size() == 1 && ir::is(uses[0].node, "Add") && is_same_half(node, *uses[0].node)) {
      return false;
    }
    std::vector<Value*> terms;
    add_terms(node, node, terms);
    std::vector<std::pair<Part, Value*>> gradients;
    std::vector<Value*> others;
    for (Value* term : terms) {
      const std::optional<Part> part = part_of_gradient(*term, node);
      if (part && (gradients.empty() || gradients[0].first.axis == part->axis)) {
        gradients.emplace_back(*part, term);
      } else {
        others.push_back(term);
      }
    }
    std::sort(gradients.begin(), gradients.end(),
              [](const auto& a, const auto& b) { return a.first < b.first; });
    if (!covers(gradients, *node.outputs[0]) || !context_.may_rewrite()) return false;
    write_joined(node, gradients, others);
    return true;
  }

  void add_terms(const Node& sum, const Node& outermost, std::vector<Value*>& terms) const {
    for (Value* term : sum.inputs) {
      const bool is_sum = ir::is(term->producer, "Add") && is_only_use(*term) &&
                          is_same_half(*term->producer, outermost) &&
                          term->type == outermost.outputs[0]->type;
      if (is_sum) {
        add_terms(*term->producer, outermost, terms);
      } else {
        terms.push_back(term);
      }
    }
  }

  // Which part of `term` is the gradient of a slice, if only the sum reads it.
  std::optional<Part> part_of_gradient(const Value& term, const Node& sum) const {
    const Node* node = term.producer;
    if (node == nullptr || ops::key_of(*node) != ops::aten::kSliceBackward || !is_only_use(term) ||
        !is_in_reach(term) || !is_same_half(*node, sum) ||
        !(*term.type.shape == *sum.outputs[0]->type.shape)) {
      return std::nullopt;
    }
    const ops::Call call = ops::decode_aten(*node);
    const auto* gradient = std::get_if<Value*>(&call.args.at(0).value);
    const auto* start = std::get_if<Dim>(&call.args.at(3).value);
    const auto* step = std::get_if<Dim>(&call.args.at(5).value);
    if (gradient == nullptr || start == nullptr || step == nullptr || !start->is_constant() ||
        !(*step == Dim(1)) || !(*gradient)->type.is_known()) {
      return std::nullopt;
    }
    const int64_t rank = ops::rank_of(term);
    const int64_t axis =
        ops::wrap_axis(*node, std::get<Dim>(call.args.at(2).value).constant(), rank) - rank;
    const Dim size = dim_at(term, axis), width = dim_at(**gradient, axis);
    if (!size.is_constant() || !width.is_constant()) return std::nullopt;
    const int64_t begin =
        start->constant() < 0 ? start->constant() + size.constant() : start->constant();
    return Part{axis, begin, width.constant()};
  }

  static bool covers(const std::vector<std::pair<Part, Value*>>& parts, const Value& whole) {
    if (parts.size() < 2) return false;
    int64_t end = 0;
    for (const auto& [part, value] : parts) {
      if (part.begin != end || part.size == 0) return false;
      end += part.size;
    }
    return dim_at(whole, parts[0].first.axis) == Dim(end);
  }

  void write_joined(Node& sum, const std::vector<std::pair<Part, Value*>>& gradients,
                    const std::vector<Value*>& others) {
    const Type type = sum.outputs[0]->type;
    std::vector<Value*> pieces;
    for (const auto& [part, value] : gradients) {
      pieces.push_back(std::get<Value*>(ops::decode_aten(*value->producer).args.at(0).value));
    }
    const Dim axis = ops::rank_of(*sum.outputs[0]) + gradients[0].first.axis;
    Value* result =
        note(write(sum).add({"", "Concat"}, pieces, {type}, {{"axis", axis}}), sum).outputs[0];
    for (Value* other : others) {
      result = note(write(sum).add({"", "Add"}, {other, result}, {type}), sum).outputs[0];
    }
    ir::replace_uses(*sum.outputs[0], *result, graph_);
    erase_unread(sum);
  }

  // A transposed concatenation that is copied to row-major memory is written in the order of the
  // copy instead.
  bool drop_copy(Node& node) {
    if (!ir::is(&node, "Identity") || node.outputs[0]->type.strides) return false;
    const Value& seen = *node.inputs[0];
    Node* transpose = seen.producer;
    if (!ir::is(transpose, "Transpose") || !is_only_use(seen)) return false;
    Value& whole = *transpose->inputs[0];
    if (!ir::is(whole.producer, "Concat") || !is_only_use(whole)) return false;
    if (!is_in_reach(whole) || !is_in_reach(*node.outputs[0])) return false;
    if (!is_same_half(*whole.producer, node) || memory_.leaves(&whole) ||
        memory_.leaves(node.outputs[0]) || !context_.may_rewrite()) {
      return false;
    }
    const Shape order = ir::ints_attr(transpose->attrs, "perm", {});
    const Shape of_copy = ir::contiguous_strides(*node.outputs[0]->type.shape);
    Shape strides(order.size());
    for (size_t i = 0; i < order.size(); ++i) strides[order[i].constant()] = of_copy[i];
    const Type type = ops::view_type(whole.type, *whole.type.shape, strides);
    Node& old = *whole.producer;
    Node& concat = note(write(old).copy(old, old.inputs, {type}), old);
    Node& view =
        note(write(node).copy(*transpose, {concat.outputs[0]}, {node.outputs[0]->type}), node);
    ir::replace_uses(*node.outputs[0], *view.outputs[0], graph_);
    erase_unread(node);
    return true;
  }

  Graph& graph_;
  PassContext& context_;
  // Of the graph before the pass. Values that the pass makes are unknown to it; nothing writes to
  // them.
  const SharedMemory memory_;
  const KnownSizes sizes_;
  std::unordered_set<const Node*> backward_;
  std::map<std::pair<const Value*, Part>, Value*> cuts_;  // of the current rewrite
  std::map<int64_t, Value*> ints_;
};

}  // namespace

int move_concats(Graph& graph, PassContext& context) {
  int rewrites = 0;
  while (const int more = Mover(graph, context).run()) rewrites += more;
  return rewrites;
}

}  // namespace torch_ort::passes
