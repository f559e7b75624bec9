// One connection after its handshake: cuts what arrives into frames, lets payloads land where their stream says, and
// sends batches of frames. A *stream* is what one side's operations and the answers to them are; a connection carries
// one, or one each way: then the kernels' acknowledgements of either direction ride on the other's frames.
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

// What all connections of one transport share. Progress holder.
struct ConnectionContext {
  static constexpr size_t kScratchBytes = 128 << 10;
  static constexpr size_t kArrivalsBytes = StagePool::kStageBytes;
  explicit ConnectionContext(Poller* poller) : poller(poller), scratch(kScratchBytes), discard(kScratchBytes) {}
  // Sockets that brought something of late: asked directly, which is cheaper than asking epoll first.
  void note_hot(Connection* connection);
  void forget_hot(Connection* connection);
  void cool();  // none is hot
  struct Hot {
    Connection* connection = nullptr;
    uint32_t misses = 0;  // in a row
    uint32_t hits = 0;
  };
  std::array<Hot, 3> hot{};  // the latest first; empty ones last
  // Left epoll, which did not take them back: asked now and then, as if it had news.
  void ask_unwatched();
  std::vector<Connection*> unwatched;
  std::byte* arrivals_to_copy();
  std::unique_ptr<TxBatch> take_batch();
  void give_batch(std::unique_ptr<TxBatch> batch);

  Poller* poller;
  int64_t now = 0;  // a little old, of the current poll
  // Of one connection before others get a turn.
  uint64_t receive_per_turn_bytes = uint64_t{4} << 20;
  uint64_t send_per_turn_bytes = uint64_t{2} << 20;
  std::vector<std::byte> scratch;
  std::vector<std::byte> discard;
  StagePool stages;
  std::vector<std::unique_ptr<TxBatch>> batches;
  device::Copier copier;
  std::unique_ptr<device::HostBuffer> arrivals;  // once it was needed: what is copied on, most of it to GPUs
};

// Which half of a link a stream is: our operations and the answers to them, or the peer's and ours.
enum class Role : uint8_t { kInitiator = 0, kAcceptor = 1 };

// Who caused the end of a stream, as far as it matters.
enum class Blame : uint8_t { kNobody, kPeer };  // kPeer: it broke the protocol

// Lifecycle: 1. on the connection, from construction. 2. over: by the connection's end (on_broken), or because its
// owner gave it up. It keeps the connection's object, though no longer the socket, until it is destroyed.
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
  // Sends what fill() gives, until there is no more or the socket is full. True when anything was sent.
  bool pump();
  // The end of the whole connection: on_broken() of all its streams is called.
  void break_off(const std::string& reason);
  // The end of this stream, by the peer's wish: on_broken() is called. The connection ends with its last stream.
  void leave(const std::string& reason);
  // The same without on_broken(): its owner has given it up. abort: what was sent and not yet read by the peer's
  // process is thrown away there too, as far as the network lets us say so; that ends the whole connection.
  void hang_up(bool abort = false);

 protected:
  // A frame's head has arrived. Adds the frame's payload_bytes to `place`. False: a protocol error, said by reject().
  virtual bool on_head(const FrameHeader& header, std::span<const std::byte> meta, Placement& place) = 0;
  // Its payload is in place, or discarded. False as above.
  virtual bool on_frame() = 0;
  // Appends frames.
  virtual void fill(TxBatch& batch) = 0;
  // What fill() gave before has been handed to the kernel.
  virtual void on_batch_sent() {}
  // Has more to send than one batch: takes turns with the other stream.
  virtual bool has_backlog() const { return false; }
  // The connection has sent its share and there may be more: sees to it that pump() is called again soon.
  virtual void on_turn_over() = 0;
  virtual void on_broken() = 0;
  // The connection ends within a frame of this stream: of its payload all but so many bytes are in place.
  virtual void on_cut(uint64_t /*missing_bytes*/) {}
  // The kernel cannot read memory that fill() gave. The connection breaks next.
  virtual void on_fault() {}
  // Set-up of an orderly end: the last words of the peer.
  bool reject(const std::string& why);
  // The same of a frame whose parts do not fit each other, or us.
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
  // Takes over a connected socket. is_bulk: expects long payloads, so it reads heads by themselves.
  // Throws TransportError when it cannot be watched.
  Connection(ConnectionContext* context, Socket socket, bool is_bulk);
  ~Connection() override;

  void on_events(uint32_t events) override;
  // Reads and handles what has arrived, up to a share of the time. True when anything was.
  bool receive();
  // asker: whose frames are to be sent; what the other stream has rides along. Null: everybody's.
  bool pump(const Stream* asker);
  void break_off(const std::string& reason, Blame blame = Blame::kNobody);
  // The end of that stream, if there is one; of the connection, if it was the last.
  void leave(Role role, const std::string& reason);

  bool is_broken() const { return broken_; }
  bool carries(Role role) const { return stream(role) != nullptr; }
  int fd() const { return socket_.fd.get(); }
  // The cipher that bytes travel under; null: in the clear.
  const char* cipher() const { return socket_.tls ? socket_.tls->cipher() : nullptr; }
  bool is_blocked() const { return is_blocked_; }
  // Whether epoll tells of news: costs each packet some, and a socket that is asked directly all the time needs it not.
  void watch(bool on);
  void ask();  // of ConnectionContext::unwatched
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
  Stream* current_ = nullptr;         // whose frame is arriving; null: nobody's any more
  bool broken_ = false;
  bool is_reset_ = false;  // by the peer: its operations count no more
  bool is_watched_ = true;
  bool is_blocked_ = false;  // the socket was full: EPOLLOUT tells when it is not
  bool backlog_first_ = false;
  std::string reject_reason_;
  int64_t last_received_ns_ = 0;
  // Invariant: place_.bytes_left > 0 implies head_ is empty.
  std::vector<std::byte> head_;  // of a frame whose metadata is not complete
  size_t head_wanted_ = 0;       // how long it will be, as far as known
  Placement place_;
  std::unique_ptr<TxBatch> batch_;
};

}  // namespace crossrail::tcp
