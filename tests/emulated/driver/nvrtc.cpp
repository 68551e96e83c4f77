// NVRTC without a GPU: the C++ compiler makes a library of the text. What it gives as a cubin is
// the path of that library, which the fake driver loads.
//
//   EMULATED_CUDA_HEADERS=<folder>  where cuda_on_cpu.h stands; the wrapper in Python sets it
//   EMULATED_CUDA_CACHE=<folder>    where the libraries go, by the hash of their text
//   EMULATED_CUDA_TEXTS=<folder>    texts that are built in the place of programs of their names
//   CXX                             the compiler, else c++
#include "driver.h"
#include <dlfcn.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <regex>
#include <string>
#include <vector>

namespace {

namespace fs = std::filesystem;

// Unaligned accesses trap, as a GPU refuses them.
constexpr const char* kFlags =
    " -std=c++20 -O1 -shared -fPIC -ffp-contract=off -Wno-unknown-pragmas -Wno-attributes"
    " -fsanitize=alignment -fsanitize-undefined-trap-on-error ";

enum NvrtcResult : int { kOk = 0, kProgramError = 2, kInvalidInput = 3, kCompilation = 6 };

struct Program {
  std::string text, log, image;
};

std::string read_file(const fs::path& path) {
  std::ifstream file(path, std::ios::binary);
  return std::string(std::istreambuf_iterator<char>(file), {});
}

std::string setting(const char* name, const std::string& otherwise) {
  const char* text = std::getenv(name);
  return text == nullptr ? otherwise : text;
}

std::string quoted(const std::string& path) { return "'" + path + "'"; }

// The text with the header before it, and an entry behind it for each kernel.
std::string program_of(const std::string& text) {
  static const std::regex kernel(
      R"re(extern\s+"C"\s+__global__\s+void\s+(?:__launch_bounds__\(\s*(\d+)[^)]*\)\s+)?(\w+)\s*\()re");
  std::string program = "#include \"cuda_on_cpu.h\"\n#line 1 \"kernel.cu\"\n" + text + "\n";
  for (std::sregex_iterator it(text.begin(), text.end(), kernel), end; it != end; ++it) {
    const std::string bound = (*it)[1].matched ? (*it)[1].str() : "0";
    program += "EMULATED_KERNEL(" + (*it)[2].str() + ", " + bound + ")\n";
  }
  return program;
}

// Kernels find what they call in the library that this function is of, wherever it was loaded.
std::string own_path() {
  Dl_info info;
  return dladdr(reinterpret_cast<void*>(&own_path), &info) != 0 ? info.dli_fname : "";
}

bool build(Program& program) {
  const std::string text = program_of(program.text), own = own_path();
  const fs::path cache =
      setting("EMULATED_CUDA_CACHE", fs::temp_directory_path() / "emulated_cuda");
  fs::create_directories(cache);
  const std::string name = std::to_string(std::hash<std::string>()(text + own + kFlags));
  const fs::path library = cache / (name + ".so");
  if (!fs::exists(library)) {
    const fs::path mine = cache / (name + "-" + std::to_string(getpid()));
    const std::string source = mine.string() + ".cpp", log = mine.string() + ".log",
                      made = mine.string() + ".so";
    std::ofstream(source) << text;
    const std::string command =
        setting("CXX", "c++") + kFlags + "-I " + quoted(setting("EMULATED_CUDA_HEADERS", ".")) +
        " " + quoted(source) + " -o " + quoted(made) + " " + quoted(own) + " 2> " + quoted(log);
    const int status = std::system(command.c_str());
    program.log = read_file(log);
    fs::remove(source);
    fs::remove(log);
    if (status != 0) return false;
    fs::rename(made, library);
  }
  program.image = "emulated:" + library.string();
  program.image.push_back('\0');
  return true;
}

Program& program_of(void* handle) { return *static_cast<Program*>(handle); }

}  // namespace

EMULATED_API int nvrtcVersion(int* major, int* minor) {
  *major = 13;
  *minor = 0;
  return kOk;
}
EMULATED_API const char* nvrtcGetErrorString(int error) {
  return error == kOk            ? "NVRTC_SUCCESS"
         : error == kCompilation ? "NVRTC_ERROR_COMPILATION"
                                 : "NVRTC_ERROR_INVALID_INPUT";
}
EMULATED_API int nvrtcCreateProgram(void** program, const char* text, const char* name, int headers,
                                    const char* const*, const char* const*) {
  if (headers != 0) return kInvalidInput;
  const char* folder = std::getenv("EMULATED_CUDA_TEXTS");
  const fs::path other = folder == nullptr || name == nullptr ? "" : fs::path(folder) / name;
  *program = new Program{fs::is_regular_file(other) ? read_file(other) : text, "", ""};
  return kOk;
}
EMULATED_API int nvrtcCompileProgram(void* program, int, const char* const*) {
  return build(program_of(program)) ? kOk : kCompilation;
}
EMULATED_API int nvrtcGetProgramLogSize(void* program, size_t* size) {
  *size = program_of(program).log.size() + 1;
  return kOk;
}
EMULATED_API int nvrtcGetProgramLog(void* program, char* log) {
  std::strcpy(log, program_of(program).log.c_str());
  return kOk;
}
EMULATED_API int nvrtcGetCUBINSize(void* program, size_t* size) {
  *size = program_of(program).image.size();
  return kOk;
}
EMULATED_API int nvrtcGetCUBIN(void* program, char* image) {
  const std::string& from = program_of(program).image;
  std::memcpy(image, from.data(), from.size());
  return kOk;
}
EMULATED_API int nvrtcDestroyProgram(void** program) {
  delete static_cast<Program*>(*program);
  *program = nullptr;
  return kOk;
}
