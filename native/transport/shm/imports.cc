// What we know about peers' regions: requested once, answered by the control plane, kept until closed or forgotten.
#include <algorithm>

#include "transport/shm/shm_transport.h"
#include "util/clock.h"
#include "util/errors.h"

namespace crossrail::shm {

std::unique_ptr<RemoteKey> ShmTransport::resolve(Link& link, const RegionDescriptor& descriptor) {
  auto& outgoing = static_cast<Outgoing&>(link);
  if (outgoing.imports.size() >= outgoing.imports_sweep_at) forget_imports(outgoing);
  auto& import = outgoing.imports[descriptor.region_id];
  if (!import) {
    import = std::make_shared<Import>();
    import->region_id = descriptor.region_id;
    // It is most likely needed then; otherwise it is requested when needed.
    import->wants_handle = descriptor.memory == MemoryKind::kCuda && own_gpu_.load(std::memory_order_relaxed) >= 0;
    ask(outgoing, *import);
  }
  return std::make_unique<ShmKey>(import);
}

// Asks which region that is, or what became of it: the answer is kImported.
void ShmTransport::ask(Outgoing& link, Import& import) {
  import.state = Import::State::kPending;
  ++link.imports_pending;
  if (link.outstanding++ == 0) link.moved_ns = now_ns();
  if (link.up) send_ask(link, import);  // otherwise once it is up
}

void ShmTransport::send_ask(const Outgoing& link, const Import& import) {
  control_->import_region(link.id, import.region_id, import.wants_handle && !link.same_process);
}

// Drops those that no key references any more, with their mappings: of closed regions, or ones that nothing is written
// to.
void ShmTransport::forget_imports(Outgoing& link) {
  clear_hazards();
  // Not one whose answer is outstanding: that is counted. A key that is being released elsewhere meanwhile is found
  // next time.
  std::erase_if(link.imports, [](const auto& entry) {
    return entry.second->state != Import::State::kPending && entry.second.use_count() == 1;
  });
  link.imports_sweep_at = std::max(kImportsKept, 2 * link.imports.size());
}

Status ShmTransport::map(Link& link, const RemoteKey& key, int gpu, Mapping* out) {
  Import& import = *static_cast<const ShmKey&>(key).import;
  out->length_bytes = import.length_bytes;
  switch (import.state) {
    case Import::State::kPending:
      return Status::kPending;
    case Import::State::kPrivate:
      if (!import.is_gpu || gpu < 0) return Status::kAccessDenied;
      return map_gpu(static_cast<Outgoing&>(link), import, gpu, out);
    case Import::State::kRefused:
      if (import.status == Status::kTransportFailed) out->trouble = import.text;
      return import.status;
    case Import::State::kDirect:
      break;
  }
  if (!import.map || gpu >= 0)
    return Status::kAccessDenied;  // private memory of our own process: nobody keeps it alive for us
  out->memory = import.map;
  out->base = import.base;
  return Status::kDone;
}

// Only memory that stays valid whatever its owner does may be handed out: physical memory, not that of cudaMalloc.
Status ShmTransport::map_gpu(Outgoing& link, Import& import, int gpu, Mapping* out) {
  if (!allows(import.access, Access::kRemoteWrite)) {
    out->trouble = "the region is not open for remote writes";
    return Status::kAccessDenied;
  }
  if (import.shared.by != device::SharedBy::kVmm) {
    out->trouble = import.shared.is_shared() ? "cudaMalloc gave it, and its owner may free it" : import.shared.why_not;
    return Status::kAccessDenied;
  }
  int none = -1;
  own_gpu_.compare_exchange_strong(none, gpu, std::memory_order_relaxed);
  if (import.lacks_handle()) {
    import.wants_handle = true;
    ask(link, import);
    return Status::kPending;
  }
  try {
    if (!import.is_local) {
      if (import.shared.physical == nullptr) throw TransportError("import", 0, import.why_staged);
      out->physical = import.shared.physical;
    } else if (const auto own = device::MappedMemory::find(import.remote_base, import.length_bytes); own != nullptr) {
      own->give_to_kernels(gpu);
      out->memory = own;
      out->base = reinterpret_cast<std::byte*>(import.remote_base);  // NOLINT(performance-no-int-to-ptr)
    } else {                                                         // of a mapping that is not ours to keep
      out->physical = device::PhysicalMemory::retain(import.remote_base, import.shared.allocation_bytes, gpu);
    }
  } catch (const TransportError& error) {
    out->trouble = error.call() + ": " + error.text();
    import.wants_handle = false;  // the next request may succeed: perhaps only descriptors were lacking
    return Status::kTransportFailed;
  }
  out->offset = import.shared.offset;
  // In our own process the address alone might refer to a successor: by now it is kept alive, so it was not gone.
  if (import.is_local && !is_open(link, import.region_id))
    return is_revoked(link, import.region_id) ? Status::kRegionRevoked : Status::kRegionClosed;
  return Status::kDone;
}

// Handles the answer to ask().
void ShmTransport::take_import(Outgoing& link, ControlEvent event) {
  constexpr int64_t kAskAgainAfterNs = 100'000'000;  // not for each of many works
  const auto found = link.imports.find(event.region_id);
  if (found == link.imports.end() || found->second->state != Import::State::kPending) return;
  Import& import = *found->second;
  RegionFacts& facts = event.facts;
  --link.imports_pending;
  --link.outstanding;
  link.moved_ns = now_ns();
  import.status = facts.status;
  import.text = event.text;
  import.access = facts.access;
  import.remote_base = facts.base;
  import.length_bytes = facts.length_bytes;
  import.is_gpu = facts.is_gpu;
  import.shared = std::move(facts.shared);
  import.reached.clear();
  import.why_staged.clear();
  if (facts.status != Status::kDone) {
    import.state = Import::State::kRefused;
    import.map.reset();  // from an earlier answer, see post_one()
    if (facts.status == Status::kRegionClosed || facts.status == Status::kRegionRevoked)
      import.text = text_of_gone(facts.status);
    // We ourselves lacked a descriptor or address space for it.
    if (facts.status == Status::kTransportFailed) import.ask_again_ns = now_ns() + kAskAgainAfterNs;
  } else if (import.is_gpu) {
    import.state = Import::State::kPrivate;
    import.is_local = link.same_process;
    if (!import.is_local && import.shared.by == device::SharedBy::kVmm) take_handle(import, std::move(event.memory));
  } else if (link.same_process && (facts.map || private_path_ == PrivatePath::kAuto)) {
    // An explicit private_path applies within a process, too: that is how tests reach it.
    import.state = Import::State::kDirect;
    import.is_local = true;
    import.base = reinterpret_cast<std::byte*>(facts.base);
    import.map = std::move(facts.map);
  } else if (facts.map) {
    import.state = Import::State::kDirect;
    import.map = std::move(facts.map);
    import.base = import.map->data() + facts.map_offset;
  } else {
    import.state = Import::State::kPrivate;
  }
}

// At once, so that no descriptor is kept. An engine that does not need the memory for a GPU has not opened a driver for
// it, either.
void ShmTransport::take_handle(Import& import, Fd memory) const {
  if (!import.wants_handle) return;
  const int gpu = own_gpu_.load(std::memory_order_relaxed);
  try {
    if (!memory) throw TransportError("import", 0, "its owner gave no handle of the memory");
    import.shared.physical = device::PhysicalMemory::import(memory, import.shared.allocation_bytes, gpu);
  } catch (const TransportError& error) {
    import.why_staged = error.call() + ": " + error.text();
    import.shared.why_not = import.why_staged;
  }
}

void ShmTransport::close_import(Outgoing& link, uint64_t region_id, Status status) {
  const auto found = link.imports.find(region_id);
  if (found == link.imports.end() || found->second->state == Import::State::kPending) return;
  if (link.hazard == region_id) clear_hazards();
  found->second->state = Import::State::kRefused;
  found->second->status = status;
  found->second->text = text_of_gone(status);
  found->second->map.reset();
  found->second->reached.clear();
  found->second->shared = {};
}

}  // namespace crossrail::shm
