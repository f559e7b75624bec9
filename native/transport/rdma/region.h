// Regions of one engine that peers reach through its RDMA NICs.
#pragma once

#include <memory>
#include <mutex>
#include <unordered_map>
#include <unordered_set>

#include "transport/rdma/nic.h"
#include "transport/rdma/registrations.h"
#include "transport/rdma/wire.h"
#include "transport/transport.h"
#include "util/anonymous_pages.h"

namespace crossrail::rdma {

class RegionTable;

// Lifecycle: 1. open. 2. revoked: unknown to verdict(), but still registered at the NICs, since our own works may be
// using it as their source. 3. Once those have ended (is_quiet() is only asked after that): revoked at the NICs, unless
// other regions share its registrations. 4. quiet. 5. destroyed.
class RdmaRegion final : public LocalRegion {
 public:
  struct Tables {
    RegionTable* regions;
    SharedRegistrations* shared;
  };
  RdmaRegion(const Tables& tables, Access access, bool is_gpu) : access(access), is_gpu(is_gpu), tables_(tables) {}
  ~RdmaRegion() override;

  RdmaKeys rdma_keys() const override;
  std::string given_by() const override;
  const Registration* on(uint32_t rail) const { return registered->by_rail[rail].get(); }
  // Threads: any.
  bool is_quiet() const;

  const Access access;
  const bool is_gpu;
  AnonymousPages pages;  // the engine's own memory; declared before `registered`, which refers to it
  std::shared_ptr<Registrations> registered;  // constant

 private:
  void revoke() const;
  const Tables tables_;
  mutable std::mutex revoking_;
  mutable bool is_revoked_ = false;    // at the NICs, or left to the other regions that share it
  mutable bool is_shared_on_ = false;  // the latter: those regions are responsible for the registrations
};

// Threads: any.
class RegionTable {
 public:
  void add(RdmaRegion& region);
  void remove(const RdmaRegion& region);
  // The region is being destroyed.
  void forget(const RdmaRegion& region);
  // Deregisters every region at the NICs, once none of our own works is in flight. True if all are quiet.
  bool revoke_all();
  // The answer to a peer whose operations failed: kDone if its NIC would have to let them pass.
  Status verdict(const Span& span) const;

 private:
  mutable std::mutex mutex_;
  std::unordered_map<uint64_t, const RdmaRegion*> open_;
  std::unordered_set<const RdmaRegion*> living_;  // including revoked ones
};

}  // namespace crossrail::rdma
