#include "engine/recv_pool.h"

#include <mutex>
#include <utility>

#include "engine/core.h"
#include "engine/engine.h"
#include "engine/wait_until.h"
#include "util/errors.h"
#include "util/futex.h"

namespace crossrail {

ReceivePool::ReceivePool(Ref<Engine> engine, uint32_t buffer_count, uint32_t buffer_bytes)
    : engine_(std::move(engine)), buffer_count_(buffer_count), buffer_bytes_(buffer_bytes) {}
ReceivePool::~ReceivePool() = default;

ReceivePool::Offer ReceivePool::offer(const std::shared_ptr<const Address>& sender, std::span<const uint8_t> payload) {
  std::lock_guard lock(lock_);
  if (closed_) return Offer::kClosed;
  if (payload.size() > buffer_bytes_) return Offer::kTooLong;
  if (ready_.size() >= buffer_count_) {
    starved_ = true;
    return Offer::kFull;
  }
  ready_.push_back({sender, Bytes(payload.begin(), payload.end())});
  engine_->core().note_received(payload.size());  // under the lock: whoever takes the message finds it counted
  wake_locked();
  return Offer::kTaken;
}

void ReceivePool::wake_locked() {
  if (notifier_) {
    notifier_->post(cookie_);
    notifier_ = nullptr;
  }
  futex_.fetch_add(1, std::memory_order_seq_cst);
  if (sleepers_.load(std::memory_order_seq_cst) > 0) engine_->core().wake_sleepers(&futex_);
}

void ReceivePool::poll(size_t limit, std::vector<Message>* out) {
  bool starved = false;
  {
    std::lock_guard lock(lock_);
    for (; limit > 0 && !ready_.empty(); --limit) {
      out->push_back(std::move(ready_.front()));
      ready_.pop_front();
    }
    if (ready_.size() < buffer_count_) starved = std::exchange(starved_, false);
  }
  if (starved) engine_->core().wake();
}

WaitResult ReceivePool::wait(Deadline deadline, const InterruptCheck& interrupted) {
  const auto ready = [this] {
    std::lock_guard lock(lock_);
    return !ready_.empty() || closed_;
  };
  const auto sleep = [&](EngineCore::Guest& guest, Deadline until) {
    const uint32_t seen = futex_.load(std::memory_order_seq_cst);
    sleepers_.fetch_add(1, std::memory_order_seq_cst);
    if (!ready()) engine_->core().sleep_on(guest, &futex_, seen, until);
    sleepers_.fetch_sub(1, std::memory_order_seq_cst);
  };
  const WaitResult result = engine_->core().wait_until(ready, sleep, deadline, interrupted);
  if (result != WaitResult::kReady) return result;
  std::lock_guard lock(lock_);
  return ready_.empty() ? WaitResult::kClosed : WaitResult::kReady;
}

void ReceivePool::notify(Notifier* notifier, uint64_t cookie) {
  std::lock_guard lock(lock_);
  if (!ready_.empty() || closed_) {
    notifier->post(cookie);
    return;
  }
  notifier_ = Ref<Notifier>::share(notifier);
  cookie_ = cookie;
}

const Clock& ReceivePool::clock() const { return engine_->clock(); }

void ReceivePool::close() {
  engine_->core().receiving().remove(this);  // first: whoever sees us closed, or is woken, may open another pool
  std::lock_guard lock(lock_);
  if (!std::exchange(closed_, true)) wake_locked();
}

bool ReceivePool::closed() const {
  std::lock_guard lock(lock_);
  return closed_;
}

// --- which pool receives ---

bool PoolSlot::put(const Ref<ReceivePool>& pool) {
  std::lock_guard lock(mutex_);
  if (has_ended_) return false;
  if (pool_) throw UsageError("the engine has an open receive pool already: close it first");
  pool_ = pool;
  version_.fetch_add(1, std::memory_order_release);  // pairs with the acquire in current()
  return true;
}

void PoolSlot::remove(const ReceivePool* pool) {
  std::lock_guard lock(mutex_);
  if (pool_.get() != pool) return;
  pool_ = nullptr;
  version_.fetch_add(1, std::memory_order_release);  // pairs with the acquire in current()
}

Ref<ReceivePool> PoolSlot::end() {
  std::lock_guard lock(mutex_);
  has_ended_ = true;
  return std::exchange(pool_, nullptr);
}

ReceivePool* PoolSlot::current() {
  const uint64_t version = version_.load(std::memory_order_acquire);
  if (version != version_seen_) {
    std::lock_guard lock(mutex_);
    current_ = pool_;
    version_seen_ = version;
  }
  return current_.get();
}

}  // namespace crossrail
