// NVRTC, loaded at run time: compiles CUDA C++ texts to cubins. It needs no driver and no GPU.
//
// NVRTC rather than Triton: PyTorch's packages for CUDA have it, it compiles a kernel in a fraction
// of a second on a thread without Python, and the same texts run in the emulator of the tests.
#pragma once

#include <memory>
#include <string>
#include <vector>

namespace torch_ort::cuda {

struct Compiled {
  std::string cubin;
  std::string log;  // the messages of NVRTC and ptxas
};

class Nvrtc {
 public:
  // The NVRTC of the process, loaded at its first use. If there is none of version 12 or later,
  // each call throws Unsupported with the same reason.
  static const Nvrtc& get();
  // Why there is no NVRTC; empty if there is one. Never throws.
  static std::string missing();

  int major() const { return major_; }
  std::string version() const;  // "13.0"
  // Identifies the build of NVRTC, which its version does not. Another build may generate other
  // code.
  const std::string& identity() const { return identity_; }
  const std::string& path() const { return path_; }

  // Compiles a text with NVRTC's `options`, which include -arch. Throws Unsupported with `name` and
  // the first lines of the log if it does not compile. Several threads may call it at once.
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
