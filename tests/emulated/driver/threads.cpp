#include "threads.h"

#include <sys/mman.h>

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <numeric>
#include <random>
#include <stdexcept>
#include <string>
#include <vector>

namespace emulated {
namespace {

constexpr size_t kStackBytes = 64 << 10, kPage = 4096, kVector = 16;
constexpr int kPoison = 0xFF;

// Saves what a call has to keep and goes on with another stack. swapcontext would ask the system
// for the signal mask, and take twenty times as long.
__attribute__((naked, noinline)) void switch_stack(void** /*save*/, void* /*load*/) {
  asm volatile(
      "pushq %rbp\n pushq %rbx\n pushq %r12\n pushq %r13\n pushq %r14\n pushq %r15\n"
      "movq %rsp, (%rdi)\n movq %rsi, %rsp\n"
      "popq %r15\n popq %r14\n popq %r13\n popq %r12\n popq %rbx\n popq %rbp\n ret\n");
}

char* map_pages(size_t bytes) {
  void* found = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (found == MAP_FAILED) throw std::runtime_error("no memory for threads");
  return static_cast<char*>(found);
}

struct Order {
  bool reverse = false, greedy = false, shuffled = false;
  unsigned seed = 0;
};

Order wanted_order() {
  const char* text = std::getenv("EMULATED_CUDA_ORDER");
  const std::string order = text == nullptr ? "forward" : text;
  if (order.starts_with("random:")) {
    return {.shuffled = true, .seed = static_cast<unsigned>(std::stoul(order.substr(7)))};
  }
  if (order == "forward") return {};
  if (order == "reverse") return {.reverse = true};
  if (order == "greedy") return {.greedy = true};
  if (order == "greedy-reverse") return {.reverse = true, .greedy = true};
  throw std::runtime_error("EMULATED_CUDA_ORDER: got '" + order +
                           "', want forward, reverse, greedy, greedy-reverse or random:<seed>");
}

std::vector<size_t> in_order(size_t count, const Order& order, std::mt19937& random) {
  std::vector<size_t> places(count);
  std::iota(places.begin(), places.end(), 0);
  if (order.reverse) std::reverse(places.begin(), places.end());
  if (order.shuffled) std::shuffle(places.begin(), places.end(), random);
  return places;
}

enum class Wait : uint8_t { kNone, kBarrier, kWarp, kDone, kFailed };

struct Thread {
  Now now{};
  size_t warp = 0;
  Wait wait = Wait::kDone;
  unsigned mask = 0;  // of kWarp: the lanes that take part
  int site = 0;
  unsigned turn = 0;       // how many operations of its warp it has come to
  uint64_t given[2] = {};  // what it hands over, by the parity of its turn
  void* stack_pointer = nullptr;
  char* stack = nullptr;
};

class Block {
 public:
  void run(const Launch& launch, uint3 index, const Order& order, std::mt19937& random) {
    launch_ = &launch;
    prepare(launch, index);
    const std::vector<size_t> sequence = in_order(count_, order, random);
    size_t alive = count_;
    while (alive > 0) {
      const size_t ended = sweep(sequence, order.greedy);
      alive -= ended;
      if (!moved_ && alive > 0) release_barrier();
    }
  }

  // --- called by fibers

  void pause(Wait wait, unsigned mask, int site) {
    Thread& thread = *current_;
    thread.wait = wait;
    thread.mask = mask;
    thread.site = site;
    switch_stack(&thread.stack_pointer, scheduler_);
  }

  unsigned meet(unsigned mask, const void* value, size_t size, int site) {
    Thread& thread = *current_;
    if ((mask >> thread.now.lane & 1) == 0) {
      fail("a lane is not in the mask of its own operation");
    }
    const unsigned parity = thread.turn++ & 1;
    std::memcpy(&thread.given[parity], value, size);
    pause(Wait::kWarp, mask, site);
    return parity;
  }

  void read(int lane, unsigned parity, void* value, size_t size) {
    const size_t place = current_->warp * 32 + static_cast<size_t>(lane);
    if (place >= count_) fail("a lane is read that the block does not have");
    std::memcpy(value, &threads_[place].given[parity], size);
  }

  int lanes_of_warp() const {
    return static_cast<int>(std::min<size_t>(32, count_ - current_->warp * 32));
  }

  void fail(const char* reason) {
    reason_ = reason;
    pause(Wait::kFailed, 0, current_->site);
  }

  void call() { launch_->kernel(); }

 private:
  void prepare(const Launch& launch, uint3 index) {
    const dim3& block = launch.block;
    count_ = size_t{block.x} * block.y * block.z;
    while (threads_.size() < count_) threads_.push_back({.stack = map_pages(kStackBytes)});
    char* shared = poisoned_memory(launch.shared_bytes);
    for (size_t t = 0; t < count_; ++t) {
      Thread& thread = threads_[t];
      const auto place = static_cast<unsigned>(t);
      thread.now = {{place % block.x, place / block.x % block.y, place / block.x / block.y},
                    index,
                    block,
                    launch.grid,
                    shared,
                    static_cast<int>(t % 32)};
      thread.warp = t / 32;
      thread.wait = Wait::kNone;
      thread.turn = 0;
      thread.site = 0;
      auto* top = reinterpret_cast<void**>(thread.stack + kStackBytes);
      *--top = nullptr;  // the stack is aligned as after a call
      *--top = reinterpret_cast<void*>(&Block::enter);
      for (int saved = 0; saved < 6; ++saved) *--top = nullptr;
      thread.stack_pointer = top;
    }
  }

