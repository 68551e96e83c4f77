#include "cuda/linear_loss.h"

#include "base/error.h"
#include "base/rounding.h"
#include "cuda/build.h"
#include "cuda/driver.h"
#include "cuda/faults.h"
#include "cuda/linear_loss_text.h"
#include "cuda/stream.h"
#include "ops/formula.h"
#include "ops/linear_loss_operands.h"
#include "region/bound_schedule.h"
#include "region/library.h"

#include <algorithm>
#include <bit>
#include <cstdint>
#include <limits>
#include <utility>

namespace torch_ort::cuda {

namespace {

using ir::DType;
using ops::LibraryWorkspace;
using region::DeviceMatrix;
using region::Layout;
using region::LibraryProduct;

// Numbers and structs that linear_loss.cuh has too.
constexpr int64_t kThreads = 512, kVectorBytes = 16, kLinesOfBias = 8;

template <typename T>
struct OfRows {
  const T* at = nullptr;
  int64_t stride = 0;

  OfRows from(int64_t row) const {
    return at == nullptr ? *this : OfRows{at + row * stride, stride};
  }
};
struct Classes {
  const void* weight = nullptr;
  int64_t stride = 0;
};
struct Labels {
  const int64_t* at;
  int64_t stride, ignored;
  int32_t columns, unused = 0;
  void* fault;

  Labels from(int64_t row) const { return {at + row * stride, stride, ignored, columns, 0, fault}; }
};
template <typename T>
struct Chunk {
  void* logits;
  int64_t row_stride;
  Labels labels;
  Classes classes;
  OfRows<T> loss_grad, sums_grad, square_grad;
  const T* totals;
  T *losses, *sums, *logsumexp;
  void* copy;
  T cap, inverse_cap, scale;
};

using Inputs = ops::LinearLossInputs<const void*>;
using Results = ops::LinearLossResults<void*>;

void* moved(void* data, DType dtype, int64_t elements) {
  return data == nullptr ? nullptr : static_cast<char*>(data) + elements * ir::size_bytes(dtype);
}

// The layouts of one node.
struct Problem {
  Problem(const ir::Node& node, const std::vector<Layout>& inputs,
          const std::vector<Layout>& outputs)
      : form(ops::linear_loss(node)),
        in(ops::linear_loss_inputs<Layout>(form, [&](int i) { return inputs.at(i); })),
        out(ops::linear_loss_results<Layout>(form, [&](int i) { return outputs.at(i); })) {
    ORT_CHECK(in.hidden.sizes.size() == 2 && in.weight.sizes.size() == 2,
              "LinearCrossEntropy: want two matrices");
    rows = in.hidden.sizes[0];
    width = in.hidden.sizes[1];
    classes = in.weight.sizes[0];
    dtype = in.hidden.dtype;
    sums = ops::computed_dtype(dtype);
    // The sizes of expanded inputs from a file may be anything.
    ORT_CHECK(classes < kMost && form.rows < kMost &&
                  static_cast<double>(form.rows) * static_cast<double>(classes) < 1e17,
              "LinearCrossEntropy: got chunks of more numbers than there can be");
    space = ops::library_workspace(form, classes, dtype);
    check();
    // See the header. The factor of each row is at most 1.
    if (dtype == DType::kHalf && form.is_mean()) {
      scale = std::min<int64_t>(std::bit_floor(static_cast<uint64_t>(std::max<int64_t>(rows, 1))),
                                int64_t{1} << 15);
    }
  }

  int64_t even_classes() const {
    const int64_t unit = kVectorBytes / ir::size_bytes(dtype);
    return classes / unit * unit;
  }

  static constexpr int64_t kMost = std::numeric_limits<int32_t>::max() - (int64_t{1} << 20);

  ops::LinearLoss form;
  ops::LinearLossInputs<Layout> in;
  ops::LinearLossResults<Layout> out;
  int64_t rows = 0, width = 0, classes = 0;
  DType dtype = DType::kUndefined, sums = DType::kUndefined;  // of logits, and of gradients
  LibraryWorkspace space;
  int64_t scale = 1;

