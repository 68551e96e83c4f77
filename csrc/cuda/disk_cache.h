// A cache of cubins in a folder of the user, for later processes. It may be deleted at any time,
// many processes may write to it at once, and nothing that another user could have written is used.
//
// Cubins are code that will run. So a file is used only if nobody else could write to it or to its
// folder, if its checksum is right, and if it contains the whole key: text, architecture, flags,
// build of NVRTC. Files get their final names when they are complete, so ranks need no lock.
// Anything wrong with a file costs only a compilation.
#pragma once

#include "cuda/nvrtc.h"

#include <cstdint>
#include <mutex>
#include <optional>
#include <string>

namespace torch_ort::cuda {

class DiskCache {
 public:
  // Creates the folder if it does not exist. With an empty path, or with 0 bytes, nothing is
  // cached.
  DiskCache(const std::string& folder, int64_t most_bytes);
  ~DiskCache();
  DiskCache(const DiskCache&) = delete;
  DiskCache& operator=(const DiskCache&) = delete;

  // Returns what was cached under a key; nothing if the file is missing, damaged or not the user's
  // own. A key contains all that a cubin depends on, and the file contains the whole key.
  std::optional<Compiled> find(const std::string& key) const;
  // Writes a file in one step. Then deletes the least recently used files if all together are too
  // large.
  void keep(const std::string& key, const Compiled& compiled);

  // Why nothing is cached, or why the last file was not; empty if there is no problem, or if the
  // cache is switched off.
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
