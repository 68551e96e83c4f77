// libcuda without a GPU: kernels are those of the fake NVRTC, streams are queues.
//
//   EMULATED_CUDA_LOG=<file>  one line for each launch
//   EMULATED_CUDA_CAPTURING=1  streams say that they are captured; their work is done all the same,
//                              but a thread has to ask before it loads code or allocates
//   EMULATED_CUDA_MAJOR=7      the compute capability, in place of 9
#include "driver.h"

#include "threads.h"
#include <dlfcn.h>
#include <unistd.h>

#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <fstream>
#include <map>
#include <memory>
#include <mutex>
#include <optional>

namespace emulated {
namespace {

constexpr int kPoison = 0xFF;
constexpr size_t kMemoryAlignment = 512;

struct Event;
// A captured graph: its work, in the order in which it was queued.
struct Graph {
  std::vector<std::function<void()>> nodes;
};
struct Stream {
  std::deque<std::function<void()>> queue;
  bool runs = false;
  std::shared_ptr<Graph> capture;  // while it is captured
  bool is_invalid = false;         // something was asked for that no graph can contain
};
struct Event {
  Stream* stream = nullptr;
  uint64_t recorded = 0, reached = 0;  // records so far, and how many of them have been run
};

struct Module {
  void* library = nullptr;
  std::map<std::string, std::unique_ptr<Function>> functions;
};

struct State {
  std::recursive_mutex mutex;
  bool initialized = false;
  Result error = kSuccess;
  std::string reason;
  Stream default_stream;
  std::map<void*, std::unique_ptr<Stream>> streams;
  std::map<char*, size_t> memory;  // of cuMemAlloc and cuMemHostAlloc
  Device device;
};

// Of the calling thread.
thread_local bool has_context = false;
thread_local int capture_mode = 0;  // CU_STREAM_CAPTURE_MODE_GLOBAL
thread_local Stream* captured_by_thread = nullptr;

// As if somebody captured all streams.
bool is_all_captured() { return std::getenv("EMULATED_CUDA_CAPTURING") != nullptr; }

bool is_capturing() { return captured_by_thread != nullptr || is_all_captured(); }

State& state() {
  static auto* each = new State;
  return *each;
}

Stream* stream_of(void* handle) {
  // 1 and 2 are CU_STREAM_LEGACY and CU_STREAM_PER_THREAD.
  if (reinterpret_cast<uintptr_t>(handle) <= 2) return &state().default_stream;
  const auto found = state().streams.find(handle);
  return found == state().streams.end() ? nullptr : found->second.get();
}

void run_stream(Stream& stream) {
  // Work that waits for an event runs other streams, which may wait for this one.
  if (stream.runs) return;
  stream.runs = true;
  while (!stream.queue.empty()) {
    const std::function<void()> work = std::move(stream.queue.front());
    stream.queue.pop_front();
    if (state().error == kSuccess) work();
  }
  stream.runs = false;
}

// Runs what stands before the last record of an event.
void run_until(Event& event, uint64_t record) {
  Stream& stream = *event.stream;
  while (event.reached < record && !stream.queue.empty()) {
    const std::function<void()> work = std::move(stream.queue.front());
    stream.queue.pop_front();
    work();
  }
}

bool is_known_address(const void* address) {
  const auto* at = static_cast<const char*>(address);
  const Device& device = state().device;
  if (device.is_device_address != nullptr && device.is_device_address(address) != 0) return true;
  auto after = state().memory.upper_bound(const_cast<char*>(at));
  if (after == state().memory.begin()) return false;
  const auto& [start, bytes] = *std::prev(after);
  return at < start + bytes;
}

std::string text_of(const Shape& s) {
  const auto three = [&](size_t i) {
    return std::to_string(s[i]) + "," + std::to_string(s[i + 1]) + "," + std::to_string(s[i + 2]);
  };
  return three(0) + " | " + three(3);
}

std::optional<std::string> wrong_shape(const Function& function, const Shape& s, unsigned shared) {
  const uint64_t threads = uint64_t{s[3]} * s[4] * s[5];
  if (std::find(s.begin(), s.end(), 0u) != s.end()) return "a dimension is 0";
  if (s[0] > 0x7FFFFFFF || s[1] > 65535 || s[2] > 65535) return "the grid is too large";
  if (threads > kMostThreads || s[5] > 64) return "the block is too large";
  if (threads > function.most_threads) return "the block has more threads than its launch bounds";
  if (shared > function.most_shared) return "more shared memory than the function may have";
  return std::nullopt;
}

// Keeps memory of the device open for kernels.
class OpenMemory {
 public:
  OpenMemory() { set(1); }
  ~OpenMemory() { set(0); }

