// Assignments to parts of a tensor, such as `x[:, t] = y` in a loop, and sums of the gradients of
// parts that were read, such as `x[:, t]`. PyTorch's operators for both make a tensor of the size
// of the whole for each part: a loop over a sequence takes time that grows with the square of its
// length, in eager PyTorch in backward alone. These passes write torch_ort.SliceScatter nodes
// (ops/slice_scatter.h), which need the time of the part where they can overwrite the whole.
//
// scatter_slices:
//   select_scatter(x, copy(_, y), 1, 3)             -> SliceScatter(y[:, None], x)
//   SliceScatter(SliceScatter(y, x[2:]), x)         -> SliceScatter(y, x)   a part of a part
//   Slice(SliceScatter(y, x))                       -> Slice(x), or Slice(y)
//   SliceScatter(b, SliceScatter(a, x))             -> Concat(a, b)         where both cover x
//
// add_slices, behind those that have better uses for sums of a few large parts:
//   Add(SliceScatter(a), slice_backward(b))         -> SliceScatter(b, SliceScatter(a))
//   and, where the two parts overlap,               -> SliceScatter(b + Slice(..), SliceScatter(a))
//
// Declines if bounds of a part depend on sizes, if memory is written or sizes are not known when a
// call begins, and between nodes of different halves or checkpoints.

#include "ir/edit.h"
#include "ops/aten.h"
#include "ops/aten_names.h"
#include "ops/creation.h"
#include "ops/op.h"
#include "ops/shapes.h"
#include "ops/slice_scatter.h"
#include "ops/writer.h"
#include "passes/arguments.h"
#include "passes/context.h"
#include "passes/halves.h"
#include "passes/known_sizes.h"
#include "passes/layouts.h"
#include "passes/memory.h"

#include <algorithm>
#include <optional>
#include <string>
#include <unordered_map>
#include <unordered_set>
#include <utility>
#include <vector>

