// The operators of the device run the kernels of the CPU over its memory. An operator is there if
// the CPU has a kernel of its own: what is composed of others is composed of those of the device,
// as on a GPU.
#include "kernels.h"

#include "cpu_view.h"
#include "generator.h"
#include "graphs.h"
#include "memory.h"
#include <ATen/CPUGeneratorImpl.h>
#include <ATen/EmptyTensor.h>
#include <ATen/Tensor.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <torch/library.h>

#include <cstring>
#include <map>
#include <mutex>
#include <set>

namespace emulated {
namespace {

using c10::Device, c10::DeviceType, c10::DispatchKey, c10::IValue, c10::OperatorHandle;
using torch::jit::Stack;

const Device kCpu(DeviceType::CPU);
const c10::DispatchKeySet kCpuKeys(DispatchKey::CPU);
const c10::DispatchKeySet kDeviceKeys(DispatchKey::CUDA);

struct Calls {
  std::mutex mutex;
  std::map<std::string, int64_t> by_operator;
};
Calls& calls() {
  static auto* each = new Calls;
  return *each;
}

std::string full_name(const OperatorHandle& op) { return toString(op.operator_name()); }

// --- what the device refuses ---------------------------------------------------------------------

// Operators whose arguments may lie on both devices.
bool takes_both(const OperatorHandle& op) {
  static const std::set<std::string> names = {
      "aten::copy_",
      "aten::_copy_from",
      "aten::index_put_",
      "aten::index",
      "aten::_index_put_impl_",
      "aten::_unsafe_index",
      "aten::_unsafe_index_put",
      "aten::_ctc_loss",
      "aten::_ctc_loss_backward",
  };
  return names.contains(op.schema().name());
}

// A number in a tensor of the CPU goes to a point-wise kernel as a number.
bool takes_numbers(const OperatorHandle& op) {
  const std::string& name = op.schema().name();
  if (op.hasTag(at::Tag::pointwise)) return true;
  for (const char* family :
       {"aten::_foreach_", "aten::index_fill", "aten::fill", "aten::masked_fill"}) {
    if (name.starts_with(family)) return true;
  }
  return false;
}

template <typename F>
void each_tensor(const IValue& value, F f) {
  if (value.isTensor()) {
    f(value.toTensor());
  } else if (value.isTensorList()) {
    for (const at::Tensor& each : value.toTensorVector()) f(each);
  } else if (value.isOptionalTensorList()) {
    for (const auto& each : value.toOptionalTensorVector()) {
      if (each) f(*each);
    }
  }
}

void check_devices(const OperatorHandle& op, const Stack& stack, size_t first) {
  if (takes_both(op)) return;
  const bool numbers = takes_numbers(op);
  bool on_device = false, on_cpu = false;
  for (size_t i = first; i < stack.size(); ++i) {
    each_tensor(stack[i], [&](const at::Tensor& tensor) {
      if (!tensor.defined()) return;
      on_device |= tensor.is_cuda();
      const bool is_number =
          tensor.dim() == 0 && (numbers || tensor.unsafeGetTensorImpl()->is_wrapped_number());
      on_cpu |= tensor.is_cpu() && !is_number;
    });
  }
  TORCH_CHECK(!(on_device && on_cpu),
              "Expected all tensors to be on the same device, but found at least two devices, "
              "cuda:0 and cpu! (when checking arguments of ",
              op.schema().name(), ")");
}

// --- how it runs ---------------------------------------------------------------------------------

template <typename F>
IValue map_tensors(const IValue& value, F f) {
  if (value.isTensor()) return f(value.toTensor());
  if (value.isTensorList()) {
    c10::List<at::Tensor> list;
    for (const at::Tensor& each : value.toTensorVector()) list.push_back(f(each));
    return list;
  }
  if (value.isOptionalTensorList()) {
    c10::List<std::optional<at::Tensor>> list;
    for (const auto& each : value.toOptionalTensorVector()) {
      list.push_back(each ? std::optional<at::Tensor>(f(*each)) : std::nullopt);
    }
    return list;
  }
  return value;
}

// Sizes that a trace has made symbols of, as the kernels of a GPU ask for them too.
IValue as_numbers(const IValue& value) {
  if (value.isSymInt()) return value.toSymInt().guard_int(__FILE__, __LINE__);
  if (!value.isSymIntList()) return value;
  c10::List<int64_t> numbers;
  for (const c10::SymInt& each : value.toSymIntVector()) {
    numbers.push_back(each.guard_int(__FILE__, __LINE__));
  }
  return numbers;
}

// Convolutions without cuDNN know one layout on a GPU, and the CPU's follow their arguments.
bool gives_row_major(const OperatorHandle& op) {
  const std::string name = full_name(op);
  return name == "aten::_slow_conv2d_forward" ||
         name == "aten::_slow_conv2d_backward.output_mask" ||
         name == "aten::slow_conv_transpose2d" || name == "aten::slow_conv_dilated2d";
}

// oneDNN's products of bfloat16 read pairs. Of a row of odd length on a processor with AMX they
// read what lies behind it, and multiply it with zero; libraries of a GPU leave it alone.
bool reads_behind_rows(const OperatorHandle& op) {
  static const std::set<std::string> products = {"aten::mm", "aten::addmm", "aten::bmm",
                                                 "aten::baddbmm"};
  return products.contains(op.schema().name());
}

bool is_written(const OperatorHandle& op, size_t argument) {
  const auto* alias = op.schema().arguments()[argument].alias_info();
  return alias != nullptr && alias->isWrite();
}

bool has_gaps(const at::Tensor& tensor) {
  return tensor.defined() && tensor.scalar_type() == at::kBFloat16 &&
         !tensor.is_non_overlapping_and_dense();
}

bool same_state(const at::Tensor& a, const at::Tensor& b) {
  return a.nbytes() == b.nbytes() &&
         std::memcmp(a.const_data_ptr(), b.const_data_ptr(), a.nbytes()) == 0;
}

// While it lives, the CPU's default generator gives a stream of the device's.
class DeviceRandom {
 public:
  DeviceRandom() : lock_(mutex()), cpu_(at::detail::getDefaultCPUGenerator()) {
    std::lock_guard lock(cpu_.mutex());
    before_ = cpu_.get_state();
    cpu_.set_current_seed(next_stream(default_generator()));
    seeded_ = cpu_.get_state();
  }
  ~DeviceRandom() {
    std::lock_guard lock(cpu_.mutex());
    if (same_state(cpu_.get_state(), seeded_)) give_back(default_generator());
    cpu_.set_state(before_);
  }

