#include "passes/border/plan.h"

#include "base/error.h"
#include "ops/collective.h"
#include "ops/op.h"
#include "passes/border/border.h"
#include "passes/border/costs.h"
#include "passes/border/network.h"
#include "passes/halves.h"

#include <algorithm>
#include <cmath>
#include <set>
#include <unordered_map>
#include <unordered_set>

namespace torch_ort::passes {

namespace {

using ir::Dim;
using ir::Graph;
using ir::Node;
using ir::Value;
using Kind = ops::FusedForm::Kind;

constexpr int kNone = -1;
// Prices of a byte that is held, in microseconds.
constexpr double kLowestPrice = 1e-7, kHighestPrice = 1;
// Prices fall by this share from the end of the forward half to its beginning, so that equal layers
// are not all chosen at the same price. Early layers are chosen first: they are recomputed when
// most of the saved memory is free again.
constexpr double kSlope = 0.1;
constexpr int kMostSegments = 32;
// Steps of the bisection on the logarithm of the price. The first steps narrow the range to a
// factor of 1.7, and further ones, for the best segmentations alone, to a factor of 1.004.
constexpr int kFirstSteps = 5, kLastSteps = 7;
constexpr size_t kRefined = 2;

// How a value reaches the backward half.
enum class Crossing {
  kFree,   // the caller holds it in any case, or it crosses whatever is chosen
  kHeld,   // the engine holds it, so its bytes count
  kNever,  // it must not cross
};

// A value of the forward half, or of the caller's.
struct Tensor {
  const Value* value = nullptr;
  int producer = kNone;  // position among the steps
  // The tensor whose memory it views; itself if it is no view.
  int root = kNone;
  int64_t bytes = 0;  // of its own memory
  Crossing crossing = Crossing::kHeld;
  // Positions in the backward half. The last read may be of a view.
  int first_read = kNone, last_read = kNone;
  double price = 1;  // of one of its bytes, times that of the cut
};

// A node of the forward half. One that waits for a gather is a step with it, if both may be
// repeated.
struct Step {
  Node* node = nullptr;
  const Node* gather = nullptr;
  std::vector<int> inputs, outputs;  // positions among the tensors
  double micros = 0;
  bool is_view = false;
  bool is_repeatable = false;
  bool is_sum = false;  // of a region; it is small compared with what it sums
  int group = kNone;    // the region that it will be in
};

// What a choice of steps to recompute leads to.
struct Outcome {
  std::vector<bool> is_made;  // by step
  std::vector<int> place;     // by step: position in the backward half
  std::vector<bool> is_held;  // by tensor: whether it crosses and its bytes count
  int64_t peak_bytes = 0, held_bytes = 0;
  double micros = 0;
};

class Joint {
 public:
  Joint(Graph& graph, const Speeds& measured, const Communication& communication)
      : border_(graph),
        costs_(graph,
               ops::has_collectives(graph) ? speeds_of_ranks(graph, communication) : measured),
        gathers_again_(communication.gathers_again),
        backward_(backward_half(graph)) {
    for (size_t i = 0; i < backward_.size(); ++i) position_[backward_[i]] = static_cast<int>(i);
    for (Node& node : graph.nodes) {
      if (is_border(&node)) break;
      if (!node.is_erased() && !may_gather_again(node)) add_step(node);
    }
    for (const Value& value : graph.values) {
      for (const ir::Use& use : value.uses) note_read(&value, use.node);
    }
    for (size_t i = tensors_.size(); i-- > 0;) {
      Tensor& root = tensors_[tensors_[i].root];
      root.last_read = std::max(root.last_read, tensors_[i].last_read);
    }
    for (Tensor& tensor : tensors_) find_crossing(tensor);
  }

  const std::vector<Step>& steps() const { return steps_; }
  const std::vector<Tensor>& tensors() const { return tensors_; }
  Node* backward_node(int position) const { return backward_[position]; }

