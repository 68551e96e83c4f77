// Ops that turn rows of numbers into distributions.
#include "ops/softmax.h"

#include "ops/aten_names.h"
#include "ops/families.h"
#include "ops/shapes.h"

namespace torch_ort::ops {

namespace {

// The exponentials of x minus its largest element, and what they are made of.
struct Powers {
  ir::Value *distance, *power, *sum;
};

Powers powers(Formula& f, ir::Value* x, const ir::Shape& axes) {
  x = f.number(x);
  ir::Value* distance = f.sub(x, f.max(x, axes));
  ir::Value* power = f.make("Exp", {distance});
  return {distance, power, f.sum(power, axes)};
}

}  // namespace

ir::Value* softmax(Formula& f, ir::Value* x, const ir::Shape& axes) {
  const auto [distance, power, sum] = powers(f, x, axes);
  return f.quotient(power, sum);
}

ir::Value* log_softmax(Formula& f, ir::Value* x, const ir::Shape& axes) {
  const auto [distance, power, sum] = powers(f, x, axes);
  // This order keeps digits. Subtracting the sum of the largest element and the logarithm from x
  // would lose them if the largest element is far from 0.
  return f.sub(distance, f.make("Log", {sum}));
}

ir::Value* softmax_gradient(Formula& f, ir::Value* gradient, ir::Value* result,
                            const ir::Shape& axes) {
  gradient = f.number(gradient);
  result = f.number(result);
  ir::Value* product = f.mul(gradient, result);
  ir::Value* sum = f.sum(product, axes);
  return f.sub(product, f.mul(result, sum));
}

ir::Value* log_softmax_gradient(Formula& f, ir::Value* gradient, ir::Value* result,
                                ir::Value* sum) {
  gradient = f.number(gradient);
  ir::Value* probability = f.make("Exp", {f.number(result)});
  return f.sub(gradient, f.mul(probability, sum));
}

void register_softmax(Registry& ops) {
  for (const auto& [name, aten] :
       {std::pair("LogSoftmax", "aten::_log_softmax"), std::pair("Softmax", "aten::_softmax")}) {
    Op op;
    op.name = name;
    op.attributes = {{"axis", AttrKind::kInt}};
    op.since = 13;
    op.pairs = {{.aten = aten,
                 .accepts = ir::is_float,
                 .arguments = {{"dim", "axis", -1, true}, {"half_to_float", nullptr, false}}}};
    op.infer = infer_like_first;
    op.lower = lower_pair;
    ops.add(op);
    ops.add(Operator{.name = aten, .row_argument = 1});
  }
  for (const char* name : {aten::kLogSoftmaxBackward, aten::kSoftmaxBackward}) {
    ops.add(Operator{.name = name, .row_argument = 2, .check = check_softmax_backward});
  }
}

}  // namespace torch_ort::ops
