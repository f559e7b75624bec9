#include "transport/sim/sim_nic.h"

#include <algorithm>
#include <cstring>
#include <mutex>
#include <utility>

#include "transport/sim/world.h"
#include "util/errors.h"

namespace crossrail::sim {

namespace {

constexpr size_t kNewsPerPoll = 256;
// How long memory waits for what has begun to arrive there: longer than a NIC's retries.
constexpr int64_t kArrivalsMaxNs = 2'000'000'000;
// An endpoint: the world's id, then the NIC's number.
constexpr size_t kIdBytes = 16;
constexpr size_t kEndpointBytes = kIdBytes + sizeof(uint32_t);

}  // namespace

// --- registrations ---

SimRegistration::SimRegistration(World* world, SimNic* nic, std::byte* base, uint64_t length_bytes, Access access)
    : nic(nic), base(base), length_bytes(length_bytes), access(access), world_(world) {
  key = world->fabric().add(this);
  remote_base = kRemoteBase;
}

SimRegistration::~SimRegistration() {
  std::lock_guard lock(world_->lock());
  is_revoked_ = true;
  const int64_t patience_ns = world_->now_ns() + kArrivalsMaxNs;
  while (arriving_ > 0 && world_->now_ns() < patience_ns) world_->pass();
  if (arriving_ > 0) world_->fabric().refuse_arrivals(*this);  // the other parts would need a turn of the engine
  world_->fabric().remove(this);
}

void SimRegistration::revoke() { is_revoked_ = true; }
bool SimRegistration::is_quiet() const { return is_revoked_ && arriving_ == 0; }

bool SimRegistration::enter() {
  ++arriving_;
  if (!is_revoked_) return true;
  --arriving_;
  return false;
}

bool SimRegistration::leave() { return --arriving_ == 0 && is_revoked_; }

// --- NIC ---

SimNic::SimNic(World* world, uint32_t actor, uint32_t host, uint32_t rail)
    : actor(actor), host(host), rail(rail), world_(world), fabric_(world->id()) {
  std::lock_guard lock(world->lock());
  number = world->fabric().add(this);
  const Host& place = world->fabric().host(host);
  const NicModel& model = place.rails[rail].model;
  name_ = place.name + "/" + std::to_string(rail);
  description_ = "simulated " + model.name + " of " + place.name;
  speed_mbps_ = model.speed_mbps();
  limits_ = {.work_bytes_max = model.work_bytes_max,
             .path_works_max = model.works_max,
             .ordered_paths = model.is_ordered,
             .names_imm_paths = model.names_imm_paths};
  endpoint_.assign(fabric_.begin(), fabric_.end());
  endpoint_.resize(kEndpointBytes);
  std::memcpy(endpoint_.data() + kIdBytes, &number, sizeof number);
}

SimNic::~SimNic() {
  std::lock_guard lock(world_->lock());
  world_->fabric().remove(this);
}

bool SimNic::parse_endpoint(const World& world, std::span<const uint8_t> endpoint, uint32_t* nic) {
  if (endpoint.size() != kEndpointBytes || !std::equal(world.id().begin(), world.id().end(), endpoint.begin())) {
    return false;
  }
  std::memcpy(nic, endpoint.data() + kIdBytes, sizeof *nic);
  return true;
}

int SimNic::nearness(std::span<const uint8_t> peer_endpoint) const {
  uint32_t peer;
  return parse_endpoint(*world_, peer_endpoint, &peer) ? 2 : 0;
}

std::unique_ptr<rdma::Registration> SimNic::register_memory(std::byte* base, uint64_t length_bytes, Access access) {
  std::lock_guard lock(world_->lock());
  if (world_->fabric().take_failed_registration(host, rail)) {
    throw TransportError("register_memory", ENOMEM, name_ + " refuses " + std::to_string(length_bytes) + " bytes",
                         "the simulation was asked for this (fail_registrations)");
  }
  return std::make_unique<SimRegistration>(world_, this, base, length_bytes, access);
}

bool SimNic::is_port_up() const {
  std::lock_guard lock(world_->lock());
  return world_->fabric().host(host).rails[rail].is_up;
}

void SimNic::send_datagram(std::span<const uint8_t> peer_endpoint, std::span<const uint8_t> bytes) {
  CROSSRAIL_ASSERT(bytes.size() <= rdma::kDatagramBytesMax);
  uint32_t peer;
  if (!parse_endpoint(*world_, peer_endpoint, &peer)) return;
  std::lock_guard lock(world_->lock());
  world_->fabric().send_datagram(*this, peer, bytes);
}

std::unique_ptr<rdma::NicPath> SimNic::make_path() {
  std::lock_guard lock(world_->lock());
  return std::make_unique<SimPath>(world_, this);
}

// --- news ---

uint32_t SimNic::keep(Detail detail) {
  if (free_details_.empty()) {
    details_.push_back(std::move(detail));
    return static_cast<uint32_t>(details_.size());
  }
  const uint32_t at = free_details_.back();
  free_details_.pop_back();
  details_[at - 1] = std::move(detail);
  return at;
}

void SimNic::push(News news, std::string text) {
  news.detail = keep({std::move(text), {}});
  news_.push_back(news);
}

void SimNic::push(News news, std::vector<uint8_t> bytes) {
  news.detail = keep({{}, std::move(bytes)});
  news_.push_back(news);
}

// On an ordered path one completion covers all works before it.
void SimNic::push_done(SimPath& path, uint64_t cookie) {
  if (limits_.ordered_paths && !news_.empty()) {
    News& last = news_.back();
    if (last.kind == NewsKind::kDone && last.path == &path) {
      last.cookie = cookie;
      return;
    }
  }
  news_.push_back({.kind = NewsKind::kDone, .path = &path, .cookie = cookie});
}

void SimNic::forget(SimPath* path) {
  for (size_t i = 0; i < news_.size(); ++i) {
    News& news = news_[i];
    if (news.path == path) news = {.kind = NewsKind::kPort, .is_up = true, .detail = news.detail};
  }
}

bool SimNic::has_arrivals() {
  std::lock_guard lock(world_->lock());
  return !news_.empty() || has_room_;
}

uint32_t SimNic::poll(rdma::NicEvents& events) {
  std::lock_guard lock(world_->lock());
  uint32_t moved = std::exchange(has_room_, false) ? 1 : 0;
  if (is_dead) {
    // Nothing reaches the engine any more except the end of its own paths.
    moved = 0;
  }
  for (size_t count = std::min(news_.size(), kNewsPerPoll); count > 0; --count, ++moved)
    tell(events, news_.pop_front());
  return moved;
}

void SimNic::tell(rdma::NicEvents& events, const News& news) {
  Detail detail;
  if (news.detail != 0) {
    detail = std::move(details_[news.detail - 1]);
    free_details_.push_back(news.detail);
  }
  constexpr int kCode = 12;
  switch (news.kind) {
    case NewsKind::kDone:
      events.on_work_done(*news.path, news.cookie, limits_.ordered_paths);
      break;
    case NewsKind::kFailed:
      events.on_work_failed(*news.path, news.cookie, news.fault, kCode, detail.text.empty() ? "flushed" : detail.text);
      break;
    case NewsKind::kImm:
      events.on_imm(news.path, news.imm);
      break;
    case NewsKind::kFragment:
      events.on_fragment(news.path, detail.bytes);
      break;
    case NewsKind::kDatagram:
      events.on_datagram(detail.bytes);
      break;
    case NewsKind::kBroken:
      events.on_path_broken(*news.path, news.by_peer, detail.text);
      break;
    case NewsKind::kFlushed:
      events.on_path_flushed(*news.path);
      break;
    case NewsKind::kPort:
      events.on_port(news.is_up, detail.text);
      break;
  }
}

}  // namespace crossrail::sim
