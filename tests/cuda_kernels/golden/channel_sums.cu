typedef float wide;
typedef int index_t;
extern "C" __global__ void __launch_bounds__(256, 4)
Sub_Mul_Relu(const float* in0, const float* in1, const float* in2, float* out0, wide* column_sums, index_t columns, index_t columns_of_sums, index_t rows_of_group, index_t rows_per_block, index_t blocks_per_group, u64 blocks_per_group_by, index_t blocks, index_t strips, index_t in0_row, index_t in1_row0, index_t in1_row_size1, u64 in1_row_size1_by, index_t in1_row1, index_t out0_row, wide ratio4) {
  SHARED(memory);
  wide* const shared = reinterpret_cast<wide*>(memory);
  const i64 block = blockIdx.z * gridDim.y + blockIdx.y;
  if (block >= blocks) return;
  const index_t strip = index_t(blockIdx.x);
  const index_t first_column = strip * 32;
  const index_t group = quotient(index_t(block), blocks_per_group, blocks_per_group_by);
  const index_t first_row = group * rows_of_group + remainder(index_t(block), blocks_per_group, blocks_per_group_by) * rows_per_block;
  const index_t last_row = min(first_row + rows_per_block, (group + 1) * rows_of_group);
  Pack<float, 4> c2[1];
#pragma unroll
  for (int e = 0; e < 1; ++e) {
    const index_t column = first_column + index_t(e * 8 + threadIdx.x) * 4;
    if (column >= columns) continue;
    load(c2[e], in2 + column);  // input 'g_in'
  }
  wide sum0[1][4] = {};
  wide sum1[1][4] = {};
  for (index_t line = first_row; line < last_row; line += 32) {
    const index_t row = line + threadIdx.y;
    const bool is_row = row < last_row;
    const float* const at0 = in0 + (row * in0_row);
    const float* const at1 = in1 + (quotient(row, in1_row_size1, in1_row_size1_by) * in1_row0 + remainder(row, in1_row_size1, in1_row_size1_by) * in1_row1);
    float* const to0 = out0 + (row * out0_row);
#pragma unroll
    for (int e = 0; e < 1; ++e) {
      const index_t column = first_column + index_t(e * 8 + threadIdx.x) * 4;
      if (!is_row || column >= columns) continue;
      Pack<float, 4> v0;
      load(v0, at0 + column);  // input 'x_in'
      Pack<float, 4> v1;
      load(v1, at1 + column);  // input 'z_in'
      Pack<float, 4> result0;
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const wide v5 = Sub(v0[i], v1[i]);  // Sub 'center'
        const wide v6 = Mul(v5, c2[e][i]);  // Mul 'scale'
        const wide v7 = Relu(v6);  // Relu 'relu'
        const wide v8 = Mul(v6, ratio4);  // Mul 'average'
        const wide v9 = Mul(v6, v6);  // Mul 'square'
        result0.at[i] = narrow<float>(v7);
        sum0[e][i] += v8;  // output 'm_in'
        sum1[e][i] += v9;  // output 'q_in'
      }
      store(to0 + column, result0);  // output 'y_in'
    }
  }
  write_partial_sums<8, 32>(column_sums + (block * 2 + 0) * columns_of_sums, sum0, first_column, columns, shared);
  write_partial_sums<8, 32>(column_sums + (block * 2 + 1) * columns_of_sums, sum1, first_column, columns, shared);
}
// Adds up the partial sums of blocks, in order: one sum for each blockIdx.y.
extern "C" __global__ void __launch_bounds__(256)
Sub_Mul_Relu_finish(const wide* column_sums, float* sum0, float* sum1, index_t columns, index_t columns_of_sums, index_t blocks_per_group, index_t strips, index_t sum0_row, index_t sum1_row) {
  SHARED(memory);
  wide* const shared = reinterpret_cast<wide*>(memory);
  const index_t parts = max((columns + 31) / 32, index_t(1));
  const index_t group = blockIdx.x / parts, column = blockIdx.x % parts * 32;
  const i64 stride = i64(2) * columns_of_sums;
  const wide* const parts_of_sum = column_sums + group * blocks_per_group * stride + i64(blockIdx.y) * columns_of_sums;
  const wide sum = add_lines(parts_of_sum, blocks_per_group, stride, column, columns, shared);
  const index_t at = column + threadIdx.x;
  if (threadIdx.y != 0 || at >= columns) return;
  if (blockIdx.y == 0) (sum0 + (group * sum0_row))[at] = narrow<float>(sum);  // output 'm_in'
  if (blockIdx.y == 1) (sum1 + (group * sum1_row))[at] = narrow<float>(sum);  // output 'q_in'
}
