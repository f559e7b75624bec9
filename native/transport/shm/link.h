// The progress holder's state per connection. Links are one-way: Outgoing is the initiator's end, Incoming the
// target's. Two engines that write to each other have two links, so that both may connect at once.
#pragma once

#include <algorithm>
#include <array>
#include <cstdint>
#include <cstdlib>
#include <deque>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "device/copier.h"
#include "device/ipc.h"
#include "transport/shm/channel.h"
#include "transport/shm/layout.h"
#include "transport/shm/region_table.h"
#include "transport/transport.h"
#include "util/memory_map.h"

namespace crossrail::shm {

// How a GPU of ours reaches the memory of another GPU. base: null: not at all. imported: what is mapped for this,
// unless the memory is our own. by_kernels: its kernels may access it; else only the driver copies.
struct GpuReach {
  std::unique_ptr<device::ImportedMemory> imported;
  std::byte* base = nullptr;
  bool by_kernels = false;
};

// A region of the target, as far as the initiator knows it.
struct Import {
  enum class State : uint8_t { kPending, kDirect, kPrivate, kRefused };
  State state = State::kPending;
  uint64_t region_id = 0;
  Status status = Status::kPending;  // for kRefused
  std::string text;                  // for kRefused
  int64_t ask_again_ns = 0;          // for kRefused because of a lack that may pass; 0: final
  Access access = Access::kLocal;
  std::byte* base = nullptr;  // kDirect: where it is mapped here
  uint64_t remote_base = 0;   // its address in the target, for cross-memory attach
  uint64_t length_bytes = 0;
  bool is_local = false;  // in our own process
  bool is_gpu = false;
  device::SharedRange shared;       // for GPU memory: how our GPUs can reach it,
  std::map<int, GpuReach> reached;  // and those that do; for the others see why_staged
  std::string why_staged;
  bool wants_handle = false;  // the owner was also asked for the handle to map it by
  bool was_copied_by_gpu = false;
  std::shared_ptr<MemoryMap> map;
  // For explain(). Rates are measured over pieces long enough to be worth timing.
  uint64_t bytes_moved = 0;
  uint64_t timed_bytes = 0;
  int64_t timed_ns = 0;

