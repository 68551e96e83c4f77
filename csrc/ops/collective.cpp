#include "ops/collective.h"

#include "ops/aten.h"

#include <algorithm>
#include <array>

namespace torch_ort::ops {

namespace {

constexpr std::string_view kGather = "_c10d_functional::all_gather_into_tensor";

constexpr std::array<std::string_view, 8> kStarting = {
    kGather,
    "_c10d_functional::all_gather_into_tensor_coalesced",
    "_c10d_functional::all_reduce",
    "_c10d_functional::all_reduce_coalesced",
    "_c10d_functional::all_to_all_single",
    "_c10d_functional::broadcast",
    "_c10d_functional::reduce_scatter_tensor",
    "_c10d_functional::reduce_scatter_tensor_coalesced",
};

}  // namespace

bool starts_collective(std::string_view op) {
  return std::find(kStarting.begin(), kStarting.end(), op) != kStarting.end();
}

bool is_collective(const ir::Node& node) { return starts_collective(key_of(node)); }

bool is_gather(const ir::Node& node) { return key_of(node) == kGather; }

bool is_wait(const ir::Node& node) { return key_of(node) == kWaitTensor; }

bool has_collectives(const ir::Graph& graph) {
  return std::any_of(graph.nodes.begin(), graph.nodes.end(),
                     [](const ir::Node& node) { return !node.is_erased() && is_collective(node); });
}

const ir::Node* collective_of(const ir::Node& wait) {
  if (!is_wait(wait) || wait.inputs.empty() || wait.inputs[0] == nullptr) return nullptr;
  const ir::Node* start = wait.inputs[0]->producer;
  return start != nullptr && is_collective(*start) ? start : nullptr;
}

}  // namespace torch_ort::ops
