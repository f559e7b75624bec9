// The Transport contract over RDMA NICs, whatever library drives them (nic.h): paths, links, counting, failure.
//
// Two engines have one session (session.h), with a path per pair of rails. Works wait in the link's queue and take
// whichever path has room; a path has a bounded window, so rails of any speed finish together. Completion means that
// the peer's NIC has placed the bytes. Messages travel as fragments on one path at a time, and complete when the peer's
// pool has taken them.
//
//   handshake.cc  datagrams, how sessions and paths begin
//   paths.cc      how paths break, and what becomes of works in doubt
//   posting.cc    from the queue to the paths
//   messages.cc   fragments, messages, outcomes
//   watch.cc      timers: liveness, paths that are to be made again, ends of links
//
// Calls between the layers: NICs report from inside poll() only, and the layer then only takes notes (NicEvents) and
// acts on them afterwards (act()), so that a NIC is never called from inside itself.
#pragma once

#include <atomic>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <vector>

#include "transport/doorbell.h"
#include "transport/rdma/nic.h"
#include "transport/rdma/region.h"
#include "transport/rdma/session.h"
#include "transport/transport.h"

namespace crossrail::rdma {

class RdmaTransport final : public Transport {
 public:
  // kind: kVerbs, kOfi or kSim: the rails under which `nics` appear in addresses. Throws TransportError.
  RdmaTransport(TransportKind kind, const TransportOptions& options, std::vector<std::unique_ptr<Nic>> nics,
                Sink* sink);
  ~RdmaTransport() override;

  const Traits& traits() const override { return traits_; }
  const Address& address() const override { return address_; }
  std::vector<std::string> rail_devices() const override;
  void complete_address(const Address& address) override;

  std::unique_ptr<LocalRegion> register_memory(uint64_t id, std::byte* base, uint64_t length_bytes,
                                               Access access) override;
  std::unique_ptr<LocalRegion> register_gpu_memory(uint64_t id, const device::GpuMemory& memory,
                                                   Access access) override;
  std::unique_ptr<LocalRegion> allocate(uint64_t id, uint64_t length_bytes, bool populate) override;
  void revoke_region(LocalRegion& region) override;
  std::vector<std::string> users_of(const LocalRegion& region) override;
  bool is_region_quiet(const LocalRegion& region) override;
  bool move_source(const LocalRegion& from, LocalRegion& to) override;

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
  bool is_armed() const override { return armed_.load(std::memory_order_seq_cst); }
  bool has_arrivals() override;
  Deadline next_timer() const override;
  int wake_fd() const override { return doorbell_->sleep_fd(); }
  bool hush(bool looks_at_once) override;
  void wake() override;

  void close() override;
  void abandon_after_fork() override;

  // Datagrams and fragments that were invalid, or not for us: for tests, and for people.
  uint64_t garbage_count() const { return garbage_; }
  size_t session_count() const { return sessions_.size(); }

 private:
  using RegisterAt = std::function<std::unique_ptr<Registration>(Nic&)>;
  void register_on(uint32_t rail, Registrations& registered, const RegisterAt& register_at);
  void check_reach(const RdmaRegion& region) const;
  std::unique_ptr<RdmaRegion> make_region(std::byte* base, uint64_t length_bytes, Access access, bool is_gpu = false);
  std::unique_ptr<LocalRegion> add_region(std::unique_ptr<RdmaRegion> region, uint64_t id,
                                          const RegisterAt& register_at);

  // One NIC, and the sink of its events.
  struct Rail final : NicEvents {
    Rail(RdmaTransport* transport, uint32_t index, std::unique_ptr<Nic> nic)
        : transport(transport), index(index), nic(std::move(nic)) {}
    void on_work_done(NicPath& path, uint64_t cookie, bool through) override;
    void on_work_failed(NicPath& path, uint64_t cookie, NicFault fault, int code, const std::string& text) override;
    void on_imm(NicPath* path, uint32_t imm) override;
    void on_fragment(NicPath* path, std::span<const uint8_t> bytes) override;
    void on_datagram(std::span<const uint8_t> bytes) override;
    void on_nobody(std::span<const uint8_t> peer_endpoint) override;
    void on_path_broken(NicPath& path, bool by_peer, const std::string& reason) override;
    void on_path_flushed(NicPath& path) override;
    void on_port(bool is_up, const std::string& detail) override;
    void on_device_fatal(const std::string& reason) override;

    uint64_t last_turn = 0;  // when it was last given works, in turns_
    RdmaTransport* const transport;
    const uint32_t index;
    const std::unique_ptr<Nic> nic;
    bool is_up = true;
    std::atomic<bool> is_dead{false};  // the device is gone. The holder writes, registering threads read
    int64_t down_since_ns = 0;         // 0: it is up, or has not been up since it was opened
    std::string trouble;
  };

