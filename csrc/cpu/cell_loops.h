// What recurrent layers compute at one time beside their products, in one pass over the memory. A
// part of kernels_loops.h; everything here has internal linkage for the reason given there.
#pragma once

#include "cpu/kernels.h"
#include "cpu/pointwise_loops.h"

namespace torch_ort::cpu {
namespace {

template <typename T>
inline Vec<T> numbers_at(const T* from, int64_t i, int64_t count) {
  return Operand<T, false>(from).at(i, count);
}

template <typename T>
void lstm(const LstmRow<T>& row) {
  for_each_vector<T>(row.n, [&row](int64_t i, int64_t count) {
    const Vec<T> input = sigmoid(numbers_at(row.input, i, count));
    const Vec<T> forget = sigmoid(numbers_at(row.forget, i, count));
    const Vec<T> fresh = tanh(numbers_at(row.fresh, i, count));
    const Vec<T> output = sigmoid(numbers_at(row.output, i, count));
    const Vec<T> memory = at::vec::fmadd(forget, numbers_at(row.memory, i, count), input * fresh);
    put(row.input, i, count, input);
    put(row.forget, i, count, forget);
    put(row.fresh, i, count, fresh);
    put(row.output, i, count, output);
    put(row.new_memory, i, count, memory);
    put(row.state, i, count, output * tanh(memory));
  });
}

// The gradient of the state after a time.
template <typename T, typename Row>
inline Vec<T> gradient_of_state(const Row& row, int64_t i, int64_t count) {
  const Vec<T> gradient = numbers_at<T>(row.of_state, i, count);
  return row.of_result == nullptr ? gradient : gradient + numbers_at(row.of_result, i, count);
}

template <typename T>
void lstm_grad(const LstmRowGrad<T>& row) {
  for_each_vector<T>(row.n, [&row](int64_t i, int64_t count) {
    const Vec<T> input = numbers_at(row.input, i, count), forget = numbers_at(row.forget, i, count);
    const Vec<T> fresh = numbers_at(row.fresh, i, count), output = numbers_at(row.output, i, count);
    const Vec<T> squashed = tanh(numbers_at(row.new_memory, i, count));
    const Vec<T> of_state = gradient_of_state<T>(row, i, count);
    const Vec<T> of_memory =
        numbers_at<T>(row.of_memory, i, count) + TanhGrad<T>::of(of_state * output, squashed);
    put(row.of_output, i, count, SigmoidGrad<T>::of(of_state * squashed, output));
    put(row.of_input, i, count, SigmoidGrad<T>::of(of_memory * fresh, input));
    put(row.of_forget, i, count,
        SigmoidGrad<T>::of(of_memory * numbers_at(row.memory, i, count), forget));
    put(row.of_fresh, i, count, TanhGrad<T>::of(of_memory * input, fresh));
    put(row.of_memory, i, count, of_memory * forget);
  });
}

template <typename T>
void gru(const GruRow<T>& row) {
  for_each_vector<T>(row.n, [&row](int64_t i, int64_t count) {
    const Vec<T> reset = sigmoid(numbers_at(row.reset, i, count));
    const Vec<T> update = sigmoid(numbers_at(row.update, i, count));
    const Vec<T> fresh = tanh(at::vec::fmadd(reset, numbers_at(row.hidden, i, count),
                                             numbers_at(row.fresh_part, i, count)));
    put(row.reset, i, count, reset);
    put(row.update, i, count, update);
    put(row.fresh, i, count, fresh);
    put(row.new_state, i, count,
        at::vec::fmadd(update, numbers_at(row.state, i, count) - fresh, fresh));
  });
}

template <typename T>
void gru_grad(const GruRowGrad<T>& row) {
  for_each_vector<T>(row.n, [&row](int64_t i, int64_t count) {
    const Vec<T> reset = numbers_at(row.reset, i, count), update = numbers_at(row.update, i, count);
    const Vec<T> fresh = numbers_at(row.fresh, i, count);
    const Vec<T> of_state = gradient_of_state<T>(row, i, count);
    const Vec<T> of_update =
        SigmoidGrad<T>::of((numbers_at(row.state, i, count) - fresh) * of_state, update);
    const Vec<T> carried = of_state * update;
    const Vec<T> of_fresh = TanhGrad<T>::of(of_state - carried, fresh);
    const Vec<T> of_reset = SigmoidGrad<T>::of(of_fresh * numbers_at(row.hidden, i, count), reset);
    put(row.of_reset, i, count, of_reset);
    put(row.of_hidden_reset, i, count, of_reset);
    put(row.of_update, i, count, of_update);
    put(row.of_hidden_update, i, count, of_update);
    put(row.of_fresh, i, count, of_fresh);
    put(row.of_hidden, i, count, of_fresh * reset);
    put(row.of_state, i, count, carried);
  });
}

}  // namespace
}  // namespace torch_ort::cpu
