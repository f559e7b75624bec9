// The verbs NIC on a device that does what no device here does: InfiniBand, faults of memory and queues, its own end.
#include <doctest/doctest.h>

#include <chrono>
#include <thread>

#include "transport/verbs/open.h"
#include "util/errors.h"

#if CROSSRAIL_WITH_VERBS

#include "fake_cuda.h"
#include "fake_verbs.h"
#include "transport/verbs/queues.h"
#include "transport/verbs/wire.h"

using namespace crossrail;
using rdma::NicFault;
using rdma::NicWork;
using verbs_test::Fake;
using verbs_test::FakeQueuePair;

namespace {

struct Told final : rdma::NicEvents {
  uint64_t done = 0;
  std::vector<std::pair<uint64_t, NicFault>> failed;
  std::vector<uint32_t> imms;
  int broken = 0;
  int flushed = 0;
  std::vector<bool> ports;
  std::string fatal;
  void on_work_done(rdma::NicPath&, uint64_t cookie, bool) override { done = cookie + 1; }
  void on_work_failed(rdma::NicPath&, uint64_t cookie, NicFault fault, int, const std::string&) override {
    failed.emplace_back(cookie, fault);
  }
  void on_imm(rdma::NicPath*, uint32_t imm) override { imms.push_back(imm); }
  void on_fragment(rdma::NicPath*, std::span<const uint8_t>) override {}
  void on_datagram(std::span<const uint8_t>) override {}
  void on_nobody(std::span<const uint8_t>) override {}
  void on_path_broken(rdma::NicPath&, const std::string&) override { ++broken; }
  void on_path_flushed(rdma::NicPath&) override { ++flushed; }
  void on_port(bool is_up, const std::string&) override { ports.push_back(is_up); }
  void on_device_fatal(const std::string& reason) override { fatal = reason; }
};

std::unique_ptr<rdma::Nic> open_fake(const RdmaOptions& rdma = {}) {
  TransportOptions options;
  options.rails = {"fake0"};
  options.rdma = rdma;
  return std::move(verbs::open_nics(options).at(0));
}

// A NIC with memory and a path to a peer that only the test knows.
struct Rig {
  explicit Rig(const verbs::Endpoint* peer = nullptr) : nic(open_fake()), memory(1 << 16) {
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
  static Fake& fake() { return *verbs_test::g_fake; }
  std::vector<NicWork> writes(uint64_t count, uint64_t first_cookie = 0) {
    std::vector<NicWork> works(count);
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

}  // namespace

TEST_CASE("verbs faults: a work that fails lets those before it be done and flushes those behind") {
  Fake fake;
  Rig rig;
  CHECK(rig.paths[0]->post(rig.writes(100)) == 100);
  fake.complete(rig.works_of(*rig.paths[0]), 40);
  rig.nic->poll(rig.told);
  CHECK(rig.told.done == 32);  // the last signalled one of those
  fake.complete(rig.works_of(*rig.paths[0]), 3, IBV_WC_REM_ACCESS_ERR);
  rig.nic->poll(rig.told);
  CHECK(rig.told.done == 42);
  CHECK(rig.told.broken == 1);
  rig.paths[0]->break_off("test");
  rig.poll_for_ms(30);
  CHECK(rig.told.flushed == 1);
  REQUIRE(rig.told.failed.size() == 58);
  CHECK(rig.told.failed[0] == std::pair<uint64_t, NicFault>(42, NicFault::kRemoteAccess));
  CHECK(rig.told.failed[57] == std::pair<uint64_t, NicFault>(99, NicFault::kFlushed));
}

TEST_CASE("verbs faults: a device that gives nothing back is not waited for longer than two seconds") {
  Fake fake;
  fake.flushes = fake.says_idle = false;
  Rig rig;
  CHECK(rig.paths[0]->post(rig.writes(10)) == 10);
  const int64_t broken_ns = now_ns();
  rig.paths[0]->break_off("test");
  rig.nic->poll(rig.told);
  if (rig.told.flushed == 0) CHECK(rig.nic->next_timer() != kNoDeadline);  // else this thread stood still for so long
  while (rig.told.flushed == 0 && now_ns() - broken_ns < 20'000'000'000) rig.nic->poll(rig.told);
  CHECK(now_ns() - broken_ns >= 2'000'000'000);
  CHECK(rig.told.flushed == 1);
  CHECK(rig.told.failed.size() == 10);
  CHECK(rig.told.broken == 0);
  CHECK(rig.nic->next_timer() == kNoDeadline);
  // The room of those ten, which is there once the queue was seen empty, is told by itself.
  CHECK(rig.nic->poll(rig.told) == 1);
  CHECK(rig.nic->poll(rig.told) == 0);
}

TEST_CASE("verbs faults: what a path has received is told, however late anybody looks") {
  Fake fake;
  Rig rig;
  constexpr size_t kImms = 1000;  // more than one poll takes
  for (size_t i = 0; i < kImms; ++i) {
    fake.receives.push_back(verbs_test::completion_of(verbs::tagged(verbs::Tag::kImmReceive, 0, 0),
                                                      rig.works_of(*rig.paths[0]).qp, IBV_WC_SUCCESS));
    fake.receives.back().opcode = IBV_WC_RECV_RDMA_WITH_IMM;
  }
  rig.paths[0]->break_off("test");

  std::this_thread::sleep_for(std::chrono::milliseconds(2100));  // longer than a path is waited for
  rig.poll_for_ms(30);

  CHECK(rig.told.flushed == 1);
  CHECK(rig.told.imms.size() == kImms);
}

TEST_CASE("verbs faults: the end of the device ends every path, without anybody's help") {
  Fake fake;
  fake.flushes = false;
  Rig rig;
  rig.add_path();
  CHECK(rig.paths[0]->post(rig.writes(10)) == 10);
  rig.paths[1]->break_off("before");
  fake.tell(IBV_EVENT_DEVICE_FATAL);
  rig.poll_for_ms(5);
  CHECK(!rig.told.fatal.empty());
  CHECK(rig.told.broken == 1);
  CHECK(rig.told.flushed == 2);
  CHECK(rig.told.failed.size() == 10);
  CHECK(rig.paths[0]->post(rig.writes(1, 10)) == 0);
  CHECK_THROWS_AS(rig.nic->make_path(), TransportError);
  rig.nic->send_datagram(rig.nic->endpoint(), {});
  CHECK(!rig.nic->is_port_up());
}

TEST_CASE("verbs faults: a refused post breaks the path, and what was taken comes back") {
  Fake fake;
  Rig rig;
  fake.posts_until_error = 5;
  CHECK(rig.paths[0]->post(rig.writes(10)) == 5);
  CHECK(rig.nic->has_arrivals());
  rig.nic->poll(rig.told);
  CHECK(rig.told.broken == 1);
  rig.paths[0]->break_off("test");
  rig.poll_for_ms(30);
  CHECK(rig.told.failed.size() == 5);
  CHECK(rig.told.flushed == 1);
}

TEST_CASE("verbs faults: all paths together never have more posted than the completion queue holds") {
  Fake fake;
  Rig rig;
  for (int i = 0; i < 63; ++i) rig.add_path();
  for (const auto& path : rig.paths) path->post(rig.writes(verbs::kPathWorks));
  CHECK(fake.posted_count == verbs::kSendsOutstanding);
  const uint8_t byte = 1;
  CHECK(!rig.paths[63]->send({&byte, 1}, {}));
  fake.complete(rig.works_of(*rig.paths[0]), verbs::kPathWorks);
  rig.nic->poll(rig.told);
  CHECK(rig.paths[63]->post(rig.writes(verbs::kPathWorks)) == verbs::kPathWorks);
  // What a destroyed path had posted is let go of once the queue was seen empty.
  rig.paths[1]->break_off("test");
  rig.poll_for_ms(30);
  CHECK(rig.told.flushed == 1);
  CHECK(rig.paths[62]->post(rig.writes(verbs::kPathWorks)) == verbs::kPathWorks);
}

TEST_CASE("verbs faults: memory that cannot be locked is said with the limit and the remedy") {
  Fake fake;
  const auto nic = open_fake();
  std::vector<std::byte> memory(4096);
  fake.register_error = ENOMEM;
  try {
    (void)nic->register_memory(memory.data(), memory.size(), Access::kRemoteWrite);
    FAIL("it was registered");
  } catch (const TransportError& error) {
    CHECK(error.code() == ENOMEM);
    CHECK(error.remedy().find("ulimit -l") != std::string::npos);
    CHECK(std::string(error.what()).find("fake0:1") != std::string::npos);
  }
}

TEST_CASE("verbs faults: memory that may only be read is registered for reading") {
  Fake fake;
  const auto nic = open_fake();
  std::vector<std::byte> memory(4096);
  fake.register_refuses_flags = IBV_ACCESS_LOCAL_WRITE;
  CHECK(nic->register_memory(memory.data(), memory.size(), Access::kRemoteRead) != nullptr);
  CHECK_THROWS_AS(nic->register_memory(memory.data(), memory.size(), Access::kRemoteWrite), TransportError);
}

TEST_CASE("verbs faults: memory is not quiet before the kernel says so") {
  Fake fake;
  const auto nic = open_fake();
  std::vector<std::byte> memory(4096);
  const auto region = nic->register_memory(memory.data(), memory.size(), Access::kRemoteWrite);
  fake.deregister_error = EBUSY;
  region->revoke();
  CHECK(!region->is_quiet());
  CHECK(fake.keys.count(region->key) == 1);
  fake.deregister_error = 0;
  CHECK(region->is_quiet());
  CHECK(fake.keys.count(region->key) == 0);
}

TEST_CASE("verbs faults: a NIC without inline data is used without") {
  Fake fake;
  fake.inline_bytes_max = 0;
  Rig rig;
  CHECK(rig.works_of(*rig.paths[0]).inline_bytes == 0);
  CHECK(rig.paths[0]->post(rig.writes(3)) == 3);
}

TEST_CASE("verbs faults: memory of a GPU by dma-buf, else by what nvidia-peermem knows") {
  test::FakeCuda cuda;
  Fake fake;
  const auto nic = open_fake();
  std::byte* const memory = cuda.allocate(8192) + 100;
  {
    const device::GpuMemory gpu(memory, 4096);
    const auto registration = nic->register_gpu_memory(gpu, Access::kRemoteWrite);
    CHECK(registration->given_by == "dma-buf");
    CHECK(registration->remote_base == reinterpret_cast<uint64_t>(memory));
    REQUIRE(fake.dma_bufs.size() == 1);
    CHECK(fake.dma_bufs[0].second == 100);
  }
  fake.dma_buf_error = EOPNOTSUPP;
  const device::GpuMemory gpu(memory, 4096);
  const auto registration = nic->register_gpu_memory(gpu, Access::kRemoteWrite);
  CHECK(registration->given_by.find("peermem, not dma-buf: ibv_reg_dmabuf_mr") == 0);
  fake.register_error = EFAULT;
  try {
    (void)nic->register_gpu_memory(gpu, Access::kRemoteWrite);
    FAIL("it was registered");
  } catch (const TransportError& error) {
    CHECK(error.remedy().find("modprobe nvidia-peermem") != std::string::npos);
  }
}

TEST_CASE("verbs faults: short writes go inline, but for those from a GPU") {
  test::FakeCuda cuda;
  Fake fake;
  Rig rig;
  auto works = rig.writes(1);
  works[0].length_bytes = 16;
  CHECK(rig.paths[0]->post(works) == 1);
  CHECK(fake.inline_count == 1);
  const device::GpuMemory gpu(cuda.allocate(4096), 4096);
  rig.region = rig.nic->register_gpu_memory(gpu, Access::kLocal);
  works = rig.writes(1, 1);
  works[0].length_bytes = 16;
  works[0].local = gpu.base();
  CHECK(rig.paths[0]->post(works) == 1);
  CHECK(fake.inline_count == 1);
}

TEST_CASE("verbs faults: InfiniBand is routed by lid within a subnet, by GID between subnets") {
  Fake fake;
  fake.link_layer = IBV_LINK_LAYER_INFINIBAND;
  fake.gid_type = IBV_GID_TYPE_IB;
  fake.gid = {};
  fake.gid.raw[0] = 0xfe;
  fake.gid.raw[15] = 7;
  const auto ours = *verbs::decode_endpoint(open_fake()->endpoint());
  CHECK(ours.lid == 5);
  verbs::Endpoint peer = ours;
  peer.lid = 9;
  Rig same(&peer);
  CHECK(same.works_of(*same.paths[0]).last_address.ah_attr.dlid == 9);
  CHECK(same.works_of(*same.paths[0]).last_address.ah_attr.is_global == 0);
  CHECK(same.nic->nearness(verbs::encode(peer)) == 2);
  peer.wants_global_route = true;  // a function that shares its LID with others
  Rig shared(&peer);
  CHECK(shared.works_of(*shared.paths[0]).last_address.ah_attr.is_global == 1);
  CHECK(shared.works_of(*shared.paths[0]).last_address.ah_attr.dlid == 9);
  peer.wants_global_route = false;
  peer.gid[7] = 1;  // another subnet, and nobody says how to get there
  CHECK(same.nic->nearness(verbs::encode(peer)) == 0);
  peer.gid[4] = 0xc0;  // the LID that routers know it by
  peer.gid[5] = 7;
  Rig other(&peer);
  CHECK(other.works_of(*other.paths[0]).last_address.ah_attr.is_global == 1);
  CHECK(other.works_of(*other.paths[0]).last_address.ah_attr.dlid == 0xc007);
  CHECK(other.nic->nearness(verbs::encode(peer)) == 1);
  fake.gid.raw[4] = 0xc1;  // ours likewise, in the same subnet
  fake.gid.raw[7] = 1;
  Rig near(&peer);
  CHECK(near.works_of(*near.paths[0]).last_address.ah_attr.is_global == 0);
  CHECK(near.works_of(*near.paths[0]).last_address.ah_attr.dlid == 9);
  CHECK(near.nic->nearness(verbs::encode(peer)) == 2);
  peer.fabric = verbs::Fabric::kRoceV2;
  CHECK(other.nic->nearness(verbs::encode(peer)) == 0);
  CHECK_THROWS_AS(Rig{&peer}, TransportError);
}

TEST_CASE("verbs faults: InfiniBand's partition is the one that the port is a full member of, or the wanted one") {
  Fake fake;
  fake.link_layer = IBV_LINK_LAYER_INFINIBAND;
  fake.gid_type = IBV_GID_TYPE_IB;
  fake.gid = {};
  fake.gid.raw[0] = 0xfe;
  fake.gid.raw[1] = 0x80;
  const auto index_of = [&](const RdmaOptions& options) {
    const auto nic = open_fake(options);
    const auto path = nic->make_path();
    for (const auto& [number, queue_pair] : fake.queue_pairs)  // datagrams, messages, works
      CHECK(queue_pair->partition_index == fake.queue_pairs.begin()->second->partition_index);
    return fake.queue_pairs.begin()->second->partition_index;
  };
  fake.partitions = {0x7fff, 0, 0x800b, 0x800c};  // as virtual machines in a cloud have it
  CHECK(index_of({}) == 2);
  RdmaOptions wanted;
  wanted.partition = 0x000c;
  CHECK(index_of(wanted) == 3);
  wanted.partition = 0x8123;
  CHECK_THROWS_WITH_AS(open_fake(wanted), doctest::Contains("no such partition: 0x8123"), TransportError);
  fake.partitions = {0x800b, 0x7fff};
  CHECK(index_of({}) == 0);
  const auto nic = open_fake();
  verbs::Endpoint peer = *verbs::decode_endpoint(nic->endpoint());
  CHECK(peer.partition == 0x800b);
  peer.partition = 0x000b;  // a limited member of the same
  CHECK(nic->nearness(verbs::encode(peer)) == 2);
  peer.partition = 0x800c;
  CHECK(nic->nearness(verbs::encode(peer)) == 0);
  fake.partitions = {0x7fff};
  CHECK(open_fake()->nearness(open_fake()->endpoint()) == 0);  // limited members do not hear each other
}

TEST_CASE("verbs faults: a port that lost its partition is down") {
  Fake fake;
  fake.link_layer = IBV_LINK_LAYER_INFINIBAND;
  fake.gid_type = IBV_GID_TYPE_IB;
  const auto nic = open_fake();
  CHECK(nic->is_port_up());
  fake.partitions = {0x800b};
  fake.tell(IBV_EVENT_PKEY_CHANGE);
  std::this_thread::sleep_for(std::chrono::milliseconds(2));
  Told told;
  nic->poll(told);
  CHECK(told.ports == std::vector<bool>{false});
}

TEST_CASE("verbs faults: a port whose packets hold no datagram is not taken") {
  Fake fake;
  fake.mtu = IBV_MTU_512;
  CHECK_THROWS_WITH_AS(open_fake(), doctest::Contains("too small for the handshake"), TransportError);
}

TEST_CASE("verbs faults: what the NIC is told of has its pages for itself") {
  Fake fake;
  const auto nic = open_fake();
  CHECK(fake.registered.size() >= 4);
  for (const auto& [base, bytes] : fake.registered)
    CHECK(reinterpret_cast<uintptr_t>(base) % static_cast<uintptr_t>(::sysconf(_SC_PAGESIZE)) == 0);
}

TEST_CASE("verbs faults: options of route and packet reach the queue pair") {
  Fake fake;
  const auto nic = open_fake({{}, 0, 106, 3, 1024});
  const auto path = nic->make_path();
  path->connect(nic->endpoint(), verbs::encode(verbs::Offer{4, 3, 4, 5, 6}));
  const FakeQueuePair& works = fake.queue_pair(verbs::decode_offer(path->offer())->work_queue_pair);
  CHECK(works.last_address.path_mtu == IBV_MTU_1024);
  CHECK(works.last_address.ah_attr.grh.traffic_class == 106);
  CHECK(works.last_address.ah_attr.sl == 3);
  CHECK(works.last_address.dest_qp_num == 5);
  CHECK(works.last_address.rq_psn == 6);
  CHECK_THROWS_AS(open_fake({{}, 3, 0, 0, 0}), TransportError);  // no such GID
}

TEST_CASE("verbs faults: a port that is down at the start is used when it comes up") {
  Fake fake;
  fake.port_state = IBV_PORT_DOWN;
  CHECK(verbs::missing().find("fake0:1") != std::string::npos);
  CHECK_THROWS_AS(verbs::open_nics({}), TransportError);  // without a name it is not taken
  const auto nic = open_fake();
  CHECK(!nic->is_port_up());
  fake.port_state = IBV_PORT_ACTIVE;
  fake.tell(IBV_EVENT_PORT_ACTIVE);
  std::this_thread::sleep_for(std::chrono::milliseconds(2));
  Told told;
  nic->poll(told);
  CHECK(told.ports == std::vector<bool>{true});
}

TEST_CASE("verbs faults: a port that lost its address is down until it has it again") {
  Fake fake;
  const auto nic = open_fake();
  Told told;
  const auto poll_after = [&](uint8_t last) {
    fake.gid.raw[15] = last;
    fake.tell(IBV_EVENT_GID_CHANGE);
    std::this_thread::sleep_for(std::chrono::milliseconds(2));
    nic->poll(told);
  };
  poll_after(77);
  poll_after(1);
  CHECK(told.ports == std::vector<bool>{false, true});
  poll_after(77);
  fake.gid_index = 3;  // given back, it is at another place of the table
  poll_after(1);
  CHECK(told.ports == std::vector<bool>{false, true, false, true});
  const auto path = nic->make_path();
  path->connect(nic->endpoint(), verbs::encode(verbs::Offer{4, 3, 4, 5, 6}));
  const FakeQueuePair& works = fake.queue_pair(verbs::decode_offer(path->offer())->work_queue_pair);
  CHECK(works.last_address.ah_attr.grh.sgid_index == 3);
}

TEST_CASE("verbs faults: devices without reliable connections are listed with the reason") {
  Fake fake;
  verbs_test::g_device.transport_type = IBV_TRANSPORT_UNSPECIFIED;
  const auto ports = verbs::ports();
  REQUIRE(ports.size() == 1);
  CHECK(ports[0].trouble.find("EFA") != std::string::npos);
  CHECK(!verbs::missing().empty());
}

TEST_CASE("verbs faults: endpoints and offers cut or changed at any place are refused or harmless") {
  Fake fake;
  Rig rig;
  std::vector<uint8_t> endpoint(rig.nic->endpoint().begin(), rig.nic->endpoint().end());
  std::vector<uint8_t> offer(rig.paths[0]->offer().begin(), rig.paths[0]->offer().end());
  CHECK(endpoint.size() <= rdma::kEndpointBytesMax);
  CHECK(offer.size() <= rdma::kOfferBytesMax);
  for (size_t cut = 0; cut < endpoint.size(); ++cut) CHECK(!verbs::decode_endpoint(std::span(endpoint).first(cut)));
  for (size_t cut = 0; cut < offer.size(); ++cut) CHECK(!verbs::decode_offer(std::span(offer).first(cut)));
  for (size_t at = 0; at < endpoint.size() * 8; ++at) {
    std::vector<uint8_t> changed = endpoint;
    changed[at / 8] = static_cast<uint8_t>(changed[at / 8] ^ 1u << at % 8);
    (void)rig.nic->nearness(changed);
    rig.nic->send_datagram(changed, {offer.data(), 1});
  }
}

TEST_CASE("verbs faults: what posting costs by itself") {
  Fake fake;
  fake.is_sink = true;
  Rig rig;
  constexpr uint64_t kBatch = 128;
  double best_ns = 1e9;
  uint64_t cookie = 0;
  for (int round = 0; round < 200; ++round) {
    auto works = rig.writes(kBatch, cookie);
    for (NicWork& work : works) work.length_bytes = 8192;
    const int64_t begin = now_ns();
    REQUIRE(rig.paths[0]->post(works) == kBatch);
    const double ns = static_cast<double>(now_ns() - begin) / kBatch;
    best_ns = std::min(best_ns, ns);
    cookie += kBatch;
    rig.nic->poll(rig.told);
    REQUIRE(rig.told.done == cookie);
  }
  MESSAGE("one write of a page: " << best_ns << " ns, " << fake.doorbells << " doorbells for " << cookie);
}

#endif
