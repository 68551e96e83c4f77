// Greedy placement: blocks are placed in order of size, largest first, each at the lowest offset
// that is free during its whole live range. Conflicts are looked up by time, so the cost grows with
// the number of blocks that are live at once, not with the square of the number of blocks.
#include "plan/arena.h"

#include <algorithm>
#include <limits>
#include <utility>

namespace torch_ort::plan {
namespace {

constexpr int64_t kNoLimit = std::numeric_limits<int64_t>::max();

struct Span {
  int64_t begin;
  int64_t end;
};

int64_t align_up(int64_t bytes, int64_t alignment) {
  return (bytes + alignment - 1) / alignment * alignment;
}

// A set of blocks that tells which of them are alive in a range of times.
class TimeIndex {
 public:
  TimeIndex(int first, int last) : first_(first), size_(std::max(last - first + 1, 1)) {
    covering_.assign(2 * static_cast<size_t>(size_), -1);
    beginning_.assign(size_, -1);
  }

  // Each node of a segment tree over times lists the blocks that are alive at all times below it.
  void add(const Block& block, int id) {
    int low = block.begin - first_ + size_;
    int high = block.end - first_ + size_ + 1;
    for (; low < high; low /= 2, high /= 2) {
      if (low & 1) push(covering_[low++], id);
      if (high & 1) push(covering_[--high], id);
    }
    push(beginning_[block.begin - first_], id);
  }

  // Calls visit(id) once for each block that is alive at some time from `begin` to `end`: those
  // alive at `begin`, and those that begin later.
  template <typename Visit>
  void for_each_alive(int begin, int end, Visit visit) const {
    for (int node = begin - first_ + size_; node > 0; node /= 2) walk(covering_[node], visit);
    for (int time = begin + 1; time <= end; ++time) walk(beginning_[time - first_], visit);
  }

 private:
  struct Link {
    int id;
    int next;
  };

  void push(int& head, int id) {
    links_.push_back({id, head});
    head = static_cast<int>(links_.size()) - 1;
  }

  template <typename Visit>
  void walk(int head, Visit visit) const {
    for (int link = head; link >= 0; link = links_[link].next) visit(links_[link].id);
  }

  int first_;
  int size_;
  std::vector<int> covering_;
  std::vector<int> beginning_;
  std::vector<Link> links_;
};

// The parts of the context area that the crossing blocks leave free in one half. Each crossing
// block has a key: it is free during a life if its key is below that of the life. In the forward
// half that means that the block begins after the life ends, in the backward half that it ends
// before the life begins.
class ContextRoom {
 public:
  ContextRoom(const std::vector<Block>& blocks, const std::vector<int>& crossing, bool forward)
      : forward_(forward) {
    for (int id : crossing) {
      keys_.push_back(forward ? -blocks[id].begin : blocks[id].end);
      starts_.push_back(blocks[id].offset);
      end_ = blocks[id].offset + blocks[id].bytes;
    }
    lowest_before_ = keys_;
    highest_after_ = keys_;
    for (size_t i = 1; i < keys_.size(); ++i) {
      lowest_before_[i] = std::min(lowest_before_[i - 1], keys_[i]);
      size_t j = keys_.size() - 1 - i;
      highest_after_[j] = std::max(highest_after_[j + 1], keys_[j]);
    }
  }

  // Appends the spans that are free during the life of the block, the lowest first. `size` is that
  // of the area.
  void find(const Block& block, int64_t size, std::vector<Span>& spans) const {
    int limit = forward_ ? -block.end : block.begin;
    // Crossing blocks are placed in about the order in which they begin and end. So nothing below
    // `low` is free, all from `high` on is, and only the few blocks between them are looked at.
    size_t low = first_below(lowest_before_, limit);
    size_t high = first_below(highest_after_, limit);
    for (size_t i = low; i < high; ++i) {
      if (keys_[i] >= limit) continue;
      size_t start = i;
      // The block before `high` is not free, so this ends.
      while (keys_[i] < limit) ++i;
      spans.push_back({starts_[start], starts_[i]});
    }
    spans.push_back({high < keys_.size() ? starts_[high] : end_, size});
  }

