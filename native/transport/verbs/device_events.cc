// What the device says by itself: ports, broken queue pairs, its own end.
#include "transport/verbs/verbs_nic.h"

namespace crossrail::verbs {

// A look costs a system call: every so often, when a sleeper found something, and while a path waits for it.
uint32_t VerbsNic::watch_device(rdma::NicEvents& events) {
  const int64_t now = now_ns();
  const bool is_time = now - looked_at_device_ns_ >= kDeviceLookNs;
  if (!sleeper_.take_device_news() && !is_time && draining_.empty()) return 0;
  looked_at_device_ns_ = now;
  uint32_t told = 0;
  ibv_async_event event{};
  while (fatal_.empty() && library().get_async_event(adapter_->context.get(), &event) == 0) {
    on_device_event(event, events);
    library().ack_async_event(&event);
    ++told;
  }
  return told;
}

void VerbsNic::on_device_event(const ibv_async_event& event, rdma::NicEvents& events) {
  const char* what = library().event_type_str(event.event_type);
  switch (event.event_type) {
    case IBV_EVENT_QP_FATAL:
    case IBV_EVENT_QP_REQ_ERR:
    case IBV_EVENT_QP_ACCESS_ERR:
      if (auto* path = static_cast<VerbsPath*>(event.element.qp->qp_context); path != nullptr)
        path->tell_broken(events, what);
      return;
    case IBV_EVENT_QP_LAST_WQE_REACHED:
      if (auto* path = static_cast<VerbsPath*>(event.element.qp->qp_context); path != nullptr)
        path->on_queue_pair_idle();
      return;
    case IBV_EVENT_PORT_ACTIVE:
    case IBV_EVENT_PORT_ERR:
    case IBV_EVENT_LID_CHANGE:
    case IBV_EVENT_GID_CHANGE:
      if (event.event_type == IBV_EVENT_GID_CHANGE || event.element.port_num == adapter_->detail.port.number)
        on_port_event(what, events);
      return;
    case IBV_EVENT_CQ_ERR:
    case IBV_EVENT_SRQ_ERR:
    case IBV_EVENT_DEVICE_FATAL:
    case IBV_EVENT_WQ_FATAL:
      fatal_ = what;
      return on_fatal(what, events);
    case IBV_EVENT_COMM_EST:
    case IBV_EVENT_SQ_DRAINED:
    case IBV_EVENT_PATH_MIG:
    case IBV_EVENT_PATH_MIG_ERR:
    case IBV_EVENT_PKEY_CHANGE:
    case IBV_EVENT_SM_CHANGE:
    case IBV_EVENT_SRQ_LIMIT_REACHED:
    case IBV_EVENT_CLIENT_REREGISTER:
      return;
  }
}

// What the event says may be over by now: the port itself is asked.
void VerbsNic::on_port_event(const char* what, rdma::NicEvents& events) {
  const bool is_up = is_usable_now(adapter_->context.get(), adapter_->detail);
  if (is_up == is_port_up_) return;
  is_port_up_ = is_up;
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
    path->tell_broken(events, "the device is gone: " + reason);
    path->finish(events);
  }
  draining_.clear();
}

}  // namespace crossrail::verbs
