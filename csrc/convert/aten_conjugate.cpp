// Conjugate and negative views. PyTorch leaves their numbers alone and sets a bit that its
// dispatcher knows of; no tensor of the engine has such bits, so here they are computed.
//
// The engine's own kernels, and views that are made once, would ignore such a bit. So an input, or
// the result of a kernel, that has one is copied (run/spec.h).

#include "convert/families.h"

namespace torch_ort::convert {

namespace {

using ir::Type;
using ir::Value;
using Values = std::vector<Value*>;

// Writes another call instead of `call`, with one result.
Value* instead(Builder& builder, const AtenCall& call, std::string op, std::string overload,
               std::vector<std::string> arg_names, ops::ArgList args, const Type& type) {
  AtenCall made = call;
  made.op = std::move(op);
  made.overload = std::move(overload);
  made.arg_names = std::move(arg_names);
  made.args = std::move(args);
  made.types = {type};
  return convert(builder, made)[0];
}

// The dims along which an element is repeated.
std::vector<size_t> expanded_dims(const Type& type) {
  std::vector<size_t> found;
  if (!type.strides) return found;
  for (size_t i = 0; i < type.strides->size(); ++i) {
    if ((*type.strides)[i] == ir::Dim(0)) found.push_back(i);
  }
  return found;
}

Row computed(std::string op) {
  return [op = std::move(op)](Builder& builder, const AtenCall& call) -> Values {
    Value* x = tensor(call.arg("self"));
    Type type = call.types[0];
    const std::vector<size_t> expanded = expanded_dims(type);
    for (size_t dim : expanded) {
      (*type.shape)[dim] = 1;
      x = instead(builder, call, "aten::slice", "Tensor", {"self", "dim", "start", "end", "step"},
                  {x, static_cast<int64_t>(dim), 0, 1, 1}, type);
    }
    x = instead(builder, call, op, "", {"self"}, {x}, type);
    if (expanded.empty()) return {x};
    const Type& whole = call.types[0];
    return {instead(builder, call, "aten::expand", "", {"self", "size", "implicit"},
                    {x, ops::Arg::list(*whole.shape), false}, whole)};
  };
}

}  // namespace

void add_conjugate(Table& table) {
  table.add("aten::_conj", computed("aten::conj_physical"));
  table.add("aten::_neg_view", computed("aten::neg"));
}

}  // namespace torch_ort::convert
