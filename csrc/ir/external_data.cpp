#include "ir/external_data.h"

#include "base/error.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <filesystem>
#include <system_error>

namespace torch_ort::ir {

namespace {

namespace fs = std::filesystem;

[[noreturn]] void raise(const std::string& tensor, const std::string& location,
                        const std::string& what, const char* want) {
  throw UserError(concat("onnx: data of tensor '", tensor, "' in the file '", location, "': got ",
                         what, ", want ", want));
}

fs::path resolve(const std::string& directory, const std::string& location,
                 const std::string& tensor) {
  if (directory.empty()) raise(tensor, location, "no folder to look in", "the folder of the model");
  if (location.empty() || location.find('\0') != std::string::npos) {
    raise(tensor, location, "no file name", "a path relative to the model");
  }
  std::error_code error;
  fs::path root = fs::canonical(directory, error);
  if (error) raise(tensor, location, concat("the folder '", directory, "'"), "one that exists");
  if (fs::path(location).is_absolute()) {
    raise(tensor, location, "an absolute path", "a path relative to the model");
  }
  fs::path path = fs::canonical(root / location, error);
  if (error) raise(tensor, location, error.message(), "a file beside the model");
  fs::path relative = path.lexically_relative(root);
  if (relative.empty() || *relative.begin() == "..") {
    raise(tensor, location, "a path out of the folder of the model", "a path inside");
  }
  return path;
}

// Closes the file when the scope ends; a mapping does not need it open.
struct Descriptor {
  ~Descriptor() {
    if (number >= 0) close(number);
  }
  int number;
};

std::shared_ptr<const MappedFile> map_file(const fs::path& path, const std::string& location,
                                           const std::string& tensor) {
  Descriptor file{::open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK)};
  struct stat status;
  if (file.number < 0 || fstat(file.number, &status) != 0) {
    raise(tensor, location, std::strerror(errno), "a readable file");
  }
  if (!S_ISREG(status.st_mode)) raise(tensor, location, "no regular file", "a regular file");
  const auto size = static_cast<size_t>(status.st_size);
  if (size == 0) return std::make_shared<const MappedFile>(nullptr, 0);
  // Private and writable: kernels are given a pointer that is not const, and the file stays as it
  // is.
  void* data = mmap(nullptr, size, PROT_READ | PROT_WRITE, MAP_PRIVATE, file.number, 0);
  if (data == MAP_FAILED) raise(tensor, location, std::strerror(errno), "memory for the file");
  return std::make_shared<const MappedFile>(data, size);
}

}  // namespace

MappedFile::~MappedFile() {
  if (size > 0) munmap(const_cast<void*>(data), size);
}

std::shared_ptr<const MappedFile> ExternalFiles::open(const std::string& location,
                                                      const std::string& tensor) {
  std::shared_ptr<const MappedFile>& file = files_[location];
  if (!file) file = map_file(resolve(directory_, location, tensor), location, tensor);
  return file;
}

}  // namespace torch_ort::ir
