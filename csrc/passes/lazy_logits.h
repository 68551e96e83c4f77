// Logits that a graph returns beside its loss, and that the caller computes only when somebody
// reads them.
#pragma once

#include "ir/type.h"

#include <cstdint>
#include <vector>

namespace torch_ort::passes {

// In place of logits, the graph returns the rows of the layer that makes them, as `output`. From
// these the logits are computed by
//   rows * weight^T + bias, in the dtype of the rows;
//   soft_cap * tanh(. / soft_cap), in the first of `dtypes`, unless the cap is 0;
// and then cast to `dtypes`, one after the other.
struct LazyLogits {
  int output = 0;             // an output of the forward half
  int weight = 0, bias = -1;  // inputs of the graph; -1: no bias
  bool is_turned = false;     // the input `weight` is width x classes
  int64_t classes = 0;
  double soft_cap = 0;
  std::vector<ir::DType> dtypes;
};

}  // namespace torch_ort::passes
