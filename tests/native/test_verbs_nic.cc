// The verbs NIC alone, on real queue pairs: run by `./dev vm test`, where there are Soft-RoCE NICs on a switch.
#include <doctest/doctest.h>
#include <poll.h>

#include <cstdlib>
#include <cstring>
#include <functional>
#include <map>
#include <set>
#include <thread>

#include "transport/verbs/open.h"
#include "util/errors.h"

#if CROSSRAIL_WITH_VERBS

using namespace crossrail;
using rdma::NicFault;
using rdma::NicOp;
using rdma::NicWork;

namespace {

bool outside_of_vm() { return std::getenv("CROSSRAIL_VM") == nullptr; }

constexpr double kPatienceS = 20;  // emulated processors, and a lossy network in some cases

struct Failure {
  NicFault fault;
  int code;
  std::string text;
};

// Writes down what a NIC says. Invariant: no work is reported twice.
struct Recorder final : rdma::NicEvents {
  std::map<rdma::NicPath*, uint64_t> done;  // works, from the first on
  std::map<rdma::NicPath*, std::map<uint64_t, Failure>> failed;
  std::vector<uint32_t> imms;
  std::vector<std::string> fragments;
  std::vector<std::string> datagrams;
  std::set<rdma::NicPath*> broken;
  std::set<rdma::NicPath*> flushed;
  std::vector<bool> ports;
  std::string fatal;

  uint64_t reported(rdma::NicPath& path) { return done[&path] + failed[&path].size(); }
  void on_work_done(rdma::NicPath& path, uint64_t cookie, bool through) override {
    CHECK(through);
    CHECK(cookie >= reported(path));
    CHECK(failed[&path].empty());
    CHECK(flushed.count(&path) == 0);
    done[&path] = cookie + 1;
  }
  void on_work_failed(rdma::NicPath& path, uint64_t cookie, NicFault fault, int code,
                      const std::string& text) override {
    CHECK(cookie == reported(path));
    CHECK(flushed.count(&path) == 0);
    failed[&path][cookie] = {fault, code, text};
  }
  void on_imm(rdma::NicPath* path, uint32_t imm) override {
    CHECK(path != nullptr);
    CHECK(flushed.count(path) == 0);
    imms.push_back(imm);
  }
  void on_fragment(rdma::NicPath* path, std::span<const uint8_t> bytes) override {
    CHECK(path != nullptr);
    fragments.emplace_back(bytes.begin(), bytes.end());
  }
  void on_datagram(std::span<const uint8_t> bytes) override { datagrams.emplace_back(bytes.begin(), bytes.end()); }
  void on_nobody(std::span<const uint8_t>) override {}
  void on_path_broken(rdma::NicPath& path, bool, const std::string&) override { CHECK(broken.insert(&path).second); }
  void on_path_flushed(rdma::NicPath& path) override { CHECK(flushed.insert(&path).second); }
  void on_port(bool is_up, const std::string&) override { ports.push_back(is_up); }
  void on_device_fatal(const std::string& reason) override { fatal = reason; }
};

std::span<const uint8_t> bytes_of(const std::string& text) {
  return {reinterpret_cast<const uint8_t*>(text.data()), text.size()};
}

void shell(const std::string& command) { REQUIRE(std::system(command.c_str()) == 0); }

std::byte pattern(size_t at) { return static_cast<std::byte>((at * 31 + (at >> 12)) & 0xff); }

struct Side {
  explicit Side(const std::string& rail, uint32_t path_mtu_bytes = 0) {
    TransportOptions options;
    options.rails = {rail};
    options.rdma.path_mtu_bytes = path_mtu_bytes;
    nic = std::move(verbs::open_nics(options).at(0));
  }
  std::unique_ptr<rdma::Registration> register_memory(std::vector<std::byte>& memory, Access access) {
    return nic->register_memory(memory.data(), memory.size(), access);
  }
  std::unique_ptr<rdma::Nic> nic;
  Recorder events;
};

// Two NICs that can be connected, and memory on both sides.
struct Rig {
  explicit Rig(const std::string& near_rail = "rxe0", const std::string& far_rail = "rxe1", size_t bytes = 4 << 20,
               uint32_t path_mtu_bytes = 0)
      : near(near_rail, path_mtu_bytes), far(far_rail), source(bytes), target(bytes) {
    for (size_t i = 0; i < bytes; ++i) source[i] = pattern(i);
    source_key = near.register_memory(source, Access::kRemoteWrite);
    target_key = far.register_memory(target, Access::kRemoteWrite);
  }

