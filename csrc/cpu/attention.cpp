// dropout(softmax(query key^T * scale + mask)) value, and its gradients, for the heads of a batch.
//
// A thread takes one head of keys after the other, and of the queries that look at it a block at a
// time, whose scores stay in the cache. Backward computes them again from the logarithms of the
// sums (Dao et al., "FlashAttention", 2022). Heads are independent and each is computed in one
// order: results do not depend on the number of threads. Tensors of bfloat16 and float16 are worked
// on in float32, and only results are rounded.
//
// Which probabilities a dropout keeps is read from a tensor of truth values, or drawn where it is
// needed: from a seed and the place of the score, so that both halves draw the same.
//
// Lists of rows may say where the queries and the keys of each sequence end. What stands behind is
// neither read nor written, and no other number or place depends on it.
//
// Heads are small products, for which one packed micro-kernel is faster than calls of a library. An
// added mask may have a gradient, such as T5's and Swin's bias for relative positions. That is the
// gradient of the scores, which the backward kernel then writes as well, so that no probabilities
// are saved. Results are planned as those of regions are, so that a transformer's step adopts no
// memory.
#include "base/error.h"
#include "base/rounding.h"
#include "cpu/panels.h"
#include "cpu/parallel.h"
#include "cpu/program.h"
#include "cpu/rows.h"
#include "cpu/thread_memory.h"

#include <c10/util/Exception.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <type_traits>

namespace torch_ort::cpu {

namespace {

constexpr int64_t kWorkPerThread = 1 << 17;  // in multiplications

// Finds the matrix of each head in memory. A mask may have fewer dims than the heads, and
// broadcasts.
class Heads {
 public:
  Heads() = default;
  Heads(const Layout& layout, const std::vector<int64_t>& sizes) : dtype_(layout.dtype) {
    const size_t missing = sizes.size() - layout.sizes.size();
    ORT_CHECK(layout.sizes.size() <= sizes.size(), "Attention: got ", layout.sizes.size(),
              " dims, want ", sizes.size(), " at most");
    for (size_t i = 0; i < layout.sizes.size(); ++i) {
      const int64_t size = layout.sizes[i];
      ORT_CHECK(size == 1 || size == sizes[missing + i], "Attention: size of dim ", i, ": got ",
                size, ", want ", sizes[missing + i]);
      if (size != 1) strides_[missing + i] = layout.strides[i];
    }
  }

  int64_t start(int64_t batch, int64_t head) const {
    return batch * strides_[0] + head * strides_[1];
  }
  int64_t row() const { return strides_[2]; }
  int64_t column() const { return strides_[3]; }
  ir::DType dtype() const { return dtype_; }

 private:
  ir::DType dtype_ = ir::DType::kUndefined;
  int64_t strides_[4] = {0, 0, 0, 0};
};

// The matrix of one head in memory. `Void` is const for a matrix that is read.
template <typename Void>
struct Matrix {
  using Byte = std::conditional_t<std::is_const_v<Void>, const char, char>;
  Byte* data;
  ir::DType dtype;
  int64_t row, column;
  int64_t row_bytes = 0;

  Matrix(Void* base, const Heads& heads, int64_t batch, int64_t head)
      : data(static_cast<Byte*>(base)),
        dtype(heads.dtype()),
        row(heads.row()),
        column(heads.column()) {
    if (base == nullptr) return;
    row_bytes = row * ir::size_bytes(dtype);
    data += heads.start(batch, head) * ir::size_bytes(dtype);
  }
  Void* at(int64_t i) const { return data + i * row_bytes; }
};

// Numbers in the type that the kernel computes in, with their strides.
template <typename T>
struct Numbers {
  const T* data;
  int64_t row, column;
};

// The columns of a right factor in `num` panels of `width` numbers (PanelProduct in kernels.h).
struct Panels {
  int64_t width = 0, num = 0;

