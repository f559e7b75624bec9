// Faults of one kind that are active in one place, such as a rail that is down. Several may overlap, each with its own
// beginning and end: the place works again when none is left.
#pragma once

#include <cstdint>
#include <vector>

namespace crossrail::sim {

// Identifies a fault among those of its kind and place, so that its end ends no other.
using FaultNumber = uint64_t;
// When beginning: a fault that lasts until all are ended. When ending: all active ones.
inline constexpr FaultNumber kEveryFault = 0;

// Threads: whoever holds the world's lock.
class StandingFaults {
 public:
  // value: the variety of fault, if there are several.
  void begin(FaultNumber number, uint32_t value = 0) {
    if (number == kEveryFault) drop(number);  // one of these is enough: they end together
    faults_.push_back({number, value});
  }
  // No effect if that fault is no longer active.
  void end(FaultNumber number) {
    if (number == kEveryFault) {
      faults_.clear();
    } else {
      drop(number);
    }
  }
  void change(bool begins, FaultNumber number) { begins ? begin(number) : end(number); }
  bool any() const { return !faults_.empty(); }
  // That of the fault that began last.
  uint32_t value_or(uint32_t none) const { return faults_.empty() ? none : faults_.back().value; }

 private:
  struct Fault {
    FaultNumber number;
    uint32_t value;
  };
  void drop(FaultNumber number) {
    std::erase_if(faults_, [number](const Fault& fault) { return fault.number == number; });
  }
  std::vector<Fault> faults_;  // in the order in which they began
};

}  // namespace crossrail::sim
