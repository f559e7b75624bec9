// What we tell peers about their operations: acknowledgements, which wait briefly for an operation to ride with, and
// the outcomes of messages.
#include <algorithm>
#include <utility>

#include "transport/tcp/frames.h"
#include "transport/tcp/tcp_transport.h"

namespace crossrail::tcp {

namespace {

constexpr uint64_t kTakenPerFrame = 256;
constexpr size_t kLastRefusalsBytesMax = 32 << 10;  // per channel: our end must not wait for room in the socket

// A refusal must not be overtaken by the acknowledgement of its operation. On a connection that carries both, the
// refusal goes first; and the initiator has begun no operation so much later without having heard of it.
bool may_ride(const InChannel& channel, const Connection& by) {
  if (channel.newest_refused == 0 || channel.newest_refused + kOperationsUnderWayMax <= channel.placed) return true;
  return channel.control.empty() && channel.is_open() && channel.stream->connection().get() == &by;
}

}  // namespace

void TcpTransport::ack_later(InLink& link, bool at_once) {
  const bool is_first = link.acked_alone_ns == 0;  // it is not known yet whether waiting pays
  link.ack_now = link.ack_now || at_once || link.rides == 0 || is_first;
  if (std::exchange(link.ack_due, true)) return;
  link.ack_due_since_ns = now_;
  if (!std::exchange(link.ack_listed, true)) acks_.push_back(&link);
}

void TcpTransport::send_ack(InLink& link) {
  link.ack_due = link.ack_now = false;
  link.acked_alone_ns = now_;
  for (auto& [index, channel] : link.channels) {
    if (channel.is_open()) channel.stream->pump();
  }
}

uint32_t TcpTransport::send_acks(bool all) {
  if (acks_.empty()) return 0;
  uint32_t sent = 0;
  size_t kept = 0;
  const size_t count = acks_.size();
  for (size_t i = 0; i < count; ++i) {
    InLink* const link = acks_[i];
    if (link->ack_due && !all && !link->ack_now && now_ - link->ack_due_since_ns < kAckWaitNs) {
      acks_[kept++] = link;
      continue;
    }
    link->ack_listed = false;
    if (!link->ack_due) continue;  // it has ridden
    if (!link->ack_now) {
      // It waited for nothing; and for long, if only a timer ended the wait.
      const bool was_long = now_ - link->ack_due_since_ns > 2 * kAckWaitNs;
      link->rides = was_long ? link->rides / 2 : std::max(link->rides - 1, 0);
    }
    send_ack(*link);  // may add to the list
    ++sent;
  }
  acks_.erase(acks_.begin() + static_cast<std::ptrdiff_t>(kept), acks_.begin() + static_cast<std::ptrdiff_t>(count));
  return sent;
}

void TcpTransport::put_rider_acks(OutLink& link, const Connection& by, TxBatch& batch) {
  InLink* const twin = link.twin;
  if (twin == nullptr) return;
  if (!twin->ack_due) {
    // It would have had an operation to ride with, had it waited.
    if (now_ - twin->acked_alone_ns < kAckWaitNs && twin->rides < kRidesMax) ++twin->rides;
    return;
  }
  if (twin->ack_now) return;
  bool all = true;
  for (auto& [index, channel] : twin->channels) {
    if (channel.placed == channel.ack_sent) continue;
    if (!may_ride(channel, by)) {
      all = false;
      continue;
    }
    if (!batch.has_room(sizeof(FrameHeader) + sizeof(AckMeta))) return;
    put_head(batch, FrameType::kAck, 0, 0, AckMeta{twin->id, channel.placed, channel.index, 0}, 0);
    channel.ack_sent = channel.placed;
  }
  put_taken(*twin, batch);
  if (!all) return;
  if (twin->rides < kRidesMax) ++twin->rides;
  if (twin->taken.empty()) twin->ack_due = false;
}

void put_taken(InLink& link, TxBatch& batch) {
  size_t told = 0;
  for (; told < link.taken.size() && batch.has_room(sizeof(FrameHeader) + sizeof(TakenMeta)); ++told) {
    put_frame(batch, FrameType::kTaken, link.taken[told]);
  }
  link.taken.erase(link.taken.begin(), link.taken.begin() + static_cast<std::ptrdiff_t>(told));
}

RefusedMeta meta_of(const MessageOutcome& message) {
  return {message.id, kMessageRefused, static_cast<uint32_t>(message.status)};
}

std::string text_of(const MessageOutcome& message) {
  if (message.status != Status::kMessageTooLong) return {};
  return "message of " + std::to_string(message.bytes) + " bytes: no receive buffer of the target is as long";
}

void append_last_words(const InLink& link, InChannel& by) {
  for (const auto& [index, channel] : link.channels) {
    if (channel.placed == 0) continue;
    // The refusals of this channel are ahead already, or were sent. The initiator knows of those that are old enough
    // (may_ride).
    const auto is_known = [&](const InChannel::Refusal& refusal) {
      return &channel == &by || refusal.operation + kOperationsUnderWayMax <= channel.placed;
    };
    const auto news = std::find_if_not(channel.refusals.begin(), channel.refusals.end(), is_known);
    size_t bytes = 0;
    for (auto refusal = news; refusal != channel.refusals.end(); ++refusal) {
      bytes += sizeof(FrameHeader) + sizeof(RefusedMeta) + refusal->text.size();
    }
    if (bytes > kLastRefusalsBytesMax) continue;  // must not be overtaken
    for (auto refusal = news; refusal != channel.refusals.end(); ++refusal) {
      append_frame(by.control, FrameType::kRefused,
                   RefusedMeta{refusal->operation, index, static_cast<uint32_t>(refusal->status)}, refusal->text);
    }
    append_frame(by.control, FrameType::kAck, AckMeta{link.id, channel.placed, index, 1});
  }
  for (const TakenMeta& taken : link.taken) append_frame(by.control, FrameType::kTaken, taken);
  for (const MessageOutcome& message : link.untaken) {
    append_frame(by.control, FrameType::kRefused, meta_of(message), text_of(message));
  }
}

void TcpTransport::hold(InLink& link) {
  if (std::find(holding_.begin(), holding_.end(), &link) == holding_.end()) holding_.push_back(&link);
}

void TcpTransport::tell_taken(InLink& link, uint64_t message_id) {
  if (!link.taken.empty() && link.taken.back().first_id + link.taken.back().count == message_id &&
      link.taken.back().count < kTakenPerFrame) {
    ++link.taken.back().count;
  } else {
    link.taken.push_back({link.id, message_id, 1});
  }
}

void TcpTransport::note_outcome(InLink& link, MessageOutcome outcome) {
  // An honest initiator sent its newest message only after it knew the outcomes of those. The second bound is for
  // dishonest ones.
  const auto is_known = [&](const MessageOutcome& old) { return old.id + kMessagesUnderWayMax <= link.newest_id; };
  while (!link.outcomes.empty() && (is_known(link.outcomes.front()) || link.outcomes.size() >= kOutcomesMax)) {
    link.outcomes.pop_front();
  }
  link.outcomes.push_back(outcome);
}

void TcpTransport::on_taken(InLink& link, uint64_t message_id) {
  note_outcome(link, {message_id, Status::kDone});
  tell_taken(link, message_id);
}

void TcpTransport::on_untaken(InLink& link, MessageOutcome outcome) {
  note_outcome(link, outcome);
  link.untaken.push_back(outcome);
  ack_later(link, true);
}

void TcpTransport::recall(InLink& link, uint64_t message_id) {
  const auto message = std::ranges::find(link.held, message_id, &HeldMessage::id);
  if (message == link.held.end()) return;
  link.held_bytes -= message->payload.size();
  link.held.erase(message);
  if (link.held.empty()) std::erase(holding_, &link);
  on_untaken(link, {message_id, Status::kCancelled});
}

void TcpTransport::tell_outcomes_again(InLink& link) {
  link.taken.clear();
  link.untaken.clear();
  for (const MessageOutcome& outcome : link.outcomes) {
    if (outcome.status == Status::kDone) {
      tell_taken(link, outcome.id);
    } else {
      link.untaken.push_back(outcome);
    }
  }
  ack_later(link, true);
}

OutLink* TcpTransport::find_out(const Address& peer, uint64_t id) {
  const auto found = std::find_if(out_.begin(), out_.end(), [&](const auto& out) {
    return out->id == id && out->address->incarnation == peer.incarnation;
  });
  return found == out_.end() ? nullptr : found->get();
}

// One message of each link in turn: a link with many messages does not keep the buffers from one with few.
void TcpTransport::offer_held() {
  while (!holding_.empty()) {
    InLink& link = *holding_.front();
    const HeldMessage& message = link.held.front();
    const Sink::Offer offer = sink_->on_message(link.peer, message.payload);
    if (offer == Sink::Offer::kHold) return;
    if (offer == Sink::Offer::kTaken) {
      on_taken(link, message.id);
    } else {
      on_untaken(link, {message.id, Status::kMessageTooLong, message.payload.size()});
    }
    link.held_bytes -= message.payload.size();
    link.held.pop_front();
    ack_later(link, true);
    holding_.pop_front();
    if (!link.held.empty()) holding_.push_back(&link);
  }
}

}  // namespace crossrail::tcp
