#include "cuda/disk_cache.h"

#include "base/error.h"

#include <dirent.h>
#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <chrono>
#include <cstdio>
#include <cstring>
#include <filesystem>
#include <memory>
#include <string_view>
#include <system_error>
#include <utility>
#include <vector>

namespace torch_ort::cuda {

namespace {

constexpr std::string_view kMagic = "torch_ort cubin 1\n";
constexpr mode_t kPrivateFolder = 0700, kPrivateFile = 0600;

struct Header {
  uint64_t checksum;              // of the sizes and all that follows
  std::array<uint64_t, 3> sizes;  // of the key, the cubin and the log, which follow
};

class File {
 public:
  explicit File(int descriptor) : descriptor_(descriptor) {}
  ~File() {
    if (is_open()) close(descriptor_);
  }
  File(const File&) = delete;
  File& operator=(const File&) = delete;
  bool is_open() const { return descriptor_ >= 0; }
  int get() const { return descriptor_; }

 private:
  int descriptor_;
};

// FNV-1a with 64 bits. It is only there to find files that are damaged. Whether a file may be
// trusted follows from its owner, and what it is for from its key.
uint64_t checksum(std::string_view text, uint64_t seed = 14695981039346656037U) {
  for (const char each : text) seed = (seed ^ static_cast<unsigned char>(each)) * 1099511628211U;
  return seed;
}

std::string_view bytes_of(const std::array<uint64_t, 3>& sizes) {
  return {reinterpret_cast<const char*>(sizes.data()), sizeof(sizes)};
}

std::string name_of(const std::string& key) {
  std::array<char, 40> text = {};
  std::snprintf(text.data(), text.size(), "%016lx%016lx", static_cast<unsigned long>(checksum(key)),
                static_cast<unsigned long>(checksum(key, kMagic.size())));
  return text.data();
}

// Whether nobody else can have written the file.
bool is_ours(const struct stat& found) {
  return found.st_uid == geteuid() && (found.st_mode & (S_IWGRP | S_IWOTH)) == 0;
}

std::optional<std::string> read_all(int descriptor, int64_t num_bytes) {
  std::string content(static_cast<size_t>(num_bytes), '\0');
  size_t done = 0;
  while (done < content.size()) {
    const ssize_t got = read(descriptor, content.data() + done, content.size() - done);
    if (got < 0 && errno == EINTR) continue;
    if (got <= 0) return std::nullopt;
    done += static_cast<size_t>(got);
  }
  return content;
}

bool write_all(int descriptor, std::string_view content) {
  while (!content.empty()) {
    const ssize_t done = ::write(descriptor, content.data(), content.size());
    if (done < 0 && errno == EINTR) continue;
    if (done <= 0) return false;
    content.remove_prefix(static_cast<size_t>(done));
  }
  return true;
}

std::string packed(const std::string& key, const Compiled& compiled) {
  Header header{.checksum = 0, .sizes = {key.size(), compiled.cubin.size(), compiled.log.size()}};
  const std::string body = key + compiled.cubin + compiled.log;
  header.checksum = checksum(body, checksum(bytes_of(header.sizes)));
  std::string content(kMagic);
  content.append(reinterpret_cast<const char*>(&header), sizeof(header));
  return content + body;
}

std::optional<Compiled> unpacked(std::string_view content, const std::string& key) {
  if (content.size() < kMagic.size() + sizeof(Header) || !content.starts_with(kMagic)) return {};
  Header header;
  std::memcpy(&header, content.data() + kMagic.size(), sizeof(header));
  const std::string_view body = content.substr(kMagic.size() + sizeof(header));
  const auto [key_bytes, cubin_bytes, log_bytes] = header.sizes;
  // One size at a time, because a sum of damaged sizes may be right by overflow.
  if (key_bytes > body.size() || cubin_bytes > body.size() - key_bytes ||
      log_bytes != body.size() - key_bytes - cubin_bytes) {
    return {};
  }
  if (header.checksum != checksum(body, checksum(bytes_of(header.sizes)))) return {};
  if (body.substr(0, key_bytes) != key) return {};
  return Compiled{.cubin = std::string(body.substr(key_bytes, cubin_bytes)),
                  .log = std::string(body.substr(key_bytes + cubin_bytes))};
}

std::string reason() { return std::generic_category().message(errno); }

}  // namespace

DiskCache::DiskCache(const std::string& folder, int64_t most_bytes) : most_bytes_(most_bytes) {
  if (folder.empty() || most_bytes <= 0) return;
  std::error_code error;
  const std::filesystem::path path = folder;
  if (path.has_parent_path()) std::filesystem::create_directories(path.parent_path(), error);
  // If it exists already, what follows checks whether it is ours.
  mkdir(folder.c_str(), kPrivateFolder);
  folder_ = open(folder.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC);
  struct stat found;
  if (folder_ < 0 || fstat(folder_, &found) != 0) {
    problem_ = concat(folder, ": ", reason());
  } else if (!is_ours(found)) {
    problem_ = concat(folder, ": another user can write there");
  } else {
    return;
  }
  if (folder_ >= 0) close(folder_);
  folder_ = -1;
}

DiskCache::~DiskCache() {
  if (folder_ >= 0) close(folder_);
}

std::optional<Compiled> DiskCache::find(const std::string& key) const {
  if (folder_ < 0) return {};
  const File file(
      openat(folder_, name_of(key).c_str(), O_RDONLY | O_NOFOLLOW | O_NONBLOCK | O_CLOEXEC));
  struct stat found;
  if (!file.is_open() || fstat(file.get(), &found) != 0) return {};
  if (!S_ISREG(found.st_mode) || !is_ours(found) || found.st_size > most_bytes_) return {};
  const std::optional<std::string> content = read_all(file.get(), found.st_size);
  if (!content) return {};
  std::optional<Compiled> compiled = unpacked(*content, key);
  if (compiled) futimens(file.get(), nullptr);  // notes the time of the use
  return compiled;
}

void DiskCache::keep(const std::string& key, const Compiled& compiled) {
  if (folder_ < 0) return;
  const std::string content = packed(key, compiled);
  if (static_cast<int64_t>(content.size()) > most_bytes_) return;
  set_problem(write(name_of(key), content) ? ""
                                           : concat("a file could not be written: ", reason()));
  make_room();
}

std::string DiskCache::problem() const {
  const std::lock_guard lock(mutex_);
  return problem_;
}

void DiskCache::set_problem(std::string problem) {
  const std::lock_guard lock(mutex_);
  problem_ = std::move(problem);
}

// Writes a file under a temporary name and renames it, so that a file with the right name is always
// complete. If this fails, errno says why.
bool DiskCache::write(const std::string& name, const std::string& content) const {
  const auto now = std::chrono::system_clock::now().time_since_epoch().count();
  const std::string mine = concat(name, ".", getpid(), ".", now);
  {
    const File file(
        openat(folder_, mine.c_str(), O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, kPrivateFile));
    if (!file.is_open()) return false;
    if (write_all(file.get(), content) &&
        renameat(folder_, mine.c_str(), folder_, name.c_str()) == 0) {
      return true;
    }
  }
  const int error = errno;
  unlinkat(folder_, mine.c_str(), 0);
  errno = error;
  return false;
}

void DiskCache::make_room() const {
  struct Kept {
    timespec used;
    int64_t num_bytes;
    std::string name;
  };
  const int copy = openat(folder_, ".", O_RDONLY | O_DIRECTORY | O_CLOEXEC);
  if (copy < 0) return;
  const std::unique_ptr<DIR, int (*)(DIR*)> folder(fdopendir(copy), &closedir);
  if (folder == nullptr) return;
  std::vector<Kept> kept;
  int64_t total = 0;
  while (const dirent* entry = readdir(folder.get())) {
    struct stat found;
    if (fstatat(folder_, entry->d_name, &found, AT_SYMLINK_NOFOLLOW) != 0) continue;
    if (!S_ISREG(found.st_mode)) continue;
    kept.push_back({found.st_mtim, found.st_size, entry->d_name});
    total += found.st_size;
  }
  if (total <= most_bytes_) return;
  std::sort(kept.begin(), kept.end(), [](const Kept& a, const Kept& b) {
    return std::pair(a.used.tv_sec, a.used.tv_nsec) < std::pair(b.used.tv_sec, b.used.tv_nsec);
  });
  // Removes files until three quarters of the limit are left, so that not every new file has to
  // look through all of them.
  for (const Kept& each : kept) {
    if (total <= most_bytes_ / 4 * 3) break;
    if (unlinkat(folder_, each.name.c_str(), 0) == 0) total -= each.num_bytes;
  }
}

}  // namespace torch_ort::cuda
