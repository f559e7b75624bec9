// Rows for ranks that share no memory with us: what is written to whom, and what is waited for. As in arXiv 2510.27656,
// section 6: routes first; then, before any counts are known, the first rows for each rank into a slot that only we write;
// then the remainder, at an offset that both sides compute; results come back as one write for each rank. Departures:
//  - Two of everything, by the parity of the round, and no barriers. A rank opens round n once it has ended round n - 2,
//    which takes results of all ranks: so each of them has taken its rows of n - 2, and their buffers are free again. And a
//    rank that has routes of round n of all others knows that these have read its results of n - 2.
//    (With sums of nodes it has results of one rank of each node, which waited for all of it: see moe/node_sums.h.)
//  - An immediate for each source, so that what is missing has a name.
//
// Lifecycle: 1. made: it has immediates. 2. connect() for each far rank. 3. rounds. 4. closed with the engine, or destroyed.
#pragma once

#include <array>
#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "engine/engine.h"
#include "moe/layout.h"
#include "moe/words.h"

namespace crossrail::moe {

// What a rank has for far rows, the same on all ranks: two regions, these parts of each twice, and others that are nothing to
// us (signals, device/round_words.h). In bytes, from its start.
struct FarMemory {
  // Of routes, which the host reads and writes.
  uint64_t routes_in = 0;            // [world] rows of route_bytes, by source rank
  uint64_t routes_out = 0;           // one row of route_bytes
  uint64_t routes_parity_bytes = 0;  // from the parts of even rounds to those of odd ones
  // Of rows, which nobody touches here: they may be in a GPU's memory.
  uint64_t rows_in = 0;      // rows of stride_bytes: slots, then remainders, as Placement has them
  uint64_t results_in = 0;   // rows of y_bytes, by position in our own order of routes
  uint64_t rows_out = 0;     // rows of stride_bytes, as Placement::send_far has them
  uint64_t results_out = 0;  // rows of y_bytes, as Placement::return_far has them
  uint64_t rows_parity_bytes = 0;

  uint64_t route_bytes = 0;  // int32 [experts], rounded up; the last four bytes are for a farewell
  uint64_t stride_bytes = 0;
  uint64_t y_bytes = 0;
};

// Laid out as FarMemory says.
template <typename RegionOf>
struct FarRegions {
  RegionOf routes;
  RegionOf rows;
};

enum class FarStep : uint8_t { kRoutes, kRows, kResults, kFarewell };
inline constexpr uint32_t kFarSteps = 4;
inline constexpr uint32_t kParities = 2;

// kMaskedOut: a rank that others went on without finds its writes fenced off.
enum class FarResult : uint8_t { kReady, kLate, kPeerLost, kLeft, kMaskedOut, kFailed, kClosed, kInterrupted };
struct FarOutcome {
  FarResult result;
  uint32_t rank;       // that it is about, unless kReady
  std::string detail;  // of kFailed
};

// Threads: one at a time.
// Invariant: of each step and parity, the counters of sources before next_ have given what was expected of them.
class Proxy {
 public:
  // The layout outlives the proxy. masks: ranks may be left out; then each has writes of its own, since a batch tells of
  // one target only what became of it.
  Proxy(EngineRef engine, const Layout& layout, uint32_t rank, const FarMemory& memory, FarRegions<RegionRef> regions,
        bool masks = false);
  ~Proxy();
  Proxy(const Proxy&) = delete;
  Proxy& operator=(const Proxy&) = delete;

  // Ascending.
  std::vector<uint32_t> far_ranks() const;
  // By step and parity: the numbers by which that rank is to count here.
  std::vector<uint32_t> imms_for(uint32_t rank) const;
  // What that rank said of itself: its regions, and the numbers by which we count there.
  void connect(uint32_t rank, FarRegions<RemoteRegionRef> regions, std::span<const uint32_t> imms);
  // Of ranks that share our memory: who waits for anyone gives up when one of them is lost, unless it said farewell, by
  // this word, which lives as long as we do. Whoever waits here has all words of this half.
  void watch(PeerRef near, uint32_t rank, const Word& farewell);
  // From now on whoever packs rows for that far rank writes them there by himself: those that fit our slot, before
  // send_rows, and all results, before send_results. Here they are only counted.
  void reach(uint32_t rank);
  bool is_reached(uint32_t rank) const;
  // That rank does so here, and signals it (device::Signals): who waits for the signal need not wait for its counts.
  void hear(uint32_t rank);
  // Goes on without that rank, far or watched: nothing is written to it or waited for from it any more, nor said of it.
  void leave_out(uint32_t rank);

  // --- one round, in this order; what writes returns at once ---
  // Whether what was written from this parity's memory has gone: it may be filled. False is a failure or a deadline.
  FarOutcome wait_sent(uint32_t round, Deadline deadline, const InterruptCheck& interrupted);
  // The routes of our own group, [experts], which are kept.
  void send_routes(uint32_t round, std::span<const int32_t> counts);
  // The first rows for each rank, out of rows_out.
  void send_rows(uint32_t round);
  // Routes of a far rank, [experts], once they have come. Written by that rank: to be checked.
  std::span<const int32_t> routes_of(uint32_t round, uint32_t rank) const;
  // The remainder; what wait(kRows) expects follows from it. null: the round came to nothing, there is none.
  void send_remainder(uint32_t round, const Placement* placement);
  // Results out of results_out; null: there are none.
  void send_results(uint32_t round, const Placement* placement);

