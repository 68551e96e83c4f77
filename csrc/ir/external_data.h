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

// Reads from the files of one folder, each of which is opened once. The bytes are copied: others
// may write into the files, or cut them off, while what was read is used.
class ExternalFiles {
 public:
  explicit ExternalFiles(std::string directory) : directory_(std::move(directory)) {}
  // `location` is relative to the folder. Raises UserError if it leads out of it, by a link too, if
  // it is no readable file, or if the file ends before the last byte. `tensor` is named in the
  // message.
  std::vector<std::byte> read(const std::string& location, int64_t offset, int64_t num_bytes,
                              const std::string& tensor);

 private:
  std::string directory_;
  std::map<std::string, std::unique_ptr<const OpenFile>> files_;
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
