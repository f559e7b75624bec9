// An opened device and a port of it, as shared by Nics, paths and registrations; and the registrations.
#pragma once

#include <atomic>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "transport/rdma/nic.h"
#include "transport/verbs/handles.h"
#include "transport/verbs/ports.h"

namespace crossrail::verbs {

class VerbsNic;

// One per engine: all its rails on the device share it, so that memory is registered once, whichever port is used.
// Threads: constant after construction, except what belongs to the progress holder.
// Invariant: outlives everything made from it (which holds a reference): libibverbs wants children destroyed first.
struct OpenDevice {
  explicit OpenDevice(Context context, const std::string& name);  // throws TransportError

  Context context;
  Domain domain;
  ibv_device_attr limits{};
  // Progress holder. Events for all of them arrive in one queue: whichever Nic reads it hands each to the one
  // concerned.
  std::vector<VerbsNic*> nics;
  bool is_abandoned = false;  // in a forked child
};

// Invariant: as for OpenDevice.
struct Adapter {
  Adapter(std::shared_ptr<OpenDevice> device, PortDetail detail, const RdmaOptions& options);

  const std::string& name() const { return detail.port.name; }
  ibv_context* context() const { return device->context.get(); }
  ibv_pd* domain() const { return device->domain.get(); }
  const ibv_device_attr& limits() const { return device->limits; }

  std::shared_ptr<OpenDevice> device;
  PortDetail detail;
  RdmaOptions options;
  // The index of its GID in the port's table, which changes if its address was removed and added again. Relaxed:
  // whoever reads the old one makes a route that fails, and asks again.
  mutable std::atomic<int> gid_index;
};

// Throws TransportError with what helps against `error`. adapter, name: where the call was made.
[[noreturn]] void fail(const std::string& name, const char* call, int error, const std::string& what);
[[noreturn]] inline void fail(const Adapter& adapter, const char* call, int error, const std::string& what) {
  fail(adapter.name(), call, error, what);
}

// Memory that peers may access, or that our own works use. Threads: [any].
class VerbsRegistration final : public rdma::Registration {
 public:
  VerbsRegistration(std::shared_ptr<const Adapter> adapter, std::byte* base, uint64_t length_bytes, Access access);
  VerbsRegistration(std::shared_ptr<const Adapter> adapter, const device::GpuMemory& memory, Access access);
  ~VerbsRegistration() override;
  void revoke() override;
  bool is_quiet() const override;

  uint32_t local_key() const { return local_key_; }

 private:
  void know(const std::byte* base);
  bool forget() const;
  std::shared_ptr<const Adapter> adapter_;
  mutable std::mutex mutex_;  // callers of is_quiet() try again
  mutable Memory memory_;
  uint32_t local_key_ = 0;
};

// Registers, and says what helps if it fails. *is_read_only: the memory cannot be written, not even by the NIC.
Memory register_with(const Adapter& adapter, void* base, uint64_t length_bytes, Access access,
                     bool* is_read_only = nullptr);

}  // namespace crossrail::verbs
