#include "cuda/driver.h"

#include "base/error.h"
#include "cuda/driver_api.h"
#include "cuda/library.h"
#include "cuda/nvrtc.h"
#include "cuda/settings.h"

#include <array>
#include <atomic>
#include <mutex>
#include <utility>

namespace torch_ort::cuda {

struct Driver::Api {
  explicit Api(const Library& library);

  int (*init)(unsigned flags);
  int (*driver_version)(int* version);
  int (*error_name)(int result, const char** name);
  int (*error_string)(int result, const char** text);
  int (*device_count)(int* count);
  int (*device_get)(int* device, int ordinal);
  int (*device_name)(char* name, int size, int device);
  int (*device_attribute)(int* value, int attribute, int device);
  int (*retain_context)(void** context, int device);
  int (*get_current)(void** context);
  int (*set_current)(void* context);
  int (*load_module)(void** module, const void* image);
  int (*get_function)(void** function, void* module, const char* name);
  int (*get_attribute)(int* value, int attribute, void* function);
  int (*set_attribute)(void* function, int attribute, int value);
  int (*launch_kernel)(void* function, unsigned grid_x, unsigned grid_y, unsigned grid_z,
                       unsigned block_x, unsigned block_y, unsigned block_z, unsigned shared_bytes,
                       void* stream, void** arguments, void** extra);
  int (*synchronize)(void* stream);
  int (*is_capturing)(void* stream, int* status);
  int (*exchange_capture_mode)(int* mode);  // of the calling thread
  int (*allocate_host)(void** memory, size_t num_bytes, unsigned flags);
  int (*free_host)(void* memory);
  int (*device_pointer)(void** of_device, void* of_host, unsigned flags);
};

Driver::Api::Api(const Library& library) {
  library.find("cuInit", init);
  library.find("cuDriverGetVersion", driver_version);
  library.find("cuGetErrorName", error_name);
  library.find("cuGetErrorString", error_string);
  library.find("cuDeviceGetCount", device_count);
  library.find("cuDeviceGet", device_get);
  library.find("cuDeviceGetName", device_name);
  library.find("cuDeviceGetAttribute", device_attribute);
  library.find("cuDevicePrimaryCtxRetain", retain_context);
  library.find("cuCtxGetCurrent", get_current);
  library.find("cuCtxSetCurrent", set_current);
  library.find("cuModuleLoadData", load_module);
  library.find("cuModuleGetFunction", get_function);
  library.find("cuFuncGetAttribute", get_attribute);
  library.find("cuFuncSetAttribute", set_attribute);
  library.find("cuLaunchKernel", launch_kernel);
  library.find("cuStreamSynchronize", synchronize);
  library.find("cuStreamIsCapturing", is_capturing);
  library.find("cuThreadExchangeStreamCaptureMode", exchange_capture_mode);
  library.find("cuMemHostAlloc", allocate_host);
  library.find("cuMemFreeHost", free_host);
  library.find("cuMemHostGetDevicePointer_v2", device_pointer);
}

// The driver, or the reason why there is none.
struct Driver::Opened {
  std::unique_ptr<const Driver> driver;
  std::string reason;
};

// Makes the context of a device current while it exists, and then restores the previous one.
class Driver::Current {
 public:
  Current(const Driver& driver, int device) : api_(*driver.api_) {
    check_not_forked();
    void* wanted = driver.context(device);
    if (api_.get_current(&before_) == api::kSuccess && before_ == wanted) return;
    const int result = api_.set_current(wanted);
    if (result != api::kSuccess) driver.check<InternalError>(result, concat("cuda:", device));
    is_changed_ = true;
  }
  ~Current() {
    if (is_changed_) api_.set_current(before_);
  }
  Current(const Current&) = delete;
  Current& operator=(const Current&) = delete;

 private:
  const Api& api_;
  void* before_ = nullptr;
  bool is_changed_ = false;
};

// Lets the calling thread load kernels and allocate memory while the user captures a CUDA graph, on
// this thread or on another. Neither becomes a part of the graph.
class Driver::OutsideCapture {
 public:
  explicit OutsideCapture(const Driver& driver) : api_(*driver.api_) {
    api_.exchange_capture_mode(&mode_);
  }
  ~OutsideCapture() { api_.exchange_capture_mode(&mode_); }
  OutsideCapture(const OutsideCapture&) = delete;
  OutsideCapture& operator=(const OutsideCapture&) = delete;

