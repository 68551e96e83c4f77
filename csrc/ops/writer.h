// Writes new nodes into a graph: the vocabulary that passes and conversions share. It stands here
// and not in ir/, for it infers types.
#pragma once

#include "ir/graph.h"

#include <string>
#include <string_view>
#include <vector>

namespace torch_ort::ops {

// New nodes stand in front of `before`, with its origin and its tags of recomputation; or at the
// end of the graph, if that is nullptr.
//
// A node, and what it makes, is named after its own op: "mul", "mul_1". Where a composite node is
// written out, its name stands before that: "layer_norm_mul".
class Writer {
 public:
  Writer(ir::Graph& graph, ir::Node* before, std::string composite = "");
  virtual ~Writer() = default;

  // A node of any op. Types follow from the inputs where none of them has a dtype.
  virtual ir::Node& add(ir::OpId op, std::vector<ir::Value*> inputs,
                        const std::vector<ir::Type>& types, ir::Attrs attrs = {});
  // As add(), with another name.
  ir::Node& add_named(std::string_view name, ir::OpId op, std::vector<ir::Value*> inputs,
                      const std::vector<ir::Type>& types, ir::Attrs attrs = {});
  // The only result of a standard node.
  ir::Value* make(std::string_view op, std::vector<ir::Value*> inputs, ir::Attrs attrs = {});
  // The only result of one of ours.
  ir::Value* make_ours(std::string_view op, std::vector<ir::Value*> inputs, const ir::Type& type,
                       ir::Attrs attrs = {});

  // `node` in another form: its op and attributes, name, origin and tags.
  ir::Node& copy(const ir::Node& node, std::vector<ir::Value*> inputs,
                 const std::vector<ir::Type>& types);
  // `node` for readers of its results that shall not share them: named "<its name>_again", with
  // its types and its origin, and not to be computed once more.
  ir::Node& again(const ir::Node& node, std::vector<ir::Value*> inputs);

  // Integers that nodes read: an initializer, or a torch_ort.Dims node where a call tells them.
  virtual ir::Value* ints(const ir::Shape& dims);
  // A number without dims, as an initializer; nullptr if `dtype` does not hold it (scalar_data).
  virtual ir::Value* scalar(double number, ir::DType dtype);
  // `x` itself if it has the dtype.
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
