// What the text of every kernel begins with. It includes no header of CUDA: these lines are all
// that NVRTC parses, in a millisecond. In front of them stand two types:
//   wide     in which the kernel computes, float or double
//   index_t  of rows, columns and offsets, int or long long
typedef long long i64;
typedef int i32;
typedef short i16;
typedef signed char i8;
typedef unsigned char u8;
typedef unsigned short u16;
typedef unsigned int u32;
typedef unsigned long long u64;

#define INLINE static __device__ __forceinline__

// Division of a number that is not negative. `by` is factor_and_shift(size) of csrc/cuda/text.h: a
// division by `size` would take about 20 instructions. Numbers of 64 bits are divided all the same.
INLINE i32 quotient(i32 number, i32 /*size*/, u64 by) {
  return i32((__umulhi(u32(number), u32(by)) + u32(number)) >> u32(by >> 32));
}
INLINE i64 quotient(i64 number, i64 size, u64 /*by*/) { return number / size; }
INLINE i32 remainder(i32 number, i32 size, u64 by) {
  return number - quotient(number, size, by) * size;
}
INLINE i64 remainder(i64 number, i64 size, u64 /*by*/) { return number % size; }

// ---- elements of memory

struct bf16 {
  u16 bits;
};
struct f16 {
  u16 bits;
};
struct boolean {
  u8 byte;
};

#ifdef EMULATED_CUDA  // the emulator of the tests, which has no PTX
#define SHARED(name) EMULATED_SHARED(name)
#define ASSUME_GLOBAL(address)
INLINE index_t anew(index_t x) { return x; }
template <typename T, int V>
INLINE T element(const T (&pack)[V], int i) {
  return pack[i];
}
template <typename P>
INLINE void store_at_once(void* to, const P& pack) {
  *reinterpret_cast<P*>(to) = pack;
}
INLINE u16 bits_of_bf16(float x) {
  const u32 bits = __float_as_uint(x);
  return x != x ? u16(0x7FC0) : u16((bits + 0x7FFFu + (bits >> 16 & 1u)) >> 16);
}
INLINE float float_of_f16(u16 bits) {
  _Float16 x;
  memcpy(&x, &bits, sizeof(x));
  return x;
}
INLINE u16 bits_of_f16(float x) {
  const _Float16 narrow = static_cast<_Float16>(x);
  u16 bits;
  memcpy(&bits, &narrow, sizeof(bits));
  return bits;
}
INLINE float fast_reciprocal(float x) {
  const float exact = 1.0f / x;
  return fabsf(exact) < 1.17549435e-38f ? 0.0f : exact;
}
#else
#define SHARED(name) extern __shared__ __align__(16) char name[]
// Marks an address that was read from a table as global, so that accesses are compiled as for
// addresses that are parameters.
#define ASSUME_GLOBAL(address) __builtin_assume(__isGlobal(address))
// An integer of which the compiler does not know that it stays the same in a loop. It would keep
// what is computed from it in registers, one for each element of a thread.
INLINE i32 anew(i32 x) {
  asm volatile("" : "+r"(x));
  return x;
}
INLINE i64 anew(i64 x) {
  asm volatile("" : "+l"(x));
  return x;
}
// Element i of a pack. Short ones are taken out of words, or the compiler would keep each in a
// register of its own where a pack may have come in parts.
template <typename T, int V>
INLINE T element(const T (&pack)[V], int i) {
  constexpr int kInWord = sizeof(T) < 4 ? 4 / sizeof(T) : 1;
  if (kInWord == 1 || V % kInWord != 0) return pack[i];
  const u32 word = reinterpret_cast<const u32*>(pack)[i / kInWord] >> (i % kInWord * 8 * sizeof(T));
  return *reinterpret_cast<const T*>(&word);
}
// A store that the compiler does not take apart, although it could join the elements with those that
// are stored elsewhere for parts of a vector.
template <typename P>
INLINE void store_at_once(void* to, const P& pack) {
  if constexpr (sizeof(P) < 16) {
    *reinterpret_cast<P*>(to) = pack;
  } else {
    const u32* const words = reinterpret_cast<const u32*>(&pack);
#pragma unroll
    for (int i = 0; i < int(sizeof(P)) / 4; i += 4) {
      asm volatile("st.global.v4.b32 [%0], {%1, %2, %3, %4};" ::"l"(
                       __cvta_generic_to_global(static_cast<u32*>(to) + i)),
                   "r"(words[i]), "r"(words[i + 1]), "r"(words[i + 2]), "r"(words[i + 3])
                   : "memory");
    }
  }
}
INLINE u16 bits_of_bf16(float x) {
  u16 bits;
  asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(bits) : "f"(x));
  return bits;
}
INLINE float float_of_f16(u16 bits) {
  float x;
  asm("cvt.f32.f16 %0, %1;" : "=f"(x) : "h"(bits));
  return x;
}
INLINE u16 bits_of_f16(float x) {
  u16 bits;
  asm("cvt.rn.f16.f32 %0, %1;" : "=h"(bits) : "f"(x));
  return bits;
}
// One instruction, with an error of a unit in the last place. What would be subnormal is 0.
INLINE float fast_reciprocal(float x) {
  float reciprocal;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(reciprocal) : "f"(x));
  return reciprocal;
}
#endif

