#include "transport/verbs/datagrams.h"

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <optional>
#include <utility>

#include "transport/verbs/route.h"
#include "util/entropy.h"
#include "util/errors.h"

namespace crossrail::verbs {

namespace {

constexpr uint32_t kReceiveBytes = kDatagramHeaderBytes + static_cast<uint32_t>(rdma::kDatagramBytesMax);

void modify(const Adapter& adapter, ibv_qp* queue_pair, ibv_qp_attr attributes, int mask) {
  if (const int error = library().modify_qp(queue_pair, &attributes, mask); error != 0)
    fail(adapter, "ibv_modify_qp", error, "cannot bring up the queue pair of datagrams");
}

QueuePair make_queue_pair(const Adapter& adapter, ibv_cq* sends, ibv_cq* receives) {
  ibv_qp_init_attr wanted{};
  wanted.send_cq = sends;
  wanted.recv_cq = receives;
  wanted.qp_type = IBV_QPT_UD;
  wanted.cap.max_send_wr = kDatagramSlots;
  wanted.cap.max_recv_wr = kDatagramReceives;
  wanted.cap.max_send_sge = 1;
  wanted.cap.max_recv_sge = 1;
  QueuePair queue_pair(library().create_qp(adapter.domain(), &wanted));
  if (queue_pair == nullptr) fail(adapter, "ibv_create_qp", errno, "cannot make the queue pair of datagrams");
  return queue_pair;
}

}  // namespace

Datagrams::Datagrams(std::shared_ptr<const Adapter> adapter, ibv_cq* sends, ibv_cq* receives,
                     std::function<void()> on_answer)
    : adapter_(std::move(adapter)),
      send_slots_(*adapter_, kDatagramSlots, static_cast<uint32_t>(rdma::kDatagramBytesMax)),
      receive_slots_(*adapter_, kDatagramReceives, kReceiveBytes),
      queue_pair_(make_queue_pair(*adapter_, sends, receives)),
      key_(kernel_entropy().draw_u32() & 0x7fffffff),  // with the highest bit set, the sender's own key would be sent
      resolver_(adapter_, std::move(on_answer)) {
  for (uint32_t i = 0; i < kDatagramReceives; ++i) slots_unused_.push_back(receive_slots_.take());
  to_ready();
}

// From reset to ready, with all receives posted.
void Datagrams::to_ready() {
  ibv_qp_attr attributes{};
  attributes.qp_state = IBV_QPS_INIT;
  attributes.port_num = adapter_->detail.port.number;
  attributes.pkey_index = adapter_->detail.partition_index;
  attributes.qkey = key_;
  modify(*adapter_, queue_pair_.get(), attributes, IBV_QP_STATE | IBV_QP_PKEY_INDEX | IBV_QP_PORT | IBV_QP_QKEY);
  attributes.qp_state = IBV_QPS_RTR;
  modify(*adapter_, queue_pair_.get(), attributes, IBV_QP_STATE);
  attributes.qp_state = IBV_QPS_RTS;
  modify(*adapter_, queue_pair_.get(), attributes, IBV_QP_STATE | IBV_QP_SQ_PSN);
  is_broken_ = false;
  for (const uint32_t slot : std::exchange(slots_unused_, {})) post_receive(slot);
}

void Datagrams::post_receive(uint32_t slot) {
  ibv_sge entry = receive_slots_.entry(slot, kReceiveBytes);
  ibv_recv_wr request{};
  request.wr_id = tagged(Tag::kDatagramReceive, 0, slot);
  request.sg_list = &entry;
  request.num_sge = 1;
  ibv_recv_wr* refused = nullptr;
  if (ibv_post_recv(queue_pair_.get(), &request, &refused) == 0) {
    ++receives_posted_;
  } else {
    slots_unused_.push_back(slot);  // retried with the next datagram that arrives, or when all have failed
  }
}

void Datagrams::send(std::span<const uint8_t> endpoint, std::span<const uint8_t> payload) {
  if (is_broken_ || payload.size() > rdma::kDatagramBytesMax) return;
  Route* route = route_of(endpoint);
  if (route == nullptr) return;
  if (route->handle != nullptr) {
    post(*route, payload);
  } else if (route->is_asked) {
    route->waiting.assign(payload.begin(), payload.end());
  }
}

// Null: not an endpoint on our network, or there are too many.
Datagrams::Route* Datagrams::route_of(std::span<const uint8_t> bytes) {
  const std::string key(reinterpret_cast<const char*>(bytes.data()), bytes.size());
  auto found = routes_.find(key);
  if (found == routes_.end()) {
    const std::optional<Endpoint> endpoint = decode_endpoint(bytes);
    if (!endpoint || nearness(adapter_->detail.endpoint, *endpoint) == 0) return nullptr;
    if (routes_.size() >= kRoutesMax) {
      if (!may_forget()) return nullptr;
      std::erase_if(routes_, [](const auto& entry) { return !entry.second.is_asked; });
      if (routes_.size() >= kRoutesMax) return nullptr;
    }
    found = routes_.try_emplace(key).first;
    found->second.queue_pair = endpoint->queue_pair;
    found->second.queue_key = endpoint->queue_key;
  }
  Route& route = found->second;
  if (!route.is_asked && now_ns() >= route.ask_at_ns) {
    route.is_asked = resolver_.ask(key, route.pause_ns == 0 ? Resolver::Urgency::kFirst : Resolver::Urgency::kAgain);
  }
  return &route;
}

void Datagrams::forget_routes() {
  for (auto& [key, route] : routes_) {
    retire(std::move(route.handle));
    route.ask_at_ns = route.pause_ns = 0;
    route.is_outdated = route.is_asked;
  }
}

void Datagrams::ask_again() {
  for (auto& [key, route] : routes_) {
    if (route.pause_ns != 0) route.ask_at_ns = route.pause_ns = 0;
  }
}

void Datagrams::retire(AddressHandle handle) {
  if (handle != nullptr && !may_forget()) retired_.push_back(std::move(handle));
}

uint32_t Datagrams::send_waiting() {
  if (may_forget()) retired_.clear();
  uint32_t sent = 0;
  for (Resolver::Answer& answer : resolver_.take_answers()) {
    const auto asked = routes_.find(answer.endpoint);
    if (asked == routes_.end()) continue;
    Route& route = asked->second;
    ++sent;
    if (std::exchange(route.is_outdated, false)) {
      route.is_asked = resolver_.ask(answer.endpoint, Resolver::Urgency::kFirst);
      continue;
    }
    route.is_asked = false;
    const std::vector<uint8_t> waiting = std::exchange(route.waiting, {});
    if (answer.handle == nullptr) {  // one that was good once may be again
      route.pause_ns = std::clamp(2 * route.pause_ns, kVainMinNs, kVainMaxNs);
      route.ask_at_ns = now_ns() + route.pause_ns;
      continue;
    }
    retire(std::exchange(route.handle, std::move(answer.handle)));
    route.pause_ns = 0;
    route.ask_at_ns = now_ns() + kRouteLifeNs;
    if (!waiting.empty() && !is_broken_) post(route, waiting);
  }
  return sent;
}

void Datagrams::post(const Route& route, std::span<const uint8_t> payload) {
  const uint32_t slot = send_slots_.take();
  if (slot == Slots::kNone) return;
  std::memcpy(send_slots_.at(slot), payload.data(), payload.size());
  ibv_sge entry = send_slots_.entry(slot, static_cast<uint32_t>(payload.size()));
  ibv_send_wr request{};
  request.wr_id = tagged(Tag::kDatagram, 0, slot);
  request.sg_list = &entry;
  request.num_sge = 1;
  request.opcode = IBV_WR_SEND;
  request.send_flags = IBV_SEND_SIGNALED;
  request.wr.ud.ah = route.handle.get();
  request.wr.ud.remote_qpn = route.queue_pair;
  request.wr.ud.remote_qkey = route.queue_key;
  ibv_send_wr* refused = nullptr;
  if (ibv_post_send(queue_pair_.get(), &request, &refused) == 0) {
    ++sends_outstanding_;
  } else {
    send_slots_.give_back(slot);
  }
}

void Datagrams::on_sent(const ibv_wc& completion) {
  --sends_outstanding_;
  send_slots_.give_back(value_of(completion.wr_id));
  if (completion.status != IBV_WC_SUCCESS) begin_recovery();
  go_on_recovering();
}

std::span<const uint8_t> Datagrams::received(const ibv_wc& completion) {
  --receives_posted_;
  if (completion.status != IBV_WC_SUCCESS) {
    begin_recovery();
    return {};
  }
  if (completion.byte_len < kDatagramHeaderBytes) return {};
  const uint8_t* packet = receive_slots_.at(value_of(completion.wr_id));
  return {packet + kDatagramHeaderBytes, completion.byte_len - kDatagramHeaderBytes};
}

void Datagrams::used(const ibv_wc& completion) {
  slots_unused_.push_back(value_of(completion.wr_id));
  if (!is_broken_)
    for (const uint32_t slot : std::exchange(slots_unused_, {})) post_receive(slot);
  go_on_recovering();
}

// An error stops the queue pair, for all of its destinations.
void Datagrams::begin_recovery() {
  if (is_broken_) return;
  is_broken_ = true;
  ibv_qp_attr attributes{};
  attributes.qp_state = IBV_QPS_ERR;
  modify(*adapter_, queue_pair_.get(), attributes, IBV_QP_STATE);
}

// Once everything posted has completed it is set up again, under the same number.
void Datagrams::go_on_recovering() {
  if (!is_broken_ || sends_outstanding_ > 0 || receives_posted_ > 0) return;
  ibv_qp_attr attributes{};
  attributes.qp_state = IBV_QPS_RESET;
  modify(*adapter_, queue_pair_.get(), attributes, IBV_QP_STATE);
  to_ready();
}

}  // namespace crossrail::verbs
