// The thread that polls watched words. It is separate from the worker, so that a long copy does not delay a callback,
// and a sleeping worker need not wake up for words that nobody can sleep on.
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

// Lifecycle: 1. constructed with the engine, without a thread. 2. starts when a word's address is first asked for, and
// polls while such a watcher is open. 3. stop().
// Threads: any.
class WatcherThread {
 public:
  // has_thread: false: somebody calls look(), and nothing is announced in between: a simulated engine acts in its own
  // turn.
  // on_awaited: a word that transfers wait for has changed, or is no longer watched; any thread, not after stop().
  WatcherThread(int64_t poll_ns, bool has_thread, std::function<void()> on_awaited);
  ~WatcherThread();

  Ref<Watcher> add(Ref<Engine> engine, const std::shared_ptr<WatcherThread>& self, Notifier* notifier, uint64_t cookie);
  void remove(Watcher* watcher);
  void free_slot(uint32_t slot);
  // From now on the word may change without an announcement.
  void expose(Watcher* watcher);
  // The word has changed, or may have. is_told: whether to post a notification; transfers that wait for it are told in
  // any case.
  void announce(Watcher* watcher, bool is_told);
  // Likewise, by a kernel: see Watcher::add_on.
  void add_on(Watcher* watcher, uint64_t stream, int gpu, uint64_t delta);
  void look();
  bool has_changes();  // since the last look
  bool is_this_thread() const { return runner_.load(std::memory_order_relaxed) == std::this_thread::get_id(); }
  void stop();
  void abandon_after_fork();

 private:
  static constexpr uint32_t kWords = 512;  // a page, as in the paper's watcher
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
  const std::function<void()> on_awaited_;  // not called under the mutex, which a simulation's turns take
  const std::unique_ptr<std::atomic<uint64_t>, Unmap> words_;
  device::HostWords for_gpus_;
  std::atomic<std::thread::id> runner_{};  // relaxed: no other thread finds its own id here
  std::mutex mutex_;                       // guards everything below
  std::condition_variable changed_;
  std::vector<Watcher*> watchers_;
  // Written under the mutex. Read without it, relaxed, at every step of a simulation: most engines have none, and one
  // that another thread adds meanwhile is seen at the next step.
  std::atomic<size_t> watcher_count_ = 0;
  size_t exposed_count_ = 0;  // of watchers_
  std::vector<uint32_t> free_slots_;
  bool stopping_ = false;
  std::thread thread_;
};

}  // namespace crossrail
