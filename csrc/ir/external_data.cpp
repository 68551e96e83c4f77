#include "ir/external_data.h"

#include "base/error.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <cstdio>
#include <cstring>
#include <filesystem>
#include <system_error>
#include <utility>

namespace torch_ort::ir {

namespace {

namespace fs = std::filesystem;

// Systems map files by pages.
constexpr size_t kPageBytes = 4096;

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

class OutputFile {
 public:
  explicit OutputFile(const std::string& path)
      : path_(path), file_(std::fopen(path.c_str(), "wb")) {
    check(file_ != nullptr);
  }
  OutputFile(const OutputFile&) = delete;
  OutputFile& operator=(const OutputFile&) = delete;
  ~OutputFile() {
    if (file_ != nullptr) std::fclose(file_);
  }

  void write(const void* bytes, size_t count) {
    check(std::fwrite(bytes, 1, count, file_) == count);
  }
  void seek(size_t offset) { check(fseeko(file_, static_cast<off_t>(offset), SEEK_SET) == 0); }
  // What is still in memory may not fit on the disk.
  void close() { check(std::fclose(std::exchange(file_, nullptr)) == 0); }

 private:
  void check(bool is_good) const {
    if (is_good) return;
    throw UserError(concat("onnx: file '", path_, "': got ", std::strerror(errno),
                           ", want a file that can be written"));
  }

  const std::string& path_;
  std::FILE* file_;
};

}  // namespace

size_t ExternalContent::add(std::shared_ptr<const TensorData> data) {
  const size_t offset = (num_bytes_ + kPageBytes - 1) / kPageBytes * kPageBytes;
  num_bytes_ = offset + data->num_bytes;
  tensors_.emplace_back(offset, std::move(data));
  return offset;
}

void ExternalContent::write(const std::string& path) const {
  OutputFile file(path);
  for (const auto& [offset, data] : tensors_) {
    file.seek(offset);
    file.write(data->bytes, data->num_bytes);
  }
  file.close();
}

void write_file(const std::string& path, std::string_view bytes) {
  OutputFile file(path);
  file.write(bytes.data(), bytes.size());
  file.close();
}

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
