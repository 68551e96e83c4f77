// Returns gradients while the backward half still runs, so that their consumer (the reducer of
// DistributedDataParallel, or an optimizer that steps in backward) can start before its end.
//
// The backward half of a graph is one node of autograd, which returns all gradients at its end. If
// gradients leave early, the half is cut into segments at the steps after which gradients are ready
// (binding.cpp). A chain of further autograd nodes, one for each further segment, follows the node
// of the graph:
//
//     graph -> segment 1 -> segment 2        each -> its own gradients
//
// The node of the graph begins a BackwardRun and returns the gradients of the first segment; the
// others are undefined there. Each node of the chain continues the run until its own gradients are
// ready. Autograd calls the consumers of a gradient before the next node of the chain. A node that
// is passed a gradient hands it on: where the run cannot stop (the first backward of a graph, which
// Python watches; gradients with a history; compiled autograd), the first node returns all of them.
//
// Hooks can be added at any time, so each forward call looks for them at its parameters, which is
// cheap. For hooks that are added between forward and backward gradients do not leave early. Nor do
// they if there are few bytes of them.
//
// The chain belongs to the autograd graph, the run to one backward pass through it. A pass that
// does not reach the end (a hook raises, or autograd.grad asks for few gradients) ends its run with
// the pass, or with the graph.
//
// A segment ends where some gradients, and the parameters that they belong to, are not used any
// more. The order of steps then computes gradients as soon as that frees the memory of what they
// are computed from (Program::gradients_leave_early). If hooks drop the gradients of each segment
// before the next one runs, the session allocates gradients rather than deliver them, provided that
// these and the plan without them take less memory than the plan with them.
#pragma once

#include "run/session.h"

#include <ATen/core/Tensor.h>
#include <torch/csrc/autograd/function.h>

#include <vector>

namespace torch_ort::run {

// Whether any of these leaves has a hook, or its gradient accumulator has one, so that somebody
// waits for its gradient.
bool are_waited_for(const Session::Tensors& with_gradient);

// Appends the chain to `node`, the node of a training graph. `segments` is Session::segments of the
// call. `edges` has for each gradient of the session the edge of the node on which it is returned.
void let_leave_early(torch::autograd::Node& node, const std::vector<int>& segments,
                     const std::vector<int>& edges);

// By gradient: whether there is none, because none of the gradients that it depends on is defined.
// Empty: all exist.
using NoGradient = std::vector<bool>;

// Runs the backward half of a training graph for its autograd node. Gradients that are returned
// later are undefined. `early` is filled in for the chain; nullptr: all gradients are returned now.
Session::Tensors run_backward_of_node(const at::Tensor& token, const Session::Tensors& saved,
                                      const Session::Tensors& tangents, NoGradient* early);

// Makes those gradients of the current node undefined that do not exist. If a hook waits for one,
// it is called with zeros, as autograd does.
void leave_out(const NoGradient& without, Session::Tensors& gradients);

}  // namespace torch_ort::run
