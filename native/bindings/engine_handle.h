// What an instance of crossrail._core.Engine holds.
#pragma once

#include <memory>
#include <vector>

#include "bindings/handles.h"

namespace crossrail::bindings {

// Lifecycle: 1. open. 2. close() in progress, GIL released: calls fail with EngineClosed as the core says so. 3.
// closed: caches are empty, buffers of registered regions are released. 4. the Python object dies.
// Invariant: the rings `remotes` and `peers` contain exactly the slots that hold something resolved by this engine,
// `regions` all RegionHandles of it.
class EngineHandle {
 public:
  EngineHandle(PyObject* self, const EngineOptions& options);
  ~EngineHandle();
  EngineHandle(const EngineHandle&) = delete;
  EngineHandle& operator=(const EngineHandle&) = delete;

  // Throws in a forked child.
  const EngineRef& core() {
    if (!retired_.empty()) [[unlikely]]
      reap(kLooksPerCall);
    return engine_.ref();
  }
  bool inherited() const { return engine_.inherited(); }
  bool closed() const { return engine_.inherited() || engine_->closed(); }
  const std::shared_ptr<const Address>& address() const { return address_; }
  uint32_t rail_count() const { return rail_count_; }
  nb::object self() const { return nb::borrow(self_); }

  RemoteRegionRef remote(DescriptorHandle& descriptor) {
    const RemoteRegionRef* known = descriptor.remote.find(this);
    return known != nullptr ? *known
                            : descriptor.remote.fill(this, &remotes_, core()->remote_region(*descriptor.value));
  }
  // For an Address or its bytes.
  PeerRef peer(nb::handle address);

  // No effect in a forked child: what there is to close belongs to the parent. timeout_s: seconds or None, on the
  // engine's clock.
  void close(nb::handle timeout_s);
  // Forgets whichever peer has that incarnation: the rest of the known address may be what is wrong.
  void forget_peer(nb::handle address);

  void adopt(RegionHandle* region) { region->insert_after(&regions_); }
  // Takes over a region whose Python object is gone, and its buffer, until nothing uses them.
  void retire(RegionRef region, nb::object buffer);
  // Drops retired regions that nothing uses any more: checks at most looks_max of them, continuing where it last
  // stopped.
  void reap(size_t looks_max);

  int traverse(visitproc visit, void* arg) const;

 private:
  struct Retired {
    Held<Region> region;
    nb::object buffer;
  };
  static constexpr size_t kLooksPerCall = 16;
  void drop_caches();
  // For a closed engine: releases what nothing uses any more.
  void let_go();

  PyObject* const self_;  // borrowed: we are part of it
  Held<Engine> engine_;
  std::shared_ptr<const Address> address_;
  uint32_t rail_count_;
  RingNode remotes_;
  RingNode peers_;
  RingNode regions_;
  std::vector<Retired> retired_;
  size_t next_retired_ = 0;  // to be checked next
};

}  // namespace crossrail::bindings
