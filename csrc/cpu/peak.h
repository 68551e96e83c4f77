// Measures the peak speeds of this machine, with which reports compare times.
#pragma once

#include "cpu/kernels.h"

#include <cstdint>

namespace torch_ort::cpu {

// The floating-point operations a second that products in this dtype can reach: multiplications and
// additions on registers alone, on `threads` threads of ATen at once (0: all). The kernels of this
// room compute float16 in float32. They do the same with bfloat16 if the instruction set or the
// processor has no products of bfloat16. Throws UserError on dtypes that no kernel multiplies, and
// if there are not so many threads. Takes about 0.03 s.
double peak_flops(ir::DType dtype, Isa isa, int threads);

// The bytes read and written a second when arrays of `num_bytes` in all are copied, each thread
// copying its part. Arrays that fit into the caches are copied there. No more memory is allocated
// than exceeds the caches by far, however large `num_bytes` is. Throws UserError as above. Takes
// about 0.07 s.
double copy_speed(int64_t num_bytes, int threads);

}  // namespace torch_ort::cpu
