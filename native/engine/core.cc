#include "engine/core.h"

#include <pthread.h>
#include <sched.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>

#include "engine/dump_triggers.h"
#include "engine/path_speed.h"
#include "engine/sharding.h"
#include "engine/watchdog.h"
#include "util/errors.h"
#include "util/mutation.h"

namespace crossrail {

LiveEngines& live_engines() {
  static auto* instance = new LiveEngines;
  return *instance;
}

namespace {

// How often this process is the child of a fork. A plain global: looked at by every submit.
constinit std::atomic<uint64_t> fork_generation{0};

// The mutex is held over fork, so that the child finds the set whole.
void before_fork() { live_engines().mutex.lock(); }
void after_fork_in_parent() { live_engines().mutex.unlock(); }
void after_fork_in_child() {
  LiveEngines& live = live_engines();
  fork_generation.fetch_add(1, std::memory_order_relaxed);
  for (EngineCore* core : live.cores) core->abandon_after_fork();
  live.cores.clear();
  live.mutex.unlock();
}

// Rails as both sides would pair them; the transport knows better once it is connected.
std::vector<RailReport> expected_rails(const Route& route, const Address& own, const Address& peer) {
  std::vector<RailReport> rails;
  const uint32_t count = own.rail_count_on(route.kind);
  for (uint32_t rail = 0; rail < count; ++rail)
    rails.push_back({rail, peer_rail(rail, count, peer.rail_count_on(route.kind))});
  return rails;
}

void add_rails(PeerExplanation& explanation, std::span<const RailReport> rails, TransportKind kind, const Address& own,
               const Address& peer) {
  for (const RailReport& rail : rails) {
    RailExplanation& shown = explanation.rails.emplace_back();
    shown.rail = rail.rail;
    shown.peer_rail = rail.peer_rail;
    if (kind == TransportKind::kTcp && rail.rail < own.endpoints.size() && rail.peer_rail < peer.endpoints.size()) {
      shown.endpoint = to_text(own.endpoints[rail.rail]);
      shown.peer_endpoint = to_text(peer.endpoints[rail.peer_rail]);
    }
  }
  explanation.gb_per_s_expected = expected_gb_per_s(rails, kind, own, peer);
}

}  // namespace

EngineCore::EngineCore(Engine* engine, const EngineOptions& options)
    : engine_(engine),
      options_(options),
      recorder_(options.recorder_entries, options.stage.get(), is_staged() ? 0 : FlightRecorder::kBurstNs),
      transfers_(engine, this),
      submits_(options.submit_queue_depth),
      imms_(options.imm_counters_max),
      watchers_(std::make_shared<WatcherThread>(options.watcher_poll_ns, options.stage == nullptr)),
      heartbeats_(this, options.heartbeat_ns),
      seat_(this, options),
      transports_(options, {options.stage.get(), options.stage_host, seat_.number}, this),
      live_(this) {
  std::vector<FlightRecorder::Rails> rails;
  for (uint32_t i = 0; i < transports_.size(); ++i)
    rails.push_back({transport_name(transports_.kind_at(i)), transports_.at(i).traits().rail_count});
  recorder_.set_rails(rails);
  dump_on_failed_assert();
  for (const Absent& absent : transports_.absent()) {
    if (!absent.is_fault) continue;
    add_event(
        {EngineEvent::Kind::kTransportAbsent, "",
         std::string(transport_name(absent.kind)) + " is not used, though there is a device for it: " + absent.reason});
  }
  if (options_.watchdog_ns > 0) {
    watchdog_ = std::make_unique<Watchdog>(this, options_.watchdog_ns);
    if (!is_staged()) watchdog_->start();
  }
  if (is_staged()) {
    options_.stage->wake(seat_.number);
    return;
  }
  // Last: nothing that may fail comes after it.
  if (options_.polling != Polling::kManual) worker_ = std::thread([this] { worker_main(); });
}

EngineCore::~EngineCore() = default;

EngineCore::Live::Live(EngineCore* engine) : core(engine) {
  static const int hooked = pthread_atfork(before_fork, after_fork_in_parent, after_fork_in_child);
  (void)hooked;
  LiveEngines& live = live_engines();
  std::lock_guard lock(live.mutex);
  live.cores.insert(core);
  generation = fork_generation.load(std::memory_order_relaxed);
}

EngineCore::Live::~Live() {
  LiveEngines& live = live_engines();
  std::lock_guard lock(live.mutex);
  live.cores.erase(core);
}

bool EngineCore::forked() const { return fork_generation.load(std::memory_order_relaxed) != live_.generation; }

void EngineCore::check_usable() const {
  if (forked()) {
    throw EngineClosedError("engine '" + options_.name + "' belongs to process " +
                            std::to_string(transports_.address().pid) + "; this is its forked child " +
                            std::to_string(getpid()) +
                            ". Open an engine here, or start children with the spawn method");
  }
  if (closed()) throw EngineClosedError("engine '" + options_.name + "' is closed");
}

// The threads are not in the child, and whatever lock they held stays locked: nothing here may be used any more.
void EngineCore::abandon_after_fork() {
  new std::thread(
      std::move(worker_));  // leaked: a thread that is not in this process can be neither joined nor detached
  watchers_->abandon_after_fork();
  if (watchdog_) watchdog_->abandon_after_fork();
  transports_.abandon_after_fork();
}

// --- driving ---

bool EngineCore::try_enter(uint8_t mark) {
  if (!progress_lock_.try_lock(mark)) return false;
  transports_.disarm();
  return true;
}

// Something that a round would move. May say yes too often, never no too often.
bool EngineCore::has_work() {
  return !submits_.empty() || runnable_ || cancel_scan_.load(std::memory_order_acquire) || verifications_.has_work() ||
         transports_.has_arrivals();
}

// Gives the progress lock up such that nothing is left lying: from arm() on, everybody with news rings the bell, and
// what came before is seen by has_work(). A ring that fell between arm() and unlock() may have woken a worker that
// found the lock taken and slept again: then the bell is no longer armed, and we ring once more.
void EngineCore::leave() {
  if (is_staged()) {
    progress_lock_.unlock();
    options_.stage->wake(seat_.number);
    return;
  }
  transports_.arm();
  const bool work = has_work();
  if (work) transports_.disarm();
  const Deadline timer = next_due();
  progress_lock_.unlock();
  if (!worker_.joinable()) return;
  // A worker that goes to sleep just now may miss both: then it looks again soon (worker_main).
  const bool unwatched = sleeps_for_good_.load(std::memory_order_seq_cst) && inflight() > 0;
  const bool oversleeps = timer < wakes_at_.load(std::memory_order_relaxed);
  if (work || unwatched || oversleeps || !transports_.is_armed()) transports_.wake_always();
}

uint32_t EngineCore::round() {
  constexpr uint32_t kIdleRounds = 32;  // take longer than entries of a burst are apart
  bump(counters_.rounds);
  if (cancel_scan_.load(std::memory_order_relaxed)) scan_cancels();
  uint32_t moved = take_submits();
  moved += post_backlogs();
  moved += transports_.poll();
  moved += serve();
  imms_.flush_arrivals();
  record_arrivals();
  if (moved > 0) {
    bump(moves_);
    idle_rounds_ = 0;
  } else if (++idle_rounds_ % kIdleRounds == 0) {
    recorder_.new_moment();
  }
  return moved;
}

void EngineCore::worker_main() {
  pthread_setname_np(pthread_self(), "crossrail-work");
  if (options_.worker_cpu >= 0) {
    cpu_set_t cpus;
    CPU_ZERO(&cpus);
    CPU_SET(static_cast<size_t>(options_.worker_cpu), &cpus);
    const int failure = pthread_setaffinity_np(pthread_self(), sizeof cpus, &cpus);
    if (failure != 0) {
      add_event({EngineEvent::Kind::kProtocolError, "",
                 "worker_cpu = " + std::to_string(options_.worker_cpu) + " cannot be used: the worker is not pinned"});
    }
  }
  constexpr int64_t kLookAgainNs = 50'000'000;
  constexpr uint32_t kQuietSleepsMax = 20;
  uint64_t moves_seen = 0;
  uint32_t quiet_sleeps = 0;  // in a row during which nothing moved
  while (!stopping_.load(std::memory_order_acquire)) {
    const bool wanted = guests_.load(std::memory_order_relaxed) != 0;
    if (wanted && !progress_lock_.is_locked()) {
      std::this_thread::yield();  // a guest is about to enter, or to go
      continue;
    }
    // When somebody else holds the lock, its leave() rings us if it leaves work behind: sleep.
    bool knows_timer = false;
    Deadline timer = kNoDeadline;
    if (!wanted && try_enter()) {
      drive_until_idle();
      transports_.arm();
      const bool work = has_work();
      if (work) transports_.disarm();
      timer = next_due();
      knows_timer = true;
      progress_lock_.unlock();
      if (work || !transports_.is_armed() || guests_.load(std::memory_order_relaxed) != 0) continue;
    }
    // close() sets the flag, then rings.
    if (stopping_.load(std::memory_order_acquire)) break;
    bump(counters_.sleeps);
    // While anybody drives, look again now and then, so that frozen peers are noticed; when nothing has happened for a
    // second, sleep for good. seq_cst: whoever leaves a transfer behind sees the flag, or we see the transfer.
    const uint64_t moves = moves_.load(std::memory_order_relaxed);
    quiet_sleeps = moves == moves_seen ? quiet_sleeps + 1 : 0;
    moves_seen = moves;
    const bool is_quiet = quiet_sleeps > kQuietSleepsMax && knows_timer;
    sleeps_for_good_.store(is_quiet, std::memory_order_seq_cst);
    const bool for_good = is_quiet && inflight() == 0;
    const Deadline until = std::min(timer, for_good ? kNoDeadline : now_ns() + kLookAgainNs);
    wakes_at_.store(until, std::memory_order_relaxed);
    transports_.sleep(until);
    wakes_at_.store(0, std::memory_order_relaxed);
    sleeps_for_good_.store(false, std::memory_order_relaxed);
  }
}

// The worker's turn: until nothing has moved for spin_ns, a guest asks, or the engine stops.
void EngineCore::drive_until_idle() {
  const bool spins = options_.polling == Polling::kSpin;
  int64_t idle_since = 0;
  while (!stopping_.load(std::memory_order_relaxed) && guests_.load(std::memory_order_relaxed) == 0) {
    if (round() > 0) {
      idle_since = 0;
      continue;
    }
    cpu_relax();
    if (spins) continue;
    const int64_t now = now_ns();
    if (idle_since == 0) idle_since = now;
    if (now - idle_since >= options_.spin_ns) return;
    // Whom we have just woken may need this very core.
    if (now - idle_since >= kYieldAfterNs) std::this_thread::yield();
  }
}

void EngineCore::run_as_holder(const std::function<void()>& work) {
  guests_.fetch_add(1, std::memory_order_relaxed);
  while (!try_enter()) std::this_thread::yield();
  guests_.fetch_sub(1, std::memory_order_relaxed);
  work();
  if (closed()) {
    progress_lock_.unlock();  // there is nobody to hand over to
  } else {
    leave();
  }
}

// On a stage who waits drives all engines of the world, ours among them; between steps callbacks of the user run here.
WaitResult EngineCore::wait_on_stage(const std::function<bool()>& ready, Deadline deadline,
                                     const InterruptCheck& interrupted) {
  constexpr int64_t kInterruptEveryNs = 50'000'000;
  constexpr uint32_t kStepsPerLook = 256;  // at the real clock
  constexpr auto kNap = std::chrono::microseconds(100);
  if (deadline <= 0) return ready() ? WaitResult::kReady : WaitResult::kTimeout;  // who only looks drives nobody
  Stage& stage = *options_.stage;
  const Stage::Wait wait(&stage);
  if (!closed()) stage.wake(seat_.number);  // words that somebody changed, and nobody told us
  int64_t next_interrupt = now_ns() + kInterruptEveryNs;
  for (uint32_t steps = 1;; ++steps) {
    if (stage.has_callbacks()) stage.run_callbacks();
    if (ready()) return WaitResult::kReady;
    if (closed() && drained_.load(std::memory_order_acquire)) return ready() ? WaitResult::kReady : WaitResult::kClosed;
    const Stage::Step step = closed() ? Stage::Step::kHeld : stage.advance(deadline);
    switch (step) {
      case Stage::Step::kMoved:
        break;
      case Stage::Step::kReached:
        return ready() ? WaitResult::kReady : WaitResult::kTimeout;
      case Stage::Step::kIdle:
        if (ready()) return WaitResult::kReady;
        throw SimulationIdleError(
            "the simulation is idle: nothing is left to happen that could end this wait of engine '" + options_.name +
            "', which has no deadline");
      case Stage::Step::kHeld:
        std::this_thread::sleep_for(kNap);
        break;
    }
    if (steps % kStepsPerLook != 0 && step != Stage::Step::kHeld) continue;
    const int64_t now = now_ns();
    if (now < next_interrupt) continue;
    next_interrupt = now + kInterruptEveryNs;
    if (interrupted && interrupted()) return WaitResult::kInterrupted;
  }
}

bool EngineCore::is_busy() const {
  if (inflight() > 0) return true;
  std::lock_guard lock(tables_mutex_);
  return std::ranges::any_of(peers_, [](const auto& item) { return item.second->state() == PeerState::kConnecting; });
}

uint64_t EngineCore::outcomes() const {
  uint64_t sum = finished_.load(std::memory_order_relaxed);
  for (const auto* counter : {&counters_.received, &counters_.imm_units, &counters_.connected, &counters_.lost}) {
    sum += counter->load(std::memory_order_relaxed);
  }
  return sum;
}

bool EngineCore::turn() {
  if (closed()) {
    stage_timer_ = kNoDeadline;
    return false;
  }
  if (!try_enter()) return true;  // a thread that connects, or forgets a peer
  watchers_->look();
  const bool moved = round() > 0;  // what was retired may make room for what round() looked at before
  const bool more = moved || has_work();
  stage_timer_ = std::min(next_due(), tend_watchdog());
  progress_lock_.unlock();
  return more;
}

// The watchdog's turn, where it has no thread. Once a stall was told, nothing more is to come of it: then time need not go
// on for its sake.
Deadline EngineCore::tend_watchdog() {
  if (!watchdog_) return kNoDeadline;
  const int64_t now = clock().now_ns();
  const uint64_t moves = moves_.load(std::memory_order_relaxed);
  if (moves != watched_moves_) {
    watched_moves_ = moves;
    watched_since_ = now;
  }
  if (now >= watch_at_) {
    watchdog_->look(now);
    watch_at_ = now + watchdog_->pause_ns();
  }
  return inflight() > 0 && now - watched_since_ <= 2 * options_.watchdog_ns ? watch_at_ : kNoDeadline;
}

bool EngineCore::progress() {
  if (is_staged()) {
    const Stage::Wait wait(options_.stage.get());
    options_.stage->wake(seat_.number);
    return options_.stage->advance(clock().now_ns()) == Stage::Step::kMoved;
  }
  if (!try_enter()) return false;
  const bool moved = round() > 0;
  if (!moved && worker_.joinable()) {
    leave();
  } else {
    progress_lock_.unlock();
  }
  return moved;
}

uint64_t EngineCore::inflight() const {
  // finished_ first: a transfer that starts and ends between the two loads must not make the difference negative.
  const uint64_t finished = finished_.load(std::memory_order_acquire);
  return submits_.pushed() + started_here_.load(std::memory_order_acquire) - finished;
}

uint64_t EngineCore::users_inflight() const {
  // Ended first, begun last: those that end meanwhile must not make a difference negative.
  const uint64_t ended = counters_.services_ended.load(std::memory_order_acquire);
  const uint64_t all = inflight();
  return all - std::min(all, counters_.services_begun.load(std::memory_order_acquire) - ended);
}

// Short work while nobody drives: posted here, as the progress holder, without the queue. As long as nobody else knows
// of the transfer, nothing about it needs an atomic.
void EngineCore::submit_here(Transfer* transfer) {
  TransferWork& work = *transfer->work_;
  take_submits();  // what came before us
  bump(started_here_);
  bump(moves_);
  work.at_once = true;
  start(transfer);     // knows whether the engine closed meanwhile
  if (work.at_once) {  // not complete yet: from here on others complete it
    work.at_once = false;
    recorder_.new_moment();  // what waits may be what hangs: its time is exact
    record_transfer(FlightState::kSubmitted, *transfer);
    if (work.local != nullptr) work.local->begin_op();
  }
  if (worker_.joinable()) {
    leave();
  } else {
    progress_lock_.unlock();
  }
}

void EngineCore::submit(Transfer* transfer) {
  int attempts = 0;
  while (!submits_.try_push(transfer)) {
    // Back-pressure: help until there is room. The engine cannot close under us for good: close() empties the queue.
    if (is_staged()) {
      bool pushed = false;
      wait_on_stage([&] { return closed() || (pushed = submits_.try_push(transfer)); }, kNoDeadline, {});
      if (pushed) break;
      continue;
    }
    if (try_enter()) {
      round();
      leave();
    } else if (++attempts % 64 == 0) {
      std::this_thread::yield();
    } else {
      cpu_relax();
    }
  }
  if (is_staged()) {
    options_.stage->wake(seat_.number);
  } else {
    transports_.wake();
  }
  std::atomic_thread_fence(std::memory_order_seq_cst);  // pairs with the seq_cst store of closed_ in close()
  if (closed()) drain_after_close();
}

// A submit that raced with close(): its transfer completes here.
void EngineCore::drain_after_close() {
  while (!progress_lock_.try_lock()) std::this_thread::yield();
  finish_submits();
  progress_lock_.unlock();
}

void EngineCore::finish_submits() {
  Transfer* transfer;
  while (submits_.try_pop(&transfer)) {
    bump(taken_);
    transfer->work_->open_items = 0;
    finish(transfer, Status::kEngineClosed);
  }
}

void EngineCore::request_cancel_scan() {
  cancel_scan_.store(true, std::memory_order_release);
  if (is_staged()) {
    options_.stage->wake(seat_.number);
  } else {
    transports_.wake();
  }
}

void EngineCore::close(Deadline drain_deadline) {
  if (forked()) return;
  std::call_once(close_once_, [&] {
    // 1. What is under way may finish until the deadline.
    if (users_inflight() > 0 && drain_deadline > clock().now_ns()) {
      const auto drained = [this] { return users_inflight() == 0; };
      const auto nap = [](Deadline until) {
        std::this_thread::sleep_for(std::chrono::nanoseconds(std::clamp<int64_t>(until - now_ns(), 0, 200'000)));
      };
      wait_until(drained, nap, drain_deadline, {});
    }
    // 2. No new submit, no worker.
    closed_.store(true, std::memory_order_seq_cst);
    stopping_.store(true, std::memory_order_release);
    if (worker_.joinable()) {
      transports_.wake_always();
      worker_.join();
    }
    watchers_->stop();
    if (watchdog_) watchdog_->stop();
    // 3. Everything that is left completes.
    while (!progress_lock_.try_lock()) std::this_thread::yield();
    finish_submits();
    std::map<Incarnation, PeerRef> peers;
    {
      std::lock_guard lock(tables_mutex_);
      peers = peers_;
    }
    for (auto& [incarnation, peer] : peers) fail_backlogs(*peer, Status::kEngineClosed, "the engine was closed");
    transports_.close();
    verifications_.fail(nullptr, Status::kEngineClosed, "the engine was closed");
    verifications_.drop_jobs();
    imms_.flush_arrivals();
    for (auto& [incarnation, peer] : peers) peer->link_ = nullptr;
    busy_.clear();
    pool_in_use_ = nullptr;
    progress_lock_.unlock();
    // 4. Everybody who waits hears of it; cycles of references are cut.
    imms_.close_all();
    Ref<ReceivePool> pool;
    {
      std::lock_guard lock(tables_mutex_);
      pool = pool_;
      // Completed transfers keep their region for the next one: what is the transport's in it ends here.
      for (auto& [id, region] : remote_regions_) region->key_.reset();
      remote_regions_.clear();
      peers_.clear();
    }
    if (pool) pool->close();
    // release: pairs with the acquire in wait_until: who sees it sees every completion.
    drained_.store(true, std::memory_order_release);
    add_event({EngineEvent::Kind::kPeerLost, "", ""});  // wakes who waits for events
  });
}

// --- peers ---

PeerRef EngineCore::add_peer(const Address& address) {
  {
    std::lock_guard lock(tables_mutex_);
    const auto known = peers_.find(address.incarnation);
    if (known != peers_.end()) return known->second;
  }
  Route route = transports_.choose(address);
  std::lock_guard lock(tables_mutex_);
  if (is_mutated(Mutation::kAcceptStaleIncarnation)) {
    for (auto& [incarnation, known] : peers_) {
      if (known->address().name == address.name) return known;
    }
  }
  PeerRef& peer = peers_[address.incarnation];
  if (!peer) {
    auto track = recorder_.add_peer(address.name, address.pid, transport_name(route.kind), PeerState::kUnknown);
    peer = PeerRef::adopt(new Peer(std::make_shared<const Address>(address), std::move(route), std::move(track)));
  }
  return peer;
}

bool EngineCore::knows(const Peer& peer) const {
  std::lock_guard lock(tables_mutex_);
  const auto known = peers_.find(peer.address().incarnation);
  return known != peers_.end() && known->second.get() == &peer;
}

void EngineCore::start_connect(Peer& peer) {
  if (peer.link_ != nullptr || peer.state() == PeerState::kLost || closed()) return;
  if (!knows(peer)) {  // an operation that began before it was forgotten: a second link to the same engine must not be
    peer.work_->note = "forgotten on request";
    set_state(peer, PeerState::kLost, FlightState::kForgotten);
    return;
  }
  set_state(peer, PeerState::kConnecting, FlightState::kConnecting);
  try {
    peer.link_ = peer.route_.transport->connect(peer.address_);
    peer.link_->user = &peer;
  } catch (const TransportError& error) {  // no memory or descriptors for a link: the peer is out of reach
    peer.work_->note = error.what();
    set_state(peer, PeerState::kLost, FlightState::kLost);
    add_event({EngineEvent::Kind::kPeerLost, peer.address().name, error.what()});
  }
}

void EngineCore::forget_peer(Peer& peer) {
  run_as_holder([&] {
    while (take_submits() > 0) {  // what was submitted before ends with the rest
    }
    if (peer.link_ != nullptr) {
      peer.route_.transport->disconnect(*peer.link_);
      peer.link_ = nullptr;
    }
    fail_backlogs(peer, Status::kPeerLost, "forgotten on request");
    verifications_.fail(&peer, Status::kPeerLost, "forgotten on request");
    peer.work_->note.clear();
    set_state(peer, PeerState::kUnknown, FlightState::kForgotten);
    std::lock_guard lock(tables_mutex_);
    for (auto& [id, region] : remote_regions_) {
      if (region->peer() == &peer) region->key_.reset();
    }
    std::erase_if(remote_regions_, [&](const auto& item) { return item.second->peer() == &peer; });
    peers_.erase(peer.address().incarnation);
  });
}

Status EngineCore::map(Peer& peer, RemoteRegion& region, Mapping* mapping) {
  if (closed()) return Status::kEngineClosed;
  if (peer.link_ == nullptr) return Status::kPeerLost;
  return peer.route_.transport->map(*key_of(peer, region), mapping);
}

PeerExplanation EngineCore::explain(Peer& peer) {
  const Route& route = peer.route_;
  PeerExplanation explanation{.peer = peer.address().name,
                              .transport = transport_name(route.kind),
                              .reason = route.reason,
                              .state = peer.state(),
                              .note = {},
                              .rails = {},
                              .gb_per_s_expected = 0,
                              .paths = {},
                              .heartbeat = {}};
  std::vector<RailReport> rails;
  run_as_holder([&] {
    explanation.state = peer.state();
    explanation.note = peer.work_->note;
    explanation.heartbeat = peer.work_->heartbeat;
    if (peer.link_ == nullptr || closed()) return;
    rails = route.transport->explain_rails(*peer.link_);
    for (PathReport& path : route.transport->explain(*peer.link_)) {
      explanation.paths.push_back(
          {std::move(path.what), std::move(path.path), std::move(path.reason), path.gb_per_s, path.bytes});
    }
  });
  if (rails.empty()) rails = expected_rails(route, route.transport->address(), peer.address());
  add_rails(explanation, rails, route.kind, route.transport->address(), peer.address());
  return explanation;
}

// --- what the transport reports ---

void EngineCore::on_link_up(Link& link) {
  auto& peer = *static_cast<Peer*>(link.user);
  set_state(peer, PeerState::kConnected, FlightState::kConnected);
  bump(peer.track_->moves);
  bump(counters_.connected);
  runnable_ = true;
  add_event({EngineEvent::Kind::kPeerConnected, peer.address().name, ""});
}

void EngineCore::on_link_down(Link& link, const std::string& reason, bool orderly) {
  const PeerRef peer = PeerRef::share(static_cast<Peer*>(link.user));
  peer->link_ = nullptr;
  peer->work_->note = reason;
  set_state(*peer, PeerState::kLost, orderly ? FlightState::kLeft : FlightState::kLost);
  bump(counters_.lost);
  fail_backlogs(*peer, Status::kPeerLost, reason);
  verifications_.fail(peer.get(), Status::kPeerLost, reason);
  {
    std::lock_guard lock(tables_mutex_);
    for (auto& [id, region] : remote_regions_) {
      if (region->peer() == peer.get()) region->key_.reset();
    }
  }
  add_event({orderly ? EngineEvent::Kind::kPeerLeft : EngineEvent::Kind::kPeerLost, peer->address().name, reason});
}

void EngineCore::on_link_frozen(Link& link, bool frozen, const std::string& detail) {
  set_liveness(*static_cast<Peer*>(link.user), frozen ? PeerState::kFrozen : PeerState::kConnected, detail);
}

void EngineCore::on_protocol_error(const std::string& peer, const std::string& detail) {
  add_event({EngineEvent::Kind::kProtocolError, peer, detail});
}

void EngineCore::on_imm(uint32_t imm, uint64_t units) {
  bump(counters_.imm_units, units);
  if (imm != arrived_imm_) record_arrivals();
  arrived_imm_ = imm;
  arrived_units_ += units;
  ++arrived_count_;
  if (imms_.note_arrival(engine_, imm, units)) return;
  bump(counters_.imm_overflow, units);
  if (std::exchange(overflow_reported_, true)) return;
  add_event({EngineEvent::Kind::kImmOverflow, "",
             "immediate " + std::to_string(imm) +
                 " arrived when imm_counters_max = " + std::to_string(options_.imm_counters_max) +
                 " counters existed; it is lost, and so are further ones (stats: imm_overflow_units). Release numbers "
                 "no longer used, or raise it"});
}

Sink::Offer EngineCore::on_message(const std::shared_ptr<const Address>& sender, std::span<const uint8_t> payload) {
  const uint64_t version = pool_version_.load(std::memory_order_acquire);
  if (version != pool_version_seen_) {
    std::lock_guard lock(tables_mutex_);
    pool_in_use_ = pool_;
    pool_version_seen_ = version;
  }
  if (!pool_in_use_) return Offer::kHold;
  switch (pool_in_use_->offer(sender, payload)) {
    case ReceivePool::Offer::kTaken:
      bump(counters_.received);
      recorder_.record({.bytes = payload.size(), .count = 1, .state = FlightState::kReceived});
      return Offer::kTaken;
    case ReceivePool::Offer::kTooLong:
      return Offer::kTooLong;
    case ReceivePool::Offer::kFull:
    case ReceivePool::Offer::kClosed:
      return Offer::kHold;
  }
  return Offer::kHold;
}

void EngineCore::pool_closed(ReceivePool* pool) {
  {
    std::lock_guard lock(tables_mutex_);
    if (pool_.get() != pool) return;
    pool_ = nullptr;
  }
  pool_version_.fetch_add(1, std::memory_order_release);
}

void EngineCore::add_event(EngineEvent event) {
  constexpr size_t kEventsKept = 1024;  // for a user who never asks; the newest tell most
  if (!event.detail.empty() || !event.peer.empty())
    recorder_.note(event_kind_name(event.kind), event.peer, event.detail);
  std::lock_guard lock(tables_mutex_);
  if (!event.detail.empty() || !event.peer.empty()) {
    if (events_.size() == kEventsKept) events_.erase(events_.begin());
    events_.push_back(std::move(event));
  }
  if (event_notifier_) event_notifier_->post(event_cookie_);
}

}  // namespace crossrail
