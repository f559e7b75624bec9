// Intrusive reference counting: one pointer per handle, one counter per object, no control block.
#pragma once

#include <atomic>
#include <cstdint>
#include <utility>

namespace crossrail {

// Base of shared objects. T must be the most derived type that `delete` is right for, or have a virtual destructor.
// Invariant: the object lives while refs_ > 0; a new object starts at 1, owned by the Ref that adopts it.
template <typename T>
class RefCounted {
 public:
  RefCounted(const RefCounted&) = delete;
  RefCounted& operator=(const RefCounted&) = delete;

  // relaxed: whoever adds a reference already holds one, so the object cannot vanish meanwhile.
  void add_ref() const { refs_.fetch_add(1, std::memory_order_relaxed); }

  // Nobody else has a reference: permanently true if new ones come only from the holder of this one. acquire: what
  // others did with theirs has happened, and is visible; pairs with release().
  bool is_only_ref() const { return refs_.load(std::memory_order_acquire) == 1; }

  void release() const {
    // release: our last uses happen before the delete. acquire: whoever deletes sees everybody else's uses. Each pairs
    // with the other, in the same line of another thread.
    if (refs_.fetch_sub(1, std::memory_order_acq_rel) == 1) {
      static_cast<T*>(const_cast<RefCounted*>(this))->destroy();
    }
  }

 protected:
  RefCounted() = default;
  ~RefCounted() = default;
  void destroy() { delete static_cast<T*>(this); }

 private:
  mutable std::atomic<uint32_t> refs_{1};
};

// Smart pointer to a RefCounted.
template <typename T>
class Ref {
 public:
  Ref() = default;
  Ref(std::nullptr_t) {}
  // Takes over one reference that the caller owns.
  static Ref adopt(T* object) {
    Ref ref;
    ref.object_ = object;
    return ref;
  }
  // Adds a reference to an object that something else keeps alive.
  static Ref share(T* object) {
    if (object != nullptr) object->add_ref();
    return adopt(object);
  }
  Ref(const Ref& other) : object_(other.object_) {
    if (object_ != nullptr) object_->add_ref();
  }
  Ref(Ref&& other) noexcept : object_(std::exchange(other.object_, nullptr)) {}
  Ref& operator=(Ref other) noexcept {
    std::swap(object_, other.object_);
    return *this;
  }
  ~Ref() {
    if (object_ != nullptr) object_->release();
  }

  T* get() const { return object_; }
  T* operator->() const { return object_; }
  T& operator*() const { return *object_; }
  explicit operator bool() const { return object_ != nullptr; }
  bool operator==(const Ref& other) const { return object_ == other.object_; }
  // Hands the reference to the caller.
  T* leak() { return std::exchange(object_, nullptr); }

 private:
  T* object_ = nullptr;
};

}  // namespace crossrail
