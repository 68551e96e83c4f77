// Tensor data that an ONNX model keeps in a file of its own.
#pragma once

#include <cstddef>
#include <map>
#include <memory>
#include <string>

namespace torch_ort::ir {

// A file as bytes in memory, read by the system when they are touched.
struct MappedFile {
  MappedFile(const void* data, size_t size) : data(data), size(size) {}
  MappedFile(const MappedFile&) = delete;
  MappedFile& operator=(const MappedFile&) = delete;
  ~MappedFile();

  const void* data;
  size_t size;
};

// Maps the files of one folder, each once.
class ExternalFiles {
 public:
  explicit ExternalFiles(std::string directory) : directory_(std::move(directory)) {}
  // `location` is relative to the folder. Raises UserError if it leads out of it, by a link too,
  // or if it is no readable file. `tensor` is named in the message.
  std::shared_ptr<const MappedFile> open(const std::string& location, const std::string& tensor);

 private:
  std::string directory_;
  std::map<std::string, std::shared_ptr<const MappedFile>> files_;
};

}  // namespace torch_ort::ir
