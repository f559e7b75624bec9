// A place for a thread to sleep, together with other descriptors and across processes: an eventfd, readable once rung.
#pragma once

#include "util/memory_map.h"

namespace crossrail {

class WakeEvent {
 public:
  WakeEvent() = default;
  // Throws TransportError.
  static WakeEvent create();
  // Takes what a peer sent: must be an eventfd, since writing to anything else could block or kill us. Throws
  // UsageError.
  static WakeEvent adopt(Fd fd);

  int fd() const { return fd_.get(); }
  void ring() const;     // any thread or process; never blocks
  void silence() const;  // any thread; unreadable until the next ring

 private:
  explicit WakeEvent(Fd fd) : fd_(static_cast<Fd&&>(fd)) {}
  Fd fd_;
};

}  // namespace crossrail