  Panels(int64_t columns, int64_t wide) {
    const int64_t half = wide / 2;
    width = round_up(columns, half) < round_up(columns, wide) ? half : wide;
    num = round_up(columns, width) / width;
  }
  int64_t columns() const { return width * num; }
};

template <typename T>
class Attention : public Kernel {
 protected:
  // `query` is the number of the input with the queries; keys and values follow it. `optional` is
  // the number of the mask, if there is one. A boolean mask or a seed for dropout follows it, and
  // lists of rows come last.
  Attention(const ir::Node& node, const std::vector<Layout>& inputs, int query, int optional,
            Isa isa)
      : kernels_(kernels<T>(isa)),
        batches_(size_of(inputs.at(query), 0)),
        heads_(size_of(inputs[query], 1)),
        key_heads_(size_of(inputs.at(query + 1), 1)),
        queries_(size_of(inputs[query], 2)),
        keys_(size_of(inputs[query + 1], 2)),
        features_(size_of(inputs[query], 3)),
        scale_(static_cast<T>(
            ir::float_attr(node.attrs, "scale", 1 / std::sqrt(static_cast<double>(features_))))),
        is_causal_(ir::int_attr(node.attrs, "is_causal", 0) != 0),
        unseen_is_nan_(ir::int_attr(node.attrs, "unseen_is_nan", 0) != 0),
        fill_(static_cast<T>(ir::float_attr(node.attrs, "fill", 0))),
        has_rows_(ir::int_attr(node.attrs, "has_rows", 0) != 0),
        drops_(ir::has_attr(node.attrs, "keep")),
        draws_(ir::has_attr(node.attrs, "stream")),
        keep_(ir::float_attr(node.attrs, "keep", 1)),
        stream_(static_cast<uint64_t>(ir::int_attr(node.attrs, "stream", 0))),
        score_panels_(keys_, kernels_.panel_width),
        feature_panels_(features_, kernels_.panel_width),
        score_row_(spread_row<T>(score_panels_.columns())),
        block_(keys_ < 1024 ? 48 : 24) {
    ORT_CHECK(key_heads_ > 0 ? heads_ % key_heads_ == 0 : heads_ == 0, "Attention: got ", heads_,
              " heads of queries, want a multiple of the ", key_heads_, " of keys");
    const int all = static_cast<int>(inputs.size()), count = all - (has_rows_ ? 2 : 0);
    const int last = count - (drops_ ? 1 : 0);
    if (last > optional) mask_input_ = optional;
    if (drops_) kept_input_ = last;
    ORT_CHECK(last - optional == (mask_input_ < 0 ? 0 : 1), "Attention: got ", all, " inputs");
    if (has_rows_) {
      rows_input_ = count;
      check_row_list(inputs[count], batches_ * queries_);
      check_row_list(inputs[count + 1], batches_ * keys_);
    }
    if (mask_input_ >= 0) mask_ = truths_or_numbers(inputs[mask_input_]);
    hides_ = has_mask() && (!fills() || fill_ == -std::numeric_limits<T>::infinity());
    if (draws_) {
      const Layout& seed = inputs[kept_input_];
      ORT_CHECK(drops_ && seed.dtype == ir::DType::kInt64 && seed.sizes == std::vector<int64_t>{1},
                "Attention: seed: got ", seed.sizes.size(), " dims of ", ir::name(seed.dtype),
                ", want one int64");
    } else if (drops_) {
      const Layout& kept = inputs[kept_input_];
      ORT_CHECK(kept.dtype == ir::DType::kBool, "Attention: dtype of what is kept: got ",
                ir::name(kept.dtype), ", want bool");
      kept_ = truths_or_numbers(kept);
    }
  }

  std::string form() const {
    return concat(batches_ * heads_, " heads, ", queries_, " x ", keys_, " scores of ", features_,
                  " features", is_causal_ ? ", causal" : "", has_mask() ? ", masked" : "",
                  drops_ ? concat(", keeps ", keep_) : "", has_rows_ ? ", of listed rows" : "",
                  "\n");
  }

  bool has_mask() const { return mask_input_ >= 0; }

  static constexpr ir::DType kDType =
      std::is_same_v<T, double> ? ir::DType::kDouble : ir::DType::kFloat;

  Heads rows_of_queries(const Layout& layout) const {
    return heads_of(layout, queries_, features_, heads_);
  }
  Heads rows_of_keys(const Layout& layout) const {
    return heads_of(layout, keys_, features_, key_heads_);
  }
  Heads scores(const Layout& layout) const { return heads_of(layout, queries_, keys_, heads_); }
  Heads numbers_of_queries(Layout layout) const {
    layout.sizes.push_back(1);
    layout.strides.push_back(0);
    ORT_CHECK(layout.dtype == kDType, "Attention: dtype of the logarithms: got ",
              ir::name(layout.dtype), ", want ", ir::name(kDType));
    return heads_of(layout, queries_, 1, heads_);
  }

  // The first `num_rows` rows of a matrix in the type that the kernel computes in: the matrix
  // itself, or a copy in `memory`.
  Numbers<T> numbers(const Matrix<const void>& matrix, int64_t num_rows, T* memory) const {
    if (matrix.dtype == kDType) {
      return {reinterpret_cast<const T*>(matrix.data), matrix.row, matrix.column};
    }
    load(memory, matrix, 0, num_rows, features_);
    return {memory, features_, 1};
  }

  // The size of the memory that numbers() needs for keys and values.
  int64_t copied_size(const Heads& key, const Heads& value) const {
    return key.dtype() == kDType && value.dtype() == kDType ? 0 : keys_ * features_;
  }

  // How many queries and keys of a sequence are computed.
  struct Lengths {
    int64_t queries, keys;
  };

  // Calls visit(batch, head, lengths, memory) for each head of keys. The memory has room for `size`
  // numbers, and belongs to this call alone.
  template <typename Visit>
  void for_each_key_head(const void* const* inputs, int64_t size, Visit visit) const {
    const int64_t work = queries_ * keys_ * features_ * num_sharing();
    const int64_t grain = std::max<int64_t>(1, kWorkPerThread / std::max<int64_t>(work, 1));
    parallel_for(0, batches_ * key_heads_, grain, [&](int64_t begin, int64_t end) {
      T* memory = thread_memory<T, Use::kHead>(size);
      for (int64_t i = begin; i < end; ++i) {
        const int64_t batch = i / key_heads_;
        visit(batch, i % key_heads_, lengths_of(inputs, batch), memory);
      }
    });
  }