 private:
  static void set(int open) {
    if (state().device.open_memory != nullptr) state().device.open_memory(open);
  }
};

void log_launch(const Function& function, const Shape& shape, unsigned shared_bytes) {
  const char* path = std::getenv("EMULATED_CUDA_LOG");
  if (path == nullptr) return;
  std::ofstream(path, std::ios::app)
      << function.name << " <<<" << text_of(shape) << " | " << shared_bytes << ">>>\n";
}

Result copy(void* to, const void* from, size_t bytes, void* stream) {
  enqueue(stream, [=] {
    const OpenMemory open;
    std::memcpy(to, from, bytes);
  });
  return kSuccess;
}

template <typename T>
void fill(void* to, T value, size_t count) {
  const OpenMemory open;
  std::fill_n(static_cast<T*>(to), count, value);
}

Result allocate(void** address, size_t bytes) {
  if (bytes == 0) return refuse(kInvalidValue, "an allocation of 0 bytes");
  const size_t rounded = (bytes + kMemoryAlignment - 1) / kMemoryAlignment * kMemoryAlignment;
  *address = std::aligned_alloc(kMemoryAlignment, rounded);
  if (*address == nullptr) return refuse(kOutOfMemory, "out of memory");
  std::memset(*address, kPoison, rounded);
  state().memory.emplace(static_cast<char*>(*address), bytes);
  return kSuccess;
}

Result release(void* address) {
  const auto found = state().memory.find(static_cast<char*>(address));
  if (found == state().memory.end()) return refuse(kInvalidValue, "memory that is not allocated");
  run_all();  // as cuMemFree waits for the device
  std::memset(address, kPoison, found->second);
  state().memory.erase(found);
  std::free(address);
  return kSuccess;
}

std::string& call_reason() {
  static thread_local std::string each;
  return each;
}

using Lock = std::lock_guard<std::recursive_mutex>;

// Before each call that needs a context.
Result ready() {
  if (!state().initialized) return refuse(kNotInitialized, "cuInit was not called");
  if (!has_context) return refuse(kInvalidContext, "no context is current");
  return sticky_error();
}

// While a stream is captured, a thread may load code and allocate only in the mode
// CU_STREAM_CAPTURE_MODE_RELAXED.
Result unless_relaxed(const std::string& what) {
  constexpr int kRelaxed = 2;
  if (!is_capturing() || capture_mode == kRelaxed) return kSuccess;
  if (captured_by_thread != nullptr) captured_by_thread->is_invalid = true;
  return refuse(kCaptureUnsupported, what + " while a stream is captured");
}

// Nobody can wait for what does not run.
Result unless_captured(Stream& stream, const std::string& what) {
  if (stream.capture == nullptr) return kSuccess;
  stream.is_invalid = true;
  return refuse(kCaptureUnsupported, "operation not permitted when stream is capturing: " + what);
}

Result after(Result result) { return result == kSuccess ? sticky_error() : result; }

}  // namespace

Device& device() { return state().device; }

Result sticky_error() { return state().error; }

void set_sticky_error(Result error, const std::string& reason) {
  if (state().error != kSuccess) return;
  state().error = error;
  state().reason = reason;
}

Result refuse(Result error, const std::string& reason) {
  call_reason() = reason;
  return error;
}

// While a stream is captured its work is done as well, so that the host finds results of the right
// sizes; the test device undoes it (device/graphs.h).
void enqueue(void* stream, std::function<void()> work) {
  Stream& each = *stream_of(stream);
  if (each.capture != nullptr) each.capture->nodes.push_back(work);
  each.queue.push_back(std::move(work));
}

void run_queued(void* stream) { run_stream(*stream_of(stream)); }

void run_all() {
  run_stream(state().default_stream);
  for (auto& [handle, stream] : state().streams) run_stream(*stream);
}

Result launch(Function& function, const Shape& shape, unsigned shared_bytes, void* stream,
              void** values) {
  const auto complain = [&](Result error, const std::string& reason) {
    return refuse(error, function.name + " <<<" + text_of(shape) + ">>>: " + reason);
  };
  if (const auto wrong = wrong_shape(function, shape, shared_bytes)) {
    return complain(kInvalidValue, *wrong);
  }
  std::vector<std::vector<char>> held;
  for (size_t i = 0; i < function.parameters.size(); ++i) {
    if (values == nullptr || values[i] == nullptr) {
      return complain(kInvalidValue, "argument " + std::to_string(i) + " is missing");
    }
    const auto* from = static_cast<const char*>(values[i]);
    held.emplace_back(from, from + function.parameters[i].bytes);
    if (!function.parameters[i].is_pointer) continue;
    const void* address;
    std::memcpy(&address, from, sizeof(address));
    if (address != nullptr && !is_known_address(address)) {
      return complain(kIllegalAddress,
                      "argument " + std::to_string(i) + " is no memory of the device");
    }
  }
  log_launch(function, shape, shared_bytes);
  enqueue(stream, [&function, shape, shared_bytes, held = std::move(held)] {
    std::vector<void*> arguments;
    for (const auto& bytes : held) arguments.push_back(const_cast<char*>(bytes.data()));
    const OpenMemory open;
    try {
      run({.grid = {shape[0], shape[1], shape[2]},
           .block = {shape[3], shape[4], shape[5]},
           .shared_bytes = shared_bytes,
           .kernel = [&] { function.call(arguments.data()); }});
    } catch (const std::runtime_error& error) {
      set_sticky_error(kLaunchFailed, function.name + ": " + error.what());
    }
  });
  return kSuccess;
}

}  // namespace emulated

