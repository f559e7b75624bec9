#include "transport/tcp/connection.h"

#include <sys/epoll.h>
#include <sys/socket.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <utility>

#include "transport/tcp/frames.h"
#include "util/clock.h"
#include "util/errors.h"

namespace crossrail::tcp {

namespace {

constexpr size_t kViewsPerCall = 1000;
// A socket seldom has more short pages than this at once, and the kernel looks at every iovec of a call.
constexpr size_t kTargetsPerCall = 256;
// Two headers: that of a range, and an acknowledgement or so before it.
constexpr size_t kBulkHeadBytes = kRangeHeadBytes;

}  // namespace

// --- streams ---

Stream::Stream(Role role, std::shared_ptr<Connection> connection) : role_(role), connection_(std::move(connection)) {
  connection_->attach(this);
}

Stream::~Stream() { hang_up(); }

bool Stream::pump() { return !over_ && connection_->pump(this); }

void Stream::break_off(const std::string& reason) {
  if (!over_) connection_->break_off(reason);
}

void Stream::leave(const std::string& reason) {
  if (over_) return;
  reason_ = reason;
  hang_up();
  on_broken();
}

void Stream::hang_up(bool abort) {
  if (std::exchange(over_, true)) return;
  if (abort) connection_->close(true);
  connection_->detach(this);
  if (abort) connection_->break_off("the operations of the other direction were given up");
}

bool Stream::reject(const std::string& why) {
  connection_->reject_reason_ = why;
  return false;
}

bool Stream::reject_malformed(FrameType type) {
  return reject("a malformed frame of type " + std::to_string(static_cast<unsigned>(type)));
}

// --- the connection ---

Connection::Connection(ConnectionContext* context, Socket socket, bool is_bulk)
    : context_(context), socket_(std::move(socket)), is_bulk_(is_bulk), last_received_ns_(now_ns()) {
  place_.copier = &context_->copier;
  context_->poller->add(socket_.fd.get(), this, EPOLLIN | EPOLLRDHUP);
  if (socket_.has_unsent()) watch_out(true);  // the end of the handshake may be unsent
}

Connection::~Connection() { close(false); }

void Connection::attach(Stream* stream) {
  const auto role = static_cast<size_t>(stream->role());
  CROSSRAIL_ASSERT(streams_[role] == nullptr && !broken_);
  streams_[role] = stream;
  carried_[role] = true;
}

void Connection::detach(Stream* stream) {
  streams_[static_cast<size_t>(stream->role())] = nullptr;
  if (current_ == stream) {
    current_ = nullptr;
    place_.discard_all();
  }
  if (streams_[0] == nullptr && streams_[1] == nullptr) {
    close(false);
  } else if (batch_) {
    // The other stream goes on, and its frames must be sent completely - but from copies, since this stream's memory is
    // no longer ours to read then.
    batch_->detach_all();
  }
}

// The socket is gone; whatever was arriving or to be sent is dropped.
void Connection::close(bool abort) {
  broken_ = true;
  context_->forget_hot(this);
  std::erase(context_->unwatched, this);
  if (socket_.fd && abort) {
    const linger now{.l_onoff = 1, .l_linger = 0};
    setsockopt(socket_.fd.get(), SOL_SOCKET, SO_LINGER, &now, sizeof now);
  }
  if (socket_.fd) context_->poller->remove(socket_.fd.get());
  socket_.fd.reset();
  if (current_ != nullptr && place_.bytes_left > 0) std::exchange(current_, nullptr)->on_cut(place_.bytes_left);
  place_.clear();
  head_.clear();
  if (batch_) context_->give_batch(std::move(batch_));
}

void Connection::break_off(const std::string& reason, Blame blame) {
  close(false);
  const auto streams = std::exchange(streams_, {});
  for (Stream* stream : streams) {
    if (stream == nullptr) continue;
    stream->over_ = true;
    stream->reason_ = reason;
    stream->blame_ = blame;
  }
  for (Stream* stream : streams) {
    if (stream != nullptr) stream->on_broken();
  }
}

void Connection::reject_peer(const std::string& why) { break_off("protocol error: " + why, Blame::kPeer); }

void Connection::leave(Role role, const std::string& reason) {
  if (Stream* const leaving = stream(role)) leaving->leave(reason);
}

void Connection::on_events(uint32_t events) {
  if (broken_) return;
  if ((events & (EPOLLERR | EPOLLHUP)) != 0) on_reset();
  if (broken_) return;
  if ((events & (EPOLLIN | EPOLLRDHUP | EPOLLERR | EPOLLHUP)) != 0) receive();
  if (!broken_ && (events & EPOLLOUT) != 0) {
    watch_out(false);
    pump(nullptr);
  }
}

// A peer that resets has given up its operations: we may only just have been thawed, long afterwards. What it sent to
// us as the acceptor is still worth reading: acknowledgements, and why it ends.
void Connection::on_reset() {
  is_reset_ = true;
  // Nothing more can be sent; and the batch may refer to memory that cannot be read, so it must not be copied.
  if (batch_) context_->give_batch(std::move(batch_));
  leave(Role::kAcceptor, "the peer reset the connection");
}

void Connection::watch(bool on) {
  if (broken_ || is_watched_ == on || (!on && is_blocked_)) return;  // only epoll reports room
  if (!on) {
    is_watched_ = false;
    context_->poller->pause(socket_.fd.get());
    return;
  }
  const uint32_t events = EPOLLIN | EPOLLRDHUP | (is_blocked_ ? EPOLLOUT : 0u);
  is_watched_ = context_->poller->resume(socket_.fd.get(), this, events);
  auto& unwatched = context_->unwatched;
  if (!is_watched_ && std::ranges::find(unwatched, this) == unwatched.end()) unwatched.push_back(this);
}

void Connection::ask() {
  watch(true);
  on_events(EPOLLIN | (is_blocked_ ? EPOLLOUT : 0u));
}

void Connection::watch_out(bool on) {
  if (std::exchange(is_blocked_, on) == on) return;
  if (on) watch(true);
  if (is_watched_) context_->poller->change(socket_.fd.get(), this, EPOLLIN | EPOLLRDHUP | (on ? EPOLLOUT : 0u));
}

namespace {

// Whose stream the frame belongs to: the peer's operations, or answers to ours.
Role role_of(FrameType type) {
  switch (type) {
    case FrameType::kWrite:
    case FrameType::kRead:
    case FrameType::kMessage:
    case FrameType::kResolve:
    case FrameType::kPing:
    case FrameType::kBye:
    case FrameType::kService:
    case FrameType::kRecall:
      return Role::kAcceptor;
    case FrameType::kReadData:
    case FrameType::kReadEnd:
    case FrameType::kAck:
    case FrameType::kTaken:
    case FrameType::kRefused:
    case FrameType::kResolved:
    case FrameType::kPong:
    case FrameType::kClosing:
    case FrameType::kShare:
    case FrameType::kShared:
      return Role::kInitiator;
  }
  return Role::kInitiator;
}

}  // namespace

bool Connection::on_head(const FrameHeader& header, std::span<const std::byte> meta) {
  const auto type = static_cast<FrameType>(header.type);
  const Role role = role_of(type);
  Stream* to = stream(role);
  // Acknowledgements ride with operations, too.
  const bool is_rider = type == FrameType::kAck || type == FrameType::kTaken;
  if (is_rider && carries(Role::kAcceptor)) to = stream(Role::kAcceptor);
  current_ = to;
  if (to != nullptr) return to->on_head(header, meta, place_);
  // Answers to operations that we have given up meanwhile, and operations that the peer has given up.
  if (carried_[static_cast<size_t>(role)] && (role == Role::kInitiator || is_reset_)) {
    place_.add_discard(header.payload_bytes);
    return true;
  }
  reject_reason_ = "a frame of type " + std::to_string(header.type) + " that nobody waits for";
  return false;
}

// The payload is complete. False: the connection is broken.
bool Connection::end_frame() {
  Stream* const to = std::exchange(current_, nullptr);
  const bool is_good = to == nullptr || to->on_frame();
  place_.clear();
  if (!is_good) reject_peer(reject_reason_);
  return !broken_;
}

// Where one receive call puts its bytes: the missing part of the arriving payload, as much as one call can take, and
// headers that follow it.
struct Connection::ReceiveViews {
  std::array<iovec, kTargetsPerCall + 1> views;  // initialised as far as used
  size_t count = 0;
  uint64_t payload_bytes = 0;
  bool by_copy = false;   // the payload goes through ConnectionContext::arrivals
  size_t head_bytes = 0;  // of an incomplete header received earlier: at the start of the scratch
  size_t head_room = 0;   // room behind them

