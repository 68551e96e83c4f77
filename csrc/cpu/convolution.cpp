#include "cpu/convolution.h"

#include "base/error.h"

namespace torch_ort::cpu {

namespace {

// Of a stride, a pad, a dilation or a window. With more, what a window reaches over has no number.
constexpr int64_t kMostOfDim = 1 << 20;

std::array<int64_t, 2> of_dims(const ir::Node& node, const char* name, int64_t least) {
  const ir::Shape numbers = ir::ints_attr(node.attrs, name, {});
  ORT_CHECK(numbers.size() == 2, node.op.name, ": ", name, ": got ", numbers.size(),
            " numbers, want 2");
  for (const ir::Dim& number : numbers) {
    ORT_CHECK(number.constant() >= least && number.constant() <= kMostOfDim, node.op.name, ": ",
              name, ": got ", number.constant(), ", want ", least, " to ", kMostOfDim);
  }
  return {numbers[0].constant(), numbers[1].constant()};
}

}  // namespace

bool is_side_by_side(const region::Layout& layout) {
  return layout.sizes[1] <= 1 || layout.strides[1] == 1;
}

Convolution::Convolution(const BoundNode& bound) {
  const ir::Node& node = bound.node;
  const region::Layout &of_result = bound.inputs.at(0), &of_image = bound.inputs.at(1);
  const region::Layout& weight = bound.outputs.at(0);
  stride = of_dims(node, "strides", 1);
  pad = of_dims(node, "pads", 0);
  dilation = of_dims(node, "dilations", 1);
  ORT_CHECK(of_result.sizes.size() == 4 && of_image.sizes.size() == 4 && weight.sizes.size() == 4,
            node.op.name, ": want tensors of 4 dims");
  batch = of_image.sizes[0];
  channels = of_image.sizes[1];
  rows = weight.sizes[0];
  std::vector<int64_t> want = {batch, rows};
  for (size_t dim = 0; dim < 2; ++dim) {
    image[dim] = of_image.sizes[2 + dim];
    window[dim] = weight.sizes[2 + dim];
    result[dim] = of_result.sizes[2 + dim];
    const int64_t reach = dilation[dim] * (window[dim] - 1) + 1;
    ORT_CHECK(window[dim] <= kMostOfDim && pad[dim] <= reach, node.op.name, ": pads: got ",
              pad[dim], ", want at most the ", reach, " pixels that a window reaches over");
    want.push_back((image[dim] + 2 * pad[dim] - reach) / stride[dim] + 1);
  }
  ORT_CHECK(of_result.sizes == want && of_result.dtype == weight.dtype &&
                of_image.dtype == weight.dtype && is_side_by_side(of_result) &&
                is_side_by_side(of_image),
            node.op.name, ": the operands do not fit together");
  gradient_strides = of_result.strides;
  image_strides = of_image.strides;
}

}  // namespace torch_ort::cpu
