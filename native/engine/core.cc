#include "engine/core.h"
#include "engine/wait_until.h"

#include <pthread.h>
#include <unistd.h>

#include <algorithm>
#include <mutex>
#include <new>
#include <set>

#include "engine/dump_triggers.h"
#include "engine/watchdog.h"
#include "util/errors.h"
#include "util/thread.h"

namespace crossrail {

namespace {

// The engines of this process, for fork handling and for dumps on a signal. Never destroyed: engines may outlive static
// destructors.
struct LiveEngines {
  std::mutex mutex;  // held over fork
  std::set<EngineCore*> cores;
};
LiveEngines& live_engines() {
  static auto* instance = new LiveEngines;
  return *instance;
}

// How many forks lie between this process and the first one. A plain global, since every submit checks it.
// relaxed: a child has a single thread when it is incremented, and every thread that it starts later sees that.
constinit std::atomic<uint64_t> fork_generation{0};

// The mutex is held across fork, so that the child finds the set consistent.
void before_fork() { live_engines().mutex.lock(); }
void after_fork_in_parent() { live_engines().mutex.unlock(); }
void after_fork_in_child() {
  LiveEngines& live = live_engines();
  fork_generation.fetch_add(1, std::memory_order_relaxed);
  for (EngineCore* core : live.cores) core->abandon_after_fork();
  live.cores.clear();
  live.mutex.unlock();
}

}  // namespace

EngineCore::EngineCore(Engine* engine, const EngineOptions& options)
    : engine_(engine),
      options_(options),
      recorder_(options.recorder_entries, options.simulation.get(), is_simulated() ? 0 : FlightRecorder::kBurstNs),
      transfers_(engine, this),
      submits_(options.submit_queue_depth),
      imms_(options.imm_counters_max),
      watchers_(std::make_shared<WatcherThread>(options.watcher_poll_ns, options.simulation == nullptr,
                                                [this] { on_word_changed(); })),
      heartbeats_(this, options.heartbeat_ns),
      seat_(this, options),
      transports_(options, {options.simulation.get(), options.simulated_host, seat_.number}, this),
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
    if (!is_simulated()) watchdog_->start();
  }
  if (is_simulated()) {
    options_.simulation->wake(seat_.number);
    return;
  }
  // Last: nothing that may fail comes after it.
  if (has_worker()) worker_ = start_thread([this] { worker_main(); });
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

bool EngineCore::visit_live(bool patient, const std::function<void(EngineCore&)>& visit) {
  LiveEngines& live = live_engines();
  constexpr int kAttempts = 10'000;  // some milliseconds
  if (patient) {
    live.mutex.lock();
  } else {
    int attempts = 0;
    while (!live.mutex.try_lock()) {
      if (++attempts == kAttempts) return false;
      std::this_thread::yield();
    }
  }
  std::lock_guard lock(live.mutex, std::adopt_lock);
  for (EngineCore* core : live.cores) visit(*core);
  return true;
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

// The threads do not exist in the child, and any lock that they held stays locked: nothing here may be used any more.
void EngineCore::abandon_after_fork() {
  leak_thread(worker_);
  watchers_->abandon_after_fork();
  if (watchdog_) watchdog_->abandon_after_fork();
  transports_.abandon_after_fork();
}

uint64_t EngineCore::inflight() const {
  // finished_ first: a transfer that starts and ends between the loads must not make the difference negative.
  // acquire: pairs with the release in bump(), before which the holder took that transfer from the queue, or counted
  // it.
  const uint64_t finished = finished_.load(std::memory_order_acquire);
  return users_accepted() + counters_.services_begun.load(std::memory_order_acquire) - finished;
}

uint64_t EngineCore::users_inflight() const {
  uint64_t ended = 0;  // first, as in inflight()
  for (const auto* counter : {&counters_.done, &counters_.failed, &counters_.cancelled})
    ended += counter->load(std::memory_order_acquire);
  return users_accepted() - ended;
}

// After a submit that raced with close(): its transfer completes here.
void EngineCore::drain_after_close() {
  while (!progress_lock_.try_lock()) std::this_thread::yield();
  finish_submits();
  progress_lock_.unlock();
}

void EngineCore::finish_submits() try {
  assert_holder();
  Transfer* transfer;
  while (submits_.try_pop(&transfer)) {
    bump(taken_);
    transfer->work_->open_items = 0;
    finish(transfer, Status::kEngineClosed);
  }
} catch (const std::bad_alloc&) {  // see round()
  fail_out_of_memory(options_.name.c_str());
}

void EngineCore::complete_everything() try {
  assert_holder();
  finish_submits();
  const std::vector<PeerRef> peers = peers_.peers();
  fail_triggered(nullptr, Status::kEngineClosed, "the engine was closed");
  for (const PeerRef& peer : peers) fail_backlogs(*peer, Status::kEngineClosed, "the engine was closed");
  transports_.close();
  verifications_.fail(nullptr, Status::kEngineClosed, "the engine was closed");
  verifications_.drop_jobs();
  imms_.end_arrivals();
  for (const PeerRef& peer : peers) peer->link_ = nullptr;
  busy_.clear();
  receiving_.drop_current();
} catch (const std::bad_alloc&) {  // see round()
  fail_out_of_memory(options_.name.c_str());
}

bool EngineCore::close(Deadline drain_deadline, const InterruptCheck& interrupted) {
  if (forked()) return true;
  WaitResult drain = WaitResult::kReady;
  // 1. What is in flight may finish until the deadline; with several closers, until the earliest of their deadlines.
  if (!closed() && users_inflight() > 0 && drain_deadline > clock().now_ns()) {
    const auto drained = [this] { return users_inflight() == 0; };
    drain = wait_until(drained, nap, drain_deadline, interrupted);
  }
  std::call_once(close_once_, [&] {
    // 2. No new submit, no worker.
    closed_.store(true, std::memory_order_seq_cst);
    // Pairs with the fence in submit(): either that thread sees closed_, or finish_submits() finds its transfer.
    std::atomic_thread_fence(std::memory_order_seq_cst);
    stopping_.store(true, std::memory_order_release);  // pairs with the acquire in worker_main()
    if (worker_.joinable()) {
      transports_.sleeping_place().call_behind();
      worker_.join();
    }
    watchers_->stop();
    if (watchdog_) watchdog_->stop();
    // 3. Everything that is left completes.
    while (!progress_lock_.try_lock()) std::this_thread::yield();
    complete_everything();
    progress_lock_.unlock();
    // 4. Everybody who waits is told; cycles of references are broken.
    imms_.close_all();
    const Ref<ReceivePool> pool = receiving_.end();
    peers_.clear();
    if (pool) pool->close();
    // release: pairs with the acquire in wait_until: whoever sees it sees every completion.
    drained_.store(true, std::memory_order_release);
    events_.wake();
  });
  return drain != WaitResult::kInterrupted;
}

void EngineCore::add_event(EngineEvent event) {
  recorder_.note(event_kind_name(event.kind), event.peer, event.detail);
  events_.add(std::move(event));
}

}  // namespace crossrail
