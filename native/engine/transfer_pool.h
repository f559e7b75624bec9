// Transfers are recycled: no allocation per submit once the pool is warm.
#pragma once

#include <cstdint>
#include <functional>
#include <mutex>

#include "engine/transfer.h"
#include "util/spinlock.h"

namespace crossrail {

// Threads: any.
// Invariant: while out_ > 0 the pool holds one reference to the engine, so that a transfer outlives everything else the
// user has dropped.
class TransferPool {
 public:
  explicit TransferPool(Engine* engine, EngineCore* core) : engine_(engine), core_(core) {}
  ~TransferPool();

  // A pending transfer with one reference.
  Transfer* take();
  void give_back(Transfer* transfer);
  // Recycled transfers keep peers' regions for the next ones: those of such peers are let go. Not under a mutex of the
  // caller's: a region's end may be its transport's business.
  void drop_regions(const std::function<bool(const Peer&)>& is_gone);
  // For tests: page indices that recycled transfers keep room for, on either side.
  uint64_t pages_kept() const {
    std::lock_guard lock(lock_);
    return pages_kept_;
  }
  static constexpr uint64_t kPagesKeptMax = uint64_t{4} << 20;  // 32 MiB

 private:
  Engine* const engine_;
  EngineCore* const core_;
  mutable SpinLock lock_;
  Transfer* free_ = nullptr;
  uint64_t out_ = 0;
  // Index arrays of those in free_, of pages: what a burst needed is not kept for good.
  uint64_t pages_kept_ = 0;
};

}  // namespace crossrail
