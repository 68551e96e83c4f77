// Steps of optimizers over many tensors at once, behind prelude.cuh. A block takes one chunk of one
// tensor. What a step does is worked out on the device (begin_step), where learning rates, counts
// of steps, scales and norms may lie, so that nobody waits for them.

enum { kThreads = 256, kChunk = 8192, kMostSettings = 32, kMostWords = 480 };

// ---- structs that csrc/cuda/optimizer.cpp has too, and fills

struct Tensor {
  u64 at[5];  // addresses of parameter, gradient and states
  i64 count;  // elements of each
  u32 slot;   // slot of its rule
  u32 flags;
};
enum { kAligned = 1, kFirstStep = 2 };

// Tensors whose steps are counted together. `taken` is the address of the number of steps taken.
struct Slot {
  u64 taken;  // 0: the settings have the number
  u32 settings, taken_is_double;
};

struct Settings {
  double lr, beta1, beta2, eps, weight_decay, momentum, dampening, ratio_min, ratio_max;
  double taken;  // number of this step
  u64 lr_at;     // where the rate is read; 0: it is `lr`
  u32 flags, unused;
};
enum {
  kLrIsDouble = 1,
  kCorrects = 2,      // the bias of means that began at 0
  kPlainRoot = 4,     // eps is added to the root without its correction
  kDecaysBefore = 8,  // the parameter decays before its update
  kDecaysAfter = 16,  // it decays after it; else its gradient, or LAMB's direction, gets the decay
  kMaximizes = 32,
  kNesterov = 64,
};
struct SettingsList {
  Settings at[kMostSettings];
};
struct WordList {
  u64 at[kMostWords];
};

// ---- structs that kernels pass on to each other

struct Step {
  u32 skips, unused;
};

// A factor as the sum of two numbers, as on the CPU. Rounded to one number, 0.999 would have an
// error that adds up over many steps. The first number is smaller than the factor, so that an
// infinite x stays infinite.
template <typename T>
struct Factor {
  T high, low;
};

// The numbers that the update of a slot's tensors uses, in the type that a kernel computes in.
// Names are those of csrc/cpu/kernels.h; `rest` means 1 minus the number.
template <typename T>
struct Numbers {
  T lr, step_size, inverse_correction, mean_correction, beta1_rest, beta2_rest, eps, weight_decay;
  T gradient_factor, momentum, dampening_rest;
  Factor<T> beta2, keep;
};
struct Rule {
  Numbers<double> exact;
  Numbers<float> rounded;
  u32 flags;
  double ratio_min, ratio_max;
};
enum { kIsNesterov = 1, kKeepsAll = 2 };

INLINE const Numbers<double>& numbers_of(const Rule& rule, double) { return rule.exact; }
INLINE const Numbers<float>& numbers_of(const Rule& rule, float) { return rule.rounded; }

// ---- numbers

INLINE float fma_of(float x, float y, float z) { return fmaf(x, y, z); }
INLINE double fma_of(double x, double y, double z) { return fma(x, y, z); }

INLINE float multiply_add(float x, const Factor<float>& by, float y) {
  return fmaf(x, by.high, fmaf(x, by.low, y));
}
INLINE double multiply_add(double x, const Factor<double>& by, double y) {
  return fma(x, by.high, y);
}

// The sum over all threads of a block, in a fixed order. Each thread gets it. `shared` has one
// number for each warp.
INLINE double sum_threads(double x, double* shared) {
#pragma unroll
  for (int bits = 16; bits > 0; bits /= 2) x += __shfl_xor_sync(0xFFFFFFFFu, x, bits);
  // All threads have read the numbers of the previous sum.
  __syncthreads();
  if (threadIdx.x % 32 == 0) shared[threadIdx.x / 32] = x;
  __syncthreads();
  x = shared[0];
#pragma unroll
  for (int warp = 1; warp < kThreads / 32; ++warp) x += shared[warp];
  return x;
}

// ---- chunks

// The tensor that a chunk belongs to: the first one whose chunks end after it. All lanes of a warp
// search together, at 32 places at a time.
INLINE int tensor_of(const u32* ends, int count, u32 chunk) {
  int low = 0, high = count;
  while (high - low > 1) {
    const int part = (high - low + 31) / 32, last = low + int(threadIdx.x % 32 + 1) * part - 1;
    const bool is_before = last < high && ends[last] <= chunk;
    low += __popc(__ballot_sync(0xFFFFFFFFu, is_before)) * part;
    high = min(high, low + part);
  }
  return low;
}

