#include "run/autograd/early_gradients.h"

#include "base/error.h"
#include "run/autograd/autograd_errors.h"
#include "run/autograd/node_pointer.h"
#include "run/backward_run.h"

#include <ATen/record_function.h>
#include <torch/csrc/autograd/custom_function.h>
#include <torch/csrc/autograd/engine.h>
#include <torch/csrc/autograd/graph_task.h>

#include <algorithm>
#include <map>
#include <memory>
#include <mutex>
#include <utility>

namespace torch_ort::run {

namespace {

using torch::autograd::Edge;
using torch::autograd::Node;
using torch::autograd::variable_list;
using Tensors = Session::Tensors;

// A backward pass that is running through a chain of nodes.
struct Pass {
  std::shared_ptr<BackwardRun> run;
  NoGradient without;
};

// The passes that the nodes of a chain share, by the numbers that autograd gives to passes.
class Passes {
 public:
  // `segments` gives for each gradient the segment that it leaves with.
  explicit Passes(std::vector<int> segments) : segments_(std::move(segments)) {}

  const std::vector<int>& segments() const { return segments_; }
  void add(int task, Pass pass) {
    const std::lock_guard lock(mutex_);
    passes_[task] = std::make_shared<const Pass>(std::move(pass));
  }
  std::shared_ptr<const Pass> find(int task) {
    const std::lock_guard lock(mutex_);
    const auto found = passes_.find(task);
    return found == passes_.end() ? nullptr : found->second;
  }
  void end(int task) {
    // Destroyed after the lock is released.
    std::shared_ptr<const Pass> pass;
    const std::lock_guard lock(mutex_);
    const auto found = passes_.find(task);
    if (found == passes_.end()) return;
    pass = std::move(found->second);
    passes_.erase(found);
  }

 private:
  const std::vector<int> segments_;
  std::mutex mutex_;
  std::map<int, std::shared_ptr<const Pass>> passes_;
};

// Whether gradients are to have a history (create_graph). Code below autograd cannot see this.
thread_local bool has_history = false;

struct HistoryHook : torch::autograd::FunctionPreHook {
  variable_list operator()(const variable_list& gradients) override {
    has_history = at::GradMode::is_enabled();
    return gradients;
  }
  // A trace of backward need not call this hook.
  void compiled_args(torch::dynamo::autograd::CompiledNodeArgs& /*args*/) const override {}
};

// Whether the node has hooks, which would be called with an undefined gradient.
bool has_hooks(Node& node) {
  return !node.tensor_pre_hooks().empty() || !node.pre_hooks().empty() ||
         !node.post_hooks().empty() || node.tensor_post_acc_grad_hooks() != nullptr;
}

void leave_out_one(bool is_without, const Edge& edge, at::Tensor& gradient) {
  if (is_without) gradient.reset();
  if (!gradient.defined() && edge.is_valid() && has_hooks(*edge.function)) {
    gradient = edge.function->input_metadata(edge.input_nr).zeros_like();
  }
}

// The node of a segment after the first. Its inputs are the gradients of the segment, which may
// have been computed already, and one more: a link from the node before it in the chain.
class SegmentNode : public Node {
 public:
  SegmentNode(std::shared_ptr<Passes> passes, bool is_last)
      : passes_(std::move(passes)), is_last_(is_last) {}

  const std::shared_ptr<Passes>& passes() const { return passes_; }

  // Adds a gradient of the graph, which is passed on to `edge`.
  uint32_t add(int gradient, const Edge& edge) {
    gradients_.push_back(gradient);
    add_next_edge(edge);
    // The metadata is that of the receiving node, so that a gradient of any class passes.
    input_metadata_.emplace_back(edge.function->input_metadata(edge.input_nr));
    return num_inputs() - 1;
  }
  // Adds the link, after all gradients. Nothing is ever passed by it, but a trace of backward reads
  // its metadata.
  uint32_t link_to(const Edge& next) {
    if (next.is_valid()) add_next_edge(next);
    input_metadata_.emplace_back(torch::autograd::InputMetadata(input_metadata(0)));
    return num_inputs() - 1;
  }

  std::string name() const override { return "torch_ort::GradientSegment"; }

  void compiled_args(torch::autograd::CompiledNodeArgs& /*args*/) const override {}
  variable_list apply_with_saved(const variable_list& inputs,
                                 torch::autograd::SwapSavedVariables& /*saved*/) override {
    return passed_on(inputs);
  }

 protected:
  variable_list apply(variable_list&& inputs) override {
    variable_list results = passed_on(inputs);
    const int task = torch::autograd::get_current_graph_task_id();
    const std::shared_ptr<const Pass> pass = passes_->find(task);
    if (!pass) return results;
    Tensors made = with_python_errors([&] {
      RECORD_FUNCTION("torch_ort::run_backward", c10::ArrayRef<const c10::IValue>{});
      return is_last_ ? pass->run->take_last(gradients_) : pass->run->take(gradients_);
    });
    for (size_t i = 0; i < made.size(); ++i) {
      if (!results[i].defined()) results[i] = std::move(made[i]);
      if (!pass->without.empty()) {
        leave_out_one(pass->without[gradients_[i]], next_edge(i), results[i]);
      }
    }
    if (is_last_) passes_->end(task);
    return results;
  }

