#include "engine/flight_recorder.h"

#include <algorithm>
#include <mutex>

#include "engine/engine.h"

namespace crossrail {

namespace {
constexpr size_t kGonePeersKept = 256;  // so that entries about them can still be read
constexpr size_t kNotesKept = 128;
}  // namespace

const char* flight_state_name(FlightState state) {
  switch (state) {
    case FlightState::kSubmitted:
      return "submitted";
    case FlightState::kDone:
      return "done";
    case FlightState::kFailed:
      return "failed";
    case FlightState::kCancelled:
      return "cancelled";
    case FlightState::kPosted:
      return "posted";
    case FlightState::kMoved:
      return "moved";
    case FlightState::kSent:
      return "sent";
    case FlightState::kRetired:
      return "retired";
    case FlightState::kWithdrawn:
      return "withdrawn";
    case FlightState::kArrived:
      return "arrived";
    case FlightState::kReceived:
      return "received";
    case FlightState::kConnecting:
      return "connecting";
    case FlightState::kConnected:
      return "connected";
    case FlightState::kFrozen:
      return "frozen";
    case FlightState::kSlow:
      return "slow";
    case FlightState::kThawed:
      return "thawed";
    case FlightState::kLost:
      return "lost";
    case FlightState::kLeft:
      return "left";
    case FlightState::kForgotten:
      return "forgotten";
  }
  return "?";
}

bool FlightRing::read(uint64_t at, FlightEntry* entry) const {
  const Slot& slot = slots_[at & mask_];
  std::array<uint64_t, 4> words;
  for (size_t i = 0; i < words.size(); ++i) words[i] = slot[i].load(std::memory_order_relaxed);
  // Pairs with the release fence in write(): if any word belongs to a later entry, the head read below is at least that
  // entry's number, which is at + capacity or more.
  std::atomic_thread_fence(std::memory_order_acquire);
  if (head_.load(std::memory_order_relaxed) - at > mask_) return false;
  entry->ticks = static_cast<int64_t>(words[0]);
  entry->bytes = words[1];
  entry->transfer = static_cast<uint32_t>(words[2]);
  entry->peer = static_cast<uint32_t>(words[2] >> 32);
  entry->imm = static_cast<uint32_t>(words[3]);
  entry->count = static_cast<uint32_t>(words[3] >> 32) & FlightEntry::kCountMax;
  entry->op = static_cast<uint32_t>(words[3] >> kOpShift) & 0x1f;
  entry->repeats = (words[3] >> kRepeatsShift & 1) != 0;
  entry->state = static_cast<FlightState>(words[3] >> kStateShift);
  return true;
}

// While entries come slowly, each gets its own reading of the clock. In a burst each reading serves twice as many
// entries as the one before, up to a bound: the more entries there were, the more would get ticks ahead of time should
// a pause come now.
void FlightRecorder::read_clock() {
  constexpr int64_t kUsesMax = 32;
  const int64_t now = clock_.ticks();
  const bool is_burst = now - read_ticks_ < (ticks_ - read_ticks_) * burst_ticks_;
  uses_ = is_burst ? std::min(2 * uses_, kUsesMax) : 1;
  ticks_ = read_ticks_ = std::max(ticks_, now);
  ticks_end_ = ticks_ + uses_;
}

FlightRecorder::FlightRecorder(uint32_t entries, const Clock* simulated, int64_t burst_ns)
    : entries_(entries), clock_(simulated), burst_ticks_(clock_.ticks_in(burst_ns)) {
  if (!is_on()) return;
  rings_.reserve(1 + kTransportsMax * kRailsMax);
  rings_.push_back(std::make_unique<FlightRing>("engine", entries_));
  ring_count_.store(1, std::memory_order_release);
}

void FlightRecorder::set_rails(std::span<const Rails> transports) {
  if (!is_on()) return;
  for (size_t i = 0; i < transports.size(); ++i) {
    first_ring_[i] = static_cast<uint32_t>(rings_.size());
    for (uint32_t rail = 0; rail < transports[i].count; ++rail) {
      rings_.push_back(
          std::make_unique<FlightRing>(std::string(transports[i].transport) + ":" + std::to_string(rail), entries_));
    }
  }
  ring_count_.store(static_cast<uint32_t>(rings_.size()), std::memory_order_release);
}

std::shared_ptr<PeerTrack> FlightRecorder::add_peer(const std::string& name, uint32_t pid, const char* transport,
                                                    PeerState state, uint32_t rail_count) {
  auto track = std::make_shared<PeerTrack>();
  track->name = name;
  track->pid = pid;
  track->transport = transport;
  track->state.store(state, std::memory_order_relaxed);
  track->rail_count = rail_count;
  if (rail_count > 0) track->rails = std::make_unique<RailTraffic[]>(rail_count);
  std::lock_guard lock(lock_);
  track->id = ++last_peer_id_;
  tracks_.push_back(track);
  if (track->id % kGonePeersKept == 0) {
    // A peer that nobody else references is gone; the newest of these are kept.
    const auto is_gone = [](const auto& known) { return known.use_count() == 1; };
    size_t surplus = static_cast<size_t>(std::count_if(tracks_.begin(), tracks_.end(), is_gone));
    surplus -= std::min(surplus, kGonePeersKept);
    std::erase_if(tracks_, [&](const auto& known) {
      if (surplus == 0 || !is_gone(known)) return false;
      --surplus;
      return true;
    });
  }
  return track;
}

void FlightRecorder::note(const char* kind, const std::string& peer, const std::string& detail) {
  if (!is_on()) return;
  auto note = std::make_shared<FlightNote>();
  note->ticks = clock_.ticks();
  note->kind = kind;
  note->peer = peer;
  note->detail = detail;
  std::lock_guard lock(lock_);
  if (notes_.size() == kNotesKept) notes_.pop_front();
  notes_.push_back(std::move(note));
}

template <typename T>
std::shared_ptr<const T> FlightRecorder::at(const std::deque<std::shared_ptr<T>>& list, size_t index) const {
  if (!lock_.try_lock_for_a_moment()) return nullptr;
  std::lock_guard lock(lock_, std::adopt_lock);
  return index < list.size() ? list[index] : nullptr;
}

std::shared_ptr<const PeerTrack> FlightRecorder::track(size_t index) const { return at(tracks_, index); }
std::shared_ptr<const FlightNote> FlightRecorder::note(size_t index) const { return at(notes_, index); }

}  // namespace crossrail
