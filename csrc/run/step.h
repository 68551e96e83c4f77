// A step is one call of a program. What it does is the business of its form, a class in steps/.
//
// Step       whatever the sizes: what it reads and makes, and what may be done with its memory.
// BoundStep  for one set of sizes: its arguments and places filled in, ready to run.
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

// Slots number the tensors of a program.
using Slots = std::unordered_map<const ir::Value*, int>;

struct BoundStep;

struct Step {
  std::string name;    // of the node, for profilers and messages
  std::string origin;  // of the node: a place in the user's program
  // Slots of the tensors that the step gives, lists flattened; -1: not kept.
  std::vector<int> outputs;
  bool effect = false;       // random, writes or raises: keeps its order
  std::string binds_symbol;  // the result is no tensor but the value of this symbol

  virtual ~Step() = default;

  virtual const char* form() const = 0;  // "out", "control_flow"; of reports
  virtual std::string op_name() const = 0;
  virtual std::vector<int> reads() const = 0;              // slots of tensor arguments, each once
  virtual std::vector<int> mutates() const { return {}; }  // slots that the step writes into
  // Sizes that it evaluates in each run or binding.
  virtual std::vector<ir::Dim> dims() const { return {}; }

  // The slot whose memory a result shares by the nature of the form, whatever the sizes, or may
  // share; -1: it has memory of its own.
  virtual int shares(size_t /*result*/) const { return -1; }
  // Whether that is all it does: its results are views, or may be.
  virtual bool is_view() const { return false; }
  // Whether the results are written into memory that the step is given.
  virtual bool writes_given_memory() const { return false; }
  // Whether it can do so wherever each element lies, and at no cost.
  virtual bool writes_strided_memory() const { return false; }
  // Slots over which outputs[0] may be written.
  virtual std::vector<int> in_place() const { return {}; }
  // Whether a reader may write over a result: the kernel has made it and keeps nothing of it.
  virtual bool gives_up_results() const { return false; }
  // Whether it reads memory with gaps as fast as any other.
  virtual bool reads_gaps(const Description& /*description*/) const { return false; }
  // Whether the kernel can use memory that is given to it for itself.
  virtual bool takes_workspace() const { return false; }
  virtual void free_idle_contexts() const {}

  // What one set of sizes lets it do: `description.roots` of its results, from those of its
  // arguments.
  virtual void describe(const CompiledGraph& graph, Description& description) const;
  virtual std::unique_ptr<BoundStep> bind(Binder& binder) const = 0;
};

// "node_3 (model.py:12)"
std::string place_of(const Step& step);

// In their order, without -1.
std::vector<int> without_repeats(const std::vector<int>& slots);

struct BoundStep {
  const Step& step;
  // Nothing is left to do in a run: its result looks at engine memory, or has come with its parts.
  bool is_done = false;
  std::vector<int> release;  // slots to let go afterwards
  // Parts of the context memory that may go back to the system afterwards.
  std::vector<plan::Discard> discards;

  explicit BoundStep(const Step& of) : step(of) {}
  virtual ~BoundStep() = default;

  // What the sizes have made of the step's form.
  virtual const char* form() const { return step.form(); }
  virtual bool is_view() const { return false; }
  virtual void run(Context& context, StepCounts& counts) const = 0;
  // Tensor objects that are made with a context, and pointed at the memory of each call.
  virtual std::vector<const ViewSpec*> moving_views() const { return {}; }
  // The kernel of a region, one instruction a line; empty: it is none.
  virtual std::string program() const { return {}; }
  // The list of rows that it made last; nothing if it makes none, or has not run.
  virtual std::optional<region::ListedRows> listed() const { return std::nullopt; }
};

}  // namespace torch_ort::run
