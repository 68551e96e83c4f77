// A list scheduler: of the steps that are ready, it runs the one that lowers memory most.
#include "plan/plan.h"
#include "plan/program.h"

#include <algorithm>
#include <array>
#include <functional>
#include <numeric>
#include <queue>
#include <span>
#include <utility>

namespace torch_ort::plan {
namespace {

using Edges = std::vector<std::pair<int, int>>;  // (earlier step, later step)

// Which steps of the same half must stay in the order they are given in.
class Dependencies {
 public:
  explicit Dependencies(const Program& program)
      : program_(program),
        is_known_(program.tensors.size()),
        made_by_(program.tensors.size(), -1),
        written_by_(program.tensors.size(), -1),
        last_reader_(program.tensors.size(), -1) {}

  std::array<Edges, 2> find() {
    for (size_t step = 0; step < program_.steps.size(); ++step) visit(static_cast<int>(step));
    return std::move(edges_);
  }

 private:
  struct Reader {
    int step;
    int previous;  // the reader before, of the same memory since its last write
  };

  void visit(int index) {
    const Step& step = program_.steps[index];
    for (int tensor : step.reads) {
      add(written_by_[root_of(program_, tensor)], index);
      add(made_by_[tensor], index);
      is_known_[tensor] = 1;
    }
    for (int tensor : step.reads) {
      // A step with an effect may change an input that it reads.
      bool changes = step.effect && kind_of(program_, tensor) == Kind::kInput;
      changes ? write(root_of(program_, tensor), index) : read(root_of(program_, tensor), index);
    }
    for (int tensor : step.writes) {
      if (!makes_view(step, tensor)) write(root_of(program_, tensor), index);
    }
    for (int tensor : step.writes) {
      made_by_[tensor] = index;
      is_known_[tensor] = 1;
    }
    if (step.effect) {
      add(last_effect_, index);
      last_effect_ = index;
    }
  }

  // A step makes a view if it reads the memory of which the tensor is made and changes none of it.
  // A tensor that exists already is written rather than made.
  bool makes_view(const Step& step, int tensor) const {
    int root = program_.tensors[tensor].root;
    if (root < 0 || step.effect || is_known_[tensor]) return false;
    return std::any_of(step.reads.begin(), step.reads.end(),
                       [&](int read) { return root_of(program_, read) == root; });
  }

  void read(int root, int step) {
    readers_.push_back({step, last_reader_[root]});
    last_reader_[root] = static_cast<int>(readers_.size()) - 1;
  }

  void write(int root, int step) {
    add(written_by_[root], step);
    for (int i = last_reader_[root]; i >= 0; i = readers_[i].previous) add(readers_[i].step, step);
    last_reader_[root] = -1;
    written_by_[root] = step;
  }

  void add(int earlier, int later) {
    if (earlier < 0 || earlier == later) return;
    bool backward = later >= program_.num_forward;
    // Nothing moves across the border, so steps of different halves stay in order anyway.
    if (backward == (earlier >= program_.num_forward)) edges_[backward].push_back({earlier, later});
  }

  const Program& program_;
  std::vector<char> is_known_;    // by tensor: an earlier step reads or makes it
  std::vector<int> made_by_;      // by tensor
  std::vector<int> written_by_;   // by root
  std::vector<int> last_reader_;  // by root, into readers_
  std::vector<Reader> readers_;
  std::array<Edges, 2> edges_;
  int last_effect_ = -1;
};

// The bytes of each root that are counted, and in which half it is allocated and freed.
struct Memory {
  static constexpr int kNever = -1;
  struct Root {
    int64_t bytes = 0;
    int born = kNever;
    int dies = kNever;
  };
  std::vector<Root> roots;

  explicit Memory(const Program& program) : roots(program.tensors.size()) {
    int num_steps = static_cast<int>(program.steps.size());
    for (int step = 0; step < num_steps; ++step) {
      int half = step >= program.num_forward;
      for (const auto* list : {&program.steps[step].reads, &program.steps[step].writes}) {
        for (int tensor : *list) touch(program, root_of(program, tensor), half);
      }
    }
    for (size_t tensor = 0; tensor < program.tensors.size(); ++tensor) {
      Root& root = roots[root_of(program, static_cast<int>(tensor))];
      if (program.tensors[tensor].delivered) root.dies = kNever;
    }
    for (int tensor : program.outputs) roots[root_of(program, tensor)].dies = kNever;
    for (int tensor : program.gradients) {
      Root& root = roots[root_of(program, tensor)];
      root.dies = kNever;
      if (program.gradients_leave_early && root.born == 1) root = {};
    }
  }

 private:
  void touch(const Program& program, int tensor, int half) {
    Kind kind = program.tensors[tensor].kind;
    if (kind == Kind::kInput || kind == Kind::kConstant) return;
    Root& root = roots[tensor];
    if (root.born == kNever) root = {program.tensors[tensor].bytes, half, kNever};
    if (kind != Kind::kOutput) root.dies = half;
  }
};

// The steps of one half, with what each of them allocates and frees.
class Half {
 public:
  Half(const Program& program, const Memory& memory, const Edges& edges, int half)
      : first_(half == 0 ? 0 : program.num_forward),
        count_((half == 0 ? program.num_forward : static_cast<int>(program.steps.size())) - first_),
        memory_(memory),
        half_(half) {
    find_touched(program);
    find_successors(edges);
  }

