#include "run/conv_search.h"

#include <ATen/Context.h>

#include <mutex>

namespace torch_ort::run {

namespace {

struct Searches {
  std::mutex mutex;
  int count = 0;
  bool before = false;  // the setting before the first of them
};

Searches& searches() {
  static Searches* searches = new Searches;  // runs may end while the process does
  return *searches;
}

}  // namespace

ConvSearch::ConvSearch(bool is_on) : is_on_(is_on) {
  if (!is_on_) return;
  Searches& all = searches();
  std::lock_guard lock(all.mutex);
  if (all.count++ > 0) return;
  all.before = at::globalContext().benchmarkCuDNN();
  at::globalContext().setBenchmarkCuDNN(true);
}

ConvSearch::~ConvSearch() {
  if (!is_on_) return;
  Searches& all = searches();
  std::lock_guard lock(all.mutex);
  if (--all.count == 0) at::globalContext().setBenchmarkCuDNN(all.before);
}

}  // namespace torch_ort::run
