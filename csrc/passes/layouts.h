// Which readers of a value depend on its strides.
//
// The strides in a type say in which order the elements are in memory. A reader depends on them if
// it is
// - the caller, to whom strides are promised: an output of the graph, a value that the YieldOp
//   returns to the caller, an input of the body of an If or a Loop;
// - an operator of PyTorch or of the user (an ATen node, an autograd Function), which may access
//   memory directly, or choose the layout of its results by that of its arguments. Point-wise
//   operators only do the latter: they depend on the order of the dims, but not on gaps between
//   elements.
// Standard ops and the engine's own find elements by index. Among these, views and concatenations
// pass the order of an operand on to their results, whose readers then count. All others write
// results in the order that the type of the result says.
//
// A pass may give a value another order only if no reader of it, or of what passes its order on,
// depends on it. There are two exceptions. Image kernels are correct for either order of images,
// and channels_last gives them both (ops::image_form). And element-wise operators of PyTorch,
// reductions, norms and softmaxes compute the same of a row-major value as of any other; if the
// types of their results are row-major, so are they then.
#pragma once

#include "ir/graph.h"

#include <map>
#include <string>
#include <string_view>
#include <utility>

namespace torch_ort::passes {

// Whether no reader depends on the strides of the value or of what passes its order on. Returns
// false if in doubt: for a reader with a result that is not row-major and of which nothing more is
// known.
bool takes_any_layout(const ir::Value& value);
// The same for one reader.
bool takes_any_layout(const ir::Use& use);

// Whether the reader may be given a row-major value in place of one with other strides.
bool takes_row_major(const ir::Use& use);

// Updates the types of what passes on the order of a value whose strides a pass has changed.
void follow_layout(ir::Value& value);
// The same for one reader of such a value.
void follow_layout(ir::Node& reader);

// Verifies that a pass follows this rule. The constructor notes the strides that readers depend on
// before the pass runs.
class CountedStrides {
 public:
  explicit CountedStrides(const ir::Graph& graph);

  // Throws InternalError if a reader that still exists would see other strides, or if the type of a
  // view has other strides than the view gets from what it looks at.
  void verify(const ir::Graph& graph, std::string_view pass) const;

 private:
  struct Seen {
    std::string reader;  // its name, since a new node may have the address of an old one
    ir::Type type;
  };

  void note(const ir::Value& value);

  std::map<std::pair<const ir::Node*, int>, Seen> seen_;  // by node and slot
};

}  // namespace torch_ort::passes
