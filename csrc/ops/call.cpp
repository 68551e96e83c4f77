#include "ops/call.h"

#include "base/error.h"

namespace torch_ort::ops {

Arg Arg::list(const ir::Shape& dims) {
  ArgList items;
  for (const ir::Dim& dim : dims) items.emplace_back(dim);
  return items;
}

Arg Arg::list(const std::vector<int64_t>& ints) {
  ArgList items;
  for (int64_t value : ints) items.emplace_back(value);
  return items;
}

Arg Arg::values(const std::vector<ir::Value*>& values) {
  ArgList items;
  for (ir::Value* value : values) items.emplace_back(value);
  return items;
}

ir::Value* CallList::temporary(ir::Type type) {
  ir::Value& value = temporaries.emplace_back();
  value.name = concat("temporary_", temporaries.size());
  value.type = std::move(type);
  return &value;
}

void CallList::add(std::string op, std::string overload, ArgList args,
                   std::vector<ir::Value*> outputs) {
  calls.push_back(
      {std::move(op), std::move(overload), std::move(args), std::move(outputs), nullptr});
}

}  // namespace torch_ort::ops
