// Memory that two processes share. Everything a peer can write is untrusted: it is copied out once, then checked.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>

#include "transport/types.h"
#include "util/memory_map.h"
#include "util/wake_event.h"

namespace crossrail::shm {

inline constexpr uint32_t kLayoutMagic = 0x53525258;  // "XRRS"
inline constexpr uint32_t kLayoutVersion = 5;
inline constexpr size_t kLine = 64;
inline constexpr uint64_t kRevokedId = uint64_t{1} << 63;  // no id reaches it

// --- one per engine, mapped by all its peers ---

// Whether the engine's progress holder sleeps: on an eventfd that peers get with the segment (PeerHome).
struct alignas(kLine) Bell {
  std::atomic<uint32_t> armed;  // 1: nobody polls; whoever has news and turns it to 0 must ring
};

struct HomeSegment {
  uint32_t magic;
  uint32_t version;
  Bell bell;
  // Slot s holds the id of the open region in it; the same with kRevokedId, when that one was revoked and nobody has
  // the slot since; or 0: closed or closing. See region_slot().
  alignas(kLine) std::atomic<uint64_t> region_ids[kRegionSlots];
};

// A peer's home as it was passed to us: what we look at, and what we ring.
struct PeerHome {
  std::shared_ptr<MemoryMap> map;  // at least sizeof(HomeSegment)
  HomeSegment* segment = nullptr;  // in it
  WakeEvent bell;
};

// --- one per link: from one initiator to one target, made by the initiator ---

inline constexpr uint32_t kRingEntries = 1024;  // per channel; a power of two
// Staging ring per channel; twice the chunk at least. Longer than the nearest caches: it is what either side may be
// ahead.
inline constexpr uint64_t kStageBytes = uint64_t{2} << 20;
inline constexpr uint64_t kStageChunkBytes = uint64_t{64} << 10;  // beside source and target in the second-level cache
inline constexpr uint64_t kGpuChunkBytes = uint64_t{512}
                                           << 10;  // of memory of GPUs: to wait for a copy takes as long as 0.5 MiB
inline constexpr uint32_t kStagedPiecesMax = 256;  // pieces in one staged chunk
static_assert(kStageBytes >= 2 * (std::max(kStageChunkBytes, kGpuChunkBytes) + kStagedPiecesMax * 16));

enum class EntryKind : uint8_t {
  kImms = 1,      // immediates whose bytes are in place
  kStagedWrite,   // bytes in the staging ring, to be put into a region of the target's
  kReadRequest,   // the target stages a range of its region into the response channel
  kMessage,       // two-sided message in the staging ring
  kReadResponse,  // on the response channel, from target to initiator
  kService,       // on the service channel: what one engine tells the other, in the staging ring
};

inline constexpr uint8_t kEntryTaken = 254;
inline constexpr uint8_t kEntryWithdrawn = 255;

struct ImmPair {
  uint32_t imm;
  uint32_t units;
};
inline constexpr uint32_t kImmPairsMax = 7;

// One line, so that a short message costs one transfer between cores.
// Invariant: an entry at position p is readable when sequence == uint32_t(p + 1); the producer writes it only after
// the consumer has published consumed > p - kRingEntries.
struct alignas(kLine) Entry {
  std::atomic<uint32_t> sequence;
  EntryKind kind;
  uint8_t count;  // pairs of kImms
  // Starts as 0. Before it begins staged work the consumer turns 0 into kEntryTaken, and before it gives up on it the
  // producer turns 0 into kEntryWithdrawn: the compare-exchange that comes first decides. The consumer then leaves
  // kEntryTaken, or a Status when it failed.
  std::atomic<uint8_t> status;
  uint8_t has_imm;
  union {
    ImmPair imms[kImmPairsMax];
    struct {
      uint64_t region_id;
      uint64_t offset;       // kReadRequest
      uint64_t stage_at;     // kStagedWrite, kMessage, kReadResponse: offset into the staging ring
      uint32_t stage_bytes;  // table and data (staged write), payload (message, response), length (read request)
      uint32_t pieces;       // entries of the table at the start of a staged write
      uint32_t wire_imm;     // staged write with has_imm: counted after the bytes are in place
      uint32_t units;        // how much it counts
      uint32_t tag;          // read request and response
      uint32_t reserved;
    } work;
  };
};
static_assert(sizeof(Entry) == kLine);

// Start of a staged write's block: where each piece goes. The bytes follow the table, one piece after the other.
struct StagedPiece {
  uint64_t offset;
  uint32_t length_bytes;
  uint32_t reserved;
};
static_assert(sizeof(StagedPiece) == 16);

// Single producer, single consumer.
struct Channel {
  alignas(kLine) std::atomic<uint64_t> consumed;  // entries the consumer is done with, in order
  alignas(kLine) Entry entries[kRingEntries];
  alignas(4096) std::byte stage[kStageBytes];
};

// Channels of a link: 0 messages, 1 responses (from the target), 2 service, 3.. one per rail of the initiator.
inline constexpr uint32_t kMessageChannel = 0;
inline constexpr uint32_t kResponseChannel = 1;
inline constexpr uint32_t kServiceChannel = 2;
inline constexpr uint32_t kFirstRailChannel = 3;
constexpr uint32_t channel_count(uint32_t rails) { return kFirstRailChannel + rails; }

struct LinkSegment {
  uint32_t magic;
  uint32_t version;
  uint32_t rail_count;
  // Region of the target that the initiator touches directly now, or 0. For the protocol with close see
  // ShmTransport::touch and RegionTable::withdraw.
  alignas(kLine) std::atomic<uint64_t> hazard;
  // 1: the initiator gave up; staged work not yet executed must not be. Immediates and messages stay valid. It sets no
  // hazard any more.
  alignas(kLine) std::atomic<uint32_t> revoked;
  alignas(4096) Channel channels[1];  // channel_count(rail_count)
};
constexpr size_t link_segment_bytes(uint32_t rails) {
  return offsetof(LinkSegment, channels) + sizeof(Channel) * channel_count(rails);
}

}  // namespace crossrail::shm
