// Little-endian, bounds-checked reading and writing of bytes that cross process borders.
#pragma once

#include <bit>
#include <cstdint>
#include <cstring>
#include <span>
#include <string>
#include <string_view>
#include <type_traits>
#include <vector>

namespace crossrail {

static_assert(std::endian::native == std::endian::little, "the codec writes native order");

class Writer {
 public:
  // Enough for nearly everything that is written: a single allocation.
  Writer() { bytes_.reserve(256); }

  template <typename T>
    requires std::is_integral_v<T>
  void put(T value) {
    const auto* bytes = reinterpret_cast<const uint8_t*>(&value);
    bytes_.insert(bytes_.end(), bytes, bytes + sizeof value);
  }
  void put_bytes(std::span<const uint8_t> bytes) { bytes_.insert(bytes_.end(), bytes.begin(), bytes.end()); }
  // One length byte, then the text; at most 255 bytes.
  void put_text(std::string_view text) {
    put(static_cast<uint8_t>(text.size()));
    put_bytes({reinterpret_cast<const uint8_t*>(text.data()), text.size()});
  }
  std::vector<uint8_t>& bytes() { return bytes_; }

 private:
  std::vector<uint8_t> bytes_;
};

// Invariant: never reads past the span; after the first short read everything reads as zero and ok() is false.
class Reader {
 public:
  explicit Reader(std::span<const uint8_t> bytes) : rest_(bytes) {}

  template <typename T>
    requires std::is_integral_v<T>
  T get() {
    T value{};
    if (take(sizeof value)) std::memcpy(&value, taken_, sizeof value);
    return value;
  }
  void get_bytes(std::span<uint8_t> out) {
    if (out.empty()) return;  // memcpy must not get a null pointer, even for zero bytes
    if (take(out.size())) {
      std::memcpy(out.data(), taken_, out.size());
    } else {
      std::memset(out.data(), 0, out.size());
    }
  }
  std::string get_text() {
    const size_t length = get<uint8_t>();
    return take(length) ? std::string(reinterpret_cast<const char*>(taken_), length) : std::string();
  }
  std::span<const uint8_t> rest() const { return rest_; }
  bool ok() const { return ok_; }
  // Everything was read, and nothing is left.
  bool finished() const { return ok_ && rest_.empty(); }

 private:
  bool take(size_t count) {
    if (!ok_ || rest_.size() < count) {
      ok_ = false;
      return false;
    }
    taken_ = rest_.data();
    rest_ = rest_.subspan(count);
    return true;
  }
  std::span<const uint8_t> rest_;
  const uint8_t* taken_ = nullptr;
  bool ok_ = true;
};

}  // namespace crossrail