  // The number of heads of queries that share a head of keys.
  int64_t num_sharing() const { return key_heads_ == 0 ? 0 : heads_ / key_heads_; }

  template <typename Visit>
  void for_each_sharing(int64_t key_head, Visit visit) const {
    for (int64_t i = 0; i < num_sharing(); ++i) visit(key_head * num_sharing() + i);
  }

  int64_t num_keys(int64_t query) const { return is_causal_ ? std::min(keys_, query + 1) : keys_; }

  // Queries [begin, begin + count). They attend to none but the first `keys` keys.
  struct Block {
    int64_t begin, count, keys;
  };
  // `memory` has room for one row of the mask.
  template <typename Visit>
  void for_each_block(const Matrix<const void>& mask, const Lengths& lengths, T* memory,
                      Visit visit) const {
    for (int64_t begin = 0; begin < lengths.queries; begin += block_) {
      const int64_t count = std::min(block_, lengths.queries - begin);
      visit(Block{begin, count, num_seen(mask, begin, count, lengths.keys, memory)});
    }
  }

  // How many of the keys of a block a query may attend to.
  int64_t num_keys(const Block& block, int64_t query) const {
    return std::min(block.keys, num_keys(query));
  }

  // The number of keys up to the last one that a query of the block attends to. At the end of a
  // sequence a mask may hide many keys: those of later tokens, or of padding. The search goes in
  // steps, so a few of the keys may be hidden. `keys` is the number of all keys.
  int64_t num_seen(const Matrix<const void>& mask, int64_t begin, int64_t count, int64_t keys,
                   T* memory) const {
    const int64_t all = std::min(keys, num_keys(begin + count - 1));
    if (!hides_) return all;
    constexpr int64_t kStep = 32;
    int64_t seen = 0;
    for (int64_t i = count; i-- > 0 && seen < all;) {
      int64_t end = std::min(keys, num_keys(begin + i));
      const T* row = mask_row(mask, begin + i, end, memory);
      while (end > seen && hides_all(row, std::max(seen, end - kStep), end)) {
        end = std::max(seen, end - kStep);
      }
      seen = std::max(seen, end);
    }
    return seen == 0 && unseen_is_nan_ ? all : seen;
  }

  // Whether the mask hides all scores of [begin, end).
  bool hides_all(const T* row, int64_t begin, int64_t end) const {
    constexpr T kLowest = -std::numeric_limits<T>::infinity();
    T extreme = fills() ? T(1) : kLowest;
    (fills() ? kernels_.min_rows : kernels_.max_rows)(&extreme, row + begin, 1, end - begin);
    return extreme == (fills() ? T(1) : kLowest);
  }

  // Copies rows of a matrix without gaps, times `factor`.
  void copy_rows(T* to, const Matrix<const void>& from, const Block& block, T factor) const {
    load(to, from, block.begin, block.count, features_);
    if (factor != 1) scale(to, factor, block.count * features_);
  }

  void load(T* to, const Matrix<const void>& from, int64_t begin, int64_t count, int64_t n) const {
    kernels_.load[static_cast<size_t>(from.dtype)](
        to, from.at(begin), {.n = n, .stride = from.column, .count = count, .distance = from.row});
  }

  void scale(T* numbers, T factor, int64_t n) const {
    pointwise(ops::Pointwise::kMul, 2)(numbers, numbers, &factor, nullptr, n);
  }

  // Writes `count` rows of features, times `factor`, to a matrix of a tensor. Overwrites `from`.
  void write_rows(const Matrix<void>& to, int64_t begin, int64_t count, T* from, T factor) const {
    const int64_t columns = feature_panels_.columns();
    if (factor != 1) scale(from, factor, count * columns);
    const auto store = kernels_.store[static_cast<size_t>(to.dtype)];
    if (columns == features_) {
      return store(to.at(begin), from,
                   {.n = features_, .stride = to.column, .count = count, .distance = to.row});
    }
    for (int64_t i = 0; i < count; ++i) {
      store(to.at(begin + i), from + i * columns, {.n = features_, .stride = to.column});
    }
  }

  // Packs a right factor whose rows are those of the matrix. The panels have room for `room` rows.
  void pack(T* to, const Panels& panels, const T* from, int64_t row, int64_t column,
            int64_t num_rows, int64_t room) const {
    pack_panels(to, panels, from, column, features_, row, num_rows, room);
  }

  // Packs a right factor whose columns are the first `num_keys` rows of the matrix.
  void pack_transposed(T* to, const Numbers<T>& from, int64_t num_keys) const {
    pack_panels(to, score_panels_, from.data, from.row, num_keys, from.column, features_,
                features_);
  }

