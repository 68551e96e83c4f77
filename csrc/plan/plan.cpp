// Live ranges over the order of steps, in-place writes, and when adopted tensors are released.
// arena.cpp chooses the offsets, order.cpp the order.
#include "plan/plan.h"

#include "base/error.h"
#include "plan/arena.h"
#include "plan/discard.h"
#include "plan/program.h"
#include "plan/workspace.h"

#include <algorithm>
#include <numeric>

namespace torch_ort::plan {
namespace {

// From the first write of a tensor to its last use. Times are positions in the order, and one more
// between the halves: a tensor that is in use at that time crosses the border.
struct Life {
  int begin = -1;  // -1: no step touches it
  int end = -1;

  void add(int time) {
    if (begin < 0) begin = time;
    end = std::max(end, time);
  }
};

bool contains(const std::vector<int>& list, int item) {
  return std::find(list.begin(), list.end(), item) != list.end();
}

class Planner {
 public:
  Planner(const Program& program, const PlanOptions& options)
      : program_(program),
        options_(options),
        num_tensors_(static_cast<int>(program.tensors.size())),
        border_(program.num_forward) {}

  Plan run() {
    choose();
    find_lives();
    find_crossing();
    form_blocks();
    place();
    find_release();
    if (plan_.chunks.size() > 1) return std::move(plan_);
    plan_.discards = find_discards(program_, plan_, blocks_, options_);
    plan_.workspaces = find_workspaces(program_, plan_, blocks_, options_);
    return std::move(plan_);
  }

 private:
  int time_at(int position) const { return position < border_ ? position : position + 1; }
  int position_at(int time) const { return time < border_ ? time : time - 1; }
  int root(int tensor) const { return root_of(program_, tensor); }

  void choose() {
    if (options_.reorder) {
      plan_.order = choose_order(program_);
    } else {
      plan_.order.resize(program_.steps.size());
      std::iota(plan_.order.begin(), plan_.order.end(), 0);
    }
  }

  void find_lives() {
    tensor_lives_.resize(num_tensors_);
    lives_.resize(num_tensors_);
    for (size_t position = 0; position < plan_.order.size(); ++position) {
      const Step& step = program_.steps[plan_.order[position]];
      int time = time_at(static_cast<int>(position));
      for (const std::vector<int>* list : {&step.reads, &step.writes}) {
        for (int tensor : *list) {
          tensor_lives_[tensor].add(time);
          lives_[root(tensor)].add(time);
        }
      }
    }
    // A gradient that a forward step computes is returned only by the backward call.
    int last = time_at(static_cast<int>(plan_.order.size()));
    for (int tensor : program_.gradients) keep_until(tensor, last);
    for (int tensor = 0; tensor < num_tensors_; ++tensor) {
      if (program_.tensors[tensor].delivered && lives_[tensor].begin >= 0)
        lives_[tensor].end = last;
    }
  }

  void keep_until(int tensor, int time) {
    for (Life* life : {&tensor_lives_[tensor], &lives_[root(tensor)]}) {
      if (life->begin >= 0 && life->begin < border_) life->end = std::max(life->end, time);
    }
  }

  void find_crossing() {
    std::vector<char> is_output(num_tensors_);
    for (int tensor : program_.outputs) is_output[root(tensor)] = 1;
    for (int tensor = 0; tensor < num_tensors_; ++tensor) {
      const Tensor& it = program_.tensors[tensor];
      const Life& life = lives_[tensor];
      bool held = it.kind == Kind::kPlanned || it.kind == Kind::kAdopted;
      if (it.root >= 0 || !held || life.begin < 0) continue;
      if (life.begin >= border_ || life.end < border_) continue;
      plan_.crossing.push_back(tensor);
      if (!is_output[tensor]) plan_.saved_bytes += it.bytes;
    }
  }

  // Makes one block for each planned root, or for each chain of roots that overwrite one another. A
  // chain with a crossing root crosses as a whole. It has at most one such root, because the lives
  // of its roots follow each other.
  void form_blocks() {
    plan_.placements.resize(num_tensors_);
    block_of_.assign(num_tensors_, -1);
    for (size_t position = 0; position < plan_.order.size(); ++position) {
      const Step& step = program_.steps[plan_.order[position]];
      for (int tensor : step.writes) {
        int owner = root(tensor);
        const Tensor& it = program_.tensors[owner];
        if (it.kind != Kind::kPlanned || it.bytes == 0 || block_of_[owner] >= 0) continue;
        int read = tensor == step.writes[0] && tensor == owner ? find_dying_read(step) : -1;
        plan_.placements[tensor].in_place_of = read;
        block_of_[owner] = read >= 0 ? block_of_[root(read)] : add_block(it.bytes);
        Block& block = blocks_[block_of_[owner]];
        extend(block, lives_[owner]);
        block.delivered = block.delivered || it.delivered;
      }
    }
  }

  int add_block(int64_t bytes) {
    blocks_.push_back({.bytes = bytes, .begin = -1});
    return static_cast<int>(blocks_.size()) - 1;
  }

  static void extend(Block& block, const Life& life) {
    if (block.begin < 0) block.begin = life.begin;
    block.end = std::max(block.end, life.end);
  }

  // The input of the step that its first result may overwrite; -1 if there is none.
  int find_dying_read(const Step& step) const {
    if (!options_.in_place) return -1;
    for (int read : step.in_place) {
      if (can_overwrite(step, read)) return read;
    }
    return -1;
  }

