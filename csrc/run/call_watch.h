// Whether a call that fails has run steps: before the first one nothing was written or drawn.
#pragma once

namespace torch_ort::run {

class CallWatch {
 public:
  CallWatch() : outer_(has_begun_) { has_begun_ = false; }
  ~CallWatch() { has_begun_ = outer_; }
  CallWatch(const CallWatch&) = delete;
  CallWatch& operator=(const CallWatch&) = delete;

  // Of the innermost call in this thread.
  static void begin() { has_begun_ = true; }
  bool has_begun() const { return has_begun_; }

 private:
  inline static thread_local bool has_begun_ = false;
  bool outer_;  // of the call that this one is a part of
};

}  // namespace torch_ort::run
