#include "run/memory/arena.h"

#include "base/rounding.h"
#include "run/counters.h"

#include <c10/core/Allocator.h>
#include <c10/util/Exception.h>
#include <sys/mman.h>
#include <unistd.h>
#ifdef __SANITIZE_ADDRESS__
#include <sanitizer/asan_interface.h>
#else
#define ASAN_POISON_MEMORY_REGION(data, bytes) ((void)(data), (void)(bytes))
#define ASAN_UNPOISON_MEMORY_REGION(data, bytes) ((void)(data), (void)(bytes))
#endif

#include <algorithm>
#include <map>
#include <mutex>

namespace torch_ort::run {

namespace {

// The usual size on x86-64, and on aarch64 where pages have 4 KiB. Elsewhere the advice to use them
// has no effect.
constexpr int64_t kHugePage = int64_t{2} << 20;
const int64_t kPage = sysconf(_SC_PAGESIZE);

// Idle buffers of the CPU by capacity.
struct IdleBuffers {
  std::mutex mutex;
  std::multimap<int64_t, void*> by_capacity;
};

IdleBuffers& idle_buffers() {
  // Never destroyed, because tokens may be dropped while the process ends.
  static IdleBuffers* buffers = new IdleBuffers;
  return *buffers;
}

void note_bytes(int64_t change) {
  Counters& count = counters();
  int64_t now = count.arena_bytes.fetch_add(change) + change;
  int64_t peak = count.arena_bytes_peak.load();
  while (now > peak && !count.arena_bytes_peak.compare_exchange_weak(peak, now)) {
  }
}

// Maps memory, aligned to a huge page if it is that large. Returns nullptr if the system has none
// left.
void* map_memory(int64_t bytes, int64_t capacity) {
  const int64_t alignment = capacity >= kHugePage ? kHugePage : kPage;
  const int64_t mapped = capacity + alignment - kPage;
  void* raw = mmap(nullptr, mapped, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (raw == MAP_FAILED) return nullptr;
  auto begin = reinterpret_cast<uintptr_t>(raw);
  uintptr_t aligned = (begin + alignment - 1) / alignment * alignment;
  if (aligned > begin) munmap(raw, aligned - begin);
  uintptr_t end = begin + mapped;
  if (end > aligned + capacity) {
    munmap(reinterpret_cast<void*>(aligned + capacity), end - aligned - capacity);
  }
  void* data = reinterpret_cast<void*>(aligned);
  // The rest stays in small pages, so that at most one small page more is held than is used.
  const int64_t in_huge_pages = bytes / kHugePage * kHugePage;
  if (in_huge_pages > 0) madvise(data, in_huge_pages, MADV_HUGEPAGE);
  counters().arena_allocations.fetch_add(1);
  counters().arena_growth.fetch_add(capacity);
  note_bytes(capacity);
  return data;
}

// Makes the address sanitizer report accesses beyond the bytes that are allocated.
void allocate_first(int64_t bytes, void* data, int64_t capacity) {
  ASAN_UNPOISON_MEMORY_REGION(data, bytes);
  ASAN_POISON_MEMORY_REGION(static_cast<char*>(data) + bytes, capacity - bytes);
}

void unmap_memory(void* data, int64_t capacity) {
  // The system may give these addresses to anybody.
  allocate_first(capacity, data, capacity);
  munmap(data, capacity);
  note_bytes(-capacity);
}

// Takes the smallest idle buffer that fits. If none fits, the largest idle one is freed. It would
// be too small for the sizes that are used now, and so there are never more buffers than were in
// use at once.
std::pair<void*, int64_t> take_idle(int64_t bytes) {
  IdleBuffers& idle = idle_buffers();
  std::lock_guard lock(idle.mutex);
  auto found = idle.by_capacity.lower_bound(bytes);
  if (found != idle.by_capacity.end()) {
    auto buffer = std::pair(found->second, found->first);
    idle.by_capacity.erase(found);
    return buffer;
  }
  if (!idle.by_capacity.empty()) {
    auto largest = std::prev(idle.by_capacity.end());
    unmap_memory(largest->second, largest->first);
    idle.by_capacity.erase(largest);
  }
  return {nullptr, 0};
}

}  // namespace

int64_t free_idle_buffers() {
  IdleBuffers& idle = idle_buffers();
  std::lock_guard lock(idle.mutex);
  int64_t freed = 0;
  for (auto [capacity, data] : idle.by_capacity) {
    unmap_memory(data, capacity);
    freed += capacity;
  }
  idle.by_capacity.clear();
  return freed;
}

Buffer allocate(c10::Device device, int64_t bytes) {
  Buffer buffer;
  buffer.device_ = device;
  if (bytes == 0) return buffer;
  if (!device.is_cpu()) {
    buffer.owner_ = c10::GetAllocator(device.type())->allocate(bytes);
    buffer.data_ = buffer.owner_.get();
    buffer.capacity_ = bytes;
    return buffer;
  }
  std::tie(buffer.data_, buffer.capacity_) = take_idle(bytes);
  if (buffer.data_ != nullptr) {
    allocate_first(bytes, buffer.data_, buffer.capacity_);
    return buffer;
  }

  const int64_t capacity = round_up(bytes, bytes >= kHugePage ? kHugePage : kPage);
  buffer.data_ = map_memory(bytes, capacity);
  if (buffer.data_ == nullptr && free_idle_buffers() > 0) {
    buffer.data_ = map_memory(bytes, capacity);
  }
  TORCH_CHECK_WITH(OutOfMemoryError, buffer.data_ != nullptr,
                   "DefaultCPUAllocator: can't allocate memory: you tried to allocate ", bytes,
                   " bytes.");
  buffer.capacity_ = capacity;
  allocate_first(bytes, buffer.data_, capacity);
  return buffer;
}

void Buffer::give_back() noexcept {
  if (data_ != nullptr && device_.is_cpu()) {
    IdleBuffers& idle = idle_buffers();
    std::lock_guard lock(idle.mutex);
    allocate_first(0, data_, capacity_);
    idle.by_capacity.emplace(capacity_, data_);
  }
  forget();
}

void Buffer::free() noexcept {
  if (data_ != nullptr && device_.is_cpu()) unmap_memory(data_, capacity_);
  forget();
}

void Buffer::forget() noexcept {
  owner_.clear();
  data_ = nullptr;
  capacity_ = 0;
}

void Buffer::release_pages(int64_t begin, int64_t end) noexcept {
  if (device_.is_cpu()) run::release_pages(static_cast<char*>(data_) + begin, end - begin);
}

void release_pages(void* data, int64_t bytes) noexcept {
  const auto address = reinterpret_cast<int64_t>(data);
  const int64_t begin = round_up(address, kPage), end = (address + bytes) / kPage * kPage;
  if (begin < end) madvise(reinterpret_cast<void*>(begin), end - begin, MADV_DONTNEED);
}

}  // namespace torch_ort::run
