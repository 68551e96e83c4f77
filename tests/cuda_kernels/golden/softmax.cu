typedef float wide;
typedef int index_t;
extern "C" __global__ void __launch_bounds__(256)
Neg_ReduceMax_Sub_Exp_ReduceSum_more(const float* in0, float* out0, float* out1, float* out2, index_t columns, index_t rows_of_group, index_t rows_per_block, index_t in0_row, index_t out0_row, index_t out1_row, index_t out2_row) {
  wide* const shared = nullptr;
  const i64 block = blockIdx.x;
  const index_t first_column = 0;
  const index_t first_row = index_t(block) * rows_per_block;
  const index_t last_row = min(first_row + rows_per_block, rows_of_group);
  for (index_t line = first_row; line < last_row; line += 32) {
    const index_t row = line + threadIdx.y;
    const bool is_row = row < last_row;
    const float* const at0 = in0 + (row * in0_row);
    float* const to0 = out0 + (row * out0_row);
    wide v2[1][4];
    wide v5[1][4];
    wide r3 = Largest::start();  // ReduceMax 'largest'
    wide r8 = Smallest::start();  // ReduceMin 'least'
#pragma unroll
    for (int e = 0; e < 1; ++e) {
      const index_t column = first_column + index_t(e * 8 + threadIdx.x) * 4;
      if (!is_row || column >= columns) continue;
      Pack<float, 4> v0;
      load(v0, at0 + column);  // input 'x_in'
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        v2[e][i] = Neg(v0[i]);  // Neg 'turn'
        r3 = Largest::of(r3, v2[e][i]);
        r8 = Smallest::of(r8, v2[e][i]);
      }
    }
    r3 = reduce_row<Largest, 8>(r3, shared);  // ReduceMax 'largest'
    r8 = reduce_row<Smallest, 8>(r8, shared);  // ReduceMin 'least'
    wide r6 = Sum::start();  // ReduceSum 'sum'
#pragma unroll
    for (int e = 0; e < 1; ++e) {
      const index_t column = first_column + index_t(e * 8 + threadIdx.x) * 4;
      if (!is_row || column >= columns) continue;
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const wide v4 = Sub(v2[e][i], r3);  // Sub 'shift'
        v5[e][i] = Exp(v4);  // Exp 'exp'
        r6 = Sum::of(r6, v5[e][i]);
      }
    }
    r6 = reduce_row<Sum, 8>(r6, shared);  // ReduceSum 'sum'
#pragma unroll
    for (int e = 0; e < 1; ++e) {
      const index_t column = first_column + index_t(e * 8 + threadIdx.x) * 4;
      if (!is_row || column >= columns) continue;
      Pack<float, 4> result0;
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const wide v7 = Div(v5[e][i], r6);  // Div 'divide'
        result0.at[i] = narrow<float>(v7);
      }
      store(to0 + column, result0);  // output 'y_in'
    }
    if (is_row && threadIdx.x == 0) out1[row * out1_row] = narrow<float>(r3);  // output 'm_in'
    if (is_row && threadIdx.x == 0) out2[row * out2_row] = narrow<float>(r8);  // output 'least_in'
  }
}
