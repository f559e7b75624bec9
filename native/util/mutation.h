// Deliberate bugs, to find out whether the checkers find them (./dev sim --mutations). They exist only in the module
// built by cmake/mutations.cmake: everywhere else is_mutated() is false at compile time, and the bug is not compiled
// in.
#pragma once

#include <cstdint>

namespace crossrail {

enum class Mutation : uint8_t {
  kNone,
  kDropImmediate,           // one immediate in eight is not counted
  kCountShareTwice,         // the share of the first of several pieces of a write counts twice
  kImmediateBeforeBytes,    // the immediate does not wait for the slices before it
  kIgnorePage,              // the last of several pages that travel together is left out, yet counted
  kShortPiece,              // off by one in sharding: each piece of a write lacks its last byte
  kCompleteBeforeFlush,     // works on a breaking path fail before the NIC reports that it is flushed
  kCancelEarly,             // a cancel completes at once, whatever is still posted
  kCancelLeavesShare,       // a cancel that came after a share was counted completes nevertheless
  kSkipCloseWait,           // a region is closed without checking who is using it
  kRepostUnasked,           // works in doubt are posted again without asking the peer
  kAnswerBeforeClosing,     // the peer says what it has seen before its own end is closed
  kSeenOfLastEpoch,         // a new epoch begins with the previous one's count
  kForgetCompletion,        // one work in a hundred that is done is never reported
  kAcceptStaleIncarnation,  // a restarted engine is taken for its predecessor of the same name
  kReuseImmediateEarly,     // a number that was released is handed out again at once
  kMessageTwice,            // a message whose acknowledgement was lost is delivered again
  kRecallTaken,             // a delivered message is returned to the sender that cancelled it
  kSkipFenceWait,           // revoke() refuses peers, but does not wait for those using the region
  kKeepOldKey,              // revoke() leaves the NICs the key that peers know
  kCountUnverified,         // a checked write is counted whatever its checksum
  kVerifiedAlsoCounts,      // the immediate of a checked write travels with its bytes as well
  kNeverThaw,               // a peer that was frozen is never reported to move again
  kSlotOneRowLate,          // moe: private rows land a row behind their slot
  kForgetRemainder,         // moe: rows that do not fit the slot are not waited for
  kOneParity,               // moe: odd rounds use the rows' memory of even ones
  kSkipLastWord,            // moe: of the ranks that share memory, the last is not waited for
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
