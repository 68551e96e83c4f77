// Memory of the test device. Its addresses are real, and no host code can read or write them: each
// page is mapped twice, once where nobody may touch it (what tensors point to), once for kernels.
#pragma once

#include <c10/core/CachingDeviceAllocator.h>

#include <cstddef>
#include <memory>

namespace emulated {

// Bytes that the device has.
inline constexpr size_t kDeviceBytes = size_t{16} << 30;

// Where kernels find what tensors have at `address`; null stays null.
// Raises for any other address outside of the device.
void* host_view(const void* address);
bool is_device_address(const void* address);

// Lets kernels of a driver read and write what tensors point to, until it is closed as often.
void open_memory(int open);

// The allocator of the device: addresses are multiples of 512, new and freed memory is full of
// 0xFF, which is NaN in all floating types. Raises OutOfMemoryError in the words of PyTorch's.
c10::DeviceAllocator& allocator();

// Memory of a graph: what is allocated while it is captured, and what of that is free again.
struct Pool;

// From now on this thread's allocations come from a new pool, until `end`.
Pool* begin_pool();
void end_pool(Pool* pool);
// Fills a pool with poison, and repairs the bytes that guard it.
void poison_pool(Pool* pool);
void repair_guards(Pool* pool);
// The graph is gone: the memory is anybody's as soon as it is free.
void drop_pool(Pool* pool);
// What all memory that is in use holds; and sets it to that, as far as it is in use still.
struct Snapshot;
std::shared_ptr<const Snapshot> take_snapshot();
void restore(const Snapshot& snapshot);

// Memory is given out up to this share of what the device has.
void set_memory_fraction(double fraction);

// Ends the process if something was written behind the end of a piece of memory that is in use.
void check_guards();

// Host memory that says it is pinned.
c10::Allocator& pinned_allocator();
bool is_pinned(const void* address);

}  // namespace emulated