  // Packs `columns` columns, which are `across` numbers apart, each of `steps` steps, which are
  // `along` numbers apart. The panels have room for `room` steps.
  void pack_panels(T* to, const Panels& panels, const T* from, int64_t across, int64_t columns,
                   int64_t along, int64_t steps, int64_t room) const {
    for (int64_t first = 0; first < columns; first += panels.width) {
      kernels_.pack({.to = to + first * room,
                     .width = panels.width,
                     .steps = steps,
                     .from = from + first * across,
                     .across = across,
                     .along = along,
                     .count = std::min(columns - first, panels.width)});
    }
  }

  // to: block.count x keys <- a * b^T. The rows of `a` are features, and `b` has the packed keys.
  // Leaves out panels of keys that only later queries than all of a tile's attend to.
  void multiply_by_keys(T* to, const T* a, const T* b, const Block& block) const {
    const int64_t width = score_panels_.width, num = round_up(block.keys, width) / width;
    const auto multiply = [&](int64_t panel, int64_t num_panels, int64_t row) {
      kernels_.multiply({.c = to + row * score_row_ + panel * width,
                         .c_row = score_row_,
                         .a = a + row * features_,
                         .a_row = features_,
                         .a_column = 1,
                         .b = b + panel * features_ * width,
                         .b_row = width,
                         .b_panel = features_ * width,
                         .width = width,
                         .num_panels = num_panels,
                         .columns = num_panels * width,
                         .m = block.count - row,
                         .k = features_});
    };
    // All queries of the block attend to the keys of these panels.
    const int64_t common = is_causal_ ? std::min(num, block.begin / width + 1) : num;
    multiply(0, common, 0);
    for (int64_t panel = common; panel < num; ++panel) {
      // From the first whole tile of rows on that has a query that attends to them.
      const int64_t tile = (panel * width - block.begin) / kernels_.product_rows;
      multiply(panel, 1, tile * kernels_.product_rows);
    }
  }

  // to: block.count x features <- a * b. `a` has scores, and `b` the packed features of all keys.
  void multiply_scores(T* to, const T* a, const T* b, const Block& block) const {
    // All rows at once, or where later queries attend to more keys, as many as a product computes
    // at a time.
    const int64_t step = is_causal_ ? kernels_.product_rows : block.count;
    for (int64_t row = 0; row < block.count; row += step) {
      const int64_t count = std::min(step, block.count - row);
      kernels_.multiply({.c = to + row * feature_panels_.columns(),
                         .c_row = feature_panels_.columns(),
                         .a = a + row * score_row_,
                         .a_row = score_row_,
                         .a_column = 1,
                         .b = b,
                         .b_row = feature_panels_.width,
                         .b_panel = keys_ * feature_panels_.width,
                         .width = feature_panels_.width,
                         .num_panels = feature_panels_.num,
                         .columns = feature_panels_.columns(),
                         .m = count,
                         .k = num_keys(block, block.begin + row + count - 1)});
    }
  }

  // to: keys x features += a^T * b. `a` has scores, and `b` the packed features of the block.
  void add_transposed_product(T* to, const T* a, const T* b, const Block& block) const {
    const auto add = [&](int64_t key, int64_t num, int64_t row) {
      kernels_.multiply({.c = to + key * feature_panels_.columns(),
                         .c_row = feature_panels_.columns(),
                         .start = to + key * feature_panels_.columns(),
                         .start_row = feature_panels_.columns(),
                         .a = a + row * score_row_ + key,
                         .a_row = 1,
                         .a_column = score_row_,
                         .b = b + row * feature_panels_.width,
                         .b_row = feature_panels_.width,
                         .b_panel = block.count * feature_panels_.width,
                         .width = feature_panels_.width,
                         .num_panels = feature_panels_.num,
                         .columns = feature_panels_.columns(),
                         .m = num,
                         .k = block.count - row});
    };
    if (!is_causal_) return add(0, block.keys, 0);
    const int64_t common = std::min(block.keys, block.begin + 1);
    add(0, common, 0);
    const int64_t step = kernels_.product_rows;
    for (int64_t key = common; key < block.keys; key += step) {
      add(key, std::min(step, block.keys - key), key - block.begin);
    }
  }

  // Mask and dropout of one head of queries.
  struct Rules {
    Matrix<const void> mask, kept;
    const uint64_t* seed = nullptr;
    int64_t place = 0;  // number of the head's first score among all scores
  };
  Rules rules(const void* const* inputs, int64_t batch, int64_t head) const {
    Rules found{{has_mask() ? inputs[mask_input_] : nullptr, mask_, batch, head},
                {drops_ && !draws_ ? inputs[kept_input_] : nullptr, kept_, batch, head}};
    if (draws_) found.seed = static_cast<const uint64_t*>(inputs[kept_input_]);
    found.place = (batch * heads_ + head) * queries_ * keys_;
    return found;
  }

