// What exists between two engines: a session, with a path for each pair of rails and the link of our own operations.
#pragma once

#include <array>
#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "transport/rdma/nic.h"
#include "transport/rdma/region.h"
#include "transport/rdma/wire.h"
#include "transport/transport.h"
#include "util/ring_queue.h"

namespace crossrail::rdma {

inline constexpr int64_t kRetryFirstNs = 20'000'000;  // shortest pause before a path asks or tries again

struct Session;
struct RdmaLink;

struct RdmaKey final : RemoteKey {
  RdmaKey(uint64_t region_id, uint64_t length_bytes, RdmaKeys keys)
      : region_id(region_id), length_bytes(length_bytes), keys(std::move(keys)) {}
  const uint64_t region_id;
  const uint64_t length_bytes;
  const RdmaKeys keys;  // by the peer's rail
};

// --- the layer's own notes in its copies of work requests (WorkRequest::reserved) ---
// bits 0..5: the requested rail + 1, 0 for any. 6..11: number of attempts that ended in doubt. 12..14: WorkFault. 15: a
// part of a longer request, whose context is its Whole.
enum class WorkFault : uint32_t { kNone = 0, kEnded, kInDoubt, kRemoteAccess, kLocal };
constexpr uint32_t routing_of(uint32_t rail) { return rail == kAnyRail ? 0 : rail + 1; }
inline uint32_t rail_of(const WorkRequest& work) { return (work.reserved & 0x3f) - 1; }  // 0 - 1 is kAnyRail
inline uint32_t attempts_of(const WorkRequest& work) { return work.reserved >> 6 & 0x3f; }
inline void add_attempt(WorkRequest& work) { work.reserved += 1 << 6; }
inline WorkFault fault_of(const WorkRequest& work) { return static_cast<WorkFault>(work.reserved >> 12 & 7); }
inline void set_fault(WorkRequest& work, WorkFault fault) {
  work.reserved = (work.reserved & ~(7u << 12)) | static_cast<uint32_t>(fault) << 12;
}
inline bool is_part(const WorkRequest& work) { return (work.reserved & 1u << 15) != 0; }
inline constexpr int64_t kFlushMaxNs = 10'000'000'000;  // for a NIC to flush, while we are polling
inline constexpr int64_t kAwayNs = 1'000'000'000;  // between two looks: beyond this we were stopped, or nobody polled
inline constexpr uint32_t kPartBit = 1u << 15;
inline constexpr const char* kItsEndBroke = "its other end broke";

// A request longer than the longest work of a NIC. Its parts are posted like other works, without the immediate; once
// all are done, the rest follows as a request of its own, with the immediate.
struct Whole {
  WorkRequest request;
  uint64_t begun_bytes = 0;  // in parts that are posted or queued again
  uint32_t parts_open = 0;
  bool is_withdrawn = false;
  Status status = Status::kDone;
  std::string detail;
};

// The engine's context for a work, also for a part.
inline void* context_of(const WorkRequest& work) {
  return is_part(work) ? static_cast<Whole*>(work.context)->request.context : work.context;
}

// One pair of rails. Lifecycle of an epoch:
//   kIdle      no path at the NIC; nothing of earlier epochs is in flight here, but `doubt` may await the peer's answer
//   kOffered   leader: Hello is being sent, repeatedly, until Accept comes
//   kAccepted  other: its Accept is sent; the first thing that arrives on the path shows that the leader has it
//   kOpen      works and fragments may be posted
//   kBreaking  break_off() was called; ends in kIdle when the NIC reports flushed
// Invariants: `works` are exactly those posted and not reported, with cookies first_cookie ... in order.
// An epoch is offered only while `doubt` is empty on the leader's side, and accepted only while it is on the other's.
// So at most one epoch is in doubt at a time, the latest that was connected: closed_seen is all that may be asked for.
enum class PathState : uint8_t { kIdle, kOffered, kAccepted, kOpen, kBreaking };

// Why a path breaks.
enum class Cause : uint8_t {
  kHere,      // a fault of the NIC or the network, or we want it to end
  kPeersEnd,  // as far as we know, the peer's end broke first: no work of ours is to blame
  kProtocol   // the peer sent something invalid
};

struct Path {
  Path(Session* session, PathKey key, uint32_t rail, uint32_t peer_rail)
      : session(session), key(key), rail(rail), peer_rail(peer_rail) {}

  Session* const session;
  const PathKey key;
  const uint32_t rail;
  const uint32_t peer_rail;

  const std::string& why_down() const { return refusal.empty() ? trouble : refusal; }

  PathState state = PathState::kIdle;
  uint32_t epoch = 0;  // the latest one created here
  std::unique_ptr<NicPath> nic_path;
  bool is_connected = false;  // nic_path->connect() was called
  bool is_broken = false;     // to be broken off at the end of this poll
  bool is_flushed = false;
  Cause cause = Cause::kHere;  // of the latest break
  std::string trouble;         // why it is not open; for people
  std::string refusal;         // or why the peer refuses it now, which is newer
  uint64_t token = 0;          // ours
  uint64_t peer_token = 0;
  Bytes offer;                // of nic_path, as sent to the peer
  uint32_t peer_mbps = 0;     // of the peer's NIC, 0 unknown
  uint32_t speed_mbps = 0;    // of the slower end, 0 unknown
  uint64_t window_bytes = 0;  // limit of outstanding bytes, according to its speed

