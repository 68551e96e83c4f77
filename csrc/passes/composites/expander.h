// The rows of expand_composites, by family, and how an expansion writes.
#pragma once

#include "ir/graph.h"
#include "ops/formula.h"
#include "ops/writer.h"

#include <cstdint>
#include <span>
#include <string_view>
#include <vector>

namespace torch_ort::passes::composites {

// How an operator of a loss makes one number of many, as PyTorch numbers it.
enum Reduction : int64_t { kNone = 0, kMean = 1, kSum = 2 };

struct Expansion {
  std::string_view op;  // a standard op, or the operator of an ATen node
  // Writes nodes whose results replace those of the node; false if it leaves the node as it is.
  bool (*expand)(ir::Graph& graph, ir::Node& node);
};

std::span<const Expansion> activations();
std::span<const Expansion> batch_norms();
std::span<const Expansion> element_losses();
std::span<const Expansion> group_norms();
std::span<const Expansion> kernels();
std::span<const Expansion> losses();
std::span<const Expansion> norms();
std::span<const Expansion> pointwise();

// Writes the nodes that replace a node, in front of it. They compute in float32, or in float64 for
// float64.
class Expander : public ops::Writer {
 public:
  Expander(ir::Graph& graph, ir::Node& node, const ir::Value& like);

  // The formula writer that shares this dtype and position.
  ops::Formula& formula() { return formula_; }

  // A value of the graph, cast to the dtype that the formulas compute in.
  ir::Value* number(ir::Value* value) { return formula_.number(value); }
  // The same for what another norm gives: the number before it was rounded, if that is known.
  ir::Value* statistic(ir::Value* value);
  ir::Value* constant(double number) { return formula_.constant(number); }
  ir::Value* ones(const ir::Shape& shape);
  // factor * numerator / denominator
  ir::Value* ratio(double factor, const ir::Dim& numerator, const ir::Dim& denominator);
  // x * factor + offset, in the shape of `x`.
  ir::Value* mul_add(ir::Value* x, ir::Value* factor, ir::Value* offset);
  ir::Value* sum_all(ir::Value* value);
  // log(1 + x), which keeps the digits of a small x.
  ir::Value* log1p(ir::Value* x);
  // e^-|x|, which is never infinite.
  ir::Value* decay(ir::Value* x);
  // log(sigmoid(x)), of x and its decay: min(x, 0) - log(1 + e^-|x|).
  ir::Value* log_sigmoid(ir::Value* x, ir::Value* decay);
  // The type of a value with this shape in the dtype that the formulas compute in.
  ir::Type typed(const ir::Shape& shape, const ir::Value& like) const;

  // All readers of an output of the node now read `value`, cast to the dtype of the output if that
  // is known.
  void replace(size_t output, ir::Value* value);
  // As replace(), for a value that is computed element by element: it gets the strides of the old
  // output.
  void replace_elements(size_t output, ir::Value* value);
  // As replace(), for a value that a transpose makes the output of. A reader that undoes the
  // transpose reads the value itself.
  void replace_transposed(size_t output, ir::Value* value, const ir::Shape& order);
  // A transpose that undoes the one before it gives the input of that one.
  ir::Value* transposed(ir::Value* x, const ir::Shape& order);

 private:
  ir::Node& node_;
  ir::DType dtype_;
  ops::Formula formula_;
};

// The axes from `begin` to before `end`.
ir::Shape range(int64_t begin, int64_t end);
// Whether sorted axes are the last ones of so many, but not all: what is reduced along them has one
// result for each row.
bool are_last(const std::vector<int64_t>& axes, int64_t rank);
// How many elements of `x` go into one result of a reduction along the axes.
ir::Dim num_along(const ir::Value& x, const std::vector<int64_t>& axes);

}  // namespace torch_ort::passes::composites
