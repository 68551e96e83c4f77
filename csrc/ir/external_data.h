// Tensor data that an ONNX model keeps in a file of its own.
#pragma once

#include "ir/attr.h"

#include <cstddef>
#include <map>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

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

// The contents of one file as it is written: tensors one after the other, each on a page of its
// own.
class ExternalContent {
 public:
  // Gives the offset of the tensor in the file.
  size_t add(std::shared_ptr<const TensorData> data);
  bool is_empty() const { return tensors_.empty(); }
  // Raises UserError if the file cannot be written.
  void write(const std::string& path) const;

 private:
  size_t num_bytes_ = 0;
  std::vector<std::pair<size_t, std::shared_ptr<const TensorData>>> tensors_;
};

// Writes a whole file. Raises UserError if that cannot be done.
void write_file(const std::string& path, std::string_view bytes);

}  // namespace torch_ort::ir
