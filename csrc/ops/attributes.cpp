#include "ops/attributes.h"

#include <algorithm>
#include <charconv>

namespace torch_ort::ops {

namespace {

bool is_number_text(const std::string& text) {
  double value = 0;
  const char* end = text.data() + text.size();
  const auto [stop, error] = std::from_chars(text.data(), end, value);
  return error == std::errc() && stop == end;
}

}  // namespace

const char* text_of(AttrKind kind) {
  static constexpr const char* kTexts[] = {"an integer", "a list of integers",
                                           "a size",     "a list of sizes",
                                           "a float",    "a list of floats",
                                           "a string",   "a list of strings",
                                           "a tensor",   "a graph"};
  return kTexts[static_cast<size_t>(kind)];
}

bool is_of_kind(const ir::Attr& attr, AttrKind kind, bool may_be_text) {
  using enum AttrKind;
  const auto* text = std::get_if<std::string>(&attr);
  const auto* texts = std::get_if<std::vector<std::string>>(&attr);
  switch (kind) {
    case kInt: {
      const auto* dim = std::get_if<ir::Dim>(&attr);
      return dim != nullptr && dim->is_constant();
    }
    case kInts: {
      const auto* dims = std::get_if<ir::Shape>(&attr);
      return dims != nullptr && ir::is_constant(*dims);
    }
    case kDim: return std::holds_alternative<ir::Dim>(attr) || text != nullptr;
    case kDims: return std::holds_alternative<ir::Shape>(attr) || texts != nullptr;
    case kFloat:
      return std::holds_alternative<double>(attr) ||
             (may_be_text && text != nullptr && is_number_text(*text));
    case kFloats:
      return std::holds_alternative<std::vector<double>>(attr) ||
             (may_be_text && texts != nullptr &&
              std::all_of(texts->begin(), texts->end(), is_number_text));
    case kString: return text != nullptr;
    case kStrings: return texts != nullptr;
    case kTensor: return std::holds_alternative<std::shared_ptr<const ir::TensorData>>(attr);
    case kGraph: return std::holds_alternative<std::shared_ptr<ir::Graph>>(attr);
  }
  return false;
}

}  // namespace torch_ort::ops
