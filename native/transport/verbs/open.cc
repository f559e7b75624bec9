#include "transport/verbs/open.h"

#include <algorithm>
#include <cerrno>
#include <map>
#include <utility>

#include "transport/verbs/ports.h"
#include "transport/verbs/verbs_nic.h"
#include "util/errors.h"

namespace crossrail::verbs {

namespace {

constexpr const char* kRemedy = "`crossrail doctor` lists what is missing; transport 'tcp' needs no such NIC";

bool is_among(const std::vector<std::string>& names, const std::string& name) {
  return std::ranges::find(names, name) != names.end();
}

bool is_named(const PortDetail& detail, const std::string& name) {
  const Port& port = detail.port;
  return name == port.name || name == port.device || is_among(detail.netdevs, name) || is_among(detail.addresses, name);
}

// Whether the name stands for some of the port's GIDs rather than for the port. An interface's name does, unless the
// GID is chosen by number.
bool names_gids(const PortDetail& detail, const std::string& name, const RdmaOptions& options) {
  return is_among(detail.addresses, name) || (options.gid_index < 0 && is_among(detail.netdevs, name));
}

std::string present_text(const std::vector<Device>& devices, const RdmaOptions& options) {
  std::string text;
  for (const Device& device : devices) {
    for (const PortDetail& detail : inspect_ports(device, options, {})) {
      text += (text.empty() ? "" : "; ") + detail.port.name;
      if (!detail.port.netdev.empty()) text += " on " + detail.port.netdev;
      if (!detail.port.address.empty()) text += " " + detail.port.address;
      if (!detail.port.trouble.empty()) text += " (" + detail.port.trouble + ")";
    }
  }
  return text.empty() ? "none" : text;
}

std::shared_ptr<OpenDevice> open_device(const std::string& name) {
  for (Device& device : open_devices(name))
    if (device.context != nullptr) return std::make_shared<OpenDevice>(std::move(device.context), name);
  throw TransportError("ibv_open_device", ENODEV, name + " is gone", kRemedy);
}

// A port that is down may be requested by name: it is used when it comes up. For a device's name, ports that are up
// come first.
PortDetail find_named(const std::vector<Device>& devices, const std::string& name, const RdmaOptions& options) {
  std::vector<std::pair<const Device*, PortDetail>> named;
  for (const Device& device : devices) {
    for (PortDetail& detail : inspect_ports(device, options, {}))
      if (is_named(detail, name)) named.emplace_back(&device, std::move(detail));
  }
  std::ranges::stable_partition(named, [](const auto& item) { return item.second.port.is_active; });
  for (const auto& [device, any] : named) {
    const std::string only = names_gids(any, name, options) ? name : std::string();
    for (const PortDetail& detail : inspect_ports(*device, options, only)) {
      if (detail.port.number != any.port.number) continue;
      if (detail.port.gid_index < 0)
        throw TransportError("open_nics", ENODEV, detail.port.name + " cannot be used: " + detail.port.trouble,
                             kRemedy);
      return detail;
    }
  }
  throw UsageError("rails: " + name + " is not an RDMA device, port, interface or address of this host; it has: " +
                   present_text(devices, options));
}

}  // namespace

std::vector<PortDetail> choose_ports(const std::vector<Device>& devices, const TransportOptions& options) {
  std::vector<PortDetail> chosen;
  for (const std::string& name : options.rails) chosen.push_back(find_named(devices, name, options.rdma));
  if (!options.rails.empty()) return chosen;
  for (const Device& device : devices)
    for (PortDetail& detail : inspect_ports(device, options.rdma, {}))
      if (detail.port.trouble.empty()) chosen.push_back(std::move(detail));
  if (chosen.empty())
    throw TransportError("open_nics", ENODEV,
                         "no RDMA port can be used; there are: " + present_text(devices, options.rdma), kRemedy);
  const auto rank = [](const PortDetail& detail) {
    return std::pair(!detail.port.is_hardware, ~detail.port.speed_mbps);
  };
  std::stable_sort(chosen.begin(), chosen.end(),
                   [&](const PortDetail& a, const PortDetail& b) { return rank(a) < rank(b); });
  const size_t present = chosen.size();
  const size_t wanted = options.rail_count == 0 ? std::min<size_t>(present, kRailsMax) : options.rail_count;
  if (chosen.size() > wanted) chosen.resize(wanted);
  while (chosen.size() < wanted) chosen.push_back(PortDetail(chosen[chosen.size() - present]));
  return chosen;
}

std::vector<Port> ports() {
  std::vector<Port> found;
  if (find_library() == nullptr) return found;
  for (const Device& device : open_devices())
    for (const PortDetail& detail : inspect_ports(device, {}, {})) found.push_back(detail.port);
  return found;
}

std::string missing() {
  std::string why;
  if (find_library(&why) == nullptr) return why;
  const std::vector<Device> devices = open_devices();
  if (devices.empty()) return "this host has no RDMA device (/sys/class/infiniband is empty)";
  for (const Device& device : devices)
    for (const PortDetail& detail : inspect_ports(device, {}, {}))
      if (detail.port.trouble.empty()) return {};
  return "no RDMA port can be used; there are: " + present_text(devices, {});
}

std::vector<std::unique_ptr<rdma::Nic>> open_nics(const TransportOptions& options) {
  std::string why;
  if (find_library(&why) == nullptr) throw TransportError("dlopen", ENOENT, why, kRemedy);
  std::map<std::string, std::shared_ptr<OpenDevice>> devices;  // several ports and rails may belong to one
  std::vector<std::unique_ptr<rdma::Nic>> nics;
  // Vectors differ among the rails of an engine and, by chance, among engines: else all of a host's would interrupt one
  // core.
  uint32_t vector_number = options.identity.incarnation[0];
  for (PortDetail& detail : choose_ports(open_devices(), options)) {
    std::shared_ptr<OpenDevice>& device = devices[detail.port.device];
    if (device == nullptr) device = open_device(detail.port.device);
    nics.push_back(std::make_unique<VerbsNic>(device, std::move(detail), options.rdma, vector_number++));
  }
  return nics;
}

}  // namespace crossrail::verbs
