#include "run/out_forms.h"

#include "build_info.h"
#include "ops/op.h"
#include "run/proved_out_forms.h"

#include <ATen/core/jit_type.h>

#include <algorithm>
#include <iterator>
#include <mutex>
#include <set>
#include <sstream>
#include <unordered_map>
#include <vector>

namespace torch_ort::run {

namespace {

using c10::FunctionSchema;
using c10::TypeKind;

// All overloads by operator name. The dispatcher has no such index, so it is built once.
std::vector<std::string> overloads_of(const std::string& op) {
  static std::mutex mutex;
  static std::unordered_map<std::string, std::vector<std::string>> overloads;
  std::lock_guard lock(mutex);
  if (overloads.empty()) {
    for (const c10::OperatorName& name : c10::Dispatcher::singleton().getAllOpNames()) {
      overloads[name.name].push_back(name.overload_name);
    }
  }
  auto found = overloads.find(op);
  if (found == overloads.end()) return {};
  std::vector<std::string> names = found->second;
  std::sort(names.begin(), names.end());
  return names;
}

std::vector<std::string> words_of(const std::string& line) {
  std::istringstream text(line);
  return std::vector<std::string>(std::istream_iterator<std::string>(text), {});
}

std::set<std::string> words_of_cell(const std::string& cell) {
  std::set<std::string> words;
  std::istringstream text(cell);
  for (std::string word; std::getline(text, word, ',');) words.insert(word);
  return words;
}

// "2.13" of "2.13.0+cpu".
std::string minor_of(const std::string& version) {
  return version.substr(0, version.find('.', version.find('.') + 1));
}

// The column of the table for a device and a version of torch. CUDA uses that of the CPU until a
// GPU has proved one.
std::optional<size_t> column_for(const std::vector<std::string>& names, const std::string& device,
                                 const std::string& version) {
  for (const std::string& kind : {device, std::string("cpu")}) {
    const auto own = std::find(names.begin(), names.end(), kind + "-" + minor_of(version));
    if (own != names.end()) return own - names.begin();
  }
  return std::nullopt;
}

// What has been proved of an overload; nullptr if nothing has.
const std::set<std::string>* proved(const c10::OperatorHandle& out, bool on_cpu) {
  static const Proofs on_the_cpu = proved_out_forms("cpu", TORCH_ORT_TORCH_VERSION);
  static const Proofs on_cuda = proved_out_forms("cuda", TORCH_ORT_TORCH_VERSION);
  const Proofs& proofs = on_cpu ? on_the_cpu : on_cuda;
  const auto found = proofs.find(toString(out.operator_name()));
  return found == proofs.end() ? nullptr : &found->second;
}

// Whether a kernel writes into its out= arguments. Generated ones call the functional form and
// copy.
bool is_real_out(const c10::OperatorHandle& op, bool on_cpu) {
  if (op.hasTag(at::Tag::generated)) return false;
  const auto device = on_cpu ? c10::DispatchKey::CPU : c10::DispatchKey::CUDA;
  return op.hasKernelForDispatchKey(device) ||
         op.hasKernelForDispatchKey(c10::DispatchKey::CompositeExplicitAutograd);
}

// Whether `out` takes the arguments of `functional`, followed by one out argument for each result.
bool is_out_of(const FunctionSchema& functional, const FunctionSchema& out) {
  const auto& plain = functional.arguments();
  const auto& with_out = out.arguments();
  if (with_out.size() != plain.size() + functional.returns().size()) return false;
  for (size_t i = 0; i < plain.size(); ++i) {
    if (plain[i].name() != with_out[i].name()) return false;
    if (*plain[i].type() != *with_out[i].type()) return false;
  }
  for (size_t i = plain.size(); i < with_out.size(); ++i) {
    if (!with_out[i].is_out()) return false;
    if (with_out[i].type()->kind() != TypeKind::TensorType) return false;
  }
  return true;
}

}  // namespace

std::optional<c10::OperatorHandle> find_op(const std::string& op, const std::string& overload) {
  return c10::Dispatcher::singleton().findSchema({op, overload});
}

Proofs proved_out_forms(const std::string& device, const std::string& version) {
  std::istringstream table(kProvedOutForms);
  std::string line;
  std::getline(table >> std::ws, line);
  const std::optional<size_t> column = column_for(words_of(line), device, version);
  Proofs proofs;
  while (column && std::getline(table, line)) {
    const std::vector<std::string> cells = words_of(line);
    if (cells.empty() || cells.at(*column) == "-") continue;
    proofs.emplace(cells[0], words_of_cell(cells.at(*column)));
  }
  return proofs;
}

std::optional<OutForm> find_out_form(const c10::OperatorHandle& functional, bool on_cpu) {
  for (const auto& ret : functional.schema().returns()) {
    if (ret.type()->kind() != TypeKind::TensorType) return std::nullopt;
  }
  const std::string& name = functional.operator_name().name;
  for (const std::string& overload : overloads_of(name)) {
    auto op = find_op(name, overload);
    if (!op || !is_out_of(functional.schema(), op->schema()) || !is_real_out(*op, on_cpu)) continue;
    const std::set<std::string>* words = proved(*op, on_cpu);
    if (words == nullptr) return std::nullopt;
    return OutForm{.op = *op,
                   .any_strides = words->contains("strides"),
                   .over_operands = words->contains("over"),
                   .over_rows = words->contains("rows"),
                   .with_gaps = words->contains("parts")};
  }
  return std::nullopt;
}

const ops::OverwriteForm* find_overwrite_form(const ops::Call& call) {
  const ops::OverwriteForm& form = ops::registry().operator_row(call.op).overwrite;
  return form.op != nullptr && call.overload.empty() ? &form : nullptr;
}

void prefer_out_forms(ops::CallList& calls, bool on_cpu, size_t& yield_position,
                      const std::function<bool(const ir::Value*)>& is_unbacked) {
  ops::CallList rewritten;
  // Pointers to temporaries stay valid.
  rewritten.temporaries = std::move(calls.temporaries);
  size_t new_position = yield_position;
  for (size_t i = 0; i < calls.calls.size(); ++i) {
    const size_t begin = rewritten.calls.size();
    if (i == yield_position) new_position = begin;
    const ops::Call& call = calls.calls[i];
    const bool unbacked =
        std::any_of(call.outputs.begin(), call.outputs.end(),
                    [&](const ir::Value* v) { return v != nullptr && is_unbacked(v); });
    const ops::OutRewrite rewrite = ops::registry().operator_row(call.op).out_rewrite;
    if (unbacked || rewrite == nullptr || !rewrite(call, on_cpu, rewritten)) {
      rewritten.calls.push_back(call);
    }
    for (size_t made = begin; made < rewritten.calls.size(); ++made) {
      rewritten.calls[made].node = call.node;
    }
  }
  if (yield_position == calls.calls.size()) new_position = rewritten.calls.size();
  calls = std::move(rewritten);
  yield_position = new_position;
}

}  // namespace torch_ort::run
