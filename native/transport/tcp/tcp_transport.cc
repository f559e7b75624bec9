#include "transport/tcp/tcp_transport.h"

#include <sys/epoll.h>
#include <sys/random.h>
#include <sys/resource.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <utility>

#include "transport/tcp/frames.h"
#include "util/errors.h"

namespace crossrail::tcp {

namespace {

// A longer range is several work requests, of which the last waits for the others: rare, and short beside 64 MiB.
constexpr uint64_t kSliceBytes = uint64_t{64} << 20;
constexpr uint64_t kPieceBytesMin = 256 << 10;
// Single operations from here on travel with the bulk.
constexpr uint64_t kBulkBytes = 16 << 10;
constexpr size_t kQueuedMax = 4096;      // of one link: the rest waits in the engine
constexpr size_t kSendsQueuedMax = 256;  // messages, likewise
constexpr int64_t kTickNs = 20'000'000;
// How long an acknowledgement waits for an operation to ride with.
constexpr int64_t kAckWaitNs = 30'000;
constexpr int32_t kRidesMax = 8;
constexpr uint64_t kTakenPerFrame = 256;
// Idle polls after which the sleeping worker is spared the sockets' news: short visits do not pay for that.
constexpr uint32_t kIdlePollsToUnwatch = 2;
constexpr uint32_t kPollsPerLook = 16;
constexpr int64_t kLookEveryNs = 500;
constexpr uint32_t kMissesToCool = 128;
constexpr uint32_t kHitsToUnwatch = 32;
constexpr uint32_t kPollsPerClock = 4;
constexpr int64_t kStoppedNs = 200'000'000;

uint64_t random_u64() {
  uint64_t value = 0;
  if (getrandom(&value, sizeof value, 0) != sizeof value) throw_errno("getrandom", "cannot draw a link number");
  return value;
}

// A thousand peers are a thousand sockets and more: what the administrator allows, we use.
void raise_descriptor_limit() {
  rlimit limit{};
  if (getrlimit(RLIMIT_NOFILE, &limit) != 0 || limit.rlim_cur >= limit.rlim_max) return;
  limit.rlim_cur = limit.rlim_max;
  setrlimit(RLIMIT_NOFILE, &limit);
}

Address with_endpoints(Address address, const std::vector<Rail>& rails) {
  for (const Rail& rail : rails) address.endpoints.push_back(rail.endpoint);
  return address;
}

}  // namespace

TcpTransport::TcpTransport(const TransportOptions& options, Sink* sink)
    : sink_(sink),
      options_(options),
      key_(handshake_key(options.secret, options.identity.incarnation)),
      connections_(&poller_),
      rails_(open_rails(options.rails, options.rail_count, options.port)),
      next_link_id_(random_u64()) {
  address_ = with_endpoints(options.identity, rails_);
  traits_ = {.rail_count = static_cast<uint32_t>(rails_.size()),
             .slice_bytes_max = kSliceBytes,
             .message_bytes_max = options.message_bytes_max,
             .fifo_rails = false,
             .balances_rails = true,
             .piece_bytes_min = kPieceBytesMin};
  raise_descriptor_limit();
  for (uint32_t rail = 0; rail < rails_.size(); ++rail) {
    listeners_.push_back(std::make_unique<Listener>(this, rail));
    poller_.add(rails_[rail].listener.get(), listeners_.back().get(), EPOLLIN);
  }
  connections_.now = now_ = now_ns();
}

TcpTransport::~TcpTransport() { close(); }

void TcpTransport::close() {
  if (closed_) return;
  closed_ = true;
  connections_.now = now_ = now_ns();
  send_acks(true);
  // First this, since the end of our operations may be the end of connections that carry both.
  for (auto& [key, link] : in_) {
    for (auto& [index, channel] : link->channels) {
      if (!channel.is_open()) continue;
      append_end(channel.control, FrameType::kClosing, "the engine was closed");
      channel.stream->pump();
    }
  }
  while (!out_.empty()) {
    OutLink& link = *out_.back();
    say_goodbye(link, "the engine was closed");
    flush(link, Status::kEngineClosed, "the engine was closed");
  }
  out_.clear();
  in_.clear();
  dirty_.clear();
  watched_.clear();
  acks_.clear();
  holding_.clear();
  acceptors_.clear();
  dead_streams_.clear();
  dead_connectors_.clear();
  for (Rail& rail : rails_) {
    poller_.remove(rail.listener.get());
    rail.listener.reset();
  }
  poller_.close();
}

// The child's copies would keep the connections open when the parent dies.
void TcpTransport::abandon_after_fork() { poller_.abandon_after_fork(); }

// --- memory ---

std::unique_ptr<LocalRegion> TcpTransport::register_memory(uint64_t id, std::byte* base, uint64_t length_bytes,
                                                           Access access) {
  return regions_.add(id, base, length_bytes, access);
}

std::unique_ptr<LocalRegion> TcpTransport::allocate(uint64_t id, uint64_t length_bytes, bool populate) {
  return regions_.allocate(id, length_bytes, populate);
}

// Those of whom a frame is being placed there, or a read answered.
std::vector<std::string> TcpTransport::users_of(const LocalRegion& region) {
  std::vector<std::string> names;
  for (const auto& [key, link] : in_) {
    const bool is_at = std::ranges::any_of(link->channels, [&](const auto& item) {
      return item.second.stream != nullptr && item.second.stream->is_at(region);
    });
    if (is_at) names.push_back(link->peer->name);
  }
  return names;
}

void TcpTransport::revoke_region(LocalRegion& region) { regions_.revoke(static_cast<TcpRegion&>(region)); }

bool TcpTransport::is_region_quiet(const LocalRegion& region) {
  return RegionTable::is_quiet(static_cast<const TcpRegion&>(region));
}

// --- peers ---

Link* TcpTransport::connect(const std::shared_ptr<const Address>& address) {
  connections_.now = now_ = now_ns();
  auto owned =
      std::make_unique<OutLink>(this, next_link_id_++, address, pair_rails(address_.endpoints, address->endpoints));
  OutLink& link = *owned;
  out_.push_back(std::move(owned));
  link.connect_by_ns = now_ + options_.connect_timeout_ns;
  link.down_since_ns = now_;
  for (auto& [key, incoming] : in_) {
    if (key.first == address->incarnation && incoming->is_connected()) pair_twins(link, *incoming);
  }
  if (link.pairs.empty()) {
    link.doom.emplace("none of our rails is of the same address family (IPv4, IPv6) as one of the peer's", false);
  } else {
    link.channel(0, Lane::kSmall).wanted = true;
  }
  watch(link);
  return &link;
}

void TcpTransport::disconnect(Link& link) {
  auto& out = static_cast<OutLink&>(link);
  say_goodbye(out, "it forgot this peer");
  flush(out, Status::kPeerLost, "forgotten on request");
}

std::unique_ptr<RemoteKey> TcpTransport::resolve(Link&, const RegionDescriptor& descriptor) {
  return std::make_unique<TcpKey>(descriptor.region_id);
}

std::vector<PathReport> TcpTransport::explain(Link& link) {
  auto& out = static_cast<OutLink&>(link);
  std::vector<PathReport> reports;
  for (uint32_t pair = 0; pair < out.pairs.size(); ++pair) {
    const RailPair& rails = out.pairs[pair];
    const Rail& rail = rails_[rails.rail];
    PathReport report;
    report.what = "rail " + std::to_string(rails.rail) + " to rail " + std::to_string(rails.peer_rail);
    report.path = "tcp";
    report.reason = to_text(rail.endpoint) + " to " + to_text(out.address->endpoints[rails.peer_rail]);
    if (!rail.netdev.empty()) report.reason += " by " + rail.netdev;
    std::string state = "connected when first needed";
    for (const Lane lane : {Lane::kSmall, Lane::kBulk}) {
      const OutChannel* channel = out.find(pair, lane);
      if (channel == nullptr) continue;
      report.bytes += channel->bytes_acked;
      if (channel->is_open()) {
        state = "connected";
      } else if (channel->is_connecting() || channel->wanted) {
        if (state != "connected") state = channel->trouble.empty() ? "connecting" : "down: " + channel->trouble;
      }
    }
    report.reason += ", " + state;
    if (out.busy_ns > 0 && report.bytes > 0) {
      report.gb_per_s = static_cast<double>(report.bytes) / static_cast<double>(out.busy_ns);
    }
    reports.push_back(std::move(report));
  }
  return reports;
}

std::vector<RailReport> TcpTransport::explain_rails(Link& link) {
  std::vector<RailReport> reports;
  for (const RailPair& pair : static_cast<OutLink&>(link).pairs) reports.push_back({pair.rail, pair.peer_rail});
  return reports;
}

uint64_t TcpTransport::rail_depth(Link& link, uint32_t rail) {
  auto& out = static_cast<OutLink&>(link);
  uint64_t depth = 0;
  out.for_each_channel([&](const OutChannel& channel) {
    if (out.pairs[channel.pair()].rail != rail) return;
    depth += channel.reads_open + (channel.current ? 1 : 0);  // a read is over when its data is here
    for (size_t i = 0; i < channel.sent.size(); ++i) depth += channel.sent[i].op == WorkOp::kRead ? 0 : 1;
  });
  return depth;
}

// --- data ---

uint32_t TcpTransport::post(Link& link, uint32_t rail, std::span<const WorkRequest> requests, uint32_t* completed) {
  auto& out = static_cast<OutLink&>(link);
  *completed = 0;
  if (!out.up || out.doom) return 0;
  if (rail != kAnyRail && !out.reaches(rail)) {
    for (const WorkRequest& request : requests) {
      ++out.outstanding;
      retire(out, request, Status::kTransportFailed,
             "rail " + std::to_string(rail) + " has no rail of the peer to talk to (see explain)");
    }
    return static_cast<uint32_t>(requests.size());
  }
  size_t room = out.queued - out.sends.size() >= kQueuedMax ? 0 : kQueuedMax - (out.queued - out.sends.size());
  size_t sends_room = out.sends.size() >= kSendsQueuedMax ? 0 : kSendsQueuedMax - out.sends.size();
  uint32_t taken = 0;
  for (const WorkRequest& request : requests) {
    if (request.op == WorkOp::kSend) {
      if (sends_room == 0) break;
      --sends_room;
      out.want(kAnyRail, Lane::kSmall);
      out.sends.push_back(request);
    } else {
      if (room == 0) break;
      --room;
      const Lane lane = request.bulk || request.length_bytes >= kBulkBytes ? Lane::kBulk : Lane::kSmall;
      out.want(rail, lane);
      WorkRequest& queued = out.queue(rail, lane).push_back(request);
      queued.reserved = routing_of(rail, lane);
    }
    ++taken;
  }
  if (taken == 0) return 0;
  out.queued += taken;
  if (out.outstanding == 0) out.busy_since_ns = out.waits_since_ns = now_ns();
  out.outstanding += taken;
  mark_dirty(out);
  watch(out);
  return taken;
}

void TcpTransport::retire(OutLink& link, const WorkRequest& request, Status status, const std::string& detail) {
  link.end(1, now_);
  const uint64_t bytes = status == Status::kDone ? request.length_bytes : 0;
  sink_->on_retired(link, request.context, request.tag, 1, bytes, status, detail);
}

void TcpTransport::withdraw(bool (*wanted)(void* context)) {
  for (auto& owned : out_) {
    OutLink& link = *owned;
    if (link.queued == 0) continue;
    std::vector<WorkRequest> withdrawn;
    const auto take_from = [&](RingQueue<WorkRequest>& queue) {
      if (queue.empty()) return;
      queue.filter([&](const WorkRequest& request) {
        if (!wanted(request.context)) return true;
        withdrawn.push_back(request);
        return false;
      });
    };
    for (auto& queue : link.queues) take_from(queue);
    take_from(link.sends);
    link.queued -= withdrawn.size();
    for (const WorkRequest& request : withdrawn) {
      link.end(1, now_);
      sink_->on_withdrawn(link, request.context, request.tag, request.length_bytes);
    }
  }
}

void TcpTransport::mark_dirty(OutLink& link) {
  if (std::exchange(link.is_dirty, true)) return;
  dirty_.push_back(&link);
}

void TcpTransport::watch(OutLink& link) {
  if (std::exchange(link.is_watched, true)) return;
  watched_.push_back(&link);
  next_tick_ns_ = 0;
}

uint32_t TcpTransport::pump(OutLink& link) {
  uint32_t moved = 0;
  for (size_t i = 0; i < link.channels.size(); ++i) {
    OutChannel* channel = link.channels[i].get();
    if (channel == nullptr || !channel->is_open() || channel->stream->connection()->is_blocked()) continue;
    if (channel->stream->pump()) ++moved;
  }
  return moved;
}

uint32_t TcpTransport::pump_dirty() {
  if (dirty_.empty()) return 0;
  uint32_t moved = 0;
  // One that has more than a turn's worth goes to the end of the list again: it has its next turn in the next round.
  const size_t count = dirty_.size();
  for (size_t i = 0; i < count; ++i) {
    OutLink& link = *dirty_[i];
    link.is_dirty = false;
    moved += pump(link);
  }
  dirty_.erase(dirty_.begin(), dirty_.begin() + static_cast<std::ptrdiff_t>(count));
  return moved;
}

// --- acknowledgements ---

void TcpTransport::ack_later(InLink& link, bool at_once) {
  link.ack_now = link.ack_now || at_once || link.rides == 0;
  if (std::exchange(link.ack_due, true)) return;
  link.ack_due_since_ns = now_;
  if (!std::exchange(link.ack_listed, true)) acks_.push_back(&link);
}

void TcpTransport::send_ack(InLink& link) {
  link.ack_due = link.ack_now = false;
  link.acked_alone_ns = now_;
  for (auto& [index, channel] : link.channels) {
    if (channel.is_open()) channel.stream->pump();
  }
}

uint32_t TcpTransport::send_acks(bool all) {
  if (acks_.empty()) return 0;
  uint32_t sent = 0;
  size_t kept = 0;
  const size_t count = acks_.size();
  for (size_t i = 0; i < count; ++i) {
    InLink* const link = acks_[i];
    if (link->ack_due && !all && !link->ack_now && now_ - link->ack_due_since_ns < kAckWaitNs) {
      acks_[kept++] = link;
      continue;
    }
    link->ack_listed = false;
    if (!link->ack_due) continue;  // it rode
    if (!link->ack_now && link->rides > 0) --link->rides;
    send_ack(*link);  // may add to the list
    ++sent;
  }
  acks_.erase(acks_.begin() + static_cast<std::ptrdiff_t>(kept), acks_.begin() + static_cast<std::ptrdiff_t>(count));
  return sent;
}

bool TcpTransport::put_rider_acks(OutLink& link, TxBatch& batch) {
  InLink* const twin = link.twin;
  if (twin == nullptr) return false;
  if (!twin->ack_due) {
    // It would have had company, had it waited.
    if (now_ - twin->acked_alone_ns < kAckWaitNs && twin->rides < kRidesMax) ++twin->rides;
    return false;
  }
  // A refusal must not be overtaken by the acknowledgement of its operation.
  if (twin->has_refused || twin->ack_now) return false;
  for (auto& [index, channel] : twin->channels) {
    if (channel.placed == channel.ack_sent) continue;
    if (!batch.has_room(sizeof(FrameHeader) + sizeof(AckMeta))) return false;
    batch.put(header_of(FrameType::kAck, 0, 0, sizeof(AckMeta), 0));
    batch.put(AckMeta{twin->id, channel.placed, channel.index, 0});
    channel.ack_sent = channel.placed;
  }
  if (twin->rides < kRidesMax) ++twin->rides;
  size_t told = 0;
  for (; told < twin->taken.size() && batch.has_room(sizeof(FrameHeader) + sizeof(TakenMeta)); ++told) {
    const TakenMeta& taken = twin->taken[told];
    batch.put(header_of(FrameType::kTaken, 0, 0, sizeof taken, 0));
    batch.put(taken);
  }
  twin->taken.erase(twin->taken.begin(), twin->taken.begin() + static_cast<std::ptrdiff_t>(told));
  if (twin->taken.empty()) twin->ack_due = false;
  return true;
}

void TcpTransport::hold(InLink& link) {
  if (std::find(holding_.begin(), holding_.end(), &link) == holding_.end()) holding_.push_back(&link);
}

void TcpTransport::tell_taken(InLink& link, uint64_t message_id) {
  if (!link.taken.empty() && link.taken.back().first_id + link.taken.back().count == message_id &&
      link.taken.back().count < kTakenPerFrame) {
    ++link.taken.back().count;
  } else {
    link.taken.push_back({link.id, message_id, 1});
  }
}

void TcpTransport::tell_too_long(InLink& link, uint64_t message_id, uint64_t bytes) {
  for (auto& [index, channel] : link.channels) {
    if (!channel.is_open()) continue;
    append_frame(channel.control, FrameType::kRefused,
                 RefusedMeta{message_id, kMessageRefused, static_cast<uint32_t>(Status::kMessageTooLong)},
                 "message of " + std::to_string(bytes) + " bytes: no receive buffer of the target is as long");
    return;
  }  // none open: the initiator will ask
}

void TcpTransport::note_outcome(InLink& link, MessageOutcome outcome) {
  // An honest initiator has sent the newest only after it knew of those. The second bound is for others.
  const auto is_known = [&](const MessageOutcome& old) { return old.id + kMessagesUnderWayMax <= link.newest_id; };
  while (!link.outcomes.empty() &&
         (is_known(link.outcomes.front()) || link.outcomes.size() >= 4 * kMessagesUnderWayMax)) {
    link.outcomes.pop_front();
  }
  link.outcomes.push_back(outcome);
}

void TcpTransport::on_taken(InLink& link, uint64_t message_id) {
  note_outcome(link, {message_id, MessageOutcome::kTaken});
  tell_taken(link, message_id);
}

void TcpTransport::on_too_long(InLink& link, uint64_t message_id, uint64_t bytes) {
  note_outcome(link, {message_id, bytes});
  tell_too_long(link, message_id, bytes);
  ack_later(link, true);
}

void TcpTransport::tell_outcomes_again(InLink& link) {
  link.taken.clear();
  for (const MessageOutcome& outcome : link.outcomes) {
    if (outcome.bytes == MessageOutcome::kTaken) {
      tell_taken(link, outcome.id);
    } else {
      tell_too_long(link, outcome.id, outcome.bytes);
    }
  }
  ack_later(link, true);
}

OutLink* TcpTransport::find_out(const Address& peer, uint64_t id) {
  const auto found = std::find_if(out_.begin(), out_.end(), [&](const auto& out) {
    return out->id == id && out->address->incarnation == peer.incarnation;
  });
  return found == out_.end() ? nullptr : found->get();
}

void TcpTransport::offer_held() {
  if (holding_.empty()) return;
  std::erase_if(holding_, [&](InLink* link) {
    while (!link->held.empty()) {
      const HeldMessage& message = link->held.front();
      const Sink::Offer offer = sink_->on_message(link->peer, message.payload);
      if (offer == Sink::Offer::kHold) return false;
      if (offer == Sink::Offer::kTaken) {
        on_taken(*link, message.id);
      } else {
        on_too_long(*link, message.id, message.payload.size());
      }
      link->held_bytes -= message.payload.size();
      link->held.pop_front();
      ack_later(*link, true);
    }
    return true;
  });
}

// --- running ---

// Sockets that brought something of late are asked directly, until one has something; all of them now and then.
uint32_t TcpTransport::poll_sockets() {
  auto& hot = connections_.hot;
  // Not at every poll either when none is: another transport of the engine may be spinning.
  const bool looks = polls_ % kPollsPerLook == 0 || (hot[0].connection == nullptr && now_ - looked_ns_ >= kLookEveryNs);
  if (looks) looked_ns_ = now_;
  for (size_t i = 0; i < hot.size() && hot[i].connection != nullptr && !looks; ++i) {
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
  return looks ? static_cast<uint32_t>(poller_.poll()) : 0;
}

uint32_t TcpTransport::poll() {
  if (++polls_ % kPollsPerClock == 0 || connections_.hot[0].connection == nullptr) {
    const int64_t before = std::exchange(now_, now_ns());
    connections_.now = now_;
    // We were stopped: peers may have given up what is waiting in our sockets, and only epoll tells of that first.
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
    poller_.unwatch();
  }
  return moved;
}

void TcpTransport::tick() {
  next_tick_ns_ = now_ + kTickNs;
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
    if (settled) link->is_watched = false;
    return settled;
  });
  for (auto& acceptor : acceptors_) acceptor->check_deadline(now_);
  std::erase_if(acceptors_, [](const auto& acceptor) { return acceptor->ended(); });
  tend_incoming();
  if (listeners_paused_until_ns_ != 0 && now_ >= listeners_paused_until_ns_) {
    listeners_paused_until_ns_ = 0;
    for (size_t i = 0; i < rails_.size(); ++i) poller_.change(rails_[i].listener.get(), listeners_[i].get(), EPOLLIN);
  }
}