INLINE float float_of_bf16(u16 bits) { return __uint_as_float(u32(bits) << 16); }

INLINE wide widen(float x) { return wide(x); }
INLINE wide widen(double x) { return wide(x); }
INLINE wide widen(bf16 x) { return wide(float_of_bf16(x.bits)); }
INLINE wide widen(f16 x) { return wide(float_of_f16(x.bits)); }
INLINE wide widen(boolean x) { return wide(x.byte != 0); }
INLINE wide widen(u8 x) { return wide(x); }
INLINE wide widen(i8 x) { return wide(x); }
INLINE wide widen(i16 x) { return wide(x); }
INLINE wide widen(i32 x) { return wide(x); }
INLINE wide widen(i64 x) { return wide(x); }

template <typename T>
struct Narrow {
  INLINE T of(wide x) { return static_cast<T>(x); }
};
template <>
struct Narrow<bf16> {
  INLINE bf16 of(wide x) { return {bits_of_bf16(static_cast<float>(x))}; }
};
template <>
struct Narrow<f16> {
  INLINE f16 of(wide x) { return {bits_of_f16(static_cast<float>(x))}; }
};
template <>
struct Narrow<boolean> {
  INLINE boolean of(wide x) { return {u8(x != wide(0))}; }
};
template <typename T>
INLINE T narrow(wide x) {
  return Narrow<T>::of(x);
}

