// A process of this host at an engine's control socket: packets of its own making, with file descriptors or without.
// The engine's control thread lives on, and answers whoever is honest.
#include <poll.h>
#include <sys/eventfd.h>

#include "fuzz.h"
#include "shm_packets.h"
#include "transport/identity.h"
#include "transport/shm/shm_transport.h"

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

// Shared memory that looks like that of an engine or a link, or like nothing, and a bell; the same five for all inputs.
struct Memory {
  Memory() {
    home = make("home", sizeof(shm::HomeSegment), shm::kLayoutMagic);
    open = make("open", sizeof(shm::OpenRegions), shm::kOpenRegionsMagic);
    link = make("link", shm::link_segment_bytes(1), shm::kLayoutMagic);
    other = make("other", 4096, 0);
    bell = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
  }
  static int make(const char* name, size_t bytes, uint32_t magic) {
    Fd fd = shm::sealed_memory(name, bytes, magic);
    require(static_cast<bool>(fd), "there is memory, written, and it keeps its size");
    return fd.leak();
  }
  int home, open, link, other, bell;
};

class Stranger {
 public:
  explicit Stranger(Victim* victim) : victim_(victim), fd_(socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0)) {
    socklen_t bytes = 0;
    const sockaddr_un to = shm::control_socket_of(victim->address(), &bytes);
    require(fd_ >= 0 && connect(fd_, reinterpret_cast<const sockaddr*>(&to), bytes) == 0, "the victim listens");
  }
  ~Stranger() { close(fd_); }

  // False: cut off.
  bool say(Input bytes, std::span<const int> fds) { return shm::send_packet(fd_, bytes, fds); }

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

Bytes hello_to(const Address& victim) {
  Address own = victim;
  own.incarnation.fill(0x11);
  own.name = "fuzzer";
  return shm::honest_hello(own);
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
  const int known[] = {memory.home, memory.open, memory.link, memory.other, memory.bell};
  if (choices.byte() % 2 == 0) {
    const int fds[] = {memory.home, memory.open, memory.bell, memory.link};
    stranger.say(hello_to(victim->address()), fds);
    require(stranger.await_answer() == shm::kWelcome, "an honest stranger is welcome");
  }
  for (int packets = 0; packets < 8 && !choices.is_empty(); ++packets) {
    std::vector<int> fds(choices.byte() % 5);
    for (int& fd : fds) fd = known[choices.byte() % std::size(known)];
    const Input body = choices.chunk();
    if (body.empty()) continue;  // a packet without bytes cannot be told from the end
    if (!stranger.say(body, fds)) break;
  }
  const uint8_t ping[] = {shm::kPing};
  if (stranger.say(ping, {})) stranger.await_answer();
  return 0;
}