 private:
  static std::mutex& mutex() {
    static std::mutex each;
    return each;
  }
  std::lock_guard<std::mutex> lock_;
  at::Generator cpu_;
  at::Tensor before_, seeded_;
};

void run_now(const OperatorHandle& op, Stack* stack) {
  const size_t first = stack->size() - op.schema().arguments().size();
  check_devices(op, *stack, first);
  {
    std::lock_guard lock(calls().mutex);
    ++calls().by_operator[full_name(op)];
  }

  CpuView view;
  const bool row_major = gives_row_major(op), closes_gaps = reads_behind_rows(op);
  bool has_generator = false;
  for (size_t i = first; i < stack->size(); ++i) {
    IValue& value = (*stack)[i];
    if (value.isDevice()) {
      if (value.toDevice().is_cuda()) value = kCpu;
    } else if (value.isGenerator()) {
      at::Generator generator = value.toGenerator();
      TORCH_CHECK(generator.device().is_cuda(),
                  "Expected a 'cuda' device type for generator but found 'cpu'");
      value = at::detail::createCPUGenerator(next_stream(generator));
      has_generator = true;
    } else {
      const bool is_read = closes_gaps && !is_written(op, i - first);
      value = map_tensors(as_numbers(value), [&](const at::Tensor& tensor) {
        const bool copies = (row_major && tensor.defined()) || (is_read && has_gaps(tensor));
        return view.to_cpu(copies ? tensor.contiguous() : tensor);
      });
    }
  }
  {
    std::optional<DeviceRandom> random;
    if (!has_generator && op.hasTag(at::Tag::nondeterministic_seeded)) random.emplace();
    op.redispatchBoxed(kCpuKeys, stack);
  }
  view.carry_back();
  for (size_t i = stack->size() - op.schema().returns().size(); i < stack->size(); ++i) {
    (*stack)[i] = map_tensors((*stack)[i], [&](const at::Tensor& tensor) {
      const at::Tensor result = view.to_device(tensor);
      return row_major && result.defined() ? result.contiguous() : result;
    });
  }
}

// The tensors that come back share memory with arguments, or are new.
void run_and_record(const OperatorHandle& op, Stack* stack) {
  const size_t first = stack->size() - op.schema().arguments().size();
  check_capture(op, *stack, first);
  const Stack given(stack->begin() + static_cast<std::ptrdiff_t>(first), stack->end());
  run_now(op, stack);
  // Kernels may have given an `out` argument memory, at whose address a replay writes.
  Unowned unowned;
  const auto of = [&](const at::Tensor& tensor) { return unowned.of(tensor); };
  Stack arguments;
  for (const IValue& each : given) arguments.push_back(map_tensors(each, of));
  std::vector<at::Tensor> made;
  const auto list_made = [&](const at::Tensor& tensor) {
    const bool is_new = tensor.defined() && tensor.is_cuda() && !unowned.has(tensor);
    made.push_back(is_new ? Unowned().of(tensor) : at::Tensor());
  };
  for (size_t i = stack->size() - op.schema().returns().size(); i < stack->size(); ++i) {
    each_tensor((*stack)[i], list_made);
  }
  record([op, arguments, made] {
    Stack again = arguments;
    run_now(op, &again);
    auto to = made.begin();
    for (const IValue& result : again) {
      each_tensor(result, [&](const at::Tensor& tensor) {
        if (to->defined()) copy_bytes(tensor, *to);
        ++to;
      });
    }
  });
}

void run_on_cpu(const OperatorHandle& op, c10::DispatchKeySet, Stack* stack) {
  if (is_recording()) return run_and_record(op, stack);
  run_now(op, stack);
}

// --- memory --------------------------------------------------------------------------------------

void check_options(std::optional<at::Layout> layout, std::optional<Device> device,
                   std::optional<bool> pinned) {
  TORCH_CHECK(layout.value_or(at::kStrided) == at::kStrided, "emulated device: no sparse tensors");
  TORCH_CHECK(!device || device->index() <= 0, "CUDA error: invalid device ordinal");
  TORCH_CHECK(!pinned.value_or(false), "Only dense CPU tensors can be pinned");
}

at::Tensor empty(c10::SymIntArrayRef size, std::optional<at::ScalarType> dtype,
                 std::optional<at::Layout> layout, std::optional<Device> device,
                 std::optional<bool> pinned, std::optional<at::MemoryFormat> format) {
  check_options(layout, device, pinned);
  return at::detail::empty_generic(C10_AS_INTARRAYREF_SLOW(size), &allocator(), kDeviceKeys,
                                   c10::dtype_or_default(dtype), format);
}

at::Tensor empty_strided(c10::SymIntArrayRef size, c10::SymIntArrayRef stride,
                         std::optional<at::ScalarType> dtype, std::optional<at::Layout> layout,
                         std::optional<Device> device, std::optional<bool> pinned) {
  check_options(layout, device, pinned);
  return at::detail::empty_strided_generic(C10_AS_INTARRAYREF_SLOW(size),
                                           C10_AS_INTARRAYREF_SLOW(stride), &allocator(),
                                           kDeviceKeys, c10::dtype_or_default(dtype));
}

at::Tensor& set_storage(at::Tensor& self, at::Storage source, c10::SymInt offset,
                        c10::SymIntArrayRef size, c10::SymIntArrayRef stride) {
  TORCH_CHECK(source.device() == self.device(),
              "Attempted to set the storage of a tensor on device \"", self.device(),
              "\" to a storage on different device \"", source.device(), "\".");
  c10::TensorImpl* impl = self.unsafeGetTensorImpl();
  impl->set_storage_keep_dtype(std::move(source));
  impl->set_storage_offset(offset.expect_int());
  impl->set_sizes_and_strides(C10_AS_INTARRAYREF_SLOW(size), C10_AS_INTARRAYREF_SLOW(stride));
  return self;
}

at::Tensor& set_whole_storage(at::Tensor& self, at::Storage source) {
  const auto size = static_cast<int64_t>(source.nbytes() / self.itemsize());
  return set_storage(self, std::move(source), 0, c10::SymIntArrayRef{size}, c10::SymIntArrayRef{1});
}

at::Tensor& set_tensor(at::Tensor& self, const at::Tensor& source) {
  return set_storage(self, source.storage(), source.storage_offset(), source.sym_sizes(),
                     source.sym_strides());
}

at::Tensor& set_nothing(at::Tensor& self) {
  const c10::Storage none(c10::Storage::use_byte_size_t(), 0, allocator().allocate(0), &allocator(),
                          /*resizable=*/true);
  return set_storage(self, none, 0, c10::SymIntArrayRef{0}, c10::SymIntArrayRef{1});
}

// Zeros without memory, which the key beside the device's stands for.
at::Tensor zeros_without_memory(c10::SymIntArrayRef size, std::optional<at::ScalarType> dtype,
                                std::optional<at::Layout> layout, std::optional<Device> device,
                                std::optional<bool> pinned) {
  check_options(layout, device, pinned);
  struct Nothing final : c10::Allocator {
    c10::DataPtr allocate(size_t) override { return {nullptr, Device(DeviceType::CUDA, 0)}; }
    void copy_data(void*, const void*, size_t) const override {}
  };
  static Nothing nothing;
  return at::detail::empty_generic(C10_AS_INTARRAYREF_SLOW(size), &nothing,
                                   kDeviceKeys.add(DispatchKey::ZeroTensor),
                                   c10::dtype_or_default(dtype), std::nullopt);
}

// Kernels that a GPU does not have: those of the CPU's libraries.
bool is_of_the_cpu_alone(const std::string& name) {
  for (const char* word : {"mkldnn", "_for_cpu", "nnpack", "fbgemm", "_cpu"}) {
    if (name.find(word) != std::string::npos) return true;
  }
  return false;
}

// Composed operators that look for a kernel of the device in a table of theirs.
bool asks_for_a_kernel(const std::string& name) { return name == "aten::copy_"; }

}  // namespace

std::string calls_by_operator() {
  std::lock_guard lock(calls().mutex);
  std::string text;
  for (const auto& [name, count] : calls().by_operator) {
    text += name + " " + std::to_string(count) + "\n";
  }
  return text;
}

TORCH_LIBRARY_IMPL(aten, CUDA, library) {
  library.impl("empty.memory_format", &empty);
  library.impl("empty_strided", &empty_strided);
  library.impl("set_.source_Storage_storage_offset", &set_storage);
  library.impl("set_.source_Storage", &set_whole_storage);
  library.impl("set_.source_Tensor", &set_tensor);
  library.impl("set_", &set_nothing);
  library.impl("_efficientzerotensor", &zeros_without_memory);
  register_gpu_kernels(library);
  register_attention(library);

  for (const c10::OperatorName& name : c10::Dispatcher::singleton().getAllOpNames()) {
    const std::string full = toString(name);
    if (!full.starts_with("aten::") || is_of_the_cpu_alone(full)) continue;
    const std::optional<OperatorHandle> op = c10::Dispatcher::singleton().findSchema(name);
    if (!op || op->hasKernelForDispatchKey(DispatchKey::CUDA)) continue;
    if (!op->hasKernelForDispatchKey(DispatchKey::CPU) && !asks_for_a_kernel(full)) continue;
    library.impl(full.c_str(), torch::CppFunction::makeFromBoxedFunction<&run_on_cpu>());
  }
}

}  // namespace emulated

// The text lives until the next call.
extern "C" __attribute__((visibility("default"))) const char* emulated_calls() {
  static std::string text;
  text = emulated::calls_by_operator();
  return text.c_str();
}
