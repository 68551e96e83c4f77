#include "driver.h"

#include "graphs.h"
#include "memory.h"
#include <c10/core/DeviceType.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <c10/util/Exception.h>
#include <dlfcn.h>

#include <atomic>

namespace emulated {
namespace {

std::atomic<const Driver*> active = nullptr;

constexpr int kNotReady = 600;

template <typename F>
F* find(void* library, const char* name) {
  auto* found = reinterpret_cast<F*>(dlsym(library, name));
  TORCH_CHECK(found != nullptr, "emulated device: the driver has no ", name);
  return found;
}

int is_address(const void* address) { return is_device_address(address); }

// Gives the path of a driver's library to the device, and the device to the driver.
void use(const char* path) {
  void* library = dlopen(path, RTLD_NOW | RTLD_LOCAL);
  TORCH_CHECK(library != nullptr, "emulated device: ", dlerror());
  auto* made = new Driver;
  const auto set = [library]<typename F>(F*& call, const char* name) {
    call = find<F>(library, name);
  };
  set(made->stream_create, "cuStreamCreate");
  set(made->stream_query, "cuStreamQuery");
  set(made->stream_synchronize, "cuStreamSynchronize");
  set(made->stream_wait_event, "cuStreamWaitEvent");
  set(made->context_synchronize, "cuCtxSynchronize");
  set(made->event_create, "cuEventCreate");
  set(made->event_record, "cuEventRecord");
  set(made->event_query, "cuEventQuery");
  set(made->event_synchronize, "cuEventSynchronize");
  set(made->event_destroy, "cuEventDestroy_v2");
  set(made->launch_host, "cuLaunchHostFunc");
  set(made->error_string, "cuGetErrorString");
  set(made->set_current, "cuCtxSetCurrent");
  set(made->begin_capture, "cuStreamBeginCapture_v2");
  set(made->end_capture, "cuStreamEndCapture");
  set(made->instantiate, "cuGraphInstantiateWithFlags");
  set(made->launch_graph, "cuGraphLaunch");
  set(made->destroy_graph, "cuGraphDestroy");
  set(made->destroy_executable, "cuGraphExecDestroy");
  set(made->is_capturing, "cuStreamIsCapturing");
  set(made->run_stream, "emulated_run_stream");
  set(made->add_node, "emulated_add_node");
  set(made->invalidate, "emulated_invalidate");
  const bool has_started =
      find<int(unsigned)>(library, "cuInit")(0) == 0 &&
      find<int(void**, int)>(library, "cuDevicePrimaryCtxRetain")(&made->context, 0) == 0;
  TORCH_CHECK(has_started, "emulated device: the driver does not start");
  active = made;
  find<void(void (*)(int), int (*)(const void*))>(library, "emulated_use_device")(&open_memory,
                                                                                  &is_address);
}

}  // namespace

const Driver* driver() {
  const Driver* found = active;
  if (found != nullptr) found->set_current(found->context);
  return found;
}

void check(int result) {
  if (result == 0 || result == kNotReady) return;
  const char* text = "";
  driver()->error_string(result, &text);
  TORCH_CHECK(false, "CUDA error: ", text);
}

void* current_stream() {
  const auto* guard = c10::impl::getDeviceGuardImpl(c10::DeviceType::CUDA);
  return reinterpret_cast<void*>(guard->getStream(guard->getDevice()).id());
}

void run_launched() {
  if (driver() == nullptr) return;
  if (is_recording()) return driver()->run_stream(current_stream());
  check(driver()->stream_synchronize(current_stream()));
}

}  // namespace emulated

extern "C" __attribute__((visibility("default"))) void emulated_use_driver(const char* path) {
  if (emulated::driver() == nullptr) emulated::use(path);
}