namespace torch_ort::passes {

namespace {

using ir::Dim;
using ir::Graph;
using ir::Node;
using ir::Shape;
using ir::Type;
using ir::Value;
using ops::Stretch;

// For each dim of a tensor, the elements that belong to a part of it.
using Part = std::vector<Stretch>;

Part whole(const Value& value) {
  Part part;
  for (const Dim& size : *value.type.shape) part.push_back({.size = size});
  return part;
}

Stretch compose(const Stretch& outer, const Stretch& inner) {
  return {outer.begin + inner.begin * outer.step, inner.size, outer.step * inner.step};
}

// How a part lies to another one.
enum class Relation { kEqual, kInside, kApart, kOther };

bool has_elements(const Stretch& stretch) {
  return stretch.size.is_constant() && stretch.size.constant() > 0;
}

int64_t last_of(const Stretch& stretch) {
  return stretch.begin + (stretch.size.constant() - 1) * stretch.step;
}

bool is_apart(const Stretch& a, const Stretch& b) {
  if (a.step == b.step && (a.begin - b.begin) % a.step != 0) return true;
  return has_elements(a) && has_elements(b) && (last_of(a) < b.begin || last_of(b) < a.begin);
}

// `size`: that of the dim.
bool is_inside(const Stretch& a, const Stretch& b, const Dim& size) {
  if (a == b || b == Stretch{.size = size}) return true;
  return b.step == 1 && has_elements(a) && has_elements(b) && a.begin >= b.begin &&
         last_of(a) <= last_of(b);
}

Relation relation(const Part& a, const Part& b, const Shape& shape) {
  bool inside = true;
  for (size_t i = 0; i < a.size(); ++i) {
    if (is_apart(a[i], b[i])) return Relation::kApart;
    inside = inside && is_inside(a[i], b[i], shape[i]);
  }
  if (a == b) return Relation::kEqual;
  return inside ? Relation::kInside : Relation::kOther;
}

// A value seen as a part of another one. The part has all dims of that; `dims` says which of them
// each dim of the value is, in ascending order, and -1 stands for a dim of size 1 that the other
// value does not have. The others are of size 1 in the part.
struct View {
  Value* of = nullptr;  // nullptr: zeros
  Part part;
  std::vector<int64_t> dims;
};

View view_of(Value& value) {
  View view{.of = &value, .part = whole(value)};
  for (size_t i = 0; i < view.part.size(); ++i) view.dims.push_back(static_cast<int64_t>(i));
  return view;
}

bool has_dim(const View& view, int64_t dim) {
  return std::find(view.dims.begin(), view.dims.end(), dim) != view.dims.end();
}

bool is_same(const View& a, const View& b) {
  return a.of == b.of && a.part == b.part && a.dims == b.dims;
}

// A node that only reads a part of its input.
struct Read {
  Part part;             // of the input
  int64_t dropped = -1;  // the dim, of one element, that the result does not have
};

std::optional<int64_t> constant(const Dim& dim) {
  return dim.is_constant() ? std::optional(dim.constant()) : std::nullopt;
}

// A bound that may count from the end; nothing if it depends on sizes.
std::optional<int64_t> wrapped(const Dim& bound, const Dim& size) {
  if (!bound.is_constant()) return std::nullopt;
  if (bound.constant() >= 0) {
    return size.is_constant() ? std::min(bound.constant(), size.constant()) : bound.constant();
  }
  if (!size.is_constant()) return std::nullopt;
  return std::max<int64_t>(0, bound.constant() + size.constant());
}

std::optional<Read> read_of_slice(const Node& node) {
  const Value &x = *node.inputs[0], &y = *node.outputs[0];
  if (!x.type.shape || !y.type.shape || x.type.shape->size() != y.type.shape->size()) {
    return std::nullopt;
  }
  const auto rank = static_cast<int64_t>(x.type.shape->size());
  const auto ints = [&](size_t slot) {
    const bool is_known = slot < node.inputs.size() && node.inputs[slot] != nullptr &&
                          ops::has_known_ints(node.inputs[slot]);
    return is_known ? std::optional(ops::known_ints(node.inputs[slot])) : std::nullopt;
  };
  const std::optional<Shape> starts = ints(1), axes = ints(3);
  const Shape steps = ints(4).value_or(Shape(starts ? starts->size() : 0, Dim(1)));
  if (!starts || !axes || axes->size() != starts->size() || steps.size() != starts->size()) {
    return std::nullopt;
  }
  Read read{.part = whole(x)};
  for (size_t i = 0; i < axes->size(); ++i) {
    const auto axis = static_cast<size_t>(ops::wrap_axis(node, axes->at(i).constant(), rank));
    const std::optional<int64_t> begin = wrapped(starts->at(i), x.type.shape->at(axis));
    const std::optional<int64_t> step = constant(steps[i]);
    if (!begin || !step || *step < 1) return std::nullopt;
    read.part[axis] = {*begin, y.type.shape->at(axis), *step};
  }
  return read;
}

std::optional<Read> read_of_select(const Node& node) {
  const Value &x = *node.inputs[0], &index = *node.inputs[1];
  if (!x.type.shape || !index.type.shape || !index.type.shape->empty()) return std::nullopt;
  const std::optional<double> number = ops::known_double(&index);
  if (!number) return std::nullopt;
  const auto rank = static_cast<int64_t>(x.type.shape->size());
  const int64_t axis = ops::wrap_axis(node, ir::int_attr(node.attrs, "axis", 0), rank);
  const std::optional<int64_t> begin =
      wrapped(static_cast<int64_t>(*number), x.type.shape->at(static_cast<size_t>(axis)));
  if (!begin) return std::nullopt;
  Read read{.part = whole(x), .dropped = axis};
  read.part[static_cast<size_t>(axis)] = {.begin = *begin, .size = 1};
  return read;
}

std::optional<Read> read_of(const Node* node) {
  if (node == nullptr || node->outputs.empty() || node->outputs[0] == nullptr) return std::nullopt;
  if (ir::is(node, "Slice")) return read_of_slice(*node);
  if (ir::is(node, "Gather")) return read_of_select(*node);
  return std::nullopt;
}

// The same view, of what the viewed value is a view of; nothing if it is none.
std::optional<View> step_down(const View& view) {
  const Node* node = view.of->producer;
  if (const std::optional<Read> read = read_of(node)) {
    View below{.of = node->inputs[0], .part = read->part, .dims = view.dims};
    size_t at = 0;
    for (size_t i = 0; i < below.part.size(); ++i) {
      if (static_cast<int64_t>(i) == read->dropped) continue;
      below.part[i] = compose(below.part[i], view.part[at++]);
    }
    for (int64_t& dim : below.dims) {
      if (read->dropped >= 0 && dim >= read->dropped) ++dim;
    }
    return below;
  }
  if (ir::is(node, "Unsqueeze") && node->inputs[0]->type.shape &&
      ops::has_known_ints(node->inputs[1])) {
    const auto rank = static_cast<int64_t>(view.part.size());
    const std::vector<int64_t> added =
        ops::wrap_axes(*node, ops::known_ints(node->inputs[1]), rank);
    View below{.of = node->inputs[0], .dims = view.dims};
    std::vector<int64_t> renamed;
    for (int64_t i = 0; i < rank; ++i) {
      const bool is_added = std::find(added.begin(), added.end(), i) != added.end();
      renamed.push_back(is_added ? -1 : static_cast<int64_t>(below.part.size()));
      if (!is_added) below.part.push_back(view.part[static_cast<size_t>(i)]);
    }
    for (int64_t& dim : below.dims) dim = dim < 0 ? dim : renamed[static_cast<size_t>(dim)];
    return below;
  }
  return std::nullopt;
}

bool is_slice_scatter(const Node* node) {
  return ir::is(node, "SliceScatter", ir::kTorchOrtDomain);
}

Value& written(const Node& scatter) { return *scatter.inputs[0]; }

Value* base_of(const Node& scatter) {
  return scatter.inputs.size() > 1 ? scatter.inputs[1] : nullptr;
}

bool is_single_axis(const Part& part, const Shape& shape, size_t& axis) {
  size_t num_cut = 0;
  for (size_t i = 0; i < part.size(); ++i) {
    if (part[i] == Stretch{.size = shape[i]}) continue;
    axis = i;
    ++num_cut;
  }
  return num_cut == 1;
}

class Rewriter {
 public:
  Rewriter(Graph& graph, PassContext& context, bool adds)
      : graph_(graph),
        context_(context),
        adds_(adds),
        memory_(graph),
        sizes_(graph),
        backward_(backward_nodes(graph)) {}

