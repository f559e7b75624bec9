// What an address or a descriptor resolved to in the engine that it was last used with.
#pragma once

#include <utility>

#include "bindings/fork.h"

namespace crossrail::bindings {

class EngineHandle;

// Node of a ring. Invariant: a node that is in no ring points at itself.
struct RingNode {
  RingNode() = default;
  RingNode(const RingNode&) = delete;
  RingNode& operator=(const RingNode&) = delete;
  ~RingNode() { unlink(); }

  bool alone() const { return next == this; }
  void insert_after(RingNode* other) {
    unlink();
    prev = other;
    next = other->next;
    prev->next = this;
    next->prev = this;
  }
  void unlink() {
    prev->next = next;
    next->prev = prev;
    prev = next = this;
  }

  RingNode* prev = this;
  RingNode* next = this;
};

// Holds one resolved reference, so that a submit needs no look-up. The engine knows all slots that hold something of
// its own, and empties them when it closes or forgets a peer, so a long-lived descriptor does not keep a closed engine
// alive.
// Invariant: engine_ != nullptr exactly while this node is in that engine's ring.
// Threads: the holder of the GIL. A caller that releases the GIL copies the Ref first.
template <typename T>
class CacheSlot : public RingNode {
 public:
  CacheSlot() = default;
  // Moving an address or a descriptor leaves the cache behind.
  CacheSlot(CacheSlot&&) noexcept {}

  const Ref<T>* find(const EngineHandle* engine) const { return engine_ == engine ? &value_.ref() : nullptr; }
  const Ref<T>& fill(EngineHandle* engine, RingNode* ring, Ref<T> value) {
    value_ = Held<T>(std::move(value));
    engine_ = engine;
    insert_after(ring);
    return value_.ref();
  }
  void drop() {
    unlink();
    engine_ = nullptr;
    value_.reset();
  }

 private:
  EngineHandle* engine_ = nullptr;
  Held<T> value_;
};

}  // namespace crossrail::bindings
