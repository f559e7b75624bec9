#include "transport/tcp/stream.h"

#include <sys/epoll.h>
#include <sys/socket.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <utility>

#include "util/clock.h"
#include "util/errors.h"

namespace crossrail::tcp {

namespace {

// Of one connection before others get a turn.
constexpr uint64_t kReceivePerTurn = uint64_t{4} << 20;
constexpr uint64_t kSendPerTurn = uint64_t{2} << 20;
constexpr size_t kBatchesKept = 8;
constexpr size_t kViewsPerCall = 1000;
// A socket seldom has more than this many short pages at once, and the kernel looks at every iovec of a call.
constexpr size_t kTargetsPerCall = 256;
// Two heads: a range's, and an acknowledgement or so before it.
constexpr size_t kBulkHeadBytes = kRangeHeadBytes;

}  // namespace

// --- batches ---

void TxBatch::copy(const void* data, size_t size) {
  const size_t at = bytes_.size();
  bytes_.resize(at + size);
  std::byte* const begin = bytes_.data() + at;
  std::memcpy(begin, data, size);
  pending_bytes_ += size;
  if (!empty()) {
    iovec& last = views_.back();
    if (static_cast<std::byte*>(last.iov_base) + last.iov_len == begin) {
      last.iov_len += size;
      return;
    }
  }
  views_.push_back({begin, size});
}

void TxBatch::view(const std::byte* data, size_t size) {
  if (size == 0) return;
  views_.push_back({const_cast<std::byte*>(data), size});
  pending_bytes_ += size;
}

void TxBatch::clear() {
  bytes_.clear();
  views_.clear();
  detached_.clear();
  first_ = 0;
  pending_bytes_ = 0;
}

void TxBatch::sent(size_t size) {
  pending_bytes_ -= size;
  while (size > 0) {
    iovec& view = views_[first_];
    const size_t taken = std::min(size, view.iov_len);
    view.iov_base = static_cast<std::byte*>(view.iov_base) + taken;
    view.iov_len -= taken;
    size -= taken;
    if (view.iov_len == 0) ++first_;
  }
}

void TxBatch::detach(const std::byte* base, uint64_t length_bytes) {
  for (iovec& view : views()) {
    const auto* data = static_cast<const std::byte*>(view.iov_base);
    if (data < base || data >= base + length_bytes) continue;
    detached_.push_back(std::make_unique<std::byte[]>(view.iov_len));
    std::memcpy(detached_.back().get(), data, view.iov_len);
    view.iov_base = detached_.back().get();
  }
}

void StreamContext::note_hot(Stream* stream) {
  if (hot[0].stream == stream) {
    hot[0].misses = 0;
    ++hot[0].hits;
    return;
  }
  Hot moved{.stream = stream};
  for (Hot& place : hot) {
    std::swap(place, moved);
    if (moved.stream == stream) hot[0].hits = moved.hits;
    if (moved.stream == stream || moved.stream == nullptr) return;
  }
  moved.stream->watch(true);
}

void StreamContext::forget_hot(Stream* stream) {
  stream->watch(true);
  const auto rest = std::remove_if(hot.begin(), hot.end(), [&](const Hot& place) { return place.stream == stream; });
  std::fill(rest, hot.end(), Hot{});
}

std::unique_ptr<TxBatch> StreamContext::take_batch() {
  if (batches.empty()) return std::make_unique<TxBatch>();
  std::unique_ptr<TxBatch> batch = std::move(batches.back());
  batches.pop_back();
  return batch;
}

void StreamContext::give_batch(std::unique_ptr<TxBatch> batch) {
  batch->clear();
  if (batches.size() < kBatchesKept) batches.push_back(std::move(batch));
}

// --- placement ---

void Placement::add(std::byte* base, uint64_t length) {
  if (length == 0) return;
  bytes_left += length;
  if (!targets.empty()) {
    iovec& last = targets.back();
    auto* const end = static_cast<std::byte*>(last.iov_base) + last.iov_len;
    if ((base == nullptr && last.iov_base == nullptr) || (last.iov_base != nullptr && end == base)) {
      last.iov_len += length;
      return;
    }
  }
  targets.push_back({base, length});
}

void Placement::placed(uint64_t size) {
  bytes_left -= size;
  while (size > 0) {
    iovec& target = targets[at];
    const uint64_t taken = std::min<uint64_t>(size, target.iov_len);
    if (target.iov_base != nullptr) target.iov_base = static_cast<std::byte*>(target.iov_base) + taken;
    target.iov_len -= taken;
    size -= taken;
    if (target.iov_len == 0) ++at;
  }
}

void Placement::copy_in(const std::byte* data, uint64_t size) {
  bytes_left -= size;
  while (size > 0) {
    iovec& target = targets[at];
    const uint64_t taken = std::min<uint64_t>(size, target.iov_len);
    if (target.iov_base != nullptr) {
      std::memcpy(target.iov_base, data, taken);
      target.iov_base = static_cast<std::byte*>(target.iov_base) + taken;
    }
    target.iov_len -= taken;
    data += taken;
    size -= taken;
    if (target.iov_len == 0) ++at;
  }
}

void Placement::discard_range(const std::byte* base, uint64_t length_bytes) {
  for (size_t i = at; i < targets.size(); ++i) {
    const auto* target = static_cast<const std::byte*>(targets[i].iov_base);
    if (target >= base && target < base + length_bytes) targets[i].iov_base = nullptr;
  }
}

// --- the connection ---

Stream::Stream(StreamContext* context, Fd fd, bool is_bulk)
    : context_(context), fd_(std::move(fd)), is_bulk_(is_bulk), last_received_ns_(now_ns()) {
  context_->poller->add(fd_.get(), this, EPOLLIN | EPOLLRDHUP);
}

Stream::~Stream() {
  context_->forget_hot(this);
  if (fd_) context_->poller->remove(fd_.get());
  if (batch_) context_->give_batch(std::move(batch_));
}

void Stream::break_off(const std::string& reason) {
  if (broken_) return;
  reason_ = reason;
  hang_up();
  on_broken();
}

void Stream::hang_up(bool abort) {
  broken_ = true;
  context_->forget_hot(this);
  if (fd_ && abort) {
    const linger now{.l_onoff = 1, .l_linger = 0};
    setsockopt(fd_.get(), SOL_SOCKET, SO_LINGER, &now, sizeof now);
  }
  if (fd_) context_->poller->remove(fd_.get());
  fd_.reset();
  place_.clear();
  head_.clear();
  if (batch_) context_->give_batch(std::move(batch_));
}

void Stream::on_events(uint32_t events) {
  if (broken_) return;
  if ((events & (EPOLLERR | EPOLLHUP)) != 0 && !hears_last_words()) return break_off("the peer reset the connection");
  if ((events & (EPOLLIN | EPOLLRDHUP | EPOLLERR | EPOLLHUP)) != 0) receive();
  if (!broken_ && (events & EPOLLOUT) != 0) {
    watch_out(false);
    pump();
  }
}

void Stream::watch(bool on) {
  if (broken_ || is_watched_ == on || (!on && is_blocked_)) return;  // only epoll tells when it is not
  is_watched_ = on;
  if (on) {
    context_->poller->add(fd_.get(), this, EPOLLIN | EPOLLRDHUP | (is_blocked_ ? EPOLLOUT : 0u));
  } else {
    context_->poller->pause(fd_.get());
  }
}

void Stream::watch_out(bool on) {
  if (std::exchange(is_blocked_, on) == on) return;
  if (on) watch(true);
  context_->poller->change(fd_.get(), this, EPOLLIN | EPOLLRDHUP | (on ? EPOLLOUT : 0u));
}

bool Stream::receive() {
  std::byte* const scratch = context_->scratch.data();
  std::array<iovec, kTargetsPerCall + 1> views;  // written as far as used
  uint64_t budget = kReceivePerTurn;
  bool moved = false;
  while (!broken_) {
    size_t count = 0;
    uint64_t payload_wanted = 0;
    uint64_t discarded = 0;
    for (size_t i = place_.at; place_.bytes_left > 0 && i < place_.targets.size() && count < kTargetsPerCall; ++i) {
      iovec view = place_.targets[i];
      if (view.iov_base == nullptr) {
        view.iov_base = context_->discard.data();
        view.iov_len = std::min(view.iov_len, context_->discard.size());
        discarded = view.iov_len;
      }
      views[count++] = view;
      payload_wanted += view.iov_len;
      if (discarded > 0) break;
    }
    size_t have = 0;
    size_t room = 0;
    if (payload_wanted == place_.bytes_left) {
      have = head_.size();
      if (have > 0) std::memcpy(scratch, head_.data(), have);
      // A bulk connection reads no further than the next head, so that payloads need not be copied out of the scratch.
      room = is_bulk_ ? std::max(kBulkHeadBytes, head_wanted_) - have : StreamContext::kScratchBytes - have;
      views[count++] = {scratch + have, room};
    }
    msghdr message{};
    message.msg_iov = views.data();
    message.msg_iovlen = count;
    // recv costs less than recvmsg, and most calls find nothing.
    const ssize_t got = count == 1 ? recv(fd_.get(), views[0].iov_base, views[0].iov_len, MSG_DONTWAIT)
                                   : recvmsg(fd_.get(), &message, MSG_DONTWAIT);
    if (got == 0) {
      break_off("the peer closed the connection");
      return true;
    }
    if (got < 0) {
      if (errno == EINTR) continue;
      if (errno != EAGAIN && errno != EWOULDBLOCK) {
        break_off(std::string("the connection broke: ") + std::strerror(errno));
        return true;
      }
      return moved;
    }
    moved = true;
    const auto size = static_cast<uint64_t>(got);
    if (payload_wanted > 0) {
      const uint64_t placed = std::min(size, payload_wanted);
      place_.placed(placed);
      if (place_.bytes_left == 0) {
        place_.clear();
        if (!on_frame()) {
          break_off("protocol error: " + reject_reason_);
          return true;
        }
        if (broken_) return true;
      }
      if (size > placed && !parse(size - placed)) return true;
    } else if (!parse(have + size)) {
      return true;
    }
    if (size < payload_wanted + room || size >= budget) break;  // drained, or enough
    budget -= size;
  }
  if (broken_) return true;
  last_received_ns_ = context_->now;
  context_->note_hot(this);
  return moved;
}

// Frames in the first `size` bytes of the scratch. False: the connection is broken.
bool Stream::parse(size_t size) {
  const std::byte* at = context_->scratch.data();
  head_wanted_ = 0;
  while (size >= sizeof(FrameHeader)) {
    FrameHeader header;
    std::memcpy(&header, at, sizeof header);
    if (header.mark != kFrameMark || header.type == 0 || header.type > kFrameTypeMax ||
        header.meta_bytes > kMetaBytesMax) {
      break_off("protocol error: a frame that is none (type " + std::to_string(header.type) + ", mark " +
                std::to_string(header.mark) + ", " + std::to_string(header.meta_bytes) + " bytes of metadata)");
      return false;
    }
    const size_t head_bytes = sizeof header + header.meta_bytes;
    if (size < head_bytes) {
      head_wanted_ = head_bytes;
      break;
    }
    if (!on_head(header, {at + sizeof header, header.meta_bytes}, place_)) {
      break_off("protocol error: " + reject_reason_);
      return false;
    }
    if (broken_) return false;
    at += head_bytes;
    size -= head_bytes;
    const uint64_t present = std::min<uint64_t>(size, place_.bytes_left);
    if (present > 0) {
      place_.copy_in(at, present);
      at += present;
      size -= present;
    }
    if (place_.bytes_left > 0) break;
    place_.clear();
    if (!on_frame()) {
      break_off("protocol error: " + reject_reason_);
      return false;
    }
    if (broken_) return false;
  }
  head_.assign(at, at + size);
  return true;
}

bool Stream::pump() {
  if (broken_ || is_blocked_) return false;
  bool moved = false;
  uint64_t budget = kSendPerTurn;
  while (!broken_) {
    if (!batch_) {
      batch_ = context_->take_batch();
      if (!fill(*batch_)) {
        context_->give_batch(std::move(batch_));
        break;
      }
    }
    const uint64_t before = batch_->pending_bytes();
    const bool all = flush();
    if (broken_) return true;
    const uint64_t sent = before - batch_->pending_bytes();
    moved = moved || sent > 0;
    if (!all) break;
    context_->give_batch(std::move(batch_));
    if (sent >= budget) {
      on_turn_over();
      break;
    }
    budget -= sent;
  }
  if (moved && !broken_) last_sent_ns_ = context_->now;
  return moved;
}

// True: the whole batch was sent.
bool Stream::flush() {
  while (!batch_->empty()) {
    msghdr message{};
    const auto views = batch_->views();
    message.msg_iov = views.data();
    message.msg_iovlen = std::min(views.size(), kViewsPerCall);
    constexpr int kFlags = MSG_DONTWAIT | MSG_NOSIGNAL;
    const ssize_t put = views.size() == 1 ? send(fd_.get(), views[0].iov_base, views[0].iov_len, kFlags)
                                          : sendmsg(fd_.get(), &message, kFlags);
    if (put >= 0) {
      batch_->sent(static_cast<size_t>(put));
      continue;
    }
    if (errno == EINTR) continue;
    // ENOBUFS: the kernel is short of memory for the moment.
    if (errno == EAGAIN || errno == EWOULDBLOCK || errno == ENOBUFS) {
      watch_out(true);
      return false;
    }
    const std::string why = std::string("the connection broke: ") + std::strerror(errno);
    if (hears_last_words()) receive();
    break_off(why);
    return false;
  }
  return true;
}

}  // namespace crossrail::tcp
