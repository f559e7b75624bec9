// The future events of a world, ordered by time.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

namespace crossrail::sim {

enum class EventKind : uint32_t {
  kTurn,      // of actor `what`
  kTimer,     // of actor `what`
  kDeed,      // number `what`: a scheduled fault
  kReach,     // work `what` reaches the peer's wire
  kPart,      // part `detail` of work `what` arrives
  kNotice,    // the immediate of work `what` is reported
  kDone,      // work `what` is reported
  kFragment,  // parcel `what` arrives
  kDatagram,  // parcel `what` arrives
  kFlush      // path `what` has nothing in flight at its NIC any more
};

// Invariant: no two events are equal: `number` counts them.
struct Event {
  int64_t at_ns;
  uint64_t number;
  EventKind kind;
  uint32_t what;
  uint64_t detail;
};

// A heap with four children per node: half the levels of a binary one, and levels are cache misses.
class EventQueue {
 public:
  bool empty() const { return heap_.empty(); }
  size_t size() const { return heap_.size(); }
  const Event& top() const { return heap_.front(); }

  void push(int64_t at_ns, EventKind kind, uint32_t what, uint64_t detail = 0) {
    const Event event{at_ns, next_number_++, kind, what, detail};
    size_t at = heap_.size();
    heap_.push_back(event);
    while (at > 0) {
      const size_t parent = (at - 1) / 4;
      if (!before(event, heap_[parent])) break;
      heap_[at] = heap_[parent];
      at = parent;
    }
    heap_[at] = event;
  }

  Event pop() {
    const Event first = heap_.front();
    const Event last = heap_.back();
    heap_.pop_back();
    const size_t count = heap_.size();
    if (count == 0) return first;
    size_t at = 0;
    for (;;) {
      const size_t child = 4 * at + 1;
      if (child >= count) break;
      size_t least = child;
      for (size_t other = child + 1; other < child + 4 && other < count; ++other) {
        if (before(heap_[other], heap_[least])) least = other;
      }
      if (!before(heap_[least], last)) break;
      heap_[at] = heap_[least];
      at = least;
    }
    heap_[at] = last;
    return first;
  }

 private:
  static bool before(const Event& a, const Event& b) {
    return a.at_ns != b.at_ns ? a.at_ns < b.at_ns : a.number < b.number;
  }
  std::vector<Event> heap_;
  uint64_t next_number_ = 0;
};

}  // namespace crossrail::sim
