// Places results of kernels that have no `out=` overload. While such a kernel runs, the allocation
// that becomes its result is answered with planned memory. Earlier calls show which allocation that
// is.
//
// A result that is elsewhere after all is copied (the counter results_copied). The kernel's other
// allocations come from dead memory of the areas (Plan::workspaces). For this PyTorch's CPU
// allocator is wrapped in the process; on threads that run no such kernel the wrapper only forwards
// calls.
#pragma once

#include <c10/util/SmallVector.h>

#include <atomic>
#include <memory>
#include <string>

namespace torch_ort::run {

// Whether the operator allocates its results on the calling thread with PyTorch's CPU allocator,
// and holds no allocation after the call.
bool is_placeable(const std::string& op);

// By result of a step: the number of the allocation that became the result in the last call.
class AllocationNumbers {
 public:
  static constexpr int kUnknown = -1;
  static constexpr int kNever = -2;  // its strides were not the planned ones

  explicit AllocationNumbers(size_t num_results);
  std::atomic<int>& operator[](size_t result) const { return numbers_[result]; }

 private:
  std::unique_ptr<std::atomic<int>[]> numbers_;
};

// During its lifetime, answers the allocations of the calling thread: results with their planned
// memory, others with workspaces as long as these last.
class Placement {
 public:
  Placement();
  ~Placement();
  Placement(const Placement&) = delete;
  Placement& operator=(const Placement&) = delete;

  void add_workspace(char* data, int64_t bytes);
  // Answers the allocation `number` with `data` if it asks for `bytes`.
  void expect(int number, void* data, size_t bytes);
  // Whether `data` is the planned memory of a result.
  bool has_placed(const void* data) const;
  // Whether all memory that it gave has been freed.
  bool is_over() const { return num_lent_ == 0; }
  // The number of the allocation that got `data`; kUnknown if none did.
  int number_of(const void* data) const;

 private:
  friend class PlacingAllocator;
  struct Place {
    int number;
    void* data;
    size_t bytes;
  };

  void* take(size_t bytes);  // nullptr: the usual allocator is to be used
  void* take_piece(size_t bytes);
  bool give_back_piece(const void* data);
  void note(const void* data) { given_.push_back(data); }
  void return_last_pieces(size_t workspace);
  // Returns false if the memory is not from here.
  bool give_back(const void* data);

  struct Workspace {
    char* rest;
    char* end;
  };
  // A piece of a workspace that is in use, or was freed and can be used again.
  struct Piece {
    size_t workspace;
    char* data;
    size_t bytes;
    bool is_free;
  };

  Placement* outer_;
  c10::SmallVector<Workspace, 4> workspaces_;
  c10::SmallVector<Piece, 16> pieces_;
  c10::SmallVector<Place, 3> places_;
  c10::SmallVector<const void*, 16> given_;  // by number of the allocation
  int num_lent_ = 0;
};

}  // namespace torch_ort::run
