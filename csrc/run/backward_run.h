// A backward call that can stop where gradients are ready and continue when more are asked for.
//
// A run owns the context that it works on until it ends. The user's hooks run in between and may
// call backward of the same forward call again, so this matters: without retain_graph the run takes
// the context of the forward call, which nobody can use afterwards; with it, the run works on a
// copy.
#pragma once

#include "run/memory/arena.h"
#include "run/session.h"

#include <ATen/core/Tensor.h>

#include <memory>
#include <vector>

namespace torch_ort::run {

class BackwardRun {
 public:
  using Tensors = Session::Tensors;

  // Takes the arguments of Session::backward. No step runs yet, with one exception: if the defined
  // tangents are not those that the plan of the forward call expected, everything runs here, since
  // such a run has no segments.
  BackwardRun(const at::Tensor& token, const Tensors& saved, const Tensors& tangents, bool keep);
  BackwardRun(const BackwardRun&) = delete;
  BackwardRun& operator=(const BackwardRun&) = delete;
  ~BackwardRun();

  // Runs until the gradients are ready and returns them. Each can be taken once. Throws torch's
  // error if a tensor that a later step reads was modified in place since the run began.
  Tensors take(const std::vector<int>& gradients);
  // As take(), and runs all remaining steps.
  Tensors take_last(const std::vector<int>& gradients);
  Tensors take_all();

 private:
  // A tensor of the caller that the run reads, and its version when the run began.
  struct Watched {
    at::Tensor tensor;
    int64_t version;
    int last_use;
  };

  void run_unexpected(Context& context, const Tensors& tangents);
  std::shared_ptr<Context> copy_of(const Context& context) const;
  void give(const Tensors& saved, const Tensors& tangents);
  Tensors take_after(const std::vector<int>& gradients, int num_steps);
  void advance(int num_steps);
  void check_versions() const;
  void look_at_what_has_left();
  void collect();
  void end() noexcept;

  bool keep_;          // whether another run may need the context
  at::Tensor packed_;  // the token of a call of which what was packed is to be dropped in the end
  std::shared_ptr<Session> called_;
  std::vector<bool> defined_;         // by tangent
  std::shared_ptr<Context> context_;  // nullptr after the run has ended
  Buffer scratch_;
  std::vector<Watched> watched_;
  std::vector<c10::weak_intrusive_ptr<c10::StorageImpl>>
      left_;  // the gradients of the last segment
  bool are_dropped_early_ = false;
  int num_looks_ = 0;
  bool has_run_ = false;
  int num_done_ = 0;  // steps that have run
  Tensors gradients_;
  std::vector<bool> is_made_;
};

}  // namespace torch_ort::run
