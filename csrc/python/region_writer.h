// Kernels of regions that Python writes and starts.
#pragma once

#include "region/writer.h"

#include <pybind11/pybind11.h>

#include <memory>

namespace torch_ort::python {

// Calls `write(body)` for each region, with a dict that describes the body (cuda/body.h) for one
// set of sizes. It returns None, or an object with a `text` and a method run(inputs, outputs,
// faults, device), which gets the addresses of first elements and of the word for errors
// (cuda/faults.h).
std::shared_ptr<const region::RegionWriter> region_writer(pybind11::object write);
// The function of a writer; None for nullptr.
pybind11::object function_of(const region::RegionWriter* writer);

}  // namespace torch_ort::python
