// One engine's worth of rdma layer over scripted NICs, with a Sink that keeps books: what tests of the layer look at.
#pragma once

#include <doctest/doctest.h>

#include <algorithm>
#include <cstring>
#include <functional>
#include <map>
#include <memory>
#include <random>
#include <string>
#include <vector>

#include "scripted_nic.h"
#include "transport/identity.h"
#include "transport/rdma/rdma_transport.h"
#include "transport/wire_imm.h"
#include "util/clock.h"

namespace crossrail::rdma::test {

struct NodeOptions {
  uint32_t rails = 1;
  std::string secret = {};
  int64_t peer_timeout_ns = 2'000'000'000;
  int64_t connect_timeout_ns = 2'000'000'000;
  std::vector<uint32_t> speeds = {};
  Clock* clock = &real_clock();
};

class Node final : public Sink {
 public:
  Node(Net& net, const std::string& name, NodeOptions options = {}) : net(net) {
    TransportOptions to;
    to.identity = make_identity(name, transport_bit(TransportKind::kVerbs), 1);
    to.secret = options.secret;
    to.peer_timeout_ns = options.peer_timeout_ns;
    to.connect_timeout_ns = options.connect_timeout_ns;
    to.message_bytes_max = 256 << 10;
    to.clock = options.clock;
    std::vector<std::unique_ptr<Nic>> owned;
    for (uint32_t i = 0; i < options.rails; ++i) {
      const uint32_t speed = i < options.speeds.size() ? options.speeds[i] : 10'000;
      auto nic = net.make_nic(name + ":" + std::to_string(i), speed, static_cast<uint8_t>(i));
      nics.push_back(nic.get());
      owned.push_back(std::move(nic));
    }
    transport = std::make_unique<RdmaTransport>(TransportKind::kVerbs, to, std::move(owned), this);
    transport->complete_address(transport->address());
  }
  ~Node() {
    for (ScriptedNic* nic : nics) {
      std::lock_guard guard(net.lock);
      nic->killed = nic->frozen = false;
    }
    transport->close();
    CHECK(open_works == 0);
  }

  // --- sink ---
  void on_retired(Link& link, void* context, uint32_t /*tag*/, uint32_t count, uint64_t bytes, Status status,
                  const std::string& detail) override {
    CHECK(&link == this->link);
    auto& work = *static_cast<struct Work*>(context);
    work.open -= static_cast<int>(count);
    CHECK(work.open >= 0);
    open_works -= static_cast<int>(count);
    if (status != Status::kDone && work.status == Status::kDone) {
      work.status = status;
      work.detail = detail;
    }
    work.bytes += bytes;
    if (work.open == 0 && on_done) on_done(work);
  }
  void on_withdrawn(Link&, void* context, uint32_t, uint64_t) override {
    auto& work = *static_cast<struct Work*>(context);
    --work.open;
    --open_works;
    ++work.withdrawn;
  }
  void on_imm(uint32_t imm, uint64_t units) override { counts[imm] += units; }
  void on_service(const std::shared_ptr<const Address>& sender, std::span<const uint8_t> payload) override {
    services.emplace_back(sender->name, std::string(payload.begin(), payload.end()));
  }
  Offer on_message(const std::shared_ptr<const Address>& sender, std::span<const uint8_t> payload) override {
    if (holds) return Offer::kHold;
    if (payload.size() > longest_message) return Offer::kTooLong;
    messages.emplace_back(sender->name, std::string(payload.begin(), payload.end()));
    return Offer::kTaken;
  }
  void on_link_up(Link& up) override {
    CHECK(&up == link);
    ++ups;
  }
  void on_link_down(Link& down, const std::string& reason, LinkEnd end) override {
    CHECK(&down == link);
    ++downs;
    down_reason = reason;
    down_end = end;
    is_down = true;
  }
  void on_link_frozen(Link&, bool now, const std::string&) override { frozen = now; }
  void on_protocol_error(const std::string&, const std::string& detail) override { errors.push_back(detail); }

  // --- doing ---
  struct Work {
    int open = 1;
    Status status = Status::kDone;
    std::string detail{};
    uint64_t bytes = 0;
    int withdrawn = 0;
    bool done() const { return open == 0; }
  };

  void connect(const Node& peer) {
    is_down = false;
    link = transport->connect(std::make_shared<const Address>(peer.transport->address()));
  }
  void disconnect() {
    transport->disconnect(*link);
    keys.clear();
    link = nullptr;
  }