  void connect() {
    near_path = near.nic->make_path();
    far_path = far.nic->make_path();
    const std::vector<uint8_t> near_offer(near_path->offer().begin(), near_path->offer().end());
    near_path->connect(far.nic->endpoint(), far_path->offer());
    far_path->connect(near.nic->endpoint(), near_offer);
    posted = 0;
  }

  bool until(const std::function<bool()>& condition, double seconds = kPatienceS) {
    const Deadline deadline = deadline_in(seconds);
    while (!condition()) {
      if (now_ns() > deadline) return false;
      near.nic->poll(near.events);
      if (polls_far) far.nic->poll(far.events);
    }
    return true;
  }

  NicWork write(uint64_t offset, uint64_t length, uint32_t imm = kNoImm) {
    NicWork work;
    work.local = source.data() + offset;
    work.length_bytes = length;
    work.registration = source_key.get();
    work.remote_address = target_key->remote_base + offset;
    work.remote_key = target_key->key;
    work.has_imm = imm != kNoImm;
    work.imm = imm;
    return work;
  }
  NicWork imm_only(uint32_t imm) {
    NicWork work;
    work.has_imm = true;
    work.has_remote = false;
    work.imm = imm;
    return work;
  }

  // All of them, as there is room.
  void post(std::vector<NicWork> works) {
    for (size_t at = 0; at < works.size();) {
      for (size_t i = at; i < works.size(); ++i) works[i].cookie = posted + (i - at);
      const uint32_t taken = near_path->post(std::span(works).subspan(at));
      at += taken;
      posted += taken;
      if (taken == 0) REQUIRE(until([&] { return posted - near.events.reported(*near_path) < 200; }));
    }
  }
  bool all_done() { return near.events.done[near_path.get()] == posted; }
  bool all_reported() { return near.events.reported(*near_path) == posted; }

  void break_off_both() {
    near_path->break_off("test");
    far_path->break_off("test");
    REQUIRE(until([&] {
      return near.events.flushed.count(near_path.get()) == 1 && far.events.flushed.count(far_path.get()) == 1;
    }));
    CHECK(all_reported());
  }
  void reconnect() {
    near_path.reset();
    far_path.reset();
    near.events = {};
    far.events = {};
    connect();
  }

  Side near;
  Side far;
  std::vector<std::byte> source;
  std::vector<std::byte> target;
  std::unique_ptr<rdma::Registration> source_key;
  std::unique_ptr<rdma::Registration> target_key;
  std::unique_ptr<rdma::NicPath> near_path;
  std::unique_ptr<rdma::NicPath> far_path;
  uint64_t posted = 0;
  bool polls_far = true;
};

}  // namespace

#define VM_TEST_CASE(name) TEST_CASE(name* doctest::skip(outside_of_vm()))

VM_TEST_CASE("verbs nic: ports are listed with their addresses") {
  const std::vector<verbs::Port> ports = verbs::ports();
  REQUIRE(ports.size() >= 2);
  CHECK(verbs::missing().empty());
  CHECK(ports[0].name == "rxe0:1");
  CHECK(ports[0].netdev == "nic0");
  CHECK(ports[0].address == "10.77.0.1");
  CHECK(ports[0].gid_type == "RoCE v2");
  CHECK(ports[0].is_active);
  CHECK(ports[0].speed_mbps > 0);
}

