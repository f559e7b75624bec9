// The running part of an engine: who drives it, what is queued for which peer, what the transports report.
//
// One thread at a time drives: the *progress holder*, which is whoever holds the progress lock. Usually that is the
// worker thread. A thread that waits (or submits something short) while the worker sleeps takes the lock and does the
// work itself rather than wake the worker. This saves two context switches, and on two cores decides whether a round
// trip takes one microsecond or ten. Whoever stops driving makes sure that somebody will see what arrives next
// (leave()).
// Everything marked "progress holder" is guarded by the progress lock; its functions begin with assert_holder().
#pragma once

#include <algorithm>
#include <array>
#include <atomic>
#include <cstdint>
#include <functional>
#include <initializer_list>
#include <memory>
#include <mutex>
#include <span>
#include <string>
#include <thread>
#include <vector>

#include "engine/engine.h"
#include "engine/event_queue.h"
#include "engine/flight_recorder.h"
#include "engine/heartbeats.h"
#include "engine/imm_table.h"
#include "engine/named_regions.h"
#include "engine/patience.h"
#include "engine/peer_table.h"
#include "engine/peer_work.h"
#include "engine/recv_pool.h"
#include "engine/traffic.h"
#include "engine/transfer_pool.h"
#include "engine/transfer_work.h"
#include "engine/transports.h"
#include "engine/triggers.h"
#include "engine/verification.h"
#include "engine/watcher_thread.h"
#include "util/errors.h"
#include "util/mpsc_queue.h"
#include "util/spinlock.h"

namespace crossrail {

class Watchdog;

class EngineCore final : public Sink, public Actor {
 public:
  EngineCore(Engine* engine, const EngineOptions& options);
  ~EngineCore();

  // Throws EngineClosedError when closed, or in a forked child.
  void check_usable() const;
  // [any] but the progress holder. Counts arrivals that peers completed before they were refused and that nobody has
  // polled yet, so that none of them is counted after this returns.
  void count_arrivals();
  // [any] From now on the engine flushes the NICs' writes to that GPU before it counts an immediate or completes a
  // read.
  void flush_gpu_before_counts(int ordinal);
  bool forked() const;
  // Not in a simulation, where none of our threads drives.
  bool has_worker() const { return !is_simulated() && options_.polling != Polling::kManual; }
  bool is_simulated() const { return options_.simulation != nullptr; }
  const Clock& clock() const { return is_simulated() ? static_cast<const Clock&>(*options_.simulation) : real_clock(); }
  // Whether we are on the worker or on the thread that watches words.
  bool is_own_thread() const { return worker_.get_id() == std::this_thread::get_id() || watchers_->is_this_thread(); }
  bool close(Deadline drain_deadline, const InterruptCheck& interrupted = {});
  bool closed() const { return closed_.load(std::memory_order_seq_cst); }
  void abandon_after_fork();

  // Pushes a filled-in transfer onto the queue.
  void submit(Transfer* transfer);
  // Whether a thread is just now posting what it submits: such a transfer is not yet among its region's operations.
  bool is_submitting() const { return progress_lock_.mark() == kSubmitting; }
  void request_cancel_scan();
  // Runs `work` as the progress holder.
  void run_as_holder(const std::function<void()>& work);
  // The same, until a deadline on the real clock. False: the holder did not release the lock in time, and nothing was
  // done.
  bool run_as_holder(const std::function<void()>& work, Deadline until);
  // The same, for work that changes nothing: if its memory runs out, so does the caller's.
  bool look_as_holder(const std::function<void()>& work, Deadline until = kNoDeadline);
  // [progress holder] For tests: one round by a holder that keeps the lock.
  void make_round() { round(); }
  bool progress();
  // Transfers accepted and not complete, including services. While some begin and end, may count a few that have ended.
  uint64_t inflight() const;
  // The same without services.
  uint64_t users_inflight() const;
  // Makes some thread drive soon, for work that nothing else announces.
  void wake();
  // [any] A word that transfers wait for has changed, or is no longer watched. Takes the progress lock if it is free
  // and begins what is due: waking another thread takes longer than posting the first bytes. The worker continues from
  // there.
  void on_word_changed();

