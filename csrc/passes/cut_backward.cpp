#include "passes/cut_backward.h"

#include "base/error.h"
#include "ir/edit.h"
#include "ops/aten.h"
#include "ops/aten_names.h"
#include "ops/fusion.h"
#include "ops/op.h"
#include "ops/product.h"
#include "ops/shapes.h"
#include "ops/writer.h"
#include "passes/context.h"
#include "region/contract.h"

#include <algorithm>
#include <unordered_map>
#include <unordered_set>
#include <utility>

namespace torch_ort::passes {

namespace {

using ir::Graph;
using ir::Node;
using ir::Value;

// What a value depends on: on no incoming gradient, on at least one that has come, or only on
// gradients that have not come.
enum class State : uint8_t { kPlain, kDefined, kUndefined };

// Every node of a backward half is linear in the gradients. So if none of the gradients that it
// reads has come, its results have not either; if some have come, the others count as zeros.
class States {
 public:
  void set(const Value* value, State state) { states_[value] = state; }

  State of(const Value* value) const {
    const auto found = states_.find(value);
    return found == states_.end() ? State::kPlain : found->second;
  }
  bool is_undefined(const Value* value) const { return of(value) == State::kUndefined; }

  // If one operand of a sum has not come, the other operand; else the value itself.
  const Value* left_of(const Value* value) const {
    const auto found = left_.find(value);
    return found == left_.end() ? value : found->second;
  }

  bool reads(const Node& node, State state) const {
    return std::any_of(node.inputs.begin(), node.inputs.end(),
                       [&](const Value* input) { return of(input) == state; });
  }
  bool has_undefined(const Node& node) const { return reads(node, State::kUndefined); }

  // The operand that is left of a sum if the other one has not come; else nullptr.
  const Value* rest_of(const Node& node) const {
    if (ir::is(&node, "Add") || ops::key_of(node) == ops::aten::kSparseSum) {
      const bool is_missing = is_undefined(node.inputs[0]);
      return is_missing == is_undefined(node.inputs[1]) ? nullptr : node.inputs[is_missing ? 1 : 0];
    }
    const Value* start = ops::start_of(node);
    if (start == nullptr || is_undefined(start)) return nullptr;
    return is_undefined(node.inputs[0]) || is_undefined(node.inputs[1]) ? start : nullptr;
  }

  // Whether what is left of a sum is what the node computes, and the tensor that it is added to has
  // not come.
  bool is_left_term(const Node& node) const {
    const Value* start = ops::start_of(node);
    return start != nullptr && is_undefined(start) && !is_undefined(node.inputs[0]) &&
           !is_undefined(node.inputs[1]);
  }

  void pass(const Node& node) {
    const bool some = reads(node, State::kDefined);
    if (!some && !has_undefined(node)) return;
    if (is_left_of_sum(node)) return;
    if (is_left_term(node)) {
      if (some) set(node.outputs[0], State::kDefined);
      return;
    }
    for (const Value* output : node.outputs) {
      if (output != nullptr) set(output, some ? State::kDefined : State::kUndefined);
    }
  }

 private:
  // The operand that is left may be zeros that depend on no gradient, such as the derivative of
  // floor.
  bool is_left_of_sum(const Node& node) {
    const Value* left = rest_of(node);
    if (left == nullptr) return false;
    const Value* sum = node.outputs[0];
    if (left->type != sum->type) return false;
    left_[sum] = left_of(left);
    if (of(left) == State::kDefined) set(sum, State::kDefined);
    return true;
  }

  std::unordered_map<const Value*, State> states_;
  std::unordered_map<const Value*, const Value*> left_;
};

std::unordered_set<const Value*> initializers_of(const Graph& graph) {
  return {graph.initializers.begin(), graph.initializers.end()};
}

// Copies nodes of a graph into a new one. Values that the copied nodes read, and that none of them
// makes, become inputs.
class Copier {
 public:
  Copier(const Graph& from, Graph& to) : initializers_(initializers_of(from)), to_(to) {}

  // The values for which inputs were added.
  const std::vector<const Value*>& inputs() const { return inputs_; }
  const std::vector<std::string>& zeros() const { return names_of_zeros_; }

  void add_graph_input(const Value* value) {
    keep(value, ir::add_input(to_, value->name, value->type));
  }

  Value* copy_of(const Value* value) {
    if (value == nullptr) return nullptr;
    if (const auto found = copies_.find(value); found != copies_.end()) return found->second;
    if (initializers_.contains(value)) {
      return keep(value, ir::add_initializer(to_, value->name, value->type, value->data));
    }
    // Constants and numbers that depend on sizes alone are copied too, because the engine reads
    // them without a tensor.
    if (value->producer != nullptr && value->producer->inputs.empty() &&
        ops::is_pure(*value->producer)) {
      add(*value->producer, {}, value->producer->outputs, value->producer->attrs);
      return copies_.at(value);
    }
    inputs_.push_back(value);
    return keep(value, ir::add_input(to_, value->name, value->type));
  }

