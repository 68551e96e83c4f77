#include "region/contract.h"

#include "base/error.h"
#include "ops/fusion.h"
#include "region/spaces.h"

#include <algorithm>
#include <array>
#include <string_view>

namespace torch_ort::region {

namespace {

constexpr std::array<std::string_view, 7> kNames = {"scalar", "column", "row", "full",
                                                    "total",  "table",  "ids"};

Space space_of(const std::string& text) {
  const auto* found = std::find(kNames.begin(), kNames.end(), text);
  const auto space = static_cast<Space>(found - kNames.begin());
  ORT_CHECK(found != kNames.end() && space != Space::kTotal, "Region: attribute 'spaces': got '",
            text, "', want scalar, column, row, full, table or ids");
  return space;
}

}  // namespace

const char* name(Space space) { return kNames[static_cast<size_t>(space)].data(); }

RegionSpec read(const ir::Node& region) {
  ops::region_body(region);  // throws if there is none
  RegionSpec spec;
  spec.body = std::get<std::shared_ptr<ir::Graph>>(region.attrs.at("body"));
  spec.rows = ir::dim_attr(region.attrs, "rows", 1);
  spec.columns = ir::dim_attr(region.attrs, "columns", 1);
  for (const std::string& text : ir::strings_attr(region.attrs, "spaces", {})) {
    spec.spaces.push_back(space_of(text));
  }
  spec.has_row_list = ir::int_attr(region.attrs, "has_row_list", 0) != 0;
  const ir::Graph& body = *spec.body;
  ORT_CHECK(spec.spaces.size() == body.inputs.size() &&
                region.inputs.size() == body.inputs.size() + (spec.has_row_list ? 1 : 0) &&
                region.outputs.size() == body.outputs.size(),
            "Region: the node does not fit its body");
  return spec;
}

void write(const RegionSpec& spec, ir::Attrs& attrs) {
  std::vector<std::string> spaces;
  for (Space space : spec.spaces) spaces.emplace_back(name(space));
  attrs["body"] = spec.body;
  attrs["columns"] = spec.columns;
  if (spec.has_row_list) attrs["has_row_list"] = int64_t{1};
  attrs["rows"] = spec.rows;
  attrs["spaces"] = std::move(spaces);
}

}  // namespace torch_ort::region
