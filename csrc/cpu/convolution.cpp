#include "cpu/convolution.h"

#include "base/error.h"
#include "base/rounding.h"

#include <algorithm>

namespace torch_ort::cpu {

namespace {

// Of a stride, a pad, a dilation or a window. With more, what a window reaches over has no number.
constexpr int64_t kMostOfDim = 1 << 20;

// Reads a number for each of the last dims of `to`.
void read_dims(const ir::Node& node, const char* name, int64_t least, size_t dims,
               std::array<int64_t, 3>& to) {
  const ir::Shape numbers = ir::ints_attr(node.attrs, name, {});
  ORT_CHECK(numbers.size() == dims, node.op.name, ": ", name, ": got ", numbers.size(),
            " numbers, want ", dims);
  size_t at = to.size() - dims;
  for (const ir::Dim& number : numbers) {
    ORT_CHECK(number.constant() >= least && number.constant() <= kMostOfDim, node.op.name, ": ",
              name, ": got ", number.constant(), ", want ", least, " to ", kMostOfDim);
    to[at++] = number.constant();
  }
}

}  // namespace

std::array<int64_t, 4> pixel_strides(const region::Layout& layout) {
  const std::vector<int64_t>& from = layout.strides;
  if (from.size() > 4) return {from[0], from[2], from[3], from[4]};
  return {from[0], 0, from[2], from[3]};
}

bool is_side_by_side(const region::Layout& layout) {
  return layout.sizes[1] <= 1 || layout.strides[1] == 1;
}

Convolution::Convolution(const BoundNode& bound)
    : Convolution(bound.node, bound.inputs.at(0), bound.inputs.at(1), bound.outputs.at(0)) {}

Convolution::Convolution(const ir::Node& node, const region::Layout& of_result,
                         const region::Layout& of_image, const region::Layout& weight) {
  const size_t rank = of_image.sizes.size(), dims = rank - 2;
  ORT_CHECK(
      (rank == 4 || rank == 5) && of_result.sizes.size() == rank && weight.sizes.size() == rank,
      node.op.name, ": want tensors of 4 dims, or of 5");
  is_volume = rank > 4;
  read_dims(node, "strides", 1, dims, stride);
  read_dims(node, "pads", 0, dims, pad);
  read_dims(node, "dilations", 1, dims, dilation);
  batch = of_image.sizes[0];
  channels = of_image.sizes[1];
  rows = weight.sizes[0];
  std::vector<int64_t> want = {batch, rows};
  for (size_t dim = image.size() - dims; dim < image.size(); ++dim) {
    const size_t at = dim + rank - image.size();  // among the dims of the tensors
    image[dim] = of_image.sizes[at];
    window[dim] = weight.sizes[at];
    result[dim] = of_result.sizes[at];
    const int64_t reach = dilation[dim] * (window[dim] - 1) + 1;
    ORT_CHECK(window[dim] >= 1 && window[dim] <= kMostOfDim, node.op.name, ": windows: got ",
              window[dim], " taps, want 1 to ", kMostOfDim);
    ORT_CHECK(pad[dim] <= reach, node.op.name, ": pads: got ", pad[dim], ", want at most the ",
              reach, " pixels that a window reaches over");
    const int64_t room = image[dim] + 2 * pad[dim] - reach;
    want.push_back(room < 0 ? 0 : room / stride[dim] + 1);
  }
  ORT_CHECK(of_result.sizes == want && of_result.dtype == weight.dtype &&
                of_image.dtype == weight.dtype && is_side_by_side(of_result) &&
                is_side_by_side(of_image),
            node.op.name, ": the operands do not fit together");
  gradient_strides = pixel_strides(of_result);
  image_strides = pixel_strides(of_image);
}

int64_t Convolution::read_groups(const ir::Node& node, const region::Layout& weight) const {
  const int64_t groups = ir::int_attr(node.attrs, "groups", 1);
  ORT_CHECK(groups > 0 && channels % groups == 0 && rows % groups == 0 &&
                weight.sizes[1] == channels / groups,
            node.op.name, ": groups: got ", groups, " for ", channels, " channels, ", rows,
            " rows, and weights of ", weight.sizes[1]);
  return groups;
}

void check_bias(const ir::Node& node, const region::Layout& bias, ir::DType dtype, int64_t channels,
                bool wants_rows) {
  ORT_CHECK(bias.sizes == std::vector<int64_t>{channels} && bias.dtype == dtype &&
                (!wants_rows || region::lies_by_rows(bias)),
            node.op.name, ": got a bias of another size than that of ", channels, " channels");
}

std::vector<Reach> reaches_of(const Convolution& it, size_t dim, bool is_transposed) {
  const int64_t stride = it.stride[dim], size = is_transposed ? it.image[dim] : it.result[dim];
  std::vector<Reach> all;
  for (int64_t first = 0; first < (is_transposed ? std::min(stride, size) : 1); ++first) {
    Reach reach{
        .first = first, .apart = is_transposed ? stride : 1, .step = is_transposed ? 1 : stride};
    reach.places = ceil_div(size - first, reach.apart);
    for (int64_t tap = 0; tap < it.window[dim]; ++tap) {
      const int64_t right = tap * it.dilation[dim] - it.pad[dim];
      if (!is_transposed) {
        reach.taps.push_back({tap, right});
      } else if ((first - right) % stride == 0) {
        reach.taps.push_back({tap, (first - right) / stride});
      }
    }
    if (is_transposed) std::reverse(reach.taps.begin(), reach.taps.end());
    all.push_back(std::move(reach));
  }
  return all;
}

std::string Convolution::text(const std::array<int64_t, 3>& sizes) const {
  return concat(is_volume ? concat(sizes[0], " x ") : "", sizes[1], " x ", sizes[2]);
}

}  // namespace torch_ort::cpu
