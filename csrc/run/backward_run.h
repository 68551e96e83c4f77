// A backward call that stops where gradients are ready, and goes on when others are asked for.
//
// What a run works on is its own from its beginning to its end, though hooks of the user run in
// between, and may call backward of the same forward call: without retain_graph it is the context
// of the forward call, which nobody can use again, with it a copy.
#pragma once

#include "run/arena.h"
#include "run/session.h"

#include <ATen/core/Tensor.h>

#include <memory>
#include <vector>

namespace torch_ort::run {

class BackwardRun {
 public:
  using Tensors = Session::Tensors;

  // As Session::backward. Runs nothing yet, but where gradients have come that the plan of the
  // forward call did not expect: these runs know no segments.
  BackwardRun(const at::Tensor& token, const Tensors& saved, const Tensors& tangents, bool keep);
  BackwardRun(const BackwardRun&) = delete;
  BackwardRun& operator=(const BackwardRun&) = delete;
  ~BackwardRun();

  // Each gradient can be taken once. Raises torch's error if what a later step reads was written
  // into since the run has begun.
  Tensors take(const std::vector<int>& gradients);
  // Runs to the end as well.
  Tensors take_last(const std::vector<int>& gradients);
  Tensors take_all();

 private:
  // A tensor of the caller's that is read, and its version when the run began.
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
  // Of the session whose plan the run follows; -1: it has none.
  int position_of(size_t gradient) const;

  bool keep_;
  std::shared_ptr<const Session> called_;
  std::vector<bool> defined_;         // by tangent
  std::shared_ptr<Context> context_;  // null when the run has ended
  Buffer scratch_;
  std::vector<Watched> watched_;
  std::vector<c10::weak_intrusive_ptr<c10::StorageImpl>> left_;  // with the last segment
  bool are_dropped_early_ = false;
  int num_looks_ = 0;
  bool has_run_ = false;
  int num_done_ = 0;  // steps
  Tensors gradients_;
  std::vector<bool> is_made_;
};

}  // namespace torch_ort::run
