// Datagrams, for handshakes: one unreliable queue pair that any port on the network can send to.
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <unordered_map>
#include <vector>

#include "transport/verbs/queues.h"
#include "transport/verbs/resolver.h"
#include "transport/verbs/slots.h"
#include "util/clock.h"

namespace crossrail::verbs {

// Progress holder.
class Datagrams {
 public:
  // on_answer: as for Resolver. Throws TransportError.
  Datagrams(std::shared_ptr<const Adapter> adapter, ibv_cq* sends, ibv_cq* receives, std::function<void()> on_answer);

  uint32_t number() const { return queue_pair_->qp_num; }
  uint32_t key() const { return key_; }

  // Dropped if the endpoint is invalid, or there is no room. The first to an endpoint waits for its route.
  void send(std::span<const uint8_t> endpoint, std::span<const uint8_t> payload);
  // Sends those whose routes are known by now. Returns how many.
  uint32_t send_waiting();
  // The known routes use another index in the port's table than its address has now.
  void forget_routes();
  // Failed attempts may succeed now: the port came up.
  void ask_again();
  bool has_answers() const { return resolver_.has_answers(); }
  // These two throw TransportError if the queue pair cannot be set up again after an error.
  void on_sent(const ibv_wc& completion);
  // The payload received, empty if receiving failed. Valid until used().
  std::span<const uint8_t> received(const ibv_wc& completion);
  void used(const ibv_wc& completion);

 private:
  struct Route {
    AddressHandle handle;  // null: none was found. The latest one found, in use while a new one is being asked for
    bool is_asked = false;
    bool is_outdated = false;  // changed while it was asked for: ask once more
    uint32_t queue_pair = 0;
    uint32_t queue_key = 0;
    int64_t ask_at_ns = 0;         // when to ask next, unless it is being asked
    int64_t pause_ns = 0;          // pause after a question without an answer; 0: the last one was answered
    std::vector<uint8_t> waiting;  // the latest datagram, while asking without a handle
  };
  // Link-layer addresses change with the machine behind them, and routes that were not found may appear.
  static constexpr int64_t kRouteLifeNs = 60'000'000'000;
  static constexpr int64_t kVainMinNs = 200'000'000;
  static constexpr int64_t kVainMaxNs = 3'000'000'000;
  static constexpr size_t kRoutesMax = 4096;

  Route* route_of(std::span<const uint8_t> endpoint);
  bool may_forget() const { return sends_outstanding_ == 0; }  // a work request refers to its route
  void retire(AddressHandle handle);
  void post(const Route& route, std::span<const uint8_t> payload);
  void post_receive(uint32_t slot);
  void to_ready();
  void begin_recovery();
  void go_on_recovering();

  std::shared_ptr<const Adapter> adapter_;
  Slots send_slots_;
  Slots receive_slots_;
  QueuePair queue_pair_;
  uint32_t key_ = 0;
  uint32_t sends_outstanding_ = 0;
  uint32_t receives_posted_ = 0;
  bool is_broken_ = false;              // being flushed
  std::vector<uint32_t> slots_unused_;  // receives not posted, while broken
  std::unordered_map<std::string, Route> routes_;
  std::vector<AddressHandle> retired_;  // that work requests may still refer to
  Resolver resolver_;
};

}  // namespace crossrail::verbs