 private:
  const Api& api_;
  int mode_ = api::kCaptureRelaxed;  // then the mode before
};

namespace {

// What was noticed first of a failure that has made a context unusable.
struct FirstFailure {
  std::mutex mutex;
  std::string what;
};

FirstFailure& first_failure() {
  static auto* each = new FirstFailure;
  return *each;
}

std::string lost(const std::string& what, const std::string& words) {
  FirstFailure& first = first_failure();
  const std::lock_guard lock(first.mutex);
  const std::string now = concat(what, ": ", words);
  if (!first.what.empty()) {
    return concat("cuda: ", now, ": nothing runs on the device any more; first noticed at ",
                  first.what);
  }
  first.what = now;
  return concat("cuda: ", now,
                ": this or an earlier kernel has failed, and nothing runs on the device any more; "
                "TORCH_ORT_CHECK=2 waits for each step and names the one that fails");
}

}  // namespace

std::string DeviceInfo::architecture() const { return concat("sm_", major, minor); }

// --- opening -------------------------------------------------------------------------------------

Driver::Driver() {
  const std::string path = settings_of_libraries().libcuda;
  const Library library =
      Library::open("driver", {path.empty() ? std::string("libcuda.so.1") : path});
  api_ = std::make_shared<const Api>(library);
  // This failure harms nothing, since no context exists yet. So any error only means that there is
  // no usable device.
  if (const int result = api_->init(0); result != api::kSuccess) {
    throw Unsupported(concat("cuda: no device: ", words_of(result)));
  }
  int count = 0, version = 0;
  check<Unsupported>(api_->device_count(&count), "cuDeviceGetCount");
  if (count == 0) throw Unsupported("cuda: no device: the driver reports 0 devices");
  check<Unsupported>(api_->driver_version(&version), "cuDriverGetVersion");
  const Nvrtc& nvrtc = Nvrtc::get();
  // A driver loads code of newer NVRTC versions only within its major version.
  if (const int major = version / 1000; major < nvrtc.major()) {
    throw Unsupported(concat("cuda: ", nvrtc.path(), " is too new for the driver: got NVRTC ",
                             nvrtc.version(), ", want ", major, ".x; TORCH_ORT_NVRTC names one"));
  }
  for (int i = 0; i < count; ++i) devices_.emplace_back();
}

const Driver::Opened& Driver::opened() {
  static const Opened* const each = [] {
    auto* made = new Opened;
    try {
      made->driver.reset(new Driver);
      // Without a driver, forked processes may use the engine.
      note_use();
    } catch (const Error& error) {
      made->reason = error.what();
    }
    return made;
  }();
  return *each;
}

const Driver& Driver::get() {
  check_not_forked();
  const Opened& each = opened();
  if (each.driver == nullptr) throw Unsupported(each.reason);
  return *each.driver;
}

std::string Driver::missing() {
  try {
    get();
  } catch (const Error& error) {
    return error.what();
  }
  return "";
}

// --- devices -------------------------------------------------------------------------------------

Driver::Device& Driver::at(int index) const {
  ORT_CHECK(index >= 0 && index < num_devices(), "cuda: no such device: got ", index,
            ", want one of ", num_devices());
  return devices_[static_cast<size_t>(index)];
}

int Driver::attribute(int index, int attribute) const {
  int device = 0, value = 0;
  check<Unsupported>(api_->device_get(&device, index), "cuDeviceGet");
  check<Unsupported>(api_->device_attribute(&value, attribute, device), "cuDeviceGetAttribute");
  return value;
}

const DeviceInfo& Driver::device(int index) const {
  return at(index).info.get([&] {
    int device = 0;
    std::array<char, 256> name = {};
    check<Unsupported>(api_->device_get(&device, index), "cuDeviceGet");
    check<Unsupported>(api_->device_name(name.data(), name.size() - 1, device), "cuDeviceGetName");
    return DeviceInfo{.name = name.data(),
                      .major = attribute(index, api::kMajor),
                      .minor = attribute(index, api::kMinor),
                      .num_multiprocessors = attribute(index, api::kMultiprocessors),
                      .max_shared_bytes = attribute(index, api::kMaxSharedOptIn)};
  });
}

void* Driver::context(int index) const {
  return at(index).context.get([&] {
    int device = 0;
    void* context = nullptr;
    check<Unsupported>(api_->device_get(&device, index), "cuDeviceGet");
    check<Unsupported>(api_->retain_context(&context, device), concat("cuda:", index));
    return context;
  });
}

// --- modules and launches ------------------------------------------------------------------------

void Driver::launch(const Function& function, const Launch& launch, void** arguments) const {
  const Current current(*this, function.device);
  const int result = api_->launch_kernel(
      function.handle, launch.grid.x, launch.grid.y, launch.grid.z, launch.block.x, launch.block.y,
      launch.block.z, launch.shared_bytes, launch.stream, arguments, nullptr);
  if (result == api::kSuccess) [[likely]]
    return;
  check<InternalError>(result, concat("launch of '", function.name, "' with grid (", launch.grid.x,
                                      ", ", launch.grid.y, ", ", launch.grid.z, "), block (",
                                      launch.block.x, ", ", launch.block.y, ", ", launch.block.z,
                                      "), ", launch.shared_bytes, " bytes of shared memory"));
}

bool Driver::is_capturing(int device, void* stream) const {
  const Current current(*this, device);
  int status = 0;
  // The legacy default stream returns an error while another stream is captured.
  return api_->is_capturing(stream, &status) != api::kSuccess || status != 0;
}

void Driver::synchronize(int device, void* stream, const std::string& what) const {
  const Current current(*this, device);
  check<InternalError>(api_->synchronize(stream), what);
}

void* Driver::load(int device, const std::string& cubin, const std::string& name) const {
  const Current current(*this, device);
  const OutsideCapture outside(*this);
  void* module = nullptr;
  check<Unsupported>(api_->load_module(&module, cubin.data()),
                     concat("load of '", name, "' for ", this->device(device).architecture()));
  return module;
}

Function Driver::function(int device, void* module, const std::string& name) const {
  const Current current(*this, device);
  const OutsideCapture outside(*this);
  void* handle = nullptr;
  const std::string what = concat("kernel '", name, "'");
  check<InternalError>(api_->get_function(&handle, module, name.c_str()), what);
  Function found{.handle = handle, .device = device, .name = name};
  const int64_t most = this->device(device).max_shared_bytes - info(found).shared_bytes;
  check<InternalError>(api_->set_attribute(handle, api::kMaxDynamicShared, static_cast<int>(most)),
                       what);
  return found;
}

FunctionInfo Driver::info(const Function& function) const {
  const Current current(*this, function.device);
  const auto read = [&](int attribute) {
    int value = 0;
    check<InternalError>(api_->get_attribute(&value, attribute, function.handle),
                         concat("kernel '", function.name, "'"));
    return value;
  };
  return {.num_registers = read(api::kRegisters),
          .local_bytes = read(api::kLocalBytes),
          .shared_bytes = read(api::kSharedBytes),
          .max_threads = read(api::kMaxThreads)};
}

// --- host memory ---------------------------------------------------------------------------------

void* Driver::allocate_host(int device, size_t num_bytes) const {
  const Current current(*this, device);
  const OutsideCapture outside(*this);
  void* memory = nullptr;
  check<Unsupported>(api_->allocate_host(&memory, num_bytes, api::kPortable | api::kDeviceMap),
                     concat(num_bytes, " bytes of host memory"));
  return memory;
}

void Driver::free_host(int device, void* memory) const noexcept {
  if (was_forked()) return;
  void* const* context = devices_[static_cast<size_t>(device)].context.found();
  void* before = nullptr;
  api_->get_current(&before);
  api_->set_current(*context);
  api_->free_host(memory);
  api_->set_current(before);
}

void* Driver::device_pointer(int device, void* host) const {
  const Current current(*this, device);
  const OutsideCapture outside(*this);
  void* found = nullptr;
  check<InternalError>(api_->device_pointer(&found, host, 0), "address of host memory");
  return found;
}

HostWord::HostWord(int device)
    : driver_(Driver::get()),
      index_(device),
      host_(static_cast<uint32_t*>(driver_.allocate_host(device, sizeof(uint32_t)))),
      device_(driver_.device_pointer(device, host_)) {
  *host_ = 0;
}

HostWord::~HostWord() { driver_.free_host(index_, host_); }

uint32_t HostWord::take() { return std::atomic_ref<uint32_t>(*host_).exchange(0); }

// --- errors --------------------------------------------------------------------------------------

std::string Driver::words_of(int result) const {
  const char *name = nullptr, *text = nullptr;
  api_->error_name(result, &name);
  api_->error_string(result, &text);
  if (name == nullptr) return concat("error ", result, ", for which the driver has no name");
  return text == nullptr ? name : concat(name, " (", text, ")");
}

template <typename E>
void Driver::check(int result, const std::string& what) const {
  if (result == api::kSuccess) [[likely]]
    return;
  const std::string words = words_of(result);
  if (api::is_lost(result)) throw DeviceError(lost(what, words));
  throw E(concat("cuda: ", what, ": ", words));
}

}  // namespace torch_ort::cuda
