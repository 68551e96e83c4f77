#include "cuda/casts.h"

#include "base/error.h"
#include "cuda/build.h"
#include "cuda/driver.h"
#include "cuda/faults.h"
#include "cuda/stream.h"
#include "cuda/text.h"
#include "region/bound_schedule.h"

#include <algorithm>
#include <array>
#include <cstdint>
#include <optional>

namespace torch_ort::cuda {

namespace {

using ir::DType;
using region::Layout;

constexpr int64_t kVectorBytes = 16, kThreads = 256;
constexpr int64_t kChunk = 16384;  // elements that a block casts
// As many tensors as fit into the parameters of a kernel, which have 4 KiB on all GPUs.
constexpr size_t kMostTensors = 128;

// The parameter of the kernel. The text below has the same struct.
struct Table {
  std::array<const void*, kMostTensors> from;
  std::array<void*, kMostTensors> to;
  std::array<int64_t, kMostTensors> counts;  // in elements
  std::array<uint32_t, kMostTensors> ends;   // blocks of this tensor and of all before it
};
static_assert(sizeof(Table) + 2 * sizeof(int64_t) <= 4096);

constexpr const char* kCode = R"(
enum { kMostTensors = 128, kChunk = 16384 };
struct Table {
  const From* from[kMostTensors];
  To* to[kMostTensors];
  i64 counts[kMostTensors];
  u32 ends[kMostTensors];  // the number of blocks of this tensor and of all before it
};
// A block casts one chunk of one tensor.
extern "C" __global__ void __launch_bounds__(256)
@NAME@(const Table table, int num_tensors) {
  int tensor = 0, most = num_tensors - 1;
  while (tensor < most) {
    const int middle = (tensor + most) / 2;
    if (blockIdx.x < table.ends[middle]) {
      most = middle;
    } else {
      tensor = middle + 1;
    }
  }
  const u32 first = tensor == 0 ? 0 : table.ends[tensor - 1];
  const i64 begin = i64(blockIdx.x - first) * kChunk;
  const i64 left = table.counts[tensor] - begin;
  const int count = left < kChunk ? int(left) : int(kChunk);
  const From* from = table.from[tensor] + begin;
  To* to = table.to[tensor] + begin;
  ASSUME_GLOBAL(from);
  ASSUME_GLOBAL(to);
  if ((u64(from) | u64(to)) % 16 == 0) {
    for (int i = int(threadIdx.x) * V; i < count; i += int(blockDim.x) * V) {
      Pack<From, V> x;
      load(x, from + i, count - i);
      Pack<To, V> y;
#pragma unroll
      for (int j = 0; j < V; ++j) y.at[j] = narrow<To>(x[j]);
      store(to + i, y, count - i);
    }
  } else {
    for (int i = int(threadIdx.x); i < count; i += int(blockDim.x)) {
      to[i] = narrow<To>(widen(from[i]));
    }
  }
}
)";

void check_is_dense(const Layout& layout) {
  int64_t stride = 1;
  for (size_t i = layout.sizes.size(); i-- > 0;) {
    if (layout.sizes[i] != 1 && layout.strides[i] != stride) {
      throw Unsupported(
          "Casts: strides of a tensor: got gaps or another order of dims, want row-major");
    }
    stride *= layout.sizes[i];
  }
}

class CastsKernel final : public region::Kernel {
 public:
  CastsKernel(const std::vector<Layout>& inputs, const std::vector<Layout>& outputs,
              const region::CodegenOptions& options)
      : options_(options), text_(write_casts(inputs.at(0).dtype, outputs.at(0).dtype)) {
    if (inputs.size() != outputs.size()) {
      throw InternalError(concat("Casts: got ", outputs.size(), " results, want ", inputs.size()));
    }
    for (size_t i = 0; i < inputs.size(); ++i) {
      const bool fits = inputs[i].dtype == inputs[0].dtype &&
                        outputs[i].dtype == outputs[0].dtype && inputs[i].sizes == outputs[i].sizes;
      if (!fits)
        throw InternalError(
            concat("Casts: result ", i, ": want the sizes of its input and one dtype for all"));
      check_is_dense(inputs[i]);
      check_is_dense(outputs[i]);
      counts_.push_back(region::num_elements(inputs[i]));
    }
    kernel_.emplace(build(text_.name, text_.text, {.dump_dir = options.dump_dir}, options.device),
                    text_.name);
  }

  void run(const void* const* inputs, void* const* outputs) const override {
    faults(options_.device).check();
    Table table;
    int num_tensors = 0;
    uint32_t num_blocks = 0;
    const auto start = [&] {
      if (num_tensors > 0) launch(table, num_tensors, num_blocks);
      num_tensors = 0;
      num_blocks = 0;
    };
    for (size_t i = 0; i < counts_.size(); ++i) {
      if (counts_[i] == 0) continue;
      table.from[num_tensors] = inputs[i];
      table.to[num_tensors] = outputs[i];
      table.counts[num_tensors] = counts_[i];
      num_blocks += static_cast<uint32_t>((counts_[i] + kChunk - 1) / kChunk);
      table.ends[num_tensors] = num_blocks;
      if (++num_tensors == static_cast<int>(kMostTensors)) start();
    }
    start();
    if (!options_.synchronize) return;
    Driver::get().synchronize(options_.device, current_stream(options_.device), text_.name);
  }

  std::string str() const override { return text_.text.substr(text_.text.find("enum {")); }

 private:
  void launch(Table& table, int num_tensors, uint32_t num_blocks) const {
    std::array<void*, 2> arguments = {&table, &num_tensors};
    const Launch launch{.grid = {num_blocks},
                        .block = {static_cast<uint32_t>(kThreads)},
                        .stream = current_stream(options_.device)};
    Driver::get().launch(kernel_->get(), launch, arguments.data());
  }

  region::CodegenOptions options_;
  CastsText text_;
  std::vector<int64_t> counts_;
  std::optional<KernelOfModule> kernel_;
};

}  // namespace

CastsText write_casts(DType from, DType to) {
  for (DType dtype : {from, to}) {
    if (!ir::is_float(dtype)) {
      throw InternalError(concat("Casts: got ", ir::name(dtype), ", want floats"));
    }
  }
  const bool is_double = from == DType::kDouble || to == DType::kDouble;
  const int64_t vector = kVectorBytes / std::min(ir::size_bytes(from), ir::size_bytes(to));
  std::string code = kCode;
  const std::string name = concat("casts_", element(from), "_", element(to));
  const std::string place = "@NAME@";
  code.replace(code.find(place), place.size(), name);
  return {
      .name = name,
      .text = concat(type_head(is_double), prelude(), "\ntypedef ", element(from),
                     " From;\ntypedef ", element(to), " To;\nenum { V = ", vector, " };", code)};
}

std::unique_ptr<const region::Kernel> make_casts(const region::BoundNode& bound) {
  return std::make_unique<CastsKernel>(bound.inputs, bound.outputs, bound.options);
}

}  // namespace torch_ort::cuda
