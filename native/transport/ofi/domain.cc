#include "transport/ofi/domain.h"

#include <mutex>

#include "util/entropy.h"
#include "util/errors.h"
#include "util/locked_memory.h"

namespace crossrail::ofi {

namespace {

// Entries of the completion queue. On efa an overrun ends the use of the device, and besides our own works and receives
// the queue takes immediates of any number of peers, which no limit of ours holds back: so it gets as many as the
// device allows. Other providers' queues grow.
constexpr size_t kQueueEntriesMax = 32768;
constexpr size_t kQueueEntries = 4096;
constexpr size_t kQueueEntriesMin = 1024;
constexpr size_t kPeersExpected = 256;  // a hint

}  // namespace

Peers::Peers(const Domain& domain) {
  fi_av_attr attributes{};
  attributes.type = FI_AV_UNSPEC;
  attributes.count = kPeersExpected;
  fid_av* addresses = nullptr;
  if (const int code = domain.fid()->ops->av_open(domain.fid(), &attributes, &addresses, nullptr); code != 0)
    domain.fail("fi_av_open", code);
  addresses_.reset(addresses);
}

fi_addr_t Peers::add(const Name& name) {
  Entry& entry = entries_[name];
  if (entry.users == 0) {
    const int count = fid()->ops->insert(fid(), name.data(), 1, &entry.address, 0, nullptr);
    if (count != 1) {
      entries_.erase(name);
      throw TransportError("fi_av_insert", count < 0 ? -count : 0, "the provider rejects a peer's address");
    }
  }
  ++entry.users;
  return entry.address;
}

void Peers::remove(const Name& name) {
  const auto found = entries_.find(name);
  if (found == entries_.end() || --found->second.users != 0) return;
  fid()->ops->remove(fid(), &found->second.address, 1, 0);  // fails only for an invalid address
  entries_.erase(found);
}

Domain::Domain(std::shared_ptr<const Library> library, const Rules& rules, Device device)
    : library_(std::move(library)), rules_(rules), device_(std::move(device)) {
  info().fabric_attr->api_version = library_->api;
  fid_fabric* fabric = nullptr;
  if (const int code = library_->calls.fabric(info().fabric_attr, &fabric, nullptr); code != 0) fail("fi_fabric", code);
  fabric_.reset(fabric);
  fid_domain* domain = nullptr;
  if (const int code = fi_domain(fabric, &info(), &domain, nullptr); code != 0) fail("fi_domain", code);
  domain_.reset(domain);
  if (rules.is_efa) open_errors();
  open_queue();
}

void Domain::open_errors() {
  fi_eq_attr attributes{};
  attributes.wait_obj = FI_WAIT_NONE;
  fid_eq* errors = nullptr;
  if (const int code = fi_eq_open(fabric_.get(), &attributes, &errors, nullptr); code != 0) fail("fi_eq_open", code);
  errors_.reset(errors);
}

std::string Domain::take_error() {
  fi_eq_err_entry error{};
  if (errors_ == nullptr || fi_eq_readerr(errors_.get(), &error, 0) <= 0) return {};
  return error_text(error.err) + " (" + std::to_string(error.prov_errno) + ")";
}

void Domain::open_queue() {
  fi_cq_attr attributes{};
  attributes.format = FI_CQ_FORMAT_DATA;
  int code = 0;
  fid_cq* queue = nullptr;
  for (const fi_wait_obj wait : {FI_WAIT_FD, FI_WAIT_NONE}) {
    if (wait == FI_WAIT_FD && !rules_.has_descriptor) continue;
    attributes.wait_obj = wait;
    for (attributes.size = rules_.is_efa ? kQueueEntriesMax : kQueueEntries; attributes.size >= kQueueEntriesMin;
         attributes.size /= 2) {
      code = fi_cq_open(domain_.get(), &attributes, &queue, nullptr);
      if (code == 0) break;
    }
    if (code == 0) break;
  }
  if (code != 0) fail("fi_cq_open", code);
  queue_.reset(queue);
  if (attributes.wait_obj == FI_WAIT_NONE) return;
  int fd = -1;
  if (fi_control(&queue->fid, FI_GETWAIT, &fd) == 0) wait_fd_ = fd;
}

void Domain::close() {
  queue_.reset();
  const std::unique_lock lock(closing_mutex_);
  is_closed_ = true;
  if (domain_ == nullptr || fi_close(&domain_->fid) != 0) return;
  static_cast<void>(domain_.release());
  errors_.reset();
  fabric_.reset();
}

bool Domain::may_sleep(fid_eq* events) const {
  struct fid* objects[] = {&queue_->fid, events != nullptr ? &events->fid : nullptr};
  return wait_fd_ >= 0 && fi_trywait(fabric_.get(), objects, events != nullptr ? 2 : 1) == 0;
}

int Domain::register_with(fi_mr_attr* attributes, uint64_t flags, fid_mr** memory) const {
  const std::shared_lock lock(closing_mutex_);
  if (is_closed_) throw EngineClosedError("the engine is closed");
  attributes->iov_count = 1;
  for (int attempt = 0;; ++attempt) {
    // If we choose the key, a random one: the key of a region closed long ago must open nothing else.
    if (!wants(FI_MR_PROV_KEY)) {
      const size_t bytes = info().domain_attr->mr_key_size;
      const uint64_t key = kernel_entropy().draw_u64();
      attributes->requested_key = bytes >= 8 ? key : key & ((1ull << (8 * bytes)) - 1);
    }
    const int code = domain_->mr->regattr(&domain_->fid, attributes, flags, memory);
    if (code != -FI_ENOKEY || attempt == 8) return code;  // otherwise the key is taken
  }
}

Fid<fid_mr> Domain::register_memory(void* base, uint64_t length_bytes, uint64_t access) const {
  const iovec range{base, length_bytes};
  fi_mr_attr attributes{};
  attributes.mr_iov = &range;
  attributes.access = access;
  attributes.iface = FI_HMEM_SYSTEM;
  fid_mr* memory = nullptr;
  if (const int code = register_with(&attributes, 0, &memory); code != 0)
    fail("fi_mr_regattr", code, code == -FI_ENOMEM || code == -FI_EPERM ? locked_memory_remedy() : "");
  return Fid<fid_mr>(memory);
}

// Without a dma-buf of ours the provider tries its own means, such as nvidia-peermem.
Fid<fid_mr> Domain::register_gpu_memory(const device::GpuMemory& gpu, uint64_t access) const {
  // Peers address the start of the dma-buf plus the offset in it, which equals our pointer.
  const fi_mr_dmabuf shared{gpu.dma_buf(), gpu.dma_buf_offset(), gpu.length_bytes(), gpu.base() - gpu.dma_buf_offset()};
  const iovec range{gpu.base(), gpu.length_bytes()};
  fi_mr_attr attributes{};
  const bool is_shared = gpu.dma_buf() >= 0;
  if (is_shared) {
    attributes.dmabuf = &shared;
  } else {
    attributes.mr_iov = &range;
  }
  attributes.access = access;
  attributes.iface = FI_HMEM_CUDA;
  attributes.device.cuda = gpu.gpu().ordinal;
  fid_mr* memory = nullptr;
  if (const int code = register_with(&attributes, is_shared ? FI_MR_DMABUF : 0, &memory); code != 0) {
    fail(is_shared ? "fi_mr_regattr(FI_MR_DMABUF)" : "fi_mr_regattr", code,
         is_shared ? "update the efa driver and libfabric: dma-bufs need Linux 5.12 and EFA's installer 1.29"
                   : "no dma-buf either: " + gpu.why_no_dma_buf());
  }
  return Fid<fid_mr>(memory);
}

void Domain::fail(const char* call, int code, const std::string& remedy) const {
  throw TransportError(call, code < 0 ? -code : code, rules_.name + " on " + device_.name + ": " + error_text(code),
                       remedy);
}

}  // namespace crossrail::ofi
