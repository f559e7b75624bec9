#include "engine/transfer.h"

#include <thread>

#include "engine/core.h"
#include "engine/transfer_pool.h"
#include "engine/transfer_work.h"
#include "util/futex.h"

namespace crossrail {

namespace {
// Marks listeners_ of a completed transfer; never dereferenced.
char listeners_closed_mark;
template <typename T>
T* closed_mark() {
  return reinterpret_cast<T*>(&listeners_closed_mark);
}
}  // namespace

const char* op_kind_name(OpKind kind) {
  switch (kind) {
    case OpKind::kWrite: return "write";
    case OpKind::kRead: return "read";
    case OpKind::kPagedWrites: return "paged-writes";
    case OpKind::kScatter: return "scatter";
    case OpKind::kBarrier: return "barrier";
    case OpKind::kSend: return "send";
  }
  return "?";
}

Transfer::Transfer(EngineCore* core) : core_(core), work_(std::make_unique<TransferWork>()) {}
Transfer::~Transfer() = default;

void Transfer::release() {
  // acq_rel: our uses happen before the recycling; the recycler sees everybody's.
  if (refs_.fetch_sub(1, std::memory_order_acq_rel) == 1) core_->transfers().give_back(this);
}

void Transfer::complete(Status status) {
  // acq_rel: the outcome in work_ is visible to whoever sees the status; the listeners' nodes to us.
  const uint32_t before = status_.exchange(static_cast<uint32_t>(status), std::memory_order_acq_rel);
  CROSSRAIL_ASSERT((before & kStatusMask) == static_cast<uint32_t>(Status::kPending));
  if ((before & kHasSleeper) != 0) futex_wake_all(&status_, FutexScope::kProcess);
  Listener* listener = listeners_.exchange(closed_mark<Listener>(), std::memory_order_acq_rel);
  while (listener != nullptr) {
    listener->notifier->post(listener->cookie);
    delete std::exchange(listener, listener->next);
  }
}

bool Transfer::notify(Notifier* notifier, uint64_t cookie) {
  Listener* head = listeners_.load(std::memory_order_acquire);
  if (head == closed_mark<Listener>()) return false;
  auto* listener = new Listener{head, Ref<Notifier>::share(notifier), cookie};
  // release: the node is whole before complete() can take it.
  while (!listeners_.compare_exchange_weak(listener->next, listener, std::memory_order_acq_rel, std::memory_order_acquire)) {
    if (listener->next == closed_mark<Listener>()) {
      delete listener;
      return false;
    }
  }
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
  const auto sleep = [this](Deadline until) {
    uint32_t seen = status_.load(std::memory_order_acquire);
    if ((seen & kStatusMask) != 0) return;
    if ((seen & kHasSleeper) == 0) {
      // The flag makes complete() pay for a wake-up only when somebody sleeps.
      if (!status_.compare_exchange_strong(seen, seen | kHasSleeper, std::memory_order_acq_rel)) return;
      seen |= kHasSleeper;
    }
    futex_wait(&status_, seen, until, FutexScope::kProcess);
  };
  const WaitResult result = core_->wait_until([this] { return done(); }, sleep, deadline, interrupted);
  if (result != WaitResult::kClosed || core_->forked()) return result;
  // Submitted while the engine closed: it is being completed by whoever submitted before us in the queue.
  while (!done()) std::this_thread::yield();
  return WaitResult::kReady;
}

TransferInfo Transfer::info() const {
  const Status now = status();
  TransferInfo info{.kind = work_->kind, .status = now, .peer = {}, .bytes = work_->length_bytes, .bytes_retired = 0, .imm = work_->imm, .detail = {}};
  if (work_->kind == OpKind::kScatter || work_->kind == OpKind::kBarrier) {
    info.peer = std::to_string(work_->targets_total) + " peers";
  } else {
    info.peer = work_->peer->address().name;
  }
  if (now == Status::kPending) return info; // the rest is still the progress holder's
  info.bytes_retired = work_->bytes_retired;
  if (!work_->failed_peer.empty()) info.peer = work_->failed_peer;
  info.detail = work_->detail;
  return info;
}

TransferPool::~TransferPool() {
  while (free_ != nullptr) delete std::exchange(free_, free_->next_free_);
}

Transfer* TransferPool::take(uint32_t refs) {
  Transfer* transfer;
  {
    std::lock_guard lock(lock_);
    if (out_++ == 0) engine_->add_ref();
    transfer = free_;
    if (transfer != nullptr) free_ = transfer->next_free_;
  }
  if (transfer == nullptr) transfer = new Transfer(core_);
  transfer->refs_.store(refs, std::memory_order_relaxed); // published with the transfer itself
  return transfer;
}

void TransferPool::give_back(Transfer* transfer) {
  transfer->work_->recycle();
  transfer->status_.store(0, std::memory_order_relaxed);
  transfer->cancel_requested_.store(false, std::memory_order_relaxed);
  transfer->listeners_.store(nullptr, std::memory_order_relaxed);
  Engine* const engine = engine_;
  bool last;
  {
    std::lock_guard lock(lock_);
    transfer->next_free_ = free_;
    free_ = transfer;
    last = --out_ == 0;
  }
  if (last) engine->release(); // may delete us
}

}  // namespace crossrail