  // Follows what is live in the backward half if these steps run again there.
  Outcome follow(std::vector<bool> is_made) const {
    Outcome outcome;
    outcome.is_made = std::move(is_made);
    outcome.place.assign(steps_.size(), kNone);
    std::vector<int> first(tensors_.size()), last(tensors_.size());
    for (size_t i = 0; i < tensors_.size(); ++i) {
      first[i] = tensors_[i].first_read;
      last[i] = tensors_[i].last_read;
    }
    std::vector<bool> leaves_group(tensors_.size(), false);
    for (size_t i = 0; i < tensors_.size(); ++i) leaves_group[i] = first[i] != kNone;
    for (size_t index = steps_.size(); index-- > 0;) {
      const Step& step = steps_[index];
      if (!outcome.is_made[index]) continue;
      int place = kNone, end = kNone;
      for (int output : step.outputs) {
        place = earlier(place, first[output]);
        end = std::max(end, last[output]);
      }
      // Nobody reads it after all.
      if (place == kNone) {
        outcome.is_made[index] = false;
        continue;
      }
      outcome.place[index] = place;
      outcome.micros += step.micros;
      for (int input : step.inputs) {
        first[input] = earlier(first[input], place);
        last[input] = std::max(last[input], step.is_view ? end : place);
        const int producer = tensors_[input].producer;
        if (producer == kNone || step.group == kNone || steps_[producer].group != step.group) {
          leaves_group[input] = true;
        }
      }
    }
    std::vector<int64_t> change(backward_.size() + 1, 0);
    outcome.is_held.assign(tensors_.size(), false);
    for (size_t i = 0; i < tensors_.size(); ++i) {
      const Tensor& tensor = tensors_[i];
      if (last[i] == kNone || tensor.bytes == 0) continue;
      const bool is_made_again = tensor.producer != kNone && outcome.is_made[tensor.producer];
      if (is_made_again && !leaves_group[i]) continue;
      if (!is_made_again && !counts(tensor)) continue;
      outcome.is_held[i] = !is_made_again;
      if (!is_made_again) outcome.held_bytes += tensor.bytes;
      change[is_made_again ? outcome.place[tensor.producer] : 0] += tensor.bytes;
      change[last[i] + 1] -= tensor.bytes;
    }
    int64_t live = 0;
    for (int64_t bytes : change) {
      live += bytes;
      outcome.peak_bytes = std::max(outcome.peak_bytes, live);
    }
    return outcome;
  }

  // The wanted steps that can run again from saved values, inputs of their segment, and each other.
  // Views always can.
  std::vector<bool> repeatable_among(const std::vector<bool>& wanted,
                                     const std::vector<int>& segments) const {
    const std::vector<bool> is_pinned = find_pinned(segments);
    std::vector<bool> can_run(steps_.size(), false);
    const auto is_there = [&](int input, size_t reader) {
      const Tensor& tensor = tensors_[input];
      const int producer = tensor.producer;
      if (producer != kNone && can_run[producer]) return true;
      if (tensor.crossing != Crossing::kHeld) return tensor.crossing == Crossing::kFree;
      return producer == kNone || tensors_[tensor.root].last_read != kNone || is_pinned[producer] ||
             segments[producer] != segments[reader] || steps_[producer].is_sum;
    };
    for (size_t index = 0; index < steps_.size(); ++index) {
      const Step& step = steps_[index];
      if (!step.is_repeatable) continue;
      if (!step.is_view && (!wanted[index] || is_pinned[index])) continue;
      const bool is_held_anyway =
          std::all_of(step.outputs.begin(), step.outputs.end(),
                      [this](int output) { return tensors_[output].crossing == Crossing::kFree; });
      can_run[index] =
          !is_held_anyway && std::all_of(step.inputs.begin(), step.inputs.end(),
                                         [&](int input) { return is_there(input, index); });
    }
    return can_run;
  }

