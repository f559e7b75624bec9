#include "engine/flight_dump.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <cerrno>
#include <cstdio>
#include <cstring>
#include <ctime>
#include <new>
#include <utility>

#include "engine/core.h"

namespace crossrail {

FileSink::FileSink(const char* path, Target target)
    : path_(path),
      is_new_(target == Target::kNew),
      fd_(open(path, O_WRONLY | O_CLOEXEC | O_NOFOLLOW | (is_new_ ? O_CREAT | O_EXCL : 0), 0600)) {
  if (fd_ < 0) error_ = errno;
}

int FileSink::finish() {
  if (fd_ < 0) return error_;
  if (close(std::exchange(fd_, -1)) != 0 && errno != EINTR && error_ == 0) error_ = errno;
  if (is_new_ && error_ != 0) unlink(path_);
  return error_;
}

void FileSink::write(std::string_view text) {
  while (error_ == 0 && !text.empty()) {
    const ssize_t written = ::write(fd_, text.data(), text.size());
    if (written >= 0) {
      text.remove_prefix(static_cast<size_t>(written));
    } else if (errno != EINTR) {
      error_ = errno;
    }
  }
}

void StringSink::write(std::string_view text) try { text_ += text; } catch (const std::bad_alloc&) {
  is_whole_ = false;
}

std::string StringSink::take() {
  if (!is_whole_) throw std::bad_alloc();
  return std::move(text_);
}

void JsonLines::flush() {
  sink_->write({buffer_.data(), filled_});
  filled_ = 0;
}

void JsonLines::raw(std::string_view text) {
  while (!text.empty()) {
    if (filled_ == buffer_.size()) flush();
    const size_t fits = std::min(text.size(), buffer_.size() - filled_);
    std::memcpy(buffer_.data() + filled_, text.data(), fits);
    filled_ += fits;
    text.remove_prefix(fits);
  }
}

// Names and details may contain any bytes. Bytes from 128 on are passed through: the reader replaces whatever is not
// UTF-8.
void JsonLines::value(std::string_view text) {
  constexpr char kHex[] = "0123456789abcdef";
  raw("\"");
  for (const char letter : text) {
    const auto byte = static_cast<unsigned char>(letter);
    if (byte < 0x20 || byte == 0x7f) {
      const std::array<char, 6> escape = {'\\', 'u', '0', '0', kHex[byte >> 4], kHex[byte & 15]};
      raw({escape.data(), escape.size()});
    } else {
      if (byte == '"' || byte == '\\') raw("\\");
      raw({&letter, 1});
    }
  }
  raw("\"");
}

namespace {

int64_t wall_ns() {
  timespec time;
  clock_gettime(CLOCK_REALTIME, &time);
  return static_cast<int64_t>(time.tv_sec) * 1'000'000'000 + time.tv_nsec;
}

const char* op_name(uint32_t op) { return op == FlightEntry::kNoOp ? "" : op_kind_name(static_cast<OpKind>(op - 1)); }

void put_entry(JsonLines& out, uint32_t ring, const FlightEntry& entry, const TickClock::Scale& scale) {
  const int64_t imm = entry.imm == kNoImm ? -1 : static_cast<int64_t>(entry.imm);
  const uint32_t transfers = entry.repeats ? entry.count : 1;
  const uint32_t count = entry.repeats ? 1 : entry.count;
  for (uint32_t i = 0; i < transfers; ++i) {
    out.line("op", scale.to_ns(entry.ticks + i), ring, flight_state_name(entry.state), op_name(entry.op),
             entry.transfer + i, entry.peer, entry.bytes, imm, count);
  }
}

// Read position in one ring: the entry to be written next, or the end.
class RingCursor {
 public:
  RingCursor() = default;
  explicit RingCursor(const FlightRing& ring) : ring_(&ring), at_(ring.oldest()), end_(ring.written()) { find(); }
  bool at_end() const { return at_ == end_; }
  const FlightEntry& entry() const { return entry_; }
  void advance() {
    ++at_;
    find();
  }