  int run() {
    int rewrites = 0;
    for (Node& node : graph_.nodes) {
      if (!node.is_erased() && rewrite(node)) ++rewrites;
    }
    for (Node& node : graph_.nodes) {
      if (!node.is_erased() && is_slice_scatter(&node) && join(node)) ++rewrites;
    }
    return rewrites;
  }

 private:
  bool rewrite(Node& node) {
    if (node.outputs.size() != 1 || node.outputs[0] == nullptr) return false;
    const std::string kind = kind_of(node);
    if (kind == ops::aten::kSliceScatter || kind == ops::aten::kSelectScatter) {
      return rewrite_scatter(node, kind == ops::aten::kSelectScatter);
    }
    if (ir::is(&node, "Slice") || ir::is(&node, "Gather")) return rewrite_read(node);
    return adds_ && ir::is(&node, "Add") && rewrite_sum(node);
  }

  // ---- what may be rewritten

  bool is_plain(const Value* value) const {
    return value != nullptr && value->type.is_known() && sizes_.are_known(*value) &&
           !memory_.is_written(value);
  }

  bool are_together(const Node& a, const Node& b) const {
    return passes::are_together(backward_, a, b);
  }

  Node& note(Node& made, const Node& in_place_of) {
    if (backward_.contains(&in_place_of)) backward_.insert(&made);
    return made;
  }