  // The bytes that are held, as an expression of symbols.
  Dim held_size(const Outcome& outcome) const {
    Dim size = 0;
    for (size_t i = 0; i < tensors_.size(); ++i) {
      const ir::Type& type = tensors_[i].value->type;
      if (!outcome.is_held[i] || !type.is_known()) continue;
      const Dim bytes =
          Dim::make(ir::DimOp::kMul, ir::numel(*type.shape), ir::size_bytes(type.dtype));
      size = Dim::make(ir::DimOp::kAdd, size, bytes);
    }
    return size;
  }

  // Chooses the steps to run again if holding a byte costs `price`. `segments` gives the segment of
  // each step: a value that a later segment reads is not recomputed. Steps that are not in
  // `wanted`, except for views, run once.
  std::vector<bool> cut(double price, const std::vector<int>& segments,
                        const std::vector<bool>* wanted = nullptr) const {
    const std::vector<bool> is_pinned = find_pinned(segments);
    std::vector<Rerun> nodes;
    for (size_t i = 0; i < steps_.size(); ++i) {
      const Step& step = steps_[i];
      const bool is_wanted = wanted == nullptr || step.is_view || (*wanted)[i];
      const bool can_run = step.is_repeatable && !is_pinned[i] && is_wanted;
      nodes.push_back({.cost = can_run ? step.micros : kNever, .inputs = step.inputs});
    }
    std::vector<Save> values;
    for (const Tensor& tensor : tensors_) {
      values.push_back({.producer = tensor.producer,
                        .cost = cost_to_hold(tensor, price),
                        .is_wanted = tensor.first_read != kNone && tensor.producer != kNone});
    }
    return cheapest_reruns(nodes, values);
  }

  // Divides the forward half into about `count` segments that hold equally much. They end at steps
  // where few bytes are live.
  std::vector<int> segments(int count) const {
    const int num_steps = static_cast<int>(steps_.size());
    std::vector<int> numbers(num_steps, 0);
    const int64_t all = held_until_.empty() ? 0 : held_until_.back();
    int number = 0, begin = 0;
    for (int part = 1; part < count; ++part) {
      const auto place_of = [&](double share) {
        const auto wanted = static_cast<int64_t>(share * static_cast<double>(all));
        return static_cast<int>(std::lower_bound(held_until_.begin(), held_until_.end(), wanted) -
                                held_until_.begin());
      };
      const int from = std::max(begin + 1, place_of((part - 0.5) / count));
      const int to = std::min(num_steps - 1, place_of((part + 0.5) / count));
      int best = kNone;
      for (int place = from; place <= to; ++place) {
        if (best == kNone || width_[place] < width_[best]) best = place;
      }
      if (best == kNone) continue;
      ++number;
      for (int step = best + 1; step < num_steps; ++step) numbers[step] = number;
      begin = best;
    }
    return numbers;
  }

  // Finds for each step how many bytes are live after it, and how many bytes have been made by then
  // that would be held.
  void find_widths() {
    width_.assign(steps_.size(), 0);
    held_until_.assign(steps_.size(), 0);
    std::vector<int64_t> change(steps_.size() + 1, 0);
    std::vector<int> last(tensors_.size(), kNone);
    for (size_t index = steps_.size(); index-- > 0;) {
      for (int input : steps_[index].inputs) {
        const int root = tensors_[input].root;
        last[root] = std::max(last[root], static_cast<int>(index));
      }
    }
    for (size_t i = 0; i < tensors_.size(); ++i) {
      const Tensor& tensor = tensors_[i];
      if (tensor.producer == kNone || tensor.root != static_cast<int>(i)) continue;
      if (counts(tensor) && tensor.last_read != kNone) held_until_[tensor.producer] += tensor.bytes;
      if (last[i] <= tensor.producer) continue;
      change[tensor.producer] += tensor.bytes;
      change[last[i]] -= tensor.bytes;
    }
    int64_t live = 0, held = 0;
    for (size_t step = 0; step < steps_.size(); ++step) {
      width_[step] = live += change[step];
      held_until_[step] = held += held_until_[step];
    }
  }

