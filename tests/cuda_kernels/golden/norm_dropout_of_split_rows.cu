typedef float wide;
typedef int index_t;
extern "C" __global__ void __launch_bounds__(512, 1)
ReduceMean_Sub_Mul_Add_Sqrt_more_stage0(const bf16* in0, const float* in1, const i64* in2, float* out0, float* out1, float* out2, wide* totals, wide* parts, index_t columns, index_t rows_of_group, index_t rows_per_block, index_t blocks, index_t strips, index_t columns_per_strip, index_t in0_row, index_t out0_row, index_t out1_row, index_t out2_row, u64 stream18) {
  SHARED(memory);
  wide* const shared = reinterpret_cast<wide*>(memory);
  const i64 block = blockIdx.z * gridDim.y + blockIdx.y;
  if (block >= blocks) return;
  const index_t strip = index_t(blockIdx.x);
  const index_t first_column = strip * columns_per_strip;
  const index_t last_column = first_column + min(columns_per_strip, columns - first_column);
  const index_t first_row = index_t(block) * rows_per_block;
  const index_t last_row = min(first_row + rows_per_block, rows_of_group);
  const u64 seed18 = static_cast<u64>(*in2);  // PhiloxMask 'mask'
  for (index_t line = first_row; line < last_row; line += 1) {
    const index_t row = line + threadIdx.y;
    const bool is_row = row < last_row;
    const bf16* const at0 = in0 + (row * in0_row);
    float* const to0 = out0 + (row * out0_row);
    wide r5 = Sum::start();  // ReduceMean 'mean'
    for (index_t begin = first_column; begin < last_column; begin += 8192) {
      Pack<bf16, 8> v0[2];
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        const index_t column = begin + index_t(e * 512 + threadIdx.x) * 8;
        if (!is_row || column >= columns) continue;
        load(v0[e], at0 + column);  // input 'x_in'
      }
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        const index_t column = begin + index_t(e * 512 + threadIdx.x) * 8;
        if (!is_row || column >= columns) continue;
#pragma unroll
        for (int i = 0; i < 8; ++i) {
          r5 = Sum::of(r5, v0[e][i]);
        }
      }
    }
    r5 = reduce_row<Sum, 512>(r5, shared);  // ReduceMean 'mean'
    if (is_row && threadIdx.x == 0) (parts + (i64(row) * 3 + 0) * strips)[strip] = r5;
  }
}
extern "C" __global__ void __launch_bounds__(512, 1)
ReduceMean_Sub_Mul_Add_Sqrt_more_stage1(const bf16* in0, const float* in1, const i64* in2, float* out0, float* out1, float* out2, wide* totals, wide* parts, index_t columns, index_t rows_of_group, index_t rows_per_block, index_t blocks, index_t strips, index_t columns_per_strip, index_t in0_row, index_t out0_row, index_t out1_row, index_t out2_row, u64 stream18) {
  SHARED(memory);
  wide* const shared = reinterpret_cast<wide*>(memory);
  const i64 block = blockIdx.z * gridDim.y + blockIdx.y;
  if (block >= blocks) return;
  const index_t strip = index_t(blockIdx.x);
  const index_t first_column = strip * columns_per_strip;
  const index_t last_column = first_column + min(columns_per_strip, columns - first_column);
  const index_t first_row = index_t(block) * rows_per_block;
  const index_t last_row = min(first_row + rows_per_block, rows_of_group);
  const u64 seed18 = static_cast<u64>(*in2);  // PhiloxMask 'mask'
  for (index_t line = first_row; line < last_row; line += 1) {
    const index_t row = line + threadIdx.y;
    const bool is_row = row < last_row;
    const bf16* const at0 = in0 + (row * in0_row);
    float* const to0 = out0 + (row * out0_row);
    wide r5 = reduce_parts<Sum, 512>(parts + (i64(row) * 3 + 0) * strips, strips, shared);  // ReduceMean 'mean'
    const wide r7 = Div(r5, wide(columns));  // ReduceMean 'mean'
    wide r10 = Sum::start();  // ReduceMean 'v'
    for (index_t begin = first_column; begin < last_column; begin += 8192) {
      Pack<bf16, 8> v0[2];
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        const index_t column = begin + index_t(e * 512 + threadIdx.x) * 8;
        if (!is_row || column >= columns) continue;
        load(v0[e], at0 + column);  // input 'x_in'
      }
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        const index_t column = begin + index_t(e * 512 + threadIdx.x) * 8;
        if (!is_row || column >= columns) continue;
#pragma unroll
        for (int i = 0; i < 8; ++i) {
          const wide v8 = Sub(v0[e][i], r7);  // Sub 'c'
          const wide v9 = Mul(v8, v8);  // Mul 'q'
          r10 = Sum::of(r10, v9);
        }
      }
    }
    r10 = reduce_row<Sum, 512>(r10, shared);  // ReduceMean 'v'
    if (is_row && threadIdx.x == 0) (parts + (i64(row) * 3 + 1) * strips)[strip] = r10;
  }
}
extern "C" __global__ void __launch_bounds__(512, 1)
ReduceMean_Sub_Mul_Add_Sqrt_more_stage2(const bf16* in0, const float* in1, const i64* in2, float* out0, float* out1, float* out2, wide* totals, wide* parts, index_t columns, index_t rows_of_group, index_t rows_per_block, index_t blocks, index_t strips, index_t columns_per_strip, index_t in0_row, index_t out0_row, index_t out1_row, index_t out2_row, u64 stream18) {
  SHARED(memory);
  wide* const shared = reinterpret_cast<wide*>(memory);
  const i64 block = blockIdx.z * gridDim.y + blockIdx.y;
  if (block >= blocks) return;
  const index_t strip = index_t(blockIdx.x);
  const index_t first_column = strip * columns_per_strip;
  const index_t last_column = first_column + min(columns_per_strip, columns - first_column);
  const index_t first_row = index_t(block) * rows_per_block;
  const index_t last_row = min(first_row + rows_per_block, rows_of_group);
  const u64 seed18 = static_cast<u64>(*in2);  // PhiloxMask 'mask'
  wide sum0 = wide(0);
  for (index_t line = first_row; line < last_row; line += 1) {
    const index_t row = line + threadIdx.y;
    const bool is_row = row < last_row;
    const bf16* const at0 = in0 + (row * in0_row);
    float* const to0 = out0 + (row * out0_row);
    wide r5 = reduce_parts<Sum, 512>(parts + (i64(row) * 3 + 0) * strips, strips, shared);  // ReduceMean 'mean'
    const wide r7 = Div(r5, wide(columns));  // ReduceMean 'mean'
    wide r10 = reduce_parts<Sum, 512>(parts + (i64(row) * 3 + 1) * strips, strips, shared);  // ReduceMean 'v'
    const wide r12 = Div(r10, wide(columns));  // ReduceMean 'v'
    const wide r13 = Add(r12, wide(0.25));  // Add 'e'
    const wide r14 = Sqrt(r13);  // Sqrt 'd'
    const wide r15 = Reciprocal(r14);  // Reciprocal 'i'
    wide r20 = Largest::start();  // ReduceMax 'most'
    for (index_t begin = first_column; begin < last_column; begin += 8192) {
      Pack<bf16, 8> v0[2];
      Pack<float, 8> c1[2];
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        const index_t column = begin + index_t(e * 512 + threadIdx.x) * 8;
        if (!is_row || column >= columns) continue;
        load(v0[e], at0 + column);  // input 'x_in'
        load(c1[e], in1 + column);  // input 'w_in'
      }
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        const index_t column = begin + index_t(e * 512 + threadIdx.x) * 8;
        if (!is_row || column >= columns) continue;
        wide v18[8];
        draw(v18, seed18, stream18, u64(row) * u64(columns) + u64(column), 2147483648u);  // PhiloxMask 'mask'
        Pack<float, 8> result0;
#pragma unroll
        for (int i = 0; i < 8; ++i) {
          const wide v8 = Sub(v0[e][i], r7);  // Sub 'c'
          const wide v16 = Mul(v8, r15);  // Mul 'n'
          const wide v17 = Mul(v16, c1[e][i]);  // Mul 'a'
          const wide v19 = Mul(v17, v18[i]);  // Mul 'y'
          result0.at[i] = narrow<float>(v19);
          r20 = Largest::of(r20, v19);
          sum0 += v19;  // output 'all_in'
        }
        store(to0 + column, result0);  // output 'y_in'
      }
    }
    r20 = reduce_row<Largest, 512>(r20, shared);  // ReduceMax 'most'
    if (is_row && threadIdx.x == 0) (parts + (i64(row) * 3 + 2) * strips)[strip] = r20;
  }
  sum0 = sum_block<512, 1>(sum0, shared);
  if (threadIdx.x == 0 && threadIdx.y == 0) totals[(block * strips + strip) * 2 + 0] = sum0;
}
extern "C" __global__ void __launch_bounds__(512, 1)
ReduceMean_Sub_Mul_Add_Sqrt_more(const bf16* in0, const float* in1, const i64* in2, float* out0, float* out1, float* out2, wide* totals, wide* parts, index_t columns, index_t rows_of_group, index_t rows_per_block, index_t blocks, index_t strips, index_t columns_per_strip, index_t in0_row, index_t out0_row, index_t out1_row, index_t out2_row, u64 stream18) {
  SHARED(memory);
  wide* const shared = reinterpret_cast<wide*>(memory);
  const i64 block = blockIdx.z * gridDim.y + blockIdx.y;
  if (block >= blocks) return;
  const index_t strip = index_t(blockIdx.x);
  const index_t first_column = strip * columns_per_strip;
  const index_t last_column = first_column + min(columns_per_strip, columns - first_column);
  const index_t first_row = index_t(block) * rows_per_block;
  const index_t last_row = min(first_row + rows_per_block, rows_of_group);
  const u64 seed18 = static_cast<u64>(*in2);  // PhiloxMask 'mask'
  wide sum1 = wide(0);
  for (index_t line = first_row; line < last_row; line += 1) {
    const index_t row = line + threadIdx.y;
    const bool is_row = row < last_row;
    const bf16* const at0 = in0 + (row * in0_row);
    float* const to0 = out0 + (row * out0_row);
    wide r5 = reduce_parts<Sum, 512>(parts + (i64(row) * 3 + 0) * strips, strips, shared);  // ReduceMean 'mean'
    const wide r7 = Div(r5, wide(columns));  // ReduceMean 'mean'
    wide r10 = reduce_parts<Sum, 512>(parts + (i64(row) * 3 + 1) * strips, strips, shared);  // ReduceMean 'v'
    const wide r12 = Div(r10, wide(columns));  // ReduceMean 'v'
    const wide r13 = Add(r12, wide(0.25));  // Add 'e'
    const wide r14 = Sqrt(r13);  // Sqrt 'd'
    const wide r15 = Reciprocal(r14);  // Reciprocal 'i'
    wide r20 = reduce_parts<Largest, 512>(parts + (i64(row) * 3 + 2) * strips, strips, shared);  // ReduceMax 'most'
    if (is_row && threadIdx.x == 0 && first_column == 0) out1[row * out1_row] = narrow<float>(r7);  // output 'mean_in'
    if (is_row && threadIdx.x == 0 && first_column == 0) out2[row * out2_row] = narrow<float>(r20);  // output 'most_in'
    if (is_row && threadIdx.x == 0 && first_column == 0) sum1 += r7;  // output 'means_in'
  }
  sum1 = sum_block<512, 1>(sum1, shared);
  if (threadIdx.x == 0 && threadIdx.y == 0) totals[(block * strips + strip) * 2 + 1] = sum1;
}
// Adds up the partial sums of blocks, in order: one sum for each blockIdx.y.
extern "C" __global__ void __launch_bounds__(256)
ReduceMean_Sub_Mul_Add_Sqrt_more_finish(const wide* totals, float* sum0, float* sum1, index_t columns, index_t blocks_per_group, index_t strips, index_t sum0_row, index_t sum1_row) {
  SHARED(memory);
  wide* const shared = reinterpret_cast<wide*>(memory);
  const index_t parts = 1;
  const index_t group = blockIdx.x / parts, column = blockIdx.x % parts * 32;
  const i64 count = i64(blocks_per_group) * strips;
  if (blockIdx.y == 0) {  // output 'all_in'
    if (column == 0) finish_one(sum0 + (group * sum0_row), totals + group * count * 2 + 0, count, 2, shared);
  }
  if (blockIdx.y == 1) {  // output 'means_in'
    if (column == 0) finish_one(sum1 + (group * sum1_row), totals + group * count * 2 + 1, count, 2, shared);
  }
}
