typedef float wide;
typedef int index_t;
extern "C" __global__ void __launch_bounds__(256)
Gelu_PhiloxMask_Mul_Add(const bf16* in0, const i64* in1, const bf16* in2, boolean* out0, bf16* out1, index_t columns, index_t rows_of_group, index_t rows_per_block, index_t blocks, index_t strips, index_t in0_row, index_t in2_row, index_t out0_row, index_t out1_row, u64 stream5) {
  const i64 block = blockIdx.z * gridDim.y + blockIdx.y;
  if (block >= blocks) return;
  const index_t strip = index_t(blockIdx.x);
  const index_t first_column = strip * 2048;
  const index_t first_row = index_t(block) * rows_per_block;
  const index_t last_row = min(first_row + rows_per_block, rows_of_group);
  const u64 seed5 = static_cast<u64>(*in1);  // PhiloxMask 'mask'
  for (index_t line = first_row; line < last_row; line += 1) {
    const index_t row = line + threadIdx.y;
    const bool is_row = row < last_row;
    const bf16* const at0 = in0 + (row * in0_row);
    const bf16* const at2 = in2 + (row * in2_row);
    boolean* const to0 = out0 + (row * out0_row);
    bf16* const to1 = out1 + (row * out1_row);
#pragma unroll
    for (int e = 0; e < 1; ++e) {
      const index_t column = first_column + index_t(e * 256 + threadIdx.x) * 8;
      if (!is_row || column >= columns) continue;
      Pack<bf16, 8> v0;
      load(v0, at0 + column, columns - column);  // input 'x_in'
      Pack<bf16, 8> v2;
      load(v2, at2 + column, columns - column);  // input 'r_in'
      wide v5[8];
      draw(v5, seed5, stream5, u64(row) * u64(columns) + u64(column), 3221225472u);  // PhiloxMask 'mask'
      Pack<boolean, 8> result0;
      Pack<bf16, 8> result1;
#pragma unroll
      for (int i = 0; i < 8; ++i) {
        const wide v4 = Gelu(v0[i]);  // Gelu 'gelu'
        const wide v6 = Mul(v4, v5[i]);  // Mul 'drop'
        const wide v7 = Mul(v6, wide(1.5));  // Mul 'scale'
        const wide v8 = Add(v7, v2[i]);  // Add 'residual'
        result0.at[i] = narrow<boolean>(v5[i]);
        result1.at[i] = narrow<bf16>(v8);
      }
      store(to0 + column, result0, columns - column);  // output 'mask_in'
      store(to1 + column, result1, columns - column);  // output 'y_in'
    }
  }
}
