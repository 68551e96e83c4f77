#include "ir/attr.h"

#include "base/error.h"

#include <algorithm>
#include <charconv>
#include <cmath>
#include <cstring>
#include <iterator>

namespace torch_ort::ir {

namespace {

const Attr* find(const Attrs& attrs, std::string_view name) {
  auto found = attrs.find(name);
  return found == attrs.end() ? nullptr : &found->second;
}

const char* kind_of(const Attr& attr) {
  static constexpr const char* kKinds[] = {
      "an integer",       "a float",           "a string", "a list of integers",
      "a list of floats", "a list of strings", "a tensor", "a graph"};
  static_assert(std::size(kKinds) == std::variant_size_v<Attr>);
  return kKinds[attr.index()];
}

[[noreturn]] void raise_kind(std::string_view name, const Attr& attr, const char* want) {
  throw InternalError(concat("attribute '", name, "': got ", kind_of(attr), ", want ", want));
}

template <typename Number>
std::string shortest_text(Number value) {
  char buffer[32];
  return std::string(buffer, std::to_chars(buffer, std::end(buffer), value).ptr);
}

}  // namespace

std::shared_ptr<const TensorData> make_tensor_data(DType dtype, std::vector<int64_t> shape,
                                                   std::vector<std::byte> bytes) {
  int64_t num_bytes = size_bytes(dtype);
  for (int64_t dim : shape) {
    ORT_CHECK(dim >= 0 && !__builtin_mul_overflow(num_bytes, dim, &num_bytes),
              "tensor data: got a dim of ", dim, ", want sizes that fit in memory");
  }
  ORT_CHECK(bytes.size() == static_cast<size_t>(num_bytes), "tensor data: got ", bytes.size(),
            " bytes, want ", num_bytes);
  auto owner = std::make_shared<const std::vector<std::byte>>(std::move(bytes));
  auto data = std::make_shared<TensorData>();
  data->dtype = dtype;
  data->shape = std::move(shape);
  data->bytes = owner->data();
  data->num_bytes = owner->size();
  data->owner = std::move(owner);
  return data;
}

std::shared_ptr<const TensorData> make_int64_data(const std::vector<int64_t>& values) {
  std::vector<std::byte> bytes(values.size() * sizeof(int64_t));
  if (!values.empty()) std::memcpy(bytes.data(), values.data(), bytes.size());
  return make_tensor_data(DType::kInt64, {static_cast<int64_t>(values.size())}, std::move(bytes));
}

Dim dim_attr(const Attrs& attrs, std::string_view name, const Dim& missing) {
  const Attr* attr = find(attrs, name);
  if (!attr) return missing;
  if (auto* dim = std::get_if<Dim>(attr)) return *dim;
  if (auto* text = std::get_if<std::string>(attr)) return Dim::parse(*text);
  raise_kind(name, *attr, "an integer");
}

int64_t int_attr(const Attrs& attrs, std::string_view name, int64_t missing) {
  Dim dim = dim_attr(attrs, name, missing);
  ORT_CHECK(dim.is_constant(), "attribute '", name, "': got '", dim.str(),
            "', want an integer that is known");
  return dim.constant();
}

double float_attr(const Attrs& attrs, std::string_view name, double missing) {
  const Attr* attr = find(attrs, name);
  if (!attr) return missing;
  if (auto* number = std::get_if<double>(attr)) return *number;
  if (auto* text = std::get_if<std::string>(attr)) return double_from_text(*text);
  raise_kind(name, *attr, "a float");
}

std::vector<double> floats_attr(const Attrs& attrs, std::string_view name,
                                const std::vector<double>& missing) {
  const Attr* attr = find(attrs, name);
  if (!attr) return missing;
  if (auto* numbers = std::get_if<std::vector<double>>(attr)) return *numbers;
  auto* texts = std::get_if<std::vector<std::string>>(attr);
  if (!texts) raise_kind(name, *attr, "a list of floats");
  std::vector<double> numbers;
  for (const std::string& text : *texts) numbers.push_back(double_from_text(text));
  return numbers;
}

std::string string_attr(const Attrs& attrs, std::string_view name, std::string_view missing) {
  const Attr* attr = find(attrs, name);
  if (!attr) return std::string(missing);
  if (auto* text = std::get_if<std::string>(attr)) return *text;
  raise_kind(name, *attr, "a string");
}

std::vector<std::string> strings_attr(const Attrs& attrs, std::string_view name,
                                      const std::vector<std::string>& missing) {
  const Attr* attr = find(attrs, name);
  if (!attr) return missing;
  if (auto* texts = std::get_if<std::vector<std::string>>(attr)) return *texts;
  raise_kind(name, *attr, "a list of strings");
}

Shape ints_attr(const Attrs& attrs, std::string_view name, const Shape& missing) {
  const Attr* attr = find(attrs, name);
  if (!attr) return missing;
  if (auto* dims = std::get_if<Shape>(attr)) return *dims;
  auto* texts = std::get_if<std::vector<std::string>>(attr);
  if (!texts) raise_kind(name, *attr, "a list of integers");
  Shape dims;
  for (const std::string& text : *texts) dims.push_back(Dim::parse(text));
  return dims;
}

bool has_attr(const Attrs& attrs, std::string_view name) { return find(attrs, name) != nullptr; }

std::string decimal_text(double value) { return shortest_text(value); }

double double_from_text(std::string_view text) {
  double value = 0;
  const char *begin = text.data(), *end = begin + text.size();
  auto [stop, error] = std::from_chars(begin, end, value);
  if (error != std::errc() || stop != end) {
    throw UserError(concat("number: got '", text, "', want a decimal number"));
  }
  return value;
}

double widen(float value) {
  return std::isfinite(value) ? double_from_text(shortest_text(value)) : value;
}

}  // namespace torch_ort::ir
