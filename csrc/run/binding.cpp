// Makes a binding for one set of sizes: binds the symbols, asks plan/ for a plan, and lets each
// form bind its steps.
#include "base/error.h"
#include "base/failpoint.h"
#include "run/binder.h"
#include "run/context.h"
#include "run/counters.h"
#include "run/dtype.h"
#include "run/replay.h"

#include <algorithm>
#include <chrono>
#include <numeric>
#include <set>

namespace torch_ort::run {

namespace {

using Tensors = std::vector<at::Tensor>;

// Binds symbols from the shapes of the inputs.
void bind_symbols(const ir::Graph& graph, const Tensors& inputs, const std::vector<int64_t>& given,
                  std::vector<std::pair<std::string, int64_t>>& symbols) {
  ORT_CHECK(given.size() == graph.symbol_inputs.size(), "run: got ", given.size(),
            " symbol values, want ", graph.symbol_inputs.size());
  const auto is_bound = [&](const std::string& name) {
    return std::any_of(symbols.begin(), symbols.end(), [&](auto& s) { return s.first == name; });
  };
  for (size_t i = 0; i < given.size(); ++i) symbols.emplace_back(graph.symbol_inputs[i], given[i]);
  for (size_t i = 0; i < inputs.size(); ++i) {
    const ir::Value& value = *graph.inputs[i];
    if (!inputs[i].defined() || !value.type.shape) continue;
    if (inputs[i].dim() != static_cast<int64_t>(value.type.shape->size())) {
      throw UserError(concat("input '", value.name, "': got ", inputs[i].dim(), " dims, want ",
                             value.type.shape->size()));
    }
    for (size_t d = 0; d < value.type.shape->size(); ++d) {
      const ir::Dim& dim = (*value.type.shape)[d];
      if (dim.is_symbol() && !is_bound(dim.name()))
        symbols.emplace_back(dim.name(), inputs[i].size(d));
      if (dim.is_constant() && dim.constant() != inputs[i].size(static_cast<int64_t>(d))) {
        throw UserError(concat("input '", value.name, "': dim ", d, ": got ",
                               inputs[i].size(static_cast<int64_t>(d)), ", want ", dim.constant()));
      }
    }
  }
}

void check_inputs(const ir::Graph& graph, const Tensors& inputs) {
  if (inputs.size() != graph.inputs.size()) {
    throw UserError(concat("run: got ", inputs.size(), " inputs, want ", graph.inputs.size()));
  }
  for (size_t i = 0; i < inputs.size(); ++i) {
    const ir::Value& value = *graph.inputs[i];
    if (!inputs[i].defined()) continue;
    if (value.type.dtype != ir::DType::kUndefined &&
        inputs[i].scalar_type() != scalar_type(value.type.dtype)) {
      throw UserError(concat("input '", value.name, "': got ",
                             c10::toString(inputs[i].scalar_type()), ", want ",
                             ir::name(value.type.dtype)));
    }
    if (inputs[i].layout() != c10::kStrided) {
      throw Unsupported(
          concat("input '", value.name, "': got layout ", inputs[i].layout(), ", want strided"));
    }
  }
}

// Checks that dims with the same symbol are equal, and that dims that are expressions have their
// value. The guards of a capture ensure both, so only SessionOptions::verify asks for this check.
void check_dims(const ir::Graph& graph, const Tensors& inputs, const ir::SymbolLookup& lookup) {
  for (size_t i = 0; i < inputs.size(); ++i) {
    const ir::Value& value = *graph.inputs[i];
    if (!inputs[i].defined() || !value.type.shape) continue;
    for (size_t d = 0; d < value.type.shape->size(); ++d) {
      const ir::Dim& dim = (*value.type.shape)[d];
      const std::optional<int64_t> want = dim.evaluate(lookup);
      const int64_t got = inputs[i].size(static_cast<int64_t>(d));
      if (want && *want != got) {
        throw UserError(concat("input '", value.name, "': dim ", d, ": got ", got, ", want ", *want,
                               " as '", dim.str(), "' is"));
      }
    }
  }
}

template <typename Part>
std::vector<Part> at_position(const std::vector<Part>& parts, size_t position) {
  std::vector<Part> found;
  std::copy_if(parts.begin(), parts.end(), std::back_inserter(found), [position](const Part& part) {
    return part.position == static_cast<int>(position);
  });
  return found;
}

}  // namespace

Binding::~Binding() = default;

bool Binding::matches(const Tensors& tensors, const std::vector<int64_t>& symbol_values,
                      GradientReturn as) const {
  if (gradient_return != as) return false;
  if (symbol_inputs != symbol_values || tensors.size() != inputs.size()) return false;
  for (size_t i = 0; i < inputs.size(); ++i) {
    if (!equals(inputs[i], tensors[i])) return false;
  }
  return true;
}

std::unique_ptr<Context> Binding::take_context() {
  {
    std::lock_guard lock(mutex);
    if (!idle.empty()) {
      std::unique_ptr<Context> context = std::move(idle.back());
      idle.pop_back();
      context->binding = shared_from_this();
      return context;
    }
  }
  counters().contexts_created.fetch_add(1);
  return std::make_unique<Context>(shared_from_this());
}

Binder::Binder(const CompiledGraph& graph, Binding& binding)
    : graph_(graph), binding_(binding), written_(graph.facts.size(), false) {
  lookup_ = [this](const std::string& name) -> std::optional<int64_t> {
    for (const auto& [symbol, value] : binding_.symbols) {
      if (symbol == name) return value;
    }
    return std::nullopt;
  };
}

void Binder::run(const Tensors& inputs) {
  if (graph_.options.verify) check_dims(*graph_.graph, inputs, lookup_);
  may_fail("plan");
  described_ = describe(graph_, binding_.inputs, lookup_, binding_.gradient_return);
  binding_.specs = std::move(described_.specs);
  binding_.program = std::move(described_.program);
  binding_.delivered = std::move(described_.delivered);
  binding_.plan = plan::make_plan(binding_.program, plan_options());
  if (graph_.options.verify) plan::verify_plan(binding_.program, binding_.plan, plan_options());
  may_fail("bind");
  bind_steps();
  list_slots();
  find_early_gradients();
}

// Tensors in planned memory begin where those of PyTorch's allocator may begin, as far as a GPU can
// tell: at two of its lines of 128 bytes. Boxes that products and attention copy by the tensor
// memory accelerator would touch one line more for each row otherwise.
constexpr int64_t kCudaAlignment = 256;
// A smaller chunk would not be worth an allocation in each call.
constexpr int64_t kSmallestChunk = 4 << 20;

plan::PlanOptions Binder::plan_options() const {
  plan::PlanOptions options;
  // A step may need a size that the result of another step determines. The planner does not know of
  // such dependencies.
  options.reorder = graph_.options.reorder && !graph_.has_unbacked_values;
  options.in_place = graph_.options.in_place;
  // On the CPU dead memory goes back to the system page by page (Plan::discards).
  if (graph_.device.is_cuda()) {
    options.alignment = kCudaAlignment;
    options.chunk_bytes = kSmallestChunk;
  }
  return options;
}

void Binder::bind_steps() {
  const plan::Plan& plan = binding_.plan;
  for (position_ = 0; position_ < static_cast<int>(plan.order.size()); ++position_) {
    step_ = plan.order[position_];
    std::unique_ptr<BoundStep> bound = graph_.steps[step_]->bind(*this);
    bound->release = plan.release[position_];
    if (graph_.device.is_cpu()) bound->discards = at_position(plan.discards, position_);
    for (size_t chunk = 0; chunk < plan.chunks.size(); ++chunk) {
      const bool is_dead = plan.chunks[chunk].position == position_;
      if (is_dead && plan.chunks.size() > 1) bound->dead_chunks.push_back(chunk);
    }
    const bool is_forward = step_ < static_cast<int>(graph_.num_forward);
    (is_forward ? binding_.forward : binding_.backward).push_back(std::move(bound));
  }
}

bool Binder::stands_from_the_start(int slot) const {
  return has_own_memory(slot) || binding_.static_results.contains(graph_.facts[slot].producer);
}

std::vector<plan::Workspace> Binder::workspaces() const {
  return at_position(binding_.plan.workspaces, position_);
}

std::optional<std::vector<ViewSpec>> Binder::rest() const {
  const auto found = described_.rests.find(step_);
  return found == described_.rests.end() ? std::nullopt : std::optional(found->second);
}

const AlignedProduct* Binder::aligned() const {
  const auto found = described_.aligned.find(step_);
  return found == described_.aligned.end() ? nullptr : &found->second;
}

std::vector<int> Binder::take_new_outputs(const Step& step) {
  std::vector<int> taken;
  for (int slot : step.outputs) {
    const int owner = slot >= 0 && is_part(slot) ? described_.parts[slot].whole : slot;
    if (owner < 0 || written_[owner]) continue;
    written_[owner] = true;
    if (kind_of(owner) == plan::Kind::kOutput && has_own_memory(owner)) taken.push_back(owner);
  }
  return taken;
}

std::vector<PartSpec> Binder::take_parts(const Step& step) {
  for (PartSpec& part : parts_made_by(step, plan::Kind::kPlanned)) {
    binding_.parts.push_back(std::move(part));
  }
  return parts_made_by(step, plan::Kind::kOutput);
}

// The parts that the step makes in tensors of one kind, each with its views.
std::vector<PartSpec> Binder::parts_made_by(const Step& step, plan::Kind kind) const {
  std::vector<PartSpec> made;
  for (size_t slot = 0; slot < described_.parts.size(); ++slot) {
    const Part& part = described_.parts[slot];
    if (part.whole < 0 || kind_of(part.whole) != kind) continue;
    if (std::find(step.outputs.begin(), step.outputs.end(), part.root) == step.outputs.end()) {
      continue;
    }
    const TensorSpec& spec = binding_.specs[slot];
    made.push_back({{static_cast<int>(slot), spec.sizes, spec.strides, part.offset}, part.whole});
  }
  return made;
}

// Lists which tensors a context makes once, which slots each call fills, and which are kept between
// its halves.
void Binder::list_slots() {
  for (const BoundSteps* half : {&binding_.forward, &binding_.backward}) {
    for (const auto& bound : *half) {
      const std::vector<const ViewSpec*> views = bound->moving_views();
      binding_.moving_views.insert(binding_.moving_views.end(), views.begin(), views.end());
    }
  }
  const auto num_slots = static_cast<int>(graph_.facts.size());
  std::vector<bool> is_static(num_slots, false);
  for (int slot = 0; slot < num_slots; ++slot) {
    is_static[slot] = graph_.facts[slot].is_constant;
    if (!has_own_memory(slot) || kind_of(slot) != plan::Kind::kPlanned) continue;
    binding_.owned.push_back(slot);
    is_static[slot] = true;
  }
  for (const PartSpec& part : binding_.parts) is_static[part.place.slot] = true;
  for (const auto& [step, bound] : binding_.static_results) {
    for (int slot : graph_.steps[step]->outputs) {
      if (slot >= 0) is_static[slot] = true;
    }
  }
  std::set<int> crossing;
  for (int slot = 0; slot < num_slots; ++slot) {
    if (is_static[slot]) {
      const bool is_owned = kind_of(slot) == plan::Kind::kPlanned;
      if (graph_.facts[slot].crosses && is_owned) crossing.insert(described_.roots[slot]);
      continue;
    }
    binding_.transient.push_back(slot);
    const bool is_callers = kind_of(slot) == plan::Kind::kInput || graph_.is_saved_output(slot);
    if (graph_.facts[slot].crosses && !is_callers) binding_.kept.push_back(slot);
  }
  binding_.crossing.assign(crossing.begin(), crossing.end());
}

// The bytes of the first segment of gradients. It is small, as the first bucket of
// DistributedDataParallel is, so that communication begins early.
constexpr int64_t kFirstSegmentBytes = 1 << 20;

void Binder::find_early_gradients() {
  const auto& roots = described_.roots;
  std::vector<int> last_use(graph_.facts.size(), 0);  // by root
  for (size_t i = 0; i < binding_.backward.size(); ++i) {
    const plan::Step& step = binding_.program.steps[binding_.plan.order[graph_.num_forward + i]];
    for (const std::vector<int>* slots : {&step.reads, &step.writes}) {
      for (int slot : *slots) last_use[roots[slot]] = static_cast<int>(i) + 1;
    }
  }
  for (int root : roots) binding_.last_use.push_back(last_use[root]);
  const std::vector<int>& inputs = graph_.options.gradient_inputs;
  for (size_t i = 0; i < graph_.gradients.size(); ++i) {
    const int slot = graph_.gradients[i], input = i < inputs.size() ? inputs[i] : -1;
    EarlyGradient early{.ready = static_cast<int>(binding_.backward.size())};
    if (input >= 0) {
      early.ready = std::max(last_use[roots[slot]], last_use[roots[graph_.inputs.at(input)]]);
    }
    for (int other : binding_.transient) {
      if (roots[other] == roots[slot]) early.slots.push_back(other);
    }
    binding_.early.push_back(std::move(early));
  }
  if (binding_.gradient_return.early) cut_into_segments();
}

void Binder::cut_into_segments() {
  std::vector<EarlyGradient>& early = binding_.early;
  std::vector<size_t> order(early.size());
  std::iota(order.begin(), order.end(), size_t{0});
  std::stable_sort(order.begin(), order.end(),
                   [&](size_t a, size_t b) { return early[a].ready < early[b].ready; });
  const int64_t most = graph_.options.segment_bytes;
  int64_t bytes = 0, enough = std::min(most, kFirstSegmentBytes);
  for (size_t i = 0; i < order.size(); ++i) {
    const bool is_next = i > 0 && early[order[i]].ready > early[order[i - 1]].ready;
    if (is_next && bytes >= enough) {
      ++binding_.num_segments;
      bytes = 0;
      enough = most;
    }
    early[order[i]].segment = binding_.num_segments - 1;
    bytes += binding_.specs[graph_.gradients[order[i]]].bytes;
    binding_.largest_segment_bytes = std::max(binding_.largest_segment_bytes, bytes);
  }
}

std::shared_ptr<Binding> make_binding(std::shared_ptr<const CompiledGraph> graph,
                                      const Tensors& inputs, const std::vector<int64_t>& symbols,
                                      GradientReturn gradient_return) {
  const auto start = std::chrono::steady_clock::now();
  check_inputs(*graph->graph, inputs);
  auto binding = std::make_shared<Binding>();
  binding->graph = std::move(graph);
  binding->gradient_return = gradient_return;
  binding->symbol_inputs = symbols;
  for (const at::Tensor& input : inputs) binding->inputs.push_back(spec_of(input));
  bind_symbols(*binding->graph->graph, inputs, symbols, binding->symbols);
  Binder(*binding->graph, *binding).run(inputs);
  const CompiledGraph& compiled = *binding->graph;
  if (compiled.options.cuda_graphs && compiled.device.is_cuda()) {
    binding->replay = std::make_unique<Replay>(*binding);
  }
  const auto spent = std::chrono::steady_clock::now() - start;
  binding->plan_ms = std::chrono::duration<double, std::milli>(spent).count();
  counters().plans.fetch_add(1);
  return binding;
}

}  // namespace torch_ort::run
