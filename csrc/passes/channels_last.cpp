// Keeps images in channels-last layout between convolutions. Volumes (N, C, D, H, W) are images,
// too.
//
// oneDNN's convolutions work on layouts of their own. Row-major images are reordered before and
// after each convolution, forward and backward, through temporaries of their size; channels-last
// images are used in place. So this pass chooses one of the two layouts for each node that can have
// either, in both halves: convolutions, batch norms, pooling, element-wise nodes, and reductions
// along known axes.
//
// The choice is a minimum cut of the graph. It weighs the reorders that convolutions save against
// copies where an image is made in one layout and read in the other. Images that other nodes read,
// that the caller passes or that are returned to it are row-major and stay so. What a convolution
// saves decreases with the share of its weight in the bytes that it reads: where weights are larger
// than images, as in the last stages of a network, oneDNN's channels-last kernels are slower, and
// there is nothing to gain, but on processors where the engine computes the gradients of weights.
// Where sizes are symbols, those of the captured call are the estimate; images without known sizes
// stay row-major.
//
// Kernels that follow the layout of their images keep their axes, and get images (N, C, H, W) with
// the strides of (N, H, W, C). All other nodes are rewritten to row-major tensors (N, H, W, C), so
// that fused regions see channels as columns; concatenations and slices then name other axes.
// Transposes between the two are views. A slice is copied if such a kernel reads it, because most
// of these kernels require dense images or are slow on others. Weights keep their layout; their
// gradients are computed in channels-last layout and copied, because the caller expects them
// row-major.
//
// Where a model transposes images itself, to apply a layer to the channels of each pixel and back,
// as ConvNeXt does, its tensors (N, H, W, C) are channels-last images already. Nothing is copied
// there if the images in between are channels last.
//
// Copies at the borders make every choice correct, for all sizes. An image that has both layouts at
// once for some sizes, such as one of a single pixel, is copied if that is not known before the
// call.
//
// Average pooling of images stays PyTorch's, although it takes several times as long as a copy of
// as many channels-last bytes: networks spend very little of their time there. Figures are in
// benchmarks/results/decisions.md.

#include "ops/channels_last.h"

#include "ir/edit.h"
#include "ops/fusion.h"
#include "ops/op.h"
#include "ops/shapes.h"
#include "ops/writer.h"
#include "passes/context.h"
#include "passes/convolutions.h"
#include "passes/halves.h"
#include "passes/known_sizes.h"
#include "passes/layouts.h"
#include "passes/memory.h"
#include "passes/min_cut.h"
#include "region/codegen.h"

#include <algorithm>
#include <map>
#include <unordered_map>

namespace torch_ort::passes {

namespace {

using ir::Dim;
using ir::DType;
using ir::Graph;
using ir::Node;
using ir::Shape;
using ir::Type;
using ir::Value;
using ops::ImageForm;
using Kind = ops::ImageForm::Kind;

// The time of a copy from one layout to the other, in reorders by oneDNN of the same image: PyTorch
// copies numbers of two bytes one by one (cpu/copy.cpp has the others).
int64_t reorders_per_copy(const Value& image) {
  return ir::size_bytes(image.type.dtype) < 4 ? 3 : 1;
}

bool is_expanded(const Value& value) { return ir::is(value.producer, "Expand"); }

// A view of a part of an image, which has the strides of the whole image.
bool is_part(const Value& value) {
  return value.producer != nullptr && value.type.strides && ops::is_view(*value.producer) &&
         ops::image_form(*value.producer).kind == Kind::kAxes;
}

size_t rank_of(const Value& value) { return value.type.shape->size(); }

// Whether the node is a Transpose of an image by the order for its rank.
bool is_transpose(const Node* node, Shape (*order)(size_t rank)) {
  if (!ir::is(node, "Transpose") || node->outputs.empty() || node->outputs[0] == nullptr) {
    return false;
  }
  const Shape perm = ir::ints_attr(node->attrs, "perm", {});
  return ops::is_image_rank(perm.size()) && perm == order(perm.size());
}

// The row-major tensor (N, H, W, C) that the image is a view of; nullptr if it is none.
Value* own_last(const Value& image) {
  if (!is_transpose(image.producer, ops::to_first)) return nullptr;
  Value* last = image.producer->inputs[0];
  return last->type.strides ? nullptr : last;
}

// Whether a node only views an image as (N, H, W, C), for readers that take it as a row-major
// tensor: none of them has promised strides that follow those of the image.
bool views_as_last(const Node* node) {
  if (!is_transpose(node, ops::to_last)) return false;
  const Value& view = *node->outputs[0];
  return std::all_of(view.uses.begin(), view.uses.end(), [](const ir::Use& use) {
    return takes_row_major(use) && !is_border(use.node) && !ops::is_view(*use.node);
  });
}

// Whether the image lies in memory in the same way in both layouts, as that of a single pixel does.
bool is_either_layout(const Value& value) {
  return !is_part(value) && ops::is_either_layout(*value.type.shape);
}

bool is_one(const Value& value) { return ir::numel(*value.type.shape) == Dim(1); }

// A node that may have either layout.
struct Candidate {
  ImageForm form;
  std::vector<Value*> reads, makes;  // only those that are images
};

bool contains(const std::vector<Value*>& images, const Value* value) {
  return std::find(images.begin(), images.end(), value) != images.end();
}

bool keeps_dims(const Node& node) { return ir::int_attr(node.attrs, "keepdims", 1) != 0; }

// How large values were in the captured call; 0 if that is not known.
class Scales {
 public:
  explicit Scales(const Graph& graph) : graph_(graph) {}

