#include "bench/fabric_loop.h"

#include <rdma/fi_cm.h>
#include <rdma/fi_rma.h>

#include "util/clock.h"
#include "util/errors.h"

namespace crossrail::bench {

namespace {

constexpr size_t kEntries = 64;
constexpr int kLastReads = 64;  // until what the provider owes the peer is sent

}  // namespace

FabricLoop::FabricLoop(const std::string& provider, const std::string& rail) {
  const auto library = ofi::open_library();
  ofi::Rules rules = ofi::rules_for(provider);
  rules.connects = false;  // the common way to use it: reliable datagram endpoints
  auto devices = ofi::choose(*library, rules, {rail}, 1);
  domain_ = std::make_unique<ofi::Domain>(library, rules, std::move(devices.front()));
  fid_ep* endpoint = nullptr;
  if (const int code = fi_endpoint(domain_->fid(), &domain_->info(), &endpoint, nullptr); code != 0)
    domain_->fail("fi_endpoint", code);
  endpoint_.reset(endpoint);
  peers_ = std::make_unique<ofi::Peers>(*domain_);
  if (const int code = fi_ep_bind(endpoint, &peers_->fid()->fid, 0); code != 0) domain_->fail("fi_ep_bind", code);
  if (const int code = fi_ep_bind(endpoint, &domain_->queue()->fid, FI_TRANSMIT | FI_RECV); code != 0)
    domain_->fail("fi_ep_bind", code);
  if (const int code = fi_enable(endpoint); code != 0) domain_->fail("fi_enable", code);
  name_.resize(64);
  size_t bytes = name_.size();
  if (const int code = fi_getname(&endpoint->fid, name_.data(), &bytes); code != 0) domain_->fail("fi_getname", code);
  name_.resize(bytes);
}

BareLoop::Target FabricLoop::add_memory(std::span<std::byte> memory) {
  constexpr uint64_t kAccess = FI_READ | FI_WRITE | FI_REMOTE_READ | FI_REMOTE_WRITE;
  memories_.push_back({memory.data(), domain_->register_memory(memory.data(), memory.size(), kAccess)});
  const bool by_address = domain_->wants(FI_MR_VIRT_ADDR);
  return {by_address ? reinterpret_cast<uint64_t>(memory.data()) : 0, fi_mr_key(memories_.back().memory.get())};
}

void FabricLoop::meet(const std::vector<uint8_t>& peer_name) {
  if (peer_name.size() != name_.size()) throw UsageError("the peer's name is none of this provider's");
  peer_ = peers_->add(peer_name);
}

void* FabricLoop::descriptor_of(const std::byte* base) const {
  for (const Entry& entry : memories_) {
    if (entry.base == base) return fi_mr_desc(entry.memory.get());
  }
  throw UsageError("the source was not added");
}

void FabricLoop::post(std::byte* from, uint64_t length_bytes, uint64_t to, uint64_t key, bool with_imm, Guard& guard) {
  const iovec range{from, length_bytes};
  const fi_rma_iov target{to, length_bytes, key};
  fi_msg_rma message{};
  message.msg_iov = &range;
  message.desc = &descriptor_;
  message.iov_count = 1;
  message.addr = peer_;
  message.rma_iov = &target;
  message.rma_iov_count = 1;
  message.data = 1;
  const uint64_t flags = FI_COMPLETION | FI_DELIVERY_COMPLETE | (with_imm ? FI_REMOTE_CQ_DATA : 0);
  for (;;) {
    const ssize_t code = fi_writemsg(endpoint_.get(), &message, flags);
    if (code == 0) return;
    if (code != -FI_EAGAIN) domain_->fail("fi_writemsg", static_cast<int>(code));
    read();
    guard.tick();
  }
}

// Counts the completions: our own writes as completed, the peer's as arrived.
uint64_t FabricLoop::read() {
  fi_cq_data_entry entries[kEntries];
  const ssize_t got = fi_cq_read(domain_->queue(), entries, kEntries);
  if (got == -FI_EAGAIN) return 0;
  if (got < 0) domain_->fail("fi_cq_read", static_cast<int>(got));
  for (ssize_t i = 0; i < got; ++i) ++((entries[i].flags & FI_WRITE) != 0 ? completed_ : arrived_);
  return static_cast<uint64_t>(got);
}

int64_t FabricLoop::writes(std::span<std::byte> source, Target target, uint64_t length_bytes, uint64_t count,
                           uint32_t window, Guard& guard) {
  if (length_bytes == 0 || length_bytes > source.size() || window == 0)
    throw UsageError("nbytes is " + std::to_string(length_bytes) + ", must fit the source; window must be 1 or more");
  descriptor_ = descriptor_of(source.data());
  completed_ = 0;
  const uint64_t places = source.size() / length_bytes;
  const int64_t start_ns = now_ns();
  for (uint64_t posted = 0; completed_ < count; guard.tick()) {
    while (posted < count && posted - completed_ < window) {
      const uint64_t offset = posted++ % places * length_bytes;
      post(source.data() + offset, length_bytes, target.base + offset, target.key, true, guard);
    }
    read();
  }
  return now_ns() - start_ns;
}

int64_t FabricLoop::pages(std::span<std::byte> source, Target target, std::span<const int64_t> src_pages,
                          std::span<const int64_t> dst_pages, uint64_t page_bytes, uint32_t window, bool imm_each,
                          Guard& guard) {
  if (src_pages.size() != dst_pages.size() || window == 0) throw UsageError("src_pages and dst_pages differ in length");
  const uint64_t count = page_bytes != 0 ? source.size() / page_bytes : 0;
  for (const int64_t page : src_pages) {
    if (static_cast<uint64_t>(page) >= count) throw UsageError("a page is outside of the source");
  }
  descriptor_ = descriptor_of(source.data());
  completed_ = 0;
  const int64_t start_ns = now_ns();
  for (uint64_t posted = 0; completed_ < src_pages.size(); guard.tick()) {
    while (posted < src_pages.size() && posted - completed_ < window) {
      post(source.data() + static_cast<uint64_t>(src_pages[posted]) * page_bytes, page_bytes,
           target.base + static_cast<uint64_t>(dst_pages[posted]) * page_bytes, target.key,
           imm_each || posted + 1 == src_pages.size(), guard);
      ++posted;
    }
    read();
  }
  return now_ns() - start_ns;
}

int64_t FabricLoop::ping_pong(std::span<std::byte> source, Target target, uint64_t rounds, bool first, Guard& guard) {
  if (source.size() < kWordBytes) throw UsageError("the source must hold 8 bytes");
  descriptor_ = descriptor_of(source.data());
  completed_ = 0;
  const auto await = [&](const uint64_t& count, uint64_t wanted) {
    while (count < wanted) {
      if (read() == 0) guard.tick();
    }
  };
  const int64_t start_ns = now_ns();
  for (uint64_t round = 1; round <= rounds; ++round) {
    if (!first) await(arrived_, round);
    post(source.data(), kWordBytes, target.base, target.key, true, guard);
    if (first) await(arrived_, round);
  }
  await(completed_, rounds);
  const int64_t took_ns = now_ns() - start_ns;
  arrived_ -= rounds;
  progress();
  return took_ns;
}

void FabricLoop::receive(uint64_t count, Guard& guard) {
  while (arrived_ < count) {
    if (read() == 0) guard.tick();
  }
  arrived_ -= count;
  progress();
}

// Acknowledgements are sent only while the queue is read.
void FabricLoop::progress() {
  for (int i = 0; i < kLastReads; ++i) read();
}

std::unique_ptr<BareLoop> open_fabric_loop(const std::string& provider, const std::string& rail) {
  return std::make_unique<FabricLoop>(provider, rail);
}

}  // namespace crossrail::bench
