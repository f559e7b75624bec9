// A path to one NIC of one peer: two reliable queue pairs, one for messages, one for writes and reads. Two, since both
// immediates and messages use up receives in the order of arrival: in a single queue an immediate would use up a
// message's buffer.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "transport/verbs/handles.h"
#include "transport/verbs/queues.h"
#include "util/clock.h"

namespace crossrail::verbs {

class VerbsNic;

// Progress holder.
// Lifecycle, as rdma::NicPath has it: 1. made: queue pairs initialised. 2. connected. 3. broken: an error was seen and
// told.
// 4. draining, from break_off() on: queue pairs in error state, what was posted comes back. 5. flushed: queue pairs
//    destroyed.
// Invariants: works with cookies below oldest_ are reported, those from posted_ on are not posted.
//   The NIC's budget is less by posted_ - oldest_ + fragments_outstanding_.
class VerbsPath final : public rdma::NicPath {
 public:
  // index: its place in the NIC's table. Throws TransportError.
  VerbsPath(VerbsNic& nic, uint32_t index);
  ~VerbsPath() override;

  std::span<const uint8_t> offer() const override { return offer_; }
  void connect(std::span<const uint8_t> peer_endpoint, std::span<const uint8_t> peer_offer) override;
  uint32_t post(std::span<const rdma::NicWork> works) override;
  bool send(std::span<const uint8_t> head, std::span<const uint8_t> body) override;
  bool is_sent() const override { return fragments_outstanding_ == 0; }
  void break_off(const std::string& reason) override;

 private:
  friend class VerbsNic;
  enum class State : uint8_t { kMade, kConnected, kBroken, kDraining, kFlushed };

  // --- called by the NIC, from poll() ---
  void on_work(const ibv_wc& completion, rdma::NicEvents& events);
  void on_fragment_sent(const ibv_wc& completion, rdma::NicEvents& events);
  // Reports once that it is broken, unless the layer knows.
  void tell_broken(rdma::NicEvents& events, bool by_peer, const std::string& reason);
  // Likewise, with the NIC's next poll().
  void note_trouble(std::string trouble, bool by_peer = false);
  // May be called several times for one queue pair: Soft-RoCE since Linux 6.4 reports it repeatedly.
  void on_queue_pair_idle(const ibv_qp* queue_pair) {
    (queue_pair == messages_.get() ? are_messages_idle_ : are_works_idle_) = true;
  }
  // While draining: true once it is flushed and this was reported.
  bool drain(rdma::NicEvents& events, int64_t now);
  // Destroys the queue pairs, reports what they left as failed, and reports that all is flushed.
  void finish(rdma::NicEvents& events);

  uint32_t room_for(uint32_t outstanding, uint32_t path_max, uint32_t kept) const;
  uint32_t works_outstanding() const { return static_cast<uint32_t>(posted_ - oldest_); }
  void to_error_state();
  void give_up_fragments();

  VerbsNic& nic_;
  const uint32_t index_;
  State state_ = State::kMade;
  QueuePair messages_;
  QueuePair works_;
  uint32_t message_psn_ = 0;
  uint32_t work_psn_ = 0;
  uint32_t work_inline_bytes_ = 0;
  uint32_t fragment_inline_bytes_ = 0;
  std::vector<uint8_t> offer_;
  uint64_t posted_ = 0;  // cookies
  uint64_t oldest_ = 0;
  uint32_t unsignalled_ = 0;  // works since the last signalled one
  uint32_t fragments_outstanding_ = 0;
  std::vector<uint32_t> slots_;  // of fragments in flight
  std::string trouble_;          // to be reported by the NIC's next poll()
  bool is_trouble_peers_ = false;
  // Draining.
  bool are_messages_idle_ = false;  // the device reported that this queue pair takes no more receives,
  bool are_works_idle_ = false;     // and this one
  int64_t idle_by_ns_ = 0;          // when it is assumed without a report
  int64_t give_up_ns_ = 0;          // when waiting for it ends
  uint64_t receives_due_ =
      0;  // nic_.receives_passed_ by which all that had come when it was idle is taken; 0: it is not
};

}  // namespace crossrail::verbs