// V elements that are read or written at once, with 16 bytes for each access. In registers they stay
// as they are in memory, so that short floats take half as many.
template <typename T, int V>
struct __align__(sizeof(T) * V < 16 ? sizeof(T) * V : 16) Pack {
  T at[V];
  __device__ __forceinline__ wide operator[](int i) const { return widen(element(at, i)); }
};
template <int V, typename T>
INLINE void load(Pack<T, V>& x, const T* from) {
  x = *reinterpret_cast<const Pack<T, V>*>(from);
}
template <int V, typename T>
INLINE void store(T* to, const Pack<T, V>& x) {
  *reinterpret_cast<Pack<T, V>*>(to) = x;
}
// The same at the end of a run, where fewer than V elements may be left.
template <int V, typename T>
INLINE void load(Pack<T, V>& x, const T* from, index_t left) {
  if (left >= V) return load(x, from);
#pragma unroll
  for (int i = 0; i < V; ++i) x.at[i] = i < left ? from[i] : T{};
}
template <int V, typename T>
INLINE void store(T* to, const Pack<T, V>& x, index_t left) {
  if (left >= V) return store(to, x);
#pragma unroll
  for (int i = 0; i < V; ++i) {
    if (i < left) to[i] = x.at[i];
  }
}
INLINE bool is_within(i32 place, i32 end) { return u32(place) < u32(end); }
INLINE bool is_within(i64 place, i64 end) { return u64(place) < u64(end); }
// The same where a row may also begin within the vector, whose first element is `column`.
template <int V, typename T>
INLINE void load(Pack<T, V>& x, const T* from, index_t column, index_t columns) {
  if (column >= 0 && column <= columns - V) return load(x, from);
#pragma unroll
  for (int i = 0; i < V; ++i) x.at[i] = is_within(column + i, columns) ? from[i] : T{};
}
template <int V, typename T>
INLINE void store(T* to, const Pack<T, V>& x, index_t column, index_t columns) {
  if (column >= 0 && column <= columns - V) return store_at_once(to, x);
#pragma unroll
  for (int i = 0; i < V; ++i) {
    if (is_within(column + i, columns)) to[i] = x.at[i];
  }
}
// Moves words to the front, by at most 2 * STEP - 1. Constant indices keep them in registers.
template <int STEP, int N>
INLINE void skip_words(u32 (&words)[N], int skipped) {
#pragma unroll
  for (int i = 0; i + STEP < N; ++i) {
    const u32 other = words[i + STEP];
    words[i] = (skipped & STEP) != 0 ? other : words[i];
  }
  if constexpr (STEP > 1) skip_words<STEP / 2>(words, skipped);
}
// The same where the run begins `before` elements into a vector: elements are put together from two
// vectors that lie in the run.
template <int V, typename T>
INLINE void load_across(Pack<T, V>& x, const T* from, int before, index_t left) {
  constexpr int kWords = int(sizeof(x)) / 4, kBits = int(sizeof(T)) * 8;
  // Two bytes, beside numbers of double, are no word.
  if (kWords == 0 || left < (before == 0 ? V : 2 * V - before)) {
#pragma unroll
    for (int i = 0; i < V; ++i) x.at[i] = i < left ? from[i] : T{};
    return;
  }
  if constexpr (kWords > 0) {
    Pack<T, V> packs[2];
    load(packs[0], from - before);
    load(packs[1], from - before + (before == 0 ? 0 : V));
    u32 words[2 * kWords + 1];
    memcpy(words, packs, sizeof(packs));
    words[2 * kWords] = 0;
    if constexpr (kWords > 1) skip_words<kWords / 2>(words, before * kBits / 32);
#pragma unroll
    for (int i = 0; i < kWords; ++i) {
      words[i] = __funnelshift_r(words[i], words[i + 1], u32(before * kBits % 32));
    }
    memcpy(&x, words, sizeof(x));
  }
}
// Elements that are not contiguous, or not aligned for one access.
template <int V, typename T, typename At>
INLINE void load_each(Pack<T, V>& x, const T* from, At at) {
#pragma unroll
  for (int i = 0; i < V; ++i) x.at[i] = from[at(i)];
}
template <int V, typename T, typename At>
INLINE void store_each(T* to, const Pack<T, V>& x, At at) {
#pragma unroll
  for (int i = 0; i < V; ++i) to[at(i)] = x.at[i];
}
// Numbers to compute with, from elements and back.
template <int V, typename T>
INLINE void load(wide (&x)[V], const T* from) {
  Pack<T, V> pack;
  load(pack, from);
#pragma unroll
  for (int i = 0; i < V; ++i) x[i] = pack[i];
}
template <int V, typename T>
INLINE void store(T* to, const wide (&x)[V]) {
  Pack<T, V> pack;
#pragma unroll
  for (int i = 0; i < V; ++i) pack.at[i] = narrow<T>(x[i]);
  store(to, pack);
}

// ---- the operations of csrc/ops/words.h

INLINE wide infinity() { return wide(__uint_as_float(0x7F800000u)); }
INLINE wide not_a_number() { return wide(__uint_as_float(0x7FC00000u)); }

#define MATH(name)                                         \
  INLINE float name##_of(float x) { return name##f(x); }   \
  INLINE double name##_of(double x) { return name(x); }
MATH(exp)
MATH(log)
MATH(log1p)
MATH(sqrt)
MATH(tanh)
MATH(erf)
MATH(floor)
MATH(ceil)
MATH(rint)
MATH(trunc)
MATH(fabs)
INLINE float pow_of(float x, float y) { return powf(x, y); }
INLINE double pow_of(double x, double y) { return pow(x, y); }

