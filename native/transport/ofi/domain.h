// One device opened: fabric, domain, completion queue; the addresses of peers; and the pieces of memory that libfabric
// sees.
#pragma once

#include <rdma/fi_domain.h>
#include <rdma/fi_endpoint.h>
#include <rdma/fi_eq.h>

#include <map>
#include <memory>
#include <shared_mutex>
#include <string>
#include <vector>

#include "device/cuda.h"
#include "transport/ofi/provider.h"

namespace crossrail::ofi {

using Name = std::vector<uint8_t>;  // an endpoint's address, in the provider's format

struct CloseFid {
  template <typename T>
  void operator()(T* object) const {
    fi_close(&object->fid);
  }
};
template <typename T>
using Fid = std::unique_ptr<T, CloseFid>;

// Threads: registration [any], by the threading model asked for (FI_THREAD_SAFE); all else the progress holder.
class Domain {
 public:
  // Throws TransportError.
  Domain(std::shared_ptr<const Library> library, const Rules& rules, Device device);

  const Library& library() const { return *library_; }
  const Rules& rules() const { return rules_; }
  const Device& device() const { return device_; }
  fi_info& info() const { return *device_.info; }
  fid_domain* fid() const { return domain_.get(); }
  fid_fabric* fabric() const { return fabric_.get(); }
  fid_cq* queue() const { return queue_.get(); }
  // Of what the provider does by itself for endpoints that are bound to it: efa ends the process where there is none.
  // Null with other providers.
  fid_eq* errors() const { return errors_.get(); }
  // The next of them, in words; empty: there is none.
  std::string take_error();
  bool wants(int mr_mode) const { return (info().domain_attr->mr_mode & mr_mode) != 0; }
  // Readable when the queue has to be read; -1 where the provider has none and must be polled.
  int wait_fd() const { return wait_fd_; }
  // False: something is there already, or may be. events: a queue to sleep on beside ours, or null.
  bool may_sleep(fid_eq* events) const;

  // All endpoints are closed. What is registered still keeps libfabric's object until ours is destroyed; who registers
  // from now on gets EngineClosedError.
  void close();

  // [any] Throws TransportError with a remedy.
  Fid<fid_mr> register_memory(void* base, uint64_t length_bytes, uint64_t access) const;
  Fid<fid_mr> register_gpu_memory(const device::GpuMemory& memory, uint64_t access) const;
  std::string error_text(int code) const { return library_->error_text(code); }
  [[noreturn]] void fail(const char* call, int code, const std::string& remedy = {}) const;

  std::string no_gpu_memory;      // why it takes none, where an endpoint's option said so. Fixed with the first of them
  uint32_t starved_receives = 0;  // of all its endpoints: those that the provider had no room for. Progress holder

 private:
  // code, *memory: of fi_mr_regattr, with a key of our choice where the provider has none.
  int register_with(fi_mr_attr* attributes, uint64_t flags, fid_mr** memory) const;
  void open_errors();
  void open_queue();

  const std::shared_ptr<const Library> library_;
  const Rules rules_;
  mutable std::shared_mutex closing_mutex_;  // held by who registers, shared; by close(), alone
  bool is_closed_ = false;                   // guarded by it; domain_ may outlive that, for what is registered
  Device device_;
  Fid<fid_fabric> fabric_;
  Fid<fid_eq> errors_;  // until all endpoints are closed
  Fid<fid_domain> domain_;
  Fid<fid_cq> queue_;
  int wait_fd_ = -1;
};

// What an endpoint calls others, counted: a name that several paths use is inserted once. Each endpoint has its own:
// efa of libfabric 2.1 lets no second one use an address vector.
class Peers {
 public:
  explicit Peers(const Domain& domain);  // throws TransportError
  fid_av* fid() const { return addresses_.get(); }
  fi_addr_t add(const Name& name);  // throws TransportError
  void remove(const Name& name);

 private:
  struct Entry {
    fi_addr_t address = FI_ADDR_NOTAVAIL;
    uint32_t users = 0;
  };
  Fid<fid_av> addresses_;
  std::map<Name, Entry> entries_;
};

}  // namespace crossrail::ofi
