// The graph as an ONNX model, in protobuf's binary form. The only user of protobuf.
#pragma once

#include "ir/external_data.h"
#include "ir/graph.h"

#include <string>
#include <string_view>

namespace torch_ort::ir {

struct OnnxWriteOptions {
  int64_t opset = 0;          // of the standard domain; what the ops need (ops::required_opset)
  std::string external_path;  // relative file name for external data; "": all data inside
  size_t external_threshold = 1024;  // smaller tensors stay inside
};

struct OnnxBytes {
  std::string model;
  ExternalContent external;  // of the file at the external path
};

// What the format cannot say is kept in metadata_props: strides, device, origin, tags of
// recomputation, symbol inputs. The origin is the doc string of a node as well, which is not read.
// Initializers without data become graph inputs, and are read as such. Symbolic attributes become
// strings, and so do doubles that a 32-bit FLOAT does not give back, but for domains whose ops
// define FLOAT: the standard one and com.microsoft.
OnnxBytes to_onnx(const Graph& graph, const OnnxWriteOptions& options);

// Writes a model into a file. More than `external_limit` bytes of initializers go into a second
// one, `<path>.data`. Raises UserError if a file cannot be written.
void save_onnx(const Graph& graph, const std::string& path, int64_t opset, size_t external_limit);

// Raises UserError on malformed bytes and on what the IR cannot hold.
// `directory` is where external data is looked for; a path that leaves it is refused.
std::unique_ptr<Graph> from_onnx(std::string_view bytes, const std::string& directory);

}  // namespace torch_ort::ir