// An angle as a number of quarter turns, and the rest, which is at most an eighth of a turn.
struct Angle {
  u32 quarters;
  float rest;
};
// For large numbers. Only some bits of 2 / pi matter: those whose products with the 24 bits of x
// are less than four quarters.
INLINE Angle angle_of_large(float x) {
  const u32 two_over_pi[] = {0,           0xA2F9836Eu, 0x4E441529u, 0xFC2757D1u,
                             0xF534DDC0u, 0xDB629599u, 0x3C439041u, 0xFE5163ABu};
  const u32 bits = __float_as_uint(x), exponent = bits >> 23 & 0xFF;
  const u64 digits = (bits & 0x7FFFFFu) | 0x800000u;
  const u32 first = exponent - 120, shift = 32 - first % 32;
  u64 words[] = {0, 0, 0, 0};
#pragma unroll
  for (int i = 0; i < 5; ++i) {  // constant indices keep the array in registers
    if (first / 32 == i) {
      for (int j = 0; j < 4; ++j) words[j] = two_over_pi[i + j];
    }
  }
  const u32 high = u32((words[0] << 32 | words[1]) >> shift);
  const u32 middle = u32((words[1] << 32 | words[2]) >> shift);
  const u32 low = u32((words[2] << 32 | words[3]) >> shift);
  const u64 product = (digits * high << 32) + digits * middle + (digits * low >> 32);
  const u32 quarters = u32((product + (u64(1) << 61)) >> 62);
  const i64 rest = static_cast<i64>(product - (u64(quarters) << 62));
  const float size = exponent == 0xFF ? x - x : static_cast<float>(rest) * 3.4061215800865545e-19f;
  return x < 0 ? Angle{0u - quarters, -size} : Angle{quarters, size};
}
INLINE Angle angle_of(float x) {
  if (!(fabsf(x) < 131072.0f)) return angle_of_large(x);
  // pi / 2 in three parts. Subtracting a multiple of the first one is exact.
  const float quarters = rintf(x * 0.63661977236758134308f);
  if (quarters == 0) return {0, x};
  float rest = fmaf(quarters, -1.57079637050628662109f, x);
  rest = fmaf(quarters, 4.37113900018624283e-8f, rest);
  rest = fmaf(quarters, 1.71512451306240634e-15f, rest);
  return {static_cast<u32>(static_cast<i32>(quarters)), rest};
}
INLINE float sin_or_cos(Angle angle) {
  const float x = angle.rest, square = x * x;
  float sine = fmaf(-1.95030691e-4f, square, 8.33207089e-3f);
  sine = x * fmaf(fmaf(sine, square, -1.66666538e-1f), square, 1.0f);
  float cosine = fmaf(2.44191961e-5f, square, -1.38871942e-3f);
  cosine = fmaf(fmaf(fmaf(cosine, square, 4.16666418e-2f), square, -0.5f), square, 1.0f);
  const float size = angle.quarters % 2 == 0 ? sine : cosine;
  return angle.quarters / 2 % 2 == 0 ? size : -size;
}
// CUDA's own functions use local memory for large numbers.
INLINE float sin_of(float x) { return sin_or_cos(angle_of(x)); }
INLINE float cos_of(float x) {
  const Angle angle = angle_of(x);
  return sin_or_cos({angle.quarters + 1, angle.rest});
}
INLINE double sin_of(double x) { return sin(x); }
INLINE double cos_of(double x) { return cos(x); }

INLINE wide Copy(wide x) { return x; }
INLINE wide Neg(wide x) { return -x; }
INLINE wide Abs(wide x) { return fabs_of(x); }
INLINE wide Exp(wide x) { return exp_of(x); }
INLINE wide Log(wide x) { return log_of(x); }
INLINE wide Log1p(wide x) { return log1p_of(x); }
INLINE wide Sqrt(wide x) { return sqrt_of(x); }
INLINE wide Reciprocal(wide x) { return wide(1) / x; }
INLINE wide Tanh(wide x) { return tanh_of(x); }
INLINE wide Erf(wide x) { return erf_of(x); }
// A quotient with an error of two units in the last place, in a third of the instructions. The divisor
// is at least 1. A quarter of it is at most 2^126, above which its reciprocal would be taken as 0.
INLINE float fast_quotient(float x, float y) {
  return x * (0.25f * fast_reciprocal(0.25f * y));
}
INLINE double fast_quotient(double x, double y) { return x / y; }
INLINE wide Sigmoid(wide x) { return fast_quotient(wide(1), wide(1) + exp_of(-x)); }
// NaN and -0.0 stay, as in PyTorch.
INLINE wide Relu(wide x) { return x < wide(0) ? wide(0) : x; }
INLINE wide Floor(wide x) { return floor_of(x); }
INLINE wide Ceil(wide x) { return ceil_of(x); }
INLINE wide Round(wide x) { return rint_of(x); }
INLINE wide Trunc(wide x) { return trunc_of(x); }
INLINE wide Sign(wide x) { return wide((x > wide(0)) - (x < wide(0))); }
INLINE wide Sin(wide x) { return sin_of(x); }
INLINE wide Cos(wide x) { return cos_of(x); }
INLINE wide Not(wide x) { return wide(x == wide(0)); }
INLINE wide IsNan(wide x) { return wide(x != x); }
INLINE wide ToBool(wide x) { return wide(x != wide(0)); }
INLINE wide ToBFloat16(wide x) { return widen(narrow<bf16>(x)); }
INLINE wide ToHalf(wide x) { return widen(narrow<f16>(x)); }