 private:
  // The numbers in the list fall from left to right.
  static size_t first_below(const std::vector<int>& falling, int limit) {
    return std::partition_point(falling.begin(), falling.end(),
                                [limit](int key) { return key >= limit; }) -
           falling.begin();
  }

  bool forward_;
  std::vector<int> keys_;
  std::vector<int64_t> starts_;
  int64_t end_ = 0;  // end of the last crossing block
  std::vector<int> lowest_before_;
  std::vector<int> highest_after_;
};

// The lowest offset within `room` at which `bytes` fit between the spans in use; -1 if there is
// none. The spans are sorted by their beginning.
int64_t lowest_fit(const std::vector<Span>& in_use, Span room, int64_t bytes) {
  int64_t offset = room.begin;
  for (const Span& span : in_use) {
    if (span.begin - offset >= bytes) break;
    offset = std::max(offset, span.end);
  }
  return room.end - offset >= bytes ? offset : -1;
}

// Places the blocks of one half that do not cross the border.
class HalfLayout {
 public:
  HalfLayout(std::vector<Block>& blocks, const std::vector<int>& crossing, bool forward, int first,
             int last, const std::vector<int64_t>& chunk_ends, int64_t context_bytes)
      : blocks_(blocks),
        room_(blocks, crossing, forward),
        placed_(first, last),
        chunk_ends_(chunk_ends),
        context_bytes_(context_bytes) {}

  // Places the delivered blocks, given from the last to begin to the first. In this order each
  // takes the lowest memory of what has died by then, and no gaps are left between them. Returns
  // the size of the context area.
  int64_t deliver(const std::vector<int>& ids) {
    for (int id : ids) {
      find_in_use(blocks_[id]);
      place_in_context(blocks_[id], kNoLimit);
      context_bytes_ = std::max(context_bytes_, blocks_[id].offset + blocks_[id].bytes);
      placed_.add(blocks_[id], id);
    }
    return context_bytes_;
  }

  // Places blocks, given from the largest to the smallest. Returns the size of the scratch area.
  int64_t place(const std::vector<int>& ids) {
    for (int id : ids) place_block(id);
    return scratch_bytes_;
  }

 private:
  void place_block(int id) {
    Block& block = blocks_[id];
    find_in_use(block);
    if (!place_in_context(block, context_bytes_)) {
      block.area = Area::kScratch;
      block.offset = lowest_fit(scratch_in_use_, {0, kNoLimit}, block.bytes);
      scratch_bytes_ = std::max(scratch_bytes_, block.offset + block.bytes);
    }
    placed_.add(block, id);
  }

  void find_in_use(const Block& block) {
    context_in_use_.clear();
    scratch_in_use_.clear();
    placed_.for_each_alive(block.begin, block.end, [this](int id) {
      const Block& other = blocks_[id];
      bool in_context = other.area == Area::kContext;
      (in_context ? context_in_use_ : scratch_in_use_)
          .push_back({other.offset, other.offset + other.bytes});
    });
    auto by_begin = [](const Span& a, const Span& b) { return a.begin < b.begin; };
    std::sort(context_in_use_.begin(), context_in_use_.end(), by_begin);
    std::sort(scratch_in_use_.begin(), scratch_in_use_.end(), by_begin);
  }

  bool place_in_context(Block& block, int64_t size) {
    free_.clear();
    room_.find(block, size, free_);
    for (const Span& span : free_) {
      if (span.end - span.begin < block.bytes) continue;
      int64_t offset = lowest_fit_in_a_chunk(span, block.bytes);
      if (offset < 0) continue;
      block.area = Area::kContext;
      block.offset = offset;
      return true;
    }
    return false;
  }

