#include "cuda/library.h"

#include "base/error.h"

#include <dlfcn.h>
#include <link.h>

#include <filesystem>
#include <utility>

namespace torch_ort::cuda {

Library::Library(std::string what, std::string path, void* handle)
    : what_(std::move(what)), path_(std::move(path)), handle_(handle) {}

Library Library::open(const std::string& what, const std::vector<std::string>& paths) {
  constexpr int kOpen = RTLD_NOW | RTLD_LOCAL;
  for (const std::string& path : paths) {
    const int mode = path.find('/') == std::string::npos ? kOpen | RTLD_NOLOAD : kOpen;
    if (void* handle = dlopen(path.c_str(), mode)) return {what, path, handle};
  }
  for (const std::string& path : paths) {
    if (void* handle = dlopen(path.c_str(), kOpen)) return {what, path, handle};
  }
  // The reason why the first path failed says most, because the others are only guesses.
  dlopen(paths.front().c_str(), RTLD_NOW | RTLD_LOCAL);
  const char* reason = dlerror();
  throw Unsupported(concat("cuda: no ", what, ": ", reason == nullptr ? "not found" : reason));
}

std::string Library::file() const {
  const link_map* map = nullptr;
  return dlinfo(handle_, RTLD_DI_LINKMAP, static_cast<void*>(&map)) == 0 ? map->l_name : path_;
}

void Library::open_beside(const std::string& name) const {
  const std::filesystem::path other = std::filesystem::path(file()).parent_path() / name;
  dlopen(other.c_str(), RTLD_NOW | RTLD_LOCAL);
}

void* Library::address(const char* name) const {
  void* found = dlsym(handle_, name);
  if (found == nullptr) {
    throw Unsupported(
        concat("cuda: ", what_, ": unsupported version: ", path_, " has no function ", name));
  }
  return found;
}

}  // namespace torch_ort::cuda