INLINE wide normal_cdf(wide x) {
  return wide(0.5) * (wide(1) + erf_of(x * wide(0.70710678118654752440)));
}
INLINE wide gelu_tanh_inner(wide x) {
  return wide(0.79788456080286535588) * (x + wide(0.044715) * x * x * x);
}
INLINE wide Gelu(wide x) { return x * normal_cdf(x); }
INLINE wide GeluTanh(wide x) { return wide(0.5) * x * (wide(1) + tanh_of(gelu_tanh_inner(x))); }
INLINE wide Silu(wide x) { return fast_quotient(x, wide(1) + exp_of(-x)); }

INLINE wide Add(wide x, wide y) { return x + y; }
INLINE wide Sub(wide x, wide y) { return x - y; }
INLINE wide Mul(wide x, wide y) { return x * y; }
INLINE wide Div(wide x, wide y) { return x / y; }
INLINE wide Pow(wide x, wide y) { return pow_of(x, y); }
// NaN stays NaN.
INLINE wide Max(wide x, wide y) { return x > y || x != x ? x : y; }
INLINE wide Min(wide x, wide y) { return x < y || x != x ? x : y; }
INLINE wide HardSwish(wide x) {
  return x * Min(Max(x + wide(3), wide(0)), wide(6)) * wide(1.0 / 6);
}
INLINE wide Equal(wide x, wide y) { return wide(x == y); }
INLINE wide Less(wide x, wide y) { return wide(x < y); }
INLINE wide LessOrEqual(wide x, wide y) { return wide(x <= y); }
INLINE wide Greater(wide x, wide y) { return wide(x > y); }
INLINE wide GreaterOrEqual(wide x, wide y) { return wide(x >= y); }
INLINE wide And(wide x, wide y) { return wide(x != wide(0) && y != wide(0)); }
INLINE wide Or(wide x, wide y) { return wide(x != wide(0) || y != wide(0)); }
INLINE wide Xor(wide x, wide y) { return wide((x != wide(0)) != (y != wide(0))); }

INLINE wide GeluGrad(wide gradient, wide x) {
  const wide density = wide(0.39894228040143267794) * exp_of(wide(-0.5) * x * x);
  return gradient * (normal_cdf(x) + x * density);
}
INLINE wide GeluTanhGrad(wide gradient, wide x) {
  const wide tanh = tanh_of(gelu_tanh_inner(x));
  const wide slope = wide(0.79788456080286535588) * (wide(1) + wide(3 * 0.044715) * x * x);
  return gradient * (wide(0.5) * (wide(1) + tanh) +
                     wide(0.5) * x * (wide(1) - tanh * tanh) * slope);
}
INLINE wide SiluGrad(wide gradient, wide x) {
  const wide sigmoid = Sigmoid(x);
  return gradient * sigmoid * (wide(1) + x * (wide(1) - sigmoid));
}
// If x is NaN the gradient passes, as in PyTorch.
INLINE wide HardSwishGrad(wide gradient, wide x) {
  if (x <= wide(-3)) return wide(0);
  return x < wide(3) ? gradient * (x * wide(1.0 / 3) + wide(0.5)) : gradient;
}
INLINE wide TanhGrad(wide gradient, wide result) {
  return gradient * (wide(1) - result * result);
}
INLINE wide SigmoidGrad(wide gradient, wide result) {
  return gradient * (wide(1) - result) * result;
}
INLINE wide LeakyReluGrad(wide gradient, wide x, wide slope) {
  return gradient * (x > wide(0) ? wide(1) : slope);
}
INLINE wide LeakyRelu(wide x, wide slope) { return LeakyReluGrad(x, x, slope); }
// If x is NaN the gradient passes, as in PyTorch.
INLINE wide ThresholdGrad(wide gradient, wide x, wide threshold) {
  return x <= threshold ? wide(0) : gradient;
}
INLINE wide Where(wide condition, wide x, wide y) { return condition != wide(0) ? x : y; }
INLINE wide MulAdd(wide x, wide y, wide z) { return x * y + z; }

