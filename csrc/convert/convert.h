// Converts ATen calls to ONNX nodes. A reader replays a captured program call by call. A row of the
// table turns a call into standard nodes if an ONNX op has exactly the same results and errors; any
// other call becomes an `org.pytorch.aten.ATen` node.
#pragma once

#include "ir/graph.h"
#include "ops/call.h"
#include "ops/writer.h"

#include <functional>
#include <string>
#include <string_view>
#include <unordered_map>
#include <vector>

namespace torch_ort::convert {

// One ATen call: all arguments in the order of the schema, with defaults filled in.
struct AtenCall {
  std::string op;        // "aten::gelu"
  std::string overload;  // "default" is written ""
  std::vector<std::string> arg_names;
  ops::ArgList args;
  std::vector<ir::Type> types;  // of the outputs, with lists flattened
  std::vector<bool> used;       // by output: whether anything reads it
  std::string name;
  std::string origin;
  std::string recompute;
  int checkpoint = -1;
  // The symbol whose value the result is, if the result is not a tensor.
  std::string binds_symbol;

  std::string key() const { return overload.empty() ? op : op + "." + overload; }
  const ops::Arg& arg(std::string_view name) const;
};

// Adds the nodes for one call. Each of them gets the name, the origin and the checkpoint tags of
// the call.
class Builder : public ops::Writer {
 public:
  Builder(ir::Graph& graph, int max_opset) : Writer(graph, nullptr), max_opset_(max_opset) {}

  int max_opset() const { return max_opset_; }
  // As Writer::add(); the node is named after the call.
  ir::Node& add(ir::OpId op, std::vector<ir::Value*> inputs, const std::vector<ir::Type>& types,
                ir::Attrs attrs = {}) override;
  // Adds a node and returns its outputs.
  std::vector<ir::Value*> node(std::string_view op, std::vector<ir::Value*> inputs,
                               const std::vector<ir::Type>& types, ir::Attrs attrs = {});
  std::vector<ir::Value*> node(ir::OpId op, std::vector<ir::Value*> inputs,
                               const std::vector<ir::Type>& types, ir::Attrs attrs = {});
  ir::Value* node1(std::string_view op, std::vector<ir::Value*> inputs, const ir::Type& type,
                   ir::Attrs attrs = {}) {
    return node(op, std::move(inputs), {type}, std::move(attrs))[0];
  }
  // A 0-d initializer; nullptr if `dtype` cannot represent the number as PyTorch would compute with
  // it. float32 and float64 take any double, the half types only numbers that they represent,
  // integer types only integers. Equal numbers share one initializer.
  ir::Value* scalar(double value, ir::DType dtype) override;
  // One-dimensional int64 values: an initializer, or a torch_ort.Dims node if they are symbolic.
  ir::Value* ints(const ir::Shape& dims) override;
  // Axes are an attribute where the opset is too old for an input.
  ir::Value* reduce(std::string_view op, ir::Value* x, const ir::Shape& axes,
                    bool keeps_dims) override;
  bool allows(int since) const { return since <= max_opset_; }

  // During its lifetime new nodes get the name, the origin and the tags of a call, and are added
  // before `before`, or at the end if that is nullptr.
  class Scope {
   public:
    Scope(Builder& builder, const AtenCall& call, ir::Node* before = nullptr) : builder_(builder) {
      builder_.call_ = &call;
      builder_.stand_before(before);
    }
    ~Scope() {
      builder_.call_ = nullptr;
      builder_.stand_before(nullptr);
    }

   private:
    Builder& builder_;
  };

 private:
  int max_opset_;
  const AtenCall* call_ = nullptr;
  std::unordered_map<std::string, ir::Value*> constants_;
};

// Returns one value for each output of the call, nullptr for unused ones. Returns an empty vector
// if this form of the call has no standard node; it then becomes an ATen node.
using Row = std::function<std::vector<ir::Value*>(Builder&, const AtenCall&)>;

// Thrown by the readers of arguments below, where a row asks for the number of a symbol.
struct AskedForSymbol {};

// Returns what the row returns, or an empty vector if the row asks for the number of a symbol.
std::vector<ir::Value*> apply(const Row& row, Builder& builder, const AtenCall& call);

class Table {
 public:
  // `key` is an operator with its overload, "aten::add.Tensor". Throws InternalError if the key is
  // there already.
  void add(std::string key, Row row);
  const Row* find(const std::string& key) const;
  size_t size() const { return rows_.size(); }
  std::vector<std::string> keys() const;  // sorted

 private:
  std::unordered_map<std::string, Row> rows_;
};

const Table& table();

// Converts one call by its row, or to an ATen node.
std::vector<ir::Value*> convert(Builder& builder, const AtenCall& call);
// Converts one call to an ATen node, whose form ops/aten.h describes.
std::vector<ir::Value*> convert_to_aten(Builder& builder, const AtenCall& call);

// Readers of arguments, for rows. Those that return numbers throw AskedForSymbol if the argument is
// symbolic.
ir::Value* tensor(const ops::Arg& arg);  // nullptr if it is None or not a tensor
bool is_number(const ops::Arg& arg);     // an integer, double or bool, and not symbolic
double number(const ops::Arg& arg);
ir::Shape dims(const ops::Arg& arg);   // a list of integers or symbols; empty for None
int64_t integer(const ops::Arg& arg);  // a constant integer
bool boolean(const ops::Arg& arg);
std::string text(const ops::Arg& arg, std::string_view missing = "");

}  // namespace torch_ort::convert
