// Sets of dtypes that ops and operators of several families take.
#pragma once

#include "ir/type.h"

namespace torch_ort::ops {

inline bool is_bool(ir::DType dtype) { return dtype == ir::DType::kBool; }

inline bool has_sign(ir::DType dtype) { return ir::is_number(dtype) && dtype != ir::DType::kUInt8; }

// Whether sums and products of ONNX take it.
inline bool is_summable(ir::DType dtype) {
  return ir::is_float(dtype) || dtype == ir::DType::kInt32 || dtype == ir::DType::kInt64;
}

}  // namespace torch_ort::ops