 private:
  variable_list passed_on(const variable_list& inputs) const {
    variable_list results(inputs.begin(),
                          inputs.begin() + static_cast<std::ptrdiff_t>(gradients_.size()));
    results.resize(num_outputs());
    return results;
  }

  std::shared_ptr<Passes> passes_;
  bool is_last_;
  std::vector<int> gradients_;
};

const SegmentNode* segment_at(const Edge& edge) {
  return dynamic_cast<const SegmentNode*>(edge.function.get());
}

// The edge that a gradient reaches after all segments.
const Edge& beyond_segments(const Edge& edge) {
  const SegmentNode* segment = segment_at(edge);
  return segment == nullptr ? edge : segment->next_edge(edge.input_nr);
}

std::shared_ptr<Passes> passes_behind(const Node& node) {
  for (const Edge& edge : node.next_edges()) {
    if (const SegmentNode* segment = segment_at(edge)) return segment->passes();
  }
  return nullptr;
}

}  // namespace

bool are_waited_for(const Tensors& with_gradient) {
  return std::any_of(with_gradient.begin(), with_gradient.end(), [](const at::Tensor& tensor) {
    const auto* meta =
        tensor.defined() ? torch::autograd::impl::get_autograd_meta(tensor) : nullptr;
    if (meta == nullptr || meta->grad_fn_) return false;
    if (!meta->hooks_.empty() || meta->post_acc_grad_hooks_ != nullptr) return true;
    const auto accumulator = torch::autograd::impl::try_get_grad_accumulator(tensor);
    return accumulator && has_hooks(*accumulator);
  });
}

void let_leave_early(Node& node, const std::vector<int>& segments, const std::vector<int>& edges) {
  const int last = segments.empty() ? 0 : *std::max_element(segments.begin(), segments.end());
  if (last == 0) return;
  node.add_pre_hook(std::make_unique<HistoryHook>());
  const auto passes = std::make_shared<Passes>(segments);
  // The next one in the chain, which is made from its end.
  Edge next;
  for (int segment = last; segment > 0; --segment) {
    auto made = make_node<SegmentNode>(passes, !next.is_valid());
    for (size_t i = 0; i < segments.size(); ++i) {
      Edge& edge = node.next_edges().at(edges.at(i));
      if (segments[i] != segment || !edge.is_valid()) continue;
      const uint32_t input = made->add(static_cast<int>(i), edge);
      edge = Edge(made, input);
    }
    if (made->num_inputs() == 0) continue;
    const uint32_t link = made->link_to(next);
    next = Edge(made, link);
  }
}

Tensors run_backward_of_node(const at::Tensor& token, const Tensors& saved, const Tensors& tangents,
                             NoGradient* early) {
  // Outside of a backward pass autograd says "keep", which is safe.
  const bool keep = torch::autograd::get_current_graph_task_keep_graph();
  const int task = torch::autograd::get_current_graph_task_id();
  const auto node = torch::autograd::get_current_node();
  const bool may_be_cut = early && node && task >= 0 && !has_history;
  const auto passes = may_be_cut ? passes_behind(*node) : nullptr;
  if (!passes) return Session::backward(token, saved, tangents, keep);
  auto run = std::make_shared<BackwardRun>(token, saved, tangents, keep);
  std::vector<int> ours;
  const std::vector<int>& segments = passes->segments();
  for (size_t i = 0; i < segments.size(); ++i) {
    if (segments[i] == 0) ours.push_back(static_cast<int>(i));
  }
  Tensors gradients(segments.size()), made = run->take(ours);
  for (size_t i = 0; i < ours.size(); ++i) gradients[ours[i]] = std::move(made[i]);
  passes->add(task, {.run = std::move(run), .without = *early});
  torch::autograd::Engine::get_default_engine().queue_callback(
      [weak = std::weak_ptr<Passes>(passes), task] {
        if (const auto passes = weak.lock()) passes->end(task);
      });
  return gradients;
}

void leave_out(const NoGradient& without, Tensors& gradients) {
  if (without.empty()) return;
  const auto node = torch::autograd::get_current_node();
  const auto passes = passes_behind(*node);
  const bool is_cut = passes && passes->find(torch::autograd::get_current_graph_task_id());
  for (size_t i = 0; i < without.size(); ++i) {
    const Edge& edge = node->next_edge(i);
    // The segment's own node does this.
    if (is_cut && segment_at(edge) != nullptr) continue;
    leave_out_one(without[i], beyond_segments(edge), gradients[i]);
  }
}

}  // namespace torch_ort::run
