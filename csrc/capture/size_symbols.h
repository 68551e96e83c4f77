// SizeSymbols of a call as symbols, while a graph is recorded from it: torch.SymInt over ir::Dim.
//
// What a trace decides of sizes becomes a guard, as far as somebody looked: the user's Python, or
// C++ that needs an answer. Choices of layout that C++ makes (is a dim 1 or 0, so that a copy can
// be a view?) are made as for any size and are no guards.
#pragma once

#include "ir/dim.h"

#include <c10/core/SymBool.h>
#include <c10/core/SymInt.h>

#include <mutex>
#include <optional>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

namespace torch_ort::capture {

// Who asks whether a condition holds.
enum class Asker {
  kUser,      // Python's `if`: what it does depends on the answer
  kOperator,  // C++ that goes another way to the same numbers
  kNobody,    // wants the answer if it is the same for all sizes
};

// The symbols of one recording. SymInts keep it alive.
class SizeSymbols : public c10::intrusive_ptr_target {
 public:
  // `value` is that of the call that is recorded. A size is no less than 0; whoever gives a bound
  // answers for it at every call.
  c10::SymInt symbol(const std::string& name, int64_t value, bool is_size,
                     std::optional<int64_t> low = std::nullopt,
                     std::optional<int64_t> high = std::nullopt);
  // A size that only data tells: whatever depends on it raises Unsupported. `value` is one that it
  // might have.
  c10::SymInt unbacked(const std::string& name, int64_t value);
  // An expression over symbols that were made here.
  c10::SymInt expression(const ir::Dim& dim);

  // The expression as it reads with what is known by now.
  ir::Dim simplified(const ir::Dim& dim);
  // Nothing if the answer depends on sizes and nobody has asked before.
  std::optional<bool> known(const ir::Dim& condition);
  // Answers as the call that is recorded does, and notes the guard.
  bool decide(const ir::Dim& condition, Asker asker);
  // The value in the call that is recorded. Raises InternalError where there is none.
  int64_t value(const ir::Dim& dim);
  // An expression that the user, or an operator, takes for an integer: it is one from then on.
  int64_t specialize(const ir::Dim& dim);

  // Conditions under which the same is recorded, in the order in which they were met.
  std::vector<ir::Dim> guards();

 private:
  struct Bounds {  // nothing: none
    std::optional<int64_t> low;
    std::optional<int64_t> high;
  };
  struct Symbol {
    int64_t value;
    bool is_size;     // or an integer that the call brings
    size_t position;  // in the order of creation
    Bounds bounds;
    bool is_unbacked = false;
  };

  ir::Dim simplified_locked(const ir::Dim& dim);
  std::optional<bool> known_locked(const ir::Dim& condition);
  Bounds bounds(const ir::Dim& dim) const;
  int64_t value_locked(const ir::Dim& dim) const;
  bool is_layout_question(const ir::Dim& condition) const;
  void learn(const ir::Dim& condition);
  void learn_equal(const ir::Dim& a, const ir::Dim& b);
  void learn_bound(ir::DimOp op, const ir::Dim& a, const ir::Dim& b);
  void guard(const ir::Dim& condition);
  std::vector<std::pair<ir::Dim, ir::Dim>> equal_factors(const ir::Dim& a, const ir::Dim& b) const;
  std::optional<std::pair<ir::Dim, ir::Dim>> without_common_factors(const ir::Dim& a,
                                                                    const ir::Dim& b) const;

  std::mutex mutex_;
  std::unordered_map<std::string, Symbol> symbols_;
  std::unordered_map<std::string, ir::Dim> replaced_;  // symbols that equal something else
  std::vector<std::pair<ir::Dim, bool>> facts_;
  std::vector<ir::Dim> guards_;
};

// What a dim over the symbols of `sizes` is as a size. InternalError where none of them is of a
// recording.
c10::SymInt size_over(const ir::Dim& dim, const std::vector<c10::SymInt>& sizes);
// The expression of a size; nothing for one of another tracer.
std::optional<ir::Dim> dim_of(const c10::SymInt& size);
std::optional<ir::Dim> condition_of(const c10::SymBool& condition);
// Whether a condition is known without a guard; nothing for one of another tracer, or if not.
std::optional<bool> known_without_guard(const c10::SymBool& condition);
// The number that a float of a recording is for all sizes; nothing if it depends on them.
std::optional<double> known_float(const c10::SymNode& number);
// The value in the recorded call; nothing for a size of another tracer.
std::optional<int64_t> value_of(const c10::SymInt& size);

// Its symbols with their values in the recorded call; nothing for a size of another tracer.
std::optional<std::unordered_map<std::string, int64_t>> symbols_in(const c10::SymInt& size);

// PyTorch counts a dim of size 0 as 1 in strides, which makes two expressions of one: max(N, 1)
// becomes N. The strides of an empty tensor are read by nothing.
std::vector<c10::SymInt> plain_strides(const std::vector<c10::SymInt>& strides);

}  // namespace torch_ort::capture
