// What this machine can do at most, as measured: the limits that reports hold times against.
#pragma once

#include "cpu/kernels.h"

#include <cstdint>

namespace torch_ort::cpu {

// Floating-point operations a second that products in this dtype can come to: additions of products
// of numbers that stay in registers, on `threads` threads of ATen's at once (0: all). The kernels
// of this room compute float16 in float32, and so they do bfloat16 where the instruction set, or
// the processor, has no products of bfloat16. UserError on dtypes that no kernel multiplies and on
// more threads than ATen has. Takes some 0.03 s.
double peak_flops(ir::DType dtype, Isa isa, int threads);

// Bytes a second, read and written, of copies from array to array that are `num_bytes` together,
// each thread its part. What fits into the caches is copied there; far more than these hold is not
// allocated, whatever `num_bytes` is. UserError as above. Takes some 0.07 s.
double copy_speed(int64_t num_bytes, int threads);

}  // namespace torch_ort::cpu
