// Attributes of nodes, and constant tensor data.
#pragma once

#include "ir/type.h"

#include <cstddef>
#include <map>
#include <memory>
#include <string>
#include <variant>
#include <vector>

namespace torch_ort::ir {

struct Graph;

// A constant tensor: elements of `dtype`, row-major and little-endian. `owner` keeps the bytes
// alive; several nodes and graphs may share one TensorData.
struct TensorData {
  DType dtype = DType::kUndefined;
  std::vector<int64_t> shape;
  const std::byte* bytes = nullptr;
  size_t num_bytes = 0;
  std::shared_ptr<const void> owner;
};

std::shared_ptr<const TensorData> make_tensor_data(DType dtype, std::vector<int64_t> shape,
                                                   std::vector<std::byte> bytes);
// A one-dimensional int64 tensor.
std::shared_ptr<const TensorData> make_int64_data(const std::vector<int64_t>& values);

// Integers may be symbolic: an int attribute is a Dim, an int list is a Shape.
// A double keeps all its digits here; an ONNX FLOAT attribute holds 32 bits (see onnx_proto.h).
using Attr =
    std::variant<Dim, double, std::string, Shape, std::vector<double>, std::vector<std::string>,
                 std::shared_ptr<const TensorData>, std::shared_ptr<Graph>>;

// Ordered, so that printing and hashing are stable.
using Attrs = std::map<std::string, Attr, std::less<>>;

// Readers of one attribute. They return `missing` if there is no attribute of that name, and throw
// InternalError if it has another type. Numbers may be given as text, as in a graph that was read
// from a file (see onnx_proto.h).
int64_t int_attr(const Attrs& attrs, std::string_view name, int64_t missing);
Dim dim_attr(const Attrs& attrs, std::string_view name, const Dim& missing);
double float_attr(const Attrs& attrs, std::string_view name, double missing);
std::vector<double> floats_attr(const Attrs& attrs, std::string_view name,
                                const std::vector<double>& missing);
std::string string_attr(const Attrs& attrs, std::string_view name, std::string_view missing);
Shape ints_attr(const Attrs& attrs, std::string_view name, const Shape& missing);
std::vector<std::string> strings_attr(const Attrs& attrs, std::string_view name,
                                      const std::vector<std::string>& missing);
bool has_attr(const Attrs& attrs, std::string_view name);

// The shortest decimal text that reads back as `value`.
std::string decimal_text(double value);
double double_from_text(std::string_view text);  // UserError on other text
// The double that the shortest decimal text of `value` stands for: 1e-05f is widened to 1e-05.
double widen(float value);

}  // namespace torch_ort::ir
