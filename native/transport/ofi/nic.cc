#include "transport/ofi/nic.h"

#include <rdma/fi_rma.h>
#include <sys/epoll.h>

#include <algorithm>
#include <cstring>

#include "transport/ofi/wire.h"
#include "util/entropy.h"
#include "util/errors.h"

namespace crossrail::ofi {

namespace {

constexpr uint32_t kControlReceives = 64;  // datagrams, and with shared endpoints the fragments of all paths
constexpr uint32_t kSharedReceives = 512;
constexpr uint32_t kSendBlock = 64;
constexpr size_t kSendBlocksMax = 64;  // 17 MiB of fragments in flight
constexpr size_t kLandingBytes = 64;
// Works in flight per path. tcp accepts any number and keeps them in its own queue: more than fill the network only
// make cancelling slow.
constexpr uint32_t kPathWorksMax = 256;
// Longer works would delay those behind them for too long on an ordered path.
constexpr uint64_t kWorkBytesMax = 1ull << 30;
constexpr size_t kDatagramsMax = 1024;
constexpr size_t kKnownMax = 1024;
constexpr int64_t kDatagramLife = 1'000'000'000;
constexpr int64_t kDatagramPause = 200'000;  // each attempt at an absent peer costs a socket
constexpr int64_t kMillisecond = 1'000'000;

std::string describe(const Domain& domain) {
  std::string text = domain.rules().name + " " + domain.device().name;
  if (!domain.device().netdev.empty()) text += " on " + domain.device().netdev;
  if (!domain.device().pci.empty()) text += " at " + domain.device().pci;
  text += ", libfabric " + domain.library().version_text();
  if (!domain.rules().unproven.empty()) text += " (" + domain.rules().unproven + ")";
  return text;
}

}  // namespace

OfiNic::OfiNic(std::shared_ptr<const Library> library, const Rules& rules, Device device)
    : domain_(std::make_shared<Domain>(std::move(library), rules, std::move(device))),
      next_path_id_(kernel_entropy().draw_u32() | 1) {
  name_ = domain_->device().name;
  description_ = describe(*domain_);
  if (connects()) {
    listener_ = std::make_unique<Listener>(*domain_);
    lines_ = std::make_unique<Lines>(*domain_, *listener_);
  } else {
    control_ = std::make_unique<Endpoint>(*domain_, shares_endpoints() ? kSharedReceives : kControlReceives);
  }
  if (shares_endpoints()) transmit_ = std::make_unique<Endpoint>(*domain_, 0);
  endpoint_ =
      EndpointWords{domain_->info().addr_format, domain_->rules().way, domain_->device().prefix_bits, own_name()}
          .encode();
  landing_memory_ = make_pages(kLandingBytes);
  landing_ =
      std::make_unique<OfiRegistration>(domain_, fences_, landing_memory_.get(), kLandingBytes, Access::kRemoteWrite);
  const fi_info& info = domain_->info();
  limits_.work_bytes_max = std::min(static_cast<uint64_t>(info.ep_attr->max_msg_size), kWorkBytesMax);
  if (control_) limits_.work_bytes_max = control_->option_bytes(FI_OPT_MAX_RMA_SIZE, limits_.work_bytes_max);
  limits_.path_works_max =
      std::clamp<uint32_t>(static_cast<uint32_t>(std::min<size_t>(info.tx_attr->size, 1u << 20)), 1, kPathWorksMax);
  shares_ =
      TransmitShares(static_cast<uint32_t>(std::min<size_t>(info.tx_attr->size, 1u << 20)), limits_.path_works_max);
  limits_.names_imm_paths = rules.endpoint_per_path && info.domain_attr->cq_data_size >= 8;
  limits_.ordered_paths = rules.ordered && limits_.names_imm_paths;
  limits_.takes_gpu_memory = (info.caps & FI_HMEM) != 0;
  doorbell_room_ = rules.keeps_doorbell ? static_cast<uint32_t>(info.tx_attr->size / 2) : 0;
  work_flags_ = FI_COMPLETION | (rules.delivery_complete ? FI_DELIVERY_COMPLETE : 0);
  // An efa message has reached the peer's NIC when it completes. If more were requested, the peer's provider would
  // answer each with a receipt, for whose end fi_close() waits (prov/efa: efa_rdm_ep_wait_send).
  send_flags_ = rules.is_efa ? FI_COMPLETION : work_flags_;
  if (domain_->wait_fd() < 0) return;
  outer_ = Fd(epoll_create1(EPOLL_CLOEXEC));
  if (!outer_) throw_errno("epoll_create1", "cannot make an epoll set");
  waits_.push_back(domain_->wait_fd());
  if (listener_) waits_.push_back(listener_->wait_fd());
  for (const int fd : waits_) {
    epoll_event event{};
    if (epoll_ctl(outer_.get(), EPOLL_CTL_ADD, fd, &event) != 0)
      throw_errno("epoll_ctl", "cannot wait for a queue of libfabric's");
  }
  fds_.push_back(outer_.get());
}

OfiNic::~OfiNic() { close(); }

// Not outer_: somebody may be sleeping on it.
void OfiNic::close() {
  condemned_.clear();
  closed_.clear();
  graves_.clear();
  transmit_.reset();
  control_.reset();
  lines_.reset();
  listener_.reset();
  // The layer has dropped every path; without the endpoints nothing can arrive any more. release: pairs with the
  // acquire in OfiRegistration::is_quiet(): whoever sees it may free the memory.
  fences_->done.store(~0ull, std::memory_order_release);
  landing_.reset();
  free_sends_ = nullptr;
  send_blocks_.clear();
  domain_->close();
}

std::string OfiNic::device() const {
  const Device& device = domain_->device();
  if (!device.netdev.empty()) return device.netdev.substr(0, device.netdev.find(':'));  // "eth0:1" is a label
  return device.is_loopback ? "lo" : name_;
}

int OfiNic::nearness(std::span<const uint8_t> peer_endpoint) const {
  const auto theirs = EndpointWords::decode(peer_endpoint);
  const auto ours = EndpointWords::decode(endpoint_);
  return theirs && ours ? nearness_of(*ours, *theirs) : 0;
}

std::unique_ptr<rdma::Registration> OfiNic::register_memory(std::byte* base, uint64_t length_bytes, Access access) {
  return std::make_unique<OfiRegistration>(domain_, fences_, base, length_bytes, access);
}

std::unique_ptr<rdma::Registration> OfiNic::register_gpu_memory(const device::GpuMemory& memory, Access access) {
  return std::make_unique<OfiRegistration>(domain_, fences_, memory, access);
}

// libfabric's hmem_cuda.c: a build that opens CUDA at run time looks for this name, which runtime images and PyPI
// packages lack.
std::string OfiNic::no_gpu_memory() const {
  if (!domain_->rules().is_efa || limits_.takes_gpu_memory) return {};
  if (!domain_->no_gpu_memory.empty()) return domain_->no_gpu_memory;
  return "libfabric " + domain_->library().version_text() + " (" + domain_->library().path +
         ") offers none (FI_HMEM): it has to be built with CUDA, as EFA's installer has it, and to find libcudart.so "
         "by just this name, without a version, on LD_LIBRARY_PATH (ln -s libcudart.so.12 libcudart.so); "
         "`FI_LOG_LEVEL=info fi_info -p efa -t FI_EP_RDM -c FI_HMEM` says what is missing";
}

std::unique_ptr<rdma::NicPath> OfiNic::make_path() {
  if (is_dead_) throw TransportError("make_path", 0, name_ + " is gone: open the engine again");
  if (shares_endpoints() && transmit_ == nullptr) transmit_ = std::make_unique<Endpoint>(*domain_, 0);
  return std::make_unique<OfiPath>(*this);
}

uint32_t OfiNic::add_path(OfiPath& path) {
  while (next_path_id_ == 0 || paths_.contains(next_path_id_)) ++next_path_id_;
  paths_.emplace(next_path_id_, &path);
  return next_path_id_++;
}

OfiPath* OfiNic::find_path(uint32_t id) const {
  const auto found = paths_.find(id);
  return found != paths_.end() ? found->second : nullptr;
}

std::vector<uint8_t> OfiNic::make_offer(const OfiPath& path) const {
  OfferWords words;
  words.path_id = path.id_;
  words.landing = landing_->remote_base;
  words.landing_key = landing_->key;
  words.token = path.token_;
  words.name = path.own_ ? path.own_->name() : own_name();
  return words.encode();
}

// --- operations ---

Op* OfiNic::take_work_op() {
  if (free_works_ == nullptr) {
    works_.emplace_back();
    return &works_.back();
  }
  Op* const op = free_works_;
  free_works_ = op->next;
  return op;
}

bool OfiNic::has_send_room() const { return free_sends_ != nullptr || send_blocks_.size() < kSendBlocksMax; }

Op* OfiNic::take_send_op() {
  if (free_sends_ == nullptr) {
    if (send_blocks_.size() == kSendBlocksMax) return nullptr;
    send_blocks_.push_back(std::make_unique<Slots>(*domain_, kSendBlock, Op::Kind::kSend));
    for (Op& op : send_blocks_.back()->ops()) give_back(op);
  }
  Op* const op = free_sends_;
  free_sends_ = op->next;
  return op;
}

void OfiNic::give_back(Op& op) {
  Op*& pool = op.kind == Op::Kind::kWork ? free_works_ : free_sends_;
  op.path = nullptr;
  op.next = pool;
  pool = &op;
}

ssize_t OfiNic::send_from(Endpoint& from, fi_addr_t to, OfiPath* path, const PacketHead& head,
                          std::span<const uint8_t> first, std::span<const uint8_t> second) {
  CROSSRAIL_ASSERT(sizeof head + first.size() + second.size() <= kPacketBytesMax);
  Op* const op = take_send_op();
  if (op == nullptr) return -FI_EAGAIN;
  std::memcpy(op->buffer, &head, sizeof head);
  if (!first.empty()) std::memcpy(op->buffer + sizeof head, first.data(), first.size());
  if (!second.empty()) std::memcpy(op->buffer + sizeof head + first.size(), second.data(), second.size());
  op->path = path;
  const iovec range{op->buffer, sizeof head + first.size() + second.size()};
  fi_msg message{};
  message.msg_iov = &range;
  message.desc = &op->descriptor;
  message.iov_count = 1;
  message.addr = to;
  message.context = op;
  const ssize_t code = fi_sendmsg(from.fid(), &message, path != nullptr ? send_flags_ : FI_COMPLETION);
  if (code != 0) {
    give_back(*op);
    return code;
  }
  from.list(*op);
  has_posted_ = true;
  return 0;
}

// --- datagrams ---

void OfiNic::send_datagram(std::span<const uint8_t> peer_endpoint, std::span<const uint8_t> bytes) {
  const auto words = EndpointWords::decode(peer_endpoint);
  const auto ours = EndpointWords::decode(endpoint_);
  if (is_dead_ || !words || nearness_of(*ours, *words) == 0 || bytes.size() > rdma::kDatagramBytesMax ||
      datagrams_.size() == kDatagramsMax) {
    return;
  }
  datagrams_.push_back({{peer_endpoint.begin(), peer_endpoint.end()},
                        words->name,
                        {bytes.begin(), bytes.end()},
                        now_ns() + kDatagramLife});
  datagrams_next_ns_ = 0;
  tend_datagrams();
}

std::string OfiNic::datagram_trouble(std::span<const uint8_t> peer_endpoint) const {
  return std::ranges::equal(peer_endpoint, troubled_endpoint_) ? datagram_trouble_ : std::string();
}

uint32_t OfiNic::tend_datagrams() {
  uint32_t moved = 0;
  const int64_t now = now_ns();
  if (now < datagrams_next_ns_) return 0;
  datagrams_next_ns_ = now + kDatagramPause;
  std::deque<Datagram> waiting;
  waiting.swap(datagrams_);
  const PacketHead head{static_cast<uint32_t>(Packet::kDatagram), 0, 0};
  for (Datagram& datagram : waiting) {
    if (now >= datagram.until) continue;
    ssize_t code = -FI_EAGAIN;
    try {
      fi_addr_t address = FI_ADDR_UNSPEC;
      if (Endpoint* const way = way_to(datagram.to, now, &address))
        code = send_from(*way, address, nullptr, head, datagram.bytes, {});
    } catch (const TransportError& error) {
      troubled_endpoint_ = datagram.endpoint;
      datagram_trouble_ = error.what();
      continue;  // dropped
    }
    if (!datagram_trouble_.empty() && datagram.endpoint == troubled_endpoint_) datagram_trouble_.clear();
    if (code == -FI_EAGAIN) datagrams_.push_back(std::move(datagram));  // no connection yet
    moved += code == 0 ? 1 : 0;
  }
  return moved;
}

Endpoint* OfiNic::way_to(const Name& name, int64_t now, fi_addr_t* address) {
  if (lines_) return lines_->to(name, now);
  auto known = known_.find(name);
  if (known == known_.end()) {
    if (known_.size() == kKnownMax) {
      const auto oldest = std::ranges::min_element(known_, {}, [](const auto& item) { return item.second.used_ns; });
      control_->peers().remove(oldest->first);
      known_.erase(oldest);
    }
    known = known_.emplace(name, Known{control_->peers().add(name), now}).first;
  }
  known->second.used_ns = now;
  *address = known->second.address;
  return control_.get();
}

// --- sleeping ---

void OfiNic::arm() {
  pending_ = !breaking_.empty() || !ending_.empty();
  if (!outer_) return;
  for (const int fd : waits_) {
    epoll_event event{};
    event.events = EPOLLIN | EPOLLONESHOT;
    if (epoll_ctl(outer_.get(), EPOLL_CTL_MOD, fd, &event) != 0)
      throw_errno("epoll_ctl", "cannot wait for a queue of libfabric's");
  }
  pending_ = pending_ || !domain_->may_sleep(listener_ ? listener_->queue() : nullptr);
}

void OfiNic::hush() {
  if (!outer_) return;
  for (const int fd : waits_) {
    epoll_event event{};
    epoll_ctl(outer_.get(), EPOLL_CTL_MOD, fd, &event);  // fails only once it was closed
  }
}

Deadline OfiNic::next_timer() const {
  const int64_t now = now_ns();
  Deadline next = kNoDeadline;
  if (!datagrams_.empty() || !unready_.empty() || answers_due_ != 0 || !closed_.empty() || !condemned_.empty())
    next = now + kMillisecond;
  if (fences_->wanted.load() != fences_->done.load(std::memory_order_relaxed)) next = now + kMillisecond;
  if (lines_) next = std::min(next, lines_->next_timer());
  // A provider without a descriptor to sleep on is polled: often while something moves, otherwise seldom.
  if (!outer_) next = now + (is_busy(now) ? kMillisecond / 20 : kMillisecond);
  return next;
}

// Works in flight for longer without any progress are for a peer that stalls.
bool OfiNic::is_busy(int64_t now) const {
  const auto has_some = [](const std::unique_ptr<Endpoint>& endpoint) {
    return endpoint != nullptr && endpoint->outstanding() != 0;
  };
  const bool is_under_way = has_some(transmit_) || std::ranges::any_of(condemned_, has_some, &Condemned::endpoint);
  return has_posted_ || now - active_ns_ < (is_under_way ? 20 : 2) * kMillisecond;
}

void OfiNic::abandon_after_fork() {
  // libfabric's descriptors cannot be told apart from here. While a child holds copies of its sockets, peers notice the
  // parent's death by its silence and not by the end of the sockets (docs/efa.md).
}

}  // namespace crossrail::ofi
