// The list of op families. Explicit calls: greppable, and no linker drops them.
#include "ops/families.h"

namespace torch_ort::ops {

const Registry& registry() {
  static const Registry filled = [] {
    Registry ops;
    register_activation(ops);
    register_aten(ops);
    register_attention(ops);
    register_control_flow(ops);
    register_convolution(ops);
    register_creation(ops);
    register_elementwise(ops);
    register_embedding(ops);
    register_loss(ops);
    register_matmul(ops);
    register_normalization(ops);
    register_python_op(ops);
    register_random(ops);
    register_reduction(ops);
    register_region(ops);
    register_shape(ops);
    register_slice_scatter(ops);
    register_softmax(ops);
    register_training(ops);
    return ops;
  }();
  return filled;
}

}  // namespace torch_ort::ops