  // --- making ---
  int64_t retry_at_ns = 0;
  int64_t retry_pause_ns = 0;
  int64_t state_since_ns = 0;
  int64_t down_since_ns = 0;  // not open since; 0: open
  int64_t opened_at_ns = 0;

  // --- our works ---
  RingQueue<WorkRequest> works;
  uint64_t first_cookie = 0;
  uint64_t outstanding_bytes = 0;
  uint64_t imms_done = 0;          // writes with immediate of this epoch known to be done
  std::string fault_text;          // the provider's text for the first failed work of the epoch
  std::vector<WorkRequest> doubt;  // works of the closed epoch, in the order of posting
  bool is_resolving = false;       // doubt is not empty, and the peer has not answered
  int64_t ask_at_ns = 0;
  int64_t ask_pause_ns = 0;
  int64_t doubt_since_ns = 0;
  std::vector<WorkRequest> suspects;  // refused by the peer's NIC while the path lives: we ask what is wrong with them
  uint64_t question = 0;              // number of the latest question about suspects,
  size_t asked = 0;                   // and how many of the first suspects it is about; 0: none is open

  // --- what we saw of the peer's ---
  uint64_t seen = 0;                        // immediates seen in this epoch
  uint32_t closed_epoch = 0;                // the latest epoch that was connected here and is flushed,
  uint64_t closed_seen = 0;                 // and how many immediates were seen in it,
  bool closed_counts = false;               // if that is known
  std::optional<std::vector<Span>> answer;  // to be sent once `epoch` is closed

  // --- signs of life ---
  int64_t heard_ns = 0;   // last sign of life from the peer's layer
  int64_t worked_ns = 0;  // when works were last done
  int64_t pinged_ns = 0;
  std::optional<uint64_t> pong;  // to be sent
  bool ping_due = false;
  bool state_due = false;      // kState is to be sent,
  bool introduce_due = false;  // and our address, before everything else

  uint64_t bytes_done = 0;
  uint32_t epochs_opened = 0;
};

// --- messages ---

struct SentMessage {
  WorkRequest request;
  uint64_t id = 0;
  uint32_t next_chunk = 0;
  bool is_over = false;         // its outcome is known
  bool is_recalled = false;     // cancelled: no more of it is sent; it ends when the peer reports its outcome
  bool is_recall_sent = false;  // on the present path
};

struct SentService {
  WorkRequest request;
  uint64_t id = 0;
  bool is_sent = false;  // on the present path
  bool is_over = false;
};

struct Assembly {
  std::vector<uint8_t> payload;
  std::vector<bool> arrived;  // by chunk
  size_t missing = 0;
};

// Works that no path has taken yet, and the total length of the long ones.
class WorkQueue : RingQueue<WorkRequest> {
  using Works = RingQueue<WorkRequest>;

 public:
  using Works::empty, Works::first_run, Works::front, Works::size, Works::operator[];
  uint64_t long_bytes() const { return long_bytes_; }

  WorkRequest& push_back(const WorkRequest& work) {
    long_bytes_ += long_bytes_of(work);
    return Works::push_back(work);
  }
  void push_front(const WorkRequest& work) {
    long_bytes_ += long_bytes_of(work);
    Works::push_front(work);
  }
  WorkRequest pop_front() {
    long_bytes_ -= long_bytes_of(front());
    return Works::pop_front();
  }
  void drop_front(size_t count) {
    for (size_t i = 0; i < count; ++i) long_bytes_ -= long_bytes_of((*this)[i]);
    Works::drop_front(count);
  }
  template <typename Keep>
  void filter(Keep&& keep) {
    Works::filter([&](const WorkRequest& work) {
      const bool is_kept = keep(work);
      if (!is_kept) long_bytes_ -= long_bytes_of(work);
      return is_kept;
    });
  }
  void clear() {
    long_bytes_ = 0;
    Works::clear();
  }

 private:
  static uint64_t long_bytes_of(const WorkRequest& work) {
    return work.length_bytes > kShortBytesMax ? work.length_bytes : 0;
  }
  uint64_t long_bytes_ = 0;
};

// Our operations towards one peer: from connect() until on_link_down or disconnect().
struct RdmaLink final : Link {
  explicit RdmaLink(Session* session, std::shared_ptr<const Address> address, uint32_t rails)
      : session(session), address(std::move(address)), queues(rails + 1) {}
  uint32_t lanes() const override { return pair_count; }
  // The queue of `rail`, or of kAnyRail.
  WorkQueue& queue(uint32_t rail) { return queues[routing_of(rail)]; }

