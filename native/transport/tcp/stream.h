// One connection after its handshake: cuts what arrives into frames, lets payloads land where their owner says, and sends
// batches of frames.
#pragma once

#include <sys/uio.h>

#include <array>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "transport/tcp/poller.h"
#include "transport/tcp/wire.h"
#include "util/memory_map.h"

namespace crossrail::tcp {

// Frames on their way out: heads and short payloads copied, long payloads as views of the regions they are in.
// Invariant: bytes_ never moves (its capacity is fixed), so that iovecs may point into it.
class TxBatch {
 public:
  static constexpr size_t kBytes = 64 << 10;
  static constexpr size_t kViewsMax = 1020;  // a little less than IOV_MAX

  TxBatch() {
    bytes_.reserve(kBytes);
    views_.reserve(kViewsMax + 4);
  }
  bool empty() const { return first_ == views_.size(); }
  // Room for `bytes` copied and `views` more.
  bool has_room(size_t bytes, size_t views = 1) const {
    return bytes_.size() + bytes <= kBytes && views_.size() + views <= kViewsMax;
  }
  void copy(const void* data, size_t size);
  template <typename T>
  void put(const T& value) {
    copy(&value, sizeof value);
  }
  void view(const std::byte* data, size_t size);
  void clear();

  uint64_t pending_bytes() const { return pending_bytes_; }
  std::span<iovec> views() { return std::span(views_).subspan(first_); }
  void sent(size_t size);
  // Copies what is left of views into [base, base + length), so that this memory is not touched any more.
  void detach(const std::byte* base, uint64_t length_bytes);

 private:
  std::vector<std::byte> bytes_;
  std::vector<iovec> views_;
  size_t first_ = 0;
  uint64_t pending_bytes_ = 0;
  std::vector<std::unique_ptr<std::byte[]>> detached_;
};

// Where the bytes of a payload go, in order. A null base discards.
struct Placement {
  std::vector<iovec> targets;
  size_t at = 0;
  uint64_t bytes_left = 0;

  void add(std::byte* base, uint64_t length);
  void add_discard(uint64_t length) { add(nullptr, length); }
  void clear() {
    targets.clear();
    at = 0;
    bytes_left = 0;
  }
  // Advances over `size` bytes that a system call has placed.
  void placed(uint64_t size);
  // Places bytes that arrived in another buffer.
  void copy_in(const std::byte* data, uint64_t size);
  // From here on, whatever was to go into [base, base + length) is discarded.
  void discard_range(const std::byte* base, uint64_t length_bytes);
};

class Stream;

// What all streams of one transport share. Progress holder.
struct StreamContext {
  static constexpr size_t kScratchBytes = 128 << 10;
  explicit StreamContext(Poller* poller) : poller(poller), scratch(kScratchBytes), discard(kScratchBytes) {}
  // Sockets that brought something of late: asked directly, which is cheaper than asking epoll first.
  void note_hot(Stream* stream);
  void forget_hot(Stream* stream);
  struct Hot {
    Stream* stream = nullptr;
    uint32_t misses = 0;  // in a row
    uint32_t hits = 0;
  };
  std::array<Hot, 3> hot{};  // the latest first; empty ones last
  std::unique_ptr<TxBatch> take_batch();
  void give_batch(std::unique_ptr<TxBatch> batch);

  Poller* poller;
  int64_t now = 0;  // a little old, of the current poll
  std::vector<std::byte> scratch;
  std::vector<std::byte> discard;
  std::vector<std::unique_ptr<TxBatch>> batches;
};

class Stream : public Pollable {
 public:
  // Takes over a connected socket in non-blocking mode. is_bulk: expects long payloads, so it reads heads by themselves.
  Stream(StreamContext* context, Fd fd, bool is_bulk);
  ~Stream() override;

  void on_events(uint32_t events) override;
  // Reads and handles what has arrived, up to a share of the time. True when anything was.
  bool receive();
  // Sends what fill() gives, until there is no more or the socket is full. True when anything was sent.
  bool pump();

  bool is_broken() const { return broken_; }
  const std::string& reason() const { return reason_; }
  // No more of it: on_broken() is called once. The descriptor is closed.
  void break_off(const std::string& reason);
  // The same without on_broken(): its owner has given it up. abort: what was sent and not yet read by the peer's process is
  // thrown away there too, as far as the network lets us say so.
  void hang_up(bool abort = false);
  int fd() const { return fd_.get(); }
  bool is_blocked() const { return is_blocked_; }
  // Whether epoll tells of news: costs each packet some, and a socket that is asked directly all the time needs it not.
  void watch(bool on);
  int64_t last_received_ns() const { return last_received_ns_; }
  int64_t last_sent_ns() const { return last_sent_ns_; }

 protected:
  // A frame's head has arrived. Adds the frame's payload_bytes to `place`. False: a protocol error, said by reject().
  virtual bool on_head(const FrameHeader& header, std::span<const std::byte> meta, Placement& place) = 0;
  // Its payload is in place, or discarded. False as above.
  virtual bool on_frame() = 0;
  // Appends frames. False: nothing to send.
  virtual bool fill(TxBatch& batch) = 0;
  // pump() has sent its share and there may be more: sees to it that it is called again soon.
  virtual void on_turn_over() = 0;
  virtual void on_broken() = 0;
  // Whether what the peer sent before it reset the connection is still worth reading.
  virtual bool hears_last_words() const = 0;
  // Set-up of an orderly end: the last words of the peer.
  bool reject(const std::string& why) {
    reject_reason_ = why;
    return false;
  }
  TxBatch* pending_batch() { return batch_.get(); }
  Placement& placement() { return place_; }

 private:
  bool flush();
  bool parse(size_t size);
  void watch_out(bool on);

  StreamContext* const context_;
  Fd fd_;
  const bool is_bulk_;
  bool broken_ = false;
  bool is_watched_ = true;
  bool is_blocked_ = false;  // the socket was full: EPOLLOUT tells when it is not
  std::string reason_;
  std::string reject_reason_;
  int64_t last_received_ns_ = 0;
  int64_t last_sent_ns_ = 0;
  // Invariant: place_.bytes_left > 0 implies head_ is empty.
  std::vector<std::byte> head_;  // of a frame whose metadata is not complete
  size_t head_wanted_ = 0;       // how long it will be, as far as known
  Placement place_;
  std::unique_ptr<TxBatch> batch_;
};

}  // namespace crossrail::tcp
