// Two shm transports of this process, one after the other's turn: nothing happens but what the test lets happen.
#pragma once

#include <doctest/doctest.h>

#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <thread>
#include <vector>

#include "transport/identity.h"
#include "transport/shm/shm_transport.h"
#include "util/clock.h"

namespace crossrail::shm {

class CountingSink final : public Sink {
 public:
  void on_retired(Link&, void*, uint32_t, uint32_t count, uint64_t, Status status, const std::string&) override {
    (status == Status::kDone ? done : failed) += count;
    last_outcome = status;
  }
  void on_withdrawn(Link&, void*, uint32_t, uint64_t) override { ++withdrawn; }
  void on_imm(uint32_t, uint64_t units) override { imm_units += units; }
  Offer on_message(const std::shared_ptr<const Address>&, std::span<const uint8_t>) override {
    if (holds) return Offer::kHold;
    ++messages;
    return Offer::kTaken;
  }
  void on_service(const std::shared_ptr<const Address>&, std::span<const uint8_t>) override {}
  void on_link_up(Link&) override { ++ups; }
  void on_link_down(Link&, const std::string& reason, LinkEnd) override {
    why_down = reason;
    units_when_down = imm_units;
  }
  void on_link_frozen(Link&, bool, const std::string&) override {}
  void on_protocol_error(const std::string&, const std::string& detail) override { protocol_error = detail; }

  bool holds = false;  // messages
  uint32_t done = 0, failed = 0, withdrawn = 0, messages = 0, ups = 0;
  Status last_outcome = Status::kPending;
  uint64_t imm_units = 0, units_when_down = 0;
  std::string why_down, protocol_error;
};

inline TransportOptions shm_options(const std::string& name) {
  TransportOptions options;
  options.identity = make_identity(name, transport_bit(TransportKind::kShm), 1);
  options.message_bytes_max = 256 << 10;
  options.connect_timeout_ns = 20'000'000'000;
  options.private_path = PrivatePath::kStaged;  // also inside a process
  return options;
}

struct Node {
  explicit Node(const std::string& name) : transport(shm_options(name), &sink) {}
  ~Node() { transport.close(); }
  CountingSink sink;
  ShmTransport transport;
};

// Lets the nodes move in turn until `ready`, or for as long as a hang takes to be one.
template <typename Ready>
bool turn_until(std::vector<Node*> nodes, Ready ready) {
  const Deadline patience = deadline_in(5);
  while (!ready()) {
    if (now_ns() > patience) return false;
    for (Node* node : nodes) node->transport.poll();
    std::this_thread::yield();  // to the control threads
  }
  return true;
}

}  // namespace crossrail::shm
