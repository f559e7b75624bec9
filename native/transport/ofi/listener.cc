#include "transport/ofi/listener.h"

#include <rdma/fi_cm.h>

#include <algorithm>
#include <cstdlib>
#include <cstring>

#include "transport/ofi/strays.h"
#include "util/errors.h"

namespace crossrail::ofi {

namespace {

constexpr size_t kEvents = 1024;  // a hint: tcp's queue grows
constexpr size_t kSaidBytesMax = 256;
constexpr int kLastEventsMax = 1024;
constexpr uint8_t kRejection = 'n';

}  // namespace

Listener::Listener(const Domain& domain) : domain_(domain) {
  fi_eq_attr attributes{};
  attributes.size = kEvents;
  attributes.wait_obj = domain.wait_fd() >= 0 ? FI_WAIT_FD : FI_WAIT_NONE;
  fid_eq* queue = nullptr;
  if (const int code = fi_eq_open(domain.fabric(), &attributes, &queue, nullptr); code != 0)
    domain.fail("fi_eq_open", code);
  queue_.reset(queue);
  fid_pep* endpoint = nullptr;
  if (const int code = fi_passive_ep(domain.fabric(), &domain.info(), &endpoint, nullptr); code != 0)
    domain.fail("fi_passive_ep", code, domain.rules().uses_ip ? "check that this address is one of the host's" : "");
  endpoint_.reset(endpoint);
  if (const int code = fi_pep_bind(endpoint, &queue->fid, 0); code != 0) domain.fail("fi_pep_bind", code);
  if (const int code = fi_listen(endpoint); code != 0) domain.fail("fi_listen", code);
  uint8_t name[kNameBytesMax];
  size_t bytes = sizeof name;
  if (const int code = fi_getname(&endpoint->fid, name, &bytes); code != 0) domain.fail("fi_getname", code);
  name_.assign(name, name + bytes);
  if (attributes.wait_obj != FI_WAIT_FD) return;
  int fd = -1;
  if (const int code = fi_control(&queue->fid, FI_GETWAIT, &fd); code != 0) domain.fail("fi_control(FI_GETWAIT)", code);
  wait_fd_ = fd;
}

Listener::~Listener() {
  // Peers that have already dialed are told.
  try {
    for (int i = 0; i < kLastEventsMax; ++i) {
      const auto event = next();
      if (!event) break;
      if (event->kind == ConnectionEvent::Kind::kRequest) reject(*event->request);
    }
  } catch (const TransportError&) {
    // The queue is unusable: nobody can be told.
  }
  // A peer that is just about to dial has a socket with us, and no more. Nothing may be driven between these closes.
  const Strays strays(name_);
  endpoint_.reset();
  queue_.reset();
  strays.close();
}

std::optional<ConnectionEvent> Listener::next() {
  for (;;) {
    uint8_t bytes[sizeof(fi_eq_cm_entry) + kSaidBytesMax];  // the entry, followed by what the peer said
    uint32_t kind = 0;
    const ssize_t got = fi_eq_read(queue_.get(), &kind, bytes, sizeof bytes, 0);
    if (got == -FI_EAVAIL) return next_error();
    if (got == -FI_EAGAIN || got == 0) return std::nullopt;
    if (got < 0) domain_.fail("fi_eq_read", static_cast<int>(got));
    if (static_cast<size_t>(got) < sizeof(fi_eq_cm_entry)) continue;  // not about a connection
    fi_eq_cm_entry entry;
    std::memcpy(&entry, bytes, sizeof entry);
    ConnectionEvent event;
    event.endpoint = entry.fid;
    event.said.assign(bytes + sizeof entry, bytes + got);
    switch (kind) {
      case FI_CONNREQ:
        event.kind = ConnectionEvent::Kind::kRequest;
        event.request = Info(entry.info, FreeInfo{domain_.library().calls.freeinfo});
        return event;
      case FI_CONNECTED:
        event.kind = ConnectionEvent::Kind::kConnected;
        return event;
      case FI_SHUTDOWN:
        return event;
      default:
        continue;
    }
  }
}

std::optional<ConnectionEvent> Listener::next_error() {
  uint8_t said[kSaidBytesMax] = {};
  fi_eq_err_entry error{};
  error.err_data = said;
  error.err_data_size = sizeof said;
  if (fi_eq_readerr(queue_.get(), &error, 0) < 0) return std::nullopt;
  ConnectionEvent event;
  event.endpoint = error.fid;
  event.code = error.err != 0 ? std::abs(error.err) : FI_EOTHER;
  if (error.err_data != nullptr && error.err_data_size != 0) {
    const auto* bytes = static_cast<const uint8_t*>(error.err_data);
    event.said.assign(bytes, bytes + std::min(error.err_data_size, sizeof said));
  }
  return event;
}

void Listener::reject(const fi_info& request) const {
  // Fails for a socket that has ended meanwhile, which is fine.
  fi_reject(endpoint_.get(), request.handle, &kRejection, sizeof kRejection);
}

}  // namespace crossrail::ofi