  Session* const session;
  const std::shared_ptr<const Address> address;
  uint32_t pair_count = 1;
  std::vector<WorkQueue> queues;  // [0] for any rail, [rail + 1]
  std::vector<std::unique_ptr<Whole>> wholes;
  WorkQueue services;                   // not begun
  RingQueue<SentService> services_out;  // begun, consecutive ids
  WorkQueue sends;                      // not begun
  RingQueue<SentMessage> messages;      // begun, consecutive ids
  uint64_t messages_bytes = 0;          // of those whose outcome is not known
  bool has_recalls = false;             // some of them may be recalled and not told
  Path* message_path = nullptr;         // the path that they use
  uint32_t message_epoch = 0;           // its epoch at that time
  uint64_t unsent_id = 1;               // of the first message that is not sent completely; all before it are
  size_t queued = 0;                    // in all queues
  uint64_t outstanding = 0;             // accepted and not retired
  bool is_up = false;                   // on_link_up was said
  bool is_frozen = false;
  struct Doom {
    std::string reason;
    LinkEnd end;
  };
  std::optional<Doom> doom;  // the link goes down once all is flushed
  // Regions that the peer's engine has reported as closed or revoked, which is final: no id is used twice. A work that
  // names one fails without being posted, since each refusal breaks the path for both sides.
  std::map<uint64_t, Status> gone;
  int64_t connect_by_ns = 0;
  int64_t waits_since_ns = 0;
  int64_t down_since_ns = 0;  // since when no path is open; 0: one is
  int64_t busy_ns = 0;        // total time with something outstanding
  int64_t busy_since_ns = 0;
};

// What the peer has said about the region that the work accesses. kDone: nothing against it.
inline Status gone_status(const RdmaLink& link, const WorkRequest& work) {
  if (link.gone.empty() || work.remote == nullptr || work.length_bytes == 0) return Status::kDone;
  const auto found = link.gone.find(static_cast<const RdmaKey&>(*work.remote).region_id);
  return found == link.gone.end() ? Status::kDone : found->second;
}

struct Session {
  // The other engine. Two engines share one session; an engine has two with itself, one for each role.
  struct Key {
    Incarnation peer;
    bool leads;  // we are the leader
    auto operator<=>(const Key&) const = default;
  };

  Key key;
  uint64_t own_number = 0;
  uint64_t peer_number = 0;  // 0: not known yet
  uint64_t nonce = 0;        // ours,
  uint64_t peer_nonce = 0;   // and the peer's: a Refuse repeats these
  Digest seal{};
  std::array<uint8_t, 8> target{};
  std::vector<std::unique_ptr<Path>> paths;
  std::map<uint32_t, Bytes> peer_endpoints;     // by the peer's rail
  std::set<Bytes> deserted;                     // the subset where nobody has been since the peer was last heard
  std::shared_ptr<const Address> peer_address;  // known when introduced, or when we connected
  uint32_t peer_rail_count = kRailsMax;         // what its address has; until that is known, the maximum
  std::string peer_name = "a peer";
  std::unique_ptr<RdmaLink> link;
  // A session that neither side has a link for ends when both have said so (StateBody::leaves): a side that has said so
  // and wants to connect after all begins a new session.
  bool peer_has_link = false;
  bool has_left = false;     // we have said so,
  int64_t left_at_ns = 0;    // at this time
  bool peer_left = false;    // the peer has said so
  uint32_t states_said = 0;  // StateBody::number of our latest state,
  uint32_t state_heard = 0;  // and of the peer's
  bool is_over = false;      // to be deleted once its paths are gone
  bool is_dirty = false;
  bool is_urgent = false;
  bool is_blocked = false;     // has something to send or post that a NIC has no room for
  int64_t quiet_since_ns = 0;  // since when no path is open; 0: one is

  // --- the peer's messages ---
  std::map<uint64_t, Assembly> assemblies;
  uint64_t held_bytes = 0;  // of both
  struct Held {
    uint64_t id;
    std::vector<uint8_t> payload;
  };
  RingQueue<Held> held;
  std::map<uint64_t, Outcome> outcomes;  // only ids from first_open_id on
  std::vector<uint64_t> untold;          // outcomes to be reported
  uint64_t first_open_id = 1;
  RingQueue<Held> services;           // to be passed to the engine
  std::set<uint64_t> services_heard;  // only ids from first_open_service on
  uint64_t first_open_service = 1;
  std::vector<uint64_t> services_untold;  // to be acknowledged
  // --- ours ---
  uint64_t next_message_id = 1;
  uint64_t next_service_id = 1;

  Path* find(PathKey key) {
    for (auto& path : paths) {
      if (path->key == key) return path.get();
    }
    return nullptr;
  }
  bool has_open_path() const {
    for (const auto& path : paths) {
      if (path->state == PathState::kOpen) return true;
    }
    return false;
  }
  bool is_quiet() const {  // no NIC has any part of it
    for (const auto& path : paths) {
      if (path->nic_path) return false;
    }
    return true;
  }
};

}  // namespace crossrail::rdma
