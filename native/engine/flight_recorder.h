// The last operations and events of an engine, kept for the case that it hangs: one bounded ring per rail, and one for
// everything else.
//
// Threads: the progress holder writes, without locks, system calls or allocation. Anybody may read at any time, even
// while the holder hangs or the process is about to abort; FlightRing::read tells complete entries from overwritten
// ones.
//
// Two measures keep it cheap in bursts of short operations, where reading the clock or writing an entry for each would
// show. In a burst (read_clock) one reading of the clock serves many entries, each one tick later than the entry
// before: no two have the same time, so time orders the entries of all rings. And a transfer that completes at once,
// exactly like the one before it, is counted in that one's entry (repeat); readers can separate them again, since only
// their numbers and ticks differ.
#pragma once

#include <algorithm>
#include <array>
#include <atomic>
#include <cstdint>
#include <deque>
#include <memory>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "engine/traffic.h"
#include "transport/types.h"
#include "util/prefetch.h"
#include "util/spinlock.h"
#include "util/tick_clock.h"

namespace crossrail {

enum class OpKind : uint8_t;
enum class PeerState : uint8_t;

enum class FlightState : uint8_t {
  // for a transfer, in the engine's ring
  kSubmitted,  // the holder took it from the queue
  kDone,
  kFailed,
  kCancelled,
  // for works (pieces of a transfer), in the ring of their rail; in the engine's ring if the transport chooses rails
  kPosted,     // handed to the transport
  kMoved,      // posted, and complete at once
  kSent,       // the transport put them on this rail
  kRetired,    // ended, successfully or not
  kWithdrawn,  // taken back by a cancel
  // for arrivals, in the engine's ring
  kArrived,   // immediates; `bytes` is the number of 48ths of a count
  kReceived,  // messages
  // for a peer, in the engine's ring
  kConnecting,
  kConnected,
  kSlow,
  kFrozen,
  kThawed,
  kLost,
  kLeft,
  kForgotten
};
const char* flight_state_name(FlightState state);

struct FlightEntry {
  static constexpr uint32_t kCountMax = (1u << 20) - 1;
  static constexpr uint32_t kNoOp = 0;

  int64_t ticks = 0;  // of the recorder's clock, unique to this entry
  uint64_t bytes = 0;
  uint32_t transfer = 0;  // TransferWork::serial, 0 none
  uint32_t peer = 0;      // PeerTrack::id, 0 none
  uint32_t imm = kNoImm;
  uint32_t count = 0;  // works, targets or arrivals; kCountMax means that many or more
  uint32_t op = 0;     // OpKind + 1, or kNoOp
  // `count` is the number of transfers that did this in a row: numbered from `transfer` on, each a tick after the one
  // before, each with one work and `bytes`.
  bool repeats = false;
  FlightState state = FlightState::kSubmitted;
};

// The last `capacity` entries. One writer, any number of readers.
// Invariant: entry number n is in slot n modulo capacity; head_ entries have been written completely. In an entry that
// repeats, only the count still changes, which is a single word, and only while the entry is the last one.
class FlightRing {
 public:
  // capacity: a power of two.
  FlightRing(std::string name, uint32_t capacity)
      : name_(std::move(name)), mask_(capacity - 1), slots_(std::make_unique<Slot[]>(capacity)) {}

  const std::string& name() const { return name_; }
  uint64_t written() const { return head_.load(std::memory_order_acquire); }
  // The same, counting every repetition as an entry.
  uint64_t recorded() const { return written() + repetitions_.load(std::memory_order_relaxed) + repetitions_of_last(); }
  // The oldest entry that may still be available.
  uint64_t oldest() const {
    const uint64_t head = written();
    return head > mask_ ? head - mask_ : 0;
  }

  void write(const FlightEntry& entry) {
    const uint64_t at = head_.load(std::memory_order_relaxed);
    if (std::exchange(last_repeats_, entry.repeats)) [[unlikely]]
      add_repetitions();
    // Pairs with the acquire fence in read(): a reader that saw one of the words written below also sees the head
    // stored before them, and so knows that the slot is being overwritten.
    std::atomic_thread_fence(std::memory_order_release);
    Slot& slot = slots_[at & mask_];
    slot[0].store(static_cast<uint64_t>(entry.ticks), std::memory_order_relaxed);
    slot[1].store(entry.bytes, std::memory_order_relaxed);
    slot[2].store(entry.transfer | uint64_t{entry.peer} << 32, std::memory_order_relaxed);
    const uint32_t count = std::min(entry.count, FlightEntry::kCountMax);
    slot[3].store(entry.imm | count * kOneCount | uint64_t{entry.op} << kOpShift |
                      uint64_t{entry.repeats} << kRepeatsShift | uint64_t(entry.state) << kStateShift,
                  std::memory_order_relaxed);
    // release: who sees the head sees the entry.
    head_.store(at + 1, std::memory_order_release);
    prefetch_for_write(&slots_[(at + kAhead) & mask_]);  // a ring is as large as the nearest cache
  }

