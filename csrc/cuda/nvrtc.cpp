#include "cuda/nvrtc.h"

#include "base/error.h"
#include "cuda/library.h"
#include "cuda/settings.h"

#include <algorithm>
#include <cstddef>
#include <filesystem>
#include <sstream>
#include <system_error>

namespace torch_ort::cuda {

namespace {

constexpr int kOldest = 12;
constexpr int kSuccess = 0;       // of nvrtcResult
constexpr size_t kMostLines = 6;  // of a log in a message

// The paths at which NVRTC may be if it is not loaded yet: in PyTorch's packages, then in the
// system.
std::vector<std::string> paths(const Settings& settings) {
  if (!settings.nvrtc.empty()) return {settings.nvrtc};
  std::vector<std::string> found, prefixes;
  for (const std::string& folder : settings.nvrtc_folders) prefixes.push_back(folder + "/");
  prefixes.insert(prefixes.end(), {"", "/usr/local/cuda/lib64/"});
  for (const std::string& prefix : prefixes) {
    for (const char* name : {"libnvrtc.so.13", "libnvrtc.so.12"}) found.push_back(prefix + name);
  }
  return found;
}

// The first lines of a log that name errors, or simply its first ones.
std::string first_lines(const std::string& log) {
  std::vector<std::string> all, errors;
  std::istringstream lines(log);
  for (std::string line; std::getline(lines, line);) {
    if (line.empty()) continue;
    if (line.find("error") != std::string::npos) errors.push_back(line);
    all.push_back(line);
  }
  std::vector<std::string>& chosen = errors.empty() ? all : errors;
  chosen.resize(std::min(chosen.size(), kMostLines));
  std::string found;
  for (const std::string& line : chosen) found += "\n" + line;
  return found;
}

}  // namespace

struct Nvrtc::Api {
  explicit Api(const Library& library);

  int (*version)(int* major, int* minor);
  const char* (*error_string)(int result);
  int (*create)(void** program, const char* text, const char* name, int num_headers,
                const char* const* headers, const char* const* include_names);
  int (*compile)(void* program, int num_options, const char* const* options);
  int (*log_size)(void* program, size_t* size);
  int (*log)(void* program, char* log);
  int (*cubin_size)(void* program, size_t* size);
  int (*cubin)(void* program, char* image);
  int (*destroy)(void** program);
};

Nvrtc::Api::Api(const Library& library) {
  library.find("nvrtcVersion", version);
  library.find("nvrtcGetErrorString", error_string);
  library.find("nvrtcCreateProgram", create);
  library.find("nvrtcCompileProgram", compile);
  library.find("nvrtcGetProgramLogSize", log_size);
  library.find("nvrtcGetProgramLog", log);
  library.find("nvrtcGetCUBINSize", cubin_size);
  library.find("nvrtcGetCUBIN", cubin);
  library.find("nvrtcDestroyProgram", destroy);
}

// A text that is being compiled.
class Nvrtc::Program {
 public:
  Program(const Nvrtc& nvrtc, const std::string& name, const std::string& text) : nvrtc_(nvrtc) {
    const std::string file = name + ".cu";
    check(nvrtc_.api_->create(&handle_, text.c_str(), file.c_str(), 0, nullptr, nullptr));
  }
  ~Program() { nvrtc_.api_->destroy(&handle_); }
  Program(const Program&) = delete;
  Program& operator=(const Program&) = delete;

  int compile(const std::vector<std::string>& options) {
    std::vector<const char*> texts;
    texts.reserve(options.size());
    for (const std::string& option : options) texts.push_back(option.c_str());
    return nvrtc_.api_->compile(handle_, static_cast<int>(texts.size()), texts.data());
  }
  std::string log() const {
    std::string log = read(nvrtc_.api_->log_size, nvrtc_.api_->log);
    while (!log.empty() && (log.back() == '\0' || log.back() == '\n')) log.pop_back();
    return log;
  }
  std::string cubin() const { return read(nvrtc_.api_->cubin_size, nvrtc_.api_->cubin); }

 private:
  void check(int result) const { nvrtc_.check(result, "handle a program"); }
  std::string read(int (*size)(void*, size_t*), int (*get)(void*, char*)) const {
    size_t bytes = 0;
    check(size(handle_, &bytes));
    std::string text(bytes, '\0');
    check(get(handle_, text.data()));
    return text;
  }

  const Nvrtc& nvrtc_;
  void* handle_ = nullptr;
};

// NVRTC, or the reason why there is none.
struct Nvrtc::Opened {
  std::unique_ptr<const Nvrtc> nvrtc;
  std::string reason;
};

Nvrtc::Nvrtc() {
  const Library library = Library::open("NVRTC", paths(settings_of_libraries()));
  path_ = library.path();
  api_ = std::make_shared<const Api>(library);
  check(api_->version(&major_, &minor_), "read its version");
  if (major_ < kOldest) {
    throw Unsupported(concat("cuda: ", path_, " is too old: got NVRTC ", version(), ", want ",
                             kOldest, ".0 or later; TORCH_ORT_NVRTC names one"));
  }
  std::error_code error;
  identity_ = concat("NVRTC ", version(), " of ", std::filesystem::file_size(library.file(), error),
                     " bytes");
  // NVRTC opens this library when it first compiles, but looks for it only among the system's
  // libraries.
  library.open_beside("libnvrtc-builtins.so." + version());
}

const Nvrtc::Opened& Nvrtc::opened() {
  static const Opened* const each = [] {
    auto* made = new Opened;
    try {
      made->nvrtc.reset(new Nvrtc);
    } catch (const Error& error) {
      made->reason = error.what();
    }
    return made;
  }();
  return *each;
}

const Nvrtc& Nvrtc::get() {
  const Opened& each = opened();
  if (each.nvrtc == nullptr) throw Unsupported(each.reason);
  return *each.nvrtc;
}

std::string Nvrtc::missing() { return opened().reason; }

std::string Nvrtc::version() const { return concat(major_, ".", minor_); }

Compiled Nvrtc::compile(const std::string& name, const std::string& text,
                        const std::vector<std::string>& options) const {
  Program program(*this, name, text);
  const int result = program.compile(options);
  Compiled made{.cubin = "", .log = program.log()};
  if (result != kSuccess) {
    throw Unsupported(concat("cuda: kernel '", name, "' does not compile with NVRTC ", version(),
                             " and ", options.empty() ? "no options" : options.front(), ": ",
                             api_->error_string(result), first_lines(made.log)));
  }
  made.cubin = program.cubin();
  return made;
}

void Nvrtc::check(int result, const std::string& what) const {
  if (result == kSuccess) return;
  throw Unsupported(concat("cuda: ", path_, ": cannot ", what, ": ", api_->error_string(result)));
}

}  // namespace torch_ort::cuda
