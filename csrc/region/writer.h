// A way to the kernels of regions beside that of a device's generator, such as texts in another
// language that Python writes.
#pragma once

#include "region/codegen.h"

#include <memory>
#include <vector>

namespace torch_ort::region {

// Those of one graph. Called by several threads at once.
class RegionWriter {
 public:
  virtual ~RegionWriter() = default;
  // Compiles a region as Codegen::compile does. nullptr: the generator shall compile it.
  virtual std::unique_ptr<const Kernel> compile(const Schedule& schedule,
                                                const ir::SymbolLookup& lookup,
                                                const std::vector<Layout>& inputs,
                                                const std::vector<Layout>& outputs,
                                                const ir::Device& device,
                                                const CodegenOptions& options) const = 0;
};

}  // namespace torch_ort::region
