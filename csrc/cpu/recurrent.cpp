#include "cpu/recurrent.h"

#include "base/error.h"
#include "base/rounding.h"
#include "cpu/parallel.h"
#include "cpu/thread_memory.h"

#include <algorithm>
#include <array>
#include <vector>

namespace torch_ort::cpu {

namespace {

constexpr int64_t kWorkPerThread = 1 << 17;  // multiplications
// Fewer rows take a product as long as so many.
constexpr int64_t kLeastRows = 4;

// A right factor in panels. Its memory is the calling thread's, and serves until the next one of
// the same thread.
template <typename T>
class PackedFactor {
 public:
  // `count` columns of which each has `steps` numbers. Number p of column j is
  // from[j * across + p * along].
  struct Columns {
    const T* from;
    int64_t across, along, count, steps;
  };

  // Several factors of the same size, one after the other.
  PackedFactor(const Kernels<T>& kernels, const std::vector<Columns>& factors)
      : kernels_(kernels), columns_(factors.at(0).count), steps_(factors.at(0).steps) {
    const int64_t half = kernels.panel_width / 2;
    width_ = columns_ <= half ? half : kernels.panel_width;
    num_panels_ = ceil_div(columns_, width_);
    size_ = num_panels_ * width_ * steps_;
    T* to = thread_memory<T, Use::kWeight>(size_ * static_cast<int64_t>(factors.size()));
    data_ = to;
    for (const Columns& each : factors) {
      kernels.pack({.to = to,
                    .width = width_,
                    .steps = steps_,
                    .from = each.from,
                    .across = each.across,
                    .along = each.along,
                    .count = columns_});
      to += size_;
    }
  }

  // c <- start + a * factor number `i`, for `rows` rows of `a`; `start` may be nullptr.
  void multiply(int64_t i, int64_t rows, T* c, int64_t c_row, const T* start, int64_t start_row,
                const T* a, int64_t a_row) const {
    kernels_.multiply({.c = c,
                       .c_row = c_row,
                       .start = start,
                       .start_row = start_row,
                       .a = a,
                       .a_row = a_row,
                       .a_column = 1,
                       .b = data_ + i * size_,
                       .b_row = width_,
                       .b_panel = width_ * steps_,
                       .width = width_,
                       .num_panels = num_panels_,
                       .columns = columns_,
                       .m = rows,
                       .k = steps_});
  }

 private:
  const Kernels<T>& kernels_;
  int64_t columns_, steps_, width_ = 0, num_panels_ = 0, size_ = 0;
  const T* data_ = nullptr;
};

// What one thread computes: rows of the batch, from the first time to the last.
template <typename T>
struct Part {
  Part(const Recurrence<T>& whole, const Kernels<T>& of_isa, int64_t first, int64_t last)
      : kernels(of_isa),
        layer(whole),
        begin(first),
        rows(last - first),
        width(whole.width),
        gates(num_gates(whole.cell)),
        n(rows * whole.width) {}

  const Kernels<T>& kernels;
  const Recurrence<T>& layer;
  const int64_t begin, rows, width, gates;
  const int64_t n;  // numbers of the part's states

  // A point-wise word over the numbers of the states.
  void word(Opcode op, T* d, const T* a, const T* b = nullptr, const T* c = nullptr) const {
    kernels.elementwise[static_cast<size_t>(op)][0](d, a, b, c, n);
  }

  // The position in time of the i-th time that the layer looks at.
  int64_t time(int64_t i) const { return layer.reverse ? layer.steps - 1 - i : i; }

  // Of a tensor [steps, `parts`, batch, width]: the part's rows.
  template <typename N>
  N* rows_of(N* tensor, int64_t t, int64_t parts = 1, int64_t part = 0) const {
    return tensor + ((t * parts + part) * layer.batch + begin) * width;
  }
  // Of a tensor [steps, batch, gates * width]: the part's rows from one on, from a gate on.
  template <typename N>
  N* gate_of(N* tensor, int64_t t, int64_t gate = 0, int64_t row = 0) const {
    return tensor + ((t * layer.batch + begin + row) * gates + gate) * width;
  }
  int64_t gate_row() const { return gates * width; }
};

template <typename T>
class ForwardPart {
 public:
  ForwardPart(const Part<T>& part, const RecurrentForward<T>& forward,
              const PackedFactor<T>& weight)
      : part_(part),
        forward_(forward),
        weight_(weight),
        scratch_(thread_memory<T, Use::kStates>(num_kept(part.layer.cell) * part.n)) {}

