// One way to sleep, whatever the transports are.
#pragma once

#include <atomic>
#include <span>
#include <vector>

#include "transport/transport.h"
#include "util/memory_map.h"
#include "util/wake_event.h"

namespace crossrail {

// Where two threads of an engine sleep until one of its transports has news: in front, a thread that waits for
// something; behind it the worker, which news wakes only while nobody is in front. So a message wakes the thread that
// waits for it directly, rather than the worker, which would then have to wake that thread.
// Both may return early without news. A thread that news has woken drives the engine or makes sure that another does:
// nobody else was told. What a sleeper must do beforehand is in transport.h. A call made before its sleeper arrives is
// kept for it.
class SleepingPlace {
 public:
  // The transports must outlive its sleepers. Throws TransportError.
  explicit SleepingPlace(std::span<Transport* const> transports);

  // If false, at most one thread may sleep, in front or behind: the transport's descriptor is an epoll set that already
  // nests others (libfabric's tcp) as deeply, or in such number, as Linux allows.
  bool has_front() const { return static_cast<bool>(behind_); }
  // [any] False: the place is taken. Whoever takes it is the one to drive until it leaves, asleep or awake.
  bool take_front();
  void leave_front();
  // Sleeps until a transport rings, a call comes, or the deadline passes. One thread at a time in each place. True:
  // news woke it.
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
  Fd behind_;  // an epoll set of the transports' descriptors, used while nobody is in front
};

}  // namespace crossrail