  // A thread in wait_until().
  struct Guest {
    bool is_in_front = false;  // arrivals wake it instead of the worker
    bool has_news = false;     // arrivals woke it, and nobody has polled since
  };

  // Blocks until ready(), driving the engine when no worker does. sleep(guest, until) blocks no longer than `until`,
  // and returns early once ready() may have become true. ready() must not have side effects while it returns false. In
  // engine/wait_until.h.
  template <typename Ready, typename Sleep>
  WaitResult wait_until(Ready&& ready, Sleep&& sleep, Deadline deadline, const InterruptCheck& interrupted);

  // For sleep() above: blocks while *word == expected, until wake_sleepers(word) or the deadline; may return early.
  // Sleeps in front of the worker if no other guest does.
  void sleep_on(Guest& guest, std::atomic<uint32_t>* word, uint32_t expected, Deadline until);
  // [any] To be called after the word has changed.
  void wake_sleepers(std::atomic<uint32_t>* word);

  // Actor, from inside Simulation::advance.
  bool turn() override;
  Deadline next_timer() const override { return simulated_timer_; }
  bool has_changed_words() const override;
  bool is_busy() const override;
  uint64_t outcomes() const override;
  int64_t patience_ns() const override { return std::max(options_.peer_timeout_ns, options_.connect_timeout_ns); }
  void die() override { close(0); }

  // The peer at that address, new or known. Throws UsageError if it is out of reach.
  PeerRef add_peer(const Address& address);
  void forget_peer(Peer& peer);
  PeerExplanation explain(Peer& peer);
  Status map(Peer& peer, RemoteRegion& region, int gpu, Mapping* mapping);  // progress holder
  void start_connect(Peer& peer);                                           // progress holder
  // Progress holder. False: this was reported already, and there has been no link since.
  bool tell_lost(Peer& peer, EngineEvent::Kind kind, const std::string& reason);
  // Progress holder. Marks a connected peer as slow, frozen, or moving again. Adds an event if its state changed.
  void set_liveness(Peer& peer, PeerState state, const std::string& detail);
  void note_received(uint64_t bytes);  // progress holder; before anybody can see the message
  void add_event(EngineEvent event);

  // --- what an engine tells of itself; any thread, also while the holder hangs ---
  const std::string& name() const { return options_.name; }
  const std::string& dump_directory() const { return options_.dump_directory; }
  EngineStats stats() const;
  // patience_ns: how long to wait for the progress lock, for each peer, on the real clock.
  TrafficReport traffic(int64_t patience_ns);
  const FlightRecorder& recorder() const { return recorder_; }
  // Accepted submits that the holder has not yet taken from the queue.
  uint64_t submits_waiting() const {
    // taken_ first, so that the difference is not negative.
    const uint64_t taken = taken_.load(std::memory_order_acquire);
    return submits_.pushed() - taken;
  }
  void dump(std::string_view reason, TextSink* sink) const;
  // Calls visit for every engine of the process; none can close meanwhile. Unless `patient`, gives up and returns
  // false, having visited none, if another thread keeps the list locked for long.
  static bool visit_live(bool patient, const std::function<void(EngineCore&)>& visit);

  // Sink, progress holder
  void on_retired(Link& link, void* context, uint32_t tag, uint32_t count, uint64_t bytes, Status status,
                  const std::string& detail) override;
  void on_withdrawn(Link& link, void* context, uint32_t tag, uint64_t bytes) override;
  void on_imm(uint32_t imm, uint64_t units) override;
  Offer on_message(const std::shared_ptr<const Address>& sender, std::span<const uint8_t> payload) override;
  void on_service(const std::shared_ptr<const Address>& sender, std::span<const uint8_t> payload) override;
  void on_link_up(Link& link) override;
  void on_link_down(Link& link, const std::string& reason, LinkEnd end) override;
  void on_link_frozen(Link& link, bool frozen, const std::string& detail) override;
  void on_protocol_error(const std::string& peer, const std::string& detail) override;
  void on_sent(Link& link, uint32_t rail, void* context, uint32_t count, uint64_t bytes, uint32_t imms) override;
  void on_over(Link& link, uint32_t rail, void* context, uint32_t count, uint64_t bytes) override;
  void on_rail_broken(Link& link, uint32_t rail) override;
  void on_sent_again(Link& link, uint32_t rail, uint32_t count) override;
  Status status_of_gone(uint64_t region_id) override { return regions_.status_of_gone(region_id); }  // any thread

