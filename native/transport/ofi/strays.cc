#include "transport/ofi/strays.h"

#include <netinet/in.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <unistd.h>

#include <charconv>
#include <cstring>
#include <optional>
#include <span>

#include "util/directory.h"

namespace crossrail::ofi {

namespace {

// The part of a socket address that identifies it: port and IP address.
Name key_of(std::span<const uint8_t> address) {
  sa_family_t family = AF_UNSPEC;
  if (address.size() >= sizeof family) std::memcpy(&family, address.data(), sizeof family);
  const auto part = [&](size_t at, size_t bytes) {
    return std::vector<uint8_t>(address.begin() + static_cast<std::ptrdiff_t>(at),
                                address.begin() + static_cast<std::ptrdiff_t>(at + bytes));
  };
  if (family == AF_INET && address.size() >= sizeof(sockaddr_in))
    return part(offsetof(sockaddr_in, sin_port), sizeof(in_port_t) + sizeof(in_addr));
  if (family != AF_INET6 || address.size() < sizeof(sockaddr_in6)) return {};
  Name key = part(offsetof(sockaddr_in6, sin6_port), sizeof(in_port_t));
  const Name ip = part(offsetof(sockaddr_in6, sin6_addr), sizeof(in6_addr));
  key.insert(key.end(), ip.begin(), ip.end());
  return key;
}

// For a connected socket; empty for everything else.
Name local_key_of(int fd) {
  sockaddr_storage storage{};
  socklen_t bytes = sizeof storage;
  if (getpeername(fd, reinterpret_cast<sockaddr*>(&storage), &bytes) != 0) return {};
  bytes = sizeof storage;
  if (getsockname(fd, reinterpret_cast<sockaddr*>(&storage), &bytes) != 0) return {};
  return key_of({reinterpret_cast<const uint8_t*>(&storage), bytes});
}

std::optional<ino_t> inode_of(int fd) {
  struct stat about{};
  return fstat(fd, &about) == 0 ? std::optional(about.st_ino) : std::nullopt;
}

}  // namespace

Strays::Strays(const Name& address) {
  const Name wanted = key_of(address);
  if (wanted.empty()) return;
  for (const std::string& name : names_in("/proc/self/fd")) {  // without /proc nothing is found
    int fd = -1;
    std::from_chars(name.data(), name.data() + name.size(), fd);
    if (fd < 0 || local_key_of(fd) != wanted) continue;
    if (const auto inode = inode_of(fd)) found_.push_back({fd, *inode});
  }
}

void Strays::close() const {
  for (const Stray& stray : found_) {
    if (inode_of(stray.fd) != stray.inode) continue;
    shutdown(stray.fd, SHUT_RDWR);
    ::close(stray.fd);
  }
}

}  // namespace crossrail::ofi
