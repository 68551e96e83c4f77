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

// A chunk of the context area.
struct ArenaChunk {
  int64_t offset = 0, bytes = 0;
  int last_use = 0;  // the last time at which a block in it is used, the border at least
};

struct ArenaSizes {
  int64_t context = 0;
  // The beginning of it, which holds what crosses the border.
  int64_t crossing = 0;
  int64_t forward_scratch = 0;
  int64_t backward_scratch = 0;
  std::vector<ArenaChunk> chunks;  // what the context area consists of, in order
};

struct ArenaOptions {
  int border = 0;  // the time between the halves
  int64_t alignment = 1;
  int64_t chunk_bytes = 0;  // as in PlanOptions
  // By time: the bytes of tensors that are in no area. Only read if there may be several chunks.
  std::vector<int64_t> beside;
};

// Places every block. Blocks that are live at time `border` cross it: they are placed side by side
// in the context area. Delivered blocks take the memory of crossing blocks that are dead by then,
// and the area grows where there is none. Other blocks use what is free of the context area, or
// else one scratch area for each half. No block lies in two chunks.
ArenaSizes place_blocks(std::vector<Block>& blocks, const ArenaOptions& options);

}  // namespace torch_ort::plan