 private:
  void check() const {
    using Sizes = std::vector<int64_t>;
    const auto fits = [](const Layout& layout, bool is_there, DType of, const Sizes& sizes) {
      return !is_there || (layout.dtype == of && layout.sizes == sizes);
    };
    const Sizes of_loss = form.reduction == ops::Reduction::kNone ? Sizes{rows} : Sizes{};
    const DType of_classes = in.class_weight.dtype;
    ORT_CHECK(ir::is_float(dtype) && fits(in.weight, true, dtype, {classes, width}) &&
                  fits(in.labels, true, DType::kInt64, {rows}) &&
                  fits(in.bias, form.has_bias, dtype, {classes}) &&
                  fits(in.class_weight, form.has_class_weight, of_classes, {classes}) &&
                  (!form.has_class_weight || ir::is_float(of_classes)) &&
                  fits(in.loss_grad, form.has_loss_grad, sums, of_loss) &&
                  fits(in.sums_grad, form.has_sums_grad, sums, {rows}) &&
                  fits(in.square_grad, form.has_square_grad, sums, {rows}) &&
                  fits(out.loss, true, sums, of_loss) &&
                  fits(out.workspace, true, sums, {space.size}) &&
                  fits(out.logits, form.has_logits, dtype, {rows, classes}) &&
                  fits(out.hidden_grad, form.has_hidden_grad, sums, {rows, width}) &&
                  fits(out.weight_grad, form.has_weight_grad, sums, {classes, width}) &&
                  fits(out.bias_grad, form.has_bias_grad, sums, {classes}) &&
                  fits(out.sums, form.has_sums, sums, {rows}) &&
                  fits(out.logsumexp, form.has_logsumexp, sums, {rows}),
              "LinearCrossEntropy: the operands do not fit together");
    // In float64 a class weight is not rounded to the float32 in which others are read.
    ORT_CHECK(!form.has_class_weight || sums == DType::kDouble || of_classes != DType::kDouble,
              "LinearCrossEntropy: got weights of classes in double, want ", ir::name(sums));
    ORT_CHECK(!form.has_row_list,
              "LinearCrossEntropy: got a list of rows, want none on this device");
    for (const Layout* each : {&out.loss, &out.workspace, &out.logits, &out.hidden_grad,
                               &out.weight_grad, &out.bias_grad, &out.sums, &out.logsumexp}) {
      ORT_CHECK(each->dtype == DType::kUndefined || region::lies_by_rows(*each),
                "LinearCrossEntropy: want results that lie by rows");
    }
  }
};

template <typename... Given>
void start(const KernelOfModule& kernel, int64_t blocks, Dim3 threads, int64_t shared_bytes,
           void* stream, Given... given) {
  const Launch launch{.grid = {static_cast<uint32_t>(blocks)},
                      .block = threads,
                      .shared_bytes = static_cast<uint32_t>(shared_bytes),
                      .stream = stream};
  Driver::get().start(kernel.get(), launch, given...);
}

// T: the dtype in which the kernels compute.
template <typename T>
class LinearLossKernel final : public region::Kernel {
 public:
  LinearLossKernel(Problem problem, const region::CodegenOptions& options)
      : of_(std::move(problem)),
        options_(options),
        text_(loss_text(of_.form, of_.dtype, of_.in.class_weight.dtype)),
        module_(build(text_.name, text_.text, {.dump_dir = options.dump_dir}, options.device)),
        weights_(module_, "linear_loss_weights"),
        rows_(module_, "linear_loss_rows"),
        sum_(module_, "linear_loss_sum"),
        bias_(module_, "linear_loss_bias") {}

  std::string str() const override {
    return concat("linear cross-entropy, ", of_.rows, " x ", of_.width, ", ", of_.classes,
                  " classes, ", of_.form.rows, " rows at a time\n");
  }

