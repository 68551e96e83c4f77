// Finds gradients that are a multiple of one number of the backward half, such as the gradient of
// the loss. What such a gradient is where that number is 1 can be computed in the forward half.
#pragma once

#include "ir/graph.h"
#include "ops/writer.h"
#include "passes/memory.h"

#include <optional>
#include <unordered_map>
#include <unordered_set>
#include <vector>

namespace torch_ort::passes {

class Multiples {
 public:
  // A value is dependent if a result of `first`, or a result of the YieldOp, leads to it. Nodes
  // that a rewrite adds afterwards are not known here.
  Multiples(const ir::Graph& graph, const SharedMemory& memory, const ir::Node& first);

  bool is_dependent(const ir::Value* value) const;
  // The one dependent input of the value's producer, if the producer views it or multiplies by it;
  // else nullptr.
  const ir::Value* dependent_factor(const ir::Value* value) const;

  // The values to factor out: a number of the backward half, and one that has a number for each
  // row. `rows` may be nullptr.
  struct Factors {
    const ir::Value *number = nullptr, *rows = nullptr;
  };
  // How often each factor occurs in a product.
  struct Degrees {
    int number = 0, rows = 0;
    bool operator==(const Degrees&) const = default;
  };
  // The degrees of a value; nothing if it is not a product of the factors and of independent
  // values.
  std::optional<Degrees> degrees(const ir::Value* value, const Factors& factors) const {
    Found found;
    return degrees(value, factors, found);
  }

  // The nodes between the factors and a value that has degrees, and the independent values that
  // these nodes read.
  struct Parts {
    std::vector<ir::Node*> nodes;
    std::vector<ir::Value*> independent;
  };
  Parts parts_of(const ir::Value* value, const Factors& factors) const;

  // Writes the nodes that compute the value, with ones in place of its factors, in `dtype`. Returns
  // their result.
  ir::Value* write(ops::Writer& writer, const ir::Value* value, const Factors& factors,
                   ir::DType dtype) const {
    Written written;
    return write(writer, value, factors, dtype, written);
  }

  // Whether `value` can be computed before `node`; move_before() moves its producers there.
  bool can_stand_before(const ir::Value* value, const ir::Node& node) const {
    std::unordered_set<const ir::Node*> seen;
    return can_stand_before(value, node, seen);
  }
  void move_before(ir::Graph& graph, const ir::Value* value, ir::Node& node);

 private:
  using Found = std::unordered_map<const ir::Value*, std::optional<Degrees>>;
  using Written = std::unordered_map<const ir::Value*, ir::Value*>;

  std::optional<Degrees> degrees(const ir::Value* value, const Factors& factors,
                                 Found& found) const;
  std::optional<Degrees> degrees_of_dependent(const ir::Value* value, const Factors& factors,
                                              Found& found) const;
  ir::Value* write(ops::Writer& writer, const ir::Value* value, const Factors& factors,
                   ir::DType dtype, Written& written) const;
  ir::Value* write_dependent(ops::Writer& writer, const ir::Value* value, const Factors& factors,
                             ir::DType dtype, Written& written) const;
  bool can_stand_before(const ir::Value* value, const ir::Node& node,
                        std::unordered_set<const ir::Node*>& seen) const;
  bool is_behind(const ir::Node* producer, const ir::Node& node) const;

  const SharedMemory memory_;
  std::unordered_set<const ir::Node*> dependent_;
  std::unordered_map<const ir::Node*, int> positions_;
};

}  // namespace torch_ort::passes
