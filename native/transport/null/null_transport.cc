#include "transport/null/null_transport.h"

#include "util/anonymous_pages.h"
#include "util/clock.h"

namespace crossrail {

namespace {

struct NullKey final : RemoteKey {};

struct NullRegion final : LocalRegion {
  AnonymousPages pages;  // the engine's own memory
};

constexpr size_t kQueueEntries = 1024;

}  // namespace

NullTransport::NullTransport(const TransportOptions& options, Sink* sink)
    : sink_(sink),
      traits_{.rail_count = options.rail_count,
              .slice_bytes_max = uint64_t{1} << 30,
              .message_bytes_max = options.message_bytes_max,
              .fifo_rails = true,
              .moves_while_posting = false},
      address_(options.identity),
      queue_(kQueueEntries) {}

std::unique_ptr<LocalRegion> NullTransport::register_memory(uint64_t id, std::byte* base, uint64_t length_bytes,
                                                            Access) {
  auto region = std::make_unique<NullRegion>();
  region->base = base;
  region->length_bytes = length_bytes;
  region->id = id;
  return region;
}

std::unique_ptr<LocalRegion> NullTransport::allocate(uint64_t id, uint64_t length_bytes, bool populate) {
  AnonymousPages pages(length_bytes, populate);
  auto region = register_memory(id, pages.base(), length_bytes, Access::kRemoteWrite);
  static_cast<NullRegion&>(*region).pages = std::move(pages);
  return region;
}

Link* NullTransport::connect(const std::shared_ptr<const Address>&) {
  links_.push_back(std::make_unique<NullLink>());
  coming_up_.push_back(links_.back().get());
  return links_.back().get();
}

void NullTransport::disconnect(Link& link) {
  std::erase(coming_up_, &static_cast<NullLink&>(link));
  std::erase_if(links_, [&](const auto& owned) { return owned.get() == &link; });
}

std::unique_ptr<RemoteKey> NullTransport::resolve(Link&, const RegionDescriptor&) {
  return std::make_unique<NullKey>();
}

std::vector<PathReport> NullTransport::explain(Link&) {
  return {{.what = "everything",
           .path = "null",
           .reason = "moves nothing, for measuring the engine",
           .gb_per_s = 0,
           .bytes = 0}};
}

uint32_t NullTransport::post(Link&, uint32_t, std::span<const WorkRequest> requests, uint32_t* completed) {
  // release: whoever sees the time knows that what it measures has happened.
  if (first_post_ns.load(std::memory_order_relaxed) == 0) first_post_ns.store(now_ns(), std::memory_order_release);
  for (const WorkRequest& request : requests) queue_[queue_at_++ % kQueueEntries] = request;
  *completed = static_cast<uint32_t>(requests.size());
  return *completed;
}

uint32_t NullTransport::poll() {
  if (coming_up_.empty()) return 0;
  std::vector<NullLink*> links;
  links.swap(coming_up_);
  for (NullLink* link : links) sink_->on_link_up(*link);
  return static_cast<uint32_t>(links.size());
}

bool NullTransport::hush(bool /*looks_at_once*/) {
  bell_.silence();
  return !is_armed();  // whoever rings disarms first
}

void NullTransport::wake() {
  // seq_cst fence: the caller's news is visible before we look whether anyone is awake to see it; pairs with arm().
  std::atomic_thread_fence(std::memory_order_seq_cst);
  if (armed_.load(std::memory_order_relaxed) != 0 && armed_.exchange(0, std::memory_order_acq_rel) != 0) bell_.ring();
}

void NullTransport::close() {
  links_.clear();
  coming_up_.clear();
}

}  // namespace crossrail
