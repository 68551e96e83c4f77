// Reads and writes graphs as ONNX models in protobuf's binary form. The only user of protobuf.
#pragma once

#include "ir/external_data.h"
#include "ir/graph.h"

#include <string>
#include <string_view>

namespace torch_ort::ir {

struct OnnxWriteOptions {
  int64_t opset = 0;                 // of the standard domain; see ops::required_opset
  std::string external_path;         // relative file name for external data; "": all data inside
  size_t external_threshold = 1024;  // smaller tensors stay inside
};

struct OnnxBytes {
  std::string model;
  ExternalContent external;  // the content of the file at `external_path`
};

// Writes the graph. What ONNX has no field for is kept in metadata_props: strides, device, origin,
// checkpoint tags, symbol inputs. The origin is also the doc string of a node, which is not read
// back. Initializers without data become graph inputs, and are read back as such. Symbolic
// attributes become strings. So do doubles that a 32-bit FLOAT attribute cannot represent, except
// in the standard domain and com.microsoft, whose ops define FLOAT.
OnnxBytes to_onnx(const Graph& graph, const OnnxWriteOptions& options);

// Writes a model into a file. If the initializers have more than `external_limit` bytes, their data
// goes into a second file, `<path>.data`. Throws UserError if a file cannot be written.
void save_onnx(const Graph& graph, const std::string& path, int64_t opset, size_t external_limit);

// Reads a model. Throws UserError on malformed bytes and on what the IR cannot represent. External
// data is read from `directory`; a path that leads out of it is refused.
std::unique_ptr<Graph> from_onnx(std::string_view bytes, const std::string& directory);

}  // namespace torch_ort::ir
