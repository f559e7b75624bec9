// Datagrams, for handshakes: one unreliable queue pair that any port of the network can send to.
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
  // on_answer: as Resolver's. Throws TransportError.
  Datagrams(std::shared_ptr<const Adapter> adapter, ibv_cq* sends, ibv_cq* receives, std::function<void()> on_answer);

  uint32_t number() const { return queue_pair_->qp_num; }
  uint32_t key() const { return key_; }

  // Into the void where the endpoint is nonsense, or there is no room. The first to an endpoint waits for its route.
  void send(std::span<const uint8_t> endpoint, std::span<const uint8_t> payload);
  // Sends what has a route by now. Returns how many.
  uint32_t send_waiting();
  // Those that are known begin at another place of the port's table than its address is at now.
  void forget_routes();
  // What was in vain may not be now: the port came up.
  void ask_again();
  bool has_answers() const { return resolver_.has_answers(); }
  // These two throw TransportError when the queue pair cannot be set up anew after an error.
  void on_sent(const ibv_wc& completion);
  // What was received, empty if that failed. Stays until used().
  std::span<const uint8_t> received(const ibv_wc& completion);
  void used(const ibv_wc& completion);

 private:
  struct Route {
    AddressHandle handle;  // null: none was found. The latest that was, in use while a new one is asked for
    bool is_asked = false;
    bool is_outdated = false;  // what was asked for: asked once more
    uint32_t queue_pair = 0;
    uint32_t queue_key = 0;
    int64_t ask_at_ns = 0;         // next, unless it is asked
    int64_t pause_ns = 0;          // between questions in vain; 0: the last was not
    std::vector<uint8_t> waiting;  // the latest, while asked and without a handle
  };
  // Addresses of the link layer change with the machine behind them; what was not found may come.
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
  std::vector<uint32_t> slots_unused_;  // of receives, while broken
  std::unordered_map<std::string, Route> routes_;
  std::vector<AddressHandle> retired_;  // that work requests may still refer to
  Resolver resolver_;
};

}  // namespace crossrail::verbs
