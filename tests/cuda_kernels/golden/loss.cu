typedef float wide;
typedef int index_t;
extern "C" __global__ void __launch_bounds__(256)
ReduceMax_Sub_Exp_ReduceSum_Log_more(const float* in0, const i64* in1, float* out0, wide* totals, u32* fault, index_t columns, index_t rows_of_group, index_t rows_per_block, index_t in0_row, index_t in1_row, index_t out0_row) {
  SHARED(memory);
  wide* const shared = reinterpret_cast<wide*>(memory);
  const i64 block = blockIdx.x;
  const index_t first_column = 0;
  const index_t first_row = index_t(block) * rows_per_block;
  const index_t last_row = min(first_row + rows_per_block, rows_of_group);
  wide sum0 = wide(0);
  wide sum1 = wide(0);
  wide sum2 = wide(0);
  for (index_t line = first_row; line < last_row; line += 32) {
    const index_t row = line + threadIdx.y;
    const bool is_row = row < last_row;
    const float* const at0 = in0 + (row * in0_row);
    Pack<float, 4> v0[1];
    const wide r1 = is_row ? widen(in1[row * in1_row]) : wide(0);  // input 'label_in'
    const wide r11 = Equal(r1, wide(-100));  // RowValid 'valid'
    const wide r12 = Not(r11);  // RowValid 'valid'
    const index_t label1_but_minus_100 = is_row ? column_of(r1, columns, fault, wide(-100)) : index_t(kIgnored);  // RowPick 'pick'
    wide r3 = Largest::start();  // ReduceMax 'largest'
#pragma unroll
    for (int e = 0; e < 1; ++e) {
      const index_t column = first_column + index_t(e * 8 + threadIdx.x) * 4;
      if (!is_row || column >= columns) continue;
      load(v0[e], at0 + column);  // input 'x_in'
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        r3 = Largest::of(r3, v0[e][i]);
      }
    }
    r3 = reduce_row<Largest, 8>(r3, shared);  // ReduceMax 'largest'
    wide r6 = Sum::start();  // ReduceSum 'sum'
#pragma unroll
    for (int e = 0; e < 1; ++e) {
      const index_t column = first_column + index_t(e * 8 + threadIdx.x) * 4;
      if (!is_row || column >= columns) continue;
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const wide v4 = Sub(v0[e][i], r3);  // Sub 'shift'
        const wide v5 = Exp(v4);  // Exp 'exp'
        r6 = Sum::of(r6, v5);
      }
    }
    r6 = reduce_row<Sum, 8>(r6, shared);  // ReduceSum 'sum'
    const wide r7 = Log(r6);  // Log 'log'
    wide r9 = Sum::start();  // RowPick 'pick'
#pragma unroll
    for (int e = 0; e < 1; ++e) {
      const index_t column = first_column + index_t(e * 8 + threadIdx.x) * 4;
      if (!is_row || column >= columns) continue;
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const wide v4 = Sub(v0[e][i], r3);  // Sub 'shift'
        const wide v8 = Sub(v4, r7);  // Sub 'log_softmax'
        if (column + i == label1_but_minus_100) r9 = v8;
        sum2 += v8;  // output 'all_in'
      }
    }
    r9 = reduce_row<Sum, 8>(r9, shared);  // RowPick 'pick'
    if (label1_but_minus_100 == kBad) r9 = not_a_number();
    const wide r13 = Mul(r9, r12);  // Mul 'weigh'
    if (is_row && threadIdx.x == 0) out0[row * out0_row] = narrow<float>(r3);  // output 'm_in'
    if (is_row && threadIdx.x == 0) sum0 += r13;  // output 'sum_in'
    if (is_row && threadIdx.x == 0) sum1 += r12;  // output 'count_in'
  }
  sum0 = sum_block<8, 32>(sum0, shared);
  if (threadIdx.x == 0 && threadIdx.y == 0) totals[block * 3 + 0] = sum0;
  sum1 = sum_block<8, 32>(sum1, shared);
  if (threadIdx.x == 0 && threadIdx.y == 0) totals[block * 3 + 1] = sum1;
  sum2 = sum_block<8, 32>(sum2, shared);
  if (threadIdx.x == 0 && threadIdx.y == 0) totals[block * 3 + 2] = sum2;
}
// Adds up the partial sums of blocks, in order: one sum for each blockIdx.y.
extern "C" __global__ void __launch_bounds__(256)
ReduceMax_Sub_Exp_ReduceSum_Log_more_finish(const wide* totals, float* sum0, float* sum1, float* sum2, index_t columns, index_t blocks_per_group, index_t strips, index_t sum0_row, index_t sum1_row, index_t sum2_row) {
  SHARED(memory);
  wide* const shared = reinterpret_cast<wide*>(memory);
  const index_t parts = 1;
  const index_t group = blockIdx.x / parts, column = blockIdx.x % parts * 32;
  const i64 count = i64(blocks_per_group) * strips;
  if (blockIdx.y == 0) {  // output 'sum_in'
    if (column == 0) finish_one(sum0 + (group * sum0_row), totals + group * count * 3 + 0, count, 3, shared);
  }
  if (blockIdx.y == 1) {  // output 'count_in'
    if (column == 0) finish_one(sum1 + (group * sum1_row), totals + group * count * 3 + 1, count, 3, shared);
  }
  if (blockIdx.y == 2) {  // output 'all_in'
    if (column == 0) finish_one(sum2 + (group * sum2_row), totals + group * count * 3 + 2, count, 3, shared);
  }
}
