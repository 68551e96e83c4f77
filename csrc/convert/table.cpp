// The table of rows: which function converts which operator.
#include "base/error.h"
#include "convert/convert.h"

#include <algorithm>

namespace torch_ort::convert {

void Table::add(std::string key, Row row) {
  const auto [position, is_new] = rows_.emplace(std::move(key), std::move(row));
  ORT_CHECK(is_new, "convert table: two rows for ", position->first);
}

const Row* Table::find(const std::string& key) const {
  auto found = rows_.find(key);
  return found == rows_.end() ? nullptr : &found->second;
}

std::vector<std::string> Table::keys() const {
  std::vector<std::string> keys;
  keys.reserve(rows_.size());
  for (const auto& [key, row] : rows_) keys.push_back(key);
  std::sort(keys.begin(), keys.end());
  return keys;
}

}  // namespace torch_ort::convert
