// Shared memory between and within the processes of one host.
//
// Paths, chosen per pair of regions and shown by explain():
//   mapped  the target's region is engine-owned memory: the initiator maps it and copies straight into it.
//   local   both engines live in one process: the same, for any memory.
//   staged  private memory: through a ring of cache-sized chunks; the initiator copies in, the target copies out.
//           Also GPU memory, if the other side is host memory: the driver copies between it and the chunks.
//   cuda-ipc, cuda-vmm  GPU memory on both sides: the initiator's GPU copies, if it reaches the target's (else staged),
//           through CUDA IPC or descriptors of physical memory.
//   cross-memory attach  private memory: process_vm_writev/readv by the initiator, where the kernel allows it.
#pragma once

#include <atomic>
#include <memory>
#include <vector>

#include "transport/shm/control.h"
#include "transport/shm/layout.h"
#include "transport/shm/link.h"
#include "transport/shm/region_table.h"
#include "transport/transport.h"

namespace crossrail::shm {

class ShmTransport final : public Transport {
 public:
  ShmTransport(const TransportOptions& options, Sink* sink);
  ~ShmTransport() override;

  const Traits& traits() const override { return traits_; }
  const Address& address() const override { return address_; }

  std::unique_ptr<LocalRegion> register_memory(uint64_t id, std::byte* base, uint64_t length_bytes,
                                               Access access) override;
  std::unique_ptr<LocalRegion> register_gpu_memory(uint64_t id, const device::GpuMemory& memory,
                                                   Access access) override;
  std::unique_ptr<LocalRegion> allocate(uint64_t id, uint64_t length_bytes, bool populate) override;
  void revoke_region(LocalRegion& region) override;
  bool is_region_quiet(const LocalRegion& region) override;
  std::vector<std::string> users_of(const LocalRegion& region) override { return regions_.touchers_of(region.id); }

  Link* connect(const std::shared_ptr<const Address>& address) override;
  void disconnect(Link& link) override;
  Status map(Link& link, const RemoteKey& key, int gpu, Mapping* out) override;
  std::unique_ptr<RemoteKey> resolve(Link& link, const RegionDescriptor& descriptor) override;
  std::vector<PathReport> explain(Link& link) override;
  std::string why_out_of_reach(const Address& peer) const override { return why_refused(peer); }
  uint64_t rail_depth(Link& link, uint32_t rail) override;

  uint32_t post(Link& link, uint32_t rail, std::span<const WorkRequest> requests, uint32_t* completed) override;
  uint32_t poll() override;
  void withdraw(bool (*wanted)(void* context)) override;

  void arm() override;
  void let_go() override {
    clear_hazards();
    ring_all();
  }
  // Checks first: peers read this line at every ring, and a needless store would take it from them.
  void disarm() override {
    if (home_->bell.armed.load(std::memory_order_relaxed) != kNone)
      home_->bell.armed.store(kNone, std::memory_order_relaxed);
  }
  bool is_armed() const override { return home_->bell.armed.load(std::memory_order_seq_cst) != kNone; }
  bool has_arrivals() override;
  int wake_fd() const override { return bell_.fd(); }
  bool hush(bool looks_at_once) override;
  void wake() override;

  void close() override;
  void abandon_after_fork() override;