  // A fragment to be handled after the NICs have been polled.
  struct Said {
    Session::Key session;
    FragmentKind kind;
    Bytes body;
  };

  // --- running (rdma_transport.cc) ---
  uint32_t poll_nics();
  void act();
  void mark_dirty(Session& session);
  void unblock();
  void mark_broken(Path& path, Cause cause, const std::string& reason);
  void retire(RdmaLink& link, const WorkRequest& request, Status status, const std::string& detail);
  void end_outstanding(RdmaLink& link, uint64_t count);
  void report_garbage(const std::string& who, const std::string& what);
  static Path* path_of(NicPath& nic_path) { return static_cast<Path*>(nic_path.user); }

  // --- handshake.cc ---
  Session& make_session(const Incarnation& peer, bool leads);
  Session* find_session(const Incarnation& peer, bool leads);
  bool has_rails_of(const Session& session, const Address& address) const;
  void get_to_know(Session& session, std::shared_ptr<const Address> address);
  Path& path_for(Session& session, PathKey key);
  void pair_paths(Session& session, const Address& peer);
  void on_datagram(Rail& rail, std::span<const uint8_t> bytes);
  void on_refuse(const Rail& rail, const Datagram& datagram);
  void on_sealed(Session& session, const Datagram& datagram);
  Session* session_of(Rail& rail, const Datagram& datagram, std::span<const uint8_t> bytes);
  void hear_link(Session& session, bool has_link);
  void on_knock(Session& session, const PathBody& body);
  void on_hello(Session& session, const PathBody& body);
  void on_accept(Session& session, const PathBody& body);
  void refuse(Rail& rail, const DatagramHead& head, RefuseCode code, const std::string& text);
  bool may_answer_stranger();
  void refuse_path(const Path& path);
  Bytes begin(const Session& session, DatagramKind kind, uint32_t rail) const;
  void send_path_datagram(Path& path, DatagramKind kind, PathBody body);
  void tend_path(Path& path);
  bool make_nic_path(Path& path);
  bool connect_path(Path& path, const Bytes& offer);
  void open_path(Path& path);
  bool wants_paths(const Session& session) const;

  // --- paths.cc ---
  void start_break(Path& path);
  void finish_break(Path& path);
  void collect_doubt(Path& path);
  void drop_nic_path(Path& path);
  void fail_before_flush(Path& path);
  void ask(Path& path);
  void answer(Path& path, const std::vector<Span>& spans);
  Status verdict_on(const Span& span);
  void on_resolve(Session& session, const ResolveBody& body);
  void on_resolved(Session& session, const ResolvedBody& body);
  void settle(Path& path, const ResolvedBody& body);
  void settle_suspects(Path& path, const ResolvedBody& body);
  bool send_to_peer(Path& path, FragmentKind kind, const Bytes& fragment_body, DatagramKind datagram_kind,
                    bool by_datagram_too);
  void retire_refused(RdmaLink& link, const WorkRequest& work, Status status, const std::string& provider);
  void note_gone(RdmaLink& link, const std::vector<Span>& spans, const std::vector<Status>& verdicts);
  void fail_gone(RdmaLink& link);
  std::string hint_for(const Path& path) const;
  void drain(const std::vector<Path*>& paths);
  void give_up(Path& path);

  // --- posting.cc ---
  bool is_usable(const Path& path) const;
  Path* best_path(Session& session, uint32_t rail, const WorkRequest& request,
                  const std::vector<const Path*>& refusing);
  static bool is_known_by(const Path& path, const WorkRequest& request);
  bool has_room(const Path& path, uint64_t length_bytes) const;
  bool is_cut_off(const Session& session, uint32_t rail, const WorkRequest& request) const;
  static constexpr uint32_t kRequeued = ~1u;  // for post_some: routing and attempts are already recorded
  uint32_t post_some(Path& path, std::span<const WorkRequest> requests, uint32_t rail);
  uint32_t post_open(RdmaLink& link, uint32_t rail, std::span<const WorkRequest> requests);
  void tell_sent(Path& path, uint32_t accepted);
  bool pump_works(Session& session);
  bool pump_queue(Session& session, uint32_t rail);
  void cut(RdmaLink& link, WorkRequest request);
  void end_part(RdmaLink& link, const WorkRequest& part, Status status, const std::string& detail);
  void end_works(Path& path, uint64_t through_cookie);
  void end_work(Path& path, uint64_t cookie);
  void pop_ended(Path& path);
  void requeue(RdmaLink& link, const std::vector<WorkRequest>& works);
  void fail_pinned(RdmaLink& link);
  void excuse(Session& session, int64_t away_ns);
  void excuse_nics(Session& session, int64_t away_ns);
  NicWork nic_work(const WorkRequest& request, const Path& path, uint64_t cookie) const;
  void set_speed(Path& path);
  void hear_speed(Path& path, uint32_t mbps);
  void set_speeds();

