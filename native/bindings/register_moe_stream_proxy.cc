// crossrail._core.moe: rounds whose steps are kernels on a stream. See moe/stream_proxy.h and device/round_words.h.
#include <nanobind/nanobind.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "bindings/bindings.h"
#include "bindings/convert.h"
#include "bindings/fork.h"
#include "bindings/host_arrays.h"
#include "bindings/moe_proxy.h"
#include "moe/stream_proxy.h"

namespace crossrail::bindings {

namespace {

using moe::StreamWord;

const char* step_name(moe::FarStep step) {
  switch (step) {
    case moe::FarStep::kRoutes:
      return "routes";
    case moe::FarStep::kRows:
      return "rows";
    case moe::FarStep::kResults:
      return "results";
    case moe::FarStep::kFarewell:
      return "sent";
  }
  return "";
}

void make_board(moe::StreamBoard* self, uint64_t numbers, uint64_t routes, uint64_t expert_rows,
                uint64_t expert_offsets, uint64_t moves, uint64_t returns, uint64_t parity_bytes) {
  new (self) moe::StreamBoard{.numbers = numbers,
                              .routes = routes,
                              .expert_rows = expert_rows,
                              .expert_offsets = expert_offsets,
                              .moves = moves,
                              .returns = returns,
                              .parity_bytes = parity_bytes};
}

std::string result_of(const moe::StreamFailure& failure) {
  return failure.is_over ? "overflow" : result_name(failure.outcome.result);
}

class StreamProxyHandle {
 public:
  StreamProxyHandle(const ProxyHandle& proxy, const moe::Layout& layout, uint32_t rank, nb::handle board,
                    const moe::StreamBoard& parts, std::vector<int64_t> rows_limits, std::vector<int32_t> routes_limits,
                    double timeout_s, nb::handle cpu, int32_t gpu)
      : board_(board, "board", HostArray::Use::kWrite, 1), gpu_(gpu) {
    const EngineRef engine = proxy.core_engine();
    if (engine->options().polling == Polling::kManual || engine->options().simulation != nullptr)
      throw UsageError(
          "rounds on a stream take an engine with a thread of its own: not polling='manual', not simulated");
    const moe::StreamProxy::Options options{
        .cpu = cpu.is_none() ? -1 : static_cast<int32_t>(to_u32(cpu, "proxy_cpu", INT32_MAX)),
        .spin_ns = engine->options().spin_ns,
        .timeout_ns = to_ns(timeout_s),
        .gpu = gpu,
        .rows_limits = std::move(rows_limits),
        .routes_limits = std::move(routes_limits)};
    const std::span<std::byte> memory(static_cast<std::byte*>(board_.data()), board_.numbers<uint8_t>().size());
    moe::Proxy& posting = proxy.get();
    const WithoutGil no_gil;  // the driver allocates words, and tests them
    proxy_ = std::make_unique<moe::StreamProxy>(engine, posting, layout, rank, memory, parts, options);
  }
  ~StreamProxyHandle() {
    if (generation_ == fork_generation) {
      const WithoutGil no_gil;
      proxy_.reset();
    } else {
      proxy_.release();  // its thread belongs to the parent
    }
  }
  StreamProxyHandle(const StreamProxyHandle&) = delete;
  StreamProxyHandle& operator=(const StreamProxyHandle&) = delete;

  moe::StreamProxy& get() const {
    if (generation_ != fork_generation) throw_forked();
    return *proxy_;
  }
  void open(uint64_t rounds, uint64_t number, uint64_t stream) const {
    moe::StreamProxy& proxy = get();
    wait_without_gil([&] {
      const bool is_begun = device::open_round({gpu_, stream}, rounds, number, proxy.told(StreamWord::kFree),
                                               proxy.words(StreamWord::kAsked), interrupted);
      return is_begun ? WaitResult::kReady : WaitResult::kInterrupted;
    });
  }
  void publish(const std::string& word, uint64_t number, uint64_t stream, uint64_t table, uint64_t count) const {
    moe::StreamProxy& proxy = get();
    const StreamWord which = word_of(word);
    const WithoutGil no_gil;
    device::publish_round({gpu_, stream}, number, proxy.words(which), {table, count});
  }
  bool await(const std::string& word, uint64_t number, uint64_t stream, uint64_t table, uint64_t count,
             bool needs_words) const {
    moe::StreamProxy& proxy = get();
    const device::ToldWords told = proxy.told(told_of(word));
    const WithoutGil no_gil;
    return device::await_round({gpu_, stream}, number, told, {table, count}, needs_words, [] { return true; });
  }
  bool tells_in_gpu() const { return get().tells_in_gpu(); }
  std::string why_pinned() const { return get().why_pinned(); }
  nb::object failure() const {
    std::optional<moe::StreamFailure> failure = get().failure();
    if (!failure) return nb::none();
    if (failure->error) std::rethrow_exception(failure->error);
    return nb::cast(std::move(*failure));
  }
  nb::list waits() const {
    nb::list found;
    for (const moe::StreamWait& wait : get().waits())
      found.append(nb::make_tuple(step_name(wait.step), wait.round, wait.ranks));
    return found;
  }
  void stop() const {
    moe::StreamProxy& proxy = get();
    const WithoutGil no_gil;
    proxy.stop();
  }
  void close() const {
    moe::StreamProxy& proxy = get();
    const WithoutGil no_gil;
    proxy.close();
  }
  static int64_t to_ns(double timeout_s) { return static_cast<int64_t>(std::min(timeout_s, 1e9) * 1e9); }

