// Writes the contents of a FlightRecorder as JSON lines, version 1, for src/crossrail/flight.py to read.
//
// One line describes the engine and why the dump was written; then comes a line for each count, peer, note, ring and
// entry, each an array whose first element is its kind. Entries are in order of time and refer to their ring by number.
// The last line is ["end"], so that a truncated file can be told from a complete one.
#pragma once

#include <array>
#include <charconv>
#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>
#include <type_traits>
#include <utility>

namespace crossrail {

inline constexpr int kFlightVersion = 1;

// Accepts text in pieces and allocates nothing: a dump may be written by a process that is about to abort.
class TextSink {
 public:
  virtual ~TextSink() = default;
  virtual void write(std::string_view text) = 0;
};

// Into a string.
class StringSink final : public TextSink {
 public:
  void write(std::string_view text) override;
  // Throws std::bad_alloc if there was no memory for all of it: write() is called by destructors, and must not.
  std::string take();

 private:
  std::string text_;
  bool is_whole_ = true;
};

// Into a new file that only this user may read, and that is removed if it cannot be written completely. The sink owns
// the descriptor.
class FileSink final : public TextSink {
 public:
  enum class Target : uint8_t {
    kNew,    // the file must not exist yet
    kDevice  // something that exists, such as a pipe, and stays
  };
  // path must outlive the sink. Symbolic links are never followed.
  FileSink(const char* path, Target target);
  ~FileSink() override { finish(); }
  FileSink(const FileSink&) = delete;
  FileSink& operator=(const FileSink&) = delete;
  void write(std::string_view text) override;
  // No more text follows. Returns the errno of the first call that failed, or 0. Idempotent.
  int finish();
  // The same, so far.
  int error() const { return error_; }

 private:
  const char* const path_;
  const bool is_new_;
  int fd_;
  int error_ = 0;
};

class EngineCore;

// Writes the recorder to a new file of that name, mode 0600. An existing file is replaced once the new one is complete;
// a device or pipe is written to directly. Returns errno, or 0. Any thread.
int dump_to_file(const EngineCore& core, const std::string& path, std::string_view reason);

// Builds JSON in its own buffer; flushes when that is full and at the end.
class JsonLines {
 public:
  explicit JsonLines(TextSink* sink) : sink_(sink) {}
  ~JsonLines() { flush(); }
  JsonLines(const JsonLines&) = delete;
  JsonLines& operator=(const JsonLines&) = delete;

  // An array of values.
  template <typename... Values>
  void line(const Values&... values) {
    raw("[");
    bool first = true;
    ((raw(std::exchange(first, false) ? "" : ","), value(values)), ...);
    raw("]\n");
  }
  void value(std::string_view text);  // quoted
  void value(const char* text) { value(std::string_view(text)); }
  void value(const std::string& text) { value(std::string_view(text)); }
  template <typename T>
    requires std::is_integral_v<T>
  void value(T number) {
    std::array<char, 24> digits;
    const auto end = std::to_chars(digits.data(), digits.data() + digits.size(), number).ptr;
    raw({digits.data(), static_cast<size_t>(end - digits.data())});
  }
  void raw(std::string_view text);
  void flush();

 private:
  TextSink* const sink_;
  std::array<char, 8192> buffer_;
  size_t filled_ = 0;
};

}  // namespace crossrail
