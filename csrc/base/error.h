// The error types of the project, and the check macro.
// They are caught by type in torch_ort/fallback.py and nowhere else.
#pragma once

#include <sstream>
#include <stdexcept>
#include <string>

namespace torch_ort {

class Error : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

// The engine does not support something in the graph. The graph runs in eager PyTorch instead.
class Unsupported : public Error {
 public:
  using Error::Error;
};

// The caller can correct it: a bad option, a bad file, a bad input. It is raised.
class UserError : public Error {
 public:
  using Error::Error;
};

// A bug in the engine. The graph runs in eager PyTorch unless strict mode asks for the error.
class InternalError : public Error {
 public:
  using Error::Error;
};

// The process can no longer use a device. Eager PyTorch could not go on either, so this is raised.
class DeviceError : public Error {
 public:
  using Error::Error;
};

template <typename... Parts>
std::string concat(const Parts&... parts) {
  std::ostringstream out;
  (out << ... << parts);
  return out.str();
}

}  // namespace torch_ort

// Throws InternalError unless the condition holds. The other arguments are joined into its message,
// and are evaluated only then.
#define ORT_CHECK(condition, ...)                                         \
  do {                                                                    \
    if (!(condition)) [[unlikely]]                                        \
      throw ::torch_ort::InternalError(::torch_ort::concat(__VA_ARGS__)); \
  } while (false)