using namespace emulated;

// --- device and context --------------------------------------------------------------------------

EMULATED_API int cuInit(unsigned) {
  state().initialized = true;
  return kSuccess;
}
EMULATED_API int cuDriverGetVersion(int* version) {
  *version = 13000;
  return kSuccess;
}
EMULATED_API int cuDeviceGetCount(int* count) {
  *count = 1;
  return kSuccess;
}
EMULATED_API int cuDeviceGet(int* device, int ordinal) {
  *device = 0;
  return ordinal == 0 ? kSuccess : refuse(kInvalidValue, "there is one device");
}
EMULATED_API int cuDeviceGetName(char* name, int size, int) {
  std::snprintf(name, static_cast<size_t>(size), "emulated device");
  return kSuccess;
}
EMULATED_API int cuDeviceGetAttribute(int* value, int attribute, int) {
  // Numbers of CUdevice_attribute. Few multiprocessors, so that grids are small.
  static const std::map<int, int> known = {
      {1, 1024},                         // threads of a block
      {8, 48 << 10},                     // shared memory of a block
      {10, 32},                          // threads of a warp
      {16, 4},                           // multiprocessors
      {39, 2048},                        // threads of a multiprocessor
      {75, 9},                           // compute capability
      {76, 0},         {81, 228 << 10},  // shared memory of a multiprocessor
      {82, 65536},                       // its registers
      {97, 227 << 10},                   // shared memory of a block on request
  };
  const auto found = known.find(attribute);
  if (found == known.end()) return refuse(kInvalidValue, "an attribute that the fake lacks");
  const char* const major = attribute == 75 ? std::getenv("EMULATED_CUDA_MAJOR") : nullptr;
  *value = major != nullptr ? std::atoi(major) : found->second;
  return kSuccess;
}
EMULATED_API int cuDevicePrimaryCtxRetain(void** context, int) {
  if (!state().initialized) return refuse(kNotInitialized, "cuInit was not called");
  *context = &state();
  return kSuccess;
}
EMULATED_API int cuDevicePrimaryCtxRelease_v2(int) { return kSuccess; }
EMULATED_API int cuCtxSetCurrent(void* context) {
  has_context = context != nullptr;
  return kSuccess;
}
EMULATED_API int cuCtxGetCurrent(void** context) {
  *context = has_context ? &state() : nullptr;
  return kSuccess;
}
EMULATED_API int cuCtxSynchronize() {
  const Lock lock(state().mutex);
  if (const Result error = ready()) return error;
  if (captured_by_thread != nullptr) {
    return unless_captured(*captured_by_thread, "cuCtxSynchronize");
  }
  run_all();
  return sticky_error();
}
// The reason for the last error of this thread's calls, or of the context.
EMULATED_API int cuGetErrorString(int error, const char** text) {
  static thread_local std::string message;
  const std::string& reason = state().error != kSuccess ? state().reason : call_reason();
  message = error == kSuccess ? "no error" : reason;
  *text = message.c_str();
  return kSuccess;
}
EMULATED_API int cuGetErrorName(int error, const char** text) {
  static const std::map<int, const char*> names = {
      {kSuccess, "CUDA_SUCCESS"},
      {kInvalidValue, "CUDA_ERROR_INVALID_VALUE"},
      {kOutOfMemory, "CUDA_ERROR_OUT_OF_MEMORY"},
      {kNotInitialized, "CUDA_ERROR_NOT_INITIALIZED"},
      {kInvalidImage, "CUDA_ERROR_INVALID_IMAGE"},
      {kInvalidContext, "CUDA_ERROR_INVALID_CONTEXT"},
      {kInvalidHandle, "CUDA_ERROR_INVALID_HANDLE"},
      {kNotFound, "CUDA_ERROR_NOT_FOUND"},
      {kNotReady, "CUDA_ERROR_NOT_READY"},
      {kIllegalAddress, "CUDA_ERROR_ILLEGAL_ADDRESS"},
      {kOutOfResources, "CUDA_ERROR_LAUNCH_OUT_OF_RESOURCES"},
      {kLaunchFailed, "CUDA_ERROR_LAUNCH_FAILED"},
      {kCaptureUnsupported, "CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED"},
      {kCaptureInvalidated, "CUDA_ERROR_STREAM_CAPTURE_INVALIDATED"},
      {kNotCapturing, "CUDA_ERROR_ILLEGAL_STATE"},
  };
  const auto found = names.find(error);
  *text = found == names.end() ? nullptr : found->second;
  return found == names.end() ? kInvalidValue : kSuccess;
}

