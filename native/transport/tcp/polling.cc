// Driving: sockets, timers, and falling asleep.
#include <sys/epoll.h>

#include <algorithm>
#include <utility>

#include "transport/tcp/tcp_transport.h"

namespace crossrail::tcp {

namespace {

constexpr int64_t kTickNs = 20'000'000;
// After this many idle polls the sockets no longer wake the sleeping worker: not worth it for short visits.
constexpr uint32_t kIdlePollsToUnwatch = 2;
constexpr uint32_t kPollsPerLook = 16;
constexpr int64_t kLookEveryNs = 500;
constexpr int64_t kLookAllNs = 1'000'000;  // hot sockets keep the others waiting for no longer than this
constexpr uint32_t kMissesToCool = 128;
constexpr uint32_t kHitsToUnwatch = 32;
constexpr uint32_t kPollsPerClock = 4;
constexpr int64_t kStoppedNs = 200'000'000;
constexpr int64_t kPauseMaxNs = 500'000'000;  // between two looks: for anything beyond this we were away
constexpr int64_t kIdleTickNs = 400'000'000;  // for links with nothing outstanding; below kPauseMaxNs

}  // namespace

// Sockets that received something recently are polled directly, until one has something; all of them from time to time.
uint32_t TcpTransport::poll_sockets() {
  auto& hot = connections_.hot;
  // Without hot sockets, not at every poll either: another transport of the engine may be spinning.
  const bool looks = polls_ % kPollsPerLook == 0 || (hot[0].connection == nullptr && now_ - looked_ns_ >= kLookEveryNs);
  const bool asks_hot = !looks || (has_slept_ && now_ - looked_ns_ < kLookAllNs);
  has_slept_ = false;
  for (size_t i = 0; i < hot.size() && hot[i].connection != nullptr && asks_hot; ++i) {
    Connection* const connection = hot[i].connection;
    if (connection->receive()) {
      if (hot[0].connection == connection && hot[0].hits >= kHitsToUnwatch) connection->watch(false);
      return 1;
    }
    if (++hot[i].misses == kMissesToCool) {
      connections_.forget_hot(hot[i].connection);
      break;
    }
  }
  if (!looks) return 0;
  looked_ns_ = now_;
  return static_cast<uint32_t>(poller_.poll());
}

uint32_t TcpTransport::poll() {
  has_looked_.store(true, std::memory_order_relaxed);  // see hush()
  if (++polls_ % kPollsPerClock == 0 || connections_.hot[0].connection == nullptr) {
    const int64_t before = std::exchange(now_, now_ns());
    connections_.now = now_;
    // We were stopped: peers may have given up what is waiting in our sockets, and only epoll reports that first.
    if (now_ - before > kStoppedNs) connections_.cool();
  }
  uint32_t moved = pump_dirty();
  moved += poll_sockets();
  if (revocations_seen_ != regions_.revocations()) {
    revocations_seen_ = regions_.revocations();
    for (auto& [key, link] : in_) {
      for (auto& [index, channel] : link->channels) {
        if (channel.is_open()) channel.stream->check_region();
      }
    }
    ++moved;
  }
  offer_held();
  moved += pump_dirty();
  moved += send_acks(false);
  if (now_ >= next_tick_ns_) tick();
  dead_streams_.clear();
  dead_connectors_.clear();
  if (moved > 0) {
    idle_polls_ = 0;
  } else if (++idle_polls_ == kIdlePollsToUnwatch) {
    poller_.doorbell().unwatch();
  }
  return moved;
}

void TcpTransport::tick() {
  next_tick_ns_ = now_ + kTickNs;
  // We were not there to poll or listen (stopped, or nobody drove): that time says nothing about peers.
  const int64_t away_ns = now_ - std::exchange(ticked_ns_, now_) - kPauseMaxNs;
  if (away_ns > 0) {
    for (OutLink* link : watched_) excuse(*link, away_ns);
    for (auto& [key, link] : in_) {
      int64_t& since_ns = link->unconnected_since_ns;
      if (since_ns != 0) since_ns = std::min(since_ns + away_ns, now_);
    }
  }
  count_attempts();
  for (size_t i = 0; i < watched_.size();) {
    OutLink* const link = watched_[i];
    tend(*link);  // may take it down
    if (i < watched_.size() && watched_[i] == link) ++i;
  }
  std::erase_if(watched_, [&](OutLink* link) {
    bool settled = link->up && link->outstanding == 0 && !link->doom && !link->frozen;
    link->for_each_channel([&](OutChannel& channel) {
      settled =
          settled && !channel.is_connecting() && !should_move(channel) && (!channel.wanted || channel.is_usable());
    });
    if (settled) {
      link->is_watched = false;
      link->release_idle();
    }
    return settled;
  });
  connections_.ask_unwatched();
  for (auto& acceptor : acceptors_) acceptor->check_deadline(now_);
  std::erase_if(acceptors_, [](const auto& acceptor) { return acceptor->ended(); });
  tend_incoming();
  tell_of_strangers();
  if (listeners_paused_until_ns_ != 0 && now_ >= listeners_paused_until_ns_) {
    listeners_paused_until_ns_ = 0;
    for (size_t i = 0; i < rails_.size(); ++i) poller_.change(rails_[i].listener.get(), listeners_[i].get(), EPOLLIN);
  }
}

bool TcpTransport::has_arrivals() {
  return !dirty_.empty() || std::any_of(acks_.begin(), acks_.end(), [](const InLink* link) { return link->ack_now; });
}

Deadline TcpTransport::next_timer() const {
  const int64_t now = now_ns();
  const Deadline soon = now + kTickNs;
  if (!acceptors_.empty() || listeners_paused_until_ns_ != 0 || !connections_.unwatched.empty()) return soon;
  Deadline next = unconnected_ > 0 ? now + 1'000'000'000 : kNoDeadline;
  if (const Deadline due = stranger_news_.due(); due != kNoDeadline) next = std::min(next, std::max(soon, due));
  for (const OutLink* link : watched_) next = std::min(next, std::max(soon, next_look_at(*link, now)));
  return next;
}

// A rail that is down may stay so for days: it wakes us only to be tried again. A peer that has not answered yet wakes
// nobody, either: thousands of engines waiting for a peer on the same machine would keep it from its work.
int64_t TcpTransport::next_look_at(const OutLink& link, int64_t now) const {
  if (link.frozen || link.doom || link.held_since_ns != 0 || (link.up && link.outstanding > 0)) return now;
  int64_t next = now + kIdleTickNs;
  if (!link.up) {
    next = std::min(next, link.connect_by_ns);
    if (const int64_t next_rail = link.down_since_ns + kNextRailNs; next_rail >= now)
      next = std::min(next, next_rail + 1);
  }
  for (const auto& channel : link.channels) {
    if (channel == nullptr || !channel->wanted || (channel->is_connecting() && !channel->outwaits_sharer(now)))
      continue;
    if (channel->doubt || should_move(*channel)) return now;
    if (!channel->is_open()) next = std::min(next, channel->retry_at_ns);
  }
  return next;
}

void TcpTransport::arm() {
  // seq_cst fence: pairs with the one in wake(): either it sees us armed and rings, or whoever looks once more sees its
  // news.
  armed_.store(true, std::memory_order_relaxed);
  std::atomic_thread_fence(std::memory_order_seq_cst);
  idle_polls_ = 0;
  polls_ = kPollsPerLook - 1;  // whoever wakes up looks at all sockets,
  has_slept_ = true;           // but may ask the hot ones first
  connections_.now = now_ = now_ns();
  for (const ConnectionContext::Hot& place : connections_.hot) {
    if (place.connection != nullptr) place.connection->watch(true);
  }
  if (connections_.hot[0].connection != nullptr) connections_.hot[0].hits = 0;
  pump_dirty();
  // Acknowledgements that wait for an operation to ride with are sent in time even if everybody sleeps.
  if (!acks_.empty()) {
    send_acks(false);
    int32_t rides = kRidesMax;  // of the link that waits for the shortest time
    for (const InLink* link : acks_) rides = std::min(rides, std::max(link->rides, 1));
    if (!acks_.empty()) poller_.wake_by(now_ + rides * kAckSleepNs);
  }
  poller_.doorbell().watch();
}

// relaxed: we are awake, and look before we sleep. A thread that still sees us armed rings for nothing.
void TcpTransport::disarm() {
  if (armed_.load(std::memory_order_relaxed)) armed_.store(false, std::memory_order_relaxed);
}

bool TcpTransport::hush(bool looks_at_once) {
  poller_.doorbell().silence();
  // Saves two system calls for a thread that polls most of the time, and will leave again. Otherwise whatever is not
  // polled yet would wake the sleeper again. relaxed: a guess; a wrong one costs those calls, or a wake-up.
  const bool has_looked = has_looked_.exchange(false, std::memory_order_relaxed);
  if (!looks_at_once || !has_looked) poller_.doorbell().unwatch();
  // release: pairs with is_armed() of a thread that is about to leave: it sees that another thread has these news.
  armed_.store(false, std::memory_order_release);
  return true;
}

void TcpTransport::wake() {
  // seq_cst fence: the caller's news is visible before we check whether anyone is awake to see it; pairs with arm().
  // acq_rel: one of several rings; what they announce is ordered by the fence.
  std::atomic_thread_fence(std::memory_order_seq_cst);
  if (armed_.load(std::memory_order_relaxed) && armed_.exchange(false, std::memory_order_acq_rel))
    poller_.doorbell().ring();
}

}  // namespace crossrail::tcp
