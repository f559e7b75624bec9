// What an instance of crossrail._core.Engine holds.
#pragma once

#include <memory>
#include <vector>

#include "bindings/handles.h"

namespace crossrail::bindings {

// Lifecycle: 1. open. 2. close() under way, GIL released: calls fail with EngineClosed as the core says so. 3. closed:
// caches are empty, buffers of registered regions are let go. 4. the Python object dies.
// Invariant: `remotes` and `peers` ring exactly the slots that hold something resolved by this engine, `regions` all
// RegionHandles of it.
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
  // Of an Address or of its bytes.
  PeerRef peer(nb::handle address);

  // No-op in a forked child: what there is to close is the parent's. timeout_s: seconds or None, on the engine's clock.
  void close(nb::handle timeout_s);
  // Whichever peer has that incarnation: what else the address says may be what is wrong with the one that is known.
  void forget_peer(nb::handle address);

  void adopt(RegionHandle* region) { region->insert_after(&regions_); }
  // Takes over a region whose Python object is gone, and its buffer, until nothing uses them.
  void retire(RegionRef region, nb::object buffer);
  // Drops retired regions that nothing uses any more: looks at so many at most, at others than the last time.
  void reap(size_t looks_max);

  int traverse(visitproc visit, void* arg) const;

 private:
  struct Retired {
    Held<Region> region;
    nb::object buffer;
  };
  static constexpr size_t kLooksPerCall = 16;
  void drop_caches();
  // Of a closed engine: what nothing uses any more.
  void let_go();

  PyObject* const self_;  // borrowed: we live inside of it
  Held<Engine> engine_;
  std::shared_ptr<const Address> address_;
  uint32_t rail_count_;
  RingNode remotes_;
  RingNode peers_;
  RingNode regions_;
  std::vector<Retired> retired_;
  size_t next_retired_ = 0;  // to be looked at
};

}  // namespace crossrail::bindings
