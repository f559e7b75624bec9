// How paths end: operations in flight end with their endpoint, its last completions are read, then the layer is told.
#include <iterator>
#include <utility>

#include "transport/ofi/nic.h"
#include "util/errors.h"

namespace crossrail::ofi {

namespace {

// A provider may report an operation of a closed endpoint late: its memory is kept for this long.
constexpr int64_t kGraveTime = 1'000'000'000;
// How long a path that has ended waits for works that other paths have on the same endpoint. A flush must end without
// any peer's help, within kFlushMaxNs of the layer: if one of their peers stalls, they are broken off as well.
constexpr int64_t kOthersTime = 5'000'000'000;
// The same if the engine waits for the flush and none of these works ends: no peer whose host answers needs longer for
// the next one. All of them together may need longer: each path has up to 4 MiB there.
constexpr int64_t kOthersHurriedTime = 50'000'000;

}  // namespace

void OfiNic::begin_end(OfiPath& path) {
  ending_.push_back(&path);
  if (path.own_ != nullptr) {
    path.own_->close();  // at once, so that nothing arrives any more; if it is busy, tend_endings tries again
    return;
  }
  if (shares_endpoints() && path.works_out_ + path.sends_out_ != 0) replace_transmit();
}

void OfiNic::replace_transmit() {
  if (transmit_ == nullptr || transmit_->outstanding() == 0) return;
  condemn_transmit(now_ + kOthersTime);
  try {
    transmit_ = std::make_unique<Endpoint>(*domain_, 0);
  } catch (const TransportError& error) {
    // Without an endpoint no path can continue. The next make_path() tries again.
    for (const auto& [id, path] : paths_) path->break_by_itself(error.what());
    return;
  }
  for (const auto& [id, path] : paths_) {
    if (!path->is_connected_ || path->is_broken_) continue;
    try {
      path->add_address();
    } catch (const TransportError& error) {
      path->break_by_itself(error.what());
    }
  }
}

// Its addresses are dropped with it.
void OfiNic::condemn_transmit(int64_t until_ns) {
  condemned_.push_back({.endpoint = std::move(transmit_), .until_ns = until_ns});
  for (const auto& [id, path] : paths_) path->address_ = FI_ADDR_NOTAVAIL;
}

void OfiNic::hurry() {
  const int64_t now = now_ns();
  for (Condemned& condemned : condemned_) {
    if (std::exchange(condemned.is_hurried, true)) continue;
    condemned.moved_ns = now;
    condemned.left = condemned.endpoint->outstanding();
  }
}

// Whether its works have had their time, as of the latest reading of the queue: what ended since then is not known yet.
bool OfiNic::is_overdue(Condemned& condemned, int64_t read_ns) {
  if (read_ns >= condemned.until_ns) return true;
  if (!condemned.is_hurried) return false;
  const uint32_t left = condemned.endpoint->outstanding();
  if (std::exchange(condemned.left, left) != left) condemned.moved_ns = now_;
  return read_ns - condemned.moved_ns >= kOthersHurriedTime;
}

// Closes what can be closed: before the queue is read, so that reading finds the last completions.
void OfiNic::tend_endings(int64_t read_ns) {
  for (OfiPath* path : ending_) {
    if (path->own_ == nullptr || !path->own_->close()) continue;
    closed_.push_back(std::move(path->own_));
  }
  if (lines_) std::ranges::move(lines_->take_closed(), std::back_inserter(closed_));
  for (Condemned& condemned : condemned_) {
    auto& endpoint = condemned.endpoint;
    const bool has_time = !is_overdue(condemned, read_ns);
    bool is_needed = false;
    for (const Op* op = endpoint->first(); op != nullptr; op = op->next) {
      if (op->path == nullptr || op->path->is_broken_) continue;
      is_needed = has_time;
      if (is_needed) break;
      op->path->break_by_itself("another path broke, and the operations under way on this one did not end");
    }
    // Not while an error is at the head of the queue: efa 2.4 and 2.5.0 would continue reading memory of the endpoint
    // (libfabric's pull request 12032).
    if (!is_needed && queue_read_to_end_ && endpoint->close()) closed_.push_back(std::move(endpoint));
  }
  std::erase_if(condemned_, [](const Condemned& condemned) { return condemned.endpoint == nullptr; });
}

uint32_t OfiNic::finish_endings(rdma::NicEvents& events) {
  if (!queue_read_to_end_ || (ending_.empty() && closed_.empty())) return 0;
  std::vector<std::unique_ptr<Endpoint>> closed;
  closed.swap(closed_);
  for (auto& endpoint : closed) bury(std::move(endpoint), &events);
  uint32_t flushed = 0;
  const std::vector<OfiPath*> ending = ending_;
  for (OfiPath* path : ending) {
    if (path->own_ != nullptr || path->works_out_ + path->sends_out_ != 0) continue;
    path->is_flushed_ = true;
    std::erase(ending_, path);
    paths_.erase(path->id_);  // anything that still names it predates this
    forget_addresses(*path);
    if (path->answer_due_) --answers_due_;
    path->answer_due_ = false;
    events.on_path_flushed(*path);
    ++flushed;
  }
  return flushed;
}

// Without a queue no operation's end can be reported: all endpoints are closed, and all paths end unasked.
void OfiNic::die(const std::string& reason, rdma::NicEvents& events) {
  is_dead_ = true;
  events_due_ = false;
  is_port_up_ = false;
  datagrams_.clear();
  if (transmit_ != nullptr) condemn_transmit(now_);
  for (const auto& [id, path] : paths_) {
    path->break_by_itself(reason);
    if (path->is_ending_) continue;
    path->is_ending_ = true;
    ending_.push_back(path);
  }
  if (control_) control_->close();
  if (lines_) lines_->close_all();
  events.on_device_fatal(reason);
}

// Its queue was read to the end after it was closed: whatever did not complete never will.
void OfiNic::bury(std::unique_ptr<Endpoint> endpoint, rdma::NicEvents* events) {
  Grave grave;
  for (Op* op = endpoint->first(); op != nullptr; op = endpoint->first()) {
    endpoint->unlist(*op);
    OfiPath* const path = op->path;
    op->path = nullptr;
    grave.orphans.push_back(op);
    if (path == nullptr) continue;
    if (op->kind == Op::Kind::kSend) {
      --path->sends_out_;
      continue;
    }
    --path->works_out_;
    if (events != nullptr) {
      events->on_work_failed(*path, op->cookie, rdma::NicFault::kFlushed, FI_ECANCELED,
                             "the endpoint was closed: " + path->reason_);
    }
  }
  endpoint->owner = nullptr;
  grave.endpoint = std::move(endpoint);
  grave.until = now_ + kGraveTime;
  graves_.push_back(std::move(grave));
}

void OfiNic::tend_graves() {
  while (!graves_.empty() && now_ >= graves_.front().until) {
    for (Op* op : graves_.front().orphans) give_back(*op);
    graves_.erase(graves_.begin());
  }
}

void OfiNic::forget_addresses(OfiPath& path) {
  Endpoint* const transmits = transmit_of(path);  // null: closed, together with its addresses
  if (transmits != nullptr && path.address_ != FI_ADDR_NOTAVAIL) transmits->peers().remove(path.peer_name_);
  if (path.is_host_known_) control_->peers().remove(path.peer_name_);
  path.address_ = FI_ADDR_NOTAVAIL;
  path.is_host_known_ = false;
}

// The layer drops a path: it is flushed, or never reached a peer.
void OfiNic::remove_path(OfiPath& path) {
  std::erase(unready_, &path);
  std::erase(breaking_, &path);
  std::erase(ending_, &path);
  if (path.is_flushed_) return;
  paths_.erase(path.id_);
  forget_addresses(path);
  if (path.answer_due_) --answers_due_;
  if (path.own_ != nullptr) {
    path.own_->owner = nullptr;
    for (Op* op = path.own_->first(); op != nullptr; op = op->next) op->path = nullptr;
    path.own_->close();
    bury(std::move(path.own_), nullptr);
  }
  const auto disown = [&path](Endpoint* endpoint) {
    if (endpoint == nullptr) return;
    for (Op* op = endpoint->first(); op != nullptr; op = op->next) {
      if (op->path == &path) op->path = nullptr;
    }
  };
  disown(transmit_.get());
  for (auto& condemned : condemned_) disown(condemned.endpoint.get());
}

}  // namespace crossrail::ofi
