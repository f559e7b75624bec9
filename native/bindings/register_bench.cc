// crossrail._core.bench: the measuring loops, for `crossrail bench` and `crossrail demo`. Not a public API.
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/variant.h>
#include <nanobind/stl/vector.h>

#include <sys/mman.h>

#include <optional>
#include <span>
#include <string>
#include <tuple>
#include <variant>
#include <vector>

#include "bench/guard.h"
#include "bench/limits.h"
#include "bench/loops.h"
#include "bench/messages.h"
#include "bench/rig.h"
#include "bindings/bench_arguments.h"
#include "bindings/bindings.h"
#include "bindings/choices.h"
#include "bindings/convert.h"
#include "bindings/explanation.h"
#include "util/errors.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace crossrail::bindings {
namespace {

using bench::Guard;
using bench::Rig;

nb::bytes to_bytes(const Bytes& bytes) { return nb::bytes(bytes.data(), bytes.size()); }
Bytes from_bytes(const nb::bytes& bytes) {
  const std::span<const uint8_t> span = as_span(bytes);
  return Bytes(span.begin(), span.end());
}

// The number of rails, or what each is bound to.
using Rails = std::variant<uint32_t, std::vector<std::string>>;

void set_rails(EngineOptions& options, const Rails& rails) {
  if (const auto* count = std::get_if<uint32_t>(&rails)) {
    options.rail_count = *count;
    return;
  }
  options.rails = std::get<std::vector<std::string>>(rails);
  options.rail_count = static_cast<uint32_t>(options.rails.size());
}

void open_rig(Rig* self, const std::string& name, const std::string& transport, const Rails& rails,
              const std::string& polling, double spin_us, const std::string& private_path, uint32_t recorder_entries,
              bool counts_traffic, uint16_t port, const nb::bytes& secret,
              const std::tuple<std::string, std::string, std::string, std::string>& tls) {
  EngineOptions options;
  std::string verify;
  std::tie(options.tls.cert_file, options.tls.key_file, options.tls.ca_file, verify) = tls;
  options.tls.verify = choose("tls.verify", verify, kTlsVerifies);
  options.port = port;
  options.secret.assign(static_cast<const char*>(secret.data()), secret.size());
  options.recorder_entries = recorder_entries;
  options.counts_traffic = counts_traffic;
  options.name = name;
  TransportWord word = to_transports(transport);
  options.transports = std::move(word.kinds);
  options.adds_rdma = word.adds_rdma;
  options.rdma.provider = std::move(word.provider);
  set_rails(options, rails);
  options.polling = choose("polling", polling, kPollings);
  options.spin_ns = static_cast<int64_t>(spin_us * 1e3);
  options.private_path = choose("private_path", private_path, kPrivatePaths);
  nb::gil_scoped_release released;
  new (self) Rig(options);
}

bench::Ack ack_of(Rig& rig, std::optional<uint32_t> imm) { return {imm ? rig.counter(*imm) : nullptr}; }

int64_t run_writes(Rig& rig, size_t src, size_t dst, uint64_t nbytes, uint64_t span_bytes, uint64_t count,
                   uint32_t window, std::optional<uint32_t> imm, std::optional<uint32_t> ack, double timeout_s) {
  Guard guard = make_guard("writes", timeout_s);
  const bench::WriteLoop loop{.src = &rig.region(src),
                              .dst = &rig.remote_region(dst),
                              .length_bytes = nbytes,
                              .span_bytes = span_bytes,
                              .op_count = count,
                              .window = window,
                              .imm = imm.value_or(kNoImm)};
  return bench::run_writes(rig.engine(), loop, ack_of(rig, ack), guard);
}

int64_t run_paged_writes(Rig& rig, size_t src, const Indices& src_pages, size_t dst, const Indices& dst_pages,
                         uint64_t page_bytes, uint64_t batch_pages, uint64_t rounds, uint32_t window,
                         std::optional<uint32_t> imm, std::optional<uint32_t> ack, double timeout_s) {
  nb::gil_scoped_release released;
  Guard guard = make_guard("paged writes", timeout_s);
  const bench::PagedLoop loop{.src = &rig.region(src),
                              .dst = &rig.remote_region(dst),
                              .src_pages = as_span(src_pages),
                              .dst_pages = as_span(dst_pages),
                              .page_bytes = page_bytes,
                              .batch_pages = batch_pages,
                              .rounds = rounds,
                              .window = window,
                              .imm = imm.value_or(kNoImm)};
  return bench::run_paged_writes(rig.engine(), loop, ack_of(rig, ack), guard);
}

int64_t run_reads(Rig& rig, size_t dst, size_t src, uint64_t nbytes, uint64_t span_bytes, uint64_t count,
                  uint32_t window, double timeout_s) {
  Guard guard = make_guard("reads", timeout_s);
  const bench::ReadLoop loop{.dst = &rig.region(dst),
                             .src = &rig.remote_region(src),
                             .length_bytes = nbytes,
                             .span_bytes = span_bytes,
                             .op_count = count,
                             .window = window};
  return bench::run_reads(rig.engine(), loop, guard);
}

int64_t run_scatters(Rig& rig, size_t src, const std::vector<size_t>& dsts, std::optional<size_t> group,
                     uint64_t slice_bytes, uint64_t span_bytes, uint64_t count, uint32_t window,
                     std::optional<uint32_t> imm, std::optional<uint32_t> ack, double timeout_s) {
  Guard guard = make_guard("scatters", timeout_s);
  std::vector<RemoteRegion*> targets;
  targets.reserve(dsts.size());
  for (const size_t dst : dsts) targets.push_back(&rig.remote_region(dst));
  const bench::ScatterLoop loop{.src = &rig.region(src),
                                .dsts = targets,
                                .group = group ? &rig.peer_group(*group) : nullptr,
                                .slice_bytes = slice_bytes,
                                .span_bytes = span_bytes,
                                .op_count = count,
                                .window = window,
                                .imm = imm.value_or(kNoImm)};
  return bench::run_scatters(rig.engine(), loop, ack_of(rig, ack), guard);
}

int64_t run_ping_pong(Rig& rig, size_t src, size_t dst, size_t landing, uint32_t imm_out, uint32_t imm_in,
                      uint64_t rounds, bool first, bool verify, uint64_t nbytes,
                      const std::optional<Durations>& round_ns, double timeout_s) {
  const std::span<int64_t> durations = round_ns ? std::span(round_ns->data(), round_ns->size()) : std::span<int64_t>();
  nb::gil_scoped_release released;
  Guard guard = make_guard("ping-pong", timeout_s);
  const bench::PingPong loop{.src = &rig.region(src),
                             .dst = &rig.remote_region(dst),
                             .landing = &rig.region(landing),
                             .imm_out = imm_out,
                             .in = rig.counter(imm_in),
                             .rounds = rounds,
                             .first = first,
                             .verify = verify,
                             .length_bytes = nbytes,
                             .round_ns = durations};
  return bench::run_ping_pong(rig.engine(), loop, guard);
}

int64_t run_receivers(const std::vector<Rig*>& rigs, uint32_t imm, uint64_t count, size_t reply_src, size_t reply_dst,
                      uint32_t reply_imm, double timeout_s) {
  Guard guard = make_guard("receivers", timeout_s);
  std::vector<bench::Receiver> receivers;
  receivers.reserve(rigs.size());
  for (Rig* rig : rigs) receivers.push_back({&rig->engine(), rig->counter(imm)});
  if (rigs.empty()) throw UsageError("rigs is empty and must hold at least one");
  return bench::run_receivers(receivers, count, rigs[0]->region(reply_src), rigs[0]->remote_region(reply_dst),
                              reply_imm, guard);
}

bench::MessageLoop message_loop(Rig& rig, Peer& peer, uint64_t nbytes, uint64_t count, uint32_t window) {
  if (window >= Rig::kPoolMessages || nbytes > Rig::kPoolMessageBytes) {
    throw UsageError("window must be less than " + std::to_string(Rig::kPoolMessages) + " and nbytes at most " +
                     std::to_string(Rig::kPoolMessageBytes));
  }
  return {.peer = &peer, .pool = &rig.pool(), .message_bytes = nbytes, .count = count, .window = window};
}

int64_t run_messages(Rig& rig, const nb::bytes& address, uint64_t nbytes, uint64_t count, uint32_t window, bool sender,
                     bool verify, double timeout_s) {
  const PeerRef peer = rig.peer(as_span(address));
  nb::gil_scoped_release released;
  Guard guard = make_guard("messages", timeout_s);
  return bench::run_messages(rig.engine(), message_loop(rig, *peer, nbytes, count, window), sender, verify, guard);
}

int64_t run_message_ping_pong(Rig& rig, const nb::bytes& address, uint64_t nbytes, uint64_t count, bool first,
                              bool verify, double timeout_s) {
  const PeerRef peer = rig.peer(as_span(address));
  nb::gil_scoped_release released;
  Guard guard = make_guard("message ping-pong", timeout_s);
  return bench::run_message_ping_pong(rig.engine(), message_loop(rig, *peer, nbytes, count, 1), first, verify, guard);
}

// Memory that two processes share through an inherited memfd, mapped while a loop runs. One page of flags, then a ring.
class SharedMapping {
 public:
  static constexpr size_t kFlagBytes = 4096;
  static constexpr size_t kBytes = kFlagBytes + bench::kStreamBytes;

