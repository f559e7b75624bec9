#include "transport/sim/visitors.h"

#include "util/clock.h"

namespace crossrail::sim {

Visitors::Visitor& Visitors::find() {
  const std::thread::id thread = std::this_thread::get_id();
  for (last_ = 0; last_ < visitors_.size(); ++last_) {
    if (visitors_[last_].thread == thread) return visitors_[last_];
  }
  visitors_.push_back({.thread = thread});
  return visitors_.back();
}

void Visitors::begin_wait() {
  Visitor& visitor = self();
  ++visitor.waits;
  visitor.looked = moves_ - 1;  // not yet; when it returns it will have seen what had moved when it last went to look
}

void Visitors::end_wait() {
  Visitor& visitor = self();
  --visitor.waits;
  ++visitor.acts;
}

bool Visitors::others_act() {
  if (visitors_.size() == 1) return false;
  const std::thread::id thread = std::this_thread::get_id();
  const int64_t now = now_ns();
  bool any = false;
  for (Visitor& visitor : visitors_) {
    if (visitor.thread == thread || (visitor.waits > 0 && visitor.looked == moves_)) continue;
    if (visitor.acts != visitor.acts_seen || visitor.seen_since_ns == 0) {
      visitor.acts_seen = visitor.acts;
      visitor.seen_since_ns = now;
    }
    any = any || now - visitor.seen_since_ns < kPatienceNs;
  }
  return any;
}

}  // namespace crossrail::sim