  bool can_overwrite(const Step& step, int read) const {
    int write = step.writes[0];
    int owner = root(read);
    const Tensor& it = program_.tensors[owner];
    int now = lives_[write].begin;
    if (it.kind != Kind::kPlanned || it.bytes != program_.tensors[write].bytes) return false;
    if (lives_[owner].end != now || lives_[owner].begin == now) return false;
    // Another operand may read the same memory in another order than that of the writes.
    for (int other : step.reads) {
      if (root(other) == owner && !contains(step.in_place, other)) return false;
    }
    for (int other : step.writes) {
      if (root(other) == owner) return false;
    }
    return contains(step.reads, read);
  }

  void place() {
    ArenaOptions arena{
        .border = border_, .alignment = options_.alignment, .chunk_bytes = options_.chunk_bytes};
    if (options_.chunk_bytes > 0) arena.beside = bytes_beside_areas();
    const ArenaSizes sizes = place_blocks(blocks_, arena);
    for (const ArenaChunk& chunk : sizes.chunks) {
      // A chunk is freed after the first backward step at the earliest.
      const int position = std::max(position_at(chunk.last_use), border_);
      plan_.chunks.push_back({chunk.offset, chunk.bytes, position});
    }
    plan_.context_bytes = sizes.context;
    plan_.crossing_bytes = sizes.crossing;
    plan_.forward_scratch_bytes = sizes.forward_scratch;
    plan_.backward_scratch_bytes = sizes.backward_scratch;
    // Both halves take their scratch memory from one pool, so each may use as much as the larger
    // one needs.
    if (wants_workspaces()) {
      plan_.forward_scratch_bytes = plan_.backward_scratch_bytes =
          std::max(sizes.forward_scratch, sizes.backward_scratch);
    }
    plan_.peak_bytes = sizes.context + std::max(sizes.forward_scratch, sizes.backward_scratch);
    for (int tensor = 0; tensor < num_tensors_; ++tensor) {
      int owner = root(tensor);
      if (kind_of(program_, tensor) != Kind::kPlanned || lives_[owner].begin < 0) continue;
      Placement& placement = plan_.placements[tensor];
      if (block_of_[owner] >= 0) {
        const Block& block = blocks_[block_of_[owner]];
        placement.area = block.area;
        placement.offset = block.offset;
        // It has no bytes.
      } else {
        bool crosses = lives_[owner].begin < border_ && lives_[owner].end >= border_;
        bool in_context = crosses || program_.tensors[owner].delivered;
        placement.area = in_context ? Area::kContext : Area::kScratch;
      }
    }
  }

  // By time: the bytes of the tensors that have memory of their own. Those that leave stay alive.
  std::vector<int64_t> bytes_beside_areas() const {
    std::vector<char> leaves(num_tensors_);
    for (int tensor : program_.outputs) leaves[root(tensor)] = 1;
    for (int tensor : program_.gradients) leaves[root(tensor)] = 1;
    const int num_times = time_at(static_cast<int>(plan_.order.size())) + 1;
    std::vector<int64_t> bytes(num_times + 1, 0);  // first the changes at each time
    for (int tensor = 0; tensor < num_tensors_; ++tensor) {
      const Tensor& it = program_.tensors[tensor];
      const Life& life = lives_[tensor];
      if (it.root >= 0 || life.begin < 0) continue;
      if (it.kind != Kind::kOutput && it.kind != Kind::kAdopted) continue;
      bytes[life.begin] += it.bytes;
      if (!leaves[tensor]) bytes[life.end + 1] -= it.bytes;
    }
    std::partial_sum(bytes.begin(), bytes.end(), bytes.begin());
    bytes.pop_back();
    return bytes;
  }

  bool wants_workspaces() const {
    return std::any_of(program_.steps.begin(), program_.steps.end(),
                       [](const Step& step) { return step.workspace; });
  }

  // A view is released after its own last use, and a root after the last use of all tensors that
  // share its memory.
  void find_release() {
    std::vector<char> leaves(num_tensors_);
    for (int tensor : program_.outputs) leaves[tensor] = 1;
    for (int tensor : program_.gradients) leaves[tensor] = 1;
    plan_.release.resize(plan_.order.size());
    for (int tensor = 0; tensor < num_tensors_; ++tensor) {
      if (kind_of(program_, tensor) != Kind::kAdopted || leaves[tensor]) continue;
      const Life& life = root(tensor) == tensor ? lives_[tensor] : tensor_lives_[tensor];
      if (life.begin < 0) continue;
      int position = position_at(life.end);
      // The memory of a gradient is held to the end of the call, so it is not released.
      if (position >= static_cast<int>(plan_.order.size())) continue;
      plan_.release[position].push_back(tensor);
    }
  }

  const Program& program_;
  const PlanOptions& options_;
  int num_tensors_;
  int border_;
  Plan plan_;
  std::vector<Life> tensor_lives_;  // of the tensor alone
  std::vector<Life> lives_;         // of a root and its views together
  std::vector<int> block_of_;
  std::vector<Block> blocks_;
};

}  // namespace

Plan make_plan(const Program& program, const PlanOptions& options) {
  ORT_CHECK(options.alignment > 0, "plan: alignment: got ", options.alignment, ", want 1 or more");
  check_program(program);
  return Planner(program, options).run();
}

}  // namespace torch_ort::plan
