// Which `out=` overloads have been proved to write what they should where they should; internal to
// run/.
#pragma once

namespace torch_ort::run {

// A line for each overload, a column for each device and version of torch. A cell is "-" where
// nothing is proved, "yes" where results come out right in row-major memory, or says besides: in
// memory of any order of dims ("strides"), where an operand of the same layout lies ("over"), so
// too if the kernel gathers along the last dim ("rows"), with gaps between the elements ("parts").
// Written by `python -m tests.out_forms.prove --write`.
extern const char* const kProvedOutForms;

}  // namespace torch_ort::run
