// How a path breaks, and what becomes of its works.
//
// 1. Something failed, or the peer, the port or we want it to end: break_off().
// 2. The NIC reports flushed: none of its works touches memory any more. Works reported done are done; the rest is in
//    doubt: the peer may have counted an immediate whose acknowledgement was lost.
// 3. We ask the peer (Resolve), over any other path, or by datagrams. It first breaks off its own end, so that nothing
//    of that epoch can arrive any more, and then says how many immediates it has seen, and whether the regions may be
//    accessed.
// 4. What it has seen is done. What its NIC refused fails. The rest is posted again, on any path.
// Nothing is counted twice, because what may have been counted is never posted again: where the peer cannot tell
// (NicLimits::names_imm_paths), writes with immediate in doubt fail.
#include <algorithm>
#include <optional>
#include <span>

#include "transport/rdma/rdma_transport.h"
#include "util/errors.h"
#include "util/mutation.h"

namespace crossrail::rdma {

namespace {

constexpr size_t kGoneMax = 4096;  // per peer; the oldest regions have the smallest ids
constexpr int64_t kAskMaxNs = 500'000'000;
constexpr int64_t kGoodForNs =
    1'000'000'000;  // a path that broke sooner, and was good for nothing, is remade after a pause
// How often a work may be to blame for a break. Without order, any work in flight may be the cause, so the limit is
// high.
constexpr uint32_t kAttemptsMax = 12;
constexpr uint32_t kAttemptsMaxUnordered = 60;
constexpr uint32_t kPeersBreaksForAttempt = 5;
static_assert(kAttemptsMaxUnordered < 64);  // bits of attempts_of()

bool needs_region(const WorkRequest& work) { return work.remote != nullptr; }
const RdmaKey& key_of(const WorkRequest& work) { return static_cast<const RdmaKey&>(*work.remote); }

// What we ask the peer about works in doubt; the same for the same works. Works that its NIC refused have a span each,
// which come first; the others have one per region.
struct Question {
  std::vector<Span> spans;
  std::vector<size_t> of_work;  // index into spans; kNone
  static constexpr size_t kNone = ~size_t{0};
};

Question question_of(std::span<const WorkRequest> works) {
  Question question{{}, std::vector<size_t>(works.size(), Question::kNone)};
  std::vector<Span>& spans = question.spans;
  const auto span_of = [](const WorkRequest& work) {
    const bool reads = work.op == WorkOp::kRead;
    return Span{key_of(work).region_id, work.remote_offset, work.length_bytes, !reads, reads};
  };
  for (size_t i = 0; i < works.size() && spans.size() < kSpansMax; ++i) {
    if (fault_of(works[i]) != WorkFault::kRemoteAccess || !needs_region(works[i])) continue;
    question.of_work[i] = spans.size();
    spans.push_back(span_of(works[i]));
  }
  const size_t refused = spans.size();
  for (size_t i = 0; i < works.size(); ++i) {
    if (fault_of(works[i]) == WorkFault::kRemoteAccess || !needs_region(works[i])) continue;
    const Span own = span_of(works[i]);
    size_t at = refused;
    while (at < spans.size() && (spans[at].region_id != own.region_id || spans[at].reads != own.reads)) ++at;
    if (at == spans.size()) {
      if (at == kSpansMax) continue;
      spans.push_back(own);
    } else {
      const uint64_t end = std::max(spans[at].offset + spans[at].length_bytes, own.offset + own.length_bytes);
      spans[at].offset = std::min(spans[at].offset, own.offset);
      spans[at].length_bytes = end - spans[at].offset;
    }
    question.of_work[i] = at;
  }
  return question;
}

// The peer's verdict on the region that works[index] accesses. Nothing: it was not asked.
std::optional<Status> verdict_of(std::span<const WorkRequest> works, size_t index, const Question& question,
                                 const std::vector<Status>& verdicts) {
  const size_t at = question.of_work[index];
  if (at >= verdicts.size()) return std::nullopt;
  const WorkRequest& work = works[index];
  // That one work exceeds the region's end says little about others in the same region.
  const bool is_own =
      question.spans[at].offset == work.remote_offset && question.spans[at].length_bytes == work.length_bytes;
  const bool is_past = work.remote_offset + work.length_bytes > key_of(work).length_bytes;
  if (verdicts[at] == Status::kOutOfBounds && !is_own && !is_past) return std::nullopt;
  return verdicts[at];
}

template <typename Body>
Bytes body_of(const Body& body) {
  Bytes bytes;
  put(bytes, body);
  return bytes;
}

}  // namespace

// --- breaking ---

void RdmaTransport::start_break(Path& path) {
  path.is_broken = false;
  if (path.state == PathState::kIdle || path.state == PathState::kBreaking) return;
  Session& session = *path.session;
  const bool was_good = now_ - path.opened_at_ns >= kGoodForNs || path.imms_done > 0 || path.seen > 0;
  if (path.state == PathState::kOpen && was_good) path.retry_pause_ns = 0;
  path.retry_at_ns = path.retry_pause_ns == 0 ? now_ : now_ + std::max(path.retry_pause_ns, kRetryFirstNs);
  if (path.down_since_ns == 0) path.down_since_ns = now_;
  path.state_since_ns = now_;
  tend_soon(session);
  if (!path.is_connected) {
    drop_nic_path(path);
    path.state = PathState::kIdle;
  } else {
    path.state = PathState::kBreaking;
    if (is_mutated(Mutation::kCompleteBeforeFlush)) fail_before_flush(path);
    path.nic_path->break_off(path.trouble);
    if (session.link) sink_->on_rail_broken(*session.link, path.rail);
  }
  if (!session.has_open_path()) {
    session.quiet_since_ns = now_;
    if (session.link && session.link->down_since_ns == 0) session.link->down_since_ns = now_;
  }
}

// A deliberate mistake: the NIC still has these.
void RdmaTransport::fail_before_flush(Path& path) {
  for (size_t i = 0; i < path.works.size() && path.session->link; ++i) {
    if (fault_of(path.works[i]) != WorkFault::kNone) continue;
    retire(*path.session->link, path.works[i], Status::kTransportFailed, "the path broke");
    set_fault(path.works[i], WorkFault::kEnded);
  }
}

void RdmaTransport::drop_nic_path(Path& path) {
  if (!path.nic_path) return;
  tokens_.erase(path.token);
  path.nic_path->user = nullptr;
  path.nic_path.reset();
}

void RdmaTransport::finish_break(Path& path) {
  if (path.state != PathState::kBreaking || !path.is_flushed) return;
  Session& session = *path.session;
  path.closed_epoch = path.epoch;
  path.closed_seen = path.seen;
  path.closed_counts = path.nic_path != nullptr && rails_[path.rail]->nic->limits().names_imm_paths;
  collect_doubt(path);
  drop_nic_path(path);
  path.state = PathState::kIdle;
  // Acknowledgements of the peer's messages may have been lost with the path.
  session.untold.clear();
  for (const auto& [id, outcome] : session.outcomes) session.untold.push_back(id);
  session.services_untold.clear();
  for (const uint64_t id : session.services_heard) {
    const auto is_same = [&](const Session::Held& held) { return held.id == id; };
    if (!session.services.any_of(is_same)) session.services_untold.push_back(id);
  }
  if (session.is_over) {
    any_over_ = true;
    return;
  }
  if (path.answer) answer(path, *std::exchange(path.answer, std::nullopt));
  if (path.is_resolving) ask(path);
  mark_dirty(session);
  tend_soon(session);
}

void RdmaTransport::collect_doubt(Path& path) {
  for (size_t i = 0; i < path.works.size(); ++i) {
    WorkRequest work = path.works[i];
    if (fault_of(work) == WorkFault::kEnded) continue;
    if (fault_of(work) == WorkFault::kNone) set_fault(work, WorkFault::kInDoubt);
    path.doubt.push_back(work);
  }
  path.works.clear();
  path.outstanding_bytes = 0;
  if (is_mutated(Mutation::kRepostUnasked) && path.session->link) {
    std::vector<WorkRequest> again = std::exchange(path.doubt, {});
    for (WorkRequest& work : again) set_fault(work, WorkFault::kNone);
    requeue(*path.session->link, again);
  }
  path.is_resolving = !path.doubt.empty();
  path.ask_at_ns = now_;
  path.ask_pause_ns = 0;
  path.doubt_since_ns = now_;
}

// Polls until these paths are flushed. For calls that must retire everything before they return.
void RdmaTransport::drain(const std::vector<Path*>& paths) {
  int64_t looked_ns = options_.clock->now_ns();
  int64_t patience = looked_ns + kFlushMaxNs;
  const auto is_drained = [&] {
    return std::ranges::all_of(paths, [](const Path* path) { return path->state != PathState::kBreaking; });
  };
  if (!is_drained()) {
    for (auto& rail : rails_) rail->nic->hurry();
  }
  while (!is_drained()) {
    poll_nics();
    for (Path* path : std::exchange(broken_, {})) start_break(*path);
    for (Path* path : std::exchange(flushed_, {})) finish_break(*path);
    options_.clock->pass();
    const int64_t away_ns = options_.clock->now_ns() - looked_ns;
    looked_ns += away_ns;
    if (away_ns > kAwayNs) patience += away_ns;
    if (looked_ns < patience) continue;
    for (Path* path : paths) {
      if (path->state == PathState::kBreaking) give_up(*path);
    }
  }
}

// A NIC that does not keep its promise: whatever it still holds stays allocated for ever.
void RdmaTransport::give_up(Path& path) {
  sink_->on_protocol_error(rails_[path.rail]->nic->name(),
                           "the NIC did not flush a path within 10 s; memory in use by it may still be touched");
  tokens_.erase(path.token);
  path.nic_path->user = nullptr;
  static_cast<void>(path.nic_path.release());
  path.is_flushed = true;
  finish_break(path);
}

// --- asking and answering ---

// Over a path if one is open, else by datagrams over all rails; by_datagram_too: both.
bool RdmaTransport::send_to_peer(Path& path, FragmentKind kind, const Bytes& body, DatagramKind datagram_kind,
                                 bool by_datagram_too) {
  Session& session = *path.session;
  for (auto& carrier : session.paths) {
    if (!is_usable(*carrier)) continue;
    if (!carrier->nic_path->send(begin_fragment(carrier->peer_token, kind), body)) continue;
    if (!by_datagram_too) return true;
    break;
  }
  for (auto& carrier : session.paths) {
    const auto endpoint = session.peer_endpoints.find(carrier->peer_rail);
    if (endpoint == session.peer_endpoints.end() || !rails_[carrier->rail]->is_up) continue;
    Bytes bytes = begin(session, datagram_kind, carrier->rail);
    bytes.insert(bytes.end(), body.begin(), body.end());
    seal(bytes, session.seal);
    rails_[carrier->rail]->nic->send_datagram(endpoint->second, bytes);
  }
  return false;
}

void RdmaTransport::ask(Path& path) {
  const bool again = path.ask_pause_ns != 0;
  path.ask_pause_ns = std::clamp(2 * path.ask_pause_ns, kRetryFirstNs, kAskMaxNs);
  path.ask_at_ns = now_ + path.ask_pause_ns;
  is_watching_ = true;
  if (path.is_resolving) {
    send_to_peer(path, FragmentKind::kResolve,
                 body_of(ResolveBody{path.key, path.epoch, question_of(path.doubt).spans}), DatagramKind::kResolve,
                 again);
  } else if (!path.suspects.empty()) {
    // One question at a time, repeated until it is answered: with two, an answer would not say which works it is about.
    if (path.asked == 0) {
      ++path.question;
      path.asked = path.suspects.size();
    }
    const Question question = question_of(std::span(path.suspects).first(path.asked));
    send_to_peer(path, FragmentKind::kResolve, body_of(ResolveBody{path.key, 0, question.spans, path.question}),
                 DatagramKind::kResolve, again);
  }
}

void RdmaTransport::on_resolve(Session& session, const ResolveBody& body) {
  Path* const path = session.find(body.path);
  if (path == nullptr || body.epoch > path->epoch) {
    ++garbage_;
    return;
  }
  if (body.epoch == 0) {
    ResolvedBody answer{path->key, 0, false, 0, {}, body.question};
    for (const Span& span : body.spans) answer.verdicts.push_back(verdict_on(span));
    send_to_peer(*path, FragmentKind::kResolved, body_of(answer), DatagramKind::kResolved, false);
    return;
  }
  if (body.epoch == path->closed_epoch) {
    answer(*path, body.spans);
  } else if (body.epoch == path->epoch && path->is_connected && path->state != PathState::kIdle) {
    if (is_mutated(Mutation::kAnswerBeforeClosing)) {
      path->closed_epoch = path->epoch;
      path->closed_seen = path->seen;
      path->closed_counts = true;
      answer(*path, body.spans);
      return;
    }
    path->answer = body.spans;
    mark_broken(*path, Cause::kPeersEnd, kItsEndBroke);  // answered once it is flushed
  }  // else delayed: it knew this before it let the next epoch begin
}

Status RdmaTransport::verdict_on(const Span& span) {
  const Status status = regions_.verdict(span);
  return status == Status::kRegionClosed ? sink_->status_of_gone(span.region_id) : status;
}

// About the epoch that was closed last.
void RdmaTransport::answer(Path& path, const std::vector<Span>& spans) {
  ResolvedBody body{path.key, path.closed_epoch, path.closed_counts, path.closed_seen, {}};
  for (const Span& span : spans) body.verdicts.push_back(verdict_on(span));
  send_to_peer(path, FragmentKind::kResolved, body_of(body), DatagramKind::kResolved, true);
}

void RdmaTransport::on_resolved(Session& session, const ResolvedBody& body) {
  Path* const path = session.find(body.path);
  if (path == nullptr) return;
  if (body.epoch == 0) {
    if (path->asked > 0 && body.question == path->question) settle_suspects(*path, body);
    return;
  }
  if (path->is_resolving && body.epoch == path->closed_epoch) {
    settle(*path, body);
  } else if (body.epoch == path->epoch && path->state != PathState::kIdle) {
    mark_broken(*path, Cause::kPeersEnd, kItsEndBroke);
  }  // else delayed
}

// --- settling ---

// provider: what the NIC reported on refusal; empty: nothing, the peer has told us why the work would fail.
void RdmaTransport::retire_refused(RdmaLink& link, const WorkRequest& work, Status status,
                                   const std::string& provider) {
  std::string text = provider.empty() ? "the peer refuses a " : "the peer's NIC refused a ";
  text += work.op == WorkOp::kRead ? "read" : "write";
  text += " of " + std::to_string(work.length_bytes) + " bytes at offset " + std::to_string(work.remote_offset);
  if (needs_region(work)) text += " of its region " + std::to_string(key_of(work).region_id);
  if (status == Status::kRegionClosed) {
    text += ": the region is closed";
  } else if (status == Status::kRegionRevoked) {
    text += ": the region was revoked";
  } else if (status == Status::kOutOfBounds) {
    text += ": that is past the region's end";
  } else if (status == Status::kAccessDenied) {
    text += ": the region is not open to that";
  } else {  // the peer finds nothing wrong
    text += ": the descriptor's key or address does not fit the region";
    status = Status::kAccessDenied;
  }
  if (!provider.empty()) text += " (" + provider + ")";
  retire(link, work, status, text);
}

void RdmaTransport::note_gone(RdmaLink& link, const std::vector<Span>& spans, const std::vector<Status>& verdicts) {
  for (size_t i = 0; i < std::min(spans.size(), verdicts.size()); ++i) {
    if (verdicts[i] != Status::kRegionClosed && verdicts[i] != Status::kRegionRevoked) continue;
    link.gone[spans[i].region_id] = verdicts[i];
    if (link.gone.size() > kGoneMax) link.gone.erase(link.gone.begin());
  }
}

// Fails queued works that name one of the regions that are gone.
void RdmaTransport::fail_gone(RdmaLink& link) {
  if (link.gone.empty()) return;
  std::vector<WorkRequest> failed;
  for (auto& queue : link.queues) {
    queue.filter([&](const WorkRequest& work) {
      if (gone_status(link, work) == Status::kDone) return true;
      failed.push_back(work);
      return false;
    });
  }
  link.queued -= failed.size();
  for (const WorkRequest& work : failed) retire_refused(link, work, gone_status(link, work), "");
}

std::string RdmaTransport::hint_for(const Path& path) const {
  const auto endpoint = path.session->peer_endpoints.find(path.peer_rail);
  if (endpoint == path.session->peer_endpoints.end()) return {};
  const std::string hint = rails_[path.rail]->nic->silence_hint(endpoint->second);
  return hint.empty() ? "" : "; " + hint;
}

void RdmaTransport::settle(Path& path, const ResolvedBody& body) {
  RdmaLink& link = *path.session->link;
  const bool ordered = rails_[path.rail]->nic->limits().ordered_paths;
  const std::vector<WorkRequest> doubt = std::exchange(path.doubt, {});
  const Question question = question_of(doubt);
  path.is_resolving = false;
  note_gone(link, question.spans, body.verdicts);
  // Compares the immediates in doubt with how many of them the peer has seen.
  uint64_t in_doubt = 0;
  for (const WorkRequest& work : doubt) in_doubt += work.has_imm ? 1 : 0;
  const uint64_t seen = body.counts && body.seen > path.imms_done ? body.seen - path.imms_done : 0;
  if (body.counts && (body.seen < path.imms_done || seen > in_doubt)) {
    sink_->on_protocol_error(path.session->peer_name, "it counts " + std::to_string(body.seen) + " immediates where " +
                                                          std::to_string(path.imms_done) + " to " +
                                                          std::to_string(path.imms_done + in_doubt) + " can be");
  }
  // On an unordered path only "all" or "none" is conclusive.
  const bool knows = body.counts && (ordered || seen == 0 || seen >= in_doubt);
  uint64_t imms = 0;
  size_t seen_end = 0;  // works before this one preceded the last immediate that was seen
  for (size_t i = 0; i < doubt.size() && knows && ordered; ++i) {
    if (doubt[i].has_imm && imms++ < seen) seen_end = i + 1;
  }
  // On an ordered path at most one work is to blame, the first that was not executed: those behind it had no chance.
  // None is, if the peer broke the path, or if a work is known to have broken it: one that a NIC refused. But some NICs
  // flush a work without saying what was wrong with it (Soft-RoCE, if packets are too long for its interface): a work
  // to which this happens again and again fails, too.
  const uint32_t attempts_max = ordered ? kAttemptsMax : kAttemptsMaxUnordered;
  const auto is_refused = [](const WorkRequest& work) { return fault_of(work) != WorkFault::kInDoubt; };
  const bool may_be_ours = path.cause != Cause::kPeersEnd || path.epochs_opened % kPeersBreaksForAttempt == 0;
  bool blames = may_be_ours && !(ordered && std::ranges::any_of(doubt, is_refused));
  const bool all = !ordered && blames;
  std::vector<WorkRequest> again;
  for (size_t i = 0; i < doubt.size(); ++i) {
    WorkRequest work = doubt[i];
    const WorkFault fault = fault_of(work);
    const bool is_done = knows && work.op == WorkOp::kWrite && fault == WorkFault::kInDoubt &&
                         (ordered ? i < seen_end : work.has_imm && seen > 0);
    const Status verdict = verdict_of(doubt, i, question, body.verdicts).value_or(gone_status(link, work));
    set_fault(work, WorkFault::kNone);
    if (is_done) {
      path.bytes_done += work.length_bytes;
      retire(link, work, Status::kDone, "");
    } else if (fault == WorkFault::kLocal) {
      retire(link, work, Status::kTransportFailed, "our NIC refused it: " + path.fault_text);
    } else if (fault == WorkFault::kRemoteAccess || verdict != Status::kDone) {
      retire_refused(link, work, verdict, fault == WorkFault::kRemoteAccess ? path.fault_text : "");
    } else if (work.has_imm && !knows) {
      retire(link, work, Status::kTransportFailed,
             pair_text(path) +
                 " broke with this write under way, and on this network nobody can tell whether its "
                 "immediate was counted: " +
                 path.trouble);
    } else if (blames && attempts_of(work) + 1 >= attempts_max) {
      blames = all;
      retire(link, work, Status::kTransportFailed,
             std::to_string(attempts_max) + " attempts failed, the last on " + pair_text(path) + ": " + path.trouble +
                 hint_for(path));
    } else {
      if (blames) add_attempt(work);
      blames = all;
      again.push_back(work);
    }
  }
  requeue(link, again);
  fail_gone(link);
  if (!again.empty()) sink_->on_sent_again(link, path.rail, static_cast<uint32_t>(again.size()));
  path.retry_at_ns = std::min(path.retry_at_ns, now_ + path.retry_pause_ns);
  tend_soon(*path.session);
}

void RdmaTransport::settle_suspects(Path& path, const ResolvedBody& body) {
  const std::vector<WorkRequest> suspects = std::exchange(path.suspects, {});
  const auto asked = std::span(suspects).first(std::exchange(path.asked, 0));
  const Question question = question_of(asked);
  note_gone(*path.session->link, question.spans, body.verdicts);
  for (size_t i = 0; i < suspects.size(); ++i) {
    WorkRequest work = suspects[i];
    const bool is_local = fault_of(work) == WorkFault::kLocal;
    const auto verdict = i < asked.size() ? verdict_of(asked, i, question, body.verdicts) : std::nullopt;
    const bool is_settled = is_local || verdict || (i < asked.size() && !needs_region(work));
    if (!is_settled) {
      path.suspects.push_back(work);
      continue;
    }
    set_fault(work, WorkFault::kNone);
    if (is_local) {
      retire(*path.session->link, work, Status::kTransportFailed, "our NIC refused it: " + path.fault_text);
    } else {
      retire_refused(*path.session->link, work, verdict.value_or(Status::kDone), path.fault_text);
    }
  }
  fail_gone(*path.session->link);
  if (path.suspects.size() == suspects.size())
    return;  // it answers nothing: asked again in a while, and lost in the end
  path.doubt_since_ns = path.ask_at_ns = now_;
  path.ask_pause_ns = 0;
  if (!path.suspects.empty()) tend_soon(*path.session);
}

}  // namespace crossrail::rdma