// --- modules and kernels -------------------------------------------------------------------------

// An image of the fake NVRTC is the path of a library.
EMULATED_API int cuModuleLoadData(void** module, const void* image) {
  const Lock lock(state().mutex);
  if (const Result error = ready()) return error;
  if (const Result error = unless_relaxed("cuModuleLoadData")) return error;
  constexpr std::string_view mark = "emulated:";
  const auto* text = static_cast<const char*>(image);
  if (std::strncmp(text, mark.data(), mark.size()) != 0) {
    return refuse(kInvalidImage, "an image that is not of the fake NVRTC");
  }
  auto loaded = std::make_unique<Module>();
  loaded->library = dlopen(text + mark.size(), RTLD_NOW | RTLD_LOCAL);
  if (loaded->library == nullptr) return refuse(kInvalidImage, dlerror());
  *module = loaded.release();
  return kSuccess;
}
EMULATED_API int cuModuleUnload(void* module) {
  const Lock lock(state().mutex);
  run_all();
  const std::unique_ptr<Module> each(static_cast<Module*>(module));
  dlclose(each->library);
  return sticky_error();
}
EMULATED_API int cuModuleGetFunction(void** function, void* module, const char* name) {
  const Lock lock(state().mutex);
  if (const Result error = ready()) return error;
  auto& each = *static_cast<Module*>(module);
  auto& found = each.functions[name];
  if (found == nullptr) {
    const std::string text = name;
    auto made = std::make_unique<Function>();
    made->name = text;
    made->call = reinterpret_cast<void (*)(void**)>(dlsym(each.library, (text + "__call").c_str()));
    auto* describe = reinterpret_cast<int (*)(Parameter*, int*)>(
        dlsym(each.library, (text + "__describe").c_str()));
    if (made->call == nullptr || describe == nullptr) {
      return refuse(kNotFound, "the module has no kernel " + text);
    }
    int bound = 0;
    made->parameters.resize(static_cast<size_t>(describe(nullptr, &bound)));
    describe(made->parameters.data(), &bound);
    if (bound > 0) made->most_threads = static_cast<unsigned>(bound);
    found = std::move(made);
  }
  *function = found.get();
  return kSuccess;
}
EMULATED_API int cuFuncSetAttribute(void* function, int attribute, int value) {
  constexpr int kMaxDynamicShared = 8;
  if (attribute != kMaxDynamicShared)
    return refuse(kInvalidValue, "an attribute that the fake lacks");
  if (value < 0 || value > static_cast<int>(kMostShared)) {
    return refuse(kInvalidValue, "more shared memory than a block can have");
  }
  static_cast<Function*>(function)->most_shared = static_cast<unsigned>(value);
  return kSuccess;
}
EMULATED_API int cuFuncGetAttribute(int* value, int attribute, void* function) {
  // Numbers of CUfunction_attribute. The C++ compiler does not tell of registers and local memory.
  const auto& each = *static_cast<Function*>(function);
  const std::map<int, int> known = {
      {0, static_cast<int>(each.most_threads)},
      {1, 0},  // shared memory of its own
      {3, 0},  // local memory
      {4, 0},  // registers
      {8, static_cast<int>(each.most_shared)},
  };
  const auto found = known.find(attribute);
  if (found == known.end()) return refuse(kInvalidValue, "an attribute that the fake lacks");
  *value = found->second;
  return kSuccess;
}
EMULATED_API int cuOccupancyMaxActiveBlocksPerMultiprocessor(int* blocks, void*, int threads,
                                                             size_t shared_bytes) {
  constexpr size_t kReserved = 1 << 10;
  const int by_threads = 2048 / std::max(threads, 1);
  const int by_shared = static_cast<int>((228u << 10) / (shared_bytes + kReserved));
  *blocks = std::min({by_threads, by_shared, 32});
  return kSuccess;
}
EMULATED_API int cuLaunchKernel(void* function, unsigned gx, unsigned gy, unsigned gz, unsigned bx,
                                unsigned by, unsigned bz, unsigned shared_bytes, void* stream,
                                void** values, void** extra) {
  const Lock lock(state().mutex);
  if (const Result error = ready()) return error;
  if (stream_of(stream) == nullptr) return refuse(kInvalidHandle, "no such stream");
  if (extra != nullptr) return refuse(kInvalidValue, "the fake takes no packed arguments");
  return launch(*static_cast<Function*>(function), {gx, gy, gz, bx, by, bz}, shared_bytes, stream,
                values);
}
EMULATED_API int cuLaunchHostFunc(void* stream, void (*call)(void*), void* data) {
  const Lock lock(state().mutex);
  if (const Result error = ready()) return error;
  if (stream_of(stream) == nullptr) return refuse(kInvalidHandle, "no such stream");
  enqueue(stream, [=] { call(data); });
  return kSuccess;
}

