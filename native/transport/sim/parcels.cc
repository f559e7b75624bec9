// Fragments of paths, and datagrams.

#include "transport/sim/fabric.h"

#include <utility>
#include "transport/sim/sim_nic.h"
#include "transport/sim/world.h"

namespace crossrail::sim {

namespace {

constexpr int64_t kReorderNs = 2'000;  // between fragments of an unordered path, and between datagrams

}  // namespace

uint32_t Fabric::new_parcel() {
  uint32_t slot;
  if (free_parcels_.empty()) {
    slot = static_cast<uint32_t>(parcels_.size());
    parcels_.emplace_back();
  } else {
    slot = free_parcels_.back();
    free_parcels_.pop_back();
  }
  parcels_[slot].number = next_parcel_number_++;
  ++parcels_under_way_;
  return slot;
}

void Fabric::free_parcel(uint32_t slot) {
  parcels_[slot] = Parcel();
  free_parcels_.push_back(slot);
  --parcels_under_way_;
}

void Fabric::send_fragment(SimPath& path, std::span<const uint8_t> head, std::span<const uint8_t> body) {
  const uint32_t slot = new_parcel();
  Parcel& parcel = parcels_[slot];
  parcel.path = path.id;
  parcel.to_path = path.peer;
  parcel.from_host = path.nic->host;
  parcel.from_rail = path.nic->rail;
  parcel.to_nic = path.peer_nic;
  parcel.bytes.reserve(head.size() + body.size());
  parcel.bytes.assign(head.begin(), head.end());
  parcel.bytes.insert(parcel.bytes.end(), body.begin(), body.end());
  ++path.fragments;
  Rail& rail = hosts_[parcel.from_host].rails[parcel.from_rail];
  const NicModel& model = rail.model;
  const Wire::Time length = Wire::duration(parcel.bytes.size(), model.bytes_per_s) + model.overhead_ns * Wire::kPerNs;
  const Wire::Time start = rail.out.take(now() * Wire::kPerNs, length);
  int64_t at_ns = Wire::ns(start + length) + model.latency_ns;
  at_ns += prng_->up_to(path.nic->limits().ordered_paths ? model.jitter_ns : model.jitter_ns + kReorderNs);
  events_->push(at_ns, EventKind::kFragment, slot, parcel.number);
}

void Fabric::arrive_fragment(uint32_t slot) {
  Parcel& parcel = parcels_[slot];
  SimPath* const path = find(parcel.path);
  SimPath* const to = find(parcel.to_path);
  const bool is_lost = path == nullptr || path->is_broken || (to != nullptr && (to->is_flushed || to->is_broken));
  const bool arrives = !is_lost && to != nullptr && to->is_connected &&
                       reaches(parcel.from_host, parcel.from_rail, nics_[parcel.to_nic]);
  if (!is_lost && !arrives) {
    if (parcel.retry_until_ns == 0) parcel.retry_until_ns = now() + kRetryMaxNs;
    if (now() < parcel.retry_until_ns) {
      events_->push(now() + kRetryEveryNs, EventKind::kFragment, slot, parcel.number);
      return;
    }
    break_path(*path, "no answer from the peer's NIC, retries ran out");
  }
  if (arrives) {
    to->nic->push({.kind = SimNic::NewsKind::kFragment, .path = to}, std::move(parcel.bytes));
    wake(*to->nic);
  }
  if (path != nullptr) {
    --path->fragments;
    if (std::exchange(path->wants_room, false)) {
      path->nic->make_room();
      wake(*path->nic);
    }
  }
  free_parcel(slot);
}

void Fabric::send_datagram(SimNic& from, uint32_t to_nic, std::span<const uint8_t> bytes) {
  if (to_nic >= nics_.size() || !hosts_[from.host].rails[from.rail].is_up || from.is_dead) return;
  const NicModel& model = hosts_[from.host].rails[from.rail].model;
  const int copies = prng_->chance(datagram_doubling_ppm_) ? 2 : 1;
  for (int i = 0; i < copies; ++i) {
    if (prng_->chance(datagram_loss_ppm_)) continue;
    const uint32_t slot = new_parcel();
    Parcel& parcel = parcels_[slot];
    parcel.from_host = from.host;
    parcel.from_rail = from.rail;
    parcel.to_nic = to_nic;
    parcel.bytes.assign(bytes.begin(), bytes.end());
    const int64_t at_ns = now() + model.latency_ns + prng_->up_to(model.jitter_ns + kReorderNs);
    events_->push(at_ns, EventKind::kDatagram, slot, parcel.number);
  }
}

void Fabric::arrive_datagram(uint32_t slot) {
  Parcel& parcel = parcels_[slot];
  SimNic* const to = nics_[parcel.to_nic];
  if (reaches(parcel.from_host, parcel.from_rail, to)) {
    to->push({.kind = SimNic::NewsKind::kDatagram}, std::move(parcel.bytes));
    wake(*to);
  }
  free_parcel(slot);
}

}  // namespace crossrail::sim