  Value* zeros_like(const Value* value) {
    Value*& zeros = zeros_[value];
    if (zeros == nullptr) {
      inputs_.push_back(value);
      // No value of a capture has such a name: inputs are found by theirs.
      zeros = &ir::add_input(to_, value->name + ":zeros", value->type);
      names_of_zeros_.push_back(zeros->name);
    }
    return zeros;
  }

  Value* zero(const Value* value) {
    const ir::Type type{
        .dtype = value->type.dtype, .shape = ir::Shape{}, .device = value->type.device};
    return &ir::add_initializer(to_, "zero", type, ops::scalar_data(0.0, type.dtype));
  }

  // Adds a copy of the node. `outputs` are those of the node, with nullptr for one that is left
  // out.
  void add(const Node& node, std::vector<Value*> inputs, const std::vector<Value*>& outputs,
           ir::Attrs attrs) {
    add(node.op, node, std::move(inputs), outputs, std::move(attrs));
  }

  // Adds another op in place of the node.
  void add(const ir::OpId& op, const Node& node, std::vector<Value*> inputs,
           const std::vector<Value*>& outputs, ir::Attrs attrs) {
    std::vector<Value*> made;
    for (const Value* output : outputs) {
      made.push_back(output == nullptr
                         ? nullptr
                         : keep(output, ir::add_value(to_, output->name, output->type)));
    }
    Node& copy = ir::append_producer(to_, op, std::move(inputs), std::move(made), std::move(attrs),
                                     node.name);
    copy.origin = node.origin;
  }

 private:
  Value* keep(const Value* value, Value& copy) {
    copies_[value] = &copy;
    return &copy;
  }

  std::unordered_set<const Value*> initializers_;
  Graph& to_;
  std::vector<const Value*> inputs_;
  std::vector<std::string> names_of_zeros_;
  std::unordered_map<const Value*, Value*> copies_, zeros_;
};

// A region without the nodes that depend only on gradients that have not come.
class CutRegion {
 public:
  CutRegion(const Node& node, const States& outer)
      : node_(node), spec_(region::read(node)), body_(*spec_.body) {
    for (size_t i = 0; i < body_.inputs.size(); ++i) {
      states_.set(body_.inputs[i], outer.of(node.inputs[i]));
    }
    for (const Node& inner : body_.nodes) {
      if (!inner.is_erased()) states_.pass(inner);
    }
  }

  State state_of(size_t output) const { return states_.of(body_.outputs[output]); }

  // The outputs of the node that are left, in order.
  std::vector<Value*> outputs() const {
    std::vector<Value*> left;
    for (size_t i = 0; i < node_.outputs.size(); ++i) {
      if (state_of(i) != State::kUndefined) left.push_back(node_.outputs[i]);
    }
    return left;
  }

  // Makes the new body, and returns the inputs of the node that it still reads.
  std::vector<Value*> make(ir::Attrs& attrs) const {
    auto cut = std::make_shared<Graph>();
    cut->name = body_.name;
    Copier copier(body_, *cut);
    const std::unordered_set<const Node*> needed = needed_nodes();
    for (const Node& inner : body_.nodes) {
      if (needed.contains(&inner)) copy(inner, copier);
    }
    for (const Value* output : body_.outputs) {
      if (states_.is_undefined(output)) continue;
      ir::add_output(*cut, own_result(*cut, *copier.copy_of(states_.left_of(output))));
    }
    region::RegionSpec spec{std::move(cut), spec_.rows, spec_.columns};
    spec.has_row_list = spec_.has_row_list;
    std::vector<Value*> outer = outer_inputs(copier, spec);
    if (spec.has_row_list) outer.push_back(node_.inputs.back());
    attrs = node_.attrs;
    region::write(spec, attrs);
    return outer;
  }

 private:
  std::unordered_set<const Node*> needed_nodes() const {
    std::unordered_set<const Value*> read;
    for (const Value* output : body_.outputs) {
      if (!states_.is_undefined(output)) read.insert(states_.left_of(output));
    }
    std::unordered_set<const Node*> needed;
    for (auto inner = body_.nodes.rbegin(); inner != body_.nodes.rend(); ++inner) {
      const auto is_read = [&](const Value* v) { return v != nullptr && read.contains(v); };
      if (std::none_of(inner->outputs.begin(), inner->outputs.end(), is_read)) continue;
      needed.insert(&*inner);
      for (const Value* input : inner->inputs) {
        if (input == nullptr) continue;
        if (!states_.is_undefined(input)) {
          read.insert(states_.left_of(input));
        } else if (!takes_number(*inner)) {
          read.insert(input);
        }
      }
    }
    return needed;
  }