// --- memory --------------------------------------------------------------------------------------

EMULATED_API int cuMemAlloc_v2(void** address, size_t bytes) {
  const Lock lock(state().mutex);
  if (const Result error = ready()) return error;
  return allocate(address, bytes);
}
EMULATED_API int cuMemFree_v2(void* address) {
  const Lock lock(state().mutex);
  if (const Result error = ready()) return error;
  return after(release(address));
}
// Host memory that kernels see too: what a kernel writes is there once its stream was waited for.
EMULATED_API int cuMemHostAlloc(void** address, size_t bytes, unsigned) {
  const Lock lock(state().mutex);
  if (const Result error = ready()) return error;
  if (const Result error = unless_relaxed("cuMemHostAlloc")) return error;
  return allocate(address, bytes);
}
EMULATED_API int cuMemHostGetDevicePointer_v2(void** of_device, void* of_host, unsigned) {
  *of_device = of_host;
  return kSuccess;
}
EMULATED_API int cuMemFreeHost(void* address) { return cuMemFree_v2(address); }
EMULATED_API int cuMemcpyDtoDAsync_v2(void* to, const void* from, size_t bytes, void* stream) {
  const Lock lock(state().mutex);
  if (const Result error = ready()) return error;
  return copy(to, from, bytes, stream);
}
// From memory that is not pinned: it is read before the call returns.
EMULATED_API int cuMemcpyHtoDAsync_v2(void* to, const void* from, size_t bytes, void* stream) {
  const Lock lock(state().mutex);
  if (const Result error = ready()) return error;
  const std::vector<char> held(static_cast<const char*>(from),
                               static_cast<const char*>(from) + bytes);
  enqueue(stream, [to, held] {
    const OpenMemory open;
    std::memcpy(to, held.data(), held.size());
  });
  return kSuccess;
}
EMULATED_API int cuMemcpyDtoHAsync_v2(void* to, const void* from, size_t bytes, void* stream) {
  const Lock lock(state().mutex);
  if (const Result error = ready()) return error;
  return copy(to, from, bytes, stream);
}
EMULATED_API int cuMemcpyHtoD_v2(void* to, const void* from, size_t bytes) {
  const Lock lock(state().mutex);
  if (const Result error = ready()) return error;
  copy(to, from, bytes, nullptr);
  run_queued(nullptr);
  return sticky_error();
}
EMULATED_API int cuMemcpyDtoH_v2(void* to, const void* from, size_t bytes) {
  return cuMemcpyHtoD_v2(to, from, bytes);
}
EMULATED_API int cuMemsetD8Async(void* to, unsigned char value, size_t count, void* stream) {
  const Lock lock(state().mutex);
  if (const Result error = ready()) return error;
  enqueue(stream, [=] { fill(to, value, count); });
  return kSuccess;
}
EMULATED_API int cuMemsetD32Async(void* to, unsigned value, size_t count, void* stream) {
  const Lock lock(state().mutex);
  if (const Result error = ready()) return error;
  enqueue(stream, [=] { fill(to, value, count); });
  return kSuccess;
}

