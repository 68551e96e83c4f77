// The cross-entropy of a linear layer, with its gradients, in chunks of rows (ops/linear_loss.h).
//
// Blocks of classes are shared by the threads. The first pass over a chunk makes its logits, and of
// each row the largest one and the sum of exp(logit - largest), block by block (Milakov and
// Gimelshein, "Online normalizer calculation for softmax", 2018). The second one turns a block into
// its gradient while it is in the cache, and multiplies that with the weights and with the rows:
//
//   d logit[c] = scale * exp(logit[c] - largest) / sum + s * weight[c] - p * (c is the label),
//   scale = p - s * (sum of weights) + q * logsumexp,
//
// where p, s and q are the gradients of the loss, of the sum of logarithms, and of half the square.
// The first has in it the weight of the class, and for a mean one over the sum of all of them.
//
// Listed rows that do not follow each other are copied, as many as a chunk has.
//
// Classes are summed in groups, whose number depends on sizes alone: results do not depend on the
// number of threads.
#include "base/error.h"
#include "base/rounding.h"
#include "cpu/parallel.h"
#include "cpu/product.h"
#include "cpu/program.h"
#include "cpu/rows.h"
#include "cpu/thread_memory.h"
#include "ops/linear_loss_operands.h"

#include <c10/util/Exception.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <cstring>
#include <limits>
#include <map>
#include <numeric>
#include <type_traits>
#include <vector>

namespace torch_ort::cpu {

namespace {

constexpr int64_t kBlock = 512;  // in classes

template <typename Each>
using Operands = ops::LinearLossInputs<Each>;
template <typename Each>
using Results = ops::LinearLossResults<Each>;

template <typename T>
class LinearCrossEntropy final : public Kernel {
 public:
  LinearCrossEntropy(const ir::Node& node, const std::vector<Layout>& inputs,
                     const std::vector<Layout>& outputs, Isa isa)
      : form_(ops::linear_loss(node)),
        isa_(isa),
        kernels_(kernels<T>(isa)),
        in_(ops::linear_loss_inputs<Layout>(form_, [&](int i) { return inputs.at(i); })),
        out_(ops::linear_loss_results<Layout>(form_, [&](int i) { return outputs.at(i); })) {
    check();
    rows_ = in_.hidden.sizes[0];
    width_ = in_.hidden.sizes[1];
    classes_ = in_.weight.sizes[0];
    pairs_ = in_.hidden.dtype == ir::DType::kBFloat16 && pair_kernels(isa) != nullptr;
    // Without gradients the logits of a block are not needed after the next block begins, so one
    // block is held.
    row_ = form_.has_grad() ? classes_ : kBlock;
    const int64_t blocks = ceil_div(classes_, kBlock);
    blocks_of_group_ = std::max<int64_t>(ceil_div(blocks, form_.groups), 1);
    groups_ = ceil_div(blocks, blocks_of_group_);
    for (int64_t columns : {kBlock, classes_ % kBlock}) {
      if (columns > 0 && columns <= classes_) add(columns);
    }
  }

  std::string str() const override {
    return concat("linear cross-entropy, ", rows_, " x ", width_, ", ", classes_, " classes, ",
                  form_.rows, " rows at a time, ", groups_, " groups",
                  form_.has_row_list ? ", of listed rows" : "", "\n");
  }

