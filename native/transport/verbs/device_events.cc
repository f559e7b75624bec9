// Events of the device: ports, broken queue pairs, its own end.
#include <optional>
#include <utility>

#include "transport/verbs/verbs_nic.h"

namespace crossrail::verbs {

// A look costs a system call, so it is done at intervals, when a sleeper found something, and while a path waits for
// it.
uint32_t VerbsNic::read_device_events() {
  const int64_t now = now_ns();
  const bool is_time = now - looked_at_device_ns_ >= kDeviceLookNs;
  if (!sleeper_.take_device_news() && !is_time && draining_.empty()) return 0;
  looked_at_device_ns_ = now;
  uint32_t told = 0;
  ibv_async_event event{};
  while (fatal_.empty() && library().get_async_event(adapter_->context(), &event) == 0) {
    hand_out(event);
    library().ack_async_event(&event);
    ++told;
  }
  return told;
}

uint32_t VerbsNic::watch_device(rdma::NicEvents& events) {
  uint32_t told = read_device_events();
  if (port_news_ != nullptr) {
    on_port_event(std::exchange(port_news_, nullptr), events);
    ++told;
  }
  if (!fatal_.empty()) on_fatal(fatal_, events);
  return told;
}

// The event queue belongs to the device: this event may be for another of its Nics, which reports it in its own poll().
void VerbsNic::hand_out(const ibv_async_event& event) {
  for (VerbsNic* nic : adapter_->device->nics) {
    if (nic->concerns_us(event)) nic->on_device_event(event);
  }
}

bool VerbsNic::concerns_us(const ibv_async_event& event) const {
  switch (event.event_type) {
    case IBV_EVENT_QP_FATAL:
    case IBV_EVENT_QP_REQ_ERR:
    case IBV_EVENT_QP_ACCESS_ERR:
    case IBV_EVENT_QP_LAST_WQE_REACHED:
    case IBV_EVENT_COMM_EST:
    case IBV_EVENT_SQ_DRAINED:
    case IBV_EVENT_PATH_MIG:
    case IBV_EVENT_PATH_MIG_ERR: {
      const auto* path = static_cast<VerbsPath*>(event.element.qp->qp_context);
      return path != nullptr && &path->nic_ == this;
    }
    case IBV_EVENT_PORT_ACTIVE:
    case IBV_EVENT_PORT_ERR:
    case IBV_EVENT_LID_CHANGE:
    case IBV_EVENT_PKEY_CHANGE:
    case IBV_EVENT_SM_CHANGE:
    case IBV_EVENT_CLIENT_REREGISTER:
      return event.element.port_num == adapter_->detail.port.number;
    case IBV_EVENT_CQ_ERR:
      return event.element.cq == sends_.get() || event.element.cq == receives_done_.get();
    case IBV_EVENT_SRQ_ERR:
    case IBV_EVENT_SRQ_LIMIT_REACHED:
      return receives_->owns(event.element.srq);
    case IBV_EVENT_GID_CHANGE:
    case IBV_EVENT_DEVICE_FATAL:
    case IBV_EVENT_WQ_FATAL:
      return true;
  }
  return false;
}

// Only takes notes.
void VerbsNic::on_device_event(const ibv_async_event& event) {
  const char* what = library().event_type_str(event.event_type);
  switch (event.event_type) {
    case IBV_EVENT_QP_FATAL:
      static_cast<VerbsPath*>(event.element.qp->qp_context)->note_trouble(what);
      return;
    case IBV_EVENT_QP_REQ_ERR:
    case IBV_EVENT_QP_ACCESS_ERR:  // something that the peer sent was refused
      static_cast<VerbsPath*>(event.element.qp->qp_context)->note_trouble(what, true);
      return;
    case IBV_EVENT_QP_LAST_WQE_REACHED:
      static_cast<VerbsPath*>(event.element.qp->qp_context)->on_queue_pair_idle(event.element.qp);
      return;
    case IBV_EVENT_PORT_ACTIVE:
    case IBV_EVENT_PORT_ERR:
    case IBV_EVENT_LID_CHANGE:
    case IBV_EVENT_PKEY_CHANGE:
    case IBV_EVENT_GID_CHANGE:
      port_news_ = what;
      return;
    case IBV_EVENT_CQ_ERR:
    case IBV_EVENT_SRQ_ERR:
    case IBV_EVENT_DEVICE_FATAL:
    case IBV_EVENT_WQ_FATAL:
      fatal_ = what;
      return;
    case IBV_EVENT_COMM_EST:
    case IBV_EVENT_SQ_DRAINED:
    case IBV_EVENT_PATH_MIG:
    case IBV_EVENT_PATH_MIG_ERR:
    case IBV_EVENT_SM_CHANGE:
    case IBV_EVENT_SRQ_LIMIT_REACHED:
    case IBV_EVENT_CLIENT_REREGISTER:
      return;
  }
}

// What the event says may be outdated by now: the port itself is asked.
void VerbsNic::on_port_event(const char* what, rdma::NicEvents& events) {
  const std::optional<int> index = gid_index_now(adapter_->context(), adapter_->detail);
  if (index && *index != adapter_->gid_index.exchange(*index, std::memory_order_relaxed)) datagrams_->forget_routes();
  const bool is_up = index.has_value();
  const uint32_t mbps = is_up ? speed_mbps_now(adapter_->detail.port) : 0;
  const bool is_other = mbps != 0 && mbps != speed_mbps_.exchange(mbps, std::memory_order_relaxed);
  if (is_up == is_port_up_ && !is_other) return;
  is_port_up_ = is_up;
  if (is_up) datagrams_->ask_again();
  events.on_port(is_up, what);
}

// Queue pairs are destroyed without waiting for anything: a device that is gone flushes nothing.
void VerbsNic::on_fatal(const std::string& reason, rdma::NicEvents& events) {
  if (is_fatal_told_) return;
  is_fatal_told_ = true;
  if (fatal_.empty()) fatal_ = reason;
  is_port_up_ = false;
  events.on_device_fatal(reason);
  for (VerbsPath* path : paths_) {
    if (path == nullptr) continue;
    path->tell_broken(events, false, "the device is gone: " + reason);
    path->finish(events);
  }
  draining_.clear();
}

}  // namespace crossrail::verbs
