// Checks and small conversions that rows of several families share.
#pragma once

#include "convert/convert.h"
#include "ops/op.h"

#include <optional>

namespace torch_ort::convert {

// Whether the opset that the user asked for has the standard op for values of this dtype.
bool can_use(const Builder& builder, std::string_view op, ir::DType dtype);
// Adds a standard op if the opset that the user asked for has this form of it; returns an empty
// vector otherwise. The row has to check that the op takes the dtypes at all.
std::vector<ir::Value*> standard(Builder& builder, std::string_view op,
                                 std::vector<ir::Value*> inputs, const std::vector<ir::Type>& types,
                                 ir::Attrs attrs = {});
// Adds a reduction along axes. These are an input of the node, or an attribute if the opset is too
// old for that.
std::vector<ir::Value*> reduce(Builder& builder, std::string_view op, ir::Value* x,
                               const ir::Shape& axes, bool keeps_dims,
                               const std::vector<ir::Type>& types);

// The row of an op's pair (ops/pair.h): what a call of the operator becomes.
using PairRow = std::vector<ir::Value*> (*)(Builder& builder, const AtenCall& call,
                                            const ops::Op& op, const ops::Pair& pair);
// Adds a row for each operator that is a pair of this form. Where several ops are a pair with one
// operator, a call becomes the first that takes it.
void add_pairs(Table& table, ops::Pair::Form form, PairRow row);

using ir::is_float;
// The argument as a dim, if it is an integer or a symbol; nothing otherwise, also for None.
std::optional<ir::Dim> dim(const ops::Arg& arg);
// The axis in the argument `name`, counted from the front of `rank` dims.
int64_t axis(const AtenCall& call, std::string_view name, size_t rank);
// Whether a tensor of this type is row-major when its kernel returns it.
bool is_row_major(const ir::Type& type);

}  // namespace torch_ort::convert
