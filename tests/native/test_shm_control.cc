// An engine's control plane, met by processes that are no engines.
#include <doctest/doctest.h>
#include <sys/eventfd.h>
#include <sys/prctl.h>
#include <sys/wait.h>

#include <csignal>
#include <cstring>
#include <filesystem>
#include <iterator>
#include <string>
#include <vector>

#include "fake_cuda.h"
#include "shm_packets.h"
#include "shm_rig.h"
#include "transport/refusal.h"

namespace crossrail::shm {

namespace {

constexpr uint64_t kRegionId = uint64_t{1} << kRegionSlotBits | 1;

// The type of the next packet, while the node moves; 0: the other side hung up, 255: nothing came.
uint8_t next_packet(Node& node, int socket) {
  uint8_t type = 255;
  turn_until({&node}, [&] {
    uint8_t bytes[2048];
    const ssize_t got = recv(socket, bytes, sizeof bytes, MSG_DONTWAIT);  // descriptors that came along are dropped
    if (got >= 0) type = got == 0 ? 0 : bytes[0];
    return got >= 0;
  });
  return type;
}

// What a process that is no engine passes as its home.
struct StrangersHome {
  const Fd segment = sealed_memory("home", sizeof(HomeSegment), kLayoutMagic);
  const Fd open = sealed_memory("open", sizeof(OpenRegions), kOpenRegionsMagic);
  const Fd bell{eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK)};
};

// Says hello over a connected socket. segment: of the link.
void be_welcomed(Node& node, const Fd& socket, const Fd& segment) {
  const StrangersHome home;
  const int fds[] = {home.segment.get(), home.open.get(), home.bell.get(), segment.get()};
  REQUIRE(
      send_packet(socket.get(), honest_hello(make_identity("stranger", transport_bit(TransportKind::kShm), 1)), fds));
  REQUIRE(next_packet(node, socket.get()) == kWelcome);
}

// The memory of the link that the next packet, a hello, brings.
std::shared_ptr<MemoryMap> link_of_hello(Node& node, int socket) {
  uint8_t bytes[2048];
  alignas(cmsghdr) char ancillary[CMSG_SPACE(sizeof(int) * 4)];
  iovec vector{.iov_base = bytes, .iov_len = sizeof bytes};
  msghdr header{};
  header.msg_iov = &vector;
  header.msg_iovlen = 1;
  header.msg_control = ancillary;
  header.msg_controllen = sizeof ancillary;
  ssize_t got = -1;
  REQUIRE(turn_until({&node}, [&] { return (got = recvmsg(socket, &header, MSG_DONTWAIT | MSG_CMSG_CLOEXEC)) >= 0; }));
  REQUIRE(got > 0);
  REQUIRE(bytes[0] == kHello);
  int fds[4];  // of its home, its open regions, its bell, the link
  REQUIRE(header.msg_controllen == CMSG_SPACE(sizeof fds));
  std::memcpy(fds, CMSG_DATA(CMSG_FIRSTHDR(&header)), sizeof fds);
  const Fd home(fds[0]), open(fds[1]), bell(fds[2]);
  return MemoryMap::map(Fd(fds[3]), link_segment_bytes(1));
}

// Who was connected to, and is no engine.
struct Impostor {
  explicit Impostor(Node* node) : node(node) {
    socklen_t length = 0;
    const sockaddr_un name = control_socket_of(target, &length);
    REQUIRE(bind(listener.get(), reinterpret_cast<const sockaddr*>(&name), length) == 0);
    REQUIRE(listen(listener.get(), 1) == 0);
    link = node->transport.connect(std::make_shared<const Address>(target));
    socket = Fd(accept4(listener.get(), nullptr, nullptr, SOCK_CLOEXEC));
    segment = link_of_hello(*node, socket.get());
    const StrangersHome home;
    Writer welcome;
    welcome.put(static_cast<uint8_t>(kWelcome));
    welcome.put(uint64_t{1});
    const int fds[] = {home.segment.get(), home.open.get(), home.bell.get()};
    REQUIRE(send_packet(socket.get(), welcome.bytes(), fds));
    REQUIRE(turn_until({node}, [&] { return node->sink.ups == 1; }));
  }

  // Memory of 4096 bytes that is reached through the rings.
  std::unique_ptr<RemoteKey> region() const;
  void post(WorkOp op, RemoteKey& key, std::span<std::byte> local) const {
    const WorkRequest request{
        .op = op, .local = local.data(), .length_bytes = local.size(), .remote = &key, .context = node};
    uint32_t completed = 0;
    REQUIRE(node->transport.post(*link, 0, {&request, 1}, &completed) == 1);
  }
  // Takes the first entry of the rail, and says this of it.
  void pop(uint32_t status) const {
    Channel& channel = rings().channels[kFirstRailChannel];
    REQUIRE(channel.entries[0].sequence.load(std::memory_order_acquire) == 1);
    channel.entries[0].status.store(static_cast<uint8_t>(status), std::memory_order_relaxed);
    channel.consumed.store(1, std::memory_order_release);
  }

