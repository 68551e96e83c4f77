// The rules for a plan, recomputed from the program and the order alone. It uses no code of the
// planner, so that a mistake there is found here.
#include "base/error.h"
#include "plan/plan.h"
#include "plan/program.h"

#include <algorithm>
#include <map>
#include <utility>

namespace torch_ort::plan {
namespace {

// --- the order -----------------------------------------------------------------------------------

void check_permutation(const Program& program, const Plan& plan, const PlanOptions& options) {
  int num_steps = static_cast<int>(program.steps.size());
  ORT_CHECK(static_cast<int>(plan.order.size()) == num_steps,
            "verify_plan: steps in the order: got ", plan.order.size(), ", want ", num_steps);
  std::vector<char> seen(num_steps);
  for (int position = 0; position < num_steps; ++position) {
    int step = plan.order[position];
    ORT_CHECK(step >= 0 && step < num_steps && !seen[step], "verify_plan: order at ", position,
              ": got step ", step, ", want each of the ", num_steps, " steps once");
    seen[step] = 1;
    ORT_CHECK((step < program.num_forward) == (position < program.num_forward),
              "verify_plan: step ", step, " is at position ", position,
              ", on the other side of the border at ", program.num_forward);
    ORT_CHECK(options.reorder || step == position, "verify_plan: order at ", position,
              ": got step ", step, ", want the given order");
  }
}

void check_effects(const Program& program, const Plan& plan) {
  int last = -1;
  for (int step : plan.order) {
    if (!program.steps[step].effect) continue;
    ORT_CHECK(step > last, "verify_plan: steps with an effect change places: step ", last,
              " comes before step ", step);
    last = step;
  }
}

// What a read finds: the step that wrote the memory last, and the step that made the tensor last.
struct Version {
  int writer = -1;
  int maker = -1;
  bool operator==(const Version&) const = default;
};

// The roots whose memory each step changes. A step without an effect that reads memory and makes a
// new alias of it makes a view, which changes nothing. A step with an effect may change the inputs
// that it reads.
std::vector<std::vector<int>> find_changes(const Program& program) {
  std::vector<std::vector<int>> changes;
  std::vector<char> is_known(program.tensors.size());
  for (const Step& step : program.steps) {
    std::vector<int>& changed = changes.emplace_back();
    for (int tensor : step.reads) {
      is_known[tensor] = 1;
      if (step.effect && kind_of(program, tensor) == Kind::kInput) {
        changed.push_back(root_of(program, tensor));
      }
    }
    for (int tensor : step.writes) {
      int root = root_of(program, tensor);
      bool reads_root = std::any_of(step.reads.begin(), step.reads.end(),
                                    [&](int read) { return root_of(program, read) == root; });
      bool is_view = tensor != root && reads_root && !step.effect && !is_known[tensor];
      if (!is_view) changed.push_back(root);
    }
    for (int tensor : step.writes) is_known[tensor] = 1;
  }
  return changes;
}

// Runs the steps in some order and notes which version each read finds.
struct Versions {
  std::vector<std::vector<Version>> found;  // by step and read
  std::vector<Version> last;                // by tensor; `writer` is set for roots alone

  Versions(const Program& program, const std::vector<std::vector<int>>& changes,
           const std::vector<int>& order)
      : found(program.steps.size()), last(program.tensors.size()) {
    for (int index : order) {
      for (int tensor : program.steps[index].reads) {
        int writer = last[root_of(program, tensor)].writer;
        found[index].push_back({writer, last[tensor].maker});
      }
      for (int root : changes[index]) last[root].writer = index;
      for (int tensor : program.steps[index].writes) last[tensor].maker = index;
    }
  }
};

void check_reads(const Program& program, const Plan& plan) {
  std::vector<int> given(program.steps.size());
  for (size_t step = 0; step < given.size(); ++step) given[step] = static_cast<int>(step);
  std::vector<std::vector<int>> changes = find_changes(program);
  Versions want(program, changes, given), got(program, changes, plan.order);
  for (size_t step = 0; step < given.size(); ++step) {
    for (size_t i = 0; i < want.found[step].size(); ++i) {
      const Version& a = got.found[step][i];
      const Version& b = want.found[step][i];
      ORT_CHECK(a == b, "verify_plan: step ", step, " reads tensor ", program.steps[step].reads[i],
                ": got it as left by steps ", a.writer, " and ", a.maker, ", want by steps ",
                b.writer, " and ", b.maker);
    }
  }
  for (size_t tensor = 0; tensor < want.last.size(); ++tensor) {
    ORT_CHECK(got.last[tensor] == want.last[tensor], "verify_plan: last write of tensor ", tensor,
              ": got step ", got.last[tensor].writer, ", want step ", want.last[tensor].writer);
  }
}

// --- memory --------------------------------------------------------------------------------------

// The first and last positions that use a tensor; -1 if none does.
struct Use {
  int first = -1;
  int last = -1;
};

// What is alive in one area, by offset.
class LiveMap {
 public:
  void add(int tensor, const char* area, int64_t offset, int64_t bytes) {
    auto next = live_.lower_bound(offset);
    if (next != live_.end()) check_apart(tensor, area, offset + bytes, next->first, next->second);
    if (next != live_.begin()) {
      auto before = std::prev(next);
      check_apart(tensor, area, before->second.end, offset, before->second);
    }
    live_[offset] = {tensor, offset + bytes};
  }
  void remove(int64_t offset) { live_.erase(offset); }
  bool empty() const { return live_.empty(); }
  int any() const { return live_.begin()->second.tensor; }