  // The word of the last entry that holds its count, for count_again().
  std::atomic<uint64_t>* last_count() { return &slots_[(head_.load(std::memory_order_relaxed) - 1) & mask_][3]; }
  // Another transfer did what that repeating entry says.
  static void count_again(std::atomic<uint64_t>* last_count) {
    last_count->store(last_count->load(std::memory_order_relaxed) + kOneCount, std::memory_order_relaxed);
  }

  // Entry number `at`, at < written(). False: it has been, or is being, overwritten. The oldest of `capacity` entries
  // is therefore never returned: its slot is the next to be written.
  bool read(uint64_t at, FlightEntry* entry) const;

 private:
  static constexpr uint64_t kAhead = 4;               // two lines
  using Slot = std::array<std::atomic<uint64_t>, 4>;  // two of them to a cache line

  // The last word: 32 bits of the immediate, 20 of the count, 5 of the operation, 1 for "repeats", 6 of the state.
  static constexpr uint64_t kOneCount = uint64_t{1} << 32;
  static constexpr uint32_t kOpShift = 52, kRepeatsShift = 57, kStateShift = 58;
  static constexpr uint64_t repetitions(uint64_t word) {
    return (word >> kRepeatsShift & 1) != 0 ? (word / kOneCount & FlightEntry::kCountMax) - 1 : 0;
  }
  uint64_t repetitions_of_last() const {
    return repetitions(slots_[(head_.load(std::memory_order_relaxed) - 1) & mask_][3].load(std::memory_order_relaxed));
  }
  void add_repetitions() {
    const uint64_t before = repetitions_.load(std::memory_order_relaxed);
    repetitions_.store(before + repetitions_of_last(), std::memory_order_relaxed);
  }

  const std::string name_;
  const uint64_t mask_;
  const std::unique_ptr<Slot[]> slots_;
  std::atomic<uint64_t> head_{0};
  std::atomic<uint64_t> repetitions_{0};  // of all entries but the last
  bool last_repeats_ = false;             // the last entry is a repeating one
};

// What can be known about a peer without asking the holder: for readers of the recorder, the watchdog, and metrics.
// Threads: the holder writes the counts, anybody reads them.
struct PeerTrack {
  uint32_t id = 0;
  uint32_t pid = 0;
  std::string name;
  const char* transport = "";
  std::atomic<PeerState> state{};
  std::atomic<uint64_t> outstanding{0};  // works handed to the transport and not retired
  std::atomic<uint64_t> queued{0};       // turns to post that wait in the engine
  std::atomic<uint64_t> moves{0};        // grows whenever works are retired or turns are taken
  std::atomic<uint64_t> refused{0};      // posts that the transport accepted only in part: the rest is tried again
  std::atomic<uint64_t> failed{0};       // transfers that failed, and scatters by their first failing target
  uint32_t rail_count = 0;               // of `rails`; 0: not counted (EngineOptions::counts_traffic)
  std::unique_ptr<RailTraffic[]> rails;  // indexed by our rail of the transport
};

// A few words about a rare event, for which an entry has no room.
struct FlightNote {
  int64_t ticks = 0;
  const char* kind = "";  // static
  std::string peer;
  std::string detail;
};

class FlightRecorder {
 public:
  static constexpr int64_t kBurstNs = 256;
  // entries: per ring, a power of two; 0: off. simulated: null, or the clock of a simulated engine. burst_ns: entries
  // that are on average less than this apart share readings of the clock; 0: one reading per entry.
  FlightRecorder(uint32_t entries, const Clock* simulated, int64_t burst_ns);
  // The engine's transports, in its order. Called once, before anything is recorded for a rail.
  struct Rails {
    const char* transport;
    uint32_t count;
  };
  void set_rails(std::span<const Rails> transports);