  // One row of the mask: numbers to add, or 1 where `fill_` replaces a score. `memory` has room for
  // a copy of the row.
  const T* mask_row(const Matrix<const void>& mask, int64_t query, int64_t n, T* memory) const {
    if (mask.column == 1 && mask.dtype == kDType) return static_cast<const T*>(mask.at(query));
    load(memory, mask, query, 1, n);
    return memory;
  }

  bool fills() const { return mask_.dtype() == ir::DType::kBool; }

  void apply_mask(T* scores, const T* row, int64_t n) const {
    if (fills()) {
      pointwise(ops::Pointwise::kWhere, 2)(scores, row, &fill_, scores, n);
    } else {
      pointwise(ops::Pointwise::kAdd, 0)(scores, scores, row, nullptr, n);
    }
  }

  // For each query of the block `keys_` numbers: 1 where dropout keeps a probability, else 0. Only
  // those of keys that the query attends to are set.
  void find_kept(T* to, const Rules& rules, const Block& block) const {
    if (!draws_) return load(to, rules.kept, block.begin, block.count, keys_);
    const auto draw = [&](int64_t i, int64_t n) {
      kernels_.random_mask(to + i * keys_, *rules.seed, stream_,
                           rules.place + (block.begin + i) * keys_, n, keep_);
    };
    if (!is_causal_ && block.keys == keys_) return draw(0, block.count * keys_);
    for (int64_t i = 0; i < block.count; ++i) draw(i, num_keys(block, block.begin + i));
  }

  // The size of the memory that find_kept() needs.
  int64_t kept_size() const { return drops_ ? block_ * keys_ : 0; }

  auto pointwise(ops::Pointwise op, int scalars) const {
    return kernels_.elementwise[static_cast<size_t>(op)][scalars];
  }

  const Kernels<T>& kernels_;
  int64_t batches_, heads_, key_heads_, queries_, keys_, features_;
  T scale_;
  bool is_causal_;
  bool unseen_is_nan_;  // the result of a query that attends to no key is NaN; else zeros
  T fill_;
  bool has_rows_, drops_, draws_;
  double keep_;
  uint64_t stream_;
  int mask_input_ = -1, kept_input_ = -1, rows_input_ = -1;
  bool hides_ = false;  // whether the mask may hide keys, by scores of -inf
  Heads mask_, kept_;
  Panels score_panels_, feature_panels_;
  int64_t score_row_;  // from one row of scores to the next
  // The number of queries at a time, a multiple of the rows that a product computes at a time.
  int64_t block_;

 private:
  Lengths lengths_of(const void* const* inputs, int64_t batch) const {
    if (!has_rows_) return {queries_, keys_};
    const auto length = [&](int input, int64_t longest) {
      return listed_length(static_cast<const int64_t*>(inputs[input]), batch, longest);
    };
    return {length(rows_input_, queries_), length(rows_input_ + 1, keys_)};
  }

  // The length up to the last listed row of the sequence. The list is in ascending order. The
  // length is at most `longest`, whatever the list contains.
  int64_t listed_length(const int64_t* list, int64_t batch, int64_t longest) const {
    TORCH_CHECK_INDEX(list[0] >= 0 && list[0] <= batches_ * longest,
                      "Attention: list of rows: got ", list[0], " of them, want 0 to ",
                      batches_ * longest);
    const int64_t *rows = list + 1, first = batch * longest;
    const int64_t* end = std::lower_bound(rows, rows + list[0], first + longest);
    return end == rows ? 0 : std::max(end[-1] + 1, first) - first;
  }

  Heads heads_of(const Layout& layout, int64_t rows, int64_t columns, int64_t heads) const {
    const bool is_short = ir::is_short_float(layout.dtype);
    ORT_CHECK(layout.dtype == kDType || (kDType == ir::DType::kFloat && is_short),
              "Attention: dtype: got ", ir::name(layout.dtype), ", want ", ir::name(kDType));
    return Heads(layout, {batches_, heads, rows, columns});
  }

  Heads truths_or_numbers(const Layout& layout) const {
    if (layout.dtype != ir::DType::kBool) return scores(layout);
    return Heads(layout, {batches_, heads_, queries_, keys_});
  }

  static int64_t size_of(const Layout& layout, size_t dim) {
    ORT_CHECK(layout.sizes.size() == 4, "Attention: got ", layout.sizes.size(), " dims, want 4");
    return layout.sizes[dim];
  }
};

// query, key, value, [mask], [kept, or a seed], [rows of queries, of keys] -> result, logarithms of
// the sums of exponentials [batch, heads, queries]
template <typename T>
class Forward final : public Attention<T> {
  using Base = Attention<T>;
  using typename Base::Block;
  using typename Base::Lengths;
  using typename Base::Rules;

