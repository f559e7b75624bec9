// Faults of one kind that are on in one place, such as a rail that is down. Several may overlap, each of which begins
// and ends by itself: the place is well again when none is left.
#pragma once

#include <cstdint>
#include <vector>

namespace crossrail::sim {

// Names a fault among those of its kind and place, so that its end ends no other.
using FaultNumber = uint64_t;
// To begin: a fault that lasts until all are ended. To end: all that are on.
inline constexpr FaultNumber kEveryFault = 0;

// Threads: whoever has the world's lock.
class StandingFaults {
 public:
  // value: what kind of fault it is, if there are several.
  void begin(FaultNumber number, uint32_t value = 0) {
    if (number == kEveryFault) drop(number);  // one such is enough: they end together
    faults_.push_back({number, value});
  }
  // One that is not on any more: no effect.
  void end(FaultNumber number) {
    if (number == kEveryFault) {
      faults_.clear();
    } else {
      drop(number);
    }
  }
  void change(bool begins, FaultNumber number) { begins ? begin(number) : end(number); }
  bool any() const { return !faults_.empty(); }
  // Of the one that began last.
  uint32_t value_or(uint32_t none) const { return faults_.empty() ? none : faults_.back().value; }

 private:
  struct Fault {
    FaultNumber number;
    uint32_t value;
  };
  void drop(FaultNumber number) {
    std::erase_if(faults_, [number](const Fault& fault) { return fault.number == number; });
  }
  std::vector<Fault> faults_;  // in the order of their begins
};

}  // namespace crossrail::sim
