#include "run/out_forms.h"

#include "build_info.h"
#include "run/proved_out_forms.h"

#include <ATen/core/jit_type.h>
#include <c10/util/BFloat16.h>
#include <c10/util/Half.h>

#include <algorithm>
#include <iterator>
#include <mutex>
#include <set>
#include <sstream>
#include <unordered_map>
#include <unordered_set>
#include <vector>

namespace torch_ort::run {

namespace {

using c10::FunctionSchema;
using c10::TypeKind;

// All overloads by operator name, read once: the dispatcher has no such index.
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

// By overload: the words of what is proved of it.
using Proofs = std::unordered_map<std::string, std::set<std::string>>;

std::set<std::string> words_of(const std::string& cell) {
  std::set<std::string> words;
  std::istringstream text(cell);
  for (std::string word; std::getline(text, word, ',');) words.insert(word);
  return words;
}

// "2.13" of "2.13.0+cpu".
std::string version_of_torch() {
  const std::string version = TORCH_ORT_TORCH_VERSION;
  return version.substr(0, version.find('.', version.find('.') + 1));
}

// The columns that speak for a device. CUDA has that of the CPU until a GPU has proved one of its
// own. A version of torch that has none may use what holds for every known one.
std::set<size_t> columns_for(const std::vector<std::string>& names, const std::string& device) {
  for (const std::string& kind : {device, std::string("cpu")}) {
    const auto own = std::find(names.begin(), names.end(), kind + "-" + version_of_torch());
    if (own != names.end()) return {static_cast<size_t>(own - names.begin())};
  }
  std::set<size_t> columns;
  for (size_t i = 0; i < names.size(); ++i) {
    if (names[i].starts_with("cpu-")) columns.insert(i);
  }
  return columns;
}

Proofs read_proofs(const std::string& device) {
  const auto cells_of = [](const std::string& line) {
    std::istringstream text(line);
    return std::vector<std::string>(std::istream_iterator<std::string>(text), {});
  };
  std::istringstream table(kProvedOutForms);
  std::string line;
  std::getline(table >> std::ws, line);
  const std::set<size_t> columns = columns_for(cells_of(line), device);
  Proofs proofs;
  while (std::getline(table, line)) {
    const std::vector<std::string> cells = cells_of(line);
    const auto is_proved = [&cells](size_t column) { return cells.at(column) != "-"; };
    if (cells.empty() || !std::all_of(columns.begin(), columns.end(), is_proved)) continue;
    std::set<std::string> shared = words_of(cells.at(*columns.begin()));
    for (size_t column : columns) {
      const std::set<std::string> words = words_of(cells.at(column));
      std::erase_if(shared, [&words](const std::string& word) { return !words.contains(word); });
    }
    proofs.emplace(cells[0], std::move(shared));
  }
  return proofs;
}

// nullptr: nothing is.
const std::set<std::string>* proved(const c10::OperatorHandle& out, bool on_cpu) {
  static const Proofs on_the_cpu = read_proofs("cpu"), on_cuda = read_proofs("cuda");
  const Proofs& proofs = on_cpu ? on_the_cpu : on_cuda;
  const auto found = proofs.find(toString(out.operator_name()));
  return found == proofs.end() ? nullptr : &found->second;
}

// A kernel that writes into its out= arguments; generated ones call the functional form and copy.
bool is_real_out(const c10::OperatorHandle& op, bool on_cpu) {
  if (op.hasTag(at::Tag::generated)) return false;
  const auto device = on_cpu ? c10::DispatchKey::CPU : c10::DispatchKey::CUDA;
  return op.hasKernelForDispatchKey(device) ||
         op.hasKernelForDispatchKey(c10::DispatchKey::CompositeExplicitAutograd);
}

// Whether `out` takes the arguments of `functional`, then one out argument per result.
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

ops::Arg first(const ops::ArgList& args) { return args.at(0); }

const OverwriteForm kOverwriteForms[] = {
    {"aten::clone", "", "aten::copy_", "",
     [](const ops::ArgList& a) -> ops::ArgList { return {first(a), false}; }, true},
    {"aten::_to_copy", "", "aten::copy_", "",
     [](const ops::ArgList& a) -> ops::ArgList { return {first(a), false}; }},
    {"aten::zeros_like", "", "aten::zero_", "",
     [](const ops::ArgList&) -> ops::ArgList { return {}; }},
    {"aten::ones_like", "", "aten::fill_", "Scalar",
     [](const ops::ArgList&) -> ops::ArgList { return {1}; }},
    {"aten::full_like", "", "aten::fill_", "Scalar",
     [](const ops::ArgList& a) -> ops::ArgList { return {a.at(1)}; }},
    {"aten::full", "", "aten::fill_", "Scalar",
     [](const ops::ArgList& a) -> ops::ArgList { return {a.at(1)}; }},
    {"aten::zeros", "", "aten::zero_", "", [](const ops::ArgList&) -> ops::ArgList { return {}; }},
    {"aten::ones", "", "aten::fill_", "Scalar",
     [](const ops::ArgList&) -> ops::ArgList { return {1}; }},
    {"aten::new_zeros", "", "aten::zero_", "",
     [](const ops::ArgList&) -> ops::ArgList { return {}; }},
    {"aten::new_full", "", "aten::fill_", "Scalar",
     [](const ops::ArgList& a) -> ops::ArgList { return {a.at(2)}; }},
    {"torch_ort::random_seed", "", "aten::random_", "",
     [](const ops::ArgList&) -> ops::ArgList { return {ops::Arg()}; }},
    {"torch_ort::bernoulli_mask", "", "aten::bernoulli_", "float",
     [](const ops::ArgList& a) -> ops::ArgList { return {a.at(1), ops::Arg()}; }},
};

// Their `.Scalar` overload wraps the number into a tensor and calls the other one, which has an
// out= kernel.
const std::unordered_set<std::string> kWrapsNumbers = {"aten::add", "aten::sub", "aten::mul",
                                                       "aten::div"};

// Some kernels keep a number in the dtype of the elements that they multiply it by.
double rounded_to(double number, ir::DType dtype) {
  const auto narrow = static_cast<float>(number);
  if (dtype == ir::DType::kBFloat16) return static_cast<float>(c10::BFloat16(narrow));
  if (dtype == ir::DType::kHalf) return static_cast<float>(c10::Half(narrow));
  return number;
}

// Whether `call` was replaced by calls with real out= forms, appended to `out`.
bool expand_to_out_forms(ops::CallList& calls, const ops::Call& call, bool on_cpu,
                         std::vector<ops::Call>& out) {
  const auto push = [&](std::string op, std::string overload, ops::ArgList args,
                        std::vector<ir::Value*> outputs) {
    out.push_back(
        {std::move(op), std::move(overload), std::move(args), std::move(outputs), call.node});
  };
  const auto input = [&](size_t index) { return std::get<ir::Value*>(call.args.at(index).value); };

  if (call.overload == "Scalar" && kWrapsNumbers.contains(call.op) && call.args.size() >= 2) {
    push(call.op, "Tensor", call.args, call.outputs);
    return true;
  }
  if (call.op == "aten::relu") {
    push("aten::clamp_min", "", {input(0), 0}, call.outputs);
    return true;
  }
  if (call.op == "aten::sum" && call.overload.empty()) {
    push("aten::sum", "dim_IntList",
         {input(0), ops::Arg(ops::ArgList{}), false,
          call.args.size() > 1 ? call.args[1] : ops::Arg()},
         call.outputs);
    return true;
  }
  if (call.op == "aten::embedding") {
    // As the functional kernel does it: rows by number, then the shape.
    ir::Value *weight = input(0), *ids = input(1), *result = call.outputs.at(0);
    if (result == nullptr || !ids->type.is_known() || !weight->type.is_known()) return false;
    if (weight->type.shape->size() != 2) return false;
    if (ids->type.shape->size() == 1) {
      push("aten::index_select", "", {weight, 0, ids}, call.outputs);
      return true;
    }
    const ir::Dim count = ir::numel(*ids->type.shape);
    ir::Type flat_ids = ids->type;
    flat_ids.shape = ir::Shape{count};
    flat_ids.strides.reset();
    ir::Type rows = result->type;
    rows.shape = ir::Shape{count, weight->type.shape->at(1)};
    rows.strides.reset();
    ir::Value* flat = calls.temporary(flat_ids);
    ir::Value* selected = calls.temporary(rows);
    push("aten::reshape", "", {ids, ops::Arg::list(ir::Shape{-1})}, {flat});
    push("aten::index_select", "", {weight, 0, flat}, {selected});
    push("aten::view", "", {selected, ops::Arg::list(*result->type.shape)}, {result});
    return true;
  }
  if (on_cpu && call.op == "aten::native_dropout" && call.args.size() == 3) {
    // The steps of the CPU kernel, with memory of ours; the draws and the roundings are the same.
    const auto* p = std::get_if<double>(&call.args[1].value);
    const auto* train = std::get_if<bool>(&call.args[2].value);
    ir::Value* x = input(0);
    if (p == nullptr || train == nullptr || !*train || *p <= 0.0) return false;
    if (*p >= 1.0) {
      // `dropout`, which this call stands for, draws nothing here.
      if (call.outputs[0] != nullptr) push("aten::mul", "Tensor", {x, 0.0}, {call.outputs[0]});
      if (call.outputs.size() > 1 && call.outputs[1] != nullptr) {
        push("aten::zeros_like", "", {x, "bool"}, {call.outputs[1]});
      }
      return true;
    }
    if (call.outputs[0] == nullptr || !call.outputs[0]->type.is_known()) return false;
    ir::Value* mask = call.outputs.size() > 1 ? call.outputs[1] : nullptr;
    if (mask == nullptr) {
      ir::Type type = call.outputs[0]->type;
      type.dtype = ir::DType::kBool;
      mask = calls.temporary(type);
    }
    ir::Value* kept = calls.temporary(call.outputs[0]->type);
    push("torch_ort::bernoulli_mask", "", {x, 1.0 - *p}, {mask});
    push("aten::mul", "Tensor", {x, mask}, {kept});
    const double scale = rounded_to(1.0 / (1.0 - *p), call.outputs[0]->type.dtype);
    push("aten::mul", "Tensor", {kept, scale}, {call.outputs[0]});
    return true;
  }
  if (on_cpu && call.op == "aten::native_dropout_backward" && call.outputs.at(0) != nullptr) {
    const ir::Type& type = call.outputs[0]->type;
    if (!type.is_known() || input(0)->type.dtype != type.dtype) return false;
    ir::Value* kept = calls.temporary(type);
    push("aten::mul", "Tensor", {input(0), input(1)}, {kept});
    push("aten::mul", "Tensor", {kept, call.args.at(2)}, {call.outputs[0]});
    return true;
  }
  return false;
}

}  // namespace

std::optional<c10::OperatorHandle> find_op(const std::string& op, const std::string& overload) {
  return c10::Dispatcher::singleton().findSchema({op, overload});
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

const OverwriteForm* find_overwrite_form(const ops::Call& call) {
  for (const OverwriteForm& form : kOverwriteForms) {
    if (call.op == form.functional && call.overload == form.overload) return &form;
  }
  return nullptr;
}

void prefer_out_forms(ops::CallList& calls, bool on_cpu, size_t& yield_position,
                      const std::function<bool(const ir::Value*)>& is_late) {
  std::vector<ops::Call> rewritten;
  rewritten.reserve(calls.calls.size());
  size_t new_position = yield_position;
  for (size_t i = 0; i < calls.calls.size(); ++i) {
    if (i == yield_position) new_position = rewritten.size();
    ops::Call& call = calls.calls[i];
    const bool late = std::any_of(call.outputs.begin(), call.outputs.end(),
                                  [&](const ir::Value* v) { return v != nullptr && is_late(v); });
    if (late || !expand_to_out_forms(calls, call, on_cpu, rewritten)) rewritten.push_back(call);
  }
  if (yield_position == calls.calls.size()) new_position = rewritten.size();
  calls.calls = std::move(rewritten);
  yield_position = new_position;
}

}  // namespace torch_ort::run
