// A tcp transport with one region, for fuzzers that connect to it.
#pragma once

#include <arpa/inet.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <sys/socket.h>
#include <unistd.h>

#include "fuzz.h"
#include "tls_files.h"
#include "transport/identity.h"
#include "transport/tcp/tcp_transport.h"

namespace crossrail::fuzz {

using namespace tcp;

inline constexpr size_t kRegionBytes = 4096;
inline constexpr uint64_t kRegionId = uint64_t{1} << 16 | 1;
inline constexpr size_t kGuardBytes = 256;

class Victim {
 public:
  // tls: null: in the clear.
  explicit Victim(const TestTls* tls = nullptr) : memory_(kRegionBytes + 2 * kGuardBytes, std::byte{0x5a}) {
    TransportOptions options;
    options.identity = make_identity("victim", transport_bit(TransportKind::kTcp), 1);
    options.rails = {"127.0.0.1"};
    options.message_bytes_max = 64 << 10;
    if (tls != nullptr) options.tls = tls->options();
    options.connect_timeout_ns = options.peer_timeout_ns = 1'000'000'000;
    transport_ = std::make_unique<TcpTransport>(options, &sink_);
    transport_->complete_address(transport_->address());
    region_ = transport_->register_memory(kRegionId, memory_.data() + kGuardBytes, kRegionBytes, Access::kRemoteWrite);
  }

  // A connection to it.
  int dial() const {
    const int fd = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
    sockaddr_in to{};
    to.sin_family = AF_INET;
    to.sin_port = htons(address().endpoints[0].port);
    to.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    require(fd >= 0 && connect(fd, reinterpret_cast<const sockaddr*>(&to), sizeof to) == 0, "the victim listens");
    const int on = 1;
    setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &on, sizeof on);
    return fd;
  }
  // Where it lets peers write.
  std::span<std::byte> region() { return std::span(memory_).subspan(kGuardBytes, kRegionBytes); }
  const Address& address() const { return transport_->address(); }
  void turn() {
    while (transport_->poll() > 0) {
    }
  }
  void check_guards() const {
    const auto is_whole = [&](size_t from) {
      return std::all_of(memory_.begin() + static_cast<ptrdiff_t>(from),
                         memory_.begin() + static_cast<ptrdiff_t>(from + kGuardBytes),
                         [](std::byte byte) { return byte == std::byte{0x5a}; });
    };
    require(is_whole(0) && is_whole(kGuardBytes + kRegionBytes), "nothing is written outside the region");
  }

 private:
  BookSink sink_;
  std::vector<std::byte> memory_;
  std::unique_ptr<TcpTransport> transport_;
  std::unique_ptr<LocalRegion> region_;
};

// By a reset: else ports run out.
inline void hang_up(int fd) {
  const linger reset{.l_onoff = 1, .l_linger = 0};
  setsockopt(fd, SOL_SOCKET, SO_LINGER, &reset, sizeof reset);
  close(fd);
}

}  // namespace crossrail::fuzz