  void run(const void* const* inputs, void* const* outputs) const override {
    Call call{ops::linear_loss_inputs<const char*>(
                  form_, [&](int i) { return static_cast<const char*>(inputs[i]); }),
              ops::linear_loss_results<char*>(
                  form_, [&](int i) { return static_cast<char*>(outputs[i]); })};
    const double total = sum_weights(call);
    call.factor = form_.is_mean() ? 1 / total : 1;
    call.class_sum = sum_class_weights(call);
    lay_out(call);
    int64_t count = rows_;
    if (form_.has_row_list) {
      const RowList list(call.in.list, rows_);
      count = list.count();
      if (list.is_run()) {
        call.offset = count == 0 ? 0 : list.rows()[0];
      } else {
        call.listed = list.rows();
      }
    }
    if (count == 0 || classes_ == 0) clear_sums(call);
    // A list of the chunk's rows for its products: their number, and 0, 1, ...
    thread_local std::vector<int64_t> first_rows;
    first_rows.resize(static_cast<size_t>(form_.rows) + 1);
    std::iota(first_rows.begin() + 1, first_rows.end(), 0);
    call.first_rows = first_rows.data();
    T* const result = reinterpret_cast<T*>(call.out.loss);
    const bool is_by_row = form_.reduction == ops::Reduction::kNone;
    if (is_by_row && form_.has_row_list) std::fill_n(result, rows_, T(0));
    double loss = 0;
    const auto for_chunks = [&](int64_t num_rows, const auto& each) {
      for (call.row = 0; call.row < num_rows; call.row += form_.rows) {
        call.rows = first_rows[0] = std::min(form_.rows, num_rows - call.row);
        call.hidden = hidden_rows(call);
        each();
      }
    };
    for_chunks(count, [&] { loss += run_chunk(call); });
    if (form_.has_logits && count < rows_) {
      const std::vector<int64_t> others = rows_beside(call, count);
      call.listed = others.data();
      call.has_loss = false;
      for_chunks(rows_ - count, [&] { make_logits(call); });
    }
    if (!is_by_row) *result = static_cast<T>(form_.is_mean() ? loss / total : loss);
  }

 private:
  static constexpr ir::DType kDType =
      std::is_same_v<T, double> ? ir::DType::kDouble : ir::DType::kFloat;

  // The products with the weights of a block of classes.
  struct Products {
    std::unique_ptr<const Kernel> logits, hidden_grad, weight_grad, more_weight_grad;
  };

  struct Call {
    Operands<const char*> in;
    Results<char*> out;
    double factor = 1, class_sum = 0;
    // The rows to compute: those that are listed, or all from `offset` on.
    const int64_t* listed = nullptr;
    int64_t offset = 0;
    bool has_loss = true;                 // else only logits
    int64_t row = 0, rows = 0;            // of the chunk, among the rows to compute
    const int64_t* first_rows = nullptr;  // the number of rows of the chunk, and 0, 1, ...
    const char* hidden = nullptr;         // the rows of the chunk, without gaps

    int64_t number(int64_t r) const {
      return listed == nullptr ? offset + row + r : listed[row + r];
    }
    // In the workspace. By group and row of the chunk: the largest logit, and the sum of
    // exponentials.
    T *logits = nullptr, *largest = nullptr, *sums = nullptr, *hidden_grads = nullptr;
    double* log_sums = nullptr;  // of logits times weights of classes
    T* copied = nullptr;         // of the rows of hidden
    // By row of the chunk: the largest logit of all groups; the scale divided by the sum; the logit
    // of the label, and later its gradient; the gradient of the sum of log-probabilities.
    T *row_largest = nullptr, *row_scale = nullptr, *picked = nullptr, *row_sums_grad = nullptr;
  };

