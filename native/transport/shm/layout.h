// Memory that two processes share. Everything that a peer can write is untrusted: it is copied out once, then checked.
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

inline constexpr uint32_t kLayoutMagic = 0x53525258;       // "XRRS"
inline constexpr uint32_t kOpenRegionsMagic = 0x4f525258;  // "XRRO"
inline constexpr uint32_t kLayoutVersion = 8;
inline constexpr size_t kLine = 64;
inline constexpr uint64_t kRevokedId = uint64_t{1} << 63;  // no id has this bit

// --- one per engine, mapped by all its peers ---

// Whether the engine's progress holder sleeps on an eventfd, which peers receive together with the segment (PeerHome).
struct alignas(kLine) Bell {
  std::atomic<uint32_t> armed;  // a Call; other than kNone, whoever is called for and changes it to kNone must ring
};

// What a sleeping engine is to be woken for. Each includes those before it.
enum Call : uint32_t {
  kNone = 0,  // it polls
  kForWork = 1,
  kForAnswers = 2,  // peers have taken or answered what it sent: it waits for that. Else each write would wake it twice
};

struct HomeSegment {
  uint32_t magic;
  uint32_t version;
  Bell bell;
};

// Peers can only read this: what one of them writes must not cut off the others.
struct OpenRegions {
  uint32_t magic;
  uint32_t version;
  // Slot s holds the id of the open region in that slot; the id with kRevokedId if that region was revoked and the slot
  // is unused since; or 0: closed or closing. See region_slot().
  alignas(kLine) std::atomic<uint64_t> ids[kRegionSlots];
};

// A peer's home as it was passed to us: the segments that we read, and the bell that we ring.
struct PeerHome {
  std::shared_ptr<MemoryMap> map;       // at least sizeof(HomeSegment)
  std::shared_ptr<MemoryMap> open_map;  // at least sizeof(OpenRegions); we may lack the right to write
  HomeSegment* segment = nullptr;       // in map
  const OpenRegions* open = nullptr;    // in open_map
  WakeEvent bell;
};

// --- one per link: from one initiator to one target, made by the initiator ---

inline constexpr uint32_t kRingEntries = 1024;  // per channel; a power of two
// Staging ring per channel; at least twice the chunk. Larger than the nearest caches: it bounds how far one side may be
// ahead.
inline constexpr uint64_t kStageBytes = uint64_t{2} << 20;
inline constexpr uint64_t kStageChunkBytes = uint64_t{64} << 10;  // fits into L2 with source and target
inline constexpr uint64_t kGpuChunkBytes = uint64_t{512}
                                           << 10;  // for GPU memory: a wait costs as much as copying 0.5 MiB
inline constexpr uint32_t kStagedPiecesMax = 256;  // pieces in one staged chunk
static_assert(kStageBytes >= 2 * (std::max(kStageChunkBytes, kGpuChunkBytes) + kStagedPiecesMax * 16));

enum class EntryKind : uint8_t {
  kImms = 1,      // immediates whose bytes are in place
  kStagedWrite,   // bytes in the staging ring, to be put into a region of the target
  kReadRequest,   // the target stages a range of its region into the response channel
  kMessage,       // two-sided message in the staging ring
  kReadResponse,  // on the response channel, from target to initiator
  kService,       // on the service channel: a message between the engines, in the staging ring
};

inline constexpr uint8_t kEntryTaken = 254;
inline constexpr uint8_t kEntryWithdrawn = 255;

struct ImmPair {
  uint32_t imm;
  uint32_t units;
};
inline constexpr uint32_t kImmPairsMax = 7;

// One cache line, so that a short message costs one transfer between cores.
// Invariant: an entry at position p is readable when sequence == uint32_t(p + 1); the producer writes it only after the
// consumer has published consumed > p - kRingEntries.
struct alignas(kLine) Entry {
  std::atomic<uint32_t> sequence;
  EntryKind kind;
  uint8_t count;  // number of pairs in kImms
  // Starts as 0. Before the consumer begins staged work it changes 0 into kEntryTaken, and to withdraw the entry the
  // producer changes 0 into kEntryWithdrawn: the first compare-exchange wins. The consumer then leaves kEntryTaken, or
  // a Status if it failed.
  std::atomic<uint8_t> status;
  uint8_t outcome;  // kReadResponse: 0, or a Status if it failed
  union {
    ImmPair imms[kImmPairsMax];
    struct {
      uint64_t region_id;
      uint64_t offset;       // kReadRequest
      uint64_t stage_at;     // kStagedWrite, kMessage, kReadResponse: offset into the staging ring
      uint32_t stage_bytes;  // table and data (staged write), payload (message, response), length (read request)
      uint32_t pieces;       // entries of the table at the start of a staged write
      uint32_t imm;          // staged write: counted after the bytes are in place,
      uint32_t units;        // by so many units; 0: nothing is counted
      uint32_t tag;          // read request and response
      uint32_t is_bulk;      // staged write: 1 if its bytes should not stay in the caches
    } work;
  };
};
static_assert(sizeof(Entry) == kLine);

// Start of a staged write's block: where each piece goes. The bytes of the pieces follow the table, in order.
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
  // The target's region that the initiator accesses directly now, or 0. For the protocol with close see
  // ShmTransport::touch and RegionTable::withdraw.
  alignas(kLine) std::atomic<uint64_t> hazard;
  // 1: the initiator gave up. Staged work that is not yet executed must not be; immediates and messages stay valid. The
  // initiator sets no hazard any more.
  alignas(kLine) std::atomic<uint32_t> revoked;
  alignas(4096) Channel channels[1];  // channel_count(rail_count)
};
constexpr size_t link_segment_bytes(uint32_t rails) {
  return offsetof(LinkSegment, channels) + sizeof(Channel) * channel_count(rails);
}

}  // namespace crossrail::shm
