# Compiles through ccache where it is installed; none is needed.

find_program(TORCH_ORT_CCACHE ccache)
if(TORCH_ORT_CCACHE AND NOT CMAKE_CXX_COMPILER_LAUNCHER)
  set(CMAKE_CXX_COMPILER_LAUNCHER "${TORCH_ORT_CCACHE}")
endif()

# With precompiled headers, ccache keeps nothing unless it is told that no #define before them and no
# __TIME__ in them matters.
if(CMAKE_CXX_COMPILER_LAUNCHER MATCHES "(^|/)ccache$")
  list(PREPEND CMAKE_CXX_COMPILER_LAUNCHER
    "${CMAKE_COMMAND}" -E env CCACHE_SLOPPINESS=pch_defines,time_macros)
endif()
