// What a thread sleeps on: one descriptor that is readable if a completion came after arm(), the device has an event,
// or a route was found.
#pragma once

#include <atomic>
#include <vector>

#include "transport/verbs/handles.h"
#include "util/memory_map.h"

namespace crossrail::verbs {

// Threads: progress holder, except where marked [any].
// An epoll set of three edge-triggered descriptors: hush() silences it by consuming the edges, without reading the
// sources, so it may run concurrently with a holder that does; a new event is a new edge, so none is lost between the
// two.
class Sleeper {
 public:
  explicit Sleeper(ibv_context* context);  // throws TransportError

  ibv_comp_channel* channel() const { return channel_.get(); }
  void arm(ibv_cq* sends, ibv_cq* receives);
  // A completion was seen: a ring from the last arm() may still be in the set.
  void saw_completion() { may_have_rung_ = may_have_rung_ || is_armed_; }
  // Did a sleeper find the device's own events?
  bool take_device_news() { return device_news_.exchange(false, std::memory_order_acquire); }  // with hush()
  bool has_device_news() const { return device_news_.load(std::memory_order_relaxed); }        // late: at the next look
  void ring();                                                                                 // [any]
  void hush();                                                                                 // [any]
  const std::vector<int>& fds() const { return fds_; }                                         // [any]
  void abandon_after_fork();

 private:
  void drain_channel();
  Channel channel_;
  Fd set_;
  Fd bell_;
  std::vector<int> fds_;
  bool is_armed_ = false;
  bool may_have_rung_ = false;
  std::atomic<bool> has_rung_{false};  // the channel's edge was consumed, with its content still there
  std::atomic<bool> device_news_{false};
};

}  // namespace crossrail::verbs