// ---- reductions. Their order depends only on sizes, so that all GPUs compute the same bits.

struct Sum {
  INLINE wide start() { return wide(0); }
  INLINE wide of(wide x, wide y) { return x + y; }
};
struct Largest {
  INLINE wide start() { return -infinity(); }
  INLINE wide of(wide x, wide y) { return Max(x, y); }
};
struct Smallest {
  INLINE wide start() { return infinity(); }
  INLINE wide of(wide x, wide y) { return Min(x, y); }
};

// Reduces over TX threads along a row; TX is a power of two. Each of them gets the result. All
// threads of the block take part. `shared` has one number for each 32 of them.
template <typename Op, int TX>
INLINE wide reduce_row(wide x, wide* shared) {
#pragma unroll
  for (int bits = (TX < 32 ? TX : 32) / 2; bits > 0; bits /= 2) {
    x = Op::of(x, __shfl_xor_sync(0xFFFFFFFFu, x, bits));
  }
  if (TX > 32) {
    wide* const of_row = shared + threadIdx.y * (TX / 32);
    // All threads have read the numbers of the previous reduction.
    __syncthreads();
    if (threadIdx.x % 32 == 0) of_row[threadIdx.x / 32] = x;
    __syncthreads();
    x = of_row[0];
#pragma unroll
    for (int warp = 1; warp < TX / 32; ++warp) x = Op::of(x, of_row[warp]);
  }
  return x;
}

// Combines what the blocks of a row that is split have found for their strips, in a fixed order.
template <typename Op, int TX>
INLINE wide reduce_parts(const wide* parts, index_t count, wide* shared) {
  wide x = Op::start();
  for (index_t i = threadIdx.x; i < count; i += TX) x = Op::of(x, parts[i]);
  return reduce_row<Op, TX>(x, shared);
}

// Adds numbers to the largest one of a row and to the sum of the exponentials of all, less the
// largest. So one pass finds both numbers of a softmax: Milakov and Gimelshein, "Online normalizer
// calculation for softmax", 2018.
template <int N>
INLINE void add_exponentials(wide& largest, wide& sum, const wide (&x)[N]) {
  wide now = largest;
#pragma unroll
  for (int i = 0; i < N; ++i) now = Max(now, x[i]);
  // As long as all numbers are -infinity they add nothing. If the whole row is, its sum is NaN,
  // which the difference of two infinities gives in the end.
  if (now == -infinity()) return;
  if (now != largest) sum *= Exp(Sub(largest, now));
#pragma unroll
  for (int i = 0; i < N; ++i) sum += Exp(Sub(x[i], now));
  largest = now;
}

// Joins what TX threads along a row have found. See reduce_row.
template <int TX>
INLINE void join_exponentials(wide& largest, wide& sum, wide* shared) {
  const wide of_thread = largest;
  largest = reduce_row<Largest, TX>(largest, shared);
  sum = reduce_row<Sum, TX>(sum * Exp(Sub(of_thread, largest)), shared);
}

// Sums over all threads of a block; the first of them gets the sum.
template <int TX, int TY>
INLINE wide sum_block(wide x, wide* shared) {
  x = reduce_row<Sum, TX>(x, shared);
  if (TY > 1) {
    __syncthreads();
    if (threadIdx.x == 0) shared[threadIdx.y] = x;
    __syncthreads();
    x = shared[0];
    for (int y = 1; y < TY; ++y) x += shared[y];
  }
  return x;
}

// Sums over the TY lines of threads of a block, which have E * V columns each, and writes the
// result to a line of partial sums, which is aligned to vectors and has whole ones. `shared` has V
// numbers for each thread.
template <int TX, int TY, int E, int V>
INLINE void write_partial_sums(wide* to, wide (&sums)[E][V], index_t first_column, index_t columns,
                               wide* shared) {
#pragma unroll
  for (int e = 0; e < E; ++e) {
    if (TY > 1) {
      __syncthreads();
#pragma unroll
      for (int i = 0; i < V; ++i) shared[(threadIdx.y * V + i) * TX + threadIdx.x] = sums[e][i];
      __syncthreads();
      if (threadIdx.y == 0) {
        for (int y = 1; y < TY; ++y) {
#pragma unroll
          for (int i = 0; i < V; ++i) sums[e][i] += shared[(y * V + i) * TX + threadIdx.x];
        }
      }
    }
    const index_t column = first_column + index_t(e * TX + threadIdx.x) * V;
    if (threadIdx.y == 0 && column < columns) store(to + column, sums[e]);
  }
}

