#include "run/device_graph.h"

#include <atomic>

namespace torch_ort::run {

namespace {

// Never destroyed, because graphs may be dropped while the process ends.
std::atomic<const DeviceGraphs*> registered = nullptr;

}  // namespace

const DeviceGraphs* device_graphs() { return registered; }

void set_device_graphs(std::unique_ptr<const DeviceGraphs> graphs) {
  registered = graphs.release();
}

}  // namespace torch_ort::run
