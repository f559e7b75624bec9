// What only time can tell: peers that do not answer, paths to be made again, sessions that nobody needs.
#include <algorithm>

#include "transport/rdma/rdma_transport.h"
#include "util/errors.h"

namespace crossrail::rdma {

namespace {

constexpr int64_t kTickNs = 50'000'000;
constexpr int64_t kFastTickNs = 5'000'000;  // while datagrams are in flight
constexpr int64_t kIdleLookNs = 1'000'000'000;
// Silence after which a peer, or one path to it, is asked for a sign of life.
constexpr int64_t kPingAfterNs = 500'000'000;
constexpr int64_t kFrozenAfterNs = 2'000'000'000;
// One path is silent while others are not.
constexpr int64_t kPathSilentNs = 2'000'000'000;
// Peers that only ever talk to us are asked from time to time whether they are alive: their paths cost memory.
constexpr int64_t kIdlePingNs = 60'000'000'000;
constexpr int64_t kLeaveNs = 100'000'000;
constexpr int64_t kStandsNs = 1'000'000'000;  // longer than a NIC may take to notice its port's state

}  // namespace

void RdmaTransport::tick() {
  now_ = options_.clock->now_ns();
  // We were not there to listen (stopped, or nobody polled): silence during that time says nothing about peers.
  const int64_t away_ns = now_ - std::exchange(ticked_ns_, now_);
  const bool was_away = away_ns > std::max(kAwayNs, options_.peer_timeout_ns / 4);
  is_watching_ = false;
  next_tick_ns_ = now_ + kTickNs;
  for (auto& [key, session] : sessions_) {
    if (away_ns > kAwayNs) excuse_nics(*session, away_ns);
    if (was_away) excuse(*session, away_ns);
    look_after(*session);
  }
  unblock();  // in case a NIC did not report new room
  finish_tending();
}

void RdmaTransport::finish_tending() {
  for (Session* session : std::exchange(urgent_, {})) session->is_urgent = false;
  if (any_over_ || !broken_.empty() || !dirty_.empty()) act();
}

// Has this session looked at in this poll or the next. A tick that looks at all sessions whenever one changes is
// quadratic in their number while many connect.
void RdmaTransport::tend_soon(Session& session) {
  is_watching_ = true;
  if (!std::exchange(session.is_urgent, true)) urgent_.push_back(&session);
}

// Not after an absence: then a tick is due.
void RdmaTransport::tend_urgent() {
  for (size_t i = 0; i < urgent_.size(); ++i) look_after(*urgent_[i]);  // including those that it makes urgent
  finish_tending();
}

void RdmaTransport::look_after(Session& session) {
  tend(session);
  is_watching_ = is_watching_ || is_watched(session);
  for (const auto& path : session.paths) {
    const bool fast = path->state == PathState::kOffered || path->state == PathState::kBreaking || path->is_resolving ||
                      (path->state == PathState::kIdle && path->retry_pause_ns < kTickNs && wants_paths(session));
    if (fast) next_tick_ns_ = std::min(next_tick_ns_, now_ + kFastTickNs);
  }
}

Deadline RdmaTransport::next_timer() const {
  Deadline next = kNoDeadline;
  if (closed_) return next;
  for (const auto& rail : rails_) next = std::min(next, rail->nic->next_timer());
  if (sessions_.empty()) return next;
  if (!urgent_.empty()) return now_;
  return std::min(next, is_watching_ ? next_tick_ns_ : now_ + kIdleLookNs);
}

bool RdmaTransport::is_watched(const Session& session) const {
  const RdmaLink* const link = session.link.get();
  if (session.is_over || session.has_left || session.quiet_since_ns != 0) return true;
  if (link != nullptr && (!link->is_up || link->outstanding > 0 || link->is_frozen)) return true;
  return std::ranges::any_of(session.paths, [&](const auto& path) {
    if (path->is_resolving || !path->suspects.empty()) return true;
    if (path->state == PathState::kIdle) return wants_paths(session) && rails_[path->rail]->is_up;
    return path->state != PathState::kOpen;
  });
}

void RdmaTransport::tend(Session& session) {
  if (session.is_over) {  // it only waits for NICs, which may not keep their promise
    for (auto& path : session.paths) {
      if (path->state == PathState::kBreaking) tend_path(*path);
    }
    return;
  }
  leave_down_ports(session);
  for (auto& path : session.paths) {
    tend_path(*path);
    if ((path->is_resolving || !path->suspects.empty()) && now_ >= path->ask_at_ns) ask(*path);
  }
  if (session.link) {
    tend_link(session);
  } else if (!session.peer_has_link) {
    if (!std::exchange(session.has_left, true)) {
      session.left_at_ns = now_;
      for (auto& path : session.paths) path->state_due = path->state_due || path->state == PathState::kOpen;
      mark_dirty(session);
    } else if (session.peer_left && now_ - session.left_at_ns >= kLeaveNs) {
      doom(session, "neither side needs it any more", LinkEnd::kLeft);
    }
  }
  if (session.is_over) return;
  tend_liveness(session);
  if (!session.link && session.quiet_since_ns != 0) {
    // A side that asked for a path that never stood waits for it as long as its connect() may take.
    const bool ever_met = std::ranges::any_of(session.paths, [](const auto& path) { return path->epochs_opened > 0; });
    const int64_t patience = std::max(2 * options_.peer_timeout_ns, ever_met ? 0 : options_.connect_timeout_ns);
    if (now_ - session.quiet_since_ns > patience) doom(session, "no path to it is left", LinkEnd::kLost);
  }
}

// Anything that NICs, and first fragments, had to report during that time has yet to be looked at.
void RdmaTransport::excuse_nics(Session& session, int64_t away_ns) {
  for (auto& path : session.paths) path->state_since_ns = std::min(path->state_since_ns + away_ns, now_);
}

// The peer was silent, or unreachable, for away_ns because of us: that time does not count against it.
void RdmaTransport::excuse(Session& session, int64_t away_ns) {
  const auto later = [&](int64_t& since_ns) {
    if (since_ns != 0) since_ns = std::min(since_ns + away_ns, now_);
  };
  for (auto& path : session.paths) {
    later(path->down_since_ns);
    later(path->doubt_since_ns);
  }
  later(session.quiet_since_ns);
  if (!session.link) return;
  RdmaLink& link = *session.link;
  link.waits_since_ns = now_;
  later(link.down_since_ns);
  if (!link.is_up) link.connect_by_ns = std::min(link.connect_by_ns + away_ns, now_ + options_.connect_timeout_ns);
}

// What is wrong on our side of it.
std::string RdmaTransport::own_trouble(const Session& session) const {
  for (const auto& path : session.paths) {
    const Rail& rail = *rails_[path->rail];
    if (!rail.is_up)
      return "our NIC " + rail.nic->name() + " is down" + (rail.trouble.empty() ? "" : ": " + rail.trouble);
    const auto endpoint = session.peer_endpoints.find(path->peer_rail);
    if (endpoint == session.peer_endpoints.end()) continue;
    const std::string unsent = rail.nic->datagram_trouble(endpoint->second);
    if (!unsent.empty()) return "our NIC " + rail.nic->name() + " could not ask it: " + unsent;
  }
  return "";
}

// The reason for each path that is down. Paths with the same reason are named together.
std::string RdmaTransport::down_text(const Session& session) const {
  std::vector<std::pair<std::string, std::string>> reasons;  // and the paths that have it
  for (const auto& path : session.paths) {
    const std::string& why = path->why_down();
    if (why.empty()) continue;
    const auto known = std::ranges::find(reasons, why, [](const auto& reason) { return reason.first; });
    if (known == reasons.end()) {
      reasons.emplace_back(why, pair_text(*path));
    } else {
      known->second += ", " + pair_text(*path);
    }
  }
  std::string text;
  for (const auto& [why, pairs] : reasons) text += (text.empty() ? "" : "; ") + pairs + ": " + why;
  return text;
}

// Our operations wait for paths no longer than promised.
void RdmaTransport::tend_link(Session& session) {
  RdmaLink& link = *session.link;
  if (session.paths.empty()) {
    doom(session, "none of our NICs reaches any of the peer's: they are on networks of different kinds",
         LinkEnd::kLost);
  } else if (session.has_open_path()) {
    if (!std::exchange(link.is_up, true)) sink_->on_link_up(link);
    link.down_since_ns = 0;
  } else if (!link.is_up) {
    if (now_ < link.connect_by_ns) return;
    const std::string own = own_trouble(session);
    std::string trouble = down_text(session);
    if (trouble.empty()) {
      trouble = "no answer from its NIC within " + seconds_text(options_.connect_timeout_ns) +
                (own.empty() ? ": the engine is gone, or datagrams between the NICs do not pass" : "; " + own);
    }
    doom(session, trouble, own.empty() ? LinkEnd::kLost : LinkEnd::kUnmade);
  } else if (link.down_since_ns != 0 && now_ - link.down_since_ns >= options_.peer_timeout_ns) {
    doom(session, "no path to it for " + seconds_text(now_ - link.down_since_ns) + ": " + down_text(session),
         LinkEnd::kLost);
  }
  if (session.is_over) return;
  for (const auto& path : session.paths) {
    const bool asks = path->is_resolving || !path->suspects.empty();
    if (!asks || now_ - path->doubt_since_ns < options_.peer_timeout_ns) continue;
    doom(session,
         "it does not say what became of operations on " + pair_text(*path) + ", which failed: " + path->trouble,
         LinkEnd::kLost);
    return;
  }
  if (link.queued > 0) fail_pinned(link);
}

std::string RdmaTransport::open_text(const Session& session) const {
  std::string text;
  for (const auto& path : session.paths) {
    if (path->state == PathState::kOpen) text += (text.empty() ? "" : ", ") + pair_text(*path);
  }
  return text;
}

// Pings what is silent while we wait for anything. Paths that owe nothing are pinged, too: their answers tell a silent
// path from a silent peer.
void RdmaTransport::tend_liveness(Session& session) {
  RdmaLink* const link = session.link.get();
  const bool waits = link != nullptr && link->is_up && (link->outstanding > 0 || link->is_frozen);
  const int64_t patience = waits ? kPingAfterNs : kIdlePingNs;
  const int64_t since = waits ? link->waits_since_ns : 0;
  int64_t moved = since;
  for (const auto& path : session.paths) {
    if (path->state == PathState::kOpen) moved = std::max({moved, path->heard_ns, path->worked_ns, path->opened_at_ns});
  }
  for (auto& path : session.paths) {
    if (!is_usable(*path)) continue;
    const int64_t silent = now_ - std::max({path->heard_ns, path->worked_ns, path->opened_at_ns, since});
    if (silent < patience) continue;
    if (now_ - path->pinged_ns >= patience) {
      path->ping_due = true;
      mark_dirty(session);
    }
    if (waits && silent >= kPathSilentNs && now_ - moved < kPingAfterNs) {
      mark_broken(*path, Cause::kHere, "silent for " + seconds_text(silent) + " while other rails of the peer answer");
    }
  }
  if (!waits || !session.has_open_path()) return;
  const int64_t silent = now_ - moved;
  // If the ports of all open paths are down on our side we cannot hear the peer: nothing can be concluded.
  if (std::ranges::none_of(session.paths, [&](const auto& path) { return is_usable(*path); })) {
    if (silent >= options_.peer_timeout_ns) {
      doom(session,
           "no path to it for " + seconds_text(silent) +
               " (peer_timeout_s) with operations under way: " + own_trouble(session),
           LinkEnd::kLost);
    }
    return;
  }
  if (silent >= options_.peer_timeout_ns) {
    doom(session,
         "silent for " + seconds_text(silent) + " (peer_timeout_s) with operations under way on " + open_text(session) +
             ": it is frozen, or cut off",
         LinkEnd::kLost);
  } else if (silent >= kFrozenAfterNs && !link->is_frozen) {
    link->is_frozen = true;
    sink_->on_link_frozen(*link, true, "silent for " + seconds_text(silent) + " with operations under way");
  } else if (silent < kFrozenAfterNs / 2 && link->is_frozen) {
    link->is_frozen = false;
    sink_->on_link_frozen(*link, false, "it answers again");
  }
}

// Works that must use one particular rail, or whose region some of the peer's rails do not know, while the remaining
// rails have been away for too long.
void RdmaTransport::fail_pinned(RdmaLink& link) {
  for (size_t i = 0; i < link.queues.size(); ++i) {
    const uint32_t rail = static_cast<uint32_t>(i) - 1;  // 0 - 1 is kAnyRail
    auto& queue = link.queues[i];
    std::string trouble;
    const auto is_patient = [&](const WorkRequest& work) {
      return std::ranges::any_of(link.session->paths, [&](const auto& path) {
        if ((rail != kAnyRail && path->rail != rail) || !is_known_by(*path, work)) return false;
        trouble = path->trouble;
        return path->down_since_ns == 0 || now_ - path->down_since_ns < options_.peer_timeout_ns;
      });
    };
    std::vector<WorkRequest> failed;
    while (!queue.empty() && !is_patient(queue.front())) failed.push_back(queue.pop_front());
    if (failed.empty()) continue;
    link.queued -= failed.size();
    mark_dirty(*link.session);  // works behind them may go now
    for (const WorkRequest& work : failed) {
      std::string text = rail == kAnyRail ? "no rail is left by which the peer's region can be reached"
                                          : "rail " + std::to_string(rail) + " is down";
      if (!trouble.empty()) text += ": " + trouble;
      retire(link, work, Status::kTransportFailed, text);
    }
  }
}

void RdmaTransport::on_port(Rail& rail) {
  if (rail.is_up) set_speeds();
  const int64_t down_ns = rail.is_up && rail.down_since_ns != 0 ? now_ - std::exchange(rail.down_since_ns, 0) : 0;
  for (auto& [key, session] : sessions_) {
    // On a path that stayed open nothing could be heard meanwhile.
    if (down_ns > 0) excuse_silence(*session, rail.index, down_ns);
    const bool has_other = std::ranges::any_of(session->paths, [&](const auto& path) { return is_usable(*path); });
    for (auto& path : session->paths) {
      if (path->rail != rail.index) continue;
      if (rail.is_up) {
        path->retry_at_ns = path->retry_pause_ns = 0;
      } else if (has_other) {
        mark_broken(*path, Cause::kHere, "the port went down: " + rail.trouble);
      }
    }
    mark_dirty(*session);
  }
  is_watching_ = true;
  next_tick_ns_ = 0;
}

// If there is another rail, a port that goes down is abandoned at once. If there is none, the NIC's retries may outlast
// the outage, so we wait until another path has stood for a while. A path that opened since then stays: our knowledge
// of ports lags behind, and it works.
void RdmaTransport::leave_down_ports(Session& session) {
  const auto stands = [&](const auto& path) { return is_usable(*path) && now_ - path->opened_at_ns >= kStandsNs; };
  if (std::ranges::none_of(session.paths, stands)) return;
  for (auto& path : session.paths) {
    const Rail& rail = *rails_[path->rail];
    if (!rail.is_up && path->opened_at_ns < rail.down_since_ns)
      mark_broken(*path, Cause::kHere, "the port went down: " + rail.trouble);
  }
}

void RdmaTransport::excuse_silence(Session& session, uint32_t rail, int64_t away_ns) {
  bool is_excused = false;
  for (auto& path : session.paths) {
    if (path->rail != rail || path->state != PathState::kOpen) continue;
    const int64_t heard_ns = std::max({path->heard_ns, path->worked_ns, path->opened_at_ns});
    path->heard_ns = std::min(heard_ns + away_ns, now_);
    is_excused = true;
  }
  if (RdmaLink* const link = session.link.get(); link != nullptr && is_excused)
    link->waits_since_ns = std::min(link->waits_since_ns + away_ns, now_);
}

// A peer is gone when nobody is at any of the endpoints that we would reach it by.
void RdmaTransport::on_nobody(const Bytes& endpoint) {
  for (auto& [key, item] : sessions_) {
    Session& session = *item;
    const auto is_it = [&](const auto& known) { return known.second == endpoint; };
    if (session.is_over || session.has_open_path() || std::ranges::none_of(session.peer_endpoints, is_it)) continue;
    session.deserted.insert(endpoint);
    const bool is_gone = std::ranges::all_of(session.paths, [&](const auto& path) {
      const auto at = session.peer_endpoints.find(path->peer_rail);
      return at != session.peer_endpoints.end() && session.deserted.contains(at->second);
    });
    if (is_gone)
      doom(session, "nobody is at its address any more: it was closed, or its process has ended", LinkEnd::kLost);
  }
}

// --- ends ---

// The session ends: its paths are broken off, and once all are flushed, the link goes down.
void RdmaTransport::doom(Session& session, const std::string& reason, LinkEnd end) {
  if (std::exchange(session.is_over, true)) return;
  any_over_ = true;
  is_watching_ = true;
  if (session.link) session.link->doom = {reason, end};
  for (auto& path : session.paths) mark_broken(*path, Cause::kHere, reason);
}

// False: a NIC still has some of its works.
bool RdmaTransport::finish_doom(Session& session) {
  for (auto& path : session.paths) start_break(*path);
  if (!session.is_quiet()) return false;
  if (session.link) {
    const RdmaLink::Doom doom = *session.link->doom;
    sink_->on_link_down(*session.link, doom.reason, doom.end);
    flush_link(*session.link, Status::kPeerLost, doom.reason);
    session.link.reset();
  }
  forget(session);
  return true;
}

// At once. For a session without a link.
void RdmaTransport::end_session(Session& session, const std::string& reason) {
  std::vector<Path*> paths;
  for (auto& path : session.paths) {
    path->trouble = reason;
    start_break(*path);
    paths.push_back(path.get());
  }
  drain(paths);
  forget(session);
  sessions_.erase(session.key);
}

// Removes it from all lists.
void RdmaTransport::forget(Session& session) {
  for (auto* list : {&dirty_, &blocked_, &holding_, &urgent_}) std::erase(*list, &session);
  for (auto* list : {&broken_, &flushed_}) std::erase_if(*list, [&](Path* path) { return path->session == &session; });
}

// Everything on the link is retired. No NIC has any of it any more.
void RdmaTransport::flush_link(RdmaLink& link, Status status, const std::string& detail) {
  std::vector<WorkRequest> left;
  const auto take = [&](WorkQueue& queue) {
    for (size_t i = 0; i < queue.size(); ++i) left.push_back(queue[i]);
    queue.clear();
  };
  for (auto& path : link.session->paths) {
    CROSSRAIL_ASSERT(path->works.empty());
    left.insert(left.end(), path->doubt.begin(), path->doubt.end());
    left.insert(left.end(), path->suspects.begin(), path->suspects.end());
    path->doubt.clear();
    path->suspects.clear();
    path->asked = 0;
    path->is_resolving = false;
  }
  for (size_t i = 0; i < link.messages.size(); ++i) {
    if (!link.messages[i].is_over) left.push_back(link.messages[i].request);
  }
  link.messages.clear();
  for (size_t i = 0; i < link.services_out.size(); ++i) {
    if (!link.services_out[i].is_over) left.push_back(link.services_out[i].request);
  }
  link.services_out.clear();
  for (auto& queue : link.queues) take(queue);
  take(link.sends);
  take(link.services);
  link.queued = 0;
  for (const WorkRequest& work : left) retire(link, work, status, detail);
}

void RdmaTransport::say_bye(Session& session, const std::string& text) {
  Bytes body;
  put_text(body, text);
  for (auto& path : session.paths) {
    if (is_usable(*path)) path->nic_path->send(begin_fragment(path->peer_token, FragmentKind::kBye), body);
    const auto endpoint = session.peer_endpoints.find(path->peer_rail);
    if (endpoint == session.peer_endpoints.end() || !rails_[path->rail]->is_up) continue;
    Bytes bytes = begin(session, DatagramKind::kBye, path->rail);
    bytes.insert(bytes.end(), body.begin(), body.end());
    seal(bytes, session.seal);
    rails_[path->rail]->nic->send_datagram(endpoint->second, bytes);
  }
}

}  // namespace crossrail::rdma