 public:
  Forward(const ir::Node& node, const std::vector<Layout>& inputs,
          const std::vector<Layout>& outputs, Isa isa)
      : Base(node, inputs, 0, 3, isa),
        query_(this->rows_of_queries(inputs[0])),
        key_(this->rows_of_keys(inputs[1])),
        value_(this->rows_of_keys(inputs.at(2))),
        result_(this->rows_of_queries(outputs.at(0))),
        logarithm_(this->numbers_of_queries(outputs.at(1))) {
    const int64_t scores = this->score_panels_.columns(), wide = this->feature_panels_.columns();
    packed_keys_ = 0;
    packed_values_ = packed_keys_ + scores * this->features_;
    rows_ = packed_values_ + this->keys_ * wide;
    scores_ = rows_ + this->block_ * round_up(this->features_, 16);
    results_ = scores_ + this->block_ * this->score_row_;
    mask_row_ = results_ + this->block_ * wide;
    kept_rows_ = mask_row_ + (this->has_mask() ? this->keys_ : 0);
    copied_ = kept_rows_ + this->kept_size();
    size_ = copied_ + this->copied_size(key_, value_);
  }

  std::string str() const override { return "attention, " + this->form(); }

  void run(const void* const* inputs, void* const* outputs) const override {
    const auto in = [&](int i) { return inputs[i]; };
    const auto out = [&](int i) { return outputs[i]; };
    const auto visit = [&](int64_t batch, int64_t key_head, const Lengths& lengths, T* memory) {
      const int64_t keys = lengths.keys;
      T* copied = memory + copied_;
      this->pack_transposed(memory + packed_keys_,
                            this->numbers({in(1), key_, batch, key_head}, keys, copied), keys);
      const Numbers<T> value = this->numbers({in(2), value_, batch, key_head}, keys, copied);
      this->pack(memory + packed_values_, this->feature_panels_, value.data, value.row,
                 value.column, keys, this->keys_);
      this->for_each_sharing(key_head, [&](int64_t head) {
        const Head each{{in(0), query_, batch, head},
                        this->rules(inputs, batch, head),
                        {out(0), result_, batch, head},
                        {out(1), logarithm_, batch, head}};
        this->for_each_block(each.rules.mask, lengths, memory + mask_row_,
                             [&](const Block& block) { run_block(each, memory, block); });
      });
    };
    this->for_each_key_head(inputs, size_, visit);
  }

 private:
  static constexpr int64_t kLargestBlock = 48;

  struct Head {
    Matrix<const void> query;
    Rules rules;
    Matrix<void> result, logarithm;
  };

  void run_block(const Head& head, T* memory, const Block& block) const {
    T *rows = memory + rows_, *scores = memory + scores_, *results = memory + results_;
    this->copy_rows(rows, head.query, block, this->scale_);
    this->multiply_by_keys(scores, rows, memory + packed_keys_, block);
    T factors[kLargestBlock];
    for (int64_t i = 0; i < block.count; ++i) {
      const int64_t at = block.begin + i;
      *static_cast<T*>(head.logarithm.at(at)) =
          softmax(scores + i * this->score_row_, head.rules.mask, at, block, memory + mask_row_,
                  factors[i]);
    }
    if (this->drops_) drop(scores, factors, head.rules, block, memory + kept_rows_);
    this->multiply_scores(results, scores, memory + packed_values_, block);
    const int64_t columns = this->feature_panels_.columns();
    for (int64_t i = 0; i < block.count; ++i) {
      this->scale(results + i * columns, factors[i], columns);
    }
    this->write_rows(head.result, block.begin, block.count, results, T(1));
  }

  void drop(T* scores, T* factors, const Rules& rules, const Block& block, T* kept) const {
    this->find_kept(kept, rules, block);
    for (int64_t i = 0; i < block.count; ++i) {
      T* row = scores + i * this->score_row_;
      this->pointwise(ops::Pointwise::kMul, 0)(row, row, kept + i * this->keys_, nullptr,
                                               this->num_keys(block, block.begin + i));
      factors[i] /= static_cast<T>(this->keep_);
    }
  }

  // Turns the scores of the block's keys into numerators; times `factor` they are probabilities.
  // Returns the logarithm of the denominator.
  T softmax(T* scores, const Matrix<const void>& mask, int64_t query, const Block& block,
            T* mask_row, T& factor) const {
    const int64_t n = this->num_keys(block, query);
    if (this->has_mask()) this->apply_mask(scores, this->mask_row(mask, query, n, mask_row), n);
    constexpr T kLowest = -std::numeric_limits<T>::infinity();
    T largest = kLowest;
    this->kernels_.max_rows(&largest, scores, 1, n);
    const bool sees_none = largest == kLowest && !(this->unseen_is_nan_ && n > 0);
    if (sees_none) std::fill_n(scores, n, T(0));
    const T sum = sees_none ? T(0) : this->kernels_.exp_row(scores, scores, largest, n);
    std::fill(scores + n, scores + block.keys, T(0));
    factor = sees_none ? T(0) : 1 / sum;
    return largest + std::log(sum);
  }

  Heads query_, key_, value_, result_, logarithm_;
  // Offsets in the memory of a call.
  int64_t packed_keys_, packed_values_, rows_, scores_, results_, mask_row_, kept_rows_, copied_,
      size_;
};

// gradient, query, key, value, logarithms, [mask], [kept, or a seed], [rows of queries, of keys] ->
// gradients of query, key, value, [masked scores]
template <typename T>
class Backward final : public Attention<T> {
  using Base = Attention<T>;
  using typename Base::Block;
  using typename Base::Lengths;
  using typename Base::Rules;

