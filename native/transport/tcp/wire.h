// What travels on a connection after the handshake: frames of a header, some metadata and a payload. Little-endian.
//
// One *link* per direction: the initiator's connections carry its operations, and back come acknowledgements and the
// data of its reads. A link has *channels*: one per pair of rails and lane. A channel outlives its connections: the
// operations on it are numbered (from 1, in the order of their frames), and the acceptor remembers the last one it has
// placed, so that after a broken connection both sides know what was placed and nothing is counted twice.
#pragma once

#include <cstddef>
#include <cstdint>

namespace crossrail::tcp {

enum class FrameType : uint8_t {
  // initiator to acceptor
  kWrite = 1,  // WriteMeta, `count` WriteEntry, payload: the entries' bytes one after the other
  kRead,       // ReadMeta
  kMessage,    // MessageMeta, payload
  kResolve,    // ResolveMeta: what of this broken channel was placed?
  kPing,       // PingMeta
  // acceptor to initiator, but for acknowledgements, which ride either way
  kReadData,  // ReadDataMeta, payload
  kReadEnd,   // ReadEndMeta, text: all data was sent, or why not
  kAck,       // AckMeta
  kTaken,     // TakenMeta: messages were taken over
  kRefused,   // RefusedMeta, text
  kResolved,  // ResolvedMeta. What became of messages is told again
  kPong,      // PingMeta
  // orderly ends
  kBye,      // initiator to acceptor, text: of the link
  kClosing,  // acceptor to initiator, text: of the engine
  // Whoever accepted a connection may ask to use it for operations of its own: to whoever made it.
  kShare,    // ShareMeta
  kShared,   // back: SharedMeta, text: yes, or why not
  kService,  // initiator to acceptor: what one engine tells the other, as metadata; an operation of its channel
  kRecall    // initiator to acceptor, RecallMeta: a message that waits for a buffer shall not have one
};
inline constexpr uint8_t kFrameTypeMax = static_cast<uint8_t>(FrameType::kRecall);

struct FrameHeader {
  uint8_t type;
  uint8_t mark;         // kFrameMark and all other bytes but the sum: known to be good before it is waited for more
  uint16_t count;       // entries in the metadata
  uint16_t operations;  // that end with this frame
  uint16_t meta_bytes;
  uint32_t payload_bytes;
  uint32_t sum;  // of all this, with 0 here, and the metadata (frames.h)
};
static_assert(sizeof(FrameHeader) == 16);
inline constexpr uint8_t kFrameMark = 0xc7;

struct WriteMeta {
  uint64_t region_id;  // 0: an immediate that concerns no region
};
struct WriteEntry {
  uint64_t offset;
  uint32_t length;  // the top bit says that there is an immediate
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
// Of a message whose operation is acknowledged. Answered by a refusal as kCancelled; by nothing if its outcome is
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
  uint32_t is_last;  // 1: of an acceptor that ends. It places nothing more, and what it refused it has told before
};
struct TakenMeta {
  uint64_t link_id;  // like acknowledgements
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
  uint64_t begun_bytes;  // that are in place of the operation after those, by whole frames
  uint32_t channel;
  uint32_t epoch;  // of the connection that brought them
};

// As in Hello: who it is was settled when the connection was made.
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

// What an initiator has under way at most: so far back does the acceptor remember what it has said.
inline constexpr size_t kOperationsUnderWayMax = 8192;  // of one channel, sent and not acknowledged
inline constexpr size_t kMessagesUnderWayMax = 1024;    // of one link, with consecutive ids

inline constexpr uint32_t kEntriesMax = 1008;  // with the header's, fewer iovecs than IOV_MAX
inline constexpr size_t kTextBytesMax = 512;
inline constexpr size_t kMetaBytesMax = sizeof(WriteMeta) + kEntriesMax * sizeof(WriteEntry);
static_assert(kMetaBytesMax <= 0xffff);
// The head of the most frequent large frame, a write of one range: what the bulk lane reads at least.
inline constexpr size_t kRangeHeadBytes = sizeof(FrameHeader) + sizeof(WriteMeta) + sizeof(WriteEntry);
// A longer range travels as several frames, of which the last one ends the operation.
inline constexpr uint64_t kFrameBytesMax = uint64_t{1} << 20;
inline constexpr uint64_t kReadChunkBytes = 256 << 10;

}  // namespace crossrail::tcp
