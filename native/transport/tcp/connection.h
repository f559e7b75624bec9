// One connection after its handshake: splits arriving bytes into frames, places payloads where their stream says, and
// sends batches of frames. A *stream* consists of one side's operations and the answers to them. A connection carries
// one stream, or one in each direction: then the kernels' acknowledgements of either direction ride on the other's
// frames.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "transport/tcp/batch.h"
#include "transport/tcp/poller.h"
#include "transport/tcp/socket.h"
#include "transport/tcp/wire.h"
#include "util/memory_map.h"

namespace crossrail::tcp {

class Connection;

// State shared by all connections of one transport. Progress holder.
struct ConnectionContext {
  static constexpr size_t kScratchBytes = 128 << 10;
  static constexpr size_t kArrivalsBytes = StagePool::kStageBytes;
  explicit ConnectionContext(Poller* poller) : poller(poller), scratch(kScratchBytes), discard(kScratchBytes) {}
  // Sockets that received something recently: polled directly, which is cheaper than asking epoll first.
  void note_hot(Connection* connection);
  void forget_hot(Connection* connection);
  void cool();  // no socket is hot afterwards
  struct Hot {
    Connection* connection = nullptr;
    uint32_t misses = 0;  // consecutive ones
    uint32_t hits = 0;
  };
  std::array<Hot, 3> hot{};  // the latest first; empty ones last
  // Polls connections that left epoll and could not be added again, now and then, as if they had data.
  void ask_unwatched();
  std::vector<Connection*> unwatched;
  std::byte* arrivals_to_copy();
  std::unique_ptr<TxBatch> take_batch();
  void give_batch(std::unique_ptr<TxBatch> batch);

  Poller* poller;
  int64_t now = 0;  // time of the current poll, slightly old
  // From one connection before others get a turn.
  uint64_t receive_per_turn_bytes = uint64_t{4} << 20;
  uint64_t send_per_turn_bytes = uint64_t{2} << 20;
  std::vector<std::byte> scratch;
  std::vector<std::byte> discard;
  StagePool stages;
  std::vector<std::unique_ptr<TxBatch>> batches;
  device::Copier copier;
  std::unique_ptr<device::HostBuffer> arrivals;  // allocated on first use: payload to be copied on, mostly to GPUs
};

// Which half of a link a stream is: our operations and their answers, or the peer's operations and our answers.
enum class Role : uint8_t { kInitiator = 0, kAcceptor = 1 };

// Who caused the end of a stream, where it matters.
enum class Blame : uint8_t { kNobody, kPeer };  // kPeer: it broke the protocol

// Lifecycle: 1. on the connection, from construction. 2. over: because the connection ended (on_broken), or because its
// owner gave it up. It keeps the connection object, but not the socket, until it is destroyed.
class Stream {
 public:
  Stream(Role role, std::shared_ptr<Connection> connection);
  virtual ~Stream();
  Stream(const Stream&) = delete;
  Stream& operator=(const Stream&) = delete;

  Role role() const { return role_; }
  bool is_broken() const { return over_; }
  const std::string& reason() const { return reason_; }
  Blame blame() const { return blame_; }
  const std::shared_ptr<Connection>& connection() const { return connection_; }
  // Sends what fill() provides, until there is no more or the socket is full. True if anything was sent.
  bool pump();
  // Ends the whole connection: on_broken() is called on all its streams.
  void break_off(const std::string& reason);
  // Ends this stream at the peer's request: on_broken() is called. The connection ends with its last stream.
  void leave(const std::string& reason);
  // The same without on_broken(): its owner has given it up. abort: data that was sent but not yet read by the peer's
  // process is discarded there too, as far as the network lets us say so; this ends the whole connection.
  void hang_up(bool abort = false);