  // Whether a number can stand for a gradient that has not come. Other nodes read a whole tensor,
  // and so do those that compute its zeros from the zeros of an input.
  bool takes_number(const Node& inner) const {
    return ops::fused_form(inner).kind == ops::FusedForm::Kind::kPointwise &&
           !states_.is_undefined(inner.outputs[0]);
  }

  void copy(const Node& inner, Copier& copier) const {
    std::vector<Value*> inputs;
    for (const Value* input : inner.inputs) {
      if (!states_.is_undefined(input)) {
        inputs.push_back(copier.copy_of(states_.left_of(input)));
      } else if (takes_number(inner)) {
        inputs.push_back(copier.zero(input));
      } else if (input->producer == nullptr) {
        inputs.push_back(copier.zeros_like(input));
      } else {
        inputs.push_back(copier.copy_of(input));
      }
    }
    copier.add(inner, std::move(inputs), inner.outputs, inner.attrs);
  }

  // An output of a region must be made by one of its nodes, and be no other output too.
  static Value& own_result(Graph& cut, Value& value) {
    const bool is_taken =
        std::find(cut.outputs.begin(), cut.outputs.end(), &value) != cut.outputs.end();
    if (value.producer != nullptr && !is_taken) return value;
    return *ops::Writer(cut, nullptr).add({"", "Identity"}, {&value}, {value.type}).outputs[0];
  }

  // The inputs of the new node. Zeros replace inputs that have not come.
  std::vector<Value*> outer_inputs(const Copier& copier, region::RegionSpec& spec) const {
    std::vector<Value*> outer;
    for (const Value* input : copier.inputs()) {
      const auto position = static_cast<size_t>(input->index);
      spec.spaces.push_back(spec_.spaces.at(position));
      outer.push_back(node_.inputs[position]);
    }
    return outer;
  }

  const Node& node_;
  const region::RegionSpec spec_;
  const Graph& body_;
  States states_;
};

class Cutter {
 public:
  Cutter(const Graph& whole, const std::vector<bool>& defined) : whole_(whole) {
    bool is_backward = false;
    for (const Node& node : whole.nodes) {
      if (node.is_erased()) continue;
      if (is_backward) nodes_.push_back(&node);
      if (!ir::is(&node, "YieldOp", ir::kMicrosoftDomain)) continue;
      is_backward = true;
      note_gradients(node, defined);
    }
    for (const Node* node : nodes_) pass(*node);
  }

  // Makes the cut graph in an empty one.
  void make(Graph& made, Cut& cut) const {
    Copier copier(whole_, made);
    if (!cut.is_half_alone) {
      for (const Value* input : whole_.inputs) copier.add_graph_input(input);
      copy_forward(copier);
    }
    cut.gradients = copy_backward(copier, made);
    cut.zeros = copier.zeros();
  }

 private:
  // Copies the forward half and the YieldOp, without the gradients that do not come.
  void copy_forward(Copier& copier) const {
    for (const Node& node : whole_.nodes) {
      if (node.is_erased()) continue;
      std::vector<Value*> inputs, outputs = node.outputs;
      for (const Value* input : node.inputs) inputs.push_back(copier.copy_of(input));
      const bool is_border = ir::is(&node, "YieldOp", ir::kMicrosoftDomain);
      if (is_border) {
        std::replace_if(
            outputs.begin(), outputs.end(), [this](Value* v) { return states_.is_undefined(v); },
            nullptr);
      }
      copier.add(node, std::move(inputs), outputs, node.attrs);
      if (is_border) return;
    }
  }

  // Returns for each gradient of the whole graph which output of `graph` it is.
  std::vector<int> copy_backward(Copier& copier, Graph& graph) const {
    const std::unordered_set<const Node*> needed = needed_nodes();
    for (const Node* node : nodes_) {
      if (needed.contains(node)) copy(*node, copier);
    }
    std::vector<int> positions;
    for (const Value* gradient : whole_.outputs) {
      if (states_.is_undefined(gradient)) {
        positions.push_back(-1);
        continue;
      }
      positions.push_back(static_cast<int>(graph.outputs.size()));
      ir::add_output(graph, *copier.copy_of(states_.left_of(gradient)));
    }
    return positions;
  }

  void note_gradients(const Node& yield, const std::vector<bool>& defined) {
    size_t next = 0;
    for (const Value* gradient : yield.outputs) {
      if (gradient == nullptr) continue;
      states_.set(gradient, defined.at(next++) ? State::kDefined : State::kUndefined);
    }
    ORT_CHECK(next == defined.size(), "cut_backward: got ", defined.size(), " gradients, want ",
              next);
  }

