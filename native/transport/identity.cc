#include "transport/identity.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <string_view>

#include "util/entropy.h"
#include "util/errors.h"
#include "util/memory_map.h"

namespace crossrail {

Address make_identity(const std::string& name, uint32_t transports, uint32_t rail_count) {
  Address address;
  address.transports = transports;
  address.name = name;
  address.host = host_identity();
  address.net = network_namespace();
  address.pid = static_cast<uint32_t>(getpid());
  address.rail_count = static_cast<uint8_t>(rail_count);
  kernel_entropy().fill(address.incarnation);
  return address;
}

Address make_identity_on(Simulation& simulation, uint32_t host, const std::string& name, uint32_t transports) {
  Address address;
  address.transports = transports;
  address.name = name;
  address.host = simulation.host_name(host);
  simulation.fill(address.incarnation);
  return address;
}

namespace {

// Empty if /proc does not tell. A lack of descriptors says nothing about the host, and is passed on.
std::string read_boot_id() {
  const Fd file(open("/proc/sys/kernel/random/boot_id", O_RDONLY | O_CLOEXEC));
  if (!file && (errno == EMFILE || errno == ENFILE || errno == ENOMEM)) {
    throw_errno("open", "cannot tell which host this is");
  }
  char text[64];
  const ssize_t length = file ? read(file.get(), text, sizeof text) : 0;
  const std::string_view found(text, static_cast<size_t>(std::max<ssize_t>(length, 0)));
  return std::string(found.substr(0, found.find('\n')));
}

}  // namespace

const std::string& host_identity() {
  // If it throws, the next engine asks again: peers compare what is kept here for as long as the process lives.
  static const std::string identity = [] {
    std::string text = read_boot_id();
    return text.empty() ? std::string(kUnknownHost) : text;
  }();
  return identity;
}

uint64_t network_namespace() {
  // The thread's, not the process's: threads may have entered another namespace, and sockets are created in the
  // thread's.
  struct stat found{};
  return stat("/proc/thread-self/ns/net", &found) == 0 ? found.st_ino : 0;
}

}  // namespace crossrail
