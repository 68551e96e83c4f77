#include "ops/channels_last.h"

#include "ops/aten.h"
#include "ops/fusion.h"
#include "ops/op.h"
#include "ops/shapes.h"

#include <algorithm>
#include <string_view>

namespace torch_ort::ops {

namespace {

using ir::Dim;
using ir::Node;
using ir::Shape;
using Kind = ImageForm::Kind;

// Kernels that follow the layout of their images, on the CPU of PyTorch.
struct KernelRow {
  const char* name;                // of a standard op, or of an ATen operator
  std::vector<const char*> reads;  // arguments that are images; of a standard op: the first input
  int num_images = 1;              // the first outputs
  bool is_convolution = false;
};

const KernelRow kKernels[] = {
    {"AveragePool", {}},
    {"BatchNormalization", {}},
    {"Conv", {}, 1, true},
    {"ConvTranspose", {}, 1, true},
    {"MaxPool", {}},
    {"aten::_adaptive_avg_pool2d", {"self"}},
    {"aten::_adaptive_avg_pool2d_backward", {"grad_output", "self"}},
    {"aten::_native_batch_norm_legit_functional", {"input"}},
    {"aten::_native_batch_norm_legit_no_training", {"input"}},
    {"aten::avg_pool2d", {"self"}},
    {"aten::avg_pool2d_backward", {"grad_output", "self"}},
    {"aten::convolution", {"input"}, 1, true},
    {"aten::convolution_backward", {"grad_output", "input"}, 1, true},
    {"aten::max_pool2d_with_indices", {"self"}, 2},
    {"aten::max_pool2d_with_indices_backward", {"grad_output", "self", "indices"}},
    {"aten::native_batch_norm_backward", {"grad_out", "input"}},
};

// Operators that no region speaks, but which go element by element.
constexpr std::string_view kElementwise[] = {
    "Elu",
    "HardSigmoid",
    "HardSwish",
    "LeakyRelu",
    "Mish",
    "Softplus",
    "aten::div",  // by a size
    "aten::elu_backward",
    "aten::hardsigmoid_backward",
    "aten::hardswish_backward",
    "aten::hardtanh_backward",
    "aten::leaky_relu_backward",
    "aten::mish_backward",
    "aten::mul",
    "aten::softplus_backward",
};

bool is_aten(const Node& node) { return ir::is(&node, "ATen", ir::kAtenDomain); }

// The input that fills an argument of an ATen node; -1 if none does.
int input_of(const Node& node, std::string_view argument) {
  const std::vector<std::string> filled = ir::strings_attr(node.attrs, "tensor_args", {});
  const auto found = std::find(filled.begin(), filled.end(), argument);
  return found == filled.end() ? -1 : static_cast<int>(found - filled.begin());
}

ImageForm kernel_form(const Node& node, const KernelRow& row) {
  ImageForm form{.kind = Kind::kKernel};
  if (row.reads.empty()) form.inputs = {0};
  for (const char* argument : row.reads) form.inputs.push_back(input_of(node, argument));
  for (int i = 0; i < row.num_images; ++i) form.outputs.push_back(i);
  if (std::find(form.inputs.begin(), form.inputs.end(), -1) != form.inputs.end()) return {};
  if (!row.is_convolution) return form;
  form.weight = is_aten(node) ? input_of(node, "weight") : 1;
  if (form.inputs.size() > 1) form.weight_gradient = 1;
  return form.weight < 0 ? ImageForm() : form;
}

bool is_elementwise(const Node& node, std::string_view name) {
  if (std::find(std::begin(kElementwise), std::end(kElementwise), name) != std::end(kElementwise)) {
    return true;
  }
  const Op* op = node.op.domain.empty() ? registry().find(node.op) : nullptr;
  if (name == "Identity" || (op != nullptr && op->elementwise)) return true;
  return fused_form(node).kind == FusedForm::Kind::kPointwise;
}

}  // namespace

Shape channels_last_shape(const Shape& shape) {
  Shape last;
  for (int64_t axis : kToLast) last.push_back(shape.at(axis));
  return last;
}

Shape channels_last_strides(const Shape& shape) {
  const Shape last = ir::contiguous_strides(channels_last_shape(shape));
  Shape strides;
  for (int64_t axis : kToFirst) strides.push_back(last[axis]);
  return strides;
}

bool has_channels_last(const ir::Type& type) {
  return type.shape && type.shape->size() == kImageRank && type.strides &&
         *type.strides == channels_last_strides(*type.shape);
}

bool prefers_channels_last(const ir::Device& device) { return device.kind == "cpu"; }

bool is_either_layout(const Shape& shape) {
  const bool one_channel = shape.at(1) == Dim(1);
  return one_channel || (shape.at(2) == Dim(1) && shape.at(3) == Dim(1));
}

ImageForm image_form(const Node& node) {
  const std::string name = key_of(node);
  if (name.empty() || node.inputs.empty() || node.outputs.empty() || !is_pure(node)) return {};
  const auto* row = std::find_if(std::begin(kKernels), std::end(kKernels),
                                 [&](const KernelRow& each) { return name == each.name; });
  if (row != std::end(kKernels)) return kernel_form(node, *row);
  if (node.outputs.size() != 1) return {};
  if (name == "Expand") return {.kind = Kind::kExpand};
  if (name == "ReduceMean" || name == "ReduceSum" || name == "ReduceMax" || name == "ReduceMin") {
    return {.kind = Kind::kReduction};
  }
  return is_elementwise(node, name) ? ImageForm{.kind = Kind::kPointwise} : ImageForm();
}

}  // namespace torch_ort::ops
