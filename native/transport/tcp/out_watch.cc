// What goes wrong between an initiator and its target: connections that cannot be made, break, or fall silent.
//
// One rail of several broken: the link goes on over the others. They carry the question how much of what was sent over
// the broken channel has been placed; with the answer the rest is sent again, over any rail. The channel is retried
// until the rail is back. All broken: the link waits for one to come back, for peer_timeout at most. All of the peer's
// ports closed, or another engine there: the peer is gone, at once.
#include <linux/sockios.h>
#include <sys/ioctl.h>

#include <algorithm>
#include <utility>

#include "transport/tcp/frames.h"
#include "transport/tcp/tcp_transport.h"
#include "util/errors.h"

namespace crossrail::tcp {

namespace {

constexpr int64_t kRetryFirstNs = 20'000'000;
constexpr int64_t kRetryMaxNs = 1'000'000'000;
// The longest pause after a connection that came up but carried nothing useful.
constexpr int64_t kRemakeMaxNs = 160'000'000;
// An attempt may take this many times as long as the latest successful one: a handshake takes three round trips, four
// with TLS, and more where packets are lost.
constexpr int64_t kAttemptFactor = 3;
// Thousands of peers are not connected all at once: each step of a handshake would wait for those of all others, until
// on a machine short of CPU time none is finished by its deadline. An attempt that is still unfinished after this long
// causes no work, and is in nobody's way.
constexpr size_t kYoungAttemptsMax = 256;
constexpr int64_t kYoungNs = 500'000'000;
// Silence after which a peer, or one rail of it, is asked for a sign of life.
constexpr int64_t kPingAfterNs = 500'000'000;
constexpr int64_t kFrozenAfterNs = 2'000'000'000;
// When fewer bytes than this (some forty of the smallest writes) are in the send queue, a decrease means nothing.
constexpr int kPileBytes = 4 << 10;
// One rail is silent while others are not.
constexpr int64_t kRailSilentNs = 2'000'000'000;
// By so much longer than ours is the kernel's patience with bytes that nobody acknowledges. If it ended first, the time
// without a connection would count from then on, and the peer be lost after twice as long.
constexpr int64_t kKernelPatienceNs = 1'000'000'000;
// All open channels are silent: rails and lanes that have no connection yet are tried.
constexpr int64_t kTryOthersNs = 1'000'000'000;
// This many consecutive connections that broke before anything got through are no accident.
constexpr uint32_t kVainConnectionsMin = 3;
constexpr int64_t kTickSlackNs = 100'000'000;  // attempts end by the same deadline, and give better reasons

// What became of another connection tells a frozen process from a way, or an address of ours, that is gone.
std::string silence_text(OutLink& link, const Address& own, int64_t silent_ns) {
  std::string text, tried;
  uint32_t last = UINT32_MAX;
  link.for_each_channel([&](const OutChannel& channel) {
    if (!channel.trouble.empty()) tried = "; another connection: " + channel.trouble;
    if (!channel.is_open() || channel.pair() == last) return;
    last = channel.pair();
    const RailPair& rails = link.pairs[last];
    text += (text.empty() ? "rail " : ", rail ") + std::to_string(rails.rail) + " (" +
            ip_text(own.endpoints[rails.rail]) + " to " + ip_text(link.address->endpoints[rails.peer_rail]) + ")";
  });
  return "silent for " + seconds_text(silent_ns) + " (peer_timeout_s) with operations under way on " + text +
         ": it is frozen, or cut off" + tried;
}

}  // namespace

// --- attempts ---

void TcpTransport::count_attempts() {
  young_attempts_ = 0;
  for (OutLink* link : watched_) {
    link->for_each_channel([&](const OutChannel& channel) {
      if (channel.connector && now_ - channel.attempted_ns < kYoungNs) ++young_attempts_;
    });
  }
}

// False: not yet. Its next tick asks again.
bool TcpTransport::may_attempt(OutLink& link) {
  if (young_attempts_ >= kYoungAttemptsMax) {
    bool tries = false;  // over another rail
    link.for_each_channel(
        [&](const OutChannel& channel) { tries = tries || channel.is_open() || channel.is_connecting(); });
    if (!tries && link.held_since_ns == 0) link.held_since_ns = now_;
    return false;
  }
  if (link.held_since_ns != 0) excuse(link, now_ - std::exchange(link.held_since_ns, 0));
  return true;
}

void TcpTransport::start_attempt(OutChannel& channel) {
  OutLink& link = *channel.link;
  if (channel.sharer != nullptr) {
    channel.shuns_sharing = true;
    channel.retry_pause_ns = std::max(channel.retry_pause_ns, kRetryFirstNs);
  } else if (start_sharing(channel)) {
    return;
  }
  const RailPair& rails = link.pairs[channel.pair()];
  Hello hello;
  hello.target_tag = target_tag(link.address->incarnation);
  hello.nonce = draw_nonce();
  hello.link_id = link.id;
  hello.channel = channel.index;
  hello.epoch = channel.connector_epoch = ++link.newest_epoch;
  hello.resumes = link.up;
  hello.is_bulk = channel.lane() == Lane::kBulk;
  hello.sender = address_;
  const Deadline deadline = link.up ? now_ + link.attempt_ns : link.connect_by_ns;
  Connector::Purpose purpose{.target = link.address,
                             .key = handshake_key(options_.secret, link.address->incarnation),
                             .hello = encode(hello),
                             .tls = tls_,
                             .deadline = deadline,
                             .same_machine = address_.host == link.address->host,
                             .short_segments = channel.has_short_segments};
  ++young_attempts_;
  channel.attempted_ns = now_;
  channel.connector =
      std::make_unique<Connector>(&poller_, &channel, rails_[rails.rail], link.address->endpoints[rails.peer_rail],
                                  std::move(purpose), (options_.peer_timeout_ns + kKernelPatienceNs) / 1'000'000);
}

void OutChannel::on_connect_result(ConnectResult result) {
  link->nobody_at[pair()] = result.kind == ConnectResult::Kind::kNobodyThere;
  const int64_t longest_ns = std::max(kAttemptNs, transport->options().peer_timeout_ns / 2);
  if (result.kind == ConnectResult::Kind::kUp) {
    link->attempt_ns = std::clamp(kAttemptFactor * (transport->now() - attempted_ns), kAttemptNs, longest_ns);
  } else if (result.kind == ConnectResult::Kind::kTimeout && result.was_taken) {
    link->attempt_ns = std::min(2 * link->attempt_ns, longest_ns);
  }
  on_attempt_over(std::move(result), false);
}

void OutChannel::on_share_result(ConnectResult result) { on_attempt_over(std::move(result), true); }

void OutChannel::on_attempt_over(ConnectResult result, bool was_sharing) {
  const bool is_up = result.kind == ConnectResult::Kind::kUp;
  const uint32_t attempt = was_sharing ? sharer->epoch() : connector_epoch;
  if (is_up && is_open()) {
    stream->leave(was_sharing ? "moved over to the connection that the peer made"
                              : "silent, and a new connection got through");
  }
  if (is_up || !was_sharing) transport->bury(std::move(connector));
  if (is_up || was_sharing) transport->bury(std::move(sharer));
  transport->watch(*link);
  if (is_up) {
    epoch = attempt;
    if (stream) transport->bury(std::move(stream));
    try {
      if (result.connection == nullptr) {
        const bool is_bulk = lane() == Lane::kBulk;
        result.connection = std::make_shared<Connection>(&transport->connections(), std::move(result.socket), is_bulk);
      }
      stream = std::make_unique<OutStream>(transport, this, std::move(result.connection));
    } catch (const TransportError& error) {
      result.kind = ConnectResult::Kind::kFailed;
      result.text = error.what();
      result.lacked_here = true;
    }
  }
  if (result.kind == ConnectResult::Kind::kUp) {
    on_opened();
  } else {
    on_attempt_failed(result, was_sharing);
  }
}

void OutChannel::on_opened() {
  opened_at_ns = transport->now();
  acked_at_opening = acked;
  bytes_acked_at_opening = bytes_acked;
  carried_bytes = 0;
  kernel_carried_bytes = 0;
  pinged_ns = 0;
  carried_ns = 0;
  moved_ns = opened_at_ns;
  outq_bytes = 0;
  if (link->pairs.size() > 1) pace.begin(round_trip_ns(stream->connection()->fd()));
  broken_at_ns = 0;
  trouble.clear();
  link->down_since_ns = 0;
  link->held_since_ns = 0;
  link->refusal.clear();
  if (!link->up) {
    link->up = true;
    transport->sink().on_link_up(*link);
  }
  if (doubt) transport->tick_soon();
  transport->mark_dirty(*link);
}

void OutChannel::on_attempt_failed(const ConnectResult& result, bool was_sharing) {
  const int64_t now = transport->now();
  retry_pause_ns = retry_pause_ns == 0 ? kRetryFirstNs : std::min(2 * retry_pause_ns, kRetryMaxNs);
  retry_at_ns = now + retry_pause_ns;
  shuns_sharing = was_sharing;
  if (result.is_way_down()) forget_silence();  // nothing passes, of any length
  trouble = result.text + leads_back_text(transport->address(), *link->address, link->pairs[pair()].peer_rail);
  if (is_open()) return;  // stays where it is: was to move over to the peer's connection, or is silent
  link->lacked_here = result.lacked_here;
  if (broken_at_ns == 0) {
    broken_at_ns = now;
    // It broke when it was to move over. That was not the end of a move, as OutStream::on_broken had to assume.
    if (stream != nullptr) transport->sink().on_rail_broken(*link, link->pairs[pair()].rail);
  }
  if (!link->doom) judge_peer(result);
}

void OutChannel::judge_peer(const ConnectResult& result) {
  bool is_reached = false;  // by another channel
  bool others = false;      // that may still come up, or are up
  link->for_each_channel([&](OutChannel& other) {
    is_reached = is_reached || other.is_open();
    others = others || other.is_open() || other.is_connecting();
  });
  if (result.kind == ConnectResult::Kind::kRefused && result.code != RefusalCode::kStale &&
      result.code != RefusalCode::kFull) {
    const bool leaves = result.code == RefusalCode::kClosing;
    // While another channel reaches the peer, a refusal comes from somebody else, at an address that no longer belongs
    // to the peer's rail.
    if (is_reached && !leaves && result.code != RefusalCode::kUnknownLink) return;
    // A single refusal may be what a middlebox has made of our words. Repeated, it counts.
    if (leaves || !link->refusal.empty()) link->doom.emplace(trouble, leaves ? LinkEnd::kLeft : LinkEnd::kLost);
    link->refusal = trouble;
  } else if (result.kind == ConnectResult::Kind::kNobodyThere && !others) {
    // An engine that is gone listens at none of its addresses. One closed port may be a firewall's or another host's.
    if (std::ranges::all_of(link->nobody_at, [](bool nobody) { return nobody; })) {
      link->doom.emplace(trouble, LinkEnd::kLost);
      return;
    }
    for (uint32_t other = 0; other < link->pairs.size(); ++other) link->channel(other, Lane::kSmall).wanted = true;
    transport->tick_soon();
  }
}

bool OutChannel::was_good(int64_t now) const { return now - opened_at_ns >= kRetryMaxNs || acked > acked_at_opening; }

void OutChannel::note_vain(const std::string& why) {
  bool others_serve = false;
  bool others_carry = false;  // a long operation takes its time: until it is done, only its bytes tell
  link->for_each_channel([&](const OutChannel& other) {
    if (&other == this || !other.is_usable()) return;
    others_serve = true;
    others_carry = others_carry || other.carries_after(opened_at_ns);
  });
  if (others_carry) link->vain_connections = 0;
  if (others_carry || !(has_unplaced() || (link->queued > 0 && !others_serve))) return;
  if (++link->vain_connections == 1) link->vain_since_ns = opened_at_ns;
  link->vain_trouble = why;
}

void OutStream::on_broken() {
  OutChannel& channel = *channel_;
  OutLink& link = *channel.link;
  const int64_t now = transport_->now();
  // A channel that moves over to the peer's connection leaves this one, or the peer ends it first: no trouble either
  // way, unless the peer's answer is long overdue.
  if (channel.sharer == nullptr || channel.sharer->is_overdue(now)) {
    channel.trouble = reason();
    channel.broken_at_ns = now;
    // A connection that keeps breaking without carrying anything is remade only after a pause.
    channel.retry_pause_ns =
        channel.was_good(now) ? 0 : std::clamp(2 * channel.retry_pause_ns, kRetryFirstNs, kRemakeMaxNs);
    channel.retry_at_ns = channel.retry_pause_ns > kRetryFirstNs ? now + channel.retry_pause_ns : now;
    channel.shuns_sharing = !channel.was_good(now);
    transport_->sink().on_rail_broken(link, link.pairs[channel.pair()].rail);
  }
  if (!channel.passes_only_short()) channel.forget_silence();
  channel.control.clear();
  for (size_t i = 0; i < link.messages.size(); ++i) {
    if (!std::exchange(link.messages[i].is_recall_sent, false)) continue;
    link.has_recalls = true;
    transport_->mark_dirty(link);
  }
  bool open = false;
  link.for_each_channel([&](OutChannel& other) {
    open = open || other.is_open();
    // Questions that this connection carried were lost with it.
    if (other.doubt && other.doubt->asked_through == &channel) other.doubt->asked_through = nullptr;
  });
  const bool is_vain = channel.acked == channel.acked_at_opening;
  // Not held against the peer before short packets were tried.
  if (is_vain && channel.silent_epoch != epoch_) channel.note_vain(reason());
  channel.was_vain = channel.was_vain || (is_vain && channel.has_unplaced());
  if (!channel.doubt && channel.has_doubts()) channel.doubt = {.epoch = epoch_, .is_vain = is_vain};
  if (!open && link.down_since_ns == 0) link.down_since_ns = now;
  // Acknowledgements of the peer's operations may have been riding on it.
  if (link.twin != nullptr) {
    for (auto& [index, incoming] : link.twin->channels) incoming.ack_sent = 0;
    transport_->tell_outcomes_again(*link.twin);
    transport_->ack_later(*link.twin, true);
  }
  transport_->watch(link);
}

// --- links in trouble, or with something to wait for ---

void TcpTransport::tend(OutLink& link) {
  if (!link.doom && !tend_channels(link)) tend_liveness(link);
  if (!link.doom) tend_vain(link);
  if (link.queued > 0) fail_pinned(link);
  // A channel that held back in favour of a silent rail takes over the work after a while.
  if (link.queued > 0 && link.pairs.size() > 1) mark_dirty(link);
  if (link.doom) {
    const auto [reason, end] = *link.doom;
    take_down(link, reason, end);
  }
}

// A peer that can be reached, again and again, but to which nothing gets through.
void TcpTransport::tend_vain(OutLink& link) {
  if (link.vain_connections < kVainConnectionsMin || link.outstanding == 0) return;
  const int64_t vain_ns = now_ - link.vain_since_ns;
  if (vain_ns < options_.peer_timeout_ns) return;
  bool others_carry = false;  // seen now and then, and perhaps never in the short life of one of these
  link.for_each_channel(
      [&](const OutChannel& other) { others_carry = others_carry || other.carries_after(link.vain_since_ns); });
  if (others_carry) {
    link.vain_connections = 0;
    return;
  }
  link.doom.emplace("for " + seconds_text(vain_ns) + " (peer_timeout_s) each of " +
                        std::to_string(link.vain_connections) +
                        " connections to it broke before anything got through: " + link.vain_trouble,
                    LinkEnd::kLost);
}

// Connects what is wanted and not connected, and asks about what is in doubt. True: no channel is open.
bool TcpTransport::tend_channels(OutLink& link) {
  OutChannel* carrier = nullptr;
  bool trying = false;
  link.for_each_channel([&](OutChannel& channel) {
    if (channel.connector) channel.connector->check_deadline(now_);  // may end it
    if (channel.is_open() && (carrier == nullptr || (carrier->doubt && !channel.doubt))) carrier = &channel;
  });
  if (link.doom) return true;
  const bool was_up = link.up;
  for (size_t i = 0; i < link.channels.size(); ++i) {
    OutChannel* channel = link.channels[i].get();
    if (channel != nullptr && channel->is_open() && should_move(*channel) && !channel->has_doubts()) {
      start_sharing(*channel);
      continue;
    }
    const bool waits = channel != nullptr && channel->is_connecting() && !channel->outwaits_sharer(now_);
    if (channel == nullptr || !channel->wanted || channel->is_open() || waits) {
      trying = trying || (channel != nullptr && channel->is_connecting());
      continue;
    }
    if (now_ < channel->retry_at_ns || !may_attempt(link)) continue;
    start_attempt(*channel);
    if (channel->connector) channel->connector->check_deadline(now_);  // one that failed at once
    if (link.doom) return true;
    trying = true;
  }
  if (carrier != nullptr) {
    link.for_each_channel([&](OutChannel& channel) {
      if (!channel.doubt || channel.doubt->asked_through != nullptr) return;
      // Later connections have sent nothing.
      const ResolveMeta question{channel.acked, channel.index, channel.doubt->epoch};
      append_frame(carrier->control, FrameType::kResolve, question);
      channel.doubt->asked_through = carrier;
      mark_dirty(link);
    });
    // Small operations need one channel; bulk needs all pairs. Another small one takes over while the first is down.
    bool small = false;
    link.for_each_channel(
        [&](OutChannel& channel) { small = small || (channel.lane() == Lane::kSmall && channel.is_open()); });
    for (uint32_t pair = 0; !small && pair < link.pairs.size(); ++pair) link.channel(pair, Lane::kSmall).wanted = true;
  } else if (link.held_since_ns == 0) {
    const int64_t since = link.down_since_ns;
    if (!was_up && now_ - since > kNextRailNs) {
      for (uint32_t pair = 0; pair < link.pairs.size(); ++pair) link.channel(pair, Lane::kSmall).wanted = true;
    }
    if (was_up) {
      for (uint32_t pair = 0; pair < link.pairs.size(); ++pair) link.channel(pair, Lane::kSmall).wanted = true;
    }
    const int64_t patience = was_up ? since + options_.peer_timeout_ns : link.connect_by_ns;
    if (now_ >= patience && !(trying && !was_up && now_ < patience + kTickSlackNs)) {
      std::string trouble = "no connection";
      link.for_each_channel([&](OutChannel& channel) {
        if (!channel.trouble.empty()) trouble = channel.trouble;
      });
      if (!link.refusal.empty()) trouble = link.refusal;
      link.doom.emplace(
          was_up ? "no rail of it could be reached for " + seconds_text(now_ - since) + ": " + trouble : trouble,
          !was_up && link.lacked_here ? LinkEnd::kUnmade : LinkEnd::kLost);
    }
  }
  return carrier == nullptr;
}

// The peer was silent, or unreachable, for away_ns because of us: that time does not count against it.
void TcpTransport::excuse(OutLink& link, int64_t away_ns) {
  const auto later = [&](int64_t& since_ns) {
    if (since_ns != 0) since_ns = std::min(since_ns + away_ns, now_);
  };
  if (!link.up) link.connect_by_ns += away_ns;
  later(link.down_since_ns);
  later(link.vain_since_ns);
  link.for_each_channel([&](OutChannel& channel) {
    later(channel.broken_at_ns);
    if (!channel.is_open()) return;
    const int64_t heard_ns = channel.stream->connection()->last_received_ns();
    link.waits_since_ns = std::max({link.waits_since_ns, channel.moved_ns, heard_ns});
  });
  later(link.waits_since_ns);
}

// Works that must use one particular rail, which has been down for too long.
void TcpTransport::fail_pinned(OutLink& link) {
  for (uint32_t rail = 0; rail < traits_.rail_count; ++rail) {
    std::vector<WorkRequest> failed;
    const OutChannel* last = nullptr;
    bool usable = false;
    bool patient = false;
    for (const Lane lane : {Lane::kSmall, Lane::kBulk}) {
      if (link.queue(rail, lane).empty()) continue;
      link.for_each_channel([&](OutChannel& channel) {
        if (link.pairs[channel.pair()].rail != rail) return;
        usable = usable || channel.is_open();
        patient = patient || channel.broken_at_ns == 0 || now_ - channel.broken_at_ns < options_.peer_timeout_ns;
        last = &channel;
      });
      if (last == nullptr || usable || patient) continue;
      auto& queue = link.queue(rail, lane);
      while (!queue.empty()) failed.push_back(queue.pop_front());
    }
    link.queued -= failed.size();
    for (const WorkRequest& request : failed) {
      retire(link, request, Status::kTransportFailed, "rail " + std::to_string(rail) + " is down: " + last->trouble);
    }
  }
}

// A middlebox that has forgotten its connections silently drops what they carry, and lets new ones through. So the peer
// may be alive: connections are made beside the silent ones, and take their place once they are up.
void TcpTransport::reconnect_silent(OutLink& link) {
  link.for_each_channel([&](OutChannel& channel) {
    const bool is_due = channel.is_open() && !channel.is_connecting() && now_ >= channel.retry_at_ns;
    if (channel.lane() == Lane::kBulk && is_due && may_attempt(link)) start_attempt(channel);
  });
}

// Pings what is silent while we wait for anything. Channels that owe nothing are pinged, too: their answers tell a
// silent rail from a silent peer.
void TcpTransport::tend_liveness(OutLink& link) {
  if (link.outstanding == 0 && !link.frozen) return;
  int64_t moved = link.waits_since_ns;
  link.for_each_channel([&](OutChannel& channel) {
    if (!channel.is_open()) return;
    int queued = 0;
    // A shrinking send queue is a sign of life, too: long transfers over slow networks are acknowledged seldom. Not if
    // it is short: the kernel of a frozen peer accepts a trickle for a long time.
    if (ioctl(channel.stream->connection()->fd(), SIOCOUTQ, &queued) == 0 && queued != channel.outq_bytes) {
      if (queued >= kPileBytes && queued < channel.outq_bytes) channel.moved_ns = channel.carried_ns = now_;
      channel.outq_bytes = queued;
    }
    channel.moved_ns = std::max(channel.moved_ns, channel.stream->connection()->last_received_ns());
    const bool is_suspect = channel.has_short_segments || now_ - channel.moved_ns >= kPingAfterNs;
    if (is_suspect) channel.kernel_carried_bytes = acknowledged_bytes(channel.stream->connection()->fd());
    moved = std::max(moved, channel.moved_ns);
  });
  link.for_each_channel([&](OutChannel& channel) {
    if (!channel.is_open()) return;
    const int64_t silent = now_ - std::max(channel.moved_ns, link.waits_since_ns);
    if (silent < kPingAfterNs) return;
    if (now_ - channel.pinged_ns >= kPingAfterNs && channel.control.empty()) {
      channel.pinged_ns = now_;
      append_frame(channel.control, FrameType::kPing, PingMeta{static_cast<uint64_t>(now_)});
      mark_dirty(link);
    }
    if (silent >= kRailSilentNs && now_ - moved < kPingAfterNs) {
      // Not if all were silent just now: kernels retransmit at different times, so some recover before others.
      if (now_ - link.all_silent_ns >= kRailSilentNs) channel.note_silence();
      channel.stream->break_off("silent for " + seconds_text(silent) + " while other rails of the peer answer");
    }
  });
  const int64_t silent = now_ - moved;
  if (silent >= kTryOthersNs) {
    link.all_silent_ns = now_;
    for (uint32_t pair = 0; pair < link.pairs.size(); ++pair) {
      for (const Lane lane : {Lane::kSmall, Lane::kBulk}) link.channel(pair, lane).wanted = true;
    }
  }
  if (silent >= kFrozenAfterNs) reconnect_silent(link);
  if (silent >= options_.peer_timeout_ns) {
    link.doom.emplace(silence_text(link, address_, silent), LinkEnd::kLost);
  } else if (silent >= kFrozenAfterNs && !link.frozen) {
    link.frozen = true;
    sink_->on_link_frozen(link, true, "silent for " + seconds_text(silent) + " with operations under way");
  } else if (silent < kFrozenAfterNs / 2 && link.frozen) {
    link.frozen = false;
    sink_->on_link_frozen(link, false, "it answers again");
  }
}

// --- ends ---

void TcpTransport::take_down(OutLink& link, const std::string& reason, LinkEnd end) {
  sink_->on_link_down(link, reason, end);
  flush(link, Status::kPeerLost, reason);
}

void TcpTransport::say_goodbye(OutLink& link, const std::string& text) {
  link.for_each_channel([&](OutChannel& channel) {
    if (!channel.is_open()) return;
    append_end(channel.control, FrameType::kBye, text);
    if (!channel.doubt) channel.doubt.emplace();  // nothing but this is in doubt
    channel.stream->pump();
  });
}

// Everything on the link is retired, and the link is deleted.
void TcpTransport::flush(OutLink& link, Status status, const std::string& detail) {
  std::vector<WorkRequest> left;
  link.for_each_channel([&](OutChannel& channel) {
    const bool abort = !channel.sent.empty() || channel.current;
    if (channel.stream) channel.stream->hang_up(abort);
    bury(std::move(channel.stream));
    bury(std::move(channel.sharer));
    bury(std::move(channel.connector));
    for (size_t i = 0; i < channel.sent.size(); ++i) {
      const WorkOp op = channel.sent[i].op;
      if (op == WorkOp::kWrite || op == WorkOp::kService) left.push_back(channel.sent[i]);
    }
    if (channel.current) left.push_back(*channel.current);
  });
  for (auto& [id, read] : link.reads) left.push_back(read.request);
  for (size_t i = 0; i < link.messages.size(); ++i) {
    if (!link.messages[i].over) left.push_back(link.messages[i].request);
  }
  for (auto& queue : link.queues) {
    for (size_t i = 0; i < queue.size(); ++i) left.push_back(queue[i]);
  }
  for (size_t i = 0; i < link.sends.size(); ++i) left.push_back(link.sends[i]);
  for (const WorkRequest& request : left) retire(link, request, status, detail);
  if (link.twin != nullptr) {
    // Acknowledgements of the peer's operations may have been riding on our connections.
    for (auto& [index, incoming] : link.twin->channels) incoming.ack_sent = 0;
    tell_outcomes_again(*link.twin);
    ack_later(*link.twin, true);
    link.twin->twin = nullptr;
  }
  newest_epoch_ = std::max(newest_epoch_, link.newest_epoch);
  std::erase(dirty_, &link);
  std::erase(watched_, &link);
  std::erase_if(out_, [&](const auto& owned) { return owned.get() == &link; });
}

// Descriptors are closed now; the objects, one of whose calls we may be in, are destroyed at the end of the poll.
void TcpTransport::bury(std::unique_ptr<Stream> stream) {
  if (!stream) return;
  stream->hang_up();
  dead_streams_.push_back(std::move(stream));
}

void TcpTransport::bury(std::unique_ptr<Connector> connector) {
  if (!connector) return;
  connector->hang_up();
  dead_connectors_.push_back(std::move(connector));
}

}  // namespace crossrail::tcp