  // Its end touches a page that faults, as far as vectors allow.
  char* poisoned_memory(size_t bytes) {
    const size_t rounded = (bytes + kPage - 1) / kPage * kPage;
    if (rounded + kPage != mapped_) {
      if (memory_ != nullptr) munmap(memory_, mapped_);
      mapped_ = rounded + kPage;
      memory_ = map_pages(mapped_);
      mprotect(memory_ + rounded, kPage, PROT_NONE);
    }
    char* start = memory_ + rounded - (bytes + kVector - 1) / kVector * kVector;
    std::memset(start, kPoison, static_cast<size_t>(memory_ + rounded - start));
    return start;
  }

  // Each thread that can go on does, in the given order; gives how many have ended.
  size_t sweep(const std::vector<size_t>& sequence, bool greedy) {
    size_t ended = 0;
    moved_ = false;
    const size_t together = greedy ? 32 : 1;
    for (size_t from = 0; from < sequence.size(); from += together) {
      bool again = true;
      while (again) {
        again = false;
        for (size_t i = from; i < std::min(from + together, sequence.size()); ++i) {
          Thread& thread = threads_[sequence[i]];
          if (thread.wait == Wait::kDone || thread.wait == Wait::kBarrier) continue;
          if (thread.wait == Wait::kWarp && !all_are_there(thread)) continue;
          resume(thread);
          moved_ = true;
          again = greedy;
          ended += thread.wait == Wait::kDone;
        }
      }
    }
    return ended;
  }

  void resume(Thread& thread) {
    current_ = &thread;
    now = &thread.now;
    thread.wait = Wait::kNone;
    switch_stack(&scheduler_, thread.stack_pointer);
    if (thread.wait == Wait::kFailed) throw std::runtime_error(place_of(thread) + ": " + reason_);
  }

  // Whether all lanes of the mask have come to the operation at which a thread waits, or are beyond
  // it.
  bool all_are_there(const Thread& thread) const {
    const size_t first = thread.warp * 32;
    for (size_t lane = 0; lane < 32 && first + lane < count_; ++lane) {
      const Thread& other = threads_[first + lane];
      if ((thread.mask >> lane & 1) == 0 || static_cast<int>(other.turn - thread.turn) > 0)
        continue;
      if (other.turn != thread.turn) return false;
      if (other.wait == Wait::kWarp && (other.site != thread.site || other.mask != thread.mask)) {
        throw std::runtime_error(place_of(thread) + " and " + place_of(other) +
                                 ": operations of one warp differ");
      }
    }
    return true;
  }

  void release_barrier() {
    const Thread* first = nullptr;
    size_t waiting = 0;
    for (size_t t = 0; t < count_; ++t) {
      const Thread& thread = threads_[t];
      if (thread.wait == Wait::kDone) continue;
      if (thread.wait == Wait::kWarp) {
        throw std::runtime_error(place_of(thread) + ": waits for lanes that never come");
      }
      if (first == nullptr) first = &thread;
      if (thread.site != first->site) {
        throw std::runtime_error(place_of(thread) + " and " + place_of(*first) +
                                 ": wait at different barriers");
      }
      ++waiting;
    }
    if (waiting != count_) {
      throw std::runtime_error(place_of(*first) + ": a barrier is reached by " +
                               std::to_string(waiting) + " of " + std::to_string(count_) +
                               " threads");
    }
    for (size_t t = 0; t < count_; ++t) threads_[t].wait = Wait::kNone;
  }

  static std::string place_of(const Thread& thread) {
    const auto text = [](const uint3& at) {
      return "(" + std::to_string(at.x) + "," + std::to_string(at.y) + "," + std::to_string(at.z) +
             ")";
    };
    return "line " + std::to_string(thread.site) + ", block " + text(thread.now.block) +
           ", thread " + text(thread.now.thread);
  }

  static void enter();

  const Launch* launch_ = nullptr;
  std::vector<Thread> threads_;  // their stacks serve all launches
  size_t count_ = 0, mapped_ = 0;
  char* memory_ = nullptr;
  bool moved_ = false;
  std::string reason_;
  Thread* current_ = nullptr;
  void* scheduler_ = nullptr;
};

Block& block() {
  static thread_local Block each;
  return each;
}

void Block::enter() {
  block().call();
  block().pause(Wait::kDone, 0, 0);
}

}  // namespace

thread_local Now* now = nullptr;

void barrier(int site) { block().pause(Wait::kBarrier, 0, site); }
unsigned meet(unsigned mask, const void* value, size_t size, int site) {
  return block().meet(mask, value, size, site);
}
void read(int lane, unsigned turn, void* value, size_t size) {
  block().read(lane, turn, value, size);
}
int lanes_of_warp() { return block().lanes_of_warp(); }
void fail(const char* reason) { block().fail(reason); }

void run(const Launch& launch) {
  const Order order = wanted_order();
  std::mt19937 random(order.seed);
  const dim3& grid = launch.grid;
  for (size_t place : in_order(size_t{grid.x} * grid.y * grid.z, order, random)) {
    const uint3 index{static_cast<unsigned>(place % grid.x),
                      static_cast<unsigned>(place / grid.x % grid.y),
                      static_cast<unsigned>(place / grid.x / grid.y)};
    block().run(launch, index, order, random);
  }
}

}  // namespace emulated
