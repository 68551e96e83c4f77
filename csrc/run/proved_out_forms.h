// The `out=` overloads that are proved to write correct results where they are told to; internal to
// run/.
#pragma once

namespace torch_ort::run {

// A table with a line for each overload and a column for each device and version of torch. A cell
// is "-" if nothing is proved, or "yes" if results are correct in row-major memory. It may add
// further layouts of results: "strides" for any order of dims, "over" for the memory of an operand
// of the same layout, "rows" for that too if the kernel gathers along the last dim, "parts" for
// gaps between elements. Written by `python -m tests.out_forms.prove --write`.
extern const char* const kProvedOutForms;

}  // namespace torch_ort::run
