#include "memory.h"

#include "caching.h"
#include "driver.h"
#include "graphs.h"
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <c10/core/impl/alloc_cpu.h>
#include <c10/util/Exception.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <map>
#include <mutex>
#include <vector>

namespace emulated {

struct Pool {
  std::map<size_t, size_t> free;  // offset -> bytes, guards included
  size_t live = 0;                // blocks
  bool is_dropped = false;
};

struct Snapshot {
  std::map<void*, std::vector<char>> blocks;
};

namespace {

using c10::CachingAllocator::Stat;
using c10::CachingAllocator::StatArray;
using c10::CachingAllocator::StatType;

constexpr size_t kAlignment = 512;
// Behind each piece of memory: who writes there is found, also if it is what he has read there.
constexpr size_t kGuardBytes = 512;
constexpr int kGuard = 0x3B;  // 0.003 as a float: what is added to it shows
constexpr int kPoison = 0xFF;
const c10::Device kDevice(c10::DeviceType::CUDA, 0);

// The two mappings. Pages that nobody has used take no memory.
struct Pages {
  char* device;
  char* host;

  Pages() {
    const int file = memfd_create("emulated_cuda", MFD_CLOEXEC);
    TORCH_CHECK(file >= 0 && ftruncate(file, kDeviceBytes) == 0, "emulated device: no memory");
    device = map(file, PROT_NONE);
    host = map(file, PROT_READ | PROT_WRITE);
    close(file);
  }

  static char* map(int file, int protection) {
    void* found = mmap(nullptr, kDeviceBytes, protection, MAP_SHARED | MAP_NORESERVE, file, 0);
    TORCH_CHECK(found != MAP_FAILED, "emulated device: no address space");
    return static_cast<char*>(found);
  }
};

const Pages& pages() {
  static const Pages each;
  return each;
}

// Of the calling thread; nullptr: memory is anybody's.
thread_local Pool* current_pool = nullptr;

Stat& whole(StatArray& stats) { return stats[static_cast<size_t>(StatType::AGGREGATE)]; }

class Allocator final : public c10::DeviceAllocator {
 public:
  c10::DataPtr allocate(size_t requested) override {
    if (requested == 0) return {nullptr, kDevice};
    const size_t bytes = (requested + kAlignment - 1) / kAlignment * kAlignment;
    const size_t guarded = bytes + kGuardBytes;
    void* stream = current_stream();
    std::lock_guard lock(mutex_);
    Pool* const pool = current_pool;
    size_t offset;
    if (pool != nullptr && take(pool->free, guarded, offset)) {
      // It has been used in the same capture.
    } else if (take(free_, guarded, offset)) {
      // It is poisoned.
    } else {
      if (end_ + guarded > limit_) {
        ++stats_.num_ooms;
        TORCH_CHECK_WITH(OutOfMemoryError, false, "CUDA out of memory. Tried to allocate ",
                         requested, " bytes. GPU 0 has a total capacity of ", limit_,
                         " bytes of which ", limit_ - end_, " bytes are free.");
      }
      offset = end_;
      end_ += guarded;
      std::memset(pages().host + offset, kPoison, guarded);
    }
    for (StatArray* each : {&stats_.allocated_bytes, &stats_.active_bytes}) {
      whole(*each).increase(bytes);
    }
    for (StatArray* each : {&stats_.allocation, &stats_.active}) whole(*each).increase(1);
    whole(stats_.requested_bytes).increase(requested);
    std::memset(pages().host + offset + requested, kGuard, guarded - requested);
    char* address = pages().device + offset;
    // PyTorch's allocator has segments for each pool.
    const void* owner = pool != nullptr ? static_cast<const void*>(pool) : stream;
    live_.emplace(address,
                  Block{bytes, requested, stream, caching_.allocate(requested, owner), pool});
    if (pool != nullptr) ++pool->live;
    note_reserved();
    return {address, address, &drop, kDevice};
  }

  c10::DeleterFnPtr raw_deleter() const override { return &drop; }
  void copy_data(void* to, const void* from, size_t count) const override {
    std::memcpy(host_view(to), host_view(from), count);
  }

  bool initialized() override { return true; }
  void emptyCache(c10::MempoolId_t) override {
    std::lock_guard lock(mutex_);
    caching_.empty();
    note_reserved();
  }
  void recordStream(const c10::DataPtr&, c10::Stream) override {}

  c10::CachingDeviceAllocator::DeviceStats getDeviceStats(c10::DeviceIndex) override {
    std::lock_guard lock(mutex_);
    return stats_;
  }
  void resetAccumulatedStats(c10::DeviceIndex) override {
    std::lock_guard lock(mutex_);
    for (StatArray* each : all_stats()) whole(*each).reset_accumulated();
    stats_.num_ooms = 0;
  }
  void resetPeakStats(c10::DeviceIndex) override {
    std::lock_guard lock(mutex_);
    for (StatArray* each : all_stats()) whole(*each).reset_peak();
  }
  std::pair<size_t, size_t> getMemoryInfo(c10::DeviceIndex) override {
    std::lock_guard lock(mutex_);
    size_t unused = limit_ - end_;
    for (const auto& [offset, bytes] : free_) unused += bytes;
    return {unused, kDeviceBytes};
  }