 protected:
  // A frame's header has arrived. Adds the frame's payload_bytes to `place`. False: a protocol error, reported by
  // reject().
  virtual bool on_head(const FrameHeader& header, std::span<const std::byte> meta, Placement& place) = 0;
  // The payload is in place, or discarded. False as above.
  virtual bool on_frame() = 0;
  // Appends frames.
  virtual void fill(TxBatch& batch) = 0;
  // Everything that fill() provided has been handed to the kernel.
  virtual void on_batch_sent() {}
  // Has more to send than one batch: alternates with the other stream.
  virtual bool has_backlog() const { return false; }
  // The connection has used up its turn and may have more to send: make sure that pump() is called again soon.
  virtual void on_turn_over() = 0;
  virtual void on_broken() = 0;
  // The connection ends within a frame of this stream; all but this many bytes of its payload are in place.
  virtual void on_cut(uint64_t /*missing_bytes*/) {}
  // The kernel could not read memory that fill() provided. The connection breaks next.
  virtual void on_fault() {}
  // Always false, for on_head() and on_frame(). why: what the peer did against the protocol.
  bool reject(const std::string& why);
  // The same for a frame whose fields do not fit each other, or our state.
  bool reject_malformed(FrameType type);

 private:
  friend class Connection;
  const Role role_;
  const std::shared_ptr<Connection> connection_;
  bool over_ = false;
  std::string reason_;
  Blame blame_ = Blame::kNobody;
};

class Connection final : public Pollable {
 public:
  // Takes over a connected socket. is_bulk: expects long payloads, so it reads headers separately. Throws
  // TransportError if the socket cannot be watched.
  Connection(ConnectionContext* context, Socket socket, bool is_bulk);
  ~Connection() override;

  void on_events(uint32_t events) override;
  // Reads and handles what has arrived, within its share of the turn. True if anything was handled.
  bool receive();
  // asker: the stream whose frames are to be sent; frames of the other stream ride along. Null: everybody's.
  bool pump(const Stream* asker);
  void break_off(const std::string& reason, Blame blame = Blame::kNobody);
  // Ends that stream, if it exists, and the connection if it was the last.
  void leave(Role role, const std::string& reason);

  bool is_broken() const { return broken_; }
  bool carries(Role role) const { return stream(role) != nullptr; }
  int fd() const { return socket_.fd.get(); }
  // The cipher in use; null: plaintext.
  const char* cipher() const { return socket_.tls ? socket_.tls->cipher() : nullptr; }
  bool is_blocked() const { return is_blocked_; }
  // Whether epoll reports events: that costs a little per packet, and a socket that is polled directly all the time
  // does not need it.
  void watch(bool on);
  void ask();  // for ConnectionContext::unwatched
  int64_t last_received_ns() const { return last_received_ns_; }
  TxBatch* pending_batch() { return batch_.get(); }
  Placement& placement() { return place_; }

 private:
  friend class Stream;
  Stream* stream(Role role) const { return streams_[static_cast<size_t>(role)]; }
  void attach(Stream* stream);
  void detach(Stream* stream);
  void close(bool abort);
  bool on_head(const FrameHeader& header, std::span<const std::byte> meta);
  bool end_frame();
  void on_reset();
  bool fill(TxBatch& batch, const Stream* asker);
  bool flush();
  bool flush_sealed();
  void break_sending(const std::string& why);
  struct ReceiveViews;
  ReceiveViews receive_views();
  bool take(const ReceiveViews& from, uint64_t size);
  void place(const std::byte* data, uint64_t size);
  bool parse(size_t size);
  void reject_peer(const std::string& why);
  void watch_out(bool on);

  ConnectionContext* const context_;
  Socket socket_;
  const bool is_bulk_;
  std::array<Stream*, 2> streams_{};  // by role
  std::array<bool, 2> carried_{};     // once
  Stream* current_ = nullptr;         // owner of the arriving frame; null: that stream has ended
  bool broken_ = false;
  bool is_reset_ = false;  // by the peer: its operations no longer count
  bool is_watched_ = true;
  bool is_blocked_ = false;  // the socket was full: EPOLLOUT reports room
  bool backlog_first_ = false;
  std::string reject_reason_;
  int64_t last_received_ns_ = 0;
  // Invariant: place_.bytes_left > 0 implies head_ is empty.
  std::vector<std::byte> head_;  // of a frame whose metadata is incomplete
  size_t head_wanted_ = 0;       // its full length, as far as known
  Placement place_;
  std::unique_ptr<TxBatch> batch_;
};

}  // namespace crossrail::tcp