 private:
  static int earlier(int a, int b) {
    if (a == kNone || b == kNone) return std::max(a, b);
    return std::min(a, b);
  }

  // Whether its bytes are engine memory that is live across the border.
  bool counts(const Tensor& tensor) const {
    const Value& value = *tensor.value;
    return tensor.producer != kNone && !border_.memory().leaves(&value);
  }

  int add_tensor(const Value& value, int producer) {
    const auto [found, is_new] = index_of_.try_emplace(&value, static_cast<int>(tensors_.size()));
    if (!is_new) return found->second;
    const int index = found->second;
    tensors_.push_back({.value = &value, .producer = producer, .root = index});
    if (producer != kNone && steps_[producer].is_view) {
      tensors_[index].root = tensors_[steps_[producer].inputs.front()].root;
    } else {
      tensors_[index].bytes = costs_.num_bytes(value);
    }
    return index;
  }

  void add_step(Node& node) {
    const int index = static_cast<int>(steps_.size());
    Step& step = steps_.emplace_back();
    step.node = &node;
    const Node* start = ops::collective_of(node);
    if (start != nullptr && may_gather_again(*start)) step.gather = start;
    for (const Value* input : step.gather == nullptr ? node.inputs : start->inputs) {
      if (input != nullptr && !Border::is_constant(*input)) {
        step.inputs.push_back(add_tensor(*input, kNone));
      }
    }
    step.group = border_.group_of(&node);
    step.is_view = ops::is_view(node) && !step.inputs.empty() && node.inputs[0] != nullptr &&
                   !Border::is_constant(*node.inputs[0]);
    step.micros = is_inside(node, step.group) ? costs_.to_compute(node) : costs_.to_run(node);
    if (step.gather != nullptr) step.micros = costs_.to_communicate(*start);
    step.is_repeatable = step.gather != nullptr || is_repeatable(node);
    step.is_sum = step.group != kNone && ops::fused_form(node).is_reduction();
    for (const Value* output : node.outputs) {
      if (output != nullptr) step.outputs.push_back(add_tensor(*output, index));
    }
  }

  bool may_gather_again(const Node& node) const {
    return gathers_again_ && border_.may_gather_again(node);
  }

  // Whether the result of the node is read only in its own region.
  bool is_inside(const Node& node, int group) const {
    if (group == kNone || node.outputs.size() != 1 || node.outputs[0] == nullptr) return false;
    const auto& uses = node.outputs[0]->uses;
    return std::all_of(uses.begin(), uses.end(),
                       [&](const ir::Use& use) { return border_.group_of(use.node) == group; });
  }

  // Whether a second run gives the same bits. Sums of regions are left out: in a region with other
  // nodes they may be added in another order, and they are small.
  bool is_repeatable(const Node& node) const {
    const Kind kind = ops::fused_form(node).kind;
    const bool is_apart = kind == Kind::kPointwise || kind == Kind::kPass ||
                          kind == Kind::kRandom || kind == Kind::kGather || kind == Kind::kConcat;
    return border_.may_repeat(node) && (is_apart || border_.group_of(&node) == kNone);
  }

  // Notes that the backward half reads the value, or that it is returned, if there is no reader.
  void note_read(const Value* value, const Node* reader) {
    const auto place = position_.find(reader);
    if (reader != nullptr && place == position_.end()) return;
    const int read = reader != nullptr ? place->second : static_cast<int>(backward_.size()) - 1;
    // What reads a view that the backward half makes reads the tensor as well.
    while (position_.contains(value->producer) && ops::is_view(*value->producer) &&
           !value->producer->inputs.empty() && value->producer->inputs[0] != nullptr) {
      value = value->producer->inputs[0];
    }
    const auto found = index_of_.find(value);
    if (found == index_of_.end()) return;
    Tensor& tensor = tensors_[found->second];
    tensor.first_read = earlier(tensor.first_read, read);
    tensor.last_read = std::max(tensor.last_read, read);
  }