  void check() const {
    const auto fits = [](const Layout& layout, const std::vector<int64_t>& sizes) {
      return layout.sizes == sizes;
    };
    ORT_CHECK(in_.hidden.sizes.size() == 2 && in_.weight.sizes.size() == 2,
              "LinearCrossEntropy: want two matrices");
    const int64_t rows = in_.hidden.sizes[0], width = in_.hidden.sizes[1];
    const int64_t classes = in_.weight.sizes[0];
    // The sizes of expanded inputs from a file may be anything.
    const double of_row = 4.0 * form_.groups + 4 + classes + (form_.groups + 1.0) * width;
    const std::vector<int64_t> of_loss = form_.reduction == ops::Reduction::kNone
                                             ? std::vector<int64_t>{rows}
                                             : std::vector<int64_t>{};
    ORT_CHECK(form_.rows * of_row < 1e18,
              "LinearCrossEntropy: got chunks of more numbers than "
              "there can be");
    if (form_.has_row_list) check_row_list(in_.list, rows);
    ORT_CHECK(in_.weight.sizes[1] == width && fits(in_.labels, {rows}) &&
                  in_.labels.dtype == ir::DType::kInt64 && in_.weight.dtype == in_.hidden.dtype &&
                  (!form_.has_bias || fits(in_.bias, {classes})) &&
                  (!form_.has_class_weight || fits(in_.class_weight, {classes})) &&
                  (!form_.has_loss_grad || fits(in_.loss_grad, of_loss)) &&
                  (!form_.has_sums_grad || fits(in_.sums_grad, {rows})) &&
                  (!form_.has_square_grad || fits(in_.square_grad, {rows})) &&
                  fits(out_.loss, of_loss) && (!form_.has_sums || fits(out_.sums, {rows})) &&
                  (!form_.has_logsumexp || fits(out_.logsumexp, {rows})) &&
                  (!form_.has_logits || fits(out_.logits, {rows, classes})) &&
                  (!form_.has_hidden_grad || fits(out_.hidden_grad, {rows, width})) &&
                  (!form_.has_weight_grad || fits(out_.weight_grad, {classes, width})) &&
                  (!form_.has_bias_grad || fits(out_.bias_grad, {classes})) &&
                  fits(out_.workspace, {ops::workspace_size(form_, classes, width)}),
              "LinearCrossEntropy: the operands do not fit together");
    ORT_CHECK(!form_.has_row_list || !form_.has_all_rows(),
              "LinearCrossEntropy: a list leaves out rows of which something is made");
    for (const Layout* each : {&out_.loss, &out_.workspace, &out_.hidden_grad, &out_.weight_grad,
                               &out_.bias_grad, &out_.sums, &out_.logsumexp}) {
      if (each->dtype == ir::DType::kUndefined) continue;
      ORT_CHECK(each->dtype == kDType && lies_by_rows(*each),
                "LinearCrossEntropy: want results of ", ir::name(kDType), " that lie by rows");
    }
  }

  void add(int64_t columns) {
    const int64_t rows = form_.rows;
    const Layout logits{kDType, {rows, columns}, {row_, 1}};
    const Layout list{ir::DType::kInt64, {rows + 1}, {1}};
    Layout rows_of_hidden = in_.hidden, weights = in_.weight;
    rows_of_hidden.sizes[0] = rows;
    if (form_.has_row_list) rows_of_hidden.strides = {width_, 1};
    weights.sizes[0] = columns;
    const auto of_rows = [&](const region::Product& product) {
      return make_rows_product(product, list, false, isa_);
    };
    const auto over_rows = [&](const region::Product& product) {
      return make_rows_product(product, list, true, isa_);
    };
    Products& made = products_[columns];
    region::Product product{logits, rows_of_hidden, turned(weights), std::nullopt};
    if (form_.has_bias) {
      product.start = Layout{in_.bias.dtype, {1, columns}, {0, in_.bias.strides[0]}};
    }
    made.logits = of_rows(product);
    const Layout grads =
        pairs_ ? Layout{ir::DType::kBFloat16, {rows, columns}, {kBlock, 1}} : logits;
    if (form_.has_hidden_grad) {
      const Layout sums{kDType, {rows, width_}, {width_, 1}};
      made.hidden_grad = of_rows({sums, grads, weights, sums});
    }
    if (form_.has_weight_grad) {
      const Layout sums{kDType, {columns, width_}, {width_, 1}};
      made.weight_grad = over_rows({sums, turned(grads), rows_of_hidden, std::nullopt});
      made.more_weight_grad = over_rows({sums, turned(grads), rows_of_hidden, sums});
    }
  }

  static Layout turned(Layout layout) {
    std::swap(layout.sizes[0], layout.sizes[1]);
    std::swap(layout.strides[0], layout.strides[1]);
    return layout;
  }

