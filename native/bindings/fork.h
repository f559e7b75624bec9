// What a forked child may do with inherited handles: nothing.
//
// The child has a copy of the parent's memory but none of its threads, and locks stay as they were at the fork. So in
// the child every use of an inherited handle throws, and dropping one leaks the native object instead of destroying it.
#pragma once

#include <cstdint>
#include <utility>

#include "util/ref.h"

namespace crossrail::bindings {

// Number of forks between this process and the one that loaded the module. Changed only in a new child, before it runs
// anything else.
extern uint32_t fork_generation;

// Registers the handler that counts forks. Called once, when the module is loaded.
void watch_forks();

// EngineClosedError naming both processes and what to do.
[[noreturn]] void throw_forked();

// A Python object's strong reference to a native one.
// Threads: as Ref; the holder of the GIL.
template <typename T>
class Held {
 public:
  Held() = default;
  explicit Held(Ref<T> ref) : ref_(std::move(ref)), generation_(fork_generation) {}
  Held(Held&& other) noexcept = default;
  Held& operator=(Held&& other) noexcept {
    std::swap(ref_, other.ref_);
    std::swap(generation_, other.generation_);
    return *this;
  }
  Held(const Held&) = delete;
  Held& operator=(const Held&) = delete;
  ~Held() {
    if (inherited()) ref_.leak();
  }

  bool inherited() const { return generation_ != fork_generation; }
  const Ref<T>& ref() const {
    if (inherited()) [[unlikely]]
      throw_forked();
    return ref_;
  }
  T& operator*() const { return *ref(); }
  T* operator->() const { return ref().get(); }
  explicit operator bool() const { return static_cast<bool>(ref_); }
  void reset() { *this = Held(); }

 private:
  Ref<T> ref_;
  uint32_t generation_ = fork_generation;
};

}  // namespace crossrail::bindings
