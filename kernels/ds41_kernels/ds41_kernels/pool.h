// Persistent threads, some of them pinned, that run one task at a time together with the caller.
#pragma once

#include <atomic>
#include <climits>
#include <cstdint>
#include <mutex>
#include <thread>
#include <utility>
#include <vector>

#include <linux/futex.h>
#include <pthread.h>
#include <sched.h>
#include <sys/syscall.h>
#include <unistd.h>

namespace ds41 {

constexpr int64_t kRecord = 264;  // bytes of a record: 256 of F8_E4M3 weights, 8 of UE8M0 scales

struct Worker {
  int group;  // one group a NUMA node
  int rank;   // among the workers of its group
  int peers;  // workers of its group
  int cpu;    // -1: not pinned
};

class Pool {
 public:
  // What a task does for one worker.
  using Task = void (*)(const Worker&, const void* argument);

  explicit Pool(std::vector<Worker> workers) : workers_(std::move(workers)) {
    for (const Worker& worker : workers_) grouped_ |= worker.group != workers_.front().group;
    for (size_t number = 1; number < workers_.size(); ++number)
      threads_.emplace_back([this, number] { serve(workers_[number]); });
  }

  Pool(const Pool&) = delete;
  Pool& operator=(const Pool&) = delete;

  ~Pool() {
    stopping_.store(true);
    announce();
    for (std::thread& thread : threads_) thread.join();
  }

  // Runs the task on every worker, the first of which is the caller; returns when all are done.
  void run(Task task, const void* argument) {
    task_ = task;
    argument_ = argument;
    pending_.store(static_cast<uint32_t>(threads_.size()), std::memory_order_relaxed);
    announce();
    task(workers_.front(), argument);
    for (int spin = 0; pending_.load(std::memory_order_acquire); ++spin) {
      pause_cpu();
      if (spin > kSpins) sched_yield();
    }
  }

  bool grouped() const { return grouped_; }  // workers of more than one group
  size_t size() const { return workers_.size(); }

  bool has_group(int group) const {
    for (const Worker& worker : workers_)
      if (worker.group == group) return true;
    return false;
  }

  std::mutex mutex;  // one task at a time
  std::atomic<uint64_t> calls{0}, rows{0}, nanoseconds{0};

 private:
  // Pauses of looking for work before a thread sleeps: about 20 us where one takes 5 ns, 0.2 ms on processors whose pause
  // is long (Intel since Skylake).
  static constexpr int kSpins = 4000;

  static void pause_cpu() {
#if defined(__x86_64__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    asm volatile("yield");
#endif
  }

  static void futex(std::atomic<uint32_t>* word, int operation, uint32_t value) {
    syscall(
        SYS_futex, reinterpret_cast<uint32_t*>(word), operation | FUTEX_PRIVATE_FLAG, value, nullptr, nullptr, 0);
  }

  void announce() {
    generation_.fetch_add(1, std::memory_order_release);
    futex(&generation_, FUTEX_WAKE, INT_MAX);
  }

  void serve(const Worker& worker) {
    if (worker.cpu >= 0) {
      cpu_set_t set;
      CPU_ZERO(&set);
      CPU_SET(worker.cpu, &set);
      pthread_setaffinity_np(pthread_self(), sizeof set, &set);  // a refusal costs speed only
    }
    uint32_t seen = 0;
    for (;;) {
      for (int spin = 0; spin < kSpins && generation_.load(std::memory_order_acquire) == seen; ++spin) pause_cpu();
      while (generation_.load(std::memory_order_acquire) == seen) futex(&generation_, FUTEX_WAIT, seen);
      ++seen;
      if (stopping_.load()) return;
      task_(worker, argument_);
      pending_.fetch_sub(1, std::memory_order_release);
    }
  }

  std::vector<Worker> workers_;
  bool grouped_ = false;
  Task task_ = nullptr;
  const void* argument_ = nullptr;
  std::atomic<uint32_t> generation_{0};
  std::atomic<uint32_t> pending_{0};
  std::atomic<bool> stopping_{false};
  std::vector<std::thread> threads_;
};

}  // namespace ds41
