#include "engine/watcher.h"

#include "engine/engine.h"
#include "engine/watcher_thread.h"
#include "util/clock.h"
#include "util/errors.h"

#include <pthread.h>
#include <sys/mman.h>
#include <sys/prctl.h>

#include <algorithm>
#include <ctime>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "util/spinlock.h"
#include "util/thread.h"

namespace crossrail {

Watcher::Watcher(Ref<Engine> engine, std::shared_ptr<WatcherThread> thread, std::atomic<uint64_t>* word, uint32_t slot,
                 Ref<Notifier> notifier, uint64_t cookie)
    : engine_(std::move(engine)),
      thread_(std::move(thread)),
      word_(word),
      slot_(slot),
      notifier_(std::move(notifier)),
      cookie_(cookie) {}

Watcher::~Watcher() {
  close();
  thread_->free_slot(slot_);
}

std::atomic<uint64_t>* Watcher::word() {
  thread_->expose(this);
  return word_;
}

// release: whoever is told of the value sees what was written before it.
void Watcher::store(uint64_t value) {
  word_->store(value, std::memory_order_release);
  thread_->announce(this, true);
}

void Watcher::add(uint64_t delta, bool announce) {
  word_->fetch_add(delta, std::memory_order_acq_rel);
  thread_->announce(this, announce);
}

bool Watcher::add_up_to(uint64_t limit, uint64_t delta) {
  uint64_t seen = value();
  do {
    const auto room = static_cast<int64_t>(limit - seen);
    if (room < 0 || delta > static_cast<uint64_t>(room)) return false;
  } while (!word_->compare_exchange_weak(seen, seen + delta, std::memory_order_acq_rel, std::memory_order_acquire));
  thread_->announce(this, false);
  return true;
}

void Watcher::add_on(uint64_t stream, int gpu, uint64_t delta) { thread_->add_on(this, stream, gpu, delta); }

Watcher::Change Watcher::take() {
  // Pairs with the exchange in look_at(): a change that found a notification already posted is older than this
  // exchange, and is read below; a later change posts again.
  is_announced_.exchange(false, std::memory_order_acq_rel);
  const uint64_t now = value();
  return {taken_.exchange(now, std::memory_order_acq_rel), now};
}

void Watcher::close() { thread_->remove(this); }

// Shared: after a fork, copy-on-write would separate the page that this process sees from the one that GPUs add to.
static std::atomic<uint64_t>* map_words(size_t bytes) {
  void* memory = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
  if (memory == MAP_FAILED) throw_errno("mmap", "cannot allocate watched words");
  return static_cast<std::atomic<uint64_t>*>(memory);
}

void WatcherThread::Unmap::operator()(std::atomic<uint64_t>* words) const { munmap(words, kBytes); }

WatcherThread::WatcherThread(int64_t poll_ns, bool has_thread, std::function<void()> on_awaited)
    : poll_ns_(poll_ns),
      has_thread_(has_thread),
      on_awaited_(std::move(on_awaited)),
      words_(map_words(kBytes)),
      for_gpus_(words_.get(), kBytes) {
  for (uint32_t slot = kWords; slot > 0; --slot) free_slots_.push_back(slot - 1);
  watchers_.reserve(kWords);  // so that add() does not fail once it has a watcher, whose end takes the mutex
}

WatcherThread::~WatcherThread() { stop(); }

Ref<Watcher> WatcherThread::add(Ref<Engine> engine, const std::shared_ptr<WatcherThread>& self, Notifier* notifier,
                                uint64_t cookie) {
  std::lock_guard lock(mutex_);
  if (stopping_) throw EngineClosedError("the engine is closed");
  if (free_slots_.empty())
    throw UsageError("an engine has at most " + std::to_string(kWords) + " watchers: close some");
  const uint32_t slot = free_slots_.back();
  std::atomic<uint64_t>* const word = words_.get() + slot;
  word->store(0, std::memory_order_release);
  auto watcher =
      Ref<Watcher>::adopt(new Watcher(std::move(engine), self, word, slot, Ref<Notifier>::share(notifier), cookie));
  // Nothing allocates from here on: a watcher that is destroyed takes the mutex.
  free_slots_.pop_back();
  watchers_.push_back(watcher.get());
  watcher_count_.store(watchers_.size(), std::memory_order_relaxed);
  return watcher;
}

void WatcherThread::expose(Watcher* watcher) {
  std::lock_guard lock(mutex_);
  if (watcher->is_exposed_ || !watcher->is_registered_ || stopping_) return;
  if (has_thread_ && !thread_.joinable()) thread_ = start_thread([this] { run(); });  // first: it may fail
  watcher->is_exposed_ = true;
  ++exposed_count_;
  changed_.notify_all();
}

void WatcherThread::announce(Watcher* watcher, bool is_told) {
  bool is_awaited = watcher->has_waiting();
  if (is_told && has_thread_) {
    std::lock_guard lock(mutex_);
    if (watcher->is_registered_) is_awaited |= look_at(watcher);  // includes changes made by others
  }
  if (is_awaited && !watcher->closed()) on_awaited_();
}

void WatcherThread::add_on(Watcher* watcher, uint64_t stream, int gpu, uint64_t delta) {
  if (!has_thread_) throw UsageError("a kernel runs in real time, and a simulated engine does not: use add()");
  expose(watcher);
  for_gpus_.add(watcher->word_, delta, stream, gpu);
}

void WatcherThread::remove(Watcher* watcher) {
  {
    std::lock_guard lock(mutex_);  // watchers are looked at only under the mutex
    if (!watcher->is_registered_) return;
    watcher->is_registered_ = false;
    if (watcher->is_exposed_) --exposed_count_;
    std::erase(watchers_, watcher);
    watcher_count_.store(watchers_.size(), std::memory_order_relaxed);
    watcher->closed_.store(true, std::memory_order_release);
  }
  if (watcher->has_waiting()) on_awaited_();
}

void WatcherThread::free_slot(uint32_t slot) {
  std::lock_guard lock(mutex_);
  free_slots_.push_back(slot);
}

void WatcherThread::stop() {
  {
    std::lock_guard lock(mutex_);
    stopping_ = true;
    changed_.notify_all();
  }
  if (thread_.joinable()) thread_.join();
  std::lock_guard lock(mutex_);
  look_at_all();  // the last value is always reported
  for (Watcher* watcher : watchers_) {
    watcher->is_registered_ = false;
    watcher->closed_.store(true, std::memory_order_release);
  }
  watchers_.clear();
  watcher_count_.store(0, std::memory_order_relaxed);
  exposed_count_ = 0;
}

void WatcherThread::abandon_after_fork() { leak_thread(thread_); }

void WatcherThread::look() {
  if (watcher_count_.load(std::memory_order_relaxed) == 0) return;
  std::lock_guard lock(mutex_);
  look_at_all();
}

bool WatcherThread::has_changes() {
  if (watcher_count_.load(std::memory_order_relaxed) == 0) return false;
  std::lock_guard lock(mutex_);
  return std::ranges::any_of(watchers_, [](const Watcher* watcher) { return watcher->value() != watcher->seen_; });
}

bool WatcherThread::look_at(Watcher* watcher) {
  // acquire: what the changing side wrote before is visible to the callback.
  const uint64_t value = watcher->word_->load(std::memory_order_acquire);
  if (value == watcher->seen_) return false;
  watcher->seen_ = value;
  // Pairs with take(): one notification is enough until somebody answers it.
  if (!watcher->is_announced_.exchange(true, std::memory_order_acq_rel)) watcher->notifier_->post(watcher->cookie_);
  return watcher->has_waiting();
}

bool WatcherThread::look_at_all() {
  bool is_awaited = false;
  for (Watcher* watcher : watchers_) is_awaited |= look_at(watcher);
  return is_awaited;
}

void WatcherThread::run() {
  pthread_setname_np(pthread_self(), "crossrail-watch");
  runner_.store(std::this_thread::get_id(), std::memory_order_relaxed);
  prctl(PR_SET_TIMERSLACK, 1000, 0, 0, 0);  // the default of 50 us would swallow short pauses
  std::unique_lock lock(mutex_);
  while (!stopping_) {
    if (exposed_count_ == 0) {
      changed_.wait(lock);
      continue;
    }
    const bool is_awaited = look_at_all();
    lock.unlock();
    if (is_awaited) on_awaited_();
    if (poll_ns_ > 0) {
      const timespec pause{.tv_sec = poll_ns_ / 1'000'000'000, .tv_nsec = poll_ns_ % 1'000'000'000};
      nanosleep(&pause, nullptr);
    } else {
      cpu_relax();
    }
    lock.lock();
  }
}

}  // namespace crossrail
