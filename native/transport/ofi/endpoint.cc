#include "transport/ofi/endpoint.h"

#include <rdma/fi_cm.h>

#include <algorithm>

#include "transport/ofi/listener.h"
#include "util/errors.h"

namespace crossrail::ofi {

namespace {

constexpr size_t kSlotStride = 4224;  // whole cache lines
static_assert(kSlotStride >= kPacketBytesMax && kSlotStride % 64 == 0);
constexpr int kEmulatedWrite =
    -(0xefa << 16) + 2;  // FI_OPT_EFA_EMULATED_WRITE of rdma/fi_ext.h, which is not always installed

}  // namespace

Slots::Slots(const Domain& domain, uint32_t count, Op::Kind kind)
    : memory_(make_pages(count * kSlotStride)), ops_(count) {
  void* descriptor = nullptr;
  if (domain.wants(FI_MR_LOCAL)) {
    registration_ = domain.register_memory(memory_.get(), count * kSlotStride, FI_SEND | FI_RECV);
    descriptor = fi_mr_desc(registration_.get());
  }
  for (uint32_t i = 0; i < count; ++i) {
    ops_[i].kind = kind;
    ops_[i].buffer = memory_.get() + i * kSlotStride;
    ops_[i].descriptor = descriptor;
  }
}

Endpoint::Endpoint(Domain& domain, uint32_t receives) : domain_(domain), peers_(std::make_unique<Peers>(domain)) {
  if (receives != 0) receives_ = std::make_unique<Slots>(domain, receives, Op::Kind::kReceive);
  open(domain.info(), nullptr);
  post_receives();
}

Endpoint::Endpoint(Domain& domain, const Listener& listener, uint32_t receives, fi_info* request) : domain_(domain) {
  receives_ = std::make_unique<Slots>(domain, receives, Op::Kind::kReceive);
  open(request != nullptr ? *request : domain.info(), &listener);
}

Endpoint::~Endpoint() { close(); }

void Endpoint::open(fi_info& info, const Listener* listener) {
  if (const int code = fi_endpoint(domain_.fid(), &info, &fid_, nullptr); code != 0) {
    domain_.fail("fi_endpoint", code,
                 "every path of this provider takes one: raise the limit on open files (ulimit -n)");
  }
  try {
    if (domain_.rules().is_efa) set_efa_options();
    bind_and_enable(listener);
    if (listener == nullptr) read_name();
  } catch (...) {
    close();
    throw;
  }
}

void Endpoint::set_efa_options() {
  const bool no = false;
  // Between processes on one host, efa would use its shm provider, and inherit its silent losses.
  int code = fi_setopt(&fid_->fid, FI_OPT_ENDPOINT, FI_OPT_SHARED_MEMORY_PERMITTED, &no, sizeof no);
  if (code != 0 && !(code == -FI_ENOPROTOOPT && domain_.rules().name == "efa-direct"))
    domain_.fail("fi_setopt(FI_OPT_SHARED_MEMORY_PERMITTED)", code);
  // All data goes through the NIC: no CUDA copies inside libfabric. Refused if it was built without CUDA, which is
  // equivalent. If it could not reach GPU memory in any other way (EOPNOTSUPP), it gets none.
  code = fi_setopt(&fid_->fid, FI_OPT_ENDPOINT, FI_OPT_CUDA_API_PERMITTED, &no, sizeof no);
  if (code == -FI_EOPNOTSUPP) {
    domain_.info().caps &= ~static_cast<uint64_t>(FI_HMEM);
    domain_.no_gpu_memory =
        "libfabric would reach it by copies of CUDA's alone: let the device reach it (dma-buf or nvidia-peermem; "
        "`crossrail doctor --only gpu`)";
  } else if (code != 0 && code != -FI_ENOPROTOOPT && code != -FI_EINVAL) {
    domain_.fail("fi_setopt(FI_OPT_CUDA_API_PERMITTED)", code);
  }
  // The peer's provider would then place the bytes whenever it runs: also after a region was closed.
  if (is_option_set(kEmulatedWrite)) {
    domain_.fail(
        "fi_getopt(FI_OPT_EFA_EMULATED_WRITE)", -FI_EOPNOTSUPP,
        "this device, or this libfabric, carries out writes by messages: use tcp, or an instance whose EFA has RDMA "
        "write");
  }
}

void Endpoint::bind_and_enable(const Listener* listener) {
  if (listener != nullptr) {
    if (const int code = fi_ep_bind(fid_, &listener->queue()->fid, 0); code != 0)
      domain_.fail("fi_ep_bind(event queue)", code);
  } else if (const int code = fi_ep_bind(fid_, &peers_->fid()->fid, 0); code != 0) {
    domain_.fail("fi_ep_bind(address vector)", code);
  }
  if (fid_eq* const errors = domain_.errors(); errors != nullptr) {
    if (const int code = fi_ep_bind(fid_, &errors->fid, 0); code != 0) domain_.fail("fi_ep_bind(event queue)", code);
  }
  if (const int code = fi_ep_bind(fid_, &domain_.queue()->fid, FI_TRANSMIT | FI_RECV); code != 0)
    domain_.fail("fi_ep_bind(completion queue)", code);
  if (const int code = fi_enable(fid_); code != 0) {
    domain_.fail("fi_enable", code, domain_.rules().uses_ip ? "check that this address is one of the host's" : "");
  }
}

void Endpoint::read_name() {
  uint8_t name[kNameBytesMax];
  size_t bytes = sizeof name;
  if (const int code = fi_getname(&fid_->fid, name, &bytes); code != 0) domain_.fail("fi_getname", code);
  name_.assign(name, name + bytes);
}

void Endpoint::dial(const Name& to, std::span<const uint8_t> said) {
  if (const int code = fi_connect(fid_, to.data(), said.data(), said.size()); code != 0)
    domain_.fail("fi_connect", code);
  post_receives();
}

void Endpoint::accept() {
  if (const int code = fi_accept(fid_, nullptr, 0); code != 0) domain_.fail("fi_accept", code);
  post_receives();
}

bool Endpoint::close() {
  if (fid_ == nullptr) return true;
  if (fi_close(&fid_->fid) != 0) return false;
  fid_ = nullptr;
  domain_.starved_receives -= static_cast<uint32_t>(starved_.size());
  starved_.clear();
  return true;
}

void Endpoint::list(Op& op) {
  op.endpoint = this;
  op.is_listed = true;
  op.previous = nullptr;
  op.next = first_;
  if (first_ != nullptr) first_->previous = &op;
  first_ = &op;
  ++outstanding_;
}

void Endpoint::unlist(Op& op) {
  if (op.previous != nullptr) {
    op.previous->next = op.next;
  } else {
    first_ = op.next;
  }
  if (op.next != nullptr) op.next->previous = op.previous;
  op.is_listed = false;
  --outstanding_;
}

void Endpoint::post_receives() {
  if (receives_ == nullptr) return;
  for (Op& op : receives_->ops()) {
    op.endpoint = this;
    post_receive(op);
  }
}

void Endpoint::post_receive(Op& op) {
  if (fid_ == nullptr) return;
  const ssize_t code = fi_recv(fid_, op.buffer, kPacketBytesMax, op.descriptor, FI_ADDR_UNSPEC, &op);
  if (code == 0) return;
  starved_.push_back(&op);
  ++domain_.starved_receives;
}

uint32_t Endpoint::post_starved_receives() {
  if (starved_.empty()) return 0;
  std::vector<Op*> waiting;
  waiting.swap(starved_);
  domain_.starved_receives -= static_cast<uint32_t>(waiting.size());
  for (Op* op : waiting) post_receive(*op);
  return static_cast<uint32_t>(waiting.size() - std::min(waiting.size(), starved_.size()));
}

bool Endpoint::is_option_set(int option) const {
  bool value = false;
  size_t bytes = sizeof value;
  return fi_getopt(&fid_->fid, FI_OPT_ENDPOINT, option, &value, &bytes) == 0 && value;
}

uint64_t Endpoint::option_bytes(int option, uint64_t otherwise) const {
  size_t value = 0;
  size_t bytes = sizeof value;
  return fi_getopt(&fid_->fid, FI_OPT_ENDPOINT, option, &value, &bytes) == 0 ? value : otherwise;
}

}  // namespace crossrail::ofi
