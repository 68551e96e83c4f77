// Chooses offsets for blocks of memory whose live ranges are known.
#pragma once

#include "plan/plan.h"

#include <cstdint>
#include <vector>

namespace torch_ort::plan {

// The memory of one planned tensor, or of a chain of tensors each of which overwrites the one
// before it.
struct Block {
  int64_t bytes = 0;  // more than zero
  // The first and last time of use. The border between the halves counts as a time.
  int begin = 0;
  int end = 0;
  bool delivered = false;  // a gradient that leaves in the context area
  // Filled in by place_blocks(), as is the offset.
  Area area = Area::kNone;
  int64_t offset = 0;
};

struct ArenaSizes {
  int64_t context = 0;
  // The beginning of it, which holds what crosses the border.
  int64_t crossing = 0;
  int64_t forward_scratch = 0;
  int64_t backward_scratch = 0;
};

// Places every block. Blocks that are live at time `border` cross it: they are placed side by side
// in the context area. Delivered blocks take the memory of crossing blocks that are dead by then,
// and the area grows where there is none. Other blocks use what is free of the context area, or
// else one scratch area for each half.
ArenaSizes place_blocks(std::vector<Block>& blocks, int border, int64_t alignment);

}  // namespace torch_ort::plan
