#include "bindings/engine_handle.h"

#include <algorithm>
#include <string>

#include "bindings/convert.h"

namespace crossrail::bindings {

namespace {

template <typename T>
void drop_all(RingNode* ring) {
  while (!ring->alone()) static_cast<CacheSlot<T>*>(ring->next)->drop();
}

std::shared_ptr<const Address> address_of(nb::handle given) {
  if (nb::isinstance<AddressHandle>(given)) return nb::inst_ptr<AddressHandle>(given)->value;
  if (PyBytes_Check(given.ptr())) return std::make_shared<const Address>(Address::decode(bytes_of(given)));
  const char* where = nb::isinstance<DescriptorHandle>(given) ? "descriptor.owner" : "engine.address at the peer";
  throw UsageError(std::string("peer must be an Address (") + where + ") or the bytes of one, not " +
                   type_name_of(given));
}

}  // namespace

EngineHandle::EngineHandle(PyObject* self, const EngineOptions& options) : self_(self) {
  {
    WithoutGil no_gil;
    engine_ = Held<Engine>(Engine::open(options));
  }
  address_ = std::make_shared<const Address>(engine_->address());
  rail_count_ = engine_->rail_count();
}

// The Python class closes earlier, in __del__; this is for an engine whose __init__ did not complete.
EngineHandle::~EngineHandle() {
  close(nb::float_(0.0));
  // A peer is still using this memory, and nobody will ask again: it is never freed.
  for (Retired& retired : retired_) retired.buffer.release();
}

PeerRef EngineHandle::peer(nb::handle address) {
  const EngineRef& engine = core();
  if (nb::isinstance<AddressHandle>(address)) {
    auto& handle = *nb::inst_ptr<AddressHandle>(address);
    const PeerRef* known = handle.peer.find(this);
    return known != nullptr ? *known : handle.peer.fill(this, &peers_, engine->peer(*handle.value));
  }
  return engine->peer(*address_of(address));
}

void EngineHandle::close(nb::handle timeout_s) {
  if (!engine_) return;
  if (engine_.inherited()) {
    drop_caches();  // they refer to us, and outlive us
    return;
  }
  const EngineRef engine = engine_.ref();
  const Deadline deadline = to_deadline(timeout_s, engine->clock());
  bool ran_out = false;
  {
    WithoutGil no_gil;
    ran_out = engine->close(deadline, interrupted);
  }
  if (ran_out) {
    let_go();
    return;
  }
  const nb::python_error error;  // saved before other Python code runs
  let_go();
  throw error;
}

void EngineHandle::let_go() {
  drop_caches();
  reap(retired_.size());
  std::vector<nb::object> buffers;  // destroying one may run any Python code: only when the ring is not being walked
  for (RingNode* node = regions_.next; node != &regions_; node = node->next) {
    auto* region = static_cast<RegionHandle*>(node);
    if (region->core()->poll_close()) buffers.push_back(region->take_quiet_buffer());
  }
}

void EngineHandle::forget_peer(nb::handle address) {
  const EngineRef engine = core();
  const std::shared_ptr<const Address> wanted = address_of(address);
  const std::vector<PeerRef> peers = engine->peers();
  const auto known =
      std::ranges::find(peers, wanted->incarnation, [](const PeerRef& peer) { return peer->address().incarnation; });
  const PeerRef peer = known != peers.end() ? *known : engine->peer(*wanted);
  {
    WithoutGil no_gil;
    engine->forget_peer(*peer);
  }
  drop_caches();  // now, since other threads could still find that peer
}

void EngineHandle::retire(RegionRef region, nb::object buffer) {
  if (region->poll_close()) return;
  retired_.push_back({Held<Region>(std::move(region)), std::move(buffer)});
}

void EngineHandle::reap(size_t looks_max) {
  std::vector<Retired> done;  // destroyed when retired_ is consistent again, see close()
  for (size_t looks = std::min(retired_.size(), looks_max); looks > 0; --looks) {
    if (next_retired_ >= retired_.size()) next_retired_ = 0;
    Retired& retired = retired_[next_retired_];
    if (!retired.region.inherited() && !retired.region->poll_close()) {
      ++next_retired_;
      continue;
    }
    std::swap(retired, retired_.back());
    done.push_back(std::move(retired_.back()));
    retired_.pop_back();
  }
}

int EngineHandle::traverse(visitproc visit, void* arg) const {
  for (const Retired& retired : retired_) Py_VISIT(retired.buffer.ptr());
  return 0;
}

void EngineHandle::drop_caches() {
  drop_all<RemoteRegion>(&remotes_);
  drop_all<Peer>(&peers_);
}

}  // namespace crossrail::bindings
