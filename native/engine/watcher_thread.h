// The thread that looks at watched words. It is separate from the worker, so that a long copy does not delay a
// callback, and a sleeping worker need not wake up for words that nobody can sleep on.
#pragma once

#include <atomic>
#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <thread>
#include <vector>

#include "device/host_words.h"
#include "engine/watcher.h"

namespace crossrail {

// Lifecycle: 1. made with the engine; no thread. 2. starts when a word's address is first asked for, and looks while
// such a watcher is open. 3. stop().
// Threads: any.
class WatcherThread {
 public:
  // has_thread: else somebody calls look(), and nothing is announced in between: a simulated engine acts in its own
  // turn.
  // on_awaited: a word that transfers wait for has changed, or is watched no more; any thread, not after stop().
  WatcherThread(int64_t poll_ns, bool has_thread, std::function<void()> on_awaited);
  ~WatcherThread();

  Ref<Watcher> add(const std::shared_ptr<WatcherThread>& self, Notifier* notifier, uint64_t cookie);
  void remove(Watcher* watcher);
  void free_slot(uint32_t slot);
  // The word may change from now on without anybody saying so.
  void expose(Watcher* watcher);
  // It has changed, or may have. is_told: by a notification; what waits for it hears of it in any case.
  void announce(Watcher* watcher, bool is_told);
  // Likewise, by a kernel: see Watcher::add_on.
  void add_on(Watcher* watcher, uint64_t stream, int gpu, uint64_t delta);
  void look();
  bool has_changes();  // since it was looked at last
  void stop();
  void abandon_after_fork();

 private:
  static constexpr uint32_t kWords = 512;  // a page, as the paper's watcher has
  static constexpr size_t kBytes = kWords * sizeof(uint64_t);

  void run();
  // True: it has changed, and transfers wait for it.
  static bool look_at(Watcher* watcher);
  bool look_at_all();

  struct Unmap {
    void operator()(std::atomic<uint64_t>* words) const;
  };

  const int64_t poll_ns_;
  const bool has_thread_;
  const std::function<void()> on_awaited_;  // not under the mutex, which a simulation's turns take
  const std::unique_ptr<std::atomic<uint64_t>, Unmap> words_;
  device::HostWords for_gpus_;
  std::mutex mutex_;  // guards everything below
  std::condition_variable changed_;
  std::vector<Watcher*> watchers_;
  // Written under the mutex. Read without it, relaxed, by who is asked at every step of a simulation: most engines have
  // none, and one that another thread adds meanwhile is seen at the next step.
  std::atomic<size_t> watcher_count_ = 0;
  size_t exposed_count_ = 0;  // of watchers_
  std::vector<uint32_t> free_slots_;
  bool stopping_ = false;
  std::thread thread_;
};

}  // namespace crossrail
