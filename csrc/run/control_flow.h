// If and Loop: each body is a session of its own, and their step runs these, without the GIL.
#pragma once

#include "run/session.h"

#include <functional>
#include <memory>
#include <string>
#include <unordered_map>
#include <vector>

namespace torch_ort::run {

class ControlFlow {
 public:
  using Tensors = Session::Tensors;
  // The value of a symbol of the graph that the node stands in; nothing if it has none yet.
  using Lookup = ir::SymbolLookup;

  // A node with closed bodies (ops/control_flow.h).
  ControlFlow(const ir::Node& node, const std::unordered_map<std::string, at::Tensor>& constants,
              const SessionOptions& options);

  // One tensor per output of the node, none of them in memory of an input or of the session.
  // Undefined inputs are left out.
  Tensors run(const Tensors& inputs, const Lookup& lookup) const;

  void free_idle_contexts() const;
  std::string op_name() const { return is_loop_ ? "Loop" : "If"; }

 private:
  // Where a body finds the value of a symbol: outside, or in an input that is an integer.
  struct Symbol {
    std::string name;
    int input;  // of the body; -1: outside
  };
  struct Body {
    std::shared_ptr<Session> session;
    std::vector<Symbol> symbols;
  };

  void add_body(const ir::Node& node, const char* name,
                const std::unordered_map<std::string, at::Tensor>& constants,
                const SessionOptions& options);
  Tensors run_body(const Body& body, const Tensors& inputs, const Lookup& lookup) const;
  Tensors run_loop(const Tensors& inputs, const Lookup& lookup) const;
  at::Tensor stacked(const Tensors& rounds, size_t output, const Lookup& lookup) const;
  // Copies what lies in memory that is not the result's own.
  void own(Tensors& results, const Tensors& inputs) const;

  std::string name_;
  bool is_loop_ = false;
  size_t num_carried_ = 0;
  c10::Device device_{c10::kCPU};
  std::vector<Body> bodies_;  // of an If: taken where the condition holds, where it does not
};

}  // namespace torch_ort::run