 public:
  Backward(const ir::Node& node, const std::vector<Layout>& inputs,
           const std::vector<Layout>& outputs, Isa isa)
      : Base(node, inputs, 1, 5, isa),
        grad_(this->rows_of_queries(inputs[0])),
        query_(this->rows_of_queries(inputs[1])),
        key_(this->rows_of_keys(inputs[2])),
        value_(this->rows_of_keys(inputs.at(3))),
        logarithm_(this->numbers_of_queries(inputs.at(4))),
        query_grad_(this->rows_of_queries(outputs.at(0))),
        key_grad_(this->rows_of_keys(outputs.at(1))),
        value_grad_(this->rows_of_keys(outputs.at(2))),
        gives_scores_(outputs.size() > 3) {
    if (gives_scores_) scores_grad_ = this->scores(outputs[3]);
    const int64_t scores = this->score_panels_.columns(), wide = this->feature_panels_.columns();
    const int64_t rows = this->block_ * round_up(this->features_, 16);
    const auto take = [this](int64_t size) {
      const int64_t place = size_;
      size_ += round_up(size, 16);
      return place;
    };
    keys_by_feature_ = take(scores * this->features_);
    values_by_feature_ = take(scores * this->features_);
    packed_keys_ = take(this->keys_ * wide);
    key_sums_ = take(this->keys_ * wide);
    value_sums_ = take(this->keys_ * wide);
    query_rows_ = take(rows);
    grad_rows_ = take(rows);
    packed_ = take(this->block_ * wide);
    sums_ = take(this->block_ * wide);
    scores_ = take(this->block_ * this->score_row_);
    score_grads_ = take(this->block_ * this->score_row_);
    mask_row_ = take(this->has_mask() ? this->keys_ : 0);
    kept_rows_ = take(this->kept_size());
    copied_ = take(this->copied_size(key_, value_));
  }

  std::string str() const override { return "attention gradient, " + this->form(); }

  void run(const void* const* inputs, void* const* outputs) const override {
    const auto in = [&](int i) { return inputs[i]; };
    const auto out = [&](int i) { return outputs[i]; };
    const auto visit = [&](int64_t batch, int64_t key_head, const Lengths& lengths, T* memory) {
      const int64_t keys = lengths.keys;
      T* copied = memory + copied_;
      this->pack_transposed(memory + values_by_feature_,
                            this->numbers({in(3), value_, batch, key_head}, keys, copied), keys);
      const Numbers<T> key = this->numbers({in(2), key_, batch, key_head}, keys, copied);
      this->pack_transposed(memory + keys_by_feature_, key, keys);
      this->pack(memory + packed_keys_, this->feature_panels_, key.data, key.row, key.column, keys,
                 this->keys_);
      const int64_t wide = this->feature_panels_.columns();
      std::fill_n(memory + key_sums_, keys * wide, T(0));
      std::fill_n(memory + value_sums_, keys * wide, T(0));
      this->for_each_sharing(key_head, [&](int64_t head) {
        const Head each{{in(0), grad_, batch, head},
                        {in(1), query_, batch, head},
                        {in(4), logarithm_, batch, head},
                        this->rules(inputs, batch, head),
                        {out(0), query_grad_, batch, head},
                        {gives_scores_ ? out(3) : nullptr, scores_grad_, batch, head}};
        this->for_each_block(each.rules.mask, lengths, memory + mask_row_,
                             [&](const Block& block) { run_block(each, memory, block); });
        if (gives_scores_) write_zeros(each.scores_grad, lengths.queries, memory + score_grads_);
      });
      this->write_rows({out(1), key_grad_, batch, key_head}, 0, keys, memory + key_sums_, T(1));
      this->write_rows({out(2), value_grad_, batch, key_head}, 0, keys, memory + value_sums_, T(1));
    };
    this->for_each_key_head(inputs, size_, visit);
  }

 private:
  struct Head {
    Matrix<const void> grad, query, logarithm;
    Rules rules;
    Matrix<void> query_grad, scores_grad;
  };

