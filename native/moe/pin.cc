#include "moe/pin.h"

#include <sched.h>

#include <string>

#include "util/errors.h"

namespace crossrail::moe {

namespace {

std::string allowed_cpus() {
  cpu_set_t set;
  CPU_ZERO(&set);
  if (sched_getaffinity(0, sizeof set, &set) != 0) return "nobody knows which";
  std::string text;
  for (int cpu = 0; cpu < CPU_SETSIZE; ++cpu) {
    if (CPU_ISSET(cpu, &set)) text += (text.empty() ? "" : ", ") + std::to_string(cpu);
  }
  return text;
}

}  // namespace

void pin_thread(pthread_t thread, int32_t cpu) {
  cpu_set_t set;
  CPU_ZERO(&set);
  const bool is_cpu = cpu >= 0 && cpu < CPU_SETSIZE;
  if (is_cpu) CPU_SET(static_cast<size_t>(cpu), &set);
  if (!is_cpu || pthread_setaffinity_np(thread, sizeof set, &set) != 0) {
    throw UsageError("proxy_cpu is " + std::to_string(cpu) +
                     ", and a thread of this process cannot run there; it may on " + allowed_cpus());
  }
}

}  // namespace crossrail::moe
