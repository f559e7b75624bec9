// Pins a thread to one core.
#pragma once

#include <pthread.h>

#include <cstdint>

namespace crossrail::moe {

// From now on the thread runs on that core only. Throws UsageError, which calls the number proxy_cpu, if this process
// may not use it.
void pin_thread(pthread_t thread, int32_t cpu);

}  // namespace crossrail::moe
