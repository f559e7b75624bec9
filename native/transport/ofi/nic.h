// One libfabric domain as a rail.
//
// Endpoints, for three kinds of providers:
// - Rules::connects (tcp). Peers know our listener from our address. A path is a connection, and closing its endpoint
// ends everything in flight, in both directions, exactly. Datagrams use connections, too (lines.h).
// - Rules::endpoint_per_path, without connections (providers that are not proven). `control_` is what peers know from
// our address: datagrams arrive there and leave from it. A path has an endpoint of its own at either end, exchanged in
// the offers.
// - Neither (efa). Works and fragments leave from `transmit_` and arrive at control_; libfabric cannot take back what
// is in flight to one peer, so when a path ends with something in flight, transmit_ is replaced: new works of all paths
// use the new one, the old one is closed as soon as no living path has anything in flight on it, and with it ends what
// the dead path had in flight.
#pragma once

#include <deque>
#include <memory>
#include <span>
#include <string>
#include <unordered_map>
#include <vector>

#include "transport/ofi/endpoint.h"
#include "transport/ofi/lines.h"
#include "transport/ofi/listener.h"
#include "transport/ofi/path.h"
#include "transport/ofi/registration.h"
#include "transport/ofi/shares.h"
#include "transport/rdma/nic.h"
#include "util/memory_map.h"
#include "util/pages.h"

namespace crossrail::ofi {

class OfiNic final : public rdma::Nic {
 public:
  // Throws TransportError.
  OfiNic(std::shared_ptr<const Library> library, const Rules& rules, Device device);
  ~OfiNic() override;

  const std::string& name() const override { return name_; }
  std::string device() const override;
  const std::string& description() const override { return description_; }
  uint32_t speed_mbps() const override { return domain_->device().speed_mbps; }
  const std::string& fabric() const override { return domain_->rules().name; }
  std::span<const uint8_t> endpoint() const override { return endpoint_; }
  const rdma::NicLimits& limits() const override { return limits_; }
  int nearness(std::span<const uint8_t> peer_endpoint) const override;
  std::unique_ptr<rdma::Registration> register_memory(std::byte* base, uint64_t length_bytes, Access access) override;
  std::unique_ptr<rdma::Registration> register_gpu_memory(const device::GpuMemory& memory, Access access) override;
  std::string no_gpu_memory() const override;
  bool is_port_up() const override { return is_port_up_; }
  void send_datagram(std::span<const uint8_t> peer_endpoint, std::span<const uint8_t> bytes) override;
  std::string datagram_trouble(std::span<const uint8_t> peer_endpoint) const override;
  std::unique_ptr<rdma::NicPath> make_path() override;
  void hurry() override;
  uint32_t poll(rdma::NicEvents& events) override;
  void arm() override;
  bool has_arrivals() override { return pending_; }
  Deadline next_timer() const override;
  const std::vector<int>& fds() const override { return fds_; }
  void hush() override;
  void close() override;
  void abandon_after_fork() override;

 private:
  friend class OfiPath;
  struct Datagram {
    std::vector<uint8_t> endpoint;  // as it was given to us,
    Name to;                        // and its libfabric name
    std::vector<uint8_t> bytes;
    Deadline until;
  };
  struct Known {  // a peer that datagrams were sent to
    fi_addr_t address;
    int64_t used_ns;
  };
  // A replaced transmit_ that still has works of living paths, which are waited for until then,
  struct Condemned {
    std::unique_ptr<Endpoint> endpoint;
    int64_t until_ns;
    bool is_hurried = false;  // or until none of them has ended for some tens of milliseconds
    int64_t moved_ns = 0;     // when one was last seen to end,
    uint32_t left = 0;        // and how many were left
  };
  struct Grave {
    std::unique_ptr<Endpoint> endpoint;
    std::vector<Op*> orphans;  // works whose completions never came
    Deadline until;
  };

  bool connects() const { return domain_->rules().connects; }
  bool shares_endpoints() const { return !domain_->rules().endpoint_per_path; }
  const Name& own_name() const { return listener_ ? listener_->name() : control_->name(); }
  std::vector<uint8_t> make_offer(const OfiPath& path) const;
  uint32_t add_path(OfiPath& path);
  void remove_path(OfiPath& path);
  OfiPath* find_path(uint32_t id) const;
  Endpoint* transmit_of(OfiPath& path) { return path.own_ ? path.own_.get() : transmit_.get(); }

  Op* take_work_op();
  bool is_busy(int64_t now) const;
  bool has_send_room() const;
  Op* take_send_op();  // null: the maximum number is in flight
  void give_back(Op& op);
  // 0, or a negative libfabric code.
  ssize_t send_from(Endpoint& from, fi_addr_t to, OfiPath* path, const PacketHead& head, std::span<const uint8_t> first,
                    std::span<const uint8_t> second);

