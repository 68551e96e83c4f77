// Ops that draw random numbers.

#include "base/error.h"
#include "ops/aten_names.h"
#include "ops/families.h"
#include "ops/shapes.h"

#include <c10/util/BFloat16.h>
#include <c10/util/Half.h>

namespace torch_ort::ops {

namespace {

using enum AttrKind;

constexpr const char* kBernoulliMask = "torch_ort::bernoulli_mask";
constexpr const char* kRandomSeed = "torch_ort::random_seed";

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
    throw Unsupported(concat("Dropout: training mode '", node.inputs[2]->name,
                             "' depends on data, want a constant"));
  const auto* trains = std::get_if<bool>(&mode->value);
  if (trains == nullptr) throw UserError("Dropout: training mode: got a number, want a bool");
  return *trains;
}

Arg ratio(const ir::Node& node) {
  if (!has_input(node, 1)) return 0.5;
  std::optional<Arg> known = known_number(node.inputs[1]);
  if (!known)
    throw Unsupported(
        concat("Dropout: ratio '", node.inputs[1]->name, "' depends on data, want a constant"));
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
      throw Unsupported("Dropout: attribute 'seed' is not supported: the device's generator draws");
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

// The elements that dropout keeps, drawn as PyTorch's own dropout draws them on the CPU.
void lower_bernoulli_mask(const ir::Node& node, CallList& calls) {
  calls.add(kBernoulliMask, "", {Arg(), ir::float_attr(node.attrs, "keep", 0.5)},
            {node.outputs[0]});
}

// One number of the device's generator, from which a run draws all its masks.
void lower_random_seed(const ir::Node& node, CallList& calls) {
  calls.add(kRandomSeed, "", {}, {node.outputs[0]});
}

// Some kernels round a factor to the dtype of the elements first.
double rounded_to(double number, ir::DType dtype) {
  const auto narrow = static_cast<float>(number);
  if (dtype == ir::DType::kBFloat16) return static_cast<float>(c10::BFloat16(narrow));
  if (dtype == ir::DType::kHalf) return static_cast<float>(c10::Half(narrow));
  return number;
}

// The steps of the CPU kernel, in planned memory; draws and roundings are the same.
bool take_dropout_apart(const Call& call, bool on_cpu, CallList& calls) {
  if (!on_cpu || call.args.size() != 3) return false;
  const auto* p = std::get_if<double>(&call.args[1].value);
  const auto* train = std::get_if<bool>(&call.args[2].value);
  auto* x = std::get<ir::Value*>(call.args[0].value);
  if (p == nullptr || train == nullptr || !*train || *p <= 0.0) return false;
  ir::Value* result = call.outputs[0];
  ir::Value* mask = call.outputs.size() > 1 ? call.outputs[1] : nullptr;
  if (*p >= 1.0) {
    // With this probability, PyTorch's dropout draws nothing.
    if (result != nullptr) calls.add("aten::mul", "Tensor", {x, 0.0}, {result});
    if (mask != nullptr) calls.add("aten::zeros_like", "", {x, "bool"}, {mask});
    return true;
  }
  if (result == nullptr || !result->type.is_known()) return false;
  if (mask == nullptr) {
    ir::Type type = result->type;
    type.dtype = ir::DType::kBool;
    mask = calls.temporary(type);
  }
  ir::Value* kept = calls.temporary(result->type);
  calls.add(kBernoulliMask, "", {x, 1.0 - *p}, {mask});
  calls.add("aten::mul", "Tensor", {x, mask}, {kept});
  const double scale = rounded_to(1.0 / (1.0 - *p), result->type.dtype);
  calls.add("aten::mul", "Tensor", {kept, scale}, {result});
  return true;
}

bool take_dropout_backward_apart(const Call& call, bool on_cpu, CallList& calls) {
  ir::Value* result = call.outputs.at(0);
  if (!on_cpu || result == nullptr) return false;
  auto* grad = std::get<ir::Value*>(call.args.at(0).value);
  const auto* scale = std::get_if<double>(&call.args.at(2).value);
  if (scale == nullptr) return false;
  if (!result->type.is_known() || grad->type.dtype != result->type.dtype) return false;
  ir::Value* kept = calls.temporary(result->type);
  calls.add("aten::mul", "Tensor", {grad, call.args.at(1)}, {kept});
  calls.add("aten::mul", "Tensor", {kept, rounded_to(*scale, result->type.dtype)}, {result});
  return true;
}

ArgList for_random(const ArgList&) { return {Arg()}; }
ArgList for_bernoulli(const ArgList& args) { return {args.at(1), Arg()}; }

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
  // A function of the seed and the position of the element. Only regions compute it.
  Op philox = own("PhiloxMask", 1, nullptr, true);
  philox.attributes = {{"keep", kFloat}, {"stream", kInt}};
  philox.work.fused = FusedForm::Kind::kRandom;
  ops.add(philox);

  ops.add(Operator{.name = "aten::native_dropout", .out_rewrite = take_dropout_apart});
  ops.add(Operator{.name = aten::kDropoutBackward, .out_rewrite = take_dropout_backward_apart});
  // These names exist only for the forms below.
  ops.add(Operator{
      .name = kBernoulliMask,
      .overwrite = {.op = "aten::bernoulli_", .overload = "float", .args = for_bernoulli},
  });
  ops.add(Operator{
      .name = kRandomSeed,
      .overwrite = {.op = "aten::random_", .args = for_random},
  });
}

}  // namespace torch_ort::ops
