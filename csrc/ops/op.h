// Facts about ops, and about PyTorch's operators. Each family has one file that registers its own;
// all.cpp lists the families. Other rooms ask the row for a fact: no list of names stands
// elsewhere.
#pragma once

#include "ir/graph.h"
#include "ops/attributes.h"
#include "ops/call.h"
#include "ops/channels_last.h"
#include "ops/fusion.h"
#include "ops/kernel_checks.h"
#include "ops/out_form.h"

#include <string>
#include <string_view>
#include <unordered_map>
#include <vector>

namespace torch_ort::ops {

// Types of the outputs, from the types of the inputs and the attributes.
// An output type that cannot be told without data is left unknown. Raises UserError on inputs that
// do not fit.
using InferRule = std::vector<ir::Type> (*)(const ir::Node& node);

// Adds the calls that compute `node`. Calls write into `node.outputs`.
// Raises Unsupported on a form that it has no call for.
using Lowering = void (*)(const ir::Node& node, CallList& calls);

// What passes look for in a node, whether of a standard op or an ATen node of an operator.
struct Work {
  bool elementwise = false;     // each element of the result comes from those in its place
  bool keeps_elements = false;  // the result has those of the first input, in their order
  FusedRule fused;              // in a region
  ImageRule image;              // on images whose channels may stand last
};

struct Op {
  std::string name;
  std::string domain;  // "" standard ONNX
  int min_inputs = 1;
  int max_inputs = 1;   // -1: any number
  int max_outputs = 1;  // -1: any number
  // From the first opset on that the engine runs; what a node of a file is held to.
  std::vector<AttrRule> attributes;
  bool any_attributes = false;  // it may have others as well
  int since = 1;                // first opset whose definition says what `lower` does
  InferRule infer = nullptr;    // nullptr: types come with the node
  Lowering lower = nullptr;     // nullptr: never runs by itself (YieldOp)
  bool pure = true;             // same inputs give the same outputs, and nothing else happens
  bool view = false;            // an output may share the memory of the first input
  int bfloat16_since = 13;      // first opset that takes bfloat16
  std::vector<int> int_inputs;  // inputs read through known_ints alone, never as tensors
  bool indexes = false;         // the second input holds places along `axis`
  Work work;
  // Where a fact depends on the form of the node.
  int (*since_of)(const ir::Node& node) = nullptr;
  bool (*pure_of)(const ir::Node& node) = nullptr;
  bool (*view_of)(const ir::Node& node) = nullptr;
};

// What is known of an operator of PyTorch besides its schema. Most have no row, and run all the
// same.
struct Operator {
  std::string name;  // "aten::silu_backward", for all overloads
  Work work;
  bool raises_or_reads_back = false;  // it is not moved or left out
  bool gives_view = false;            // though the schema does not say that a result shares memory
  bool view_or_copy = false;          // as the strides of the argument allow
  bool names_strides = false;  // and an offset, from the beginning of the memory of an argument
  OverwriteForm overwrite;     // of the overload without a name
  OutRewrite out_rewrite = nullptr;
  bool is_placeable = false;  // by the allocations of its kernel (run/placement.h)
  // The argument that names a dim along which the kernel gathers: it finishes what it gathers of a
  // row before it writes the elements of the row.
  int row_argument = -1;
  KernelCheck check = nullptr;  // of arguments that a file gives it
};

class Registry {
 public:
  void add(Op op);
  void add(Operator op);
  const Op* find(const ir::OpId& id) const;                     // nullptr if there is none
  const Operator& operator_row(const std::string& name) const;  // an empty one if there is none
  std::vector<const Op*> all() const;                           // sorted by domain and name
  std::vector<std::string> operator_names() const;              // sorted

 private:
  std::unordered_map<std::string, Op> ops_;
  std::unordered_map<std::string, Operator> operators_;
};

// The one registry, filled by all.cpp on first use.
const Registry& registry();

// Facts of one node, whatever its domain. An ATen node carries what its schema says as attributes:
// `effects` (writes, random, raises), `writes` (of these: any argument may be written) and `view`
// (a result shares the memory of an argument).
bool is_pure(const ir::Node& node);
// Whether an input may be written. Registered ops are functional; of others nothing is known.
bool may_write(const ir::Node& node);
bool is_view(const ir::Node& node);
const Work& work_of(const ir::Node& node);
// The first opset that holds this form of the node; 1 outside the standard domain.
int first_opset(const ir::Node& node);
// Whether anything wants the elements of `value`, and not only the integers that they say.
bool is_read_as_tensor(const ir::Value& value);

// UserError if a node has fewer inputs than its op takes, or more.
void check_inputs(const ir::Node& node);
// Fills in the types of the outputs of `node` that are unknown.
void infer_types(ir::Node& node);
// Of a node of a graph whose opset may be older than the rule: an older op has another one.
void infer_types(const ir::Graph& graph, ir::Node& node);
// For all nodes in order; used on graphs read from text.
void infer_types(ir::Graph& graph);
// UserError if an output is declared as something else than its op gives. Lowerings count on it.
void check_types(const ir::Graph& graph);
// The lowest opset that holds every standard node of the graph (at least 12).
int required_opset(const ir::Graph& graph);
// Calls for all nodes of the graph, in order. Raises Unsupported naming the node that has none.
// `yield_position`: the number of calls before the YieldOp; calls.size() if there is none.
CallList lower(const ir::Graph& graph, size_t& yield_position);

// Reads of an input that stands for integers: an initializer with data, or a node Constant,
// torch_ort.Dims, or Shape of a tensor whose dims are known.
bool has_known_ints(const ir::Value* value);
ir::Shape known_ints(const ir::Value* value);  // Unsupported if they come from data

}  // namespace torch_ort::ops
