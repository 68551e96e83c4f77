// Registration of the families of ops. Each family is one file with its name; all.cpp calls these
// functions.
#pragma once

#include "ops/op.h"

namespace torch_ort::ops {

void register_activation(Registry& ops);
void register_aten(Registry& ops);
void register_attention(Registry& ops);
void register_control_flow(Registry& ops);
void register_convolution(Registry& ops);
void register_creation(Registry& ops);
void register_elementwise(Registry& ops);
void register_embedding(Registry& ops);
void register_loss(Registry& ops);
void register_matmul(Registry& ops);
void register_normalization(Registry& ops);
void register_python_op(Registry& ops);
void register_random(Registry& ops);
void register_reduction(Registry& ops);
void register_region(Registry& ops);
void register_shape(Registry& ops);
void register_slice_scatter(Registry& ops);
void register_softmax(Registry& ops);
void register_training(Registry& ops);

}  // namespace torch_ort::ops
