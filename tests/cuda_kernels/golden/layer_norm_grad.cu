typedef float wide;
typedef int index_t;
extern "C" __global__ void __launch_bounds__(256, 2)
Sub_Mul_ReduceMean(const bf16* in0, const float* in1, const float* in2, const float* in3, const float* in4, float* out0, wide* column_sums, index_t columns, index_t columns_of_sums, index_t rows_of_group, index_t rows_per_block, index_t in0_row, index_t in1_row, index_t in2_row, index_t in3_row, index_t out0_row) {
  SHARED(memory);
  wide* const shared = reinterpret_cast<wide*>(memory);
  const i64 block = blockIdx.x;
  const index_t first_column = 0;
  const index_t first_row = index_t(block) * rows_per_block;
  const index_t last_row = min(first_row + rows_per_block, rows_of_group);
  Pack<float, 8> c4[1];
#pragma unroll
  for (int e = 0; e < 1; ++e) {
    const index_t column = first_column + index_t(e * 16 + threadIdx.x) * 8;
    if (column >= columns) continue;
    load(c4[e], in4 + column);  // input 'w_in'
  }
  wide sum0[1][8] = {};
  wide sum1[1][8] = {};
  for (index_t line = first_row; line < last_row; line += 16) {
    const index_t row = line + threadIdx.y;
    const bool is_row = row < last_row;
    const bf16* const at0 = in0 + (row * in0_row);
    const float* const at1 = in1 + (row * in1_row);
    float* const to0 = out0 + (row * out0_row);
    Pack<bf16, 8> v0[1];
    wide v8[1][8];
    wide v9[1][8];
    const wide r2 = is_row ? widen(in2[row * in2_row]) : wide(0);  // input 'mean_in'
    const wide r3 = is_row ? widen(in3[row * in3_row]) : wide(0);  // input 'scale_in'
    wide r10 = Sum::start();  // ReduceMean 'mean_1'
    wide r14 = Sum::start();  // ReduceMean 'mean_2'
#pragma unroll
    for (int e = 0; e < 1; ++e) {
      const index_t column = first_column + index_t(e * 16 + threadIdx.x) * 8;
      if (!is_row || column >= columns) continue;
      load(v0[e], at0 + column);  // input 'g_in'
      Pack<float, 8> v1;
      load(v1, at1 + column);  // input 'x_in'
#pragma unroll
      for (int i = 0; i < 8; ++i) {
        const wide v7 = Sub(v1[i], r2);  // Sub 'center'
        v8[e][i] = Mul(v7, r3);  // Mul 'normal'
        v9[e][i] = Mul(v0[e][i], c4[e][i]);  // Mul 'weigh'
        const wide v13 = Mul(v9[e][i], v8[e][i]);  // Mul 'product'
        r10 = Sum::of(r10, v9[e][i]);
        r14 = Sum::of(r14, v13);
      }
    }
    r10 = reduce_row<Sum, 16>(r10, shared);  // ReduceMean 'mean_1'
    r14 = reduce_row<Sum, 16>(r14, shared);  // ReduceMean 'mean_2'
    const wide r12 = Div(r10, wide(columns));  // ReduceMean 'mean_1'
    const wide r16 = Div(r14, wide(columns));  // ReduceMean 'mean_2'
#pragma unroll
    for (int e = 0; e < 1; ++e) {
      const index_t column = first_column + index_t(e * 16 + threadIdx.x) * 8;
      if (!is_row || column >= columns) continue;
      Pack<float, 8> result0;
#pragma unroll
      for (int i = 0; i < 8; ++i) {
        const wide v17 = Sub(v9[e][i], r12);  // Sub 'part_1'
        const wide v18 = Mul(v8[e][i], r16);  // Mul 'part_2'
        const wide v19 = Sub(v17, v18);  // Sub 'parts'
        const wide v20 = Mul(v19, r3);  // Mul 'dx'
        const wide v21 = Mul(v0[e][i], v8[e][i]);  // Mul 'of_weight'
        result0.at[i] = narrow<float>(v20);
        sum0[e][i] += v21;  // output 'dw_in'
        sum1[e][i] += v0[e][i];  // output 'db_in'
      }
      store(to0 + column, result0);  // output 'dx_in'
    }
  }
  write_partial_sums<16, 16>(column_sums + (block * 2 + 0) * columns_of_sums, sum0, first_column, columns, shared);
  write_partial_sums<16, 16>(column_sums + (block * 2 + 1) * columns_of_sums, sum1, first_column, columns, shared);
}
// Adds up the partial sums of blocks, in order: one sum for each blockIdx.y.
extern "C" __global__ void __launch_bounds__(256)
Sub_Mul_ReduceMean_finish(const wide* column_sums, float* sum0, float* sum1, index_t columns, index_t columns_of_sums, index_t blocks_per_group, index_t strips, index_t sum0_row, index_t sum1_row) {
  SHARED(memory);
  wide* const shared = reinterpret_cast<wide*>(memory);
  const index_t parts = max((columns + 31) / 32, index_t(1));
  const index_t group = blockIdx.x / parts, column = blockIdx.x % parts * 32;
  const i64 stride = i64(2) * columns_of_sums;
  const wide* const parts_of_sum = column_sums + group * blocks_per_group * stride + i64(blockIdx.y) * columns_of_sums;
  const wide sum = add_lines(parts_of_sum, blocks_per_group, stride, column, columns, shared);
  const index_t at = column + threadIdx.x;
  if (threadIdx.y != 0 || at >= columns) return;
  if (blockIdx.y == 0) (sum0 + (group * sum0_row))[at] = narrow<float>(sum);  // output 'dw_in'
  if (blockIdx.y == 1) (sum1 + (group * sum1_row))[at] = narrow<float>(sum);  // output 'db_in'
}
