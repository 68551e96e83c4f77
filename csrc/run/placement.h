// Results of kernels that have no `out=` form, made in memory that is given to them: while such a
// kernel runs, the allocation that becomes its result is answered with that memory. Which one that
// is, calls tell.
#pragma once

#include <c10/util/SmallVector.h>

#include <atomic>
#include <memory>
#include <string>

namespace torch_ort::run {

// Whether the operator allocates its results on the thread that calls it, through PyTorch's
// allocator of the CPU, and keeps nothing that it allocates.
bool is_placeable(const std::string& op);

// By result of a step: the number, in its last call, of the allocation that became the result.
class AllocationNumbers {
 public:
  static constexpr int kUnknown = -1;
  static constexpr int kNever = -2;  // it came with other strides

  explicit AllocationNumbers(size_t num_results);
  std::atomic<int>& operator[](size_t result) const { return numbers_[result]; }

 private:
  std::unique_ptr<std::atomic<int>[]> numbers_;
};

// Answers allocations of the calling thread while it lives: results with the memory that they are
// to stand in, others with workspaces as far as they go.
class Placement {
 public:
  Placement();
  ~Placement();
  Placement(const Placement&) = delete;
  Placement& operator=(const Placement&) = delete;

  void add_workspace(char* data, int64_t bytes);
  // Answers allocation `number`, if it asks for `bytes`, with `data`.
  void expect(int number, void* data, size_t bytes);
  // Whether it is the memory of a result.
  bool has_placed(const void* data) const;
  // Whether nobody holds memory that it has given.
  bool is_over() const { return num_lent_ == 0; }
  // Of the allocation that got `data`; kUnknown if none did.
  int number_of(const void* data) const;

 private:
  friend class PlacingAllocator;
  struct Place {
    int number;
    void* data;
    size_t bytes;
  };

  void* take(size_t bytes);  // nullptr: allocate as usual
  void* take_piece(size_t bytes);
  bool give_back_piece(const void* data);
  void note(const void* data) { given_.push_back(data); }
  void return_last_pieces(size_t workspace);
  // False if it is no memory of ours.
  bool give_back(const void* data);

  struct Workspace {
    char* rest;
    char* end;
  };
  // A piece of a workspace: taken from what is left of it, or one that is free again.
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
  c10::SmallVector<const void*, 16> given_;  // by number
  int num_lent_ = 0;
};

}  // namespace torch_ort::run
