#include "region/codegen.h"

#include <map>

namespace torch_ort::region {

namespace {

std::map<std::string, const Codegen*>& codegens() {
  static std::map<std::string, const Codegen*> by_kind;
  return by_kind;
}

const Codegen* codegen_of(const ir::Value* value) {
  const bool is_known = value != nullptr && value->type.is_known();
  return is_known ? codegen_for(value->type.device) : nullptr;
}

}  // namespace

void set_codegen(const std::string& device_kind, const Codegen* codegen) {
  codegens()[device_kind] = codegen;
}

const Codegen* codegen_for(const ir::Device& device) {
  const auto found = codegens().find(device.kind);
  return found == codegens().end() ? nullptr : found->second;
}

bool takes(const ir::Value* value) {
  const Codegen* codegen = codegen_of(value);
  return codegen != nullptr && codegen->takes(value->type);
}

bool takes_attention(const ir::Value* value) {
  const Codegen* codegen = codegen_of(value);
  return codegen != nullptr && codegen->has_attention() && codegen->takes(value->type);
}

}  // namespace torch_ort::region