  void run(const void* const* inputs, void* const* outputs) const override {
    faults(options_.device).check();
    Call call{
        .in = ops::linear_loss_inputs<const void*>(of_.form, [&](int i) { return inputs[i]; }),
        .out = ops::linear_loss_results<void*>(of_.form, [&](int i) { return outputs[i]; }),
        .stream = current_stream(options_.device)};
    lay_out(call);
    start(weights_, 1, {kThreads}, kSharedBytes, call.stream, call.chunk.labels, of_.rows,
          call.chunk.classes, call.totals);
    // Without rows there is still a loss, and gradients that are zeros.
    const int64_t chunks = std::max<int64_t>(ceil_div(of_.rows, of_.form.rows), 1);
    for (int64_t chunk = 0; chunk < chunks; ++chunk) {
      call.first = chunk * of_.form.rows;
      call.rows = std::min(of_.form.rows, of_.rows - call.first);
      call.is_first = chunk == 0;
      call.is_last = chunk + 1 == chunks;
      run_chunk(call);
    }
    if (!options_.synchronize) return;
    Driver::get().synchronize(options_.device, call.stream, text_.name);
    faults(options_.device).check();
  }

 private:
  static constexpr int64_t kSharedBytes = kThreads / 32 * sizeof(T);

  struct Call {
    Inputs in;
    Results out;
    void* stream = nullptr;
    Chunk<T> chunk;  // as if it began with the first row
    T *totals = nullptr, *losses = nullptr;
    int64_t first = 0, rows = 0;  // of the chunk
    bool is_first = true, is_last = false;
  };

  void lay_out(Call& call) const {
    const auto of_rows = [](const void* data, const Layout& layout) {
      const bool is_by_row = !layout.strides.empty();
      return OfRows<T>{static_cast<const T*>(data), is_by_row ? layout.strides[0] : 0};
    };
    auto* const space = static_cast<T*>(call.out.workspace);
    call.totals = space + of_.space.totals;
    call.losses = space + of_.space.losses;
    const T cap = static_cast<T>(of_.form.soft_cap);
    call.chunk = {.logits = space,
                  .row_stride = of_.space.row_stride,
                  .labels = {static_cast<const int64_t*>(call.in.labels), of_.in.labels.strides[0],
                             of_.form.ignore_index, static_cast<int32_t>(of_.classes), 0,
                             faults(options_.device).word()},
                  .classes = {call.in.class_weight,
                              of_.form.has_class_weight ? of_.in.class_weight.strides[0] : 0},
                  .loss_grad = of_rows(call.in.loss_grad, of_.in.loss_grad),
                  .sums_grad = of_rows(call.in.sums_grad, of_.in.sums_grad),
                  .square_grad = of_rows(call.in.square_grad, of_.in.square_grad),
                  .totals = call.totals,
                  .losses = is_by_row() ? static_cast<T*>(call.out.loss) : call.losses,
                  .sums = static_cast<T*>(call.out.sums),
                  .logsumexp = static_cast<T*>(call.out.logsumexp),
                  .copy = call.out.logits,
                  .cap = cap,
                  .inverse_cap = T(1) / cap,
                  .scale = static_cast<T>(of_.scale)};
  }

  bool is_by_row() const { return of_.form.reduction == ops::Reduction::kNone; }

  void run_chunk(Call& call) const {
    const DeviceMatrix hidden =
        matrix(call.in.hidden, of_.in.hidden).rows_from(call.first, call.rows);
    const DeviceMatrix logits{call.chunk.logits,    of_.dtype, call.rows, of_.classes,
                              of_.space.row_stride, 1};
    if (call.rows > 0) {
      multiply_logits(call, hidden, logits);
      start(rows_, call.rows, {kThreads}, kSharedBytes, call.stream, chunk_of(call));
    }
    if (!is_by_row()) {
      start(sum_, 1, {kThreads}, kSharedBytes, call.stream, call.losses,
            static_cast<int32_t>(call.rows), int32_t{call.is_first}, int32_t{call.is_last},
            call.totals, call.out.loss);
    }
    if (of_.form.has_bias_grad && of_.classes > 0) sum_bias(call);
    if (of_.form.has_hidden_grad) multiply_hidden_grad(call, logits);
    if (of_.form.has_weight_grad) multiply_weight_grad(call, hidden, logits);
  }

  Chunk<T> chunk_of(const Call& call) const {
    Chunk<T> chunk = call.chunk;
    chunk.labels = chunk.labels.from(call.first);
    for (auto numbers : {&Chunk<T>::loss_grad, &Chunk<T>::sums_grad, &Chunk<T>::square_grad}) {
      chunk.*numbers = (chunk.*numbers).from(call.first);
    }
    if (is_by_row()) chunk.losses += call.first;
    if (chunk.sums != nullptr) chunk.sums += call.first;
    if (chunk.logsumexp != nullptr) chunk.logsumexp += call.first;
    chunk.copy = moved(chunk.copy, of_.dtype, call.first * of_.classes);
    return chunk;
  }