  // Puts a value in the place of a node's result, and erases what nobody reads then.
  void replace(Node& node, Value& with) {
    const bool is_alike = with.type == node.outputs[0]->type;
    const std::vector<ir::Use> readers = node.outputs[0]->uses;
    ir::replace_uses(*node.outputs[0], with, graph_);
    for (const ir::Use& reader : readers) {
      if (!is_alike) follow_layout(*reader.node);
    }
    erase_unread_from(node);
  }

  const Part& replaced_by(const Node& scatter) const {
    const auto [found, is_new] = parts_.try_emplace(&scatter);
    if (is_new) found->second = ops::replaced_part(scatter);
    return found->second;
  }

  // Erases the node if nobody reads it, and then those that only it has read.
  void erase_unread_from(Node& node) {
    std::vector<Node*> left = {&node};
    while (!left.empty()) {
      Node& next = *left.back();
      left.pop_back();
      const bool is_read = std::any_of(
          next.outputs.begin(), next.outputs.end(),
          [](const Value* output) { return output != nullptr && !output->uses.empty(); });
      if (next.is_erased() || is_read || !ops::is_pure(next)) continue;
      for (Value* input : next.inputs) {
        if (input != nullptr && input->producer != nullptr) left.push_back(input->producer);
      }
      parts_.erase(&next);
      ir::erase(graph_, next);
    }
  }

  // Whether the readers of `old` may be given `with`, which has the same elements.
  static bool can_stand_for(const Value& with, const Value& old) {
    if (with.type == old.type) return true;
    return std::all_of(old.uses.begin(), old.uses.end(), [&](const ir::Use& use) {
      if (takes_any_layout(use)) return true;
      return !with.type.strides && use.node != nullptr && use.node->op.domain == ir::kAtenDomain &&
             takes_row_major(use);
    });
  }

  bool leaves(const Value& value) const {
    return memory_.leaves(&value) ||
           std::any_of(value.uses.begin(), value.uses.end(), [](const ir::Use& use) {
             return use.node == nullptr || is_border(use.node) || use.index == ir::kCaptured;
           });
  }

  // ---- reads

  // What a view reads in the end: a view of what the last copy, or SliceScatter node, that it can
  // do without has read. Nothing if there is none of these.
  std::optional<View> trace(View view, const Node& reader) const {
    std::optional<View> found;
    while (view.of != nullptr) {
      const Node* node = view.of->producer;
      if (node == nullptr || !are_together(*node, reader) || memory_.is_written(view.of)) break;
      if (Value* source = copied(*view.of, reader)) {
        view.of = source;
        found = view;
        continue;
      }
      if (!is_slice_scatter(node)) {
        std::optional<View> below = step_down(view);
        if (!below) break;
        view = *std::move(below);
        continue;
      }
      const Part& replaced = replaced_by(*node);
      const Relation to = relation(view.part, replaced, *view.of->type.shape);
      if (to == Relation::kOther) break;
      if (to == Relation::kApart) {
        view.of = base_of(*node);
      } else {
        view.of = &written(*node);
        for (size_t i = 0; i < replaced.size(); ++i) {
          view.part[i].begin = (view.part[i].begin - replaced[i].begin) / replaced[i].step;
          // Strides other than 1 are equal.
          if (replaced[i].step != 1) view.part[i].step = 1;
        }
      }
      if (view.of != nullptr && memory_.is_written(view.of)) break;
      found = view;
    }
    // A dim that was added for the write is not needed to read it.
    while (found && found->of != nullptr && ir::is(found->of->producer, "Unsqueeze")) {
      std::optional<View> below = step_down(*found);
      if (!below) break;
      found = std::move(below);
    }
    return found;
  }

