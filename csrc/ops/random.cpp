// Ops that draw random numbers.

#include "base/error.h"
#include "ops/families.h"
#include "ops/shapes.h"

namespace torch_ort::ops {

namespace {

using enum AttrKind;

std::vector<ir::Type> infer_dropout(const ir::Node& node) {
  const ir::Type& type = input(node, 0).type;
  ir::Type mask = with_shape(type, type.shape);
  mask.dtype = ir::DType::kBool;
  std::vector<ir::Type> types = {with_shape(type, type.shape), mask};
  types.resize(node.outputs.size());
  return types;
}

bool is_training(const ir::Node& node) {
  if (!has_input(node, 2)) return false;
  const std::optional<Arg> mode = known_number(node.inputs[2]);
  if (!mode)
    throw Unsupported(
        concat("Dropout: training mode '", node.inputs[2]->name, "' comes from data"));
  const auto* trains = std::get_if<bool>(&mode->value);
  if (trains == nullptr) throw UserError("Dropout: training mode: got a number, want a bool");
  return *trains;
}

Arg ratio(const ir::Node& node) {
  if (!has_input(node, 1)) return 0.5;
  std::optional<Arg> known = known_number(node.inputs[1]);
  if (!known)
    throw Unsupported(concat("Dropout: ratio '", node.inputs[1]->name, "' comes from data"));
  if (!std::holds_alternative<double>(known->value)) {
    throw UserError("Dropout: ratio: got another type, want a float");
  }
  return *known;
}

void lower_dropout(const ir::Node& node, CallList& calls) {
  ir::Value* x = node.inputs[0];
  ir::Value* mask = node.outputs.size() > 1 ? node.outputs[1] : nullptr;
  if (is_training(node)) {
    if (ir::has_attr(node.attrs, "seed")) {
      throw Unsupported("Dropout: a seed of its own: the generator of the device is the only one");
    }
    calls.add("aten::native_dropout", "", {x, ratio(node), true}, {node.outputs[0], mask});
    return;
  }
  if (node.outputs[0] != nullptr)
    calls.add("aten::clone", "", {x, "contiguous_format"}, {node.outputs[0]});
  if (mask != nullptr) {
    calls.add("aten::ones_like", "", {x, "bool", Arg(), Arg(), Arg(), "contiguous_format"}, {mask});
  }
}

// Which elements are kept: the draws that PyTorch's own dropout makes on the CPU.
void lower_bernoulli_mask(const ir::Node& node, CallList& calls) {
  calls.add("torch_ort::bernoulli_mask", "", {Arg(), ir::float_attr(node.attrs, "keep", 0.5)},
            {node.outputs[0]});
}

// One number from the generator of the device, from which a run draws all its masks.
void lower_random_seed(const ir::Node& node, CallList& calls) {
  calls.add("torch_ort::random_seed", "", {}, {node.outputs[0]});
}

Op own(std::string name, int inputs, Lowering lower, bool pure) {
  Op op;
  op.name = std::move(name);
  op.domain = ir::kTorchOrtDomain;
  op.min_inputs = op.max_inputs = inputs;
  op.lower = lower;
  op.pure = pure;
  return op;
}

}  // namespace

void register_random(Registry& ops) {
  Op dropout;
  dropout.name = "Dropout";
  dropout.max_inputs = 3;
  dropout.max_outputs = 2;
  dropout.attributes = {{"seed", kInt}};
  dropout.since = 12;
  dropout.infer = infer_dropout;
  dropout.lower = lower_dropout;
  dropout.pure = false;
  ops.add(dropout);
  Op bernoulli = own("BernoulliMask", 0, lower_bernoulli_mask, false);
  bernoulli.attributes = {{"keep", kFloat}};
  ops.add(bernoulli);
  ops.add(own("RandomSeed", 0, lower_random_seed, false));
  // A function of the seed and the place of the element; runs in regions alone.
  Op philox = own("PhiloxMask", 1, nullptr, true);
  philox.attributes = {{"keep", kFloat}, {"stream", kInt}};
  philox.work.fused = FusedForm::Kind::kRandom;
  ops.add(philox);
}

}  // namespace torch_ort::ops
