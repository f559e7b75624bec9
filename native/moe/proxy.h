// Rows for ranks that share no memory with us: what is written to whom, and what is waited for. The protocol is that of
// arXiv 2510.27656, section 6: Routes go first. Before any counts are known, the first rows for each rank go into a
// slot that only we write. The remainder goes to an offset that both sides compute. Results come back as one write per
// rank. Two things differ from the paper:
//  - There are two of every buffer, by the parity of the round, and no barriers. A rank opens round n once it has ended
//  round n - 2. That required the results of all ranks, so each has taken its rows of n - 2, and its buffers are free.
//  A rank that has the routes of round n from all others knows that they have read its results of n - 2. (With node
//  sums it has the results of one rank of each node, which waited for that node: see moe/node_sums.h.)
//  - Each source has immediates of its own, so an error can name the rank that is late.
//
// Lifecycle: 1. Constructed; it has its immediates. 2. connect() for each far rank. 3. Rounds. 4. Closed with the
// engine, or destroyed.
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

// A rank's memory for far rows: two regions, with the same parts on all ranks. Offsets are in bytes, from the start of
// the region. Each part exists twice, once per parity. A region may have more that this file does not use (signals,
// device/round_words.h).
struct FarMemory {
  // In the region of routes, which the host reads and writes.
  uint64_t routes_in = 0;            // [world] rows of route_bytes, by source rank
  uint64_t routes_out = 0;           // one row of route_bytes
  uint64_t routes_parity_bytes = 0;  // distance between the parts of even rounds and those of odd ones
  // In the region of rows, which may be GPU memory: the proxy never touches its bytes.
  uint64_t rows_in = 0;      // rows of stride_bytes: slots, then remainders, where Placement puts them
  uint64_t results_in = 0;   // rows of y_bytes, by position in our own order of routes
  uint64_t rows_out = 0;     // rows of stride_bytes, in the order of Placement::send_far
  uint64_t results_out = 0;  // rows of y_bytes, in the order of Placement::return_far
  uint64_t rows_parity_bytes = 0;

  // int32 [experts] and, with dp_size > 1, a hash of the routes; rounded up. The last kFarewellBytes hold the reason
  // for a farewell: in rows of even rounds. In those of odd ones they are the caller's.
  uint64_t route_bytes = 0;
  uint64_t stride_bytes = 0;
  uint64_t y_bytes = 0;
};

// The two regions that FarMemory divides.
template <typename RegionOf>
struct FarRegions {
  RegionOf routes;
  RegionOf rows;
};

enum class FarStep : uint8_t { kRoutes, kRows, kResults, kFarewell };
inline constexpr uint32_t kFarSteps = 4;
inline constexpr uint32_t kParities = 2;

// kMaskedOut: the others have masked this rank, and have fenced off its writes.
enum class FarResult : uint8_t { kReady, kLate, kPeerLost, kLeft, kMaskedOut, kFailed, kClosed, kInterrupted };
struct FarOutcome {
  FarResult result;
  uint32_t rank;       // the rank that the result is about; meaningless with kReady
  std::string detail;  // for kFailed
};

// Why a rank stops taking part, as stated in its farewell: a number that its peers can interpret, and words for people.
// Words are cut to kFarewellWords bytes, and end at the first 0.
struct Reason {
  std::optional<uint32_t> number = {};
  std::string words = {};
};
inline constexpr uint32_t kFarewellBytes = 256;
inline constexpr uint32_t kFarewellWords = kFarewellBytes - sizeof(uint32_t);

// Threads: one at a time. Invariant: for each step and parity, everything expected of the sources before next_ has been
// taken from their counters.
class Proxy {
 public:
  // The layout outlives the proxy. masks: ranks may be left out. Then each rank gets separate writes, since a failed
  // batch reports the fate of a single target only.
  Proxy(EngineRef engine, const Layout& layout, uint32_t rank, const FarMemory& memory, FarRegions<RegionRef> regions,
        bool masks = false);
  ~Proxy();
  Proxy(const Proxy&) = delete;
  Proxy& operator=(const Proxy&) = delete;

