// Estimates how long nodes run and how long it takes to move and to hold values, from the speeds of
// the machine. All times are in microseconds. Where sizes are symbols, those of the captured call
// are taken.
#pragma once

#include "ir/graph.h"

#include <cstdint>

namespace torch_ort::passes {

// The peak speeds of the machine, as measured. The defaults are those of two cores of a processor.
struct Speeds {
  double flops_of_float = 50e9;  // floating-point operations of products a second
  double flops_of_double = 25e9;
  double flops_of_short = 50e9;  // of bfloat16 and float16
  double bytes = 10e9;           // bytes that copies read and write a second
  // What a collective takes that moves nothing, in microseconds, and the bytes that it moves in a
  // second: gloo between processes of one machine (benchmarks/results/decisions.md).
  double collective_us = 100;
  double collective_bytes = 1e9;
};

// How the ranks of a graph communicate.
struct Communication {
  // In place of those of Speeds; 0: not given.
  double collective_us = 0, collective_bytes = 0;
  // Whether a gather may be repeated in the backward half to save memory.
  bool gathers_again = true;
};

// The speeds by which all ranks of a graph decide alike, as measured ones would not: those of its
// device, as far as `communication` does not give them.
Speeds speeds_of_ranks(const ir::Graph& graph, const Communication& communication);

class Costs {
 public:
  // Times of work in regions and of moving and holding are all in proportion to one speed, that of
  // memory. A choice among these alone needs no measured speeds.
  explicit Costs(const ir::Graph& graph, const Speeds& speeds = {})
      : graph_(graph), speeds_(speeds) {}

  // The bytes of a value; 0 if its type is not known.
  int64_t num_bytes(const ir::Value& value) const;
  // To read or write a value once.
  double to_move(const ir::Value& value) const;
  // To save a value for the backward half, beside moving it.
  double to_hold(const ir::Value& value) const;
  // To run a node inside of a region, where its inputs and results are not moved.
  double to_compute(const ir::Node& node) const;
  // To run a node by itself.
  double to_run(const ir::Node& node) const;
  // From the start of a collective to its end.
  double to_communicate(const ir::Node& start) const;

 private:
  double to_move_bytes(double bytes) const;
  double count(const ir::Value& value) const;
  double size_from_end(const ir::Value& value, size_t from_end) const;
  double product_flops(const ir::Node& node) const;
  double convolution_flops(const ir::Node& node) const;
  double attention_flops(const ir::Node& node) const;

  const ir::Graph& graph_;
  const Speeds speeds_;
};

}  // namespace torch_ort::passes
