#include "passes/integers.h"

#include "ir/edit.h"

namespace torch_ort::passes {

ir::Value* make_ints(ir::Graph& graph, const ir::Shape& dims, ir::Node* before) {
  const ir::Type type{.dtype = ir::DType::kInt64,
                      .shape = ir::Shape{static_cast<int64_t>(dims.size())}};
  if (!ir::is_constant(dims)) {
    const ir::OpId op{ir::kTorchOrtDomain, "Dims"};
    const ir::Attrs attrs = {{"dims", dims}};
    ir::Node& made = before == nullptr
                         ? ir::append(graph, op, {}, {type}, attrs, "dims")
                         : ir::insert_before(graph, *before, op, {}, {type}, attrs, "dims");
    return made.outputs[0];
  }
  std::vector<int64_t> numbers;
  for (const ir::Dim& dim : dims) numbers.push_back(dim.constant());
  return &ir::add_initializer(graph, "ints", type, ir::make_int64_data(numbers));
}

std::optional<int64_t> hinted_size(const ir::Graph& graph, const ir::Dim& dim) {
  return dim.evaluate([&graph](const std::string& symbol) -> std::optional<int64_t> {
    const auto found = graph.size_hints.find(symbol);
    return found == graph.size_hints.end() ? std::nullopt : std::optional(found->second);
  });
}

}  // namespace torch_ort::passes
