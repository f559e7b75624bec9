#include "transport/rdma/rdma_transport.h"

#include <sys/epoll.h>

#include <algorithm>
#include <cstring>

#include "transport/wire_imm.h"
#include "util/errors.h"
#include "util/mutation.h"

namespace crossrail::rdma {

namespace {

constexpr uint32_t kPollsPerClock = 16;  // a power of two
constexpr size_t kDatagramsMax = 1024;   // waiting to be handled: more in one poll are lost, as datagrams may be
constexpr uint64_t kSliceBytes = uint64_t{1} << 20;
constexpr uint64_t kPieceBytesMin = 64 << 10;
constexpr int64_t kTellGarbageEveryNs = 1'000'000'000;
constexpr int64_t kByeNs = 200'000'000;      // for our last words to be sent
constexpr int64_t kQuietNs = 1'000'000'000;  // for NICs to let go of regions, once no path is left

// Makes whatever arrives at a NIC wake the sleeper.
void listen_to(const Nic& nic, const Doorbell& doorbell) {
  for (const int fd : nic.fds()) {
    epoll_event event{};
    event.events = EPOLLIN;
    if (epoll_ctl(doorbell.set(), EPOLL_CTL_ADD, fd, &event) != 0)
      throw_errno("epoll_ctl", "cannot watch a descriptor");
  }
}

}  // namespace

RdmaTransport::RdmaTransport(TransportKind kind, const TransportOptions& options,
                             std::vector<std::unique_ptr<Nic>> nics, Sink* sink)
    : sink_(sink), kind_(kind), options_(options), address_(options.identity) {
  if (options.place.simulation == nullptr) {
    doorbell_.emplace();
    for (const auto& nic : nics) listen_to(*nic, *doorbell_);
    clock_mask_ = kPollsPerClock - 1;
  }
  CROSSRAIL_ASSERT(!nics.empty() && nics.size() <= kRailsMax);
  RdmaRails& own = address_.rdma_on(kind);
  own.fabric = nics.front()->fabric();
  work_bytes_max_ = ~uint64_t{0};
  std::string no_gpu_memory;
  for (auto& nic : nics) {
    const auto endpoint = nic->endpoint();
    own.endpoints.push_back({Bytes(endpoint.begin(), endpoint.end()), nic->speed_mbps()});
    work_bytes_max_ = std::min(work_bytes_max_, nic->limits().work_bytes_max);
    fastest_mbps_ = std::max(fastest_mbps_, nic->speed_mbps());
    if (no_gpu_memory.empty() && !nic->limits().takes_gpu_memory) no_gpu_memory = nic->no_gpu_memory();
    const auto index = static_cast<uint32_t>(rails_.size());
    rails_.push_back(std::make_unique<Rail>(this, index, std::move(nic)));
    rails_.back()->is_up = rails_.back()->nic->is_port_up();
  }
  traits_ = {.rail_count = static_cast<uint32_t>(rails_.size()),
             .slice_bytes_max = std::min(kSliceBytes, work_bytes_max_),
             .message_bytes_max = options.message_bytes_max,
             .fifo_rails = false,  // a work may take any path, and another one when retried
             .balances_rails = true,
             .moves_while_posting = false,
             .piece_bytes_min = kPieceBytesMin,
             .moves_gpu_memory =
                 std::ranges::all_of(rails_, [](const auto& rail) { return rail->nic->limits().takes_gpu_memory; }),
             .no_gpu_memory = no_gpu_memory};
  now_ = ticked_ns_ = options_.clock->now_ns();
}

RdmaTransport::~RdmaTransport() { close(); }

std::vector<std::string> RdmaTransport::rail_devices() const {
  std::vector<std::string> devices;
  for (const auto& rail : rails_) devices.push_back(rail->nic->device());
  return devices;
}

void RdmaTransport::complete_address(const Address& address) {
  address_ = address;
  introduction_ = address.encode();
}

// Sends last words first, then takes everything from the NICs.
void RdmaTransport::close() {
  if (closed_) return;
  closed_ = true;
  now_ = options_.clock->now_ns();
  for (auto& [key, session] : sessions_) say_bye(*session, "the engine was closed");
  const auto is_said = [&] {
    return std::ranges::all_of(sessions_, [](const auto& item) {
      return std::ranges::all_of(item.second->paths, [](const auto& path) {
        return path->state != PathState::kOpen || path->is_broken || path->nic_path->is_sent();
      });
    });
  };
  const int64_t patience = now_ + kByeNs;
  while (!is_said() && options_.clock->now_ns() < patience) {
    poll_nics();
    options_.clock->pass();
  }
  std::vector<Path*> paths;
  for (auto& [key, session] : sessions_) {
    session->is_over = true;
    for (auto& path : session->paths) {
      path->trouble = "the engine was closed";
      start_break(*path);
      paths.push_back(path.get());
    }
  }
  drain(paths);
  for (auto& [key, session] : sessions_) {
    if (session->link) flush_link(*session->link, Status::kEngineClosed, "the engine was closed");
  }
  dirty_.clear();
  blocked_.clear();
  holding_.clear();
  urgent_.clear();
  broken_.clear();
  flushed_.clear();
  sessions_.clear();
  // Regions outlive us, and nobody drives the NICs any more: later questions whether one is quiet get this answer.
  const int64_t give_up = options_.clock->now_ns() + kQuietNs;
  while (!regions_.revoke_all() && options_.clock->now_ns() < give_up) {
    poll_nics();
    options_.clock->pass();
  }
  if (doorbell_) doorbell_->unwatch();
  for (auto& rail : rails_) rail->nic->close();
}

void RdmaTransport::abandon_after_fork() {
  if (doorbell_) doorbell_->abandon_after_fork();
  for (auto& rail : rails_) rail->nic->abandon_after_fork();
}

// --- peers ---

Link* RdmaTransport::connect(const std::shared_ptr<const Address>& address) {
  now_ = options_.clock->now_ns();
  const Incarnation& own = options_.identity.incarnation;
  const bool leads = own <= address->incarnation;
  Session* session = find_session(address->incarnation, leads);
  // If we have said that we leave, the peer may have dropped the session, and what is posted into it would be lost.
  if (session != nullptr && (session->is_over || session->has_left || !has_rails_of(*session, *address))) {
    end_session(*session, "a new session begins");
    session = nullptr;
  }
  if (session == nullptr) session = &make_session(address->incarnation, leads);
  get_to_know(*session, address);
  session->link = std::make_unique<RdmaLink>(session, address, static_cast<uint32_t>(rails_.size()));
  RdmaLink& link = *session->link;
  link.connect_by_ns = now_ + options_.connect_timeout_ns;
  link.down_since_ns = now_;
  link.unsent_id = session->next_message_id;
  pair_paths(*session, *address);
  link.pair_count = std::max<uint32_t>(1, static_cast<uint32_t>(session->paths.size()));
  for (auto& path : session->paths) {
    if (path->state == PathState::kOpen) path->state_due = true;
    if (path->state == PathState::kIdle) path->retry_at_ns = 0;
    tend_path(*path);
  }
  mark_dirty(*session);
  tend_soon(*session);
  return &link;
}

void RdmaTransport::disconnect(Link& link) {
  auto& out = static_cast<RdmaLink&>(link);
  Session& session = *out.session;
  now_ = options_.clock->now_ns();
  std::vector<Path*> used;
  for (auto& path : session.paths) {
    const bool dooming = path->state == PathState::kBreaking;
    if (path->works.empty() && !dooming) continue;
    path->trouble = "the peer was forgotten on request";
    start_break(*path);
    used.push_back(path.get());
  }
  drain(used);
  flush_link(out, Status::kPeerLost, "forgotten on request");
  session.link.reset();
  for (auto& path : session.paths) {
    if (path->state == PathState::kOpen) path->state_due = true;
  }
  mark_dirty(session);
  tend_soon(session);
}

// The engine identifies owners by their incarnation: a forged descriptor may name fewer rails than the owner has. Each
// rail gets a key, if need be one that the peer's NIC refuses.
std::unique_ptr<RemoteKey> RdmaTransport::resolve(Link& link, const RegionDescriptor& descriptor) {
  RdmaKeys keys = descriptor.rdma_on(kind_);
  keys.keys.resize(static_cast<RdmaLink&>(link).address->rdma_on(kind_).endpoints.size());
  return std::make_unique<RdmaKey>(descriptor.region_id, descriptor.length_bytes, std::move(keys));
}

std::string RdmaTransport::pair_text(const Path& path) const {
  return "rail " + std::to_string(path.rail) + " (" + rails_[path.rail]->nic->name() + ") to rail " +
         std::to_string(path.peer_rail);
}

std::vector<PathReport> RdmaTransport::explain(Link& link) {
  auto& out = static_cast<RdmaLink&>(link);
  std::vector<PathReport> reports;
  for (const auto& path : out.session->paths) {
    PathReport report;
    report.what = "rail " + std::to_string(path->rail) + " to rail " + std::to_string(path->peer_rail);
    report.path = transport_name(kind_);
    report.reason = rails_[path->rail]->nic->description();
    if (!rails_[path->rail]->is_up) {
      report.reason += ", down: " + rails_[path->rail]->trouble;
    } else if (path->state == PathState::kOpen) {
      report.reason += ", connected";
    } else {
      report.reason += path->why_down().empty() ? ", connecting" : ", down: " + path->why_down();
    }
    if (!rails_[path->rail]->is_up || (path->state != PathState::kOpen && !path->why_down().empty())) {
      report.down_rail = path->rail;
    }
    if (path->epochs_opened > 1) report.reason += ", remade " + std::to_string(path->epochs_opened - 1) + " times";
    report.bytes = path->bytes_done;
    report.gb_per_s = rate_gb_per_s(report.bytes, out.busy_ns);
    reports.push_back(std::move(report));
  }
  return reports;
}

std::vector<RailReport> RdmaTransport::explain_rails(Link& link) {
  std::vector<RailReport> reports;
  for (const auto& path : static_cast<RdmaLink&>(link).session->paths) reports.push_back({path->rail, path->peer_rail});
  return reports;
}

uint64_t RdmaTransport::rail_depth(Link& link, uint32_t rail) {
  uint64_t depth = 0;
  for (const auto& path : static_cast<RdmaLink&>(link).session->paths) {
    if (path->rail == rail) depth += path->works.size();
  }
  return depth;
}

// --- what NICs tell: notes only ---

void RdmaTransport::Rail::on_work_done(NicPath& nic_path, uint64_t cookie, bool through) {
  Path* const path = path_of(nic_path);
  if (path == nullptr) return;
  path->worked_ns = transport->now_;
  if (through) {
    transport->end_works(*path, cookie);
  } else {
    transport->end_work(*path, cookie);
  }
  transport->mark_dirty(*path->session);
}

void RdmaTransport::Rail::on_work_failed(NicPath& nic_path, uint64_t cookie, NicFault fault, int code,
                                         const std::string& text) {
  Path* const path = path_of(nic_path);
  if (path == nullptr) return;
  CROSSRAIL_ASSERT(cookie >= path->first_cookie && cookie - path->first_cookie < path->works.size());
  WorkRequest& work = path->works[cookie - path->first_cookie];
  if (is_mutated(Mutation::kCompleteBeforeFlush) && fault_of(work) == WorkFault::kEnded) return;
  CROSSRAIL_ASSERT(fault_of(work) == WorkFault::kNone);
  const std::string said = text + " (" + std::to_string(code) + ")";
  if (fault != NicFault::kFlushed && path->fault_text.empty()) path->fault_text = said;
  const bool is_refused = fault == NicFault::kRemoteAccess || fault == NicFault::kLocal;
  set_fault(work, fault == NicFault::kRemoteAccess ? WorkFault::kRemoteAccess
                  : fault == NicFault::kLocal      ? WorkFault::kLocal
                                                   : WorkFault::kInDoubt);
  if (is_refused && !nic->limits().ordered_paths) {
    if (path->suspects.empty()) {
      path->doubt_since_ns = transport->now_;
      path->ask_at_ns = path->ask_pause_ns = 0;
    }
    path->suspects.push_back(work);  // the path lives on
    path->outstanding_bytes -= work.length_bytes;
    set_fault(work, WorkFault::kEnded);
    transport->pop_ended(*path);
    transport->tend_soon(*path->session);
    transport->mark_dirty(*path->session);  // its window has room
    return;
  }
  const bool by_peer = fault == NicFault::kFlushed && nic->limits().ordered_paths;
  transport->mark_broken(*path, by_peer ? Cause::kPeersEnd : Cause::kHere, said);
}

void RdmaTransport::Rail::on_imm(NicPath* nic_path, uint32_t imm) {
  Path* const path = nic_path == nullptr ? nullptr : path_of(*nic_path);
  if (path != nullptr) {
    ++path->seen;
    path->heard_ns = transport->now_;
    if (path->state == PathState::kAccepted) transport->open_path(*path);
  }
  if (is_mutated_now(Mutation::kDropImmediate, 8)) return;
  transport->sink_->on_imm(imm_of_wire(imm), units_of_wire(imm));
}

void RdmaTransport::Rail::on_fragment(NicPath* nic_path, std::span<const uint8_t> bytes) {
  if (bytes.size() < kFragmentHeadBytes || bytes.size() > kFragmentBytesMax) {
    transport->report_garbage(nic->name(), "a fragment of " + std::to_string(bytes.size()) + " bytes");
    return;
  }
  uint64_t token;
  std::memcpy(&token, bytes.data(), sizeof token);
  Path* const path = transport->path_of_fragment(*this, nic_path, token);
  if (path == nullptr) return;
  path->heard_ns = transport->now_;
  if (path->state == PathState::kAccepted) transport->open_path(*path);
  const uint8_t kind = bytes[8];
  if (kind < static_cast<uint8_t>(FragmentKind::kState) || kind > kFragmentKindMax) {
    transport->mark_broken(*path, Cause::kProtocol, "a fragment of kind " + std::to_string(kind));
    return;
  }
  transport->on_fragment(*path, static_cast<FragmentKind>(kind), bytes.subspan(kFragmentHeadBytes));
}

void RdmaTransport::Rail::on_datagram(std::span<const uint8_t> bytes) {
  if (transport->datagrams_.size() >= kDatagramsMax) return;
  transport->datagrams_.push_back({index, Bytes(bytes.begin(), bytes.end())});
}

void RdmaTransport::Rail::on_nobody(std::span<const uint8_t> peer_endpoint) {
  transport->deserted_.emplace_back(peer_endpoint.begin(), peer_endpoint.end());
}

void RdmaTransport::Rail::on_path_broken(NicPath& nic_path, bool by_peer, const std::string& reason) {
  if (Path* const path = path_of(nic_path))
    transport->mark_broken(*path, by_peer ? Cause::kPeersEnd : Cause::kHere, reason);
}

void RdmaTransport::Rail::on_path_flushed(NicPath& nic_path) {
  Path* const path = path_of(nic_path);
  if (path == nullptr || std::exchange(path->is_flushed, true)) return;
  transport->flushed_.push_back(path);
}

void RdmaTransport::Rail::on_port(bool up, const std::string& detail) {
  is_up = up && !is_dead.load(std::memory_order_relaxed);
  if (!is_up && down_since_ns == 0) down_since_ns = transport->now_;
  trouble = detail;
  transport->ports_changed_.push_back(index);
}

void RdmaTransport::Rail::on_device_fatal(const std::string& reason) {
  is_up = false;
  trouble = reason;
  // release: pairs with register_on: the holder must not give this rail works with the region registered there.
  is_dead.store(true, std::memory_order_release);
  transport->ports_changed_.push_back(index);
}

// --- running ---

uint32_t RdmaTransport::poll_nics() {
  uint32_t moved = 0;
  for (auto& rail : rails_) moved += rail->nic->poll(*rail);
  return moved;
}

uint32_t RdmaTransport::poll() {
  if (closed_) return 0;
  is_now_read_ = false;
  if ((++polls_ & clock_mask_) == 0) now_ = options_.clock->now_ns();
  uint32_t moved = poll_nics();
  if (moved > 0) unblock();
  for (size_t i = 0; i < holding_.size(); ++i) mark_dirty(*holding_[i]);
  act();
  if (!urgent_.empty()) now_ = options_.clock->now_ns();  // if much time has passed, that is accounted for first
  if (now_ >= next_tick_ns_) {
    tick();
  } else if (!urgent_.empty()) {
    tend_urgent();
  }
  return moved;
}

// Retries sessions that a NIC had no room for.
void RdmaTransport::unblock() {
  for (Session* session : blocked_) {
    session->is_blocked = false;
    mark_dirty(*session);
  }
  blocked_.clear();
}

// Acts on the notes taken.
void RdmaTransport::act() {
  while (!datagrams_.empty()) {
    const Arrived arrived = std::move(datagrams_.front());
    datagrams_.pop_front();
    on_datagram(*rails_[arrived.rail], arrived.bytes);
  }
  if (!deserted_.empty()) {
    for (const Bytes& endpoint : std::exchange(deserted_, {})) on_nobody(endpoint);
  }
  if (!said_.empty()) {
    for (const Said& said : std::exchange(said_, {})) on_said(said);
  }
  if (!ports_changed_.empty()) {
    for (const uint32_t index : std::exchange(ports_changed_, {})) on_port(*rails_[index]);
  }
  if (!broken_.empty()) {
    for (Path* path : std::exchange(broken_, {})) start_break(*path);
  }
  if (!flushed_.empty()) {
    for (Path* path : std::exchange(flushed_, {})) finish_break(*path);
  }
  // Sessions that become dirty meanwhile have their turn in the next round.
  const size_t count = dirty_.size();
  for (size_t i = 0; i < count; ++i) {
    Session& session = *dirty_[i];
    session.is_dirty = false;
    if (session.is_over) continue;
    offer_held(session);
    const bool all_sent = pump_control(session);
    const bool all_messages = pump_messages(session);
    const bool all_posted = pump_works(session);
    if (all_sent && all_messages && all_posted) continue;
    if (!std::exchange(session.is_blocked, true)) blocked_.push_back(&session);
  }
  dirty_.erase(dirty_.begin(), dirty_.begin() + static_cast<std::ptrdiff_t>(count));
  if (!any_over_) return;
  any_over_ = false;
  for (auto item = sessions_.begin(); item != sessions_.end();) {
    Session& session = *item->second;
    const bool gone = session.is_over && finish_doom(session);
    any_over_ = any_over_ || (session.is_over && !gone);
    item = gone ? sessions_.erase(item) : std::next(item);
  }
}

void RdmaTransport::mark_dirty(Session& session) {
  if (std::exchange(session.is_dirty, true)) return;
  dirty_.push_back(&session);
}

void RdmaTransport::mark_broken(Path& path, Cause cause, const std::string& reason) {
  if (path.state == PathState::kIdle || path.state == PathState::kBreaking || path.is_broken) return;
  path.is_broken = true;
  path.cause = cause;
  path.trouble = cause == Cause::kProtocol ? "protocol error: " + reason : reason;
  broken_.push_back(&path);
  if (cause == Cause::kProtocol) sink_->on_protocol_error(path.session->peer_name, path.trouble);
}

void RdmaTransport::report_garbage(const std::string& who, const std::string& what) {
  ++garbage_;
  if (now_ - garbage_told_ns_ < kTellGarbageEveryNs && garbage_told_ns_ != 0) return;
  garbage_told_ns_ = now_;
  sink_->on_protocol_error(who, what + " (" + std::to_string(garbage_) + " such in all)");
}

void RdmaTransport::end_outstanding(RdmaLink& link, uint64_t count) {
  link.outstanding -= count;
  if (link.outstanding == 0) link.busy_ns += std::max<int64_t>(0, now_ - link.busy_since_ns);
}

void RdmaTransport::retire(RdmaLink& link, const WorkRequest& request, Status status, const std::string& detail) {
  if (is_part(request)) {
    end_part(link, request, status, detail);
    return;
  }
  end_outstanding(link, 1);
  const uint64_t bytes = status == Status::kDone ? request.length_bytes : 0;
  sink_->on_retired(link, request.context, request.tag, 1, bytes, status, detail);
}

// --- sleeping ---

void RdmaTransport::arm() {
  // seq_cst fence: pairs with the one in wake(): either it sees us armed and rings, or whoever looks once more sees its
  // news.
  armed_.store(true, std::memory_order_relaxed);
  std::atomic_thread_fence(std::memory_order_seq_cst);
  polls_ = clock_mask_;  // read the clock first after a sleep
  if (closed_) return;
  now_ = options_.clock->now_ns();
  doorbell_->watch();
  for (auto& rail : rails_) rail->nic->arm();
}

void RdmaTransport::disarm() {
  is_now_read_ = false;
  if (!armed_.load(std::memory_order_relaxed)) return;
  armed_.store(false, std::memory_order_relaxed);
  doorbell_->unwatch();
}

bool RdmaTransport::has_arrivals() {
  if (closed_) return false;
  if (!dirty_.empty() || !datagrams_.empty() || !deserted_.empty() || !said_.empty() || !broken_.empty() ||
      !flushed_.empty() || !ports_changed_.empty() || any_over_)
    return true;
  return std::ranges::any_of(rails_, [](const auto& rail) { return rail->nic->has_arrivals(); });
}

bool RdmaTransport::hush(bool /*looks_at_once*/) {
  doorbell_->silence();
  doorbell_->unwatch();
  for (auto& rail : rails_) rail->nic->hush();
  // release: pairs with is_armed() of a thread that is about to leave: it sees that another thread has these news.
  armed_.store(false, std::memory_order_release);
  return true;
}

void RdmaTransport::wake() {
  // seq_cst fence: the caller's news is visible before we check whether anyone is awake to see it; pairs with arm().
  std::atomic_thread_fence(std::memory_order_seq_cst);
  if (armed_.load(std::memory_order_relaxed) && armed_.exchange(false, std::memory_order_acq_rel)) doorbell_->ring();
}

}  // namespace crossrail::rdma