 private:
  struct Entry {
    int tensor;
    int64_t end;
  };
  static void check_apart(int tensor, const char* area, int64_t end, int64_t start,
                          const Entry& other) {
    ORT_CHECK(end <= start, "verify_plan: tensors ", other.tensor, " and ", tensor,
              " are alive together and overlap in the ", area, " area by ", end - start, " bytes");
  }

  std::map<int64_t, Entry> live_;
};

class MemoryCheck {
 public:
  MemoryCheck(const Program& program, const Plan& plan, const PlanOptions& options)
      : program_(program),
        plan_(plan),
        options_(options),
        num_tensors_(static_cast<int>(program.tensors.size())),
        uses_(num_tensors_),
        tensor_uses_(num_tensors_),
        leaves_(num_tensors_),
        waits_(num_tensors_),
        live_(num_tensors_) {
    find_uses();
  }

  void run() {
    check_placements();
    check_sizes();
    for (int position = 0; position < num_positions(); ++position) {
      if (position == program_.num_forward) pass_border();
      run_step(position);
    }
    if (num_positions() == program_.num_forward) pass_border();
    check_release();
    check_discards();
    check_workspaces();
    check_chunks();
  }

 private:
  int num_positions() const { return static_cast<int>(plan_.order.size()); }
  int root(int tensor) const { return root_of(program_, tensor); }
  bool in_forward(int position) const { return position < program_.num_forward; }

  void find_uses() {
    for (int position = 0; position < num_positions(); ++position) {
      const Step& step = program_.steps[plan_.order[position]];
      std::vector<int> all = step.reads;
      all.insert(all.end(), step.writes.begin(), step.writes.end());
      for (int tensor : all) {
        for (Use* use : {&uses_[root(tensor)], &tensor_uses_[tensor]}) {
          if (use->first < 0) use->first = position;
          use->last = position;
        }
      }
    }
    for (int tensor : program_.gradients) waits_[tensor] = waits_[root(tensor)] = 1;
    for (int tensor : program_.outputs) leaves_[tensor] = 1;
    for (int tensor : program_.gradients) leaves_[tensor] = 1;
  }

  // Whether it is written in the forward half and needed after it.
  bool crosses(int root) const {
    const Use& use = uses_[root];
    if (use.first < 0 || !in_forward(use.first)) return false;
    return waits_[root] || !in_forward(use.last) || program_.tensors[root].delivered;
  }

  void check_placements() const {
    ORT_CHECK(static_cast<int>(plan_.placements.size()) == num_tensors_,
              "verify_plan: placements: got ", plan_.placements.size(), ", want ", num_tensors_);
    for (int tensor = 0; tensor < num_tensors_; ++tensor) {
      const Placement& placement = plan_.placements[tensor];
      const Placement& of_root = plan_.placements[root(tensor)];
      ORT_CHECK(placement.area == of_root.area && placement.offset == of_root.offset,
                "verify_plan: alias ", tensor, " is not where its root ", root(tensor), " is: got ",
                placement.offset, ", want ", of_root.offset);
      bool placed = placement.area != Area::kNone;
      bool wanted = kind_of(program_, tensor) == Kind::kPlanned && uses_[root(tensor)].first >= 0;
      ORT_CHECK(placed == wanted, "verify_plan: tensor ", tensor,
                placed ? " has a place and needs none" : " has no place");
      if (placed && root(tensor) == tensor) check_place(tensor);
    }
  }

