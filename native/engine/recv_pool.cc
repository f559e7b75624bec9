#include "engine/recv_pool.h"

#include <mutex>

#include "engine/core.h"
#include "engine/engine.h"
#include "engine/wait_until.h"
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
  engine_->core().pool_closed(this);  // first: whoever sees us closed, or is woken, may open another pool
  std::lock_guard lock(lock_);
  if (!std::exchange(closed_, true)) wake_locked();
}

bool ReceivePool::closed() const {
  std::lock_guard lock(lock_);
  return closed_;
}

}  // namespace crossrail