  void find_crossing(Tensor& tensor) {
    const bool crosses_anyway = tensors_[tensor.root].last_read != kNone;
    const bool is_callers = tensor.producer == kNone;
    const bool is_repeatable = !is_callers && steps_[tensor.producer].is_repeatable;
    const auto index = static_cast<size_t>(&tensor - tensors_.data());
    tensor.price =
        1 + kSlope * (1 - static_cast<double>(index) / static_cast<double>(tensors_.size()));
    if (is_repeatable && steps_[tensor.producer].is_view) {
      // A view does not cross: it is made again at no cost.
      tensor.crossing = Crossing::kNever;
    } else if (border_.memory().is_written(tensor.value) ||
               (!is_callers && border_.memory().leaves(tensor.value))) {
      tensor.crossing = crosses_anyway ? Crossing::kFree : Crossing::kNever;
    } else {
      tensor.crossing = crosses_anyway && !is_repeatable ? Crossing::kFree : Crossing::kHeld;
    }
  }

  // The cost of holding the tensor at that price of a byte.
  static double cost_to_hold(const Tensor& tensor, double price) {
    if (tensor.crossing == Crossing::kFree) return 0;
    if (tensor.crossing == Crossing::kNever) return kNever;
    return price * tensor.price * static_cast<double>(tensor.bytes);
  }

  // The steps that have a result which another segment reads. Views are not among them, but the
  // tensors that they view are.
  std::vector<bool> find_pinned(const std::vector<int>& segments) const {
    std::vector<int> last_segment(tensors_.size(), kNone);
    for (size_t step = 0; step < steps_.size(); ++step) {
      if (steps_[step].is_view) continue;
      for (int input : steps_[step].inputs) {
        const int root = tensors_[input].root;
        last_segment[root] = std::max(last_segment[root], segments[step]);
      }
    }
    std::vector<bool> is_pinned(steps_.size(), false);
    for (size_t i = 0; i < tensors_.size(); ++i) {
      const int producer = tensors_[i].producer;
      if (producer == kNone || tensors_[i].root != static_cast<int>(i)) continue;
      if (last_segment[i] > segments[producer]) is_pinned[producer] = true;
    }
    return is_pinned;
  }

  const Border border_;
  const Costs costs_;
  const bool gathers_again_;
  const std::vector<Node*> backward_;
  std::unordered_map<const Node*, int> position_;  // in the backward half
  std::unordered_map<const Value*, int> index_of_;
  std::vector<Tensor> tensors_;
  std::vector<Step> steps_;
  std::vector<int64_t> width_, held_until_;  // by step
};

// A division into segments, and the cheapest choice found so far that keeps to the budget.
struct Search {
  std::vector<int> segments;
  Outcome best;
  double low = std::log(kLowestPrice), high = std::log(kHighestPrice);  // of the price

