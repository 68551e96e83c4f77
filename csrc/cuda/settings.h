// Settings of CUDA for the whole process, which torch_ort/options.py reads from the environment.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

namespace torch_ort::cuda {

struct Settings {
  std::string libcuda;                     // a path; empty: libcuda.so.1
  std::string nvrtc;                       // a path; empty: it is searched for
  std::vector<std::string> nvrtc_folders;  // where to search besides the system's libraries
  std::string cache_dir;                   // the cache of compiled kernels; empty: none
  int64_t cache_bytes = 0;                 // the size limit of the cache; 0: no cache
  std::string dump_dir;                    // of texts that belong to no graph; empty: nowhere
};

// Sets the settings. Throws UserError if they name other libraries than those that are loaded.
void configure(Settings settings);
Settings settings();
// The same, for code that loads the libraries: from then on their paths are fixed.
Settings settings_of_libraries();

// Whether PyTorch can multiply matrices of short floats into float32 on this machine's GPUs, as
// found by a trial.
void set_wide_products(bool are_there);
bool has_wide_products();

}  // namespace torch_ort::cuda