VM_TEST_CASE("verbs nic: a rail is named by device, port, interface or address") {
  for (const char* name : {"rxe1", "rxe1:1", "nic1", "10.77.0.2"}) {
    const Side side(name);
    CHECK(side.nic->name() == "rxe1:1");
    CHECK(side.nic->is_port_up());
  }
  CHECK_THROWS_AS(Side("mlx5_0"), UsageError);
}

VM_TEST_CASE("verbs nic: more rails than ports take the ports in turns") {
  TransportOptions options;
  options.rail_count = static_cast<uint32_t>(verbs::ports().size()) + 1;
  const auto nics = verbs::open_nics(options);
  REQUIRE(nics.size() == options.rail_count);
  CHECK(nics.front()->name() == nics.back()->name());
  CHECK(nics[0]->name() != nics[1]->name());
  options.rail_count = 0;
  CHECK(verbs::open_nics(options).size() == verbs::ports().size());
}

VM_TEST_CASE("verbs nic: datagrams reach the endpoint they name, and nonsense goes nowhere") {
  Rig rig;
  const std::string hello(1024, 'h');
  const std::vector<uint8_t> endpoint(rig.far.nic->endpoint().begin(), rig.far.nic->endpoint().end());
  CHECK(rig.near.nic->nearness(endpoint) == 2);
  rig.near.nic->send_datagram(endpoint, bytes_of(hello));
  REQUIRE(rig.until([&] { return rig.far.events.datagrams.size() == 1; }));
  CHECK(rig.far.events.datagrams[0] == hello);
  for (size_t cut = 0; cut < endpoint.size(); ++cut)
    rig.near.nic->send_datagram(std::span(endpoint).first(cut), bytes_of("cut"));
  for (int i = 0; i < 200; ++i) rig.near.nic->send_datagram(endpoint, bytes_of("more"));  // more than there are slots
  rig.near.nic->poll(rig.near.events);
  rig.until([] { return false; }, 0.5);
  rig.near.nic->send_datagram(endpoint, bytes_of("last"));
  REQUIRE(rig.until([&] { return rig.far.events.datagrams.back() == "last"; }));
  for (const std::string& datagram : rig.far.events.datagrams) CHECK(datagram != "cut");
}

VM_TEST_CASE("verbs nic: a write with an immediate is in place when the immediate is told") {
  Rig rig;
  rig.connect();
  rig.post({rig.write(0, 1 << 20, 0x80000007)});
  REQUIRE(rig.until([&] { return rig.far.events.imms.size() == 1; }));
  CHECK(rig.far.events.imms[0] == 0x80000007);
  CHECK(std::memcmp(rig.source.data(), rig.target.data(), 1 << 20) == 0);
  CHECK(rig.until([&] { return rig.all_done(); }));
  CHECK(rig.near.events.failed[rig.near_path.get()].empty());
}

VM_TEST_CASE("verbs nic: thousands of small writes, few of them signalled, are all done and in order") {
  Rig rig;
  rig.connect();
  std::vector<NicWork> works;
  for (uint32_t i = 0; i < 3000; ++i)
    works.push_back(rig.write(i * 512, i % 3 == 0 ? 512 : 40, i % 2 == 0 ? i : kNoImm));
  rig.post(works);
  REQUIRE(rig.until([&] { return rig.all_done() && rig.far.events.imms.size() == 1500; }));
  for (uint32_t i = 0; i < 1500; ++i) CHECK(rig.far.events.imms[i] == 2 * i);
  for (uint32_t i = 0; i < 3000; ++i)
    CHECK(std::memcmp(rig.source.data() + i * 512, rig.target.data() + i * 512, i % 3 == 0 ? 512 : 40) == 0);
}

