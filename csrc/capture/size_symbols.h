// The sizes of a call as symbols while a graph is recorded from it: torch.SymInt over ir::Dim.
//
// A decision on a size becomes a guard if somebody looks at the answer: the user's Python code, or
// C++ code that needs one. Where C++ only chooses among layouts (is a dim 1 or 0, so that a view
// would do instead of a copy?), the answer is the one that is right for all sizes, and there is no
// guard.
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

// Who asks for the value of a condition.
enum class Asker {
  kUser,  // a Python `if`: the program depends on the answer
  // C++ that computes the same results in one of two ways.
  kOperator,
  kNobody,  // wants an answer only if it is the same for all sizes
};

// The symbols of one recording. The SymInts that it makes keep it alive. Its functions may be
// called from several threads.
class SizeSymbols : public c10::intrusive_ptr_target {
 public:
  // Makes a symbol that has `value` in the recorded call. A size is never less than 0. The caller
  // guarantees the bounds `low` and `high` for every call.
  c10::SymInt symbol(const std::string& name, int64_t value, bool is_size,
                     std::optional<int64_t> low = std::nullopt,
                     std::optional<int64_t> high = std::nullopt);
  // Makes an unbacked symbol: a size that depends on data. A decision on it throws Unsupported.
  // `value` is one that it might have; it is at most `high`.
  c10::SymInt unbacked(const std::string& name, int64_t value,
                       std::optional<int64_t> high = std::nullopt);
  // Makes an expression over the symbols of this recording.
  c10::SymInt expression(const ir::Dim& dim);

  // Simplifies the expression by what is known so far.
  ir::Dim simplified(const ir::Dim& dim);
  // The value of a condition; nothing if it depends on sizes and has not been decided before.
  std::optional<bool> known(const ir::Dim& condition);
  // Decides a condition by the values of the recorded call, and adds a guard.
  bool decide(const ir::Dim& condition, Asker asker);
  // The value in the recorded call. Throws InternalError for symbols of another recording.
  int64_t value(const ir::Dim& dim);
  // Whether it has a symbol that depends on data.
  bool is_unbacked(const ir::Dim& dim);
  // Makes the expression a constant, with a guard, because the user's code or an operator asks for
  // an integer.
  int64_t specialize(const ir::Dim& dim);

  // The conditions under which a call has the same recording, in the order in which they were
  // decided.
  std::vector<ir::Dim> guards();

 private:
  struct Bounds {  // nothing: no bound
    std::optional<int64_t> low;
    std::optional<int64_t> high;
  };
  struct Symbol {
    int64_t value;
    bool is_size;     // otherwise an integer argument of the call
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
  std::unordered_map<std::string, ir::Dim> replaced_;  // symbols that equal an expression
  std::vector<std::pair<ir::Dim, bool>> facts_;
  std::vector<ir::Dim> guards_;
};

// Computes with floats that depend on sizes and are no integers, such as a quotient of two sizes:
// these are no expressions of this file. `method` is the name of one of PyTorch's SymNode, such as
// "truediv".
using FloatFunction = c10::SymNode (*)(const char* method, const c10::SymNode& a,
                                       const c10::SymNode& b);
// Has to be called before the first recording.
void compute_floats_by(FloatFunction function);

// The SymInt of a dim whose symbols occur in `sizes`. Throws InternalError if none of these belongs
// to a recording.
c10::SymInt size_over(const ir::Dim& dim, const std::vector<c10::SymInt>& sizes);
// The expression of a size; nothing if another tracer made it.
std::optional<ir::Dim> dim_of(const c10::SymInt& size);
std::optional<ir::Dim> condition_of(const c10::SymBool& condition);
// The value of a condition if it is known without a guard; nothing if it is not, or if another
// tracer made it.
std::optional<bool> known_without_guard(const c10::SymBool& condition);
// The value of a recorded float if it is the same for all sizes; nothing otherwise.
std::optional<double> known_float(const c10::SymNode& number);
// The value of a size in the recorded call; nothing if another tracer made it.
std::optional<int64_t> value_of(const c10::SymInt& size);

// Whether a size of a recording has a symbol that depends on data.
bool depends_on_data(const c10::SymInt& size);
// The symbols of a size, with their values in the recorded call; nothing if another tracer made it.
std::optional<std::unordered_map<std::string, int64_t>> symbols_in(const c10::SymInt& size);

// Replaces max(N, 1) by N in strides. PyTorch counts a dim of size 0 as 1 there, which makes two
// expressions of equal strides. Nothing reads the strides of an empty tensor.
std::vector<c10::SymInt> plain_strides(const std::vector<c10::SymInt>& strides);

}  // namespace torch_ort::capture