  void pass(const Node& node) {
    if (!ir::is(&node, "Region", ir::kTorchOrtDomain)) {
      states_.pass(node);
      return;
    }
    const CutRegion& region = regions_.try_emplace(&node, node, states_).first->second;
    for (size_t i = 0; i < node.outputs.size(); ++i) {
      states_.set(node.outputs[i], region.state_of(i));
    }
  }

  bool is_left_out(const Node& node) const {
    // Checks, and Functions that give no gradient. Autograd would not have called them. What gives
    // a size stays, since others may use the size.
    if (node.outputs.empty()) {
      return states_.has_undefined(node) && !states_.reads(node, State::kDefined) &&
             !ir::has_attr(node.attrs, "binds_symbol");
    }
    return std::all_of(node.outputs.begin(), node.outputs.end(), [this](const Value* output) {
      return output == nullptr || states_.is_undefined(output);
    });
  }

  // The nodes that the remaining gradients depend on, and those that do more than compute results.
  std::unordered_set<const Node*> needed_nodes() const {
    std::unordered_set<const Value*> read;
    for (const Value* gradient : whole_.outputs) read.insert(states_.left_of(gradient));
    std::unordered_set<const Node*> needed;
    for (auto each = nodes_.rbegin(); each != nodes_.rend(); ++each) {
      const Node& node = **each;
      const auto is_read = [&](const Value* v) { return v != nullptr && read.contains(v); };
      const bool is_wanted =
          std::any_of(node.outputs.begin(), node.outputs.end(), is_read) || !ops::is_pure(node);
      if (!is_wanted || is_left_out(node)) continue;
      needed.insert(&node);
      if (const Value* left = copied(node)) {
        read.insert(states_.left_of(left));
        continue;
      }
      for (const Value* input : node.inputs) {
        if (input != nullptr && !states_.is_undefined(input)) read.insert(states_.left_of(input));
      }
    }
    return needed;
  }

  // The operand that is left of a sum, if its strides differ from those of the sum. Then it is
  // copied, since others may view the sum.
  const Value* copied(const Node& node) const {
    const Value* left = states_.rest_of(node);
    if (left == nullptr) return nullptr;
    const ir::Type &type = left->type, &sum = node.outputs[0]->type;
    return type.dtype == sum.dtype && type.shape == sum.shape ? left : nullptr;
  }

  void copy(const Node& node, Copier& copier) const {
    std::vector<Value*> inputs;
    if (const Value* left = copied(node)) {
      copier.add({"", "Identity"}, node, {operand(node, left, copier)}, node.outputs, {});
      return;
    }
    const auto region = regions_.find(&node);
    if (region != regions_.end() && states_.has_undefined(node)) {
      ir::Attrs attrs;
      for (const Value* input : region->second.make(attrs)) {
        inputs.push_back(operand(node, input, copier));
      }
      copier.add(node, std::move(inputs), region->second.outputs(), std::move(attrs));
      return;
    }
    const bool is_left_term = states_.is_left_term(node);
    for (size_t i = 0; i < node.inputs.size(); ++i) {
      const bool is_start = is_left_term && i == 2;
      inputs.push_back(is_start ? nullptr : operand(node, node.inputs[i], copier));
    }
    // A product has no third input unless it has a tensor to start from. Other nodes keep absent
    // inputs at the end: they may be elements of a list.
    while (is_left_term && inputs.back() == nullptr) inputs.pop_back();
    copier.add(node, std::move(inputs), node.outputs, node.attrs);
  }

  // What the copy of a node reads in place of a value.
  Value* operand(const Node& node, const Value* value, Copier& copier) const {
    if (!states_.is_undefined(value)) return copier.copy_of(states_.left_of(value));
    // A Function may ask for None in place of zeros. Autograd's node knows.
    if (ir::is(&node, "PythonOpGrad", ir::kMicrosoftDomain)) return nullptr;
    return copier.zeros_like(value);
  }

  const Graph& whole_;
  std::vector<const Node*> nodes_;  // of the backward half
  States states_;
  std::unordered_map<const Node*, CutRegion> regions_;
};

}  // namespace

// Cuts the backward half of a training graph down to what the gradients of some of its outputs
// reach. The forward half stays as it is, with the names of its values.
int cut_backward(Graph& graph, PassContext& context) {
  if (context.cut == nullptr) return 0;
  Graph made;
  Cutter(graph, context.cut->defined).make(made, *context.cut);
  // What the old nodes and values were goes with `made`.
  std::swap(graph.inputs, made.inputs);
  std::swap(graph.outputs, made.outputs);
  std::swap(graph.initializers, made.initializers);
  std::swap(graph.nodes, made.nodes);
  std::swap(graph.values, made.values);
  std::swap(graph.names, made.names);
  std::swap(graph.last_suffixes, made.last_suffixes);
  return 1;
}

}  // namespace torch_ort::passes