  // Ascending.
  std::vector<uint32_t> far_ranks() const;
  // The immediates that the rank must use for its writes to us, by step and parity.
  std::vector<uint32_t> imms_for(uint32_t rank) const;
  // regions, imms: the rank's own, and what its imms_for() returned for us.
  void connect(uint32_t rank, FarRegions<RemoteRegionRef> regions, std::span<const uint32_t> imms);
  // For a rank that shares our memory. A wait for any rank gives up when this one is lost, unless it has said farewell
  // by this word; or when it has said farewell without the word of its results. results: by parity. The words outlive
  // the proxy. Whoever waits here has already seen the words of all near ranks for this half.
  void watch(PeerRef near, uint32_t rank, const Word& farewell, std::span<const Word, kParities> results);
  // From now on, whatever packs rows for this far rank writes them into its memory: the rows that fit our slot, before
  // send_rows, and all results, before send_results. The proxy then posts only their counts.
  void reach(uint32_t rank);
  bool is_reached(uint32_t rank) const;
  // That rank writes to our memory in the same way, and signals it (device::Signals). Whoever waits for the signal need
  // not wait for the rank's counts.
  void hear(uint32_t rank);
  // Goes on without this rank, which is far or watched: from now on it is not written to, waited for or reported.
  void leave_out(uint32_t rank);

  // --- one round, in this order; calls that write return at once ---
  // Waits until everything written from this parity's memory has left it: then it may be filled again.
  FarOutcome wait_sent(uint32_t round, Deadline deadline, const InterruptCheck& interrupted);
  // The routes of our own group, [experts]. They are copied. hash: identifies the routes; sent only with dp_size > 1.
  void send_routes(uint32_t round, std::span<const int32_t> counts, uint64_t hash = 0);
  // The first rows for each rank, from rows_out.
  void send_rows(uint32_t round);
  // The routes of a far rank, [experts], once they have arrived. Untrusted: the caller checks them.
  std::span<const int32_t> routes_of(uint32_t round, uint32_t rank) const;
  // Likewise; with dp_size > 1.
  uint64_t hash_of(uint32_t round, uint32_t rank) const;
  // The remainder. The placement also decides how many writes wait(kRows) expects. null: there is no remainder, as in a
  // round that was refused.
  void send_remainder(uint32_t round, const Placement* placement);
  // Results from results_out; null: there are none.
  void send_results(uint32_t round, const Placement* placement);
  // The rest of a round for which some rank has too little room: no rows other than those already sent, and no results.
  void refuse(uint32_t round, bool has_sent_rows);

  // Instead of send_results (moe/node_sums.h): results are those of our partners from here on. Then send_sums once for
  // each origin whose partner we are: `rows` rows of results_out from first_row on.
  void take_sums(uint32_t round) { takes_sums_[parity_of(round)] = true; }
  void send_sums(uint32_t round, uint32_t origin, uint64_t first_row, uint64_t rows);

  // Tells the others that we no longer take part, once everything that we sent before has arrived. Returns when each of
  // them has been told or is gone, or at the deadline. why: what they can read with why_left, if anything.
  // kInterrupted: call it again.
  FarOutcome say_farewell(const Reason& why, Deadline deadline, const InterruptCheck& interrupted = {});
  // The reason given by a rank that has said farewell. Untrusted: the caller checks it.
  Reason why_left(uint32_t rank) const;

  // Waits until all of this step has arrived. May be called again after kLate.
  FarOutcome wait(FarStep step, uint32_t round, Deadline deadline, const InterruptCheck& interrupted);
  // Takes what has arrived of this step, without waiting. True: everything. Failures are reported by wait() only.
  bool take(FarStep step, uint32_t round);
  // Whether all of this step has arrived, apart from what is signalled. Takes nothing.
  bool has_come_unsignalled(FarStep step, uint32_t round);
  // Whether no write from this parity's memory is in flight any more.
  bool has_sent(uint32_t round) const;
  // Whether all of this step has come from that far rank, in the last opened round of that parity. Takes nothing.
  bool has_come_from(FarStep step, uint32_t round, uint32_t rank);

