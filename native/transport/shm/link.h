// What the progress holder keeps per connection. Links are one-way: Outgoing is the initiator's end, Incoming the
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

// A region of the target, as far as the initiator knows it.
// How a GPU of ours reaches memory of another one. base: null: not at all. imported: what is mapped for that, if it is
// not ours already. by_kernels: its kernels may touch it; else the driver alone copies.
struct GpuReach {
  std::unique_ptr<device::ImportedMemory> imported;
  std::byte* base = nullptr;
  bool by_kernels = false;
};

struct Import {
  enum class State : uint8_t { kPending, kDirect, kPrivate, kRefused };
  State state = State::kPending;
  uint64_t region_id = 0;
  Status status = Status::kPending;  // of kRefused
  std::string text;                  // of kRefused
  int64_t ask_again_ns = 0;          // of kRefused for want of something that may be there later; 0: for good
  Access access = Access::kLocal;
  std::byte* base = nullptr;  // kDirect: where we reach it
  uint64_t remote_base = 0;   // its address in the target, for cross-memory attach
  uint64_t length_bytes = 0;
  bool is_local = false;  // in our own process
  bool is_gpu = false;
  device::SharedRange shared;       // of a GPU's: how those of ours reach it,
  std::map<int, GpuReach> reached;  // and by which they do; not: see why_staged
  std::string why_staged;
  bool wants_handle = false;  // the owner was asked for what it is mapped by, too
  bool was_copied_by_gpu = false;
  std::shared_ptr<MemoryMap> map;
  // For explain(). Rate over pieces long enough to be worth timing.
  uint64_t bytes_moved = 0;
  uint64_t timed_bytes = 0;
  int64_t timed_ns = 0;

  // Whether it has to be asked for before a GPU of ours can reach it.
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

// Staged work whose rate says which way private memory goes, and for which transfers. Short work waits for its turn
// more than for its bytes, and memory of GPUs has no choice.
enum class Timed : uint8_t { kNot, kShort, kBulk };
inline constexpr uint64_t kTimedStagedMin = 32 << 10;
inline Timed timed_as(bool is_gpu, uint64_t bytes, bool bulk) {
  if (is_gpu || bytes < kTimedStagedMin) return Timed::kNot;
  return bulk ? Timed::kBulk : Timed::kShort;
}

// A read of private memory, cut in chunks.
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
  int gpu = -1;  // whose memory that is
  uint32_t bytes = 0;
  uint32_t tag = 0;  // of the last request made with this chunk; modulo kReadChunks its index
};
inline constexpr uint32_t kReadChunks = 16;  // outstanding per link; responses need room in one staging ring
inline constexpr uint64_t kReadChunkBytes = 64 << 10;

// One staged entry that the target has not confirmed yet.
struct InFlight {
  void* context;
  uint64_t bytes;       // of the work requests that end with it
  uint64_t stage_head;  // staging ring position behind this entry
  uint32_t tag;         // of these work requests
  uint32_t retires;     // their number
  bool staged;          // false: an immediate entry, nothing to retire
  bool cut;             // the rest of the request was taken back: it is retired as withdrawn, not done
  Timed timed;          // of these work requests
  bool failed;          // nothing of it is there for the target: its bytes could not be had from our GPU
  bool wanted_back;     // a message that the target had in its hands when it was to be taken back, see retry_messages
};

// The initiator's end of a rail: staged work on its way.
struct RailQueue {
  ChannelWriter writer;
  struct Pending {
    WorkRequest request;
    uint64_t done_bytes = 0;
    StagedRead* read = nullptr;  // of a read that has begun
  };
  std::deque<Pending> pending;  // accepted, not yet (wholly) in the ring
  std::unique_ptr<InFlight[], decltype(&std::free)> inflight{nullptr,
                                                             &std::free};  // by position; allocated at first use
  uint64_t retired = 0;                                                    // positions before this are retired
  uint32_t staged_inflight = 0;
  bool was_full = false;          // something was not posted for want of room, of which there has been none since
  Status sticky = Status::kDone;  // of the earlier chunks of the request at the head
  // Immediates whose bytes are in place, not yet published.
  std::array<ImmPair, kImmPairsMax> open_imms;
  uint32_t open_imm_count = 0;
};
inline constexpr size_t kPendingMax = 256;  // work requests per rail waiting for staging room: the send queue's depth

// Paths of private memory are compared by their best windows: cold starts and preemption are noise.
inline constexpr uint64_t kTrialWindowBytes = uint64_t{4} << 20;

inline constexpr uint64_t kTrialBytes = uint64_t{32} << 20;  // moved each way before they are compared
// Attaching costs the initiator alone, but stalls on the kernel's page work.
inline constexpr double kAttachMargin = 1.15;
// How much is moved the way that was found to be faster before both are tried anew: a trial may have met a peer that
// had no core, or pages that were touched for the first time. Twice as much each time that it is found again.
inline constexpr uint64_t kTrustBytesMin = uint64_t{4} << 30;
inline constexpr uint64_t kTrustBytesMax = uint64_t{256} << 30;

inline constexpr uint64_t kAttachBytesMin = 64 << 10;  // below, staging packs pieces and beats a system call each