  void run() {
    const T* before = part_.rows_of(part_.layer.state, 0);
    const T* memory =
        part_.layer.memory == nullptr ? nullptr : part_.rows_of(part_.layer.memory, 0);
    for (int64_t i = 0; i < part_.layer.steps; ++i) {
      t_ = part_.time(i);
      T* after = part_.rows_of(forward_.output, t_);
      switch (part_.layer.cell) {
        case Cell::kLstm: memory = lstm(before, memory, after); break;
        case Cell::kGru: gru(before, after); break;
        case Cell::kTanh:
          add_state(0, after, before);
          part_.word(Opcode::kTanh, after, after);
          break;
        case Cell::kRelu:
          add_state(0, after, before);
          part_.word(Opcode::kRelu, after, after);
          break;
      }
      before = after;
    }
    if (part_.layer.cell == Cell::kLstm) {
      std::copy_n(memory, part_.n, part_.rows_of(forward_.last_memory, 0));
    }
  }

 private:
  // What is kept of this time. Without backward all times have the same place.
  T* kept(int64_t part) const {
    if (forward_.kept != nullptr) {
      return part_.rows_of(forward_.kept, t_, num_kept(part_.layer.cell), part);
    }
    return scratch_ + part * part_.n;
  }

  // to <- x + W h of a gate
  void add_state(int64_t gate, T* to, const T* state) const {
    weight_.multiply(gate, part_.rows, to, part_.width, part_.gate_of(forward_.gates, t_, gate),
                     part_.gate_row(), state, part_.width);
  }

  const T* lstm(const T* before, const T* memory, T* after) {
    for (int64_t gate = 0; gate < 4; ++gate) add_state(gate, kept(gate), before);
    part_.kernels.lstm({.input = kept(0),
                        .forget = kept(1),
                        .fresh = kept(2),
                        .output = kept(3),
                        .memory = memory,
                        .new_memory = kept(4),
                        .state = after,
                        .n = part_.n});
    return kept(4);
  }

  void gru(const T* before, T* after) {
    T *reset = kept(0), *update = kept(1), *fresh = kept(2), *hidden = kept(3);
    add_state(0, reset, before);
    add_state(1, update, before);
    weight_.multiply(2, part_.rows, hidden, part_.width, forward_.bias, 0, before, part_.width);
    for (int64_t row = 0; row < part_.rows; ++row) {
      const int64_t at = row * part_.width;
      part_.kernels.gru({.reset = reset + at,
                         .update = update + at,
                         .hidden = hidden + at,
                         .fresh_part = part_.gate_of(forward_.gates, t_, 2, row),
                         .fresh = fresh + at,
                         .state = before + at,
                         .new_state = after + at,
                         .n = part_.width});
    }
  }

  const Part<T>& part_;
  const RecurrentForward<T>& forward_;
  const PackedFactor<T>& weight_;
  T* scratch_;
  int64_t t_ = 0;
};

// The number of buffers that backward computes in: the gradients of h and c, and zeros.
constexpr int64_t kBuffers = 3;

template <typename T>
class BackwardPart {
 public:
  BackwardPart(const Part<T>& part, const RecurrentBackward<T>& backward,
               const PackedFactor<T>& weight)
      : part_(part),
        backward_(backward),
        weight_(weight),
        scratch_(thread_memory<T, Use::kStates>(kBuffers * part.n)) {}