  // Writes a view of a value that is there.
  Value* emit(const View& view, Node& reader) {
    ops::Writer write(graph_, &reader);
    Value* value = view.of;
    const Shape shape = *value->type.shape;
    Shape starts, ends, axes, steps;
    Shape sizes, strides = ops::strides_of(value->type);
    std::vector<std::pair<int64_t, int64_t>> dropped;  // dims, and the index in each
    for (size_t i = 0; i < shape.size(); ++i) {
      const auto& [begin, size, step] = view.part[i];
      const auto dim = static_cast<int64_t>(i);
      const bool is_kept = has_dim(view, dim);
      if (!is_kept) dropped.emplace_back(dim, begin);
      sizes.push_back(is_kept ? size : shape[i]);
      if (!is_kept || view.part[i] == Stretch{.size = shape[i]}) continue;
      strides[i] = ops::times(strides[i], step);
      starts.emplace_back(begin);
      ends.push_back(ops::plus(ops::times(size, step), begin));
      axes.emplace_back(dim);
      steps.emplace_back(step);
    }
    if (!axes.empty()) {
      std::vector<Value*> inputs = {value, write.ints(starts), write.ints(ends), write.ints(axes)};
      if (std::any_of(steps.begin(), steps.end(), [](const Dim& s) { return !(s == Dim(1)); })) {
        inputs.push_back(write.ints(steps));
      }
      const Type type = ops::view_type(value->type, sizes, strides);
      value = note(write.add({"", "Slice"}, inputs, {type}), reader).outputs[0];
    }
    for (auto each = dropped.rbegin(); each != dropped.rend(); ++each) {
      Value* index = write.scalar(static_cast<double>(each->second), ir::DType::kInt64);
      value =
          note(write.add({"", "Gather"}, {value, index}, {Type()}, {{"axis", Dim(each->first)}}),
               reader)
              .outputs[0];
    }
    Shape added;
    for (size_t i = 0; i < view.dims.size(); ++i) {
      if (view.dims[i] < 0) added.emplace_back(static_cast<int64_t>(i));
    }
    if (!added.empty()) {
      value = note(write.add({"", "Unsqueeze"}, {value, write.ints(added)}, {Type()}), reader)
                  .outputs[0];
    }
    return value;
  }

  // Whether the caller may write to the value before backward reads what `reader` saves of it.
  bool may_change(const Value& value, const Node& reader) const {
    if (backward_.contains(&reader)) return false;
    return leaves(value) || (memory_.is_callers(&value) && memory_.has_yield());
  }

  bool rewrite_read(Node& node) {
    Value& result = *node.outputs[0];
    if (!is_plain(&result) || leaves(result) || !read_of(&node)) return false;
    const std::optional<View> view = trace(view_of(result), node);
    if (!view || view->of == nullptr || may_change(*view->of, node)) return false;
    if (!context_.may_rewrite()) return false;
    Value* value = emit(*view, node);
    if (!(value->type.shape == result.type.shape) || !can_stand_for(*value, result)) {
      context_.did_not_rewrite();
      if (value != view->of) erase_unread_from(*value->producer);
      return false;
    }
    replace(node, *value);
    return true;
  }

  // ---- writes

  // What `value` is a copy of, made by an operator whose other argument has a dtype and a layout
  // alone; nullptr if it is none.
  Value* copied(const Value& value, const Node& reader) const {
    const Node* node = value.producer;
    if (node == nullptr || kind_of(*node) != ops::aten::kCopyLike || !are_together(*node, reader)) {
      return nullptr;
    }
    Value* source = tensor(ops::decode_aten(*node).args.at(1));
    const bool is_alike = is_plain(source) && source->type.shape == value.type.shape &&
                          source->type.dtype == value.type.dtype &&
                          source->type.device == value.type.device && !memory_.is_written(&value);
    return is_alike ? source : nullptr;
  }

  // What a part that is written was copied from, so that it is copied only once.
  Value* source_of(Value* part, const Node& reader) const {
    while (true) {
      Value* source = copied(*part, reader);
      const Node* node = part->producer;
      if (ir::is(node, "Identity") && are_together(*node, reader) && !memory_.is_written(part) &&
          is_plain(node->inputs[0])) {
        source = node->inputs[0];
      }
      if (source == nullptr) return part;
      part = source;
    }
  }

