// What a torch_ort.SliceScatter node writes: a copy of a tensor, a part of which is replaced.
//
//   x = SliceScatter <axes = [1], starts = [3]> (part, base)
//   x = SliceScatter <axes = [1], starts = [3], shape = [8, 64]> (part)
//
// are x = base.clone(), or x = zeros(8, 64), and x[:, 3 : 3 + part.shape[1]] = part.
//
// The sizes of the replaced part are those of `part`, which has as many dims as the result. The
// result is written over the base if nobody reads that later (run/steps/slice_scatter.cpp).
#pragma once

#include "ir/graph.h"

#include <cstdint>
#include <vector>

namespace torch_ort::ops {

// The call that such a node becomes.
inline constexpr const char* kSliceScatterCall = "torch_ort::slice_scatter";

// Along one dim: the elements begin, begin + step, ...
struct Stretch {
  int64_t begin = 0;
  ir::Dim size;
  int64_t step = 1;
  bool operator==(const Stretch&) const = default;
};

// For each dim of the result of a SliceScatter node whose part has a known shape, which elements
// are replaced. Throws UserError if the attributes fit neither each other nor the part.
std::vector<Stretch> replaced_part(const ir::Node& node);
// Whether `size` elements from `begin` on are among the first `whole`. No number overflows.
inline bool is_within(int64_t begin, int64_t size, int64_t step, int64_t whole) {
  return size <= 0 || (begin < whole && size - 1 <= (whole - 1 - begin) / step);
}
// The attributes `axes`, `starts` and `steps` that name such a part of a tensor of this shape.
ir::Attrs attrs_of_part(const std::vector<Stretch>& part, const ir::Shape& whole);

}  // namespace torch_ort::ops
