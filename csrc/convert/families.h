// Registration of the families of rows. Each family is one file, aten_<family>.cpp; all.cpp calls
// these functions.
#pragma once

#include "convert/convert.h"

namespace torch_ort::convert {

void add_attention(Table& table);
void add_conjugate(Table& table);
void add_convolution(Table& table);
void add_creation(Table& table);
void add_elementwise(Table& table);
void add_embedding(Table& table);
void add_loss(Table& table);
void add_matmul(Table& table);
void add_normalization(Table& table);
void add_python_op(Table& table);
void add_random(Table& table);
void add_reduction(Table& table);
void add_shape(Table& table);

}  // namespace torch_ort::convert