// --- streams and events --------------------------------------------------------------------------

EMULATED_API int cuStreamCreate(void** stream, unsigned) {
  const Lock lock(state().mutex);
  if (const Result error = ready()) return error;
  auto made = std::make_unique<Stream>();
  *stream = made.get();
  state().streams.emplace(*stream, std::move(made));
  return kSuccess;
}
EMULATED_API int cuStreamDestroy_v2(void* stream) {
  const Lock lock(state().mutex);
  if (stream_of(stream) == nullptr) return refuse(kInvalidHandle, "no such stream");
  run_queued(stream);
  state().streams.erase(stream);
  return sticky_error();
}
EMULATED_API int cuStreamSynchronize(void* stream) {
  const Lock lock(state().mutex);
  if (const Result error = ready()) return error;
  if (stream_of(stream) == nullptr) return refuse(kInvalidHandle, "no such stream");
  if (const Result error = unless_captured(*stream_of(stream), "cuStreamSynchronize")) return error;
  run_queued(stream);
  return sticky_error();
}
EMULATED_API int cuStreamQuery(void* stream) {
  const Lock lock(state().mutex);
  if (const Result error = ready()) return error;
  if (stream_of(stream) == nullptr) return refuse(kInvalidHandle, "no such stream");
  if (const Result error = unless_captured(*stream_of(stream), "cuStreamQuery")) return error;
  if (stream_of(stream)->queue.empty()) return kSuccess;
  // Who asks again and again gets an end.
  run_queued(stream);
  return kNotReady;
}
EMULATED_API int cuStreamIsCapturing(void* stream, int* status) {
  const Lock lock(state().mutex);
  const Stream* each = stream_of(stream);
  if (each == nullptr) return refuse(kInvalidHandle, "no such stream");
  *status = each->capture != nullptr || is_all_captured() ? 1 : 0;
  return kSuccess;
}
EMULATED_API int cuThreadExchangeStreamCaptureMode(int* mode) {
  std::swap(*mode, capture_mode);
  return kSuccess;
}
EMULATED_API int cuEventCreate(void** event, unsigned) {
  *event = new Event;
  return kSuccess;
}
EMULATED_API int cuEventDestroy_v2(void* event) {
  const Lock lock(state().mutex);
  run_all();  // the queues know it
  delete static_cast<Event*>(event);
  return kSuccess;
}
EMULATED_API int cuEventRecord(void* event, void* stream) {
  const Lock lock(state().mutex);
  if (const Result error = ready()) return error;
  if (stream_of(stream) == nullptr) return refuse(kInvalidHandle, "no such stream");
  auto* each = static_cast<Event*>(event);
  each->stream = stream_of(stream);
  const uint64_t record = ++each->recorded;
  enqueue(stream, [each, record] { each->reached = record; });
  return kSuccess;
}
EMULATED_API int cuStreamWaitEvent(void* stream, void* event, unsigned) {
  const Lock lock(state().mutex);
  if (const Result error = ready()) return error;
  if (stream_of(stream) == nullptr) return refuse(kInvalidHandle, "no such stream");
  auto* each = static_cast<Event*>(event);
  if (each->stream == nullptr) return kSuccess;
  enqueue(stream, [each, record = each->recorded] { run_until(*each, record); });
  return kSuccess;
}
EMULATED_API int cuEventSynchronize(void* event) {
  const Lock lock(state().mutex);
  if (const Result error = ready()) return error;
  auto* each = static_cast<Event*>(event);
  if (each->stream != nullptr) run_until(*each, each->recorded);
  return sticky_error();
}
EMULATED_API int cuEventQuery(void* event) {
  const Lock lock(state().mutex);
  if (const Result error = ready()) return error;
  auto* each = static_cast<Event*>(event);
  return each->reached == each->recorded ? kSuccess : kNotReady;
}