VM_TEST_CASE("verbs nic: reads, and immediates without bytes") {
  Rig rig;
  rig.connect();
  std::fill(rig.target.begin(), rig.target.end(), std::byte{5});
  NicWork read = rig.write(4096, 100000);
  read.op = NicOp::kRead;
  rig.post({read, rig.imm_only(9)});
  REQUIRE(rig.until([&] { return rig.all_done() && rig.far.events.imms == std::vector<uint32_t>{9}; }));
  CHECK(std::all_of(rig.source.begin() + 4096, rig.source.begin() + 104096,
                    [](std::byte b) { return b == std::byte{5}; }));
  CHECK(rig.source[104096] == pattern(104096));
}

VM_TEST_CASE("verbs nic: fragments of all sizes arrive whole, in both directions") {
  Rig rig;
  rig.connect();
  std::vector<std::string> sent;
  for (const size_t size : {0, 1, 100, 128, 129, 1000, 4096}) {
    sent.push_back(std::string(size, static_cast<char>('a' + sent.size())));
    const size_t half = size / 2;
    CHECK(rig.near_path->send(bytes_of(sent.back().substr(0, half)), bytes_of(sent.back().substr(half))));
    CHECK(rig.far_path->send(bytes_of(sent.back()), {}));
  }
  CHECK(!rig.near_path->is_sent());
  REQUIRE(rig.until([&] { return rig.far.events.fragments.size() == 7 && rig.near.events.fragments.size() == 7; }));
  CHECK(rig.far.events.fragments == sent);
  CHECK(rig.near.events.fragments == sent);
  CHECK(rig.until([&] { return rig.near_path->is_sent(); }));
}

VM_TEST_CASE("verbs nic: a full queue takes no more fragments, and goes on when there is room") {
  Rig rig;
  rig.connect();
  const std::string text(4096, 'x');
  uint32_t accepted = 0;
  while (rig.near_path->send(bytes_of(text), {})) ++accepted;
  CHECK(accepted >= 32);
  CHECK(rig.until([&] { return rig.far.events.fragments.size() == accepted && rig.near_path->is_sent(); }));
  CHECK(rig.near_path->send(bytes_of(text), {}));
  CHECK(rig.until([&] { return rig.near_path->is_sent(); }));
}

VM_TEST_CASE("verbs nic: what the peer refuses fails alone, what follows is flushed, a new path goes on") {
  Rig rig;
  std::unique_ptr<rdma::Registration> other;
  NicWork bad;
  SUBCASE("past the end") {
    bad = rig.write(0, 4096, 3);
    bad.remote_address += rig.target.size() - 100;
  }
  SUBCASE("a key that never was") {
    bad = rig.write(0, 4096, 3);
    bad.remote_key ^= 0x55;
  }
  SUBCASE("a region that was revoked") {
    other = rig.far.nic->register_memory(rig.target.data(), 8192, Access::kRemoteWrite);
    bad = rig.write(0, 4096, 3);
    bad.remote_key = other->key;
    other->revoke();
    CHECK(other->is_quiet());
  }
  SUBCASE("a region that may only be read") {
    other = rig.far.nic->register_memory(rig.target.data(), 8192, Access::kRemoteRead);
    bad = rig.write(0, 4096, 3);
    bad.remote_key = other->key;
  }
  rig.connect();
  rig.post({rig.write(0, 1000, 1), rig.write(1000, 1000, 2), bad, rig.write(2000, 1000, 4)});
  REQUIRE(rig.until([&] { return rig.all_reported(); }));
  const auto& failed = rig.near.events.failed[rig.near_path.get()];
  CHECK(rig.near.events.done[rig.near_path.get()] == 2);
  REQUIRE(failed.size() == 2);
  CHECK(failed.at(2).fault == NicFault::kRemoteAccess);
  CHECK(failed.at(3).fault == NicFault::kFlushed);
  CHECK(rig.near.events.broken.count(rig.near_path.get()) == 1);
  CHECK(rig.near_path->post(std::vector{rig.write(0, 8)}) == 0);
  rig.break_off_both();
  CHECK(rig.far.events.imms == std::vector<uint32_t>{1, 2});
  rig.reconnect();
  rig.post({rig.write(0, 1000, 5)});
  CHECK(rig.until([&] { return rig.all_done() && rig.far.events.imms == std::vector<uint32_t>{5}; }));
}

