// An engine's control plane, met by processes that are no engines.
#include <doctest/doctest.h>
#include <sys/eventfd.h>
#include <sys/prctl.h>
#include <sys/wait.h>

#include <csignal>

#include "shm_packets.h"
#include "shm_rig.h"

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

// Says hello over a connected socket. segment: of the link.
void be_welcomed(Node& node, const Fd& socket, const Fd& segment) {
  const Fd home = sealed_memory("home", sizeof(HomeSegment), true);
  const Fd bell(eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK));
  const int fds[] = {home.get(), bell.get(), segment.get()};
  REQUIRE(
      send_packet(socket.get(), honest_hello(make_identity("stranger", transport_bit(TransportKind::kShm), 1)), fds));
  REQUIRE(next_packet(node, socket.get()) == kWelcome);
}

}  // namespace

TEST_CASE("shm: who connects has no answers to give, which would be taken for another's") {
  Node node("target");
  const Fd segment = sealed_memory("link", link_segment_bytes(1), true);
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
  const Fd segment = sealed_memory("link", link_segment_bytes(1), true);
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
  const Address target = make_identity("target", transport_bit(TransportKind::kShm), 1);
  const Fd listener(socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0));
  socklen_t length = 0;
  const sockaddr_un name = control_socket_of(target, &length);
  REQUIRE(bind(listener.get(), reinterpret_cast<const sockaddr*>(&name), length) == 0);
  REQUIRE(listen(listener.get(), 1) == 0);
  node.transport.connect(std::make_shared<const Address>(target));
  const Fd socket(accept4(listener.get(), nullptr, nullptr, SOCK_CLOEXEC));
  REQUIRE(next_packet(node, socket.get()) == kHello);
  const Fd home = sealed_memory("home", sizeof(HomeSegment), true);
  const Fd bell(eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK));
  Writer welcome;
  welcome.put(static_cast<uint8_t>(kWelcome));
  welcome.put(uint64_t{1});
  const int fds[] = {home.get(), bell.get()};
  REQUIRE(send_packet(socket.get(), welcome.bytes(), fds));
  REQUIRE(turn_until({&node}, [&] { return node.sink.ups == 1; }));

  Writer import;
  import.put(static_cast<uint8_t>(kImport));
  import.put(kRegionId);
  REQUIRE(send_packet(socket.get(), import.bytes(), {}));

  CHECK(next_packet(node, socket.get()) == kRefuse);
  CHECK(next_packet(node, socket.get()) == 0);
  CHECK(turn_until({&node}, [&] { return !node.sink.why_down.empty(); }));
}

}  // namespace crossrail::shm
