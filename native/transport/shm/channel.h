// The two ends of a Channel.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstddef>
#include <cstdint>

#include "transport/shm/layout.h"
#include "util/prefetch.h"

namespace crossrail::shm {

// A copy of something in memory that a peer may change while we look: what is checked afterwards is what is used. The
// fence is for the compiler, which might otherwise read `shared` again instead of keeping the copy.
template <typename T>
T copy_of_shared(const T& shared) {
  const T copy = shared;
  std::atomic_signal_fence(std::memory_order_seq_cst);
  return copy;
}

// The consumer's position. One thread at a time.
class ChannelReader {
 public:
  ChannelReader() = default;
  explicit ChannelReader(Channel* channel) : channel_(channel) {}

  bool has_entry() const { return peek() != nullptr; }

  // The next entry, or null. The entry stays in place until pop().
  // acquire: pairs with the release in ChannelWriter::publish, so that the body and the staged bytes are completely
  // visible.
  const Entry* peek() const {
    const Entry& entry = channel_->entries[position_ % kRingEntries];
    const uint32_t sequence = entry.sequence.load(std::memory_order_acquire);
    return sequence == static_cast<uint32_t>(position_ + 1) ? &entry : nullptr;
  }

  // Claims the current entry's work. False: the producer has withdrawn it; pop(0) it.
  // acq_rel: pairs with withdraw(); what the loser does afterwards does not interfere with the winner.
  bool take() {
    uint8_t untouched = 0;
    return channel_->entries[position_ % kRingEntries].status.compare_exchange_strong(untouched, kEntryTaken,
                                                                                      std::memory_order_acq_rel);
  }
  // Gives up the claim, for later.
  void put_back() { channel_->entries[position_ % kRingEntries].status.store(0, std::memory_order_release); }

  // Finishes the current entry. status 0 is success.
  void pop(uint8_t status) {
    if (status != 0) channel_->entries[position_ % kRingEntries].status.store(status, std::memory_order_relaxed);
    ++position_;
  }

  // Tells the producer what was popped since the last call. True if there was something.
  // release: pairs with the acquire in ChannelWriter::refresh; the producer then reuses entries and staging, and reads
  // statuses.
  bool publish() {
    if (published_ == position_) return false;
    channel_->consumed.store(position_, std::memory_order_release);
    published_ = position_;
    return true;
  }

  // A staged block, or null if the offsets are invalid.
  const std::byte* block(uint64_t stage_at, uint64_t bytes) const {
    if (bytes > kStageBytes || stage_at > kStageBytes - bytes) return nullptr;
    return channel_->stage + stage_at;
  }

 private:
  Channel* channel_ = nullptr;
  uint64_t position_ = 0;
  uint64_t published_ = 0;
};

// The producer's position. One thread at a time.
// Invariant: entries in [consumed_, position_) belong to the consumer, and so do stage bytes in [stage_tail_,
// stage_head_) (counted without wrapping).
class ChannelWriter {
 public:
  ChannelWriter() = default;
  explicit ChannelWriter(Channel* channel) : channel_(channel) {}

  uint64_t position() const { return position_; }
  uint64_t consumed() const { return consumed_; }
  uint8_t status_of(uint64_t position) const {
    return channel_->entries[position % kRingEntries].status.load(std::memory_order_relaxed);
  }

  // True: the consumer has not begun this entry and never will.
  bool withdraw(uint64_t position) {
    uint8_t untouched = 0;
    return channel_->entries[position % kRingEntries].status.compare_exchange_strong(untouched, kEntryWithdrawn,
                                                                                     std::memory_order_acq_rel);
  }

  // Learns how far the consumer has got. A consumer that claims more than it was given is ignored.
  void refresh() {
    const uint64_t consumed = channel_->consumed.load(std::memory_order_acquire);
    if (consumed > consumed_ && consumed <= position_) consumed_ = consumed;
  }

  bool has_room() {
    if (position_ - consumed_ < kRingEntries) return true;
    refresh();
    return position_ - consumed_ < kRingEntries;
  }

  // An entry is about to be filled: prefetches its cache line, which the consumer polls. Called only shortly before: a
  // line that arrives too early is taken back by the consumer's next poll.
  void expect_entry() { prefetch_for_write(&channel_->entries[position_ % kRingEntries]); }

  // The entry to fill, after has_room().
  Entry& next() {
    Entry& entry = channel_->entries[position_ % kRingEntries];
    entry.status.store(0, std::memory_order_relaxed);
    return entry;
  }

  void publish(Entry& entry) {
    ++position_;
    entry.sequence.store(static_cast<uint32_t>(position_), std::memory_order_release);
  }

  // A contiguous block of the staging ring, or null if there is no room now. *stage_at is its offset; commit with
  // stage_head() remembered by the caller, free with release_stage().
  std::byte* reserve(uint64_t bytes, uint64_t* stage_at) {
    if (stage_head_ == stage_tail_) to_start();
    uint64_t head = stage_head_;
    const uint64_t in_ring = head % kStageBytes;
    if (in_ring + bytes > kStageBytes) head += kStageBytes - in_ring;  // does not fit before the end: skip to the start
    if (head + bytes - stage_tail_ > kStageBytes) return nullptr;
    stage_head_ = head + bytes;
    *stage_at = head % kStageBytes;
    return channel_->stage + *stage_at;
  }
  uint64_t stage_head() const { return stage_head_; }
  // Everything reserved up to `head` is free again. For an entry without bytes, `head` may be from before to_start().
  void release_stage(uint64_t head) { stage_tail_ = std::max(stage_tail_, head); }

 private:
  // Rewinds an empty ring: occasional messages then always use the same cache lines and the same few pages.
  void to_start() { stage_head_ = stage_tail_ = (stage_head_ + kStageBytes - 1) / kStageBytes * kStageBytes; }

  Channel* channel_ = nullptr;
  uint64_t position_ = 0;
  uint64_t consumed_ = 0;
  uint64_t stage_head_ = 0;
  uint64_t stage_tail_ = 0;
};

}  // namespace crossrail::shm