  int64_t count(const Value& value) const {
    return hinted_size(graph_, ir::numel(*value.type.shape)).value_or(0);
  }

  int64_t num_bytes(const Value& value) const {
    return count(value) * ir::size_bytes(value.type.dtype);
  }

 private:
  const Graph& graph_;
};

// ---- which nodes can have either layout

class Candidates {
 public:
  Candidates(Graph& graph, const Scales& scales) : memory_(graph), sizes_(graph), scales_(scales) {
    for (Node& node : graph.nodes) {
      if (node.is_erased()) continue;
      if (std::optional<Candidate> found = find(node)) nodes_.emplace(&node, std::move(*found));
    }
  }

  const Candidate* of(const Node* node) const {
    const auto found = nodes_.find(node);
    return found == nodes_.end() ? nullptr : &found->second;
  }

 private:
  // Whether the value is on a device where channels last is faster, all its sizes are known when a
  // call begins, and nothing writes to it.
  bool is_sized(const Value* value) const {
    return value != nullptr && value->type.is_known() &&
           ops::prefers_channels_last(value->type.device) && sizes_.are_known(*value) &&
           !memory_.is_written(value);
  }

  bool is_plain(const Value* value) const { return is_sized(value) && !value->type.strides; }

  // A view of a part of an image that is itself row-major.
  bool is_part_of_image(const Value& value) const {
    return is_part(value) && is_image(value.producer->inputs[0]);
  }

  bool is_image(const Value* value) const {
    if (!is_sized(value)) return false;
    const bool has_strides = value->type.strides && own_last(*value) == nullptr;
    if (has_strides && !is_expanded(*value) && !is_part_of_image(*value)) return false;
    return ops::is_image_rank(rank_of(*value)) && scales_.count(*value) > 0 &&
           std::none_of(value->uses.begin(), value->uses.end(),
                        [](const ir::Use& use) { return use.index == ir::kCaptured; });
  }

  std::optional<Candidate> find(Node& node) const {
    Candidate found{.form = ops::image_form(node)};
    bool fits = false;
    switch (found.form.kind) {
      case Kind::kNone: break;
      case Kind::kKernel: fits = fits_kernel(node, found); break;
      case Kind::kPointwise: fits = fits_pointwise(node, found); break;
      case Kind::kReduction: fits = fits_reduction(node, found); break;
      case Kind::kExpand: fits = fits_expand(node, found); break;
      case Kind::kAxes: fits = fits_axes(node, found); break;
    }
    return fits ? std::optional(std::move(found)) : std::nullopt;
  }