  Node* const node;
  const Address target = make_identity("target", transport_bit(TransportKind::kShm), 1);
  const Fd listener{::socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0)};
  LinkSegment& rings() const { return *reinterpret_cast<LinkSegment*>(segment->data()); }

  Link* link = nullptr;
  Fd socket;
  std::shared_ptr<MemoryMap> segment;
};

size_t open_fds() {
  return static_cast<size_t>(std::distance(std::filesystem::directory_iterator("/proc/self/fd"), {}));
}

// What a peer answers that has memory of its own, of 4096 bytes.
Writer begin_facts(bool is_gpu) {
  Writer answer;
  answer.put(static_cast<uint8_t>(kImported));
  answer.put(kRegionId);
  answer.put(static_cast<uint8_t>(Status::kDone));
  answer.put(static_cast<uint8_t>(Access::kRemoteWrite));
  answer.put(uint64_t{4096});  // address
  answer.put(uint64_t{4096});  // length
  answer.put(uint64_t{0});     // offset in shared memory
  answer.put(static_cast<uint8_t>(is_gpu));
  return answer;
}

Bytes host_facts() { return std::move(begin_facts(false).bytes()); }

std::unique_ptr<RemoteKey> Impostor::region() const {
  RegionDescriptor descriptor;
  descriptor.region_id = kRegionId;
  auto key = node->transport.resolve(*link, descriptor);
  REQUIRE(next_packet(*node, socket.get()) == kImport);
  REQUIRE(send_packet(socket.get(), host_facts(), {}));
  Mapping none;
  REQUIRE(turn_until({node}, [&] { return node->transport.map(*link, *key, -1, &none) == Status::kAccessDenied; }));
  return key;
}

Bytes gpu_facts(uint8_t by, uint64_t offset, uint64_t allocation_bytes) {
  Writer answer = begin_facts(true);
  answer.put(by);
  answer.put(offset);
  answer.put_bytes(device::IpcHandle{});
  answer.put(uint64_t{1});
  answer.put(allocation_bytes);
  answer.put_text("");
  return std::move(answer.bytes());
}

}  // namespace

TEST_CASE("shm: of a process that does not answer, only what is known is said") {
  CHECK(silence_named(0).empty());
  CHECK(silence_named('T') == ": it is stopped (SIGSTOP or a debugger)");
  for (const char state : {'R', 'S', 'D', 'I'}) {
    CAPTURE(state);
    const std::string text = silence_named(state);
    CHECK(text.starts_with(": it is not stopped"));
    CHECK(text.find(std::string("(state ") + state + ")") != std::string::npos);
  }
  CHECK(silence_named('Z') == ": its main thread has ended (state Z)");
}

TEST_CASE("shm: where hosts cannot be told apart, an engine that nobody here is is on another") {
  Node node("asks"), there("there");
  Address near = there.transport.address();
  near.host = kUnknownHost;
  CHECK(node.transport.why_out_of_reach(near) == "");
  Address far = make_identity("far", transport_bit(TransportKind::kShm), 1);
  CHECK(node.transport.why_out_of_reach(far) == "");  // of this host, and has ended: connecting tells
  far.host = kUnknownHost;
  CHECK(node.transport.why_out_of_reach(far).find("no engine here is that one") != std::string::npos);
}

TEST_CASE("shm: who connects has no answers to give, which would be taken for another's") {
  Node node("target");
  const Fd segment = sealed_memory("link", link_segment_bytes(1), kLayoutMagic);
  for (const PacketType type : {kWelcome, kImported, kRegionGone, kPong}) {
    const Fd stranger(socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0));
    socklen_t length = 0;
    const sockaddr_un name = control_socket_of(node.transport.address(), &length);
    REQUIRE(connect(stranger.get(), reinterpret_cast<const sockaddr*>(&name), length) == 0);
    be_welcomed(node, stranger, segment);
    Writer answer;
    answer.put(static_cast<uint8_t>(type));
    answer.put(kRegionId);
    if (type == kRegionGone) answer.put(static_cast<uint8_t>(Status::kRegionClosed));

    REQUIRE(send_packet(stranger.get(), answer.bytes(), {}));

    CHECK(next_packet(node, stranger.get()) == kRefuse);
  }
}

