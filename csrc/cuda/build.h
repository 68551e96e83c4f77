// Kernels from text. A text is compiled once in a process for each architecture, from the moment
// when it is first named, on threads that need no GIL; whoever needs it waits. Cubins are kept in
// files (disk_cache.h) for later processes.
#pragma once

#include "cuda/driver.h"
#include "cuda/nvrtc.h"

#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

namespace torch_ort::cuda {

struct BuildOptions {
  std::vector<std::string> flags;  // of NVRTC, besides -arch and what makes ptxas talk
  std::string dump_dir;            // the text is written there as <name>.cu; empty: nowhere
};

// A text for one architecture.
class Image {
 public:
  struct Source {
    std::string name, text, architecture;
    std::vector<std::string> flags;
  };
  explicit Image(Source source) : source_(std::move(source)) {}

  const Source& source() const { return source_; }
  bool is_ready() const { return compiled_.is_made(); }
  // Compiles it if nobody has, or waits. Unsupported, at each call, with the name and the first
  // lines of NVRTC's log if it does not compile.
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

// The same, loaded on one device, where it stays: a kernel of it may be queued whenever this goes.
class Module {
 public:
  Module(std::shared_ptr<const Image> image, int device)
      : image_(std::move(image)), device_(device) {}

  const Image& image() const { return *image_; }
  bool is_ready() const { return handle_.is_made(); }
  // Compiles and loads it if nobody has, or waits. Unsupported as Image::wait, and if it does not
  // load.
  const Module& wait() const;
  // A kernel of it, with leave to use all shared memory of the device; waits. It stays where it is
  // as long as the module lives. InternalError if there is none of this name.
  const Function& function(const std::string& name) const;

 private:
  void* handle() const;

  std::shared_ptr<const Image> image_;
  int device_;
  mutable Once<void*> handle_;
  mutable std::mutex mutex_;
  mutable std::map<std::string, Function> functions_;
};

// Compiles a text for an architecture ("sm_90"), which needs NVRTC alone. Equal ones are one image
// for the life of the process. `name` is for messages, dumps, and whoever reads.
std::shared_ptr<const Image> compile(const std::string& name, const std::string& text,
                                     const BuildOptions& options, const std::string& architecture);
// The same for a device, and loads it there. Equal ones are one module. Raises as Driver::get.
std::shared_ptr<const Module> build(const std::string& name, const std::string& text,
                                    const BuildOptions& options, int device);

// How images came about since the process began, or forget_builds.
struct BuildCounts {
  int64_t compiled = 0, found_on_disk = 0;
};
BuildCounts build_counts();
// Why cubins are not kept on disk; empty if they are, or shall not be.
std::string disk_cache_problem();
// What is built from now on is new; for tests.
void forget_builds();

}  // namespace torch_ort::cuda
