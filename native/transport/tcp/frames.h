// Reading and writing the parts of frames, for both sides.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstring>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "transport/foreign_text.h"
#include "transport/tcp/batch.h"
#include "transport/tcp/wire.h"

namespace crossrail::tcp {

// `meta` holds at least sizeof(T) bytes.
template <typename T>
T read_meta(std::span<const std::byte> meta) {
  T value;
  std::memcpy(&value, meta.data(), sizeof value);
  return value;
}

// A peer's text, made fit to be shown.
inline std::string text_of(std::span<const std::byte> bytes) {
  return shown(std::string(reinterpret_cast<const char*>(bytes.data()), std::min(bytes.size(), kTextBytesMax)));
}

template <typename T>
std::span<const std::byte> object_bytes(const T& value) {
  return std::as_bytes(std::span(&value, 1));
}

// Checksum of a header and its metadata, so that flipped bits end the connection. Otherwise they might place bytes
// elsewhere, or lose an acknowledgement, which nobody asks for again. It does not protect against people: TLS does.
// Every step is one-to-one, so that a difference in one word survives to the end, where half of the state is kept.
class HeadSum {
 public:
  // When called several times, all but the last call in multiples of eight bytes.
  void add(std::span<const std::byte> bytes) {
    uint64_t word = 0;
    for (; bytes.size() >= sizeof word; bytes = bytes.subspan(sizeof word)) {
      std::memcpy(&word, bytes.data(), sizeof word);
      mix(word);
    }
    if (bytes.empty()) return;
    word = 0;
    std::memcpy(&word, bytes.data(), bytes.size());
    mix(word);
  }
  uint32_t value() const { return static_cast<uint32_t>(state_); }

 private:
  void mix(uint64_t word) {
    state_ = (state_ ^ word) * 0x9e3779b97f4a7c15;
    state_ ^= state_ >> 32;
  }
  uint64_t state_ = 0xd6e8feb86659fd93;
};

inline uint32_t head_sum(FrameHeader header, std::span<const std::byte> meta, std::span<const std::byte> more = {}) {
  header.sum = 0;
  HeadSum sum;
  sum.add(object_bytes(header));
  sum.add(meta);
  sum.add(more);
  return sum.value();
}

// The exclusive or of kFrameMark and all other bytes before the sum: any single wrong byte changes it.
inline uint8_t mark_of(FrameHeader header) {
  static_assert(offsetof(FrameHeader, sum) == sizeof(uint64_t) + sizeof(uint32_t));
  header.mark = kFrameMark;
  uint64_t fold;
  std::memcpy(&fold, &header, sizeof fold);
  fold ^= header.payload_bytes;
  fold ^= fold >> 32;
  fold ^= fold >> 16;
  return static_cast<uint8_t>(fold ^ fold >> 8);
}

// more: metadata that follows `meta`.
inline FrameHeader header_of(FrameType type, size_t count, size_t operations, std::span<const std::byte> meta,
                             std::span<const std::byte> more, uint64_t payload_bytes) {
  FrameHeader header{.type = static_cast<uint8_t>(type),
                     .mark = 0,
                     .count = static_cast<uint16_t>(count),
                     .operations = static_cast<uint16_t>(operations),
                     .meta_bytes = static_cast<uint16_t>(meta.size() + more.size()),
                     .payload_bytes = static_cast<uint32_t>(payload_bytes),
                     .sum = 0};
  header.mark = mark_of(header);
  header.sum = head_sum(header, meta, more);
  return header;
}

// Appends a header and its metadata to a batch that has room for them.
template <typename Meta>
void put_head(TxBatch& batch, FrameType type, size_t count, size_t operations, const Meta& meta, uint64_t payload_bytes,
              std::span<const std::byte> more = {}) {
  static_assert(sizeof meta % sizeof(uint64_t) == 0);  // HeadSum
  batch.put(header_of(type, count, operations, object_bytes(meta), more, payload_bytes));
  batch.put(meta);
  batch.copy(more.data(), more.size());
}

inline void append_bytes(std::vector<std::byte>& out, const void* data, size_t size) {
  const auto* bytes = static_cast<const std::byte*>(data);
  out.insert(out.end(), bytes, bytes + size);
}

// A frame without payload: metadata, followed by a text.
template <typename Meta>
void append_frame(std::vector<std::byte>& out, FrameType type, const Meta& meta, std::string_view text = {}) {
  static_assert(sizeof meta % sizeof(uint64_t) == 0);  // HeadSum
  text = text.substr(0, kTextBytesMax);
  const FrameHeader header = header_of(type, 0, 0, object_bytes(meta), std::as_bytes(std::span(text)), 0);
  append_bytes(out, &header, sizeof header);
  append_bytes(out, &meta, sizeof meta);
  append_bytes(out, text.data(), text.size());
}

// The same, into a batch that has room for it.
template <typename Meta>
void put_frame(TxBatch& batch, FrameType type, const Meta& meta, std::string_view text = {}) {
  put_head(batch, type, 0, 0, meta, 0, std::as_bytes(std::span(text.substr(0, kTextBytesMax))));
}

// An orderly end: of a link (kBye) or of the engine (kClosing).
inline void append_end(std::vector<std::byte>& out, FrameType type, std::string_view text) {
  text = text.substr(0, kTextBytesMax);
  const FrameHeader header = header_of(type, 0, 0, std::as_bytes(std::span(text)), {}, 0);
  append_bytes(out, &header, sizeof header);
  append_bytes(out, text.data(), text.size());
}

// Moves frames without payload to the batch, as many whole ones as it has room for: where a connection carries both
// directions, frames of the other stream may come next.
inline void put_frames(TxBatch& batch, std::vector<std::byte>& frames) {
  size_t taken = 0;
  while (taken < frames.size()) {
    const auto header = read_meta<FrameHeader>(std::span(frames).subspan(taken));
    const size_t frame_bytes = sizeof header + header.meta_bytes;
    if (!batch.has_room(taken + frame_bytes)) break;
    taken += frame_bytes;
  }
  if (taken == 0) return;
  batch.copy(frames.data(), taken);
  frames.erase(frames.begin(), frames.begin() + static_cast<std::ptrdiff_t>(taken));
}

}  // namespace crossrail::tcp
