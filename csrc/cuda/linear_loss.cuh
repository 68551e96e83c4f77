// The cross-entropy of a linear layer, after prelude.cuh: what is computed between the products
// with its weight (csrc/cuda/linear_loss.h). The text defines before this
//   Element      of the logits
//   ClassWeight  of the weights of classes
//   Form         which operands there are, as constants of a struct
// `shared` has a number for each warp of a block where nothing else is said.
//
// A block takes one row. Its first pass over the logits finds the largest one and the sum of the
// exponentials, the second one writes the gradient in their place. The row is in the second-level
// cache then: all rows that are worked on at a time take some tens of megabytes.

enum {
  kLossThreads = 512,
  kAtOnce = 16 / sizeof(Element),
  kLinesOfBias = 8,
  kColumnsOfBias = 32 * kAtOnce
};

// Numbers of rows; `at` is nullptr if there are none.
struct OfRows {
  const wide* at;
  i64 stride;

  __device__ __forceinline__ wide operator[](i64 row) const { return at[row * stride]; }
};

// csrc/cuda/linear_loss.cpp fills these structs.
struct Classes {
  const ClassWeight* weight;
  i64 stride;

  // The weight of a class.
  __device__ __forceinline__ wide operator[](i64 column) const {
    return Form::kHasClassWeight ? widen(weight[column * stride]) : wide(1);
  }
};
struct Labels {
  const i64* at;
  i64 stride, ignored;
  index_t columns;  // how many classes there are
  u32* fault;

  // The class of a row, kIgnored, or kBad.
  __device__ __forceinline__ index_t operator[](i64 row) const {
    const i64 label = at[row * stride];
    if (label == ignored) return index_t(kIgnored);
    if (label >= 0 && label < i64(columns)) return index_t(label);
    *fault = kBadLabel;
    return index_t(kBad);
  }
};
struct Chunk {
  Element* logits;  // what the product has written; their gradient in the end
  i64 row_stride;
  Labels labels;
  Classes classes;
  OfRows loss_grad, sums_grad, square_grad;
  const wide* totals;
  // By row; nullptr for those that nobody wants.
  wide *losses, *sums, *logsumexp;
  Element* copy;  // of the logits, in dense rows
  wide cap, inverse_cap;
  wide scale;  // of the gradients that are written
};

// The places of a chunk's numbers among the totals.
enum { kSumOfWeights, kSumOfClasses, kSumOfLosses };

// The sums of the weights of all labels, and of all classes. One block.
INLINE void sum_weights(const Labels& labels, i64 rows, const Classes& classes, wide* totals,
                        wide* shared) {
  wide of_labels = wide(0), of_classes = wide(0);
  for (i64 row = threadIdx.x; row < rows; row += kLossThreads) {
    const index_t label = labels[row];
    if (label >= 0) of_labels += classes[label];
  }
  if (Form::kHasClassWeight) {
    for (i64 column = threadIdx.x; column < labels.columns; column += kLossThreads) {
      of_classes += classes[column];
    }
  }
  of_labels = reduce_row<Sum, kLossThreads>(of_labels, shared);
  of_classes = reduce_row<Sum, kLossThreads>(of_classes, shared);
  if (threadIdx.x == 0) {
    totals[kSumOfWeights] = of_labels;
    totals[kSumOfClasses] = Form::kHasClassWeight ? of_classes : wide(labels.columns);
  }
}

// The logits from what the product has written, -infinity behind the end of the row.
INLINE void load_logits(wide (&x)[kAtOnce], const Element* from, index_t left, const Chunk& chunk) {
  load(x, from);
#pragma unroll
  for (int i = 0; i < kAtOnce; ++i) {
    if (Form::kHasCap) x[i] = chunk.cap * Tanh(x[i] * chunk.inverse_cap);
    if (i >= left) x[i] = -infinity();
  }
}

