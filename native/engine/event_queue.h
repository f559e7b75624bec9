// Events that happened and that nobody has taken yet.
#pragma once

#include <cstdint>
#include <mutex>
#include <vector>

#include "engine/engine.h"
#include "engine/notifier.h"
#include "util/ref.h"

namespace crossrail {

// All functions: any thread.
class EventQueue {
 public:
  // Tells the notifier. For a user who never asks, it keeps the newest events: they say most.
  void add(EngineEvent event);
  // Tells the notifier that nothing more will come.
  void wake();
  // Posts this cookie to the notifier (null: none) from now on, and at once if there are events.
  void set_notifier(Notifier* notifier, uint64_t cookie);
  // All events, oldest first.
  std::vector<EngineEvent> take();

 private:
  static constexpr size_t kKept = 1024;

  std::mutex mutex_;
  std::vector<EngineEvent> events_;
  Ref<Notifier> notifier_;
  uint64_t cookie_ = 0;
};

}  // namespace crossrail