  static DeviceMatrix matrix(const void* data, const Layout& layout) {
    return {
        data, layout.dtype, layout.sizes[0], layout.sizes[1], layout.strides[0], layout.strides[1]};
  }

  // Calls `each` with the classes that the library multiplies at once: where they begin, and how
  // many they are.
  template <typename Each>
  void for_classes(const Each& each) const {
    const int64_t even = of_.even_classes();
    if (even > 0) each(0, even);
    if (even < of_.classes) each(even, of_.classes - even);
  }

  void multiply(const LibraryProduct& product) const {
    region::library().multiply(product, options_.device);
  }

  void multiply_logits(const Call& call, const DeviceMatrix& hidden,
                       const DeviceMatrix& logits) const {
    const DeviceMatrix weight = matrix(call.in.weight, of_.in.weight);
    for_classes([&](int64_t first, int64_t count) {
      LibraryProduct product{.result = logits.columns_from(first, count),
                             .a = hidden,
                             .b = weight.rows_from(first, count).turned()};
      if (of_.form.has_bias) {
        product.added = LibraryProduct::Added::kVector;
        product.vector_stride = of_.in.bias.strides[0];
        product.vector = static_cast<const char*>(call.in.bias) +
                         first * product.vector_stride * ir::size_bytes(of_.dtype);
      }
      multiply(product);
    });
  }

  void multiply_hidden_grad(const Call& call, const DeviceMatrix& gradient) const {
    const DeviceMatrix weight = matrix(call.in.weight, of_.in.weight);
    const DeviceMatrix whole = matrix(call.out.hidden_grad, of_.out.hidden_grad);
    auto added = LibraryProduct::Added::kNothing;
    const auto add = [&](int64_t first, int64_t count) {
      multiply({.result = whole.rows_from(call.first, call.rows),
                .a = gradient.columns_from(first, count),
                .b = weight.rows_from(first, count),
                .added = std::exchange(added, LibraryProduct::Added::kResult),
                .factor = 1.0 / static_cast<double>(of_.scale)});
    };
    if (of_.classes == 0) return add(0, 0);  // zeros
    for_classes(add);
  }

  void multiply_weight_grad(const Call& call, const DeviceMatrix& hidden,
                            const DeviceMatrix& gradient) const {
    const DeviceMatrix whole = matrix(call.out.weight_grad, of_.out.weight_grad);
    for_classes([&](int64_t first, int64_t count) {
      multiply({.result = whole.rows_from(first, count),
                .a = gradient.columns_from(first, count).turned(),
                .b = hidden,
                .added = call.is_first ? LibraryProduct::Added::kNothing
                                       : LibraryProduct::Added::kResult,
                .factor = 1.0 / static_cast<double>(of_.scale)});
    });
  }

  void sum_bias(const Call& call) const {
    const int64_t columns = 32 * kVectorBytes / ir::size_bytes(of_.dtype);
    start(bias_, ceil_div(of_.classes, columns), {32, kLinesOfBias},
          kLinesOfBias * columns * static_cast<int64_t>(sizeof(T)), call.stream, call.chunk.logits,
          of_.space.row_stride, static_cast<int32_t>(call.rows), static_cast<int32_t>(of_.classes),
          static_cast<T>(1.0 / static_cast<double>(of_.scale)), int32_t{call.is_first},
          call.out.bias_grad);
  }

  Problem of_;
  region::CodegenOptions options_;
  LossText text_;
  std::shared_ptr<const Module> module_;
  KernelOfModule weights_, rows_, sum_, bias_;
};

}  // namespace

std::unique_ptr<const region::Kernel> make_linear_loss(const region::BoundNode& bound) {
  Problem problem(bound.node, bound.inputs, bound.outputs);
  if (problem.sums == DType::kDouble) {
    return std::make_unique<const LinearLossKernel<double>>(std::move(problem), bound.options);
  }
  return std::make_unique<const LinearLossKernel<float>>(std::move(problem), bound.options);
}

}  // namespace torch_ort::cuda
