#include "cuda/pool.h"

#include "cuda/forked.h"

#include <algorithm>
#include <condition_variable>
#include <deque>
#include <future>
#include <mutex>
#include <thread>
#include <utility>
#include <vector>

namespace torch_ort::cuda {

namespace {

// Few, because several ranks may share a machine.
constexpr unsigned kMostThreads = 4;

struct Pool {
  std::mutex mutex;
  std::condition_variable has_work;
  // A job keeps the exception that it throws.
  std::deque<std::packaged_task<void()>> jobs;
  std::vector<std::thread> threads;
  bool is_stopped = false;
};

// Never destroyed, because its threads may still run.
Pool& pool() {
  static auto* each = new Pool;
  return *each;
}

void work(Pool& pool) {
  std::unique_lock lock(pool.mutex);
  while (true) {
    pool.has_work.wait(lock, [&] { return pool.is_stopped || !pool.jobs.empty(); });
    if (pool.is_stopped) return;
    std::packaged_task<void()> job = std::move(pool.jobs.front());
    pool.jobs.pop_front();
    lock.unlock();
    job();
    lock.lock();
  }
}

}  // namespace

void work_on(const std::function<void()>& job) {
  check_not_forked();
  note_use();
  Pool& each = pool();
  const std::lock_guard lock(each.mutex);
  if (each.is_stopped) return;
  const unsigned most = std::clamp(std::thread::hardware_concurrency(), 1U, kMostThreads);
  each.jobs.emplace_back(job);
  if (each.threads.size() < most) each.threads.emplace_back([&each] { work(each); });
  each.has_work.notify_one();
}

void stop_working() {
  if (was_forked()) return;
  Pool& each = pool();
  std::vector<std::thread> threads;
  {
    const std::lock_guard lock(each.mutex);
    each.is_stopped = true;
    each.jobs.clear();
    threads.swap(each.threads);
    each.has_work.notify_all();
  }
  for (std::thread& thread : threads) thread.join();
}

}  // namespace torch_ort::cuda