  void run(const Joint& joint, int64_t allowed, int steps) {
    for (int step = 0; step < steps; ++step) {
      const double middle = (low + high) / 2;
      Outcome outcome = joint.follow(joint.cut(std::exp(middle), segments));
      const bool is_enough = outcome.peak_bytes <= allowed;
      (is_enough ? high : low) = middle;
      if (is_enough && outcome.micros <= best.micros) best = std::move(outcome);
    }
  }
};

std::string with_commas(int64_t number) {
  const std::string digits = std::to_string(number);
  std::string text;
  for (size_t i = 0; i < digits.size(); ++i) {
    if (i > 0 && (digits.size() - i) % 3 == 0) text += ',';
    text += digits[i];
  }
  return text;
}

[[noreturn]] void refuse(const Budget& budget, int64_t dense, int64_t least) {
  const std::string asked = budget.is_fraction
                                ? concat(budget.amount, " of ", with_commas(dense), " bytes")
                                : concat(with_commas(budget.bytes(dense)), " bytes");
  // Rounded up, so that a program that asks for this share gets a plan.
  const double share =
      std::ceil(1000.0 * static_cast<double>(least) / static_cast<double>(dense)) / 1000.0;
  throw UserError(concat("memory_budget: too small for this graph: got ", asked, ", want at least ",
                         with_commas(least), " bytes, which is ", share,
                         " of what is held without recomputation"));
}

void write_down(const Joint& joint, const Outcome& best, const std::vector<int>& segments,
                RecomputePlan& plan) {
  BudgetReport& report = plan.report;
  report.peak_bytes = best.peak_bytes;
  report.held_bytes = best.held_bytes;
  report.again_us = best.micros;
  for (size_t i = 0; i < joint.steps().size(); ++i) {
    if (!best.is_made[i]) continue;
    const Step& step = joint.steps()[i];
    plan.again.push_back({step.node, step.gather, joint.backward_node(best.place[i]), segments[i]});
    int64_t bytes = 0;
    for (int output : step.outputs) {
      const Tensor& tensor = joint.tensors()[output];
      if (tensor.last_read != kNone) bytes += tensor.bytes;
    }
    if (bytes == 0 && step.group != kNone) continue;
    if (step.is_view) continue;
    const Node& made = step.gather == nullptr ? *step.node : *step.gather;
    report.made.push_back({made.name, made.op.str(), made.origin, bytes, step.micros});
  }
}

// Makes the choices by name.
class Chooser {
 public:
  Chooser(const Joint& joint, const Selection& selection, const Clusters& clusters)
      : joint_(joint), selection_(selection), clusters_(clusters) {
    whole_.assign(joint.steps().size(), 0);
    parted_ = whole_;
    int before = 0;
    for (size_t i = 0; i < parted_.size(); ++i) {
      const Node& node = *joint.steps()[i].node;
      layers_.push_back(clusters.layer(node));
      parted_[i] = before = segment_of(node, before);
    }
    const auto names_layers = [this](const Selection::Chosen& chosen) {
      const Cluster* cluster = find(chosen.name);
      return cluster != nullptr && cluster->is_layer && chosen.type != 0;
    };
    parts_ = selection.level != Selection::Level::kChosen || selection.ends_at_layers ||
             std::any_of(selection.chosen.begin(), selection.chosen.end(), names_layers);
    dense_ = joint.follow(nothing());
  }

  const Outcome& dense() const { return dense_; }
  const std::vector<int>& segments() const { return parts_ ? parted_ : whole_; }

  // The outcome of all choices that are switched on.
  Outcome choose() const {
    std::vector<bool> wanted = nothing(), wanted_in_part = nothing();
    if (selection_.level != Selection::Level::kChosen) {
      std::vector<bool>& list =
          selection_.level == Selection::Level::kLayers ? wanted : wanted_in_part;
      for (size_t i = 0; i < list.size(); ++i) list[i] = layers_[i] != Clusters::kNoLayer;
    }
    for (const Selection::Chosen& chosen : selection_.chosen) {
      const Cluster* cluster = find(chosen.name);
      if (cluster == nullptr || chosen.type == 0) continue;
      add(*cluster, chosen.count, chosen.type == 1 ? wanted : wanted_in_part);
    }
    return follow(wanted, wanted_in_part, segments());
  }

  std::vector<ClusterReport> report() const {
    std::vector<ClusterReport> reports;
    for (const Cluster& cluster : clusters_.all) report(cluster, reports);
    for (const Selection::Chosen& chosen : selection_.chosen) {
      if (find(chosen.name) != nullptr) continue;
      reports.push_back({.name = chosen.name,
                         .type = chosen.type,
                         .count = chosen.count,
                         .saved_expression = "0"});
    }
    const auto saves_more = [](const ClusterReport& a, const ClusterReport& b) {
      return a.saved_bytes > b.saved_bytes;
    };
    std::stable_sort(reports.begin(), reports.end(), saves_more);
    return reports;
  }