  // One number of a tensor with at most one dim.
  T load(const char* base, const Layout& layout, int64_t i) const {
    T number;
    const int64_t offset = layout.strides.empty() ? 0 : i * layout.strides[0];
    kernels_.load[static_cast<size_t>(layout.dtype)](
        &number, base + offset * ir::size_bytes(layout.dtype), {.n = 1});
    return number;
  }

  // The label of a row; -1 for the ignored one.
  int64_t label(const Call& call, int64_t row) const {
    const int64_t at =
        reinterpret_cast<const int64_t*>(call.in.labels)[row * in_.labels.strides[0]];
    return at == form_.ignore_index ? -1 : at;
  }

  T weight_of(const Call& call, int64_t label) const {
    return form_.has_class_weight ? load(call.in.class_weight, in_.class_weight, label) : T(1);
  }

  // The sum of the weights of all labels that are not ignored. Raises for a label that is no class.
  double sum_weights(const Call& call) const {
    double total = 0;
    for (int64_t row = 0; row < rows_; ++row) {
      const int64_t at =
          reinterpret_cast<const int64_t*>(call.in.labels)[row * in_.labels.strides[0]];
      if (at == form_.ignore_index) continue;
      TORCH_CHECK_INDEX(at >= 0 && at < classes_, "Target ", at, " is out of bounds.");
      total += weight_of(call, at);
    }
    return total;
  }

  // The weights of a block of classes; nullptr if all are 1.
  const T* class_weights(const Call& call, int64_t begin, int64_t columns) const {
    if (!form_.has_class_weight) return nullptr;
    T* const weights = thread_memory<T, Use::kConverted>(kBlock);
    const Layout& layout = in_.class_weight;
    kernels_.load[static_cast<size_t>(layout.dtype)](weights,
                                                     at(call.in.class_weight, layout, begin),
                                                     {.n = columns, .stride = layout.strides[0]});
    return weights;
  }

  double sum_class_weights(const Call& call) const {
    double sum = static_cast<double>(classes_);
    if (!form_.has_class_weight || !form_.has_all_rows()) return sum;
    sum = 0;
    for (int64_t begin = 0; begin < classes_; begin += kBlock) {
      const int64_t columns = std::min(kBlock, classes_ - begin);
      const T* weights = class_weights(call, begin, columns);
      sum = std::accumulate(weights, weights + columns, sum);
    }
    return sum;
  }

  void lay_out(Call& call) const {
    T* next = reinterpret_cast<T*>(call.out.workspace);
    const auto take = [&](int64_t of_row) {
      T* taken = next;
      next += form_.rows * of_row;
      return taken;
    };
    // Doubles come first, because of their alignment.
    if (form_.has_sums) call.log_sums = reinterpret_cast<double*>(take(2 * form_.groups));
    call.largest = take(form_.groups);
    call.sums = take(form_.groups);
    call.row_largest = take(1);
    call.row_scale = take(1);
    call.picked = take(1);
    if (form_.has_grad()) call.logits = take(classes_);
    if (form_.has_hidden_grad) call.hidden_grads = take(form_.groups * width_);
    if (form_.has_row_list) call.copied = take(width_);
    if (form_.has_sums_grad) call.row_sums_grad = take(1);
  }

  // Clears sums to which no chunk will add.
  void clear_sums(const Call& call) const {
    if (form_.has_hidden_grad && !form_.has_row_list) {
      std::fill_n(reinterpret_cast<T*>(call.out.hidden_grad), rows_ * width_, T(0));
    }
    if (form_.has_weight_grad) {
      std::fill_n(reinterpret_cast<T*>(call.out.weight_grad), classes_ * width_, T(0));
    }
    if (form_.has_bias_grad) {
      std::fill_n(reinterpret_cast<T*>(call.out.bias_grad), classes_, T(0));
    }
  }

