// NVRTC, found while the process runs: CUDA C++ texts into cubins. It needs no driver and no GPU.
#pragma once

#include <memory>
#include <string>
#include <vector>

namespace torch_ort::cuda {

struct Compiled {
  std::string cubin;
  std::string log;  // what NVRTC and ptxas say
};

class Nvrtc {
 public:
  // Of the process, opened at first use. Unsupported, for the same reason at each call, if there is
  // none of version 12 or later.
  static const Nvrtc& get();
  // Why there is none; empty if there is one. Never raises.
  static std::string missing();

  int major() const { return major_; }
  std::string version() const;  // "13.0"
  // What tells it from others that may give other code: its version does not say which build it is.
  const std::string& identity() const { return identity_; }
  const std::string& path() const { return path_; }

  // Compiles a text with NVRTC's `options`, -arch among them. Unsupported with `name` and the first
  // lines of the log if it does not compile. Thread safe.
  Compiled compile(const std::string& name, const std::string& text,
                   const std::vector<std::string>& options) const;

 private:
  struct Api;
  class Program;
  struct Opened;

  Nvrtc();
  static const Opened& opened();
  void check(int result, const std::string& what) const;

  std::string path_, identity_;
  std::shared_ptr<const Api> api_;
  int major_ = 0, minor_ = 0;
};

}  // namespace torch_ort::cuda
