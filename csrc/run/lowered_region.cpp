#include "run/lowered_region.h"

#include "base/error.h"
#include "region/lower.h"
#include "run/dtype.h"
#include "run/planned_graph.h"

#include <ATen/core/Tensor.h>
#include <ATen/ops/from_blob.h>

#include <algorithm>
#include <cmath>
#include <optional>
#include <utility>

namespace torch_ort::run {

namespace {

using ir::DType;
using region::Kernel;
using region::Layout;
using Tensors = PlannedGraph::Tensors;

// The dtype in which kernels compute narrower numbers; kUndefined means in their own dtype.
DType kernel_precision(const region::CodegenOptions& options) {
  return options.round_short_floats ? DType::kUndefined : DType::kFloat;
}

// Runs the nodes of the region, for the sizes of one binding.
class Lowered {
 public:
  Lowered(const BoundRegion& region, DType precision)
      : device_(torch_device(region.node.inputs.at(0)->type.device)), layouts_(region.inputs) {
    std::unique_ptr<ir::Graph> graph = region::lower(region.node, precision);
    for (const std::string& name : graph->symbol_inputs) {
      const std::optional<int64_t> value = region.lookup(name);
      ORT_CHECK(value, "Region '", region.node.name, "': symbol '", name, "' has no value");
      symbols_.push_back(*value);
    }
    SessionOptions options;
    options.regions = region.options;
    graph_ = std::make_unique<PlannedGraph>(std::move(graph), Constants(), options);
  }

  Tensors run(const void* const* inputs) const {
    Tensors tensors;
    for (size_t i = 0; i < layouts_.size(); ++i) {
      tensors.push_back(tensor(const_cast<void*>(inputs[i]), layouts_[i]));
    }
    return graph_->run(tensors, symbols_);
  }

  at::Tensor tensor(void* data, const Layout& layout) const {
    const auto options = at::TensorOptions().dtype(scalar_type(layout.dtype)).device(device_);
    return at::from_blob(data, layout.sizes, layout.strides, options);
  }

  std::string str() const {
    std::string lines = "node by node\n";
    for (const ir::Node& node : graph_->compiled().graph->nodes)
      lines += concat("  ", node.op.str(), "\n");
    return lines;
  }

 private:
  c10::Device device_;
  std::vector<Layout> layouts_;
  std::vector<int64_t> symbols_;
  std::unique_ptr<PlannedGraph> graph_;
};

class LoweredKernel final : public Kernel {
 public:
  explicit LoweredKernel(const BoundRegion& region)
      : lowered_(region, kernel_precision(region.options)), outputs_(region.outputs) {}

  void run(const void* const* inputs, void* const* outputs) const override {
    const Tensors results = lowered_.run(inputs);
    for (size_t i = 0; i < outputs_.size(); ++i) {
      lowered_.tensor(outputs[i], outputs_[i]).copy_(results[i]);
    }
  }

  std::string str() const override { return lowered_.str(); }

