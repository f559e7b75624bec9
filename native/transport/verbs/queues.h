// The depths of the queues, and how a completion identifies what it is about.
#pragma once

#include <cstdint>

#include "transport/rdma/nic.h"
#include "transport/transport.h"

namespace crossrail::verbs {

// --- of each path ---
inline constexpr uint32_t kPathWorks = 256;     // 256 KiB in flight with pages of 1 KiB: 400 Gbit/s for 5 us
inline constexpr uint32_t kPathFragments = 64;  // sent and not acknowledged
// Small payloads are embedded in the work request, which saves the NIC a memory read. A larger limit would make each
// queue entry larger.
inline constexpr uint32_t kWorkInlineBytes = 64;
inline constexpr uint32_t kFragmentInlineBytes = 128;

// --- of a NIC ---
// Zero-length receives, which immediates use up; replenished in the same poll that takes them, in chains.
inline constexpr uint32_t kImmReceives = 4096;
inline constexpr uint32_t kFragmentReceives = 256;
inline constexpr uint32_t kDatagramReceives = 128;
inline constexpr uint32_t kFragmentSlots =
    128;  // that all paths send from, to begin with, and so many more when they are used up
inline constexpr uint32_t kDatagramSlots = 32;
inline constexpr uint32_t kReplenishChain = 64;
inline constexpr uint32_t kDatagramHeaderBytes = 40;  // what the NIC prepends to a datagram: its route

// The queue of receive completions: each posted receive makes one entry, and is posted again only after that was taken.
// So
//   the receives of immediates + those of fragments + those of datagrams,
// and, of devices in software, what their queue takes beyond the receives of fragments (Receives::make_up_for_path):
// they round up to a power of two, from one more.
inline constexpr uint32_t kFragmentSpares = kFragmentReceives;
inline constexpr uint32_t kReceiveEntries = kImmReceives + kFragmentReceives + kFragmentSpares + kDatagramReceives;
static_assert(kReceiveEntries < 8192, "devices round up to a power of two: no more of it for the spares");

// The queue of send completions: a work request makes at most one entry (with one in every few signalled, or failing,
// each one). All paths together have at most kSendsOutstanding posted that are not known to be finished, however many
// paths there are; what a path left behind is subtracted only once the queue was seen empty. So
//   works and fragments of all paths + datagrams.
inline constexpr uint32_t kSendsOutstanding = 16000;
inline constexpr uint32_t kSendEntries = kSendsOutstanding + kDatagramSlots;
static_assert(kSendsOutstanding >= kPathWorks + kPathFragments);
static_assert(kSendEntries < 16384, "devices round up to a power of two, some from one more");
// Three quarters are first come, first served: a path may have no more works, and no more fragments, than this fraction
// of what is left of them, which lets 40 paths be full. The last quarter is reserved for paths that have just a few:
// some 340 peers can stand still, with everything that was posted to them, and leave room for others. Short fragments
// (pings, and answers to them) have room when others have none.
inline constexpr uint32_t kShareDivisor = 8;
inline constexpr uint32_t kSendsKept = kSendsOutstanding / 4;
inline constexpr uint32_t kPathWorksKept = 4;
inline constexpr uint32_t kPathFragmentsKept = 4;
inline constexpr uint32_t kPathShortFragmentsKept = 8;
static_assert((kSendsOutstanding - kSendsKept - kPathWorks) / kShareDivisor >= kPathWorks, "alone it has all its room");

// At least one in this many works of a path is signalled, and always the last one of a call.
inline constexpr uint32_t kSignalEvery = 32;
// The most work requests behind one doorbell (RdmaOptions::chain_length): as many as a path is handed at once.
inline constexpr uint32_t kChainMax = RdmaOptions::kChainMax;

// The work request id that a completion returns: kind << 56 | path << 32 | value.
enum class Tag : uint8_t {
  kWork = 1,         // value: the lower half of its cookie
  kFragment,         // value: its slot
  kDatagram,         // value: its slot
  kImmReceive,       // no value
  kFragmentReceive,  // value: its slot
  kDatagramReceive   // value: its slot
};
inline constexpr uint32_t kPathsMax = 1u << 24;

constexpr uint64_t tagged(Tag tag, uint32_t path, uint32_t value) {
  return uint64_t{static_cast<uint8_t>(tag)} << 56 | uint64_t{path} << 32 | value;
}
constexpr Tag tag_of(uint64_t id) { return static_cast<Tag>(id >> 56); }
constexpr uint32_t path_of(uint64_t id) { return static_cast<uint32_t>(id >> 32) & (kPathsMax - 1); }
constexpr uint32_t value_of(uint64_t id) { return static_cast<uint32_t>(id); }

}  // namespace crossrail::verbs