  // Whether its handle must be requested before a GPU of ours can reach it.
  bool lacks_handle() const {
    return state == State::kPrivate && is_gpu && !is_local && shared.by == device::SharedBy::kVmm && !wants_handle;
  }
};

inline std::string text_of_gone(Status status) {
  return status == Status::kRegionRevoked ? "revoked by its owner" : "closed by its owner";
}

class ShmKey final : public RemoteKey {
 public:
  explicit ShmKey(std::shared_ptr<Import> import) : import(std::move(import)) {}
  const std::shared_ptr<Import> import;
};

// Staged work whose rate decides which path private memory takes, and for which transfers. Short work waits for its
// turn rather than for its bytes, and GPU memory has no choice.
enum class Timed : uint8_t { kNot, kShort, kBulk };
inline constexpr uint64_t kTimedStagedMin = 32 << 10;
inline Timed timed_as(bool is_gpu, uint64_t bytes, bool bulk) {
  if (is_gpu || bytes < kTimedStagedMin) return Timed::kNot;
  return bulk ? Timed::kBulk : Timed::kShort;
}

// A read of private memory, cut into chunks.
struct StagedRead {
  void* context;
  uint32_t tag;
  uint64_t bytes;
  uint32_t chunks_open;
  bool all_requested;
  Status status;
  Timed timed;
};
struct ReadChunk {
  StagedRead* read = nullptr;  // null: free
  std::byte* local = nullptr;
  int gpu = -1;  // the GPU whose memory that is
  uint32_t bytes = 0;
  uint32_t tag = 0;  // of the last request made with this chunk; its index modulo kReadChunks
};
inline constexpr uint32_t kReadChunks = 16;  // outstanding per link; responses need room in one staging ring
inline constexpr uint64_t kReadChunkBytes = 64 << 10;

// One staged entry that the target has not confirmed yet.
struct InFlight {
  void* context;
  uint64_t bytes;       // of the work requests that it completes
  uint64_t stage_head;  // staging ring position after this entry
  uint32_t tag;         // of these work requests
  uint32_t retires;     // their number
  bool staged;          // false: an entry with immediates, nothing to retire
  bool cut;             // the rest of the request was taken back: it is retired as withdrawn, not done
  Timed timed;          // of these work requests
  bool failed;          // nothing in it is valid for the target: our GPU did not deliver the bytes
  bool wanted_back;     // a message that the target was just handling when we tried to take it back, see retry_messages
};

// The initiator's end of a rail: staged work in flight.
struct RailQueue {
  ChannelWriter writer;
  struct Pending {
    WorkRequest request;
    uint64_t done_bytes = 0;
    StagedRead* read = nullptr;  // of a read that has begun
  };
  std::deque<Pending> pending;  // accepted, not yet (completely) in the ring
  std::unique_ptr<InFlight[], decltype(&std::free)> inflight{nullptr,
                                                             &std::free};  // by position; allocated at first use
  uint64_t retired = 0;                                                    // positions before this are retired
  uint32_t staged_inflight = 0;
  bool was_full = false;          // something was not posted for lack of room, and there has been none since
  Status sticky = Status::kDone;  // the status of earlier chunks of the request at the head
  // Immediates whose bytes are in place, not yet published.
  std::array<ImmPair, kImmPairsMax> open_imms;
  uint32_t open_imm_count = 0;
};
inline constexpr size_t kPendingMax = 256;  // work requests per rail waiting for staging room: the send queue's depth

// Paths for private memory are compared by their best windows: cold starts and preemption are noise.
inline constexpr uint64_t kTrialWindowBytes = uint64_t{4} << 20;

inline constexpr uint64_t kTrialBytes = uint64_t{32} << 20;  // moved by each path before they are compared
// Attaching costs only the initiator, but stalls on the kernel's page handling.
inline constexpr double kAttachMargin = 1.15;
// How much is moved by the faster path before both are tried again: a trial may have met a peer without a free core, or
// pages touched for the first time. Doubles each time that the result is confirmed.
inline constexpr uint64_t kTrustBytesMin = uint64_t{4} << 30;
inline constexpr uint64_t kTrustBytesMax = uint64_t{256} << 30;

inline constexpr uint64_t kAttachBytesMin = 64 << 10;  // below, staging packs pieces and beats system calls

// The path that private memory takes, chosen by trying both on real traffic, again and again. Long and short transfers
// choose separately: whoever waits for each of several short ones pays for waking the target rather than for bytes.
// Works whose target begins just behind their source, modulo the page (lies_behind()), have a rate of their own for
// attaching: there the kernel's copy may be very slow, and ours is not.
struct PrivateChoice {
  enum class Way : uint8_t { kTry, kStaged, kAttach };
  // Rate of a path, GB/s of its best window.
  struct Trial {
    uint64_t bytes = 0;
    double best = 0;
    uint64_t window_bytes = 0;
    int64_t window_ns = 0;
    void add(uint64_t more_bytes, int64_t more_ns) {
      bytes += more_bytes;
      window_bytes += more_bytes;
      window_ns += more_ns;
      if (window_bytes < kTrialWindowBytes || window_ns <= 0) return;
      best = std::max(best, static_cast<double>(window_bytes) / static_cast<double>(window_ns));
      window_bytes = 0;
      window_ns = 0;
    }
  };
  struct Attaching {
    Way way = Way::kTry;
    Trial trial;
  };
  bool tries_staged = true;  // tried first
  Trial staged;
  std::array<Attaching, 2> attaching;  // by lies_behind()
  // The previous result, while both are tried again.
  std::optional<std::array<Attaching, 2>> found;
  uint64_t found_bytes = 0;  // moved before both were last tried
  uint64_t trust_bytes = kTrustBytesMin;
  bool is_settled = false;  // final
  std::string reason = "staged until enough has been moved to compare it with cross-memory attach";

