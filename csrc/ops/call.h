// How a node runs: as a short list of calls of registered PyTorch operators. Calls are plain data.
// run/ binds them to the dispatcher, and plan/ decides where their results are in memory.
#pragma once

#include "ir/graph.h"

#include <complex>
#include <cstdint>
#include <deque>
#include <string>
#include <variant>
#include <vector>

namespace torch_ort::ops {

struct Arg;
using ArgList = std::vector<Arg>;

// One argument of a call; an empty Arg is None. Enumerations (dtype, layout, device, memory format)
// are given by PyTorch's names ("float32", "strided", "cuda:0", "contiguous_format"); the schema
// says which of them a string is.
struct Arg {
  std::variant<std::monostate, ir::Value*, bool, double, std::complex<double>, ir::Dim, std::string,
               ArgList>
      value;

  Arg() = default;
  Arg(ir::Value* v) {
    if (v != nullptr) value = v;
  }  // NOLINT: a missing value is None
  Arg(bool v) : value(v) {}                      // NOLINT
  Arg(double v) : value(v) {}                    // NOLINT
  Arg(std::complex<double> v) : value(v) {}      // NOLINT
  Arg(int v) : value(ir::Dim(v)) {}              // NOLINT
  Arg(int64_t v) : value(ir::Dim(v)) {}          // NOLINT
  Arg(ir::Dim v) : value(std::move(v)) {}        // NOLINT
  Arg(std::string v) : value(std::move(v)) {}    // NOLINT
  Arg(const char* v) : value(std::string(v)) {}  // NOLINT
  Arg(ArgList v) : value(std::move(v)) {}        // NOLINT
  static Arg list(const ir::Shape& dims);
  static Arg list(const std::vector<int64_t>& ints);
  static Arg values(const std::vector<ir::Value*>& values);

  bool is_none() const { return std::holds_alternative<std::monostate>(value); }
};

// One call. `args` are in the order of the schema. `outputs` are the tensors that it returns, with
// lists flattened; nullptr for those that nobody reads.
struct Call {
  std::string op;        // "aten::addmm"
  std::string overload;  // "", "Tensor", "out"
  ArgList args;
  std::vector<ir::Value*> outputs;
  const ir::Node* node = nullptr;  // the node that the call computes
};

// The calls of a graph while they are collected. A value between two calls of one node is a
// temporary: it belongs to the list, not to the graph.
struct CallList {
  std::vector<Call> calls;
  std::deque<ir::Value> temporaries;

  ir::Value* temporary(ir::Type type);
  void add(std::string op, std::string overload, ArgList args, std::vector<ir::Value*> outputs);
};

}  // namespace torch_ort::ops
