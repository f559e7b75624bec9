// Reading and writing of frames' parts, for both sides.
#pragma once

#include <algorithm>
#include <cstring>
#include <span>
#include <string>
#include <string_view>
#include <vector>

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

// What a peer says, fit to be shown: ours is plain ASCII, a stranger's may be anything.
inline std::string text_of(std::span<const std::byte> bytes) {
  std::string text(reinterpret_cast<const char*>(bytes.data()), std::min(bytes.size(), kTextBytesMax));
  std::replace_if(text.begin(), text.end(), [](char c) { return c < ' ' || c > '~'; }, '?');
  return text;
}

inline FrameHeader header_of(FrameType type, size_t count, size_t operations, size_t meta_bytes,
                             uint64_t payload_bytes) {
  return {.type = static_cast<uint8_t>(type),
          .mark = kFrameMark,
          .count = static_cast<uint16_t>(count),
          .operations = static_cast<uint16_t>(operations),
          .meta_bytes = static_cast<uint16_t>(meta_bytes),
          .payload_bytes = payload_bytes};
}

inline void append_bytes(std::vector<std::byte>& out, const void* data, size_t size) {
  const auto* bytes = static_cast<const std::byte*>(data);
  out.insert(out.end(), bytes, bytes + size);
}

// A frame without payload: metadata, and a text after it.
template <typename Meta>
void append_frame(std::vector<std::byte>& out, FrameType type, const Meta& meta, std::string_view text = {}) {
  text = text.substr(0, kTextBytesMax);
  const FrameHeader header = header_of(type, 0, 0, sizeof meta + text.size(), 0);
  append_bytes(out, &header, sizeof header);
  append_bytes(out, &meta, sizeof meta);
  append_bytes(out, text.data(), text.size());
}

// The same, into a batch that has room for it.
template <typename Meta>
void put_frame(TxBatch& batch, FrameType type, const Meta& meta, std::string_view text = {}) {
  text = text.substr(0, kTextBytesMax);
  batch.put(header_of(type, 0, 0, sizeof meta + text.size(), 0));
  batch.put(meta);
  batch.copy(text.data(), text.size());
}

// An orderly end: of a link (kBye) or of the engine (kClosing).
inline void append_end(std::vector<std::byte>& out, FrameType type, std::string_view text) {
  text = text.substr(0, kTextBytesMax);
  const FrameHeader header = header_of(type, 0, 0, text.size(), 0);
  append_bytes(out, &header, sizeof header);
  append_bytes(out, text.data(), text.size());
}

// Moves frames without payload to the batch, as many as it has room for. Whole ones: where a connection carries both
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
