#include "transport/rdma/registrations.h"

#include <algorithm>
#include <bit>

#include "transport/rdma/region.h"

namespace crossrail::rdma {

namespace {

uint64_t begin_of(const RdmaRegion& region) { return reinterpret_cast<uint64_t>(region.base); }
uint64_t end_of(const RdmaRegion& region) { return begin_of(region) + region.length_bytes; }

uint32_t bits_of(const RdmaRegion& region) { return static_cast<uint32_t>(std::bit_width(region.length_bytes)); }

bool may_join(const RdmaRegion& wanted, const RdmaRegion& open) {
  if (wanted.is_gpu != open.is_gpu) return false;
  if (wanted.is_gpu) return begin_of(open) == begin_of(wanted) && end_of(open) == end_of(wanted);
  return begin_of(open) <= begin_of(wanted) && end_of(wanted) <= end_of(open);
}

}  // namespace

void Registrations::revoke() const {
  for (const auto& registration : by_rail) registration->revoke();
}

bool Registrations::is_quiet() const {
  return std::ranges::all_of(by_rail, [](const auto& registration) { return registration->is_quiet(); });
}

const Registration* Registrations::any() const {
  const auto found = std::ranges::find_if(by_rail, is_known_at);
  return found == by_rail.end() ? nullptr : found->get();
}

SharedRegistrations::Place SharedRegistrations::place_of(const RdmaRegion& region) {
  return {bits_of(region), begin_of(region), region.id};
}

const RdmaRegion* SharedRegistrations::find(const RdmaRegion& wanted) const {
  if (open_.empty()) return nullptr;
  const uint32_t longest = std::get<0>(open_.rbegin()->first);
  for (uint32_t bits = bits_of(wanted); bits <= longest; ++bits) {
    const uint64_t reach = uint64_t{1} << bits;  // no region is longer than 2**48 bytes
    for (auto next = open_.upper_bound({bits, begin_of(wanted), UINT64_MAX}); next != open_.begin();) {
      --next;
      const auto& [its_bits, begin, id] = next->first;
      if (its_bits != bits || end_of(wanted) - begin >= reach) break;
      if (may_join(wanted, *next->second)) return next->second;
    }
  }
  return nullptr;
}

bool SharedRegistrations::join(RdmaRegion& region) {
  if (region.access != Access::kLocal) return false;
  const std::lock_guard lock(mutex_);
  const RdmaRegion* const other = find(region);
  if (other == nullptr) return false;
  open_[place_of(region)] = &region;
  region.registered = other->registered;
  ++region.registered->users;
  return true;
}

void SharedRegistrations::add(const RdmaRegion& region) {
  const auto is_read_only = [](const auto& registration) { return registration->is_read_only; };
  if (region.access != Access::kLocal || std::ranges::any_of(region.registered->by_rail, is_read_only)) return;
  const std::lock_guard lock(mutex_);
  open_[place_of(region)] = &region;
  ++region.registered->users;
}

bool SharedRegistrations::leave(const RdmaRegion& region) {
  const std::lock_guard lock(mutex_);
  if (open_.erase(place_of(region)) == 0) return true;
  return --region.registered->users == 0;
}

}  // namespace crossrail::rdma
