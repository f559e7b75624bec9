// Works in flight: when they arrive, and what becomes of them.
#include <algorithm>
#include <cstring>
#include <utility>

#include "transport/sim/fabric.h"
#include "transport/sim/sim_nic.h"
#include "transport/sim/world.h"
#include "util/errors.h"

namespace crossrail::sim {

namespace {

constexpr uint64_t kWholeBytesMax = 4096;  // longer ones arrive in parts
constexpr uint32_t kPartsMax = 4;
// When this many immediates have not been looked at by its engine, a NIC takes no more: it has no receives left.
constexpr size_t kReceivesMax = 8192;
constexpr int64_t kNotReadyNs = 20'000;
constexpr uint32_t kNoticeLatePpm = 250'000;  // of immediates, reported some time after their bytes are in place

Wire::Time slowed(Wire::Time duration, uint32_t permille) {
  return permille == 1000 ? duration : duration * permille / 1000;
}

// The time for which a work occupies a rail's wire.
Wire::Time length_on(const Rail& rail, uint64_t bytes) {
  const Wire::Time length = Wire::duration(bytes, rail.model.bytes_per_s) + rail.model.overhead_ns * Wire::kPerNs;
  return slowed(length, rail.slowness_permille);
}

// The time until the next work can begin.
Wire::Time gap_on(const Rail& rail, Wire::Time length) {
  if (rail.model.works_per_s == 0) return length;
  return std::max(length, slowed(Wire::Time{1'000'000'000'000} / rail.model.works_per_s, rail.slowness_permille));
}

}  // namespace

uint32_t Fabric::new_work() {
  uint32_t slot;
  if (free_works_.empty()) {
    slot = static_cast<uint32_t>(works_.size());
    works_.emplace_back();
  } else {
    slot = free_works_.back();
    free_works_.pop_back();
  }
  works_[slot].number = next_work_number_++;
  ++works_under_way_;
  return slot;
}

void Fabric::free_work(uint32_t slot) {
  leave_key(works_[slot]);
  works_[slot] = Work();
  free_works_.push_back(slot);
  --works_under_way_;
}

void Fabric::leave_key(Work& item) {
  if (item.key_index == kNone) return;
  SimRegistration* const registration = keys_[item.key_index].registration;
  item.key_index = kNone;
  if (registration->leave()) wake(*registration->nic);
}

// It places nothing any more: its target need not wait until the path is flushed, which takes a turn of its owner.
void Fabric::give_up(Work& item) {
  item.given_up = true;
  leave_key(item);
}

void Fabric::post(SimPath& path, const rdma::NicWork& work) {
  const SimNic& nic = *path.nic;
  const NicPlace& peer = nic_places_[path.peer_nic];
  const uint32_t slot = new_work();
  Work& item = works_[slot];
  item.work = work;
  item.path = path.id;
  item.to_path = path.peer;
  item.to_nic = path.peer_nic;
  item.from_host = nic.host;
  item.from_rail = nic.rail;
  item.is_ordered = nic.limits().ordered_paths;
  item.moves_bytes = work.length_bytes > 0 && !static_cast<const SimRegistration*>(work.registration)->is_phantom();
  if (draws_failure(nic.host, nic.rail)) {
    item.doom = prng_->chance(500'000) ? Work::Doom::kBefore : Work::Doom::kAfter;
  }
  path.works.push_back({.slot = slot});
  log_->note(now() - World::kOriginNs, nic.host, LogWord::kPost, nic.actor, nic.rail, item.number,
             work.op == rdma::NicOp::kRead ? 1 : 0, work.length_bytes, work.has_imm ? uint64_t{work.imm} + 1 : 0,
             peer.host, peer.rail);
  plan(path, slot);
}

// Determines when it leaves, and when it reaches the other end.
void Fabric::plan(SimPath& path, uint32_t slot) {
  Work& item = works_[slot];
  const SimNic& nic = *path.nic;
  const NicPlace& peer = nic_places_[path.peer_nic];
  const bool reads = item.work.op == rdma::NicOp::kRead;
  const uint64_t bytes = item.work.length_bytes;
  Host& source = hosts_[reads ? peer.host : nic.host];
  Host& sink = hosts_[reads ? nic.host : peer.host];
  Rail& out = source.rails[reads ? peer.rail : nic.rail];
  const bool is_local = peer.host == nic.host && path.peer_nic != nic.number;
  const int64_t latency_ns =
      is_local ? source.local_model.latency_ns : hosts_[nic.host].rails[nic.rail].model.latency_ns;
  Wire::Time from = now() * Wire::kPerNs;
  if (reads) from += latency_ns * Wire::kPerNs;  // the request must go there first
  if (is_local) {
    const Wire::Time length = Wire::duration(bytes, source.local_model.bytes_per_s);
    const Wire::Time start = source.local.take(from, length);
    const Wire::Time begin = start + latency_ns * Wire::kPerNs;
    item.leaves_ns = Wire::ns(start);
    schedule(slot, &path, begin, begin + length);
    return;
  }
  const Wire::Time length = length_on(out, bytes);
  const Wire::Time start = out.out.take(from, gap_on(out, length));
  item.leaves_ns = Wire::ns(start);
  item.in = &sink.rails[reads ? nic.rail : peer.rail];
  item.reaches = start + latency_ns * Wire::kPerNs;
  item.trails = item.reaches + length;
  int64_t at_ns = Wire::ns(item.reaches);
  if (item.is_ordered) at_ns = path.last_reach_ns = std::max(at_ns, path.last_reach_ns);
  events_->push(at_ns, EventKind::kReach, slot, item.number);
}

// The other end's wire takes it as soon as it has finished what came before.
void Fabric::reach(uint32_t slot) {
  const Work& item = works_[slot];
  const Wire::Time length = length_on(*item.in, item.work.length_bytes);
  // Later than possible if an earlier work on its path was.
  const Wire::Time from = Wire::ns(item.reaches) < now() ? now() * Wire::kPerNs : item.reaches;
  const Wire::Time begin = item.in->in.take(from, gap_on(*item.in, length));
  schedule(slot, find(item.path), begin, std::max(item.trails, begin + length));
}

// Schedules the arrival of its parts. path: null if the sender is gone.
void Fabric::schedule(uint32_t slot, SimPath* path, Wire::Time begin, Wire::Time end) {
  Work& item = works_[slot];
  const uint64_t bytes = item.work.length_bytes;
  const int64_t jitter_ns = prng_->up_to(hosts_[item.from_host].rails[item.from_rail].model.jitter_ns);
  int64_t begin_ns = Wire::ns(begin) + jitter_ns;
  int64_t end_ns = Wire::ns(end) + jitter_ns;
  if (item.is_ordered && path != nullptr) {
    begin_ns = std::max(begin_ns, path->last_landing_ns);
    end_ns = path->last_landing_ns = std::max(end_ns, path->last_landing_ns);
  }
  item.parts = item.moves_bytes && bytes > kWholeBytesMax ? 2 + static_cast<uint32_t>(prng_->below(kPartsMax - 1)) : 1;
  item.parts_open = item.parts;
  const uint32_t parts = item.parts;
  const auto last = static_cast<uint32_t>(parts == 1 ? 0 : prng_->below(parts));
  for (uint32_t part = 0; part < parts; ++part) {
    push_part(part == last ? end_ns : begin_ns + prng_->up_to(end_ns - begin_ns), slot, part);
  }
}

void Fabric::push_part(int64_t at_ns, uint32_t slot, uint32_t part) {
  events_->push(at_ns, EventKind::kPart, slot, works_[slot].number << 8 | part);
}

// --- arriving ---

void Fabric::arrive(uint32_t slot, uint32_t part) {
  Work& item = works_[slot];
  SimPath* const path = find(item.path);
  if (item.given_up) {
    if (path == nullptr) free_work(slot);  // otherwise it waits for the flush
    return;
  }
  if (item.is_ordered && path != nullptr && item.work.cookie != path->landing_cookie) {
    if (path->is_broken) {  // an earlier one failed: this one has no chance
      give_up(item);
    } else {
      push_part(std::max(path->retry_at_ns, now()) + 1, slot, part);
    }
    return;
  }
  SimPath* const to = find(item.to_path);
  const SimNic* const to_nic = nics_[item.to_nic];
  const bool is_there = to != nullptr && to->is_connected && !to->is_flushed;
  const bool is_reached = is_there && (path == nullptr ? reaches(to_nic->host, to_nic->rail, to_nic)
                                                       : reaches(item.from_host, item.from_rail, to_nic));
  if (!is_reached) {
    retry(slot, part, path);
    return;
  }
  if (item.work.has_imm && to_nic->news_count() >= kReceivesMax) {
    if (path != nullptr) path->retry_at_ns = now() + kNotReadyNs;
    push_part(now() + kNotReadyNs, slot, part);
    return;
  }
  if (!item.is_admitted && !admit(slot, *to)) return;
  place(item, part);
  if (--item.parts_open == 0) land(slot, *to);
}

// What a NIC checks when the first part arrives. From then on the region's owner waits for the last part.
bool Fabric::admit(uint32_t slot, SimPath& to) {
  Work& item = works_[slot];
  SimPath* const path = find(item.path);
  item.is_admitted = true;
  if (item.doom == Work::Doom::kBefore && path != nullptr) {
    fail_work(*path, slot, rdma::NicFault::kUnreachable, "an error on the wire, as asked for");
    return false;
  }
  if (item.work.length_bytes == 0) return true;
  SimRegistration* const registration = registration_of(item.work.remote_key);
  const uint64_t offset = item.work.remote_address - SimRegistration::kRemoteBase;
  const Access needed = item.work.op == rdma::NicOp::kRead ? Access::kRemoteRead : Access::kRemoteWrite;
  const bool may = registration != nullptr && registration->nic == to.nic &&
                   fits(offset, item.work.length_bytes, registration->length_bytes) &&
                   allows(registration->access, needed);
  if (may && registration->enter()) {
    item.key_index = static_cast<uint32_t>(item.work.remote_key);
    item.moves_bytes = item.moves_bytes && !registration->is_phantom();
    return true;
  }
  refuse(slot, &to);
  return false;
}

// By the peer's NIC. to: null if its end of the path is gone.
void Fabric::refuse(uint32_t slot, SimPath* to) {
  SimPath* const path = find(works_[slot].path);
  if (path == nullptr) {
    free_work(slot);
    return;
  }
  const bool breaks = works_[slot].is_ordered && to != nullptr;
  fail_work(*path, slot, rdma::NicFault::kRemoteAccess, "remote access error");
  if (breaks) break_path(*to, "it refused a work of the peer", true);
}

void Fabric::refuse_arrivals(const SimRegistration& registration) {
  const auto index = static_cast<uint32_t>(registration.key);
  for (uint32_t slot = 0; slot < works_.size(); ++slot) {
    if (works_[slot].key_index == index) refuse(slot, find(works_[slot].to_path));
  }
}

void Fabric::place(const Work& item, uint32_t part) const {
  if (!item.moves_bytes) return;
  const uint64_t bytes = item.work.length_bytes;
  const uint64_t begin = bytes * part / item.parts;
  const uint64_t length = bytes * (part + 1) / item.parts - begin;
  std::byte* const local = item.copy ? item.copy.get() : item.work.local;
  std::byte* const remote =
      keys_[item.key_index].registration->base + (item.work.remote_address - SimRegistration::kRemoteBase);
  if (item.work.op == rdma::NicOp::kRead) {
    std::memcpy(local + begin, remote + begin, length);
  } else {
    std::memcpy(remote + begin, local + begin, length);
  }
}

void Fabric::land(uint32_t slot, SimPath& to) {
  Work& item = works_[slot];
  SimPath* const path = find(item.path);
  item.has_landed = true;
  leave_key(item);
  ++totals_.works;
  totals_.bytes += item.work.length_bytes;
  log_->note(now() - World::kOriginNs, to.nic->host, LogWord::kLand, item.number);
  const NicModel& model = hosts_[to.nic->host].rails[to.nic->rail].model;
  if (item.work.has_imm) {
    int64_t at_ns = now() + (prng_->chance(kNoticeLatePpm) ? prng_->up_to(2 * model.completion_ns) : 0);
    if (item.is_ordered) at_ns = to.last_notice_ns = std::max(at_ns, to.last_notice_ns);
    to.notices.push_back({at_ns, item.work.imm});
    if (at_ns <= now()) {
      tell_notices(to, false);
    } else {
      events_->push(at_ns, EventKind::kNotice, to.id.index, to.id.number);
    }
  }
  if (path == nullptr) {
    free_work(slot);
    return;
  }
  const bool reads = item.work.op == rdma::NicOp::kRead;
  int64_t report_ns = now() + (reads ? 0 : model.completion_ns) + prng_->up_to(model.jitter_ns);
  if (item.is_ordered) {
    ++path->landing_cookie;
    report_ns = path->last_report_ns = std::max(report_ns, path->last_report_ns);
  }
  events_->push(report_ns, EventKind::kDone, slot, item.number);
}

void Fabric::tell_notices(SimPath& to, bool all) {
  size_t kept = 0;
  const bool names = to.nic->limits().names_imm_paths;
  for (const SimPath::Notice& notice : to.notices) {
    if (!all && notice.at_ns > now()) {
      to.notices[kept++] = notice;
      continue;
    }
    to.nic->push({.kind = SimNic::NewsKind::kImm, .imm = notice.imm, .path = names ? &to : nullptr});
    log_->note(now() - World::kOriginNs, to.nic->host, LogWord::kCount, to.nic->actor, notice.imm);
  }
  if (kept == to.notices.size()) return;
  to.notices.resize(kept);
  wake(*to.nic);
}

// --- ending ---

void Fabric::report(uint32_t slot) {
  Work& item = works_[slot];
  SimPath* const path = find(item.path);
  if (path == nullptr) return;   // killed, and landed
  if (item.given_up) return;     // its acknowledgement is lost
  if (path->has_failed) return;  // behind a failed one: it was executed, and is reported as flushed
  if (item.doom == Work::Doom::kAfter) {
    fail_work(*path, slot, rdma::NicFault::kUnreachable, "the acknowledgement was lost, as asked for");
    return;
  }
  // On an ordered path a completion covers all works before it, and those may be withheld.
  if (withholds(item.from_host, item.from_rail) || (item.is_ordered && item.work.cookie != path->first_cookie)) {
    item.is_withheld = true;
    return;
  }
  if (lacks_answer(slot, *path)) return;
  const uint64_t cookie = item.work.cookie;
  log_->note(now() - World::kOriginNs, path->nic->host, LogWord::kDone, item.number);
  path->nic->push_done(*path, cookie);
  path->end_work(cookie);
  free_work(slot);
  wake(*path->nic);
  if (std::exchange(path->awaits_answer, false)) release_withheld(*path);  // and those behind it on an ordered path
}

// In order; a report may end the path.
void Fabric::release_withheld(SimPath& path) {
  std::vector<std::pair<uint32_t, uint64_t>> released;
  for (size_t i = 0; i < path.works.size(); ++i) {
    const SimPath::Posted& posted = path.works[i];
    if (posted.is_reported || posted.slot == SimPath::kGone || !works_[posted.slot].is_withheld) continue;
    released.emplace_back(posted.slot, works_[posted.slot].number);
  }
  for (const auto& [slot, number] : released) {
    if (works_[slot].number != number) continue;
    works_[slot].is_withheld = false;
    report(slot);
  }
}

bool Fabric::lacks_answer(uint32_t slot, SimPath& path) {
  Work& item = works_[slot];
  if (!is_silent(nic_places_[item.to_nic].host, item.from_host)) return false;
  if (item.retry_until_ns == 0) item.retry_until_ns = now() + kRetryMaxNs;
  path.awaits_answer = true;
  if (now() < item.retry_until_ns) {
    events_->push(now() + kRetryEveryNs, EventKind::kDone, slot, item.number);
  } else {
    fail_work(path, slot, rdma::NicFault::kUnreachable, "no answer from the peer's NIC, retries ran out");
  }
  return true;
}

void Fabric::fail_work(SimPath& path, uint32_t slot, rdma::NicFault fault, const std::string& text) {
  const uint64_t cookie = works_[slot].work.cookie;
  const bool breaks = works_[slot].is_ordered || fault == rdma::NicFault::kUnreachable;
  log_->note(now() - World::kOriginNs, path.nic->host, LogWord::kFail, works_[slot].number,
             static_cast<uint64_t>(fault));
  path.nic->push({.kind = SimNic::NewsKind::kFailed, .fault = fault, .path = &path, .cookie = cookie}, text);
  path.has_failed = path.has_failed || works_[slot].is_ordered;
  path.end_work(cookie);
  free_work(slot);
  wake(*path.nic);
  if (breaks) break_path(path, text);
}

void Fabric::retry(uint32_t slot, uint32_t part, SimPath* path) {
  Work& item = works_[slot];
  if (path == nullptr) {
    free_work(slot);
    return;
  }
  if (path->is_broken) {
    give_up(item);
    return;
  }
  if (item.retry_until_ns == 0) item.retry_until_ns = now() + kRetryMaxNs;
  if (now() >= item.retry_until_ns) {
    fail_work(*path, slot, rdma::NicFault::kUnreachable, "no answer from the peer's NIC, retries ran out");
    return;
  }
  path->retry_at_ns = now() + kRetryEveryNs;
  push_part(path->retry_at_ns, slot, part);
}

}  // namespace crossrail::sim
