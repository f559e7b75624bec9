#include "util/locked_memory.h"

#include <sys/resource.h>

namespace crossrail {

std::string locked_memory_remedy() {
  rlimit limit{};
  ::getrlimit(RLIMIT_MEMLOCK, &limit);
  const std::string may = limit.rlim_cur == RLIM_INFINITY ? "unlimited" : std::to_string(limit.rlim_cur >> 10) + " KiB";
  return "the NIC's memory has to be locked, and this process may lock " + may +
         ": raise it (`ulimit -l unlimited`; LimitMEMLOCK=infinity in systemd; --ulimit memlock=-1 for docker)";
}

}  // namespace crossrail
