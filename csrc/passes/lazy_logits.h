// Logits that leave a graph beside their loss, and that are made when somebody reads them.
#pragma once

#include "ir/type.h"

#include <cstdint>
#include <vector>

namespace torch_ort::passes {

// What leaves in the place of logits, at `output`, are the rows of the layer that makes them. The
// logits are, from left to right,
//   rows * weight^T + bias, in the type of the rows;
//   soft_cap * tanh(. / soft_cap), in the first of `dtypes`; 0: no cap
// and then cast to `dtypes`, one after the other.
struct LazyLogits {
  int output = 0;             // of the forward half
  int weight = 0, bias = -1;  // inputs of the graph; -1: there is none
  bool is_turned = false;     // the weight stands there as width x classes
  int64_t classes = 0;
  double soft_cap = 0;
  std::vector<ir::DType> dtypes;
};

// Whether the pass `lazy_logits` may leave out logits, and where it says so, on this thread.
class LazyLogitsInForce {
 public:
  explicit LazyLogitsInForce(std::vector<LazyLogits>* found);  // nullptr: it may not
  ~LazyLogitsInForce();
  LazyLogitsInForce(const LazyLogitsInForce&) = delete;
  LazyLogitsInForce& operator=(const LazyLogitsInForce&) = delete;

  static std::vector<LazyLogits>* found();

 private:
  std::vector<LazyLogits>* before_;
};

}  // namespace torch_ort::passes
