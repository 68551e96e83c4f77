#include "run/steps/collective.h"

#include "ops/collective.h"
#include "run/context.h"
#include "run/counters.h"
#include "run/steps/operator.h"

#include <algorithm>
#include <chrono>
#include <utility>

namespace torch_ort::run {

namespace {

using Clock = std::chrono::steady_clock;

void add(std::atomic<int64_t>& counter, Clock::duration time) {
  counter.fetch_add(std::chrono::duration_cast<std::chrono::microseconds>(time).count(),
                    std::memory_order_relaxed);
}

constexpr const char* kWhyHost = "communication between ranks is started by the host";

// The results of one collective, which have memory of PyTorch's.
struct StartStep : OperatorStep {
  // Whether this graph waits for all results. Otherwise the caller does, at some time.
  bool is_waited_for;

  StartStep(const CallSite& site, const c10::OperatorHandle& op)
      : OperatorStep(site, op, site.call.args), is_waited_for(site.call.node != nullptr) {
    for (const ir::Value* result : site.call.outputs) {
      is_waited_for = is_waited_for && result != nullptr &&
                      std::any_of(result->uses.begin(), result->uses.end(), [](const ir::Use& use) {
                        return use.node != nullptr && ops::is_wait(*use.node);
                      });
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
    if (of.is_waited_for) {
      const Clock::time_point now = Clock::now();
      for (int slot : of.outputs) context.in_flight.push_back({context.slots[slot], now});
    }
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

// The result is the tensor that it waits for. To the plan it is another one, that may be returned
// and saved as any other; it may be overwritten if nothing else reads what was waited for.
struct WaitStep : OperatorStep {
  int flying;
  std::vector<int> held;  // slots of what the collective reads meanwhile
  bool is_alone;          // nothing else reads what it waits for

  WaitStep(const CallSite& site, const c10::OperatorHandle& op, const ir::Node& start)
      : OperatorStep(site, op, site.call.args),
        flying(args.at(0).slots.at(0)),
        is_alone(site.call.node->inputs[0]->uses.size() == 1) {
    for (const ir::Value* operand : start.inputs) {
      if (operand != nullptr) held.push_back(site.slot(operand));
    }
  }

  const char* form() const override { return "wait"; }
  bool gives_up_results() const override { return is_alone; }
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
  using BoundCall::BoundCall;

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
    if (of.outputs[0] >= 0) of.store_results(context);
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
  if (ops::starts_collective(site.call.op)) return std::make_unique<StartStep>(site, *site.op);
  const ir::Node* start = site.call.node == nullptr ? nullptr : ops::collective_of(*site.call.node);
  if (site.call.op != ops::kWaitTensor || start == nullptr) return nullptr;
  return std::make_unique<WaitStep>(site, *site.op, *start);
}

}  // namespace torch_ort::run