  // The given order or the scheduled one, whichever has the lower peak.
  std::vector<int> best_order(bool is_kept) {
    std::vector<int> given(count_);
    std::iota(given.begin(), given.end(), 0);
    std::vector<int> scheduled = is_kept ? given : schedule();
    std::vector<int>& best = peak(scheduled) < peak(given) ? scheduled : given;
    for (int& step : best) step += first_;
    return std::move(best);
  }

 private:
  // From here on, steps are numbered from the first one of the half.
  static std::span<const int> slice(const std::vector<int>& starts, const std::vector<int>& items,
                                    int index) {
    return {items.data() + starts[index], items.data() + starts[index + 1]};
  }
  std::span<const int> touched(int step) const { return slice(touched_starts_, touched_, step); }
  std::span<const int> successors(int step) const {
    return slice(successor_starts_, successors_, step);
  }

  void find_touched(const Program& program) {
    std::vector<int> seen_at(memory_.roots.size(), -1);
    num_users_.assign(memory_.roots.size(), 0);
    sum_of_users_.assign(memory_.roots.size(), 0);
    allocates_.assign(count_, 0);
    touched_starts_.push_back(0);
    for (int step = 0; step < count_; ++step) {
      const Step& it = program.steps[first_ + step];
      for (const auto* list : {&it.reads, &it.writes}) {
        for (int tensor : *list) {
          int root = root_of(program, tensor);
          if (memory_.roots[root].born == Memory::kNever || seen_at[root] == step) continue;
          bool is_new = seen_at[root] < 0 && memory_.roots[root].born == half_;
          if (is_new) allocates_[step] += memory_.roots[root].bytes;
          seen_at[root] = step;
          ++num_users_[root];
          sum_of_users_[root] += step;
          touched_.push_back(root);
        }
      }
      touched_starts_.push_back(static_cast<int>(touched_.size()));
    }
  }

  void find_successors(const Edges& edges) {
    successor_starts_.assign(count_ + 1, 0);
    num_before_.assign(count_, 0);
    for (auto [earlier, later] : edges) {
      ++successor_starts_[earlier - first_ + 1];
      ++num_before_[later - first_];
    }
    std::partial_sum(successor_starts_.begin(), successor_starts_.end(), successor_starts_.begin());
    successors_.resize(edges.size());
    std::vector<int> next(successor_starts_.begin(), successor_starts_.end() - 1);
    for (auto [earlier, later] : edges) successors_[next[earlier - first_]++] = later - first_;
  }

  std::vector<int> schedule() const {
    // A step frees more when it becomes the last user of a tensor that it reads. It is then queued
    // again, and its older entry, which has another number of bytes, is ignored.
    using Entry = std::pair<int64_t, int>;  // (bytes that it adds, step)
    std::priority_queue<Entry, std::vector<Entry>, std::greater<>> ready;
    std::vector<int64_t> adds = allocates_;
    std::vector<int> num_before = num_before_, num_users = num_users_;
    std::vector<int64_t> sum_of_users = sum_of_users_;
    std::vector<char> done(count_);
    for (int step = 0; step < count_; ++step) {
      for (int root : touched(step)) {
        if (num_users[root] == 1 && dies_here(root)) adds[step] -= memory_.roots[root].bytes;
      }
    }
    for (int step = 0; step < count_; ++step) {
      if (num_before[step] == 0) ready.push({adds[step], step});
    }

    std::vector<int> order;
    order.reserve(count_);
    while (!ready.empty()) {
      auto [added, step] = ready.top();
      ready.pop();
      if (done[step] || added != adds[step]) continue;
      done[step] = 1;
      order.push_back(step);
      for (int root : touched(step)) {
        sum_of_users[root] -= step;
        if (--num_users[root] != 1 || !dies_here(root)) continue;
        int last_user = static_cast<int>(sum_of_users[root]);
        adds[last_user] -= memory_.roots[root].bytes;
        if (num_before[last_user] == 0) ready.push({adds[last_user], last_user});
      }
      for (int next : successors(step)) {
        if (--num_before[next] == 0) ready.push({adds[next], next});
      }
    }
    return order;
  }

  // The peak in bytes above those at the start of the half. What a step reads is still live while
  // it writes.
  int64_t peak(const std::vector<int>& order) const {
    std::vector<int> num_users = num_users_;
    int64_t live = 0, highest = 0;
    for (int step : order) {
      live += allocates_[step];
      highest = std::max(highest, live);
      for (int root : touched(step)) {
        if (--num_users[root] == 0 && dies_here(root)) live -= memory_.roots[root].bytes;
      }
    }
    return highest;
  }

  bool dies_here(int root) const { return memory_.roots[root].dies == half_; }

  int first_;
  int count_;
  const Memory& memory_;
  int half_;
  std::vector<int> touched_starts_, touched_;  // the counted roots of each step, each once
  std::vector<int> num_users_;                 // by root: the steps that touch it
  std::vector<int64_t> sum_of_users_;          // when one user is left, the sum is that user
  std::vector<int64_t> allocates_;             // by step, in bytes
  std::vector<int> successor_starts_, successors_;
  std::vector<int> num_before_;  // by step: edges that lead to it
};

}  // namespace

std::vector<int> choose_order(const Program& program) {
  check_program(program);
  Memory memory(program);
  auto [forward_edges, backward_edges] = Dependencies(program).find();
  std::vector<int> order =
      Half(program, memory, forward_edges, 0).best_order(program.keeps_forward_order);
  std::vector<int> backward =
      Half(program, memory, backward_edges, 1).best_order(program.keeps_backward_order);
  order.insert(order.end(), backward.begin(), backward.end());
  return order;
}

}  // namespace torch_ort::plan
