// What of a plan runs as CUDA graphs (replay.h).
#pragma once

#include <cstdint>
#include <string>
#include <vector>

namespace torch_ort::run {

// The steps [begin, end) of a half.
struct StepRange {
  bool is_backward;
  int begin, end;
  auto operator<=>(const StepRange&) const = default;
};

struct ReplayReport {
  struct Part {
    StepRange range{};
    int64_t captures = 0, replays = 0, runs = 0;  // `runs`: step by step
    std::string refused;                          // why it is not captured; empty: it is
  };
  std::string refused;  // why nothing is captured; empty: parts are
  std::vector<Part> parts;
};

}  // namespace torch_ort::run
