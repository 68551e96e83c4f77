#include "run/memory/placement.h"

#include "ops/op.h"

#include <c10/core/CPUAllocator.h>

#include <algorithm>
#include <cstring>

namespace torch_ort::run {

namespace {

thread_local Placement* current = nullptr;

}  // namespace

// PyTorch's own allocator, except on threads that place results.
class PlacingAllocator final : public c10::Allocator {
 public:
  explicit PlacingAllocator(c10::Allocator* usual) : usual_(usual) { instance_ = this; }

  c10::DataPtr allocate(size_t bytes) override {
    Placement* placement = current;
    if (placement == nullptr) return usual_->allocate(bytes);
    if (void* data = placement->take(bytes)) {
      placement->note(data);
      return {data, data, &PlacingAllocator::give_back, c10::Device(c10::kCPU)};
    }
    c10::DataPtr made = usual_->allocate(bytes);
    placement->note(made.get());
    return made;
  }

  c10::DeleterFnPtr raw_deleter() const override { return &free_raw; }

  // The deleter of planned memory. The plan keeps the memory, so there is nothing to free.
  static void give_back(void* data) {
    if (current != nullptr) current->give_back(data);
  }

  void copy_data(void* target, const void* source, size_t bytes) const override {
    std::memcpy(target, source, bytes);
  }

 private:
  // Frees memory that a kernel has allocated for itself without a DataPtr.
  static void free_raw(void* data) {
    if (current != nullptr && current->give_back(data)) return;
    instance_->usual_->raw_deleter()(data);
  }

  static inline PlacingAllocator* instance_ = nullptr;
  c10::Allocator* usual_;
};

// Installs the allocator. It is never destroyed, because tensors that it has allocated may outlive
// everything else. If another library replaces it later, results are copied.
static void install() {
  static const bool done = [] {
    c10::SetCPUAllocator(new PlacingAllocator(c10::GetCPUAllocator()));
    return true;
  }();
  (void)done;
}

bool is_placeable(const std::string& op) { return ops::registry().operator_row(op).is_placeable; }

AllocationNumbers::AllocationNumbers(size_t num_results)
    : numbers_(std::make_unique<std::atomic<int>[]>(num_results)) {
  install();
  for (size_t i = 0; i < num_results; ++i) numbers_[i].store(kUnknown);
}

Placement::Placement() : outer_(current) { current = this; }

Placement::~Placement() { current = outer_; }

void Placement::add_workspace(char* data, int64_t bytes) {
  workspaces_.push_back({data, data + bytes});
}

void Placement::expect(int number, void* data, size_t bytes) {
  if (number >= 0) places_.push_back({number, data, bytes});
}

bool Placement::has_placed(const void* data) const {
  return std::any_of(places_.begin(), places_.end(),
                     [data](const Place& place) { return place.data == data; });
}

int Placement::number_of(const void* data) const {
  // The search begins with the last allocation: memory of an earlier one may have been freed and
  // used again.
  for (size_t i = given_.size(); i-- > 0;) {
    if (given_[i] == data) return static_cast<int>(i);
  }
  return AllocationNumbers::kUnknown;
}

void* Placement::take(size_t bytes) {
  const auto number = static_cast<int>(given_.size());
  for (const Place& place : places_) {
    if (place.number == number && place.bytes == bytes) {
      ++num_lent_;
      return place.data;
    }
  }
  void* const piece = take_piece(bytes);
  if (piece != nullptr) ++num_lent_;
  return piece;
}

void* Placement::take_piece(size_t bytes) {
  constexpr size_t kAlignment = 64;
  const size_t rounded = (bytes + kAlignment - 1) / kAlignment * kAlignment;
  if (bytes == 0) return nullptr;
  Piece* fitting = nullptr;
  for (Piece& piece : pieces_) {
    const bool fits = piece.is_free && piece.bytes >= rounded;
    if (fits && (fitting == nullptr || piece.bytes < fitting->bytes)) fitting = &piece;
  }
  if (fitting != nullptr) {
    fitting->is_free = false;
    return fitting->data;
  }
  for (size_t i = 0; i < workspaces_.size(); ++i) {
    Workspace& space = workspaces_[i];
    if (rounded > static_cast<size_t>(space.end - space.rest)) continue;
    pieces_.push_back({i, space.rest, rounded, false});
    space.rest += rounded;
    return pieces_.back().data;
  }
  return nullptr;
}

// Returns the free pieces at the end of what was taken from a workspace.
void Placement::return_last_pieces(size_t workspace) {
  for (size_t i = pieces_.size(); i-- > 0;) {
    if (pieces_[i].workspace != workspace) continue;
    if (!pieces_[i].is_free) return;
    workspaces_[workspace].rest = pieces_[i].data;
    pieces_.erase(pieces_.begin() + static_cast<ptrdiff_t>(i));
  }
}

bool Placement::give_back_piece(const void* data) {
  for (Piece& piece : pieces_) {
    if (piece.data != data || piece.is_free) continue;
    piece.is_free = true;
    return_last_pieces(piece.workspace);
    return true;
  }
  return false;
}

bool Placement::give_back(const void* data) {
  if (!give_back_piece(data) && !has_placed(data)) return false;
  --num_lent_;
  return true;
}

}  // namespace torch_ort::run
