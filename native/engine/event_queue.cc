#include "engine/event_queue.h"

#include <utility>

namespace crossrail {

void EventQueue::add(EngineEvent event) {
  std::lock_guard lock(mutex_);
  if (events_.size() == kKept) events_.erase(events_.begin());
  events_.push_back(std::move(event));
  if (notifier_) notifier_->post(cookie_);
}

void EventQueue::wake() {
  std::lock_guard lock(mutex_);
  if (notifier_) notifier_->post(cookie_);
}

void EventQueue::set_notifier(Notifier* notifier, uint64_t cookie) {
  std::lock_guard lock(mutex_);
  notifier_ = Ref<Notifier>::share(notifier);
  cookie_ = cookie;
  if (!events_.empty() && notifier != nullptr) notifier->post(cookie);
}

std::vector<EngineEvent> EventQueue::take() {
  std::lock_guard lock(mutex_);
  return std::exchange(events_, {});
}

}  // namespace crossrail