TEST_CASE("shm: who lost only its connection is waited for in a copy until it has given its link up, or died") {
  Node node("target");
  const auto region = node.transport.allocate(kRegionId, 8192, true);
  const auto other = node.transport.allocate(kRegionId + 1, 8192, true);
  const Fd segment = sealed_memory("link", link_segment_bytes(1), kLayoutMagic);
  const auto map = MemoryMap::map(Fd(dup(segment.get())), link_segment_bytes(1));
  auto& link = *reinterpret_cast<LinkSegment*>(map->data());
  const Fd stranger(socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0));
  socklen_t length = 0;
  const sockaddr_un name = control_socket_of(node.transport.address(), &length);
  // Who connects is who the engine watches. It does nothing else: we speak for it.
  const pid_t peer = fork();
  if (peer == 0) {
    prctl(PR_SET_PDEATHSIG, SIGKILL);
    if (connect(stranger.get(), reinterpret_cast<const sockaddr*>(&name), length) != 0) _exit(1);
    for (;;) pause();
  }
  REQUIRE(turn_until({&node}, [&] {
    sockaddr_un there;
    socklen_t bytes = sizeof there;
    return getpeername(stranger.get(), reinterpret_cast<sockaddr*>(&there), &bytes) == 0;
  }));
  be_welcomed(node, stranger, segment);
  link.hazard.store(kRegionId);
  const uint8_t nonsense[] = {99};
  REQUIRE(send_packet(stranger.get(), nonsense, {}));
  REQUIRE(next_packet(node, stranger.get()) == kRefuse);
  REQUIRE(next_packet(node, stranger.get()) == 0);

  node.transport.poll();
  node.transport.revoke_region(*region);
  node.transport.revoke_region(*other);

  CHECK(!node.transport.is_region_quiet(*region));
  CHECK(node.transport.users_of(*region) == std::vector<std::string>{"stranger"});
  CHECK(node.transport.is_region_quiet(*other));
  SUBCASE("dies") { kill(peer, SIGKILL); }
  SUBCASE("gives it up") {
    link.hazard.store(0);
    CHECK(node.transport.is_region_quiet(*region));
    link.hazard.store(kRegionId);  // it has not heard yet
    CHECK(!node.transport.is_region_quiet(*region));
    link.revoked.store(1);
    CHECK(!node.transport.is_region_quiet(*region));
    link.hazard.store(0);
  }
  CHECK(turn_until({&node}, [&] { return map.use_count() == 1; }));  // nothing is kept of it
  CHECK(node.transport.is_region_quiet(*region));
  kill(peer, SIGKILL);
  waitpid(peer, nullptr, 0);
}

TEST_CASE("shm: who was connected to is not shown our regions") {
  Node node("initiator");
  const auto region = node.transport.allocate(kRegionId, 8192, true);
  const Impostor impostor(&node);

  Writer import;
  import.put(static_cast<uint8_t>(kImport));
  import.put(kRegionId);
  import.put(uint8_t{0});
  REQUIRE(send_packet(impostor.socket.get(), import.bytes(), {}));

  CHECK(next_packet(node, impostor.socket.get()) == kRefuse);
  CHECK(next_packet(node, impostor.socket.get()) == 0);
  CHECK(turn_until({&node}, [&] { return !node.sink.why_down.empty(); }));
}

TEST_CASE("shm: who answers more reads than it was asked for does not keep us for itself") {
  Node node("initiator");
  const Impostor impostor(&node);
  const auto key = impostor.region();
  std::vector<std::byte> local(4096);
  impostor.post(WorkOp::kRead, *key, local);

  Channel& responses = impostor.rings().channels[kResponseChannel];
  for (uint32_t i = 0; i < kRingEntries; ++i) {
    responses.entries[i].kind = EntryKind::kReadResponse;
    responses.entries[i].sequence.store(i + 1, std::memory_order_release);
  }
  node.transport.poll();

  CHECK(responses.consumed.load() == 1);
}

TEST_CASE("shm: a peer says that it refuses, and not what only our side can know") {
  for (uint32_t byte = 1; byte < kEntryTaken; ++byte) {
    CAPTURE(byte);
    Node node("initiator");
    const Impostor impostor(&node);
    const auto key = impostor.region();
    std::vector<std::byte> local(4096);
    impostor.post(WorkOp::kWrite, *key, local);

    impostor.pop(byte);
    node.transport.poll();

    CHECK(node.sink.last_outcome == (is_refusal(byte) ? static_cast<Status>(byte) : Status::kTransportFailed));
  }
}

TEST_CASE("shm: what a peer leaves undone because we forget it is lost, not cancelled") {
  Node node("initiator");
  const Impostor impostor(&node);
  const auto key = impostor.region();
  std::vector<std::byte> local(4096);
  impostor.post(WorkOp::kWrite, *key, local);

  impostor.pop(static_cast<uint8_t>(Status::kCancelled));  // between our two steps
  node.transport.disconnect(*impostor.link);

  CHECK(node.sink.last_outcome == Status::kPeerLost);
  CHECK(node.sink.failed == 1);
}