  // polling.cc
  uint32_t read_queue(rdma::NicEvents& events);
  void on_entry(const fi_cq_data_entry& entry, rdma::NicEvents& events);
  void on_error_entry(rdma::NicEvents& events);
  void on_work_error(Op& op, const fi_cq_err_entry& error, rdma::NicEvents& events);
  void on_send_end(Op& op);
  void on_packet(Op& op, size_t length_bytes, rdma::NicEvents& events);
  void on_path_packet(Op& op, const PacketHead& head, std::span<const uint8_t> payload, rdma::NicEvents& events);
  void on_imm(uint64_t data, rdma::NicEvents& events);
  uint32_t tend_unready();
  uint32_t post_starved_receives();
  uint32_t tend_datagrams();
  // Null: no connection yet. Throws TransportError for an invalid address.
  Endpoint* way_to(const Name& name, int64_t now, fi_addr_t* address);
  uint32_t tend_fences();
  bool tend_fence_of(OfiPath& path, uint64_t number);
  uint32_t tend_answers();
  uint32_t tell_breaks(rdma::NicEvents& events);
  // connections.cc
  bool are_events_due() const;
  uint32_t read_events(rdma::NicEvents& events);
  void on_request(const ConnectionEvent& event);
  void on_connected(const struct fid* endpoint);
  void on_ended(const ConnectionEvent& event, rdma::NicEvents& events);
  OfiPath* path_of(const struct fid* endpoint) const;
  // ending.cc
  void forget_addresses(OfiPath& path);
  void begin_end(OfiPath& path);
  void replace_transmit();
  void condemn_transmit(int64_t until_ns);
  bool is_overdue(Condemned& condemned, int64_t read_ns);
  void tend_endings(int64_t read_ns);
  uint32_t finish_endings(rdma::NicEvents& events);
  void bury(std::unique_ptr<Endpoint> endpoint, rdma::NicEvents* events);
  void tend_graves();
  void die(const std::string& reason, rdma::NicEvents& events);
  void tend_port(rdma::NicEvents& events);

  std::string name_;
  std::string description_;
  std::shared_ptr<Domain> domain_;
  std::shared_ptr<Fences> fences_ = std::make_shared<Fences>();
  rdma::NicLimits limits_;
  std::vector<uint8_t> endpoint_;
  Pages landing_memory_;
  std::unique_ptr<OfiRegistration> landing_;
  uint64_t work_flags_ = 0;
  uint64_t send_flags_ = 0;
  // Shares of transmit_, which all paths use: shares.h.
  TransmitShares shares_;
  uint32_t doorbell_room_ = 0;  // FI_MORE only while fewer works are in flight: a full queue would hold them back
  Fd outer_;
  std::vector<int> waits_;  // libfabric's descriptors within outer_
  std::vector<int> fds_;

  // With Rules::connects. Declared before the endpoints, whose events arrive there.
  std::unique_ptr<Listener> listener_;

  // Declared before the endpoints, to which these operations belong.
  std::deque<Op> works_;
  Op* free_works_ = nullptr;
  std::vector<std::unique_ptr<Slots>> send_blocks_;
  Op* free_sends_ = nullptr;
  std::unique_ptr<Lines> lines_;       // with Rules::connects,
  std::unique_ptr<Endpoint> control_;  // without
  std::unique_ptr<Endpoint> transmit_;
  std::vector<Condemned> condemned_;
  std::vector<std::unique_ptr<Endpoint>> closed_;  // their last completions may still be in the queue
  std::vector<Grave> graves_;

  std::unordered_map<uint32_t, OfiPath*> paths_;
  uint32_t next_path_id_ = 1;
  std::vector<OfiPath*> unready_;
  std::vector<OfiPath*> ending_;
  std::vector<OfiPath*> breaking_;  // broke on their own, not reported yet
  std::deque<Datagram> datagrams_;
  std::vector<uint8_t> troubled_endpoint_;  // the endpoint that the latest datagram was not sent to,
  std::string datagram_trouble_;            // and why
  std::map<Name, Known> known_;
  uint32_t answers_due_ = 0;
  uint64_t fence_number_ = 0;  // of the current one, 0: none
  bool queue_read_to_end_ = false;
  bool is_port_up_ = true;
  bool is_dead_ = false;  // on_device_fatal was called
  bool events_due_ = false;
  bool pending_ = false;
  bool has_posted_ = false;  // since the last poll()
  uint32_t dropped_ = 0;     // invalid packets
  int64_t now_ = 0;
  int64_t events_read_ns_ = 0;
  int64_t unready_next_ns_ = 0;
  int64_t datagrams_next_ns_ = 0;
  int64_t active_ns_ = 0;  // when something was last posted or completed
  int64_t port_looked_ns_ = 0;
};

}  // namespace crossrail::ofi