  explicit SharedMapping(int fd) : base_(mmap(nullptr, kBytes, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0)) {
    if (base_ == MAP_FAILED) throw_errno("mmap", "cannot map the memory of the bare loops");
  }
  ~SharedMapping() { munmap(base_, kBytes); }
  SharedMapping(const SharedMapping&) = delete;
  SharedMapping& operator=(const SharedMapping&) = delete;

  std::span<std::byte> flags() { return {static_cast<std::byte*>(base_), kFlagBytes}; }
  std::span<std::byte> ring() { return {static_cast<std::byte*>(base_) + kFlagBytes, bench::kStreamBytes}; }

 private:
  void* base_;
};

int64_t flag_ping_pong(int fd, bool first, uint64_t start, uint64_t rounds, double timeout_s) {
  SharedMapping shared(fd);
  Guard guard = make_guard("flag ping-pong", timeout_s);
  return bench::flag_ping_pong(shared.flags(), first, start, rounds, guard);
}

int64_t slot_stream(int fd, bool producer, uint64_t start, uint64_t count, double timeout_s) {
  SharedMapping shared(fd);
  Guard guard = make_guard("bare ring", timeout_s);
  return bench::slot_stream(shared.ring(), producer, start, count, guard);
}

nb::object view(nb::handle self, size_t index) {
  const std::span<std::byte> memory = nb::cast<Rig&>(self).memory(index);
  return nb::cast(nb::ndarray<nb::numpy, uint8_t, nb::ndim<1>>(memory.data(), {memory.size()}, self));
}

nb::object explain(Rig& rig, const nb::bytes& address) {
  const PeerRef peer = rig.peer(as_span(address));
  return explanation_tuple(rig.engine().explain(*peer));
}

// (what, path, reason, GB/s) for each pair of memories used with this peer.
std::vector<std::tuple<std::string, std::string, std::string, double>> paths(Rig& rig, const nb::bytes& address) {
  const PeerRef peer = rig.peer(as_span(address));
  std::vector<std::tuple<std::string, std::string, std::string, double>> rows;
  for (const PathExplanation& path : rig.engine().explain(*peer).paths) {
    rows.emplace_back(path.what, path.path, path.reason, path.gb_per_s);
  }
  return rows;
}

void translate_interrupted(const std::exception_ptr& raised, void*) {
  try {
    std::rethrow_exception(raised);
  } catch (const bench::Interrupted&) {
    // PyErr_CheckSignals has set the Python error already.
    if (PyErr_Occurred() == nullptr) PyErr_SetNone(PyExc_KeyboardInterrupt);
  }
}

void register_rig(nb::module_& module) {
  using release = nb::call_guard<nb::gil_scoped_release>;
  nb::class_<Rig>(module, "Rig", "One engine with its memory, for measuring: handles are indices, descriptors bytes.")
      .def("__init__", &open_rig, "name"_a, nb::kw_only(), "transport"_a = "shm", "rails"_a = Rails(1u),
           "polling"_a = "manual", "spin_us"_a = 50.0, "private_path"_a = "auto",
           "recorder_entries"_a = EngineOptions{}.recorder_entries, "counts_traffic"_a = true, "port"_a = 0,
           "secret"_a = nb::bytes("", 0), "tls"_a = std::tuple("", "", "", "chain"))
      .def("close", &Rig::close, release())
      .def_prop_ro("address", [](Rig& rig) { return to_bytes(rig.address()); })
      .def("alloc", &Rig::alloc, "nbytes"_a, release())
      .def("map_private", &Rig::map_private, "nbytes"_a, release())
      .def(
          "descriptor", [](const Rig& rig, size_t index) { return to_bytes(rig.region(index).descriptor().encode()); },
          "index"_a)
      .def(
          "remote", [](Rig& rig, const nb::bytes& descriptor) { return rig.remote(as_span(descriptor)); },
          "descriptor"_a)
      .def(
          "group",
          [](Rig& rig, const std::vector<nb::bytes>& addresses) {
            std::vector<Bytes> encoded;
            encoded.reserve(addresses.size());
            for (const nb::bytes& address : addresses) encoded.push_back(from_bytes(address));
            return rig.group(encoded);
          },
          "addresses"_a)
      .def(
          "view", [](nb::pointer_and_handle<Rig> self, size_t index) { return view(self.h, index); }, "index"_a,
          nb::sig("def view(self, index: int) -> numpy.typing.NDArray[numpy.uint8]"))
      .def(
          "connect",
          [](Rig& rig, const nb::bytes& address, double timeout_s) {
            const PeerRef peer = rig.peer(as_span(address));
            nb::gil_scoped_release no_gil;
            if (rig.engine().connect(*peer, deadline_in(timeout_s), {}) != WaitResult::kReady) {
              throw TransportError("bench", 0, "the peer did not connect");
            }
          },
          "address"_a, "timeout_s"_a)
      .def("paths", &paths, "address"_a)
      .def("explain", &explain, "address"_a, nb::sig("def explain(self, address: bytes) -> tuple[typing.Any, ...]"))
      .def(
          "drive",
          [](Rig& rig, double seconds) {
            Guard guard = make_guard("drive", seconds + 1.0);
            rig.drive(seconds, guard);
          },
          "seconds"_a, release());
}

void register_loops(nb::module_& module) {
  using release = nb::call_guard<nb::gil_scoped_release>;
  module.def("run_writes", &run_writes, "rig"_a, "src"_a, "dst"_a, nb::kw_only(), "nbytes"_a, "span_bytes"_a, "count"_a,
             "window"_a, "imm"_a = nb::none(), "ack"_a = nb::none(), "timeout_s"_a = 60.0, release());
  module.def("run_reads", &run_reads, "rig"_a, "dst"_a, "src"_a, nb::kw_only(), "nbytes"_a, "span_bytes"_a, "count"_a,
             "window"_a, "timeout_s"_a = 60.0, release());
  module.def("run_paged_writes", &run_paged_writes, "rig"_a, "src"_a, "src_pages"_a, "dst"_a, "dst_pages"_a,
             nb::kw_only(), "page_bytes"_a, "batch_pages"_a, "rounds"_a = 1, "window"_a = 1, "imm"_a = nb::none(),
             "ack"_a = nb::none(), "timeout_s"_a = 60.0);
  module.def("run_scatters", &run_scatters, "rig"_a, "src"_a, "dsts"_a, "group"_a = nb::none(), nb::kw_only(),
             "slice_bytes"_a, "span_bytes"_a, "count"_a, "window"_a, "imm"_a = nb::none(), "ack"_a = nb::none(),
             "timeout_s"_a = 60.0, release());
  module.def("run_ping_pong", &run_ping_pong, "rig"_a, "src"_a, "dst"_a, "landing"_a, nb::kw_only(), "imm_out"_a,
             "imm_in"_a, "rounds"_a, "first"_a, "verify"_a = false, "nbytes"_a = 8, "round_ns"_a = nb::none(),
             "timeout_s"_a = 60.0);
  module.def("run_receivers", &run_receivers, "rigs"_a, nb::kw_only(), "imm"_a, "count"_a, "reply_src"_a, "reply_dst"_a,
             "reply_imm"_a, "timeout_s"_a = 60.0, release());
  module.def("run_messages", &run_messages, "rig"_a, "peer"_a, nb::kw_only(), "nbytes"_a, "count"_a, "window"_a,
             "sender"_a, "verify"_a = false, "timeout_s"_a = 60.0);
  module.def("run_message_ping_pong", &run_message_ping_pong, "rig"_a, "peer"_a, nb::kw_only(), "nbytes"_a, "count"_a,
             "first"_a, "verify"_a = false, "timeout_s"_a = 60.0);
}

void register_limits(nb::module_& module) {
  using release = nb::call_guard<nb::gil_scoped_release>;
  module.def(
      "copy_in_calls",
      [](const Memory& dst, const ConstMemory& src, uint64_t call_bytes) {
        nb::gil_scoped_release released;
        return bench::copy_in_calls(as_span(dst), as_span(src), call_bytes);
      },
      "dst"_a, "src"_a, "call_bytes"_a);
  module.def(
      "copy_pages",
      [](const Memory& dst, const ConstMemory& src, const Indices& dst_pages, const Indices& src_pages,
         uint64_t page_bytes) {
        nb::gil_scoped_release released;
        return bench::copy_pages(as_span(dst), as_span(src), as_span(dst_pages), as_span(src_pages), page_bytes);
      },
      "dst"_a, "src"_a, "dst_pages"_a, "src_pages"_a, "page_bytes"_a);
  module.def(
      "fill_work_requests",
      [](const Indices& dst_pages, const Indices& src_pages, uint64_t page_bytes, uint64_t rounds) {
        nb::gil_scoped_release released;
        return bench::fill_work_requests(as_span(dst_pages), as_span(src_pages), page_bytes, rounds);
      },
      "dst_pages"_a, "src_pages"_a, "page_bytes"_a, "rounds"_a);
  module.def("flag_ping_pong", &flag_ping_pong, "fd"_a, nb::kw_only(), "first"_a, "start"_a, "rounds"_a,
             "timeout_s"_a = 60.0, release());
  module.def(
      "pass_gate",
      [](const Memory& page, uint32_t due, bool sleeps, double timeout_s) {
        Guard guard = make_guard("gate", timeout_s);
        nb::gil_scoped_release released;
        bench::pass_gate(as_span(page), due, sleeps, guard);
      },
      "page"_a, "due"_a, nb::kw_only(), "sleeps"_a, "timeout_s"_a = 60.0);
  module.def(
      "spin_on_word",
      [](const Memory& word, const Durations& seen_ns, double timeout_s) {
        Guard guard = make_guard("spin on a word", timeout_s);
        nb::gil_scoped_release released;
        bench::spin_on_word(as_span(word), {seen_ns.data(), seen_ns.size()}, guard);
      },
      "word"_a, "seen_ns"_a, "timeout_s"_a = 60.0);
  module.def("slot_stream", &slot_stream, "fd"_a, nb::kw_only(), "producer"_a, "start"_a, "count"_a,
             "timeout_s"_a = 60.0, release());
  module.attr("SHARED_BYTES") = SharedMapping::kBytes;
  // The least that submit_write can cost from Python: the same arguments, nothing done.
  module.def(
      "nothing", [](nb::handle, nb::handle, uint64_t, uint64_t, uint64_t) {}, "src"_a, "dst"_a, "length"_a,
      nb::kw_only(), "src_offset"_a = 0, "dst_offset"_a = 0);
}

}  // namespace

void register_bench(nb::module_& module) {
  nb::module_ bench = module.def_submodule("bench", "Measuring loops of `crossrail bench`; not a public API.");
  nb::register_exception_translator(translate_interrupted);
  register_rig(bench);
  register_loops(bench);
  register_limits(bench);
  register_bench_sockets(bench);
  register_bench_fabric(bench);
  register_bench_moe(bench);
}

}  // namespace crossrail::bindings