  bool fits_kernel(const Node& node, Candidate& found) const {
    for (int slot : found.form.inputs) {
      Value* image = node.inputs.at(slot);
      if (!is_image(image) || is_expanded(*image)) return false;
      found.reads.push_back(image);
    }
    for (int output : found.form.outputs) {
      if (output >= static_cast<int>(node.outputs.size())) break;
      Value* image = node.outputs[output];
      // Nobody asks for this gradient.
      if (image == nullptr || image->uses.empty()) continue;
      if (!is_image(image)) return false;
      found.makes.push_back(image);
    }
    // It reads and makes channels-last images as it is.
    const bool is_done =
        std::all_of(found.reads.begin(), found.reads.end(),
                    [](const Value* image) { return own_last(*image) != nullptr; }) &&
        std::all_of(found.makes.begin(), found.makes.end(),
                    [](const Value* image) { return is_either_layout(*image); });
    if (is_done) return false;
    if (found.form.weight < 0) return true;
    if (fails_in_library(node)) return false;
    const DType dtype = found.reads[0]->type.dtype;
    // Only oneDNN's convolutions gain, and these compute in float32 and bfloat16.
    return (dtype == DType::kFloat || dtype == DType::kBFloat16) &&
           is_plain(node.inputs.at(found.form.weight));
  }

  // Of volumes in groups with strides, oneDNN's gradient of the weight for channels that lie side
  // by side leaves numbers unwritten, and writes beyond its memory (oneDNN 3.12: a window of 7 with
  // a stride of 2 and 17 channels by themselves). Its kernel for row-major volumes is right.
  static bool fails_in_library(const Node& node) {
    const std::optional<Convolution> it = find_convolution(node);
    if (!it || !it->is_of_volumes() || it->groups == Dim(1)) return false;
    return std::any_of(it->strides.begin(), it->strides.end(),
                       [](const Dim& stride) { return !(stride == Dim(1)); });
  }

  // An operand of a point-wise node must broadcast to the result.
  bool is_operand(const Value* value, const Shape& result) const {
    if (value == nullptr) return true;
    if (!is_plain(value) && !is_image(value)) return false;
    const Shape& shape = *value->type.shape;
    if (shape.size() > result.size()) return false;
    for (size_t i = 0; i < shape.size(); ++i) {
      const Dim& dim = result[result.size() - shape.size() + i];
      if (!(shape[i] == dim) && !(shape[i] == Dim(1))) return false;
    }
    return true;
  }

  bool fits_pointwise(const Node& node, Candidate& found) const {
    if (!is_image(node.outputs[0]) || node.outputs[0]->type.strides) return false;
    for (Value* input : node.inputs) {
      if (!is_operand(input, *node.outputs[0]->type.shape)) return false;
      if (input != nullptr && !is_one(*input) && rank_of(*input) == rank_of(*node.outputs[0])) {
        found.reads.push_back(input);
      }
    }
    found.makes.push_back(node.outputs[0]);
    return true;
  }

  bool fits_reduction(const Node& node, Candidate& found) const {
    if (!is_image(node.inputs[0]) || !is_plain(node.outputs[0])) return false;
    const std::optional<std::vector<int64_t>> axes = ops::reduction_axes(node);
    if (!axes) return false;
    found.reads.push_back(node.inputs[0]);
    if (keeps_dims(node)) {
      found.makes.push_back(node.outputs[0]);
      return is_image(node.outputs[0]);
    }
    // The dims that are left must have the same order in both layouts.
    int64_t last = -1;
    for (const Dim& each : ops::to_last(rank_of(*node.inputs[0]))) {
      const int64_t axis = each.constant();
      if (std::find(axes->begin(), axes->end(), axis) != axes->end()) continue;
      if (axis < last) return false;
      last = axis;
    }
    return true;
  }

  bool fits_expand(const Node& node, Candidate& found) const {
    const bool fits = is_image(node.inputs[0]) && !is_expanded(*node.inputs[0]) &&
                      is_image(node.outputs[0]) &&
                      rank_of(*node.inputs[0]) == rank_of(*node.outputs[0]) &&
                      is_operand(node.inputs[0], *node.outputs[0]->type.shape);
    if (!fits) return false;
    found.reads.push_back(node.inputs[0]);
    found.makes.push_back(node.outputs[0]);
    return true;
  }

  bool fits_axes(const Node& node, Candidate& found) const {
    for (const auto& [values, images] :
         {std::pair(&node.inputs, &found.reads), std::pair(&node.outputs, &found.makes)}) {
      for (Value* value : *values) {
        // Nobody asks for this part.
        if (value == nullptr || value->uses.empty()) continue;
        if (!value->type.shape) return false;
        // Integer arguments and 0-d tensors are no images.
        if (!ops::is_image_rank(rank_of(*value))) continue;
        if (!is_image(value)) return false;
        images->push_back(value);
      }
    }
    return !found.reads.empty() && !found.makes.empty() &&
           ops::work_of(node).image.rename_axes(node).has_value();
  }