  // The submitting thread takes an empty transfer, fills it in and hands it over.
  TransferRef make_transfer(OpKind kind);
  static TransferWork& work_of(Transfer& transfer) { return *transfer.work_; }
  // `short_work`: posting it costs no more than waking the worker would.
  TransferRef hand_over(TransferRef transfer, bool short_work);
  // Called on a filled-in transfer before hand_over(). Returns whether it will wait for a trigger; hand_over() is then
  // cheap.
  static bool set_trigger(TransferWork& work, const Trigger& trigger);
  // Called on a filled-in transfer with verify=True before hand_over(). Reads the whole source on the submitting
  // thread, so that no other thread has to wait for that.
  void plan_verification(TransferWork& work);
  // --- what engines tell each other (services.cc), progress holder; not from inside a Sink call ---
  void send_service(Peer& peer, Bytes payload, uint64_t token);
  // The same to an engine that has asked us, and that we may not know yet. False: it is not sent, and no completion
  // follows.
  bool tell(const Address& address, Bytes payload, uint64_t token);
  static Heartbeat& heartbeat_of(Peer& peer) { return peer.work_->heartbeat; }

  void region_made() { counters_.regions.fetch_add(1, std::memory_order_relaxed); }
  void region_gone() { counters_.regions.fetch_sub(1, std::memory_order_relaxed); }

  TransferPool& transfers() { return transfers_; }
  TransportSet& transports() { return transports_; }
  PeerTable& peer_table() { return peers_; }
  NamedRegions& named_regions() { return regions_; }
  PoolSlot& receiving() { return receiving_; }
  const WatcherThread* watchers() const { return watchers_.get(); }

 private:
  friend class Engine;
  friend class Verifications;
  // kBlocked: this transfer is stuck, others in its queue may move. kFull: the queue is tried again once something
  // retires.
  enum class Progress : uint8_t { kAllPosted, kMore, kBlocked, kFull };

  // --- driving (driving.cc; in a simulation, simulated.cc) ---
  // Checked only in builds with a sanitizer: other builds do not pay for it.
  void assert_holder() const {
#ifdef CROSSRAIL_CHECK_HOLDERS
    CROSSRAIL_ASSERT(progress_lock_.is_mine());
#endif
  }
  void worker_main();
  bool drive_until_idle(Patience& patience);
  bool try_enter(uint8_t mark = 1);
  // The same, unless the engine is closed: close() may already have closed the transports.
  bool try_enter_open(uint8_t mark = 1);
  [[noreturn]] void throw_closed_meanwhile() const;
  Deadline tend_watchdog();
  class Visit;  // a thread's stay in wait_until()
  WaitResult wait_in_simulation(const std::function<bool()>& ready, Deadline deadline,
                                const InterruptCheck& interrupted);
  void leave();
  void leave_awake();
  void submit_here(Transfer* transfer);
  uint32_t round();
  uint32_t poll_transports();
  bool has_work();
  void drain_after_close();
  void finish_submits();
  void complete_everything();

  // --- recording (recording.cc), progress holder ---
  void record_transfer(FlightState state, const Transfer& transfer);
  static FlightEntry entry_of_works(FlightState state, const Peer& peer, const TransferWork& work, uint32_t count,
                                    uint64_t bytes);
  void record_works(FlightState state, const Peer& peer, uint32_t rail, const Transfer& transfer, uint32_t count,
                    uint64_t bytes);
  void record_posted(Peer& peer, uint32_t rail, uint32_t accepted, uint32_t completed, uint64_t bytes,
                     const Transfer& transfer);
  void record_first_moved(const Peer& peer, uint32_t rail, uint64_t bytes, const TransferWork& work);
  void record_arrivals();
  static void note_retired(Peer& peer, uint32_t count);
  static void note_queued(Peer& peer);