 private:
  std::vector<bool> nothing() const { return std::vector<bool>(joint_.steps().size(), false); }

  // The number of the segment that a node is in. Layers count from 1. Nodes before the first layer
  // are in segment 0, and nodes after the last one in a segment of their own. Nodes that passes
  // have added are where the node before them is.
  int segment_of(const Node& node, int before) const {
    if (node.captured < 0) return before;
    const int layer = clusters_.layer(node);
    if (layer != Clusters::kNoLayer) return layer + 1;
    return node.captured < clusters_.first ? 0 : clusters_.num_layers + 1;
  }

  const Cluster* find(const std::string& name) const {
    const auto found = std::find_if(clusters_.all.begin(), clusters_.all.end(),
                                    [&](const Cluster& each) { return each.name == name; });
    return found == clusters_.all.end() ? nullptr : &*found;
  }

  // Adds the steps that the first `count` occurrences of the cluster have become.
  void add(const Cluster& cluster, int64_t count, std::vector<bool>& wanted) const {
    std::unordered_set<int> numbers;
    for (size_t i = 0; i < cluster.occurrences.size(); ++i) {
      if (count >= 0 && static_cast<int64_t>(i) >= count) break;
      numbers.insert(cluster.occurrences[i].begin(), cluster.occurrences[i].end());
    }
    for (size_t i = 0; i < wanted.size(); ++i) {
      if (numbers.contains(joint_.steps()[i].node->captured)) wanted[i] = true;
    }
  }

  Outcome follow(const std::vector<bool>& wanted, const std::vector<bool>& wanted_in_part,
                 const std::vector<int>& segments) const {
    std::vector<bool> made = joint_.repeatable_among(wanted, segments);
    if (std::find(wanted_in_part.begin(), wanted_in_part.end(), true) == wanted_in_part.end()) {
      return joint_.follow(std::move(made));
    }
    // The cut weighs time as well, if only a little, so it may hold more than recomputing all that
    // is wanted. Taking the smaller of the two, a compromise never holds more than that.
    const std::vector<bool> in_part = joint_.cut(kHighestPrice, segments, &wanted_in_part);
    const std::vector<bool> as_whole = joint_.repeatable_among(wanted_in_part, segments);
    Outcome with_part = joint_.follow(either(made, in_part));
    Outcome without = joint_.follow(either(made, as_whole));
    return with_part.held_bytes <= without.held_bytes ? with_part : without;
  }

  static std::vector<bool> either(const std::vector<bool>& a, const std::vector<bool>& b) {
    std::vector<bool> both(a.size());
    for (size_t i = 0; i < a.size(); ++i) both[i] = a[i] || b[i];
    return both;
  }

  void report(const Cluster& cluster, std::vector<ClusterReport>& reports) const {
    using Level = Selection::Level;
    const auto is_it = [&](const Selection::Chosen& each) { return each.name == cluster.name; };
    const auto chosen = std::find_if(selection_.chosen.begin(), selection_.chosen.end(), is_it);
    int type = chosen == selection_.chosen.end() ? 0 : chosen->type;
    if (selection_.level != Level::kChosen) type = 0;
    if (cluster.is_layer && selection_.level == Level::kLayers) type = 1;
    if (cluster.is_layer && selection_.level == Level::kCompromise) type = 2;
    int64_t least = 0;
    for (int each : {1, 2}) {
      const bool is_on = each == type;
      if (!is_on && !selection_.lists_all) continue;
      ClusterReport row = saved_by(cluster, each);
      const bool is_worth_it = row.saved_bytes > least;
      least = std::max(least, row.saved_bytes);
      if (!is_on && !is_worth_it) continue;
      row.is_on = is_on;
      if (is_on && chosen != selection_.chosen.end()) row.count = chosen->count;
      reports.push_back(std::move(row));
    }
  }