  uint64_t bytes() const { return payload_bytes + head_room; }
};

Connection::ReceiveViews Connection::receive_views() {
  ReceiveViews to;
  to.by_copy = place_.needs_copy(!socket_.tls);
  if (to.by_copy) {
    to.payload_bytes = std::min<uint64_t>(place_.bytes_left, ConnectionContext::kArrivalsBytes);
    to.views[to.count++] = {context_->arrivals_to_copy(), to.payload_bytes};
  } else if (place_.bytes_left > 0) {
    for (size_t i = place_.at; i < place_.targets.size() && to.count < kTargetsPerCall; ++i) {
      iovec view = place_.targets[i];
      const bool is_discarded = view.iov_base == nullptr;
      if (is_discarded) view = {context_->discard.data(), std::min(view.iov_len, context_->discard.size())};
      to.views[to.count++] = view;
      to.payload_bytes += view.iov_len;
      if (is_discarded) break;
    }
  }
  if (to.payload_bytes < place_.bytes_left) return to;
  std::byte* const scratch = context_->scratch.data();
  to.head_bytes = head_.size();
  if (to.head_bytes > 0) std::memcpy(scratch, head_.data(), to.head_bytes);
  // A bulk connection reads no further than the next header, so that payloads need not be copied out of the scratch.
  const size_t head_end = is_bulk_ ? std::max(kBulkHeadBytes, head_wanted_) : ConnectionContext::kScratchBytes;
  to.head_room = head_end - to.head_bytes;
  to.views[to.count++] = {scratch + to.head_bytes, to.head_room};
  return to;
}

// `size` bytes have arrived in these views. False: the connection is broken.
bool Connection::take(const ReceiveViews& from, uint64_t size) {
  if (from.payload_bytes == 0) return parse(from.head_bytes + size);
  const uint64_t placed = std::min(size, from.payload_bytes);
  if (from.by_copy) {
    place(context_->arrivals->base(), placed);
  } else {
    place_.placed(placed);
  }
  if (place_.bytes_left == 0 && !end_frame()) return false;
  return size == placed || parse(size - placed);
}

// Places payload that arrived in a buffer of ours.
void Connection::place(const std::byte* data, uint64_t size) {
  for (uint64_t done = place_.copy_in(data, size); done < size; done += place_.copy_in(data + done, size - done)) {
    place_.skip_unwritable();
  }
}

bool Connection::receive() {
  uint64_t budget = context_->receive_per_turn_bytes;
  bool moved = false;
  if (socket_.tls) socket_.tls->begin_turn(budget);
  while (!broken_) {
    const ReceiveViews to = receive_views();
    const ssize_t got = socket_.receive({to.views.data(), to.count});
    if (got == 0) {
      break_off("the peer closed the connection");
      return true;
    }
    if (got < 0) {
      if (errno == EINTR) continue;
      if (errno != EAGAIN && errno != EWOULDBLOCK) {
        const int error = errno;
        const std::string why = socket_.error_text();
        if (error == EFAULT && place_.skip_unwritable()) continue;
        break_off("the connection broke: " + why);
        return true;
      }
      if (!moved) return false;
      break;
    }
    moved = true;
    const auto size = static_cast<uint64_t>(got);
    if (!take(to, size)) return true;
    if (size < to.bytes()) {
      if (socket_.tls && socket_.tls->end_waits()) continue;
      break;  // drained
    }
    // Enough for this turn, except for what the socket would not report again: of that there is little.
    if (size >= budget && !(socket_.tls && socket_.tls->holds_more())) break;
    budget -= std::min(size, budget);
  }
  if (broken_) return true;
  last_received_ns_ = context_->now;
  context_->note_hot(this);
  return moved;
}

// Parses the frames in the first `size` bytes of the scratch. False: the connection is broken.
bool Connection::parse(size_t size) {
  const std::byte* at = context_->scratch.data();
  head_wanted_ = 0;
  while (size >= sizeof(FrameHeader)) {
    FrameHeader header;
    std::memcpy(&header, at, sizeof header);
    if (header.mark != mark_of(header) || header.type == 0 || header.type > kFrameTypeMax ||
        header.meta_bytes > kMetaBytesMax) {
      reject_peer("an invalid frame (type " + std::to_string(header.type) + ", mark " + std::to_string(header.mark) +
                  ", " + std::to_string(header.meta_bytes) + " bytes of metadata)");
      return false;
    }
    const size_t head_bytes = sizeof header + header.meta_bytes;
    if (size < head_bytes) {
      head_wanted_ = head_bytes;
      break;
    }
    const std::span meta(at + sizeof header, header.meta_bytes);
    if (head_sum(header, meta) != header.sum) {
      reject_peer("a damaged frame (type " + std::to_string(header.type) + "): its checksum does not fit");
      return false;
    }
    if (!on_head(header, meta)) {
      reject_peer(reject_reason_);
      return false;
    }
    if (broken_) return false;
    at += head_bytes;
    size -= head_bytes;
    const uint64_t present = std::min<uint64_t>(size, place_.bytes_left);
    if (present > 0) {
      place(at, present);
      at += present;
      size -= present;
    }
    if (place_.bytes_left > 0) break;
    if (!end_frame()) return false;
  }
  head_.assign(at, at + size);
  return true;
}

// The acceptor's frames wait for an operation to ride with unless they are asked for; operations need not wait.
bool Connection::fill(TxBatch& batch, const Stream* asker) {
  Stream* const out = stream(Role::kInitiator);
  Stream* const in = stream(Role::kAcceptor);
  if (in != nullptr) in->on_batch_sent();
  if (in != nullptr && out != nullptr && in->has_backlog()) {
    backlog_first_ = !backlog_first_;
    if (backlog_first_) in->fill(batch);
  }
  if (out != nullptr) out->fill(batch);
  if (in != nullptr && (!batch.empty() || asker == nullptr || asker != out || in->has_backlog())) in->fill(batch);
  return !batch.empty();
}

bool Connection::pump(const Stream* asker) {
  if (broken_ || is_blocked_) return false;
  bool moved = false;
  uint64_t budget = context_->send_per_turn_bytes;
  while (!broken_) {
    if (!batch_) {
      batch_ = context_->take_batch();
      // TLS may have bytes of its own to send.
      if (!fill(*batch_, asker) && !socket_.has_unsent()) {
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
      for (Stream* stream : streams_) {
        if (stream != nullptr) stream->on_turn_over();
      }
      break;
    }
    budget -= sent;
  }
  return moved;
}

// True: the whole batch was sent.
bool Connection::flush() {
  if (socket_.tls) return flush_sealed();
  while (!batch_->empty()) {
    msghdr message{};
    const auto views = batch_->views();
    message.msg_iov = views.data();
    message.msg_iovlen = std::min(views.size(), kViewsPerCall);
    constexpr int kFlags = MSG_DONTWAIT | MSG_NOSIGNAL;
    const ssize_t put = views.size() == 1 ? send(socket_.fd.get(), views[0].iov_base, views[0].iov_len, kFlags)
                                          : sendmsg(socket_.fd.get(), &message, kFlags);
    if (put >= 0) {
      batch_->sent(static_cast<size_t>(put));
      continue;
    }
    if (errno == EINTR) continue;
    if (is_full(errno)) {
      watch_out(true);
      return false;
    }
    const std::string why = std::string("the connection broke: ") + std::strerror(errno);
    if (errno == EFAULT) {
      for (Stream* stream : streams_) {
        if (stream != nullptr) stream->on_fault();
      }
    }
    break_sending(why);
    return false;
  }
  return true;
}

// The same under TLS. Encrypted bytes no longer belong to the batch, and may still wait for the kernel.
bool Connection::flush_sealed() {
  TlsSession& tls = *socket_.tls;
  for (;;) {
    if (tls.flush() != 0) {
      if (is_full(errno)) {
        watch_out(true);
      } else {
        break_sending(std::string("the connection broke: ") + std::strerror(errno));
      }
      return false;
    }
    if (batch_->empty()) return true;
    const ssize_t sealed = tls.seal(batch_->views());
    if (sealed < 0) {
      break_sending("the connection broke: " + socket_.error_text());
      return false;
    }
    batch_->sent(static_cast<size_t>(sealed));
  }
}

// What the peer has sent before is still worth reading.
void Connection::break_sending(const std::string& why) {
  on_reset();
  if (!broken_) receive();
  break_off(why);
}

}  // namespace crossrail::tcp
