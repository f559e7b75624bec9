// A thread on one core.
#pragma once

#include <pthread.h>

#include <cstdint>

namespace crossrail::moe {

// From now on it runs on that core alone. Throws UsageError, which calls the number proxy_cpu, where this process may
// not.
void pin_thread(pthread_t thread, int32_t cpu);

}  // namespace crossrail::moe