  // Returns the sum of the losses of the chunk.
  double run_chunk(const Call& call) const {
    make_logits(call);
    const double loss = finish_rows(call);
    if (!form_.has_grad()) return loss;
    parallel_for(0, groups_, 1, [&](int64_t begin, int64_t end) {
      for (int64_t group = begin; group < end; ++group) make_gradients(call, group);
    });
    if (form_.has_hidden_grad) add_groups(call);
    return loss;
  }

  // Calls each(first class, number of classes) for the blocks of a group.
  template <typename Each>
  void for_blocks(int64_t group, Each each) const {
    for (int64_t block = group * blocks_of_group_; block < (group + 1) * blocks_of_group_;
         ++block) {
      const int64_t begin = block * kBlock;
      if (begin < classes_) each(begin, std::min(kBlock, classes_ - begin));
    }
  }

  static const char* at(const char* base, const Layout& layout, int64_t i) {
    return base + i * layout.strides[0] * ir::size_bytes(layout.dtype);
  }

  // The rows that are not among the `count` rows to compute.
  std::vector<int64_t> rows_beside(const Call& call, int64_t count) const {
    std::vector<int64_t> others;
    for (int64_t row = 0, at = 0; row < rows_; ++row) {
      const bool is_listed =
          at < count && row == (call.listed == nullptr ? call.offset + at : call.listed[at]);
      if (is_listed) {
        ++at;
      } else {
        others.push_back(row);
      }
    }
    return others;
  }

  const char* hidden_rows(const Call& call) const {
    const bool lies = in_.hidden.strides[0] == width_ && in_.hidden.strides[1] == 1;
    if (!form_.has_row_list || (call.listed == nullptr && lies)) {
      return at(call.in.hidden, in_.hidden, call.number(0));
    }
    const int64_t size = ir::size_bytes(in_.hidden.dtype);
    char* const copied = reinterpret_cast<char*>(call.copied);
    parallel_for(0, call.rows, 64, [&](int64_t begin, int64_t end) {
      for (int64_t r = begin; r < end; ++r) {
        const char* from = at(call.in.hidden, in_.hidden, call.number(r));
        char* const to = copied + r * width_ * size;
        if (in_.hidden.strides[1] == 1) {
          std::memcpy(to, from, static_cast<size_t>(width_ * size));
          continue;
        }
        for (int64_t i = 0; i < width_; ++i) {
          std::memcpy(to + i * size, from + i * in_.hidden.strides[1] * size,
                      static_cast<size_t>(size));
        }
      }
    });
    return copied;
  }

  void make_logits(const Call& call) const {
    parallel_for(0, groups_, 1, [&](int64_t begin, int64_t end) {
      for (int64_t group = begin; group < end; ++group) make_logits(call, group);
    });
  }

  void make_logits(const Call& call, int64_t group) const {
    T* const largest = call.largest + group * form_.rows;
    T* const sums = call.sums + group * form_.rows;
    std::fill_n(largest, call.rows, -std::numeric_limits<T>::infinity());
    std::fill_n(sums, call.rows, T(0));
    double* const log_sums = form_.has_sums ? call.log_sums + group * form_.rows : nullptr;
    if (form_.has_sums) std::fill_n(log_sums, call.rows, 0.0);
    for_blocks(group, [&](int64_t begin, int64_t columns) {
      T* const block = call.logits != nullptr ? call.logits + begin
                                              : thread_memory<T, Use::kHead>(form_.rows * kBlock);
      std::array<const void*, 4> factors = {call.hidden, at(call.in.weight, in_.weight, begin),
                                            call.first_rows};
      if (form_.has_bias) {
        factors[2] = at(call.in.bias, in_.bias, begin);
        factors[3] = call.first_rows;
      }
      void* result = block;
      products_.at(columns).logits->run(factors.data(), &result);
      const T* weights = form_.has_sums ? class_weights(call, begin, columns) : nullptr;
      const double weight_sum = weights == nullptr
                                    ? static_cast<double>(columns)
                                    : std::accumulate(weights, weights + columns, 0.0);
      for (int64_t r = 0; r < call.rows; ++r) {
        T* const row = block + r * row_;
        if (form_.soft_cap != 0) cap(row, columns);
        if (form_.has_logits) store_logits(call, call.number(r), begin, columns, row);
        if (!call.has_loss) continue;
        const int64_t named = label(call, call.number(r)) - begin;
        if (named >= 0 && named < columns) call.picked[r] = row[named];
        const T here = add_row(largest[r], sums[r], row, columns);
        if (form_.has_sums) log_sums[r] += sum_row(row, here, weights, weight_sum, columns);
      }
    });
  }

