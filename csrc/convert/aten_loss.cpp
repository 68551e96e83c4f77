// Losses. Backward reads the total weight, which ONNX does not give: training keeps the call as it
// is.

#include "convert/families.h"
#include "convert/rows.h"

namespace torch_ort::convert {

namespace {

using ir::Value;
using Values = std::vector<Value*>;

const char* const kReductions[] = {"none", "mean", "sum"};

template <size_t kRank>
Values nll_loss(Builder& builder, const AtenCall& call) {
  Value *x = tensor(call.arg("self")), *target = tensor(call.arg("target"));
  Value* weight = tensor(call.arg("weight"));
  if (call.used[1] || x == nullptr || target == nullptr || !is_float(x->type.dtype)) return {};
  if (!x->type.shape || x->type.shape->size() != kRank) return {};
  if (!target->type.shape || target->type.shape->size() != kRank - 1) return {};
  if (target->type.dtype != ir::DType::kInt64) return {};
  if (weight != nullptr && weight->type.dtype != x->type.dtype) return {};
  Values inputs = {x, target};
  if (weight != nullptr) inputs.push_back(weight);
  Values outputs =
      standard(builder, "NegativeLogLikelihoodLoss", inputs, {call.types[0]},
               {{"reduction", std::string(kReductions[integer(call.arg("reduction"))])},
                {"ignore_index", ir::Dim(integer(call.arg("ignore_index")))}});
  if (!outputs.empty()) outputs.push_back(nullptr);
  return outputs;
}

}  // namespace

void add_loss(Table& table) {
  table.add("aten::nll_loss2d_forward", nll_loss<4>);
  table.add("aten::nll_loss_forward", nll_loss<2>);
}

}  // namespace torch_ort::convert
