// libcuda, loaded at run time: devices, modules, launches. Needs no header of CUDA.
//
// Neither it nor NVRTC is linked: both are loaded by dlopen at their first use. So one build runs
// with and without a GPU, with PyTorch for CUDA or for the CPU.
//
// After a kernel has failed, nothing runs in its CUDA context any more, eager PyTorch included. A
// fallback would only replace the error by a later and vaguer one of PyTorch, so a lost device is
// raised (DeviceError). CUDA reports a failure at some later call, so all further errors say where
// it was noticed first. A launch that the driver refuses does no harm: that is an InternalError,
// and eager PyTorch takes over.
#pragma once

#include "cuda/forked.h"
#include "cuda/once.h"

#include <array>
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
  int64_t max_shared_bytes = 0;      // of a block that opts in
  std::string architecture() const;  // "sm_90"
};

// A kernel of a loaded module. Modules are never unloaded.
struct Function {
  void* handle = nullptr;  // a CUfunction
  int device = 0;
  std::string name;
};

struct FunctionInfo {
  int num_registers = 0, local_bytes = 0,
      shared_bytes = 0;  // of a thread, of a thread, and of a block
  int max_threads = 0;   // of a block
};

// The driver, and the primary contexts of its devices, which PyTorch uses too. Any thread may call
// any function: each makes the context of its device current, and restores the thread's afterwards.
// After a kernel has failed no call works any more: all throw DeviceError with the first failure
// that was noticed.
class Driver {
 public:
  // The driver of the process, loaded at its first use together with NVRTC. If there is no driver,
  // no device or no NVRTC, or if the driver is too old for NVRTC, each call throws Unsupported with
  // the same reason. Throws DeviceError in a process that was forked from one that had a driver.
  static const Driver& get();
  // Why there is no driver; empty if there is one. Never throws.
  static std::string missing();

  int num_devices() const { return static_cast<int>(devices_.size()); }
  const DeviceInfo& device(int index) const;

  // Queues a kernel. `arguments` points to one value each; the values are copied. Throws
  // InternalError if the driver refuses the launch, because sizes are wrong or a block needs too
  // many resources.
  void launch(const Function& function, const Launch& launch, void** arguments) const;
  // The same with the arguments themselves.
  template <typename... Given>
  void start(const Function& function, const Launch& with, Given... given) const {
    std::array<void*, sizeof...(Given)> arguments = {static_cast<void*>(&given)...};
    launch(function, with, arguments.data());
  }
  // Whether the stream is being captured into a CUDA graph.
  bool is_capturing(int device, void* stream) const;
  // Waits for a stream. If something on it failed, the message names `what`.
  void synchronize(int device, void* stream, const std::string& what) const;

  // Loads a cubin and returns the module. Throws Unsupported if it does not load. `name` is for
  // messages.
  void* load(int device, const std::string& cubin, const std::string& name) const;
  // Returns a kernel that may use all shared memory of its device. Throws InternalError if there is
  // none of this name.
  Function function(int device, void* module, const std::string& name) const;
  FunctionInfo info(const Function& function) const;

  // Allocates host memory that the kernels of all devices can access. Throws Unsupported if it
  // cannot.
  void* allocate_host(int device, size_t num_bytes) const;
  void free_host(int device, void* memory) const noexcept;  // does nothing if the context is lost
  // The address of such memory for kernels of a device.
  void* device_pointer(int device, void* host) const;

 private:
  struct Api;
  struct Device {
    Once<void*> context;
    Once<DeviceInfo> info;
  };
  class Current;
  class OutsideCapture;
  struct Opened;

  Driver();
  static const Opened& opened();
  Device& at(int index) const;
  void* context(int index) const;
  int attribute(int index, int attribute) const;
  // Throws DeviceError if the context is lost, and otherwise E, if `result` is an error.
  template <typename E>
  void check(int result, const std::string& what) const;
  std::string words_of(int result) const;

  std::shared_ptr<const Api> api_;
  mutable std::deque<Device> devices_;
};

// A word of host memory that kernels of a device write to report an error.
class HostWord {
 public:
  explicit HostWord(int device);
  ~HostWord();
  HostWord(const HostWord&) = delete;
  HostWord& operator=(const HostWord&) = delete;

  uint32_t* host() const { return host_; }
  void* device() const { return device_; }  // the address for kernels
  // Returns the word and sets it to 0. Kernels that are still running may write it later.
  uint32_t take();

 private:
  const Driver& driver_;
  int index_;
  uint32_t* host_;
  void* device_;
};

}  // namespace torch_ort::cuda