  void store_logits(const Call& call, int64_t row, int64_t begin, int64_t columns,
                    const T* from) const {
    const Layout& to = out_.logits;
    const int64_t offset = row * to.strides[0] + begin * to.strides[1];
    kernels_.store[static_cast<size_t>(to.dtype)](
        call.out.logits + offset * ir::size_bytes(to.dtype), from,
        {.n = columns, .stride = to.strides[1]});
  }

  void apply(Opcode op, T* row, T number, int64_t columns) const {
    kernels_.elementwise[static_cast<size_t>(op)][2](row, row, &number, nullptr, columns);
  }

  void cap(T* row, int64_t columns) const {
    apply(Opcode::kMul, row, static_cast<T>(1 / form_.soft_cap), columns);
    kernels_.elementwise[static_cast<size_t>(Opcode::kTanh)][0](row, row, nullptr, nullptr,
                                                                columns);
    apply(Opcode::kMul, row, static_cast<T>(form_.soft_cap), columns);
  }

  // The sum of logits times weights. Distances from one logit are summed, and that logit is added
  // in float64, so that large logits lose no digits.
  double sum_row(const T* row, T one, const T* weights, double weight_sum, int64_t columns) const {
    if (!std::isfinite(one)) one = T(0);
    T* const distances = thread_memory<T, Use::kSums>(kBlock);
    const auto of = [&](Opcode op) { return kernels_.elementwise[static_cast<size_t>(op)]; };
    of(Opcode::kSub)[2](distances, row, &one, nullptr, columns);
    if (weights != nullptr) of(Opcode::kMul)[0](distances, distances, weights, nullptr, columns);
    T sum = 0;
    kernels_.sum_rows(&sum, distances, 1, columns);
    return static_cast<double>(sum) + static_cast<double>(one) * weight_sum;
  }

  // Adds a part of a row to the running maximum and sum. Returns the largest number of the part.
  T add_row(T& largest, T& sum, const T* row, int64_t columns) const {
    T* const powers = thread_memory<T, Use::kSums>(kBlock);
    T here = -std::numeric_limits<T>::infinity();
    kernels_.max_rows(&here, row, 1, columns);
    const T added = is_lowest(here) ? T(0) : kernels_.exp_row(powers, row, here, columns);
    join(largest, sum, here, added);
    return here;
  }

  static bool is_lowest(T number) { return number == -std::numeric_limits<T>::infinity(); }

  // A NaN becomes the maximum, and the sum becomes NaN with it.
  static void join(T& largest, T& sum, T other, T added) {
    if (is_lowest(other)) return;
    if (other > largest || std::isnan(other)) {
      sum = is_lowest(largest) ? added : sum * std::exp(largest - other) + added;
      largest = other;
    } else {
      sum += added * std::exp(other - largest);
    }
  }

