// The sequential part of a recurrent layer: what each time of the sequence needs of the one before.
//
// The input's part of the gates is a product over all times at once, and so are the gradients of
// both weights; these are products of the graph. What is left here is, for each time, the product
// of the state with the recurrent weight and the point-wise words of the cell. The weight is packed
// once for all times. Threads divide the batch, whose rows do not depend on each other, so no
// thread waits for another within a sequence. Each number is summed in one order, whatever the
// number of threads.
//
// The formulas are those of torch.nn.LSTM, GRU and RNN. With h the state before a time, x that
// time's part of the input, W the recurrent weight, and gates in PyTorch's order:
//
//   LSTM  i, f, g, o = sigmoid, sigmoid, tanh, sigmoid of x + W h
//         c <- f c + i g;  h <- o tanh(c)
//   GRU   r, z = sigmoid of x + W h;  m = W h + bias;  n = tanh(x + r m)
//         h <- n + z (h - n)
//   RNN   h <- tanh or relu of x + W h
#pragma once

#include "cpu/kernels.h"

#include <cstdint>
#include <string_view>

namespace torch_ort::cpu {

enum class Cell : uint8_t { kLstm, kGru, kTanh, kRelu };

// From "lstm", "gru", "rnn_tanh" or "rnn_relu". Throws UserError on another name.
Cell cell_from_name(std::string_view name);

// How many parts of the width of a state a cell computes by the recurrent weight.
int64_t num_gates(Cell cell);
// What forward keeps of each time for backward, in parts of the size of a state: of an LSTM i, f,
// g, o and c; of a GRU r, z, n and m.
int64_t num_kept(Cell cell);

// One layer in one direction. All tensors are row-major and of dtype T.
template <typename T>
struct Recurrence {
  Cell cell = Cell::kLstm;
  bool reverse = false;                     // from the last time to the first
  int64_t steps = 0, batch = 0, width = 0;  // times, sequences, numbers of a state
  const T* weight = nullptr;                // [gates * width, width]
  const T* state = nullptr;                 // [batch, width], before the first time
  const T* memory = nullptr;                // c of an LSTM before the first time
};

template <typename T>
struct RecurrentForward {
  const T* gates = nullptr;  // x: [steps, batch, gates * width]
  const T* bias = nullptr;   // of m of a GRU: [width]; nullptr: zeros
  T* output = nullptr;       // h of each time: [steps, batch, width]
  T* last_memory = nullptr;  // c of an LSTM after the last time
  T* kept = nullptr;         // [steps, num_kept, batch, width]; nullptr without backward
};

template <typename T>
struct RecurrentBackward {
  const T* output = nullptr;  // as forward has given it
  const T* kept = nullptr;
  const T* output_gradient = nullptr;       // [steps, batch, width]; nullptr: zeros
  const T* last_gradient = nullptr;         // of h after the last time; nullptr: zeros
  const T* last_memory_gradient = nullptr;  // of c after the last time; nullptr: zeros
  T* gates_gradient = nullptr;              // of x: [steps, batch, gates * width]
  // Of W h and the bias, for a GRU, which differs from that of x in m alone.
  T* hidden_gradient = nullptr;
  T* state_gradient = nullptr;   // [batch, width]
  T* memory_gradient = nullptr;  // of an LSTM
};

template <typename T>
void run(const Recurrence<T>& layer, const RecurrentForward<T>& forward, Isa isa);
template <typename T>
void run(const Recurrence<T>& layer, const RecurrentBackward<T>& backward, Isa isa);

}  // namespace torch_ort::cpu
