// Tile kernels, built for the instruction set in the file's name (see CMakeLists.txt).
#include "cpu/kernels_loops.h"

namespace torch_ort::cpu {

const Kernels<float>& float_kernels_neon() {
  static const TableMaker<float> maker;
  return maker.table;
}

const Kernels<double>& double_kernels_neon() {
  static const TableMaker<double> maker;
  return maker.table;
}

}  // namespace torch_ort::cpu
