#include "transport/open.h"

#include <filesystem>
#include <fstream>

#include "transport/null/null_transport.h"
#include "transport/ofi/open.h"
#include "transport/shm/shm_transport.h"
#include "transport/tcp/tcp_transport.h"
#include "util/errors.h"

namespace crossrail {

namespace {

constexpr const char* kDevices = "/sys/class/infiniband";
constexpr const char* kEfa = "efa";

// Libraries are not opened, and libfabric not asked, which takes it a while, on machines without a device.
bool any_device(const char* vendor = nullptr) {
  std::error_code error;
  for (const auto& entry : std::filesystem::directory_iterator(kDevices, error)) {
    if (vendor == nullptr) return true;
    std::string found;
    std::ifstream(entry.path() / "device" / "vendor") >> found;
    if (found == vendor) return true;
  }
  return false;
}

bool is_efa(const std::string& provider) { return provider.empty() || provider.starts_with(kEfa); }

std::string ofi_missing(const std::string& provider) {
  constexpr const char* kAmazon = "0x1d0f";
  if (is_efa(provider) && !any_device(kAmazon)) return "no EFA device here";
  return ofi::missing(provider.empty() ? kEfa : provider);
}

std::vector<RdmaPort> ofi_ports(const std::string& provider) {
  std::vector<RdmaPort> ports;
  if (!ofi_missing(provider).empty()) return ports;
  for (const ofi::Candidate& found : ofi::candidates(provider.empty() ? kEfa : provider)) {
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
    case TransportKind::kOfi:
      throw TransportError("open", 0, "this build carries no " + std::string(transport_name(kind)),
                           "use transport 'tcp'");
  }
  return nullptr;
}

bool is_built(TransportKind kind) { return !is_rdma(kind); }

std::vector<RdmaPort> rdma_ports(TransportKind kind, const std::string& provider) {
  return kind == TransportKind::kOfi ? ofi_ports(provider) : std::vector<RdmaPort>{};
}

std::string rdma_missing(TransportKind kind, const std::string& provider) {
  if (kind == TransportKind::kOfi) return ofi_missing(provider);
  return std::string("this build carries no ") + transport_name(kind);
}

}  // namespace crossrail
