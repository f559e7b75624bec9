// How two engines meet: authenticated datagrams, repeated until there are paths.
//
//   the other                    the leader (smaller incarnation)
//   Knock {path, epoch over} ->                      only if it wants to talk; the leader may begin unasked
//                             <-  Hello {path, epoch, offer}      repeated
//   Accept {path, epoch, offer} ->                   one for every Hello of that epoch
//                             <-  State, on the path: the first fragment shows that the leader has the Accept
//
// Epochs only grow, so duplicate and delayed datagrams are recognised. Each side numbers its sessions, so a peer that
// forgot us and starts over can be told from one that repeats itself.
#include <algorithm>

#include "transport/rdma/rdma_transport.h"
#include "util/errors.h"
#include "util/mutation.h"

namespace crossrail::rdma {

namespace {

constexpr int64_t kRetryMaxNs = 500'000'000;
constexpr int64_t kAcceptedMaxNs = 5'000'000'000;
constexpr size_t kSessionsMax = 4096;
constexpr size_t kPathsMax = 32;  // per session
// To those that have not proven to know our address and secret. Each may name another endpoint to be answered at, and a
// NIC's means of sending to new ones are limited: ofi's lines over tcp to 1024, each of which takes 5 s to time out.
constexpr uint32_t kStrangersAnsweredMax = 128;
constexpr int64_t kStrangersPeriodNs = 1'000'000'000;

Bytes bytes_of(std::span<const uint8_t> span) { return Bytes(span.begin(), span.end()); }

bool is_question(DatagramKind kind) {
  return kind == DatagramKind::kKnock || kind == DatagramKind::kHello || kind == DatagramKind::kResolve;
}

bool is_for_strangers(RefuseCode code) {
  return code == RefuseCode::kVersion || code == RefuseCode::kNotMe || code == RefuseCode::kAuthentication;
}

}  // namespace

// --- sessions ---

Session* RdmaTransport::find_session(const Incarnation& peer, bool leads) {
  const auto found = sessions_.find({peer, leads});
  return found == sessions_.end() ? nullptr : found->second.get();
}

Session& RdmaTransport::make_session(const Incarnation& peer, bool leads) {
  auto session = std::make_unique<Session>();
  const Incarnation& own = options_.identity.incarnation;
  session->key = {peer, leads};
  session->own_number = next_session_number_++;
  session->nonce = options_.entropy->draw_u64();
  session->seal = session_key(options_.secret, leads ? own : peer, leads ? peer : own);
  session->target = target_tag(peer);
  session->quiet_since_ns = now_;
  is_watching_ = true;
  auto& slot = sessions_[session->key];
  CROSSRAIL_ASSERT(slot == nullptr);
  slot = std::move(session);
  return *slot;
}

// Whether all paths that the peer has begun use rails that it has.
bool RdmaTransport::has_rails_of(const Session& session, const Address& address) const {
  const size_t count = address.rdma_on(kind_).endpoints.size();
  return std::ranges::all_of(session.paths, [&](const auto& path) { return path->peer_rail < count; });
}

void RdmaTransport::get_to_know(Session& session, std::shared_ptr<const Address> address) {
  session.peer_name = address->name;
  session.peer_rail_count = static_cast<uint32_t>(address->rdma_on(kind_).endpoints.size());
  session.peer_address = std::move(address);
}

Path& RdmaTransport::path_for(Session& session, PathKey key) {
  if (Path* known = session.find(key)) return *known;
  const uint32_t rail = session.key.leads ? key.leader_rail : key.other_rail;
  const uint32_t peer_rail = session.key.leads ? key.other_rail : key.leader_rail;
  auto& path = session.paths.emplace_back(std::make_unique<Path>(&session, key, rail, peer_rail));
  path->down_since_ns = now_;
  set_speed(*path);
  return *path;
}

// Rails on one network are paired with each other; if there are none, every pair that can communicate. The pairs are
// chosen so that every rail of both sides has one.
void RdmaTransport::pair_paths(Session& session, const Address& peer) {
  const auto& theirs = peer.rdma_on(kind_).endpoints;
  const auto count = static_cast<uint32_t>(rails_.size());
  std::vector<bool> paired(count, false);
  const auto pair_up = [&](const std::vector<uint32_t>& a, const std::vector<uint32_t>& b) {
    if (a.empty() || b.empty()) return;
    for (size_t k = 0; k < std::max(a.size(), b.size()); ++k) {
      const auto ours = static_cast<uint8_t>(a[k % a.size()]);
      const auto other = static_cast<uint8_t>(b[k % b.size()]);
      Path& path = path_for(session, session.key.leads ? PathKey{ours, other} : PathKey{other, ours});
      if (path.peer_mbps == 0) hear_speed(path, theirs[other].speed_mbps);
    }
  };
  for (uint32_t k = 0; k < theirs.size(); ++k) session.peer_endpoints[k] = theirs[k].bytes;
  for (const int nearness : {2, 1}) {
    for (uint32_t i = 0; i < count; ++i) {
      if (paired[i]) continue;
      std::vector<uint32_t> b;
      for (uint32_t k = 0; k < theirs.size(); ++k) {
        if (rails_[i]->nic->nearness(theirs[k].bytes) >= nearness) b.push_back(k);
      }
      if (b.empty()) continue;
      // Those of our rails that reach the same rails of the peer.
      std::vector<uint32_t> a;
      for (uint32_t j = i; j < count; ++j) {
        const bool reaches_all =
            std::ranges::all_of(b, [&](uint32_t k) { return rails_[j]->nic->nearness(theirs[k].bytes) >= nearness; });
        if (paired[j] || !reaches_all) continue;
        a.push_back(j);
        paired[j] = true;
      }
      pair_up(a, b);
    }
    if (!session.paths.empty()) return;
  }
}

// --- sending ---

Bytes RdmaTransport::begin(const Session& session, DatagramKind kind, uint32_t rail) const {
  DatagramHead head;
  head.kind = kind;
  head.to_leader = !session.key.leads;
  head.has_link = session.link != nullptr;
  head.nonce = session.nonce;
  head.target_tag = session.target;
  head.sender = options_.identity.incarnation;
  head.sender_session = session.own_number;
  head.target_session = session.peer_number;
  head.endpoint = bytes_of(rails_[rail]->nic->endpoint());
  return begin_datagram(head);
}

void RdmaTransport::send_path_datagram(Path& path, DatagramKind kind, PathBody body) {
  Session& session = *path.session;
  const auto endpoint = session.peer_endpoints.find(path.peer_rail);
  if (endpoint == session.peer_endpoints.end()) return;
  Bytes bytes = begin(session, kind, path.rail);
  body.speed_mbps = rails_[path.rail]->nic->speed_mbps();
  put(bytes, body);
  seal(bytes, session.seal);
  rails_[path.rail]->nic->send_datagram(endpoint->second, bytes);
}

void RdmaTransport::refuse(Rail& rail, const DatagramHead& head, RefuseCode code, const std::string& text) {
  if (!is_question(head.kind) || head.endpoint.empty()) return;
  if (is_for_strangers(code) && !may_answer_stranger()) return;
  DatagramHead answer;
  answer.kind = DatagramKind::kRefuse;
  answer.to_leader = !head.to_leader;
  answer.nonce = head.nonce;
  answer.target_tag = target_tag(head.sender);
  answer.sender = {};  // not authenticated, and nobody's business
  answer.endpoint = bytes_of(rail.nic->endpoint());
  Bytes bytes = begin_datagram(answer);
  put(bytes, RefuseBody{code, text});
  bytes.resize(bytes.size() + kMacBytes);
  rail.nic->send_datagram(head.endpoint, bytes);
}

bool RdmaTransport::may_answer_stranger() {
  if (now_ - strangers_since_ns_ >= kStrangersPeriodNs) {
    strangers_since_ns_ = now_;
    strangers_answered_ = 0;
  }
  return strangers_answered_++ < kStrangersAnsweredMax;
}

// Tells the peer that it cannot have the path that it asked for now, and why.
void RdmaTransport::refuse_path(const Path& path) {
  Session& session = *path.session;
  DatagramHead head;
  head.kind = session.key.leads ? DatagramKind::kKnock : DatagramKind::kHello;
  head.to_leader = session.key.leads;
  head.nonce = session.peer_nonce;
  head.sender = session.key.peer;
  head.endpoint = session.peer_endpoints[path.peer_rail];
  refuse(*rails_[path.rail], head, RefuseCode::kFull, path.trouble);
}

// --- receiving ---

void RdmaTransport::on_datagram(Rail& rail, std::span<const uint8_t> bytes) {
  const auto datagram = decode_datagram(bytes);
  if (!datagram) {
    report_garbage(rail.nic->name(), "a datagram of " + std::to_string(bytes.size()) + " bytes was malformed");
    return;
  }
  if (datagram->head.kind == DatagramKind::kRefuse) {
    on_refuse(rail, *datagram);
    return;
  }
  Session* const session = session_of(rail, *datagram, bytes);
  if (session == nullptr) return;
  hear_link(*session, datagram->head.has_link);
  on_sealed(*session, *datagram);
  hear_link(*session, datagram->head.has_link);  // it may have reported that the peer's end of our last path broke
}

void RdmaTransport::on_sealed(Session& session, const Datagram& datagram) {
  const auto malformed = [&] { report_garbage(session.peer_name, "a sealed datagram from it was malformed"); };
  switch (datagram.head.kind) {
    case DatagramKind::kKnock:
    case DatagramKind::kHello:
    case DatagramKind::kAccept: {
      const auto body = decode_path(datagram.body);
      const uint32_t own_rail = !body ? 0 : session.key.leads ? body->path.leader_rail : body->path.other_rail;
      const bool from_leader = datagram.head.kind == DatagramKind::kHello;
      if (!body || own_rail >= rails_.size() || from_leader == session.key.leads ||
          (session.find(body->path) == nullptr && session.paths.size() >= kPathsMax)) {
        malformed();
        return;
      }
      const uint32_t peer_rail = session.key.leads ? body->path.other_rail : body->path.leader_rail;
      if (peer_rail >= session.peer_rail_count) {
        malformed();
        return;
      }
      session.peer_endpoints[peer_rail] = datagram.head.endpoint;
      if (datagram.head.kind == DatagramKind::kKnock) on_knock(session, *body);
      if (datagram.head.kind == DatagramKind::kHello) on_hello(session, *body);
      if (datagram.head.kind == DatagramKind::kAccept) on_accept(session, *body);
      return;
    }
    case DatagramKind::kResolve:
      if (const auto body = decode_resolve(datagram.body)) {
        on_resolve(session, *body);
      } else {
        malformed();
      }
      return;
    case DatagramKind::kResolved:
      if (const auto body = decode_resolved(datagram.body)) {
        on_resolved(session, *body);
      } else {
        malformed();
      }
      return;
    case DatagramKind::kBye:
      on_bye(session, decode_text(datagram.body).value_or("it gave no reason"));
      return;
    case DatagramKind::kRefuse:
      return;
  }
}

// The session that the datagram belongs to, once it is authenticated. Null: none, or the datagram has been handled.
Session* RdmaTransport::session_of(Rail& rail, const Datagram& datagram, std::span<const uint8_t> bytes) {
  const DatagramHead& head = datagram.head;
  const Incarnation& own = options_.identity.incarnation;
  if (head.version != kProtocolVersion) {
    refuse(rail, head, RefuseCode::kVersion,
           "the versions differ");  // each side sees the other's in the headers of its datagrams
    report_garbage(rail.nic->name(), "a datagram of protocol version " + std::to_string(head.version) +
                                         " arrived, this build speaks version " + std::to_string(kProtocolVersion));
    return nullptr;
  }
  if (head.target_tag != target_tag(own)) {
    refuse(rail, head, RefuseCode::kNotMe, "another engine is at this address now");
    report_garbage(rail.nic->name(), "a datagram for another engine arrived");
    return nullptr;
  }
  const bool leads = head.to_leader;
  if (head.sender != own && leads != (own < head.sender)) {
    report_garbage(rail.nic->name(), "a datagram has the roles of the two engines the wrong way round");
    return nullptr;
  }
  Session* session = find_session(head.sender, leads);
  const Digest key = session != nullptr
                         ? session->seal
                         : session_key(options_.secret, leads ? own : head.sender, leads ? head.sender : own);
  if (!is_sealed(bytes, key)) {
    refuse(rail, head, RefuseCode::kAuthentication, "the secret differs, or the address is not this engine's");
    report_garbage(rail.nic->name(), "a datagram was not sealed with our secret");
    return nullptr;
  }
  if (closed_) {
    refuse(rail, head, RefuseCode::kClosing, "the engine is closing");
    return nullptr;
  }
  const uint64_t expected = session != nullptr ? session->own_number : 0;
  if (head.target_session != 0 && head.target_session != expected) {
    refuse(rail, head, RefuseCode::kUnknownSession,
           "it was unreachable for too long, or was forgotten here: connect again");
    return nullptr;
  }
  if (session == nullptr) {
    const bool begins = head.kind == (leads ? DatagramKind::kKnock : DatagramKind::kHello);
    if (!begins) return nullptr;
    if (sessions_.size() >= kSessionsMax) {
      refuse(rail, head, RefuseCode::kFull, "it has as many peers as it can have");
      return nullptr;
    }
    session = &make_session(head.sender, leads);
  }
  if (session->peer_number == 0) session->peer_number = head.sender_session;
  if (head.sender_session < session->peer_number || session->is_over)
    return nullptr;  // from an older session; repeats itself
  if (head.sender_session > session->peer_number) {
    doom(*session, "it has forgotten this engine and starts over", LinkEnd::kLost);
    return nullptr;
  }
  session->deserted.clear();
  session->peer_nonce = head.nonce;
  return session;
}

// While a path stands, its States report this, and they are numbered: a late datagram must not undo what they said.
// While no path stands, a late one costs an extra path, over which the next State comes.
void RdmaTransport::hear_link(Session& session, bool has_link) {
  if (std::ranges::any_of(session.paths, [&](const auto& path) { return is_usable(*path); })) return;
  session.peer_has_link = has_link;
  if (has_link) session.has_left = session.peer_left = false;
}

void RdmaTransport::on_refuse(const Rail& rail, const Datagram& datagram) {
  const auto found = std::ranges::find_if(
      sessions_, [&](const auto& item) { return item.second->nonce == datagram.head.nonce && !item.second->is_over; });
  if (found == sessions_.end()) {
    ++garbage_;  // late, or forged
    return;
  }
  Session& session = *found->second;
  if (datagram.head.version != kProtocolVersion) {
    doom(session,
         "it speaks protocol version " + std::to_string(datagram.head.version) + ", this build version " +
             std::to_string(kProtocolVersion) + ": use the same crossrail release on both sides",
         LinkEnd::kLost);
    return;
  }
  const auto body = decode_refuse(datagram.body);
  if (!body) {
    ++garbage_;
    return;
  }
  switch (body->code) {
    case RefuseCode::kFull: {
      const auto refused = std::ranges::find_if(session.paths, [&](const auto& path) {
        const auto endpoint = session.peer_endpoints.find(path->peer_rail);
        return path->rail == rail.index && path->state != PathState::kOpen &&
               endpoint != session.peer_endpoints.end() && endpoint->second == datagram.head.endpoint;
      });
      if (refused == session.paths.end()) {
        ++garbage_;  // late
      } else {
        (*refused)->refusal = body->text;
      }
      return;
    }
    case RefuseCode::kClosing:
      doom(session, body->text, LinkEnd::kLeft);
      return;
    case RefuseCode::kMalformed:
    case RefuseCode::kVersion:
    case RefuseCode::kNotMe:
    case RefuseCode::kAuthentication:
    case RefuseCode::kUnknownSession:
      doom(session, body->text, LinkEnd::kLost);
      return;
  }
}

// --- making paths ---

// Also without operations of our own: an idle peer has no other way to learn that its end of a path broke, and would
// lose its next write on it where nobody can tell what became of works in doubt.
bool RdmaTransport::wants_paths(const Session& session) const {
  return !session.is_over && (session.link != nullptr || session.peer_has_link);
}

bool RdmaTransport::make_nic_path(Path& path) {
  try {
    path.nic_path = rails_[path.rail]->nic->make_path();
    path.token = options_.entropy->draw_u64();
  } catch (const TransportError& error) {
    path.nic_path.reset();
    path.trouble = error.what();
    path.refusal.clear();
    return false;
  }
  path.nic_path->user = &path;
  path.offer = bytes_of(path.nic_path->offer());
  path.is_connected = path.is_broken = path.is_flushed = false;
  path.works.clear();
  const uint64_t seen_before = path.seen;
  path.first_cookie = path.outstanding_bytes = path.imms_done = path.seen = 0;
  if (is_mutated(Mutation::kSeenOfLastEpoch)) path.seen = seen_before;
  path.fault_text.clear();
  tokens_[path.token] = &path;
  return true;
}

bool RdmaTransport::connect_path(Path& path, const Bytes& offer) {
  try {
    path.nic_path->connect(path.session->peer_endpoints[path.peer_rail], offer);
    path.is_connected = true;
  } catch (const TransportError& error) {
    path.trouble = error.what();
    path.refusal.clear();
    drop_nic_path(path);
    path.state = PathState::kIdle;
    path.closed_epoch = path.epoch;  // it never stood, and nothing was seen on it
    path.closed_seen = 0;
    return false;
  }
  return true;
}

// Time-driven actions for a path: to be made, asked for once more, or given up.
void RdmaTransport::tend_path(Path& path) {
  Session& session = *path.session;
  const Rail& rail = *rails_[path.rail];
  switch (path.state) {
    case PathState::kIdle: {
      if (!wants_paths(session) || !path.doubt.empty() || !rail.is_up || now_ < path.retry_at_ns) return;
      path.retry_pause_ns = std::clamp(2 * path.retry_pause_ns, kRetryFirstNs, kRetryMaxNs);
      path.retry_at_ns = now_ + path.retry_pause_ns;
      if (!session.peer_endpoints.contains(path.peer_rail)) return;
      if (!session.key.leads) {
        send_path_datagram(path, DatagramKind::kKnock, {path.key, path.epoch, 0, {}});
        return;
      }
      if (!make_nic_path(path)) {
        if (session.peer_number != 0) refuse_path(path);  // it may have knocked
        return;
      }
      ++path.epoch;
      path.state = PathState::kOffered;
      path.state_since_ns = now_;
      send_path_datagram(path, DatagramKind::kHello, {path.key, path.epoch, path.token, path.offer});
      return;
    }
    case PathState::kOffered:
      if (!wants_paths(session)) {
        mark_broken(path, Cause::kHere, "neither side needs it any more");
      } else if (now_ >= path.retry_at_ns) {
        path.retry_pause_ns = std::clamp(2 * path.retry_pause_ns, kRetryFirstNs, kRetryMaxNs);
        path.retry_at_ns = now_ + path.retry_pause_ns;
        send_path_datagram(path, DatagramKind::kHello, {path.key, path.epoch, path.token, path.offer});
      }
      return;
    case PathState::kAccepted:
      if (now_ - path.state_since_ns >= kAcceptedMaxNs)
        mark_broken(path, Cause::kHere, "the peer asked for it and never used it");
      return;
    case PathState::kBreaking:
      if (now_ - path.state_since_ns >= kFlushMaxNs) give_up(path);
      return;
    case PathState::kOpen:
      return;
  }
}

void RdmaTransport::on_knock(Session& session, const PathBody& body) {
  Path& path = path_for(session, body.path);
  hear_speed(path, body.speed_mbps);
  is_watching_ = true;
  switch (path.state) {
    case PathState::kIdle:
    case PathState::kOffered:
      path.retry_at_ns = 0;
      tend_path(path);
      return;
    case PathState::kOpen:
      if (body.epoch >= path.epoch) mark_broken(path, Cause::kPeersEnd, kItsEndBroke);
      return;
    case PathState::kAccepted:
    case PathState::kBreaking:
      return;
  }
}

void RdmaTransport::on_hello(Session& session, const PathBody& body) {
  Path& path = path_for(session, body.path);
  is_watching_ = true;
  if (body.epoch < path.epoch) return;  // delayed
  if (body.epoch == path.epoch) {
    if (path.state == PathState::kAccepted || path.state == PathState::kOpen) {
      send_path_datagram(path, DatagramKind::kAccept, {path.key, path.epoch, path.token, path.offer});
    } else if (path.state == PathState::kIdle) {  // that epoch is over here
      answer(path, {});
    }
    return;
  }
  if (path.state != PathState::kIdle) {
    mark_broken(path, Cause::kPeersEnd, kItsEndBroke);
    return;  // it will send Hello again
  }
  if (!path.doubt.empty()) return;
  if (!make_nic_path(path)) {
    refuse_path(path);
    return;
  }
  path.epoch = body.epoch;
  path.peer_token = body.token;
  hear_speed(path, body.speed_mbps);
  if (!connect_path(path, body.offer)) {
    refuse_path(path);
    return;
  }
  path.state = PathState::kAccepted;
  path.state_since_ns = now_;
  send_path_datagram(path, DatagramKind::kAccept, {path.key, path.epoch, path.token, path.offer});
}

void RdmaTransport::on_accept(Session& session, const PathBody& body) {
  Path* const path = session.find(body.path);
  if (path == nullptr || path->state != PathState::kOffered || path->epoch != body.epoch) return;  // late or duplicate
  path->peer_token = body.token;
  hear_speed(*path, body.speed_mbps);
  if (connect_path(*path, body.offer)) {
    open_path(*path);
  } else {
    refuse_path(*path);
  }
}

// May be called from a NIC's event: only takes notes.
void RdmaTransport::open_path(Path& path) {
  Session& session = *path.session;
  path.state = PathState::kOpen;
  path.opened_at_ns = path.state_since_ns = path.heard_ns = now_;
  path.down_since_ns = 0;
  path.pinged_ns = 0;
  path.trouble.clear();
  path.refusal.clear();
  path.pong.reset();
  path.ping_due = false;
  path.state_due = path.introduce_due = true;
  ++path.epochs_opened;
  session.quiet_since_ns = 0;
  mark_dirty(session);
  if (!session.link) return;
  session.link->down_since_ns = 0;
  if (std::exchange(session.link->is_up, true) || session.link->doom) return;
  sink_->on_link_up(*session.link);
}

}  // namespace crossrail::rdma
