// A shared library that is loaded at run time and never unloaded.
#pragma once

#include <string>
#include <vector>

namespace torch_ort::cuda {

class Library {
 public:
  // Opens the first of `paths` that can be loaded. A name without a folder counts at first only if
  // the process has loaded it already. Throws Unsupported with `what` and the reason for the first
  // path.
  static Library open(const std::string& what, const std::vector<std::string>& paths);

  // Looks up a function. Throws Unsupported if there is none of this name.
  template <typename Result, typename... Arguments>
  void find(const char* name, Result (*&function)(Arguments...)) const {
    function = reinterpret_cast<Result (*)(Arguments...)>(address(name));
  }
  // Loads another library of the same folder, if there is one: this library asks for it by its bare
  // name.
  void open_beside(const std::string& name) const;
  const std::string& path() const { return path_; }  // as requested
  std::string file() const;                          // the file that was loaded

 private:
  Library(std::string what, std::string path, void* handle);
  void* address(const char* name) const;

  std::string what_, path_;
  void* handle_;
};

}  // namespace torch_ort::cuda
