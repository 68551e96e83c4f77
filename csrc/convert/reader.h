// Builds a graph from a captured program, one call at a time. The program refers to its values by
// name.
#pragma once

#include "convert/convert.h"

#include <memory>
#include <string>
#include <unordered_map>
#include <vector>

namespace torch_ort::convert {

class Reader {
 public:
  // `max_opset` is the newest standard opset whose ops may be used.
  Reader(std::string name, int max_opset);
  // Reads the body of an If or a Loop. The body may name values of `outer`, which has to outlive
  // this reader.
  Reader(Reader& outer, std::string name);

  void add_input(const std::string& name, ir::Type type);
  // A tensor that the program holds. Its data is bound when the graph is compiled.
  void add_constant(const std::string& name, ir::Type type);
  void add_symbol_input(const std::string& name);
  // The value of a symbol in the call that is captured.
  void add_size_hint(const std::string& symbol, int64_t value);
  // `call.args` refer to values that value() returned. `names` are the names of the results, "" for
  // unused ones.
  void add_call(AtenCall call, const std::vector<std::string>& names);
  // Gives a value another name.
  void add_alias(const std::string& name, const std::string& of);
  // A row-major copy of `of` that a later call may write into. It is marked as having an effect, so
  // that no pass merges two such copies.
  void add_private_clone(const std::string& of, const std::string& name, ir::Type type);
  // Adds an If or a Loop whose bodies have been read. `call` has its inputs, result types and
  // origin.
  void add_control_flow(const AtenCall& call, const std::vector<std::string>& names,
                        const std::vector<std::pair<std::string, Reader*>>& bodies);
  // Adds the YieldOp, the border between the halves: the names of the module's outputs, and the
  // names and types of their gradients.
  void add_yield(const std::vector<std::string>& outputs,
                 const std::vector<std::pair<std::string, ir::Type>>& tangents);
  void set_outputs(const std::vector<std::string>& names);
  ir::Value* value(const std::string& name);  // InternalError if there is none

  std::unique_ptr<ir::Graph> take();

 private:
  ir::Value* find(const std::string& name);

  Reader* outer_ = nullptr;
  std::unique_ptr<ir::Graph> graph_;
  Builder builder_;
  std::unordered_map<std::string, ir::Value*> values_;
  std::unordered_map<const ir::Value*, ir::Value*> captured_;  // by the value of `outer_`
};

}  // namespace torch_ort::convert
