#include "run/autograd/returned_views.h"

#include "ops/aten.h"
#include "ops/aten_names.h"
#include "ops/shapes.h"
#include "run/out_forms.h"

#include <algorithm>
#include <functional>
#include <set>
#include <unordered_map>

namespace torch_ort::run {

void copy_returned_views(ops::CallList& list, size_t& num_forward, bool is_training,
                         std::vector<ir::Value*>& outputs, std::vector<ir::Value*>& gradients) {
  std::vector<ops::Call>& calls = list.calls;
  // The value whose memory each view has, through other views.
  std::unordered_map<const ir::Value*, const ir::Value*> base;
  std::unordered_map<const ir::Value*, size_t> made_by;
  const auto root_of = [&](const ir::Value* value) {
    auto found = base.find(value);
    return found == base.end() ? value : found->second;
  };
  const auto is_tensor = [](const ops::Arg& arg) {
    return std::holds_alternative<ir::Value*>(arg.value);
  };
  const auto first_tensor = [&](const ops::Call& call) {
    const auto found = std::find_if(call.args.begin(), call.args.end(), is_tensor);
    return found == call.args.end() ? nullptr : std::get<ir::Value*>(found->value);
  };
  for (size_t i = 0; i < calls.size(); ++i) {
    const ops::Call& call = calls[i];
    for (const ir::Value* value : call.outputs) {
      if (value != nullptr) made_by[value] = i;
    }
    const auto op = find_op(call.op, call.overload);
    if (!op) continue;
    if (!ops::gives_view(op->schema())) continue;
    const ir::Value* viewed = first_tensor(call);
    for (const ir::Value* value : call.outputs) {
      if (value != nullptr && viewed != nullptr) base[value] = root_of(viewed);
    }
  }

  std::set<const ir::Value*> read_later;  // the roots that backward reads
  for (size_t i = num_forward; i < calls.size(); ++i) {
    const std::function<void(const ops::Arg&)> note = [&](const ops::Arg& arg) {
      if (auto* value = std::get_if<ir::Value*>(&arg.value)) read_later.insert(root_of(*value));
      if (auto* list = std::get_if<ops::ArgList>(&arg.value)) {
        for (const ops::Arg& item : *list) note(item);
      }
    };
    for (const ops::Arg& arg : calls[i].args) note(arg);
  }
  const std::set<const ir::Value*> given(outputs.begin(), outputs.end());

  const auto temporary = [&](const ir::Value& like) {
    ir::Value* made = list.temporary(like.type);
    made->name = like.name + "_copy";
    return made;
  };
  const auto clone = [&](ir::Value* value, std::vector<ops::Call>& added) {
    ir::Value* copied = temporary(*value);
    // A kernel writes the copy, so each of its elements needs a place of its own.
    if (ops::repeats_elements(copied->type)) copied->type.strides = std::nullopt;
    added.push_back({ops::aten::kClone, "", {value, ops::Arg()}, {copied}, value->producer});
    return copied;
  };
  // A view that repeats elements stays one: its base is copied, and the same views are made of the
  // copy.
  const auto copy = [&](ir::Value* value, std::vector<ops::Call>& added) {
    std::vector<const ir::Value*> views;
    if (ops::repeats_elements(value->type) && !ops::repeats_elements(root_of(value)->type)) {
      for (; root_of(value) != value; value = first_tensor(calls[made_by.at(value)])) {
        views.push_back(value);
      }
    }
    ir::Value* copied = clone(value, added);
    for (auto view = views.rbegin(); view != views.rend(); ++view) {
      ops::Call again = calls[made_by.at(*view)];
      *std::find_if(again.args.begin(), again.args.end(), is_tensor) = copied;
      for (ir::Value*& output : again.outputs) {
        ir::Value* made = output != nullptr ? temporary(*output) : nullptr;
        if (output == *view) copied = made;
        output = made;
      }
      added.push_back(std::move(again));
    }
    return copied;
  };
  std::vector<ops::Call> forward_copies, backward_copies;
  if (is_training) {
    for (ir::Value*& value : outputs) {
      const ir::Value* root = root_of(value);
      if (root == value || made_by.count(root) == 0) continue;
      if (read_later.count(root) == 0 || given.count(root) > 0) continue;
      value = copy(value, forward_copies);
    }
  }
  // Whether the memory was made before the border, or belongs to an input. A gradient must not
  // share such memory.
  const auto is_forward_memory = [&](const ir::Value* root) {
    auto made = made_by.find(root);
    if (made != made_by.end()) return made->second < num_forward;
    return root->producer == nullptr;
  };
  for (ir::Value*& value : gradients) {
    if (!is_forward_memory(root_of(value))) continue;
    value = copy(value, backward_copies);
  }
  calls.insert(calls.end(), backward_copies.begin(), backward_copies.end());
  calls.insert(calls.begin() + static_cast<std::ptrdiff_t>(num_forward), forward_copies.begin(),
               forward_copies.end());
  num_forward += forward_copies.size();
}

}  // namespace torch_ort::run
