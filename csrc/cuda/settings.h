// What the environment says of CUDA, for the whole process; torch_ort/options.py reads it.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

namespace torch_ort::cuda {

struct Settings {
  std::string libcuda;                     // a path; empty: libcuda.so.1
  std::string nvrtc;                       // a path; empty: it is looked for
  std::vector<std::string> nvrtc_folders;  // where else than among the libraries of the system
  std::string cache_dir;                   // of kernels that were built; empty: none are kept
  int64_t cache_bytes = 0;                 // how large that may become; 0: none are kept
  std::string dump_dir;                    // of texts that belong to no graph; empty: nowhere
};

// UserError if other libraries are asked for than those that are open.
void configure(Settings settings);
Settings settings();
// The same, for whoever opens the libraries: from then on their paths are fixed.
Settings settings_of_libraries();

// Whether PyTorch multiplies matrices of short floats into float32 on this machine's GPUs, which
// only a trial can tell.
void set_wide_products(bool are_there);
bool has_wide_products();

}  // namespace torch_ort::cuda
