// Which RDMA devices there are, before any is opened: for policy, topo and doctor.
#include <nanobind/nanobind.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <string>

#include "bindings/bindings.h"
#include "bindings/convert.h"
#include "bindings/gil.h"
#include "device/cuda.h"
#include "transport/descriptor.h"
#include "transport/ofi/library.h"
#include "transport/open.h"

namespace crossrail::bindings {

namespace {

TransportKind rdma_kind(const std::string& transport) {
  for (const TransportKind kind : {TransportKind::kVerbs, TransportKind::kOfi}) {
    if (transport == transport_name(kind)) return kind;
  }
  throw UsageError("transport is '" + transport + "', must be 'verbs' or 'ofi'");
}

std::string missing(const std::string& transport, const std::string& provider) {
  const TransportKind kind = rdma_kind(transport);
  WithoutGil no_gil;  // a library may be opened, which looks at its devices
  return rdma_missing(kind, provider);
}

nb::list ports(const std::string& transport, const std::string& provider) {
  const TransportKind kind = rdma_kind(transport);
  std::vector<RdmaPort> found;
  {
    WithoutGil no_gil;
    found = rdma_ports(kind, provider);
  }
  nb::list list;
  for (const RdmaPort& port : found) {
    nb::dict shown;
    shown["name"] = to_text(port.name);
    shown["device"] = to_text(port.device);
    shown["netdev"] = to_text(port.netdev);
    shown["ip"] = to_text(port.ip);
    shown["trouble"] = to_text(port.trouble);
    shown["is_software"] = port.is_software;
    list.append(shown);
  }
  return list;
}

nb::list gpus() {
  std::vector<device::Gpu> found;
  {
    WithoutGil no_gil;  // the driver may be opened
    found = device::gpus();
  }
  nb::list list;
  for (const device::Gpu& gpu : found) {
    nb::dict shown;
    shown["ordinal"] = gpu.ordinal;
    shown["name"] = to_text(gpu.name);
    shown["exports_dma_buf"] = gpu.exports_dma_buf;
    shown["has_gpudirect"] = gpu.has_gpudirect;
    shown["needs_flush"] = gpu.needs_flush;
    list.append(shown);
  }
  return list;
}

std::string no_driver() {
  std::string why;
  WithoutGil no_gil;
  return device::find_driver(&why) != nullptr ? std::string() : why;
}

nb::tuple built() {
  nb::list names;
  for (uint32_t number = 1; number <= kTransportKinds; ++number) {
    const auto kind = static_cast<TransportKind>(number);
    if (is_built(kind)) names.append(transport_name(kind));
  }
  return nb::tuple(names);
}

}  // namespace

void register_devices(nb::module_& module) {
  module.def("_look_for_libfabric", &ofi::look_in, nb::arg("paths"),
             "Files to try after all other places, when a libfabric is needed for the first time.");
  module.def("_built_transports", &built, nb::sig("def _built_transports() -> tuple[str, ...]"),
             "What this build carries, whether or not the machine has devices for it.");
  module.def("_gpus", &gpus, nb::sig("def _gpus() -> list[dict[str, typing.Any]]"),
             "GPUs of NVIDIA's driver, which is opened: ordinal, name, exports_dma_buf, has_gpudirect, needs_flush.");
  module.def("_no_gpu_driver", &no_driver, "Why NVIDIA's driver cannot be used here; empty: it can.");
  module.def(
      "_is_gpu_address",
      [](uint64_t address) {
        return device::is_gpu_address(reinterpret_cast<const void*>(address));  // NOLINT(performance-no-int-to-ptr)
      },
      nb::arg("address"), "Whether CUDA gave it; False without asking where nobody in this process has opened CUDA.");
  module.def("_gpu_pci_address", &device::pci_address, nb::arg("ordinal"),
             "\"0000:53:00.0\"; empty: CUDA does not say, or knows no such GPU.");
  module.def(
      "_gpu_of_address",
      [](uint64_t address) {
        return device::gpu_of_address(reinterpret_cast<const void*>(address));  // NOLINT(performance-no-int-to-ptr)
      },
      nb::arg("address"), "Ordinal of the GPU whose memory it is; -1: as _is_gpu_address, no GPU's.");
  module.def(
      "_replace_gpu_driver", &device::replace_driver_by, nb::arg("file"),
      "Tests: the driver in that file instead of NVIDIA's, empty: the real one again. While no region is a GPU's.");
  module.def(
      "_gpu_allocation",
      [](uint64_t address) {
        const device::Allocation found =
            device::allocation_of(reinterpret_cast<const void*>(address));  // NOLINT(performance-no-int-to-ptr)
        return nb::make_tuple(found.base, found.length_bytes);
      },
      nb::arg("address"), nb::sig("def _gpu_allocation(address: int) -> tuple[int, int]"),
      "First byte and length of the allocation of CUDA's that an address of a GPU is in.");
  module.def("_rdma_missing", &missing, nb::arg("transport"), nb::arg("provider") = "",
             "Why 'verbs' or 'ofi' has no rail here: no library, no device; empty: it has.");
  module.def("_rdma_ports", &ports, nb::arg("transport"), nb::arg("provider") = "",
             nb::sig("def _rdma_ports(transport: str, provider: str = '') -> list[dict[str, typing.Any]]"),
             "Its ports: name, device, netdev, ip, trouble (why it is no rail now), is_software.");
}

}  // namespace crossrail::bindings
