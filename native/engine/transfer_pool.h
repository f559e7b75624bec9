// Transfers are recycled: no allocation per submit once the pool is warm.
#pragma once

#include <cstdint>
#include <functional>
#include <mutex>

#include "engine/transfer.h"
#include "util/spinlock.h"

namespace crossrail {

// Threads: any.
// Invariant: while out_ > 0 the pool holds one reference to the engine, so that a transfer stays valid even if the user
// has dropped everything else.
class TransferPool {
 public:
  TransferPool(Engine* engine, EngineCore* core) : engine_(engine), core_(core) {}
  ~TransferPool();

  // A pending transfer with one reference.
  Transfer* take();
  void give_back(Transfer* transfer);
  // Recycled transfers keep the peer's region for their next use; this releases the regions of peers for which
  // is_gone() is true. Not to be called under a mutex of the caller's: releasing a region may call into its transport.
  void drop_regions(const std::function<bool(const Peer&)>& is_gone);
  // For tests: room for page indices and messages in recycled transfers, and how many there are.
  uint64_t bytes_kept() const {
    std::lock_guard lock(lock_);
    return bytes_kept_;
  }
  uint64_t idle() const {
    std::lock_guard lock(lock_);
    return idle_;
  }
  static constexpr uint64_t kBytesKeptMax = uint64_t{32} << 20;
  static constexpr uint64_t kIdleMax = 65536;  // some 50 MB

 private:
  // Under lock_:
  void note_taken();
  Transfer* pop_idle();  // null if there is none

  Engine* const engine_;
  EngineCore* const core_;
  mutable SpinLock lock_;
  Transfer* free_ = nullptr;
  uint64_t out_ = 0;
  // What a burst needed is not kept for ever. The storage of the transfers in free_ is at most kBytesKeptMax at any
  // time. Of transfers beyond kIdleMax each take() deletes one: give_back() may run where no region may end.
  uint64_t bytes_kept_ = 0;
  uint64_t idle_ = 0;  // length of free_
};

}  // namespace crossrail
