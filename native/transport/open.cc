#include "transport/open.h"

#include "transport/null/null_transport.h"
#include "transport/shm/shm_transport.h"
#include "transport/tcp/tcp_transport.h"
#include "util/errors.h"

namespace crossrail {

std::unique_ptr<Transport> open_transport(TransportKind kind, const TransportOptions& options, Sink* sink) {
  switch (kind) {
    case TransportKind::kShm:
      return std::make_unique<shm::ShmTransport>(options, sink);
    case TransportKind::kNull:
      return std::make_unique<NullTransport>(options, sink);
    case TransportKind::kTcp:
      return std::make_unique<tcp::TcpTransport>(options, sink);
    case TransportKind::kVerbs:
    case TransportKind::kOfi:
      throw TransportError("open", 0, "this build carries no " + std::string(transport_name(kind)),
                           "use transport 'tcp'");
  }
  return nullptr;
}

bool is_built(TransportKind kind) { return !is_rdma(kind); }

std::vector<RdmaPort> rdma_ports(TransportKind, const std::string&) { return {}; }

std::string rdma_missing(TransportKind kind, const std::string&) {
  return std::string("this build carries no ") + transport_name(kind);
}

}  // namespace crossrail
