// What the transports report to the progress holder: links, immediates, messages.
#include <bit>
#include <memory>

#include "device/cuda.h"
#include "engine/core.h"
#include "util/errors.h"

namespace crossrail {

void EngineCore::on_link_up(Link& link) {
  assert_holder();
  auto& peer = *static_cast<Peer*>(link.user);
  set_state(peer, PeerState::kConnected, FlightState::kConnected);
  peer.work_->is_told_lost = false;
  peer.work_->is_worth_another_try = false;
  bump(peer.track_->moves);
  bump(counters_.connected);
  runnable_ = true;
  add_event({EngineEvent::Kind::kPeerConnected, peer.address().name, ""});
}

void EngineCore::on_link_down(Link& link, const std::string& reason, LinkEnd end) {
  assert_holder();
  const PeerRef peer = PeerRef::share(static_cast<Peer*>(link.user));
  peer->link_ = nullptr;
  peer->work_->note = reason;
  record_arrivals();
  imms_.flush_arrivals();  // whoever sees that the peer is lost sees everything that it has counted
  const bool orderly = end == LinkEnd::kLeft;
  peer->work_->is_worth_another_try = end == LinkEnd::kUnmade;
  set_state(*peer, PeerState::kLost, orderly ? FlightState::kLeft : FlightState::kLost);
  fail_backlogs(*peer, Status::kPeerLost, reason);
  verifications_.fail(peer.get(), Status::kPeerLost, reason);
  peers_.drop_keys(*peer);
  if (tell_lost(*peer, orderly ? EngineEvent::Kind::kPeerLeft : EngineEvent::Kind::kPeerLost, reason))
    bump(counters_.lost);
}

void EngineCore::on_link_frozen(Link& link, bool frozen, const std::string& detail) {
  assert_holder();
  set_liveness(*static_cast<Peer*>(link.user), frozen ? PeerState::kFrozen : PeerState::kConnected, detail);
}

void EngineCore::on_protocol_error(const std::string& peer, const std::string& detail) {
  assert_holder();
  add_event({EngineEvent::Kind::kProtocolError, peer, detail});
}

void EngineCore::flush_gpu_before_counts(int ordinal) {
  CROSSRAIL_ASSERT(ordinal >= 0 && ordinal < 64);
  gpus_to_flush_.fetch_or(uint64_t{1} << ordinal, std::memory_order_release);
}

// Waits for NICs' writes to GPUs where they become visible late. False, with an event: not possible.
bool EngineCore::flush_gpus(uint64_t gpus, const std::string& what) {
  assert_holder();
  try {
    for (; gpus != 0; gpus &= gpus - 1) device::flush_writes(std::countr_zero(gpus));
    return true;
  } catch (const TransportError& error) {
    add_event({EngineEvent::Kind::kProtocolError, "", what + " cannot be reported: " + error.what()});
    return false;
  }
}

void EngineCore::count_arrivals() {
  constexpr int kTurnsMax = 1000;          // others may keep going for ever
  if (closed() || is_simulated()) return;  // in a simulation, what arrives takes its virtual time
  run_as_holder([this] {
    for (int turn = 0; turn < kTurnsMax && !closed() && poll_transports() > 0; ++turn) {
    }
    record_arrivals();
    imms_.flush_arrivals();
  });
}

void EngineCore::on_imm(uint32_t imm, uint64_t units) {
  assert_holder();
  // acquire: pairs with flush_gpu_before_counts(), before which no peer knew of the region.
  if (const uint64_t gpus = gpus_to_flush_.load(std::memory_order_acquire); gpus != 0) [[unlikely]] {
    if (!flush_gpus(gpus, "an arrival of immediate " + std::to_string(imm))) return;
  }
  bump(counters_.imm_units, units);
  if (imm != arrived_imm_) record_arrivals();
  arrived_imm_ = imm;
  arrived_units_ += units;
  ++arrived_count_;
  if (imms_.note_arrival(engine_, imm, units)) return;
  bump(counters_.imm_overflow, units);
  if (std::exchange(overflow_reported_, true)) return;
  add_event({EngineEvent::Kind::kImmOverflow, "",
             "immediate " + std::to_string(imm) +
                 " arrived when imm_counters_max = " + std::to_string(options_.imm_counters_max) +
                 " counters existed; it is lost, and so are further ones (stats: imm_overflow_units). Release numbers "
                 "no longer used, or raise it"});
}

Sink::Offer EngineCore::on_message(const std::shared_ptr<const Address>& sender, std::span<const uint8_t> payload) {
  assert_holder();
  ReceivePool* const pool = receiving_.current();
  if (pool == nullptr) return Offer::kHold;
  switch (pool->offer(sender, payload)) {
    case ReceivePool::Offer::kTaken:
      return Offer::kTaken;
    case ReceivePool::Offer::kTooLong:
      return Offer::kTooLong;
    case ReceivePool::Offer::kFull:
    case ReceivePool::Offer::kClosed:
      return Offer::kHold;
  }
  return Offer::kHold;
}

void EngineCore::note_received(uint64_t bytes) {
  assert_holder();
  bump(counters_.received);
  recorder_.record({.bytes = bytes, .count = 1, .state = FlightState::kReceived});
}

}  // namespace crossrail