// Adds `count` lines of partial sums, which are `stride` numbers apart, in a fixed order. A block
// of 32 x 8 threads does this for 32 columns from `column` on; the first line of threads gets the
// sums. `shared` has 256 numbers.
INLINE wide add_lines(const wide* parts, i64 count, i64 stride, index_t column, index_t columns,
                      wide* shared) {
  column += threadIdx.x;
  wide sum = wide(0);
  if (column < columns) {
#pragma unroll 4
    for (i64 line = threadIdx.y; line < count; line += 8) sum += parts[line * stride + column];
  }
  shared[threadIdx.y * 32 + threadIdx.x] = sum;
  __syncthreads();
  if (threadIdx.y == 0) {
    for (int y = 1; y < 8; ++y) sum += shared[y * 32 + threadIdx.x];
  }
  return sum;
}

// The same for a single column, with all threads of the block.
template <typename T>
INLINE void finish_one(T* out, const wide* parts, i64 count, i64 stride, wide* shared) {
  wide sum = wide(0);
#pragma unroll 4
  for (i64 line = threadIdx.y * 32 + threadIdx.x; line < count; line += 256) {
    sum += parts[line * stride];
  }
  sum = sum_block<32, 8>(sum, shared);
  if (threadIdx.x == 0 && threadIdx.y == 0) *out = narrow<T>(sum);
}

// ---- labels and rows of tables. One out of bounds gives NaN and stores a fault for the host.

enum { kIgnored = -1, kBad = -2 };
enum { kBadLabel = 1, kBadId = 2 };

// The column that a label selects; kIgnored or kBad.
INLINE index_t column_of(wide label, index_t columns, u32* fault) {
  if (label > wide(-1) && label < wide(columns)) return index_t(label);
  *fault = kBadLabel;
  return kBad;
}
INLINE index_t column_of(wide label, index_t columns, u32* fault, wide ignored) {
  return label == ignored ? index_t(kIgnored) : column_of(label, columns, fault);
}
// The row of a table that an id selects, or kBad.
INLINE index_t row_of(i64 id, i64 rows, u32* fault) {
  if (id >= 0 && id < rows) return index_t(id);
  *fault = kBadId;
  return kBad;
}

// ---- Philox 4x32 with 10 rounds. Element e of a stream is word e % 4 of counter e / 4, as on the
// CPU (csrc/cpu/kernels_loops.h).

struct Words {
  u32 at[4];
};
INLINE Words philox(u64 seed, u64 stream, u64 counter) {
  u32 x0 = u32(counter), x1 = u32(counter >> 32), x2 = u32(stream), x3 = u32(stream >> 32);
  u32 key0 = u32(seed), key1 = u32(seed >> 32);
#pragma unroll
  for (int round = 0; round < 10; ++round) {
    const u32 a_high = __umulhi(0xD2511F53u, x0), a_low = 0xD2511F53u * x0;
    const u32 b_high = __umulhi(0xCD9E8D57u, x2), b_low = 0xCD9E8D57u * x2;
    x0 = b_high ^ x1 ^ key0;
    x1 = b_low;
    x2 = a_high ^ x3 ^ key1;
    x3 = a_low;
    key0 += 0x9E3779B9u;
    key1 += 0xBB67AE85u;
  }
  return {{x0, x1, x2, x3}};
}
// 1 for elements whose random number is below the limit, else 0. V is a power of two, and divides
// `element`, since elements are counted as they lie in dense rows.
template <int V>
INLINE void draw(wide (&x)[V], u64 seed, u64 stream, u64 element, u32 limit) {
#pragma unroll
  for (int i = 0; i < V; i += 4) {
    const Words words = philox(seed, stream, element / 4 + i / 4);
#pragma unroll
    for (int j = 0; j < 4 && i + j < V; ++j) {
      const u32 at = V < 4 ? u32(element % 4) + j : j;
      const u32 low = at % 2 == 0 ? words.at[0] : words.at[1];
      const u32 high = at % 2 == 0 ? words.at[2] : words.at[3];
      x[i + j] = wide((at < 2 ? low : high) < limit);
    }
  }
}
INLINE wide draw(u64 seed, u64 stream, u64 element, u32 limit) {
  wide x[1];
  draw(x, seed, stream, element, limit);
  return x[0];
}