  // --- peers.cc, progress holder ---
  void set_state(Peer& peer, PeerState state, FlightState shown);

  // --- counting (traffic.cc), progress holder ---
  void start_timing(Peer& peer, uint32_t rail, uint32_t accepted, const Transfer* transfer);
  void end_timing(Peer& peer, uint32_t rail, const Transfer* transfer, bool is_good);

  // --- posting (posting.cc, work_requests.cc) and ends (ending.cc), progress holder ---
  uint32_t take_submits();
  void start(Transfer* transfer);
  bool hold(Transfer* transfer);
  void begin(Transfer* transfer);
  uint32_t begin_triggered();
  static uint64_t round_bytes_max(const Peer& peer);
  bool may_post(const Peer& peer, const PostItem& item) const;
  void start_item(Peer& peer, Transfer* transfer, uint32_t target);
  uint32_t post_backlogs();
  uint32_t post_turns(std::initializer_list<RingQueue<PostItem> PeerWork::*> queues, size_t* next);
  uint32_t post_backlog(Peer& peer, RingQueue<PostItem>& backlog);
  static bool is_short(const PostItem& item);
  Progress advance(Peer& peer, const PostItem& item);
  Progress post_range(Peer& peer, Transfer* transfer);
  void count_in_round(const Peer& peer, const TransferWork& work, uint64_t bytes, uint32_t requests = 1);
  static Progress refused(uint32_t rail);
  Progress post_short_range(Peer& peer, Transfer* transfer, RemoteKey* key);
  static WorkRequest range_request(const Peer& peer, const TransferWork& work, RemoteKey* key, uint64_t offset,
                                   uint64_t length_bytes);
  Progress post_pages(Peer& peer, Transfer* transfer);
  Progress post_long_pages(Peer& peer, Transfer* transfer, RemoteKey* key);
  Progress post_target(Peer& peer, Transfer* transfer, ScatterTarget& target);
  Progress post_message(Peer& peer, Transfer* transfer);
  static void plan_range(const Peer& peer, TransferWork& work);
  static uint32_t rail_for(const Peer& peer, const TransferWork& work, uint32_t piece);
  uint32_t post(Peer& peer, uint32_t rail, std::span<const WorkRequest> requests, uint64_t bytes, Transfer* transfer);
  RemoteKey* key_of(Peer& peer, RemoteRegion& region);
  void close_item(Transfer* transfer);
  void fail_item(const PostItem& item, Status status, const Peer& peer, const std::string& detail);
  void note_kept(TransferWork& work);
  bool is_partly_counted(TransferWork& work);
  void go_on(Transfer* transfer);
  void fail(Transfer* transfer, Status status, const Peer& peer, const std::string& detail);
  void finish_if_done(Transfer* transfer);
  void finish(Transfer* transfer, Status status);
  void fail_backlogs(Peer& peer, Status status, const std::string& detail);
  void scan_cancels();
  void fail_triggered(const Peer* peer, Status status, const std::string& detail);
  void mark_busy(Peer& peer);

  // --- reports.cc, progress holder ---
  bool flush_gpus(uint64_t gpus, const std::string& what);

  // --- services.cc, progress holder ---
  uint32_t serve();
  void on_service_ended(const TransferWork& work, Status status);
  Deadline next_due() const {
    return std::min({transports_.next_timer(), heartbeats_.next_timer(), verifications_.next_timer()});
  }

  // Transfers that users have submitted so far.
  uint64_t users_accepted() const { return submits_.pushed() + started_here_.load(std::memory_order_acquire); }

  Engine* const engine_;
  const EngineOptions options_;
  FlightRecorder recorder_;
  TransferPool transfers_;
  MpscQueue<Transfer*> submits_;
  ImmTable imms_;
  std::shared_ptr<WatcherThread> watchers_;

