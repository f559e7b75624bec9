// A path to one NIC of one peer: a connection; or an address in the vector, with some providers with an endpoint of its
// own.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "transport/ofi/endpoint.h"
#include "transport/rdma/nic.h"

namespace crossrail::ofi {

class OfiNic;

class OfiPath final : public rdma::NicPath {
 public:
  explicit OfiPath(OfiNic& nic);
  ~OfiPath() override;

  std::span<const uint8_t> offer() const override { return offer_; }
  void connect(std::span<const uint8_t> peer_endpoint, std::span<const uint8_t> peer_offer) override;
  uint32_t post(std::span<const rdma::NicWork> works) override;
  bool send(std::span<const uint8_t> head, std::span<const uint8_t> body) override;
  bool is_sent() const override { return sends_out_ == 0; }
  void break_off(const std::string& reason) override;

 private:
  friend class OfiNic;
  // Invariant: is_ready only while connected and not broken; once is_ending, is_broken too.
  void dial();
  // False: not with this token, or not any more. Throws TransportError.
  bool accept(fi_info& request, uint64_t token);
  void on_standing();  // the connection is up
  uint32_t room_for(uint32_t outstanding, uint32_t path_max, uint32_t kept) const;
  ssize_t post_one(const rdma::NicWork& work, bool more);
  void on_refused_post(ssize_t code);
  bool send_packet(Packet kind, uint64_t number, std::span<const uint8_t> head, std::span<const uint8_t> body);
  void break_by_itself(const std::string& reason);
  void add_address();  // at the endpoint that its works use. Throws TransportError

  OfiNic& nic_;
  const uint32_t id_;
  const uint64_t token_;  // 0 without connections
  std::vector<uint8_t> offer_;
  // With Rules::endpoint_per_path; null before a connection is begun, and once it is closed and read to its end.
  std::unique_ptr<Endpoint> own_;
  // About the peer:
  Name peer_name_;
  fi_addr_t address_ = FI_ADDR_NOTAVAIL;  // at the endpoint that works use
  bool is_host_known_ = false;            // control_ of the NIC knows its name
  uint32_t peer_id_ = 0;
  uint64_t peer_token_ = 0;
  uint64_t peer_landing_ = 0;  // target of immediates without a region
  uint64_t peer_landing_key_ = 0;

  uint32_t works_out_ = 0;
  uint32_t sends_out_ = 0;
  bool is_connected_ = false;  // connect() was called
  bool is_standing_ = false;   // the provider's connection is up
  bool is_ready_ = false;      // works may be posted
  bool is_broken_ = false;
  bool is_ending_ = false;  // break_off() was called
  bool is_flushed_ = false;
  bool fault_told_ = false;  // the first failed work was reported as such
  bool break_told_ = false;
  bool was_heard_ = false;   // the peer's NIC was heard: its works may be in flight
  bool answer_due_ = false;  // to a fence
  std::string reason_;
  Deadline ready_by_ = kNoDeadline;
  uint64_t fence_sent_ = 0;
  uint64_t fence_answered_ = 0;
  uint64_t fence_asked_ = 0;  // by the peer
  Deadline fence_by_ = kNoDeadline;
};

}  // namespace crossrail::ofi