TEST_CASE("shm: what a peer says of memory of a GPU is checked, and descriptors that come with it are closed") {
  test::FakeCuda cuda;
  constexpr auto kByVmm = static_cast<uint8_t>(device::SharedBy::kVmm);
  size_t lie = 0;
  for (const size_t descriptors : {size_t{0}, size_t{1}, size_t{4}}) {
    Node node("initiator");
    const auto own = node.transport.register_gpu_memory(kRegionId, device::GpuMemory(cuda.allocate(8192), 4096, false),
                                                        Access::kRemoteWrite);
    const Impostor impostor(&node);
    RegionDescriptor descriptor;
    descriptor.region_id = kRegionId;
    descriptor.memory = MemoryKind::kCuda;
    const Fd junk = sealed_memory("junk", 4096, 0);
    const std::vector<int> fds(descriptors, junk.get());
    const size_t before = open_fds();
    {
      auto key = node.transport.resolve(*impostor.link, descriptor);
      REQUIRE(next_packet(node, impostor.socket.get()) == kImport);
      REQUIRE(send_packet(impostor.socket.get(), gpu_facts(kByVmm, 0, test::FakeVmm::kUnit), fds));
      Mapping mapping;
      Status status = Status::kPending;
      REQUIRE(turn_until({&node}, [&] {
        status = node.transport.map(*impostor.link, *key, 0, &mapping);
        return status != Status::kPending;
      }));
      CHECK(status == Status::kTransportFailed);
      CHECK(mapping.trouble.find(descriptors == 0 ? "gave no handle" : "CUDA error 1") != std::string::npos);
    }
    CHECK(open_fds() == before);

    // Past the end of its allocation, at an offset that wraps, in no way that we know.
    const Bytes lies[] = {gpu_facts(kByVmm, 1, 4096), gpu_facts(kByVmm, ~uint64_t{0}, 1 << 20),
                          gpu_facts(kByVmm + 1, 0, test::FakeVmm::kUnit)};
    REQUIRE(send_packet(impostor.socket.get(), lies[lie++], fds));
    CHECK(next_packet(node, impostor.socket.get()) == kRefuse);
    CHECK(turn_until({&node}, [&] { return !node.sink.why_down.empty(); }));
    CHECK(cuda.handles() == 0);
  }
}

TEST_CASE("shm: a descriptor of memory of a GPU is made for who wants one, and not kept") {
  test::FakeCuda cuda;
  std::byte* const segments = cuda.allocate_segments(1, true);
  {
    Node node("target");
    const auto region =
        node.transport.register_gpu_memory(kRegionId, device::GpuMemory(segments, 4096, false), Access::kRemoteWrite);
    const Fd segment = sealed_memory("link", link_segment_bytes(1), kLayoutMagic);
    const Fd stranger(socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0));
    socklen_t length = 0;
    const sockaddr_un name = control_socket_of(node.transport.address(), &length);
    REQUIRE(connect(stranger.get(), reinterpret_cast<const sockaddr*>(&name), length) == 0);
    be_welcomed(node, stranger, segment);
    const size_t before = open_fds();
    for (const bool is_refused : {false, true}) {
      cuda.vmm.export_error = is_refused ? 304 : 0;
      for (const uint8_t wants : {uint8_t{0}, uint8_t{1}}) {
        Writer import;
        import.put(static_cast<uint8_t>(kImport));
        import.put(kRegionId);
        import.put(wants);
        REQUIRE(send_packet(stranger.get(), import.bytes(), {}));
        uint8_t bytes[2048];
        alignas(cmsghdr) char ancillary[CMSG_SPACE(sizeof(int))];
        iovec vector{.iov_base = bytes, .iov_len = sizeof bytes};
        msghdr header{
            .msg_iov = &vector, .msg_iovlen = 1, .msg_control = ancillary, .msg_controllen = sizeof ancillary};
        REQUIRE(recvmsg(stranger.get(), &header, MSG_CMSG_CLOEXEC) > 0);
        CHECK(bytes[0] == kImported);
        const cmsghdr* const item = CMSG_FIRSTHDR(&header);
        REQUIRE((item != nullptr) == (wants == 1 && !is_refused));
        if (item == nullptr) continue;
        int fd = -1;
        std::memcpy(&fd, CMSG_DATA(item), sizeof fd);
        CHECK(device::PhysicalMemory::import(Fd(fd), test::FakeVmm::kUnit, 0) != nullptr);
      }
    }
    CHECK(turn_until({&node}, [&] { return open_fds() == before; }));
  }
  cuda.free_segments(segments);
}

}  // namespace crossrail::shm
