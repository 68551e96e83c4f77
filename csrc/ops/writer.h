// Adds new nodes to a graph; passes and conversions share it. It is in this room rather than in ir/
// because it infers types.
#pragma once

#include "ir/graph.h"

#include <string>
#include <string_view>
#include <vector>

namespace torch_ort::ops {

// Adds nodes before `before`, with its origin and tags of recomputation, or at the end of the graph
// if that is nullptr.
//
// A node and its outputs are named after the op: "mul", "mul_1". If a composite node is expanded,
// its name comes first: "layer_norm_mul".
class Writer {
 public:
  Writer(ir::Graph& graph, ir::Node* before, std::string composite = "");
  virtual ~Writer() = default;

  // Adds a node of any op. If none of `types` has a dtype, the types are inferred.
  virtual ir::Node& add(ir::OpId op, std::vector<ir::Value*> inputs,
                        const std::vector<ir::Type>& types, ir::Attrs attrs = {});
  // As add(), with a name that the caller chooses.
  ir::Node& add_named(std::string_view name, ir::OpId op, std::vector<ir::Value*> inputs,
                      const std::vector<ir::Type>& types, ir::Attrs attrs = {});
  // Adds a standard node and returns its only result.
  ir::Value* make(std::string_view op, std::vector<ir::Value*> inputs, ir::Attrs attrs = {});
  // Adds a node of the domain torch_ort and returns its only result.
  ir::Value* make_ours(std::string_view op, std::vector<ir::Value*> inputs, const ir::Type& type,
                       ir::Attrs attrs = {});

  // Adds a node with the op, attributes, name, origin and tags of recomputation of `node`, and
  // other inputs and types.
  ir::Node& copy(const ir::Node& node, std::vector<ir::Value*> inputs,
                 const std::vector<ir::Type>& types);
  // Adds a second copy of `node` for readers that shall not share its results. It is named
  // "<name>_again" and has the types and origin of `node`, but no tags of
  // recomputation.
  ir::Node& again(const ir::Node& node, std::vector<ir::Value*> inputs);

  // Integers as a one-dimensional tensor: an initializer, or a torch_ort.Dims node if they are
  // symbolic.
  virtual ir::Value* ints(const ir::Shape& dims);
  // A 0-d initializer; nullptr if `dtype` cannot represent the number (see scalar_data).
  virtual ir::Value* scalar(double number, ir::DType dtype);
  // Returns `x` itself if it has the dtype.
  ir::Value* cast(ir::Value* x, ir::DType dtype);
  ir::Value* reshape(ir::Value* x, const ir::Shape& shape);
  ir::Value* transpose(ir::Value* x, const ir::Shape& order);
  virtual ir::Value* reduce(std::string_view op, ir::Value* x, const ir::Shape& axes,
                            bool keeps_dims);

 protected:
  ir::Graph& graph() const { return graph_; }
  void stand_before(ir::Node* before) { before_ = before; }

 private:
  ir::Graph& graph_;
  ir::Node* before_;
  std::string composite_;
};

}  // namespace torch_ort::ops
