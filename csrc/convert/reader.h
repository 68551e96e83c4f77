// Builds a graph from a program told call by call. Readers of FX graphs (and later of TorchScript)
// use it; values are known by the names that the program gives them.
#pragma once

#include "convert/convert.h"

#include <memory>
#include <string>
#include <unordered_map>
#include <vector>

namespace torch_ort::convert {

class Reader {
 public:
  // `max_opset`: the newest standard opset whose ops may be used.
  Reader(std::string name, int max_opset);
  // Reads a body of an If or a Loop: the values of `outer`, which has to live on, may be named in
  // it.
  Reader(Reader& outer, std::string name);

  void add_input(const std::string& name, ir::Type type);
  // A tensor that the program holds; its data is bound when it is compiled.
  void add_constant(const std::string& name, ir::Type type);
  void add_symbol_input(const std::string& name);
  // The value of a symbol in the call that is captured.
  void add_size_hint(const std::string& symbol, int64_t value);
  // `call.args` refer to values through value(); `names` are those of the results, "" where nothing
  // reads one.
  void add_call(AtenCall call, const std::vector<std::string>& names);
  // Another name for a value.
  void add_alias(const std::string& name, const std::string& of);
  // A row-major copy that a later call may write into: marked as an effect, so that no pass takes
  // two of them for one.
  void add_private_clone(const std::string& of, const std::string& name, ir::Type type);
  // An If or a Loop, whose bodies have been read; `call` tells inputs, results and where it stands.
  void add_control_flow(const AtenCall& call, const std::vector<std::string>& names,
                        const std::vector<std::pair<std::string, Reader*>>& bodies);
  // The border. Names of the module's outputs, and of their gradients with types.
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
  std::unordered_map<const ir::Value*, ir::Value*> captured_;  // by the value of `outer`
};

}  // namespace torch_ort::convert
