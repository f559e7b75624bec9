// The bare loop over libibverbs: one reliable queue pair, chains of write requests, one completion queue for both
// directions.
#include <memory>

#include "bench/bare_loop.h"
#include "transport/verbs/open.h"
#include "util/errors.h"

#if CROSSRAIL_WITH_VERBS

#include <arpa/inet.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <optional>

#include "transport/verbs/adapter.h"
#include "transport/verbs/ports.h"
#include "transport/verbs/route.h"
#include "util/clock.h"
#include "util/entropy.h"

namespace crossrail::bench {
namespace {

class VerbsLoop final : public BareLoop {
 public:
  VerbsLoop();

  const std::vector<uint8_t>& name() const override { return name_; }
  Target add_memory(std::span<std::byte> memory) override;
  void meet(const std::vector<uint8_t>& peer_name) override;
  int64_t writes(std::span<std::byte> source, Target target, uint64_t length_bytes, uint64_t count, uint32_t window,
                 Guard& guard) override;
  int64_t pages(std::span<std::byte> source, Target target, std::span<const int64_t> src_pages,
                std::span<const int64_t> dst_pages, uint64_t page_bytes, uint32_t window, bool imm_each,
                Guard& guard) override;
  int64_t ping_pong(std::span<std::byte> source, Target target, uint64_t rounds, bool first, Guard& guard) override;
  void receive(uint64_t count, Guard& guard) override;
  void progress() override { read(); }

 private:
  static constexpr uint32_t kSends = 256;
  static constexpr uint32_t kReceives = 4096;  // without memory: immediates use them up
  static constexpr uint32_t kChain = 16;       // requests behind one doorbell; the last of them is signalled
  static constexpr uint32_t kReceiveChain = 64;
  static constexpr uint32_t kInlineBytes = 64;
  static constexpr uint32_t kPsnMask = 0xffffff;
  static constexpr int kReadMax = 64;
  // Each receive makes one entry, and each send at most one.
  static constexpr int kQueueEntries = kReceives + kSends;

  struct Entry {
    std::byte* base;
    verbs::Memory memory;
  };
  struct Place {
    const std::byte* from;
    uint64_t to;
  };

  void open_queues();
  void change(ibv_qp_attr attributes, int mask);
  void use(const std::byte* source, Target target, uint64_t length_bytes);
  void post(uint32_t count);
  template <typename PlaceOf>
  int64_t move(uint64_t count, uint32_t window, bool imm_each, PlaceOf place_of, Guard& guard);
  uint32_t read();
  void replenish();

