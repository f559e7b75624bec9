// TCP between engines, with nothing but the kernel: the default between hosts that have no RDMA network.
//
// The initiator's worker gathers operations into frames and sends them directly from their regions; the target's worker
// places them directly into the target's pages, so the kernel copies once on each side. Completion means placed: the
// target acknowledges. Each peer has, per pair of rails, one connection for small operations and one for large ones.
// The protocol: wire.h. How a connection begins: handshake.h. What happens when one breaks: out_watch.cc. The
// transport's own calls: tcp_transport.cc, posting.cc, acknowledging.cc, polling.cc; peers that connect to us:
// incoming.cc.
#pragma once

#include <atomic>
#include <deque>
#include <map>
#include <memory>
#include <optional>
#include <vector>

#include "transport/tcp/connect.h"
#include "transport/tcp/link.h"
#include "transport/tcp/poller.h"
#include "transport/tcp/region_table.h"
#include "transport/tcp/stranger_news.h"
#include "transport/transport.h"

namespace crossrail::tcp {

// How long an acknowledgement waits for an operation to ride with, for each of the link's rides if everybody sleeps,
// where a timer ends the wait. (Setting a timer at each visit of a thread made a round trip three times as long, and
// each timer that rings for nothing wakes somebody.)
inline constexpr int64_t kAckWaitNs = 30'000;
inline constexpr int64_t kAckSleepNs = 100'000;
inline constexpr int32_t kRidesMax = 8;

class TcpTransport final : public Transport, public Acceptor::Owner {
 public:
  TcpTransport(const TransportOptions& options, Sink* sink);
  ~TcpTransport() override;

  const Traits& traits() const override { return traits_; }
  const Address& address() const override { return address_; }
  std::vector<std::string> rail_devices() const override;

  std::unique_ptr<LocalRegion> register_memory(uint64_t id, std::byte* base, uint64_t length_bytes,
                                               Access access) override;
  std::unique_ptr<LocalRegion> register_gpu_memory(uint64_t id, const device::GpuMemory& memory,
                                                   Access access) override;
  std::unique_ptr<LocalRegion> allocate(uint64_t id, uint64_t length_bytes, bool populate) override;
  void revoke_region(LocalRegion& region) override;
  std::vector<std::string> users_of(const LocalRegion& region) override;
  bool is_region_quiet(const LocalRegion& region) override;

  Link* connect(const std::shared_ptr<const Address>& address) override;
  void disconnect(Link& link) override;
  std::unique_ptr<RemoteKey> resolve(Link& link, const RegionDescriptor& descriptor) override;
  std::vector<PathReport> explain(Link& link) override;
  std::vector<RailReport> explain_rails(Link& link) override;
  uint64_t rail_depth(Link& link, uint32_t rail) override;

  uint32_t post(Link& link, uint32_t rail, std::span<const WorkRequest> requests, uint32_t* completed) override;
  uint32_t poll() override;
  void withdraw(bool (*wanted)(void* context)) override;

  void arm() override;
  void disarm() override;
  // seq_cst: pairs with hush(), and comes before what EngineCore::leave() does about the answer.
  bool is_armed() const override { return armed_.load(std::memory_order_seq_cst); }
  // Only what no socket reports: more to send than fits one turn. For everything else the kernel wakes the sleeper.
  bool has_arrivals() override;
  Deadline next_timer() const override;
  int wake_fd() const override { return poller_.doorbell().sleep_fd(); }
  bool hush(bool looks_at_once) override;
  void wake() override;

  void close() override;
  void abandon_after_fork() override;

  // --- for links; progress holder ---
  Sink& sink() { return *sink_; }
  ConnectionContext& connections() { return connections_; }
  RegionTable& regions() { return regions_; }
  Poller& poller() { return poller_; }
  const TransportOptions& options() const { return options_; }
  const Rail& rail(uint32_t index) const { return rails_[index]; }
  int64_t now() const { return now_; }  // of the current poll
  uint64_t message_window_bytes() const { return kMessageBytesMax + traits_.message_bytes_max; }
  void mark_dirty(OutLink& link);
  void watch(OutLink& link);
  void tick_soon() { next_tick_ns_ = 0; }
  void ack_later(InLink& link, bool at_once);
  void bury(std::unique_ptr<Stream> stream);
  void bury(std::unique_ptr<Connector> connector);
  void retire(OutLink& link, const WorkRequest& request, Status status, const std::string& detail);
  void hold(InLink& link);
  // New messages queue behind the held ones.
  bool holds_messages() const { return !holding_.empty(); }
  void on_taken(InLink& link, uint64_t message_id);
  void on_untaken(InLink& link, MessageOutcome outcome);
  // The initiator wants it back, and gets it if it is still waiting for a buffer.
  void recall(InLink& link, uint64_t message_id);
  // For messages: what was told may have been lost with a connection.
  void tell_outcomes_again(InLink& link);
  // Our operations towards the peer at `link`, by link id; null: over.
  OutLink* find_out(const Address& peer, uint64_t id);
  void on_incoming_broken(InChannel& channel, const InStream& stream);
  // The peer also uses this connection for operations of its own.
  void attach_incoming(const Hello& hello, std::shared_ptr<Connection> connection);
  // Adds frames that report what this link's twin has placed, to ride along on this connection.
  void put_rider_acks(OutLink& link, const Connection& by, TxBatch& batch);

