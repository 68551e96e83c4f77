// Which strides a reader counts on.
//
// The strides of a type say in which order the elements of a tensor lie in memory. A reader counts
// on them if it is
//   - the caller, who was promised them: an output of the graph, what leaves at the border, a body
//     of If or Loop;
//   - an operator of PyTorch's or of users (an ATen node, a Function), which may walk through
//     memory, or give results in the order of its arguments. Point-wise ones do the latter alone:
//     they count on the order of the dims, not on gaps between elements.
// Standard ops and ours find elements by their indices. Of these, views and concatenations follow:
// their results lie in the order of an operand, and have readers of their own. All others write
// results in the order that the type of the result says.
//
// A pass may give a value another order only if nobody counts on it, nor on what follows it.
// Kernels of images are excepted: channels_last gives them either order, and they are right in both
// (ops::image_form).
#pragma once

#include "ir/graph.h"

#include <map>
#include <string>
#include <string_view>
#include <utility>

namespace torch_ort::passes {

// Whether nobody counts on the strides of the value, nor on those of what follows it. Declines
// where a reader has a result in another order than row-major of which nothing more is known.
bool takes_any_layout(const ir::Value& value);

// Types of what follows a value that takes any layout, and has got another one.
void follow_layout(ir::Value& value);

// Verifies that a pass keeps to the rule: what readers count on, noted before it runs.
class CountedStrides {
 public:
  explicit CountedStrides(const ir::Graph& graph);

  // InternalError if a reader that still stands would see other strides, or if the type of a view
  // says other strides than what it looks at gives it.
  void verify(const ir::Graph& graph, std::string_view pass) const;

 private:
  struct Seen {
    std::string reader;  // its name: a new node may stand at the address of an old one
    ir::Type type;
  };

  void note(const ir::Value& value);

  std::map<std::pair<const ir::Node*, int>, Seen> seen_;  // by node and slot
};

}  // namespace torch_ort::passes
