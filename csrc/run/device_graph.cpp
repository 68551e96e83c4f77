#include "run/device_graph.h"

#include <utility>

namespace torch_ort::run {

namespace {

// Never destroyed, because graphs may be dropped while the process ends.
const DeviceGraphs* registered = nullptr;

}  // namespace

const DeviceGraphs* device_graphs() { return registered; }

void set_device_graphs(std::unique_ptr<const DeviceGraphs> graphs) {
  registered = graphs.release();
}

}  // namespace torch_ort::run
