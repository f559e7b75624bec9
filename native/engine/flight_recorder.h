// The last operations and events of an engine, kept for the day when it hangs: a bounded ring for each rail, and one for
// what belongs to none.
//
// Threads: the progress holder writes, without locks, system calls or allocation. Anybody reads at any time, also while
// the holder hangs or the process is about to abort. What is overwritten while it is read is told from what is whole
// (FlightRing::read). Time is read anew for every eighth entry, and for the first after a round of the engine; in between it
// is a little later for each entry: no two have the same, so that time orders the entries of all rings.
#pragma once

#include <algorithm>
#include <array>
#include <atomic>
#include <cstdint>
#include <deque>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "transport/types.h"
#include "util/spinlock.h"
#include "util/tick_clock.h"

namespace crossrail {

enum class OpKind : uint8_t;
enum class PeerState : uint8_t;

enum class FlightState : uint8_t {
  // of a transfer, in the engine's ring
  kSubmitted,  // the holder took it over
  kDone,
  kFailed,
  kCancelled,
  // of works, that is pieces of a transfer, in the ring of their rail, or in the engine's where that is the transport's affair
  kPosted,     // the transport has them
  kMoved,      // posted, and over already
  kSent,       // the transport put them on this rail
  kRetired,    // over, well or badly
  kWithdrawn,  // taken back by a cancel
  // what came, in the engine's ring
  kArrived,   // immediates; bytes is how many 48ths of a count
  kReceived,  // messages
  // of a peer, in the engine's ring
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

  int64_t ticks = 0;  // of the recorder's clock, unlike any other entry's
  uint64_t bytes = 0;
  uint32_t transfer = 0;  // TransferWork::serial, 0 none
  uint32_t peer = 0;      // PeerTrack::id, 0 none
  uint32_t imm = kNoImm;
  uint32_t count = 0;  // works, targets, arrivals; kCountMax means that or more
  uint32_t op = 0;     // OpKind + 1, or kNoOp
  FlightState state = FlightState::kSubmitted;
};

// The last `capacity` entries. One writer, any readers.
// Invariant: entry number n lies in slot n modulo capacity; head_ entries have been written whole.
class FlightRing {
 public:
  // capacity: a power of two.
  FlightRing(std::string name, uint32_t capacity)
      : name_(std::move(name)), mask_(capacity - 1), slots_(std::make_unique<Slot[]>(capacity)) {}

  const std::string& name() const { return name_; }
  uint64_t written() const { return head_.load(std::memory_order_acquire); }
  // The oldest entry that may still be there.
  uint64_t oldest() const {
    const uint64_t head = written();
    return head > mask_ ? head - mask_ : 0;
  }

  void write(const FlightEntry& entry) {
    const uint64_t at = head_.load(std::memory_order_relaxed);
    // Pairs with the acquire fence in read(): a reader that got one of the words below also gets the head that was stored
    // before them, and sees that the slot is being overwritten.
    std::atomic_thread_fence(std::memory_order_release);
    Slot& slot = slots_[at & mask_];
    slot[0].store(static_cast<uint64_t>(entry.ticks), std::memory_order_relaxed);
    slot[1].store(entry.bytes, std::memory_order_relaxed);
    slot[2].store(entry.transfer | uint64_t{entry.peer} << 32, std::memory_order_relaxed);
    const uint32_t count = entry.count < FlightEntry::kCountMax ? entry.count : FlightEntry::kCountMax;
    slot[3].store(entry.imm | uint64_t{count} << 32 | uint64_t{entry.op} << 52 | uint64_t(entry.state) << 58,
                  std::memory_order_relaxed);
    // release: who sees the head sees the entry.
    head_.store(at + 1, std::memory_order_release);
  }

  // Entry number `at`, at < written(). False: it has been overwritten, or is being so. The oldest of `capacity` is
  // therefore never given out: its slot is the next to be written.
  bool read(uint64_t at, FlightEntry* entry) const;

 private:
  using Slot = std::array<std::atomic<uint64_t>, 4>;  // two of them to a cache line

