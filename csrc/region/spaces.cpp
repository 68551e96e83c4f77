#include "region/spaces.h"

#include "base/error.h"
#include "ops/op.h"
#include "ops/shapes.h"

#include <algorithm>

namespace torch_ort::region {

namespace {

using ir::Dim;
using ir::Node;
using ir::Shape;
using ir::Value;
using Kind = ops::FusedForm::Kind;

const Shape& worked_shape(const Member& each) {
  const bool by_input =
      each.form.is_reduction() || each.form.kind == Kind::kPick || each.form.kind == Kind::kConcat;
  return *(by_input ? each.node->inputs[0] : each.node->outputs[0])->type.shape;
}

std::vector<Dim> last_products(const Shape& shape) {
  std::vector<Dim> products;
  Dim product = 1;
  for (size_t i = shape.size(); i-- > 0;) {
    product = ops::times(product, shape[i]);
    if (product == Dim(1)) continue;
    if (products.empty() || !(products.back() == product)) products.push_back(product);
  }
  return products;
}

bool contains(const std::vector<Dim>& dims, const Dim& dim) {
  return std::find(dims.begin(), dims.end(), dim) != dims.end();
}

bool is_one(const Dim& dim) { return dim == Dim(1); }

// How many of the last dims have the product `columns`; -1 if no number of them has.
int num_column_dims(const Shape& shape, const Dim& columns) {
  Dim product = 1;
  for (size_t count = 0;; ++count) {
    if (product == columns) return static_cast<int>(count);
    if (count == shape.size()) return -1;
    product = ops::times(product, shape[shape.size() - 1 - count]);
  }
}

// How the dims of an operand compare with those of the result that it is broadcast to.
struct Alignment {
  bool fits = true;  // each dim is that of the result, or 1
  bool rows_equal = true, rows_one = true, columns_equal = true, columns_one = true;
};

Alignment align(const Shape& operand, const Shape& result, int num_columns) {
  Alignment found;
  if (operand.size() > result.size()) return {.fits = false};
  const size_t missing = result.size() - operand.size();
  for (size_t i = 0; i < result.size(); ++i) {
    const Dim dim = i < missing ? Dim(1) : operand[i - missing];
    const bool equal = dim == result[i], one = is_one(dim);
    found.fits = found.fits && (equal || one);
    const bool is_column = i + num_columns >= result.size();
    (is_column ? found.columns_equal : found.rows_equal) &= equal;
    (is_column ? found.columns_one : found.rows_one) &= one;
  }
  return found;
}

Dim columns_of_table(const Node& gather) {
  const Shape& table = *gather.inputs[0]->type.shape;
  return ir::numel(Shape(table.begin() + 1, table.end()));
}

class Finder {
 public:
  // `rows`: nothing if the members are to decide the number of rows.
  Finder(const std::vector<Member>& members, const Dim& elements, const Dim& columns,
         std::optional<Dim> rows)
      : members_(members), elements_(elements), rows_(std::move(rows)) {
    spaces_.columns = columns;
  }

  std::optional<Spaces> run() {
    if (!find_rows()) return std::nullopt;
    for (const Member& each : members_) {
      spaces_.operand_of.emplace_back(each.node->inputs.size(), -1);
      const std::optional<Space> space = result_of(each);
      if (!space) {
        misfit_ = each.node;
        return std::nullopt;
      }
      spaces_.made[each.node->outputs[0]] = *space;
    }
    return std::move(spaces_);
  }

  const Node* misfit() const { return misfit_; }

 private:
  // Finds the number of rows as a product of dims. As a quotient of elements and columns it would
  // have no value if there are no columns.
  bool find_rows() {
    for (const Member& each : members_) {
      if (rows_) break;
      const Shape& shape = worked_shape(each);
      const int num_columns = num_column_dims(shape, spaces_.columns);
      if (num_columns < 0 || !(ir::numel(shape) == elements_)) continue;
      rows_ = ir::numel(Shape(shape.begin(), shape.end() - num_columns));
    }
    if (rows_) spaces_.rows = *rows_;
    return rows_.has_value();
  }

