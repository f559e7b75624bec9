// A device that was opened, and a port of it: what Nics, paths and registrations share. And the registrations.
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

// Of one engine: all its rails on the device share it, so that memory is registered once, whatever port it leaves by.
// Threads: fixed after construction, but for what the progress holder has.
// Invariant: outlives everything made from it (they hold a reference): libibverbs wants children destroyed first.
struct OpenDevice {
  explicit OpenDevice(Context context, const std::string& name);  // throws TransportError

  Context context;
  Domain domain;
  ibv_device_attr limits{};
  // Progress holder. Events come by one queue for all of them: whoever reads it hands each to whom it concerns.
  std::vector<VerbsNic*> nics;
  bool is_abandoned = false;  // in a forked child
};

// Invariant: as OpenDevice.
struct Adapter {
  Adapter(std::shared_ptr<OpenDevice> device, PortDetail detail, const RdmaOptions& options);

  const std::string& name() const { return detail.port.name; }
  ibv_context* context() const { return device->context.get(); }
  ibv_pd* domain() const { return device->domain.get(); }
  const ibv_device_attr& limits() const { return device->limits; }

  std::shared_ptr<OpenDevice> device;
  PortDetail detail;
  RdmaOptions options;
  // Where in the port's table its GID is: elsewhere, when its address was taken away and given back. Relaxed: who reads
  // the old one makes a route that fails, and asks again.
  mutable std::atomic<int> gid_index;
};

// Throws TransportError with what helps against `error`. adapter, name: whose call it was.
[[noreturn]] void fail(const std::string& name, const char* call, int error, const std::string& what);
[[noreturn]] inline void fail(const Adapter& adapter, const char* call, int error, const std::string& what) {
  fail(adapter.name(), call, error, what);
}

// Memory that peers may reach, or that our own works use. Threads: [any].
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
  mutable std::mutex mutex_;  // whoever asks whether it is quiet tries again
  mutable Memory memory_;
  uint32_t local_key_ = 0;
};

// Registers, and says what helps where it fails. *is_read_only: the memory may not be written, and the NIC may not
// either.
Memory register_with(const Adapter& adapter, void* base, uint64_t length_bytes, Access access,
                     bool* is_read_only = nullptr);

}  // namespace crossrail::verbs
