// The language of formulas: what a composite computes, in standard nodes. Each formula is written
// once, beside the op that it belongs to (softmax.h, normalization.h, activation.h), and is read
// in two places: files for other programs (convert/spell_out.cpp) and the bodies of fused regions
// (passes/composites/).
//
// Formulas, with the file of each, and who reads it:
//
//   softmax, log-softmax (softmax.cpp)
//       files below opset 13, in attention below 23, and where the dtype changes; regions along
//       the last dim
//   their gradients (softmax.cpp)
//       regions; in files they stay ATen nodes
//   layer norm (normalization.cpp)
//       files below opset 17, in float64, and without a weight; regions with its statistics
//   its gradients (normalization.cpp)
//       regions; in files they stay ATen nodes
//   RMS norm and its gradients, which are operators on a GPU (normalization.cpp)
//       regions with the factors of its rows; in files they stay standard or ATen nodes
//   1 / sqrt(x) (Formula::rsqrt)
//       files, and regions of the other norms as well
//   gelu, silu, mish, hardswish (activation.cpp)
//       files whose opset has no op; in regions gelu, silu and their gradients are words (words.h),
//       and those of pieces have formulas for regions (passes/composites/activations.cpp)
//
// These are written for one reader alone: batch and group norm, losses of labels and of elements,
// activations of pieces, dropout and their gradients, powers, bounds, norms of vectors, for regions
// (passes/composites/); attention, scans by index and ranges for files (convert/spell_out.cpp); and
// what runs alone without a kernel of its own, as RMS norm on the CPU, as ATen calls (`lower_...`
// in each family).
#pragma once

#include "ops/writer.h"

#include <cstdint>
#include <string_view>
#include <unordered_map>
#include <vector>

namespace torch_ort::ops {

// Who reads the nodes of a formula. Where standard ops can say a step in two ways, each reader gets
// the one that suits it.
enum class Reader : uint8_t {
  kFile,    // another program
  kRegion,  // a fused region: one reciprocal for a row costs less than a quotient for each element
};

// The dtype that formulas over `dtype` compute in: float64 for itself, float32 for all others. The
// sum of many float16 or bfloat16 numbers loses too many digits in their own dtype.
ir::DType computed_dtype(ir::DType dtype);

// Writes the steps of a formula. Operands are in computed_dtype() unless said otherwise.
class Formula {
 public:
  // `dtype`: that of the operands of the formula.
  Formula(Writer& writer, ir::DType dtype, Reader reader);

  // A value of any dtype in the computed one.
  ir::Value* number(ir::Value* x);
  ir::Value* constant(double number);
  ir::Value* make(std::string_view op, std::vector<ir::Value*> inputs, ir::Attrs attrs = {});

  ir::Value* add(ir::Value* a, ir::Value* b);
  ir::Value* sub(ir::Value* a, ir::Value* b);
  ir::Value* mul(ir::Value* a, ir::Value* b);
  ir::Value* scaled(ir::Value* x, double factor);
  ir::Value* square(ir::Value* x);
  // 1 / x. For one x there is one node.
  ir::Value* reciprocal(ir::Value* x);
  // 1 / sqrt(x)
  ir::Value* rsqrt(ir::Value* x);
  // x / divisor, where each divisor serves many elements.
  ir::Value* quotient(ir::Value* x, ir::Value* divisor);

  // Along axes that keep a dim of 1.
  ir::Value* max(ir::Value* x, const ir::Shape& axes);
  ir::Value* sum(ir::Value* x, const ir::Shape& axes);
  ir::Value* mean(ir::Value* x, const ir::Shape& axes);
  // Along axes that go away.
  ir::Value* total(ir::Value* x, const ir::Shape& axes);

 private:
  Writer& writer_;
  const ir::DType dtype_;
  const Reader reader_;
  std::unordered_map<const ir::Value*, ir::Value*> reciprocals_;
};

}  // namespace torch_ort::ops