struct Chunk {
  const Tensor* tensor;
  int index;  // number of the tensor
  i64 begin;
  int count;

  template <typename T>
  __device__ __forceinline__ T* array(int i) const {
    T* const all = reinterpret_cast<T*>(tensor->at[i]);
    // The compiler cannot know the memory space of an address that was read from memory.
    ASSUME_GLOBAL(all);
    return all + begin;
  }
};
INLINE Chunk find_chunk(const u32* ends, const Tensor* tensors, int num_tensors) {
  const int index = tensor_of(ends, num_tensors, blockIdx.x);
  const i64 begin = i64(blockIdx.x - (index == 0 ? 0u : ends[index - 1])) * kChunk;
  const i64 left = tensors[index].count - begin;
  return {tensors + index, index, begin, left < kChunk ? int(left) : int(kChunk)};
}

// Runs over the elements of a chunk, V at a time. Elements at its end are processed one by one, as
// are all if addresses are not aligned.
template <int V, typename Work>
INLINE void for_each(const Chunk& chunk, Work& work) {
  const int by_vector = chunk.tensor->flags & kAligned ? chunk.count - chunk.count % V : 0;
  for (int i = threadIdx.x * V; i < by_vector; i += kThreads * V) work.template run<V>(i);
  for (int i = by_vector + int(threadIdx.x); i < chunk.count; i += kThreads) {
    work.template run<1>(i);
  }
}

// ---- SGD

struct None {};  // the type of an array that is left out
template <typename T>
struct IsThere {
  enum { value = 1 };
};
template <>
struct IsThere<None> {
  enum { value = 0 };
};

template <typename P, typename G, typename B>
struct Sgd {
  P* parameter;
  const G* gradient;
  B* buffer;
  wide factor, decay, momentum, minus_lr, undamped;
  bool is_first, is_nesterov;

  template <int V>
  __device__ __forceinline__ void run(int i) const {
    wide x[V], change[V], kept[V];
    load(x, parameter + i);
    load(change, gradient + i);
    if constexpr (IsThere<B>::value) {
      if (!is_first) load(kept, buffer + i);
    }
#pragma unroll
    for (int j = 0; j < V; ++j) {
      change[j] *= factor;
      if (decay != wide(0)) change[j] = fma_of(decay, x[j], change[j]);
      if constexpr (IsThere<B>::value) {
        kept[j] = is_first ? change[j] : fma_of(undamped, change[j], kept[j] * momentum);
        change[j] = is_nesterov ? fma_of(momentum, kept[j], change[j]) : kept[j];
      }
      x[j] = fma_of(minus_lr, change[j], x[j]);
    }
    if constexpr (IsThere<B>::value) store(buffer + i, kept);
    store(parameter + i, x);
  }
};

template <int V, typename P, typename G, typename B = None>
INLINE void sgd(const u32* ends, const Tensor* tensors, int num_tensors, const Step* step,
                const Rule* rules) {
  if (step->skips) return;
  const Chunk chunk = find_chunk(ends, tensors, num_tensors);
  const Rule& rule = rules[chunk.tensor->slot];
  const Numbers<wide>& by = numbers_of(rule, wide());
  const Sgd<P, G, B> work = {chunk.array<P>(0),
                             chunk.array<const G>(1),
                             IsThere<B>::value ? chunk.array<B>(2) : nullptr,
                             by.gradient_factor,
                             by.weight_decay,
                             by.momentum,
                             -by.lr,
                             by.dampening_rest,
                             (chunk.tensor->flags & kFirstStep) != 0,
                             (rule.flags & kIsNesterov) != 0};
  for_each<V>(chunk, work);
}

// ---- Adam

// The running means of the gradient and of its square.
struct Means {
  wide beta1_rest, beta2_rest;
  Factor<wide> beta2;

  __device__ __forceinline__ wide mean(wide old, wide g) const {
    return fma_of(beta1_rest, g - old, old);
  }
  __device__ __forceinline__ wide square(wide old, wide g) const {
    return multiply_add(old, beta2, beta2_rest * g * g);
  }
};
INLINE Means means_of(const Numbers<wide>& by) { return {by.beta1_rest, by.beta2_rest, by.beta2}; }

template <typename P, typename G, typename M, typename S, typename L>
struct Adam {
  P* parameter;
  const G* gradient;
  M* mean;
  S* square;
  L* largest;
  Means means;
  Factor<wide> keep;
  bool keeps_all;
  wide factor, decay, eps, inverse_correction, minus_step_size;