  std::optional<Space> result_of(const Member& each) {
    const Node& node = *each.node;
    switch (each.form.kind) {
      case Kind::kNone: return std::nullopt;
      case Kind::kPass: return pass(node);
      case Kind::kPointwise: return pointwise(node);
      case Kind::kPick: {
        if (!has_columns(*node.inputs[0]) || !is_full(node, 0) || !is_row(node, 1)) break;
        return Space::kRow;
      }
      case Kind::kScatter: {
        if (!has_columns(*node.outputs[0]) || !is_row(node, 0)) break;
        if (!is_scalar(node, 1) && !is_row(node, 1)) break;
        return Space::kFull;
      }
      case Kind::kRandom: {
        const std::optional<Space> space = space_by_size(*node.outputs[0]->type.shape);
        if (!space || !is_scalar(node, 0)) break;
        return space;
      }
      case Kind::kValid: {
        const std::optional<Space> space = space_by_size(*node.outputs[0]->type.shape);
        if (!space || !is_read_as(node, 0, *space)) break;
        return space;
      }
      case Kind::kConcat: return concat(node);
      case Kind::kGather: return gather(node);
      default: return reduction(each);
    }
    return std::nullopt;
  }

  // Whether the value is full, with its last dim alone as columns.
  bool has_columns(const Value& value) const {
    const Shape& shape = *value.type.shape;
    return !shape.empty() && shape.back() == spaces_.columns && ir::numel(shape) == elements_;
  }

  std::optional<Space> space_by_size(const Shape& shape) const {
    const Dim count = ir::numel(shape);
    if (count == elements_) return Space::kFull;
    if (count == spaces_.rows) return Space::kRow;
    return std::nullopt;
  }

  const Space* made(const Value* value) const {
    const auto found = spaces_.made.find(value);
    return found == spaces_.made.end() ? nullptr : &found->second;
  }

  void take_input(const Node& node, size_t operand, Space space, Shape shape = {},
                  int num_column_dims = 0, bool splits_columns = false) {
    Operand input{node.inputs[operand], space, std::move(shape), num_column_dims, splits_columns};
    std::vector<Operand>& taken = spaces_.operands;
    auto found = std::find(taken.begin(), taken.end(), input);
    if (found == taken.end()) found = taken.insert(found, std::move(input));
    spaces_.operand_of.back()[operand] = static_cast<int>(found - taken.begin());
  }

  // Whether the operand is in this space without a broadcast. Takes it as an input if it is one.
  bool is_read_as(const Node& node, size_t operand, Space space) {
    const Value* value = node.inputs[operand];
    if (const Space* inside = made(value)) return *inside == space;
    if (space_by_size(*value->type.shape) != space) return false;
    take_input(node, operand, space);
    return true;
  }

  bool is_full(const Node& node, size_t operand) { return is_read_as(node, operand, Space::kFull); }
  bool is_row(const Node& node, size_t operand) { return is_read_as(node, operand, Space::kRow); }

  bool is_scalar(const Node& node, size_t operand) {
    const Value* value = node.inputs[operand];
    if (made(value) != nullptr || !is_one(ir::numel(*value->type.shape))) return false;
    take_input(node, operand, Space::kScalar);
    return true;
  }

  std::optional<Space> pass(const Node& node) {
    const std::optional<Space> space = space_by_size(*node.outputs[0]->type.shape);
    if (!space || !is_read_as(node, 0, *space)) return std::nullopt;
    // Rows of the result have to be rows of the input, whose shape may be another.
    if (*space == Space::kFull &&
        (num_column_dims(*node.inputs[0]->type.shape, spaces_.columns) < 0 ||
         num_column_dims(*node.outputs[0]->type.shape, spaces_.columns) < 0)) {
      return std::nullopt;
    }
    return space;
  }

