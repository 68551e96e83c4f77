// Gradients that leave while backward goes on, so that whoever waits for them (the reducer of
// DistributedDataParallel, an optimizer that steps in backward) begins before its end.
//
// The backward half of a graph is one node of autograd, which hands over all gradients at its end.
// Where gradients leave early, the half is cut into segments at the steps after which gradients are
// ready (binding.cpp), and a chain of nodes stands behind that of the graph, one for each further
// segment:
//
//     graph -> segment 1 -> segment 2        each -> its own gradients
//
// The node of the graph begins a BackwardRun, gives the gradients of the first segment, and nothing
// in the places of others; each node of the chain has the run go on until its own are ready.
// Autograd calls what waits for a gradient before the next node of the chain. A node that is given
// a gradient passes it on: where the run cannot stop (the first backward of a graph, which Python
// watches, gradients with a history, compiled autograd), the first node gives all of them.
//
// Whether somebody waits is asked at each forward call, since hooks may come at any time: it costs
// a look at each leaf, and those that come between forward and backward are called at the end. So
// is what becomes of a graph whose gradients have hooks, but few bytes.
//
// The chain belongs to the graph of autograd, the run to one backward pass through it. A pass that
// does not come to the end (a hook raises, autograd.grad wants few gradients) ends its run with the
// pass, or with the graph.
#pragma once

#include "run/session.h"

#include <ATen/core/Tensor.h>
#include <torch/csrc/autograd/function.h>

#include <vector>

namespace torch_ort::run {

// Whether a leaf among these has a hook, or its accumulator: somebody waits for its gradient.
bool are_waited_for(const Session::Tensors& with_gradient);

// Puts the chain behind `node`, that of a training graph. `segments`: Session::segments of the
// call. `edges`: by gradient of the session, which edge of the node it leaves by.
void let_leave_early(torch::autograd::Node& node, const std::vector<int>& segments,
                     const std::vector<int>& edges);

// By gradient: whether there is none, as no gradient has come that it depends on. Empty: there are
// all.
using NoGradient = std::vector<bool>;

// The backward of a training graph, called from its node of autograd. Gradients that leave later
// are undefined. `early`: what the chain is told; nullptr: all leave now.
Session::Tensors run_backward_of_node(const at::Tensor& token, const Session::Tensors& saved,
                                      const Session::Tensors& tangents, NoGradient* early);

// Takes out of the gradients of the current node those that there are not. Where a hook waits, it
// is called with zeros, as autograd does it.
void leave_out(const NoGradient& without, Session::Tensors& gradients);

}  // namespace torch_ort::run
