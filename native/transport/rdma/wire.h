// The protocol between two rdma layers. Little-endian, bounds-checked.
//
// Datagrams make paths, and ask about broken ones when no path is left. Each carries an HMAC-SHA256 under a key derived
// from both incarnations and the secret. Fragments travel on paths and need none: a path's peer has been known since
// the path was made.
//
// Of two engines, the one with the smaller incarnation *leads*: it creates the epochs of all paths between them,
// whichever of the two wants to talk. The other asks for them (Knock). So both may connect at once, and there are no
// conflicts to resolve.
#pragma once

#include <array>
#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "transport/descriptor.h"
#include "transport/rdma/nic.h"
#include "transport/transport.h"
#include "util/sha256.h"

namespace crossrail::rdma {

inline constexpr uint16_t kProtocolVersion = 7;
inline constexpr size_t kMacBytes = 16;
inline constexpr size_t kTextBytesMax = 400;

// A path between two engines: the rail of the leader, and that of the other.
struct PathKey {
  uint8_t leader_rail = 0;
  uint8_t other_rail = 0;
  auto operator<=>(const PathKey&) const = default;
};

enum class DatagramKind : uint8_t {
  kKnock = 1,  // to the leader: make this path. PathBody with the epoch that has ended at the sender
  kHello,      // from the leader: PathBody of a new epoch
  kAccept,     // the answer: PathBody
  kRefuse,     // RefuseBody; the only kind without HMAC: it repeats the nonce of what it refuses instead
  kResolve,    // ResolveBody
  kResolved,   // ResolvedBody
  kBye         // text: the engine was closed
};

struct DatagramHead {
  uint16_t version = kProtocolVersion;
  DatagramKind kind = DatagramKind::kKnock;
  bool to_leader = false;
  bool has_link = false;  // the sender has operations for us, now or later
  uint64_t nonce = 0;     // the sender's, for its session; in a Refuse, that of what it refuses
  std::array<uint8_t, 8> target_tag{};
  Incarnation sender{};
  uint64_t sender_session = 0;  // the sender's number for its session: later ones have larger numbers
  uint64_t target_session = 0;  // the receiver's; 0: unknown
  Bytes endpoint;               // of the sender's NIC: where to send answers
};

struct PathBody {
  PathKey path;
  uint32_t epoch = 0;
  uint64_t token = 0;  // prefix of fragments to the sender, on this path and epoch
  Bytes offer;
  uint32_t speed_mbps = 0;  // of the sender's NIC now, 0 unknown; its address has the one at opening
};

enum class RefuseCode : uint8_t { kMalformed = 1, kVersion, kNotMe, kAuthentication, kUnknownSession, kClosing, kFull };
struct RefuseBody {
  RefuseCode code = RefuseCode::kMalformed;
  std::string text;
};

// What the operations in doubt do to one region.
struct Span {
  uint64_t region_id = 0;
  uint64_t offset = 0;
  uint64_t length_bytes = 0;
  bool writes = false;
  bool reads = false;
};
inline constexpr size_t kSpansMax = 16;

// My end of this epoch is closed. Close yours: how many immediates have you seen, and may these regions be accessed?
// Epoch 0: the path is alive, and the question with that number is only about the regions.
struct ResolveBody {
  PathKey path;
  uint32_t epoch = 0;
  std::vector<Span> spans;
  uint64_t question = 0;
};
struct ResolvedBody {
  PathKey path;
  uint32_t epoch = 0;
  bool counts = false;  // `seen` is meaningful
  uint64_t seen = 0;
  std::vector<Status> verdicts;  // kDone: yes. As many as spans
  uint64_t question = 0;         // the question answered
};

// Without the HMAC. With it, datagrams are at most kDatagramBytesMax.
Bytes begin_datagram(const DatagramHead& head);
void put(Bytes& bytes, const PathBody& body);
void put(Bytes& bytes, const RefuseBody& body);
void put(Bytes& bytes, const ResolveBody& body);
void put(Bytes& bytes, const ResolvedBody& body);
void put_text(Bytes& bytes, const std::string& text);
void seal(Bytes& bytes, const Digest& key);
bool is_sealed(std::span<const uint8_t> bytes, const Digest& key);

// Empty if it is not one of ours. For another version there is no body, and no endpoint unless its header is like ours.
struct Datagram {
  DatagramHead head;
  std::span<const uint8_t> body;  // a view of the given bytes; without the HMAC
};
std::optional<Datagram> decode_datagram(std::span<const uint8_t> bytes);
std::optional<PathBody> decode_path(std::span<const uint8_t> body);
std::optional<RefuseBody> decode_refuse(std::span<const uint8_t> body);
std::optional<ResolveBody> decode_resolve(std::span<const uint8_t> body);
std::optional<ResolvedBody> decode_resolved(std::span<const uint8_t> body);
std::optional<std::string> decode_text(std::span<const uint8_t> body);

std::array<uint8_t, 8> target_tag(const Incarnation& incarnation);
Digest session_key(std::string_view secret, const Incarnation& leader, const Incarnation& other);

// --- fragments: token u64, kind u8, then ---

enum class FragmentKind : uint8_t {
  kState = 1,  // StateBody
  kIntroduce,  // the sender's Address, encoded: the origin of its messages
  kMessage,    // MessageHead, then this chunk of it
  kOutcomes,   // count u8, then for each: id u64, outcome u8
  kPing,       // u64
  kPong,       // the same u64
  kResolve,    // as in the datagrams
  kResolved,
  kBye,      // text
  kService,  // ServiceHead, then the message: from engine to engine
  kServed,   // count u8, then for each: id u64. The engine has received them
  kRecall    // RecallBody: a message that waits for a buffer shall not get one
};
inline constexpr uint8_t kFragmentKindMax = static_cast<uint8_t>(FragmentKind::kRecall);
inline constexpr size_t kFragmentHeadBytes = 9;

// Fragments arrive in any order, so states are numbered, from 1, per session and direction, and older ones are ignored.
struct StateBody {
  uint32_t number = 0;
  bool has_link = false;
  bool leaves = false;  // the session may end unless you need it
};

struct MessageHead {
  uint64_t id = 0;          // from 1, per session and direction
  uint64_t first_open = 0;  // the sender knows the outcome of all earlier ones
  uint32_t length_bytes = 0;
  uint32_t chunk = 0;
};
inline constexpr size_t kMessageHeadBytes = 24;
inline constexpr size_t kChunkBytes = kFragmentBytesMax - kFragmentHeadBytes - kMessageHeadBytes;
inline constexpr uint64_t kMessagesUnderWayMax = 256;               // consecutive ids, outcome unknown
inline constexpr uint64_t kMessageWindowBytes = uint64_t{1} << 20;  // outcome unknown; one message may always go
inline constexpr size_t kOutcomesPerFragment = 200;
enum class Outcome : uint8_t { kTaken = 0, kTooLong = 1, kRecalled = 2 };

// Answered by the message's outcome, which is kRecalled if it had none. It may overtake the message.
struct RecallBody {
  uint64_t id = 0;
  uint64_t first_open = 0;  // as in MessageHead
};

// Numbered separately, since messages may be held back for ever. Each travels in one fragment, and again on another
// path if its path breaks; the receiver recognises duplicates by their ids.
struct ServiceHead {
  uint64_t id = 0;          // from 1, per session and direction
  uint64_t first_open = 0;  // the sender knows that all earlier ones arrived
};
inline constexpr size_t kServiceHeadBytes = 16;
inline constexpr uint64_t kServicesUnderWayMax = 64;  // consecutive ids
static_assert(kFragmentHeadBytes + kServiceHeadBytes + kServiceBytesMax <= kFragmentBytesMax);

Bytes begin_fragment(uint64_t token, FragmentKind kind);
void put(Bytes& bytes, const StateBody& body);
std::optional<StateBody> decode_state(std::span<const uint8_t> body);
void put(Bytes& bytes, const ServiceHead& head);
std::optional<ServiceHead> decode_service_head(std::span<const uint8_t> body);
void put(Bytes& bytes, const RecallBody& body);
std::optional<RecallBody> decode_recall(std::span<const uint8_t> body);
void put(Bytes& bytes, const MessageHead& head);
std::optional<MessageHead> decode_message_head(std::span<const uint8_t> body);

}  // namespace crossrail::rdma
