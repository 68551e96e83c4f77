// Softmax and its logarithm.

#include "convert/families.h"
#include "convert/rows.h"

namespace torch_ort::convert {

namespace {

Row softmax(std::string op) {
  return [op = std::move(op)](Builder& builder, const AtenCall& call) -> std::vector<ir::Value*> {
    ir::Value* x = tensor(call.arg("self"));
    if (x == nullptr || !is_float(x->type.dtype) || !x->type.shape) return {};
    const size_t rank = x->type.shape->size();
    if (rank == 0 || call.types[0].dtype != x->type.dtype) return {};
    return standard(builder, op, {x}, call.types, {{"axis", ir::Dim(axis(call, "dim", rank))}});
  };
}

}  // namespace

void add_softmax(Table& table) {
  table.add("aten::_log_softmax", softmax("LogSoftmax"));
  table.add("aten::_softmax", softmax("Softmax"));
}

}  // namespace torch_ort::convert
