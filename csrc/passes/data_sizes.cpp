#include "passes/data_sizes.h"

#include "ops/control_flow.h"

#include <cctype>

namespace torch_ort::passes {

using ir::Node;
using Symbols = std::unordered_set<std::string>;

namespace {

// In a graph that was read from a file, sizes of attributes are texts (ir/attr.h). Any word of them
// may be a symbol.
void collect_words(std::string_view text, Symbols& symbols) {
  std::string word;
  const auto end_word = [&] {
    if (!word.empty() && std::isdigit(static_cast<unsigned char>(word[0])) == 0) {
      symbols.insert(word);
    }
    word.clear();
  };
  for (const char letter : text) {
    if (letter == '_' || std::isalnum(static_cast<unsigned char>(letter)) != 0) {
      word += letter;
    } else {
      end_word();
    }
  }
  end_word();
}

// The symbols that a node mentions, and maybe other words.
Symbols mentioned_by(const Node& node) {
  Symbols symbols = ops::symbols_of(node);
  for (const auto& [name, attr] : node.attrs) {
    if (auto* text = std::get_if<std::string>(&attr)) collect_words(*text, symbols);
    if (auto* texts = std::get_if<std::vector<std::string>>(&attr)) {
      for (const std::string& text : *texts) collect_words(text, symbols);
    }
  }
  return symbols;
}

}  // namespace

DataSizes::DataSizes(const ir::Graph& graph) {
  Symbols given(graph.symbol_inputs.begin(), graph.symbol_inputs.end());
  for (const ir::Value* input : graph.inputs) ops::collect_symbols(input->type, given);
  for (const Node& node : graph.nodes) {
    if (node.is_erased()) continue;
    Symbols symbols;
    for (const ir::Value* output : node.outputs) {
      if (output != nullptr) ops::collect_symbols(output->type, symbols);
    }
    if (ir::has_attr(node.attrs, "binds_symbol")) {
      symbols.insert(ir::string_attr(node.attrs, "binds_symbol", ""));
    }
    for (const std::string& symbol : symbols) {
      if (given.insert(symbol).second) giver_of_.emplace(symbol, &node);
    }
  }
  for (const auto& [symbol, node] : giver_of_) givers_.insert(node);
}

std::vector<const Node*> DataSizes::givers_for(const Node& node) const {
  if (giver_of_.empty()) return {};
  std::vector<const Node*> givers;
  for (const std::string& symbol : mentioned_by(node)) {
    const auto found = giver_of_.find(symbol);
    if (found != giver_of_.end() && found->second != &node) givers.push_back(found->second);
  }
  return givers;
}

}  // namespace torch_ort::passes
