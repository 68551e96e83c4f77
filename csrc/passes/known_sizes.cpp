#include "passes/known_sizes.h"

#include "region/codegen.h"

#include <algorithm>

namespace torch_ort::passes {

using ir::Dim;
using ir::Shape;
using ir::Value;

KnownSizes::KnownSizes(const ir::Graph& graph)
    : symbols_(graph.symbol_inputs.begin(), graph.symbol_inputs.end()) {
  for (const Value* input : graph.inputs) {
    if (!input->type.shape) continue;
    for (const Dim& dim : *input->type.shape) {
      if (dim.is_symbol()) symbols_.insert(dim.name());
    }
  }
}

bool KnownSizes::are_known(const Value& value) const {
  const Shape& shape = *value.type.shape;
  return std::all_of(shape.begin(), shape.end(), [this](const Dim& dim) { return is_known(dim); });
}

bool KnownSizes::is_known(const Dim& dim) const {
  std::vector<std::string> symbols;
  dim.collect_symbols(symbols);
  return std::all_of(symbols.begin(), symbols.end(),
                     [this](const std::string& name) { return symbols_.contains(name); });
}

std::optional<int64_t> hinted_size(const ir::Graph& graph, const Dim& dim) {
  return dim.evaluate([&graph](const std::string& symbol) -> std::optional<int64_t> {
    const auto found = graph.size_hints.find(symbol);
    return found == graph.size_hints.end() ? std::nullopt : std::optional(found->second);
  });
}

bool is_fusible_float(const Value* value) {
  return region::takes(value) && ir::is_float(value->type.dtype);
}

}  // namespace torch_ort::passes