  void run() {
    begin_with(state(), backward_.last_gradient);
    begin_with(memory(), backward_.last_memory_gradient);
    begin_with(zeros(), nullptr);
    for (int64_t i = part_.layer.steps; i-- > 0;) {
      t_ = part_.time(i);
      before_ = i == 0 ? part_.rows_of(part_.layer.state, 0)
                       : part_.rows_of(backward_.output, part_.time(i - 1));
      of_result_ = backward_.output_gradient == nullptr
                       ? nullptr
                       : part_.rows_of(backward_.output_gradient, t_);
      switch (part_.layer.cell) {
        case Cell::kLstm: lstm(i); break;
        case Cell::kGru: gru(); break;
        case Cell::kTanh: rnn(Opcode::kTanhGrad); break;
        case Cell::kRelu: rnn(Opcode::kThresholdGrad); break;
      }
    }
    std::copy_n(state(), part_.n, part_.rows_of(backward_.state_gradient, 0));
    if (part_.layer.cell == Cell::kLstm) {
      std::copy_n(memory(), part_.n, part_.rows_of(backward_.memory_gradient, 0));
    }
  }

 private:
  T* buffer(int64_t i) const { return scratch_ + i * part_.n; }
  T* state() const { return buffer(0); }  // the gradient of h
  T* memory() const { return buffer(1); }
  T* zeros() const { return buffer(2); }
  const T* kept(int64_t part) const {
    return part_.rows_of(backward_.kept, t_, num_kept(part_.layer.cell), part);
  }

  void begin_with(T* to, const T* gradient) const {
    if (gradient == nullptr) {
      std::fill_n(to, part_.n, T(0));
    } else {
      std::copy_n(part_.rows_of(gradient, 0), part_.n, to);
    }
  }

  // The gradient of h before this time, through W h: added to `start`.
  void through_weight(const T* gradients, const T* start) const {
    weight_.multiply(0, part_.rows, state(), part_.width, start, part_.width,
                     part_.gate_of(gradients, t_), part_.gate_row());
  }

  void lstm(int64_t i) const {
    const T* memory_before = i == 0 ? part_.rows_of(part_.layer.memory, 0)
                                    : part_.rows_of(backward_.kept, part_.time(i - 1), 5, 4);
    T* const gradients = backward_.gates_gradient;
    for (int64_t row = 0; row < part_.rows; ++row) {
      const int64_t at = row * part_.width;
      part_.kernels.lstm_grad({.input = kept(0) + at,
                               .forget = kept(1) + at,
                               .fresh = kept(2) + at,
                               .output = kept(3) + at,
                               .memory = memory_before + at,
                               .new_memory = kept(4) + at,
                               .of_result = of_result(at),
                               .of_state = state() + at,
                               .of_memory = memory() + at,
                               .of_input = part_.gate_of(gradients, t_, 0, row),
                               .of_forget = part_.gate_of(gradients, t_, 1, row),
                               .of_fresh = part_.gate_of(gradients, t_, 2, row),
                               .of_output = part_.gate_of(gradients, t_, 3, row),
                               .n = part_.width});
    }
    through_weight(gradients, nullptr);
  }

  void gru() const {
    T *const of_x = backward_.gates_gradient, *const of_hidden = backward_.hidden_gradient;
    for (int64_t row = 0; row < part_.rows; ++row) {
      const int64_t at = row * part_.width;
      part_.kernels.gru_grad({.reset = kept(0) + at,
                              .update = kept(1) + at,
                              .fresh = kept(2) + at,
                              .hidden = kept(3) + at,
                              .state = before_ + at,
                              .of_result = of_result(at),
                              .of_state = state() + at,
                              .of_reset = part_.gate_of(of_x, t_, 0, row),
                              .of_update = part_.gate_of(of_x, t_, 1, row),
                              .of_fresh = part_.gate_of(of_x, t_, 2, row),
                              .of_hidden_reset = part_.gate_of(of_hidden, t_, 0, row),
                              .of_hidden_update = part_.gate_of(of_hidden, t_, 1, row),
                              .of_hidden = part_.gate_of(of_hidden, t_, 2, row),
                              .n = part_.width});
    }
    through_weight(of_hidden, state());
  }

