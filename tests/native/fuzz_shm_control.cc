// A process of this host at an engine's control socket: packets of its own making, with file descriptors or without. The
// engine's control thread lives on, and answers whoever is honest.
#include <fcntl.h>
#include <poll.h>
#include <sys/eventfd.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#include <cstddef>
#include <cstring>

#include "fuzz.h"
#include "transport/identity.h"
#include "transport/shm/control_connection.h"
#include "transport/shm/layout.h"
#include "transport/shm/shm_transport.h"
#include "util/codec.h"

namespace crossrail::fuzz {
namespace {

constexpr uint64_t kRegionId = uint64_t{1} << 16 | 1;

class Victim {
 public:
  Victim() {
    TransportOptions options;
    options.identity = make_identity("victim", transport_bit(TransportKind::kShm), 1);
    options.message_bytes_max = 64 << 10;
    options.connect_timeout_ns = 2'000'000'000;
    transport_ = std::make_unique<shm::ShmTransport>(options, &sink_);
    transport_->complete_address(transport_->address());
    region_ = transport_->allocate(kRegionId, 8192, true);
  }
  const Address& address() const { return transport_->address(); }
  void turn() {
    while (transport_->poll() > 0) {
    }
  }

 private:
  BookSink sink_;
  std::unique_ptr<shm::ShmTransport> transport_;
  std::unique_ptr<LocalRegion> region_;
};

// Shared memory that looks like a home or a link, or like nothing, and a bell; the same four for all inputs.
struct Memory {
  Memory() {
    home = make("home", sizeof(shm::HomeSegment), true);
    link = make("link", shm::link_segment_bytes(1), true);
    other = make("other", 4096, false);
    bell = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
  }
  static int make(const char* name, size_t bytes, bool has_magic) {
    const int fd = memfd_create(name, MFD_CLOEXEC | MFD_ALLOW_SEALING);
    require(fd >= 0 && ftruncate(fd, static_cast<off_t>(bytes)) == 0, "there is memory");
    const uint32_t head[] = {shm::kLayoutMagic, shm::kLayoutVersion, 1};
    if (has_magic) require(pwrite(fd, head, sizeof head, 0) == sizeof head, "and it is written");
    require(fcntl(fd, F_ADD_SEALS, F_SEAL_SHRINK | F_SEAL_GROW) == 0, "and it keeps its size");
    return fd;
  }
  int home, link, other, bell;
};

class Stranger {
 public:
  explicit Stranger(Victim* victim) : victim_(victim), fd_(socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0)) {
    sockaddr_un to{};
    to.sun_family = AF_UNIX;
    const std::string name = "crossrail." + to_hex(victim->address().incarnation);
    std::memcpy(to.sun_path + 1, name.data(), name.size());
    const auto bytes = static_cast<socklen_t>(offsetof(sockaddr_un, sun_path) + 1 + name.size());
    require(fd_ >= 0 && connect(fd_, reinterpret_cast<const sockaddr*>(&to), bytes) == 0, "the victim listens");
  }
  ~Stranger() { close(fd_); }

  // False: cut off.
  bool say(Input bytes, std::span<const int> fds) {
    iovec vector{.iov_base = const_cast<uint8_t*>(bytes.data()), .iov_len = bytes.size()};
    alignas(cmsghdr) char ancillary[CMSG_SPACE(sizeof(int) * 4)] = {};
    msghdr header{};
    header.msg_iov = &vector;
    header.msg_iovlen = 1;
    if (!fds.empty()) {
      header.msg_control = ancillary;
      header.msg_controllen = CMSG_SPACE(sizeof(int) * fds.size());
      cmsghdr* const item = CMSG_FIRSTHDR(&header);
      item->cmsg_level = SOL_SOCKET;
      item->cmsg_type = SCM_RIGHTS;
      item->cmsg_len = CMSG_LEN(sizeof(int) * fds.size());
      std::memcpy(CMSG_DATA(item), fds.data(), sizeof(int) * fds.size());
    }
    return sendmsg(fd_, &header, MSG_NOSIGNAL) >= 0;
  }

  // Until the control thread has dealt with what was said: it answers everything, by a packet or by hanging up.
  // Returns the first byte of it, its type; 0 of the latter.
  uint8_t await_answer() {
    for (int tries = 0; tries < 2000; ++tries) {
      pollfd watched{.fd = fd_, .events = POLLIN, .revents = 0};
      const int ready = ::poll(&watched, 1, 1);
      victim_->turn();
      if (ready <= 0) continue;
      uint8_t bytes[2048];
      // Descriptors that came along are dropped by the kernel.
      return recv(fd_, bytes, sizeof bytes, MSG_DONTWAIT) > 0 ? bytes[0] : 0;
    }
    require(false, "the control thread answers within two seconds");
    return 0;
  }

 private:
  Victim* const victim_;
  const int fd_;
};

Bytes honest_hello(const Address& victim) {
  Writer writer;
  writer.put(static_cast<uint8_t>(shm::kHello));
  writer.put(shm::kControlVersion);
  writer.put(shm::kLayoutVersion);
  writer.put(uint64_t{1});
  writer.put(uint8_t{1});
  Address own = victim;
  own.incarnation.fill(0x11);
  own.name = "fuzzer";
  writer.put_bytes(own.encode());
  return std::move(writer.bytes());
}

}  // namespace
}  // namespace crossrail::fuzz

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  using namespace crossrail;
  using namespace crossrail::fuzz;
  static auto* const victim = new Victim;  // one for all inputs: it has to survive each of them
  static const Memory memory;
  Choices choices({data, size});
  Stranger stranger(victim);
  const int known[] = {memory.home, memory.link, memory.other, memory.bell};
  if (choices.byte() % 2 == 0) {
    const int fds[] = {memory.home, memory.bell, memory.link};
    stranger.say(honest_hello(victim->address()), fds);
    require(stranger.await_answer() == shm::kWelcome, "an honest stranger is welcome");
  }
  for (int packets = 0; packets < 8 && !choices.is_empty(); ++packets) {
    std::vector<int> fds(choices.byte() % 5);
    for (int& fd : fds) fd = known[choices.byte() % 4];
    const Input body = choices.chunk();
    if (body.empty()) continue;  // a packet without bytes cannot be told from the end
    if (!stranger.say(body, fds)) break;
  }
  const uint8_t ping[] = {shm::kPing};
  if (stranger.say(ping, {})) stranger.await_answer();
  return 0;
}
