#include <nanobind/nanobind.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>

#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "bindings/bindings.h"
#include "bindings/choices.h"
#include "bindings/convert.h"
#include "bindings/engine_handle.h"
#include "bindings/explanation.h"
#include "bindings/handles.h"
#include "bindings/raise.h"
#include "bindings/sim_world.h"

namespace crossrail::bindings {

namespace {

using Self = nb::pointer_and_handle<EngineHandle>;

// A number of rails, or what each is bound to.
void set_rails(EngineOptions* options, nb::handle rails) {
  if (PyIndex_Check(rails.ptr())) {
    options->rail_count = to_u32(rails, "rails", kRailsMax, 1);
    return;
  }
  constexpr const char* kWanted =
      "must be a number in 1..16, or a list of IP addresses and interface names, as ['eth0', 'eth1']";
  // A string is a sequence of strings, too, but not one of rails.
  if (PyUnicode_Check(rails.ptr()) || !PySequence_Check(rails.ptr()))
    throw UsageError("rails is " + type_name_of(rails) + ", " + kWanted);
  for (nb::handle rail : nb::borrow<nb::sequence>(rails)) {
    if (!PyUnicode_Check(rail.ptr())) throw UsageError("rails holds " + type_name_of(rail) + ", " + kWanted);
    options->rails.push_back(nb::cast<std::string>(rail));
  }
  if (options->rails.empty() || options->rails.size() > kRailsMax) {
    throw UsageError("rails is a list of " + std::to_string(options->rails.size()) + ", " + kWanted);
  }
  options->rail_count = static_cast<uint32_t>(options->rails.size());
}

void init(Self self, const std::string& name, const std::string& transport, nb::handle rails, nb::handle port,
          nb::handle secret, const std::tuple<std::string, std::string, std::string, std::string>& tls,
          double peer_timeout_s, const std::string& polling, double spin_us, nb::handle worker_cpu,
          nb::handle submit_queue_depth, nb::handle imm_counters_max, nb::handle message_bytes_max,
          double watcher_poll_us, double connect_timeout_s, const std::string& private_path, double heartbeat_s,
          const std::tuple<nb::object, nb::object, nb::object, nb::object, nb::object, nb::object>& rdma,
          const std::tuple<nb::object, nb::object, std::string, bool>& observed, nb::handle world, nb::handle host) {
  EngineOptions options;
  options.name = name;
  TransportWord word = to_transports(transport);
  options.transports = std::move(word.kinds);
  options.adds_rdma = word.adds_rdma;
  set_rails(&options, rails);
  options.port = static_cast<uint16_t>(to_u32(port, "port", 65535));
  const std::span<const uint8_t> secret_bytes = bytes_of(secret);
  options.secret.assign(secret_bytes.begin(), secret_bytes.end());
  std::string verify;
  std::tie(options.tls.cert_file, options.tls.key_file, options.tls.ca_file, verify) = tls;
  options.tls.verify = choose("tls.verify", verify, kTlsVerifies);
  options.peer_timeout_ns = to_ns(peer_timeout_s, "peer_timeout_s", 1e9, 1e-3, 1e6);
  options.polling = choose("polling", polling, kPollings);
  options.spin_ns = to_ns(spin_us, "spin_us", 1e3, 0, 1e7);
  if (!worker_cpu.is_none()) options.worker_cpu = static_cast<int32_t>(to_u32(worker_cpu, "worker_cpu", 1023));
  options.submit_queue_depth = to_u32(submit_queue_depth, "submit_queue_depth", 65536, 16);
  options.imm_counters_max = to_u32(imm_counters_max, "imm_counters_max", 1 << 24, 1);
  options.message_bytes_max = to_u32(message_bytes_max, "message_bytes_max", 256 << 10, 1);
  options.watcher_poll_ns = to_ns(watcher_poll_us, "watcher_poll_us", 1e3, 0, 1e6);
  options.connect_timeout_ns = to_ns(connect_timeout_s, "connect_timeout_s", 1e9, 1e-3, 1e6);
  if (heartbeat_s != 0) options.heartbeat_ns = to_ns(heartbeat_s, "heartbeat_s", 1e9, 1e-3, 1e6);
  options.private_path = choose("private_path", private_path, kPrivatePaths);
  const auto& [gid_index, traffic_class, service_level, path_mtu, partition, chain_length] = rdma;
  const bool by_choice = gid_index.equal(nb::int_(-1));
  options.rdma.gid_index = by_choice ? -1 : static_cast<int32_t>(to_u32(gid_index, "rdma.gid_index", 255));
  options.rdma.traffic_class = to_u32(traffic_class, "rdma.traffic_class", 255);
  options.rdma.service_level = to_u32(service_level, "rdma.service_level", 15);
  options.rdma.path_mtu_bytes = to_u32(path_mtu, "rdma.path_mtu", 4096);
  options.rdma.partition = to_u32(partition, "rdma.partition", 0xffff);
  options.rdma.chain_length = to_u32(chain_length, "rdma.chain_length", RdmaOptions::kChainMax, 1);
  options.rdma.provider = std::move(word.provider);
  const auto& [recorder_entries, watchdog_s, dump_directory, counts_traffic] = observed;
  options.recorder_entries = to_u32(recorder_entries, "recorder_entries", 1 << 20);
  if (!watchdog_s.is_none()) options.watchdog_ns = to_ns(nb::cast<double>(watchdog_s), "watchdog_s", 1e9, 1e-3, 1e6);
  options.dump_directory = dump_directory;
  options.counts_traffic = counts_traffic;
  if (!world.is_none()) {
    options.simulation = nb::cast<const SimWorldHandle&>(world).world;
    options.simulated_host = to_u32(host, "host");
  }
  new (self.p) EngineHandle(self.h.ptr(), options);
}

void connect(Self self, nb::handle address, nb::handle timeout_s) {
  const EngineRef engine = self.p->core();
  const PeerRef peer = self.p->peer(address);
  const Deadline deadline = to_deadline(timeout_s, engine->clock());
  const WaitResult result = wait_without_gil([&] { return engine->connect(*peer, deadline, interrupted); });
  if (result == WaitResult::kReady) return;
  const Address& target = peer->address();
  if (result == WaitResult::kTimeout) {
    raise_object(make_error("connect_timeout", self.h, to_text(target.name), target.pid, timeout_s));
  }
  raise_object(make_error("connect_failed", self.h, to_text(target.name), target.pid,
                          to_text(explain_without_gil(*engine, *peer).note)));
}

nb::object explain(Self self, nb::handle address) {
  const EngineRef engine = self.p->core();
  const PeerRef peer = self.p->peer(address);
  return explanation_tuple(explain_without_gil(*engine, *peer));
}

nb::list peers(Self self) {
  nb::list list;
  for (const PeerRef& peer : self.p->core()->peers()) list.append(AddressHandle(peer->shared_address()));
  return list;
}

PeerGroupHandle add_peer_group(Self self, nb::handle peers) {
  const EngineRef engine = self.p->core();
  std::vector<Address> addresses;
  for (nb::handle peer : to_sequence(peers, "peers", "Addresses")) addresses.push_back(self.p->peer(peer)->address());
  PeerGroupRef group;
  {
    WithoutGil no_gil;
    group = engine->add_peer_group(addresses);
  }
  return PeerGroupHandle{Held<PeerGroup>(std::move(group)), nb::borrow(self.h)};
}

nb::list take_events(Self self) {
  nb::list list;
  for (const EngineEvent& event : self.p->core()->take_events()) {
    list.append(nb::make_tuple(event_kind_name(event.kind), to_text(event.peer), to_text(event.detail)));
  }
  return list;
}

nb::dict stats(Self self) {
  nb::dict dict;
  self.p->core()->stats().each([&](const char* name, uint64_t value) { dict[name] = value; });
  return dict;
}

int traverse(PyObject* self, visitproc visit, void* arg) {
  Py_VISIT(Py_TYPE(self));
  return nb::inst_ready(self) ? nb::inst_ptr<EngineHandle>(self)->traverse(visit, arg) : 0;
}

PyType_Slot slots[] = {{Py_tp_traverse, reinterpret_cast<void*>(traverse)}, {0, nullptr}};

void register_peers(nb::class_<EngineHandle>& engine) {
  engine
      .def("connect", &connect, nb::arg("peer").none(), nb::arg("timeout_s").none() = 15.0,
           nb::sig("def connect(self, peer: Address | bytes, timeout_s: float | None = 15.0) -> None"),
           R"(Connects now instead of at the first operation. Optional. Blocks, GIL released; any thread.

timeout_s: best more than the engine's connect_timeout_s (5 s), at whose end PeerLost says what is wrong on the way.
Raises PeerLost when the peer cannot be reached, is gone or of an older incarnation, WaitTimeout, EngineClosed.)")
      .def(
          "peer_state", [](Self self, nb::handle peer) { return peer_state_name(self.p->peer(peer)->state()); },
          nb::arg("peer").none(), nb::sig("def peer_state(self, peer: Address | bytes) -> str"),
          "'unknown', 'connecting', 'connected', 'slow' (with heartbeats: no answer within an interval), 'frozen' "
          "(does not\n"
          "move while something waits for it, may come back) or 'lost'. Any thread, never blocks.")
      .def_prop_ro(
          "_now_s", [](Self self) { return static_cast<double>(self.p->core()->clock().now_ns()) * 1e-9; },
          "What deadlines are measured by, in seconds from any beginning: virtual on a simulated host.")
      .def("peers", &peers, nb::sig("def peers(self) -> list[Address]"), "The peers known to this engine, in no order.")
      .def(
          "forget_peer", [](Self self, nb::handle peer) { self.p->forget_peer(peer); }, nb::arg("peer").none(),
          nb::sig("def forget_peer(self, peer: Address | bytes) -> None"),
          "Fails every transfer to this peer with PeerLost and drops all state about it. The address can connect "
          "again.")
      .def("add_peer_group", &add_peer_group, nb::arg("peers").none(),
           nb::sig("def add_peer_group(self, peers: collections.abc.Sequence[Address | bytes]) -> PeerGroup"),
           "Resolves peers beforehand for submit_scatter and submit_barrier. Order is kept.")
      .def(
          "remove_peer_group", [](Self, nb::handle group) { to_group(group).removed = true; }, nb::arg("group").none(),
          nb::sig("def remove_peer_group(self, group: PeerGroup) -> None"),
          "Later use of the group raises UsageError; what is in flight goes on.")
      .def("_explain", &explain, nb::arg("peer").none(),
           nb::sig("def _explain(self, peer: Address | bytes) -> tuple[str, str, str, str, str, list[tuple[int, int]], "
                   "list[tuple[str, str]], float, list[tuple[str, str, str, float, int]], "
                   "tuple[int, float, float, float, float] | None]"));
}

}  // namespace

void register_engine(nb::module_& module) {
  nb::class_<PeerGroupHandle>(module, "PeerGroup", nb::is_final(), nb::type_slots(engine_slots<PeerGroupHandle>),
                              "Peers resolved beforehand, in the caller's order. Immutable.")
      .def("__len__", [](const PeerGroupHandle& self) { return self.group->size(); })
      .def_prop_ro(
          "peers",
          [](const PeerGroupHandle& self) {
            nb::list list;
            for (const PeerRef& peer : self.group->peers()) list.append(AddressHandle(peer->shared_address()));
            return list;
          },
          nb::sig("def peers(self) -> list[Address]"))
      .def("__repr__", [](const PeerGroupHandle& self) {
        const size_t count = self.group->size();
        return "<PeerGroup of " + std::to_string(count) + (count == 1 ? " peer" : " peers") +
               (self.removed ? ", removed>" : ">");
      });

  nb::class_<EngineHandle> engine(module, "Engine", nb::type_slots(slots));
  engine
      .def(
          "__init__", &init, nb::arg("name"), nb::arg("transport"), nb::arg("rails"), nb::arg("port"),
          nb::arg("secret"), nb::arg("tls"), nb::arg("peer_timeout_s"), nb::arg("polling"), nb::arg("spin_us"),
          nb::arg("worker_cpu").none(), nb::arg("submit_queue_depth"), nb::arg("imm_counters_max"),
          nb::arg("message_bytes_max"), nb::arg("watcher_poll_us"), nb::arg("connect_timeout_s"),
          nb::arg("private_path"), nb::arg("heartbeat_s"), nb::arg("rdma"), nb::arg("observed"),
          nb::arg("world").none(), nb::arg("host").none(),
          nb::sig(
              "def __init__(self, name: str, transport: str, rails: int | collections.abc.Sequence[str], "
              "port: int, secret: bytes, tls: tuple[str, str, str, str], peer_timeout_s: float, polling: str, spin_us: "
              "float, "
              "worker_cpu: int | None, submit_queue_depth: int, imm_counters_max: int, message_bytes_max: int, "
              "watcher_poll_us: float, connect_timeout_s: float, private_path: str, heartbeat_s: float, rdma: "
              "tuple[int, int, int, int, int, int], "
              "observed: tuple[int, float | None, str, bool], world: SimWorld | None, host: int | None) -> None"))
      .def_prop_ro("name", [](Self self) { return to_text(self.p->address()->name); })
      .def_prop_ro(
          "address", [](Self self) { return AddressHandle(self.p->address()); },
          "What peers need to reach this engine.")
      .def_prop_ro(
          "_gpu_transports",
          [](Self self) {
            const uint32_t mask = self.p->core()->gpu_transports();
            nb::list names;
            for (uint32_t number = 1; number <= kTransportKinds; ++number) {
              const auto kind = static_cast<TransportKind>(number);
              if ((mask & transport_bit(kind)) != 0) names.append(transport_name(kind));
            }
            return nb::tuple(names);
          },
          nb::sig("def _gpu_transports(self) -> tuple[str, ...]"), "Those that move memory of GPUs.")
      .def_prop_ro(
          "_no_gpu_memory", [](Self self) { return self.p->core()->no_gpu_memory(); },
          "Why its NICs take no memory of GPUs, if they could; empty: nobody knows.")
      .def_prop_ro(
          "_rail_devices",
          [](Self self) {
            nb::dict devices;
            for (const auto& [kind, names] : self.p->core()->rail_devices()) {
              nb::list rails;
              for (const std::string& name : names) rails.append(to_text(name));
              devices[transport_name(kind)] = nb::tuple(rails);
            }
            return devices;
          },
          nb::sig("def _rail_devices(self) -> dict[str, tuple[str, ...]]"),
          "By transport, what each rail is on: a netdev or a port. Several may share one.")
      .def_prop_ro(
          "rails", [](Self self) { return self.p->rail_count(); },
          "The number of its rails, on the transport that has most.")
      .def_prop_ro(
          "closed", [](Self self) { return self.p->closed(); }, "True once it is closed, and in a forked child.")
      .def_prop_ro(
          "_inherited", [](Self self) { return self.p->inherited(); }, "In a forked child.")
      .def(
          "_close", [](Self self, nb::handle timeout_s) { self.p->close(timeout_s); }, nb::arg("timeout_s").none(),
          nb::sig("def _close(self, timeout_s: float | None) -> None"))
      .def(
          "release_imm",
          [](Self self, nb::handle imm, nb::handle force) {
            self.p->core()->release_imm(to_u32(imm, "imm", kImmMax), to_bool(force, "force"));
          },
          nb::arg("imm").none(), nb::kw_only(), nb::arg("force").none() = false,
          nb::sig("def release_imm(self, imm: int, *, force: bool = False) -> None"),
          R"(States that no peer will send this number any more: drops its counter, and alloc_imm may hand the number out again.

It is not handed out before all others were, or a million were released; an arrival for it puts it in use again. Raises
UsageError if counts are evidently still expected: somebody waits for it, or a part of one has arrived. force: drops
those too.)")
      .def(
          "progress",
          [](Self self) {
            const EngineRef core = self.p->core();
            WithoutGil no_gil;
            return core->progress();
          },
          "One round of the engine's work; True when anything moved. Needed only with polling='manual'. Any thread.")
      .def_prop_ro(
          "_seat", [](Self self) { return self.p->core()->seat(); }, "Which engine of its simulated world it is.")
      .def("stats", &stats, nb::sig("def stats(self) -> dict[str, int]"), "Counts since the engine opened.")
      .def(
          "_set_event_notifier",
          [](Self self, const NotifierHandle& notifier, uint64_t cookie) {
            self.p->core()->set_event_notifier(notifier.notifier.ref().get(), cookie);
          },
          nb::arg("notifier"), nb::arg("cookie"))
      .def("_take_events", &take_events, nb::sig("def _take_events(self) -> list[tuple[str, str, str]]"));
  register_peers(engine);
  register_operations(engine);
  register_mapping(module, engine);
  register_pinned(module);
  register_flight(module, engine);
  register_traffic(engine);
}

}  // namespace crossrail::bindings