 private:
  // --- initiator ---
  // outgoing.cc
  bool touch(Outgoing& link, uint64_t region_id);
  static bool is_open(const Outgoing& link, uint64_t region_id);
  static bool is_revoked(const Outgoing& link, uint64_t region_id);
  void clear_hazards();
  bool copy_direct(Outgoing& link, const WorkRequest& request, const WorkRequest* next);
  bool copy_attached(Outgoing& link, const WorkRequest& request);
  uint32_t post_messages(Outgoing& link, RailQueue& queue, EntryKind kind, std::span<const WorkRequest> requests);
  static bool is_staging(const RailQueue& rail, const void* context);
  static bool is_begun(const RailQueue& rail);
  static void uncount_head(RailQueue& rail, const void* context);
  bool post_one(Outgoing& link, RailQueue& rail, const WorkRequest& request, const WorkRequest* next,
                uint32_t* completed);
  bool has_room(Outgoing& link, RailQueue& rail);
  bool room_for_imm(Outgoing& link, RailQueue& rail, uint32_t wire);
  void add_imm(RailQueue& rail, uint32_t wire);
  void flush_imms(Outgoing& link, RailQueue& rail);
  // imports.cc
  void ask(Outgoing& link, Import& import);
  void send_ask(const Outgoing& link, const Import& import);
  Status map_gpu(Outgoing& link, Import& import, int gpu, Mapping* out);
  void take_handle(Import& import, Fd memory) const;
  void forget_imports(Outgoing& link);
  void take_import(Outgoing& link, ControlEvent event);
  void close_import(Outgoing& link, uint64_t region_id, Status status);
  // staging.cc
  uint32_t push_pending(Outgoing& link, RailQueue& rail);
  bool push_write_chunk(Outgoing& link, RailQueue& rail);
  bool push_read_chunks(Outgoing& link, RailQueue& rail);
  InFlight& inflight_slot(RailQueue& rail);
  uint32_t retire_staged(Outgoing& link, RailQueue& rail);
  uint32_t take_responses(Outgoing& link);
  // gpu_copies.cc
  static const GpuReach* reach_by_gpu(Import& import, int gpu);
  bool goes_by_gpu(const RailQueue::Pending& pending);
  bool push_gpu_copies(Outgoing& link, RailQueue& rail);
  bool copy_by_gpu(Import& import, int gpu, const std::vector<WorkRequest>& requests);
  static void take_rest_of(RailQueue& rail, std::vector<WorkRequest>* failed);
  bool refuse_head(Outgoing& link, RailQueue& rail, Status status, const std::string& text);
  // watching.cc
  uint32_t poll_outgoing(Outgoing& link, int64_t now);
  static uint32_t note_room(Outgoing& link);
  static void time_staging(Outgoing& link, int64_t since, int64_t now);
  static void weigh_private_paths(const Outgoing& link, PrivateChoice& choice);
  void check_liveness(Outgoing& link, int64_t now);
  // withdrawing.cc
  void report_withdrawn(Outgoing& link, void* context, uint32_t tag, uint32_t count, uint64_t bytes);
  void withdraw_queue(Outgoing& link, RailQueue& rail, bool (*wanted)(void* context));
  void withdraw_pending(Outgoing& link, RailQueue& rail, bool (*wanted)(void* context));
  static bool end_with_last_chunk(RailQueue& rail, const WorkRequest& request);
  uint32_t retry_messages(Outgoing& link);
  void withdraw_reads(Outgoing& link, bool (*wanted)(void* context));
  void flush_link(Outgoing& link, Status status, const std::string& detail);
  // --- target (incoming.cc) ---
  uint32_t poll_incoming(Incoming& link);
  uint32_t drain_messages(Incoming& link);
  uint32_t drain_services(Incoming& link);
  uint32_t drain_rail(Incoming& link, ChannelReader& reader);
  Status execute_write(Incoming& link, const ChannelReader& reader, const Entry& entry);
  Status place(Incoming& link, const RegionTable::Target& target, const std::byte* block, uint64_t block_bytes,
               uint32_t pieces, bool bulk);
  bool answer_read(Incoming& link, const Entry& entry);
  void add_incoming(ControlEvent event);
  void drain(Incoming& link);
  void take_last_words(const Address& peer);
  void drop_incoming(uint64_t link_id);
  // --- both ---
  template <typename AnyLink>
  void pin(AnyLink& link, int gpu) {
    if (!link.pinned)
      link.pinned = std::make_unique<device::PinnedMemory>(gpu, link.segment_map->data(), link.segment_map->size());
  }
  uint32_t handle_control();
  void handle_outgoing(Outgoing& link, ControlEvent event);
  Outgoing* find_outgoing(uint64_t id);
  static void ring(HomeSegment& home, const WakeEvent& bell, Call call);
  void ring_later(PeerHome& home, Call call);
  void ring_all();

  Sink* const sink_;
  Traits traits_;
  const Address address_;
  const PrivatePath private_path_;
  // The first GPU that this engine has had memory on: memory passed to us is imported there. -1: none yet. relaxed: it
  // says nothing about anything else.
  std::atomic<int> own_gpu_{-1};
  std::shared_ptr<MemoryMap> home_map_;
  HomeSegment* home_;
  const WakeEvent bell_ = WakeEvent::create();
  RegionTable regions_;
  std::vector<std::unique_ptr<Incoming>> incoming_;
  size_t first_incoming_ = 0;  // the first one that poll() looks at
  std::vector<std::unique_ptr<Outgoing>> outgoing_;
  Outgoing* hazardous_ = nullptr;  // the one link with a hazard set,
  uint32_t hazard_polls_ = 0;      // and the number of polls since it was set
  struct Unrung {
    PeerHome* home;
    Call call;
  };
  std::vector<Unrung> unrung_;  // peers that have news since the last ring_all()
  device::Copier copier_;
  bool gpu_copies_wait_ = false;  // for the next poll(), which is to come soon
  bool streamed_ = false;         // there were streaming stores since the last copy_fence()
  uint64_t next_link_id_ = 1;
  bool closed_ = false;
  std::unique_ptr<Control> control_;  // last: its thread uses the above
};

}  // namespace crossrail::shm
