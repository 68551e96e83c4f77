// Cubins in a folder of the user's, for later processes. It may be lost at any time, many processes
// may write it at once, and nothing in it is believed that another user could have written.
#pragma once

#include "cuda/nvrtc.h"

#include <cstdint>
#include <mutex>
#include <optional>
#include <string>

namespace torch_ort::cuda {

class DiskCache {
 public:
  // Makes the folder if there is none. An empty one, or 0 bytes: nothing is kept.
  DiskCache(const std::string& folder, int64_t most_bytes);
  ~DiskCache();
  DiskCache(const DiskCache&) = delete;
  DiskCache& operator=(const DiskCache&) = delete;

  // What was kept under a key; nothing where the file is missing, broken or another user's. A key
  // holds all that a cubin depends on, and stands whole in its file.
  std::optional<Compiled> find(const std::string& key) const;
  // Writes a file at once; then deletes those that were used longest ago, if all take too much.
  void keep(const std::string& key, const Compiled& compiled);

  // Why nothing is kept, or why the last one was not; empty if all is well, or nothing shall be.
  std::string problem() const;

 private:
  bool write(const std::string& name, const std::string& content) const;
  void make_room() const;
  void set_problem(std::string problem);

  int folder_ = -1;  // a file descriptor
  int64_t most_bytes_;
  mutable std::mutex mutex_;
  std::string problem_;
};

}  // namespace torch_ort::cuda