  bool is_on() const { return entries_ != 0; }

  // --- progress holder ---
  // Some time has passed: the next entry reads the clock again.
  void new_moment() { ticks_end_ = ticks_; }
  // Into the engine's ring.
  void record(const FlightEntry& entry) { record(0, kAnyRail, entry); }
  // Into the ring of a transport's rail; kAnyRail: the engine's.
  void record(uint32_t transport, uint32_t rail, FlightEntry entry) {
    if (!is_on()) return;
    repeated_.peer = nullptr;
    entry.ticks = next_ticks();
    ring_of(transport, rail).write(entry);
  }
  // What a transfer did as a whole, if the next one may do exactly the same. peer: any pointer that identifies the
  // peer.
  void record_repeatable(const void* peer, uint32_t transport, uint32_t rail, FlightEntry entry) {
    if (!is_on()) return;
    entry.repeats = true;
    record(transport, rail, entry);
    repeated_ = {ring_of(transport, rail).last_count(), peer, entry.bytes, kind_of(entry.imm, entry.op, rail)};
  }
  // True: the last entry, made by record_repeatable(), now also counts this transfer, which is the next one after it.
  // Both must be of the same transport.
  bool repeat(const void* peer, uint32_t rail, uint32_t imm, uint32_t op, uint64_t bytes) {
    const Repeated& last = repeated_;
    if (last.peer != peer || last.bytes != bytes || last.kind != kind_of(imm, op, rail) || ticks_ == ticks_end_)
      return false;
    ++ticks_;
    FlightRing::count_again(last.count);
    return true;
  }

  // --- any thread ---
  std::shared_ptr<PeerTrack> add_peer(const std::string& name, uint32_t pid, const char* transport, PeerState state,
                                      uint32_t rail_count);
  void note(const char* kind, const std::string& peer, const std::string& detail);

  uint32_t ring_count() const { return ring_count_.load(std::memory_order_acquire); }
  const FlightRing& ring(uint32_t index) const { return *rings_[index]; }
  // By index from 0, until null. They take a lock that is held for a few instructions only, and give up after a moment
  // if a thread crashed while holding it. Nothing is allocated.
  std::shared_ptr<const PeerTrack> track(size_t index) const;
  std::shared_ptr<const FlightNote> note(size_t index) const;
  TickClock::Scale scale() const { return clock_.scale(); }

 private:
  // The last entry, if it may be repeated.
  struct Repeated {
    std::atomic<uint64_t>* count = nullptr;
    const void* peer = nullptr;  // null: it may not be repeated
    uint64_t bytes = 0;
    uint64_t kind = 0;
  };
  // Everything else that must be equal, in one word. rail: may be kAnyRail, whose lowest bits differ from any other's.
  static constexpr uint64_t kind_of(uint32_t imm, uint32_t op, uint32_t rail) {
    return imm | uint64_t{op & 0xffff} << 32 | uint64_t{rail} << 48;
  }

  // The only source of entries' times.
  int64_t next_ticks() {
    if (ticks_ == ticks_end_) read_clock();
    return ++ticks_;
  }
  void read_clock();
  FlightRing& ring_of(uint32_t transport, uint32_t rail) {
    return rail == kAnyRail ? *rings_.front() : *rings_[first_ring_[transport] + rail];
  }
  template <typename T>
  std::shared_ptr<const T> at(const std::deque<std::shared_ptr<T>>& list, size_t index) const;

  const uint32_t entries_;
  const TickClock clock_;
  const int64_t burst_ticks_;
  int64_t ticks_ = 0;       // of the last entry
  int64_t ticks_end_ = 0;   // the last tick that the last reading of the clock can serve
  int64_t read_ticks_ = 0;  // that reading
  int64_t uses_ = 1;        // the number of entries that it was meant for
  Repeated repeated_;
  std::array<uint32_t, kTransportsMax> first_ring_{};
  std::vector<std::unique_ptr<FlightRing>> rings_;  // reserved: never moves
  // release: whoever sees the count, such as a thread that dumps while the engine opens, sees the rings.
  std::atomic<uint32_t> ring_count_{0};

  mutable SpinLock lock_;  // guards what follows
  std::deque<std::shared_ptr<PeerTrack>> tracks_;
  std::deque<std::shared_ptr<FlightNote>> notes_;
  uint32_t last_peer_id_ = 0;
};

}  // namespace crossrail
