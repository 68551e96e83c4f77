# The imported target torch_ort::torch, made from the headers and libraries of the installed torch.
# find_package(Torch) is not used: beside a CUDA build of torch it enables the CUDA language and
# fails without a toolkit, and nothing here includes a CUDA header.

execute_process(
  COMMAND "${Python_EXECUTABLE}" -c [[
import torch, torch.utils
print(torch.__version__)
print(int(torch.compiled_with_cxx11_abi()))
print(torch.utils.cmake_prefix_path)
]]
  OUTPUT_VARIABLE torch_facts
  ERROR_VARIABLE torch_error
  RESULT_VARIABLE torch_result
  OUTPUT_STRIP_TRAILING_WHITESPACE)
if(NOT torch_result EQUAL 0)
  message(FATAL_ERROR
    "torch cannot be imported by ${Python_EXECUTABLE}; install it first, then build with "
    "`pip install --no-build-isolation`\n${torch_error}")
endif()

string(REPLACE "\n" ";" torch_facts "${torch_facts}")
list(GET torch_facts 0 TORCH_ORT_TORCH_VERSION)
list(GET torch_facts 1 torch_cxx11_abi)
list(GET torch_facts 2 torch_prefix)
# The prefix is <torch>/share/cmake.
get_filename_component(torch_root "${torch_prefix}/../.." ABSOLUTE)

set(torch_libraries)
foreach(name IN ITEMS torch_python torch torch_cpu c10)
  find_library(torch_library_${name} ${name} PATHS "${torch_root}/lib" NO_DEFAULT_PATH NO_CACHE
    REQUIRED)
  list(APPEND torch_libraries "${torch_library_${name}}")
endforeach()

# The OpenMP runtime that torch loads (csrc/cpu/parallel.h): two of them in one process fight over the
# cores. Where torch does not bring it, it is the system's.
file(GLOB torch_openmp "${torch_root}/lib/libgomp*.so*")
if(torch_openmp)
  list(GET torch_openmp 0 torch_openmp)
else()
  set(torch_openmp gomp)
endif()

add_library(torch_ort::torch INTERFACE IMPORTED)
target_include_directories(torch_ort::torch SYSTEM INTERFACE
  "${torch_root}/include" "${torch_root}/include/torch/csrc/api/include")
target_compile_definitions(torch_ort::torch INTERFACE
  "_GLIBCXX_USE_CXX11_ABI=${torch_cxx11_abi}")
target_link_libraries(torch_ort::torch INTERFACE ${torch_libraries} ${torch_openmp})

message(STATUS "torch ${TORCH_ORT_TORCH_VERSION} in ${torch_root}")
