// The `out=` overloads that are proved to write correct results where they are told to; internal to
// run/.
//
// An overload is used only if a test has proved it, since some `out=` kernels of PyTorch resize
// their results, leave parts of them unwritten, or give other numbers for strided inputs (losses,
// batch norm). A proof compares with the functional overload: in planned memory between guard
// bytes, for various dtypes, layouts of arguments and results, empty tensors and 0-d tensors. What
// it found holds for one device and one minor version of torch. CUDA uses the column of the CPU
// until one has been written on a GPU. With a version without a column no `out=` overload is used
// at all: what other versions agree on says nothing of it. Each run checks that address, sizes and
// strides of a result are unchanged after the call; otherwise it raises InternalError with the
// operator's name, and eager PyTorch takes over.
#pragma once

namespace torch_ort::run {

// A table with a line for each overload and a column for each device and version of torch. A cell
// is "-" if nothing is proved, or "yes" if results are correct in row-major memory. It may add
// further layouts of results: "strides" for any order of dims, "over" for the memory of an operand
// of the same layout, "rows" for that too if the kernel gathers along the last dim, "parts" for
// gaps between elements. Written by `python -m tests.out_forms.prove --write`.
extern const char* const kProvedOutForms;

}  // namespace torch_ort::run
