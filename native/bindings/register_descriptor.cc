// Address and RegionDescriptor: what engines exchange.
#include <nanobind/nanobind.h>
#include <nanobind/stl/string.h>

#include <algorithm>
#include <cstring>
#include <memory>
#include <string>
#include <vector>

#include "bindings/bindings.h"
#include "bindings/convert.h"
#include "bindings/handles.h"

namespace crossrail::bindings {

namespace {

std::vector<TransportKind> kinds_of(const Address& address) {
  std::vector<TransportKind> kinds;
  for (uint32_t number = 1; number <= kTransportKinds; ++number) {
    const auto kind = static_cast<TransportKind>(number);
    if (address.has(kind)) kinds.push_back(kind);
  }
  return kinds;
}

// Any 64 of an incarnation's 128 random bits serve as a hash.
Py_hash_t hash_of(const Address& address) {
  Py_hash_t hash;
  static_assert(sizeof(hash) <= sizeof(address.incarnation));
  std::memcpy(&hash, address.incarnation.data(), sizeof(hash));
  return hash == -1 ? 0 : hash;
}

// From bytes or another contiguous buffer: what came from a socket is a bytearray, or a part of one.
template <typename T>
std::shared_ptr<const T> decode(nb::handle data) {
  BufferView view;
  if (!view.acquire(data, PyBUF_SIMPLE)) {
    const char* hint = PyUnicode_Check(data.ptr()) ? " (bytes.fromhex(text) if it is hexadecimal)" : "";
    throw UsageError("data must be bytes or another contiguous buffer, not " + type_name_of(data) + hint);
  }
  return std::make_shared<const T>(T::decode(view.bytes()));
}

AddressHandle decode_address(nb::handle data) { return AddressHandle(decode<Address>(data)); }

DescriptorHandle decode_descriptor(nb::handle data) { return DescriptorHandle(decode<RegionDescriptor>(data)); }

std::string text_of(const Address& address) { return to_hex(address.encode()); }

AddressHandle parse_address(nb::handle given) {
  std::string text;
  if (!nb::try_cast(given, text)) throw UsageError("text must be what str(address) gave, not " + type_name_of(given));
  const nb::object bytes =
      nb::steal(PyObject_CallMethod(reinterpret_cast<PyObject*>(&PyBytes_Type), "fromhex", "s", text.c_str()));
  if (!bytes.is_valid()) {
    PyErr_Clear();
    throw UsageError("address text is not hexadecimal: '" + text.substr(0, 40) + "'");
  }
  return decode_address(nb::borrow<nb::bytes>(bytes));
}

// "shm x 2", "shm x 1, tcp x 2 (10.0.0.1:4711, 10.0.1.1:4711), ofi x 1 (efa)"
std::string rails_text(const Address& address) {
  std::string text;
  for (const TransportKind kind : kinds_of(address)) {
    std::string details;
    if (kind == TransportKind::kTcp) {
      for (const Endpoint& endpoint : address.endpoints)
        details += (details.empty() ? "" : ", ") + crossrail::to_text(endpoint);
    }
    if (is_rdma(kind)) details = address.rdma_on(kind).fabric;
    text += (text.empty() ? "" : ", ") + std::string(transport_name(kind)) + " x " +
            std::to_string(address.rail_count_on(kind)) + (details.empty() ? "" : " (" + details + ")");
  }
  return text;
}

std::string represent(const Address& address) {
  return "<Address '" + address.name + "' pid " + std::to_string(address.pid) + ", " + rails_text(address) +
         ", incarnation " + to_hex(address.incarnation).substr(0, 8) + ">";
}

std::string represent(const RegionDescriptor& descriptor) {
  return "<RegionDescriptor " + std::to_string(descriptor.length_bytes) + " bytes of '" + descriptor.owner.name +
         "' pid " + std::to_string(descriptor.owner.pid) + ", " + access_name(descriptor.access) + ">";
}

template <typename Handle>
nb::object equal(const Handle& self, nb::handle other) {
  if (!nb::isinstance<Handle>(other)) return nb::borrow(Py_NotImplemented);
  return nb::bool_(*self.value == *nb::inst_ptr<Handle>(other)->value);
}

void register_address(nb::module_& module) {
  nb::class_<AddressHandle>(module, "Address", nb::is_final(),
                            R"(Which engine it is, and how to reach it. Immutable; equal if all fields are equal.

Send it to peers over any channel, as bytes(address) for Address.from_bytes, or as str(address) for Address.from_text,
as on a command line. Keep the object and reuse it: engines look it up once and remember the result in it.)")
      .def_static("from_bytes", &decode_address, nb::arg("data").none(),
                  nb::sig("def from_bytes(data: bytes | bytearray | memoryview) -> Address"),
                  "The inverse of to_bytes. Raises UsageError for anything malformed.")
      .def_static("from_text", &parse_address, nb::arg("text").none(), nb::sig("def from_text(text: str) -> Address"),
                  "The inverse of str(address). Raises UsageError for anything malformed.")
      .def(
          "to_bytes", [](const AddressHandle& self) { return to_bytes(self.value->encode()); },
          "Bytes with a version and a checksum, for from_bytes().")
      .def("__bytes__", [](const AddressHandle& self) { return to_bytes(self.value->encode()); })
      .def("__str__", [](const AddressHandle& self) { return text_of(*self.value); })
      .def("__repr__", [](const AddressHandle& self) { return to_shown(represent(*self.value)); })
      .def("__eq__", &equal<AddressHandle>, nb::arg("other").none(),
           nb::sig("def __eq__(self, other: object, /) -> bool"))
      .def("__hash__", [](const AddressHandle& self) { return hash_of(*self.value); })
      // A pickle holds the versioned bytes, so it is as portable as they are.
      .def("__getstate__", [](const AddressHandle& self) { return to_bytes(self.value->encode()); })
      .def("__setstate__",
           [](AddressHandle* self, const nb::bytes& data) { new (self) AddressHandle(decode_address(data)); })
      .def_prop_ro(
          "name", [](const AddressHandle& self) { return to_text(self.value->name); },
          "The name that the engine was opened with; not necessarily unique.")
      .def_prop_ro(
          "incarnation", [](const AddressHandle& self) { return to_hex(self.value->incarnation); },
          "128 random bits in hexadecimal, drawn when the engine opened: a restarted engine has others.")
      .def_prop_ro(
          "pid", [](const AddressHandle& self) { return self.value->pid; },
          "Process id of the engine, in its own pid namespace.")
      .def_prop_ro(
          "rails",
          [](const AddressHandle& self) {
            uint32_t most = 1;
            for (const TransportKind kind : kinds_of(*self.value))
              most = std::max(most, self.value->rail_count_on(kind));
            return most;
          },
          "The number of its rails, on the transport where it has most.")
      .def_prop_ro(
          "transports",
          [](const AddressHandle& self) {
            nb::list names;
            for (const TransportKind kind : kinds_of(*self.value)) names.append(transport_name(kind));
            return nb::tuple(names);
          },
          nb::sig("def transports(self) -> tuple[str, ...]"), "Names of the transports by which it can be reached.")
      .def_prop_ro(
          "endpoints",
          [](const AddressHandle& self) {
            nb::list texts;
            for (const Endpoint& endpoint : self.value->endpoints) texts.append(crossrail::to_text(endpoint));
            return nb::tuple(texts);
          },
          nb::sig("def endpoints(self) -> tuple[str, ...]"),
          "Where its tcp rails listen, as 'ip:port'; empty without tcp.")
      .def(
          "rail_speeds",
          [](const AddressHandle& self, const std::string& transport) {
            nb::list speeds;
            for (const TransportKind kind : kinds_of(*self.value)) {
              if (transport != transport_name(kind)) continue;
              for (uint32_t rail = 0; rail < self.value->rail_count_on(kind); ++rail)
                speeds.append(self.value->speed_mbps_of(kind, rail) / 1e3);
            }
            return nb::tuple(speeds);
          },
          nb::arg("transport"), nb::sig("def rail_speeds(self, transport: str) -> tuple[float, ...]"),
          "The speed of each of its rails on that transport, in Gb/s; 0 if unknown. Empty if it has no such "
          "transport.");
}

}  // namespace

void register_descriptor(nb::module_& module) {
  register_address(module);
  nb::class_<DescriptorHandle>(
      module, "RegionDescriptor", nb::is_final(),
      R"(Names a region of some engine to its peers, who use it as the target or source of their operations.

Immutable; equal if all fields are equal. Send bytes(descriptor) over any channel and rebuild it with from_bytes. Keep
the object and reuse it: engines look it up once and remember the result in it. A pickle holds the same bytes.
It keeps nothing open: the region is open as long as its engine's program holds the Region.)")
      .def_static("from_bytes", &decode_descriptor, nb::arg("data").none(),
                  nb::sig("def from_bytes(data: bytes | bytearray | memoryview) -> RegionDescriptor"),
                  "The inverse of to_bytes. Raises UsageError for anything malformed.")
      .def(
          "to_bytes", [](const DescriptorHandle& self) { return to_bytes(self.value->encode()); },
          "Bytes with a version and a checksum, for from_bytes().")
      .def("__bytes__", [](const DescriptorHandle& self) { return to_bytes(self.value->encode()); })
      .def("__repr__", [](const DescriptorHandle& self) { return to_shown(represent(*self.value)); })
      .def("__eq__", &equal<DescriptorHandle>, nb::arg("other").none(),
           nb::sig("def __eq__(self, other: object, /) -> bool"))
      .def("__hash__",
           [](const DescriptorHandle& self) {
             const Py_hash_t hash = hash_of(self.value->owner) ^ static_cast<Py_hash_t>(self.value->region_id);
             return hash == -1 ? 0 : hash;
           })
      .def("__getstate__", [](const DescriptorHandle& self) { return to_bytes(self.value->encode()); })
      .def("__setstate__",
           [](DescriptorHandle* self, const nb::bytes& data) { new (self) DescriptorHandle(decode_descriptor(data)); })
      .def_prop_ro(
          "owner",
          [](const DescriptorHandle& self) {
            return AddressHandle(std::shared_ptr<const Address>(self.value, &self.value->owner));
          },
          "Address of the engine that registered it.")
      .def_prop_ro(
          "nbytes", [](const DescriptorHandle& self) { return self.value->length_bytes; },
          "Length of the region in bytes.")
      .def_prop_ro(
          "region", [](const DescriptorHandle& self) { return self.value->region_id; },
          "The region's number, as in error messages. An engine never uses one twice: renew() gives the region "
          "another.")
      .def_prop_ro(
          "access", [](const DescriptorHandle& self) { return access_name(self.value->access); },
          nb::sig("def access(self) -> str"), "What peers may do: 'local' (nothing), 'read' or 'write'.")
      .def_prop_ro(
          "device",
          [](const DescriptorHandle& self) { return self.value->memory == MemoryKind::kHost ? "cpu" : "cuda"; },
          nb::sig("def device(self) -> str"), "Where the memory is: 'cpu', or 'cuda' if it is on a GPU of the owner.");
}

}  // namespace crossrail::bindings