  // The base, or nullptr if all its numbers are zeros or not specified.
  static Value* base_or_zeros(Value* base) {
    const Node* node = base->producer;
    if (node == nullptr || node->op.domain != ir::kAtenDomain) return base;
    const bool is_open = ops::registry().operator_row(ops::key_of(*node)).is_uninitialized;
    return is_open || ops::fills_with_zeros(*node) ? nullptr : base;
  }

  // The place of `part` in `base` as the arguments after the first two name it; nothing if
  // bounds are not known.
  static std::optional<Read> place_in(const ops::Call& call, const Value& base, const Value& part,
                                      bool is_select) {
    constexpr size_t kFirst = 2;  // of the arguments that name the part
    const auto number = [&](size_t at) {
      const auto* dim = std::get_if<Dim>(&call.args.at(at).value);
      return dim == nullptr ? std::optional<Dim>() : std::optional(*dim);
    };
    const std::optional<Dim> axis = number(kFirst);
    if (!axis || !axis->is_constant()) return std::nullopt;
    const Shape& shape = *base.type.shape;
    const auto rank = static_cast<int64_t>(shape.size());
    const int64_t at = axis->constant() < 0 ? axis->constant() + rank : axis->constant();
    if (at < 0 || at >= rank) return std::nullopt;
    const auto dim = static_cast<size_t>(at);
    const bool is_none = call.args.at(kFirst + 1).is_none();
    const std::optional<Dim> start = is_none ? std::optional(Dim(0)) : number(kFirst + 1);
    const std::optional<int64_t> begin = start ? wrapped(*start, shape[dim]) : std::nullopt;
    if (!begin) return std::nullopt;
    Read read{.part = whole(base)};
    if (is_select) {
      read.part[dim] = {.begin = *begin, .size = 1};
      read.dropped = at;
      return read;
    }
    const std::optional<Dim> step = number(kFirst + 3);
    if (!step || !step->is_constant() || step->constant() < 1 ||
        part.type.shape->size() != shape.size()) {
      return std::nullopt;
    }
    read.part[dim] = {*begin, part.type.shape->at(dim), step->constant()};
    return read;
  }

  bool rewrite_scatter(Node& node, bool is_select) {
    const ops::Call call = ops::decode_aten(node);
    Value *base = tensor(call.args.at(0)), *source = tensor(call.args.at(1));
    Value& result = *node.outputs[0];
    if (!is_plain(base) || !is_plain(source) || !is_plain(&result) ||
        source->type.dtype != base->type.dtype || !(base->type.device == result.type.device) ||
        ops::repeats_elements(result.type)) {
      return false;
    }
    const std::optional<Read> read = place_in(call, *base, *source, is_select);
    if (!read || !context_.may_rewrite()) return false;
    View place = view_in(*read, *base);
    source = source_of(source, node);
    while (Value* copy = copied(*base, node)) base = copy;
    join_nested(node, place, source);
    replace(node, *write(node, place, source, base_or_zeros(base)));
    return true;
  }

  // The part that a node reads, or replaces, as a view of the whole.
  static View view_in(const Read& read, Value& of) {
    View view{.of = &of, .part = read.part};
    for (size_t i = 0; i < read.part.size(); ++i) {
      const auto dim = static_cast<int64_t>(i);
      if (dim != read.dropped) view.dims.push_back(dim);
    }
    return view;
  }

  // Writes the result of `node` as a base, of which a part is replaced. `base`: nullptr stands for
  // zeros.
  Value* write(Node& node, const View& place, Value* source, Value* base) {
    ops::Writer writing(graph_, &node);
    const Value& result = *node.outputs[0];
    Shape added;
    for (size_t i = 0; i < place.part.size(); ++i) {
      const auto dim = static_cast<int64_t>(i);
      if (!has_dim(place, dim)) added.emplace_back(dim);
    }
    if (!added.empty()) {
      source = note(writing.add({"", "Unsqueeze"}, {source, writing.ints(added)}, {Type()}), node)
                   .outputs[0];
    }
    if (place.part == whole(result)) {
      const bool is_free = can_stand_for(*source, result) && !leaves(result) && !leaves(*source) &&
                           !memory_.is_callers(source);
      if (is_free) return source;
      return note(writing.add({"", "Identity"}, {source}, {result.type}), node).outputs[0];
    }
    if (base != nullptr && is_replaced(*base, place, node)) base = base_of(*base->producer);
    ir::Attrs attrs = ops::attrs_of_part(place.part, *result.type.shape);
    std::vector<Value*> inputs = {source};
    if (base == nullptr) {
      attrs.emplace("shape", *result.type.shape);
    } else {
      inputs.push_back(base);
    }
    return note(writing.add({ir::kTorchOrtDomain, "SliceScatter"}, inputs, {result.type}, attrs),
                node)
        .outputs[0];
  }

