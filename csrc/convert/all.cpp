// The list of row families. Explicit calls: greppable, and no linker drops them.
#include "convert/families.h"

namespace torch_ort::convert {

const Table& table() {
  static const Table filled = [] {
    Table table;
    add_attention(table);
    add_conjugate(table);
    add_convolution(table);
    add_creation(table);
    add_elementwise(table);
    add_embedding(table);
    add_loss(table);
    add_matmul(table);
    add_normalization(table);
    add_python_op(table);
    add_random(table);
    add_reduction(table);
    add_shape(table);
    return table;
  }();
  return filled;
}

}  // namespace torch_ort::convert
