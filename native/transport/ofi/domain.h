// An opened device: fabric, domain and completion queue; the addresses of peers; and the memory registered with
// libfabric.
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

// Threads: registration [any], thanks to the threading model requested (FI_THREAD_SAFE); everything else the progress
// holder.
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
  // For errors that the provider reports about bound endpoints on its own: efa ends the process if there is no such
  // queue. Null with other providers.
  fid_eq* errors() const { return errors_.get(); }
  // The next of these errors, as text; empty: none.
  std::string take_error();
  bool wants(int mr_mode) const { return (info().domain_attr->mr_mode & mr_mode) != 0; }
  // Readable when the queue must be read; -1 if the provider has no descriptor and must be polled.
  int wait_fd() const { return wait_fd_; }
  // False: there is something already, or may be. events: another queue to sleep on together with ours, or null.
  bool may_sleep(fid_eq* events) const;

  // All endpoints are closed. libfabric's object remains as long as there are registrations; attempts to register from
  // now on get EngineClosedError.
  void close();

  // [any] Throws TransportError with a remedy.
  Fid<fid_mr> register_memory(void* base, uint64_t length_bytes, uint64_t access) const;
  Fid<fid_mr> register_gpu_memory(const device::GpuMemory& memory, uint64_t access) const;
  std::string error_text(int code) const { return library_->error_text(code); }
  [[noreturn]] void fail(const char* call, int code, const std::string& remedy = {}) const;

  std::string no_gpu_memory;      // why it takes none, if an endpoint's option said so. Fixed by the first endpoint
  uint32_t starved_receives = 0;  // over all its endpoints: receives that the provider had no room for. Progress holder

 private:
  // Returns a code and *memory from fi_mr_regattr, with a key of our choice if the provider does not choose one.
  int register_with(fi_mr_attr* attributes, uint64_t flags, fid_mr** memory) const;
  void open_errors();
  void open_queue();

  const std::shared_ptr<const Library> library_;
  const Rules rules_;
  mutable std::shared_mutex closing_mutex_;  // held shared by registering threads, exclusively by close()
  bool is_closed_ = false;                   // guarded by it; domain_ may outlive it, for registrations
  Device device_;
  Fid<fid_fabric> fabric_;
  Fid<fid_eq> errors_;  // kept until all endpoints are closed
  Fid<fid_domain> domain_;
  Fid<fid_cq> queue_;
  int wait_fd_ = -1;
};

// An endpoint's address vector with reference counts: a name that several paths use is inserted once. One per endpoint:
// efa of libfabric 2.1 does not let two endpoints share an address vector.
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