  template <int V>
  __device__ __forceinline__ void run(int i) const {
    wide x[V], g[V], m[V], squares[V], most[V];
    load(x, parameter + i);
    load(g, gradient + i);
    load(m, mean + i);
    load(squares, square + i);
    if constexpr (IsThere<L>::value) load(most, largest + i);
#pragma unroll
    for (int j = 0; j < V; ++j) {
      g[j] *= factor;
      if (decay != wide(0)) g[j] = fma_of(decay, x[j], g[j]);
      m[j] = means.mean(m[j], g[j]);
      squares[j] = means.square(squares[j], g[j]);
      most[j] = IsThere<L>::value ? Max(most[j], squares[j]) : squares[j];
      const wide change = m[j] / fma_of(Sqrt(most[j]), inverse_correction, eps);
      x[j] = keeps_all ? fma_of(minus_step_size, change, x[j])
                       : multiply_add(x[j], keep, minus_step_size * change);
    }
    store(mean + i, m);
    store(square + i, squares);
    if constexpr (IsThere<L>::value) store(largest + i, most);
    store(parameter + i, x);
  }
};

template <int V, typename P, typename G, typename M, typename S, typename L = None>
INLINE void adam(const u32* ends, const Tensor* tensors, int num_tensors, const Step* step,
                 const Rule* rules) {
  if (step->skips) return;
  const Chunk chunk = find_chunk(ends, tensors, num_tensors);
  const Rule& rule = rules[chunk.tensor->slot];
  const Numbers<wide>& by = numbers_of(rule, wide());
  const Adam<P, G, M, S, L> work = {chunk.array<P>(0),
                                    chunk.array<const G>(1),
                                    chunk.array<M>(2),
                                    chunk.array<S>(3),
                                    IsThere<L>::value ? chunk.array<L>(4) : nullptr,
                                    means_of(by),
                                    by.keep,
                                    (rule.flags & kKeepsAll) != 0,
                                    by.gradient_factor,
                                    by.weight_decay,
                                    by.eps,
                                    by.inverse_correction,
                                    -by.step_size};
  for_each<V>(chunk, work);
}

// ---- LAMB. The rate of a parameter depends on all of it, so there are two passes. The second one
// computes the direction again instead of reading it.

struct Direction {
  wide mean_correction, inverse_correction, eps, decay;

  __device__ __forceinline__ wide of(wide x, wide mean, wide square) const {
    const wide r = mean * mean_correction / fma_of(Sqrt(square), inverse_correction, eps);
    return decay == wide(0) ? r : fma_of(decay, x, r);
  }
};
INLINE Direction direction_of(const Numbers<wide>& by) {
  return {by.mean_correction, by.inverse_correction, by.eps, by.weight_decay};
}

template <typename P, typename G, typename M, typename S>
struct LambMeans {
  const P* parameter;
  const G* gradient;
  M* mean;
  S* square;
  Means means;
  Direction direction;
  wide factor;
  double of_parameter, of_direction;  // sums of squares

  template <int V>
  __device__ __forceinline__ void run(int i) {
    wide x[V], g[V], m[V], squares[V];
    load(x, parameter + i);
    load(g, gradient + i);
    load(m, mean + i);
    load(squares, square + i);
#pragma unroll
    for (int j = 0; j < V; ++j) {
      g[j] *= factor;
      m[j] = means.mean(m[j], g[j]);
      squares[j] = means.square(squares[j], g[j]);
      const double r = direction.of(x[j], m[j], squares[j]);
      of_parameter += double(x[j]) * double(x[j]);
      of_direction += r * r;
    }
    store(mean + i, m);
    store(square + i, squares);
  }
};

// `norms` gets two sums of squares for each chunk: that of the parameter, and that of the
// direction.
template <int V, typename P, typename G, typename M, typename S>
INLINE void lamb_means(const u32* ends, const Tensor* tensors, int num_tensors, const Step* step,
                       const Rule* rules, double* norms) {
  SHARED(memory);
  if (step->skips) return;
  const Chunk chunk = find_chunk(ends, tensors, num_tensors);
  const Numbers<wide>& by = numbers_of(rules[chunk.tensor->slot], wide());
  LambMeans<P, G, M, S> work = {chunk.array<const P>(0),
                                chunk.array<const G>(1),
                                chunk.array<M>(2),
                                chunk.array<S>(3),
                                means_of(by),
                                direction_of(by),
                                by.gradient_factor,
                                0,
                                0};
  for_each<V>(chunk, work);
  double* const shared = reinterpret_cast<double*>(memory);
  const double of_parameter = sum_threads(work.of_parameter, shared);
  const double of_direction = sum_threads(work.of_direction, shared);
  if (threadIdx.x != 0) return;
  norms[i64(blockIdx.x) * 2] = of_parameter;
  norms[i64(blockIdx.x) * 2 + 1] = of_direction;
}

