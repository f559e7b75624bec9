#include "transport/shm/shm_transport.h"

#include <algorithm>
#include <thread>
#include <utility>

#include "util/clock.h"
#include "util/errors.h"

namespace crossrail::shm {

namespace {

// A write is cut so that small ones and arrivals get a turn after about 10 us of copying.
constexpr uint64_t kSliceBytes = uint64_t{256} << 10;

constexpr uint32_t kHazardPolls = 64;
constexpr int64_t kQuietTimeoutNs = 100'000'000;

HomeSegment* make_home(MemoryMap& map) {
  // Not constructed: memfd memory is zero, the initial value of every field, and writing zeros would make it resident.
  auto* home = reinterpret_cast<HomeSegment*>(map.data());
  home->magic = kLayoutMagic;
  home->version = kLayoutVersion;
  return home;
}

}  // namespace

ShmTransport::ShmTransport(const TransportOptions& options, Sink* sink)
    : sink_(sink),
      traits_{.rail_count = options.rail_count,
              .slice_bytes_max = kSliceBytes,
              .message_bytes_max = options.message_bytes_max,
              .fifo_rails = true,
              .piece_bytes_min = kAttachBytesMin,  // so that rails do not make pieces too short for the faster path
              .copies_gpu_memory = true},
      address_(options.identity),
      private_path_(options.private_path),
      home_map_(MemoryMap::create("crossrail-home", sizeof(HomeSegment))),
      home_(make_home(*home_map_)),
      regions_(sink),
      control_(std::make_unique<Control>(address_, home_map_, &bell_, &regions_, options.connect_timeout_ns, this)) {}

ShmTransport::~ShmTransport() { close(); }

void ShmTransport::close() {
  if (closed_) return;
  closed_ = true;
  for (auto& link : outgoing_) flush_link(*link, Status::kEngineClosed, "the engine was closed");
  // Peers that are just copying into our memory finish. One that is stopped in the middle of a copy is not waited for
  // any longer, and not forgotten either: its region stays in use (is_region_quiet), so that nobody frees the memory.
  regions_.revoke_all();
  const Deadline patience = now_ns() + kQuietTimeoutNs;
  while (regions_.is_touched(0) && now_ns() < patience) std::this_thread::yield();
  control_->stop();
  control_->take_events();  // they may hold memory
  ring_all();
  regions_.drop_idle_touchers();
  home_map_->release_fd();
  regions_.seen_by_peers().release_fd();
  outgoing_.clear();
  incoming_.clear();
}

void ShmTransport::abandon_after_fork() { control_->abandon_after_fork(); }

// --- memory ---

std::unique_ptr<LocalRegion> ShmTransport::register_memory(uint64_t id, std::byte* base, uint64_t length_bytes,
                                                           Access access) {
  return regions_.add(id, base, length_bytes, access);
}

std::unique_ptr<LocalRegion> ShmTransport::register_gpu_memory(uint64_t id, const device::GpuMemory& memory,
                                                               Access access) {
  int none = -1;
  own_gpu_.compare_exchange_strong(none, memory.gpu().ordinal, std::memory_order_relaxed);
  return regions_.add(id, memory.base(), memory.length_bytes(), access, memory.gpu().ordinal, device::share(memory));
}

std::unique_ptr<LocalRegion> ShmTransport::allocate(uint64_t id, uint64_t length_bytes, bool populate) {
  return regions_.allocate(id, length_bytes, populate);
}

void ShmTransport::revoke_region(LocalRegion& region) {
  auto& shm_region = static_cast<ShmRegion&>(region);
  control_->region_closed(shm_region.id, regions_.revoke(shm_region));
}

bool ShmTransport::is_region_quiet(const LocalRegion& region) {
  // seq_cst load: see RegionTable::withdraw for what it pairs with.
  return regions_.executing.load(std::memory_order_seq_cst) != region.id && !regions_.is_touched(region.id);
}

// --- peers ---

Link* ShmTransport::connect(const std::shared_ptr<const Address>& address) {
  auto link = std::make_unique<Outgoing>();
  link->id = next_link_id_++;
  link->address = address;
  link->rail_count = traits_.rail_count;
  link->segment_map = MemoryMap::create("crossrail-link", link_segment_bytes(link->rail_count));
  link->segment = reinterpret_cast<LinkSegment*>(link->segment_map->data());  // zero, see make_home
  link->segment->magic = kLayoutMagic;
  link->segment->version = kLayoutVersion;
  link->segment->rail_count = link->rail_count;
  link->messages.writer = ChannelWriter(&link->segment->channels[kMessageChannel]);
  link->responses = ChannelReader(&link->segment->channels[kResponseChannel]);
  link->services.writer = ChannelWriter(&link->segment->channels[kServiceChannel]);
  link->rails.resize(link->rail_count);
  for (uint32_t rail = 0; rail < link->rail_count; ++rail) {
    link->rails[rail].writer = ChannelWriter(&link->segment->channels[kFirstRailChannel + rail]);
  }
  if (private_path_ == PrivatePath::kStaged) {
    link->settle_private_path(PrivateChoice::Way::kStaged, "requested by private_path");
  } else if (private_path_ == PrivatePath::kCrossMemoryAttach) {
    link->settle_private_path(PrivateChoice::Way::kAttach, "requested by private_path");
  }
  control_->connect(link->id, address, link->segment_map, link->rail_count);
  outgoing_.push_back(std::move(link));
  return outgoing_.back().get();
}

void ShmTransport::disconnect(Link& link) {
  auto& outgoing = static_cast<Outgoing&>(link);
  flush_link(outgoing, Status::kPeerLost, "forgotten on request");
  control_->drop(outgoing.id);
  ring_all();  // its home is in the list
  std::erase_if(outgoing_, [&](const auto& owned) { return owned.get() == &outgoing; });
}

Outgoing* ShmTransport::find_outgoing(uint64_t id) {
  const auto found = std::find_if(outgoing_.begin(), outgoing_.end(), [&](const auto& link) { return link->id == id; });
  return found == outgoing_.end() ? nullptr : found->get();
}

uint32_t ShmTransport::handle_control() {
  if (!control_->has_events()) return 0;
  std::vector<ControlEvent> events = control_->take_events();
  for (ControlEvent& event : events) {
    switch (event.kind) {
      case ControlEvent::Kind::kInUp:
        add_incoming(std::move(event));
        break;
      case ControlEvent::Kind::kInDown:
        drop_incoming(event.link_id);
        break;
      case ControlEvent::Kind::kProtocolError:
        sink_->on_protocol_error("", event.text);
        break;
      case ControlEvent::Kind::kOutUp:
      case ControlEvent::Kind::kOutDown:
      case ControlEvent::Kind::kImported:
      case ControlEvent::Kind::kRegionClosed:
      case ControlEvent::Kind::kPong:
        if (Outgoing* link = find_outgoing(event.link_id)) handle_outgoing(*link, std::move(event));
        break;
    }
  }
  return static_cast<uint32_t>(events.size());
}

void ShmTransport::handle_outgoing(Outgoing& link, ControlEvent event) {
  switch (event.kind) {
    case ControlEvent::Kind::kOutUp:
      link.up = true;
      link.home = std::move(event.home);
      link.pid = event.pid;
      link.same_process = event.same_process;
      link.moved_ns = now_ns();
      for (const auto& [region_id, import] : link.imports) send_ask(link, *import);
      sink_->on_link_up(link);
      break;
    case ControlEvent::Kind::kOutDown:
      take_last_words(*link.address);
      sink_->on_link_down(link, event.text, event.end);
      flush_link(link, Status::kPeerLost, event.text);
      ring_all();  // its home is in the list
      std::erase_if(outgoing_, [&](const auto& owned) { return owned.get() == &link; });
      break;
    case ControlEvent::Kind::kImported:
      take_import(link, std::move(event));
      break;
    case ControlEvent::Kind::kRegionClosed:
      close_import(link, event.region_id, event.facts.status);
      break;
    case ControlEvent::Kind::kPong:
      link.pinged_ns = 0;
      link.moved_ns = now_ns();
      if (std::exchange(link.frozen, false)) sink_->on_link_frozen(link, false, "it answers again");
      break;
    case ControlEvent::Kind::kInUp:
    case ControlEvent::Kind::kInDown:
    case ControlEvent::Kind::kProtocolError:
      break;  // of no link of ours
  }
}

// --- running ---

uint32_t ShmTransport::poll() {
  ring_all();
  // Not at once: the next write most likely goes to the same region, and setting a hazard costs a full fence.
  if (hazardous_ != nullptr && ++hazard_polls_ >= kHazardPolls) clear_hazards();
  uint32_t moved = handle_control();
  // Starts with another link each time: room for messages that became free goes to everybody in turn.
  if (++first_incoming_ >= incoming_.size()) first_incoming_ = 0;
  for (size_t i = first_incoming_; i < incoming_.size(); ++i) moved += poll_incoming(*incoming_[i]);
  for (size_t i = 0; i < first_incoming_ && i < incoming_.size(); ++i) moved += poll_incoming(*incoming_[i]);
  gpu_copies_wait_ = false;
  int64_t now = 0;
  for (size_t i = 0; i < outgoing_.size(); ++i) {
    Outgoing& link = *outgoing_[i];
    if (!link.up || !link.awaits_target()) continue;
    if (now == 0) now = now_ns();
    moved += poll_outgoing(link, now);
  }
  return moved;
}

bool ShmTransport::has_arrivals() {
  if (control_->has_events() || gpu_copies_wait_) return true;
  for (const auto& link : incoming_) {
    if (!link->message_held && link->messages.has_entry()) return true;
    if (link->services.has_entry()) return true;
    for (const ChannelReader& reader : link->rails) {
      if (link->has_work(reader)) return true;
    }
  }
  for (const auto& link : outgoing_) {
    if (!link->up || !link->awaits_target()) continue;
    if (link->responses.has_entry()) return true;
    const auto confirmed = [](RailQueue& queue) {
      const uint64_t before = queue.writer.consumed();
      queue.writer.refresh();
      return (queue.staged_inflight > 0 || queue.was_full) && queue.writer.consumed() != before;
    };
    if (confirmed(link->messages) || confirmed(link->services)) return true;
    for (RailQueue& rail : link->rails) {
      if (confirmed(rail)) return true;
    }
  }
  return false;
}

void ShmTransport::arm() {
  clear_hazards();
  // seq_cst: pairs with the fence in ring_all() and wake(): either they see us armed, or we see their news in
  // has_arrivals.
  const bool awaits = std::any_of(outgoing_.begin(), outgoing_.end(),
                                  [](const auto& link) { return link->up && link->awaits_target(); });
  home_->bell.armed.store(awaits ? kForAnswers : kForWork, std::memory_order_seq_cst);
  ring_all();
  std::atomic_thread_fence(std::memory_order_seq_cst);
}

bool ShmTransport::hush(bool /*looks_at_once*/) {
  bell_.silence();
  // Whoever rings disarms first: still armed means that the ring was a stale one.
  return !is_armed();
}

void ShmTransport::wake() {
  std::atomic_thread_fence(std::memory_order_seq_cst);  // see arm()
  ring(*home_, bell_, kForWork);
}

// Wakes the progress holder of `home`'s engine if it sleeps. The news itself was stored before a full fence.
void ShmTransport::ring(HomeSegment& home, const WakeEvent& bell, Call call) {
  // The exchange lets a single ringer pay for the system call; the sleeper re-arms before it sleeps again.
  if (home.bell.armed.load(std::memory_order_relaxed) >= call &&
      home.bell.armed.exchange(kNone, std::memory_order_acq_rel) != kNone) {
    bell.ring();
  }
}

// There is news for this peer. A full fence after each item would wait for its cache lines to arrive; a single one for
// all, at the next poll or arm, does not. A peer that is seen to be asleep already is woken at once.
// A home is called for one reason alone: that of an incoming link for answers, that of an outgoing one for work.
void ShmTransport::ring_later(PeerHome& home, Call call) {
  if (home.segment->bell.armed.load(std::memory_order_relaxed) >= call) {
    std::atomic_thread_fence(std::memory_order_seq_cst);
    ring(*home.segment, home.bell, call);
  }
  const auto is_this = [&](const Unrung& each) { return each.home == &home; };
  if (!unrung_.empty() && is_this(unrung_.back())) return;
  if (std::none_of(unrung_.begin(), unrung_.end(), is_this)) unrung_.push_back({&home, call});
}

void ShmTransport::ring_all() {
  if (unrung_.empty()) return;
  // seq_cst: pairs with the one in arm(): either we see the peer armed here, or it sees our news there.
  std::atomic_thread_fence(std::memory_order_seq_cst);
  for (const auto& [home, call] : unrung_) ring(*home->segment, home->bell, call);
  unrung_.clear();
}

}  // namespace crossrail::shm