  SharedMemory memory_;
  KnownSizes sizes_;
  const Scales& scales_;
  std::unordered_map<const Node*, Candidate> nodes_;
};

// ---- which of them get channels last

class Chooser {
 public:
  Chooser(Graph& graph, const Candidates& candidates, const Scales& scales)
      : graph_(graph), candidates_(candidates), scales_(scales) {}

  std::unordered_set<const Node*> run() {
    std::unordered_set<const Node*> moved;
    for (Node& node : graph_.nodes) {
      if (node.is_erased() || candidates_.of(&node) == nullptr) continue;
      places_[&node] = cut_.add_node();
      weigh(node, *candidates_.of(&node));
    }
    if (!has_gain_) return moved;
    for (Value* input : graph_.inputs) add_borders(*input);
    for (Node& node : graph_.nodes) {
      for (Value* output : node.outputs) {
        if (output != nullptr) add_borders(*output);
      }
    }
    const std::vector<bool> is_last = cut_.sink_side();
    for (const auto& [node, place] : places_) {
      if (is_last[place]) moved.insert(node);
    }
    return moved;
  }

 private:
  // Whether channels-last images are slower where the weight is larger than they are. It is the
  // gradient of the weight that would be, which the engine computes of many convolutions
  // (passes/winograd), on some processors of all (passes/convolution_weights).
  bool slows_down(const Node& node, const Value& weight) const {
    const bool is_own = region::prefers_own_convolutions(&weight);
    if (is_own && weight.type.dtype == DType::kFloat) return false;
    const std::optional<Convolution> found = find_convolution(node);
    if (!found) return true;
    return is_own ? !found->suits_depthwise() : !suits_winograd(graph_, *found);
  }

  // Adds what the convolution gains or loses by channels last, as bytes that need no reorder.
  void weigh(const Node& node, const Candidate& candidate) {
    if (candidate.form.weight < 0) return;
    int64_t images = 0, bytes = 0;
    for (const std::vector<Value*>* values : {&candidate.reads, &candidate.makes}) {
      // The share of the weight is taken of one input and one result. The gradient node of a
      // convolution reads two images, so its result would be a third one.
      const bool is_third = values == &candidate.makes && candidate.reads.size() > 1;
      for (const Value* value : *values) {
        if (!is_third) images += scales_.count(*value);
        bytes += scales_.num_bytes(*value);
      }
    }
    const Value& weight = *node.inputs[candidate.form.weight];
    const double share = slows_down(node, weight) ? static_cast<double>(scales_.count(weight)) /
                                                        static_cast<double>(images)
                                                  : 0;
    const auto gain = static_cast<int64_t>(static_cast<double>(bytes) * (1 - share));
    if (gain > 0) {
      cut_.add_arc(places_[&node], MinCut::kSink, gain);
      has_gain_ = true;
    } else {
      cut_.add_arc(MinCut::kSource, places_[&node], -gain);
    }
  }

  // The place in the cut of a node that reads or makes `value` as an image. Any other node needs it
  // row-major, so its place is the source.
  int place_of(const Node* node, const Value& value, bool reads) const {
    const Candidate* candidate = node == nullptr ? nullptr : candidates_.of(node);
    if (candidate == nullptr) return MinCut::kSource;
    const bool is_there = contains(reads ? candidate->reads : candidate->makes, &value);
    return is_there ? places_.at(node) : MinCut::kSource;
  }

  // Adds what copies of `value` would cost. One copy serves all readers of the other layout. A part
  // that is read row-major is cut out of the row-major image, so the cost is that of a copy of the
  // image.
  void add_borders(const Value& value) {
    // It is there in both layouts.
    if (own_last(value) != nullptr) return;
    const int maker = place_of(value.producer, value, false);
    std::vector<int> readers;
    bool is_viewed = false;
    for (const ir::Use& use : value.uses) {
      const bool is_view = views_as_last(use.node);
      if (!is_view) readers.push_back(place_of(use.node, value, true));
      is_viewed |= is_view;
    }
    // Else its readers, which take channels as columns, read numbers that are apart.
    if (is_viewed && maker != MinCut::kSource) {
      cut_.add_arc(maker, MinCut::kSink, scales_.num_bytes(value));
    }
    const auto is_plain = [](int place) { return place == MinCut::kSource; };
    if (std::all_of(readers.begin(), readers.end(), is_plain) && is_plain(maker)) return;
    if (is_either_layout(value)) return;
    const int64_t cost = reorders_per_copy(value) * scales_.num_bytes(value);
    const int to_last = cut_.add_node(), to_first = cut_.add_node();
    to_first_[&value] = to_first;
    cut_.add_arc(maker, to_last, cost);
    if (is_part(value)) {
      const auto image = to_first_.find(value.producer->inputs[0]);
      if (image != to_first_.end()) cut_.add_arc(to_first, image->second, MinCut::kInfinite);
    } else if (!is_plain(maker)) {
      cut_.add_arc(to_first, maker, cost);
    }
    for (int reader : readers) {
      if (!is_plain(reader)) cut_.add_arc(to_last, reader, MinCut::kInfinite);
      cut_.add_arc(reader, to_first, MinCut::kInfinite);
    }
  }

