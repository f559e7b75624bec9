// Streams of our own.
#pragma once

#include "device/cuda.h"

namespace crossrail::device {

// A stream that neither waits for the default stream nor makes it wait, with high priority if the driver has
// priorities: streams of different priorities do not share a hardware queue, in which work launched behind a waiting
// kernel would have to wait, too. The GPU's context is current. Returns the driver's code.
inline int make_stream(const Driver& driver, void** stream) {
  constexpr unsigned kNonBlocking = 1;  // cuda.h: CU_STREAM_NON_BLOCKING
  *stream = nullptr;
  int least = 0;
  int greatest = 0;
  if (driver.create_stream_with_priority != nullptr && driver.stream_priorities != nullptr &&
      driver.stream_priorities(&least, &greatest) == 0) {
    return driver.create_stream_with_priority(stream, kNonBlocking, greatest);
  }
  return driver.create_stream(stream, kNonBlocking);
}

}  // namespace crossrail::device