  double finish_rows(const Call& call) const {
    double loss = 0;
    for (int64_t r = 0; r < call.rows; ++r) {
      T largest = -std::numeric_limits<T>::infinity(), sum = 0;
      for (int64_t group = 0; group < groups_; ++group) {
        const int64_t i = group * form_.rows + r;
        join(largest, sum, call.largest[i], call.sums[i]);
      }
      const int64_t row = call.number(r), named = label(call, row);
      const T weight = named < 0 ? T(0) : weight_of(call, named);
      double of_row = 0;
      if (named >= 0) {
        of_row = static_cast<double>(weight) *
                 static_cast<double>((largest - call.picked[r]) + std::log(sum));
      }
      loss += of_row;
      if (form_.reduction == ops::Reduction::kNone) {
        reinterpret_cast<T*>(call.out.loss)[row] = static_cast<T>(of_row);
      }
      const double logsumexp = static_cast<double>(largest) + std::log(static_cast<double>(sum));
      if (form_.has_all_rows()) write_sums(call, r, logsumexp);
      scale_row(call, r, named < 0 ? 0 : weight * call.factor, logsumexp);
      call.row_largest[r] = largest;
      call.row_scale[r] /= sum;
    }
    return loss;
  }

  void write_sums(const Call& call, int64_t r, double logsumexp) const {
    const int64_t row = call.number(r);
    if (form_.has_logsumexp) {
      reinterpret_cast<T*>(call.out.logsumexp)[row] = static_cast<T>(logsumexp);
    }
    if (!form_.has_sums) return;
    double sum = -call.class_sum * logsumexp;
    for (int64_t group = 0; group < groups_; ++group) sum += call.log_sums[group * form_.rows + r];
    reinterpret_cast<T*>(call.out.sums)[row] = static_cast<T>(sum);
  }

  // Computes the factor of a row's probabilities, and the number that is subtracted from that of
  // its label.
  void scale_row(const Call& call, int64_t r, double factor, double logsumexp) const {
    const int64_t row = call.number(r);
    // An ignored row stays zero even if the gradient of its loss is infinite.
    if (form_.has_loss_grad && factor != 0) {
      factor *= load(call.in.loss_grad, in_.loss_grad, row);
    }
    call.picked[r] = static_cast<T>(factor);
    if (form_.has_sums_grad) {
      call.row_sums_grad[r] = load(call.in.sums_grad, in_.sums_grad, row);
      factor -= call.row_sums_grad[r] * call.class_sum;
    }
    if (form_.has_square_grad) {
      factor += load(call.in.square_grad, in_.square_grad, row) * logsumexp;
    }
    call.row_scale[r] = static_cast<T>(factor);
  }

  void make_gradients(const Call& call, int64_t group) const {
    T* const sums =
        call.hidden_grads == nullptr ? nullptr : call.hidden_grads + group * form_.rows * width_;
    if (sums != nullptr) std::fill_n(sums, call.rows * width_, T(0));
    for_blocks(group, [&](int64_t begin, int64_t columns) {
      const Products& products = products_.at(columns);
      const void* grads = make_block(call, begin, columns);
      if (sums != nullptr) {
        const std::array<const void*, 4> factors = {grads, at(call.in.weight, in_.weight, begin),
                                                    sums, call.first_rows};
        void* result = sums;
        products.hidden_grad->run(factors.data(), &result);
      }
      if (form_.has_weight_grad) {
        T* const there = reinterpret_cast<T*>(call.out.weight_grad) + begin * width_;
        const bool is_first = call.row == 0;
        const std::array<const void*, 4> factors = {
            grads, call.hidden, is_first ? static_cast<const void*>(call.first_rows) : there,
            call.first_rows};
        void* result = there;
        (is_first ? products.weight_grad : products.more_weight_grad)->run(factors.data(), &result);
      }
    });
  }

