#include "transport/identity.h"

#include <sys/stat.h>
#include <unistd.h>

#include <fstream>

#include "util/entropy.h"

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

Address make_identity_on(Stage& stage, uint32_t host, const std::string& name, uint32_t transports) {
  Address address;
  address.transports = transports;
  address.name = name;
  address.host = stage.host_name(host);
  stage.fill(address.incarnation);
  return address;
}

const std::string& host_identity() {
  static const std::string identity = [] {
    std::ifstream file("/proc/sys/kernel/random/boot_id");
    std::string text;
    std::getline(file, text);
    return text.empty() ? std::string("unknown-host") : text.substr(0, 64);
  }();
  return identity;
}

uint64_t network_namespace() {
  // The thread's, not the process's: threads may have entered another one, and sockets are made in the thread's.
  struct stat found{};
  return stat("/proc/thread-self/ns/net", &found) == 0 ? found.st_ino : 0;
}

}  // namespace crossrail