  // --- messages.cc ---
  Path* path_of_fragment(Rail& rail, NicPath* nic_path, uint64_t token);
  void on_fragment(Path& path, FragmentKind kind, std::span<const uint8_t> body);
  bool on_message_chunk(Session& session, std::span<const uint8_t> body);
  bool on_outcomes(Session& session, std::span<const uint8_t> body);
  bool on_recall(Session& session, std::span<const uint8_t> body);
  void tell_outcome(Session& session, uint64_t id);
  bool on_service(Session& session, std::span<const uint8_t> body);
  bool on_served(Session& session, std::span<const uint8_t> body);
  bool pump_served(Session& session, Path& path);
  bool pump_services(Session& session, Path& path);
  bool on_introduce(Session& session, std::span<const uint8_t> body);
  void on_state(Session& session, const StateBody& state);
  void on_bye(Session& session, const std::string& text);
  void on_said(const Said& said);
  bool pump_control(Session& session);
  bool pump_path_control(Path& path);
  bool pump_outcomes(Session& session, Path& path);
  bool pump_recalls(RdmaLink& link, Path& path);
  bool pump_messages(Session& session);
  Path* message_path(Session& session);
  void offer_held(Session& session);
  void forget_known_outcomes(Session& session, uint64_t first_open_id);

  // --- watch.cc ---
  void tick();
  void tend_soon(Session& session);
  void tend_urgent();
  void finish_tending();
  void look_after(Session& session);
  void tend(Session& session);
  void tend_liveness(Session& session);
  void tend_link(Session& session);
  void doom(Session& session, const std::string& reason, LinkEnd end);
  bool finish_doom(Session& session);
  void flush_link(RdmaLink& link, Status status, const std::string& detail);
  void end_session(Session& session, const std::string& reason);
  void forget(Session& session);
  void on_port(Rail& rail);
  void leave_down_ports(Session& session);
  void excuse_silence(Session& session, uint32_t rail, int64_t away_ns);
  void on_nobody(const Bytes& endpoint);
  bool is_watched(const Session& session) const;
  void say_bye(Session& session, const std::string& text);
  std::string pair_text(const Path& path) const;
  std::string down_text(const Session& session) const;
  std::string open_text(const Session& session) const;
  std::string own_trouble(const Session& session) const;

  Sink* const sink_;
  const TransportKind kind_;
  const TransportOptions options_;
  Address address_;
  Traits traits_;
  RegionTable regions_;
  SharedRegistrations shared_;
  std::vector<std::unique_ptr<Rail>> rails_;
  uint32_t fastest_mbps_ = 0;
  uint64_t turns_ = 0;
  uint64_t work_bytes_max_ = 0;            // the minimum over all NICs
  static constexpr size_t kBatch = 32;     // works handed to a path at once
  std::array<NicWork, kBatch> nic_works_;  // scratch of post_some: initialising it would cost as much as a post
  std::optional<Doorbell> doorbell_;       // none in a simulation, where nobody sleeps
  std::map<Session::Key, std::unique_ptr<Session>> sessions_;
  std::map<uint64_t, Path*> tokens_;  // paths that have a NicPath
  uint64_t next_session_number_ = 1;
  std::vector<Session*> dirty_;
  std::vector<Session*> blocked_;
  std::vector<Session*> holding_;  // with messages that the engine has no room for
  std::vector<Session*> urgent_;   // to be tended in this poll or the next, rather than at the next tick
  std::vector<Path*> broken_;
  std::vector<Path*> flushed_;
  struct Arrived {
    uint32_t rail;
    Bytes bytes;
  };
  std::deque<Arrived> datagrams_;
  std::vector<Bytes> deserted_;  // endpoints where nobody is
  std::vector<Said> said_;
  Bytes introduction_;  // our address, encoded
  std::vector<uint32_t> ports_changed_;
  bool any_over_ = false;
  bool is_watching_ = false;  // some session waits for something that only time will bring
  bool closed_ = false;
  int64_t now_ = 0;
  bool is_now_read_ = false;  // since the holder entered, or polled: what it posts to many peers counts as simultaneous
  uint32_t polls_ = 0;
  uint32_t clock_mask_ = 0;  // the clock is read when polls_ has none of these bits
  int64_t next_tick_ns_ = 0;
  int64_t ticked_ns_ = 0;
  uint64_t garbage_ = 0;
  int64_t garbage_told_ns_ = 0;
  int64_t strangers_since_ns_ = 0;
  uint32_t strangers_answered_ = 0;
  // Whether the progress holder is about to sleep, and nobody has rung since.
  std::atomic<bool> armed_{false};
};

}  // namespace crossrail::rdma
