// Does nothing. It reads the values that a backward half might have read, so that these exist until
// it has run.
#include "run/steps/forms.h"

namespace torch_ort::run {

namespace {

struct KeepStep : Step {
  std::vector<int> kept;  // slots

  const char* form() const override { return "keep"; }
  std::string op_name() const override { return kKeepCall; }
  std::vector<int> reads() const override { return kept; }
  bool reads_gaps(const Description& /*description*/) const override { return true; }
  std::unique_ptr<BoundStep> bind(Binder& binder) const override;
};

struct BoundKeep : BoundStep {
  explicit BoundKeep(const KeepStep& of) : BoundStep(of) { is_done = true; }

  void run(Context& /*context*/, StepCounts& /*counts*/) const override {}
};

std::unique_ptr<BoundStep> KeepStep::bind(Binder& /*binder*/) const {
  return std::make_unique<BoundKeep>(*this);
}

}  // namespace

std::unique_ptr<Step> make_keep(const CallSite& site) {
  if (site.call.op != kKeepCall) return nullptr;
  auto step = std::make_unique<KeepStep>();
  for (const ops::Arg& arg : site.call.args) {
    step->kept.push_back(site.slot(std::get<ir::Value*>(arg.value)));
  }
  step->outputs = site.output_slots();
  return step;
}

}  // namespace torch_ort::run