  // Instead of send_results, once for each partner (moe/node_sums.h): so many rows of results_out, from that row on.
  void send_sums(uint32_t round, uint32_t partner, uint64_t first_row, uint64_t rows);

  // We take part no more: who waits for us is told, once all that we sent before is there. Returns when all have been told,
  // or are gone, or at the deadline. why: a number for them, if it has one.
  void say_farewell(std::optional<uint32_t> why, Deadline deadline);
  // That of a rank that has said farewell. Written by that rank: to be checked.
  std::optional<uint32_t> why_left(uint32_t rank) const;

  // Until all of this step has come. May be repeated after kLate.
  FarOutcome wait(FarStep step, uint32_t round, Deadline deadline, const InterruptCheck& interrupted);
  // Without waiting: takes what has come of this step. Whether that is all; what may have failed meanwhile, wait() says.
  bool take(FarStep step, uint32_t round);
  // Whether all of this step has come but what is signalled. Takes nothing.
  bool has_come_unsignalled(FarStep step, uint32_t round);
  // Whether nothing of what was written from this parity's memory is under way any more.
  bool has_sent(uint32_t round) const;
  // Whether all of this step has come from that far rank, in the round last opened of that parity. Takes nothing.
  bool has_come_from(FarStep step, uint32_t round, uint32_t rank);

 private:
  struct Member {
    uint32_t rank;
    bool is_partner = false;  // sums go to it, and come from it
    bool sends_rows;          // of our index in its group: rows go between it and us
    uint32_t turn = 0;        // Layout::far_ranks_in_turn
    FarRegions<RemoteRegionRef> regions;
    std::array<uint32_t, kFarSteps * kParities> imms{};  // there
    std::array<Ref<ImmCounter>, kFarSteps * kParities> counters;
    uint64_t slot_offset = 0;  // there, in rows_in: of the slot that only we write
    bool is_reached = false;
    bool is_heard = false;
    bool is_left_out = false;
    std::optional<int64_t> farewell_ns;  // when a wait first saw that it has left
  };
  struct Watched {
    PeerRef peer;
    uint32_t rank;
    const Word* farewell;  // null: it is far
    bool is_left_out = false;
  };
  // A batch, or the write to one member.
  struct Sent {
    TransferRef transfer;
    const Member* to;  // null: several
  };
  // One member's part of a step; dst null: none.
  struct Slice {
    const Member* to = nullptr;
    RemoteRegion* dst = nullptr;
    uint64_t src_offset = 0;
    uint64_t dst_offset = 0;
    uint64_t length_bytes = 0;
    uint32_t imm = 0;
  };
  // What is posted as one scatter.
  struct Batch {
    std::vector<RemoteRegion*> dsts;
    std::vector<uint64_t> src_offsets;
    std::vector<uint64_t> dst_offsets;
    std::vector<uint64_t> lengths;
    std::vector<uint32_t> imms;
  };
  static uint32_t parity_of(uint32_t round) { return round % kParities; }
  static size_t slot_of(FarStep step, uint32_t round) {
    return static_cast<size_t>(step) * kParities + parity_of(round);
  }
  Member& member(uint32_t rank);
  const Member& member(uint32_t rank) const { return const_cast<Proxy*>(this)->member(rank); }
  // Offsets in the region of routes, and in that of rows.
  uint64_t at_routes(uint64_t part, uint32_t round) const {
    return part + parity_of(round) * memory_.routes_parity_bytes;
  }
  // In the region of routes: the last bytes of that row, of even rounds.
  uint64_t at_farewell(uint64_t row) const { return row + memory_.route_bytes - sizeof(uint32_t); }
  uint64_t at_rows(uint64_t part, uint32_t round) const { return part + parity_of(round) * memory_.rows_parity_bytes; }
  // Adds a write, at most one for each member; and posts what was added, in their turns.
  void add(const Member& to, FarStep step, uint32_t round, uint64_t from_offset, uint64_t to_offset,
           uint64_t length_bytes);
  void post(FarStep step, uint32_t round);
  void post_batch(FarStep step, uint32_t round, const Member* to);
  uint32_t expected_of(FarStep step, uint32_t round, size_t member) const;
  FarOutcome failed_write(std::optional<FarStep> step, uint32_t round);
  uint32_t rank_of(const TransferInfo& failed) const;
  uint32_t slowest() const;
  // step: that is waited for; none: until what was sent has gone.
  FarOutcome trouble(std::optional<FarStep> step, uint32_t round, Member& awaited);
  bool has_left(Member& member, bool was_refused);
  bool has_ended(uint32_t far_rank, FarStep step, uint32_t round);
  bool has_come(FarStep step, uint32_t round, size_t index);

  const EngineRef engine_;
  const Layout& layout_;
  const uint32_t rank_;
  const uint32_t group_;
  const FarMemory memory_;
  const FarRegions<RegionRef> regions_;
  const bool masks_;
  std::vector<Member> members_;
  std::vector<Watched> watched_;
  std::array<size_t, kFarSteps * kParities> next_{};
  std::array<std::vector<int32_t>, kParities> counts_;          // ours, of each parity's round
  std::array<std::vector<uint32_t>, kParities> rows_expected_;  // writes of rows, by member
  std::array<bool, kParities> takes_sums_{};                    // results come from partners only
  std::array<std::vector<Sent>, kParities> sent_;
  std::vector<Slice> slices_;  // by turn; none between calls
  Batch batch_;                // empty between calls; keeps its storage
};

}  // namespace crossrail::moe
