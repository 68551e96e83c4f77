// ATen calls in, ONNX nodes out. Readers (FX now, TorchScript later) replay a program as ATen
// calls; the rows of the table turn each call into standard nodes where an ONNX op says exactly the
// same, and everything else into `org.pytorch.aten::ATen`.
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

// One ATen call as a reader sees it: all arguments in the order of the schema, defaults filled in.
struct AtenCall {
  std::string op;        // "aten::gelu"
  std::string overload;  // "default" is written ""
  std::vector<std::string> arg_names;
  ops::ArgList args;
  std::vector<ir::Type> types;  // of the outputs, lists flattened
  std::vector<bool> used;       // whether anything reads output i
  std::string name;
  std::string origin;
  std::string recompute;
  int checkpoint = -1;
  std::string binds_symbol;  // the result is no tensor, but the value of this symbol

  std::string key() const { return overload.empty() ? op : op + "." + overload; }
  const ops::Arg& arg(std::string_view name) const;
};

// Builds nodes for one call; keeps name, origin and tags of the call on each of them.
class Builder : public ops::Writer {
 public:
  Builder(ir::Graph& graph, int max_opset) : Writer(graph, nullptr), max_opset_(max_opset) {}

  int max_opset() const { return max_opset_; }
  // Named after the call.
  ir::Node& add(ir::OpId op, std::vector<ir::Value*> inputs, const std::vector<ir::Type>& types,
                ir::Attrs attrs = {}) override;
  // Adds a standard node; returns its outputs.
  std::vector<ir::Value*> node(std::string_view op, std::vector<ir::Value*> inputs,
                               const std::vector<ir::Type>& types, ir::Attrs attrs = {});
  std::vector<ir::Value*> node(ir::OpId op, std::vector<ir::Value*> inputs,
                               const std::vector<ir::Type>& types, ir::Attrs attrs = {});
  ir::Value* node1(std::string_view op, std::vector<ir::Value*> inputs, const ir::Type& type,
                   ir::Attrs attrs = {}) {
    return node(op, std::move(inputs), {type}, std::move(attrs))[0];
  }
  // A 0-d initializer. Nothing (nullptr) if `dtype` cannot hold the number exactly as PyTorch would
  // compute with it: float32 and float64 take any double, half types only what they represent,
  // integer types only integers.
  ir::Value* scalar(double value, ir::DType dtype) override;
  // One-dimensional int64 values: an initializer, or a `torch_ort.Dims` node where they are
  // symbolic.
  ir::Value* ints(const ir::Shape& dims) override;
  // Axes are an attribute where the opset is too old for an input.
  ir::Value* reduce(std::string_view op, ir::Value* x, const ir::Shape& axes,
                    bool keeps_dims) override;
  bool allows(int since) const { return since <= max_opset_; }

  // While it lives, new nodes take the name, the origin and the tags of a call, and stand before
  // `before`, or at the end.
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

// Gives one value per output of the call (nullptr where it is not used), or an empty vector if
// this form of the call has no standard node: it then becomes an ATen node.
using Row = std::function<std::vector<ir::Value*>(Builder&, const AtenCall&)>;

// What the readers below throw where a row asks for the number of a symbol.
struct AskedForSymbol {};

// What a row gives; an empty vector as well where it asks for the number of a symbol.
std::vector<ir::Value*> apply(const Row& row, Builder& builder, const AtenCall& call);

class Table {
 public:
  // `key`: "aten::add.Tensor". InternalError if the key stands already.
  void add(std::string key, Row row);
  const Row* find(const std::string& key) const;
  size_t size() const { return rows_.size(); }
  std::vector<std::string> keys() const;  // sorted

 private:
  std::unordered_map<std::string, Row> rows_;
};

const Table& table();

// Converts one call by its row, or as an ATen node.
std::vector<ir::Value*> convert(Builder& builder, const AtenCall& call);
// The ATen node of a call: attributes `operator`, `overload_name`, and every other argument by its
// name.
std::vector<ir::Value*> convert_to_aten(Builder& builder, const AtenCall& call);

// Readers of arguments, for rows. Those of numbers throw AskedForSymbol.
ir::Value* tensor(const ops::Arg& arg);  // nullptr if None or no tensor
bool is_number(const ops::Arg& arg);     // an integer, double or bool that is known now
double number(const ops::Arg& arg);
ir::Shape dims(const ops::Arg& arg);   // a list of integers; empty for None
int64_t integer(const ops::Arg& arg);  // a constant integer
bool boolean(const ops::Arg& arg);
std::string text(const ops::Arg& arg, std::string_view missing = "");

}  // namespace torch_ort::convert