  ClusterReport saved_by(const Cluster& cluster, int type) const {
    std::vector<bool> wanted = nothing();
    add(cluster, -1, wanted);
    const bool parts = cluster.is_layer || selection_.ends_at_layers;
    const std::vector<int>& segments = parts ? parted_ : whole_;
    const Outcome outcome =
        type == 1 ? follow(wanted, nothing(), segments) : follow(nothing(), wanted, segments);
    const Dim saved =
        Dim::make(ir::DimOp::kSub, joint_.held_size(dense_), joint_.held_size(outcome));
    return {.name = cluster.name,
            .type = type,
            .frequency = static_cast<int64_t>(cluster.occurrences.size()),
            .saved_bytes = dense_.held_bytes - outcome.held_bytes,
            .saved_expression = saved.str()};
  }

  const Joint& joint_;
  const Selection& selection_;
  const Clusters& clusters_;
  std::vector<int> layers_;  // by step
  // Segments by step: one for all steps, and one for each layer.
  std::vector<int> whole_, parted_;
  bool parts_ = false;  // whether to divide into layers
  Outcome dense_;
};

}  // namespace

RecomputePlan plan_recompute(Graph& graph, const Selection& selection, const Clusters& clusters,
                             const Communication& communication) {
  const Joint joint(graph, selection.speeds, communication);
  const Chooser chooser(joint, selection, clusters);
  RecomputePlan plan;
  plan.report.dense_bytes = plan.report.allowed_bytes = chooser.dense().peak_bytes;
  plan.report.dense_held_bytes = chooser.dense().held_bytes;
  plan.report.num_layers = clusters.num_layers;
  plan.report.clusters = chooser.report();
  write_down(joint, selection.is_empty() ? chooser.dense() : chooser.choose(), chooser.segments(),
             plan);
  return plan;
}

RecomputePlan plan_recompute(Graph& graph, const Budget& budget,
                             const Communication& communication) {
  Joint joint(graph, budget.speeds, communication);
  joint.find_widths();
  const size_t num_steps = joint.steps().size();
  Outcome best = joint.follow(std::vector<bool>(num_steps, false));
  RecomputePlan plan;
  BudgetReport& report = plan.report;
  report.dense_bytes = best.peak_bytes;
  const int64_t dense_and_lists = report.dense_bytes + budget.list_bytes;
  report.allowed_bytes = budget.bytes(dense_and_lists);
  const int64_t allowed = report.allowed_bytes - budget.list_bytes;
  std::vector<int> segments(num_steps, 0);

  if (best.peak_bytes > allowed) {
    int64_t least = best.peak_bytes;
    std::vector<Search> searches;
    std::set<std::vector<int>> tried;
    for (int count = 1; count <= kMostSegments; count *= 2) {
      for (int parts : {count, count + count / 2}) {
        std::vector<int> parted = joint.segments(parts);
        if (!tried.insert(parted).second) continue;
        Outcome most = joint.follow(joint.cut(kHighestPrice, parted));
        least = std::min(least, most.peak_bytes);
        if (most.peak_bytes > allowed) continue;
        searches.push_back({std::move(parted), std::move(most)});
        searches.back().run(joint, allowed, kFirstSteps);
      }
    }
    if (searches.empty()) refuse(budget, dense_and_lists, least + budget.list_bytes);
    const auto is_cheaper = [](const Search& a, const Search& b) {
      return a.best.micros < b.best.micros;
    };
    std::sort(searches.begin(), searches.end(), is_cheaper);
    if (searches.size() > kRefined) searches.resize(kRefined);
    for (Search& search : searches) search.run(joint, allowed, kLastSteps);
    const Search& cheapest = *std::min_element(searches.begin(), searches.end(), is_cheaper);
    best = cheapest.best;
    segments = cheapest.segments;
  }

  write_down(joint, best, segments, plan);
  return plan;
}

}  // namespace torch_ort::passes
