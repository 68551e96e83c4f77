// Compiles kernels from source texts. A process compiles a text once for each architecture. It
// starts when the text is first named, on threads that need no GIL; callers that need the kernel
// wait. Cubins are cached in files (disk_cache.h) for later processes.
//
// A caller that needs a kernel before a thread has started on it compiles it itself, so that nobody
// waits for a queue. Texts are made to compile quickly: what seldom runs is not unrolled, all sums
// of columns are finished by the same code, and sorting is one kernel. If a text does not compile,
// that is Unsupported, since the likely cause is another version of NVRTC.
#pragma once

#include "cuda/driver.h"
#include "cuda/nvrtc.h"

#include <atomic>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

namespace torch_ort::cuda {

struct BuildOptions {
  // Options of NVRTC besides -arch and those that make ptxas report resource usage.
  std::vector<std::string> flags;
  std::string dump_dir;  // where the text is written as <name>.cu; empty: nowhere
};

// A text that is compiled for one architecture.
class Image {
 public:
  struct Source {
    std::string name, text, architecture;
    std::vector<std::string> flags;
  };
  explicit Image(Source source) : source_(std::move(source)) {}

  const Source& source() const { return source_; }
  bool is_ready() const { return compiled_.is_made(); }
  // Compiles the text, or waits if another thread compiles it. If it does not compile, each call
  // throws Unsupported with the name and the first lines of NVRTC's log.
  const Compiled& wait() const;

 private:
  struct Result {
    Compiled compiled;
    std::string error;
  };
  Result compile() const;

  Source source_;
  mutable Once<Result> compiled_;
};

// An image that is loaded on one device. It is never unloaded, since one of its kernels may be
// queued when the Module is destroyed.
class Module {
 public:
  Module(std::shared_ptr<const Image> image, int device)
      : image_(std::move(image)), device_(device) {}

  const Image& image() const { return *image_; }
  bool is_ready() const { return handle_.is_made(); }
  // Compiles and loads the image, or waits. Throws Unsupported as Image::wait() does, and if it
  // does not load.
  const Module& wait() const;
  // Returns a kernel that may use all shared memory of the device; waits if necessary. The
  // reference is valid as long as the module. Throws InternalError if there is no kernel of this
  // name.
  const Function& function(const std::string& name) const;

 private:
  void* handle() const;

  std::shared_ptr<const Image> image_;
  int device_;
  mutable Once<void*> handle_;
  mutable std::mutex mutex_;
  mutable std::map<std::string, Function> functions_;
};

// A kernel of a module, for those who start it again and again: only the first call waits until the
// module is loaded, and takes a lock.
class KernelOfModule {
 public:
  KernelOfModule(std::shared_ptr<const Module> module, std::string name)
      : module_(std::move(module)), name_(std::move(name)) {}

  const Function& get() const;  // throws as Module::function() does

 private:
  std::shared_ptr<const Module> module_;
  std::string name_;
  mutable std::atomic<const Function*> found_ = nullptr;
};

// Starts to compile a text for an architecture such as "sm_90", which needs only NVRTC. Equal texts
// share one image for the life of the process. `name` is for messages, dumps and listings.
std::shared_ptr<const Image> compile(const std::string& name, const std::string& text,
                                     const BuildOptions& options, const std::string& architecture);
// The same for the architecture of a device, on which it is loaded. Equal texts share one module.
// Throws what Driver::get() throws.
std::shared_ptr<const Module> build(const std::string& name, const std::string& text,
                                    const BuildOptions& options, int device);

// How many images were compiled and how many found on disk, since the process began or since
// forget_builds().
struct BuildCounts {
  int64_t compiled = 0, found_on_disk = 0;
};
BuildCounts build_counts();
// Why cubins are not cached on disk; empty if they are, or if the cache is switched off.
std::string disk_cache_problem();
// Forgets all images and modules; for tests.
void forget_builds();

}  // namespace torch_ort::cuda
