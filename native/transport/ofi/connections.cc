// With Rules::connects: which connections are accepted, are up, or have ended.
//
// Of the two ends of a path the one with the smaller (name of its listener, path number) dials; the other accepts
// whoever names its path and the token from its offer, once. The dialing end may know the other's offer earlier than
// the other way round: then the connection is up before connect() is called at the other end.
#include <algorithm>

#include "transport/ofi/lines.h"
#include "transport/ofi/listener.h"
#include "transport/ofi/nic.h"
#include "transport/ofi/wire.h"
#include "util/errors.h"

namespace crossrail::ofi {

namespace {

// Reading the event queue costs system calls, and its news is seldom urgent: the completion queue, too, reports that a
// connection ended.
constexpr int64_t kEventsPause = 250'000;
constexpr int kEventsMax = 64;  // in one poll

}  // namespace

bool OfiNic::are_events_due() const {
  return events_due_ || !unready_.empty() || lines_->is_dialing() || now_ - events_read_ns_ >= kEventsPause;
}

uint32_t OfiNic::read_events(rdma::NicEvents& events) {
  events_due_ = false;
  events_read_ns_ = now_;
  uint32_t count = 0;
  try {
    for (; count < kEventsMax; ++count) {
      const auto event = listener_->next();
      if (!event) return count;
      switch (event->kind) {
        case ConnectionEvent::Kind::kRequest:
          on_request(*event);
          break;
        case ConnectionEvent::Kind::kConnected:
          on_connected(event->endpoint);
          break;
        case ConnectionEvent::Kind::kEnded:
          on_ended(*event, events);
          break;
      }
    }
    events_due_ = true;
  } catch (const TransportError& error) {
    die(error.what(), events);
  }
  return count;
}

OfiPath* OfiNic::path_of(const struct fid* endpoint) const {
  const auto found = std::ranges::find_if(
      paths_, [&](const auto& item) { return item.second->own_ != nullptr && item.second->own_->is(endpoint); });
  return found != paths_.end() ? found->second : nullptr;
}

void OfiNic::on_request(const ConnectionEvent& event) {
  const auto words = DialWords::decode(event.said);
  bool is_let_in = false;
  try {
    if (words && words->path_id == 0) {
      lines_->accept(*event.request, now_);
      is_let_in = true;
    } else if (words) {
      OfiPath* const path = find_path(words->path_id);
      is_let_in = path != nullptr && path->accept(*event.request, words->token);
    }
  } catch (const TransportError&) {
    // The dialing side learns that it was refused, and tries again.
  }
  if (is_let_in) return;
  ++dropped_;
  listener_->reject(*event.request);
}

void OfiNic::on_connected(const struct fid* endpoint) {
  if (OfiPath* const path = path_of(endpoint)) {
    path->on_standing();
  } else if (lines_->on_connected(endpoint)) {
    datagrams_next_ns_ = 0;
  }
}

void OfiNic::on_ended(const ConnectionEvent& event, rdma::NicEvents& events) {
  // Refused without a message: not by a NIC of ours, but by a host where nobody listens at that port.
  const bool is_nobody = event.code == FI_ECONNREFUSED && event.said.empty();
  if (OfiPath* const path = path_of(event.endpoint)) {
    path->break_by_itself(event.code == 0 ? "the peer's end closed the connection"
                          : is_nobody     ? "nobody is at the peer's port any more"
                                          : "no connection: " + domain_->error_text(event.code));
    return;
  }
  const Name name = lines_->on_ended(event.endpoint);
  if (name.empty()) return;
  // Datagrams that were waiting for this line are lost, as datagrams may be: the layer repeats itself.
  const auto is_to = [&](const Datagram& datagram) { return datagram.to == name; };
  const auto first = std::ranges::find_if(datagrams_, is_to);
  if (first == datagrams_.end()) return;
  const std::vector<uint8_t> endpoint = first->endpoint;
  std::erase_if(datagrams_, is_to);
  if (is_nobody) events.on_nobody(endpoint);
}

}  // namespace crossrail::ofi
