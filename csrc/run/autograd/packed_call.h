// What a forward call saves for its backward while saved-tensor hooks are active that may copy,
// move or drop what they get: in place of the call's context, an ordinary saved tensor for each
// tensor that crosses the border. Those that the caller holds autograd saves itself.
#pragma once

#include "run/context.h"
#include "run/session.h"

#include <torch/csrc/autograd/saved_variable.h>

#include <memory>
#include <string>
#include <utility>
#include <vector>

namespace torch_ort::run {

class PackedCall {
 public:
  // Calls the hooks. The context is not needed afterwards.
  explicit PackedCall(const Context& context);

  // Returns another context with what was packed. Throws UserError if a hook gives back a tensor of
  // another form.
  std::shared_ptr<Context> unpack() const;

 private:
  struct Item {
    int slot;
    TensorSpec spec;
    torch::autograd::SavedVariable saved;
  };

  void pack(int slot, const at::Tensor& tensor);

  std::shared_ptr<Session> called_;
  std::shared_ptr<const Variant> variant_;
  std::shared_ptr<Binding> binding_;
  std::vector<std::pair<std::string, int64_t>> unbacked_symbols_;
  std::vector<Item> items_;
  // By slot. They own calls of Functions, which nothing can copy.
  std::vector<std::pair<int, at::Tensor>> python_contexts_;
};

}  // namespace torch_ort::run
