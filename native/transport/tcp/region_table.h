// Regions of one engine that peers reach over tcp.
#pragma once

#include <atomic>
#include <memory>
#include <unordered_map>
#include <utility>

#include "transport/transport.h"
#include "util/anonymous_pages.h"
#include "util/spinlock.h"

namespace crossrail::tcp {

class RegionTable;

// Lifecycle: 1. open. 2. revoked: no new use. 3. quiet: users == 0. 4. destroyed.
class TcpRegion final : public LocalRegion {
 public:
  TcpRegion(RegionTable* table, Access access) : access(access), table_(table) {}
  ~TcpRegion() override;

  const Access access;
  AnonymousPages pages;  // the engine's own memory
  // Frames being placed, and reads being answered. Changed by the progress holder only. Decrements are release: they
  // pair with the acquire in is_quiet(), so that whoever frees the memory sees it untouched.
  std::atomic<uint32_t> users{0};
  // relaxed: the holder learns of it through revocations() at the latest; until then it uses memory that close() still
  // keeps.
  std::atomic<bool> revoked{false};
  bool has_faulted = false;  // the kernel could not read some of it. Progress holder only

 private:
  RegionTable* const table_;
};

// A use of a region by the progress holder.
class RegionUse {
 public:
  RegionUse() = default;
  explicit RegionUse(TcpRegion* region) : region_(region) {}  // takes over one of region->users
  RegionUse(RegionUse&& other) noexcept : region_(std::exchange(other.region_, nullptr)) {}
  RegionUse& operator=(RegionUse&& other) noexcept {
    if (this != &other) {
      reset();
      region_ = std::exchange(other.region_, nullptr);
    }
    return *this;
  }
  ~RegionUse() { reset(); }
  // One more use. relaxed: this use keeps the region.
  RegionUse share() const {
    region_->users.fetch_add(1, std::memory_order_relaxed);
    return RegionUse(region_);
  }
  void reset() {
    if (region_ != nullptr) std::exchange(region_, nullptr)->users.fetch_sub(1, std::memory_order_release);
  }
  TcpRegion* operator->() const { return region_; }
  explicit operator bool() const { return region_ != nullptr; }
  bool is_of(const LocalRegion& region) const { return region_ == &region; }
  bool is_revoked() const { return region_ != nullptr && region_->revoked.load(std::memory_order_relaxed); }

 private:
  TcpRegion* region_ = nullptr;
};

// Threads: any, except use(): progress holder.
class RegionTable {
 public:
  std::unique_ptr<TcpRegion> add(uint64_t id, std::byte* base, uint64_t length_bytes, Access access, int gpu = -1,
                                 bool maps_file = false);
  std::unique_ptr<TcpRegion> allocate(uint64_t id, uint64_t length_bytes, bool populate);
  void revoke(TcpRegion& region);
  static bool is_quiet(const TcpRegion& region) { return region.users.load(std::memory_order_acquire) == 0; }

  // Empty if no open region has this id.
  RegionUse use(uint64_t id);
  // Changes with every revocation: uses under way must then be checked.
  uint64_t revocations() const { return revocations_.load(std::memory_order_acquire); }

 private:
  friend class TcpRegion;
  void remove(const TcpRegion& region);
  SpinLock lock_;
  std::unordered_map<uint64_t, TcpRegion*> open_;
  std::atomic<uint64_t> revocations_{0};
};

}  // namespace crossrail::tcp
