// Memory registered with a provider, and when peers no longer access it.
#pragma once

#include <atomic>
#include <memory>

#include "transport/ofi/domain.h"
#include "transport/rdma/nic.h"

namespace crossrail::ofi {

// If a provider places peers' bytes in software, closing a registration refuses new operations but does not end one
// whose bytes are still arriving. A fence does: every path carries a question behind everything in flight, in both
// directions, and the answer shows that it has ended. Numbers grow.
struct Fences {
  // revoke() adds one after the registration is closed; poll() reads it before it begins a fence. Sequentially
  // consistent: what a fence of number n looks at is later than every close that n counts.
  std::atomic<uint64_t> wanted{0};
  // poll() stores it with release when all have answered; is_quiet() acquires it, so that the bytes are seen too.
  std::atomic<uint64_t> done{0};
};

class OfiRegistration final : public rdma::Registration {
 public:
  OfiRegistration(std::shared_ptr<const Domain> domain, std::shared_ptr<Fences> fences, std::byte* base,
                  uint64_t length_bytes, Access access);
  OfiRegistration(std::shared_ptr<const Domain> domain, std::shared_ptr<Fences> fences, const device::GpuMemory& memory,
                  Access access);
  ~OfiRegistration() override;
  void revoke() override;
  bool is_quiet() const override;
  void* descriptor() const { return descriptor_; }

 private:
  OfiRegistration(std::shared_ptr<const Domain> domain, std::shared_ptr<Fences> fences, Fid<fid_mr> memory,
                  const std::byte* base, Access access);
  const std::shared_ptr<const Domain> domain_;  // outlives memory_
  const std::shared_ptr<Fences> fences_;
  Fid<fid_mr> memory_;
  void* descriptor_ = nullptr;
  const bool needs_fence_;
  std::atomic<uint64_t> ticket_{0};  // of the fence that ends it; relaxed: revoke() is before is_quiet() by its caller
  std::atomic<bool> revoked_{false};
};

}  // namespace crossrail::ofi