 private:
  struct Member {
    uint32_t rank;
    bool is_partner = false;  // sums come from it (moe/node_sums.h)
    bool sends_rows;          // it has our index in its group: rows are exchanged with it
    uint32_t turn = 0;        // in Layout::far_ranks_in_turn
    FarRegions<RemoteRegionRef> regions;
    std::array<uint32_t, kFarSteps * kParities> imms{};  // for our writes to it
    std::array<Ref<ImmCounter>, kFarSteps * kParities> counters;
    uint64_t slot_offset = 0;  // in its rows_in, the slot that only we write
    bool is_reached = false;
    bool is_heard = false;
    bool is_left_out = false;
    std::optional<int64_t> farewell_ns;  // the time at which a wait first saw that it has left
  };
  struct Watched {
    PeerRef peer;
    uint32_t rank;
    const Word* farewell;  // null for a far rank
    const Word* results;   // [kParities], likewise
    bool is_left_out = false;
  };
  // A batch, or a write to one member.
  struct Sent {
    TransferRef transfer;
    const Member* to;  // null for a batch
  };
  // The arguments of one scatter: what a step writes to each member, in their order. dsts is null if there is nothing.
  struct Batch {
    std::vector<const Member*> to;
    std::vector<RemoteRegion*> dsts;
    std::vector<uint64_t> src_offsets;
    std::vector<uint64_t> dst_offsets;
    std::vector<uint64_t> lengths;
    std::vector<uint32_t> imms;
    void resize(size_t members);
    void move(size_t from, size_t here);
  };
  static uint32_t parity_of(uint32_t round) { return round % kParities; }
  static size_t slot_of(FarStep step, uint32_t round) {
    return static_cast<size_t>(step) * kParities + parity_of(round);
  }
  Member& member(uint32_t rank);
  const Member& member(uint32_t rank) const { return const_cast<Proxy*>(this)->member(rank); }
  // Offset of a part for this round's parity: in the region of routes, and in that of rows.
  uint64_t at_routes(uint64_t part, uint32_t round) const {
    return part + parity_of(round) * memory_.routes_parity_bytes;
  }
  // Offset of a farewell in the region of routes: the last bytes of that row of even rounds.
  uint64_t at_farewell(uint64_t row) const { return row + memory_.route_bytes - kFarewellBytes; }
  uint64_t at_rows(uint64_t part, uint32_t round) const;
  // What is sent of our routes: their counts and, if others must have the same, their hash.
  uint64_t counts_bytes() const { return layout_.shape().experts * sizeof(int32_t); }
  uint64_t hash_bytes() const { return layout_.shape().dp_size > 1 ? sizeof(uint64_t) : 0; }
  // add() records a write, at most one per member. post() posts all recorded writes, in the members' order; with masks_
  // each separately.
  void add(const Member& to, FarStep step, uint32_t round, uint64_t from_offset, uint64_t to_offset,
           uint64_t length_bytes);
  void post(FarStep step, uint32_t round);
  void post_part(FarStep step, uint32_t round, size_t begin, size_t count);
  uint32_t expected_of(FarStep step, uint32_t round, size_t member) const;
  FarOutcome failed_write(std::optional<FarStep> step, uint32_t round);
  uint32_t rank_of(const TransferInfo& failed) const;
  uint32_t slowest() const;
  // What prevents a wait for `awaited` from ending. step: the one that is waited for; none: the wait is for our own
  // writes.
  FarOutcome trouble(std::optional<FarStep> step, uint32_t round, Member& awaited);
  bool has_left(Member& member, bool was_refused);
  std::optional<uint32_t> left_before(FarStep step, uint32_t round);
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
  std::array<std::vector<int32_t>, kParities> counts_;          // our routes in the latest round of each parity
  std::array<std::vector<uint32_t>, kParities> rows_expected_;  // writes of rows, by member
  std::array<bool, kParities> takes_sums_{};                    // whether results come from partners only
  std::array<std::vector<Sent>, kParities> sent_;
  Batch batch_;  // without dsts between calls
};

}  // namespace crossrail::moe
