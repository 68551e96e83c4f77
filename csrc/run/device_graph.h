// What a device repeats by one call: a CUDA graph. PyTorch captures it, because its kernels are in
// it as well, its allocator gives the memory, and its generators have to count the numbers that are
// drawn. All of that is Python's, so python/ registers how it is done.
#pragma once

#include <c10/core/Device.h>

#include <functional>
#include <memory>
#include <string>

namespace torch_ort::run {

class DeviceGraph {
 public:
  virtual ~DeviceGraph() = default;
  // Queues all of it on the current stream. Throws IndexError if kernels have found a label or an
  // id out of bounds since the last call.
  virtual void replay() const = 0;
};

class DeviceGraphs {
 public:
  virtual ~DeviceGraphs() = default;
  // Why there are none; empty if there are.
  virtual std::string missing() const = 0;
  // Whether somebody captures the current stream of the device.
  virtual bool is_capturing(c10::DeviceIndex device) const = 0;
  // Captures what `queue` queues on the current stream; it does not run. Memory that is allocated
  // meanwhile belongs to the graph: nobody else gets it before the graph and the tensors in it are
  // gone. Throws what `queue` throws, and what PyTorch throws if the capture cannot be used.
  virtual std::unique_ptr<const DeviceGraph> capture(c10::DeviceIndex device,
                                                     const std::function<void()>& queue) const = 0;
};

// Those of CUDA; nullptr before anybody has registered them.
const DeviceGraphs* device_graphs();
void set_device_graphs(std::unique_ptr<const DeviceGraphs> graphs);

}  // namespace torch_ort::run
