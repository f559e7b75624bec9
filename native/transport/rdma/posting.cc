// From the link's queue to the paths, and what the NICs report about it.
#include <algorithm>
#include <utility>

#include "transport/rdma/rdma_transport.h"
#include "util/errors.h"
#include "util/mutation.h"

namespace crossrail::rdma {

namespace {

constexpr size_t kQueuedMax = 4096;      // per link: the rest waits in the engine
constexpr size_t kSendsQueuedMax = 256;  // messages, likewise
constexpr size_t kPassedMax = 256;       // that others may pass: each attempt looks at all of them
constexpr uint64_t kBatchBytes =
    256 << 10;  // in works handed to a path at once, when there are other paths that could take some
// For the fastest rail, posted and not done; slower ones have proportionally less, so that all finish together.
constexpr uint64_t kWindowBytes = uint64_t{4} << 20;
constexpr uint64_t kWindowBytesMin = 256 << 10;
// For one link, per path, in works that are not short: the rest waits in the engine, where short work can pass it.
// Short work waits behind no more than this and the window, 0.4 ms at 400 Gb/s, and paths do not run dry between two
// rounds.
constexpr uint64_t kQueuedBytesMax = 4 * kWindowBytes;
const std::string kNoDetail;

}  // namespace

bool RdmaTransport::is_usable(const Path& path) const {
  return path.state == PathState::kOpen && !path.is_broken && rails_[path.rail]->is_up;
}

// The speeds of our NICs may have changed.
void RdmaTransport::set_speeds() {
  fastest_mbps_ = 0;
  for (const auto& rail : rails_) fastest_mbps_ = std::max(fastest_mbps_, rail->nic->speed_mbps());
  for (auto& [key, session] : sessions_) {
    for (auto& path : session->paths) set_speed(*path);
  }
}

void RdmaTransport::hear_speed(Path& path, uint32_t mbps) {
  if (mbps == 0) return;
  path.peer_mbps = mbps;
  set_speed(path);
}

void RdmaTransport::set_speed(Path& path) {
  const uint32_t own_mbps = rails_[path.rail]->nic->speed_mbps();
  const uint32_t mbps =
      own_mbps == 0 || path.peer_mbps == 0 ? std::max(own_mbps, path.peer_mbps) : std::min(own_mbps, path.peer_mbps);
  path.speed_mbps = mbps;
  path.window_bytes = mbps == 0 || fastest_mbps_ == 0
                          ? kWindowBytes
                          : std::clamp(kWindowBytes * mbps / fastest_mbps_, kWindowBytesMin, kWindowBytes);
}

bool RdmaTransport::has_room(const Path& path, uint64_t length_bytes) const {
  if (path.works.size() >= rails_[path.rail]->nic->limits().path_works_max) return false;
  return path.outstanding_bytes == 0 || path.outstanding_bytes + length_bytes <= path.window_bytes;
}

// Whether the peer's NIC at the other end knows the region: one that was already gone when the region was registered
// does not, and the path to it may not have broken yet.
bool RdmaTransport::is_known_by(const Path& path, const WorkRequest& request) {
  if (request.remote == nullptr || request.length_bytes == 0) return true;
  return static_cast<const RdmaKey&>(*request.remote).keys.keys[path.peer_rail] != kNoKey;
}

// The path that would finish it first; among equals, the one whose rail has waited longest: each peer has its own
// paths, and a scatter to many peers would otherwise go over the first rail of each. refusing: rails whose NICs accept
// nothing now.
Path* RdmaTransport::best_path(Session& session, uint32_t rail, const WorkRequest& request,
                               const std::vector<const Path*>& refusing) {
  const uint64_t length_bytes = request.length_bytes;
  const auto is_open = [&](const Path& path) {
    return (rail == kAnyRail || path.rail == rail) && is_usable(path) && has_room(path, length_bytes) &&
           is_known_by(path, request) && std::ranges::find(refusing, &path) == refusing.end();
  };
  if (session.paths.size() == 1) return is_open(*session.paths.front()) ? session.paths.front().get() : nullptr;
  Path* best = nullptr;
  uint64_t best_load = 0;
  for (auto& path : session.paths) {
    if (!is_open(*path)) continue;
    const uint64_t load = (path->outstanding_bytes + length_bytes) / std::max<uint32_t>(1, path->speed_mbps / 1000);
    const auto rank = [&](const Path& one) { return std::pair(one.works.size(), rails_[one.rail]->last_turn); };
    if (best != nullptr && (load > best_load || (load == best_load && rank(*path) >= rank(*best)))) continue;
    best = path.get();
    best_load = load;
  }
  return best;
}

NicWork RdmaTransport::nic_work(const WorkRequest& request, const Path& path, uint64_t cookie) const {
  NicWork work;
  work.op = request.op == WorkOp::kRead ? NicOp::kRead : NicOp::kWrite;
  work.has_imm = request.has_imm;
  work.imm = request.wire_imm;
  work.local = request.local;
  work.length_bytes = request.length_bytes;
  if (request.local_region != nullptr) {
    work.registration = static_cast<const RdmaRegion*>(request.local_region)->on(path.rail);
  }
  work.has_remote = request.remote != nullptr;
  if (work.has_remote) {
    const auto& key = static_cast<const RdmaKey&>(*request.remote);
    // An immediate without bytes may name the region's end, where there is no byte to point at.
    const uint64_t offset = request.length_bytes == 0 ? 0 : request.remote_offset;
    work.remote_address = key.keys.base + offset;
    work.remote_key = key.keys.keys[path.peer_rail];
  }
  work.cookie = cookie;
  return work;
}

// Posts a prefix on this path: as much as its window has room for and the NIC takes.
uint32_t RdmaTransport::post_some(Path& path, std::span<const WorkRequest> requests, uint32_t rail) {
  const uint64_t bytes_max = path.session->paths.size() == 1 ? ~uint64_t{0} : kBatchBytes;
  const size_t works_room = rails_[path.rail]->nic->limits().path_works_max - path.works.size();
  const size_t count_max = std::min({kBatch, requests.size(), works_room});
  uint64_t bytes = 0;
  uint64_t outstanding = path.outstanding_bytes;
  uint64_t cookie = path.first_cookie + path.works.size();
  size_t count = 0;
  for (; count < count_max; ++count) {
    const WorkRequest& request = requests[count];
    if (request.length_bytes > work_bytes_max_) break;
    if (count > 0 && (outstanding + request.length_bytes > path.window_bytes || bytes >= bytes_max)) break;
    if (!is_known_by(path, request)) break;
    nic_works_[count] = nic_work(request, path, cookie++);
    bytes += request.length_bytes;
    outstanding += request.length_bytes;
  }
  if (count == 0) return 0;
  const uint32_t accepted = path.nic_path->post({nic_works_.data(), count});
  for (uint32_t i = 0; i < accepted; ++i) {
    WorkRequest& work = path.works.push_back(requests[i]);
    if (rail != kRequeued) work.reserved = routing_of(rail);
    path.outstanding_bytes += work.length_bytes;
  }
  tell_sent(path, accepted);
  return accepted;
}

// Reports the last `accepted` works of the path as sent. Consecutive ones of one transfer are reported in one call.
void RdmaTransport::tell_sent(Path& path, uint32_t accepted) {
  rails_[path.rail]->last_turn = ++turns_;
  for (size_t i = path.works.size() - accepted; i < path.works.size();) {
    void* const context = context_of(path.works[i]);
    uint32_t count = 0, imms = 0;
    uint64_t bytes = 0;
    for (; i < path.works.size() && context_of(path.works[i]) == context; ++i, ++count) {
      bytes += path.works[i].length_bytes;
      imms += path.works[i].has_imm ? 1 : 0;
    }
    sink_->on_sent(*path.session->link, path.rail, context, count, bytes, imms);
  }
}

uint32_t RdmaTransport::post(Link& link, uint32_t rail, std::span<const WorkRequest> requests, uint32_t* completed) {
  auto& out = static_cast<RdmaLink&>(link);
  *completed = 0;
  if (!out.is_up || out.doom) return 0;
  Session& session = *out.session;
  if (rail != kAnyRail && std::ranges::none_of(session.paths, [&](const auto& path) { return path->rail == rail; })) {
    for (const WorkRequest& request : requests) {
      ++out.outstanding;
      end_outstanding(out, 1);
      sink_->on_retired(out, request.context, request.tag, 1, 0, Status::kTransportFailed,
                        "rail " + std::to_string(rail) + " has no rail of the peer to talk to (see explain)");
    }
    return static_cast<uint32_t>(requests.size());
  }
  if (out.outstanding == 0) {
    if (!std::exchange(is_now_read_, true)) now_ = options_.clock->now_ns();
    out.busy_since_ns = out.waits_since_ns = now_;
    is_watching_ = true;
  }
  if (out.gone.empty()) return post_open(out, rail, requests);
  const auto is_vain = [&](const WorkRequest& request) { return gone_status(out, request) != Status::kDone; };
  auto next = requests.begin();
  while (next != requests.end()) {
    for (; next != requests.end() && is_vain(*next); ++next) {
      WorkRequest vain = *next;
      vain.reserved = 0;
      ++out.outstanding;
      retire_refused(out, vain, gone_status(out, vain), "");
    }
    const auto end = std::find_if(next, requests.end(), is_vain);
    if (next == end) break;
    const std::span<const WorkRequest> open(next, end);
    const uint32_t accepted = post_open(out, rail, open);
    next += accepted;
    if (accepted < open.size()) break;
  }
  return static_cast<uint32_t>(next - requests.begin());
}

// Posts requests that the peer is not known to refuse.
uint32_t RdmaTransport::post_open(RdmaLink& out, uint32_t rail, std::span<const WorkRequest> requests) {
  Session& session = *out.session;
  const bool is_service = requests.front().op == WorkOp::kService;
  const bool sends = is_service || requests.front().op == WorkOp::kSend;
  auto& queue = is_service ? out.services : sends ? out.sends : out.queue(rail);
  uint32_t taken = 0;
  if (!sends && queue.empty()) {
    std::vector<const Path*> refusing;
    while (taken < requests.size() && requests[taken].length_bytes <= work_bytes_max_) {  // longer ones are cut first
      Path* const path = best_path(session, rail, requests[taken], refusing);
      if (path == nullptr) break;
      const uint32_t accepted = post_some(*path, requests.subspan(taken), rail);
      taken += accepted;
      out.outstanding += accepted;
      if (accepted == 0) refusing.push_back(path);
    }
  }
  const size_t queued_max = is_service ? kServicesQueuedMax : sends ? kSendsQueuedMax : kQueuedMax;
  const uint64_t bytes_max = sends ? ~uint64_t{0} : out.pair_count * kQueuedBytesMax;
  const auto is_let_in = [&](const WorkRequest& request) {
    return queue.size() < queued_max && (queue.long_bytes() < bytes_max || request.length_bytes <= kShortBytesMax);
  };
  const uint32_t posted = taken;
  for (; taken < requests.size() && is_let_in(requests[taken]); ++taken) {
    queue.push_back(requests[taken]).reserved = routing_of(rail);
  }
  out.queued += taken - posted;
  out.outstanding += taken - posted;
  if (taken > posted) mark_dirty(session);
  if (sends && !session.is_blocked) pump_messages(session);
  return taken;
}

// True: nothing is left that waits for room in a NIC.
bool RdmaTransport::pump_works(Session& session) {
  if (!session.link || session.link->queued == 0) return true;
  bool all = pump_queue(session, kAnyRail);
  for (uint32_t rail = 0; rail < rails_.size(); ++rail) all = pump_queue(session, rail) && all;
  return all;
}

// Whether it waits for a path to be made while others are open, because those do not know its region.
bool RdmaTransport::is_cut_off(const Session& session, uint32_t rail, const WorkRequest& request) const {
  if (rail != kAnyRail) return false;
  bool is_any_usable = false;
  for (const auto& path : session.paths) {
    if (!is_usable(*path)) continue;
    if (is_known_by(*path, request)) return false;
    is_any_usable = true;
  }
  return is_any_usable;
}

bool RdmaTransport::pump_queue(Session& session, uint32_t rail) {
  RdmaLink& link = *session.link;
  auto& queue = link.queue(rail);
  std::vector<WorkRequest> passed;  // cut off: they stay ahead of all others
  std::vector<const Path*> refusing;
  while (!queue.empty()) {
    if (queue.front().length_bytes > work_bytes_max_) {
      --link.queued;
      cut(link, queue.pop_front());
      continue;
    }
    Path* const path = best_path(session, rail, queue.front(), refusing);
    if (path == nullptr) {
      // Whatever makes room again, or opens a path, marks us dirty.
      if (passed.size() >= kPassedMax || !is_cut_off(session, rail, queue.front())) break;
      passed.push_back(queue.pop_front());
      continue;
    }
    const uint32_t accepted = post_some(*path, queue.first_run(kBatch), kRequeued);
    queue.drop_front(accepted);
    link.queued -= accepted;
    if (accepted == 0) refusing.push_back(path);
  }
  const bool is_refused = !queue.empty() && !refusing.empty();
  for (auto work = passed.rbegin(); work != passed.rend(); ++work) queue.push_front(*work);
  return !is_refused;
}

// What is with a NIC keeps the registration it was posted with; everything else switches to the new one.
bool RdmaTransport::move_source(const LocalRegion& from, LocalRegion& to) {
  bool is_free = true;
  const auto move = [&](WorkRequest& request) {
    if (request.local_region == &from) request.local_region = &to;
  };
  for (auto& [key, session] : sessions_) {
    for (auto& path : session->paths) {
      for (size_t i = 0; i < path->works.size(); ++i) {
        const WorkRequest& work = path->works[i];
        is_free = is_free && (work.local_region != &from || fault_of(work) == WorkFault::kEnded);
      }
      for (WorkRequest& work : path->doubt) move(work);
      for (WorkRequest& work : path->suspects) move(work);
    }
    if (!session->link) continue;
    for (auto& queue : session->link->queues) {
      for (size_t i = 0; i < queue.size(); ++i) move(queue[i]);
    }
    for (auto& whole : session->link->wholes) move(whole->request);
  }
  return is_free;
}

// --- requests longer than a NIC's longest work ---

void RdmaTransport::cut(RdmaLink& link, WorkRequest request) {
  const uint64_t part_bytes = work_bytes_max_;
  auto& whole = *link.wholes.emplace_back(std::make_unique<Whole>());
  whole.request = request;
  auto& queue = link.queue(rail_of(request));
  std::vector<WorkRequest> parts;
  while (request.length_bytes - whole.begun_bytes > part_bytes) {
    WorkRequest& part = parts.emplace_back(request);
    part.has_imm = false;
    part.local += whole.begun_bytes;
    part.remote_offset += whole.begun_bytes;
    part.length_bytes = part_bytes;
    part.context = &whole;
    part.reserved |= kPartBit;
    whole.begun_bytes += part_bytes;
  }
  whole.parts_open = static_cast<uint32_t>(parts.size());
  for (auto part = parts.rbegin(); part != parts.rend(); ++part) queue.push_front(*part);
  link.queued += parts.size();
}

void RdmaTransport::end_part(RdmaLink& link, const WorkRequest& part, Status status, const std::string& detail) {
  auto& whole = *static_cast<Whole*>(part.context);
  if (status != Status::kDone && whole.status == Status::kDone) {
    whole.status = status;
    whole.detail = detail;
  }
  if (--whole.parts_open > 0) return;
  WorkRequest rest = whole.request;
  const uint64_t total_bytes = rest.length_bytes;
  const Status ended = whole.status;
  const std::string why = whole.detail;
  const bool is_withdrawn = whole.is_withdrawn;
  rest.local += whole.begun_bytes;
  rest.remote_offset += whole.begun_bytes;
  rest.length_bytes -= whole.begun_bytes;
  std::erase_if(link.wholes, [&](const auto& owned) { return owned.get() == &whole; });
  if (ended != Status::kDone) {
    retire(link, rest, ended, why);
  } else if (is_withdrawn) {
    end_outstanding(link, 1);
    sink_->on_withdrawn(link, rest.context, rest.tag, total_bytes);
  } else {
    link.queue(rail_of(rest)).push_front(rest);
    ++link.queued;
    mark_dirty(*link.session);
  }
}

// --- what is done ---

// Consecutive works of one transfer and tag are reported in one call.
void RdmaTransport::end_works(Path& path, uint64_t through_cookie) {
  CROSSRAIL_ASSERT(through_cookie - path.first_cookie < path.works.size());
  RdmaLink& link = *path.session->link;
  void* context = nullptr;
  uint32_t tag = 0;
  uint32_t count = 0;
  uint64_t bytes = 0;
  const auto tell = [&] {
    if (count == 0) return;
    end_outstanding(link, count);
    path.bytes_done += bytes;
    sink_->on_over(link, path.rail, context, count, bytes);
    sink_->on_retired(link, context, tag, std::exchange(count, 0), std::exchange(bytes, 0), Status::kDone, kNoDetail);
  };
  while (!path.works.empty() && path.first_cookie <= through_cookie) {
    const WorkRequest& work = path.works.front();
    if (fault_of(work) == WorkFault::kNone) {
      path.outstanding_bytes -= work.length_bytes;
      path.imms_done += work.has_imm ? 1 : 0;
      if (is_part(work)) {
        tell();
        path.bytes_done += work.length_bytes;
        sink_->on_over(link, path.rail, context_of(work), 1, work.length_bytes);
        end_part(link, work, Status::kDone, kNoDetail);
      } else {
        if (work.context != context || work.tag != tag) tell();
        context = work.context;
        tag = work.tag;
        ++count;
        bytes += work.length_bytes;
      }
    } else {
      CROSSRAIL_ASSERT(fault_of(work) == WorkFault::kEnded);
    }
    path.works.drop_front(1);
    ++path.first_cookie;
  }
  tell();
}

void RdmaTransport::end_work(Path& path, uint64_t cookie) {
  CROSSRAIL_ASSERT(cookie - path.first_cookie < path.works.size());
  WorkRequest& work = path.works[cookie - path.first_cookie];
  if (is_mutated(Mutation::kCompleteBeforeFlush) && fault_of(work) == WorkFault::kEnded) return;
  CROSSRAIL_ASSERT(fault_of(work) == WorkFault::kNone);
  const WorkRequest done = work;
  set_fault(work, WorkFault::kEnded);
  path.outstanding_bytes -= done.length_bytes;
  path.imms_done += done.has_imm ? 1 : 0;
  path.bytes_done += done.length_bytes;
  pop_ended(path);
  sink_->on_over(*path.session->link, path.rail, context_of(done), 1, done.length_bytes);
  retire(*path.session->link, done, Status::kDone, kNoDetail);
}

void RdmaTransport::pop_ended(Path& path) {
  while (!path.works.empty() && fault_of(path.works.front()) == WorkFault::kEnded) {
    path.works.drop_front(1);
    ++path.first_cookie;
  }
}

// --- what goes back ---

// In their order, before all others.
void RdmaTransport::requeue(RdmaLink& link, const std::vector<WorkRequest>& works) {
  for (auto work = works.rbegin(); work != works.rend(); ++work) link.queue(rail_of(*work)).push_front(*work);
  link.queued += works.size();
  mark_dirty(*link.session);
}

void RdmaTransport::withdraw(bool (*wanted)(void* context)) {
  for (auto& [key, session] : sessions_) {
    if (!session->link) continue;
    RdmaLink& link = *session->link;
    std::vector<WorkRequest> withdrawn;
    const auto take_from = [&](WorkQueue& queue) {
      if (queue.empty()) return;
      queue.filter([&](const WorkRequest& request) {
        if (is_part(request) || !wanted(request.context)) return true;
        withdrawn.push_back(request);
        return false;
      });
    };
    for (auto& queue : link.queues) take_from(queue);
    link.queued -= withdrawn.size();
    const size_t from_queues = withdrawn.size();
    take_from(link.sends);
    link.queued -= withdrawn.size() - from_queues;
    for (size_t i = 0; i < link.messages.size(); ++i) {
      SentMessage& message = link.messages[i];
      if (message.is_over || message.is_recalled || !wanted(message.request.context)) continue;
      message.is_recalled = link.has_recalls = true;
      mark_dirty(*session);
    }
    for (auto& whole : link.wholes) whole->is_withdrawn = whole->is_withdrawn || wanted(whole->request.context);
    for (const WorkRequest& request : withdrawn) {
      end_outstanding(link, 1);
      sink_->on_withdrawn(link, request.context, request.tag, request.length_bytes);
    }
  }
}

}  // namespace crossrail::rdma
