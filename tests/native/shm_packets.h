// A process of this host that is no engine: what it says at a control socket, and the memory that it passes there.
#pragma once

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <span>
#include <string>

#include "transport/shm/control_connection.h"
#include "transport/shm/layout.h"
#include "util/codec.h"
#include "util/memory_map.h"

namespace crossrail::shm {

inline sockaddr_un control_socket_of(const Address& engine, socklen_t* length) {
  sockaddr_un address{};
  address.sun_family = AF_UNIX;
  const std::string name = "crossrail." + to_hex(engine.incarnation);
  std::memcpy(address.sun_path + 1, name.data(), name.size());
  *length = static_cast<socklen_t>(offsetof(sockaddr_un, sun_path) + 1 + name.size());
  return address;
}

// False: cut off.
inline bool send_packet(int socket, std::span<const uint8_t> bytes, std::span<const int> fds) {
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
  return sendmsg(socket, &header, MSG_NOSIGNAL) >= 0;
}

// Zero, or with what a segment begins with. No descriptor: there is no memory.
inline Fd sealed_memory(const char* name, size_t bytes, uint32_t magic) {
  Fd fd(memfd_create(name, MFD_CLOEXEC | MFD_ALLOW_SEALING));
  const uint32_t head[] = {magic, kLayoutVersion, 1};
  const bool is_whole = fd && ftruncate(fd.get(), static_cast<off_t>(bytes)) == 0 &&
                        (magic == 0 || pwrite(fd.get(), head, sizeof head, 0) == sizeof head) &&
                        fcntl(fd.get(), F_ADD_SEALS, F_SEAL_SHRINK | F_SEAL_GROW) == 0;
  return is_whole ? std::move(fd) : Fd();
}

// Of one rail.
inline Bytes honest_hello(Address own) {
  Writer writer;
  writer.put(static_cast<uint8_t>(kHello));
  writer.put(kControlVersion);
  writer.put(kLayoutVersion);
  writer.put(uint64_t{1});
  writer.put(uint8_t{1});
  writer.put_bytes(own.encode());
  return std::move(writer.bytes());
}

}  // namespace crossrail::shm