 private:
  static StreamWord word_of(const std::string& name) {
    if (name == "routes") return StreamWord::kRoutes;
    if (name == "packed") return StreamWord::kPacked;
    if (name == "returned") return StreamWord::kReturned;
    if (name == "ended") return StreamWord::kEnded;
    throw UsageError("word is '" + name + "', must be one of routes, packed, returned, ended");
  }
  static StreamWord told_of(const std::string& name) {
    if (name == "rows") return StreamWord::kRows;
    if (name == "results") return StreamWord::kResults;
    throw UsageError("word is '" + name + "', must be rows or results");
  }

  const HostArray board_;
  const int32_t gpu_;
  std::unique_ptr<moe::StreamProxy> proxy_;
  const uint32_t generation_ = fork_generation;
};

}  // namespace

void register_moe_stream_proxy(nb::module_& module) {
  nb::module_ part = module.def_submodule("moe");
  part.attr("STREAM_WORDS_BYTES") = moe::kStreamWords * sizeof(device::RoundWords);
  nb::class_<moe::StreamBoard>(part, "StreamBoard", nb::is_final(),
                               "Where things are in the board: see moe/stream_proxy.h.")
      .def("__init__", &make_board, nb::kw_only(), nb::arg("numbers"), nb::arg("routes"), nb::arg("expert_rows"),
           nb::arg("expert_offsets"), nb::arg("moves"), nb::arg("returns"), nb::arg("parity_bytes"));
  nb::class_<moe::StreamFailure>(
      part, "StreamFailure", nb::is_final(),
      "What ended the rounds. result: as of Proxy.wait, or 'overflow'; counts: int32, [groups * experts].")
      .def_prop_ro("result", &result_of)
      .def_prop_ro("rank", [](const moe::StreamFailure& self) { return self.outcome.rank; })
      .def_prop_ro("detail", [](const moe::StreamFailure& self) { return to_text(self.outcome.detail); })
      .def_prop_ro("step", [](const moe::StreamFailure& self) { return step_name(self.step); })
      .def_prop_ro("round", [](const moe::StreamFailure& self) { return self.round; })
      .def_prop_ro("counts", [](const moe::StreamFailure& self) { return to_numpy(self.counts); });
  nb::class_<StreamProxyHandle>(part, "StreamProxy", nb::is_final())
      .def(nb::init<const ProxyHandle&, const moe::Layout&, uint32_t, nb::handle, const moe::StreamBoard&,
                    std::vector<int64_t>, std::vector<int32_t>, double, nb::handle, int32_t>(),
           nb::keep_alive<1, 2>(), nb::keep_alive<1, 3>(), nb::arg("proxy"), nb::arg("layout"), nb::arg("rank"),
           nb::arg("board"), nb::arg("parts"), nb::kw_only(), nb::arg("rows_limits"), nb::arg("routes_limits"),
           nb::arg("timeout_s"), nb::arg("cpu").none(), nb::arg("gpu"),
           nb::sig("def __init__(self, proxy: Proxy, layout: Layout, rank: int, board: object, parts: "
                   "StreamBoard, *, rows_limits: collections.abc.Sequence[int], routes_limits: "
                   "collections.abc.Sequence[int], "
                   "timeout_s: float, cpu: int | None, "
                   "gpu: int) -> None"),
           "gpu: whose streams; -1: steps are done by the calling thread.")
      .def("open", &StreamProxyHandle::open, nb::arg("rounds"), nb::arg("number"), nb::arg("stream"),
           "Launches: the next round; its number is put where `number` is.")
      .def("publish", &StreamProxyHandle::publish, nb::arg("word"), nb::arg("number"), nb::arg("stream"),
           nb::arg("table") = 0, nb::arg("count") = 0,
           "Launches: tells the thread that the round has got there: 'routes', 'packed', 'returned', 'ended'; and "
           "others "
           "by signals, so many, at the addresses that are in the table: see device/round_words.h.")
      .def(
          "wait", &StreamProxyHandle::await, nb::arg("word"), nb::arg("number"), nb::arg("stream"),
          nb::arg("table") = 0, nb::arg("count") = 0, nb::arg("needs_words") = true,
          "Launches: until the thread has got there, 'rows', 'results', if it needs_words, and other ranks by signals. "
          "Without a GPU it waits here, for 50 ms; False: not there yet, call it again.")
      .def_prop_ro("tells_in_gpu", &StreamProxyHandle::tells_in_gpu,
                   "Whether words that kernels wait for are in the memory of their GPU, by GDRCopy.")
      .def_prop_ro("why_pinned", &StreamProxyHandle::why_pinned, "Why they are in pinned memory; empty without a GPU.")
      .def("failure", &StreamProxyHandle::failure, nb::sig("def failure(self) -> StreamFailure | None"),
           "What ended the rounds. Raises what the thread met.")
      .def("waits", &StreamProxyHandle::waits, nb::sig("def waits(self) -> list[tuple[str, int, list[int]]]"),
           "Waits for other ranks that have lasted a while: of what step of which round, and whose part is missing.")
      .def(
          "set_timeout",
          [](const StreamProxyHandle& self, double timeout_s) {
            self.get().set_timeout(StreamProxyHandle::to_ns(timeout_s));
          },
          nb::arg("timeout_s"))
      .def("stop", &StreamProxyHandle::stop, "Ends the thread; nothing waits for it any more. Idempotent.")
      .def("close", &StreamProxyHandle::close,
           "Stops, and gives the GPU's memory back. No kernel that waits for it may run any more. Idempotent.");
}

}  // namespace crossrail::bindings
