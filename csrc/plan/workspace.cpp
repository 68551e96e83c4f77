#include "plan/workspace.h"

#include <algorithm>
#include <utility>

namespace torch_ort::plan {

namespace {

constexpr size_t kMostParts = 4;

void find_parts(const std::vector<Block>& blocks, Workspace part, int64_t size, int time,
                const PlanOptions& options, std::vector<Workspace>& parts) {
  std::vector<std::pair<int64_t, int64_t>> taken = {{size, size}};
  for (const Block& block : blocks) {
    if (block.area != part.area || block.begin > time || block.end < time) continue;
    taken.emplace_back(block.offset, block.offset + block.bytes);
  }
  std::sort(taken.begin(), taken.end());
  int64_t free = 0;
  for (const auto& [from, to] : taken) {
    part.offset = free;
    part.bytes = from - free;
    if (part.bytes >= std::max<int64_t>(options.workspace_bytes, 1)) parts.push_back(part);
    free = std::max(free, (to + options.alignment - 1) / options.alignment * options.alignment);
  }
}

}  // namespace

std::vector<Workspace> find_workspaces(const Program& program, const Plan& plan,
                                       const std::vector<Block>& blocks,
                                       const PlanOptions& options) {
  std::vector<Workspace> found;
  for (int position = 0; position < static_cast<int>(plan.order.size()); ++position) {
    if (!program.steps[plan.order[position]].workspace) continue;
    const bool in_forward = position < program.num_forward;
    const int time = in_forward ? position : position + 1;
    const int64_t scratch = in_forward ? plan.forward_scratch_bytes : plan.backward_scratch_bytes;
    std::vector<Workspace> parts;
    find_parts(blocks, {position, Area::kContext}, plan.context_bytes, time, options, parts);
    find_parts(blocks, {position, Area::kScratch}, scratch, time, options, parts);
    std::stable_sort(parts.begin(), parts.end(),
                     [](const Workspace& a, const Workspace& b) { return a.bytes > b.bytes; });
    parts.resize(std::min(parts.size(), kMostParts));
    found.insert(found.end(), parts.begin(), parts.end());
  }
  return found;
}

}  // namespace torch_ort::plan
