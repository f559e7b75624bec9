// A double of libfabric at its own border: the exported calls and the operation tables behind them, playing EFA in one
// process. It moves real bytes, in any order, late, with full queues and failures, and it notes every use that the
// documentation of the provider forbids. For what only EFA executes, since no machine here has one.
#pragma once

#include <cstdint>
#include <memory>
#include <random>
#include <string>
#include <vector>

#include "transport/ofi/library.h"

namespace crossrail::test {

struct DoubleSettings {
  uint32_t version = FI_VERSION(2, 5);
  uint32_t devices = 2;
  bool offers_direct = true;
  size_t queue_entries_max = 8192;
  size_t transmit_size = 64;
  uint32_t refuse_percent = 0;  // of posts and receives: -FI_EAGAIN although there is room
  uint32_t delay_max = 6;       // readings of the queue that an operation may wait
  bool takes_shm_option = true;
  bool offers_descriptor = false;  // of queues: efa-direct since 2.2, efa since 2.4
  bool takes_gpu_memory = true;    // built with CUDA
  bool emulates_writes = false;    // by messages, as devices without RDMA write
  bool imms_eat_receives = false;  // of efa-direct, as devices without unsolicited ones and libfabric before 2.4
  uint64_t rma_bytes_max = 1ull << 30;
  int register_error = 0;  // of fi_mr_regattr; 0: none
  bool is_sink = false;    // writes go nowhere and are complete at once: what is left is the cost of posting
};

class LibfabricDouble {
 public:
  explicit LibfabricDouble(const DoubleSettings& settings, uint32_t seed = 1);
  ~LibfabricDouble();
  LibfabricDouble(const LibfabricDouble&) = delete;
  LibfabricDouble& operator=(const LibfabricDouble&) = delete;

  // One at a time: libfabric's calls carry no handle.
  std::shared_ptr<const ofi::Library> library();
  std::vector<std::string>& violations();

  // What is sent to the endpoints of a device waits, for ever or until it is thawed.
  void freeze(uint32_t device, bool frozen);
  // What is sent to them fails with this status of the device (efa_errno.h), 0: nothing does.
  void fail_towards(uint32_t device, int status);
  void refuse_sends(int code);    // each message, with this code of libfabric's; 0: none
  void refuse(uint32_t percent);  // of posts and receives from now on
  void refuse_registrations(int code);
  void break_queue(uint32_t device);  // reading it fails from now on
  // As efa, whose receipt of a message that it has given us does not get through: an error of a receive that is over.
  void fail_receipt(uint32_t device);
  void complete_late(uint32_t device);  // errors of what was under way on its endpoints that are closed
  void fail_by_itself(int status);      // at something that nobody asked for, with all devices
  uint32_t endpoints_open() const;
  uint32_t operations_pending() const;

  struct World;

 private:
  std::unique_ptr<World> world_;
};

}  // namespace crossrail::test
