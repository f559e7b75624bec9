// The Python-side halves of the core's objects: what an instance of a crossrail._core class holds.
//
// Threads: the holder of the GIL. A caller that releases the GIL around a native call keeps a Ref to everything that
// the call uses.
#pragma once

#include <nanobind/nanobind.h>

#include <cstdint>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "bindings/cache_slot.h"
#include "bindings/convert.h"
#include "bindings/fork.h"
#include "engine/engine.h"

namespace nb = nanobind;

namespace crossrail::bindings {

struct AddressHandle {
  explicit AddressHandle(std::shared_ptr<const Address> address) : value(std::move(address)) {}
  std::shared_ptr<const Address> value;
  CacheSlot<Peer> peer;
};

struct DescriptorHandle {
  explicit DescriptorHandle(std::shared_ptr<const RegionDescriptor> descriptor) : value(std::move(descriptor)) {}
  std::shared_ptr<const RegionDescriptor> value;
  CacheSlot<RemoteRegion> remote;
};

[[noreturn]] inline void refuse_descriptor(nb::handle given, const std::string& argument) {
  PyObject* const bytes = given.ptr();  // not by the buffer protocol, which a Region has, too
  const bool is_encoded = PyBytes_Check(bytes) || PyByteArray_Check(bytes) || PyMemoryView_Check(bytes);
  throw UsageError(
      argument + " must be a RegionDescriptor (" +
      (is_encoded ? "RegionDescriptor.from_bytes(data) makes one of a peer's bytes" : "region.descriptor at the peer") +
      "), not " + type_name_of(given));
}
// UsageError for anything else.
inline DescriptorHandle& to_descriptor(nb::handle given, const char* argument) {
  if (!nb::isinstance<DescriptorHandle>(given)) refuse_descriptor(given, argument);
  return *nb::inst_ptr<DescriptorHandle>(given);
}

// A registered region and the Python object whose memory it is.
// Invariant: `owner` is kept until neither our engine nor a peer touches the memory and no buffer view of us exists.
class RegionHandle : public RingNode {
 public:
  RegionHandle(nb::pointer_and_handle<EngineHandle> engine, RegionRef region, nb::object owner, bool writable);
  ~RegionHandle() { detach(); }

  // Throws UsageError once the region was dropped by the garbage collector.
  const RegionRef& core() const;
  EngineHandle* engine() const { return engine_; }
  const nb::object& owner_engine() const { return engine_object_; }
  bool writable() const { return writable_; }
  nb::object descriptor();

  // After the core's close() has said that nothing touches the memory: releases the buffer, now or with the last view.
  // Destroying a buffer may run any Python code, so the caller decides when.
  nb::object take_quiet_buffer();
  // Throws UsageError for a region that refuses use: its memory may belong to somebody else by now.
  void check_viewable() const;
  // Buffer protocol.
  void export_view(PyObject* self, Py_buffer* view, int flags);
  void unexport_view();

  int traverse(visitproc visit, void* arg) const;
  // The object is being destroyed: closes the region, or leaves it and its buffer to the engine until its transfers are
  // done.
  void detach();

 private:
  EngineHandle* engine_;
  nb::object engine_object_;
  Held<Region> region_;
  nb::object buffer_;
  nb::object descriptor_;
  uint64_t descriptor_id_ = 0;  // the id that descriptor_ shows to peers
  uint32_t exports_ = 0;
  bool quiet_ = false;
  bool writable_;
};

struct TransferHandle {
  Held<Transfer> transfer;
  nb::object engine;
};

struct ImmCounterHandle {
  Held<ImmCounter> counter;
  nb::object engine;
};

// A pool that nobody can take messages from is closed: otherwise it would hold senders back for ever.
struct ReceivePoolHandle {
  ReceivePoolHandle(Ref<ReceivePool> native, nb::object owner, bool callback)
      : pool(std::move(native)), engine(std::move(owner)), has_callback(callback) {}
  ~ReceivePoolHandle() {
    if (!pool.inherited()) pool->close();
  }
  ReceivePoolHandle(const ReceivePoolHandle&) = delete;
  ReceivePoolHandle& operator=(const ReceivePoolHandle&) = delete;

  Held<ReceivePool> pool;
  nb::object engine;
  bool has_callback = false;  // messages go to the callback only
  // The Address objects handed out with messages. Bounded by clearing.
  std::vector<std::pair<std::shared_ptr<const Address>, nb::object>> senders;
};

struct MessageHandle {
  nb::object peer;
  nb::object data;
};

struct WatcherHandle {
  Held<Watcher> watcher;
  nb::object engine;
  // Nobody can increment the word any more, though waiting transfers keep the word alive.
  ~WatcherHandle() {
    if (watcher && !watcher.inherited()) watcher->close();
  }
};

struct PeerGroupHandle {
  Held<PeerGroup> group;
  nb::object engine;
  bool removed = false;
};

// UsageError for anything else.
inline PeerGroupHandle& to_group(nb::handle given) {
  if (!nb::isinstance<PeerGroupHandle>(given)) {
    throw UsageError("group must be a PeerGroup (engine.add_peer_group(peers) makes one), not " + type_name_of(given));
  }
  return *nb::inst_ptr<PeerGroupHandle>(given);
}

struct NotifierHandle {
  Held<Notifier> notifier;
};

// tp_traverse and tp_clear for handles whose engine is the only Python reference that can close a cycle.
template <typename T>
int traverse_engine(PyObject* self, visitproc visit, void* arg) {
  Py_VISIT(Py_TYPE(self));
  if (nb::inst_ready(self)) Py_VISIT(nb::inst_ptr<T>(self)->engine.ptr());
  return 0;
}
template <typename T>
int clear_engine(PyObject* self) {
  if (nb::inst_ready(self)) nb::inst_ptr<T>(self)->engine.reset();
  return 0;
}
template <typename T>
inline PyType_Slot engine_slots[] = {{Py_tp_traverse, reinterpret_cast<void*>(traverse_engine<T>)},
                                     {Py_tp_clear, reinterpret_cast<void*>(clear_engine<T>)},
                                     {0, nullptr}};

}  // namespace crossrail::bindings
