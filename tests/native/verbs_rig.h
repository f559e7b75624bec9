// A verbs NIC on the double of a device, with what it told, memory and paths to peers that only the test knows.
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "fake_verbs.h"
#include "transport/verbs/open.h"
#include "transport/verbs/wire.h"

namespace crossrail::verbs_test {

struct Told final : rdma::NicEvents {
  uint64_t done = 0;
  std::vector<std::pair<uint64_t, rdma::NicFault>> failed;
  std::vector<uint32_t> imms;
  int broken = 0;
  int broken_by_peer = 0;
  int flushed = 0;
  std::vector<bool> ports;
  std::string fatal;
  void on_work_done(rdma::NicPath&, uint64_t cookie, bool) override { done = cookie + 1; }
  void on_work_failed(rdma::NicPath&, uint64_t cookie, rdma::NicFault fault, int, const std::string&) override {
    failed.emplace_back(cookie, fault);
  }
  void on_imm(rdma::NicPath*, uint32_t imm) override { imms.push_back(imm); }
  void on_fragment(rdma::NicPath*, std::span<const uint8_t>) override {}
  void on_datagram(std::span<const uint8_t>) override {}
  void on_nobody(std::span<const uint8_t>) override {}
  void on_path_broken(rdma::NicPath&, bool by_peer, const std::string&) override {
    ++broken;
    broken_by_peer += by_peer ? 1 : 0;
  }
  void on_path_flushed(rdma::NicPath&) override { ++flushed; }
  void on_port(bool is_up, const std::string&) override { ports.push_back(is_up); }
  void on_device_fatal(const std::string& reason) override { fatal = reason; }
};

inline std::unique_ptr<rdma::Nic> open_fake(const RdmaOptions& rdma = {}) {
  TransportOptions options;
  options.rails = {"fake0"};
  options.rdma = rdma;
  return std::move(verbs::open_nics(options).at(0));
}

// A NIC with memory and a path to a peer that only the test knows.
struct Rig {
  explicit Rig(const verbs::Endpoint* peer = nullptr, const RdmaOptions& rdma = {})
      : nic(open_fake(rdma)), memory(1 << 16) {
    region = nic->register_memory(memory.data(), memory.size(), Access::kRemoteWrite);
    add_path(peer);
  }
  rdma::NicPath& add_path(const verbs::Endpoint* peer = nullptr) {
    paths.push_back(nic->make_path());
    const auto ours = verbs::decode_endpoint(nic->endpoint());
    paths.back()->connect(verbs::encode(peer == nullptr ? *ours : *peer), verbs::encode(verbs::Offer{16, 3, 4, 5, 6}));
    return *paths.back();
  }
  FakeQueuePair& works_of(rdma::NicPath& path) {
    return fake().queue_pair(verbs::decode_offer(path.offer())->work_queue_pair);
  }
  FakeQueuePair& messages_of(rdma::NicPath& path) {
    return fake().queue_pair(verbs::decode_offer(path.offer())->message_queue_pair);
  }
  static Fake& fake() { return *g_fake; }
  std::vector<rdma::NicWork> writes(uint64_t count, uint64_t first_cookie = 0) {
    std::vector<rdma::NicWork> works(count);
    for (uint64_t i = 0; i < count; ++i) {
      works[i].cookie = first_cookie + i;
      works[i].local = memory.data();
      works[i].length_bytes = 100;
      works[i].registration = region.get();
    }
    return works;
  }
  void poll_for_ms(int ms) {
    const Deadline deadline = deadline_in(ms / 1000.0);
    while (now_ns() < deadline) nic->poll(told);
  }

  std::unique_ptr<rdma::Nic> nic;
  std::vector<std::byte> memory;
  std::unique_ptr<rdma::Registration> region;
  std::vector<std::unique_ptr<rdma::NicPath>> paths;
  Told told;
};

}  // namespace crossrail::verbs_test