template <typename P, typename M, typename S>
struct LambMove {
  P* parameter;
  const M* mean;
  const S* square;
  Direction direction;
  wide minus_rate;

  template <int V>
  __device__ __forceinline__ void run(int i) const {
    wide x[V], m[V], squares[V];
    load(x, parameter + i);
    load(m, mean + i);
    load(squares, square + i);
#pragma unroll
    for (int j = 0; j < V; ++j) {
      x[j] = fma_of(minus_rate, direction.of(x[j], m[j], squares[j]), x[j]);
    }
    store(parameter + i, x);
  }
};

template <int V, typename P, typename M, typename S>
INLINE void lamb_move(const u32* ends, const Tensor* tensors, int num_tensors, const Step* step,
                      const Rule* rules, const double* rates) {
  if (step->skips) return;
  const Chunk chunk = find_chunk(ends, tensors, num_tensors);
  const LambMove<P, M, S> work = {
      chunk.array<P>(0), chunk.array<const M>(2), chunk.array<const S>(3),
      direction_of(numbers_of(rules[chunk.tensor->slot], wide())), wide(-rates[chunk.index])};
  for_each<V>(chunk, work);
}

// Computes the rate of each tensor, with one block for each.
INLINE void lamb_rate(const u32* ends, const Tensor* tensors, const Step* step, const Rule* rules,
                      const double* norms, double* rates) {
  SHARED(memory);
  if (step->skips) return;
  const u32 first = blockIdx.x == 0 ? 0 : ends[blockIdx.x - 1];
  double of_parameter = 0, of_direction = 0;
  for (u32 chunk = first + threadIdx.x; chunk < ends[blockIdx.x]; chunk += kThreads) {
    of_parameter += norms[i64(chunk) * 2];
    of_direction += norms[i64(chunk) * 2 + 1];
  }
  double* const shared = reinterpret_cast<double*>(memory);
  of_parameter = sqrt(sum_threads(of_parameter, shared));
  of_direction = sqrt(sum_threads(of_direction, shared));
  if (threadIdx.x != 0) return;
  const Rule& rule = rules[tensors[blockIdx.x].slot];
  double ratio = of_parameter == 0 || of_direction == 0 ? 1 : of_parameter / of_direction;
  if (ratio < rule.ratio_min) ratio = rule.ratio_min;
  if (ratio > rule.ratio_max) ratio = rule.ratio_max;
  rates[blockIdx.x] = rule.exact.lr * ratio;
}

// ---- the norm of gradients

template <typename G>
struct SumSquares {
  const G* gradient;
  double sum;

  template <int V>
  __device__ __forceinline__ void run(int i) {
    wide g[V];
    load(g, gradient + i);
#pragma unroll
    for (int j = 0; j < V; ++j) sum = fma(double(g[j]), double(g[j]), sum);
  }
};

// Sums in float64, in which squares of float32 do not overflow. So the sum is finite if all numbers
// are.
template <int V, typename G>
INLINE void sum_squares(const u32* ends, const Tensor* tensors, int num_tensors, double* sums) {
  SHARED(memory);
  const Chunk chunk = find_chunk(ends, tensors, num_tensors);
  SumSquares<G> work = {chunk.array<const G>(1), 0};
  for_each<V>(chunk, work);
  const double sum = sum_threads(work.sum, reinterpret_cast<double*>(memory));
  if (threadIdx.x == 0) sums[blockIdx.x] = sum;
}

// ---- what one block prepares before all others run

INLINE double number_at(u64 address, bool is_double) {
  return is_double ? *reinterpret_cast<const double*>(address)
                   : double(*reinterpret_cast<const float*>(address));
}

INLINE Factor<float> rounded(Factor<double> by) {
  float high = float(by.high);
  if (by.high != 0 && fabs(double(high)) >= fabs(by.high)) {
    high = __uint_as_float(__float_as_uint(high) - 1);
  }
  return {high, float(by.high - double(high))};
}
INLINE Numbers<float> rounded(const Numbers<double>& by) {
  return {float(by.lr),
          float(by.step_size),
          float(by.inverse_correction),
          float(by.mean_correction),
          float(by.beta1_rest),
          float(by.beta2_rest),
          float(by.eps),
          float(by.weight_decay),
          float(by.gradient_factor),
          float(by.momentum),
          float(by.dampening_rest),
          rounded(by.beta2),
          rounded(by.keep)};
}

