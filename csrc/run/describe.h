// Describes a compiled graph with known sizes to the planner; internal to run/.
//
// No node computes a size: sizes are expressions, which are evaluated here. A tensor with an
// unbacked size is not planned: its step runs in functional form and binds the symbols of its
// shape. Steps that need these sizes evaluate them in the run, and stay in the given order.
#pragma once

#include "plan/plan.h"
#include "run/binding.h"
#include "run/spec.h"

#include <unordered_map>
#include <vector>

namespace torch_ort::run {

// The place of a tensor that is written as a part of another one.
struct Part {
  int whole = -1;  // the slot of the other tensor; -1: it is not a part
  // The slot that the step writes; other slots are views of it.
  int root = -1;
  int64_t offset = 0;  // in elements
};

// Where a matrix of a product stands that has more rows or columns in the product.
struct Widened {
  enum class Place : uint8_t {
    kOwn,   // in its own memory, where there is room behind its rows or behind the last one
    kCopy,  // in memory of the step: a factor is copied there, the result from there
  } place;
  std::vector<int64_t> sizes, strides;  // with the columns and rows that are added
};

// A product with more columns or a greater depth than its matrices have (aligned_products.h).
struct AlignedProduct {
  std::optional<Widened> a, b, result;  // nothing: the matrix is as it is
};

struct Description {
  std::vector<TensorSpec> specs;  // by slot
  std::vector<int> roots;         // by slot: whose memory it shares with these sizes
  // By step: the adopted slot that its result overwrites; -1: none.
  std::vector<int> taken_over;
  std::vector<Part> parts;  // by slot
  // By step, for concatenations of which some operands are written in place: what is copied, and
  // where to.
  std::unordered_map<int, std::vector<ViewSpec>> rests;
  // By step, for products.
  std::unordered_map<int, AlignedProduct> aligned;
  // By root: the bytes behind a tensor that products read and write as well.
  std::unordered_map<int, int64_t> tails;
  plan::Program program;
  std::vector<int> delivered;  // by gradient: the root slot that is handed out; -1: none
};

// `inputs` are the inputs of the graph, in order.
Description describe(const CompiledGraph& graph, const std::vector<TensorSpec>& inputs,
                     const ir::SymbolLookup& lookup, GradientReturn gradient_return);

}  // namespace torch_ort::run
