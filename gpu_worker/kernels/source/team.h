// A few threads that work through the stages of a job together.
//
// A stage is a number of chunks; whoever is free takes the next one, and whoever finishes a stage's last chunk opens the
// next stage. So nobody ever waits for a thread, only for a chunk in another's hands: on a machine whose cores are shared
// with other processes, a thread that the kernel has put aside between two chunks delays nothing. (OpenMP's loops wait
// for each of their threads, several hundred times per iteration.) Which thread computes a chunk never changes the result.
#pragma once

#include <atomic>
#include <cstdint>
#include <ctime>
#include <thread>
#include <vector>

#include "amx.h"

namespace legato {

constexpr int64_t kSpinNs = 50'000;  // About what it takes to wake a thread on an idle virtual core.

struct Job {
  virtual ~Job() = default;
  // Do one chunk of one stage. thread is below the team's size; two calls at a time never have the same.
  virtual void run_chunk(int stage, int chunk, int thread) = 0;
  // Called when all chunks of a stage are done, before the next opens.
  virtual void on_stage_done(int stage) = 0;
  std::vector<int32_t> num_chunks;  // by stage; a stage of none is passed over
};

class Team {
 public:
  explicit Team(int num_threads) {
    for (int thread = 1; thread < num_threads; ++thread) helpers_.emplace_back([this, thread] { help(thread); });
  }

  ~Team() {
    is_stopping_.store(true);
    wake();
    for (std::thread& helper : helpers_) helper.join();
  }

  int num_threads() const { return (int)helpers_.size() + 1; }

  // Do all stages of job; the calling thread takes part. One caller at a time.
  void run(Job& job) {
    job_ = &job;
    const uint64_t epoch = (epoch_of(ticket_.load()) + 1) & kEpochMask;
    num_done_.store(0, std::memory_order_relaxed);
    open(epoch, 0);
    for (;;) {
      const uint64_t ticket = ticket_.load(std::memory_order_acquire);
      if (stage_of(ticket) == kNoStage) break;
      if (!take(ticket, 0)) wait_for_change(ticket);
    }
    release_amx();
  }

 private:
  // What is open now, in one word, so that taking a chunk is one compare-and-swap that fails if anything has changed:
  // epoch (one per job), stage, and how many of its chunks are not taken.
  static constexpr int kLeftBits = 24, kStageBits = 14;
  static constexpr uint64_t kEpochMask = (1ull << (64 - kLeftBits - kStageBits)) - 1;
  static constexpr uint64_t kNoStage = (1ull << kStageBits) - 1;

  static uint64_t pack(uint64_t epoch, uint64_t stage, uint64_t left) {
    return (epoch << (kLeftBits + kStageBits)) | (stage << kLeftBits) | left;
  }
  static uint64_t epoch_of(uint64_t ticket) { return ticket >> (kLeftBits + kStageBits); }
  static uint64_t stage_of(uint64_t ticket) { return (ticket >> kLeftBits) & kNoStage; }
  static uint64_t left_of(uint64_t ticket) { return ticket & ((1ull << kLeftBits) - 1); }

  // Open the first stage from this one on that has chunks, or end the job.
  void open(uint64_t epoch, size_t stage) {
    const std::vector<int32_t>& counts = job_->num_chunks;
    while (stage < counts.size() && counts[stage] == 0) ++stage;
    ticket_.store(stage < counts.size() ? pack(epoch, stage, (uint64_t)counts[stage]) : pack(epoch, kNoStage, 0));
    if (num_asleep_.load() > 0) wake();
  }

  // Take a chunk of what ticket shows and do it. False: all are taken.
  bool take(uint64_t ticket, int thread) {
    if (left_of(ticket) == 0) return false;
    if (!ticket_.compare_exchange_weak(ticket, ticket - 1, std::memory_order_acq_rel)) return true;  // Look again.
    // Only now is the job certain to be the ticket's, and to stay until this chunk is done.
    const int stage = (int)stage_of(ticket);
    const int32_t count = job_->num_chunks[stage];
    job_->run_chunk(stage, count - (int)left_of(ticket), thread);
    if (num_done_.fetch_add(1, std::memory_order_acq_rel) + 1 == count) {
      job_->on_stage_done(stage);
      num_done_.store(0, std::memory_order_relaxed);
      open(epoch_of(ticket), (size_t)stage + 1);
    }
    return true;
  }

  void help(int thread) {
    while (!is_stopping_.load()) {
      const uint64_t ticket = ticket_.load(std::memory_order_acquire);
      if (!take(ticket, thread)) wait_for_change(ticket);
    }
  }

  // Return when ticket is out of date, or the team stops: spin for a little while, then sleep.
  void wait_for_change(uint64_t ticket) {
    const int64_t deadline_ns = now_ns() + kSpinNs;
    do {
      for (int round = 0; round < 16; ++round) {
        if (ticket_.load(std::memory_order_acquire) != ticket) return;
        relax();
      }
    } while (now_ns() < deadline_ns);
    release_amx();
    num_asleep_.fetch_add(1);
    // The pulse is read before the last look at the ticket, so a change after the look also changes the pulse.
    const uint32_t pulse = pulse_.load();
    if (ticket_.load() == ticket && !is_stopping_.load()) pulse_.wait(pulse);
    num_asleep_.fetch_sub(1);
  }

  void wake() {
    pulse_.fetch_add(1);
    pulse_.notify_all();
  }

  static void relax() {
#if defined(__x86_64__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    asm volatile("yield");
#endif
  }

 public:
  static int64_t now_ns() {
    timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (int64_t)now.tv_sec * 1'000'000'000 + now.tv_nsec;
  }

 private:
  alignas(64) std::atomic<uint64_t> ticket_{pack(0, kNoStage, 0)};
  alignas(64) std::atomic<int32_t> num_done_{0};  // chunks of the open stage
  alignas(64) std::atomic<uint32_t> pulse_{0};
  std::atomic<int32_t> num_asleep_{0};
  std::atomic<bool> is_stopping_{false};
  Job* job_ = nullptr;
  std::vector<std::thread> helpers_;
};

}  // namespace legato
