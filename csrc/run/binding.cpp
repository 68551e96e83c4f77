// One set of sizes: binds its symbols, asks plan/ for places, binds the arguments.
#include "base/error.h"
#include "base/failpoint.h"
#include "ops/op.h"
#include "region/lower.h"
#include "run/context.h"
#include "run/counters.h"
#include "run/describe.h"
#include "run/dtype.h"
#include "run/guard.h"
#include "run/lowered_region.h"

#include <c10/core/TensorImpl.h>

#include <algorithm>
#include <atomic>
#include <chrono>

namespace torch_ort::run {

namespace {

// Binds symbols from the shapes of the inputs.
void bind_symbols(const ir::Graph& graph, const Session::Tensors& inputs,
                  const std::vector<int64_t>& given,
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

void check_inputs(const ir::Graph& graph, const Session::Tensors& inputs) {
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

// Symbols that several dims name, and dims that are expressions: the guards of a capture hold
// these.
void check_dims(const ir::Graph& graph, const Session::Tensors& inputs,
                const ir::SymbolLookup& lookup) {
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

bool Binding::matches(const Session::Tensors& tensors, const std::vector<int64_t>& given) const {
  if (delivers != session->delivery_->is_on) return false;
  if (symbol_inputs != given || tensors.size() != inputs.size()) return false;
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

// Turns a session and one set of sizes into a Binding.
class Binder {
 public:
  Binder(Session& session, Binding& binding) : session_(session), binding_(binding) {
    lookup_ = [this](const std::string& name) -> std::optional<int64_t> {
      for (const auto& [symbol, value] : binding_.symbols) {
        if (symbol == name) return value;
      }
      return std::nullopt;
    };
  }

  void run(const Session::Tensors& inputs) {
    if (session_.options_.verify) check_dims(*session_.graph_, inputs, lookup_);
    may_fail("plan");
    described_ = describe(session_, binding_.inputs, lookup_, binding_.delivers);
    binding_.specs = std::move(described_.specs);
    binding_.program = std::move(described_.program);
    binding_.delivered = std::move(described_.delivered);
    binding_.plan = plan::make_plan(binding_.program, plan_options());
    if (session_.options_.verify) {
      plan::verify_plan(binding_.program, binding_.plan, plan_options());
    }
    may_fail("bind");
    bind_steps();
  }

 private:
  bool is_root(size_t slot) const { return described_.roots[slot] == static_cast<int>(slot); }
  plan::Kind kind_of(size_t slot) const { return binding_.program.tensors[slot].kind; }

  plan::PlanOptions plan_options() const {
    plan::PlanOptions options;
    // A step may need a size that another one tells, which the planner does not see.
    options.reorder = session_.options_.reorder && !session_.has_late_values_;
    options.in_place = session_.options_.in_place;
    return options;
  }

  void bind_steps() {
    const plan::Plan& plan = binding_.plan;
    std::vector<bool> written(session_.facts_.size(), false);
    for (size_t position = 0; position < plan.order.size(); ++position) {
      const int index = plan.order[position];
      const Step& step = session_.steps_[index];
      BoundStep bound;
      bound.step = &step;
      bound.form = described_.forms[index];
      bound.takes_over = described_.taken_over[index];
      if (step.form == Form::kRegion) {
        bound.kernel =
            session_.options_.is_from_file ? compile_region_of_file(step) : compile_region(step);
      }
      if (step.form == Form::kPlaced) bound.numbers.emplace(step.outputs.size());
      for (const ArgSource& source : step.args) bound.args.push_back(bind_arg(step, source));
      for (int slot : step.outputs) {
        const int owner = slot >= 0 && is_part(slot) ? described_.parts[slot].whole : slot;
        if (owner < 0 || written[owner]) continue;
        written[owner] = true;
        if (kind_of(owner) == plan::Kind::kOutput && is_root(owner))
          bound.allocate.push_back(owner);
      }
      if (bound.form == Form::kParts) {
        bound.rest = std::move(described_.rests.at(index));
        bound.is_done = bound.rest.empty();
      }
      if (step.writes_strided_memory()) {
        bound.parts = parts_made_by(step, plan::Kind::kOutput);
        for (PartSpec& part : parts_made_by(step, plan::Kind::kPlanned)) {
          binding_.parts.push_back(std::move(part));
        }
      }
      if (bound.form == Form::kView && makes_part(step)) {
        bound.is_done = true;
      } else if (bound.form == Form::kView && step.outputs.size() > 0) {
        const int base = step.reads().front();
        const bool sizes_known =
            std::none_of(bound.args.begin(), bound.args.end(), [](const BoundArg& arg) {
              return arg.kind == BoundArg::Kind::kLateDim ||
                     arg.kind == BoundArg::Kind::kLateDimList;
            });
        const plan::Kind kind = kind_of(base);
        bound.is_done = sizes_known && stands_from_the_start(base) &&
                        (kind == plan::Kind::kPlanned || kind == plan::Kind::kConstant);
        if (bound.is_done)
          binding_.static_views.push_back(index);
        else if (may_move(step))
          describe_views(step, base, bound);
      }
      for (int slot : plan.release[position]) bound.release.push_back(slot);
      bound.workspaces = at_position(plan.workspaces, position);
      if (session_.device_.is_cpu()) bound.discards = at_position(plan.discards, position);
      auto& half =
          index < static_cast<int>(session_.num_forward_) ? binding_.forward : binding_.backward;
      half.push_back(std::move(bound));
    }
    // Views of views come after what they look at, whatever the order of the plan.
    std::sort(binding_.static_views.begin(), binding_.static_views.end());
    list_slots();
  }

  bool is_part(int slot) const { return described_.parts[slot].whole >= 0; }
  bool makes_part(const Step& step) const {
    return std::any_of(step.outputs.begin(), step.outputs.end(),
                       [this](int slot) { return slot >= 0 && is_part(slot); });
  }

  // The parts that a step makes in tensors of one kind, each with its views.
  std::vector<PartSpec> parts_made_by(const Step& step, plan::Kind kind) const {
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

  std::shared_ptr<const region::Kernel> compile_region(const Step& step) const {
    const auto layout_of = [this](int slot) {
      const TensorSpec& spec = binding_.specs[slot];
      ORT_CHECK(spec.known, "run: region: the size of '", session_.slot_value(slot)->name,
                "' is not known");
      return region::Layout{run::dtype(spec.dtype), spec.sizes, spec.strides};
    };
    std::vector<region::Layout> inputs, outputs;
    for (const ArgSource& arg : step.args) inputs.push_back(layout_of(arg.slots[0]));
    for (int slot : step.outputs) outputs.push_back(layout_of(slot));
    const region::CodegenOptions& options = session_.options_.regions;
    const ir::Device& device = step.region->inputs[0]->type.device;
    const region::Codegen* codegen = region::codegen_for(device);
    if (codegen == nullptr && (step.schedule == nullptr || region::is_mask(*step.region))) {
      throw Unsupported(concat(step.region->op.str(), " '", step.name, "': no kernel for device '",
                               ir::to_string(device), "'"));
    }
    if (step.schedule == nullptr) {
      return codegen->compile(*step.region, inputs, outputs, options);
    }
    const BoundRegion region{*step.region, lookup_, inputs, outputs, options};
    using Mode = SessionOptions::RegionMode;
    const Mode mode = session_.options_.region_mode;
    if (codegen == nullptr || mode == Mode::kNodes) return make_lowered(region);
    std::shared_ptr<const region::Kernel> kernel =
        codegen->compile(*step.schedule, lookup_, inputs, outputs, options);
    return mode == Mode::kChecked ? make_checked(std::move(kernel), region) : kernel;
  }

  // Regions of the engine's own fit their operands, those of a file need not.
  std::shared_ptr<const region::Kernel> compile_region_of_file(const Step& step) const {
    try {
      return compile_region(step);
    } catch (const InternalError& error) {
      throw UserError(concat("file: node '", step.name, "': ", error.what()));
    } catch (const std::out_of_range&) {
      throw UserError(concat("file: node '", step.name, "': got attributes or a body for another ",
                             "number of operands, want those of its ", step.args.size()));
    }
  }

  // A tensor object over engine memory or a constant, and not one that a step gives in the run.
  bool stands_from_the_start(int slot) {
    const SlotFacts& facts = session_.facts_[slot];
    if (is_root(slot)) return true;
    const std::vector<int>& made = binding_.static_views;
    return std::find(made.begin(), made.end(), facts.producer) != made.end();
  }

  // Whether the results stay inside: an object that is pointed elsewhere must be the engine's own.
  // Strides that are named count from the beginning of memory that a caller's tensor may be a part
  // of.
  bool may_move(const Step& step) const {
    if (ops::registry().operator_row(step.op->schema().name()).names_strides) return false;
    const auto stays = [this](int slot) {
      const auto is_in = [slot](const std::vector<int>& slots) {
        return std::find(slots.begin(), slots.end(), slot) != slots.end();
      };
      return slot < 0 || (!session_.facts_[slot].late && !is_in(session_.output_slots_) &&
                          !is_in(session_.gradient_slots_) && !session_.facts_[slot].crosses);
    };
    return binding_.specs[step.reads().front()].known &&
           std::all_of(step.outputs.begin(), step.outputs.end(), stays);
  }

  // Runs the view over a tensor without memory and notes what comes out.
  void describe_views(const Step& step, int base, BoundStep& bound) {
    const TensorSpec& spec = binding_.specs[base];
    torch::jit::Stack stack;
    for (const BoundArg& arg : bound.args) {
      if (arg.kind == BoundArg::Kind::kConstant) {
        stack.emplace_back(arg.constant);
      } else if (arg.kind == BoundArg::Kind::kSlot && arg.slot == base) {
        stack.emplace_back(tensor_over(storage_without_memory(spec.bytes, spec.device), spec, 0));
      } else {
        return;
      }
    }
    RunGuard guard(session_.device());
    step.op->callBoxed(&stack);
    std::vector<at::Tensor> results;
    for (const c10::IValue& result : stack) {
      if (result.isTensorList()) {
        for (const c10::IValue& element : result.toListRef()) results.push_back(element.toTensor());
      } else {
        results.push_back(result.toTensor());
      }
    }
    if (results.size() < step.outputs.size()) return;
    for (size_t i = 0; i < step.outputs.size(); ++i) {
      if (step.outputs[i] < 0) continue;
      if (results[i].scalar_type() != spec.dtype) {
        bound.views.clear();
        return;
      }
      bound.views.push_back({step.outputs[i], results[i].sizes().vec(), results[i].strides().vec(),
                             results[i].storage_offset()});
    }
    bound.viewed = base;
  }

  void list_slots() {
    for (const auto* half : {&binding_.forward, &binding_.backward}) {
      for (const BoundStep& bound : *half) {
        for (const ViewSpec& view : bound.views) binding_.moving_views.push_back(&view);
        for (const PartSpec& part : bound.parts) binding_.moving_views.push_back(&part.place);
      }
    }

    std::vector<bool> is_static(session_.facts_.size(), false);
    for (size_t slot = 0; slot < session_.facts_.size(); ++slot) {
      is_static[slot] = session_.facts_[slot].is_constant;
      if (!is_root(slot) || kind_of(slot) != plan::Kind::kPlanned) continue;
      binding_.owned.push_back(static_cast<int>(slot));
      is_static[slot] = true;
    }
    for (const PartSpec& part : binding_.parts) is_static[part.place.slot] = true;
    for (int step : binding_.static_views) {
      for (int slot : session_.steps_[step].outputs) {
        if (slot >= 0) is_static[slot] = true;
      }
    }
    for (size_t slot = 0; slot < is_static.size(); ++slot) {
      if (is_static[slot]) continue;
      binding_.transient.push_back(static_cast<int>(slot));
      const SlotFacts& facts = session_.facts_[slot];
      const bool callers =
          kind_of(slot) == plan::Kind::kInput || session_.is_saved_output(static_cast<int>(slot));
      if (facts.crosses && !callers) binding_.kept.push_back(static_cast<int>(slot));
    }
  }

  BoundArg bind_arg(const Step& step, const ArgSource& source) const {
    BoundArg bound;
    bound.source = &source;
    switch (source.kind) {
      case ArgSource::Kind::kConstant:
        bound.kind = BoundArg::Kind::kConstant;
        bound.constant = source.constant;
        return bound;
      case ArgSource::Kind::kSlot:
        bound.kind = BoundArg::Kind::kSlot;
        bound.slot = source.slots[0];
        return bound;
      case ArgSource::Kind::kOutput:
        bound.kind = BoundArg::Kind::kSlot;
        bound.slot = step.outputs[source.slots[0]];
        return bound;
      case ArgSource::Kind::kSlotList: bound.kind = BoundArg::Kind::kTensorList; return bound;
      case ArgSource::Kind::kDim:
      case ArgSource::Kind::kDimList: break;
    }
    const bool list = source.kind == ArgSource::Kind::kDimList;
    c10::List<int64_t> values;
    for (const ir::Dim& dim : source.dims) {
      std::optional<int64_t> value = dim.evaluate(lookup_);
      if (!value) {
        bound.kind = list ? BoundArg::Kind::kLateDimList : BoundArg::Kind::kLateDim;
        return bound;
      }
      values.push_back(*value);
    }
    bound.kind = BoundArg::Kind::kConstant;
    if (list)
      bound.constant = values;
    else if (source.as_tensor)
      bound.constant = wrapped_number(values.get(0));
    else
      bound.constant = values.get(0);
    return bound;
  }

  Session& session_;
  Binding& binding_;
  ir::SymbolLookup lookup_;
  Description described_;  // less what the binding keeps
};

std::shared_ptr<Binding> Session::make_binding(const Tensors& inputs,
                                               const std::vector<int64_t>& symbols) {
  const auto start = std::chrono::steady_clock::now();
  check_inputs(*graph_, inputs);
  auto binding = std::make_shared<Binding>();
  binding->session = this;
  binding->owner = weak_from_this();
  binding->delivers = delivery_->is_on;
  static std::atomic<int64_t> next_serial{1};
  binding->serial = next_serial.fetch_add(1);
  binding->symbol_inputs = symbols;
  for (const at::Tensor& input : inputs) binding->inputs.push_back(spec_of(input));
  bind_symbols(*graph_, inputs, symbols, binding->symbols);
  Binder(*this, *binding).run(inputs);
  const auto spent = std::chrono::steady_clock::now() - start;
  binding->plan_ms = std::chrono::duration<double, std::milli>(spent).count();
  counters().plans.fetch_add(1);
  return binding;
}

std::shared_ptr<Binding> Session::binding_for(const Tensors& inputs,
                                              const std::vector<int64_t>& symbols) {
  {
    std::lock_guard lock(mutex_);
    for (auto found = bindings_.begin(); found != bindings_.end(); ++found) {
      if (!(*found)->matches(inputs, symbols)) continue;
      bindings_.splice(bindings_.begin(), bindings_, found);
      return bindings_.front();
    }
  }
  std::shared_ptr<Binding> binding = make_binding(inputs, symbols);
  std::lock_guard lock(mutex_);
  bindings_.push_front(binding);
  if (bindings_.size() > options_.max_bindings) bindings_.pop_back();
  return binding;
}

Context::Context(std::shared_ptr<Binding> of) : binding(std::move(of)) {
  const Session& session = *binding->session;
  const plan::Plan& plan = binding->plan;
  empty_storage = storage_without_memory(0, session.device());
  slots.resize(binding->specs.size());
  for (int slot : binding->owned) {
    const plan::Placement& place = plan.placements[slot];
    const TensorSpec& spec = binding->specs[slot];
    c10::Storage storage = storage_without_memory(spec.bytes, session.device());
    slots[slot] = tensor_over(storage, spec, 0);
    auto& parts = place.area == plan::Area::kContext ? context_parts : scratch_parts;
    parts.push_back({std::move(storage), place.offset});
  }
  for (const auto& [place, whole] : binding->parts) {
    const TensorSpec& spec = binding->specs[place.slot];
    const int64_t bytes = place.offset * static_cast<int64_t>(c10::elementSize(spec.dtype));
    slots[place.slot] = tensor_over(slots[whole].storage(), spec, bytes);
  }
  for (const auto& [slot, tensor] : session.constants()) slots[slot] = tensor;
  views.resize(slots.size());
  for (const ViewSpec* view : binding->moving_views) {
    TensorSpec spec = binding->specs[view->slot];
    spec.sizes = view->sizes;
    spec.strides = view->strides;
    views[view->slot] = tensor_over(empty_storage, spec, 0);
  }
  RunGuard guard(session.device());
  for (int step : binding->static_views) make_static_view(*this, session.step(step));
}

void Context::attach(std::vector<Part>& parts, void* data) {
  const c10::Device device = binding->session->device();
  for (Part& part : parts) {
    void* address = data == nullptr ? nullptr : static_cast<char*>(data) + part.offset;
    part.storage.set_data_ptr_noswap(c10::DataPtr(address, device));
  }
}

void Context::attach_context_memory(void* data) {
  context_data = static_cast<char*>(data);
  attach(context_parts, data);
}

void Context::attach_scratch(void* data) {
  scratch_data = static_cast<char*>(data);
  attach(scratch_parts, data);
}

}  // namespace torch_ort::run
