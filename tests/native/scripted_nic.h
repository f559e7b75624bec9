// A network of NICs in one process, with which the rdma layer is tested: it delays, reorders what nobody promised to
// keep in order, loses and doubles datagrams, breaks paths before and after a work was carried out, pulls cables,
// kills.
//
// Threads: each Nic as nic.h says; the Net itself is locked, so that Nics of several threads can share one.
#pragma once

#include <array>
#include <atomic>
#include <cstdint>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include "transport/rdma/nic.h"
#include "util/wake_event.h"

namespace crossrail::rdma::test {

class ScriptedNic;
class ScriptedPath;

struct NetOptions {
  uint64_t seed = 1;
  bool ordered_paths = true;
  bool names_imm_paths = true;
  int64_t delay_ns_max = 0;  // of each step of a work or fragment
  double datagram_loss = 0;
  double datagram_doubling = 0;
  bool has_other_version = false;  // each side finds the other's datagrams of the next version
  int64_t datagram_delay_ns_max = 0;
  double breaks_before = 0;                 // of works: the path breaks, and the work was not carried out
  double breaks_after = 0;                  // it was, but nobody is told
  bool tells_nobody = false;                // where datagrams go to a NIC that is gone
  bool holds_works = false;                 // none is carried out
  double refuses_post = 0;                  // of post() and send() calls: no room
  int64_t retry_ns = 3'000'000;             // until a NIC that gets no answer gives up
  uint32_t registrations_max = UINT32_MAX;  // at once, of all NICs; one more fails
  uint64_t work_bytes_max = uint64_t{1} << 30;
  uint32_t path_works_max = 64;
  bool moves_bytes = true;  // false: a write is noted instead, in Net::noted
};

struct NetRegion {
  const ScriptedNic* nic;
  std::byte* base;
  uint64_t length_bytes;
  Access access;
};

// Invariant: everything below is only touched under `lock`.
class Net {
 public:
  explicit Net(NetOptions options) : options(options), random(options.seed) {}

  std::unique_ptr<ScriptedNic> make_nic(const std::string& name, uint32_t speed_mbps = 10'000, uint8_t network = 0);

  // --- the script ---
  void set_port(ScriptedNic& nic, bool up);
  void set_speed(ScriptedNic& nic, uint32_t mbps);  // of a port that is up
  // Nothing of it answers any more, and it does nothing.
  void kill(ScriptedNic& nic);
  // Its device is lost: it says so, flushes its paths unasked, and refuses everything.
  void end_device(ScriptedNic& nic);
  // Its layer is not there: it carries out plain writes, but has no receives, and sends nothing.
  void freeze(ScriptedNic& nic, bool frozen);
  // by_peer: each refused something that its peer posted.
  void break_all_paths(ScriptedNic& nic, bool by_peer = false);
  void inject_datagram(ScriptedNic& to, std::vector<uint8_t> bytes);
  void change(const std::function<void(NetOptions&)>& edit) {
    std::lock_guard guard(lock);
    edit(options);
  }
  size_t registrations() {
    std::lock_guard guard(lock);
    return regions.size();
  }

  // --- for nics ---
  void step(int64_t now);
  bool chance(double probability) {
    return probability > 0 && std::uniform_real_distribution<>(0, 1)(random) < probability;
  }
  int64_t delay(int64_t max) { return max <= 0 ? 0 : std::uniform_int_distribution<int64_t>(0, max)(random); }
  ScriptedPath* peer_of(const ScriptedPath& path);
  void execute(ScriptedPath& path, size_t index);
  // first: what the first of its works is reported with; kFlushed: nothing of ours is to blame.
  void break_path(ScriptedPath& path, const std::string& reason, NicFault first = NicFault::kUnreachable);
  int64_t next_due() const;

  std::recursive_mutex lock;
  NetOptions options;
  std::mt19937_64 random;
  std::map<uint64_t, ScriptedNic*> nics;
  std::map<uint64_t, ScriptedPath*> paths;
  std::map<uint64_t, NetRegion> regions;  // by key
  struct Datagram {
    uint64_t to;
    std::vector<uint8_t> bytes;
    int64_t due;
  };
  std::vector<Datagram> datagrams;
  uint64_t next_id = 1;
  std::vector<std::pair<uint64_t, uint64_t>> noted;      // address and length of writes that moved nothing
  std::vector<std::pair<uint64_t, size_t>> handed_over;  // path and number of works, of each post() that took some
};

class ScriptedRegistration final : public Registration {
 public:
  ScriptedRegistration(Net* net, uint64_t id) : net_(net) { key = id; }
  ~ScriptedRegistration() override { revoke(); }
  void revoke() override {
    std::lock_guard guard(net_->lock);
    net_->regions.erase(key);
  }
  bool is_quiet() const override { return true; }

