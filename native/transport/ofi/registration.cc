#include "transport/ofi/registration.h"

namespace crossrail::ofi {

namespace {

uint64_t access_bits(Access access) {
  uint64_t bits = FI_SEND | FI_RECV | FI_READ | FI_WRITE;
  if (access != Access::kLocal) bits |= FI_REMOTE_READ;
  if (access == Access::kRemoteWrite) bits |= FI_REMOTE_WRITE;
  return bits;
}

}  // namespace

OfiRegistration::OfiRegistration(std::shared_ptr<const Domain> domain, std::shared_ptr<Fences> fences, std::byte* base,
                                 uint64_t length_bytes, Access access)
    : OfiRegistration(domain, std::move(fences), domain->register_memory(base, length_bytes, access_bits(access)), base,
                      access) {}

OfiRegistration::OfiRegistration(std::shared_ptr<const Domain> domain, std::shared_ptr<Fences> fences,
                                 const device::GpuMemory& memory, Access access)
    : OfiRegistration(domain, std::move(fences), domain->register_gpu_memory(memory, access_bits(access)),
                      memory.base(), access) {
  is_gpu = true;
  given_by = memory.dma_buf() >= 0 ? "dma-buf" : "libfabric's own way, not dma-buf: " + memory.why_no_dma_buf();
}

OfiRegistration::OfiRegistration(std::shared_ptr<const Domain> domain, std::shared_ptr<Fences> fences,
                                 Fid<fid_mr> memory, const std::byte* base, Access access)
    : domain_(std::move(domain)),
      fences_(std::move(fences)),
      memory_(std::move(memory)),
      descriptor_(fi_mr_desc(memory_.get())),
      needs_fence_(domain_->rules().placed_by_software && access != Access::kLocal) {
  key = fi_mr_key(memory_.get());
  remote_base = domain_->wants(FI_MR_VIRT_ADDR) ? reinterpret_cast<uint64_t>(base) : 0;
}

OfiRegistration::~OfiRegistration() { revoke(); }

void OfiRegistration::revoke() {
  if (revoked_.exchange(true, std::memory_order_acq_rel)) return;
  memory_.reset();
  if (needs_fence_) ticket_.store(fences_->wanted.fetch_add(1) + 1, std::memory_order_relaxed);
}

bool OfiRegistration::is_quiet() const {
  return !needs_fence_ || fences_->done.load(std::memory_order_acquire) >= ticket_.load(std::memory_order_relaxed);
}

}  // namespace crossrail::ofi
