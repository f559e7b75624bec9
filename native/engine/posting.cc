// From submits to work requests: which gets a turn, and for how long.
#include <algorithm>
#include <new>

#include "engine/core.h"
#include "util/errors.h"

namespace crossrail {

namespace {

constexpr uint32_t kSubmitsPerRound = 64;
constexpr uint32_t kItemsPerTurn = 256;                  // of one peer in a round,
constexpr uint64_t kBytesPerRound = uint64_t{1} << 20;   // and of bytes in all: then arrivals are looked at again.
constexpr uint64_t kQueuedPerRound = uint64_t{4} << 20;  // Where posting only queues: see count_in_round().

}  // namespace

uint32_t EngineCore::take_submits() {
  assert_holder();
  round_bytes_ = 0;
  uint32_t taken = 0;
  Transfer* transfer;
  while (taken < kSubmitsPerRound && submits_.try_pop(&transfer)) {
    start(transfer);
    ++taken;
  }
  if (taken > 0) bump(taken_, taken);
  return taken;
}

void EngineCore::start(Transfer* transfer) {
  assert_holder();
  TransferWork& work = *transfer->work_;
  work.serial = ++last_serial_;
  if (!work.at_once) record_transfer(FlightState::kSubmitted, *transfer);
  if (closed()) {
    finish(transfer, Status::kEngineClosed);
    return;
  }
  if (work.is_to_be_cancelled(*transfer)) {
    finish(transfer, Status::kCancelled);
    return;
  }
  if (work.has_trigger && hold(transfer)) return;
  begin(transfer);
}

// True: it waits for its word, or has already ended because that word is no longer watched.
bool EngineCore::hold(Transfer* transfer) {
  assert_holder();
  TransferWork& work = *transfer->work_;
  Peer& peer = work.peer();
  if (peer.link_ == nullptr) start_connect(peer);      // the link may have gone meanwhile
  if (peer.state() == PeerState::kLost) return false;  // it begins, and fails
  switch (triggers_.hold(transfer, std::move(work.trigger), work.threshold)) {
    case Triggers::Word::kAwaited:
      return true;
    case Triggers::Word::kReached:
      work.triggered_ns.store(clock().now_ns(), std::memory_order_relaxed);
      return false;
    case Triggers::Word::kClosed:
      finish(transfer, closed() ? Status::kEngineClosed : Status::kCancelled);
      return true;
  }
  return true;
}

void EngineCore::on_word_changed() try {
  if (is_simulated() || !try_enter_open()) {
    wake();
    return;
  }
  first_bytes_only_ = true;
  if (begin_triggered() > 0) bump(moves_);
  first_bytes_only_ = false;
  leave_awake();
} catch (const std::bad_alloc&) {  // see round()
  fail_out_of_memory(options_.name.c_str());
}

// How many bytes a round posts to such peers.
uint64_t EngineCore::round_bytes_max(const Peer& peer) {
  return peer.route_.traits->moves_while_posting ? kBytesPerRound : kQueuedPerRound;
}

// Whether the thread that begins an item may post it at once. With first_bytes_only_, only an item that begins with
// short work; otherwise any, except a long one once this round has posted enough: submits behind it should be looked at
// before all of it is copied.
bool EngineCore::may_post(const Peer& peer, const PostItem& item) const {
  const TransferWork& work = *item.transfer->work_;
  if (!first_bytes_only_) return is_short(item) || round_bytes_ < round_bytes_max(peer);
  return round_bytes_ < kFirstBytes &&
         (work.kind == OpKind::kPagedWrites ? work.page_bytes : work.length_bytes) <= kFirstBytes;
}

uint32_t EngineCore::begin_triggered() {
  assert_holder();
  if (triggers_.empty()) return 0;
  round_bytes_ = 0;
  const std::vector<Triggers::Due> due = triggers_.take_due();
  for (const auto& [transfer, word] : due) {
    TransferWork& work = *transfer->work_;
    // A cancel that came before the word changed is seen now, if not earlier: the transfer does not begin.
    if (closed()) {
      finish(transfer, Status::kEngineClosed);
    } else if (word == Triggers::Word::kClosed || work.is_to_be_cancelled(*transfer)) {
      finish(transfer, Status::kCancelled);
    } else {
      work.triggered_ns.store(clock().now_ns(), std::memory_order_relaxed);
      begin(transfer);
    }
  }
  runnable_ = runnable_ || due.size() == Triggers::kDueMax;
  return static_cast<uint32_t>(due.size());
}

void EngineCore::begin(Transfer* transfer) {
  assert_holder();
  TransferWork& work = *transfer->work_;
  work.first_rail = work.rail != kAnyRail ? work.rail : next_rail_;
  if (++next_rail_ == transports_.rail_count()) next_rail_ = 0;
  if (work.kind == OpKind::kScatter || work.kind == OpKind::kBarrier) {
    work.open_items = static_cast<uint32_t>(work.targets.size());
    for (uint32_t i = 0; i < work.targets.size(); ++i) start_item(*work.targets[i].peer, transfer, i);
    // A group may be empty, and every target may already have been posted and be done.
    finish_if_done(transfer);
    return;
  }
  work.open_items = 1;
  start_item(work.peer(), transfer, 0);
  finish_if_done(transfer);
}

// A single short work. Short works of one peer keep their order of turns.
bool EngineCore::is_short(const PostItem& item) {
  const TransferWork& work = *item.transfer->work_;
  if (work.bulk || work.has_plan || work.kind == OpKind::kPagedWrites) return false;
  const bool has_targets = work.kind == OpKind::kScatter || work.kind == OpKind::kBarrier;
  return (has_targets ? work.targets[item.target].length_bytes : work.length_bytes) <= kShortBytesMax;
}

// Posts at once what has nothing queued before it; queues the rest.
void EngineCore::start_item(Peer& peer, Transfer* transfer, uint32_t target) {
  assert_holder();
  if (peer.link_ == nullptr) start_connect(peer);
  const PostItem item{transfer, target};
  if (peer.state() == PeerState::kLost) {
    fail_item(item, Status::kPeerLost, peer, peer.work_->note);
    return;
  }
  PeerWork& waiting = *peer.work_;
  const OpKind kind = transfer->work_->kind;
  auto& backlog = kind == OpKind::kSend      ? waiting.messages
                  : kind == OpKind::kService ? waiting.services
                  : is_short(item)           ? waiting.shorts
                                             : waiting.backlog;
  if (backlog.empty() && may_post(peer, item) && advance(peer, item) == Progress::kAllPosted) {
    close_item(transfer);
    return;
  }
  backlog.push_back(item);
  mark_busy(peer);
  runnable_ = true;
}

void EngineCore::mark_busy(Peer& peer) {
  assert_holder();
  note_queued(peer);
  if (std::exchange(peer.work_->is_busy, true)) return;
  busy_.push_back(PeerRef::share(&peer));
}

// Short work of all peers does not share a round's byte budget with long work. The two take turns going first: long
// work may need part of the same room.
uint32_t EngineCore::post_backlogs() {
  assert_holder();
  runnable_ = false;
  if (busy_.empty()) return 0;
  size_t next = 0;
  const auto post_short = [&] {
    return post_turns({&PeerWork::services, &PeerWork::messages, &PeerWork::shorts}, &next);
  };
  uint32_t moved = shorts_first_ ? post_short() : 0;
  moved += post_turns({&PeerWork::backlog}, &next);
  if (!shorts_first_) moved += post_short();
  shorts_first_ = !shorts_first_;
  std::rotate(busy_.begin(), busy_.begin() + static_cast<std::ptrdiff_t>(next), busy_.end());
  std::erase_if(busy_, [](const PeerRef& peer) {
    note_queued(*peer);
    PeerWork& work = *peer->work_;
    if (!work.backlog.empty() || !work.shorts.empty() || !work.messages.empty() || !work.services.empty()) return false;
    work.end_busy();
    return true;
  });
  runnable_ = runnable_ || moved > 0;
  return moved;
}

// A turn for each busy peer, until the round has used up its bytes. *next: the first peer without a turn, if any: the
// next round begins there.
uint32_t EngineCore::post_turns(std::initializer_list<RingQueue<PostItem> PeerWork::*> queues, size_t* next) {
  round_bytes_ = 0;
  uint32_t moved = 0;
  const size_t count = busy_.size();  // posting may add some
  for (size_t i = 0; i < count; ++i) {
    const PeerRef peer = busy_[i];  // posting may lose the peer
    if (round_bytes_ >= round_bytes_max(*peer)) {
      if (*next == 0) *next = i;
      continue;
    }
    for (const auto queue : queues) moved += post_backlog(*peer, (*peer->work_).*queue);
  }
  return moved;
}

// One pass over a peer's queue, a turn per item; ends when everything that was tried is blocked.
uint32_t EngineCore::post_backlog(Peer& peer, RingQueue<PostItem>& backlog) {
  assert_holder();
  uint32_t moved = 0;
  uint32_t blocked = 0;
  const uint64_t bytes_max = round_bytes_max(peer);
  for (uint32_t turn = 0; turn < kItemsPerTurn && blocked < backlog.size() && round_bytes_ < bytes_max; ++turn) {
    const PostItem item = backlog.front();
    const uint32_t posted_before = item.transfer->work_->posted;
    const Progress progress = advance(peer, item);
    if (backlog.empty()) return moved + 1;  // the link went down meanwhile
    if (progress == Progress::kFull) {      // the item keeps its place
      if (item.transfer->work_->posted != posted_before) ++moved;
      break;
    }
    backlog.pop_front();
    if (progress == Progress::kAllPosted) {
      ++moved;
      close_item(item.transfer);
      finish_if_done(item.transfer);
      continue;
    }
    backlog.push_back(item);
    if (item.transfer->work_->posted != posted_before) {
      ++moved;
      blocked = 0;
    } else {
      ++blocked;
    }
  }
  if (moved > 0) bump(peer.track_->moves);
  return moved;
}

EngineCore::Progress EngineCore::advance(Peer& peer, const PostItem& item) {
  assert_holder();
  TransferWork& work = *item.transfer->work_;
  const bool has_targets = work.kind == OpKind::kScatter || work.kind == OpKind::kBarrier;  // each fails on its own
  if ((work.failure != Status::kDone && !has_targets) || work.cut_short)
    return Progress::kAllPosted;  // post nothing more of it
  if (peer.link_ == nullptr || peer.state() == PeerState::kConnecting) return Progress::kFull;
  switch (work.kind) {
    case OpKind::kWrite:
    case OpKind::kRead:
      return post_range(peer, item.transfer);
    case OpKind::kPagedWrites:
      return post_pages(peer, item.transfer);
    case OpKind::kScatter:
    case OpKind::kBarrier:
      return post_target(peer, item.transfer, work.targets[item.target]);
    case OpKind::kSend:
    case OpKind::kService:
      return post_message(peer, item.transfer);
  }
  return Progress::kAllPosted;
}

}  // namespace crossrail
