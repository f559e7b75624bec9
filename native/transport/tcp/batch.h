// What passes through a socket: outgoing frames, and where the payload of an arriving frame goes.
#pragma once

#include <sys/uio.h>

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "device/copier.h"
#include "transport/tcp/stage_pool.h"
#include "transport/transport.h"
#include "util/memory_map.h"

namespace crossrail::tcp {

// Frames to be sent: headers and short payloads are copied, long payloads are views into their regions.
// Invariant: bytes_ is kBytes long and never moves, so that iovecs may point into it.
class TxBatch {
 public:
  static constexpr size_t kBytes = 64 << 10;
  static constexpr size_t kViewsMax = 1020;  // a little less than IOV_MAX

  // stages: for payloads in GPU memory; outlives the batch.
  explicit TxBatch(StagePool* stages = nullptr)
      : stage_pool_(stages), bytes_(std::make_unique_for_overwrite<std::byte[]>(kBytes)) {
    views_.reserve(kViewsMax + 4);
  }
  bool empty() const { return first_ == views_.size(); }
  // Room for `bytes` more copied bytes and `views` more views.
  bool has_room(size_t bytes, size_t views = 1) const {
    return copied_bytes_ + bytes <= kBytes && views_.size() + views <= kViewsMax;
  }
  // The caller has checked that there is room.
  void copy(const void* data, size_t size);
  template <typename T>
  void put(const T& value) {
    copy(&value, sizeof value);
  }
  void view(const std::byte* data, size_t size);
  // Host memory for what is copied out of a GPU, at most StagePool::kStageBytes; valid until clear(). Pass it to
  // view().
  std::byte* stage(size_t size);
  void clear();

  uint64_t pending_bytes() const { return pending_bytes_; }
  std::span<iovec> views() { return std::span(views_).subspan(first_); }
  void sent(size_t size);
  // Copies the unsent part of all views into [base, base + length), so that this memory is not touched any more.
  void detach(const std::byte* base, uint64_t length_bytes);
  // The same for all memory; also forgets the marks.
  void detach_all();

  // What was appended last completes the frames of operations from this one on.
  void mark(uint64_t first_operation) { marks_.push_back({first_operation, sent_bytes_ + pending_bytes_}); }
  // The first marked operation whose frame has not been sent completely, or kAllSent.
  static constexpr uint64_t kAllSent = ~uint64_t{0};
  uint64_t first_unsent() const;

 private:
  void detach(iovec& view);
  struct Mark {
    uint64_t first_operation;
    uint64_t end_bytes;
  };
  StagePool* const stage_pool_;
  const std::unique_ptr<std::byte[]> bytes_;
  size_t copied_bytes_ = 0;
  std::vector<iovec> views_;
  size_t first_ = 0;
  uint64_t pending_bytes_ = 0;
  uint64_t sent_bytes_ = 0;
  std::vector<Mark> marks_;
  std::vector<std::unique_ptr<std::byte[]>> detached_;
  std::vector<std::unique_ptr<device::HostBuffer>> stages_;
  size_t staged_bytes_ = 0;  // of the last stage
};

// Where the bytes of a payload go, in order. A null base discards them.
struct Placement {
  std::vector<iovec> targets;
  size_t at = 0;
  uint64_t bytes_left = 0;
  // The GPU whose memory all non-discarded targets are in; every byte must then come by copy_in(). -1: host memory.
  int gpu = -1;
  device::Copier* copier = nullptr;
  // A file is mapped there. Then each add() is a target of its own, and bytes are placed only by system calls, which
  // report a file that was truncated instead of killing the process.
  bool maps_file = false;
  bool failed = false;  // a copy to that GPU failed, or host memory is gone; until the next aim_at()

  // The next payload goes to the memory of this region; null: host memory.
  void aim_at(const LocalRegion* region) {
    gpu = region == nullptr ? -1 : region->gpu;
    maps_file = region != nullptr && region->maps_file;
    failed = false;
  }
  void add(std::byte* base, uint64_t length);
  void add_discard(uint64_t length) { add(nullptr, length); }
  void clear() {
    targets.clear();
    at = 0;
    bytes_left = 0;
    gpu = -1;
    maps_file = false;
  }
  // Whether some bytes of the add() with this number, counting only those with bytes, are not in place.
  bool is_lost(size_t number) const { return failed && (!maps_file || targets[number].iov_base == nullptr); }
  // Whether payload must come by copy_in(), unless the socket places it by system calls.
  bool needs_copy(bool by_calls) const { return bytes_left > 0 && (gpu >= 0 || (maps_file && !by_calls)); }
  // Advances over `size` bytes that a system call has placed.
  void placed(uint64_t size);
  // Places bytes that arrived in another buffer. Returns how many: fewer if host memory is gone.
  uint64_t copy_in(const std::byte* data, uint64_t size);
  // The kernel could not write to one of the remaining targets: those that no longer exist are discarded; if all exist,
  // everything is. False: none remained.
  bool skip_unwritable();
  // From here on, everything is discarded.
  void discard_all();
  // From here on, everything meant for [base, base + length) is discarded.
  void discard_range(const std::byte* base, uint64_t length_bytes);
};

}  // namespace crossrail::tcp