  // Turns the logits of a block into their gradients, in the form that the products read.
  const void* make_block(const Call& call, int64_t begin, int64_t columns) const {
    T* const block = call.logits + begin;
    uint16_t* const pairs =
        pairs_ ? thread_memory<uint16_t, Use::kParts>(form_.rows * kBlock) : nullptr;
    T* const bias_grad =
        form_.has_bias_grad ? reinterpret_cast<T*>(call.out.bias_grad) + begin : nullptr;
    if (bias_grad != nullptr && call.row == 0) std::fill_n(bias_grad, columns, T(0));
    const T* weights = form_.has_sums_grad ? class_weights(call, begin, columns) : nullptr;
    for (int64_t r = 0; r < call.rows; ++r) {
      T* const row = block + r * row_;
      const T sums_grad = form_.has_sums_grad ? call.row_sums_grad[r] : T(0);
      const int64_t named = label(call, call.number(r));
      const bool is_finite = std::isfinite(call.row_largest[r]);
      const bool is_idle = named < 0 && sums_grad == T(0) && !form_.has_square_grad;
      if (is_idle) {
        // The gradient is zero times the probabilities: NaN if these are NaN.
        std::fill_n(row, columns, is_finite ? T(0) : std::numeric_limits<T>::quiet_NaN());
      } else {
        make_row(call, r, row, named - begin, sums_grad, weights, columns);
      }
      if (bias_grad != nullptr && (!is_idle || !is_finite)) {
        kernels_.add_rows(bias_grad, row, 1, columns);
      }
      if (pairs_) {
        kernels_.store[static_cast<size_t>(ir::DType::kBFloat16)](pairs + r * kBlock, row,
                                                                  {.n = columns});
      }
    }
    return pairs_ ? static_cast<const void*>(pairs) : block;
  }

  // Computes the gradient of a row whose label is class `named` of the block.
  void make_row(const Call& call, int64_t r, T* row, int64_t named, T sums_grad, const T* weights,
                int64_t columns) const {
    const auto of = [&](Opcode op) { return kernels_.elementwise[static_cast<size_t>(op)]; };
    T* const capped = thread_memory<T, Use::kSums>(kBlock);
    if (form_.soft_cap != 0) {
      const T inverse = static_cast<T>(1 / form_.soft_cap);
      of(Opcode::kMul)[2](capped, row, &inverse, nullptr, columns);
    }
    kernels_.exp_row(row, row, call.row_largest[r], columns);
    apply(Opcode::kMul, row, call.row_scale[r], columns);
    if (sums_grad != T(0) && weights == nullptr) apply(Opcode::kAdd, row, sums_grad, columns);
    if (sums_grad != T(0) && weights != nullptr) {
      of(Opcode::kMulAdd)[2](row, weights, &sums_grad, row, columns);
    }
    if (named >= 0 && named < columns) row[named] -= call.picked[r];
    if (form_.soft_cap != 0) of(Opcode::kTanhGrad)[0](row, row, capped, nullptr, columns);
  }

  void add_groups(const Call& call) const {
    T* const result = reinterpret_cast<T*>(call.out.hidden_grad);
    const int64_t grain = std::max<int64_t>((1 << 15) / std::max<int64_t>(width_, 1), 1);
    parallel_for(0, call.rows, grain, [&](int64_t begin, int64_t end) {
      for (int64_t r = begin; r < end; ++r) {
        T* const row = result + call.number(r) * width_;
        const T* from = call.hidden_grads + r * width_;
        std::copy(from, from + width_, row);
        for (int64_t group = 1; group < groups_; ++group) {
          kernels_.add_rows(row, from + group * form_.rows * width_, 1, width_);
        }
      }
    });
  }

  const ops::LinearLoss form_;
  const Isa isa_;
  const Kernels<T>& kernels_;
  const Operands<Layout> in_;
  const Results<Layout> out_;
  int64_t rows_ = 0, width_ = 0, classes_ = 0;
  int64_t row_ = 0;  // distance from a row of logits to the next
  int64_t groups_ = 0, blocks_of_group_ = 0;
  bool pairs_ = false;  // products of bfloat16 are summed in float32
  std::map<int64_t, Products> products_;
};

}  // namespace

std::unique_ptr<const Kernel> make_linear_loss(const BoundNode& bound) {
  const auto make = [&]<typename T>() {
    return std::make_unique<const LinearCrossEntropy<T>>(bound.node, bound.inputs, bound.outputs,
                                                         isa_of(bound));
  };
  if (bound.inputs.at(0).dtype == ir::DType::kDouble) return make.operator()<double>();
  return make.operator()<float>();
}

}  // namespace torch_ort::cpu
