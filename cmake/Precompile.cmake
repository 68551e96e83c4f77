# Precompiled headers. Most of what a file costs to compile is reading the headers of torch, of
# pybind11 and of the standard library, so each kind of room has them compiled once.
#
# Headers of ours do not belong here: an edit of one would compile all rooms of its kind again, and
# the compiler takes what a precompiled header includes for a system header, in which it does not
# warn. Nor do headers that few files need: each file of the kind would instantiate the templates
# that they leave pending.
#
# Each file still includes what it uses: CMAKE_DISABLE_PRECOMPILE_HEADERS=ON builds without these,
# and tools other than GCC (clang-tidy, clangd) read their text instead.

set(standard_headers
  <algorithm> <array> <cstdint> <functional> <limits> <map> <memory> <optional> <set> <string>
  <string_view> <unordered_map> <unordered_set> <utility> <variant> <vector>)
set(torch_headers
  ${standard_headers} <mutex>
  <ATen/core/Tensor.h> <ATen/core/dispatch/Dispatcher.h> <ATen/core/ivalue.h> <ATen/core/stack.h>
  <ATen/record_function.h>)
# Not torch's own additions to pybind11, though half of the files include them: measured with them,
# the other half took up to a fifth longer.
set(python_headers
  ${standard_headers} <pybind11/functional.h> <pybind11/pybind11.h> <pybind11/stl.h>)

# torch_ort_precompile(KIND ROOM...)
# The first room compiles the headers of its kind and the others take them, for which all must have
# the same flags. Where they differ, or the compiler is another one since, GCC warns of it
# (-Winvalid-pch, which CMake adds) and reads the text. ccache preprocesses a file by itself, and has
# to find the precompiled header named in the result.
function(torch_ort_precompile kind first)
  target_precompile_headers(torch_ort_${first} PRIVATE ${${kind}_headers})
  foreach(room IN LISTS ARGN)
    target_precompile_headers(torch_ort_${room} REUSE_FROM torch_ort_${first})
  endforeach()
  foreach(room IN LISTS first ARGN)
    target_compile_options(torch_ort_${room} PRIVATE
      $<$<CXX_COMPILER_ID:GNU>:-fpch-preprocess> $<$<CXX_COMPILER_ID:GNU>:-Wno-error=invalid-pch>)
  endforeach()
endfunction()

# torch_ort_read_headers(FILE...)
# Names files of csrc/ that read the text: those with flags of their own, and those that include so
# little that a precompiled header would take longer.
function(torch_ort_read_headers)
  foreach(file IN LISTS ARGN)
    set(source "${PROJECT_SOURCE_DIR}/csrc/${file}")
    if(NOT EXISTS "${source}")
      message(FATAL_ERROR "torch_ort_read_headers: there is no ${source}")
    endif()
    set_source_files_properties("${source}" PROPERTIES SKIP_PRECOMPILE_HEADERS ON)
  endforeach()
endfunction()