  void check_place(int root) const {
    const Placement& placement = plan_.placements[root];
    bool in_context = placement.area == Area::kContext;
    int64_t size = in_context                      ? plan_.context_bytes
                   : in_forward(uses_[root].first) ? plan_.forward_scratch_bytes
                                                   : plan_.backward_scratch_bytes;
    int64_t end = placement.offset + program_.tensors[root].bytes;
    ORT_CHECK(placement.offset >= 0 && end <= size, "verify_plan: tensor ", root,
              " is out of its area: got ", placement.offset, " to ", end, ", want 0 to ", size);
    ORT_CHECK(placement.offset % options_.alignment == 0, "verify_plan: offset of tensor ", root,
              " is not aligned: got ", placement.offset, ", want a multiple of ",
              options_.alignment);
    ORT_CHECK(in_context || !crosses(root), "verify_plan: tensor ", root,
              " crosses the border in the scratch area");
    ORT_CHECK(in_context || !program_.tensors[root].delivered, "verify_plan: tensor ", root,
              " is delivered in the scratch area");
    ORT_CHECK(!crosses(root) || end <= plan_.crossing_bytes, "verify_plan: tensor ", root,
              " crosses the border behind the crossing part of the context area: got ", end,
              ", want ", plan_.crossing_bytes, " at most");
  }

  void check_sizes() const {
    std::vector<int> crossing;
    int64_t saved = 0;
    for (int tensor = 0; tensor < num_tensors_; ++tensor) {
      Kind kind = program_.tensors[tensor].kind;
      bool held = kind == Kind::kPlanned || kind == Kind::kAdopted;
      if (root(tensor) != tensor || !held || !crosses(tensor)) continue;
      crossing.push_back(tensor);
      bool is_output = std::any_of(program_.outputs.begin(), program_.outputs.end(),
                                   [&](int output) { return root(output) == tensor; });
      if (!is_output) saved += program_.tensors[tensor].bytes;
    }
    ORT_CHECK(plan_.crossing == crossing, "verify_plan: crossing tensors: got ",
              plan_.crossing.size(), " of them, want these ", crossing.size(), ", in order");
    ORT_CHECK(plan_.saved_bytes == saved, "verify_plan: saved bytes: got ", plan_.saved_bytes,
              ", want ", saved);
    int64_t peak =
        plan_.context_bytes + std::max(plan_.forward_scratch_bytes, plan_.backward_scratch_bytes);
    ORT_CHECK(plan_.peak_bytes == peak, "verify_plan: peak bytes: got ", plan_.peak_bytes,
              ", want ", peak);
  }

  void run_step(int position) {
    const Step& step = program_.steps[plan_.order[position]];
    for (int tensor : step.writes) {
      int read = plan_.placements[tensor].in_place_of;
      if (read < 0 || uses_[root(tensor)].first != position) continue;
      check_in_place(position, tensor, read);
      remove(root(read));
    }
    for (int tensor : step.writes) {
      if (uses_[root(tensor)].first == position) add(root(tensor));
    }
    for (const auto* list : {&step.reads, &step.writes}) {
      for (int tensor : *list) {
        // A tensor that waits for the border is removed there, and a delivered one never.
        bool held = (in_forward(position) && waits_[root(tensor)]) ||
                    program_.tensors[root(tensor)].delivered;
        if (uses_[root(tensor)].last == position && !held) remove(root(tensor));
      }
    }
  }

  void check_in_place(int position, int write, int read) const {
    int index = plan_.order[position];
    const Step& step = program_.steps[index];
    auto refuse = [&](auto... why) {
      throw InternalError(concat("verify_plan: step ", index, " may not write ", write, " over ",
                                 read, ": ", why...));
    };
    auto lists = [](const std::vector<int>& list, int item) {
      return std::find(list.begin(), list.end(), item) != list.end();
    };
    if (read >= num_tensors_) refuse("there is no such tensor");
    int owner = root(read);
    if (!options_.in_place) refuse("the options forbid it");
    if (write != step.writes[0]) refuse("it is not the first write");
    if (!lists(step.reads, read)) refuse("the step does not read it");
    if (!lists(step.in_place, read)) refuse("the step does not list it as a candidate");
    Kind kind = program_.tensors[owner].kind;
    if (kind == Kind::kInput || kind == Kind::kConstant) refuse("it is an input or a constant");
    if (kind == Kind::kOutput) refuse("it leaves as an output");
    if (kind == Kind::kAdopted) refuse("its memory is adopted");
    if (program_.tensors[write].root >= 0 || program_.tensors[write].kind != Kind::kPlanned) {
      refuse("the write has no planned memory of its own");
    }
    if (program_.tensors[write].bytes != program_.tensors[owner].bytes) {
      refuse("got ", program_.tensors[write].bytes, " bytes, want ", program_.tensors[owner].bytes);
    }
    if (uses_[owner].last > position) {
      refuse("it is still read by step ", plan_.order[uses_[owner].last]);
    }
    if (uses_[owner].first == position) refuse("the step itself makes it");
    if (program_.tensors[owner].delivered) refuse("it is delivered");
    for (int other : step.reads) {
      if (root(other) == owner && !lists(step.in_place, other)) {
        refuse("the step reads the same memory as tensor ", other);
      }
    }
    for (int other : step.writes) {
      if (root(other) == owner) refuse("the step writes the same memory as tensor ", other);
    }
    if (plan_.placements[write].area != plan_.placements[owner].area ||
        plan_.placements[write].offset != plan_.placements[owner].offset) {
      refuse("they lie in different places");
    }
  }

