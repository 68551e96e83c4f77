// What a row of an op says of its attributes.
#pragma once

#include "ir/graph.h"

#include <cstdint>
#include <vector>

namespace torch_ort::ops {

enum class AttrKind : uint8_t {
  kInt,
  kInts,
  kDim,   // an expression of sizes, which may stand as text
  kDims,  // a list of these
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

// What an attribute of the kind holds, as messages say it: "a list of integers".
const char* text_of(AttrKind kind);
// Whether the attribute is of the kind. Numbers of our own ops may stand as text (onnx_proto.h).
bool is_of_kind(const ir::Attr& attr, AttrKind kind, bool may_be_text);

}  // namespace torch_ort::ops
