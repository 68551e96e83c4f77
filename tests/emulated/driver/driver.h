// What the parts of the fake driver share: streams as queues, kernels, and the error of the
// context.
#pragma once

#include "block.h"

#include <array>
#include <functional>
#include <string>
#include <vector>

#define EMULATED_API extern "C" __attribute__((visibility("default")))

namespace emulated {

// Results, as cuda.h numbers them.
enum Result : int {
  kSuccess = 0,
  kInvalidValue = 1,
  kOutOfMemory = 2,
  kNotInitialized = 3,
  kInvalidImage = 200,
  kInvalidContext = 201,
  kInvalidHandle = 400,
  kNotFound = 500,
  kNotReady = 600,
  kIllegalAddress = 700,
  kOutOfResources = 701,
  kLaunchFailed = 719,
  kCaptureUnsupported = 900,
  kCaptureInvalidated = 901,
  kNotCapturing = 904,
};

// What a real device of compute capability 9.0 allows.
inline constexpr unsigned kMostThreads = 1024, kMostShared = 227 << 10, kUsualShared = 48 << 10;

struct Function {
  std::string name;
  void (*call)(void**) = nullptr;
  std::vector<Parameter> parameters;
  unsigned most_threads = kMostThreads;
  unsigned most_shared = kUsualShared;
};

using Shape = std::array<unsigned, 6>;  // of the grid, then of the block

// Queues a launch after checking it. Its arguments are copied.
Result launch(Function& function, const Shape& shape, unsigned shared_bytes, void* stream,
              void** values);

// Work stays queued until somebody waits for its stream: work of other streams, and the host, may
// see memory as it was before. A stream that waits for an event runs what stands before it.
void enqueue(void* stream, std::function<void()> work);
void run_queued(void* stream);
void run_all();

// The first error of queued work, which all calls return from then on, as in a real context.
Result sticky_error();
void set_sticky_error(Result error, const std::string& reason);
// Notes why a call is refused, for cuGetErrorString; gives `error`.
Result refuse(Result error, const std::string& reason);

// How the test device is told of: it opens its memory for kernels, and knows its addresses.
struct Device {
  void (*open_memory)(int open) = nullptr;
  int (*is_device_address)(const void* address) = nullptr;
};
Device& device();

}  // namespace emulated