  // Whether the value is only there for `node`, which replaces all that its own node has replaced.
  bool is_replaced(const Value& base, const View& place, const Node& node) const {
    const Node* before = base.producer;
    if (!is_slice_scatter(before) || base.uses.size() != 1 || base.uses[0].node != &node ||
        !are_together(*before, node)) {
      return false;
    }
    const Relation to = relation(replaced_by(*before), place.part, *base.type.shape);
    return to == Relation::kEqual || to == Relation::kInside;
  }

  // A part of a part: if what is written is that part of the base with a part of its own replaced,
  // then only the latter is written.
  void join_nested(const Node& node, View& place, Value*& source) const {
    const Node* inner = source->producer;
    if (!is_slice_scatter(inner) || !are_together(*inner, node)) return;
    Value* before = base_of(*inner);
    const std::optional<View> read = trace(place, node);
    const auto origin = [&](const View& view) { return ground(trace(view, node).value_or(view)); };
    const bool is_of_zeros = read ? read->of == nullptr : base_or_zeros(place.of) == nullptr;
    const bool is_same_part =
        before == nullptr ? is_of_zeros : is_same(origin(view_of(*before)), origin(place));
    if (!is_same_part) return;
    const Part& replaced = replaced_by(*inner);
    for (size_t i = 0; i < place.dims.size(); ++i) {
      Stretch& stretch = place.part[static_cast<size_t>(place.dims[i])];
      stretch = compose(stretch, replaced[i]);
    }
    source = &written(*inner);
  }

  // The same view of what all views that it goes through are views of.
  static View ground(View view) {
    while (view.of != nullptr) {
      std::optional<View> below = step_down(view);
      if (!below) break;
      view = *std::move(below);
    }
    return view;
  }

  // ---- sums

  // The gradient of a part: zeros but for a part. Only the sum reads it.
  struct Term {
    Value* part;
    View place;
  };

  std::optional<Term> term_of(Value* value, const Node& sum) const {
    const Node* node = value->producer;
    const Type& type = sum.outputs[0]->type;
    if (node == nullptr || value->uses.size() != 1 || !is_plain(value) ||
        !are_together(*node, sum) || !(value->type == type)) {
      return std::nullopt;
    }
    const std::string kind = kind_of(*node);
    const bool is_select = kind == ops::aten::kSelectBackward;
    if (!is_select && kind != ops::aten::kSliceBackward) return std::nullopt;
    // The second argument is the shape of the whole, where those that scatter have the part.
    const ops::Call call = ops::decode_aten(*node);
    Value* part = tensor(call.args.at(0));
    if (!is_plain(part) || part->type.dtype != type.dtype) return std::nullopt;
    const std::optional<Read> read = place_in(call, *value, *part, is_select);
    if (!read || !is_small(*part, *value)) return std::nullopt;
    return Term{part, view_in(*read, *value)};
  }

  // Beside larger parts, a sum of whole tensors takes little more time, and can be in a region.
  bool is_small(const Value& part, const Value& of) const {
    constexpr int64_t kShare = 4;
    const std::optional<int64_t> count = hinted_size(graph_, ir::numel(*part.type.shape));
    const std::optional<int64_t> all = hinted_size(graph_, ir::numel(*of.type.shape));
    return count && all && *count * kShare <= *all;
  }

