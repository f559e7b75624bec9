// Operations on their way from the engine to the channels' batches: accepted, taken back, retired.
#include <algorithm>
#include <array>
#include <optional>
#include <utility>

#include "transport/tcp/tcp_transport.h"

namespace crossrail::tcp {

namespace {

constexpr size_t kQueuedMax = 4096;      // per lane of a link: the rest waits in the engine
constexpr size_t kSendsQueuedMax = 256;  // messages, likewise

}  // namespace

uint32_t TcpTransport::post(Link& link, uint32_t rail, std::span<const WorkRequest> requests, uint32_t* completed) {
  auto& out = static_cast<OutLink&>(link);
  *completed = 0;
  if (!out.up || out.doom) return 0;
  if (rail != kAnyRail && !out.reaches(rail)) {
    for (const WorkRequest& request : requests) {
      ++out.outstanding;
      retire(out, request, Status::kTransportFailed,
             "rail " + std::to_string(rail) + " has no rail of the peer to talk to (see explain)");
    }
    return static_cast<uint32_t>(requests.size());
  }
  // Determined for a lane when first needed: most posts use one lane only.
  std::array<std::optional<size_t>, 2> rooms;
  size_t sends_room = out.sends.size() >= kSendsQueuedMax ? 0 : kSendsQueuedMax - out.sends.size();
  uint32_t taken = 0;
  for (const WorkRequest& request : requests) {
    if (request.op == WorkOp::kSend) {
      if (sends_room == 0) break;
      --sends_room;
      out.want(kAnyRail, Lane::kSmall);
      out.sends.push_back(request);
    } else {
      const Lane lane = request.bulk || request.length_bytes > kShortBytesMax ? Lane::kBulk : Lane::kSmall;
      auto& room = rooms[static_cast<size_t>(lane)];
      if (!room) room = kQueuedMax - std::min(out.queued_in(lane), kQueuedMax);
      if (*room == 0) break;
      --*room;
      out.want(rail, lane);
      WorkRequest& queued = out.queue(rail, lane).push_back(request);
      queued.reserved = routing_of(rail, lane);
    }
    ++taken;
  }
  if (taken == 0) return 0;
  out.queued += taken;
  if (out.outstanding == 0) {
    out.busy_since_ns = out.waits_since_ns = now_ns();
    out.vain_connections = 0;
  }
  out.outstanding += taken;
  mark_dirty(out);
  watch(out);
  return taken;
}

void TcpTransport::retire(OutLink& link, const WorkRequest& request, Status status, const std::string& detail) {
  link.end(1, now_);
  const uint64_t bytes = status == Status::kDone ? request.length_bytes : 0;
  sink_->on_retired(link, request.context, request.tag, 1, bytes, status, detail);
}

void TcpTransport::withdraw(bool (*wanted)(void* context)) {
  for (auto& owned : out_) {
    OutLink& link = *owned;
    std::vector<WorkRequest> withdrawn;
    const auto take_from = [&](RingQueue<WorkRequest>& queue) {
      if (queue.empty()) return;
      queue.filter([&](const WorkRequest& request) {
        if (!wanted(request.context)) return true;
        withdrawn.push_back(request);
        return false;
      });
    };
    for (auto& queue : link.queues) take_from(queue);
    take_from(link.sends);
    link.queued -= withdrawn.size();
    for (size_t i = 0; i < link.messages.size(); ++i) {
      SentMessage& message = link.messages[i];
      if (message.over || message.is_recalled || !wanted(message.request.context)) continue;
      message.is_recalled = link.has_recalls = true;
      mark_dirty(link);
    }
    for (const WorkRequest& request : withdrawn) {
      link.end(1, now_);
      sink_->on_withdrawn(link, request.context, request.tag, request.length_bytes);
    }
  }
}

void TcpTransport::mark_dirty(OutLink& link) {
  if (std::exchange(link.is_dirty, true)) return;
  dirty_.push_back(&link);
}

void TcpTransport::watch(OutLink& link) {
  if (std::exchange(link.is_watched, true)) return;
  if (watched_.empty()) ticked_ns_ = now_ns();  // there was nothing to watch until now
  watched_.push_back(&link);
  next_tick_ns_ = 0;
}

uint32_t TcpTransport::pump(OutLink& link) {
  uint32_t moved = 0;
  // Twice, since the channel asked first may have held back in favour of another that has its share by now.
  for (int round = 0; round < 2; ++round) {
    const uint32_t before = moved;
    for (size_t i = 0; i < link.channels.size(); ++i) {
      OutChannel* channel = link.channels[i].get();
      if (channel == nullptr || !channel->is_open() || channel->stream->connection()->is_blocked()) continue;
      if (channel->stream->pump()) ++moved;
    }
    if (moved == before || link.queued == 0 || link.pairs.size() == 1) break;
  }
  return moved;
}

uint32_t TcpTransport::pump_dirty() {
  if (dirty_.empty()) return 0;
  uint32_t moved = 0;
  // A link with more than a turn's worth goes to the end of the list: its next turn is in the next round.
  const size_t count = dirty_.size();
  for (size_t i = 0; i < count; ++i) {
    OutLink& link = *dirty_[i];
    link.is_dirty = false;
    moved += pump(link);
  }
  dirty_.erase(dirty_.begin(), dirty_.begin() + static_cast<std::ptrdiff_t>(count));
  return moved;
}

}  // namespace crossrail::tcp
