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

// The graph holds something that the engine does not do: it runs in eager PyTorch.
class Unsupported : public Error {
 public:
  using Error::Error;
};

// The caller can mend it: a bad option, a bad file, a bad input.
class UserError : public Error {
 public:
  using Error::Error;
};

// A bug of ours.
class InternalError : public Error {
 public:
  using Error::Error;
};

// A device is lost to this process: eager PyTorch cannot go on there either, so this is raised.
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

// Raises InternalError with the parts joined into one message.
#define ORT_CHECK(condition, ...)                                         \
  do {                                                                    \
    if (!(condition)) [[unlikely]]                                        \
      throw ::torch_ort::InternalError(::torch_ort::concat(__VA_ARGS__)); \
  } while (false)