  bool rewrite_sum(Node& node) {
    for (size_t i : {0, 1}) {
      const std::optional<Term> added = term_of(node.inputs[i], node);
      Value* sum = node.inputs[1 - i];
      if (!added || sum->producer == nullptr) continue;
      const std::optional<Term> first = term_of(sum, node);
      const bool is_sum = is_slice_scatter(sum->producer) && are_together(*sum->producer, node) &&
                          sum->type == node.outputs[0]->type && is_plain(sum);
      if ((!first && !is_sum) || !context_.may_rewrite()) continue;
      if (first) sum = write(node, first->place, first->part, nullptr);
      replace(node, *write(node, added->place, sum_of_parts(node, *added, *sum), sum));
      return true;
    }
    return false;
  }

  // The part of a term and what the other sum has in its place.
  Value* sum_of_parts(Node& node, const Term& term, Value& sum) {
    View place = term.place;
    place.of = &sum;
    place = trace(place, node).value_or(place);
    if (place.of == nullptr) return term.part;
    Value* before = emit(place, node);
    ops::Writer writing(graph_, &node);
    const Type type = ops::with_shape(term.part->type, term.part->type.shape);
    return note(writing.add({"", "Add"}, {before, term.part}, {type}), node).outputs[0];
  }

  // ---- concatenations

  // Whether a chain of writes replaces all of a tensor, part by part along one dim.
  bool join(Node& last) {
    Value& result = *last.outputs[0];
    if (result.type.strides || !result.type.shape) return false;
    if (result.uses.size() == 1 && is_slice_scatter(result.uses[0].node) &&
        result.uses[0].index == 1) {
      return false;  // the chain goes on
    }
    const Shape& shape = *result.type.shape;
    size_t axis = 0;
    std::vector<std::pair<Stretch, Value*>> parts;
    int64_t covered = 0;
    for (const Node* node = &last; node != nullptr;) {
      const Part& replaced = replaced_by(*node);
      size_t at = 0;
      if (!is_single_axis(replaced, shape, at) || (!parts.empty() && at != axis)) return false;
      axis = at;
      if (replaced[axis].step != 1 || !has_elements(replaced[axis])) return false;
      parts.emplace_back(replaced[axis], &written(*node));
      covered += replaced[axis].size.constant();
      if (Dim(covered) == shape[axis]) break;
      Value* base = base_of(*node);
      if (base == nullptr || base->uses.size() != 1 || !is_slice_scatter(base->producer) ||
          !are_together(*base->producer, last)) {
        return false;
      }
      node = base->producer;
    }
    std::sort(parts.begin(), parts.end(),
              [](const auto& a, const auto& b) { return a.first.begin < b.first.begin; });
    int64_t end = 0;
    std::vector<Value*> operands;
    for (const auto& [stretch, value] : parts) {
      if (stretch.begin != end) return false;
      end += stretch.size.constant();
      operands.push_back(value);
    }
    if (!(Dim(end) == shape[axis]) || !context_.may_rewrite()) return false;
    ops::Writer writing(graph_, &last);
    Node& made = writing.add({"", "Concat"}, operands, {result.type},
                             {{"axis", Dim(static_cast<int64_t>(axis))}});
    replace(last, *note(made, last).outputs[0]);
    return true;
  }

  Graph& graph_;
  PassContext& context_;
  const bool adds_;
  // Of the graph before the pass. Nothing writes to the values that the pass makes.
  const SharedMemory memory_;
  const KnownSizes sizes_;
  std::unordered_set<const Node*> backward_;
  mutable std::unordered_map<const Node*, Part> parts_;  // that SliceScatter nodes replace
};

int rewrite(Graph& graph, PassContext& context, bool adds) {
  int rewrites = 0;
  while (const int more = Rewriter(graph, context, adds).run()) rewrites += more;
  return rewrites;
}

}  // namespace

int scatter_slices(Graph& graph, PassContext& context) { return rewrite(graph, context, false); }

int add_slices(Graph& graph, PassContext& context) { return rewrite(graph, context, true); }

}  // namespace torch_ort::passes