  bool attaches(bool is_behind) const { return !tries_staged && attaching[is_behind].way != Way::kStaged; }
  // According to the results so far, for the kinds of works that occurred; if only works that lie behind occurred, for
  // those.
  bool attaches() const {
    const auto& ways = found ? *found : attaching;
    const bool is_behind = ways[0].trial.bytes == 0 && ways[1].trial.bytes > 0;
    return found ? ways[is_behind].way == Way::kAttach : attaches(is_behind);
  }
  // It would be attaching's turn to be tried, but all works so far were too short for it.
  bool has_only_short() const {
    return !found && !tries_staged && attaching[0].way == Way::kTry && trial_bytes() == staged.bytes;
  }
  uint64_t bytes() const { return found_bytes + trial_bytes(); }
  uint64_t trial_bytes() const { return staged.bytes + attaching[0].trial.bytes + attaching[1].trial.bytes; }
  void settle(Way way, std::string why) {
    is_settled = true;
    found.reset();
    tries_staged = false;
    for (Attaching& each : attaching) each.way = way;
    reason = std::move(why);
  }
  // The result is old enough to be checked again.
  bool is_outdated() const {
    const bool is_found = !found && (attaching[0].way != Way::kTry || attaching[1].way != Way::kTry);
    return is_found && !is_settled && trial_bytes() >= trust_bytes;
  }
  void try_again() {
    found = attaching;
    found_bytes = bytes();
    tries_staged = true;
    staged = {};
    attaching = {};
  }
  // Once staging has been tried: decides for each kind for which attaching was tried enough. True if it decided any.
  bool weigh() {
    bool has_decided = false;
    for (Attaching& each : attaching) {
      if (each.way != Way::kTry || each.trial.bytes < kTrialBytes) continue;
      each.way = each.trial.best > kAttachMargin * staged.best ? Way::kAttach : Way::kStaged;
      has_decided = true;
    }
    // Works that lie behind are never faster than the others: trying them as well would be pointless.
    if (attaching[0].way == Way::kStaged && attaching[1].way == Way::kTry) attaching[1].way = Way::kStaged;
    if (has_decided && found) {
      const bool attached = attaches();
      found.reset();
      trust_bytes = attaches() == attached ? std::min(2 * trust_bytes, kTrustBytesMax) : kTrustBytesMin;
    }
    return has_decided;
  }
};

inline constexpr size_t kImportsKept = 1024;  // per link, before imports that no key references are dropped

struct Outgoing final : Link {
  uint64_t id = 0;
  std::shared_ptr<const Address> address;
  bool up = false;
  bool same_process = false;
  bool is_given_up = false;  // as we have told the target: LinkSegment::revoked
  uint32_t pid = 0;
  uint32_t rail_count = 0;
  std::shared_ptr<MemoryMap> segment_map;
  LinkSegment* segment = nullptr;
  std::unique_ptr<device::PinnedMemory> pinned;  // the segment, once GPU memory has gone through it
  std::unique_ptr<PeerHome> home;
  uint64_t hazard = 0;  // the value of segment->hazard
  RailQueue messages;
  RailQueue services;
  std::vector<RailQueue> rails;
  ChannelReader responses;
  std::array<ReadChunk, kReadChunks> read_chunks;
  uint32_t reads_open = 0;
  uint32_t responses_due = 0;    // answers to requests made, including cancelled ones
  bool messages_wanted = false;  // some slot of `messages` is wanted_back
  std::map<uint64_t, std::shared_ptr<Import>> imports;
  size_t imports_sweep_at = kImportsKept;  // entries
  uint32_t imports_pending = 0;
  std::array<PrivateChoice, 2> choices;    // indexed by WorkRequest::bulk
  std::array<uint64_t, 2> staged_bytes{};  // likewise: timed work that was done since time_staging()
  uint32_t outstanding = 0;                // staged entries, messages, reads and imports that wait for the target
  uint32_t full_queues = 0;  // queues with was_full: work kept by the engine waits for the target to make room
  uint32_t withdrawn = 0;    // entries that were taken back, and whose staging is not free yet
  // Liveness: when something that waits for the target last moved, and the ping that asks whether it is alive.
  int64_t moved_ns = 0;
  int64_t pinged_ns = 0;   // 0: no ping in flight
  int64_t staging_ns = 0;  // since when timed work is staged, or when the last of it was done; 0: there is none
  bool frozen = false;

  void settle_private_path(PrivateChoice::Way way, const std::string& why) {
    for (PrivateChoice& choice : choices) choice.settle(way, why);
  }
  // Entries that were taken back still occupy the rings until the target has passed them; answers to cancelled reads do
  // so until we have.
  bool awaits_target() const { return awaits_progress() || withdrawn > 0 || responses_due > 0; }
  // If none of this moves, the question arises whether the target is alive. Writes into its mapped memory are done at
  // once, so for those only a full ring shows it.
  bool awaits_progress() const { return outstanding > 0 || full_queues > 0; }
};

struct Incoming {
  uint64_t id = 0;
  std::shared_ptr<const Address> peer;
  uint32_t rail_count = 0;
  std::shared_ptr<MemoryMap> segment_map;
  LinkSegment* segment = nullptr;
  std::unique_ptr<device::PinnedMemory> pinned;  // likewise
  std::unique_ptr<PeerHome> home;
  ChannelReader messages;
  ChannelReader services;
  std::vector<ChannelReader> rails;
  RailQueue responses;
  bool message_held = false;  // the next message was offered and refused for now
  // The next read of some rail waits for room among the answers, of which the peer had taken so many by then.
  bool answer_held = false;
  uint64_t answers_taken = 0;

  // Whether draining this ring may find anything to do. If not, the peer rings once it has taken answers.
  bool has_work(const ChannelReader& rail) {
    const Entry* const entry = rail.peek();
    if (entry == nullptr || !answer_held || entry->kind != EntryKind::kReadRequest) return entry != nullptr;
    responses.writer.refresh();
    return responses.writer.consumed() != answers_taken;
  }
};

}  // namespace crossrail::shm