  std::unique_ptr<verbs::Adapter> adapter_;
  std::vector<Entry> memories_;
  verbs::CompletionQueue queue_;
  verbs::QueuePair queue_pair_;
  uint32_t inline_bytes_ = 0;
  uint32_t receives_missing_ = kReceives;
  uint32_t psn_ = kernel_entropy().draw_u32() & kPsnMask;
  std::vector<uint8_t> name_;
  std::array<ibv_send_wr, kChain> requests_{};
  std::array<ibv_sge, kChain> ranges_{};
  uint64_t completed_ = 0;
  uint64_t arrived_ = 0;
};

std::unique_ptr<verbs::Adapter> open_adapter() {
  if (const std::string why = verbs::missing(); !why.empty()) throw TransportError("bare verbs", ENODEV, why);
  TransportOptions options;
  std::vector<verbs::Device> devices = verbs::open_devices();
  verbs::PortDetail detail = std::move(verbs::choose_ports(devices, options).front());
  const auto device = std::ranges::find(devices, detail.port.device, &verbs::Device::name);
  auto opened = std::make_shared<verbs::OpenDevice>(std::move(device->context), device->name);
  return std::make_unique<verbs::Adapter>(std::move(opened), std::move(detail), options.rdma);
}

VerbsLoop::VerbsLoop() : adapter_(open_adapter()) {
  open_queues();
  ibv_qp_attr initial{};
  initial.qp_state = IBV_QPS_INIT;
  initial.port_num = adapter_->detail.port.number;
  initial.pkey_index = adapter_->detail.partition_index;
  initial.qp_access_flags = IBV_ACCESS_REMOTE_WRITE;
  change(initial, IBV_QP_STATE | IBV_QP_PKEY_INDEX | IBV_QP_PORT | IBV_QP_ACCESS_FLAGS);
  replenish();
  verbs::Endpoint endpoint = adapter_->detail.endpoint;
  endpoint.queue_pair = queue_pair_->qp_num;
  endpoint.queue_key = psn_;  // reliable queue pairs have no key
  name_ = verbs::encode(endpoint);
  for (uint32_t i = 0; i < kChain; ++i) {
    requests_[i].sg_list = &ranges_[i];
    requests_[i].num_sge = 1;
    requests_[i].imm_data = htonl(1);
  }
}

void VerbsLoop::open_queues() {
  queue_.reset(verbs::library().create_cq(adapter_->context(), kQueueEntries, nullptr, nullptr, 0));
  if (queue_ == nullptr) verbs::fail(*adapter_, "ibv_create_cq", errno, "cannot make a completion queue");
  ibv_qp_init_attr wanted{};
  wanted.send_cq = wanted.recv_cq = queue_.get();
  wanted.qp_type = IBV_QPT_RC;
  wanted.cap = {.max_send_wr = kSends,
                .max_recv_wr = kReceives,
                .max_send_sge = 1,
                .max_recv_sge = 1,
                .max_inline_data = kInlineBytes};
  queue_pair_.reset(verbs::library().create_qp(adapter_->domain(), &wanted));
  if (queue_pair_ == nullptr) verbs::fail(*adapter_, "ibv_create_qp", errno, "cannot make a queue pair");
  inline_bytes_ = std::min(wanted.cap.max_inline_data, kInlineBytes);
}

void VerbsLoop::change(ibv_qp_attr attributes, int mask) {
  if (const int error = verbs::library().modify_qp(queue_pair_.get(), &attributes, mask); error != 0)
    verbs::fail(*adapter_, "ibv_modify_qp", error, "cannot connect the bare queue pair");
}

BareLoop::Target VerbsLoop::add_memory(std::span<std::byte> memory) {
  memories_.push_back(
      {memory.data(), verbs::register_with(*adapter_, memory.data(), memory.size(), Access::kRemoteWrite)});
  return {reinterpret_cast<uint64_t>(memory.data()), memories_.back().memory->rkey};
}

void VerbsLoop::meet(const std::vector<uint8_t>& peer_name) {
  const std::optional<verbs::Endpoint> peer = verbs::decode_endpoint(peer_name);
  if (!peer) throw UsageError("the peer's name is none of a bare verbs loop");
  ibv_qp_attr far{};
  far.qp_state = IBV_QPS_RTR;
  far.path_mtu = static_cast<ibv_mtu>(std::min(adapter_->detail.endpoint.mtu, peer->mtu));
  far.dest_qp_num = peer->queue_pair;
  far.rq_psn = peer->queue_key;
  far.max_dest_rd_atomic = 1;
  far.min_rnr_timer = 4;  // 0.04 ms
  far.ah_attr = verbs::route_to(*adapter_, *peer);
  change(far, IBV_QP_STATE | IBV_QP_AV | IBV_QP_PATH_MTU | IBV_QP_DEST_QPN | IBV_QP_RQ_PSN | IBV_QP_MAX_DEST_RD_ATOMIC |
                  IBV_QP_MIN_RNR_TIMER);
  ibv_qp_attr ready{};
  ready.qp_state = IBV_QPS_RTS;
  ready.sq_psn = psn_;
  ready.timeout = 14;  // 67 ms until a packet is retransmitted,
  ready.retry_cnt = 6;
  ready.rnr_retry = 7;  // and a peer without receives is waited for
  ready.max_rd_atomic = 1;
  change(ready,
         IBV_QP_STATE | IBV_QP_SQ_PSN | IBV_QP_TIMEOUT | IBV_QP_RETRY_CNT | IBV_QP_RNR_RETRY | IBV_QP_MAX_QP_RD_ATOMIC);
}

// Fills in the fields that all requests of a loop have in common.
void VerbsLoop::use(const std::byte* source, Target target, uint64_t length_bytes) {
  const auto entry = std::ranges::find(memories_, source, &Entry::base);
  if (entry == memories_.end()) throw UsageError("the source was not added");
  for (uint32_t i = 0; i < kChain; ++i) {
    ranges_[i].length = static_cast<uint32_t>(length_bytes);
    ranges_[i].lkey = entry->memory->lkey;
    requests_[i].wr.rdma.rkey = static_cast<uint32_t>(target.key);
    requests_[i].send_flags = length_bytes <= inline_bytes_ ? unsigned{IBV_SEND_INLINE} : 0;
  }
  completed_ = 0;
}

// Posts the first `count` of the chain. Their single completion says how many it stands for.
void VerbsLoop::post(uint32_t count) {
  for (uint32_t i = 0; i < count; ++i) requests_[i].next = i + 1 < count ? &requests_[i + 1] : nullptr;
  ibv_send_wr& last = requests_[count - 1];
  const unsigned flags = last.send_flags;
  last.send_flags |= IBV_SEND_SIGNALED;
  last.wr_id = count;
  ibv_send_wr* refused = nullptr;
  const int error = ibv_post_send(queue_pair_.get(), requests_.data(), &refused);
  last.send_flags = flags;
  if (error != 0) verbs::fail(*adapter_, "ibv_post_send", error, "cannot post the bare writes");
}

template <typename PlaceOf>
int64_t VerbsLoop::move(uint64_t count, uint32_t window, bool imm_each, PlaceOf place_of, Guard& guard) {
  window = std::min(window, kSends);
  const uint32_t chain_max = std::clamp(window / 4, 1u, kChain);
  const int64_t start_ns = now_ns();
  for (uint64_t posted = 0; completed_ < count; guard.tick()) {
    for (;;) {
      const auto chain = static_cast<uint32_t>(std::min<uint64_t>(chain_max, count - posted));
      if (chain == 0 || window - (posted - completed_) < chain) break;
      for (uint32_t i = 0; i < chain; ++i) {
        const Place place = place_of(posted + i);
        ranges_[i].addr = reinterpret_cast<uint64_t>(place.from);
        requests_[i].wr.rdma.remote_addr = place.to;
        requests_[i].opcode = imm_each || posted + i + 1 == count ? IBV_WR_RDMA_WRITE_WITH_IMM : IBV_WR_RDMA_WRITE;
      }
      post(chain);
      posted += chain;
    }
    read();
  }
  return now_ns() - start_ns;
}

int64_t VerbsLoop::writes(std::span<std::byte> source, Target target, uint64_t length_bytes, uint64_t count,
                          uint32_t window, Guard& guard) {
  if (length_bytes == 0 || length_bytes > source.size() || window == 0)
    throw UsageError("nbytes is " + std::to_string(length_bytes) + ", must fit the source; window must be 1 or more");
  use(source.data(), target, length_bytes);
  const uint64_t places = source.size() / length_bytes;
  const auto place_of = [&](uint64_t index) {
    const uint64_t offset = index % places * length_bytes;
    return Place{source.data() + offset, target.base + offset};
  };
  return move(count, window, true, place_of, guard);
}

int64_t VerbsLoop::pages(std::span<std::byte> source, Target target, std::span<const int64_t> src_pages,
                         std::span<const int64_t> dst_pages, uint64_t page_bytes, uint32_t window, bool imm_each,
                         Guard& guard) {
  if (src_pages.size() != dst_pages.size() || window == 0) throw UsageError("src_pages and dst_pages differ in length");
  const uint64_t page_count = page_bytes != 0 ? source.size() / page_bytes : 0;
  for (const int64_t page : src_pages) {
    if (static_cast<uint64_t>(page) >= page_count) throw UsageError("a page is outside of the source");
  }
  use(source.data(), target, page_bytes);
  const auto place_of = [&](uint64_t index) {
    return Place{source.data() + static_cast<uint64_t>(src_pages[index]) * page_bytes,
                 target.base + static_cast<uint64_t>(dst_pages[index]) * page_bytes};
  };
  return move(src_pages.size(), window, imm_each, place_of, guard);
}

int64_t VerbsLoop::ping_pong(std::span<std::byte> source, Target target, uint64_t rounds, bool first, Guard& guard) {
  if (source.size() < kWordBytes) throw UsageError("the source must hold 8 bytes");
  use(source.data(), target, kWordBytes);
  ranges_[0].addr = reinterpret_cast<uint64_t>(source.data());
  requests_[0].wr.rdma.remote_addr = target.base;
  requests_[0].opcode = IBV_WR_RDMA_WRITE_WITH_IMM;
  const auto await = [&](const uint64_t& count, uint64_t wanted) {
    while (count < wanted) {
      if (read() == 0) guard.tick();
    }
  };
  const int64_t start_ns = now_ns();
  for (uint64_t round = 1; round <= rounds; ++round) {
    if (!first) await(arrived_, round);
    post(1);
    if (first) await(arrived_, round);
  }
  await(completed_, rounds);
  const int64_t took_ns = now_ns() - start_ns;
  arrived_ -= rounds;
  return took_ns;
}

void VerbsLoop::receive(uint64_t count, Guard& guard) {
  while (arrived_ < count) {
    if (read() == 0) guard.tick();
  }
  arrived_ -= count;
}

// Counts the completions: our own writes as completed, the peer's as arrived.
uint32_t VerbsLoop::read() {
  ibv_wc entries[kReadMax];
  const int got = ibv_poll_cq(queue_.get(), kReadMax, entries);
  for (int i = 0; i < got; ++i) {
    const ibv_wc& entry = entries[i];
    if (entry.status != IBV_WC_SUCCESS)
      throw TransportError("ibv_poll_cq", static_cast<int>(entry.status),
                           std::string("a bare write failed: ") + verbs::library().wc_status_str(entry.status));
    if ((entry.opcode & IBV_WC_RECV) != 0) {
      ++arrived_;
      ++receives_missing_;
    } else {
      completed_ += entry.wr_id;
    }
  }
  if (receives_missing_ >= kReceiveChain) replenish();
  return static_cast<uint32_t>(std::max(got, 0));
}

void VerbsLoop::replenish() {
  ibv_recv_wr chain[kReceiveChain]{};
  while (receives_missing_ > 0) {
    const uint32_t count = std::min(receives_missing_, kReceiveChain);
    for (uint32_t i = 0; i < count; ++i) chain[i].next = i + 1 < count ? &chain[i + 1] : nullptr;
    ibv_recv_wr* refused = nullptr;
    if (const int error = ibv_post_recv(queue_pair_.get(), chain, &refused); error != 0)
      verbs::fail(*adapter_, "ibv_post_recv", error, "cannot post receives");
    receives_missing_ -= count;
  }
}

}  // namespace

std::unique_ptr<BareLoop> open_verbs_loop() { return std::make_unique<VerbsLoop>(); }

}  // namespace crossrail::bench

#else

namespace crossrail::bench {

std::unique_ptr<BareLoop> open_verbs_loop() { throw TransportError("bare verbs", 0, verbs::missing()); }

}  // namespace crossrail::bench

#endif