 private:
  // Skips entries that have been overwritten meanwhile.
  void find() {
    while (at_ < end_ && !ring_->read(at_, &entry_)) at_ = std::min(end_, std::max(at_ + 1, ring_->oldest()));
  }
  const FlightRing* ring_ = nullptr;
  uint64_t at_ = 0;
  uint64_t end_ = 0;
  FlightEntry entry_;
};

// All rings, merged by time.
void put_rings(JsonLines& out, const FlightRecorder& recorder, const TickClock::Scale& scale) {
  constexpr size_t kRingsMax = 1 + kTransportsMax * kRailsMax;
  std::array<RingCursor, kRingsMax> cursors;
  const uint32_t count = recorder.ring_count();
  for (uint32_t i = 0; i < count; ++i) {
    const FlightRing& ring = recorder.ring(i);
    out.line("ring", ring.name(), ring.recorded());
    cursors[i] = RingCursor(ring);
  }
  for (;;) {
    uint32_t next = count;
    for (uint32_t i = 0; i < count; ++i) {
      if (cursors[i].at_end()) continue;
      if (next == count || cursors[i].entry().ticks < cursors[next].entry().ticks) next = i;
    }
    if (next == count) return;
    put_entry(out, next, cursors[next].entry(), scale);
    cursors[next].advance();
  }
}

}  // namespace

void EngineCore::dump(std::string_view reason, TextSink* sink) const {
  JsonLines out(sink);
  const TickClock::Scale scale = recorder_.scale();
  out.line("flight", kFlightVersion, CROSSRAIL_VERSION, options_.name, transports_.address().pid, reason,
           clock().now_ns(), wall_ns());
  stats().each([&](const char* name, uint64_t value) { out.line("count", name, value); });
  out.line("count", "submits_waiting", submits_waiting());
  out.line("count", "transfers_untriggered", triggers_.size());
  imms_.visit_waiting([&](uint32_t imm, uint64_t units, uint64_t needed) { out.line("wait", imm, units, needed); });
  for (size_t i = 0; const auto track = recorder_.track(i); ++i) {
    const auto get = [](const auto& value) { return value.load(std::memory_order_relaxed); };
    out.line("peer", track->id, track->name, track->pid, track->transport, peer_state_name(get(track->state)),
             get(track->outstanding), get(track->queued), get(track->moves));
  }
  for (size_t i = 0; const auto note = recorder_.note(i); ++i)
    out.line("note", scale.to_ns(note->ticks), note->kind, note->peer, note->detail);
  put_rings(out, recorder_, scale);
  out.line("end");
}

int dump_to_file(const EngineCore& core, const std::string& path, std::string_view reason) {
  constexpr int kNamesTried = 1000;
  static std::atomic<uint64_t> last_number{0};
  struct stat there{};
  if (lstat(path.c_str(), &there) == 0 && !S_ISREG(there.st_mode)) {
    if (S_ISLNK(there.st_mode)) return ELOOP;
    FileSink device(path.c_str(), FileSink::Target::kDevice);
    if (device.error() == 0) core.dump(reason, &device);
    return device.finish();
  }
  const std::string directory = path.substr(0, path.rfind('/') + 1);  // with the slash, or empty
  for (int i = 0; i < kNamesTried; ++i) {
    const uint64_t number = last_number.fetch_add(1, std::memory_order_relaxed);
    const std::string unready =
        directory + ".crossrail-" + std::to_string(getpid()) + "-" + std::to_string(number) + ".part";
    FileSink file(unready.c_str(), FileSink::Target::kNew);
    if (file.error() == EEXIST) continue;  // left by an earlier process with our pid
    if (file.error() == 0) core.dump(reason, &file);
    if (file.finish() != 0) return file.error();
    if (rename(unready.c_str(), path.c_str()) == 0) return 0;
    const int error = errno;
    unlink(unready.c_str());
    return error;
  }
  return EEXIST;
}

}  // namespace crossrail