  void check_guards() {
    std::lock_guard lock(mutex_);
    for (const auto& [address, block] : live_) {
      check_guard(static_cast<const char*>(host_view(address)), block.requested,
                  block.bytes + kGuardBytes);
    }
  }

  void poison(Pool& pool) {
    std::lock_guard lock(mutex_);
    for (const auto& [offset, bytes] : pool.free) {
      std::memset(pages().host + offset, kPoison, bytes);
    }
    for (const auto& [address, block] : live_) {
      if (block.pool == &pool) std::memset(host_view(address), kPoison, block.requested);
    }
  }

  // Within the pool, what lay there earlier in the capture may cover what guards memory now.
  void repair(Pool& pool) {
    std::lock_guard lock(mutex_);
    for (const auto& [address, block] : live_) {
      if (block.pool != &pool) continue;
      std::memset(static_cast<char*>(host_view(address)) + block.requested, kGuard,
                  block.bytes + kGuardBytes - block.requested);
    }
  }

  void drop_pool(Pool& pool) {
    std::lock_guard lock(mutex_);
    for (const auto& [offset, bytes] : pool.free) {
      std::memset(pages().host + offset, kPoison, bytes);
      join(free_, offset, bytes);
    }
    pool.free.clear();
    pool.is_dropped = true;
    if (pool.live == 0) delete &pool;
  }

  std::shared_ptr<const Snapshot> snapshot() {
    std::lock_guard lock(mutex_);
    auto taken = std::make_shared<Snapshot>();
    for (const auto& [address, block] : live_) {
      const auto* from = static_cast<const char*>(host_view(address));
      taken->blocks.emplace(address, std::vector<char>(from, from + block.requested));
    }
    return taken;
  }

  void restore(const Snapshot& snapshot) {
    std::lock_guard lock(mutex_);
    for (const auto& [address, bytes] : snapshot.blocks) {
      const auto found = live_.find(address);
      if (found == live_.end() || found->second.requested != bytes.size()) continue;
      std::memcpy(host_view(address), bytes.data(), bytes.size());
    }
  }

  void set_limit(size_t bytes) {
    std::lock_guard lock(mutex_);
    limit_ = bytes;
  }

 private:
  struct Block {
    size_t bytes, requested;
    void* stream;
    Caching::Address cached;
    Pool* pool;  // of which it is; nullptr: of none
  };

  static void drop(void* address);

  // The first place that is large enough.
  static bool take(std::map<size_t, size_t>& free, size_t bytes, size_t& offset) {
    auto place = free.begin();
    while (place != free.end() && place->second < bytes) ++place;
    if (place == free.end()) return false;
    offset = place->first;
    const size_t rest = place->second - bytes;
    free.erase(place);
    if (rest > 0) free.emplace(offset + bytes, rest);
    return true;
  }

  // Streams are in order: what was launched before the memory is freed may still use it.
  void release(void* address) {
    void* stream = count_out(address);
    const Driver* queue = driver();
    // What is freed in a capture is free for the rest of it. What was launched has to run first.
    if (current_pool != nullptr && is_recording()) {
      queue->run_stream(current_stream());
      return make_free(address);
    }
    if (queue == nullptr || queue->launch_host(stream, &make_free, address) != 0) {
      make_free(address);
    }
  }

  // Takes a block out of the statistics, and gives the stream that it was made for.
  void* count_out(void* address) {
    std::lock_guard lock(mutex_);
    const Block& block = live_.at(address);
    for (StatArray* each : {&stats_.allocated_bytes, &stats_.active_bytes}) {
      whole(*each).decrease(block.bytes);
    }
    for (StatArray* each : {&stats_.allocation, &stats_.active}) whole(*each).decrease(1);
    whole(stats_.requested_bytes).decrease(block.requested);
    caching_.free(block.cached);
    return block.stream;
  }

  // What PyTorch's allocator would hold; the device itself keeps no segments.
  void note_reserved() {
    Stat& reserved = whole(stats_.reserved_bytes);
    const auto now = static_cast<int64_t>(caching_.reserved());
    if (now > reserved.current) reserved.increase(static_cast<size_t>(now - reserved.current));
    if (now < reserved.current) reserved.decrease(static_cast<size_t>(reserved.current - now));
  }

  static void make_free(void* address);

  void poison_and_join(void* address) {
    std::lock_guard lock(mutex_);
    const size_t bytes = live_.at(address).bytes + kGuardBytes;
    const size_t offset = static_cast<char*>(address) - pages().device;
    check_guard(pages().host + offset, live_.at(address).requested, bytes);
    Pool* const pool = live_.at(address).pool;
    live_.erase(address);
    std::memset(pages().host + offset, kPoison, bytes);
    if (pool == nullptr) return join(free_, offset, bytes);
    --pool->live;
    join(pool->is_dropped ? free_ : pool->free, offset, bytes);
    if (pool->is_dropped && pool->live == 0) delete pool;
  }

