#include "transport/verbs/adapter.h"

#include <cerrno>
#include <cstring>

#include "util/errors.h"
#include "util/locked_memory.h"

namespace crossrail::verbs {

namespace {

std::string remedy_for(int error) {
  if (error == ENOMEM || error == EAGAIN) return locked_memory_remedy();
  if (error == EACCES || error == EPERM) return "let this user open /dev/infiniband/uverbs*";
  if (error == EFAULT) return "the memory is not mapped, or may not be written";
  if (error == EOPNOTSUPP) return "its driver cannot do that";
  return {};
}

unsigned flags_for(Access access) {
  // Relaxed ordering: without it PCIe slows down fast NICs. The completion of a write is not relaxed, so it still comes
  // after the bytes.
  unsigned flags = IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_RELAXED_ORDERING;
  switch (access) {
    case Access::kLocal:
      return flags;
    case Access::kRemoteRead:
      return flags | IBV_ACCESS_REMOTE_READ;
    case Access::kRemoteWrite:
      return flags | IBV_ACCESS_REMOTE_READ | IBV_ACCESS_REMOTE_WRITE;
  }
  return flags;
}

}  // namespace

void fail(const std::string& name, const char* call, int error, const std::string& what) {
  throw TransportError(call, error, name + ": " + what + ": " + std::strerror(error), remedy_for(error));
}

OpenDevice::OpenDevice(Context opened, const std::string& name) : context(std::move(opened)) {
  if (const int error = library().query_device(context.get(), &limits); error != 0)
    fail(name, "ibv_query_device", error, "cannot ask for the device's limits");
  domain.reset(library().alloc_pd(context.get()));
  if (domain == nullptr) fail(name, "ibv_alloc_pd", errno, "cannot make a protection domain");
}

Adapter::Adapter(std::shared_ptr<OpenDevice> opened, PortDetail port, const RdmaOptions& wanted)
    : device(std::move(opened)), detail(std::move(port)), options(wanted), gid_index(detail.port.gid_index) {}

Memory register_with(const Adapter& adapter, void* base, uint64_t length_bytes, Access access, bool* is_read_only) {
  const auto address = reinterpret_cast<uint64_t>(base);
  const unsigned flags = flags_for(access);
  Memory memory(library().reg_mr(adapter.domain(), base, length_bytes, address, flags));
  // Memory that may only be read can still be sent from.
  if (memory == nullptr && errno == EFAULT && access != Access::kRemoteWrite) {
    const unsigned read_only = flags & ~static_cast<unsigned>(IBV_ACCESS_LOCAL_WRITE);
    memory.reset(library().reg_mr(adapter.domain(), base, length_bytes, address, read_only));
    if (is_read_only != nullptr) *is_read_only = true;
  }
  if (memory == nullptr)
    fail(adapter, "ibv_reg_mr", errno, "cannot register " + std::to_string(length_bytes) + " bytes");
  return memory;
}

namespace {

// Null, and why: not with this NIC, this kernel, or this memory.
Memory register_dma_buf(const Adapter& adapter, const device::GpuMemory& memory, Access access, std::string* why) {
  if (library().reg_dmabuf_mr == nullptr) {
    *why = "libibverbs has no ibv_reg_dmabuf_mr: rdma-core 34 or newer is needed";
    return nullptr;
  }
  Memory registered(library().reg_dmabuf_mr(adapter.domain(), memory.dma_buf_offset(), memory.length_bytes(),
                                            reinterpret_cast<uint64_t>(memory.base()), memory.dma_buf(),
                                            static_cast<int>(flags_for(access))));
  if (registered == nullptr) *why = "ibv_reg_dmabuf_mr: " + std::string(std::strerror(errno));
  return registered;
}

Memory register_by_peermem(const Adapter& adapter, const device::GpuMemory& memory, Access access,
                           const std::string& why_no_dma_buf) {
  const auto address = reinterpret_cast<uint64_t>(memory.base());
  Memory registered(
      library().reg_mr(adapter.domain(), memory.base(), memory.length_bytes(), address, flags_for(access)));
  if (registered == nullptr) {
    throw TransportError(
        "ibv_reg_mr", errno,
        adapter.name() + ": cannot register " + std::to_string(memory.length_bytes()) + " bytes of GPU " +
            std::to_string(memory.gpu().ordinal) + ": " + std::strerror(errno) +
            "; nor as a dma-buf: " + why_no_dma_buf,
        "let dma-buf work (Linux 5.12, NVIDIA's open kernel modules, CUDA 11.7), or load nvidia-peermem "
        "(modprobe nvidia-peermem); torch's expandable_segments need dma-buf");
  }
  return registered;
}

}  // namespace

VerbsRegistration::VerbsRegistration(std::shared_ptr<const Adapter> adapter, std::byte* base, uint64_t length_bytes,
                                     Access access)
    : adapter_(std::move(adapter)), memory_(register_with(*adapter_, base, length_bytes, access, &is_read_only)) {
  know(base);
}

// As a dma-buf if driver and NIC support it, else as plain memory, which works if the module nvidia-peermem is loaded.
VerbsRegistration::VerbsRegistration(std::shared_ptr<const Adapter> adapter, const device::GpuMemory& memory,
                                     Access access)
    : adapter_(std::move(adapter)) {
  std::string why = memory.why_no_dma_buf();
  if (memory.dma_buf() >= 0) {
    memory_ = register_dma_buf(*adapter_, memory, access, &why);
    given_by = "dma-buf";
  }
  if (memory_ == nullptr) {
    memory_ = register_by_peermem(*adapter_, memory, access, why);
    given_by = "peermem, not dma-buf: " + why;
  }
  is_gpu = true;
  know(memory.base());
}

void VerbsRegistration::know(const std::byte* base) {
  local_key_ = memory_->lkey;
  key = memory_->rkey;
  remote_base = reinterpret_cast<uint64_t>(base);
}

VerbsRegistration::~VerbsRegistration() { (void)forget(); }

void VerbsRegistration::revoke() { (void)forget(); }

bool VerbsRegistration::is_quiet() const { return forget(); }

// The kernel returns once the NIC has forgotten the memory. It refuses while an operation of a peer still uses it: then
// this is called again. A device that is gone (EIO) has forgotten everything.
bool VerbsRegistration::forget() const {
  const std::lock_guard lock(mutex_);
  if (memory_ == nullptr) return true;
  const int error = library().dereg_mr(memory_.get());
  if (error == 0 || error == EIO) (void)memory_.release();
  return memory_ == nullptr;
}

}  // namespace crossrail::verbs