  bool has_bytes(int root) const {
    return plan_.placements[root].area != Area::kNone && program_.tensors[root].bytes > 0;
  }

  void add(int root) {
    if (!has_bytes(root) || live_[root]) return;
    bool in_context = plan_.placements[root].area == Area::kContext;
    (in_context ? context_ : scratch_)
        .add(root, in_context ? "context" : "scratch", plan_.placements[root].offset,
             program_.tensors[root].bytes);
    live_[root] = 1;
  }

  void remove(int root) {
    if (!has_bytes(root) || !live_[root]) return;
    bool in_context = plan_.placements[root].area == Area::kContext;
    (in_context ? context_ : scratch_).remove(plan_.placements[root].offset);
    live_[root] = 0;
  }

  void pass_border() {
    ORT_CHECK(scratch_.empty(), "verify_plan: tensor ", scratch_.any(),
              " crosses the border in the scratch area");
    for (int root = 0; root < num_tensors_; ++root) {
      bool over = uses_[root].last < program_.num_forward;
      if (waits_[root] && over && !program_.tensors[root].delivered) remove(root);
    }
  }

  void check_discards() const {
    for (const Discard& discard : plan_.discards) {
      ORT_CHECK(!in_forward(discard.position) && discard.position < num_positions() &&
                    discard.offset >= 0 && discard.bytes > 0 &&
                    discard.offset + discard.bytes <= plan_.context_bytes,
                "verify_plan: discard after position ", discard.position, " of ", discard.offset,
                " to ", discard.offset + discard.bytes, " is out of range");
      for (int root = 0; root < num_tensors_; ++root) {
        if (!lies_in(root, Area::kContext, discard.offset, discard.bytes)) continue;
        const bool is_used =
            uses_[root].last > discard.position || program_.tensors[root].delivered;
        ORT_CHECK(!is_used, "verify_plan: tensor ", root, " is discarded after position ",
                  discard.position, " and still needed");
      }
    }
  }

  void check_workspaces() const {
    for (const Workspace& space : plan_.workspaces) {
      const int64_t size = space.area == Area::kContext ? plan_.context_bytes
                           : space.area == Area::kNone  ? 0
                           : in_forward(space.position) ? plan_.forward_scratch_bytes
                                                        : plan_.backward_scratch_bytes;
      ORT_CHECK(space.position >= 0 && space.position < num_positions() && space.offset >= 0 &&
                    space.bytes > 0 && space.offset + space.bytes <= size,
                "verify_plan: workspace at position ", space.position, " of ", space.offset, " to ",
                space.offset + space.bytes, " is out of range");
      for (int root = 0; root < num_tensors_; ++root) {
        if (!lies_in(root, space.area, space.offset, space.bytes)) continue;
        ORT_CHECK(!lives_at(root, space.position), "verify_plan: tensor ", root,
                  " lives in the workspace at position ", space.position);
      }
    }
  }

  void check_chunks() const {
    int64_t end = 0;
    for (const Chunk& chunk : plan_.chunks) {
      ORT_CHECK(chunk.offset == end && chunk.bytes > 0, "verify_plan: chunk of ", chunk.offset,
                " to ", chunk.offset + chunk.bytes, ": want one that begins at ", end);
      end += chunk.bytes;
      ORT_CHECK(chunk.position >= program_.num_forward, "verify_plan: chunk of ", chunk.offset,
                " to ", end, " is dead after position ", chunk.position,
                ", in the forward half, want the backward half");
      for (int root = 0; root < num_tensors_; ++root) {
        if (lies_in(root, Area::kContext, chunk.offset, chunk.bytes)) check_in_chunk(root, chunk);
      }
    }
    ORT_CHECK(end == plan_.context_bytes, "verify_plan: chunks end at ", end, ", want ",
              plan_.context_bytes, ", as the context area does");
    const bool is_divided = plan_.chunks.size() > 1;
    ORT_CHECK(!is_divided || (plan_.discards.empty() && plan_.workspaces.empty()),
              "verify_plan: an area of ", plan_.chunks.size(),
              " chunks has discards or workspaces, want none");
  }

