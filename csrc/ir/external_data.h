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

// A file that is open for reading.
struct OpenFile {
  OpenFile(int descriptor, size_t size) : descriptor(descriptor), size(size) {}
  OpenFile(const OpenFile&) = delete;
  OpenFile& operator=(const OpenFile&) = delete;
  ~OpenFile();

  int descriptor;
  size_t size;
};

// Reads from the files of one folder, and opens each file once. The bytes are copied, because
// another process may write into a file or truncate it while what was read is in use.
class ExternalFiles {
 public:
  explicit ExternalFiles(std::string directory) : directory_(std::move(directory)) {}
  // Reads `num_bytes` at `offset` of the file `location`, a path relative to the folder. Throws
  // UserError if the path leads out of the folder (also by a symbolic link), if it is not a
  // readable file, or if the file ends too early. The message names `tensor`.
  std::vector<std::byte> read(const std::string& location, int64_t offset, int64_t num_bytes,
                              const std::string& tensor);

 private:
  std::string directory_;
  std::map<std::string, std::unique_ptr<const OpenFile>> files_;
};

// The contents of a data file that is about to be written: tensors one after the other, each of
// which begins on a page of its own.
class ExternalContent {
 public:
  // Adds a tensor and returns its offset in the file.
  size_t add(std::shared_ptr<const TensorData> data);
  bool is_empty() const { return tensors_.empty(); }
  // Throws UserError if the file cannot be written.
  void write(const std::string& path) const;

 private:
  size_t num_bytes_ = 0;
  std::vector<std::pair<size_t, std::shared_ptr<const TensorData>>> tensors_;
};

// Writes a whole file. Throws UserError if it cannot.
void write_file(const std::string& path, std::string_view bytes);

}  // namespace torch_ort::ir
