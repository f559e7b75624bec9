#include "engine/transfer.h"

#include <mutex>
#include <thread>

#include "engine/core.h"
#include "engine/transfer_pool.h"
#include "engine/transfer_work.h"
#include "engine/wait_until.h"
#include "util/futex.h"

namespace crossrail {

const char* op_kind_name(OpKind kind) {
  switch (kind) {
    case OpKind::kWrite:
      return "write";
    case OpKind::kRead:
      return "read";
    case OpKind::kPagedWrites:
      return "paged-writes";
    case OpKind::kScatter:
      return "scatter";
    case OpKind::kBarrier:
      return "barrier";
    case OpKind::kSend:
      return "send";
    case OpKind::kService:
      return "service";
  }
  return "?";
}

Transfer::Transfer(EngineCore* core) : core_(core), work_(std::make_unique<TransferWork>()) {}
Transfer::~Transfer() = default;

void Transfer::release() {
  // Ours is the only reference: nobody can add another, so no atomic subtraction is needed. This is the common case:
  // the engine's reference is gone.
  // acquire: pairs with the release of whoever dropped the previous reference.
  if (word_.load(std::memory_order_acquire) / kOneRef == 1) {
    core_->transfers().give_back(this);
    return;
  }
  // acq_rel: our uses happen before the recycling; whoever recycles sees everybody's.
  if (word_.fetch_sub(kOneRef, std::memory_order_acq_rel) / kOneRef == 1) core_->transfers().give_back(this);
}

void Transfer::complete(Status status) {
  uint32_t word = word_.load(std::memory_order_relaxed);
  CROSSRAIL_ASSERT((word & kStatusMask) == static_cast<uint32_t>(Status::kPending));
  // Nobody to notify: set the status and drop our reference in one step. Whoever asks later sees the status. release:
  // the outcome in work_ is visible to whoever sees the status; acquire: for the recycling.
  while ((word & (kHasSleeper | kHasListener)) == 0) {
    if (!word_.compare_exchange_weak(word, word + static_cast<uint32_t>(status) - kOneRef, std::memory_order_acq_rel,
                                     std::memory_order_relaxed))
      continue;
    if (word / kOneRef == 1) core_->transfers().give_back(this);
    return;
  }
  // seq_cst, as in notify(): if a listener is being pushed right now, at least one side sees the other.
  word = word_.fetch_add(static_cast<uint32_t>(status), std::memory_order_seq_cst);
  if ((word & kHasSleeper) != 0) core_->wake_sleepers(&word_);
  if (listeners_.load(std::memory_order_seq_cst) != nullptr)
    tell_listeners(listeners_.exchange(nullptr, std::memory_order_acq_rel));
  release();
}

void Transfer::tell_listeners(Listener* latest) {
  Listener* first = nullptr;
  while (latest != nullptr) {
    Listener* const below = std::exchange(latest->next, first);
    first = std::exchange(latest, below);
  }
  while (first != nullptr) {
    first->notifier->post(first->cookie);
    delete std::exchange(first, first->next);
  }
}

bool Transfer::notify(Notifier* notifier, uint64_t cookie) {
  if ((word_.fetch_or(kHasListener, std::memory_order_seq_cst) & kStatusMask) != 0) return false;
  Listener* below = listeners_.load(std::memory_order_relaxed);
  auto* listener = new Listener{below, Ref<Notifier>::share(notifier), cookie};
  // Once pushed, the node belongs to whoever takes the stack.
  while (!listeners_.compare_exchange_weak(below, listener, std::memory_order_seq_cst, std::memory_order_relaxed))
    listener->next = below;
  // Completed meanwhile, perhaps without seeing us: then the stack is still there, and we notify.
  if ((word_.load(std::memory_order_seq_cst) & kStatusMask) != 0)
    tell_listeners(listeners_.exchange(nullptr, std::memory_order_acq_rel));
  return true;
}

bool Transfer::cancel() {
  if (done()) return false;
  cancel_requested_.store(true, std::memory_order_release);
  core_->request_cancel_scan();
  return true;
}

WaitResult Transfer::wait(Deadline deadline, const InterruptCheck& interrupted) {
  if (done()) return WaitResult::kReady;
  const auto sleep = [this](EngineCore::Guest& guest, Deadline until) {
    uint32_t seen = word_.load(std::memory_order_acquire);
    if ((seen & kStatusMask) != 0) return;
    if ((seen & kHasSleeper) == 0) {
      // The flag makes complete() pay for a wake-up only if somebody sleeps.
      if (!word_.compare_exchange_strong(seen, seen | kHasSleeper, std::memory_order_acq_rel)) return;
      seen |= kHasSleeper;
    }
    core_->sleep_on(guest, &word_, seen, until);
  };
  const WaitResult result = core_->wait_until([this] { return done(); }, sleep, deadline, interrupted);
  if (result != WaitResult::kClosed || core_->forked()) return result;
  // Submitted while the engine closed: it is being completed by a thread that was before us in the queue.
  while (!done()) std::this_thread::yield();
  return WaitResult::kReady;
}

const Clock& Transfer::clock() const { return core_->clock(); }

TransferInfo Transfer::info() const {
  const Status now = status();
  TransferInfo info{.kind = work_->kind,
                    .status = now,
                    .peer = {},
                    .bytes = work_->length_bytes,
                    .bytes_retired = work_->bytes_retired.load(std::memory_order_relaxed),
                    .imm = work_->verify ? work_->verify->imm : work_->imm,
                    .region_id = 0,
                    .offset = 0,
                    .sum_sent = 0,
                    .sum_found = 0,
                    .detail = {},
                    .triggered_ns = work_->triggered_ns.load(std::memory_order_relaxed),
                    .ended_ns = kNoTrigger,
                    .failed_peer = {}};
  if (work_->kind == OpKind::kScatter || work_->kind == OpKind::kBarrier) {
    info.peer = std::to_string(work_->targets_total) + (work_->targets_total == 1 ? " peer" : " peers");
  } else {
    info.peer = work_->peer().address().name;
    if (work_->kind != OpKind::kSend && work_->kind != OpKind::kService) {
      info.region_id = work_->remote->descriptor().region_id;
      info.offset = work_->remote_offset;
    }
  }
  if (now == Status::kPending) return info;  // the rest still belongs to the progress holder
  if (work_->failed_peer) info.peer = work_->failed_peer->name;
  info.failed_peer = work_->failed_peer;
  info.detail = work_->detail;
  info.ended_ns = work_->ended_ns;
  if (work_->verify) {
    info.sum_sent = work_->verify->sum_sent;
    info.sum_found = work_->verify->sum_found;
  }
  return info;
}

TransferPool::~TransferPool() {
  while (free_ != nullptr) delete std::exchange(free_, free_->next_free_);
}

Transfer* TransferPool::take() {
  Transfer* transfer;
  Transfer* surplus = nullptr;
  {
    std::lock_guard lock(lock_);
    transfer = pop_idle();
    if (transfer != nullptr) note_taken();
    if (idle_ >= kIdleMax) surplus = pop_idle();
  }
  delete surplus;
  if (transfer == nullptr) {
    transfer = new Transfer(core_);  // before it is counted: there may be no memory for it
    std::lock_guard lock(lock_);
    note_taken();
  }
  transfer->word_.store(Transfer::kOneRef, std::memory_order_relaxed);  // published with the transfer itself
  return transfer;
}

void TransferPool::note_taken() {
  if (out_++ == 0) engine_->add_ref();
}

Transfer* TransferPool::pop_idle() {
  Transfer* const transfer = free_;
  if (transfer == nullptr) return nullptr;
  free_ = transfer->next_free_;
  bytes_kept_ -= transfer->work_->storage_bytes;
  --idle_;
  return transfer;
}

void TransferPool::drop_regions(const std::function<bool(const Peer&)>& is_gone) {
  std::vector<RemoteRegionRef> gone;  // released after the lock
  const auto take = [&](RemoteRegionRef& region) {
    if (region && is_gone(*region->peer())) gone.push_back(std::move(region));
  };
  std::lock_guard lock(lock_);
  for (Transfer* transfer = free_; transfer != nullptr; transfer = transfer->next_free_) {
    take(transfer->work_->remote);
    for (ScatterTarget& target : transfer->work_->targets) take(target.dst);
  }
}

void TransferPool::give_back(Transfer* transfer) {
  transfer->work_->recycle();
  if (transfer->cancel_requested_.load(std::memory_order_relaxed))
    transfer->cancel_requested_.store(false, std::memory_order_relaxed);
  Engine* const engine = engine_;
  TransferWork& work = *transfer->work_;
  TransferWork::Storage surplus;  // freed after the lock
  bool last;
  {
    std::lock_guard lock(lock_);
    if (bytes_kept_ + work.storage_bytes > kBytesKeptMax) surplus = work.take_storage();
    bytes_kept_ += work.storage_bytes;
    transfer->next_free_ = free_;
    free_ = transfer;
    ++idle_;
    last = --out_ == 0;
  }
  if (last) engine->release();  // may delete us
}

}  // namespace crossrail
