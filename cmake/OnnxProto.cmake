# The object library torch_ort_onnx_proto: onnx.proto of the installed onnx package, compiled under
# a protobuf package of its own, so that its messages never meet the copies inside torch and onnx.

# From version 22 on protobuf needs Abseil, which its own package for CMake brings. Older ones in
# Debian have none.
set(protobuf_MODULE_COMPATIBLE ON)
find_package(Protobuf QUIET CONFIG)
if(NOT Protobuf_FOUND)
  find_package(Protobuf QUIET)
endif()
if(NOT Protobuf_FOUND OR NOT Protobuf_PROTOC_EXECUTABLE)
  message(FATAL_ERROR
    "protobuf is not found: install it (Debian, Ubuntu: `apt-get install protobuf-compiler "
    "libprotobuf-dev`), or point CMAKE_PREFIX_PATH at an unpacked copy")
endif()

set(ONNX_PROTO "" CACHE FILEPATH "onnx-ml.proto; empty takes that of the installed onnx package")
set(onnx_proto "${ONNX_PROTO}")
if(NOT onnx_proto)
  execute_process(
    COMMAND "${Python_EXECUTABLE}" -c [[
import importlib.util, pathlib
print(pathlib.Path(importlib.util.find_spec("onnx").origin).parent / "onnx-ml.proto")
]]
    OUTPUT_VARIABLE onnx_proto
    ERROR_QUIET
    OUTPUT_STRIP_TRAILING_WHITESPACE)
endif()
if(NOT EXISTS "${onnx_proto}")
  message(FATAL_ERROR
    "onnx-ml.proto is not found: install the onnx package for ${Python_EXECUTABLE}, "
    "or set ONNX_PROTO to the file")
endif()
set_property(DIRECTORY APPEND PROPERTY CMAKE_CONFIGURE_DEPENDS "${onnx_proto}")

# The rename is done on the text: protoc has no option for it.
file(READ "${onnx_proto}" onnx_text)
string(REGEX REPLACE "\npackage onnx;" "\npackage torch_ort_onnx;" onnx_renamed "${onnx_text}")
if(onnx_renamed STREQUAL onnx_text)
  message(FATAL_ERROR "${onnx_proto} has no line `package onnx;` to rename")
endif()

set(onnx_dir "${PROJECT_BINARY_DIR}/onnx")
set(onnx_renamed_proto "${onnx_dir}/onnx_torch_ort.proto")
# Written only when it differs, so that a configure does not recompile it.
file(CONFIGURE OUTPUT "${onnx_renamed_proto}" CONTENT "${onnx_renamed}" @ONLY)

add_custom_command(
  OUTPUT "${onnx_dir}/onnx_torch_ort.pb.cc" "${onnx_dir}/onnx_torch_ort.pb.h"
  COMMAND "${Protobuf_PROTOC_EXECUTABLE}" "--proto_path=${onnx_dir}" "--cpp_out=${onnx_dir}"
    onnx_torch_ort.proto
  DEPENDS "${onnx_renamed_proto}"
  COMMENT "protoc onnx_torch_ort.proto"
  VERBATIM)

# onnx.proto asks for the lite runtime, which keeps no table of descriptors for the whole process.
if(TARGET protobuf::libprotobuf-lite)
  set(TORCH_ORT_PROTOBUF protobuf::libprotobuf-lite)
else()
  set(TORCH_ORT_PROTOBUF protobuf::libprotobuf)
endif()

add_library(torch_ort_onnx_proto OBJECT
  "${onnx_dir}/onnx_torch_ort.pb.cc" "${onnx_dir}/onnx_torch_ort.pb.h")
target_include_directories(torch_ort_onnx_proto SYSTEM PUBLIC "${onnx_dir}")
target_link_libraries(torch_ort_onnx_proto PUBLIC ${TORCH_ORT_PROTOBUF})