  Graph& graph_;
  const Candidates& candidates_;
  const Scales& scales_;
  MinCut cut_;
  std::unordered_map<const Node*, int> places_;
  std::unordered_map<const Value*, int> to_first_;  // places of the plain copies
  bool has_gain_ = false;
};

// ---- the rewrite

class Mover {
 public:
  Mover(Graph& graph, const Candidates& candidates, std::unordered_set<const Node*> moved)
      : graph_(graph), candidates_(candidates), chosen_(std::move(moved)) {}

  int run(PassContext& context) {
    std::vector<Node*> nodes;
    for (Node& node : graph_.nodes) {
      if (!node.is_erased()) nodes.push_back(&node);
    }
    int rewrites = 0;
    for (Node* node : nodes) {
      if (chosen_.contains(node) && context.may_rewrite()) {
        move(*node, *candidates_.of(node));
        ++rewrites;
      } else if (views_as_last(node) && is_moved(node->inputs[0])) {
        Value* last = get(*node->inputs[0], Form::kLast, node);
        ir::replace_uses(*node->outputs[0], *last, graph_);
        replaced_.push_back(node);
      } else {
        for (size_t i = 0; i < node->inputs.size(); ++i) {
          if (!is_moved(node->inputs[i])) continue;
          ir::set_input(*node, static_cast<int>(i), get(*node->inputs[i], Form::kPlain, node));
        }
      }
      if (is_border(node)) copies_.clear();
    }
    for (size_t i = 0; i < graph_.outputs.size(); ++i) give_out(static_cast<int>(i));
    for (auto node = replaced_.rbegin(); node != replaced_.rend(); ++node) {
      ir::erase(graph_, **node);
    }
    return rewrites;
  }

 private:
  enum class Form {
    kPlain,  // (N, C, H, W), row-major
    kView,   // (N, C, H, W), channels last
    kLast,   // (N, H, W, C), row-major
  };

  bool is_moved(const Value* value) const { return value != nullptr && moved_.contains(value); }

  // ---- images in the layout that a reader needs

  // Gives `value` in another form. It is made in front of `before`, or at the end of the graph, and
  // at most once in each half, because a copy that crosses the border would be saved. Views for
  // PyTorch's kernels have the strides of channels last even for dims of one element, where strides
  // do not matter: PyTorch recognizes the layout by them.
  Value* get(Value& value, Form form, Node* before) {
    if (Value* last = own_last(value)) return form == Form::kLast ? last : &value;
    if (form == own_form(value)) return form == Form::kLast ? moved_.at(&value) : &value;
    Value*& found = copies_[{&value, form}];
    if (found == nullptr) found = make(value, form, before);
    return found;
  }

  Form own_form(const Value& value) const {
    const auto found = moved_.find(&value);
    if (found == moved_.end()) return Form::kPlain;
    return found->second == nullptr ? Form::kView : Form::kLast;
  }

  Value* make(Value& value, Form form, Node* before) {
    const Form own = own_form(value);
    const Shape& shape = *value.type.shape;
    if (is_part(value) && form == Form::kPlain) return part_of_plain(value, before);
    if (is_either_layout(value) && form != Form::kView) {
      const bool to_last = form == Form::kLast;
      Value* from = own == Form::kLast ? moved_.at(&value) : &value;
      return reshape(*from, to_last ? ops::channels_last_shape(shape) : shape, before);
    }
    switch (form) {
      case Form::kPlain:
        return copy(*(own == Form::kView ? &value : get(value, Form::kView, before)), before);
      case Form::kView: {
        // PyTorch's kernels take dense images as they are. Other images they reject, or compute
        // slowly.
        Value* last = get(value, Form::kLast, before);
        if (is_part(*last)) last = copy(*last, before);
        return transpose(*last, ops::to_first, before);
      }
      case Form::kLast: break;
    }
    Value* view = transpose(value, ops::to_last, before);
    return own == Form::kView ? view : copy(*view, before);
  }

