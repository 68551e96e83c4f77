// The pointers by which autograd holds its nodes: std::shared_ptr, or c10::intrusive_ptr in newer
// versions of torch. Nothing else in our C++ depends on the version of torch but the list of out=
// kernels, which is a table (run/proved_out_forms.h).

#pragma once

#include <ATen/core/Tensor.h>
#include <c10/util/intrusive_ptr.h>

#include <memory>
#include <type_traits>
#include <utility>

namespace torch_ort::run {

using NodePtr = std::decay_t<decltype(std::declval<const at::Tensor&>().grad_fn())>;

// Makes a node of a class of ours.
template <typename T, typename... Args>
auto make_node(Args&&... args) {
  if constexpr (std::is_same_v<NodePtr, std::shared_ptr<typename NodePtr::element_type>>) {
    return std::make_shared<T>(std::forward<Args>(args)...);
  } else {
    return c10::make_intrusive<T>(std::forward<Args>(args)...);
  }
}

}  // namespace torch_ort::run
