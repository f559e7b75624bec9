// Messages between engines beside their users' operations: sending and receiving.
#include <optional>
#include <string>
#include <utility>
#include <variant>

#include "engine/core.h"
#include "engine/service_wire.h"
#include "util/errors.h"

namespace crossrail {

namespace {

constexpr uint32_t kBadServicesTold = 16;  // per engine: where there is one malformed message, there may be many

}  // namespace

// --- sending ---

// A transfer like others, but owned by no user: it is not in the user's statistics.
void EngineCore::send_service(Peer& peer, Bytes payload, uint64_t token) {
  assert_holder();
  Transfer* const transfer = transfers_.take();
  TransferWork& work = *transfer->work_;
  work.kind = OpKind::kService;
  work.payload = std::move(payload);
  work.length_bytes = work.payload.size();
  work.receiver = PeerRef::share(&peer);
  work.service_token = token;
  bump(counters_.services_begun);
  start(transfer);
}

void EngineCore::on_service_ended(const TransferWork& work, Status status) {
  assert_holder();
  switch (static_cast<ServiceKind>(work.payload[1])) {
    case ServiceKind::kPing:
      heartbeats_.on_ended(*work.receiver, status);
      break;
    case ServiceKind::kQuestion:
      if (status != Status::kDone) verifications_.on_unsent(work.service_token, status, work.detail);
      break;
    case ServiceKind::kVerdict:
      // That we have lost the asker does not mean that it has lost us: links are one-way.
      verifications_.on_told(work.receiver->address(), work.payload, work.service_token, status == Status::kPeerLost);
      break;
  }
}

bool EngineCore::tell(const Address& address, Bytes payload, uint64_t token) {
  assert_holder();
  if (closed()) return false;
  try {
    const PeerRef peer = add_peer(address);
    // It was given up before, and here it is.
    if (peer->state() == PeerState::kLost) set_state(*peer, PeerState::kUnknown, FlightState::kForgotten);
    send_service(*peer, std::move(payload), token);
    return true;
  } catch (const UsageError& error) {
    on_protocol_error(address.name, std::string("cannot answer its question: ") + error.what());
    return false;
  }
}

// --- hearing ---

void EngineCore::on_service(const std::shared_ptr<const Address>& sender, std::span<const uint8_t> payload) {
  assert_holder();
  services_in_.push_back({sender, Bytes(payload.begin(), payload.end())});
}

uint32_t EngineCore::serve() {
  assert_holder();
  uint32_t moved = 0;
  if (!services_in_.empty()) {
    for (const ServiceNote& note : std::exchange(services_in_, {})) {
      ++moved;
      std::string why;
      std::optional<ServiceMessage> message = decode_service(note.payload, &why);
      if (!message) {
        if (++bad_services_ <= kBadServicesTold) on_protocol_error(note.sender->name, why + "; ignored");
      } else if (auto* question = std::get_if<Question>(&*message)) {
        verifications_.on_question(note.sender, std::move(*question));
      } else if (const auto* verdict = std::get_if<Verdict>(&*message)) {
        verifications_.on_verdict(*note.sender, *verdict);
      }  // a heartbeat asks for nothing but to be taken
    }
  }
  if (verifications_.has_work()) moved += verifications_.work();
  if (heartbeats_.is_on()) heartbeats_.tend(clock().now_ns());
  return moved;
}

}  // namespace crossrail