  static void join(std::map<size_t, size_t>& free, size_t offset, size_t bytes) {
    auto next = free.emplace(offset, bytes).first;
    if (auto after = std::next(next); after != free.end() && offset + bytes == after->first) {
      next->second += after->second;
      free.erase(after);
    }
    if (next != free.begin()) {
      if (auto before = std::prev(next); before->first + before->second == offset) {
        before->second += next->second;
        free.erase(next);
      }
    }
  }

  // The process ends, as where memory is touched that is nobody's.
  static void check_guard(const char* memory, size_t requested, size_t end) {
    const auto is_guard = [](char byte) { return byte == static_cast<char>(kGuard); };
    if (std::all_of(memory + requested, memory + end, is_guard)) return;
    std::fprintf(stderr, "emulated device: a kernel wrote behind the end of %zu bytes\n",
                 requested);
    std::abort();
  }

  std::array<StatArray*, 6> all_stats() {
    return {&stats_.allocation,     &stats_.active,       &stats_.allocated_bytes,
            &stats_.reserved_bytes, &stats_.active_bytes, &stats_.requested_bytes};
  }

  std::mutex mutex_;
  std::map<size_t, size_t> free_;  // offset -> bytes; no two of them touch
  std::map<void*, Block> live_;
  size_t end_ = 0;  // what lies behind was never used
  size_t limit_ = kDeviceBytes;
  Caching caching_;
  c10::CachingDeviceAllocator::DeviceStats stats_;
};

// Never destroyed: tensors of Python modules outlive static objects.
Allocator& device_allocator() {
  static auto* each = new Allocator;
  return *each;
}

void Allocator::drop(void* address) { device_allocator().release(address); }
void Allocator::make_free(void* address) { device_allocator().poison_and_join(address); }

class PinnedAllocator final : public c10::Allocator {
 public:
  c10::DataPtr allocate(size_t bytes) override {
    if (bytes == 0) return {nullptr, c10::Device(c10::DeviceType::CPU)};
    void* address = c10::alloc_cpu(bytes);
    std::lock_guard lock(mutex_);
    live_.emplace(static_cast<char*>(address), bytes);
    return {address, address, &drop, c10::Device(c10::DeviceType::CPU)};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &drop; }
  void copy_data(void* to, const void* from, size_t count) const override {
    std::memcpy(to, from, count);
  }

  bool owns(const void* address) {
    std::lock_guard lock(mutex_);
    auto after = live_.upper_bound(static_cast<char*>(const_cast<void*>(address)));
    if (after == live_.begin()) return false;
    const auto& [start, bytes] = *std::prev(after);
    return address < start + bytes;
  }

 private:
  static void drop(void* address) {
    auto& self = static_cast<PinnedAllocator&>(pinned_allocator());
    {
      std::lock_guard lock(self.mutex_);
      self.live_.erase(static_cast<char*>(address));
    }
    c10::free_cpu(address);
  }

  std::mutex mutex_;
  std::map<char*, size_t> live_;
};

}  // namespace

bool is_device_address(const void* address) {
  const auto* at = static_cast<const char*>(address);
  return at >= pages().device && at < pages().device + kDeviceBytes;
}

void* host_view(const void* address) {
  if (address == nullptr) return nullptr;
  TORCH_CHECK(is_device_address(address), "CUDA error: an illegal memory access was encountered (",
              address, " is not memory of the device)");
  return pages().host + (static_cast<const char*>(address) - pages().device);
}

void open_memory(int open) {
  static std::mutex mutex;
  static int count = 0;
  const std::lock_guard lock(mutex);
  count += open != 0 ? 1 : -1;
  const bool changes = count == (open != 0 ? 1 : 0);
  const int protection = open != 0 ? PROT_READ | PROT_WRITE : PROT_NONE;
  if (changes) TORCH_CHECK(mprotect(pages().device, kDeviceBytes, protection) == 0);
}

c10::DeviceAllocator& allocator() { return device_allocator(); }

void set_memory_fraction(double fraction) {
  device_allocator().set_limit(static_cast<size_t>(fraction * kDeviceBytes));
}

void check_guards() { device_allocator().check_guards(); }

Pool* begin_pool() { return current_pool = new Pool; }

void end_pool(Pool* pool) {
  if (current_pool == pool) current_pool = nullptr;
}

void poison_pool(Pool* pool) { device_allocator().poison(*pool); }
void repair_guards(Pool* pool) { device_allocator().repair(*pool); }
void drop_pool(Pool* pool) { device_allocator().drop_pool(*pool); }
std::shared_ptr<const Snapshot> take_snapshot() { return device_allocator().snapshot(); }
void restore(const Snapshot& snapshot) { device_allocator().restore(snapshot); }

c10::Allocator& pinned_allocator() {
  static auto* each = new PinnedAllocator;
  return *each;
}

bool is_pinned(const void* address) {
  return static_cast<PinnedAllocator&>(pinned_allocator()).owns(address);
}

namespace {
const bool registered = [] {
  c10::SetAllocator(c10::DeviceType::CUDA, &allocator(), /*priority=*/100);
  return true;
}();
}  // namespace

}  // namespace emulated
