// What the completion queue reports, and what the NIC does unprompted: connections, datagrams, fences.
#include <algorithm>
#include <cstring>
#include <fstream>
#include <utility>

#include "transport/ofi/nic.h"
#include "util/errors.h"

namespace crossrail::ofi {

namespace {

constexpr size_t kEntriesAtOnce = 32;
constexpr int kReadsMax = 16;  // of this many entries in one poll
// While somebody waits for the end of the queue: others' traffic must not postpone it for ever.
constexpr int kReadsToEndMax = 256;
constexpr int64_t kUnreadyPause = 20'000;  // each attempt drives the provider
constexpr int64_t kFenceTimeout = 2'000'000'000;
constexpr int64_t kPortInterval = 500'000'000;

// Status codes of the EFA device, as passed on by its provider (efa_errno.h).
constexpr int kEfaFlushed = 1;
constexpr int kEfaBadLocalKey = 5;
constexpr int kEfaBadLocalLength = 6;
constexpr int kEfaBadRemoteAddress = 7;
constexpr int kEfaBadRemoteLength = 11;
constexpr int kEfaRefusedByPeersProvider = 4111;

// Not every provider sets every flag (shm before 2.4 omits FI_REMOTE_WRITE, sockets adds FI_REMOTE_CQ_DATA to our own
// works): this holds for all that were measured.
bool is_immediate(uint64_t flags) {
  if ((flags & FI_REMOTE_WRITE) != 0) return true;
  return (flags & FI_REMOTE_CQ_DATA) != 0 && (flags & (FI_WRITE | FI_READ | FI_SEND | FI_RECV)) == 0;
}

struct Verdict {
  rdma::NicFault fault;
  bool breaks_path;
};

Verdict judge(const Rules& rules, const fi_cq_err_entry& error) {
  const int code = error.err < 0 ? -error.err : error.err;
  if (rules.is_efa) {
    switch (error.prov_errno) {
      case kEfaBadRemoteAddress:
      case kEfaBadRemoteLength:
      case kEfaRefusedByPeersProvider:
        return {rdma::NicFault::kRemoteAccess, false};  // SRD continues: the other works are not affected
      case kEfaBadLocalKey:
      case kEfaBadLocalLength:
        return {rdma::NicFault::kLocal, false};
      case kEfaFlushed:
        return {rdma::NicFault::kFlushed, true};
      default:
        return {rdma::NicFault::kUnreachable, true};
    }
  }
  if (code == FI_EACCES || code == FI_EPERM) return {rdma::NicFault::kRemoteAccess, false};
  return {rdma::NicFault::kUnreachable, true};
}

// No longer with the provider, as far as we know: tend_graves() returns it.
bool is_buried(const Op& op) { return op.kind != Op::Kind::kReceive && !op.is_listed; }

}  // namespace

uint32_t OfiNic::poll(rdma::NicEvents& events) {
  const int64_t read_ns = std::exchange(now_, now_ns());
  const uint64_t fences_wanted = fences_->wanted.load();  // read before the queue: see tend_fences
  tend_endings(read_ns);
  uint32_t moved = read_queue(events);
  // After the queue, which may have reported the end of a connection; before fences, which ask those that stand.
  const bool wants_fence = fence_number_ == 0 && fences_wanted != fences_->done.load(std::memory_order_relaxed);
  if (listener_ && !is_dead_ && (wants_fence || are_events_due())) moved += read_events(events);
  if (wants_fence && queue_read_to_end_ && !events_due_) fence_number_ = fences_wanted;
  if (domain_->starved_receives != 0 && !is_dead_) moved += post_starved_receives();
  if (!unready_.empty()) moved += tend_unready();
  if (!datagrams_.empty()) moved += tend_datagrams();
  if (answers_due_ != 0) moved += tend_answers();
  if (fence_number_ != 0) moved += tend_fences();
  if (lines_) lines_->tend(now_);
  moved += tell_breaks(events);
  moved += finish_endings(events);
  if (!graves_.empty()) tend_graves();
  if (now_ - port_looked_ns_ > kPortInterval) tend_port(events);
  if (std::exchange(has_posted_, false) || moved != 0) active_ns_ = now_;
  return moved;
}

uint32_t OfiNic::read_queue(rdma::NicEvents& events) {
  uint32_t count = 0;
  queue_read_to_end_ = is_dead_;
  if (is_dead_) return 0;
  const bool to_end =
      !ending_.empty() || !condemned_.empty() || !closed_.empty() || fences_->wanted.load() != fences_->done.load();
  const int rounds = to_end ? kReadsToEndMax : kReadsMax;
  fi_cq_data_entry entries[kEntriesAtOnce];
  for (int round = 0; round < rounds; ++round) {
    const ssize_t got = fi_cq_read(domain_->queue(), entries, kEntriesAtOnce);
    if (got > 0) {
      for (ssize_t i = 0; i < got; ++i) on_entry(entries[i], events);
      count += static_cast<uint32_t>(got);
      // Asked once more, the provider would look at the network before we have handled these.
      if (!to_end && got < static_cast<ssize_t>(kEntriesAtOnce)) break;
    } else if (got == -FI_EAVAIL) {
      on_error_entry(events);
      ++count;
    } else if (got == -FI_EAGAIN || got == 0) {
      queue_read_to_end_ = true;
      break;
    } else {
      die("fi_cq_read: " + domain_->error_text(static_cast<int>(got)), events);
      break;
    }
  }
  return count;
}

void OfiNic::on_entry(const fi_cq_data_entry& entry, rdma::NicEvents& events) {
  auto* const op = static_cast<Op*>(entry.op_context);
  if (is_immediate(entry.flags)) {
    on_imm(entry.data, events);
    // efa-direct before 2.4 is offered on devices whose immediates use up receives, too: they return with this.
    if (domain_->rules().is_efa && op != nullptr) op->endpoint->post_receive(*op);
    return;
  }
  if (op == nullptr) return;  // an error without an operation
  if (is_buried(*op)) return;
  switch (op->kind) {
    case Op::Kind::kReceive:
      on_packet(*op, entry.len, events);
      break;
    case Op::Kind::kSend:
      on_send_end(*op);
      break;
    case Op::Kind::kWork:
      op->endpoint->unlist(*op);
      if (OfiPath* const path = op->path; path != nullptr) {
        --path->works_out_;
        events.on_work_done(*path, op->cookie, false);
      }
      give_back(*op);
      break;
  }
}

void OfiNic::on_imm(uint64_t data, rdma::NicEvents& events) {
  const auto imm = static_cast<uint32_t>(data);
  if (!limits_.names_imm_paths) {
    events.on_imm(nullptr, imm);
    return;
  }
  OfiPath* const path = find_path(static_cast<uint32_t>(data >> 32));
  if (path == nullptr) {
    ++dropped_;
    return;
  }
  path->was_heard_ = true;
  events.on_imm(path, imm);
}

// --- errors ---

void OfiNic::on_error_entry(rdma::NicEvents& events) {
  fi_cq_err_entry error{};
  const ssize_t got = fi_cq_readerr(domain_->queue(), &error, 0);
  if (got < 1) return;  // nobody else reads it: the next round finds it
  auto* const op = static_cast<Op*>(error.op_context);
  if (op == nullptr || is_buried(*op)) return;
  switch (op->kind) {
    case Op::Kind::kReceive:  // too long, or of a closed endpoint; a connection ends with it
      ++dropped_;
      events_due_ = connects();
      // efa may tell so of a message that it has given us before: when its receipt does not get through. It is posted
      // again since, and twice would mix two messages up; one too few are left where it was not.
      if (!connects() && !domain_->rules().is_efa) op->endpoint->post_receive(*op);
      break;
    case Op::Kind::kSend:
      if (op->path != nullptr)
        op->path->break_by_itself("a fragment was not delivered: " + domain_->error_text(error.err));
      on_send_end(*op);
      break;
    case Op::Kind::kWork:
      on_work_error(*op, error, events);
      break;
  }
}

void OfiNic::on_work_error(Op& op, const fi_cq_err_entry& error, rdma::NicEvents& events) {
  op.endpoint->unlist(op);
  OfiPath* const path = op.path;
  const uint64_t cookie = op.cookie;
  give_back(op);
  if (path == nullptr) return;
  --path->works_out_;
  Verdict verdict = judge(domain_->rules(), error);
  char buffer[128] = "";
  const char* const more =
      domain_->queue()->ops->strerror(domain_->queue(), error.prov_errno, error.err_data, buffer, sizeof buffer);
  std::string text = domain_->error_text(error.err);
  if (more != nullptr && *more != '\0' && text != more) text += std::string(" (") + more + ")";
  // After the first failure all other works of the path return, with whatever code.
  if (verdict.breaks_path && (path->fault_told_ || path->is_ending_)) verdict.fault = rdma::NicFault::kFlushed;
  if (verdict.breaks_path) {
    path->fault_told_ = true;
    path->break_by_itself(text);
  }
  events.on_work_failed(*path, cookie, verdict.fault, error.prov_errno != 0 ? error.prov_errno : error.err, text);
}

void OfiNic::on_send_end(Op& op) {
  op.endpoint->unlist(op);
  if (op.path != nullptr) --op.path->sends_out_;
  give_back(op);
}

// --- packets ---

void OfiNic::on_packet(Op& op, size_t length_bytes, rdma::NicEvents& events) {
  PacketHead head;
  if (length_bytes >= sizeof head && length_bytes <= kPacketBytesMax) {
    std::memcpy(&head, op.buffer, sizeof head);
    const std::span<const uint8_t> payload{reinterpret_cast<const uint8_t*>(op.buffer) + sizeof head,
                                           length_bytes - sizeof head};
    if (static_cast<Packet>(head.kind) != Packet::kDatagram) {
      on_path_packet(op, head, payload, events);
    } else if (op.endpoint->owner == nullptr && payload.size() <= rdma::kDatagramBytesMax) {
      if (lines_) lines_->on_heard(*op.endpoint, now_);
      events.on_datagram(payload);
    } else {
      ++dropped_;
    }
  } else {
    ++dropped_;
  }
  op.endpoint->post_receive(op);
}

void OfiNic::on_path_packet(Op& op, const PacketHead& head, std::span<const uint8_t> payload, rdma::NicEvents& events) {
  OfiPath* const path = find_path(head.path_id);
  if (path == nullptr || op.endpoint->owner != (shares_endpoints() ? nullptr : path)) {
    ++dropped_;
    return;
  }
  path->was_heard_ = true;
  switch (static_cast<Packet>(head.kind)) {
    case Packet::kFragment:
      events.on_fragment(path, payload);
      break;
    case Packet::kHello:
      break;
    case Packet::kFence:
      path->fence_asked_ = head.number;
      answers_due_ += path->answer_due_ ? 0 : 1;
      path->answer_due_ = true;
      break;
    case Packet::kFenceAnswer:
      path->fence_answered_ = std::max(path->fence_answered_, std::min(head.number, path->fence_sent_));
      break;
    case Packet::kDatagram:
      break;
  }
}

// --- connections ---

uint32_t OfiNic::tend_unready() {
  uint32_t ready = 0;
  const int64_t now = now_ns();
  if (now < unready_next_ns_) return 0;
  unready_next_ns_ = now + kUnreadyPause;
  const std::vector<OfiPath*> waiting = unready_;
  for (OfiPath* path : waiting) {
    if (!connects() && path->send_packet(Packet::kHello, 0, {}, {})) {
      path->is_ready_ = true;
      std::erase(unready_, path);
      ++ready;
    } else if (now >= path->ready_by_) {
      path->break_by_itself("no connection within 5 s");
    }
  }
  return ready;
}

uint32_t OfiNic::post_starved_receives() {
  uint32_t posted = control_ ? control_->post_starved_receives() : 0;
  for (const auto& [id, path] : paths_) {
    if (path->own_) posted += path->own_->post_starved_receives();
  }
  return lines_ ? posted + lines_->post_starved_receives() : posted;
}

uint32_t OfiNic::tell_breaks(rdma::NicEvents& events) {
  if (breaking_.empty()) return 0;
  std::vector<OfiPath*> broken;
  broken.swap(breaking_);
  for (OfiPath* path : broken) {
    path->break_told_ = true;
    events.on_path_broken(*path, false, path->reason_);
  }
  return static_cast<uint32_t>(broken.size());
}

// --- fences ---

uint32_t OfiNic::tend_answers() {
  uint32_t moved = 0;
  for (const auto& [id, path] : paths_) {
    if (!path->answer_due_) continue;
    if (path->is_broken_) {
      path->answer_due_ = false;
    } else if (path->is_ready_ && path->send_packet(Packet::kFenceAnswer, path->fence_asked_, {}, {})) {
      path->answer_due_ = false;
      ++moved;
    } else {
      continue;
    }
    --answers_due_;
  }
  return moved;
}

// A fence begins once the queue was read to its end after the registrations it is for were closed. A path that nothing
// was heard from by then carries nothing that could have begun before: its hello would come first, and in order; or the
// event of its connection, which was not there when events were read to their end.
uint32_t OfiNic::tend_fences() {
  bool all = true;
  for (const auto& [id, path] : paths_) all = tend_fence_of(*path, fence_number_) && all;
  if (!all) return 0;
  fences_->done.store(fence_number_, std::memory_order_release);
  fence_number_ = 0;
  return 1;
}

bool OfiNic::tend_fence_of(OfiPath& path, uint64_t number) {
  if (path.fence_answered_ >= number || path.is_flushed_) {
    path.fence_by_ = kNoDeadline;
    return true;
  }
  if (path.fence_sent_ < number && !path.was_heard_) {
    path.fence_answered_ = path.fence_sent_ = number;
    return true;
  }
  if (path.fence_by_ == kNoDeadline) path.fence_by_ = now_ + kFenceTimeout;
  if (path.fence_sent_ < number) {
    // Not ready: a connection that is up, but whose other end has not told the layer yet.
    if (path.is_ready_ && path.send_packet(Packet::kFence, number, {}, {})) path.fence_sent_ = number;
  }
  if (now_ >= path.fence_by_) path.break_by_itself("the peer's NIC did not answer a fence for 2 s");
  return false;
}

// --- the port ---

void OfiNic::tend_port(rdma::NicEvents& events) {
  port_looked_ns_ = now_;
  if (is_dead_) return;
  // They do not say which path they are about: the paths concerned end on their own, or by their deadlines.
  std::string told;
  for (std::string text = domain_->take_error(); !text.empty(); text = domain_->take_error()) told = std::move(text);
  if (!told.empty()) events.on_port(is_port_up_, name_ + ": libfabric reports an error of its own: " + told);
  const Device& device = domain_->device();
  std::string state;
  bool up = true;
  if (domain_->rules().is_efa && !device.device.empty()) {
    std::ifstream("/sys/class/infiniband/" + device.device + "/ports/1/state") >> state;  // "4: ACTIVE"
    up = state.empty() || state == "4:";
  } else if (!device.netdev.empty() && !device.is_loopback) {
    std::ifstream("/sys/class/net/" + device.netdev + "/operstate") >> state;
    up = state != "down" && state != "lowerlayerdown";
  }
  if (up == is_port_up_) return;
  is_port_up_ = up;
  events.on_port(up, name_ + (up ? " is up" : " is down") + (state.empty() ? "" : " (" + state + ")"));
}

}  // namespace crossrail::ofi