 private:
  Lowered lowered_;
  std::vector<Layout> outputs_;
};

// The relative error that rounding to `dtype` may cause, with some tolerance.
double rounding(DType dtype) {
  switch (dtype) {
    case DType::kBFloat16: return 0x1p-7;
    case DType::kHalf: return 0x1p-10;
    case DType::kFloat: return 0x1p-18;
    default: return 0x1p-40;
  }
}

std::string text(c10::IntArrayRef sizes, int64_t element) {
  std::string place;
  for (auto size = sizes.rbegin(); size != sizes.rend(); ++size) {
    place = concat(element % *size, place.empty() ? "" : ", ", place);
    element /= *size;
  }
  return concat("[", place, "]");
}

// The elements of a result that are wrong.
struct Difference {
  // How many, and the position in row-major order of the one with the largest error.
  int64_t count = 0, worst = 0;
  double off = 0;  // its error
};

// Compares a result with `rounded` and `exact`, which the same operands give in two precisions.
Difference find_difference(const double* got, const double* rounded, const double* exact,
                           int64_t count, DType dtype) {
  double lost = 0, largest = 0;
  for (int64_t i = 0; i < count; ++i) {
    if (!std::isfinite(exact[i])) continue;
    largest = std::max(largest, std::abs(exact[i]));
    if (std::isfinite(rounded[i])) lost = std::max(lost, std::abs(rounded[i] - exact[i]));
  }
  const double allowed = 16 * lost + rounding(dtype) * largest;
  Difference difference;
  for (int64_t i = 0; i < count; ++i) {
    if (got[i] == exact[i] || got[i] == rounded[i]) continue;
    if (std::isnan(got[i]) && std::isnan(exact[i])) continue;
    // Near the largest number of the dtype, it depends on the precision whether a result is finite.
    if (std::isfinite(rounded[i]) != std::isfinite(exact[i])) continue;
    const double off = std::abs(got[i] - exact[i]);
    if (off <= allowed) continue;
    if (difference.count == 0 || !(off <= difference.off)) difference = {difference.count, i, off};
    ++difference.count;
  }
  return difference;
}

class CheckedKernel final : public Kernel {
 public:
  CheckedKernel(std::shared_ptr<const Kernel> kernel, const BoundRegion& region)
      : kernel_(std::move(kernel)),
        name_(region.node.name),
        origin_(region.node.origin),
        as_kernel_(region, kernel_precision(region.options)),
        in_double_(region, DType::kDouble),
        outputs_(region.outputs) {
    for (const ir::Value* output : region.node.outputs) names_.push_back(output->name);
  }

  // The kernel runs last, because it may overwrite an operand.
  void run(const void* const* inputs, void* const* outputs) const override {
    const Tensors near = as_kernel_.run(inputs), exact = in_double_.run(inputs);
    kernel_->run(inputs, outputs);
    for (size_t i = 0; i < outputs_.size(); ++i) {
      check(i, as_kernel_.tensor(outputs[i], outputs_[i]), near[i], exact[i]);
    }
  }

  std::string str() const override { return kernel_->str(); }

 private:
  // If the two sides of a comparison in the body are almost equal, different roundings may decide
  // it differently. So a few elements of a large result may be anything.
  static int64_t num_allowed(int64_t count) { return count / 10000; }

  void check(size_t output, const at::Tensor& result, const at::Tensor& near,
             const at::Tensor& exact) const {
    const auto numbers = [](const at::Tensor& tensor) {
      return tensor.to(at::kCPU, at::kDouble).contiguous();
    };
    const at::Tensor got = numbers(result), want = numbers(exact);
    const at::Tensor rounded = numbers(near.to(result.scalar_type()));
    const Difference difference =
        find_difference(got.const_data_ptr<double>(), rounded.const_data_ptr<double>(),
                        want.const_data_ptr<double>(), got.numel(), outputs_[output].dtype);
    if (difference.count <= num_allowed(got.numel())) return;
    const int64_t worst = difference.worst;
    throw InternalError(
        concat("check: region '", name_, "'", origin_.empty() ? "" : concat(" (", origin_, ")"),
               ": result '", names_[output], "': ", difference.count, " of ", got.numel(),
               " elements differ from its nodes run one by one; the worst, ",
               text(got.sizes(), worst), ": got ", got.const_data_ptr<double>()[worst], ", want ",
               want.const_data_ptr<double>()[worst]));
  }

  std::shared_ptr<const Kernel> kernel_;
  std::string name_, origin_;
  std::vector<std::string> names_;
  Lowered as_kernel_, in_double_;
  std::vector<Layout> outputs_;
};

}  // namespace

std::unique_ptr<const Kernel> make_lowered(const BoundRegion& region) {
  return std::make_unique<LoweredKernel>(region);
}

std::unique_ptr<const Kernel> make_checked(std::shared_ptr<const Kernel> kernel,
                                           const BoundRegion& region) {
  return std::make_unique<CheckedKernel>(std::move(kernel), region);
}

}  // namespace torch_ort::run