INLINE void compute_row(const Chunk& chunk, wide* shared) {
  const i64 row = blockIdx.x;
  const index_t columns = chunk.labels.columns;
  Element* const logits = chunk.logits + row * chunk.row_stride;
  const index_t label = chunk.labels[row];

  wide largest = -infinity(), sum = wide(0), weighted = wide(0);
  for (index_t column = threadIdx.x * kAtOnce; column < columns; column += kLossThreads * kAtOnce) {
    wide x[kAtOnce];
    load_logits(x, logits + column, columns - column, chunk);
    add_exponentials(largest, sum, x);
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) {
      if (column + i >= columns) break;
      if (Form::kHasSums) weighted += chunk.classes[column + i] * x[i];
      if (Form::kHasCopy) chunk.copy[row * i64(columns) + column + i] = narrow<Element>(x[i]);
    }
  }
  wide picked = wide(0);
  if (label >= 0) {
    picked = widen(logits[label]);
    if (Form::kHasCap) picked = chunk.cap * Tanh(picked * chunk.inverse_cap);
  }
  // There are barriers in these: all threads have read the logits when one of them goes on.
  join_exponentials<kLossThreads>(largest, sum, shared);
  if (Form::kHasSums) weighted = reduce_row<Sum, kLossThreads>(weighted, shared);

  const wide logarithm = largest + Log(sum);
  const wide weight = label >= 0 ? chunk.classes[label] : label == kBad ? not_a_number() : wide(0);
  const wide of_classes = chunk.totals[kSumOfClasses];
  if (threadIdx.x == 0) {
    chunk.losses[row] = label == kIgnored ? wide(0) : weight * (logarithm - picked);
    if (Form::kHasSums) chunk.sums[row] = weighted - of_classes * logarithm;
    if (Form::kHasLogSumExp) chunk.logsumexp[row] = logarithm;
  }
  if (!Form::kHasGrad) return;

  wide of_loss = label == kIgnored ? wide(0) : chunk.scale * weight;
  if (Form::kIsMean && label != kIgnored) of_loss /= chunk.totals[kSumOfWeights];
  if (Form::kHasLossGrad) of_loss *= chunk.loss_grad[row];
  const wide of_sums = Form::kHasSumsGrad ? chunk.scale * chunk.sums_grad[row] : wide(0);
  const wide of_square = Form::kHasSquareGrad ? chunk.scale * chunk.square_grad[row] : wide(0);
  // Whatever the logits of a row without a loss are, infinities and NaN among them.
  const bool is_zero = label == kIgnored && of_sums == wide(0) && of_square == wide(0);
  const wide factor = (of_loss - of_sums * of_classes + of_square * logarithm) / sum;
  for (index_t column = threadIdx.x * kAtOnce; column < columns; column += kLossThreads * kAtOnce) {
    wide x[kAtOnce], gradient[kAtOnce];
    load_logits(x, logits + column, columns - column, chunk);
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) {
      gradient[i] = factor * Exp(x[i] - largest);
      if (Form::kHasSumsGrad && column + i < columns) {
        gradient[i] += of_sums * chunk.classes[column + i];
      }
      if (column + i == label) gradient[i] -= of_loss;
      if (Form::kHasCap) {
        const wide tanh = x[i] * chunk.inverse_cap;
        gradient[i] *= wide(1) - tanh * tanh;
      }
      // Behind the end of the row too: nobody reads that.
      if (is_zero) gradient[i] = wide(0);
    }
    store(logits + column, gradient);
  }
}

// Adds the losses of a chunk to those of the chunks before it, and writes the loss after the last
// one. One block.
INLINE void sum_losses(const wide* losses, index_t rows, int is_first, int is_last, wide* totals,
                       wide* loss, wide* shared) {
  wide sum = wide(0);
  for (index_t row = threadIdx.x; row < rows; row += kLossThreads) sum += losses[row];
  sum = reduce_row<Sum, kLossThreads>(sum, shared);
  if (threadIdx.x != 0) return;
  if (!is_first) sum += totals[kSumOfLosses];
  totals[kSumOfLosses] = sum;
  if (is_last) *loss = Form::kIsMean ? sum / totals[kSumOfWeights] : sum;
}

// Sums the gradient of the logits over the rows of a chunk, for the gradient of the bias. A block
// of 32 x 8 threads has kColumnsOfBias columns, and `shared` as many numbers for each line of them.
INLINE void sum_rows(const Element* gradient, i64 row_stride, index_t rows, index_t columns,
                     wide factor, int is_first, wide* bias_grad, wide* shared) {
  const index_t column = (index_t(blockIdx.x) * 32 + threadIdx.x) * kAtOnce;
  wide sum[kAtOnce];
#pragma unroll
  for (int i = 0; i < kAtOnce; ++i) sum[i] = wide(0);
  if (column < columns) {
    for (index_t row = threadIdx.y; row < rows; row += kLinesOfBias) {
      wide x[kAtOnce];
      load(x, gradient + row * row_stride + column);
#pragma unroll
      for (int i = 0; i < kAtOnce; ++i) sum[i] += x[i];
    }
  }
  wide* const of_thread = shared + threadIdx.x * kAtOnce;
#pragma unroll
  for (int i = 0; i < kAtOnce; ++i) of_thread[threadIdx.y * kColumnsOfBias + i] = sum[i];
  __syncthreads();
  if (threadIdx.y != 0) return;
#pragma unroll
  for (int i = 0; i < kAtOnce; ++i) {
    if (column + i >= columns) return;
    for (int line = 1; line < kLinesOfBias; ++line) sum[i] += of_thread[line * kColumnsOfBias + i];
    sum[i] *= factor;
    bias_grad[column + i] = is_first ? sum[i] : bias_grad[column + i] + sum[i];
  }
}
