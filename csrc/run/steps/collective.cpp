#include "run/steps/collective.h"

#include "ops/collective.h"
#include "run/binder.h"
#include "run/context.h"
#include "run/counters.h"
#include "run/out_forms.h"
#include "run/steps/operator.h"
#include "run/steps/writer.h"

#include <algorithm>
#include <array>
#include <chrono>
#include <optional>
#include <string_view>
#include <utility>

namespace torch_ort::run {

namespace {

using Clock = std::chrono::steady_clock;

void add(std::atomic<int64_t>& counter, Clock::duration time) {
  counter.fetch_add(std::chrono::duration_cast<std::chrono::microseconds>(time).count(),
                    std::memory_order_relaxed);
}

constexpr const char* kWhyHost = "communication between ranks is started by the host";

bool waits(const ir::Use& use) { return use.node != nullptr && ops::is_wait(*use.node); }

// Notes that the results of one collective are in flight.
void take_off(Context& context, const std::vector<int>& slots) {
  const Clock::time_point now = Clock::now();
  for (int slot : slots) context.in_flight.push_back({context.slots[slot], now});
}

// Operators with a form that works in place. Those that write into other given memory
// (all_gather_into_tensor_out) do not reach process groups that are written in Python.
struct InPlaceForm {
  std::string_view op;
  const char* form;
};

constexpr std::array<InPlaceForm, 2> kInPlaceForms = {{
    {"_c10d_functional::all_reduce", "_c10d_functional::all_reduce_"},
    {"_c10d_functional::broadcast", "_c10d_functional::broadcast_"},
}};

// A collective whose result is in planned memory. The result is a copy of the operand at first,
// unless the plan lets it overwrite that.
struct InPlaceStartStep : OperatorStep {
  int operand;

  InPlaceStartStep(const CallSite& site, const c10::OperatorHandle& form)
      : OperatorStep(site, *site.op, site.call.args), operand(args.at(0).slots.at(0)) {
    op = form;
    args[0] = ArgSource::of_output(0);
  }

  const char* form() const override { return "collective"; }
  bool goes_on() const override { return true; }
  bool writes_given_memory() const override { return true; }
  std::vector<int> in_place() const override { return {operand}; }
  std::vector<int> reads() const override { return {operand}; }
  std::string why_host_is_needed() const override { return kWhyHost; }
  std::unique_ptr<BoundStep> bind(Binder& binder) const override;
};

struct BoundInPlaceStart : BoundWriter {
  const InPlaceStartStep& of;
  std::vector<BoundArg> args;

  BoundInPlaceStart(const InPlaceStartStep& called, Binder& binder)
      : BoundWriter(called, binder), of(called), args(called.bind_args(binder)) {}

 protected:
  void write(Context& context, StepCounts& counts) const override {
    const at::Tensor &operand = context.slots[of.operand], &result = context.slots[of.outputs[0]];
    if (operand.const_data_ptr() != result.const_data_ptr()) result.copy_(operand);
    of.call(context, args);
    take_off(context, of.outputs);
    ++counts.out;
    counters().collectives.fetch_add(1, std::memory_order_relaxed);
  }
};

std::unique_ptr<BoundStep> InPlaceStartStep::bind(Binder& binder) const {
  return std::make_unique<BoundInPlaceStart>(*this, binder);
}

std::unique_ptr<Step> make_in_place_start(const CallSite& site) {
  const auto found = std::find_if(kInPlaceForms.begin(), kInPlaceForms.end(),
                                  [&](const InPlaceForm& each) { return each.op == site.call.op; });
  const ir::Value* result = site.call.outputs.at(0);
  if (found == kInPlaceForms.end() || site.call.node == nullptr || result == nullptr ||
      site.leaving.contains(result) || site.is_unbacked || !site.has_known_results()) {
    return nullptr;
  }
  // What nobody waits for is in flight when its planned memory has another use.
  if (result->type.strides || !ir::is_number(result->type.dtype) || result->uses.empty() ||
      !std::all_of(result->uses.begin(), result->uses.end(), waits)) {
    return nullptr;
  }
  const std::optional<c10::OperatorHandle> form = find_op(found->form, "");
  if (!form) return nullptr;
  return std::make_unique<InPlaceStartStep>(site, *form);
}

// The results of one collective, which have memory of PyTorch's.
struct StartStep : OperatorStep {
  // Whether this graph waits for all results. Otherwise the caller does, at some time.
  bool is_waited_for;

  StartStep(const CallSite& site, const c10::OperatorHandle& op)
      : OperatorStep(site, op, site.call.args), is_waited_for(site.call.node != nullptr) {
    for (const ir::Value* result : site.call.outputs) {
      is_waited_for = is_waited_for && result != nullptr &&
                      std::any_of(result->uses.begin(), result->uses.end(), waits);
    }
  }

  const char* form() const override { return "collective"; }
  bool goes_on() const override { return true; }
  std::string why_host_is_needed() const override { return kWhyHost; }
  std::unique_ptr<BoundStep> bind(Binder& binder) const override;
};

struct BoundStart : BoundCall<StartStep> {
  using BoundCall::BoundCall;

