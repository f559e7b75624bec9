#include "transport/sim/world.h"

#include <algorithm>
#include <utility>

#include "transport/descriptor.h"
#include "util/errors.h"

namespace crossrail::sim {

namespace {

// Between an engine's news and its turn: the time in which a polling thread sees them. Random, so that the order is,
// too.
constexpr int64_t kTurnNsMin = 20;
constexpr int64_t kTurnNsMax = 200;
constexpr int64_t kLongGapNs = 1'000'000;
constexpr int kEventsPerStep = 64;
// If only timers of idle engines are left for this long, whatever is waited for never comes. Less than the pause
// between their pings.
constexpr int64_t kCalmNsMax = 30'000'000'000;
// The same if somebody is busy for ever, with a message that nobody receives: longer than engines wait for each other.
constexpr int64_t kStuckNsMax = 1'000'000'000'000;
constexpr int64_t kPatiences = 4;

// Derived from the seed, but from neither stream of choices. Addresses contain it: if it were random, whatever is made
// from their bytes - the length of something compressed, say - would differ from run to run.
std::string id_of(uint64_t seed, uint64_t twin) {
  Prng ids(seed ^ 0x6964206f66206120);
  uint64_t bits = ids.next();
  for (uint64_t i = 0; i < twin; ++i) bits = ids.next();
  uint8_t bytes[8];
  for (uint8_t& byte : bytes) {
    byte = static_cast<uint8_t>(bits);
    bits >>= 8;
  }
  return to_hex(bytes);
}

}  // namespace

World::World(uint64_t seed, size_t log_lines_max, uint64_t twin)
    : prng_(seed),
      entropy_(~seed),
      log_(log_lines_max),
      fabric_(&now_ns_, &prng_, &events_, &log_, [this](uint32_t actor) { wake(actor); }),
      id_(id_of(seed, twin)) {}

World::~World() = default;

// --- clock, random bits ---

void World::fill(std::span<uint8_t> bytes) {
  std::lock_guard lock(mutex_);
  for (uint8_t& byte : bytes) byte = static_cast<uint8_t>(entropy_.next() >> 56);
}

// Also called from inside a turn: only the network goes on, and whatever concerns engines waits.
void World::pass() {
  std::lock_guard lock(mutex_);
  while (!events_.empty()) {
    const Event event = events_.pop();
    if (event.kind == EventKind::kTurn || event.kind == EventKind::kTimer || event.kind == EventKind::kDeed) {
      postponed_.push_back(event);
      continue;
    }
    set_time(std::max(now_ns(), event.at_ns));
    fabric_.happen(event);
    return;
  }
  set_time(now_ns() + kTurnNsMax);
}

// --- engines ---

uint32_t World::enter(Actor* actor, uint32_t host, const std::string& name) {
  std::lock_guard lock(mutex_);
  if (host >= fabric_.host_count()) throw UsageError("the world has no host " + std::to_string(host));
  const auto number = static_cast<uint32_t>(seats_.size());
  seats_.push_back({.actor = actor, .host = host});
  log_.name_engine(name);
  log_.note(log_time(), host, LogWord::kEngineOpen, number);
  return number;
}

void World::leave(uint32_t actor) {
  std::lock_guard lock(mutex_);
  Seat& seat = seats_[actor];
  if (seat.actor == nullptr) return;  // killed: the rest goes when its user releases it
  seat.actor = nullptr;
  log_.note(log_time(), seat.host, LogWord::kEngineClose, actor);
}

std::string World::host_name(uint32_t host) const {
  std::lock_guard lock(mutex_);
  return "sim-" + const_cast<Fabric&>(fabric_).host(host).name;
}

void World::wake(uint32_t actor) {
  std::lock_guard lock(mutex_);
  visitors_.act();
  Seat& seat = seats_[actor];
  if (seat.is_frozen) {
    seat.has_news = true;
  } else if (seat.turn_at_ns == kNoDeadline) {
    schedule_turn(actor, now_ns() + kTurnNsMin + prng_.up_to(kTurnNsMax - kTurnNsMin));
  }
}

// With the lock held, in_turn_ means that it is this thread's turn.
void World::after_turn(std::function<void()> deed) {
  {
    std::lock_guard lock(mutex_);
    if (in_turn_) {
      after_turn_.push_back(std::move(deed));
      return;
    }
  }
  deed();
}

void World::schedule_turn(uint32_t number, int64_t at_ns) {
  seats_[number].turn_at_ns = at_ns;
  events_.push(at_ns, EventKind::kTurn, number);
}

void World::give_turn(uint32_t number) {
  visitors_.note_move();
  ++fabric_.totals().turns;
  Actor* const actor = seats_[number].actor;
  in_turn_ = true;
  const bool more = actor->turn();
  in_turn_ = false;
  Seat& seat = seats_[number];
  if (more && seat.turn_at_ns == kNoDeadline) {
    schedule_turn(number, now_ns() + kTurnNsMin + prng_.up_to(kTurnNsMax - kTurnNsMin));
  }
  seat.timer_ns = actor->next_timer();
  if (seat.timer_ns < seat.timer_at_ns) {
    seat.timer_at_ns = std::max(seat.timer_ns, now_ns() + 1);
    events_.push(seat.timer_at_ns, EventKind::kTimer, number);
  }
}

// Timers mostly move on: one event looks after them all. True: it is time for a turn.
bool World::look_at_timer(uint32_t number, int64_t at_ns) {
  Seat& seat = seats_[number];
  if (seat.timer_at_ns != at_ns) return false;  // an earlier event came after it
  seat.timer_at_ns = kNoDeadline;
  if (seat.actor == nullptr || seat.timer_ns == kNoDeadline) return false;
  if (seat.is_frozen) {
    seat.has_news = true;
    return false;
  }
  if (seat.timer_ns <= now_ns()) return true;
  seat.timer_at_ns = seat.timer_ns;
  events_.push(seat.timer_at_ns, EventKind::kTimer, number);
  return false;
}

// --- going on ---

bool World::is_calm() const {
  std::lock_guard lock(mutex_);
  if (fabric_.under_way() || !deeds_.empty()) return false;
  return std::ranges::all_of(seats_, [](const Seat& seat) {
    return seat.actor == nullptr || (seat.turn_at_ns == kNoDeadline && !seat.actor->is_busy());
  });
}

// Called when a timer is next, which is often enough.
bool World::is_idle() {
  uint64_t outcomes = 0;
  int64_t patience_ns = 0;
  for (const Seat& seat : seats_) {
    if (seat.actor == nullptr) continue;
    outcomes += seat.actor->outcomes();
    patience_ns = std::max(patience_ns, seat.actor->patience_ns());
  }
  if (std::exchange(outcomes_, outcomes) != outcomes || !deeds_.empty()) stuck_since_ns_ = now_ns();
  if (!is_calm()) calm_since_ns_ = now_ns();
  return now_ns() - calm_since_ns_ > kCalmNsMax || now_ns() - stuck_since_ns_ > kStuckNsMax + kPatiences * patience_ns;
}

// Whether anything happened that a waiting thread could see.
bool World::happens(const Event& event, std::unique_lock<std::recursive_mutex>* held) {
  ++fabric_.totals().events;
  switch (event.kind) {
    case EventKind::kTurn: {
      Seat& seat = seats_[event.what];
      if (seat.turn_at_ns != event.at_ns) return false;
      seat.turn_at_ns = kNoDeadline;
      if (seat.actor == nullptr) return false;
      if (seat.is_frozen) {
        seat.has_news = true;
        return false;
      }
      give_turn(event.what);
      return true;
    }
    case EventKind::kTimer:
      if (!look_at_timer(event.what, event.at_ns)) return false;
      give_turn(event.what);
      return true;
    case EventKind::kDeed: {
      const auto found = deeds_.find(event.what);
      const std::function<void()> deed = std::move(found->second);
      deeds_.erase(found);
      held->unlock();
      deed();
      return true;
    }
    case EventKind::kReach:
    case EventKind::kPart:
    case EventKind::kNotice:
    case EventKind::kDone:
    case EventKind::kFragment:
    case EventKind::kDatagram:
    case EventKind::kFlush:
      fabric_.happen(event);
      return false;
  }
  return false;
}

Simulation::Step World::advance(Deadline until, Deadline limit) {
  std::unique_lock held(mutex_);
  visitors_.come_back();
  const Step step = go_on(until, limit, &held);
  if (!held.owns_lock()) return step;
  visitors_.go_look();
  if (!after_turn_.empty()) {
    const std::vector<std::function<void()>> deeds = std::exchange(after_turn_, {});
    held.unlock();
    for (const auto& deed : deeds) deed();
  }
  return step;
}

Simulation::Step World::go_on(Deadline until, Deadline limit, std::unique_lock<std::recursive_mutex>* held) {
  for (const Event& event : postponed_) events_.push(event.at_ns, event.kind, event.what, event.detail);
  postponed_.clear();
  until = std::max(until, now_ns());
  const Deadline end_ns = std::max(std::min(until, limit), now_ns());
  for (int count = 0; count < kEventsPerStep; ++count) {
    const bool ends = events_.empty() || events_.top().at_ns > end_ns;
    const int64_t next_ns = ends ? end_ns : events_.top().at_ns;
    if (next_ns - now_ns() > kLongGapNs) {
      if (!visitors_.has_looked()) return Step::kMoved;  // another thread moved something
      if (visitors_.others_act()) return Step::kHeld;
    }
    if (until == kNoDeadline) {
      if (events_.empty() || (events_.top().kind == EventKind::kTimer && is_idle())) return Step::kIdle;
    }
    if (ends) {
      set_time(end_ns);
      return Step::kReached;
    }
    const Event event = events_.pop();
    set_time(std::max(now_ns(), event.at_ns));
    if (happens(event, held)) return Step::kMoved;
  }
  return Step::kMoved;
}

void World::wake_watchers() {
  std::lock_guard lock(mutex_);
  for (const uint32_t number : watching_) {
    if (seats_[number].actor != nullptr && seats_[number].actor->has_changed_words()) wake(number);
  }
}

void World::watches_words(uint32_t actor) {
  std::lock_guard lock(mutex_);
  watching_.insert(actor);
}

void World::begin_wait() {
  std::lock_guard lock(mutex_);
  visitors_.begin_wait();
}

void World::end_wait() {
  std::lock_guard lock(mutex_);
  visitors_.end_wait();
}

void World::set_callbacks(std::function<bool()> is_due, std::function<void()> run) {
  std::lock_guard lock(mutex_);
  has_callbacks_ = std::move(is_due);
  run_callbacks_ = std::move(run);
}

// Meanwhile this thread does not count as waiting: others do not run ahead. A callback may throw, for example upon
// Ctrl-C: the wait that it ends cleans up after itself.
void World::run_callbacks() {
  struct Pause {
    World& world;
    explicit Pause(World& of) : world(of) { world.end_wait(); }
    ~Pause() { world.begin_wait(); }
  } const pause(*this);
  run_callbacks_();
}

// --- deeds ---

void World::at(int64_t at_ns, std::function<void()> deed) {
  {
    std::lock_guard lock(mutex_);
    if (at_ns > now_ns()) {
      deeds_[next_deed_] = std::move(deed);
      events_.push(at_ns, EventKind::kDeed, next_deed_++);
      return;
    }
  }
  deed();
}

void World::freeze(uint32_t actor, bool frozen, FaultNumber fault) {
  std::lock_guard lock(mutex_);
  Seat& seat = seats_[actor];
  if (seat.actor == nullptr) return;
  seat.freezes.change(frozen, fault);
  if (seat.freezes.any() != frozen || std::exchange(seat.is_frozen, frozen) == frozen) return;
  log_.note(log_time(), seat.host, frozen ? LogWord::kFrozen : LogWord::kThawed, actor);
  if (!frozen) wake(actor);
}

void World::kill(uint32_t actor) {
  Actor* dying = nullptr;
  {
    std::lock_guard lock(mutex_);
    Seat& seat = seats_[actor];
    if (seat.actor == nullptr) return;
    dying = seat.actor;
    log_.note(log_time(), seat.host, LogWord::kKilled, actor);
    fabric_.kill(actor);
  }
  dying->die();
  std::lock_guard lock(mutex_);
  seats_[actor].actor = nullptr;
}

std::vector<uint32_t> World::engines_on(uint32_t host) const {
  std::lock_guard lock(mutex_);
  std::vector<uint32_t> engines;
  for (uint32_t number = 0; number < seats_.size(); ++number) {
    if (seats_[number].actor != nullptr && seats_[number].host == host) engines.push_back(number);
  }
  return engines;
}

// --- looking at it ---

std::vector<std::string> World::log_lines() const {
  std::lock_guard lock(mutex_);
  return log_.lines();
}

std::string World::log_digest() const {
  std::lock_guard lock(mutex_);
  return log_.digest();
}

Totals World::totals() const {
  std::lock_guard lock(mutex_);
  return const_cast<Fabric&>(fabric_).totals();
}

}  // namespace crossrail::sim
