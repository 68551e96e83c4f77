#include "region/bound_schedule.h"

#include "base/error.h"
#include "ops/fusion.h"
#include "ops/op.h"
#include "ops/shapes.h"

#include <algorithm>
#include <functional>
#include <numeric>

namespace torch_ort::region {

namespace {

using ir::DType;
using ops::FusedForm;

int64_t product(const std::vector<int64_t>& sizes) {
  return std::accumulate(sizes.begin(), sizes.end(), int64_t{1}, std::multiplies<>());
}

// Merges dims that are contiguous with one another.
std::vector<Access::Axis> merge(const std::vector<Access::Axis>& axes) {
  std::vector<Access::Axis> merged;
  for (const Access::Axis& axis : axes) {
    if (axis.size == 1) continue;
    if (!merged.empty() && merged.back().stride == axis.size * axis.stride) {
      merged.back() = {merged.back().size * axis.size, axis.stride};
    } else {
      merged.push_back(axis);
    }
  }
  if (merged.empty()) merged.push_back({1, 1});
  return merged;
}

std::vector<Access::Axis> axes_of(const Layout& layout) {
  std::vector<Access::Axis> axes;
  for (size_t i = 0; i < layout.sizes.size(); ++i) {
    axes.push_back({layout.sizes[i], layout.strides[i]});
  }
  return axes;
}

std::string text(const std::vector<int64_t>& sizes) {
  std::string list;
  for (int64_t size : sizes) list += concat(list.empty() ? "[" : ",", size);
  return list.empty() ? "[]" : list + "]";
}

// Splits the dims of a full operand into those of rows and those of columns.
Access full_access(const Layout& layout, int64_t num_columns) {
  Access access{.dtype = layout.dtype};
  size_t split = layout.sizes.size();
  int64_t columns = 1;
  while (split > 0 && columns != num_columns) columns *= layout.sizes[--split];
  ORT_CHECK(columns == num_columns, "Region: got an operand of sizes ", text(layout.sizes),
            ", want last dims that make ", num_columns, " columns");
  const std::vector<Access::Axis> axes = axes_of(layout);
  const auto middle = axes.begin() + static_cast<std::ptrdiff_t>(split);
  access.rows = merge({axes.begin(), middle});
  access.columns = merge({middle, axes.end()});
  return access;
}

// The layout of an operand that is broadcast to the shape of the node that reads it.
Layout expand(const Layout& layout, const std::vector<int64_t>& shape) {
  Layout wide{.dtype = layout.dtype, .sizes = shape, .strides = std::vector<int64_t>(shape.size())};
  ORT_CHECK(layout.sizes.size() <= shape.size(),
            "Region: an operand has more dims than its reader");
  const size_t missing = shape.size() - layout.sizes.size();
  for (size_t i = 0; i < layout.sizes.size(); ++i) {
    ORT_CHECK(layout.sizes[i] == 1 || layout.sizes[i] == shape[missing + i],
              "Region: got an operand of sizes ", text(layout.sizes),
              ", want ones that broadcast to ", text(shape));
    wide.strides[missing + i] = layout.sizes[i] == 1 ? 0 : layout.strides[i];
  }
  return wide;
}

// A label is the number of a column, which float32 represents exactly only up to 2^24.
bool wants_double(const Schedule& schedule, int64_t num_columns) {
  constexpr int64_t kFloatCounts = int64_t{1} << 24;
  const auto& steps = schedule.steps;
  return std::any_of(steps.begin(), steps.end(), [num_columns](const Schedule::Step& step) {
    return ops::wants_double(*step.node, step.form) ||
           (step.form.has_label() && num_columns >= kFloatCounts);
  });
}

bool is_concat(const ir::Node* node) {
  return node != nullptr && ops::fused_form(*node).kind == FusedForm::Kind::kConcat;
}

}  // namespace

int64_t Access::row_offset(int64_t row) const {
  if (rows.size() == 1) return begin + row * rows[0].stride;
  int64_t offset = begin;
  for (size_t axis = rows.size(); axis-- > 0;) {
    offset += row % rows[axis].size * rows[axis].stride;
    row /= rows[axis].size;
  }
  return offset;
}

int64_t Access::column_offset(int64_t column) const {
  int64_t offset = 0;
  for (size_t axis = columns.size(); axis-- > 0;) {
    offset += column % columns[axis].size * columns[axis].stride;
    column /= columns[axis].size;
  }
  return offset;
}

std::vector<int64_t> Access::scattered_columns(int64_t num_columns) const {
  std::vector<int64_t> offsets;
  if (is_one_run()) return offsets;
  for (int64_t column = 0; column < num_columns; ++column) offsets.push_back(column_offset(column));
  return offsets;
}

int64_t num_elements(const Layout& layout) { return product(layout.sizes); }

bool lies_by_rows(const Layout& layout) {
  int64_t stride = 1;
  for (size_t i = layout.sizes.size(); i-- > 0; stride *= layout.sizes[i]) {
    if (layout.sizes[i] > 1 && layout.strides[i] != stride) return false;
  }
  return true;
}

Access access_of(const Layout& layout, Space space, int64_t num_columns) {
  if (space == Space::kFull) return full_access(layout, num_columns);
  Access access{.dtype = layout.dtype, .rows = {{1, 0}}, .columns = {{1, 1}}};
  if (space == Space::kRow) access.rows = merge(axes_of(layout));
  if (space == Space::kColumn) access.columns = merge(axes_of(layout));
  return access;
}

BoundSchedule::BoundSchedule(const Schedule& schedule, const ir::SymbolLookup& lookup,
                             const std::vector<Layout>& input_layouts,
                             const std::vector<Layout>& output_layouts, bool (*can_load)(DType))
    : schedule(schedule),
      body(*schedule.spec.body),
      lookup(lookup),
      input_layouts(input_layouts),
      output_layouts(output_layouts),
      can_load_(can_load) {
  const size_t num_inputs = body.inputs.size() + (schedule.spec.has_row_list ? 1 : 0);
  ORT_CHECK(input_layouts.size() == num_inputs && output_layouts.size() == body.outputs.size(),
            "Region: the operands do not fit the body");
  num_columns = evaluate(schedule.spec.columns);
  num_rows = evaluate(schedule.spec.rows);
  num_groups = evaluate(schedule.groups);
  ORT_CHECK(!schedule.spec.has_row_list || num_groups == 1, "Region: got a list of rows for ",
            num_groups, " groups, want one");
  is_double = wants_double(schedule, num_columns);
  if (is_flat()) {
    num_columns *= num_rows;
    num_rows = 1;
  }
  for (size_t i = 0; i < body.inputs.size(); ++i) inputs.push_back(input_access(i));
}

int64_t BoundSchedule::evaluate(const ir::Dim& dim) const {
  const std::optional<int64_t> value = dim.evaluate(lookup);
  ORT_CHECK(value.has_value(), "Region: symbol in '", dim.str(), "' is not bound");
  return *value;
}

double BoundSchedule::evaluate(const ops::SizeRatio& ratio) const {
  return ratio.factor * static_cast<double>(evaluate(ratio.numerator)) /
         static_cast<double>(evaluate(ratio.denominator));
}

std::vector<int64_t> BoundSchedule::evaluate(const ir::Shape& shape) const {
  std::vector<int64_t> sizes;
  for (const ir::Dim& dim : shape) sizes.push_back(evaluate(dim));
  return sizes;
}

int64_t BoundSchedule::rows_of_group() const { return num_rows / std::max<int64_t>(1, num_groups); }

bool BoundSchedule::is_full_size(const std::vector<int64_t>& sizes) const {
  return product(sizes) == num_rows * num_columns;
}

// Whether the region can run as one long row: each operand is contiguous or one number, and no node
// distinguishes rows from columns.
bool BoundSchedule::is_flat() const {
  if (schedule.spec.has_row_list) return false;
  for (const Schedule::Step& step : schedule.steps) {
    if (step.form.is_reduction() || step.form.has_label()) return false;
    if (step.form.kind == FusedForm::Kind::kRandom && step.space != Space::kFull) return false;
  }
  const auto is_full_run = [this](const Layout& layout) {
    const std::vector<Access::Axis> axes = merge(axes_of(layout));
    return is_full_size(layout.sizes) && axes.size() == 1 && axes[0].stride == 1;
  };
  for (size_t i = 0; i < body.inputs.size(); ++i) {
    const Space space = schedule.spec.spaces[i];
    if (space == Space::kScalar) continue;
    if (space != Space::kFull || !is_full_run(input_layouts[i])) return false;
  }
  return std::all_of(output_layouts.begin(), output_layouts.end(), is_full_run);
}

int BoundSchedule::input_index(const ir::Node& node, size_t slot) const {
  const auto found = std::find(body.inputs.begin(), body.inputs.end(), node.inputs[slot]);
  ORT_CHECK(found != body.inputs.end(), "Region: operand ", slot, " of '", node.name,
            "' is no input");
  return static_cast<int>(found - body.inputs.begin());
}

Access BoundSchedule::input_access(size_t input) const {
  const Space space = schedule.spec.spaces[input];
  const Layout& layout = input_layouts[input];
  if (space == Space::kTable) return table_access(layout);
  if (space != Space::kIds) return checked_access(stretched(input), space);
  ORT_CHECK(layout.dtype == DType::kInt64 || layout.dtype == DType::kInt32,
            "Region: Gather: got ids of ", ir::name(layout.dtype), ", want int64 or int32");
  return checked_access(layout, Space::kRow);
}

Access BoundSchedule::table_access(Layout layout) const {
  ORT_CHECK(layout.sizes.size() > 1, "Region: Gather: got a table of ", layout.sizes.size(),
            " dims, want 2 or more");
  const Access::Axis rows{layout.sizes[0], layout.strides[0]};
  layout.sizes[0] = num_rows;
  Access access = checked_access(layout, Space::kFull);
  access.rows = {rows};
  return access;
}

Access BoundSchedule::checked_access(const Layout& layout, Space space) const {
  const bool has_rows = space == Space::kFull || space == Space::kRow;
  const bool has_columns = space == Space::kFull || space == Space::kColumn;
  const int64_t rows = has_rows ? num_rows : 1;
  const int64_t columns = has_columns ? num_columns : 1;
  ORT_CHECK(rows >= 0 && columns >= 0 && product(layout.sizes) == rows * columns,
            "Region: got an operand of sizes ", text(layout.sizes), ", want ", rows, " rows of ",
            columns, " columns");
  if (!can_load_(layout.dtype)) {
    throw Unsupported(concat("Region: got an operand of ", ir::name(layout.dtype)));
  }
  return access_of(layout, space, num_columns);
}

Access BoundSchedule::sums_access(const Layout& layout, int64_t size) const {
  ORT_CHECK(product(layout.sizes) == num_groups * size, "Region: got sums of sizes ",
            text(layout.sizes), ", want ", num_groups, " groups of ", size);
  if (!can_load_(layout.dtype)) {
    throw Unsupported(concat("Region: got sums of ", ir::name(layout.dtype)));
  }
  return full_access(layout, size);
}

// The layout of an input as its readers read it.
Layout BoundSchedule::stretched(size_t input) const {
  const Schedule::Stretch& stretch = schedule.stretched[input];
  Layout layout = input_layouts[input];
  if (stretch.shape.empty()) return layout;
  for (int i = 0; i < stretch.num_column_dims && !layout.sizes.empty(); ++i) {
    layout.sizes.pop_back();
    layout.strides.pop_back();
  }
  return expand(layout, evaluate(stretch.shape));
}

std::vector<BoundSchedule::OutputPart> BoundSchedule::parts_of_output(size_t output) const {
  const ir::Value* value = body.outputs[output];
  const Layout& whole = output_layouts[output];
  if (!is_concat(value->producer)) return {{value, whole, 0}};
  const ir::Node& concat = *value->producer;
  Layout part = whole;
  const auto rank = static_cast<int64_t>(part.sizes.size());
  const int64_t axis = ops::wrap_axis(concat, ir::int_attr(concat.attrs, "axis", 0), rank);
  const int64_t size = evaluate((*concat.inputs[0]->type.shape)[axis]);
  ORT_CHECK(size * static_cast<int64_t>(concat.inputs.size()) == part.sizes[axis],
            "Region: Concat: got ", concat.inputs.size(), " parts of ", size, ", want ",
            part.sizes[axis], " in all");
  part.sizes[axis] = size;
  std::vector<OutputPart> parts;
  for (size_t i = 0; i < concat.inputs.size(); ++i) {
    parts.push_back({concat.inputs[i], part, static_cast<int64_t>(i) * size * part.strides[axis]});
  }
  return parts;
}

}  // namespace torch_ort::region