  std::optional<Space> pointwise(const Node& node) {
    const Shape& shape = *node.outputs[0]->type.shape;
    const std::optional<Space> space = space_by_size(shape);
    if (!space) return std::nullopt;
    const int num_columns = *space == Space::kFull ? num_column_dims(shape, spaces_.columns) : 0;
    if (num_columns < 0) return std::nullopt;
    for (size_t i = 0; i < node.inputs.size(); ++i) {
      if (is_scalar(node, i)) continue;
      const bool fits = *space == Space::kFull ? fits_full(node, i, shape, num_columns)
                                               : fits_row(node, i, shape);
      if (!fits) return std::nullopt;
    }
    return space;
  }

  bool fits_full(const Node& node, size_t operand, const Shape& shape, int num_columns) {
    const Value* value = node.inputs[operand];
    const Alignment at = align(*value->type.shape, shape, num_columns);
    if (!at.fits) return false;
    const bool is_all = at.rows_equal && at.columns_equal;
    if (const Space* inside = made(value)) {
      if (*inside == Space::kFull) return is_all;
      return *inside == Space::kRow && at.rows_equal && at.columns_one;
    }
    if (is_all) {
      take_input(node, operand, Space::kFull);
    } else if (at.rows_one && at.columns_equal) {
      take_input(node, operand, Space::kColumn);
    } else if (at.rows_equal && at.columns_one) {
      take_input(node, operand, Space::kRow);
    } else if (at.columns_one) {
      const auto rank = static_cast<int>(value->type.shape->size());
      take_input(node, operand, Space::kRow, Shape(shape.begin(), shape.end() - num_columns),
                 std::min(rank, num_columns));
    } else {
      take_input(node, operand, Space::kFull, shape, 0, !at.columns_equal);
    }
    return true;
  }

  bool fits_row(const Node& node, size_t operand, const Shape& shape) {
    const Value* value = node.inputs[operand];
    const Alignment at = align(*value->type.shape, shape, 0);
    if (!at.fits) return false;
    if (const Space* inside = made(value)) return *inside == Space::kRow && at.rows_equal;
    take_input(node, operand, Space::kRow, at.rows_equal ? Shape{} : shape);
    return true;
  }

  std::optional<Space> reduction(const Member& each) {
    const Node& node = *each.node;
    const Shape& shape = *node.inputs[0]->type.shape;
    const std::vector<int64_t> axes = *ops::reduction_axes(node);
    const bool sums = each.form.kind == Kind::kSum;
    if (axes.size() == shape.size()) {
      const bool fits = sums && adds_up_in(Dim(1)) && (is_full(node, 0) || is_row(node, 0));
      return fits ? std::optional(Space::kTotal) : std::nullopt;
    }
    if (!is_full(node, 0)) return std::nullopt;
    const int num_columns = num_column_dims(shape, spaces_.columns);
    if (num_columns < 0) return std::nullopt;
    const auto count = static_cast<int>(axes.size());
    const bool is_last = axes.front() == static_cast<int64_t>(shape.size()) - count;
    if (is_last && equals_but_ones(shape, num_columns, count)) return Space::kRow;
    const bool touch = axes.back() - axes.front() == count - 1;
    const bool is_of_rows =
        touch && ir::numel(Shape(shape.begin() + axes.back() + 1, shape.end())) == spaces_.columns;
    const Dim groups = ir::numel(Shape(shape.begin(), shape.begin() + axes.front()));
    return sums && is_of_rows && adds_up_in(groups) ? std::optional(Space::kTotal) : std::nullopt;
  }

  // Whether the number of groups of rows is the same for all sums over rows.
  bool adds_up_in(const Dim& groups) {
    if (!groups_) groups_ = groups;
    spaces_.groups = *groups_;
    return *groups_ == groups;
  }

  std::optional<Space> concat(const Node& node) {
    if (num_column_dims(*node.inputs[0]->type.shape, spaces_.columns) < 0) return std::nullopt;
    for (size_t i = 0; i < node.inputs.size(); ++i) {
      if (!is_full(node, i)) return std::nullopt;
    }
    return Space::kTotal;
  }

