// The rows: facts about ops and about PyTorch's operators. Each family registers its own in one
// file; all.cpp lists the families. Other rooms ask a row for a fact and keep no lists of names.
#pragma once

#include "ir/graph.h"
#include "ops/attributes.h"
#include "ops/call.h"
#include "ops/channels_last.h"
#include "ops/fusion.h"
#include "ops/kernel_checks.h"
#include "ops/out_form.h"
#include "ops/pair.h"

#include <string>
#include <string_view>
#include <unordered_map>
#include <vector>

namespace torch_ort::ops {

// Computes the types of the outputs from the types of the inputs and the attributes. A type that
// depends on data is left unknown. Throws UserError on inputs that do not fit.
using InferRule = std::vector<ir::Type> (*)(const ir::Node& node);

// Adds the calls that compute `node`; they write into `node.outputs`. Throws Unsupported on a form
// of the node that has no call.
using Lowering = void (*)(const ir::Node& node, CallList& calls);

// What passes ask about a node, of a standard op or of an ATen node.
struct Work {
  // Each element of the result depends only on the elements at its place in the inputs.
  bool elementwise = false;
  // The result has the elements of the first input in their order.
  bool keeps_elements = false;
  FusedRule fused;  // the form that it has in a fused region
  ImageRule image;  // how it treats channels-last images
};

// What the plan and passes ask about an op that is one kernel of the engine's (region/codegen.h).
struct KernelFacts {
  // Results may have any strides; otherwise they are row-major.
  bool writes_strides = true;
  // The rows of operands may have gaps between them.
  bool reads_gaps = true;
  // Elements of operands and results that lie side by side must stay so, as channels of images.
  bool needs_runs = false;
  // The input whose memory the first result may take; -1: none.
  int overwrites = -1;
  // The input that sums begin with, if the node has it; -1: the op has none.
  int start = -1;
  // How many inputs, the last ones, are lists of rows, and the attribute that says whether a node
  // has them; nullptr: each node has.
  int row_lists = 0;
  const char* row_lists_if = nullptr;
};

struct Op {
  std::string name;
  std::string domain;  // "" standard ONNX
  int min_inputs = 1;
  int max_inputs = 1;   // -1: any number
  int max_outputs = 1;  // -1: any number
  // The attributes of all opsets that the engine runs. Nodes of files are checked against them.
  std::vector<AttrRule> attributes;
  bool any_attributes = false;  // other attributes are allowed too
  // The first opset whose definition agrees with `lower`.
  int since = 1;
  // The operators of PyTorch that compute the same.
  std::vector<Pair> pairs;
  InferRule infer = nullptr;  // nullptr: the node is made with its types
  Lowering lower = nullptr;   // nullptr: it does not run (YieldOp)
  // Equal inputs give equal outputs, and the node has no other effect.
  bool pure = true;
  // An output may share memory with the first input.
  bool view = false;
  int bfloat16_since = 13;  // the first opset that takes bfloat16
  // Inputs that are read by known_ints() alone, never as tensors.
  std::vector<int> int_inputs;
  // The second input holds indices along `axis`.
  bool indexes = false;
  Work work;
  KernelFacts kernel;
  // For facts that depend on the node; they take precedence over the fields above.
  int (*since_of)(const ir::Node& node) = nullptr;
  bool (*pure_of)(const ir::Node& node) = nullptr;
  bool (*view_of)(const ir::Node& node) = nullptr;
  std::vector<int> (*int_inputs_of)(const ir::Node& node) = nullptr;
};

// Facts about a PyTorch operator that its schema does not state. Most operators have no row, and
// run without one.
struct Operator {
  std::string name;  // "aten::silu_backward", for all overloads
  Work work;
  bool raises_or_reads_back = false;  // it must not be moved or removed
  bool gives_view = false;            // although the schema does not say so
  bool view_or_copy = false;          // as the strides of the argument permit
  bool is_uninitialized = false;      // the numbers of its result are not specified
  // Its arguments are strides and an offset into the memory of an argument, as those of as_strided.
  bool names_strides = false;
  OverwriteForm overwrite;  // for the overload without a name
  OutRewrite out_rewrite = nullptr;
  // Its results can be placed by answering its kernel's allocations (run/memory/placement.h).
  bool is_placeable = false;
  // The argument that is the dim along which the kernel gathers. Such a kernel reads all that it
  // needs of a row before it writes the row. -1: there is none.
  int row_argument = -1;
  KernelCheck check = nullptr;  // for arguments that come from a file
};

class Registry {
 public:
  void add(Op op);
  void add(Operator op);
  const Op* find(const ir::OpId& id) const;                     // nullptr if there is none
  const Operator& operator_row(const std::string& name) const;  // an empty row if there is none
  std::vector<const Op*> all() const;                           // sorted by domain and name
  std::vector<std::string> operator_names() const;              // sorted

 private:
  std::unordered_map<std::string, Op> ops_;
  std::unordered_map<std::string, Operator> operators_;
};

// The registry of the process; all.cpp fills it on first use.
const Registry& registry();

// Facts about one node of any domain. An ATen node carries the facts of its schema as attributes:
// `effects` (it writes, draws random numbers or raises), `writes` (it may write into any argument)
// and `view` (a result shares memory with an argument).
bool is_pure(const ir::Node& node);
// Whether the node may write into an input. Registered ops never do; any other node might.
bool may_write(const ir::Node& node);
bool is_view(const ir::Node& node);
const Work& work_of(const ir::Node& node);
// Those of the node's op; for ops that are no kernel they say nothing.
const KernelFacts& kernel_facts(const ir::Node& node);
// The positions of the inputs that are lists of rows.
std::vector<int> row_list_inputs(const ir::Node& node);
// The first opset that has this form of the node; 1 outside of the standard domain.
int first_opset(const ir::Node& node);
// The positions of the inputs that are read by known_ints() alone.
std::vector<int> int_inputs(const ir::Node& node);
// Whether a node reads `value` as a tensor, rather than by known_ints() alone.
bool is_read_as_tensor(const ir::Value& value);

// Throws UserError if a node has fewer or more inputs than its op takes.
void check_inputs(const ir::Node& node);
// Infers those output types of `node` that are unknown.
void infer_types(ir::Node& node);
// The same for a node of `graph`. Infers nothing if the opset of the graph is older than the rule,
// since the op may have had another definition.
void infer_types(const ir::Graph& graph, ir::Node& node);
// The same for all nodes in order; for graphs that are read from text.
void infer_types(ir::Graph& graph);
// Throws UserError if an output is declared with another type than its op gives. Lowerings rely on
// the declared types.
void check_types(const ir::Graph& graph);
// The lowest opset, 12 or later, that has every standard node of the graph.
int required_opset(const ir::Graph& graph);
// Returns the calls for all nodes of the graph, in order. Throws Unsupported with the name of the
// node that has none. `yield_position` becomes the number of calls before the YieldOp, or of all
// calls if there is no YieldOp.
CallList lower(const ir::Graph& graph, size_t& yield_position);

// An input that holds integers is an initializer with data, or the result of a Constant, a
// torch_ort.Dims, or a Shape of a tensor whose dims are known. known_ints() throws Unsupported if
// the integers depend on data instead.
bool has_known_ints(const ir::Value* value);
ir::Shape known_ints(const ir::Value* value);

}  // namespace torch_ort::ops
