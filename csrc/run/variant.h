// One way of a session to run: the gradients of some of its outputs come, and those of others do
// not.
//
// A model often returns more than its loss depends on, such as logits beside the loss, and does so
// in every step. So a forward call expects the gradients that came in the last backward, and
// follows the plan of the variant for these, whose backward half is cut down to what they need
// (passes/cut_backward.h). It is planned as a whole, so its gradients are delivered and its memory
// is that of one step. It also keeps all that the backward half of the session's graph reads. If
// other gradients come than were expected, the variant of the backward half alone runs over that.
#pragma once

#include "run/planned_graph.h"

#include <compare>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

namespace torch_ort::run {

struct Variant {
  struct Key {
    std::vector<bool> defined;  // by incoming gradient: whether it comes
    bool is_half = false;       // it is the backward half alone

    auto operator<=>(const Key&) const = default;
  };

  Key key;
  std::shared_ptr<PlannedGraph> graph;  // nullptr: nothing is left of the backward half
  // By gradient of the session: the gradient of `graph` that it is; -1: there is none.
  std::vector<int> gradients;
  // The slots of all that the backward half of the session's graph reads of its forward half. They
  // stand in this order in each variant; none in a backward half.
  std::vector<int> saved;
  // What a backward half reads, by its inputs: positions among the session's saved values followed
  // by its incoming gradients. Beyond both: zeros.
  std::vector<size_t> inputs;

  // Runs a backward half on what the context of a forward call of another variant holds. Allocates
  // the gradients, and returns those of the session; those that do not exist are undefined.
  PlannedGraph::Tensors run(const Context& context, const PlannedGraph::Tensors& tangents) const;
};

// The session's graph as it is: all gradients come.
std::shared_ptr<const Variant> whole_variant(std::shared_ptr<PlannedGraph> graph);
// The variant for which only some gradients come; nullptr if zeros would have to replace others, or
// if no gradient is left. Then `whole` serves in its place.
std::shared_ptr<const Variant> make_variant(const Variant& whole, const std::vector<bool>& defined);
// The same for the backward half alone. `context` may be that of any call.
std::shared_ptr<const Variant> make_half(const Variant& whole, const std::vector<bool>& defined,
                                         const Context& context);

// The gradients that a first call expects: those of outputs without dims, as a loss is, if there
// are any.
std::vector<bool> first_expected(const CompiledGraph& whole);

}  // namespace torch_ort::run