  std::optional<Space> gather(const Node& node) {
    if (made(node.inputs[0]) != nullptr || made(node.inputs[1]) != nullptr) return std::nullopt;
    const bool is_all = ir::numel(*node.outputs[0]->type.shape) == elements_;
    if (!is_all || !(columns_of_table(node) == spaces_.columns)) return std::nullopt;
    take_input(node, 0, Space::kTable);
    take_input(node, 1, Space::kIds);
    return Space::kFull;
  }

  // Whether the last `a` dims and the last `b` dims differ only in dims of size 1.
  static bool equals_but_ones(const Shape& shape, int a, int b) {
    for (int i = std::min(a, b); i < std::max(a, b); ++i) {
      if (!is_one(shape[shape.size() - 1 - i])) return false;
    }
    return true;
  }

  const std::vector<Member>& members_;
  const Dim elements_;
  std::optional<Dim> rows_, groups_;
  Spaces spaces_;
  const Node* misfit_ = nullptr;
};

}  // namespace

std::vector<Dim> possible_columns(const Member& each) {
  const Shape& shape = worked_shape(each);
  std::vector<Dim> columns = last_products(shape);
  if (each.form.kind == Kind::kPick || each.form.kind == Kind::kScatter) {
    return shape.empty() ? std::vector<Dim>() : std::vector<Dim>{shape.back()};
  }
  if (each.form.kind == Kind::kGather) return {columns_of_table(*each.node)};
  if (each.form.kind == Kind::kPass) {
    const std::vector<Dim> before = last_products(*each.node->inputs[0]->type.shape);
    std::erase_if(columns, [&](const Dim& dim) { return !contains(before, dim); });
    return columns;
  }
  if (!each.form.is_reduction()) return columns;
  const std::vector<int64_t> axes = *ops::reduction_axes(*each.node);
  if (axes.size() == shape.size()) return columns;
  Dim product = 1;
  if (axes.back() == static_cast<int64_t>(shape.size()) - 1) {
    for (int64_t axis : axes) product = ops::times(product, shape[axis]);
  } else {
    for (size_t i = axes.back() + 1; i < shape.size(); ++i) {
      product = ops::times(product, shape[i]);
    }
  }
  return {product};
}

Dim num_elements(const Member& each) { return ir::numel(worked_shape(each)); }

std::optional<Spaces> find_spaces(const std::vector<Member>& members, const Dim& elements,
                                  const Dim& columns) {
  return Finder(members, elements, columns, std::nullopt).run();
}

std::vector<Member> members_of(const RegionSpec& spec) {
  std::vector<Member> members;
  for (Node& node : spec.body->nodes) {
    // These nodes compute sizes, not elements.
    const bool is_size = ir::is(&node, "Dims", ir::kTorchOrtDomain) ||
                         ir::is(&node, "SizeRatio", ir::kTorchOrtDomain);
    if (node.is_erased() || is_size) continue;
    members.push_back({&node, ops::fused_form(node)});
    if (members.back().form.kind == Kind::kNone) {
      throw Unsupported(concat("Region: no instruction for ", node.op.str()));
    }
  }
  return members;
}

Spaces find_spaces(const RegionSpec& spec, const std::vector<Member>& members) {
  Finder finder(members, ops::times(spec.rows, spec.columns), spec.columns, spec.rows);
  std::optional<Spaces> spaces = finder.run();
  ORT_CHECK(spaces.has_value(), "Region: node '", finder.misfit()->name, "': got a result of ",
            ir::to_string(*finder.misfit()->outputs[0]->type.shape),
            ", want it and its operands to stand in ", spec.rows.str(), " rows of ",
            spec.columns.str(), " columns");
  const std::vector<Value*>& inputs = spec.body->inputs;
  for (const Operand& operand : spaces->operands) {
    const auto found = std::find(inputs.begin(), inputs.end(), operand.value);
    const bool is_input = found != inputs.end();
    const Space said = is_input ? spec.spaces.at(found - inputs.begin()) : Space::kScalar;
    ORT_CHECK(operand.space == said, "Region: space of '", operand.value->name, "': got ",
              name(said), ", want ", name(operand.space), " as it is read");
  }
  return std::move(*spaces);
}

}  // namespace torch_ort::region
