// Gradients that are multiples of one number of the backward half. What they are where that number
// is 1 can be computed in the forward half.
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
  // Late is what depends on the results of `first`, or on what comes back at the border. Nodes that
  // a rewrite makes afterwards are not known.
  Multiples(const ir::Graph& graph, const SharedMemory& memory, const ir::Node& first);

  bool is_late(const ir::Value* value) const;
  // What is late among the inputs of the producer, if that is one value and its node multiplies it,
  // or looks at it; else nullptr.
  const ir::Value* late_factor(const ir::Value* value) const;

  // `rows` may be nullptr.
  struct Factors {
    const ir::Value *number = nullptr, *rows = nullptr;
  };
  // How often each of them is a factor of a value.
  struct Degrees {
    int number = 0, rows = 0;
    bool operator==(const Degrees&) const = default;
  };
  // Nothing if the value is no product of these and of what is early.
  std::optional<Degrees> degrees(const ir::Value* value, const Factors& factors) const {
    Found found;
    return degrees(value, factors, found);
  }

  // What a value that has degrees is made of: nodes that come after the factors, and early values.
  struct Parts {
    std::vector<ir::Node*> nodes;
    std::vector<ir::Value*> early;
  };
  Parts parts_of(const ir::Value* value, const Factors& factors) const;

  // The value with ones in the places of its factors, in `dtype`.
  ir::Value* write(ops::Writer& writer, const ir::Value* value, const Factors& factors,
                   ir::DType dtype) const {
    Written written;
    return write(writer, value, factors, dtype, written);
  }

  // Whether `value` can be computed before `node`, and to do so.
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
  std::optional<Degrees> degrees_of_late(const ir::Value* value, const Factors& factors,
                                         Found& found) const;
  ir::Value* write(ops::Writer& writer, const ir::Value* value, const Factors& factors,
                   ir::DType dtype, Written& written) const;
  ir::Value* write_late(ops::Writer& writer, const ir::Value* value, const Factors& factors,
                        ir::DType dtype, Written& written) const;
  bool can_stand_before(const ir::Value* value, const ir::Node& node,
                        std::unordered_set<const ir::Node*>& seen) const;
  bool is_behind(const ir::Node* producer, const ir::Node& node) const;

  const SharedMemory memory_;
  std::unordered_set<const ir::Node*> late_;
  std::unordered_map<const ir::Node*, int> positions_;
};

}  // namespace torch_ort::passes
