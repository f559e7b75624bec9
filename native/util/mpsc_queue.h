// Bounded lock-free queue, many producers, one consumer at a time. After D. Vyukov's bounded MPMC queue
// (1024cores.net): each cell has a sequence number that says whose turn it is.
#pragma once

#include <atomic>
#include <cstddef>
#include <memory>

namespace crossrail {

// Invariant: a cell at position p is free for the producer of p when sequence == p, and holds its value when
// sequence == p + 1. T is trivially copyable.
template <typename T>
class MpscQueue {
 public:
  // capacity: a power of two.
  explicit MpscQueue(size_t capacity) : mask_(capacity - 1), cells_(new Cell[capacity]) {
    for (size_t i = 0; i < capacity; ++i) cells_[i].sequence.store(i, std::memory_order_relaxed);
  }

  // Any thread. False when full.
  bool try_push(const T& value) {
    // relaxed, here and in the exchange: a position only assigns one turn of a cell; the cell's sequence provides the
    // order.
    size_t position = tail_.load(std::memory_order_relaxed);
    for (;;) {
      Cell& cell = cells_[position & mask_];
      // acquire: pairs with the consumer's release in try_pop, so that we overwrite only what was read.
      const size_t sequence = cell.sequence.load(std::memory_order_acquire);
      if (sequence == position) {
        if (tail_.compare_exchange_weak(position, position + 1, std::memory_order_relaxed)) {
          cell.value = value;
          // release: publishes the value; pairs with the acquire in try_pop.
          cell.sequence.store(position + 1, std::memory_order_release);
          return true;
        }
      } else if (static_cast<ptrdiff_t>(sequence - position) < 0) {
        return false;
      } else {
        position = tail_.load(std::memory_order_relaxed);
      }
    }
  }

  // Consumer. False if empty.
  bool try_pop(T* value) {
    Cell& cell = cells_[head_ & mask_];
    // acquire: pairs with the producer's release: its value is there.
    if (cell.sequence.load(std::memory_order_acquire) != head_ + 1) return false;
    *value = cell.value;
    // release: our copy is taken before the producer of the next turn, whose load acquires, overwrites it.
    cell.sequence.store(head_ + mask_ + 1, std::memory_order_release);
    ++head_;
    return true;
  }

  // Any thread: the number of values pushed so far, including those just being pushed. relaxed: it orders nothing. A
  // thread that has learnt, by acquire and release, that a value was popped finds it counted.
  size_t pushed() const { return tail_.load(std::memory_order_relaxed); }

  // Consumer. acquire: as in try_pop.
  bool empty() const { return cells_[head_ & mask_].sequence.load(std::memory_order_acquire) != head_ + 1; }

 private:
  struct Cell {
    std::atomic<size_t> sequence;
    T value;
  };
  const size_t mask_;
  std::unique_ptr<Cell[]> cells_;
  alignas(64) std::atomic<size_t> tail_{0};
  alignas(64) size_t head_ = 0;  // consumer only
};

}  // namespace crossrail