// --- graphs --------------------------------------------------------------------------------------

EMULATED_API int cuStreamBeginCapture_v2(void* stream, int) {
  const Lock lock(state().mutex);
  if (const Result error = ready()) return error;
  Stream* each = stream_of(stream);
  if (each == nullptr) return refuse(kInvalidHandle, "no such stream");
  if (each == &state().default_stream || each->capture != nullptr) {
    return refuse(kCaptureUnsupported, "the default stream, or one that is captured already");
  }
  run_stream(*each);
  each->capture = std::make_shared<Graph>();
  each->is_invalid = false;
  captured_by_thread = each;
  return kSuccess;
}
EMULATED_API int cuStreamEndCapture(void* stream, void** graph) {
  const Lock lock(state().mutex);
  *graph = nullptr;
  Stream* each = stream_of(stream);
  if (each == nullptr || each->capture == nullptr) {
    return refuse(kNotCapturing, "the stream is not captured");
  }
  const std::shared_ptr<Graph> made = std::move(each->capture);
  captured_by_thread = nullptr;
  run_stream(*each);
  if (each->is_invalid) {
    return refuse(kCaptureInvalidated, "operation failed due to a previous error during capture");
  }
  *graph = new std::shared_ptr<Graph>(made);
  return kSuccess;
}
EMULATED_API int cuGraphInstantiateWithFlags(void** executable, void* graph, uint64_t) {
  *executable = new std::shared_ptr<Graph>(*static_cast<std::shared_ptr<Graph>*>(graph));
  return kSuccess;
}
EMULATED_API int cuGraphLaunch(void* executable, void* stream) {
  const Lock lock(state().mutex);
  if (const Result error = ready()) return error;
  if (stream_of(stream) == nullptr) return refuse(kInvalidHandle, "no such stream");
  if (const Result error = unless_captured(*stream_of(stream), "cuGraphLaunch")) return error;
  if (const char* path = std::getenv("EMULATED_CUDA_LOG")) {
    std::ofstream(path, std::ios::app) << "cuGraphLaunch\n";
  }
  enqueue(stream, [graph = *static_cast<std::shared_ptr<Graph>*>(executable)] {
    for (const auto& node : graph->nodes) {
      if (state().error == kSuccess) node();
    }
  });
  return kSuccess;
}
EMULATED_API int cuGraphDestroy(void* graph) {
  delete static_cast<std::shared_ptr<Graph>*>(graph);
  return kSuccess;
}
EMULATED_API int cuGraphExecDestroy(void* executable) { return cuGraphDestroy(executable); }

// --- of the fake alone ---------------------------------------------------------------------------

// The test device says how its memory is opened, and which addresses it has.
EMULATED_API void emulated_use_device(void (*open_memory)(int), int (*is_address)(const void*)) {
  state().device = {open_memory, is_address};
}
// Runs what is queued, also of a stream that is captured: before a kernel of PyTorch's, which does
// not wait for its turn.
EMULATED_API void emulated_run_stream(void* stream) {
  const Lock lock(state().mutex);
  if (stream_of(stream) != nullptr) run_queued(stream);
}
// Adds to the graph what a kernel of PyTorch's has done already.
EMULATED_API void emulated_add_node(void* stream, void (*call)(void*), void* data,
                                    void (*drop)(void*)) {
  const Lock lock(state().mutex);
  const std::shared_ptr<void> held(data, drop);
  Stream* each = stream_of(stream);
  if (each->capture != nullptr) each->capture->nodes.push_back([=] { call(held.get()); });
}
EMULATED_API void emulated_invalidate(void* stream) {
  const Lock lock(state().mutex);
  stream_of(stream)->is_invalid = true;
}
// Forgets the error of the context, which a real one keeps until the process ends.
EMULATED_API void emulated_forget_error() {
  state().error = kSuccess;
  state().reason.clear();
}
