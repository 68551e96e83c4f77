typedef float wide;
typedef int index_t;
extern "C" __global__ void __launch_bounds__(256)
MulAdd_Relu_Greater_Where_Sub_more(const float* in0, const float* in1, const float* in2, const float* in3, const float* in4, float* out0, float* out1, index_t columns, index_t rows_of_group, index_t rows_per_block, index_t in0_row, index_t in1_row0, index_t in1_row_size1, u64 in1_row_size1_by, index_t in1_row1, index_t in2_row0, index_t in2_row_size1, u64 in2_row_size1_by, index_t in2_row1, index_t in3_row, index_t in4_row0, index_t in4_row_size1, u64 in4_row_size1_by, index_t in4_row1, index_t out0_row, index_t out1_row, wide ratio7) {
  wide* const shared = nullptr;
  const i64 block = blockIdx.x;
  const index_t first_column = 0;
  const index_t first_row = index_t(block) * rows_per_block;
  const index_t last_row = min(first_row + rows_per_block, rows_of_group);
  for (index_t line = first_row; line < last_row; line += 8) {
    const index_t row = line + threadIdx.y;
    const bool is_row = row < last_row;
    const float* const at0 = in0 + (row * in0_row);
    const float* const at3 = in3 + (row * in3_row);
    float* const to0 = out0 + (row * out0_row);
    const wide r1 = is_row ? widen(in1[quotient(row, in1_row_size1, in1_row_size1_by) * in1_row0 + remainder(row, in1_row_size1, in1_row_size1_by) * in1_row1]) : wide(0);  // input 'w_in'
    const wide r2 = is_row ? widen(in2[quotient(row, in2_row_size1, in2_row_size1_by) * in2_row0 + remainder(row, in2_row_size1, in2_row_size1_by) * in2_row1]) : wide(0);  // input 'b_in'
    const wide r4 = is_row ? widen(in4[quotient(row, in4_row_size1, in4_row_size1_by) * in4_row0 + remainder(row, in4_row_size1, in4_row_size1_by) * in4_row1]) : wide(0);  // input 'mean_in'
    wide r14 = Sum::start();  // ReduceSum 'sum'
    Pack<float, 2> v0[2];
    Pack<float, 2> v3[2];
#pragma unroll
    for (int e = 0; e < 2; ++e) {
      const index_t column = first_column + index_t(e * 32 + threadIdx.x) * 2;
      if (!is_row || column >= columns) continue;
      load(v0[e], at0 + column);  // input 'x_in'
      load(v3[e], at3 + column);  // input 'g_in'
    }
#pragma unroll
    for (int e = 0; e < 2; ++e) {
      const index_t column = first_column + index_t(e * 32 + threadIdx.x) * 2;
      if (!is_row || column >= columns) continue;
      Pack<float, 2> result0;
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const wide v8 = MulAdd(v0[e][i], r1, r2);  // MulAdd 'apply'
        const wide v9 = Relu(v8);  // Relu 'relu'
        const wide v10 = Greater(v8, wide(0));  // Greater 'positive'
        const wide v11 = Where(v10, v3[e][i], wide(0));  // Where 'gradient'
        const wide v12 = Sub(v0[e][i], r4);  // Sub 'center'
        const wide v13 = Mul(v11, v12);  // Mul 'product'
        result0.at[i] = narrow<float>(v9);
        r14 = Sum::of(r14, v13);
      }
      store(to0 + column, result0);  // output 'y_in'
    }
    r14 = reduce_row<Sum, 32>(r14, shared);  // ReduceSum 'sum'
    const wide r15 = Mul(r14, ratio7);  // Mul 'part'
    if (is_row && threadIdx.x == 0) out1[row * out1_row] = narrow<float>(r15);  // output 's_in'
  }
}
