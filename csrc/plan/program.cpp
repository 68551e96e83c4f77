// Checks of a program. They take a few microseconds, and prevent that a mistake of the caller
// becomes a read out of bounds here or overwritten memory later.
#include "plan/program.h"

#include "base/error.h"

namespace torch_ort::plan {
namespace {

void check_indices(const std::vector<int>& tensors, size_t count, const char* where) {
  for (int tensor : tensors) {
    ORT_CHECK(tensor >= 0 && static_cast<size_t>(tensor) < count, "plan: tensor out of range in ",
              where, ": got ", tensor, ", want 0 to ", static_cast<int64_t>(count) - 1);
  }
}

void check_tensors(const Program& program) {
  int count = static_cast<int>(program.tensors.size());
  for (int tensor = 0; tensor < count; ++tensor) {
    const Tensor& it = program.tensors[tensor];
    ORT_CHECK(it.bytes >= 0, "plan: size of tensor ", tensor, ": got ", it.bytes,
              ", want 0 or more bytes");
    ORT_CHECK(it.root >= -1 && it.root < count, "plan: root of tensor ", tensor, ": got ", it.root,
              ", want a tensor or -1");
    ORT_CHECK(it.root < 0 || (it.root != tensor && program.tensors[it.root].root < 0),
              "plan: root of tensor ", tensor, " is an alias itself: got ", it.root,
              ", want a tensor with memory of its own");
    ORT_CHECK(!it.delivered || (it.kind == Kind::kPlanned && it.root < 0), "plan: tensor ", tensor,
              " is delivered: want planned memory of its own");
  }
}

void check_step(const Program& program, int index, std::vector<char>& written) {
  const Step& step = program.steps[index];
  for (int tensor : step.reads) {
    Kind kind = kind_of(program, tensor);
    bool given = kind == Kind::kInput || kind == Kind::kConstant;
    ORT_CHECK(given || written[root_of(program, tensor)], "plan: step ", index, " reads tensor ",
              tensor, " before any step writes it");
  }
  for (int tensor : step.writes) {
    const Tensor& it = program.tensors[tensor];
    written[root_of(program, tensor)] = 1;
    if (it.root >= 0) continue;
    ORT_CHECK(it.kind != Kind::kConstant, "plan: step ", index, " writes tensor ", tensor,
              ", which is a constant");
    ORT_CHECK(it.kind != Kind::kInput || step.effect, "plan: step ", index, " writes tensor ",
              tensor, ", which is an input, and has no effect");
  }
}

void check_leaving(const Program& program, const std::vector<int>& tensors, bool may_deliver) {
  for (int tensor : tensors) {
    bool delivered = may_deliver && program.tensors[root_of(program, tensor)].delivered;
    ORT_CHECK(delivered || kind_of(program, tensor) != Kind::kPlanned, "plan: tensor ", tensor,
              " leaves but is in the engine's memory: got planned, want output or adopted");
  }
}

}  // namespace

void check_program(const Program& program) {
  int num_steps = static_cast<int>(program.steps.size());
  ORT_CHECK(program.num_forward >= 0 && program.num_forward <= num_steps,
            "plan: number of forward steps: got ", program.num_forward, ", want 0 to ", num_steps);
  check_tensors(program);
  for (const Step& step : program.steps) {
    check_indices(step.reads, program.tensors.size(), "reads");
    check_indices(step.writes, program.tensors.size(), "writes");
    check_indices(step.in_place, program.tensors.size(), "in_place");
  }
  check_indices(program.outputs, program.tensors.size(), "outputs");
  check_indices(program.gradients, program.tensors.size(), "gradients");

  std::vector<char> written(program.tensors.size());
  for (int step = 0; step < num_steps; ++step) check_step(program, step, written);
  check_leaving(program, program.outputs, false);
  check_leaving(program, program.gradients, true);
}

}  // namespace torch_ort::plan
