// A rail that completes everything at once and moves nothing: for measuring the cost of the engine itself.
#pragma once

#include <atomic>
#include <cstdint>
#include <vector>

#include "transport/transport.h"
#include "util/wake_event.h"

namespace crossrail {

class NullTransport final : public Transport {
 public:
  NullTransport(const TransportOptions& options, Sink* sink);

  const Traits& traits() const override { return traits_; }
  const Address& address() const override { return address_; }
  std::unique_ptr<LocalRegion> register_memory(uint64_t id, std::byte* base, uint64_t length_bytes,
                                               Access access) override;
  std::unique_ptr<LocalRegion> allocate(uint64_t id, uint64_t length_bytes, bool populate) override;
  void revoke_region(LocalRegion&) override {}
  bool is_region_quiet(const LocalRegion&) override { return true; }
  Link* connect(const std::shared_ptr<const Address>& address) override;
  void disconnect(Link& link) override;
  std::unique_ptr<RemoteKey> resolve(Link& link, const RegionDescriptor& descriptor) override;
  std::vector<PathReport> explain(Link& link) override;
  uint32_t post(Link& link, uint32_t rail, std::span<const WorkRequest> requests, uint32_t* completed) override;
  uint32_t poll() override;
  void withdraw(bool (*)(void*)) override {}  // everything completes at once
  void arm() override {
    armed_.store(1, std::memory_order_relaxed);
    std::atomic_thread_fence(std::memory_order_seq_cst);  // see wake(): a last look sees its news, or it rings
  }
  void disarm() override { armed_.store(0, std::memory_order_relaxed); }
  bool is_armed() const override { return armed_.load(std::memory_order_seq_cst) != 0; }
  bool has_arrivals() override { return !coming_up_.empty(); }
  int wake_fd() const override { return bell_.fd(); }
  bool hush(bool looks_at_once) override;
  void wake() override;
  void close() override;
  void abandon_after_fork() override {}

  // When something was first posted on any null transport since this was set to 0; below 0: not measuring. For
  // measurements.
  static inline std::atomic<int64_t> first_post_ns{-1};

 private:
  struct NullLink final : Link {};
  Sink* const sink_;
  Traits traits_;
  const Address address_;
  WakeEvent bell_ = WakeEvent::create();
  std::atomic<uint32_t> armed_{0};
  std::vector<std::unique_ptr<NullLink>> links_;
  std::vector<NullLink*> coming_up_;
  // Requests are copied here, as into a NIC's queue, so that posting costs as much as filling a queue.
  std::vector<WorkRequest> queue_;
  size_t queue_at_ = 0;
};

}  // namespace crossrail
