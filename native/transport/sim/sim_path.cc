#include <cstring>
#include <mutex>

#include "transport/sim/sim_nic.h"
#include "transport/sim/world.h"
#include "util/errors.h"

namespace crossrail::sim {

namespace {
constexpr uint32_t kFragmentsMax = 64;  // in flight per path
}  // namespace

SimPath::SimPath(World* world, SimNic* nic) : nic(nic), world_(world) {
  id = world->fabric().add(this);
  std::memcpy(offer_.data(), &id.index, sizeof id.index);
  std::memcpy(offer_.data() + sizeof id.index, &id.number, sizeof id.number);
}

SimPath::~SimPath() {
  std::lock_guard lock(world_->lock());
  world_->fabric().remove(this);
}

void SimPath::connect(std::span<const uint8_t> peer_endpoint, std::span<const uint8_t> peer_offer) {
  std::lock_guard lock(world_->lock());
  if (peer_offer.size() != offer_.size() || !SimNic::parse_endpoint(*world_, peer_endpoint, &peer_nic)) {
    throw TransportError("connect", 0, "the peer's offer is malformed, or of another world");
  }
  std::memcpy(&peer.index, peer_offer.data(), sizeof peer.index);
  std::memcpy(&peer.number, peer_offer.data() + sizeof peer.index, sizeof peer.number);
  if (!world_->fabric().has_nic(peer_nic)) throw TransportError("connect", 0, "the peer's NIC is gone");
  is_connected = true;
  world_->fabric().note_connect(*this);
}

uint32_t SimPath::post(std::span<const rdma::NicWork> posted) {
  std::lock_guard lock(world_->lock());
  if (is_broken || !is_connected || nic->is_dead) return 0;
  if (world_->fabric().host(nic->host).rails[nic->rail].is_full) return 0;
  for (const rdma::NicWork& work : posted) {
    CROSSRAIL_ASSERT(work.cookie == first_cookie + works.size());
    CROSSRAIL_ASSERT(works.size() < nic->limits().path_works_max && work.length_bytes <= nic->limits().work_bytes_max);
    CROSSRAIL_ASSERT(work.length_bytes == 0 || work.registration != nullptr);
    world_->fabric().post(*this, work);
  }
  return static_cast<uint32_t>(posted.size());
}

bool SimPath::send(std::span<const uint8_t> head, std::span<const uint8_t> body) {
  std::lock_guard lock(world_->lock());
  CROSSRAIL_ASSERT(head.size() + body.size() <= rdma::kFragmentBytesMax);
  if (is_broken || !is_connected || nic->is_dead) return false;
  if (fragments >= kFragmentsMax) {
    wants_room = true;
    return false;
  }
  world_->fabric().send_fragment(*this, head, body);
  return true;
}

bool SimPath::is_sent() const {
  std::lock_guard lock(world_->lock());
  return fragments == 0 || is_broken;
}

void SimPath::break_off(const std::string&) {
  std::lock_guard lock(world_->lock());
  if (!is_broken_off) world_->fabric().break_off(*this);
}

void SimPath::end_work(uint64_t cookie) {
  works[cookie - first_cookie].is_reported = true;
  while (!works.empty() && works.front().is_reported) {
    works.pop_front();
    ++first_cookie;
  }
}

}  // namespace crossrail::sim