  struct Memory {
    std::vector<std::byte> bytes;
    std::unique_ptr<LocalRegion> region;
    RegionDescriptor descriptor;
  };
  std::unique_ptr<Memory> memory(uint64_t length_bytes, Access access = Access::kRemoteWrite) {
    auto made = std::make_unique<Memory>();
    made->bytes.resize(length_bytes);
    made->region =
        transport->register_memory(uint64_t{1} << 16 | next_region++, made->bytes.data(), length_bytes, access);
    made->descriptor.owner = transport->address();
    made->descriptor.region_id = made->region->id;
    made->descriptor.length_bytes = length_bytes;
    made->descriptor.access = access;
    made->descriptor.rdma_on(TransportKind::kVerbs) = made->region->rdma_keys();
    return made;
  }
  void close(Memory& closed) {
    transport->revoke_region(*closed.region);
    REQUIRE(transport->is_region_quiet(*closed.region));
  }
  RemoteKey* key(const Memory& remote) {
    auto& key = keys[remote.descriptor.region_id];
    if (!key) key = transport->resolve(*link, remote.descriptor);
    return key.get();
  }
  WorkRequest request(Work& work, WorkOp op, Memory& local, uint64_t local_offset, const Memory& remote,
                      uint64_t remote_offset, uint64_t length, uint32_t imm = kNoImm) {
    WorkRequest made;
    made.op = op;
    made.has_imm = imm != kNoImm;
    made.wire_imm = made.has_imm ? wire_imm(imm, 0) : 0;
    made.local = local.bytes.data() + local_offset;
    made.length_bytes = length;
    made.local_region = local.region.get();
    made.remote = key(remote);
    made.remote_offset = remote_offset;
    made.context = &work;
    return made;
  }
  // Posts all, polling `others` while there is no room.
  bool post(const std::vector<WorkRequest>& requests, const std::function<void()>& turn, uint32_t rail = kAnyRail) {
    open_works += static_cast<int>(requests.size());
    size_t posted = 0;
    while (posted < requests.size()) {
      uint32_t completed = 0;
      const std::span<const WorkRequest> rest(requests.data() + posted, requests.size() - posted);
      posted += is_down ? 0 : transport->post(*link, rail, rest, &completed);
      if (is_down) {
        open_works -= static_cast<int>(requests.size() - posted);
        return false;
      }
      if (posted < requests.size()) turn();
    }
    return true;
  }
  void send(Work& work, std::string& text, const std::function<void()>& turn) {
    WorkRequest made;
    made.op = WorkOp::kSend;
    made.local = reinterpret_cast<std::byte*>(text.data());
    made.length_bytes = text.size();
    made.context = &work;
    post({made}, turn);
  }
  size_t open_paths() {
    const auto* const session = static_cast<RdmaLink*>(link)->session;
    return static_cast<size_t>(
        std::ranges::count_if(session->paths, [](const auto& path) { return path->state == PathState::kOpen; }));
  }
  uint64_t count(uint32_t imm) { return counts[imm] / kUnitsPerCount; }

  Net& net;
  std::vector<ScriptedNic*> nics;
  std::unique_ptr<RdmaTransport> transport;
  Link* link = nullptr;
  std::map<uint64_t, std::unique_ptr<RemoteKey>> keys;
  std::map<uint32_t, uint64_t> counts;
  std::vector<std::pair<std::string, std::string>> messages;
  std::vector<std::pair<std::string, std::string>> services;
  std::vector<std::string> errors;
  std::function<void(Work&)> on_done;
  bool holds = false;
  size_t longest_message = 256 << 10;
  int open_works = 0;
  int ups = 0;
  int downs = 0;
  bool is_down = false;
  LinkEnd down_end = LinkEnd::kLost;
  bool frozen = false;
  std::string down_reason;
  uint64_t next_region = 1;
};

// Polls the nodes until `done`, for so long at most. Whether it was.
inline void fill(std::vector<std::byte>& bytes, uint64_t seed) {
  std::mt19937_64 random(seed);
  for (auto& byte : bytes) byte = static_cast<std::byte>(random());
}

inline bool poll_until(const std::vector<Node*>& nodes, const std::function<bool()>& done, double seconds = 10) {
  const int64_t end = deadline_in(seconds);
  while (!done()) {
    for (Node* node : nodes) node->transport->poll();
    if (now_ns() > end) return done();
  }
  return true;
}

}  // namespace crossrail::rdma::test
