#include "convert/rows.h"

#include "base/error.h"

#include <map>

namespace torch_ort::convert {

bool can_use(const Builder& builder, std::string_view op, ir::DType dtype) {
  switch (dtype) {
    case ir::DType::kFloat:
    case ir::DType::kDouble:
    case ir::DType::kHalf:
    case ir::DType::kBFloat16:
    case ir::DType::kBool:
    case ir::DType::kUInt8:
    case ir::DType::kInt8:
    case ir::DType::kInt16:
    case ir::DType::kInt32:
    case ir::DType::kInt64: break;
    default: return false;
  }
  const ops::Op* found = ops::registry().find({"", std::string(op)});
  ORT_CHECK(found != nullptr, "op ", op, " is not registered");
  if (dtype == ir::DType::kBFloat16 && !builder.allows(found->bfloat16_since)) return false;
  return builder.allows(found->since);
}

std::vector<ir::Value*> standard(Builder& builder, std::string_view op,
                                 std::vector<ir::Value*> inputs, const std::vector<ir::Type>& types,
                                 ir::Attrs attrs) {
  // The opset that a node needs depends on all of it. So a node outside of the graph is made to
  // ask.
  ir::Node form;
  form.op.name = op;
  form.inputs = inputs;
  form.attrs = attrs;
  std::vector<ir::Value> outputs(types.size());
  for (size_t i = 0; i < types.size(); ++i) {
    outputs[i].type = types[i];
    form.outputs.push_back(&outputs[i]);
  }
  if (!builder.allows(ops::first_opset(form))) return {};
  return builder.node(op, std::move(inputs), types, std::move(attrs));
}

std::vector<ir::Value*> reduce(Builder& builder, std::string_view op, ir::Value* x,
                               const ir::Shape& axes, bool keeps_dims,
                               const std::vector<ir::Type>& types) {
  const ir::Dim keeps = keeps_dims ? 1 : 0;
  auto values = standard(builder, op, {x, builder.ints(axes)}, types, {{"keepdims", keeps}});
  if (!values.empty()) return values;
  return standard(builder, op, {x}, types, {{"axes", axes}, {"keepdims", keeps}});
}

void add_pairs(Table& table, ops::Pair::Form form, PairRow row) {
  std::map<std::string, std::vector<std::pair<const ops::Op*, const ops::Pair*>>> found;
  for (const ops::Op* op : ops::registry().all()) {
    for (const ops::Pair& pair : op->pairs) {
      if (pair.form != form) continue;
      for (const std::string& overload : pair.overloads) {
        found[overload.empty() ? pair.aten : pair.aten + "." + overload].emplace_back(op, &pair);
      }
    }
  }
  for (auto& [key, candidates] : found) {
    table.add(key,
              [row, candidates = std::move(candidates)](Builder& builder, const AtenCall& call) {
                std::vector<ir::Value*> values;
                for (const auto& [op, pair] : candidates) {
                  if (values.empty()) values = row(builder, call, *op, *pair);
                }
                return values;
              });
  }
}

std::optional<ir::Dim> dim(const ops::Arg& arg) {
  if (const auto* value = std::get_if<ir::Dim>(&arg.value)) return *value;
  return std::nullopt;
}

int64_t axis(const AtenCall& call, std::string_view name, size_t rank) {
  const int64_t given = integer(call.arg(name));
  return given < 0 ? given + static_cast<int64_t>(rank) : given;
}

bool is_row_major(const ir::Type& type) {
  if (!type.strides) return true;
  return type.shape && *type.strides == ir::contiguous_strides(*type.shape);
}

}  // namespace torch_ort::convert
