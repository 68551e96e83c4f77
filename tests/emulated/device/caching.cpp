#include "caching.h"

#include <algorithm>
#include <iterator>

namespace emulated {

namespace {

constexpr size_t kUnit = 512;           // of blocks
constexpr size_t kMostSmall = 1 << 20;  // requests up to this share small segments
constexpr size_t kSmallSegment = 2 << 20;
constexpr size_t kLeastOwn = 10 << 20;  // requests from this on have segments of their own size
constexpr size_t kLargeSegment = 20 << 20;
constexpr size_t kRoundOwn = 2 << 20;

size_t round_up(size_t bytes, size_t unit) { return (bytes + unit - 1) / unit * unit; }

size_t segment_bytes(size_t bytes) {
  if (bytes <= kMostSmall) return kSmallSegment;
  return bytes < kLeastOwn ? kLargeSegment : round_up(bytes, kRoundOwn);
}

}  // namespace

Caching::FreeBlock Caching::key(Blocks::const_iterator block) {
  const auto& [address, of] = *block;
  return {of.is_small, of.stream, of.bytes, address};
}

Caching::Address Caching::allocate(size_t bytes, const void* stream) {
  bytes = std::max(round_up(bytes, kUnit), kUnit);
  const bool is_small = bytes <= kMostSmall;
  const auto found = free_.lower_bound({is_small, stream, bytes, 0});
  const bool fits =
      found != free_.end() && std::get<0>(*found) == is_small && std::get<1>(*found) == stream;
  const auto block =
      fits ? blocks_.find(std::get<3>(*found)) : new_segment(bytes, stream, is_small);
  free_.erase(key(block));
  block->second.is_free = false;
  const size_t rest = block->second.bytes - bytes;
  if (is_small ? rest >= kUnit : rest > kMostSmall) {
    Block behind = block->second;
    behind.bytes = rest;
    behind.is_free = true;
    block->second.bytes = bytes;
    free_.insert(key(blocks_.emplace(block->first + bytes, behind).first));
  }
  return block->first;
}

Caching::Blocks::iterator Caching::new_segment(size_t bytes, const void* stream, bool is_small) {
  const size_t whole = segment_bytes(bytes);
  const auto made = blocks_.emplace(end_, Block{whole, end_, stream, is_small, true}).first;
  end_ += whole;
  reserved_ += whole;
  free_.insert(key(made));
  return made;
}

Caching::Blocks::iterator Caching::join(Blocks::iterator block, Blocks::iterator behind) {
  const bool fits = behind != blocks_.end() && block->second.is_free && behind->second.is_free &&
                    block->second.segment == behind->second.segment;
  if (!fits) return block;
  free_.erase(key(block));
  free_.erase(key(behind));
  block->second.bytes += behind->second.bytes;
  blocks_.erase(behind);
  free_.insert(key(block));
  return block;
}

void Caching::free(Address address) {
  auto block = blocks_.find(address);
  block->second.is_free = true;
  free_.insert(key(block));
  join(block, std::next(block));
  if (block != blocks_.begin()) join(std::prev(block), block);
}

void Caching::empty() {
  for (auto block = blocks_.begin(); block != blocks_.end();) {
    const auto behind = std::next(block);
    const bool is_whole =
        block->second.segment == block->first &&
        (behind == blocks_.end() || behind->second.segment != block->second.segment);
    if (block->second.is_free && is_whole) {
      reserved_ -= block->second.bytes;
      free_.erase(key(block));
      blocks_.erase(block);
    }
    block = behind;
  }
}

}  // namespace emulated