  // Acceptor::Owner
  std::optional<Refusal> check_hello(const Hello& hello) override;
  void on_accepted(Acceptor& acceptor, const Hello& hello, Socket socket) override;
  void on_stranger(RefusalCode code, const std::string& who, const std::string& what) override;

 private:
  struct Listener final : Pollable {
    Listener(TcpTransport* transport, uint32_t rail) : transport(transport), rail(rail) {}
    void on_events(uint32_t) override { transport->accept_all(*this); }
    TcpTransport* const transport;
    const uint32_t rail;
  };

  void note_outcome(InLink& link, MessageOutcome outcome);
  static void tell_taken(InLink& link, uint64_t message_id);
  void accept_all(Listener& listener);
  void make_room_for_stranger();
  void tell_of_strangers();
  void keep_to_rail(int fd);
  void end_unconnected(const Address& peer);
  InChannel& begin_epoch(const Hello& hello);
  // share.cc: one connection for both directions
  std::shared_ptr<Connection> find_shareable(const OutChannel& channel) const;
  bool may_share(const OutChannel& channel) const;
  bool start_sharing(OutChannel& channel);
  bool should_move(const OutChannel& channel) const;
  void reconsider_attempts(OutLink& link);
  // out_watch.cc: failures
  void tend(OutLink& link);
  bool tend_channels(OutLink& link);
  void reconnect_silent(OutLink& link);
  void tend_liveness(OutLink& link);
  void tend_vain(OutLink& link);
  void excuse(OutLink& link, int64_t away_ns);
  void fail_pinned(OutLink& link);
  bool may_attempt(OutLink& link);
  void start_attempt(OutChannel& channel);
  void count_attempts();
  void take_down(OutLink& link, const std::string& reason, LinkEnd end);
  void flush(OutLink& link, Status status, const std::string& detail);
  void say_goodbye(OutLink& link, const std::string& text);
  uint32_t pump(OutLink& link);
  uint32_t pump_dirty();
  uint32_t send_acks(bool all);
  void send_ack(InLink& link);
  void offer_held();
  void tend_incoming();
  void drop(InLink& link);
  // Updates whether the link has a connection, and since when it has none.
  void note_connected(InLink& link);
  uint32_t poll_sockets();
  void tick();
  // When it must be tended next while everybody sleeps.
  int64_t next_look_at(const OutLink& link, int64_t now) const;

  Sink* const sink_;
  const TransportOptions options_;
  Traits traits_;
  Address address_;
  Digest key_;
  std::shared_ptr<TlsContext> tls_;  // null: plaintext
  Poller poller_;
  ConnectionContext connections_;
  RegionTable regions_;
  std::vector<Rail> rails_;
  std::vector<std::unique_ptr<Listener>> listeners_;
  int64_t listeners_paused_until_ns_ = 0;  // out of descriptors
  bool strangers_reported_ = false;
  StrangerNews stranger_news_;
  std::vector<std::unique_ptr<Acceptor>> acceptors_;
  std::vector<std::unique_ptr<OutLink>> out_;
  std::map<std::pair<Incarnation, uint64_t>, std::unique_ptr<InLink>> in_;
  size_t unconnected_ = 0;  // links in in_ that have an unconnected_since_ns
  std::vector<OutLink*> dirty_;
  std::vector<OutLink*> watched_;
  std::vector<InLink*> acks_;
  std::deque<InLink*> holding_;  // links with messages that nobody takes, the next in turn first
  // Streams that broke in the middle of their own calls: destroyed at the end of the poll.
  std::vector<std::unique_ptr<Stream>> dead_streams_;
  std::vector<std::unique_ptr<Connector>> dead_connectors_;
  uint64_t revocations_seen_ = 0;
  uint64_t next_link_id_;
  uint32_t newest_epoch_ = 0;  // of links that ended, so that an answer to one of them is not taken for another link's
  int64_t now_ = 0;
  int64_t next_tick_ns_ = 0;
  int64_t ticked_ns_ = 0;      // or when it began to watch its first link
  size_t young_attempts_ = 0;  // at the latest tick, and those begun since
  int64_t looked_ns_ = 0;
  uint32_t idle_polls_ = 0;
  uint32_t polls_ = 0;
  bool has_slept_ = false;               // somebody has slept since the last look at the sockets
  std::atomic<bool> has_looked_{false};  // polled since the last hush()
  std::atomic<bool> armed_{false};
  bool closed_ = false;
};

}  // namespace crossrail::tcp