  // Cuts the part out of the row-major image, since readers may depend on the strides that a part
  // has.
  Value* part_of_plain(Value& value, Node* before) {
    const Node& part = *value.producer;
    std::vector<Value*> inputs = part.inputs;
    inputs[0] = get(*inputs[0], Form::kPlain, before);
    Node& again = write(before).again(part, std::move(inputs));
    for (size_t i = 0; i < part.outputs.size(); ++i) {
      if (part.outputs[i]) copies_[{part.outputs[i], Form::kPlain}] = again.outputs[i];
    }
    return again.outputs.at(value.index);
  }

  ops::Writer write(Node* before) { return ops::Writer(graph_, before); }

  Value* transpose(Value& value, Shape (*order)(size_t rank), Node* before) {
    return write(before).transpose(&value, order(rank_of(value)));
  }

  // A row-major copy.
  Value* copy(Value& value, Node* before) {
    const Type type = ops::with_shape(value.type, value.type.shape);
    return write(before).add({"", "Identity"}, {&value}, {type}).outputs[0];
  }

  Value* reshape(Value& value, const Shape& shape, Node* before) {
    return write(before)
        .add({"", "Reshape"}, {&value, write(before).ints(shape)},
             {ops::with_shape(value.type, shape)})
        .outputs[0];
  }

  // ---- nodes

  void move(Node& node, const Candidate& candidate) {
    switch (candidate.form.kind) {
      case Kind::kNone: return;
      case Kind::kKernel: return move_kernel(node, candidate);
      case Kind::kPointwise: return move_pointwise(node);
      case Kind::kReduction: return move_reduction(node);
      case Kind::kExpand: return move_expand(node);
      case Kind::kAxes: return move_axes(node, candidate);
    }
  }

  void move_kernel(Node& node, const Candidate& candidate) {
    for (int slot : candidate.form.inputs) {
      ir::set_input(node, slot, get(*node.inputs[slot], Form::kView, &node));
    }
    for (Value* image : candidate.makes) {
      if (ops::is_either_layout(*image->type.shape)) continue;
      image->type.strides = ops::channels_last_strides(*image->type.shape);
      moved_[image] = nullptr;
    }
    const int gradient = candidate.form.weight_gradient;
    if (gradient >= 0 && gradient < static_cast<int>(node.outputs.size()) &&
        node.outputs[gradient] != nullptr) {
      copy_weight_gradient(node, *node.outputs[gradient]);
    }
  }

  void copy_weight_gradient(Node& node, Value& gradient) {
    if (gradient.uses.empty()) return;  // and has no type
    const Shape& shape = *gradient.type.shape;
    if (ops::is_either_layout(shape)) return;
    const auto next = std::next(node.position);
    Value* plain = copy(gradient, next == graph_.nodes.end() ? nullptr : &*next);
    plain->producer->origin = node.origin;
    gradient.type.strides = ops::channels_last_strides(shape);
    ir::replace_uses(gradient, *plain, graph_);
    ir::set_input(*plain->producer, 0, &gradient);
  }

  // Writes a node that does the same on channels-last tensors. The old one is erased when nothing
  // reads it any more.
  Value& rewrite(Node& node, std::vector<Value*> inputs, const Type& type) {
    replaced_.push_back(&node);
    return *write(&node).copy(node, std::move(inputs), {type}).outputs[0];
  }
  // As rewrite(), for a node whose result is an image.
  void replace(Node& node, std::vector<Value*> inputs, const Type& type) {
    moved_[node.outputs[0]] = &rewrite(node, std::move(inputs), type);
  }

  static Type last_type(const Value& image) {
    return ops::with_shape(image.type, ops::channels_last_shape(*image.type.shape));
  }

  void move_pointwise(Node& node) {
    std::vector<Value*> inputs;
    for (Value* input : node.inputs) {
      inputs.push_back(input == nullptr ? nullptr : operand(*input, node));
    }
    replace(node, std::move(inputs), last_type(*node.outputs[0]));
  }