  void run(Context& context, StepCounts& counts) const override {
    of.is_waited_for ? of.call(context, args) : call_with_copies(context);
    of.store_results(context);
    if (of.is_waited_for) take_off(context, of.outputs);
    ++counts.functional;
    counters().collectives.fetch_add(1, std::memory_order_relaxed);
  }

 private:
  void call_with_copies(Context& context) const;
};

// The engine's memory has other contents when the caller waits.
void BoundStart::call_with_copies(Context& context) const {
  std::vector<std::pair<int, at::Tensor>> operands;
  for (int slot : of.reads()) {
    at::Tensor& operand = context.slots[slot];
    operands.emplace_back(slot, operand);
    operand = operand.clone();
  }
  of.call(context, args);
  for (auto& [slot, operand] : operands) context.slots[slot] = std::move(operand);
}

std::unique_ptr<BoundStep> StartStep::bind(Binder& binder) const {
  return std::make_unique<BoundStart>(*this, binder);
}

// The result is the tensor that it waits for. If that has planned memory, the result is a view of
// it. Otherwise it is another tensor to the plan, that may be returned and saved as any other; it
// may be overwritten if nothing else reads what was waited for.
struct WaitStep : OperatorStep {
  int flying;
  std::vector<int> held;  // slots of what the collective reads meanwhile
  bool is_placed;         // whether what it waits for has planned memory
  bool is_alone;          // nothing else reads what it waits for

  WaitStep(const CallSite& site, const c10::OperatorHandle& op, const ir::Node& start)
      : OperatorStep(site, op, site.call.args),
        flying(args.at(0).slots.at(0)),
        is_alone(site.call.node->inputs[0]->uses.size() == 1) {
    const int producer = site.graph.facts.at(flying).producer;
    is_placed = site.graph.steps.at(producer)->writes_given_memory();
    if (is_placed) return;  // the operand has been copied
    for (const ir::Value* operand : start.inputs) {
      if (operand != nullptr) held.push_back(site.slot(operand));
    }
  }

  const char* form() const override { return "wait"; }
  int shares(size_t /*result*/) const override { return is_placed ? flying : -1; }
  bool gives_up_results() const override { return is_alone && !is_placed; }
  std::vector<int> reads() const override {
    std::vector<int> slots = held;
    slots.push_back(flying);
    return without_repeats(slots);
  }
  // It looks at no elements.
  bool reads_gaps(const Description& /*description*/) const override { return true; }
  std::string why_host_is_needed() const override { return kWhyHost; }
  std::unique_ptr<BoundStep> bind(Binder& binder) const override;
};

struct BoundWait : BoundCall<WaitStep> {
  bool is_static;  // the result is there from the start

  BoundWait(const WaitStep& called, Binder& binder)
      : BoundCall(called, binder),
        is_static(called.is_placed && called.outputs[0] >= 0 &&
                  binder.kind_of(called.flying) == plan::Kind::kPlanned &&
                  binder.stands_from_the_start(called.flying)) {
    if (is_static) binder.add_static(*this);
  }

  void make_static(Context& context) const override {
    context.slots[of.outputs[0]] = context.slots[of.flying];
  }

  void run(Context& context, StepCounts& /*counts*/) const override {
    const Clock::time_point begin = Clock::now();
    of.call(context, args);
    const Clock::time_point end = Clock::now();
    const at::Tensor& flying = context.slots[of.flying];
    const auto flight =
        std::find_if(context.in_flight.begin(), context.in_flight.end(),
                     [&](const Context::Flight& each) { return each.result.is_same(flying); });
    if (flight != context.in_flight.end()) {
      add(counters().collectives_flight_us, end - flight->start);
      add(counters().collectives_waited_us, end - begin);
      context.in_flight.erase(flight);
    }
    if (of.outputs[0] >= 0 && !is_static) of.store_results(context);
  }
};

std::unique_ptr<BoundStep> WaitStep::bind(Binder& binder) const {
  return std::make_unique<BoundWait>(*this, binder);
}

}  // namespace

void wait_for_all(Context& context) noexcept {
  for (const Context::Flight& flight : std::exchange(context.in_flight, {})) {
    try {
      static const auto wait = c10::Dispatcher::singleton().findSchemaOrThrow(ops::kWaitTensor, "");
      torch::jit::Stack stack = {flight.result};
      wait.callBoxed(&stack);
    } catch (...) {  // NOLINT: see the header
    }
  }
}

std::unique_ptr<Step> make_collective(const CallSite& site) {
  if (!site.op) return nullptr;
  if (ops::starts_collective(site.call.op)) {
    if (auto placed = make_in_place_start(site)) return placed;
    return std::make_unique<StartStep>(site, *site.op);
  }
  const ir::Node* start = site.call.node == nullptr ? nullptr : ops::collective_of(*site.call.node);
  if (site.call.op != ops::kWaitTensor || start == nullptr) return nullptr;
  return std::make_unique<WaitStep>(site, *site.op, *start);
}

}  // namespace torch_ort::run
