// A queue in one growing ring: no allocation once it has reached its peak, and no memory while empty and released.
#pragma once

#include <algorithm>
#include <cstddef>
#include <memory>
#include <span>
#include <type_traits>
#include <utility>

namespace crossrail {

// Threads: one. T is moved when the ring grows.
template <typename T>
class RingQueue {
 public:
  bool empty() const { return size_ == 0; }
  size_t size() const { return size_; }
  T& operator[](size_t index) { return items_[(first_ + index) & (capacity_ - 1)]; }
  const T& operator[](size_t index) const { return items_[(first_ + index) & (capacity_ - 1)]; }
  T& front() { return (*this)[0]; }
  T& back() { return (*this)[size_ - 1]; }
  // The first elements, at most count_max, as far as they are contiguous: all of them, or those up to where the ring
  // wraps. Valid until something is added or removed.
  std::span<const T> first_run(size_t count_max) const {
    return {items_.get() + first_, std::min({count_max, size_, capacity_ - first_})};
  }

  T& push_back(T item) {
    if (size_ == capacity_) grow();
    T& slot = items_[(first_ + size_++) & (capacity_ - 1)];
    slot = std::move(item);
    return slot;
  }
  void push_front(T item) {
    if (size_ == capacity_) grow();
    first_ = (first_ + capacity_ - 1) & (capacity_ - 1);
    ++size_;
    items_[first_] = std::move(item);
  }
  T pop_front() {
    T item = std::move(front());
    first_ = (first_ + 1) & (capacity_ - 1);
    --size_;
    return item;
  }
  // Removes the first elements, which must not need a destructor.
  void drop_front(size_t count) {
    static_assert(std::is_trivially_destructible_v<T>);
    first_ = (first_ + count) & (capacity_ - 1);
    size_ -= count;
  }
  // Keeps the elements for which keep(item) is true, in order.
  template <typename Keep>
  void filter(Keep&& keep) {
    size_t kept = 0;
    for (size_t i = 0; i < size_; ++i) {
      if (!keep((*this)[i])) continue;
      if (kept != i) (*this)[kept] = std::move((*this)[i]);
      ++kept;
    }
    size_ = kept;
  }
  template <typename Is>
  bool any_of(Is&& is) const {
    for (size_t i = 0; i < size_; ++i) {
      if (is((*this)[i])) return true;
    }
    return false;
  }
  void clear() { first_ = size_ = 0; }
  // Frees the memory. Only while empty.
  void release() {
    items_.reset();
    capacity_ = first_ = 0;
  }
  size_t capacity() const { return capacity_; }

 private:
  void grow() {
    const size_t capacity = capacity_ == 0 ? 8 : 2 * capacity_;
    auto items = std::make_unique<T[]>(capacity);
    for (size_t i = 0; i < size_; ++i) items[i] = std::move((*this)[i]);
    items_ = std::move(items);
    capacity_ = capacity;
    first_ = 0;
  }
  std::unique_ptr<T[]> items_;
  size_t capacity_ = 0;  // power of two, or 0
  size_t first_ = 0;
  size_t size_ = 0;
};

}  // namespace crossrail