  int64_t lowest_fit_in_a_chunk(Span room, int64_t bytes) const {
    // The last chunk grows with the area.
    const auto last = std::prev(chunk_ends_.end());
    for (auto end = std::upper_bound(chunk_ends_.begin(), last, room.begin); end != last; ++end) {
      if (*end >= room.end) break;
      int64_t offset = lowest_fit(context_in_use_, {room.begin, *end}, bytes);
      if (offset >= 0) return offset;
      room.begin = *end;
    }
    return lowest_fit(context_in_use_, room, bytes);
  }

  std::vector<Block>& blocks_;
  ContextRoom room_;
  TimeIndex placed_;
  const std::vector<int64_t>& chunk_ends_;
  int64_t context_bytes_;
  int64_t scratch_bytes_ = 0;
  std::vector<Span> context_in_use_;
  std::vector<Span> scratch_in_use_;
  std::vector<Span> free_;
};

// The order of the crossing blocks. They are all alive at the border, so no order can overlap them.
enum class CrossingOrder {
  // All free memory is one piece at the end: always in the forward half, and in the backward half
  // as long as it passes the layers in reverse.
  kByFirstWrite,
  // All free memory is one piece at the end always in the backward half, so that delivered
  // gradients leave no gaps.
  kByLastUse,
};

bool is_small(const Block& block) {
  constexpr int64_t kLargestSmall = 4 << 10;
  return block.bytes <= kLargestSmall;
}

int64_t place_crossing(std::vector<Block>& blocks, std::vector<int>& crossing,
                       CrossingOrder order) {
  const bool by_write = order == CrossingOrder::kByFirstWrite;
  std::sort(crossing.begin(), crossing.end(), [&blocks, by_write](int left, int right) {
    const Block &a = blocks[left], &b = blocks[right];
    // Small blocks come first. Between large ones they would divide the memory that these leave
    // free.
    if (is_small(a) != is_small(b)) return is_small(a);
    if (by_write && a.begin != b.begin) return a.begin < b.begin;
    if (a.end != b.end) return a.end > b.end;
    return a.begin != b.begin ? a.begin < b.begin : left < right;
  });
  int64_t offset = 0;
  for (int id : crossing) {
    blocks[id].area = Area::kContext;
    blocks[id].offset = offset;
    offset += blocks[id].bytes;
  }
  return offset;
}

// The blocks by kind, each kind in the order in which its blocks are placed.
struct Groups {
  std::vector<int> crossing, delivered, forward, backward;
  int last = 0;  // the last time at which one of them is used

