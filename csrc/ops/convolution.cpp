// Ops that slide a window over spatial dims: convolutions, pooling, resizing.

#include "base/error.h"
#include "ops/families.h"
#include "ops/shapes.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <numeric>

namespace torch_ort::ops {

namespace {

using ir::Dim;
using ir::Node;
using ir::Shape;
using ir::Type;
using ir::Value;
using enum AttrKind;

constexpr auto kKernel = ImageForm::Kind::kKernel;

// The sliding window of a node, with one number for each spatial dim.
struct Window {
  std::vector<int64_t> kernel, strides, dilations, before, after;
  bool is_symmetric() const { return before == after; }
};

// PyTorch's kernels count positions in 32 bits.
constexpr int64_t kMost = std::numeric_limits<int32_t>::max();

void check_range(const Node& node, const char* name, int64_t number, int64_t least) {
  if (number >= least && number <= kMost) return;
  throw UserError(
      concat(node.op.str(), ": ", name, ": got ", number, ", want ", least, " to ", kMost));
}

// An attribute with one number for each spatial dim, or with two.
std::vector<int64_t> numbers(const Node& node, const char* name, size_t size, int64_t missing,
                             int64_t least) {
  if (!ir::has_attr(node.attrs, name)) return std::vector<int64_t>(size, missing);
  std::vector<int64_t> result;
  for (const Dim& dim : ir::ints_attr(node.attrs, name, {})) {
    result.push_back(dim.constant());
    check_range(node, name, result.back(), least);
  }
  if (result.size() != size) {
    throw UserError(
        concat(node.op.str(), ": ", name, ": got ", result.size(), " numbers, want ", size));
  }
  return result;
}

int64_t num_groups(const Node& node) {
  const int64_t groups = ir::int_attr(node.attrs, "group", 1);
  check_range(node, "group", groups, 1);
  return groups;
}

size_t spatial_rank(const Node& node) {
  const Shape& shape = known_shape(node, input(node, 0));
  if (shape.size() < 3) {
    throw UserError(
        concat(node.op.str(), ": input: got ", ir::to_string(shape), ", want rank 3 or more"));
  }
  return shape.size() - 2;
}

// The sizes of the convolution kernel: from an attribute, or from the weight.
std::vector<int64_t> kernel_sizes(const Node& node, size_t rank) {
  if (node.inputs.size() < 2) {
    if (!ir::has_attr(node.attrs, "kernel_shape")) {
      throw UserError(concat(node.op.str(), ": kernel_shape is missing"));
    }
    return numbers(node, "kernel_shape", rank, 1, 1);
  }
  const Shape& weight = known_shape(node, input(node, 1));
  if (weight.size() != rank + 2) {
    throw UserError(
        concat(node.op.str(), ": weight: got ", ir::to_string(weight), ", want rank ", rank + 2));
  }
  std::vector<int64_t> sizes;
  for (size_t i = 2; i < weight.size(); ++i) {
    if (!weight[i].is_constant()) {
      throw Unsupported(concat(node.op.str(), ": weight: got ", ir::to_string(weight),
                               ", want sizes that are known"));
    }
    sizes.push_back(weight[i].constant());
    check_range(node, "size of the kernel", sizes.back(), 1);
  }
  const std::vector<int64_t> named = numbers(node, "kernel_shape", rank, 1, 1);
  if (ir::has_attr(node.attrs, "kernel_shape") && named != sizes) {
    throw UserError(concat(node.op.str(), ": kernel_shape: got other sizes than those of the ",
                           "weight, want ", ir::to_string(weight)));
  }
  return sizes;
}

Window window_of(const Node& node) {
  const size_t rank = spatial_rank(node);
  Window window;
  window.kernel = kernel_sizes(node, rank);
  window.strides = numbers(node, "strides", rank, 1, 1);
  window.dilations = numbers(node, "dilations", rank, 1, 1);
  std::vector<int64_t> pads = numbers(node, "pads", 2 * rank, 0, 0);
  const std::string automatic = ir::string_attr(node.attrs, "auto_pad", "NOTSET");
  if (automatic == "VALID") {
    pads.assign(2 * rank, 0);
  } else if (automatic != "NOTSET") {
    throw Unsupported(
        concat(node.op.str(), ": auto_pad: got ", automatic, ", want NOTSET or VALID"));
  }
  window.before.assign(pads.begin(), pads.begin() + static_cast<int64_t>(rank));
  window.after.assign(pads.begin() + static_cast<int64_t>(rank), pads.end());
  return window;
}

// The number of positions of the window along dim `i`.
Dim num_positions(const Window& window, size_t i, const Dim& size) {
  const int64_t reach = window.dilations[i] * (window.kernel[i] - 1) + 1;
  const int64_t padding = window.before[i] + window.after[i];
  return plus(floor_div(plus(size, padding - reach), window.strides[i]), 1);
}

// The input with padding added as elements.
Value* padded_input(Value* x, const Window& window, const Arg& value, CallList& calls) {
  Shape pads, shape = *x->type.shape;
  for (size_t i = window.kernel.size(); i-- > 0;) {
    pads.push_back(window.before[i]);
    pads.push_back(window.after[i]);
    shape[i + 2] = plus(shape[i + 2], window.before[i] + window.after[i]);
  }
  Value* padded = calls.temporary(with_shape(x->type, shape));
  calls.add("aten::constant_pad_nd", "", {x, Arg::list(pads), value}, {padded});
  return padded;
}

// The same window without padding.
Window unpadded(Window window) {
  window.before.assign(window.kernel.size(), 0);
  window.after = window.before;
  return window;
}

// ---- Conv, ConvTranspose

std::vector<Type> infer_conv(const Node& node) {
  const Type& x = input(node, 0).type;
  const Type& weight = input(node, 1).type;
  if (!x.shape || !weight.shape) return {with_shape(x, std::nullopt)};
  const Window window = window_of(node);
  Shape shape = {(*x.shape)[0], (*weight.shape)[0]};
  const Dim channels = times((*weight.shape)[1], num_groups(node));
  same_dim(node, channels, (*x.shape)[1]);
  for (size_t i = 0; i < window.kernel.size(); ++i) {
    shape.push_back(num_positions(window, i, (*x.shape)[i + 2]));
  }
  return {with_shape(x, std::move(shape))};
}

void lower_conv(const Node& node, CallList& calls) {
  Window window = window_of(node);
  Value* x = node.inputs[0];
  if (!window.is_symmetric()) {
    x = padded_input(x, window, 0, calls);
    window = unpadded(window);
  }
  Value* bias = has_input(node, 2) ? node.inputs[2] : nullptr;
  calls.add("aten::convolution", "",
            {x, node.inputs[1], bias, Arg::list(window.strides), Arg::list(window.before),
             Arg::list(window.dilations), false,
             Arg::list(std::vector<int64_t>(window.kernel.size(), 0)), num_groups(node)},
            {node.outputs[0]});
}

std::vector<Type> infer_conv_transpose(const Node& node) {
  const Type& x = input(node, 0).type;
  const Type& weight = input(node, 1).type;
  if (!x.shape || !weight.shape) return {with_shape(x, std::nullopt)};
  if (ir::has_attr(node.attrs, "output_shape"))
    throw Unsupported("ConvTranspose: attribute 'output_shape' is not supported");
  const Window window = window_of(node);
  const std::vector<int64_t> extra = numbers(node, "output_padding", window.kernel.size(), 0, 0);
  Shape shape = {(*x.shape)[0], times((*weight.shape)[1], num_groups(node))};
  same_dim(node, (*weight.shape)[0], (*x.shape)[1]);
  for (size_t i = 0; i < window.kernel.size(); ++i) {
    const int64_t reach = window.dilations[i] * (window.kernel[i] - 1) + 1;
    const Dim steps = times(minus((*x.shape)[i + 2], 1), window.strides[i]);
    shape.push_back(plus(steps, reach + extra[i] - window.before[i] - window.after[i]));
  }
  return {with_shape(x, std::move(shape))};
}

void lower_conv_transpose(const Node& node, CallList& calls) {
  if (ir::has_attr(node.attrs, "output_shape"))
    throw Unsupported("ConvTranspose: attribute 'output_shape' is not supported");
  const Window window = window_of(node);
  if (!window.is_symmetric())
    throw Unsupported(
        "ConvTranspose: got pads that differ at the two ends of a dim, want equal ones");
  Value* bias = has_input(node, 2) ? node.inputs[2] : nullptr;
  calls.add(
      "aten::convolution", "",
      {node.inputs[0], node.inputs[1], bias, Arg::list(window.strides), Arg::list(window.before),
       Arg::list(window.dilations), true,
       Arg::list(numbers(node, "output_padding", window.kernel.size(), 0, 0)), num_groups(node)},
      {node.outputs[0]});
}

// ---- pooling

std::vector<Type> infer_pool(const Node& node) {
  const Type& x = input(node, 0).type;
  std::optional<Shape> shape;
  if (x.shape) {
    const Window window = window_of(node);
    shape = Shape{(*x.shape)[0], (*x.shape)[1]};
    for (size_t i = 0; i < window.kernel.size(); ++i) {
      shape->push_back(num_positions(window, i, (*x.shape)[i + 2]));
    }
  }
  std::vector<Type> types = {with_shape(x, shape)};
  if (node.outputs.size() > 1) {
    types.push_back(with_shape(x, shape));
    types.back().dtype = ir::DType::kInt64;
  }
  return types;
}

// PyTorch's kernels pad both sides equally, and by at most half of the window.
bool is_padded_by_kernels(const Window& window) {
  for (size_t i = 0; i < window.kernel.size(); ++i) {
    if (2 * window.before[i] > window.kernel[i]) return false;
  }
  return window.is_symmetric();
}

void check_pool(const Node& node) {
  // ONNX and PyTorch round up the number of positions by different rules.
  if (ir::int_attr(node.attrs, "ceil_mode", 0) != 0)
    throw Unsupported(concat(node.op.str(), ": ceil_mode: got 1, want 0"));
  const size_t rank = spatial_rank(node);
  if (rank != 2 && rank != 3) {
    throw Unsupported(concat(node.op.str(), ": input: got rank ", rank + 2, ", want 4 or 5"));
  }
}

// The least number of a dtype, which no maximum is, unless all are.
double least(ir::DType dtype) {
  switch (dtype) {
    case ir::DType::kUInt8: return 0;
    case ir::DType::kInt8: return std::numeric_limits<int8_t>::min();
    case ir::DType::kInt16: return std::numeric_limits<int16_t>::min();
    case ir::DType::kInt32: return std::numeric_limits<int32_t>::min();
    default: return -std::numeric_limits<double>::infinity();
  }
}

void lower_max_pool(const Node& node, CallList& calls) {
  check_pool(node);
  if (node.outputs.size() > 1 && node.outputs[1] != nullptr) {
    throw Unsupported("MaxPool: indices into the whole tensor are not supported");
  }
  Window window = window_of(node);
  Value* x = node.inputs[0];
  if (!is_padded_by_kernels(window)) {
    x = padded_input(x, window, least(x->type.dtype), calls);
    window = unpadded(window);
  }
  const bool is_flat = window.kernel.size() == 2;
  calls.add(is_flat ? "aten::max_pool2d_with_indices" : "aten::max_pool3d_with_indices", "",
            {x, Arg::list(window.kernel), Arg::list(window.strides), Arg::list(window.before),
             Arg::list(window.dilations), false},
            {node.outputs[0], nullptr});
}

void add_average(Value* x, const Window& window, bool counts_padding, Value* result,
                 CallList& calls) {
  calls.add(window.kernel.size() == 2 ? "aten::avg_pool2d" : "aten::avg_pool3d", "",
            {x, Arg::list(window.kernel), Arg::list(window.strides), Arg::list(window.before),
             false, counts_padding, Arg()},
            {result});
}

// Averages that leave out the padding. Averages that include it are divided by the share of each
// window that is no padding.
void add_average_without_padding(const Node& node, const Window& window, CallList& calls) {
  Value *x = node.inputs[0], *result = node.outputs[0];
  const Window plain = unpadded(window);
  Value* averages = calls.temporary(with_shape(result->type, result->type.shape));
  add_average(padded_input(x, window, 0, calls), plain, true, averages, calls);
  Shape one = *x->type.shape;
  one[0] = one[1] = 1;
  Shape counted = known_shape(node, *result);
  counted[0] = counted[1] = 1;
  Value* ones = calls.temporary(with_shape(x->type, one));
  Value* parts = calls.temporary(with_shape(x->type, counted));
  calls.add("aten::ones", "",
            {Arg::list(one), ir::name(x->type.dtype), Arg(), device_name(x->type), Arg()}, {ones});
  add_average(padded_input(ones, window, 0, calls), plain, true, parts, calls);
  calls.add("aten::div", "Tensor", {averages, parts}, {result});
}

void lower_average_pool(const Node& node, CallList& calls) {
  check_pool(node);
  Window window = window_of(node);
  const bool counts_padding = ir::int_attr(node.attrs, "count_include_pad", 0) != 0;
  if (std::any_of(window.dilations.begin(), window.dilations.end(),
                  [](int64_t d) { return d != 1; })) {
    throw Unsupported("AveragePool: dilations other than 1 are not supported");
  }
  if (is_padded_by_kernels(window)) {
    add_average(node.inputs[0], window, counts_padding, node.outputs[0], calls);
  } else if (counts_padding) {
    add_average(padded_input(node.inputs[0], window, 0, calls), unpadded(window), true,
                node.outputs[0], calls);
  } else {
    add_average_without_padding(node, window, calls);
  }
}

int average_pool_since(const Node& node) { return ir::has_attr(node.attrs, "dilations") ? 19 : 11; }

std::vector<Type> infer_global_pool(const Node& node) {
  const Type& x = input(node, 0).type;
  if (!x.shape) return {with_shape(x, std::nullopt)};
  Shape shape(x.shape->size(), Dim(1));
  for (size_t i = 0; i < std::min<size_t>(2, shape.size()); ++i) shape[i] = (*x.shape)[i];
  return {with_shape(x, std::move(shape))};
}

std::vector<int64_t> spatial_axes(const Node& node) {
  std::vector<int64_t> axes(spatial_rank(node));
  std::iota(axes.begin(), axes.end(), 2);
  return axes;
}

void lower_global_average_pool(const Node& node, CallList& calls) {
  calls.add("aten::mean", "dim", {node.inputs[0], Arg::list(spatial_axes(node)), true, Arg()},
            {node.outputs[0]});
}

void lower_global_max_pool(const Node& node, CallList& calls) {
  calls.add("aten::amax", "", {node.inputs[0], Arg::list(spatial_axes(node)), true},
            {node.outputs[0]});
}

// ---- Resize

// The factors of all dims, if the node gives them.
std::optional<std::vector<double>> resize_scales(const Node& node) {
  if (!has_input(node, 2)) return std::nullopt;
  std::vector<double> scales;
  for (const Arg& scale : known_numbers(node, *node.inputs[2])) {
    const auto* factor = std::get_if<double>(&scale.value);
    if (factor == nullptr || !(*factor > 0) || !(*factor <= kMost)) {
      throw UserError(
          "Resize: scales: got one that is no float, or out of range, want floats above 0");
    }
    scales.push_back(*factor);
  }
  // In older graphs the factors are empty if sizes are given.
  if (scales.empty()) return std::nullopt;
  return scales;
}

Shape resized_shape(const Node& node) {
  const Shape& from = known_shape(node, input(node, 0));
  Shape to;
  if (const auto scales = resize_scales(node)) {
    for (size_t i = 0; i < std::min(from.size(), scales->size()); ++i) {
      const double scale = (*scales)[i];
      if (from[i].is_constant()) {
        to.push_back(
            static_cast<int64_t>(std::floor(static_cast<double>(from[i].constant()) * scale)));
      } else if (scale == std::floor(scale)) {
        to.push_back(times(from[i], static_cast<int64_t>(scale)));
      } else {
        throw Unsupported(concat("Resize: factor ", scale, " of a symbolic size is not supported"));
      }
    }
  } else {
    to = known_ints(&input(node, 3));
  }
  if (to.size() != from.size()) {
    throw UserError(concat("Resize: sizes: got ", to.size(), ", want ", from.size()));
  }
  return to;
}

std::vector<Type> infer_resize(const Node& node) {
  const Type& x = input(node, 0).type;
  const bool is_known =
      x.shape && ((has_input(node, 3) && has_known_ints(node.inputs[3])) ||
                  (has_input(node, 2) && constant_data(*node.inputs[2]) != nullptr));
  if (!is_known) return {with_shape(x, std::nullopt)};
  return {with_shape(x, resized_shape(node))};
}

std::string resize_kernel(const Node& node, size_t rank) {
  const std::string mode = ir::string_attr(node.attrs, "mode", "nearest");
  const std::string coordinates =
      ir::string_attr(node.attrs, "coordinate_transformation_mode", "half_pixel");
  if (mode == "nearest" && coordinates == "asymmetric" &&
      ir::string_attr(node.attrs, "nearest_mode", "round_prefer_floor") == "floor") {
    return concat("aten::upsample_nearest", rank, "d");
  }
  if (mode == "linear" && (coordinates == "half_pixel" || coordinates == "align_corners")) {
    return rank == 1   ? "aten::upsample_linear1d"
           : rank == 2 ? "aten::upsample_bilinear2d"
                       : "aten::upsample_trilinear3d";
  }
  throw Unsupported(concat("Resize: mode ", mode, " with ", coordinates, " is not supported"));
}

// Whether each size times its factor is an integer. With align_corners, ONNX maps the last pixel to
// the end of what need not be one, and PyTorch maps it to the last pixel.
bool has_whole_sizes(const Shape& from, const std::vector<double>& scales) {
  for (size_t i = 0; i < from.size(); ++i) {
    if (scales[i] == std::floor(scales[i])) continue;
    const double size = from[i].is_constant() ? static_cast<double>(from[i].constant()) : 0.5;
    if (scales[i] * size != std::floor(scales[i] * size)) return false;
  }
  return true;
}

void lower_resize(const Node& node, CallList& calls) {
  for (const char* name : {"antialias", "exclude_outside", "axes"}) {
    if (ir::has_attr(node.attrs, name))
      throw Unsupported(concat("Resize: attribute '", name, "' is not supported"));
  }
  const size_t rank = spatial_rank(node);
  if (rank > 3) throw Unsupported(concat("Resize: input: got rank ", rank + 2, ", want 3 to 5"));
  const Shape from = known_shape(node, *node.inputs[0]);
  const Shape to = resized_shape(node);
  if (!(to[0] == from[0]) || !(to[1] == from[1])) {
    throw Unsupported(concat("Resize: sizes: got ", ir::to_string(to), " from ",
                             ir::to_string(from), ", want the first two dims unchanged"));
  }
  ArgList args = {node.inputs[0], Arg::list(Shape(to.begin() + 2, to.end()))};
  const bool is_aligned = ir::string_attr(node.attrs, "coordinate_transformation_mode",
                                          "half_pixel") == "align_corners";
  if (ir::string_attr(node.attrs, "mode", "nearest") == "linear") args.push_back(is_aligned);
  const auto scales = resize_scales(node);
  if (scales && is_aligned && !has_whole_sizes(from, *scales)) {
    throw Unsupported("Resize: align_corners with factors that give no integers is not supported");
  }
  for (size_t i = 0; i < rank; ++i) args.push_back(scales ? Arg((*scales)[i + 2]) : Arg());
  calls.add(resize_kernel(node, rank), "", std::move(args), {node.outputs[0]});
}

int resize_since(const Node& node) {
  return ir::has_attr(node.attrs, "antialias") || ir::has_attr(node.attrs, "axes") ? 18 : 13;
}

std::vector<AttrRule> window_with(std::vector<AttrRule> more) {
  more.insert(more.end(), {{"auto_pad", kString},
                           {"dilations", kInts},
                           {"kernel_shape", kInts},
                           {"pads", kInts},
                           {"strides", kInts}});
  return more;
}

Op windowed(std::string name, InferRule infer, Lowering lower) {
  Op op;
  op.name = std::move(name);
  op.since = 11;
  op.infer = infer;
  op.lower = lower;
  op.bfloat16_since = 22;
  return op;
}

}  // namespace

void register_convolution(Registry& ops) {
  Op conv = windowed("Conv", infer_conv, lower_conv);
  conv.min_inputs = 2;
  conv.max_inputs = 3;
  conv.attributes = window_with({{"group", kInt}});
  conv.work.image = {.kind = kKernel, .is_convolution = true};
  ops.add(conv);
  Op transposed = windowed("ConvTranspose", infer_conv_transpose, lower_conv_transpose);
  transposed.min_inputs = 2;
  transposed.max_inputs = 3;
  transposed.attributes =
      window_with({{"group", kInt}, {"output_padding", kInts}, {"output_shape", kInts}});
  transposed.work.image = {.kind = kKernel, .is_convolution = true};
  ops.add(transposed);
  ops.add(Operator{
      .name = "aten::convolution",
      .work = {.image = {.kind = kKernel, .reads = {"input"}, .is_convolution = true}},
      .is_placeable = true,
  });
  ops.add(Operator{
      .name = "aten::convolution_backward",
      .work = {.image = {.kind = kKernel,
                         .reads = {"grad_output", "input"},
                         .is_convolution = true}},
      .is_placeable = true,
  });

  Op max_pool = windowed("MaxPool", infer_pool, lower_max_pool);
  max_pool.max_outputs = 2;
  max_pool.attributes = window_with({{"ceil_mode", kInt}, {"storage_order", kInt}});
  max_pool.work.image.kind = kKernel;
  ops.add(max_pool);
  Op average_pool = windowed("AveragePool", infer_pool, lower_average_pool);
  average_pool.attributes = window_with({{"ceil_mode", kInt}, {"count_include_pad", kInt}});
  average_pool.since_of = average_pool_since;
  average_pool.work.image = {.kind = kKernel, .is_for_planes = true};
  ops.add(average_pool);
  ops.add(windowed("GlobalAveragePool", infer_global_pool, lower_global_average_pool));
  ops.add(windowed("GlobalMaxPool", infer_global_pool, lower_global_max_pool));
  for (const char* name : {"aten::_adaptive_avg_pool2d", "aten::avg_pool2d"}) {
    ops.add(Operator{.name = name, .work = {.image = {.kind = kKernel, .reads = {"self"}}}});
  }
  for (const char* name : {"aten::_adaptive_avg_pool2d_backward", "aten::avg_pool2d_backward"}) {
    ops.add(Operator{
        .name = name,
        .work = {.image = {.kind = kKernel, .reads = {"grad_output", "self"}}},
    });
  }
  ops.add(Operator{
      .name = "aten::max_pool2d_with_indices",
      .work = {.image = {.kind = kKernel, .reads = {"self"}, .num_images = 2}},
  });
  ops.add(Operator{
      .name = "aten::max_pool2d_with_indices_backward",
      .work = {.image = {.kind = kKernel, .reads = {"grad_output", "self", "indices"}}},
      .check = check_max_pool_backward,
  });
  ops.add(Operator{
      .name = "aten::max_pool3d_with_indices",
      .work = {.image = {.kind = kKernel, .reads = {"self"}, .num_images = 2}},
  });
  ops.add(Operator{
      .name = "aten::max_pool3d_with_indices_backward",
      .work = {.image = {.kind = kKernel, .reads = {"grad_output", "self", "indices"}}},
      .check = check_max_pool_backward,
  });

  Op resize = windowed("Resize", infer_resize, lower_resize);
  resize.max_inputs = 4;
  resize.attributes = {{"antialias", kInt},
                       {"axes", kInts},
                       {"coordinate_transformation_mode", kString},
                       {"cubic_coeff_a", kFloat},
                       {"exclude_outside", kInt},
                       {"extrapolation_value", kFloat},
                       {"keep_aspect_ratio_policy", kString},
                       {"mode", kString},
                       {"nearest_mode", kString}};
  // Before, factors were required beside sizes.
  resize.since = 13;
  resize.since_of = resize_since;
  resize.bfloat16_since = 13;
  resize.int_inputs = {2, 3};  // factors are constants
  resize.work.image.kind = kKernel;
  ops.add(resize);
  for (const std::string name : {"aten::upsample_nearest2d", "aten::_upsample_nearest_exact2d",
                                 "aten::upsample_bilinear2d"}) {
    ops.add(Operator{
        .name = name,
        .work = {.image = {.kind = kKernel, .reads = {"self"}}},
        .is_placeable = true,
    });
    ops.add(Operator{
        .name = name + "_backward",
        .work = {.image = {.kind = kKernel, .reads = {"grad_output"}}},
        .is_placeable = true,
    });
  }
}

}  // namespace torch_ort::ops
