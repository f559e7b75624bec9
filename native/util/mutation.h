// Deliberate mistakes, to find out whether the checkers find them (./dev sim --mutations). They are in no module but
// the one of cmake/mutations.cmake: elsewhere is_mutated() is false at compile time, and its mistake is not there.
#pragma once

#include <cstdint>

namespace crossrail {

enum class Mutation : uint8_t {
  kNone,
  kDropImmediate,           // one immediate in eight is not counted
  kCountShareTwice,         // of a write in several pieces, the first piece's share counts double
  kImmediateBeforeBytes,    // the immediate does not wait for the slices before it
  kIgnorePage,              // of pages that travel together the last is left out, though counted
  kShortPiece,              // off by one in sharding: of a write in pieces each lacks its last byte
  kCompleteBeforeFlush,     // what is on a path that breaks has failed before the NIC says that it is flushed
  kCancelEarly,             // a cancel completes at once, whatever is still posted
  kCancelLeavesShare,       // a cancel that came after a share was counted completes all the same
  kSkipCloseWait,           // a region is closed without a look at who is at it
  kRepostUnasked,           // what is in doubt is posted again without asking the peer
  kAnswerBeforeClosing,     // the peer says what it has seen before its own end is closed
  kSeenOfLastEpoch,         // a new epoch begins with the count of the last one
  kForgetCompletion,        // one work in a hundred that is done is never reported
  kAcceptStaleIncarnation,  // a restarted engine is taken for the one that had its name before
  kReuseImmediateEarly,     // a number that was released is handed out again at once
  kMessageTwice,            // a message whose acknowledgement was lost is delivered again
  kRecallTaken,             // a message that was delivered is given back to who cancelled it
  kSkipFenceWait,           // revoke() refuses peers, and does not wait for who is at the region
  kKeepOldKey,              // revoke() leaves the NICs the key that peers know
  kCountUnverified,         // a checked write is counted whatever its sum
  kVerifiedAlsoCounts,      // the immediate of a checked write travels with its bytes as well
  kNeverThaw,               // a peer that stood still is never said to move again
  kSlotOneRowLate,          // of moe: private rows land a row behind their slot
  kForgetRemainder,         // of moe: rows that do not fit the slot are not waited for
  kOneParity,               // of moe: rounds of odd number use the rows' memory of even ones
  kSkipLastWord,            // of moe: of ranks that share memory the last one is not waited for
};

#ifdef CROSSRAIL_MUTATIONS
// The one that the environment variable CROSSRAIL_MUTATION names, by its number, for the life of the process.
bool is_mutated(Mutation mutation);
// Of the times that it is asked, one in `of`: the same ones in every run.
bool is_mutated_now(Mutation mutation, uint32_t of);
#else
constexpr bool is_mutated(Mutation) { return false; }
constexpr bool is_mutated_now(Mutation, uint32_t) { return false; }
#endif

}  // namespace crossrail