  const std::string name_;
  const uint64_t mask_;
  const std::unique_ptr<Slot[]> slots_;
  std::atomic<uint64_t> head_{0};
};

// What is known of a peer without asking the holder: by the recorder's readers, and by the watchdog.
// Threads: counts are the holder's to write, anybody's to read.
struct PeerTrack {
  uint32_t id = 0;
  uint32_t pid = 0;
  std::string name;
  const char* transport = "";
  std::atomic<PeerState> state{};
  std::atomic<uint64_t> outstanding{0};  // works that the transport has
  std::atomic<uint64_t> queued{0};       // turns to post that wait with the engine
  std::atomic<uint64_t> moves{0};        // grows whenever works are retired, or turns taken
};

// A few words about something rare, which an entry has no room for.
struct FlightNote {
  int64_t ticks = 0;
  const char* kind = "";  // static
  std::string peer;
  std::string detail;
};

class FlightRecorder {
 public:
  // entries: of each ring, a power of two; 0: off. simulated: null, or the clock of a simulated engine.
  FlightRecorder(uint32_t entries, const Clock* simulated);
  // Of the engine's transports, in its order of them. Once, before anything is recorded of a rail.
  struct Rails {
    const char* transport;
    uint32_t count;
  };
  void set_rails(std::span<const Rails> transports);

  bool is_on() const { return entries_ != 0; }

  // --- progress holder ---
  // Some time has passed: it is read anew when there is something to record.
  void new_moment() { uses_left_ = 0; }
  // Into the engine's ring.
  void record(FlightEntry entry) {
    if (!is_on()) return;
    entry.ticks = next_ticks();
    rings_.front()->write(entry);
  }
  // Into the ring of a transport's rail; kAnyRail: the engine's.
  void record(uint32_t transport, uint32_t rail, FlightEntry entry) {
    if (!is_on()) return;
    entry.ticks = next_ticks();
    ring_of(transport, rail).write(entry);
  }

  // --- any thread ---
  std::shared_ptr<PeerTrack> add_peer(const std::string& name, uint32_t pid, const char* transport, PeerState state);
  void note(const char* kind, const std::string& peer, const std::string& detail);

  uint32_t ring_count() const { return ring_count_.load(std::memory_order_acquire); }
  const FlightRing& ring(uint32_t index) const { return *rings_[index]; }
  // One after the other, by index from 0 until there is none. They take a lock that is held for a few instructions, and
  // give up after a moment if a thread that crashed holds it. Nothing is allocated.
  std::shared_ptr<const PeerTrack> track(size_t index) const;
  std::shared_ptr<const FlightNote> note(size_t index) const;
  TickClock::Scale scale() const { return clock_.scale(); }

 private:
  static constexpr uint32_t kUsesMax = 8;

  // The one place that time comes from.
  int64_t next_ticks() {
    if (uses_left_ == 0) {
      uses_left_ = kUsesMax;
      last_ticks_ = std::max(last_ticks_, clock_.ticks());
    }
    --uses_left_;
    return ++last_ticks_;
  }
  FlightRing& ring_of(uint32_t transport, uint32_t rail) {
    return rail == kAnyRail ? *rings_.front() : *rings_[first_ring_[transport] + rail];
  }
  template <typename T>
  std::shared_ptr<const T> at(const std::deque<std::shared_ptr<T>>& list, size_t index) const;

  const uint32_t entries_;
  const TickClock clock_;
  int64_t last_ticks_ = 0;
  uint32_t uses_left_ = 0;  // of the last reading
  std::array<uint32_t, kTransportsMax> first_ring_{};
  std::vector<std::unique_ptr<FlightRing>> rings_;  // reserved: never moves
  // release: who sees the count, a thread that dumps while the engine opens, sees the rings.
  std::atomic<uint32_t> ring_count_{0};

  mutable SpinLock lock_;  // guards what follows
  std::deque<std::shared_ptr<PeerTrack>> tracks_;
  std::deque<std::shared_ptr<FlightNote>> notes_;
  uint32_t last_peer_id_ = 0;
};

}  // namespace crossrail
