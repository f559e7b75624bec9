// One port of an RDMA device as a rail.
#pragma once

#include <array>
#include <atomic>
#include <cstdint>
#include <memory>
#include <string>
#include <unordered_map>
#include <vector>

#include "transport/verbs/adapter.h"
#include "transport/verbs/datagrams.h"
#include "transport/verbs/queues.h"
#include "transport/verbs/receives.h"
#include "transport/verbs/send_chain.h"
#include "transport/verbs/sleeper.h"
#include "transport/verbs/slots.h"
#include "transport/verbs/verbs_path.h"

namespace crossrail::verbs {

// Completions taken from a queue and not reported yet.
struct Batch {
  static constexpr uint32_t kMax = 32;
  std::array<ibv_wc, kMax> entries;
  uint32_t next = 0;
  uint32_t count = 0;
  bool is_empty() const { return next == count; }
};

// Progress holder, except what rdma::Nic marks [any].
// Invariant: destroyed after its paths; registrations may live longer.
class VerbsNic final : public rdma::Nic {
 public:
  // Throws TransportError. device: shared with the transport's other Nics on it. vector_number: its remainder chooses
  // the completion vector of both queues, since one thread sleeps on both.
  VerbsNic(std::shared_ptr<OpenDevice> device, PortDetail detail, const RdmaOptions& options, uint32_t vector_number);
  ~VerbsNic() override;

  const std::string& name() const override { return adapter_->name(); }
  const std::string& description() const override { return description_; }
  uint32_t speed_mbps() const override { return speed_mbps_.load(std::memory_order_relaxed); }
  const std::string& fabric() const override { return fabric_; }
  std::span<const uint8_t> endpoint() const override { return endpoint_; }
  const rdma::NicLimits& limits() const override { return limits_; }
  int nearness(std::span<const uint8_t> peer_endpoint) const override;
  std::unique_ptr<rdma::Registration> register_memory(std::byte* base, uint64_t length_bytes, Access access) override;
  std::unique_ptr<rdma::Registration> register_gpu_memory(const device::GpuMemory& memory, Access access) override;
  bool shares_registrations_with(const rdma::Nic& other) const override;
  bool is_port_up() const override { return is_port_up_; }
  void send_datagram(std::span<const uint8_t> peer_endpoint, std::span<const uint8_t> bytes) override;
  std::string silence_hint(std::span<const uint8_t> peer_endpoint) const override;
  std::unique_ptr<rdma::NicPath> make_path() override;
  uint32_t poll(rdma::NicEvents& events) override;
  void arm() override { sleeper_.arm(sends_.get(), receives_done_.get()); }
  bool has_arrivals() override;
  Deadline next_timer() const override;
  const std::vector<int>& fds() const override { return sleeper_.fds(); }
  void hush() override { sleeper_.hush(); }
  void close() override;
  void abandon_after_fork() override;

 private:
  friend class VerbsPath;

  // --- completions.cc ---
  uint32_t take_receives(rdma::NicEvents& events);
  uint32_t take_sends(rdma::NicEvents& events);
  void on_receive(const ibv_wc& completion, rdma::NicEvents& events);
  void on_send(const ibv_wc& completion, rdma::NicEvents& events);
  void on_fragment(const ibv_wc& completion, rdma::NicEvents& events);
  void on_datagram(const ibv_wc& completion, rdma::NicEvents& events);
  // Takes the next few from `queue`, if the batch is empty. True: the queue has no more.
  bool refill(ibv_cq* queue, Batch* batch);

  // --- device_events.cc ---
  uint32_t watch_device(rdma::NicEvents& events);
  uint32_t read_device_events();
  void hand_out(const ibv_async_event& event);
  bool concerns_us(const ibv_async_event& event) const;
  void on_device_event(const ibv_async_event& event);
  void on_port_event(const char* what, rdma::NicEvents& events);
  void on_fatal(const std::string& reason, rdma::NicEvents& events);

  uint32_t tell_troubles(rdma::NicEvents& events);
  uint32_t drain_paths(rdma::NicEvents& events);
  uint32_t take_fragment_slot();
  VerbsPath* path_by_index(uint32_t index) const { return index < paths_.size() ? paths_[index] : nullptr; }
  VerbsPath* path_by_queue_pair(uint32_t number);
  void forget_queue_pairs(const VerbsPath& path);
  void remove(const VerbsPath& path);

  static constexpr int64_t kDeviceLookNs = 1'000'000;

  std::shared_ptr<const Adapter> adapter_;
  const int completion_vector_;
  Sleeper sleeper_;
  CompletionQueue sends_;
  CompletionQueue receives_done_;
  std::unique_ptr<Receives> receives_;
  std::unique_ptr<Slots> fragment_slots_;
  std::unique_ptr<Datagrams> datagrams_;
  SendChain chain_;
  std::string description_;
  std::string fabric_;
  std::vector<uint8_t> endpoint_;
  rdma::NicLimits limits_;

  bool is_port_up_ = false;
  std::atomic<uint32_t> speed_mbps_;  // [any] may read it
  const char* port_news_ = nullptr;   // what the device reported about our port, to be checked by poll(); null: nothing
  std::string fatal_;                 // why the device is gone; empty: it is not
  bool is_fatal_told_ = false;
  uint32_t budget_ = 0;       // work requests that may still be posted: queues.h
  uint32_t budget_owed_ = 0;  // to be returned once the queue of send completions was seen empty
  uint64_t receives_passed_ =
      0;  // receive completions taken; a look that found none left counts as all that there can be
  int64_t looked_at_device_ns_ = 0;
  Batch send_batch_;
  Batch receive_batch_;
  std::vector<VerbsPath*> paths_;   // by index; null: free
  std::vector<uint32_t> free_;      // indices
  std::vector<uint32_t> freed_;     // indices that completions in the queue may still name
  std::vector<uint32_t> draining_;  // indices
  std::vector<uint32_t> troubled_;  // indices
  std::unordered_map<uint32_t, VerbsPath*> by_queue_pair_;
  uint32_t last_number_ = 0;  // of the queue pair on which the last immediate arrived; 0: none
  VerbsPath* last_path_ = nullptr;
};

}  // namespace crossrail::verbs