INLINE Rule rule_of(const Settings& by, double taken, double factor) {
  const double lr = by.lr_at == 0 ? by.lr : number_at(by.lr_at, by.flags & kLrIsDouble);
  const bool corrects = (by.flags & kCorrects) != 0;
  const double rest1 = corrects ? 1 - pow(by.beta1, taken) : 1;
  const double rest2 = corrects ? 1 - pow(by.beta2, taken) : 1;
  const bool decays_parameter = (by.flags & (kDecaysBefore | kDecaysAfter)) != 0;
  const double keep = decays_parameter ? 1 - lr * by.weight_decay : 1;
  Numbers<double> exact;
  exact.lr = lr;
  exact.step_size = lr / rest1;
  exact.mean_correction = 1 / rest1;
  exact.inverse_correction = 1 / sqrt(rest2);
  if (by.flags & kPlainRoot) {
    exact.step_size *= sqrt(rest2);
    exact.inverse_correction = 1;
  }
  // (p - step) keep = keep p - keep step, so the step is multiplied too.
  if (by.flags & kDecaysAfter) exact.step_size *= keep;
  exact.beta1_rest = 1 - by.beta1;
  exact.beta2_rest = 1 - by.beta2;
  exact.eps = by.eps;
  exact.weight_decay = decays_parameter ? 0 : by.weight_decay;
  exact.gradient_factor = by.flags & kMaximizes ? -factor : factor;
  exact.momentum = by.momentum;
  exact.dampening_rest = 1 - by.dampening;
  exact.beta2 = {by.beta2, 0};
  exact.keep = {keep, 0};
  const u32 flags = (by.flags & kNesterov ? kIsNesterov : 0) | (keep == 1 ? kKeepsAll : 0);
  return {exact, rounded(exact), flags, by.ratio_min, by.ratio_max};
}

// What to do with all gradients. Unused addresses are 0.
struct Gradients {
  double scale, max_norm;  // gradients are divided by `scale`; max_norm < 0: no limit
  const float* scale_at;   // where the scale is read
  const float* found_inf;  // a number that is not 0 if the step is to be skipped
  const double* sums;      // partial sums of squares; if given, all must be finite
  i64 num_sums;
  double* norm;  // result: the norm of the unscaled gradients
  u8* skipped;   // result: whether the step is skipped
};

// Prepares settings from number `first_settings` on, and slots from number `first_slot` on.
INLINE void begin(Step* step, Rule* rules, const Slot* slots, int first_slot, int last_slot,
                  int first_settings, const Gradients& gradients, const SettingsList& settings) {
  SHARED(memory);
  const double scale = gradients.scale_at ? double(*gradients.scale_at) : gradients.scale;
  double factor = 1 / scale;
  bool skips = gradients.found_inf && *gradients.found_inf != 0;
  if (gradients.sums) {
    double sum = 0;
    for (i64 i = threadIdx.x; i < gradients.num_sums; i += kThreads) sum += gradients.sums[i];
    sum = sum_threads(sum, reinterpret_cast<double*>(memory));
    const double norm = sqrt(sum) / scale;
    if (!(norm - norm == 0)) skips = true;
    const double limit = gradients.max_norm / (norm + 1e-6);  // as in clip_grad_norm_
    if (gradients.max_norm >= 0 && limit < 1) factor *= limit;
    if (gradients.norm && threadIdx.x == 0) *gradients.norm = norm;
  }
  if (threadIdx.x == 0) {
    step->skips = skips;
    if (gradients.skipped) *gradients.skipped = skips;
  }
  for (int i = first_slot + int(threadIdx.x); i < last_slot; i += kThreads) {
    const Settings& by = settings.at[slots[i].settings - first_settings];
    double taken = by.taken;
    if (slots[i].taken != 0) {
      taken = number_at(slots[i].taken, slots[i].taken_is_double) + 1;
      if (!skips && slots[i].taken_is_double) *reinterpret_cast<double*>(slots[i].taken) = taken;
      if (!skips && !slots[i].taken_is_double) {
        *reinterpret_cast<float*>(slots[i].taken) = float(taken);
      }
    }
    rules[i] = rule_of(by, taken, factor);
  }
}
