// What PyTorch asks of a device: its number, streams and events (the guard), and what it has (the
// hooks).
#include "driver.h"
#include "generator.h"
#include "memory.h"
#include <ATen/detail/CUDAHooksInterface.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>

#include <atomic>
#include <chrono>

namespace emulated {
namespace {

using c10::Device, c10::DeviceIndex, c10::DeviceType, c10::Stream;
using Clock = std::chrono::steady_clock;

const Device kDevice(DeviceType::CUDA, 0);

void check_index(DeviceIndex index) {
  TORCH_CHECK(index == 0 || index == -1, "CUDA error: invalid device ordinal");
}

// Without a driver all work is done when the call returns: a stream is a name, and an event the
// time of its record. The number of a stream of the driver is its handle.
thread_local c10::StreamId current_stream = 0;
struct Event {
  Clock::time_point time;
  void* of_driver = nullptr;
};

void* handle(const Stream& stream) { return reinterpret_cast<void*>(stream.id()); }
void* in_driver(void* event) {
  return event == nullptr ? nullptr : static_cast<Event*>(event)->of_driver;
}

class Guard final : public c10::impl::DeviceGuardImplInterface {
 public:
  DeviceType type() const override { return DeviceType::CUDA; }
  DeviceIndex deviceCount() const noexcept override { return 1; }
  Device getDevice() const override { return kDevice; }
  Device exchangeDevice(Device device) const override {
    setDevice(device);
    return kDevice;
  }
  void setDevice(Device device) const override { check_index(device.index()); }
  void uncheckedSetDevice(Device) const noexcept override {}

  Stream getStream(Device device) const override {
    return Stream(Stream::UNSAFE, device.has_index() ? device : kDevice, current_stream);
  }
  Stream getDefaultStream(Device) const override { return Stream(Stream::DEFAULT, kDevice); }
  Stream getNewStream(Device, int) const override {
    if (driver() != nullptr) {
      void* made = nullptr;
      check(driver()->stream_create(&made, 1));
      return Stream(Stream::UNSAFE, kDevice, reinterpret_cast<c10::StreamId>(made));
    }
    static std::atomic<c10::StreamId> last = 0;
    return Stream(Stream::UNSAFE, kDevice, ++last);
  }
  Stream getStreamFromGlobalPool(Device device, bool) const override {
    return getNewStream(device, 0);
  }
  Stream exchangeStream(Stream stream) const override {
    const Stream before = getStream(kDevice);
    current_stream = stream.id();
    return before;
  }
  void* getStreamNativeHandle(const Stream stream) const override { return handle(stream); }
  bool queryStream(const Stream& stream) const override {
    return driver() == nullptr || driver()->stream_query(handle(stream)) == 0;
  }
  void synchronizeStream(const Stream& stream) const override {
    if (driver() != nullptr) check(driver()->stream_synchronize(handle(stream)));
  }
  void synchronizeDevice(DeviceIndex index) const override {
    check_index(index);
    if (driver() != nullptr) check(driver()->context_synchronize());
  }
  void recordDataPtrOnStream(const c10::DataPtr&, const Stream&) const override {}

  void record(void** event, const Stream& stream, DeviceIndex, c10::EventFlag) const override {
    if (*event == nullptr) *event = new Event;
    auto& each = *static_cast<Event*>(*event);
    each.time = Clock::now();
    if (driver() == nullptr) return;
    if (each.of_driver == nullptr) check(driver()->event_create(&each.of_driver, 0));
    check(driver()->event_record(each.of_driver, handle(stream)));
  }
  void block(void* event, const Stream& stream) const override {
    if (void* each = in_driver(event)) {
      check(driver()->stream_wait_event(handle(stream), each, 0));
    }
  }
  bool queryEvent(void* event) const override {
    void* each = in_driver(event);
    return each == nullptr || driver()->event_query(each) == 0;
  }
  void synchronizeEvent(void* event) const override {
    if (void* each = in_driver(event)) check(driver()->event_synchronize(each));
  }
  void destroyEvent(void* event, DeviceIndex) const noexcept override {
    if (void* each = in_driver(event)) driver()->event_destroy(each);
    delete static_cast<Event*>(event);
  }
  double elapsedTime(void* from, void* to, DeviceIndex) const override {
    const std::chrono::duration<double, std::milli> passed =
        static_cast<Event*>(to)->time - static_cast<Event*>(from)->time;
    return passed.count();
  }
};
C10_REGISTER_GUARD_IMPL(CUDA, Guard)

constexpr long kCuDnnVersion = 91900;  // 9.19.0

// Python has no other way to the default generator than to make one: the first is it.
std::atomic<bool> default_generator_given = false;

}  // namespace
}  // namespace emulated

// PyTorch looks for hooks of this name.
struct CUDAHooks final : at::CUDAHooksInterface {
  explicit CUDAHooks(at::CUDAHooksArgs) {}

  void init() const override {}
  bool hasCUDA() const override { return true; }
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasPrimaryContext(c10::DeviceIndex) const override { return true; }
  c10::DeviceIndex deviceCount() const override { return 1; }
  int getNumGPUs() const override { return 1; }
  c10::DeviceIndex current_device() const override { return 0; }
  c10::DeviceIndex getCurrentDevice() const override { return 0; }
  void setCurrentDevice(c10::DeviceIndex index) const override { emulated::check_index(index); }
  c10::DeviceIndex exchangeDevice(c10::DeviceIndex) const override { return 0; }
  c10::DeviceIndex maybeExchangeDevice(c10::DeviceIndex) const override { return 0; }
  void deviceSynchronize(c10::DeviceIndex) const override {
    if (emulated::driver() != nullptr) emulated::check(emulated::driver()->context_synchronize());
  }

  const at::Generator& getDefaultGenerator(c10::DeviceIndex) const override {
    return emulated::default_generator();
  }
  at::Generator getNewGenerator(c10::DeviceIndex) const override {
    if (!emulated::default_generator_given.exchange(true)) return emulated::default_generator();
    return emulated::make_generator(c10::default_rng_seed_val);
  }

  // PyTorch 2.14 asks before it chooses a kernel for attention.
  long versionCuDNN() const override { return emulated::kCuDnnVersion; }
  long versionRuntimeCuDNN() const override { return emulated::kCuDnnVersion; }

  at::Allocator* getCUDADeviceAllocator() const override { return &emulated::allocator(); }
  at::Allocator* getPinnedMemoryAllocator() const override { return &emulated::pinned_allocator(); }
  bool isPinnedPtr(const void* address) const override { return emulated::is_pinned(address); }
  at::Device getDeviceFromPtr(void* address) const override {
    TORCH_CHECK(
        emulated::is_device_address(address),
        "The specified pointer resides on host memory and is not registered with any CUDA device.");
    return emulated::kDevice;
  }
};

namespace at {
REGISTER_CUDA_HOOKS(CUDAHooks)
}

extern "C" __attribute__((visibility("default"))) void emulated_set_memory_fraction(
    double fraction) {
  emulated::set_memory_fraction(fraction);
}

extern "C" __attribute__((visibility("default"))) void emulated_check_guards() {
  emulated::check_guards();
}
