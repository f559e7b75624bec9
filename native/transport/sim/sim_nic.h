// One engine's NIC on one rail of a simulated host: implements rdma/nic.h over a Fabric.
#pragma once

#include <array>
#include <atomic>
#include <memory>
#include <string>
#include <vector>

#include "transport/rdma/nic.h"
#include "transport/sim/fabric.h"
#include "util/ring_queue.h"

namespace crossrail::sim {

class World;
class SimNic;

class SimRegistration final : public rdma::Registration {
 public:
  SimRegistration(World* world, SimNic* nic, std::byte* base, uint64_t length_bytes, Access access);
  ~SimRegistration() override;
  void revoke() override;
  bool is_quiet() const override;

  // The base of the addresses that peers use: nobody's real address.
  static constexpr uint64_t kRemoteBase = uint64_t{1} << 40;

  SimNic* const nic;
  std::byte* const base;
  const uint64_t length_bytes;
  const Access access;
  bool is_phantom() const { return base == kPhantomBase; }

  // --- of the fabric ---
  // The first part of a work has arrived: from now on until leave() its other parts must not be stopped. False:
  // refused.
  bool enter();
  // The last part has arrived, or the work was given up. True: somebody who has revoked the registration waits for
  // this.
  bool leave();

 private:
  World* const world_;
  // Accessed without the world's lock, which turns hold while they look at an engine's regions. seq_cst: enter() counts
  // before it looks, revoke() sets it before is_quiet() looks, so one of the two sees the other.
  std::atomic<bool> is_revoked_{false};
  std::atomic<uint32_t> arriving_{0};
};

// The peer's end of a path is another SimPath. Invariant: `works` holds the posted works from first_cookie on, of which
// the first is not reported.
class SimPath final : public rdma::NicPath {
 public:
  SimPath(World* world, SimNic* nic);
  ~SimPath() override;
  std::span<const uint8_t> offer() const override { return offer_; }
  void connect(std::span<const uint8_t> peer_endpoint, std::span<const uint8_t> peer_offer) override;
  uint32_t post(std::span<const rdma::NicWork> works) override;
  bool send(std::span<const uint8_t> head, std::span<const uint8_t> body) override;
  bool is_sent() const override;
  void break_off(const std::string& reason) override;

  SimNic* const nic;
  PathId id;
  PathId peer;
  uint32_t peer_nic = 0;
  bool is_connected = false;
  bool is_broken = false;
  bool has_failed = false;  // ordered: a work of it failed, and those behind it end by the flush
  bool is_broken_off = false;
  bool is_flushed = false;
  bool wants_room = false;  // a fragment was refused for lack of room
  uint32_t fragments = 0;   // sent and not arrived
  static constexpr uint32_t kGone = ~uint32_t{0};
  struct Posted {
    uint32_t slot = kGone;  // kGone: the engine was killed
    bool is_reported = false;
  };
  RingQueue<Posted> works;
  uint64_t first_cookie = 0;
  uint64_t landing_cookie = 0;  // ordered: the next one to land
  bool awaits_answer = false;   // a work has landed, and its acknowledgement is lost so far
  int64_t last_reach_ns = 0;    // ordered: no later work reaches the peer's wire before this
  int64_t last_landing_ns = 0;  // ordered: no later work lands before this
  int64_t last_notice_ns = 0;
  int64_t last_report_ns = 0;
  int64_t retry_at_ns = 0;
  struct Notice {
    int64_t at_ns;
    uint32_t imm;
  };
  std::vector<Notice> notices;  // immediates that arrived here and are not reported yet

  void end_work(uint64_t cookie);

 private:
  World* const world_;
  std::array<uint8_t, 8> offer_{};
};

class SimNic final : public rdma::Nic {
 public:
  SimNic(World* world, uint32_t actor, uint32_t host, uint32_t rail);
  ~SimNic() override;

  const std::string& name() const override { return name_; }
  const std::string& description() const override { return description_; }
  uint32_t speed_mbps() const override { return speed_mbps_; }
  const std::string& fabric() const override { return fabric_; }
  std::span<const uint8_t> endpoint() const override { return endpoint_; }
  const rdma::NicLimits& limits() const override { return limits_; }
  int nearness(std::span<const uint8_t> peer_endpoint) const override;
  std::unique_ptr<rdma::Registration> register_memory(std::byte* base, uint64_t length_bytes, Access access) override;
  bool is_port_up() const override;
  void send_datagram(std::span<const uint8_t> peer_endpoint, std::span<const uint8_t> bytes) override;
  std::unique_ptr<rdma::NicPath> make_path() override;
  uint32_t poll(rdma::NicEvents& events) override;
  void arm() override {}
  bool has_arrivals() override;
  const std::vector<int>& fds() const override { return no_fds_; }
  void hush() override {}
  void abandon_after_fork() override {}

  // --- of the fabric ---
  enum class NewsKind : uint8_t { kDone, kFailed, kImm, kFragment, kDatagram, kBroken, kFlushed, kPort };
  struct News {
    NewsKind kind;
    rdma::NicFault fault = rdma::NicFault::kFlushed;
    bool is_up = false;
    bool by_peer = false;  // for kBroken
    uint32_t imm = 0;
    SimPath* path = nullptr;
    uint64_t cookie = 0;
    uint32_t detail = 0;  // in details_ + 1; 0: none
  };
  void push(News news) { news_.push_back(news); }
  void push(News news, std::string text);
  void push(News news, std::vector<uint8_t> bytes);
  void push_done(SimPath& path, uint64_t cookie);
  void forget(SimPath* path);  // removes it from the news
  void make_room() { has_room_ = true; }
  size_t news_count() const { return news_.size(); }
  // The NIC number in an endpoint of this world; false: another world's.
  static bool parse_endpoint(const World& world, std::span<const uint8_t> endpoint, uint32_t* nic);

  const uint32_t actor;
  const uint32_t host;
  const uint32_t rail;
  uint32_t number = 0;
  bool is_dead = false;  // its engine was killed

 private:
  struct Detail {
    std::string text;
    std::vector<uint8_t> bytes;
  };
  uint32_t keep(Detail detail);
  void tell(rdma::NicEvents& events, const News& news);

  World* const world_;
  std::string name_;
  std::string description_;
  const std::string fabric_;
  uint32_t speed_mbps_;
  rdma::NicLimits limits_;
  std::vector<uint8_t> endpoint_;
  std::vector<int> no_fds_;
  RingQueue<News> news_;
  std::vector<Detail> details_;
  std::vector<uint32_t> free_details_;
  bool has_room_ = false;
};

}  // namespace crossrail::sim
