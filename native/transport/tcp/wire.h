// What travels on a connection after the handshake: frames made of a header, metadata and a payload. Little-endian.
//
// One *link* per direction: the initiator's connections carry its operations; acknowledgements and the data of its
// reads come back. A link has *channels*: one per pair of rails and lane. A channel outlives its connections: its
// operations are numbered (from 1, in the order of their frames), and the acceptor remembers the last one that it has
// placed. So after a connection broke both sides know what was placed, and nothing is counted twice.
#pragma once

#include <cstddef>
#include <cstdint>

namespace crossrail::tcp {

enum class FrameType : uint8_t {
  // initiator to acceptor
  kWrite = 1,  // WriteMeta, `count` WriteEntry, payload: the entries' bytes one after the other
  kRead,       // ReadMeta
  kMessage,    // MessageMeta, payload
  kResolve,    // ResolveMeta: how much of this broken channel was placed?
  kPing,       // PingMeta
  // acceptor to initiator, except acknowledgements, which travel either way
  kReadData,  // ReadDataMeta, payload
  kReadEnd,   // ReadEndMeta, text: all data was sent, or why not
  kAck,       // AckMeta
  kTaken,     // TakenMeta: messages were taken over
  kRefused,   // RefusedMeta, text
  kResolved,  // ResolvedMeta. Message outcomes are told again
  kPong,      // PingMeta
  // orderly ends
  kBye,      // initiator to acceptor, text: of the link
  kClosing,  // acceptor to initiator, text: of the engine
  // Whoever accepted a connection may ask whoever made it to use it for operations of its own.
  kShare,    // ShareMeta
  kShared,   // the answer: SharedMeta, text: yes, or why not
  kService,  // initiator to acceptor: a message between the engines, as metadata; an operation of its channel
  kRecall    // initiator to acceptor, RecallMeta: a message still waiting for a buffer shall not get one
};
inline constexpr uint8_t kFrameTypeMax = static_cast<uint8_t>(FrameType::kRecall);

struct FrameHeader {
  uint8_t type;
  uint8_t mark;         // kFrameMark xor all other bytes but the sum: checked before waiting for more bytes
  uint16_t count;       // entries in the metadata
  uint16_t operations;  // number of operations that this frame completes
  uint16_t meta_bytes;
  uint32_t payload_bytes;
  uint32_t sum;  // of the header, with 0 here, and the metadata (frames.h)
};
static_assert(sizeof(FrameHeader) == 16);
inline constexpr uint8_t kFrameMark = 0xc7;

struct WriteMeta {
  uint64_t region_id;  // 0: an immediate without a region
};
struct WriteEntry {
  uint64_t offset;
  uint32_t length;  // the top bit marks an immediate
  uint32_t wire_imm;
};
inline constexpr uint32_t kHasImm = 1u << 31;

struct ReadMeta {
  uint64_t region_id;
  uint64_t offset;
  uint64_t length;
  uint64_t read_id;
};
struct MessageMeta {
  uint64_t message_id;
};
// About a message whose operation is acknowledged. Answered by a refusal as kCancelled, or not at all if its outcome is
// known, which is told anyway.
struct RecallMeta {
  uint64_t message_id;
};
struct ResolveMeta {
  uint64_t acked;  // operations of the channel that the initiator knows to be placed
  uint32_t channel;
  uint32_t epoch;  // connections up to this epoch are over
};
struct PingMeta {
  uint64_t token;
};
struct ReadDataMeta {
  uint64_t read_id;
  uint64_t offset;  // within the read
};
struct ReadEndMeta {
  uint64_t read_id;
  uint64_t status;  // Status
};
struct AckMeta {
  uint64_t link_id;  // acknowledgements may come on any connection between the two engines
  uint64_t placed;
  uint32_t channel;
  uint32_t is_last;  // 1: from an acceptor that ends. It places nothing more, and has already told what it refused
};
struct TakenMeta {
  uint64_t link_id;  // as for acknowledgements
  uint64_t first_id;
  uint64_t count;
};
struct RefusedMeta {
  uint64_t operation;  // number on the channel; of a message, its id
  uint32_t channel;    // kMessageRefused: a message
  uint32_t status;     // Status
};
inline constexpr uint32_t kMessageRefused = ~0u;
struct ResolvedMeta {
  uint64_t placed;
  uint64_t begun_bytes;  // bytes of the next operation that are in place, in whole frames
  uint32_t channel;
  uint32_t epoch;  // of the connection that delivered them
};

// Fields as in Hello; the identities were settled when the connection was made.
struct ShareMeta {
  uint64_t link_id;
  uint32_t channel;
  uint32_t epoch;
  uint64_t resumes;
};
struct SharedMeta {
  uint32_t channel;
  uint32_t epoch;
  uint64_t code;  // 0, or a RefusalCode
};

// The most that an initiator has outstanding: this far back the acceptor remembers what it has told.
inline constexpr size_t kOperationsUnderWayMax = 8192;  // per channel, sent and not acknowledged
inline constexpr size_t kMessagesUnderWayMax = 1024;    // per link, with consecutive ids

inline constexpr uint32_t kEntriesMax = 1008;  // with the header's, fewer iovecs than IOV_MAX
inline constexpr size_t kTextBytesMax = 512;
inline constexpr size_t kMetaBytesMax = sizeof(WriteMeta) + kEntriesMax * sizeof(WriteEntry);
static_assert(kMetaBytesMax <= 0xffff);
// The header of the most frequent large frame, a write of one range: the minimum that the bulk lane reads.
inline constexpr size_t kRangeHeadBytes = sizeof(FrameHeader) + sizeof(WriteMeta) + sizeof(WriteEntry);
// A longer range travels as several frames, the last of which completes the operation.
inline constexpr uint64_t kFrameBytesMax = uint64_t{1} << 20;
inline constexpr uint64_t kReadChunkBytes = 256 << 10;

}  // namespace crossrail::tcp
