typedef float wide;
typedef int index_t;
extern "C" __global__ void __launch_bounds__(256)
Gather_Add_Mul_ReduceMean_Sqrt_more(const float* in0, const i64* in1, const float* in2, float* out0, float* out1, u32* fault, index_t columns, index_t rows_of_group, index_t rows_per_block, index_t in0_rows, index_t in0_row, index_t in1_row, index_t in2_row0, index_t in2_row_size1, u64 in2_row_size1_by, index_t in2_row1, index_t out0_row, index_t out1_row) {
  wide* const shared = nullptr;
  const i64 block = blockIdx.x;
  const index_t first_column = 0;
  const index_t first_row = index_t(block) * rows_per_block;
  const index_t last_row = min(first_row + rows_per_block, rows_of_group);
  for (index_t line = first_row; line < last_row; line += 16) {
    const index_t row = line + threadIdx.y;
    const bool is_row = row < last_row;
    const float* const at2 = in2 + (quotient(row, in2_row_size1, in2_row_size1_by) * in2_row0 + remainder(row, in2_row_size1, in2_row_size1_by) * in2_row1);
    const index_t id3 = is_row ? row_of(in1[row * in1_row], in0_rows, fault) : index_t(kBad);  // Gather 'rows'
    float* const to0 = out0 + (row * out0_row);
    float* const to1 = out1 + (row * out1_row);
    wide v4[1][4];
    wide r6 = Sum::start();  // ReduceMean 'm'
#pragma unroll
    for (int e = 0; e < 1; ++e) {
      const index_t column = first_column + index_t(e * 16 + threadIdx.x) * 4;
      if (!is_row || column >= columns) continue;
      Pack<float, 4> v0;
      load(v0, at2 + column);  // input 'place_in'
      Pack<float, 4> v3;
      if (id3 == kBad) {
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          v3.at[i] = narrow<float>(not_a_number());
        }
      } else {
        load(v3, (in0 + id3 * in0_row) + column);  // Gather 'rows'
      }
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        v4[e][i] = Add(v3[i], v0[i]);  // Add 'x'
        const wide v5 = Mul(v4[e][i], v4[e][i]);  // Mul 'q'
        r6 = Sum::of(r6, v5);
      }
    }
    r6 = reduce_row<Sum, 16>(r6, shared);  // ReduceMean 'm'
    const wide r8 = Div(r6, wide(columns));  // ReduceMean 'm'
    const wide r9 = Add(r8, wide(0.25));  // Add 'e'
    const wide r10 = Sqrt(r9);  // Sqrt 'r'
    const wide r11 = Reciprocal(r10);  // Reciprocal 'i'
#pragma unroll
    for (int e = 0; e < 1; ++e) {
      const index_t column = first_column + index_t(e * 16 + threadIdx.x) * 4;
      if (!is_row || column >= columns) continue;
      Pack<float, 4> result0;
      Pack<float, 4> result1;
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const wide v12 = Mul(v4[e][i], r11);  // Mul 'y'
        result0.at[i] = narrow<float>(v4[e][i]);
        result1.at[i] = narrow<float>(v12);
      }
      store(to0 + column, result0);  // output 'x_in'
      store(to1 + column, result1);  // output 'y_in'
    }
  }
}
