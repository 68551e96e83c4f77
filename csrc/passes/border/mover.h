// Copies nodes of the forward half into the backward half, which then reads the results of the
// copies instead of values that cross the border.
#pragma once

#include "ir/graph.h"

#include <unordered_map>

namespace torch_ort::passes {

// Whether torch.utils.checkpoint asks for a node to be run again in backward.
bool asks_recompute(const ir::Node& node);

class Mover {
 public:
  explicit Mover(ir::Graph& graph) : graph_(graph) {}

  // Copies a node to just before a node of the backward half. The copy reads what stands for the
  // inputs of the node, and its results stand for those of the node. So copies are made in the
  // order of the forward half.
  ir::Node& copy(const ir::Node& node, ir::Node& before);
  // Makes `other` stand for a value of the forward half.
  void replace(const ir::Value& value, ir::Value& other) { stands_for_[&value] = &other; }
  // What stands for the value; the value itself if nothing does.
  ir::Value* current(ir::Value* value) const;

  // Makes one reader, or all nodes of the backward half, read what stands for their inputs.
  void redirect(const ir::Use& use) const;
  void redirect_backward_half() const;

 private:
  ir::Graph& graph_;
  std::unordered_map<const ir::Value*, ir::Value*> stands_for_;
};

}  // namespace torch_ort::passes
