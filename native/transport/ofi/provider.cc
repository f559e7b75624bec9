#include "transport/ofi/provider.h"

#include <rdma/fi_endpoint.h>

#include <algorithm>
#include <cstdio>
#include <cstring>
#include <set>

#include "device/cuda.h"
#include "transport/types.h"
#include "util/errors.h"
#include "util/host_addresses.h"

namespace crossrail::ofi {

namespace {

constexpr uint64_t kCaps = FI_MSG | FI_RMA | FI_SEND | FI_RECV | FI_READ | FI_WRITE | FI_REMOTE_READ | FI_REMOTE_WRITE;
constexpr size_t kImmBytes = 4;

Rules efa_rules(const std::string& name) {
  Rules rules;
  rules.name = name;
  rules.provider = "efa";
  rules.fabric = name;
  rules.is_efa = true;
  rules.way = name == "efa-direct" ? 2 : 1;
  rules.endpoint_per_path = false;
  rules.placed_by_software = false;
  rules.has_descriptor = false;
  rules.keeps_doorbell = true;
  rules.unproven = "written to its documentation and tested against a double of libfabric, not yet run on EFA hardware";
  return rules;
}

Info allocate(const Library& library) {
  Info info(library.calls.dupinfo(nullptr), FreeInfo{library.calls.freeinfo});
  if (info == nullptr) throw TransportError("fi_allocinfo", FI_ENOMEM, "out of memory");
  return info;
}

// gpu: only devices that take GPU memory.
Info hints_for(const Library& library, const Rules& rules, bool gpu) {
  Info hints = allocate(library);
  hints->caps = kCaps | (gpu ? FI_HMEM : 0);
  // Not FI_RX_CQ_DATA: efa would take it as permission to use up a receive for every immediate.
  hints->mode = FI_CONTEXT | FI_CONTEXT2;
  hints->ep_attr->type = rules.connects ? FI_EP_MSG : FI_EP_RDM;
  hints->domain_attr->mr_mode = FI_MR_LOCAL | FI_MR_VIRT_ADDR | FI_MR_ALLOCATED | FI_MR_PROV_KEY;
  if (gpu) hints->domain_attr->mr_mode |= FI_MR_HMEM;
  // One progress holder at a time for queues and endpoints, but registration comes from any thread.
  // FI_THREAD_COMPLETION would mean exactly that; tcp of 2.5 crashes in fi_cq_open with it.
  hints->domain_attr->threading = FI_THREAD_SAFE;
  // Nothing moves on its own even where AUTO is promised (tcp): the holder polls, or sleeps on the queue's descriptor.
  hints->domain_attr->control_progress = FI_PROGRESS_MANUAL;
  hints->domain_attr->data_progress = FI_PROGRESS_MANUAL;
  hints->domain_attr->resource_mgmt = FI_RM_ENABLED;
  hints->domain_attr->cq_data_size = kImmBytes;
  hints->fabric_attr->prov_name = strdup(rules.provider.c_str());  // freed with the hints
  if (!rules.fabric.empty()) hints->fabric_attr->name = strdup(rules.fabric.c_str());
  return hints;
}

bool is_wanted(const fi_info& info, const Rules& rules) {
  return info.fabric_attr->prov_name != nullptr && rules.provider == info.fabric_attr->prov_name &&
         (info.caps & kCaps) == kCaps && info.domain_attr->cq_data_size >= kImmBytes &&
         info.ep_attr->rx_ctx_cnt != FI_SHARED_CONTEXT;  // each endpoint has its own receives
}

// What the provider offers, at `source` unless it is empty. Throws for any failure other than "nothing".
std::vector<Info> ask(const Library& library, const Rules& rules, const std::string& source, bool gpu = false) {
  const Info hints = hints_for(library, rules, gpu);
  fi_info* list = nullptr;
  const int code = library.calls.getinfo(library.api, source.empty() ? nullptr : source.c_str(), nullptr,
                                         source.empty() ? 0 : FI_SOURCE | FI_NUMERICHOST, hints.get(), &list);
  if (code == -FI_ENODATA) return {};
  if (code != 0) {
    throw TransportError("fi_getinfo", -code,
                         "libfabric " + library.version_text() + " does not say what its provider " + rules.provider +
                             " offers: " + library.error_text(code));
  }
  const Info owner(list, FreeInfo{library.calls.freeinfo});
  std::vector<Info> found;
  for (const fi_info* info = list; info != nullptr; info = info->next) {
    if (!is_wanted(*info, rules)) continue;
    found.emplace_back(library.calls.dupinfo(info), FreeInfo{library.calls.freeinfo});
    if (found.back() == nullptr) throw TransportError("fi_dupinfo", FI_ENOMEM, "out of memory");
  }
  return found;
}

std::string pci_text(const fid_nic& nic) {
  if (nic.bus_attr == nullptr || nic.bus_attr->bus_type != FI_BUS_PCI) return {};
  const fi_pci_attr& pci = nic.bus_attr->attr.pci;
  char text[24];
  std::snprintf(text, sizeof text, "%04x:%02x:%02x.%x", pci.domain_id, pci.bus_id, pci.device_id, pci.function_id);
  return text;
}

Device of_hardware(Info info) {
  Device device;
  if (info->domain_attr->name != nullptr) device.name = info->domain_attr->name;
  if (info->nic != nullptr) {
    if (info->nic->device_attr != nullptr && info->nic->device_attr->name != nullptr)
      device.device = info->nic->device_attr->name;
    if (info->nic->link_attr != nullptr)
      device.speed_mbps = static_cast<uint32_t>(info->nic->link_attr->speed / 1'000'000);
    device.pci = pci_text(*info->nic);
  }
  device.info = std::move(info);
  return device;
}

// The provider's device at one address. Without info: the provider does not use it.
Device at_address(const Library& library, const Rules& rules, const HostAddress& address) {
  Device device;
  device.name = address.text;
  device.netdev = address.netdev;
  device.speed_mbps = address.speed_mbps;
  device.prefix_bits = address.prefix_bits;
  device.is_loopback = address.is_loopback;
  std::vector<Info> found = ask(library, rules, address.text);
  if (!found.empty()) device.info = std::move(found.front());
  return device;
}

std::vector<Device> choose_addresses(const Library& library, const Rules& rules, const std::vector<std::string>& names,
                                     uint32_t count) {
  const std::vector<HostAddress> present = host_addresses();
  std::vector<HostAddress> wanted;
  for (const std::string& name : names) wanted.push_back(find_address(name, present));
  if (names.empty()) {
    const std::vector<HostAddress> usual = usual_addresses(present);
    for (uint32_t i = 0; i < std::max(count, 1u); ++i) {
      wanted.push_back(usual.empty() ? parse_address("127.0.0." + std::to_string(i + 1), present)
                                     : usual[i % usual.size()]);
    }
  }
  std::vector<Device> chosen;
  for (const HostAddress& address : wanted) {
    chosen.push_back(at_address(library, rules, address));
    if (chosen.back().info == nullptr) {
      throw TransportError("fi_getinfo", FI_ENODATA,
                           "libfabric " + library.version_text() + " (" + library.path + ") has no provider " +
                               rules.provider + " that can use " + address.text,
                           "see which providers there are: fi_info -l");
    }
  }
  return chosen;
}

std::string list_text(const std::vector<Device>& devices) {
  std::string text;
  for (const Device& device : devices) text += (text.empty() ? "" : ", ") + device.name;
  return text;
}

// Several rails may use one device: each gets its own domain.
Device same_again(const Library& library, const Device& device) {
  Device copy;
  copy.info = Info(library.calls.dupinfo(device.info.get()), FreeInfo{library.calls.freeinfo});
  if (copy.info == nullptr) throw TransportError("fi_dupinfo", FI_ENOMEM, "out of memory");
  copy.name = device.name;
  copy.device = device.device;
  copy.pci = device.pci;
  copy.speed_mbps = device.speed_mbps;
  return copy;
}

std::vector<Device> choose_hardware(const Library& library, const Rules& rules, const std::vector<std::string>& names,
                                    uint32_t count) {
  std::vector<Device> present = devices(library, rules);
  if (present.empty()) {
    throw TransportError(
        "fi_getinfo", FI_ENODATA,
        "libfabric " + library.version_text() + " (" + library.path + ") finds no device for " + rules.name,
        rules.is_efa ? "check that the instance has EFA interfaces (ls /sys/class/infiniband), that "
                       "the efa kernel module is loaded, and that this libfabric was built with efa"
                     : "see which providers there are: fi_info -l");
  }
  std::vector<Device> chosen;
  if (names.empty()) {
    const size_t wanted = count != 0 ? count : std::min<size_t>(present.size(), kRailsMax);
    for (size_t i = 0; i < wanted; ++i) chosen.push_back(same_again(library, present[i % present.size()]));
    return chosen;
  }
  for (const std::string& name : names) {
    const auto found = std::find_if(present.begin(), present.end(), [&](const Device& device) {
      return device.name == name || device.device == name || device.pci == name;
    });
    if (found == present.end()) {
      throw UsageError("rails: '" + name + "' is not a device of " + rules.name + "; there are: " + list_text(present));
    }
    chosen.push_back(same_again(library, *found));
  }
  return chosen;
}

}  // namespace

Rules rules_for(const std::string& provider) {
  if (provider == "efa" || provider == "efa-direct") return efa_rules(provider);
  Rules rules;
  rules.name = provider;
  rules.provider = provider;
  rules.uses_ip = provider == "tcp" || provider == "net" || provider == "sockets" || provider.starts_with("tcp;") ||
                  provider.starts_with("udp;") || provider.starts_with("verbs;");
  rules.connects = rules.ordered = provider == "tcp";
  rules.has_descriptor = provider.find(';') == std::string::npos;
  if (provider == "tcp") return rules;
  rules.unproven = "crossrail's tests do not run on this provider";
  if (provider == "shm") {
    rules.refused =
        "it reports writes as done that a peer refused or that never happened (measured of libfabric 1.17 to 2.5); "
        "within one host use transport='shm', which is ours";
  }
  return rules;
}

std::vector<Device> devices(const Library& library, const Rules& rules) {
  std::vector<Device> found;
  if (rules.uses_ip) {
    for (const HostAddress& address : host_addresses()) {
      Device device = at_address(library, rules, address);
      if (device.info != nullptr) found.push_back(std::move(device));
    }
    return found;
  }
  std::set<std::string> names;  // a device may be offered several times, with different attributes: the first is best
  std::vector<Info> offered;
  if (rules.is_efa && device::find_driver() != nullptr) offered = ask(library, rules, {}, true);
  if (offered.empty()) offered = ask(library, rules, {});  // by a build without CUDA, too
  for (Info& info : offered) {
    Device device = of_hardware(std::move(info));
    if (names.insert(device.name).second) found.push_back(std::move(device));
  }
  std::stable_sort(found.begin(), found.end(),
                   [](const Device& a, const Device& b) { return a.speed_mbps > b.speed_mbps; });
  return found;
}

std::vector<Device> choose(const Library& library, const Rules& rules, const std::vector<std::string>& names,
                           uint32_t count) {
  return rules.uses_ip ? choose_addresses(library, rules, names, count) : choose_hardware(library, rules, names, count);
}

}  // namespace crossrail::ofi