  // The driving thread. acquire/release on progress_lock_ orders everything that belongs to the progress holder.
  static constexpr uint8_t kSubmitting = 2;  // the lock's mark while a thread is in submit_here()
  SpinLock progress_lock_;
  std::atomic<uint32_t> guests_{0};                        // threads that want the lock: the worker makes way
  std::atomic<std::atomic<uint32_t>*> in_front_{nullptr};  // the word of the guest who sleeps in front
  Patience guests_patience_{options_.spin_ns, 20'000};     // longer than a stream of short writes pauses
  std::atomic<bool> stopping_{false};
  std::atomic<bool> closed_{false};   // no new submits
  std::atomic<bool> drained_{false};  // and all earlier submits are complete
  std::once_flag close_once_;
  std::atomic<bool> cancel_scan_{false};
  std::atomic<bool> look_wanted_{false};      // wake() was called, and no round has begun since
  std::atomic<uint64_t> moves_{0};            // rounds in which something moved; progress holder writes
  std::atomic<uint64_t> errands_{0};          // of run_as_holder(), which may set timers; progress holder writes
  std::atomic<bool> sleeps_for_good_{false};  // the worker sleeps without a deadline
  std::atomic<Deadline> wakes_at_{0};         // the worker sleeps no longer than this; 0 awake
  std::atomic<uint64_t> started_here_{0};     // users' transfers that never went through the queue; holder writes
  std::atomic<uint64_t> finished_{0};         // transfers complete; progress holder writes
  std::atomic<uint64_t> taken_{0};            // transfers taken from the queue; progress holder writes

  PeerTable peers_;
  NamedRegions regions_;
  PoolSlot receiving_;
  EventQueue events_;

  // Progress holder:
  std::vector<PeerRef> busy_;
  Triggers triggers_;
  bool shorts_first_ = true;
  bool runnable_ = false;  // the last pass posted something, or something new arrived
  uint32_t next_rail_ = 0;
  static constexpr uint64_t kFirstBytes = uint64_t{16} << 10;
  bool first_bytes_only_ = false;  // the driving thread is in a hurry: post only this many bytes and queue the rest
  uint64_t round_bytes_ = 0;       // posted in this round; bytes copied by a GPU count for less
  uint32_t idle_rounds_ = 0;       // in a row
  bool overflow_reported_ = false;
  uint32_t last_serial_ = 0;
  std::atomic<uint64_t> gpus_to_flush_{0};  // a bit for each ordinal
  uint32_t arrived_imm_ = kNoImm;           // the immediate whose arrivals are not recorded yet
  uint32_t arrived_count_ = 0;
  uint64_t arrived_units_ = 0;
  struct ServiceNote {
    std::shared_ptr<const Address> sender;
    Bytes payload;
  };
  std::vector<ServiceNote> services_in_;
  uint32_t bad_services_ = 0;
  Heartbeats heartbeats_;
  Verifications verifications_{this};

  struct Counters {
    std::atomic<uint64_t> done{0}, failed{0}, cancelled{0}, bytes_written{0}, bytes_read{0}, sent{0}, received{0},
        imm_units{0}, imm_overflow{0}, posted{0}, retried{0}, rounds{0}, sleeps{0}, connected{0}, lost{0}, regions{0},
        services_begun{0};
  } counters_;

  // The engine's place in a simulation, if any: entered before its NICs are made, left after they are gone.
  struct Seat {
    Seat(Actor* actor, const EngineOptions& options)
        : simulation(options.simulation.get()),
          number(simulation != nullptr ? simulation->enter(actor, options.simulated_host, options.name) : 0) {}
    ~Seat() {
      if (simulation != nullptr) simulation->leave(number);
    }
    Seat(const Seat&) = delete;
    Seat& operator=(const Seat&) = delete;
    Simulation* const simulation;
    const uint32_t number;
  } seat_;
  Deadline simulated_timer_ = kNoDeadline;  // as of the last turn
  Deadline watch_at_ = 0;                   // in a simulation: when the watchdog looks next
  uint64_t watched_moves_ = 0;              // moves_ when it last changed
  int64_t watched_since_ = 0;
  TransportSet transports_;  // declared after what its threads use when they call us

  // Registers the engine with the fork handlers. Declared after all members that may fail to initialise, so that an
  // engine that fails to open is never registered.
  struct Live {
    explicit Live(EngineCore* engine);
    ~Live();
    EngineCore* const core;
    uint64_t generation;
  } live_;
  std::thread worker_;
  std::unique_ptr<Watchdog> watchdog_;
};

}  // namespace crossrail