  void check_in_chunk(int root, const Chunk& chunk) const {
    const int64_t begin = plan_.placements[root].offset;
    const int64_t end = begin + program_.tensors[root].bytes;
    ORT_CHECK(begin >= chunk.offset && end <= chunk.offset + chunk.bytes, "verify_plan: tensor ",
              root, " from ", begin, " to ", end, " lies in two chunks");
    const int last = program_.tensors[root].delivered ? num_positions() : uses_[root].last;
    ORT_CHECK(last <= chunk.position, "verify_plan: tensor ", root, " is used after position ",
              chunk.position, ", when its chunk is dead");
  }

  // Whether a root has a byte in that part of the area. An alias lies where its root does, and a
  // file may state any size for it, which the run finds out.
  bool lies_in(int tensor, Area area, int64_t offset, int64_t bytes) const {
    const Placement& place = plan_.placements[tensor];
    return program_.tensors[tensor].root < 0 && has_bytes(tensor) && place.area == area &&
           place.offset < offset + bytes && offset < place.offset + program_.tensors[tensor].bytes;
  }

  bool lives_at(int root, int position) const {
    // An alias has no use of its own: it is used through its root.
    if (uses_[root].first < 0 || uses_[root].first > position) return false;
    const bool waits = in_forward(position) && waits_[root] != 0;
    return uses_[root].last >= position || waits || program_.tensors[root].delivered;
  }

  // --- adopted tensors ---------------------------------------------------------------------------

  void check_release() const {
    ORT_CHECK(static_cast<int>(plan_.release.size()) == num_positions(),
              "verify_plan: release lists: got ", plan_.release.size(), ", want ", num_positions());
    std::vector<char> released(num_tensors_);
    for (int position = 0; position < num_positions(); ++position) {
      for (int tensor : plan_.release[position]) {
        ORT_CHECK(tensor >= 0 && tensor < num_tensors_ && !released[tensor],
                  "verify_plan: release after position ", position, ": got tensor ", tensor,
                  ", want each tensor once at most");
        released[tensor] = 1;
        check_release_of(tensor, position);
      }
    }
    for (int tensor = 0; tensor < num_tensors_; ++tensor) {
      ORT_CHECK(released[tensor] || !must_go(tensor), "verify_plan: adopted tensor ", tensor,
                " is never released");
    }
  }

  // A root is in use as long as its aliases are.
  const Use& use_of(int tensor) const {
    return root(tensor) == tensor ? uses_[tensor] : tensor_uses_[tensor];
  }

  void check_release_of(int tensor, int position) const {
    ORT_CHECK(kind_of(program_, tensor) == Kind::kAdopted, "verify_plan: tensor ", tensor,
              " is released but not adopted");
    ORT_CHECK(!leaves_[tensor], "verify_plan: tensor ", tensor, " is released but leaves");
    int last = use_of(tensor).last;
    ORT_CHECK(last <= position, "verify_plan: tensor ", tensor, " is released after position ",
              position, ", too early: step ", last < 0 ? -1 : plan_.order[last], " uses it");
    bool kept = waits_[tensor] && in_forward(use_of(tensor).first);
    ORT_CHECK(!kept || !in_forward(position), "verify_plan: tensor ", tensor,
              " is released in the forward half, too early: it is saved");
  }

  bool must_go(int tensor) const {
    if (kind_of(program_, tensor) != Kind::kAdopted || leaves_[tensor]) return false;
    return use_of(tensor).first >= 0 && !waits_[tensor];
  }

  const Program& program_;
  const Plan& plan_;
  const PlanOptions& options_;
  int num_tensors_;
  std::vector<Use> uses_;         // of a root and its aliases together
  std::vector<Use> tensor_uses_;  // of the tensor alone
  std::vector<char> leaves_;
  std::vector<char> waits_;  // must outlive the forward half even if backward does not use it
  std::vector<char> live_;
  LiveMap context_;
  LiveMap scratch_;
};

}  // namespace

void verify_plan(const Program& program, const Plan& plan, const PlanOptions& options) {
  check_program(program);
  check_permutation(program, plan, options);
  check_effects(program, plan);
  check_reads(program, plan);
  MemoryCheck(program, plan, options).run();
}

}  // namespace torch_ort::plan