bool TcpTransport::has_arrivals() {
  return !dirty_.empty() || std::any_of(acks_.begin(), acks_.end(), [](const InLink* link) { return link->ack_now; });
}

Deadline TcpTransport::next_timer() const {
  if (!watched_.empty() || !acceptors_.empty() || listeners_paused_until_ns_ != 0) return now_ns() + kTickNs;
  const bool waits =
      std::any_of(in_.begin(), in_.end(), [](const auto& item) { return item.second->unconnected_since_ns != 0; });
  return waits ? now_ns() + 1'000'000'000 : kNoDeadline;
}

void TcpTransport::arm() {
  // seq_cst: pairs with the fence in wake(): either it sees us armed and rings, or has_work() sees its news.
  armed_.store(true, std::memory_order_seq_cst);
  idle_polls_ = 0;
  polls_ = kPollsPerLook - 1;  // who wakes up looks at all sockets
  connections_.now = now_ = now_ns();
  for (const ConnectionContext::Hot& place : connections_.hot) {
    if (place.connection != nullptr) place.connection->watch(true);
  }
  if (connections_.hot[0].connection != nullptr) connections_.hot[0].hits = 0;
  pump_dirty();
  // Acknowledgements that wait for company go out in time even if everybody sleeps.
  if (!acks_.empty()) {
    send_acks(false);
    if (!acks_.empty()) poller_.ring_at(now_ + kAckWaitNs);
  }
  poller_.watch();
}

void TcpTransport::disarm() {
  if (armed_.load(std::memory_order_relaxed)) armed_.store(false, std::memory_order_relaxed);
}

bool TcpTransport::hush() {
  poller_.clear_bell();
  poller_.unwatch();
  return true;
}

void TcpTransport::wake() {
  // seq_cst fence: the caller's news is visible before we look whether anyone is awake to see it; pairs with arm().
  std::atomic_thread_fence(std::memory_order_seq_cst);
  if (armed_.load(std::memory_order_relaxed) && armed_.exchange(false, std::memory_order_acq_rel)) poller_.ring();
}

}  // namespace crossrail::tcp