 private:
  Net* const net_;
};

struct NicEvent {
  enum class Kind { kDone, kFailed, kImm, kFragment, kDatagram, kNobody, kBroken, kFlushed, kPort, kFatal } kind;
  uint64_t path = 0;  // id; 0: none
  uint64_t cookie = 0;
  NicFault fault = NicFault::kFlushed;
  std::string text{};
  uint32_t imm = 0;
  bool up = false;
  bool by_peer = false;
  std::vector<uint8_t> bytes{};
};

class ScriptedPath final : public NicPath {
 public:
  ScriptedPath(Net* net, ScriptedNic* nic, uint64_t id);
  ~ScriptedPath() override;
  std::span<const uint8_t> offer() const override { return offer_; }
  void connect(std::span<const uint8_t> peer_endpoint, std::span<const uint8_t> peer_offer) override;
  uint32_t post(std::span<const NicWork> works) override;
  bool send(std::span<const uint8_t> head, std::span<const uint8_t> body) override;
  bool is_sent() const override;
  void break_off(const std::string& reason) override;

  struct Work {
    NicWork work;
    uint64_t local_key;  // which has to be good until the work is carried out
    int64_t posted;
    int64_t exec_due;
    int64_t ack_due;
    bool executed = false;
  };
  struct Fragment {
    std::vector<uint8_t> bytes;
    int64_t posted;
    int64_t due;
  };
  Net* const net;
  ScriptedNic* const nic;
  const uint64_t id;
  uint64_t peer = 0;  // path id; 0: not connected
  uint64_t peer_nic = 0;
  bool broken = false;
  bool told_broken = false;
  bool broken_off = false;
  uint64_t next_cookie = 0;
  std::deque<Work> works;
  std::deque<Fragment> fragments;

 private:
  std::array<uint8_t, 8> offer_;
};

class ScriptedNic final : public Nic {
 public:
  ScriptedNic(Net* net, uint64_t id, std::string name, uint32_t speed_mbps, uint8_t network);
  ~ScriptedNic() override;
  const std::string& name() const override { return name_; }
  const std::string& description() const override { return name_; }
  uint32_t speed_mbps() const override { return speed_mbps_.load(); }
  const std::string& fabric() const override { return fabric_; }
  std::span<const uint8_t> endpoint() const override { return endpoint_; }
  const NicLimits& limits() const override { return limits_; }
  int nearness(std::span<const uint8_t> peer_endpoint) const override;
  std::unique_ptr<Registration> register_memory(std::byte* base, uint64_t length_bytes, Access access) override;
  bool is_port_up() const override;
  void send_datagram(std::span<const uint8_t> peer_endpoint, std::span<const uint8_t> bytes) override;
  std::unique_ptr<NicPath> make_path() override;
  uint32_t poll(NicEvents& events) override;
  void arm() override;
  bool has_arrivals() override;
  Deadline next_timer() const override;
  const std::vector<int>& fds() const override { return fds_; }
  void hush() override { bell_.silence(); }
  void hurry() override { ++hurried; }
  void abandon_after_fork() override {}

  // Under the net's lock.
  void push(NicEvent event);
  Net* const net;
  const uint64_t id;
  bool up = true;
  bool killed = false;
  bool frozen = false;
  bool is_dead = false;
  std::string make_error;     // of its paths; empty: none
  std::string connect_error;  // likewise
  uint32_t hurried = 0;
  bool flushes = true;  // paths that are broken off are said to be flushed
  std::deque<NicEvent> events;
  bool armed = false;
  std::atomic<uint32_t> speed_mbps_;

 private:
  const std::string name_;
  const std::string fabric_;
  std::array<uint8_t, 9> endpoint_;
  NicLimits limits_;
  WakeEvent bell_ = WakeEvent::create();
  std::vector<int> fds_;
};

}  // namespace crossrail::rdma::test
