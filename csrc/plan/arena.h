// Offsets for blocks of memory whose lifetimes are known.
#pragma once

#include "plan/plan.h"

#include <cstdint>
#include <vector>

namespace torch_ort::plan {

// Memory of one planned tensor, or of a chain of tensors that take it over from one another.
struct Block {
  int64_t bytes = 0;  // more than zero
  int begin = 0;      // first and last time of use; the border between the halves has a time too
  int end = 0;
  bool delivered = false;   // stays in the context area when the backward half is over
  Area area = Area::kNone;  // filled in, with the offset
  int64_t offset = 0;
};

struct ArenaSizes {
  int64_t context = 0;
  int64_t crossing = 0;  // its beginning, where what crosses lies
  int64_t forward_scratch = 0;
  int64_t backward_scratch = 0;
};

// Places every block. What is alive at time `border` crosses: it lies in the context area, side by
// side. Delivered blocks take what has died of that, and make the area larger where nothing has.
// The rest shares the context area where these leave it room, and one scratch area per half
// otherwise.
ArenaSizes place_blocks(std::vector<Block>& blocks, int border, int64_t alignment);

}  // namespace torch_ort::plan
