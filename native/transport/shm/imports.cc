// What we know of peers' regions: asked for once, answered by the control plane, until they are closed or forgotten.
#include <algorithm>

#include "transport/shm/shm_transport.h"
#include "util/clock.h"

namespace crossrail::shm {

std::unique_ptr<RemoteKey> ShmTransport::resolve(Link& link, const RegionDescriptor& descriptor) {
  auto& outgoing = static_cast<Outgoing&>(link);
  if (outgoing.imports.size() >= outgoing.imports_sweep_at) forget_imports(outgoing);
  auto& import = outgoing.imports[descriptor.region_id];
  if (!import) {
    import = std::make_shared<Import>();
    import->region_id = descriptor.region_id;
    ask(outgoing, *import);
  }
  return std::make_unique<ShmKey>(import);
}

// What region that is, or what became of it: the answer is kImported.
void ShmTransport::ask(Outgoing& link, Import& import) {
  import.state = Import::State::kPending;
  ++link.imports_pending;
  if (link.outstanding++ == 0) link.moved_ns = now_ns();
  if (link.up) control_->import_region(link.id, import.region_id);  // else once it is
}

// Those that no key names any more, and their mappings: of regions that are closed, or that nothing is written to now.
void ShmTransport::forget_imports(Outgoing& link) {
  clear_hazards();
  // Not one that is being asked for: its answer is counted. A key that is being let go elsewhere meanwhile is met again.
  std::erase_if(link.imports, [](const auto& entry) {
    return entry.second->state != Import::State::kPending && entry.second.use_count() == 1;
  });
  link.imports_sweep_at = std::max(kImportsKept, 2 * link.imports.size());
}

Status ShmTransport::map(const RemoteKey& key, Mapping* out) {
  const Import& import = *static_cast<const ShmKey&>(key).import;
  switch (import.state) {
    case Import::State::kPending:
      return Status::kPending;
    case Import::State::kPrivate:
      return Status::kAccessDenied;
    case Import::State::kRefused:
      return import.status;
    case Import::State::kDirect:
      break;
  }
  if (!import.map) return Status::kAccessDenied;  // private memory of our own process: nobody keeps it for us
  *out = {import.map, import.base};
  return Status::kDone;
}

// The answer to ask().
void ShmTransport::take_import(Outgoing& link, ControlEvent event) {
  constexpr int64_t kAskAgainAfterNs = 100'000'000;  // not for each of a crowd of works
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
  if (facts.status != Status::kDone) {
    import.state = Import::State::kRefused;
    import.map.reset();  // from an answer before, see post_one()
    if (facts.status == Status::kRegionClosed || facts.status == Status::kRegionRevoked)
      import.text = text_of_gone(facts.status);
    // It was ourselves who had no descriptor or no room for it.
    if (facts.status == Status::kTransportFailed) import.ask_again_ns = now_ns() + kAskAgainAfterNs;
  } else if (import.is_gpu) {
    import.state = Import::State::kPrivate;
    import.is_local = link.same_process;
  } else if (link.same_process && (facts.map || private_path_ == 0)) {
    // An explicit private_path holds inside a process too: that is how tests reach it.
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

void ShmTransport::close_import(Outgoing& link, uint64_t region_id, Status status) {
  const auto found = link.imports.find(region_id);
  if (found == link.imports.end() || found->second->state == Import::State::kPending) return;
  if (link.hazard == region_id) clear_hazards();
  found->second->state = Import::State::kRefused;
  found->second->status = status;
  found->second->text = text_of_gone(status);
  found->second->map.reset();
  found->second->reached.clear();
}

}  // namespace crossrail::shm
