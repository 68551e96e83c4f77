// The rules for the attributes of an op, as its row (op.h) lists them.
#pragma once

#include "ir/graph.h"

#include <cstdint>
#include <vector>

namespace torch_ort::ops {

enum class AttrKind : uint8_t {
  kInt,
  kInts,
  kDim,   // an expression over sizes, which may be text
  kDims,  // a list of such expressions
  kFloat,
  kFloats,
  kString,
  kStrings,
  kTensor,
  kGraph,
};

struct AttrRule {
  const char* name;
  AttrKind kind;
  bool is_required = false;
};

// The words for a kind in messages, such as "a list of integers".
const char* text_of(AttrKind kind);
// Whether the attribute is of the kind. `may_be_text`: a number may be given as text, as in nodes
// of the engine's own domains (onnx_proto.h).
bool is_of_kind(const ir::Attr& attr, AttrKind kind, bool may_be_text);

}  // namespace torch_ort::ops
