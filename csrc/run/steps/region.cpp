// A fused region, or an op that is one kernel: a kernel of region/codegen.h, which writes into
// given memory.
#include "base/error.h"
#include "ops/op.h"
#include "ops/product.h"
#include "region/lower.h"
#include "region/schedule.h"
#include "run/binder.h"
#include "run/counters.h"
#include "run/lowered_region.h"
#include "run/steps/forms.h"
#include "run/steps/kernel.h"

#include <c10/core/impl/VirtualGuardImpl.h>

#include <algorithm>
#include <stdexcept>

namespace torch_ort::run {

namespace {

struct RegionStep : Step {
  const ir::Node& node;
  std::vector<int> operands;                         // slots
  std::shared_ptr<const region::Schedule> schedule;  // nullptr if the node has no body

  explicit RegionStep(const CallSite& site) : node(*site.call.node) {
    for (const ops::Arg& arg : site.call.args) {
      operands.push_back(site.slot(std::get<ir::Value*>(arg.value)));
    }
    outputs = site.output_slots();
    if (ir::is(&node, "Region", ir::kTorchOrtDomain)) {
      schedule = std::make_shared<region::Schedule>(region::make_schedule(node));
    }
  }

  const char* form() const override { return "region"; }
  std::string op_name() const override { return node.op.str(); }
  std::vector<int> reads() const override { return without_repeats(operands); }
  bool writes_given_memory() const override { return true; }
  bool writes_strided_memory() const override { return ops::kernel_facts(node).writes_strides; }
  bool reads_gaps(const Description& /*description*/) const override {
    return ops::kernel_facts(node).reads_gaps;
  }
  bool needs_runs() const override { return ops::kernel_facts(node).needs_runs; }

  std::vector<int> in_place() const override {
    std::vector<int> slots;
    if (const int input = ops::kernel_facts(node).overwrites; input >= 0) return {operands[input]};
    if (const int start = slot_of_start(); start >= 0) return {start};
    if (schedule == nullptr) return slots;
    for (int input : schedule->overwritable) slots.push_back(operands[input]);
    return slots;
  }

  std::unique_ptr<BoundStep> bind(Binder& binder) const override;

 private:
  // The tensor that the kernel adds to, unless it reads it in another order as well; -1: none.
  int slot_of_start() const {
    if (ops::start_of(node) == nullptr) return -1;
    const int slot = operands[ops::kernel_facts(node).start];
    return std::count(operands.begin(), operands.end(), slot) > 1 ? -1 : slot;
  }
};

// The options of the session, with the index of the device on which the program runs.
region::CodegenOptions codegen_options(const CompiledGraph& graph) {
  region::CodegenOptions options = graph.options.regions;
  const c10::Device& device = graph.device;
  options.device = device.has_index()
                       ? device.index()
                       : c10::impl::VirtualGuardImpl(device.type()).getDevice().index();
  return options;
}

// Makes the kernel of a region for one set of sizes.
class KernelMaker {
 public:
  KernelMaker(const RegionStep& step, const Binder& binder)
      : step_(step),
        lookup_(binder.lookup()),
        options_(binder.graph().options),
        codegen_options_(codegen_options(binder.graph())) {
    for (int slot : step.operands) inputs_.push_back(layout_of(slot, binder));
    for (int slot : step.outputs) outputs_.push_back(layout_of(slot, binder));
  }

  std::shared_ptr<const region::Kernel> make() const {
    const ir::Device& device = step_.node.outputs[0]->type.device;
    const region::Codegen* codegen = region::codegen_for(device);
    if (codegen == nullptr && (step_.schedule == nullptr || region::is_mask(step_.node))) {
      throw Unsupported(concat(step_.node.op.str(), " '", step_.name, "': no kernel for device '",
                               ir::to_string(device), "'"));
    }
    if (step_.schedule == nullptr) {
      return region::compile(*codegen, {step_.node, inputs_, outputs_, codegen_options_});
    }
    const BoundRegion region{step_.node, lookup_, inputs_, outputs_, codegen_options_};
    using Mode = SessionOptions::RegionMode;
    if (codegen == nullptr || options_.region_mode == Mode::kNodes) return make_lowered(region);
    std::shared_ptr<const region::Kernel> kernel;
    if (options_.region_writer != nullptr) {
      kernel = options_.region_writer->compile(*step_.schedule, lookup_, inputs_, outputs_, device,
                                               codegen_options_);
    }
    if (kernel == nullptr) {
      kernel = codegen->compile(*step_.schedule, lookup_, inputs_, outputs_, codegen_options_);
    }
    if (options_.region_mode == Mode::kChecked) return make_checked(std::move(kernel), region);
    return kernel;
  }

 private:
  const RegionStep& step_;
  const ir::SymbolLookup& lookup_;
  const SessionOptions& options_;
  const region::CodegenOptions codegen_options_;
  std::vector<region::Layout> inputs_, outputs_;
};

// A region from a file may not fit its operands, whose sizes may not be known either. This is an
// error of the user.
std::shared_ptr<const region::Kernel> make_of_file(const RegionStep& step, const Binder& binder) {
  try {
    return KernelMaker(step, binder).make();
  } catch (const InternalError& error) {
    throw UserError(concat("file: node '", step.name, "': ", error.what()));
  } catch (const std::out_of_range&) {
    throw UserError(concat("file: node '", step.name, "': got attributes or a body for another ",
                           "number of operands, want those of its ", step.operands.size()));
  }
}

std::unique_ptr<BoundStep> RegionStep::bind(Binder& binder) const {
  std::shared_ptr<const region::Kernel> kernel = binder.graph().options.is_from_file
                                                     ? make_of_file(*this, binder)
                                                     : KernelMaker(*this, binder).make();
  return std::make_unique<BoundKernel>(*this, binder, operands, std::move(kernel),
                                       &StepCounts::region);
}

}  // namespace

std::unique_ptr<Step> make_region(const CallSite& site) {
  if (site.is_unbacked || site.call.op != "torch_ort::region") return nullptr;
  return std::make_unique<RegionStep>(site);
}

}  // namespace torch_ort::run
