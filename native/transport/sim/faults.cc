// Deliberate faults.
#include <algorithm>
#include <cstring>
#include <memory>
#include <utility>

#include "transport/sim/fabric.h"
#include "transport/sim/sim_nic.h"
#include "transport/sim/world.h"

namespace crossrail::sim {

void Fabric::set_rail_up(uint32_t host, uint32_t rail, bool up, FaultNumber fault) {
  Rail& changed = hosts_[host].rails[rail];
  changed.downs.change(!up, fault);
  if (changed.downs.any() == up || std::exchange(changed.is_up, up) == up) return;
  log_->note(now() - World::kOriginNs, host, LogWord::kFault, up ? FaultWord::kRailUp : FaultWord::kRailDown, rail);
  for (SimNic* nic : nics_) {
    if (nic == nullptr || nic->is_dead || nic->host != host || nic->rail != rail) continue;
    nic->push({.kind = SimNic::NewsKind::kPort, .is_up = up}, up ? "plugged in" : "unplugged");
    wake(*nic);
  }
}

void Fabric::set_rail_full(uint32_t host, uint32_t rail, bool full, FaultNumber fault) {
  Rail& changed = hosts_[host].rails[rail];
  changed.fulls.change(full, fault);
  if (changed.fulls.any() != full || std::exchange(changed.is_full, full) == full) return;
  log_->note(now() - World::kOriginNs, host, LogWord::kFault, full ? FaultWord::kQueueFull : FaultWord::kQueueRoom,
             rail);
  for (SimNic* nic : nics_) {
    if (full || nic == nullptr || nic->host != host || nic->rail != rail) continue;
    nic->make_room();
    wake(*nic);
  }
}

void Fabric::set_slowness(uint32_t host, uint32_t rail, uint32_t permille, FaultNumber fault) {
  Rail& changed = hosts_[host].rails[rail];
  if (permille == 1000) {
    changed.slownesses.end(fault);
  } else {
    changed.slownesses.begin(fault, permille);
  }
  changed.slowness_permille = changed.slownesses.value_or(1000);
  log_->note(now() - World::kOriginNs, host, LogWord::kFault, FaultWord::kSlow, changed.slowness_permille);
}

bool Fabric::change(FaultsByHosts& faults, std::pair<uint32_t, uint32_t> hosts, bool begins, FaultNumber fault) {
  StandingFaults& there = faults[hosts];
  there.change(begins, fault);
  if (there.any()) return begins;
  faults.erase(hosts);
  return true;
}

void Fabric::set_partition(uint32_t a, uint32_t b, bool parted, FaultNumber fault) {
  if (!change(partitions_, {std::min(a, b), std::max(a, b)}, parted, fault)) return;
  log_->note(now() - World::kOriginNs, a, LogWord::kFault, parted ? FaultWord::kPartition : FaultWord::kHeal, b);
}

void Fabric::set_silence(uint32_t from, uint32_t to, bool silent, FaultNumber fault) {
  if (!change(silences_, {from, to}, silent, fault)) return;
  log_->note(now() - World::kOriginNs, from, LogWord::kFault, silent ? FaultWord::kSilence : FaultWord::kSound, to);
}

Faults& Fabric::faults_of(uint32_t host, uint32_t rail) {
  return rail == kAnyRail ? hosts_[host].faults : hosts_[host].rails[rail].faults;
}

bool Fabric::draws_failure(uint32_t host, uint32_t rail) {
  Faults* const both[] = {&hosts_[host].faults, &hosts_[host].rails[rail].faults};
  for (Faults* faults : both) {
    if (faults->fail_count == 0) continue;
    --faults->fail_count;
    return true;
  }
  return std::ranges::any_of(both, [&](const Faults* faults) {
    return faults->fail_chance_ppm > 0 && prng_->chance(faults->fail_chance_ppm);
  });
}

bool Fabric::withholds(uint32_t host, uint32_t rail) const {
  return hosts_[host].faults.withholdings.any() || hosts_[host].rails[rail].faults.withholdings.any();
}

bool Fabric::take_failed_registration(uint32_t host, uint32_t rail) {
  for (Faults* faults : {&hosts_[host].faults, &hosts_[host].rails[rail].faults}) {
    if (faults->registrations_to_fail == 0) continue;
    --faults->registrations_to_fail;
    return true;
  }
  return false;
}

void Fabric::set_failing(uint32_t host, uint32_t rail, uint32_t chance_ppm, uint64_t count) {
  faults_of(host, rail).fail_chance_ppm = chance_ppm;
  faults_of(host, rail).fail_count = count;
  log_->note(now() - World::kOriginNs, host, LogWord::kFault, FaultWord::kFailWorks, count != 0 ? count : chance_ppm);
}

void Fabric::set_withholding(uint32_t host, uint32_t rail, bool withholds, FaultNumber fault) {
  StandingFaults& there = faults_of(host, rail).withholdings;
  const bool before = there.any();
  there.change(withholds, fault);
  if (there.any() == before) return;
  log_->note(now() - World::kOriginNs, host, LogWord::kFault, withholds ? FaultWord::kWithhold : FaultWord::kRelease,
             rail == kAnyRail ? 0 : rail);
  if (withholds) return;
  for (SimPath* path : paths_) {
    if (path == nullptr || path->nic->host != host || this->withholds(host, path->nic->rail)) continue;
    release_withheld(*path);
  }
}

void Fabric::set_registrations_to_fail(uint32_t host, uint32_t rail, uint64_t count) {
  faults_of(host, rail).registrations_to_fail = count;
  log_->note(now() - World::kOriginNs, host, LogWord::kFault, FaultWord::kFailRegistrations, count);
}

void Fabric::set_datagram_faults(uint32_t loss_ppm, uint32_t doubling_ppm) {
  datagram_loss_ppm_ = loss_ppm;
  datagram_doubling_ppm_ = doubling_ppm;
  log_->note(now() - World::kOriginNs, 0, LogWord::kFault, FaultWord::kDatagramLoss, loss_ppm);
}

// Works that have left its NICs are executed, with the bytes that the memory has at this moment; the others never
// happen.
void Fabric::kill(uint32_t actor) {
  for (SimPath* path : paths_) {
    if (path == nullptr || path->nic->actor != actor) continue;
    for (size_t i = 0; i < path->works.size(); ++i) {
      SimPath::Posted& posted = path->works[i];
      if (posted.is_reported) continue;
      const uint32_t slot = std::exchange(posted.slot, SimPath::kGone);
      Work& item = works_[slot];
      const bool flies = !item.given_up && !item.has_landed && item.leaves_ns <= now() &&
                         item.work.op == rdma::NicOp::kWrite && item.retry_until_ns == 0;
      if (!flies) {
        free_work(slot);
        continue;
      }
      item.path = {};
      if (!item.moves_bytes) continue;
      item.copy = std::make_unique<std::byte[]>(item.work.length_bytes);
      std::memcpy(item.copy.get(), item.work.local, item.work.length_bytes);
    }
    path->is_broken = true;
  }
  for (SimNic* nic : nics_) {
    if (nic != nullptr && nic->actor == actor) nic->is_dead = true;
  }
}

}  // namespace crossrail::sim