  Groups(const std::vector<Block>& blocks, int border) : last(border) {
    for (size_t id = 0; id < blocks.size(); ++id) {
      const Block& block = blocks[id];
      last = std::max(last, block.end);
      auto& group = block.end < border      ? forward
                    : block.begin <= border ? crossing
                    : block.delivered       ? delivered
                                            : backward;
      group.push_back(static_cast<int>(id));
    }
    const auto larger = [&blocks](int a, int b) { return blocks[a].bytes > blocks[b].bytes; };
    std::stable_sort(forward.begin(), forward.end(), larger);
    std::stable_sort(backward.begin(), backward.end(), larger);
    const auto later = [&blocks](int a, int b) { return blocks[a].begin > blocks[b].begin; };
    std::stable_sort(delivered.begin(), delivered.end(), later);
  }
};

// Where chunks end: behind a crossing block, as soon as a chunk has the bytes. There are few
// chunks, since each is an allocation in each call.
std::vector<int64_t> divide(const std::vector<Block>& blocks, const std::vector<int>& crossing,
                            int64_t crossing_bytes, int64_t chunk_bytes) {
  constexpr int64_t kMostChunks = 32;
  std::vector<int64_t> ends;
  if (chunk_bytes > 0) {
    const int64_t smallest = std::max(chunk_bytes, crossing_bytes / kMostChunks);
    int64_t begin = 0;
    for (int id : crossing) {
      const int64_t end = blocks[id].offset + blocks[id].bytes;
      if (end - begin < smallest || crossing_bytes - end < smallest) continue;
      ends.push_back(end);
      begin = end;
    }
  }
  ends.push_back(crossing_bytes);
  return ends;
}

std::vector<ArenaChunk> chunks_between(const std::vector<Block>& blocks,
                                       const std::vector<int64_t>& ends, int border) {
  std::vector<ArenaChunk> chunks;
  int64_t begin = 0;
  for (int64_t end : ends) {
    if (end > begin) chunks.push_back({begin, end - begin, border});
    begin = end;
  }
  for (const Block& block : blocks) {
    if (block.area != Area::kContext) continue;
    const auto next = std::upper_bound(
        chunks.begin(), chunks.end(), block.offset,
        [](int64_t offset, const ArenaChunk& chunk) { return offset < chunk.offset; });
    int& last = std::prev(next)->last_use;
    last = std::max(last, block.end);
  }
  return chunks;
}

// Delivered blocks are usually placed first, so that no other blocks are between them. Placed last,
// they leave more room for blocks that live only briefly, which are the larger ones in models of
// images.
ArenaSizes place_groups(std::vector<Block>& blocks, Groups& groups, CrossingOrder order,
                        bool deliver_last, const ArenaOptions& options) {
  ArenaSizes sizes;
  sizes.crossing = place_crossing(blocks, groups.crossing, order);
  std::vector<int64_t> ends = divide(blocks, groups.crossing, sizes.crossing, options.chunk_bytes);
  HalfLayout backward(blocks, groups.crossing, false, options.border + 1, groups.last, ends,
                      sizes.crossing);
  if (deliver_last) sizes.backward_scratch = backward.place(groups.backward);
  sizes.context = backward.deliver(groups.delivered);
  if (!deliver_last) sizes.backward_scratch = backward.place(groups.backward);
  HalfLayout forward(blocks, groups.crossing, true, 0, options.border - 1, ends, sizes.context);
  sizes.forward_scratch = forward.place(groups.forward);
  ends.back() = sizes.context;
  sizes.chunks = chunks_between(blocks, ends, options.border);
  return sizes;
}

// What of two placements the better one has less of: the bytes of the areas. If chunks are freed
// after their last use, the peak with the tensors that are in no area.
int64_t peak(const ArenaSizes& sizes, const ArenaOptions& options) {
  if (options.chunk_bytes == 0) {
    return sizes.context + std::max(sizes.forward_scratch, sizes.backward_scratch);
  }
  int64_t highest = 0;
  for (int time = 0; time < static_cast<int>(options.beside.size()); ++time) {
    int64_t bytes = options.beside[time];
    bytes += time < options.border ? sizes.forward_scratch : sizes.backward_scratch;
    for (const ArenaChunk& chunk : sizes.chunks) {
      if (chunk.last_use >= time) bytes += chunk.bytes;
    }
    highest = std::max(highest, bytes);
  }
  return highest;
}

}  // namespace

ArenaSizes place_blocks(std::vector<Block>& blocks, const ArenaOptions& options) {
  for (Block& block : blocks) block.bytes = align_up(block.bytes, options.alignment);
  Groups groups(blocks, options.border);
  ArenaSizes sizes = place_groups(blocks, groups, CrossingOrder::kByFirstWrite, false, options);
  if (groups.delivered.empty() && sizes.chunks.size() <= 1) return sizes;
  int64_t lowest = peak(sizes, options);
  constexpr std::pair<CrossingOrder, bool> kOthers[] = {{CrossingOrder::kByLastUse, false},
                                                        {CrossingOrder::kByLastUse, true},
                                                        {CrossingOrder::kByFirstWrite, true}};
  for (const auto& [order, deliver_last] : kOthers) {
    if (deliver_last && groups.delivered.empty()) continue;
    std::vector<Block> others = blocks;
    ArenaSizes other_sizes = place_groups(others, groups, order, deliver_last, options);
    const int64_t other_peak = peak(other_sizes, options);
    if (other_peak >= lowest) continue;
    blocks = std::move(others);
    sizes = std::move(other_sizes);
    lowest = other_peak;
  }
  return sizes;
}

}  // namespace torch_ort::plan
