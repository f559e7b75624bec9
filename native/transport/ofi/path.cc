#include "transport/ofi/path.h"

#include <rdma/fi_rma.h>

#include <algorithm>
#include <tuple>

#include "transport/ofi/nic.h"
#include "transport/ofi/wire.h"
#include "util/entropy.h"
#include "util/errors.h"

namespace crossrail::ofi {

namespace {

constexpr uint32_t kPathReceives = 16;  // 68 KiB per path; more wait at the sender
constexpr uint32_t kPathSendsMax = 16;
constexpr size_t kShortBytes = 128;  // fragments up to this size are control messages, which must get through
constexpr int64_t kReadyTimeout = 5'000'000'000;

}  // namespace

OfiPath::OfiPath(OfiNic& nic)
    : nic_(nic), id_(nic.add_path(*this)), token_(nic.connects() ? kernel_entropy().draw_u64() : 0) {
  if (nic.shares_endpoints() || nic.connects()) {
    offer_ = nic.make_offer(*this);
    return;
  }
  try {
    own_ = std::make_unique<Endpoint>(*nic.domain_, kPathReceives);
  } catch (...) {
    nic.remove_path(*this);
    throw;
  }
  own_->owner = this;
  offer_ = nic.make_offer(*this);
}

OfiPath::~OfiPath() { nic_.remove_path(*this); }

void OfiPath::connect(std::span<const uint8_t> peer_endpoint, std::span<const uint8_t> peer_offer) {
  const auto endpoint = EndpointWords::decode(peer_endpoint);
  const auto offer = OfferWords::decode(peer_offer);
  if (!endpoint || !offer || nic_.nearness(peer_endpoint) == 0 ||
      !is_name_like(endpoint->format, offer->name, endpoint->name))
    throw TransportError("connect", 0, "the peer's NIC describes itself as no " + nic_.fabric() + " NIC would");
  peer_name_ = offer->name;
  peer_id_ = offer->path_id;
  peer_token_ = offer->token;
  peer_landing_ = offer->landing;
  peer_landing_key_ = offer->landing_key;
  if (!nic_.connects()) add_address();
  if (nic_.connects() && own_ == nullptr && !is_broken_) dial();
  is_connected_ = true;
  if (is_broken_) return;  // it stood, and has already ended
  ready_by_ = now_ns() + kReadyTimeout;
  nic_.unready_.push_back(this);
  nic_.unready_next_ns_ = 0;
  if (is_standing_) {
    on_standing();
  } else {
    nic_.tend_unready();
  }
}

void OfiPath::add_address() {
  Endpoint& transmits = *nic_.transmit_of(*this);
  address_ = transmits.peers().add(peer_name_);
  if (!nic_.shares_endpoints() || is_host_known_) return;
  // The peer's works come from another of its endpoints, but from the same host: efa answers only addresses that it was
  // given.
  nic_.control_->peers().add(peer_name_);
  is_host_known_ = true;
}

// If it is our turn to dial.
void OfiPath::dial() {
  const Name& name = nic_.own_name();
  if (std::tie(peer_name_, peer_id_) < std::tie(name, id_)) return;
  own_ = std::make_unique<Endpoint>(*nic_.domain_, *nic_.listener_, kPathReceives, nullptr);
  own_->owner = this;
  own_->dial(peer_name_, DialWords{peer_id_, peer_token_}.encode());
}

bool OfiPath::accept(fi_info& request, uint64_t token) {
  if (token != token_ || own_ != nullptr || is_broken_) return false;
  auto endpoint = std::make_unique<Endpoint>(*nic_.domain_, *nic_.listener_, kPathReceives, &request);
  endpoint->owner = this;
  endpoint->accept();
  own_ = std::move(endpoint);
  was_heard_ = true;  // the dialing side may write from now on
  return true;
}

void OfiPath::on_standing() {
  was_heard_ = is_standing_ = true;
  is_ready_ = is_connected_ && !is_broken_;
  if (is_ready_) std::erase(nic_.unready_, this);
}

uint32_t OfiPath::post(std::span<const rdma::NicWork> works) {
  if (!is_ready_) return 0;
  const uint32_t room = room_for(works_out_, nic_.limits_.path_works_max, nic_.shares_.works_kept());
  const auto count = static_cast<uint32_t>(std::min<size_t>(works.size(), room));
  for (uint32_t i = 0; i < count; ++i) {
    const ssize_t code = post_one(works[i], i + 1 < count);
    if (code == 0) continue;
    on_refused_post(code);
    return i;
  }
  return count;
}

// Room for more of that kind.
uint32_t OfiPath::room_for(uint32_t outstanding, uint32_t path_max, uint32_t kept) const {
  if (!nic_.shares_endpoints()) return path_max - std::min(outstanding, path_max);
  return nic_.shares_.room(nic_.transmit_->outstanding(), outstanding, path_max, kept);
}

ssize_t OfiPath::post_one(const rdma::NicWork& work, bool more) {
  Endpoint& endpoint = *nic_.transmit_of(*this);
  Op* const op = nic_.take_work_op();
  op->path = this;
  op->cookie = work.cookie;
  // efa-direct before libfabric 2.6 has no RMA without bytes: it sends one from a scratch byte to the peer's.
  const bool is_filled = work.length_bytes == 0 && nic_.domain_->rules().is_efa;
  const OfiRegistration* const from =
      is_filled ? nic_.landing_.get() : static_cast<const OfiRegistration*>(work.registration);
  const iovec range{is_filled ? nic_.landing_memory_.get() : work.local, is_filled ? 1 : work.length_bytes};
  const bool is_landing = is_filled || !work.has_remote;
  const fi_rma_iov target{is_landing ? peer_landing_ : work.remote_address, range.iov_len,
                          is_landing ? peer_landing_key_ : work.remote_key};
  void* descriptor = from != nullptr ? from->descriptor() : nullptr;
  fi_msg_rma message{};
  message.msg_iov = &range;
  message.desc = &descriptor;
  message.iov_count = range.iov_len != 0 ? 1 : 0;
  message.addr = address_;
  message.rma_iov = &target;
  message.rma_iov_count = 1;
  message.context = op;
  uint64_t flags = nic_.work_flags_;
  if (more && endpoint.outstanding() + 1 < nic_.doorbell_room_) flags |= FI_MORE;
  ssize_t code;
  if (work.op == rdma::NicOp::kRead) {
    code = fi_readmsg(endpoint.fid(), &message, flags & ~static_cast<uint64_t>(FI_DELIVERY_COMPLETE));
  } else {
    if (work.has_imm) {
      message.data = work.imm;
      if (nic_.limits_.names_imm_paths) message.data |= static_cast<uint64_t>(peer_id_) << 32;
      flags |= FI_REMOTE_CQ_DATA;
    }
    code = fi_writemsg(endpoint.fid(), &message, flags);
  }
  if (code != 0) {
    nic_.give_back(*op);
    return code;
  }
  endpoint.list(*op);
  nic_.has_posted_ = true;
  ++works_out_;
  return 0;
}

void OfiPath::on_refused_post(ssize_t code) {
  // From an endpoint that shares its queue, or from a connection: no room. From a datagram endpoint that has worked
  // before: it has lost its connection, and the provider would make another behind our back, on which later works would
  // overtake the lost ones.
  if (code == -FI_EAGAIN && (nic_.shares_endpoints() || nic_.connects())) return;
  if (code == -FI_EAGAIN) {
    break_by_itself("the connection ended");
  } else {
    break_by_itself("posting failed: " + nic_.domain_->error_text(static_cast<int>(code)));
  }
}

bool OfiPath::send(std::span<const uint8_t> head, std::span<const uint8_t> body) {
  if (!is_ready_) return false;
  const bool is_short = head.size() + body.size() <= kShortBytes;
  const uint32_t kept = is_short ? nic_.shares_.short_fragments_kept() : nic_.shares_.fragments_kept();
  if (room_for(sends_out_, kPathSendsMax, kept) == 0) return false;
  return send_packet(Packet::kFragment, 0, head, body);
}

bool OfiPath::send_packet(Packet kind, uint64_t number, std::span<const uint8_t> head, std::span<const uint8_t> body) {
  const PacketHead packet{static_cast<uint32_t>(kind), peer_id_, number};
  if (!nic_.has_send_room()) return false;  // distinguished from a provider that accepts nothing
  ssize_t code = 0;
  try {
    code = nic_.send_from(*nic_.transmit_of(*this), address_, this, packet, head, body);
  } catch (const TransportError& error) {           // a limit on locked memory: retried with the next packet
    if (!is_ready_) break_by_itself(error.what());  // but without one there may be no path at all
    return false;
  }
  if (code == 0) {
    ++sends_out_;
    return true;
  }
  if (is_ready_ || code != -FI_EAGAIN) on_refused_post(code);  // not ready: a hello, which is retried
  return false;
}

void OfiPath::break_by_itself(const std::string& reason) {
  if (is_broken_) return;
  is_broken_ = true;
  is_ready_ = false;
  reason_ = reason;
  std::erase(nic_.unready_, this);
  nic_.breaking_.push_back(this);
}

void OfiPath::break_off(const std::string& reason) {
  if (is_ending_) return;
  is_ending_ = true;
  is_broken_ = true;
  is_ready_ = false;
  break_told_ = true;
  if (reason_.empty()) reason_ = reason;
  std::erase(nic_.unready_, this);
  std::erase(nic_.breaking_, this);
  nic_.begin_end(*this);
}

}  // namespace crossrail::ofi
