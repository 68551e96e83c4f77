#include "region/codegen.h"

#include "base/error.h"

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

const KernelRow* find_kernel(const Codegen& codegen, std::string_view op) {
  for (const KernelRow& row : codegen.kernels()) {
    if (row.op == op) return &row;
  }
  return nullptr;
}

// The strides of a contiguous layout. `by_columns`: its matrices are column-major.
std::vector<int64_t> dense_strides(const std::vector<int64_t>& sizes, bool by_columns) {
  std::vector<int64_t> strides(sizes.size());
  int64_t stride = 1;
  for (size_t i = sizes.size(); i-- > 0;) {
    const bool is_turned = by_columns && i + 2 >= sizes.size();
    const size_t dim = is_turned ? 2 * sizes.size() - 3 - i : i;
    strides[dim] = stride;
    stride *= sizes[dim];
  }
  return strides;
}

// The strides of dims of size 1 do not count.
bool same_strides(const Layout& layout, const std::vector<int64_t>& strides) {
  for (size_t i = 0; i < strides.size(); ++i) {
    if (layout.sizes[i] != 1 && layout.strides[i] != strides[i]) return false;
  }
  return true;
}

std::string text_of(const Layout& layout) {
  if (same_strides(layout, dense_strides(layout.sizes, false))) return "N";
  if (same_strides(layout, dense_strides(layout.sizes, true))) return "T";
  std::string text;
  for (size_t i = 0; i < layout.strides.size(); ++i) {
    text += concat(i == 0 ? "(" : ",", layout.sizes[i] == 1 ? 0 : layout.strides[i]);
  }
  return text + ")";
}

// The layout broadcast to the sizes of the result.
Layout broadcast(Layout layout, const std::vector<int64_t>& sizes) {
  for (size_t i = 0; i < sizes.size(); ++i) {
    if (layout.sizes[i] == 1) layout.strides[i] = 0;
  }
  layout.sizes = sizes;
  return layout;
}

}  // namespace

std::string text_of(const Product& product) {
  const auto& [result, a, b, start] = product;
  const size_t rank = result.sizes.size();
  ORT_CHECK(rank >= 2 && a.sizes.size() == rank && b.sizes.size() == rank &&
                (!start || start->sizes.size() == rank),
            "product: want operands of 2 or more dims, and all of as many");
  std::string batch;
  std::vector<int64_t> of_a = result.sizes, of_b = result.sizes;
  for (size_t i = 0; i + 2 < rank; ++i) batch += concat(result.sizes[i], "*");
  of_a[rank - 1] = of_b[rank - 2] = a.sizes[rank - 1];
  return concat(ir::name(result.dtype), " ", batch, of_a[rank - 2], "x", of_a[rank - 1], "x",
                of_b[rank - 1], " ", text_of(broadcast(a, of_a)), text_of(broadcast(b, of_b)),
                start ? concat(" + ", text_of(broadcast(*start, result.sizes))) : "",
                text_of(result) == "N" ? "" : concat(" -> ", text_of(result)));
}

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

const KernelRow* kernel_for(const ir::Value* value, std::string_view op) {
  return takes(value) ? find_kernel(*codegen_of(value), op) : nullptr;
}

bool has_wide_products(const ir::Value* value) {
  return takes(value) && codegen_of(value)->has_wide_products();
}

bool prefers_own_convolutions(const ir::Value* value) {
  return has_kernel(value, "Convolution") && !codegen_of(value)->has_fast_convolutions();
}

std::unique_ptr<const Kernel> compile(const Codegen& codegen, const BoundNode& bound) {
  const ir::Node& node = bound.node;
  const bool is_ours = node.op.domain == ir::kTorchOrtDomain;
  const KernelRow* found = is_ours ? find_kernel(codegen, node.op.name) : nullptr;
  if (found == nullptr) {
    throw Unsupported(concat(node.op.str(), " '", node.name, "': no kernel for device '",
                             ir::to_string(node.outputs[0]->type.device), "'"));
  }
  return found->make(bound);
}

}  // namespace torch_ort::region
