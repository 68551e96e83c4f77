#include "ir/external_data.h"

#include "base/error.h"

#include <fcntl.h>
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

// Operating systems map files by pages.
constexpr size_t kPageBytes = 4096;

[[noreturn]] void raise(const std::string& tensor, const std::string& location,
                        const std::string& what, const std::string& want) {
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

std::unique_ptr<const OpenFile> open_file(const fs::path& path, const std::string& location,
                                          const std::string& tensor) {
  const int descriptor = ::open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK);
  if (descriptor < 0) raise(tensor, location, std::strerror(errno), "a readable file");
  auto file = std::make_unique<OpenFile>(descriptor, 0);
  struct stat status;
  if (fstat(descriptor, &status) != 0) {
    raise(tensor, location, std::strerror(errno), "a readable file");
  }
  if (!S_ISREG(status.st_mode)) raise(tensor, location, "no regular file", "a regular file");
  file->size = static_cast<size_t>(status.st_size);
  return file;
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
  // Data that is still buffered may not fit on the disk.
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

OpenFile::~OpenFile() { close(descriptor); }

std::vector<std::byte> ExternalFiles::read(const std::string& location, int64_t offset,
                                           int64_t num_bytes, const std::string& tensor) {
  std::unique_ptr<const OpenFile>& file = files_[location];
  if (!file) file = open_file(resolve(directory_, location, tensor), location, tensor);
  const auto check_end = [&](int64_t size) {
    if (offset <= size && num_bytes <= size - offset) return;
    raise(tensor, location, concat("the end at byte ", offset, " + ", num_bytes),
          concat("one within the ", size, " bytes of the file '", location, "'"));
  };
  check_end(static_cast<int64_t>(file->size));
  std::vector<std::byte> bytes(num_bytes);
  for (int64_t done = 0; done < num_bytes;) {
    const ssize_t count =
        pread(file->descriptor, bytes.data() + done, num_bytes - done, offset + done);
    if (count < 0 && errno == EINTR) continue;
    if (count < 0) raise(tensor, location, std::strerror(errno), "a readable file");
    if (count == 0) check_end(offset + done);  // the file has become shorter
    done += count;
  }
  return bytes;
}

}  // namespace torch_ort::ir
