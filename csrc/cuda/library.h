// A shared library that is opened while the process runs, and stays open.
#pragma once

#include <string>
#include <vector>

namespace torch_ort::cuda {

class Library {
 public:
  // One that the process has loaded already, else the first that opens: names or paths. Unsupported
  // with `what` it is and the reason of the first path.
  static Library open(const std::string& what, const std::vector<std::string>& paths);

  // Unsupported if it has no function of this name.
  template <typename Result, typename... Arguments>
  void find(const char* name, Result (*&function)(Arguments...)) const {
    function = reinterpret_cast<Result (*)(Arguments...)>(address(name));
  }
  // Opens another one in the same folder, if it is there: this one asks for it by its bare name.
  void open_beside(const std::string& name) const;
  const std::string& path() const { return path_; }  // as it was asked for
  std::string file() const;                          // where it was found

 private:
  Library(std::string what, std::string path, void* handle);
  void* address(const char* name) const;

  std::string what_, path_;
  void* handle_;
};

}  // namespace torch_ort::cuda
