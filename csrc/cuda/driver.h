// libcuda, found while the process runs: devices, modules, launches. No header of CUDA's is needed.
#pragma once

#include "cuda/forked.h"
#include "cuda/once.h"

#include <cstddef>
#include <cstdint>
#include <deque>
#include <memory>
#include <string>

namespace torch_ort::cuda {

struct Dim3 {
  uint32_t x = 1, y = 1, z = 1;
};

struct Launch {
  Dim3 grid, block;
  uint32_t shared_bytes = 0;
  void* stream = nullptr;  // a CUstream
};

struct DeviceInfo {
  std::string name;
  int major = 0, minor = 0;  // compute capability
  int num_multiprocessors = 0;
  int64_t max_shared_bytes = 0;      // of a block that asks for it
  std::string architecture() const;  // "sm_90"
};

// A kernel of a loaded module, which outlives it.
struct Function {
  void* handle = nullptr;  // a CUfunction
  int device = 0;
  std::string name;
};

struct FunctionInfo {
  int num_registers = 0, local_bytes = 0, shared_bytes = 0;  // of a thread, a thread and a block
  int max_threads = 0;                                       // of a block
};

// The driver and the primary contexts of its devices, which PyTorch uses too. All calls may come
// from any thread: each makes the context of its device current, and leaves the thread as it was.
// After a kernel has failed, no call works any more: all raise DeviceError, with what was first
// noticed of it.
class Driver {
 public:
  // Of the process, opened at first use, with NVRTC. Unsupported for the same reason at each call
  // if there is no driver, no device, no NVRTC, or one that the driver is too old for; DeviceError
  // in a process that was forked from one with a driver.
  static const Driver& get();
  // Why there is none; empty if there is one. Never raises.
  static std::string missing();

  int num_devices() const { return static_cast<int>(devices_.size()); }
  const DeviceInfo& device(int index) const;

  // Queues a kernel. `arguments` point to one value each, which are copied. InternalError if the
  // launch is refused: sizes are wrong, or a block has too little of something.
  void launch(const Function& function, const Launch& launch, void** arguments) const;
  // Whether what is queued on a stream becomes a graph instead.
  bool is_capturing(int device, void* stream) const;
  // Waits for a stream; what has failed is said to be `what`.
  void synchronize(int device, void* stream, const std::string& what) const;

  // A module of a cubin; Unsupported if it does not load. `name` is for messages.
  void* load(int device, const std::string& cubin, const std::string& name) const;
  // May have all the shared memory that its device allows. InternalError: there is none.
  Function function(int device, void* module, const std::string& name) const;
  FunctionInfo info(const Function& function) const;

  // Host memory that kernels of all devices see at the same address; Unsupported if there is none.
  void* allocate_host(int device, size_t num_bytes) const;
  void free_host(int device, void* memory) const noexcept;  // nothing if the context is lost
  // The address by which kernels of a device know such memory.
  void* device_pointer(int device, void* host) const;

 private:
  struct Api;
  struct Device {
    Once<void*> context;
    Once<DeviceInfo> info;
  };
  class Current;
  struct Opened;

  Driver();
  static const Opened& opened();
  Device& at(int index) const;
  void* context(int index) const;
  int attribute(int index, int attribute) const;
  // Raises DeviceError if the context is lost, else E.
  template <typename E>
  void check(int result, const std::string& what) const;
  std::string words_of(int result) const;

  std::shared_ptr<const Api> api_;
  mutable std::deque<Device> devices_;
};

// A word of host memory that kernels of a device write, to say that they have met something wrong.
class HostWord {
 public:
  explicit HostWord(int device);
  ~HostWord();
  HostWord(const HostWord&) = delete;
  HostWord& operator=(const HostWord&) = delete;

  uint32_t* host() const { return host_; }
  void* device() const { return device_; }  // what kernels are given
  // What stands there, and 0 from now on. Kernels that are not waited for may write later.
  uint32_t take();

 private:
  const Driver& driver_;
  int index_;
  uint32_t* host_;
  void* device_;
};

}  // namespace torch_ort::cuda
