// One way of sleeping, whatever the transports are.
#pragma once

#include <atomic>
#include <span>
#include <vector>

#include "transport/transport.h"
#include "util/memory_map.h"
#include "util/wake_event.h"

namespace crossrail {

// Where two threads of an engine sleep until one of its transports has news: in front, a thread that waits for
// something, and behind it the worker, whom news wake while nobody is in front. So a message wakes the thread that
// waits for it, and not first the worker, who would then wake that thread.
// Both return early at times, without news. Who is woken by news drives, or makes sure that somebody does: nobody else
// was told. What a sleeper must do before is said in transport.h. A call is kept until its sleeper comes.
class SleepingPlace {
 public:
  // The transports must outlive its sleepers. Throws TransportError.
  explicit SleepingPlace(std::span<Transport* const> transports);

  // Without, at most one thread may sleep, in front or behind: what a transport waits for is epoll sets in epoll sets
  // (libfabric's tcp), as deep as Linux allows, or in as many.
  bool has_front() const { return static_cast<bool>(behind_); }
  // [any] False: somebody is there. Who takes it is the one to drive until he leaves, asleep or awake.
  bool take_front();
  void leave_front();
  // Until one of the transports is rung, or the call, or the deadline. One thread at a time in each. True: woken by
  // news.
  bool sleep_in_front(Deadline deadline);
  void sleep_behind(Deadline deadline);
  void call_front() const { front_call_.ring(); }    // [any]
  void call_behind() const { behind_call_.ring(); }  // [any]

 private:
  void let_news_through(bool on);
  bool take_news(const WakeEvent& call, bool looks_at_once, Deadline deadline);

  std::vector<Transport*> transports_;
  WakeEvent front_call_;
  WakeEvent behind_call_;
  std::atomic<bool> is_front_taken_{false};
  Fd behind_;  // an epoll set: of the transports' descriptors, while nobody is in front
};

}  // namespace crossrail
