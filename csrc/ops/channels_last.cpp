#include "ops/channels_last.h"

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

bool is_aten(const Node& node) { return ir::is(&node, "ATen", ir::kAtenDomain); }

// The number of the input that is given for an argument of an ATen node; -1 if none is.
int input_of(const Node& node, std::string_view argument) {
  const std::vector<std::string> filled = ir::strings_attr(node.attrs, "tensor_args", {});
  const auto found = std::find(filled.begin(), filled.end(), argument);
  return found == filled.end() ? -1 : static_cast<int>(found - filled.begin());
}

ImageForm kernel_form(const Node& node, const ImageRule& rule) {
  const std::optional<Shape>& shape = node.inputs[0]->type.shape;
  if (rule.is_for_planes && shape && shape->size() > 4) return {};
  ImageForm form{.kind = Kind::kKernel};
  if (rule.reads.empty()) form.inputs = {0};
  for (const char* argument : rule.reads) form.inputs.push_back(input_of(node, argument));
  for (int i = 0; i < rule.num_images; ++i) form.outputs.push_back(i);
  const ir::Value* first = node.outputs[0];
  if (rule.wants_first_image && (first == nullptr || !first->type.is_known())) return {};
  if (std::find(form.inputs.begin(), form.inputs.end(), -1) != form.inputs.end()) return {};
  if (!rule.is_convolution) return form;
  form.weight = is_aten(node) ? input_of(node, "weight") : 1;
  if (form.inputs.size() > 1) form.weight_gradient = 1;
  return form.weight < 0 ? ImageForm() : form;
}

bool is_reduction(const FusedRule& rule) {
  const auto* kind = std::get_if<FusedForm::Kind>(&rule);
  return kind != nullptr && FusedForm{*kind}.is_reduction();
}

}  // namespace

bool is_image_rank(size_t rank) { return rank == 4 || rank == 5; }

Shape to_last(size_t rank) {
  Shape order = {0};
  for (size_t axis = 2; axis < rank; ++axis) order.push_back(static_cast<int64_t>(axis));
  order.push_back(1);
  return order;
}

Shape to_first(size_t rank) {
  Shape order = {0, static_cast<int64_t>(rank) - 1};
  for (size_t axis = 1; axis + 1 < rank; ++axis) order.push_back(static_cast<int64_t>(axis));
  return order;
}

Shape channels_last_shape(const Shape& shape) {
  Shape last;
  for (const Dim& axis : to_last(shape.size())) last.push_back(shape.at(axis.constant()));
  return last;
}

Shape channels_last_strides(const Shape& shape) {
  const Shape last = ir::contiguous_strides(channels_last_shape(shape));
  Shape strides;
  for (const Dim& axis : to_first(shape.size())) strides.push_back(last[axis.constant()]);
  return strides;
}

int64_t channels_last_axis(const Node& node, int64_t axis, size_t rank) {
  return to_first(rank)[wrap_axis(node, axis, static_cast<int64_t>(rank))].constant();
}

bool has_channels_last(const ir::Type& type) {
  return type.shape && is_image_rank(type.shape->size()) && type.strides &&
         *type.strides == channels_last_strides(*type.shape);
}

bool prefers_channels_last(const ir::Device& device) { return device.kind == "cpu"; }

bool is_either_layout(const Shape& shape) {
  const auto is_one = [](const Dim& dim) { return dim == Dim(1); };
  return is_one(shape.at(1)) || std::all_of(shape.begin() + 2, shape.end(), is_one);
}

ImageForm image_form(const Node& node) {
  if (node.inputs.empty() || node.inputs[0] == nullptr || node.outputs.empty() || !is_pure(node)) {
    return {};
  }
  const Work& work = work_of(node);
  if (work.image.kind == Kind::kKernel) return kernel_form(node, work.image);
  if (work.image.kind == Kind::kAxes) return {.kind = Kind::kAxes};
  if (node.outputs.size() != 1) return {};
  if (work.image.kind != Kind::kNone) return {.kind = work.image.kind};
  if (is_reduction(work.fused)) return {.kind = Kind::kReduction};
  const bool is_pointwise =
      work.elementwise || fused_form(node).kind == FusedForm::Kind::kPointwise;
  return is_pointwise ? ImageForm{.kind = Kind::kPointwise} : ImageForm();
}

}  // namespace torch_ort::ops
