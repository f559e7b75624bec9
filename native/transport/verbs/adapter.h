// An opened port: what its Nic, paths and registrations share. And the registrations.
#pragma once

#include <memory>
#include <mutex>
#include <string>

#include "transport/rdma/nic.h"
#include "transport/verbs/handles.h"
#include "transport/verbs/ports.h"

namespace crossrail::verbs {

// Invariant: outlives everything made from it (they hold a reference): libibverbs wants children destroyed first.
struct Adapter {
  Adapter(Context context, PortDetail detail, const RdmaOptions& options);

  const std::string& name() const { return detail.port.name; }

  Context context;
  Domain domain;
  PortDetail detail;
  RdmaOptions options;
  ibv_device_attr limits{};
};

// Throws TransportError for errno, or for `error` where the call returns it.
[[noreturn]] void fail(const Adapter& adapter, const char* call, int error, const std::string& what);

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

// Registers, and says what helps where it fails. *is_read_only: the memory may not be written, and the NIC may not either.
Memory register_with(const Adapter& adapter, void* base, uint64_t length_bytes, Access access,
                     bool* is_read_only = nullptr);

}  // namespace crossrail::verbs
