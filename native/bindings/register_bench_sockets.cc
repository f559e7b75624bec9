// crossrail._core.bench: bare TCP sockets, as limits (bench/sockets.h). Sockets are file descriptors, which the caller
// opens and closes.
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/string.h>

#include <string>

#include "bench/sockets.h"
#include "bindings/bench_arguments.h"
#include "bindings/bindings.h"
#include "bindings/choices.h"

using namespace nanobind::literals;

namespace crossrail::bindings {
namespace {

using bench::Guard;
using bench::SocketWait;

constexpr Choice<SocketWait> kWaits[] = {{"spin", SocketWait::kSpin}, {"block", SocketWait::kBlock}};

int64_t socket_stream(int fd, const Memory& memory, bool sender, uint64_t nbytes, uint64_t count, uint32_t window,
                      uint64_t chunk_bytes, const std::string& wait, double timeout_s) {
  nb::gil_scoped_release released;
  Guard guard = make_guard("bare socket stream", timeout_s);
  const bench::SocketStream loop{.message_bytes = nbytes,
                                 .chunk_bytes = chunk_bytes,
                                 .count = count,
                                 .window = window,
                                 .wait = choose("wait", wait, kWaits)};
  return bench::socket_stream(fd, as_span(memory), sender, loop, guard);
}

int64_t socket_pages(int fd, const Memory& memory, bool sender, const Indices& src_pages, const Indices& dst_pages,
                     uint64_t page_bytes, uint64_t batch_pages, const std::string& wait, double timeout_s) {
  nb::gil_scoped_release released;
  Guard guard = make_guard("bare socket pages", timeout_s);
  const bench::SocketPages loop{.src_pages = as_span(src_pages),
                                .dst_pages = as_span(dst_pages),
                                .page_bytes = page_bytes,
                                .batch_pages = batch_pages,
                                .wait = choose("wait", wait, kWaits)};
  return bench::socket_pages(fd, as_span(memory), sender, loop, guard);
}

int64_t socket_ping_pong(int fd, bool first, uint64_t nbytes, uint64_t rounds, const std::string& wait,
                         double timeout_s) {
  Guard guard = make_guard("bare socket ping-pong", timeout_s);
  return bench::socket_ping_pong(fd, first, nbytes, rounds, choose("wait", wait, kWaits), guard);
}

int64_t socket_messages(int fd, bool sender, uint64_t nbytes, uint64_t count, const std::string& wait,
                        double timeout_s) {
  Guard guard = make_guard("bare socket messages", timeout_s);
  return bench::socket_messages(fd, sender, nbytes, count, choose("wait", wait, kWaits), guard);
}

}  // namespace

void register_bench_sockets(nb::module_& module) {
  using release = nb::call_guard<nb::gil_scoped_release>;
  module.def("tune_socket", &bench::tune_socket, "fd"_a);
  module.def("socket_stream", &socket_stream, "fd"_a, "memory"_a, nb::kw_only(), "sender"_a, "nbytes"_a, "count"_a,
             "window"_a, "chunk_bytes"_a = 0, "wait"_a = "spin", "timeout_s"_a = 60.0);
  module.def("socket_pages", &socket_pages, "fd"_a, "memory"_a, nb::kw_only(), "sender"_a, "src_pages"_a, "dst_pages"_a,
             "page_bytes"_a, "batch_pages"_a, "wait"_a = "spin", "timeout_s"_a = 60.0);
  module.def("socket_ping_pong", &socket_ping_pong, "fd"_a, nb::kw_only(), "first"_a, "nbytes"_a, "rounds"_a,
             "wait"_a = "spin", "timeout_s"_a = 60.0, release());
  module.def("socket_messages", &socket_messages, "fd"_a, nb::kw_only(), "sender"_a, "nbytes"_a, "count"_a,
             "wait"_a = "spin", "timeout_s"_a = 60.0, release());
}

}  // namespace crossrail::bindings
