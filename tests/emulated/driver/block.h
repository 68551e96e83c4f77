// What the text of a kernel, as a CPU runs it, and who runs it know of each other.
#pragma once

#include <cstddef>

struct uint3 {
  unsigned x, y, z;
};
struct dim3 {
  unsigned x, y, z;
  constexpr dim3(unsigned a = 1, unsigned b = 1, unsigned c = 1) : x(a), y(b), z(c) {}
};
namespace emulated {

// The text finds these in the library of the driver.
#pragma GCC visibility push(default)

// The thread that runs, which threadIdx and the like name.
struct Now {
  uint3 thread, block;
  dim3 block_dim, grid_dim;
  char* shared;
  int lane;
};
extern thread_local Now* now;

// A site is a line of the text: threads that meet must have come from the same one.
void barrier(int site);
// All lanes of the mask hand over a value of at most 8 bytes; then each may read those of the
// others.
unsigned meet(unsigned mask, const void* value, size_t size, int site);
void read(int lane, unsigned turn, void* value, size_t size);
int lanes_of_warp();
// Ends the kernel; the launch's error names the reason.
void fail(const char* reason);

#pragma GCC visibility pop

// A parameter of a kernel.
struct Parameter {
  int bytes, is_pointer;
};

}  // namespace emulated