// The way that private memory takes, chosen by trying both on real traffic, again and again. Long and short transfers
// choose separately: whoever waits for each of several short ones pays for waking the target rather than for bytes.
// Works whose target lies behind their source (lies_behind()) have a rate of their own for attaching: there the
// kernel's copy may be very slow, and ours is not.
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
  bool tries_staged = true;  // first of all
  Trial staged;
  std::array<Attaching, 2> attaching;  // by lies_behind()
  // What was found before, while it is tried anew.
  std::optional<std::array<Attaching, 2>> found;
  uint64_t found_bytes = 0;  // moved before both were tried last
  uint64_t trust_bytes = kTrustBytesMin;
  bool is_settled = false;  // for good
  std::string reason = "staged until enough has been moved to compare it with cross-memory attach";

  bool attaches(bool is_behind) const { return !tries_staged && attaching[is_behind].way != Way::kStaged; }
  // As far as it was found. Of the works that there were: of those behind, where there were no others.
  bool attaches() const {
    const auto& ways = found ? *found : attaching;
    const bool is_behind = ways[0].trial.bytes == 0 && ways[1].trial.bytes > 0;
    return found ? ways[is_behind].way == Way::kAttach : attaches(is_behind);
  }
  // It would be time to attach some, and all that came were too short for it.
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
  // What was found has held for long enough.
  bool is_outdated() const {
    const bool is_found = !found && (attaching[0].way != Way::kTry || attaching[1].way != Way::kTry);
    return is_found && !is_settled && trial_bytes() >= trust_bytes;
  }
  void try_anew() {
    found = attaching;
    found_bytes = bytes();
    tries_staged = true;
    staged = {};
    attaching = {};
  }
  // Once the staged way was tried: decides for whom the other one was tried enough. Whether it did.
  bool weigh() {
    bool has_decided = false;
    for (Attaching& each : attaching) {
      if (each.way != Way::kTry || each.trial.bytes < kTrialBytes) continue;
      each.way = each.trial.best > kAttachMargin * staged.best ? Way::kAttach : Way::kStaged;
      has_decided = true;
    }
    // Those behind are never faster than the others: to try them as well would be in vain.
    if (attaching[0].way == Way::kStaged && attaching[1].way == Way::kTry) attaching[1].way = Way::kStaged;
    if (has_decided && found) {
      const bool attached = attaches();
      found.reset();
      trust_bytes = attaches() == attached ? std::min(2 * trust_bytes, kTrustBytesMax) : kTrustBytesMin;
    }
    return has_decided;
  }
};

inline constexpr size_t kImportsKept = 1024;  // of a link, before those that no key names are forgotten

struct Outgoing final : Link {
  uint64_t id = 0;
  std::shared_ptr<const Address> address;
  bool up = false;
  bool same_process = false;
  uint32_t pid = 0;
  uint32_t rail_count = 0;
  std::shared_ptr<MemoryMap> segment_map;
  LinkSegment* segment = nullptr;
  std::unique_ptr<device::PinnedMemory> pinned;  // the segment, once something of a GPU's went through it
  std::unique_ptr<PeerHome> home;
  uint64_t hazard = 0;  // what segment->hazard holds
  RailQueue messages;
  RailQueue services;
  std::vector<RailQueue> rails;
  ChannelReader responses;
  std::array<ReadChunk, kReadChunks> read_chunks;
  uint32_t reads_open = 0;
  uint32_t responses_due = 0;    // to requests made, cancelled ones included
  bool messages_wanted = false;  // some slot of `messages` is wanted_back
  std::map<uint64_t, std::shared_ptr<Import>> imports;
  size_t imports_sweep_at = kImportsKept;  // entries
  uint32_t imports_pending = 0;
  std::array<PrivateChoice, 2> choices;    // by WorkRequest::bulk
  std::array<uint64_t, 2> staged_bytes{};  // likewise: of timed work that is done, since time_staging()
  uint32_t outstanding = 0;                // staged entries, messages, reads and imports that wait for the target
  uint32_t full_queues = 0;                // with was_full: what the engine keeps waits for the target to make room
  uint32_t withdrawn = 0;                  // entries that were taken back, and whose staging is not free yet
  // Liveness: when something that waits for the target last moved, and the question whether it still lives.
  int64_t moved_ns = 0;
  int64_t pinged_ns = 0;   // 0: no ping under way
  int64_t staging_ns = 0;  // since when timed work is staged, or since the last of it was done; 0: there is none
  bool frozen = false;

  void settle_private_path(PrivateChoice::Way way, const std::string& why) {
    for (PrivateChoice& choice : choices) choice.settle(way, why);
  }
  // What was taken back still has its place in the rings, which nothing else gets until the target has passed it; so
  // have answers to cancelled reads until we have.
  bool awaits_target() const { return awaits_progress() || withdrawn > 0 || responses_due > 0; }
  // What does not move meanwhile raises the question whether the target lives. Writes into its memory are done at once,
  // so that of those only a full ring tells.
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
  bool message_held = false;  // the next message was offered and held back
};

}  // namespace crossrail::shm
