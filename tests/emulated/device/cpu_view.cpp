#include "cpu_view.h"

#include "driver.h"
#include "memory.h"
#include <ATen/Tensor.h>

#include <cstring>

namespace emulated {
namespace {

const c10::Device kCpu(c10::DeviceType::CPU);

void set_form(const at::Tensor& made, const at::Tensor& like) {
  c10::TensorImpl* impl = made.unsafeGetTensorImpl();
  impl->set_storage_offset(like.storage_offset());
  impl->set_sizes_and_strides(like.sizes(), like.strides());
  if (like.unsafeGetTensorImpl()->is_wrapped_number()) impl->set_wrapped_number(true);
  if (like.is_conj()) made._set_conj(true);
  if (like.is_neg()) made._set_neg(true);
}

// A tensor of the form of `like`, of other memory and for another dispatch key.
at::Tensor make_like(const at::Tensor& like, c10::Storage storage, c10::DispatchKey key) {
  at::Tensor made = at::detail::make_tensor<c10::TensorImpl>(
      std::move(storage), c10::DispatchKeySet(key), like.dtype());
  set_form(made, like);
  return made;
}

// The same in the memory of `base`. In inference mode too it is a view of a usual tensor if that is
// one.
at::Tensor make_view(const at::Tensor& base, const at::Tensor& like) {
  const c10::DispatchKeySet bits({c10::DispatchKey::Conjugate, c10::DispatchKey::Negative});
  at::Tensor made = at::detail::make_tensor<c10::TensorImpl>(
      c10::TensorImpl::VIEW, c10::Storage(base.storage()), base.key_set() - bits, like.dtype());
  set_form(made, like);
  return made;
}

c10::DataPtr copy_to_device(const c10::Storage& from) {
  c10::DataPtr copy = allocator().allocate(from.nbytes());
  if (from.nbytes() > 0) std::memcpy(host_view(copy.get()), from.data(), from.nbytes());
  return copy;
}

}  // namespace

CpuView::CpuView() { run_launched(); }

at::Tensor CpuView::to_cpu(const at::Tensor& tensor) {
  if (!tensor.defined() || !tensor.is_cuda()) return tensor;
  const c10::Storage& device = tensor.storage();
  const auto [found, is_new] = by_device_storage_.try_emplace(device.unsafeGetStorageImpl());
  if (is_new) {
    const size_t bytes = device.nbytes();
    // The address as it stands: data() would copy what is lazily copied, through this very device.
    void* view = bytes == 0 ? nullptr : host_view(device.data());
    const c10::Storage cpu(c10::Storage::use_byte_size_t(), bytes, c10::DataPtr(view, kCpu),
                           c10::GetAllocator(c10::DeviceType::CPU), /*resizable=*/true);
    by_cpu_storage_.emplace(cpu.unsafeGetStorageImpl(), tensor);
    found->second = {cpu, device};
  }
  at::Tensor made = make_like(tensor, found->second.cpu, c10::DispatchKey::CPU);
  arguments_.emplace(made.unsafeGetTensorImpl(), Argument{made, tensor});
  return made;
}

at::Tensor CpuView::to_device(const at::Tensor& tensor) {
  if (!tensor.defined() || !tensor.is_cpu()) return tensor;
  const auto argument = arguments_.find(tensor.unsafeGetTensorImpl());
  if (argument != arguments_.end()) return argument->second.device;
  const auto found = by_cpu_storage_.find(tensor.storage().unsafeGetStorageImpl());
  if (found != by_cpu_storage_.end()) return make_view(found->second, tensor);
  const c10::Storage copy(c10::Storage::use_byte_size_t(), tensor.storage().nbytes(),
                          copy_to_device(tensor.storage()), &allocator(), /*resizable=*/true);
  const at::Tensor made = make_like(tensor, copy, c10::DispatchKey::CUDA);
  by_cpu_storage_.emplace(tensor.storage().unsafeGetStorageImpl(), made);
  return made;
}

void CpuView::carry_back() {
  for (auto& [impl, alias] : by_device_storage_) {
    const void* view = alias.device.nbytes() == 0 ? nullptr : host_view(alias.device.data());
    if (alias.cpu.data() == view && alias.cpu.nbytes() == alias.device.nbytes()) continue;
    if (alias.cpu.data() != view) impl->set_data_ptr_noswap(copy_to_device(alias.cpu));
    impl->set_nbytes(alias.cpu.nbytes());
  }
  for (auto& [impl, argument] : arguments_) {
    c10::TensorImpl* device = argument.device.unsafeGetTensorImpl();
    if (impl->sizes() == device->sizes() && impl->strides() == device->strides()) continue;
    device->set_sizes_and_strides(impl->sizes(), impl->strides());
  }
}

}  // namespace emulated
