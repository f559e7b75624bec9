#include "transport/open.h"

#include <fstream>

#include "transport/null/null_transport.h"
#include "transport/ofi/open.h"
#include "transport/rdma/rdma_transport.h"
#include "transport/shm/shm_transport.h"
#include "transport/sim/open.h"
#include "transport/tcp/tcp_transport.h"
#include "transport/verbs/open.h"
#include "util/directory.h"

namespace crossrail {

namespace {

constexpr const char* kDevices = "/sys/class/infiniband";
constexpr const char* kEfa = "efa";

// On machines without a device, libraries are not opened and libfabric is not asked, which would take a while.
bool any_device(const char* vendor = nullptr) {
  for (const std::string& name : names_in(kDevices)) {
    if (vendor == nullptr) return true;
    std::string found;
    std::ifstream(kDevices + ("/" + name) + "/device/vendor") >> found;
    if (found == vendor) return true;
  }
  return false;
}

std::vector<RdmaPort> verbs_ports() {
  std::vector<RdmaPort> ports;
  if (!any_device()) return ports;
  for (const verbs::Port& port : verbs::ports())
    ports.push_back({port.name, port.device, port.netdev, port.address, port.trouble, !port.is_hardware});
  return ports;
}

bool is_efa(const std::string& provider) { return provider.empty() || provider.starts_with(kEfa); }

std::string ofi_missing(const std::string& provider) {
  constexpr const char* kAmazon = "0x1d0f";
  if (is_efa(provider) && !any_device(kAmazon)) return "no EFA device here";
  return ofi::missing(provider);
}

std::vector<RdmaPort> ofi_ports(const std::string& provider) {
  std::vector<RdmaPort> ports;
  if (!ofi_missing(provider).empty()) return ports;
  for (const ofi::Candidate& found : ofi::candidates(provider)) {
    const bool by_ip = found.device.empty();
    ports.push_back({found.name, by_ip ? found.name : found.device, found.netdev, by_ip ? found.name : "", "", by_ip});
  }
  return ports;
}

}  // namespace

std::unique_ptr<Transport> open_transport(TransportKind kind, const TransportOptions& options, Sink* sink) {
  switch (kind) {
    case TransportKind::kShm:
      return std::make_unique<shm::ShmTransport>(options, sink);
    case TransportKind::kNull:
      return std::make_unique<NullTransport>(options, sink);
    case TransportKind::kTcp:
      return std::make_unique<tcp::TcpTransport>(options, sink);
    case TransportKind::kVerbs:
      return std::make_unique<rdma::RdmaTransport>(kind, options, verbs::open_nics(options), sink);
    case TransportKind::kOfi:
      return std::make_unique<rdma::RdmaTransport>(kind, options, ofi::open_nics(options), sink);
    case TransportKind::kSim:
      return std::make_unique<rdma::RdmaTransport>(kind, options, sim::open_nics(options), sink);
  }
  return nullptr;
}

bool is_built(TransportKind kind) {
#if CROSSRAIL_WITH_VERBS
  constexpr bool kHasVerbs = true;
#else
  constexpr bool kHasVerbs = false;  // built without libibverbs' headers
#endif
  return kind != TransportKind::kVerbs || kHasVerbs;
}

std::vector<RdmaPort> rdma_ports(TransportKind kind, const std::string& provider) {
  return kind == TransportKind::kOfi ? ofi_ports(provider) : verbs_ports();
}

std::string rdma_missing(TransportKind kind, const std::string& provider) {
  if (kind == TransportKind::kOfi) return ofi_missing(provider);
  return is_built(kind) && !any_device() ? "no RDMA device here" : verbs::missing();
}

}  // namespace crossrail
