#include "ofi_double_infos.h"

#include <rdma/fi_domain.h>
#include <rdma/fi_endpoint.h>

#include <cstdlib>
#include <cstring>

namespace crossrail::test {

namespace {

fi_info* allocate_info() {
  auto* info = static_cast<fi_info*>(std::calloc(1, sizeof(fi_info)));
  info->tx_attr = static_cast<fi_tx_attr*>(std::calloc(1, sizeof(fi_tx_attr)));
  info->rx_attr = static_cast<fi_rx_attr*>(std::calloc(1, sizeof(fi_rx_attr)));
  info->ep_attr = static_cast<fi_ep_attr*>(std::calloc(1, sizeof(fi_ep_attr)));
  info->domain_attr = static_cast<fi_domain_attr*>(std::calloc(1, sizeof(fi_domain_attr)));
  info->fabric_attr = static_cast<fi_fabric_attr*>(std::calloc(1, sizeof(fi_fabric_attr)));
  return info;
}

fid_nic* make_nic(uint32_t device) {
  auto* nic = static_cast<fid_nic*>(std::calloc(1, sizeof(fid_nic)));
  nic->device_attr = static_cast<fi_device_attr*>(std::calloc(1, sizeof(fi_device_attr)));
  nic->device_attr->name = strdup(("rdmap" + std::to_string(device) + "s6").c_str());
  nic->bus_attr = static_cast<fi_bus_attr*>(std::calloc(1, sizeof(fi_bus_attr)));
  nic->bus_attr->bus_type = FI_BUS_PCI;
  nic->bus_attr->attr.pci = {0, static_cast<uint8_t>(device), 6, 0};
  nic->link_attr = static_cast<fi_link_attr*>(std::calloc(1, sizeof(fi_link_attr)));
  nic->link_attr->speed = 100'000'000'000;
  return nic;
}

void free_nic(fid_nic* nic) {
  if (nic == nullptr) return;
  std::free(nic->device_attr->name);
  std::free(nic->device_attr);
  std::free(nic->bus_attr);
  std::free(nic->link_attr);
  std::free(nic);
}

char* copy_text(const char* text) { return text != nullptr ? strdup(text) : nullptr; }

fi_info* device_info(uint32_t device, bool direct, bool gpu, size_t transmit_size) {
  fi_info* const info = allocate_info();
  info->caps =
      (gpu ? FI_HMEM : 0) | FI_MSG | FI_RMA | FI_SEND | FI_RECV | FI_READ | FI_WRITE | FI_REMOTE_READ | FI_REMOTE_WRITE;
  info->mode = direct ? FI_CONTEXT2 : 0;
  info->addr_format = FI_ADDR_EFA;
  info->tx_attr->size = transmit_size;
  info->ep_attr->type = FI_EP_RDM;
  info->ep_attr->max_msg_size = direct ? 8192 : ~size_t{0};
  info->domain_attr->name = strdup(("rdmap" + std::to_string(device) + "s6-rdm").c_str());
  info->domain_attr->mr_mode = FI_MR_VIRT_ADDR | FI_MR_ALLOCATED | FI_MR_PROV_KEY | FI_MR_LOCAL;
  info->domain_attr->mr_key_size = 4;
  info->domain_attr->cq_data_size = 4;
  info->fabric_attr->name = strdup(direct ? "efa-direct" : "efa");
  info->fabric_attr->prov_name = strdup("efa");
  info->nic = make_nic(device);
  return info;
}

}  // namespace

void free_info(fi_info* info) {
  while (info != nullptr) {
    fi_info* const next = info->next;
    free_nic(info->nic);
    std::free(info->domain_attr->name);
    std::free(info->fabric_attr->name);
    std::free(info->fabric_attr->prov_name);
    std::free(info->tx_attr);
    std::free(info->rx_attr);
    std::free(info->ep_attr);
    std::free(info->domain_attr);
    std::free(info->fabric_attr);
    std::free(info);
    info = next;
  }
}

fi_info* duplicate_info(const fi_info* from) {
  fi_info* const info = allocate_info();
  if (from == nullptr) return info;
  fi_info plain = *from;
  plain.next = nullptr;
  plain.nic = from->nic != nullptr ? make_nic(from->nic->bus_attr->attr.pci.bus_id) : nullptr;
  plain.tx_attr = info->tx_attr;
  plain.rx_attr = info->rx_attr;
  plain.ep_attr = info->ep_attr;
  plain.domain_attr = info->domain_attr;
  plain.fabric_attr = info->fabric_attr;
  *info = plain;
  *info->tx_attr = *from->tx_attr;
  *info->rx_attr = *from->rx_attr;
  *info->ep_attr = *from->ep_attr;
  *info->domain_attr = *from->domain_attr;
  *info->fabric_attr = *from->fabric_attr;
  info->domain_attr->name = copy_text(from->domain_attr->name);
  info->fabric_attr->name = copy_text(from->fabric_attr->name);
  info->fabric_attr->prov_name = copy_text(from->fabric_attr->prov_name);
  return info;
}

int offer_infos(const DoubleSettings& settings, const fi_info* hints, std::vector<std::string>& violations,
                fi_info** list) {
  if (hints == nullptr || hints->fabric_attr->prov_name == nullptr ||
      std::strcmp(hints->fabric_attr->prov_name, "efa") != 0)
    return -FI_ENODATA;
  if ((hints->mode & FI_RX_CQ_DATA) != 0)
    violations.emplace_back("FI_RX_CQ_DATA offered: immediates would eat receives");
  const std::string fabric = hints->fabric_attr->name != nullptr ? hints->fabric_attr->name : "";
  const bool gpu = (hints->caps & FI_HMEM) != 0;
  if (gpu && !settings.takes_gpu_memory) return -FI_ENODATA;
  if (gpu && (hints->domain_attr->mr_mode & FI_MR_HMEM) == 0) violations.emplace_back("FI_HMEM without FI_MR_HMEM");
  fi_info** end = list;
  *list = nullptr;
  for (const bool direct : {false, true}) {
    if (direct && !settings.offers_direct) continue;
    if (!fabric.empty() && fabric != (direct ? "efa-direct" : "efa")) continue;
    for (uint32_t device = 0; device < settings.devices; ++device) {
      *end = device_info(device, direct, gpu, settings.transmit_size);
      end = &(*end)->next;
    }
  }
  return *list != nullptr ? 0 : -FI_ENODATA;
}

}  // namespace crossrail::test
