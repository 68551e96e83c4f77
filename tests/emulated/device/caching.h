// How much memory PyTorch's caching allocator would hold for the same requests. It asks the driver
// for segments, cuts blocks out of them, and keeps both when tensors die. The rules are those of
// c10/cuda/CUDACachingAllocator.cpp with its default settings.
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <set>
#include <tuple>

namespace emulated {

class Caching {
 public:
  // What a piece of memory that is in use is known by.
  using Address = uint64_t;

  // Takes the smallest free block of the stream that fits, or a new segment.
  Address allocate(size_t bytes, const void* stream);
  // Joins the block with free ones beside it.
  void free(Address address);
  // Gives back the segments that are free as a whole.
  void empty();
  // The bytes of all segments.
  size_t reserved() const { return reserved_; }

 private:
  struct Block {
    size_t bytes;
    Address segment;
    const void* stream;
    bool is_small;  // of a segment for small blocks
    bool is_free;
  };
  using Blocks = std::map<Address, Block>;
  using FreeBlock = std::tuple<bool, const void*, size_t, Address>;  // is_small, stream, bytes

  static FreeBlock key(Blocks::const_iterator block);
  Blocks::iterator new_segment(size_t bytes, const void* stream, bool is_small);
  Blocks::iterator join(Blocks::iterator block, Blocks::iterator behind);

  Blocks blocks_;
  std::set<FreeBlock> free_;
  Address end_ = 0;
  size_t reserved_ = 0;
};

}  // namespace emulated
