#include "ops/cast.h"

#include "ops/shapes.h"

namespace torch_ort::ops {

ir::Value* cast(CallList& calls, ir::Value* x, ir::DType dtype) {
  if (x->type.dtype == dtype) return x;
  ir::Type type = with_shape(x->type, x->type.shape);
  type.dtype = dtype;
  ir::Value* result = calls.temporary(type);
  calls.add("aten::_to_copy", "", {x, ir::name(dtype), Arg(), Arg(), Arg(), false, Arg()},
            {result});
  return result;
}

}  // namespace torch_ort::ops
