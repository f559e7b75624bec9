#include "transport/sim/fabric.h"

#include <algorithm>

#include "transport/sim/sim_nic.h"
#include "transport/sim/world.h"
#include "util/errors.h"

namespace crossrail::sim {

Fabric::Fabric(const std::atomic<int64_t>* now_ns, Prng* prng, EventQueue* events, EventLog* log,
               std::function<void(uint32_t)> wake)
    : now_ns_(now_ns), prng_(prng), events_(events), log_(log), wake_(std::move(wake)) {}
Fabric::~Fabric() = default;

uint32_t Fabric::add_host(const std::string& name, std::vector<NicModel> rails, const LocalModel& local) {
  Host host;
  host.name = name;
  host.local_model = local;
  for (NicModel& model : rails) {
    Rail rail;
    rail.model = std::move(model);
    host.rails.push_back(std::move(rail));
  }
  hosts_.push_back(std::move(host));
  log_->name_host(name);
  return host_count() - 1;
}

// --- who is there ---

uint32_t Fabric::add(SimNic* nic) {
  nics_.push_back(nic);
  nic_places_.push_back({nic->host, nic->rail});
  return static_cast<uint32_t>(nics_.size() - 1);
}

void Fabric::remove(SimNic* nic) { nics_[nic->number] = nullptr; }

// A killed engine's NIC is gone, even if its user still holds the engine.
bool Fabric::has_nic(uint32_t number) const {
  return number < nics_.size() && nics_[number] != nullptr && !nics_[number]->is_dead;
}

PathId Fabric::add(SimPath* path) {
  PathId id{static_cast<uint32_t>(paths_.size()), next_path_number_++};
  if (free_paths_.empty()) {
    paths_.push_back(path);
  } else {
    id.index = free_paths_.back();
    free_paths_.pop_back();
    paths_[id.index] = path;
  }
  return id;
}

void Fabric::remove(SimPath* path) {
  CROSSRAIL_ASSERT(!path->is_connected || path->is_flushed);  // nic.h: 5.
  path->nic->forget(path);
  paths_[path->id.index] = nullptr;
  free_paths_.push_back(path->id.index);
}

SimPath* Fabric::find(PathId id) const {
  if (id.number == 0 || id.index >= paths_.size()) return nullptr;
  SimPath* const path = paths_[id.index];
  return path != nullptr && path->id == id ? path : nullptr;
}

// The salt makes forged keys fail.
uint64_t Fabric::add(SimRegistration* registration) {
  uint32_t index = free_key_;
  if (index == kNone) {
    index = static_cast<uint32_t>(keys_.size());
    keys_.emplace_back();
  } else {
    free_key_ = keys_[index].next_free;
  }
  keys_[index] = {registration, static_cast<uint32_t>(prng_->next()), kNone};
  return uint64_t{keys_[index].salt} << 32 | index;
}

void Fabric::remove(SimRegistration* registration) {
  const auto index = static_cast<uint32_t>(registration->key);
  keys_[index].registration = nullptr;
  keys_[index].next_free = free_key_;
  free_key_ = index;
}

SimRegistration* Fabric::registration_of(uint64_t key) const {
  const auto index = static_cast<uint32_t>(key);
  if (index >= keys_.size() || keys_[index].registration == nullptr || keys_[index].salt != key >> 32) return nullptr;
  return keys_[index].registration;
}

void Fabric::wake(const SimNic& nic) { wake_(nic.actor); }

void Fabric::note_connect(const SimPath& path) {
  const NicPlace& peer = nic_places_[path.peer_nic];
  log_->note(now() - World::kOriginNs, path.nic->host, LogWord::kConnect, path.nic->actor, path.nic->rail, peer.host,
             peer.rail);
}

// --- what is in reach ---

bool Fabric::are_parted(uint32_t a, uint32_t b) const {
  return !partitions_.empty() && partitions_.contains({std::min(a, b), std::max(a, b)});
}

bool Fabric::is_silent(uint32_t from, uint32_t to) const {
  return !silences_.empty() && silences_.contains({from, to});
}

bool Fabric::reaches(uint32_t from_host, uint32_t from_rail, const SimNic* to) const {
  return to != nullptr && !to->is_dead && hosts_[from_host].rails[from_rail].is_up &&
         hosts_[to->host].rails[to->rail].is_up && !are_parted(from_host, to->host) && !is_silent(from_host, to->host);
}

// --- how paths end ---

// Works not reported yet may or may not be executed until the path is flushed: on an ordered path, the first few are.
void Fabric::give_up_some(SimPath& path) {
  const uint64_t count = path.works.size();
  const uint64_t cut = path.works.empty() ? 0 : prng_->below(count + 1);
  const bool is_ordered = path.nic->limits().ordered_paths;
  for (uint64_t i = 0; i < count; ++i) {
    const SimPath::Posted& posted = path.works[i];
    const bool kept = is_ordered ? i < cut : prng_->chance(500'000);
    if (!kept && !posted.is_reported && posted.slot != SimPath::kGone) give_up(works_[posted.slot]);
  }
}

void Fabric::break_path(SimPath& path, const std::string& reason, bool by_peer) {
  if (path.is_broken) return;
  path.is_broken = true;
  give_up_some(path);
  log_->note(now() - World::kOriginNs, path.nic->host, LogWord::kBreak, path.nic->actor, path.nic->rail);
  if (path.is_broken_off) return;
  path.nic->push({.kind = SimNic::NewsKind::kBroken, .by_peer = by_peer, .path = &path}, reason);
  wake(*path.nic);
}

void Fabric::break_off(SimPath& path) {
  path.is_broken_off = true;
  break_path(path, "");
  const NicModel& model = hosts_[path.nic->host].rails[path.nic->rail].model;
  const int64_t longest = path.nic->is_dead ? 0 : 2 * (model.latency_ns + model.completion_ns + model.jitter_ns);
  events_->push(now() + 1 + prng_->up_to(longest), EventKind::kFlush, path.id.index, path.id.number);
}

// From here on nothing of it touches memory, in either direction: whatever arrives finds that the path is flushed.
void Fabric::flush(SimPath& path) {
  tell_notices(path, true);  // their bytes are in place, and their senders may know
  path.is_flushed = true;
  uint64_t cookie = path.first_cookie;
  for (size_t i = 0; i < path.works.size(); ++i, ++cookie) {
    const SimPath::Posted posted = path.works[i];
    if (posted.is_reported) continue;
    if (posted.slot != SimPath::kGone) {
      log_->note(now() - World::kOriginNs, path.nic->host, LogWord::kFail, works_[posted.slot].number,
                 static_cast<uint64_t>(rdma::NicFault::kFlushed));
      free_work(posted.slot);
    }
    path.nic->push(
        {.kind = SimNic::NewsKind::kFailed, .fault = rdma::NicFault::kFlushed, .path = &path, .cookie = cookie});
  }
  path.works.clear();
  path.nic->push({.kind = SimNic::NewsKind::kFlushed, .path = &path});
  log_->note(now() - World::kOriginNs, path.nic->host, LogWord::kFlush, path.nic->actor, path.nic->rail);
  wake(*path.nic);
}

void Fabric::happen(const Event& event) {
  switch (event.kind) {
    case EventKind::kReach:
      if (works_[event.what].number == event.detail) reach(event.what);
      return;
    case EventKind::kPart: {
      if (works_[event.what].number == event.detail >> 8)
        arrive(event.what, static_cast<uint32_t>(event.detail & 0xff));
      return;
    }
    case EventKind::kNotice:
      if (SimPath* const path = find({event.what, static_cast<uint32_t>(event.detail)})) tell_notices(*path, false);
      return;
    case EventKind::kDone:
      if (works_[event.what].number == event.detail) report(event.what);
      return;
    case EventKind::kFragment:
      if (parcels_[event.what].number == event.detail) arrive_fragment(event.what);
      return;
    case EventKind::kDatagram:
      arrive_datagram(event.what);
      return;
    case EventKind::kFlush:
      if (SimPath* const path = find({event.what, static_cast<uint32_t>(event.detail)})) flush(*path);
      return;
    case EventKind::kTurn:
    case EventKind::kTimer:
    case EventKind::kDeed:
      return;  // the world's
  }
}

}  // namespace crossrail::sim
