// The dispatch state in which steps run.
#pragma once

#include <ATen/core/LegacyTypeDispatch.h>
#include <c10/core/AutogradState.h>
#include <c10/core/DeviceGuard.h>
#include <c10/core/GradMode.h>
#include <c10/core/impl/LocalDispatchKeySet.h>

namespace torch_ort::run {

// Excludes what the capture has already handled: autograd, version counters, autocast,
// functionalization and Python modes. Otherwise they would record, cast or trace a second time.
class RunGuard {
 public:
  explicit RunGuard(c10::Device device)
      : exclude_(excluded()), grad_mode_(false), device_(device) {}

 private:
  static c10::DispatchKeySet excluded() {
    return c10::autocast_dispatch_keyset | c10::python_ks |
           c10::DispatchKeySet({c10::DispatchKey::Functionalize, c10::DispatchKey::PreDispatch,
                                c10::DispatchKey::PythonDispatcher});
  }

  c10::impl::ExcludeDispatchKeyGuard exclude_;
  at::AutoDispatchBelowADInplaceOrView below_;
  c10::AutoGradMode grad_mode_;
  c10::OptionalDeviceGuard device_;
};

}  // namespace torch_ort::run
