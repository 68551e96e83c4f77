#include "cuda/build.h"

#include "base/error.h"
#include "cuda/disk_cache.h"
#include "cuda/forked.h"
#include "cuda/pool.h"
#include "cuda/settings.h"

#include <atomic>
#include <filesystem>
#include <fstream>
#include <system_error>
#include <utility>

namespace torch_ort::cuda {

namespace {

// All that a cubin depends on, as text. The size precedes each flag, so that no two lists of flags
// give the same text.
std::string key_of(const Image::Source& source) {
  std::string key = concat(Nvrtc::get().identity(), "\n", source.architecture, "\n");
  for (const std::string& flag : source.flags) key += concat(flag.size(), " ", flag, "\n");
  return key + "\n" + source.text;
}

struct State {
  std::mutex mutex;
  std::map<std::string, std::shared_ptr<const Image>> images;                     // by key
  std::map<std::pair<const Image*, int>, std::shared_ptr<const Module>> modules;  // by device
  std::map<std::filesystem::path, std::string> dumped;                            // texts by file
  std::shared_ptr<DiskCache> cache;
  std::string cache_dir;
  int64_t cache_bytes = 0;
  std::atomic<int64_t> compiled{0}, found_on_disk{0};
};

// Never destroyed, because threads of the pool may still run.
State& state() {
  static auto* each = new State;
  return *each;
}

// The cache that the current settings ask for.
std::shared_ptr<DiskCache> disk_cache() {
  const Settings asked = settings();
  State& each = state();
  const std::lock_guard lock(each.mutex);
  if (each.cache == nullptr || each.cache_dir != asked.cache_dir ||
      each.cache_bytes != asked.cache_bytes) {
    each.cache = std::make_shared<DiskCache>(asked.cache_dir, asked.cache_bytes);
    each.cache_dir = asked.cache_dir;
    each.cache_bytes = asked.cache_bytes;
  }
  return each.cache;
}

// If several texts have the same name, the later ones are numbered.
void dump(const std::filesystem::path& folder, const std::string& name, const std::string& text) {
  State& each = state();
  const std::lock_guard lock(each.mutex);
  std::filesystem::path path = folder / (name + ".cu");
  for (int number = 2; each.dumped.contains(path) && each.dumped.at(path) != text; ++number) {
    path = folder / concat(name, "_", number, ".cu");
  }
  if (each.dumped.contains(path)) return;
  std::error_code error;
  std::filesystem::create_directories(folder, error);
  std::ofstream file(path, std::ios::binary);
  file << text;
  file.close();
  if (!file) throw UserError(concat("dump_dir: cannot write: got ", path.string()));
  each.dumped.emplace(std::move(path), text);
}

std::shared_ptr<const Image> image_of(const std::string& name, const std::string& text,
                                      const BuildOptions& options,
                                      const std::string& architecture) {
  check_not_forked();
  if (!options.dump_dir.empty()) dump(options.dump_dir, name, text);
  Image::Source source{
      .name = name, .text = text, .architecture = architecture, .flags = options.flags};
  const std::string key = key_of(source);
  State& each = state();
  const std::lock_guard lock(each.mutex);
  std::shared_ptr<const Image>& image = each.images[key];
  if (image == nullptr) image = std::make_shared<const Image>(std::move(source));
  return image;
}

}  // namespace

// --- images --------------------------------------------------------------------------------------

Image::Result Image::compile() const {
  const std::shared_ptr<DiskCache> cache = disk_cache();
  const std::string key = key_of(source_);
  if (std::optional<Compiled> found = cache->find(key)) {
    state().found_on_disk.fetch_add(1);
    return {.compiled = std::move(*found), .error = ""};
  }
  // A text calls a few functions of the prelude: no warnings of the others.
  std::vector<std::string> options = {"-arch=" + source_.architecture, "--ptxas-options=-v",
                                      "--diag-suppress=177"};
  options.insert(options.end(), source_.flags.begin(), source_.flags.end());
  Result result;
  try {
    result.compiled = Nvrtc::get().compile(source_.name, source_.text, options);
  } catch (const Unsupported& error) {
    result.error = error.what();
    return result;
  }
  state().compiled.fetch_add(1);
  cache->keep(key, result.compiled);
  return result;
}

const Compiled& Image::wait() const {
  check_not_forked();
  const Result& result = compiled_.get([&] { return compile(); });
  if (!result.error.empty()) throw Unsupported(result.error);
  return result.compiled;
}

// --- modules -------------------------------------------------------------------------------------

void* Module::handle() const {
  check_not_forked();
  return handle_.get(
      [&] { return Driver::get().load(device_, image_->wait().cubin, image_->source().name); });
}

const Module& Module::wait() const {
  handle();
  return *this;
}

const Function& Module::function(const std::string& name) const {
  void* module = handle();
  const std::lock_guard lock(mutex_);
  const auto found = functions_.find(name);
  if (found != functions_.end()) return found->second;
  return functions_.emplace(name, Driver::get().function(device_, module, name)).first->second;
}

const Function& KernelOfModule::get() const {
  const Function* found = found_.load(std::memory_order_acquire);
  if (found == nullptr) [[unlikely]] {
    found = &module_->function(name_);
    found_.store(found, std::memory_order_release);
  }
  return *found;
}

// --- building ------------------------------------------------------------------------------------

std::shared_ptr<const Image> compile(const std::string& name, const std::string& text,
                                     const BuildOptions& options, const std::string& architecture) {
  const std::shared_ptr<const Image> image = image_of(name, text, options, architecture);
  if (!image->is_ready()) work_on([image] { image->wait(); });
  return image;
}

std::shared_ptr<const Module> build(const std::string& name, const std::string& text,
                                    const BuildOptions& options, int device) {
  const std::string architecture = Driver::get().device(device).architecture();
  const std::shared_ptr<const Image> image = image_of(name, text, options, architecture);
  std::shared_ptr<const Module> module;
  {
    State& each = state();
    const std::lock_guard lock(each.mutex);
    std::shared_ptr<const Module>& known = each.modules[{image.get(), device}];
    if (known != nullptr) return known;
    known = std::make_shared<const Module>(image, device);
    module = known;
  }
  work_on([module] { module->wait(); });
  return module;
}

BuildCounts build_counts() {
  State& each = state();
  return {.compiled = each.compiled.load(), .found_on_disk = each.found_on_disk.load()};
}

std::string disk_cache_problem() { return disk_cache()->problem(); }

void forget_builds() {
  State& each = state();
  std::map<std::pair<const Image*, int>, std::shared_ptr<const Module>> modules;
  const std::lock_guard lock(each.mutex);
  modules.swap(each.modules);
  each.images.clear();
  each.cache = nullptr;
  each.compiled = 0;
  each.found_on_disk = 0;
}

}  // namespace torch_ort::cuda
