// Whether a failed call had run a step. Before the first step nothing was written and no random
// number drawn, so the call may run in eager PyTorch instead.
#pragma once

namespace torch_ort::run {

class CallWatch {
 public:
  CallWatch() : outer_(has_begun_) { has_begun_ = false; }
  ~CallWatch() { has_begun_ = outer_; }
  CallWatch(const CallWatch&) = delete;
  CallWatch& operator=(const CallWatch&) = delete;

  // Marks the innermost call of this thread.
  static void begin() { has_begun_ = true; }
  bool has_begun() const { return has_begun_; }

 private:
  inline static thread_local bool has_begun_ = false;
  bool outer_;  // of the enclosing call
};

}  // namespace torch_ort::run