  // `op` takes the gradient and the result; one with a threshold compares with zero.
  void rnn(Opcode op) const {
    T* gradient = part_.gate_of(backward_.gates_gradient, t_);  // as contiguous as a state
    const T* from = state();
    if (of_result_ != nullptr) {
      part_.word(Opcode::kAdd, gradient, state(), of_result_);
      from = gradient;
    }
    part_.word(op, gradient, from, part_.rows_of(backward_.output, t_), zeros());
    through_weight(backward_.gates_gradient, nullptr);
  }

  const T* of_result(int64_t at) const { return of_result_ == nullptr ? nullptr : of_result_ + at; }

  const Part<T>& part_;
  const RecurrentBackward<T>& backward_;
  const PackedFactor<T>& weight_;
  T* scratch_;
  const T* before_ = nullptr;     // h before this time
  const T* of_result_ = nullptr;  // the gradient of this time's output; nullptr: zeros
  int64_t t_ = 0;
};

// Calls `work` with each thread's part.
template <typename T, typename F>
void for_parts(const Recurrence<T>& layer, const Kernels<T>& kernels, F work) {
  const int64_t of_row = layer.steps * num_gates(layer.cell) * layer.width * layer.width;
  const int64_t grain =
      std::max(kLeastRows, ceil_div(kWorkPerThread, std::max<int64_t>(of_row, 1)));
  parallel_for(0, layer.batch, grain,
               [&](int64_t begin, int64_t end) { work(Part<T>(layer, kernels, begin, end)); });
}

struct CellRow {
  std::string_view name;
  int64_t gates, kept;
};

// In the order of Cell.
constexpr std::array<CellRow, 4> kCells = {{
    {"lstm", 4, 5},
    {"gru", 3, 4},
    {"rnn_tanh", 1, 0},
    {"rnn_relu", 1, 0},
}};

}  // namespace

Cell cell_from_name(std::string_view name) {
  for (size_t i = 0; i < kCells.size(); ++i) {
    if (kCells[i].name == name) return static_cast<Cell>(i);
  }
  throw UserError(concat("cell: got ", name, ", want lstm, gru, rnn_tanh or rnn_relu"));
}

int64_t num_gates(Cell cell) { return kCells.at(static_cast<size_t>(cell)).gates; }

int64_t num_kept(Cell cell) { return kCells.at(static_cast<size_t>(cell)).kept; }

template <typename T>
void run(const Recurrence<T>& layer, const RecurrentForward<T>& forward, Isa isa) {
  const Kernels<T>& all = kernels<T>(isa);
  const int64_t width = layer.width;
  if (layer.batch == 0 || width == 0) return;
  // By gates, so that the states of all rows in a gate are contiguous for the words.
  std::vector<typename PackedFactor<T>::Columns> gates;
  for (int64_t i = 0; i < num_gates(layer.cell); ++i) {
    gates.push_back({.from = layer.weight + i * width * width,
                     .across = width,
                     .along = 1,
                     .count = width,
                     .steps = width});
  }
  const PackedFactor<T> weight(all, gates);
  for_parts(layer, all, [&](const Part<T>& part) { ForwardPart<T>(part, forward, weight).run(); });
}

template <typename T>
void run(const Recurrence<T>& layer, const RecurrentBackward<T>& backward, Isa isa) {
  const Kernels<T>& all = kernels<T>(isa);
  const int64_t width = layer.width;
  if (layer.batch == 0 || width == 0) return;
  const PackedFactor<T> weight(all, {{.from = layer.weight,
                                      .across = 1,
                                      .along = width,
                                      .count = width,
                                      .steps = num_gates(layer.cell) * width}});
  for_parts(layer, all,
            [&](const Part<T>& part) { BackwardPart<T>(part, backward, weight).run(); });
}

template void run(const Recurrence<float>&, const RecurrentForward<float>&, Isa);
template void run(const Recurrence<double>&, const RecurrentForward<double>&, Isa);
template void run(const Recurrence<float>&, const RecurrentBackward<float>&, Isa);
template void run(const Recurrence<double>&, const RecurrentBackward<double>&, Isa);

}  // namespace torch_ort::cpu