  void run_block(const Head& head, T* memory, const Block& block) const {
    const int64_t features = this->features_, columns = this->score_row_;
    T *queries = memory + query_rows_, *grads = memory + grad_rows_;
    T *scores = memory + scores_, *score_grads = memory + score_grads_, *sums = memory + sums_;
    this->copy_rows(queries, head.query, block, this->scale_);
    this->copy_rows(grads, head.grad, block, 1 / static_cast<T>(this->keep_));
    this->multiply_by_keys(scores, queries, memory + keys_by_feature_, block);
    this->multiply_by_keys(score_grads, grads, memory + values_by_feature_, block);
    T* kept = memory + kept_rows_;
    if (this->drops_) this->find_kept(kept, head.rules, block);
    for (int64_t i = 0; i < block.count; ++i) {
      const int64_t at = block.begin + i, n = this->num_keys(block, at);
      T *row = scores + i * columns, *row_grad = score_grads + i * columns;
      const T* mask = nullptr;
      if (this->has_mask()) mask = this->mask_row(head.rules.mask, at, n, memory + mask_row_);
      const T sum = probabilities(row, head, at, n, mask);
      if (this->drops_) multiply(row_grad, kept + i * this->keys_, n);
      through_softmax(row_grad, row, sum, n);
      if (mask != nullptr && this->fills()) leave_filled(row_grad, mask, n);
      if (this->drops_) multiply(row, kept + i * this->keys_, n);
      std::fill(row + n, row + block.keys, T(0));
      std::fill(row_grad + n, row_grad + (gives_scores_ ? this->keys_ : block.keys), T(0));
      if (gives_scores_) write_scores(head.scores_grad, at, row_grad);
    }
    T* packed = memory + packed_;
    this->pack(packed, this->feature_panels_, grads, features, 1, block.count, block.count);
    this->add_transposed_product(memory + value_sums_, scores, packed, block);
    this->pack(packed, this->feature_panels_, queries, features, 1, block.count, block.count);
    this->add_transposed_product(memory + key_sums_, score_grads, packed, block);
    this->multiply_scores(sums, score_grads, memory + packed_keys_, block);
    this->write_rows(head.query_grad, block.begin, block.count, sums, this->scale_);
  }

  void write_scores(const Matrix<void>& to, int64_t query, const T* from) const {
    this->kernels_.store[static_cast<size_t>(to.dtype)](to.at(query), from,
                                                        {.n = this->keys_, .stride = to.column});
  }

  // The gradients of the scores of queries that are not computed.
  void write_zeros(const Matrix<void>& to, int64_t begin, T* memory) const {
    if (begin < this->queries_) std::fill_n(memory, this->keys_, T(0));
    for (int64_t i = begin; i < this->queries_; ++i) write_scores(to, i, memory);
  }

  void multiply(T* numbers, const T* factors, int64_t n) const {
    this->pointwise(ops::Pointwise::kMul, 0)(numbers, numbers, factors, nullptr, n);
  }

  // Sets the gradients of scores that the mask has replaced to zero, even if they are NaN.
  void leave_filled(T* gradients, const T* mask, int64_t n) const {
    const T zero = 0;
    this->pointwise(ops::Pointwise::kWhere, 2)(gradients, mask, &zero, gradients, n);
  }

  // Turns the first `n` scores of a query into its probabilities. Returns their sum, which is
  // nearly 1.
  T probabilities(T* scores, const Head& head, int64_t query, int64_t n, const T* mask) const {
    if (mask != nullptr) this->apply_mask(scores, mask, n);
    const T logarithm = *static_cast<const T*>(head.logarithm.at(query));
    // The query attends to no key.
    if (logarithm == -std::numeric_limits<T>::infinity()) {
      std::fill_n(scores, n, T(0));
      return 1;
    }
    const T sum = this->kernels_.exp_row(scores, scores, logarithm, n);
    // The logarithm of a large sum has few digits, and none if all scores are the lowest number.
    // Then the probabilities are divided by their sum.
    if (std::abs(sum - 1) <= 4 * std::numeric_limits<T>::epsilon()) return sum;
    this->scale(scores, 1 / sum, n);
    return 1;
  }

  // Turns the gradients of probabilities, whose sum is `sum`, into those of the scores. If one key
  // has all the weight these cancel to zero, which they would not if their mean was computed from
  // the result.
  void through_softmax(T* gradients, const T* probabilities, T sum, int64_t n) const {
    multiply(gradients, probabilities, n);
    T total = 0;
    this->kernels_.sum_rows(&total, gradients, 1, n);
    const T factor = -total / sum;
    this->pointwise(ops::Pointwise::kMulAdd, 2)(gradients, probabilities, &factor, gradients, n);
  }

  Heads grad_, query_, key_, value_, logarithm_, query_grad_, key_grad_, value_grad_;
  Heads scores_grad_;
  bool gives_scores_;
  int64_t keys_by_feature_, values_by_feature_, packed_keys_, key_sums_, value_sums_, query_rows_,
      grad_rows_, packed_, sums_, scores_, score_grads_, mask_row_, kept_rows_, copied_,
      size_ = 0;  // offsets in the memory of a call
};

template <template <typename> class Program>
std::unique_ptr<const Kernel> make(const BoundNode& bound) {
  const auto& [node, inputs, outputs, options] = bound;
  const Isa isa = isa_of(bound);
  if (inputs.at(0).dtype == ir::DType::kDouble) {
    return std::make_unique<const Program<double>>(node, inputs, outputs, isa);
  }
  return std::make_unique<const Program<float>>(node, inputs, outputs, isa);
}

}  // namespace

std::unique_ptr<const Kernel> make_attention(const BoundNode& bound) {
  return make<Forward>(bound);
}

std::unique_ptr<const Kernel> make_attention_grad(const BoundNode& bound) {
  return make<Backward>(bound);
}

}  // namespace torch_ort::cpu