VM_TEST_CASE("verbs nic: a path broken off under load reports each work once and touches nothing afterwards") {
  Rig rig("rxe0", "rxe1", 16 << 20);
  for (int round = 0; round < 5; ++round) {
    round == 0 ? rig.connect() : rig.reconnect();
    std::vector<NicWork> works;
    for (uint32_t i = 0; i < 200; ++i) works.push_back(rig.write(i * 65536, 65536, i));
    rig.post(works);
    rig.until([&] { return rig.near.events.done[rig.near_path.get()] > static_cast<uint64_t>(10 * round); });
    const int64_t before = now_ns();
    rig.break_off_both();
    CHECK(now_ns() - before < 3'000'000'000);
    CHECK(rig.far.events.imms.size() >= rig.near.events.done[rig.near_path.get()]);
    std::fill(rig.target.begin(), rig.target.end(), std::byte{0});
    std::this_thread::sleep_for(std::chrono::milliseconds(50));
    CHECK(std::all_of(rig.target.begin(), rig.target.end(), [](std::byte b) { return b == std::byte{0}; }));
    CHECK(rig.near_path->post(std::vector{rig.write(0, 8)}) == 0);
    CHECK(!rig.near_path->send(bytes_of("late"), {}));
  }
}

// Soft-RoCE forgets a receive each time.
VM_TEST_CASE("verbs nic: paths that break in the middle of messages leave receives for others") {
  Rig rig("rxe0", "rxe1", 4 << 20, 256);  // sixteen packets for each
  const std::string text(4096, 'x');
  for (int round = 0; round < 700; ++round) {
    round == 0 ? rig.connect() : rig.reconnect();
    while (rig.near_path->send(bytes_of(text), {})) {
    }
    const size_t some = static_cast<size_t>(round % 20);
    rig.until([&] { return rig.far.events.fragments.size() >= some; }, 0.2);
    rig.far_path->break_off("test");
    rig.break_off_both();
  }
  rig.reconnect();
  for (int i = 0; i < 20; ++i) CHECK(rig.near_path->send(bytes_of(text), {}));
  CHECK(rig.until([&] { return rig.far.events.fragments.size() == 20; }));
}

VM_TEST_CASE("verbs nic: immediates beyond the receives wait until the peer looks") {
  Rig rig;
  rig.connect();
  rig.polls_far = false;
  std::vector<NicWork> works;
  for (uint32_t i = 0; i < 10000; ++i) works.push_back(rig.imm_only(i));
  std::thread late([&] {
    std::this_thread::sleep_for(std::chrono::milliseconds(800));
    const Deadline deadline = deadline_in(kPatienceS);
    while (rig.far.events.imms.size() < 10000 && now_ns() < deadline) rig.far.nic->poll(rig.far.events);
  });
  rig.post(works);
  CHECK(rig.until([&] { return rig.all_done(); }));
  late.join();
  REQUIRE(rig.far.events.imms.size() == 10000);
  for (uint32_t i = 0; i < 10000; ++i) CHECK(rig.far.events.imms[i] == i);
}

VM_TEST_CASE("verbs nic: a peer that is gone is noticed by what is posted to it") {
  Rig rig;
  rig.connect();
  rig.post({rig.write(0, 100, 1)});
  REQUIRE(rig.until([&] { return rig.all_done(); }));
  rig.far_path->break_off("it leaves");
  REQUIRE(rig.until([&] { return rig.far.events.flushed.size() == 1; }));
  rig.far_path.reset();
  rig.post({rig.write(0, 100, 2)});
  REQUIRE(rig.until([&] { return rig.near.events.broken.size() == 1; }, 5));
  CHECK(rig.near.events.failed[rig.near_path.get()].at(1).fault == NicFault::kUnreachable);
}

VM_TEST_CASE("verbs nic: a port that goes down and up is told, and works again") {
  Rig rig;
  shell("ip link set port0 down");
  CHECK(rig.until([&] { return rig.near.events.ports == std::vector<bool>{false}; }));
  CHECK(!rig.near.nic->is_port_up());
  shell("ip link set port0 up");
  CHECK(rig.until([&] { return rig.near.events.ports == std::vector<bool>{false, true}; }));
  rig.connect();
  rig.post({rig.write(0, 100000, 1)});
  CHECK(rig.until([&] { return rig.all_done(); }));
}

VM_TEST_CASE("verbs nic: over a network that loses, doubles and reorders packets") {
  Rig rig;
  shell("tc qdisc add dev port1 root netem loss 2% duplicate 1% delay 100us reorder 5%");
  rig.connect();
  std::vector<NicWork> works;
  for (uint32_t i = 0; i < 128; ++i) works.push_back(rig.write(i * 32768, 32768, i));
  rig.post(works);
  CHECK(rig.until([&] { return rig.all_done() && rig.far.events.imms.size() == 128; }, 60));
  CHECK(rig.source == rig.target);
  shell("tc qdisc del dev port1 root");
}

VM_TEST_CASE("verbs nic: a sleeper is woken by arrivals, and hush is quiet until the next arming") {
  Rig rig;
  rig.connect();
  const int fd = rig.far.nic->fds().at(0);
  const auto is_readable = [fd](int timeout_ms) {
    pollfd entry{fd, POLLIN, 0};
    return ::poll(&entry, 1, timeout_ms) == 1;
  };
  for (uint32_t round = 0; round < 50; ++round) {
    rig.far.nic->arm();
    if (rig.far.nic->has_arrivals()) rig.far.nic->poll(rig.far.events);
    rig.polls_far = false;
    rig.post({rig.write(0, 64, round)});
    REQUIRE(is_readable(5000));
    rig.far.nic->hush();
    CHECK(!is_readable(0));
    CHECK(rig.far.nic->has_arrivals());
    rig.polls_far = true;
    REQUIRE(rig.until([&] { return rig.far.events.imms.size() == round + 1 && rig.all_done(); }));
  }
}

VM_TEST_CASE("verbs nic: both ends on one port") {
  Rig rig("rxe0", "rxe0");
  rig.connect();
  rig.post({rig.write(0, 1 << 20, 1)});
  CHECK(rig.until([&] { return rig.all_done() && rig.far.events.imms.size() == 1; }));
}

VM_TEST_CASE("verbs nic: 256 paths on one NIC, all in use") {
  Rig rig;
  std::vector<std::unique_ptr<rdma::NicPath>> near;
  std::vector<std::unique_ptr<rdma::NicPath>> far;
  for (uint32_t i = 0; i < 256; ++i) {
    near.push_back(rig.near.nic->make_path());
    far.push_back(rig.far.nic->make_path());
    near.back()->connect(rig.far.nic->endpoint(), far.back()->offer());
    far.back()->connect(rig.near.nic->endpoint(), near.back()->offer());
  }
  for (uint32_t i = 0; i < 256; ++i) {
    std::vector<NicWork> works(40, rig.write(0, 64, i));
    for (size_t k = 0; k < works.size(); ++k) works[k].cookie = k;
    uint32_t taken = 0;
    REQUIRE(rig.until([&] {
      taken += near[i]->post(std::span(works).subspan(taken));
      return taken == 40;
    }));
  }
  CHECK(rig.until([&] { return rig.far.events.imms.size() == 256 * 40; }, 60));
  for (auto& path : near) path->break_off("end");
  for (auto& path : far) path->break_off("end");
  CHECK(rig.until([&] { return rig.near.events.flushed.size() == 256 && rig.far.events.flushed.size() == 256; }, 60));
}

#endif