  Value* operand(Value& value, Node& reader) {
    if (is_one(value)) return is_moved(&value) ? get(value, Form::kPlain, &reader) : &value;
    Shape shape = *value.type.shape;
    const size_t rank = rank_of(*reader.outputs[0]);
    if (shape.size() == rank) return get(value, Form::kLast, &reader);
    shape.insert(shape.begin(), rank - shape.size(), Dim(1));
    // An image may be an operand of volumes.
    Value& plain = is_moved(&value) ? *get(value, Form::kPlain, &reader) : value;
    if (ops::is_either_layout(shape)) {
      return reshape(plain, ops::channels_last_shape(shape), &reader);
    }
    return transpose(*reshape(plain, shape, &reader), ops::to_last, &reader);
  }

  void move_reduction(Node& node) {
    std::vector<Value*> inputs = {get(*node.inputs[0], Form::kLast, &node)};
    if (ops::has_input(node, 1)) {
      Shape axes;
      const Shape order = ops::to_last(rank_of(*node.inputs[0]));
      const std::vector<int64_t> old = *ops::reduction_axes(node);
      for (size_t i = 0; i < order.size(); ++i) {
        const bool is_reduced = std::find(old.begin(), old.end(), order[i].constant()) != old.end();
        if (is_reduced) axes.push_back(static_cast<int64_t>(i));
      }
      inputs.push_back(write(&node).ints(axes));
    }
    Value& result = *node.outputs[0];
    if (keeps_dims(node)) return replace(node, std::move(inputs), last_type(result));
    const Type type = ops::with_shape(result.type, result.type.shape);
    ir::replace_uses(result, rewrite(node, std::move(inputs), type), graph_);
  }

  void move_expand(Node& node) {
    Value* x = get(*node.inputs[0], Form::kLast, &node);
    const Shape shape = ops::channels_last_shape(*node.outputs[0]->type.shape);
    replace(node, {x, write(&node).ints(shape)}, ops::expanded_type(x->type, shape));
  }

  void move_axes(Node& node, const Candidate& candidate) {
    ops::RenamedAxes renamed = *ops::work_of(node).image.rename_axes(node);
    std::vector<Value*> inputs = node.inputs;
    for (Value*& input : inputs) {
      if (contains(candidate.reads, input)) input = get(*input, Form::kLast, &node);
    }
    for (const auto& [slot, ints] : renamed.ints) {
      if (slot >= static_cast<int>(inputs.size())) inputs.resize(slot + 1);
      inputs[slot] = write(&node).ints(ints);
    }
    std::vector<Type> types;
    for (const Value* output : node.outputs) {
      types.push_back(contains(candidate.makes, output) ? last_type(*output) : Type());
    }
    Node& made = write(&node).copy(node, std::move(inputs), types);
    made.attrs = std::move(renamed.attrs);
    // Views get the strides that their new inputs imply.
    ops::infer_types(made);
    replaced_.push_back(&node);
    for (size_t i = 0; i < node.outputs.size(); ++i) {
      if (contains(candidate.makes, node.outputs[i])) moved_[node.outputs[i]] = made.outputs[i];
    }
  }

  // An output of the graph becomes row-major again and keeps its name, by which callers know it.
  void give_out(int index) {
    Value& old = *graph_.outputs[index];
    if (!is_moved(&old)) return;
    const std::string name = old.name;
    Value* plain = get(old, Form::kPlain, nullptr);
    ir::set_output(graph_, index, *plain);
    ir::take_name(graph_, *plain, name);
  }

  Graph& graph_;
  const Candidates& candidates_;
  std::unordered_set<const Node*> chosen_;
  // The channels-last form of each image, by the image of the original graph: a row-major tensor
  // (N, H, W, C), or nullptr if the image itself has become channels last, as the result of a
  // kernel has.
  std::unordered_map<const Value*, Value*> moved_;
  std::map<std::pair<Value*, Form>, Value*> copies_;  // of the current half
  std::vector<Node*> replaced_;
};

}  // namespace

int channels_last(Graph& graph, PassContext& context) {
  const Scales scales(graph);
  const Candidates candidates(graph, scales);
  std::unordered_set<const Node*> chosen = Chooser(graph, candidates, scales).run();
  if (chosen.empty()) return 0;
  return Mover(graph, candidates, std::move(chosen)).run(context);
}

}  // namespace torch_ort::passes
