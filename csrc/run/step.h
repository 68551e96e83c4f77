// A step is one call of a compiled graph. Its form, a class in steps/, decides how it runs.
//
// Step       does not depend on sizes: what it reads and makes, and how its memory may be used
// BoundStep  for one set of sizes: arguments and addresses are filled in, ready to run
//
// The planner, the binder and the run loop ask these two, and know no form by name. A call writes
// into planned memory by `out=` if that overload is proved (proved_out_forms.h), or gets such
// memory while it allocates (placement.h). Otherwise the functional overload runs, and its result
// is adopted. A point-wise step that is the only reader of an adopted result overwrites it.
#pragma once

#include "ir/graph.h"
#include "plan/plan.h"
#include "region/codegen.h"
#include "run/spec.h"

#include <memory>
#include <optional>
#include <string>
#include <unordered_map>
#include <vector>

namespace torch_ort::run {

class Binder;
struct CompiledGraph;
struct Context;
struct Description;
struct StepCounts;

// The number of the slot of each value.
using Slots = std::unordered_map<const ir::Value*, int>;

struct BoundStep;

struct Step {
  std::string name;    // the name of the node, for profiles and messages
  std::string origin;  // the user's source line of the node
  // The slots of the results, with lists flattened; -1: not stored.
  std::vector<int> outputs;
  bool effect = false;  // it draws, writes or raises: it stays in order
  // The symbol whose value the result is, if it is not a tensor.
  std::string binds_symbol;

  virtual ~Step() = default;

  virtual const char* form() const = 0;  // for reports: "out", "control_flow"
  virtual std::string op_name() const = 0;
  virtual std::vector<int> reads() const = 0;              // slots of tensor arguments, each once
  virtual std::vector<int> mutates() const { return {}; }  // slots that it modifies
  // The sizes that it evaluates when it is bound or run.
  virtual std::vector<ir::Dim> dims() const { return {}; }

  // The slot whose memory a result shares, or may share, with any sizes; -1: the result has memory
  // of its own.
  virtual int shares(size_t /*result*/) const { return -1; }
  // Whether its results are views, or may be, and it does nothing else.
  virtual bool is_view() const { return false; }
  // Whether it writes its results into given memory.
  virtual bool writes_given_memory() const { return false; }
  // Whether it can write results of any strides at no cost.
  virtual bool writes_strided_memory() const { return false; }
  // The slots that outputs[0] may overwrite.
  virtual std::vector<int> in_place() const { return {}; }
  // Whether a reader may overwrite a result, because the kernel allocated it and does not hold it.
  virtual bool gives_up_results() const { return false; }
  // Whether it reads memory with gaps as fast as dense memory.
  virtual bool reads_gaps(const Description& /*description*/) const { return false; }
  // Whether elements that lie side by side must stay so where it reads or writes memory with gaps.
  virtual bool needs_runs() const { return false; }
  // Whether it starts what goes on beside later steps.
  virtual bool goes_on() const { return false; }
  // Whether the kernel can use a workspace.
  virtual bool takes_workspace() const { return false; }
  virtual void free_idle_contexts() const {}
  // Why a device cannot repeat it without the host (replay.h); empty if it can.
  virtual std::string why_host_is_needed() const { return ""; }

  // Refines `description` for one set of sizes: sets the roots of its results from those of its
  // arguments.
  virtual void describe(const CompiledGraph& graph, Description& description) const;
  virtual std::unique_ptr<BoundStep> bind(Binder& binder) const = 0;
};

// The name and origin of a step: "node_3 (model.py:12)".
std::string place_of(const Step& step);

// The slots in their order, each once, without -1.
std::vector<int> without_repeats(const std::vector<int>& slots);

struct BoundStep {
  const Step& step;
  // There is nothing to do in a run: the result is a view of engine memory, or its parts have been
  // written in place.
  bool is_done = false;
  std::vector<int> release;  // slots to release afterwards
  // Parts of the context area to return to the system afterwards.
  std::vector<plan::Discard> discards;
  std::vector<size_t> dead_chunks;  // chunks of the context area to free afterwards

  explicit BoundStep(const Step& of) : step(of) {}
  virtual ~BoundStep() = default;

  // The form with these sizes, which may be simpler than that of the step.
  virtual const char* form() const { return step.form(); }
  virtual bool is_view() const { return false; }
  virtual void run(Context& context, StepCounts& counts) const = 0;
  // The views that are made with a context and redirected to the memory of each call.
  virtual std::vector<const ViewSpec*> moving_views() const { return {}; }
  // Makes results that a context has from its beginning on (Binder::add_static).
  virtual void make_static(Context& /*context*/) const {}
  // The listing of a kernel, one instruction a line; empty if it has none.
  virtual std::string program() const { return {}; }
  // The list of rows that the last run made; nothing if it makes none or has not run.
  virtual std::optional<region::ListedRows> listed() const { return std::nullopt; }
};

}  // namespace torch_ort::run
