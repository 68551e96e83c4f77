// The dispatch state in which steps run.
#pragma once

#include <ATen/core/LegacyTypeDispatch.h>
#include <c10/core/AutogradState.h>
#include <c10/core/DeviceGuard.h>
#include <c10/core/GradMode.h>
#include <c10/core/impl/LocalDispatchKeySet.h>

#include <optional>
#include <utility>

namespace torch_ort::run {

// Remembers for a run, and runs inside of it, whether the caller is under autocast: the backward of
// the user's own Functions runs as in the caller's code. Such a Function may run other graphs, and
// is the caller of those.
class CallersState {
 public:
  static CallersState enter() { return CallersState(off_ ? *off_ : excluded_now()); }
  static CallersState leave() { return CallersState(std::nullopt); }
  CallersState(const CallersState&) = delete;
  CallersState& operator=(const CallersState&) = delete;
  ~CallersState() { off_ = outer_; }

  // The keys of autocast that are off for the caller.
  static c10::DispatchKeySet off() { return off_ ? *off_ : excluded_now(); }

 private:
  explicit CallersState(std::optional<c10::DispatchKeySet> off)
      : outer_(std::exchange(off_, off)) {}

  static c10::DispatchKeySet excluded_now() {
    return c10::impl::tls_local_dispatch_key_set().excluded_ & c10::autocast_dispatch_keyset;
  }

  static inline thread_local std::optional<c10::DispatchKeySet> off_;
  std::optional<c10::DispatchKeySet> outer_;
};

// Excludes what the capture has already handled: autograd, version counters, autocast,
// functionalization and Python modes. Otherwise they would record, cast or trace a second time.
class RunGuard {
 public:
  explicit RunGuard(c10::Device device)
      : outer_(CallersState::enter()), exclude_(excluded()), grad_mode_(false), device_(device) {}

 private:
  static c10::DispatchKeySet excluded() {
    return c10::autocast_dispatch_keyset | c10::python_ks |
           c10::DispatchKeySet({c10::DispatchKey::Functionalize, c10::DispatchKey::PreDispatch,
                                c10::DispatchKey::PythonDispatcher});
  }

  CallersState outer_;
  c10::impl::ExcludeDispatchKeyGuard exclude_;
  at::AutoDispatchBelowADInplaceOrView below_;
  c10::AutoGradMode grad_mode_;
  c10::OptionalDeviceGuard device_;
};

}  // namespace torch_ort::run
