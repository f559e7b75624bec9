// crossrail._core.moe: rounds whose steps are kernels on a stream. See moe/stream_proxy.h and device/round_words.h.
#include <nanobind/nanobind.h>
#include <nanobind/stl/array.h>
#include <nanobind/stl/string.h>

#include <algorithm>
#include <array>
#include <memory>
#include <string>
#include <utility>

#include "bindings/bindings.h"
#include "bindings/convert.h"
#include "bindings/fork.h"
#include "bindings/moe_arrays.h"
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

class StreamProxyHandle {
 public:
  StreamProxyHandle(const ProxyHandle& proxy, const moe::Layout& layout, uint32_t rank, nb::handle board,
                    const std::array<uint64_t, 7>& parts, int32_t rows_max, int32_t routes_max, double timeout_s,
                    nb::handle cpu, int32_t gpu)
      : board_(board, "board", MoeArray::Use::kWrite, 1), gpu_(gpu) {
    const EngineRef& engine = proxy.core_engine();
    if (engine->options().polling == Polling::kManual || engine->options().stage != nullptr)
      throw UsageError(
          "rounds on a stream take an engine with a thread of its own: not polling='manual', not simulated");
    const auto& [numbers, routes, expert_rows, expert_offsets, moves, returns, parity] = parts;
    proxy_ = std::make_unique<moe::StreamProxy>(
        engine, proxy.get(), layout, rank,
        std::span<std::byte>(static_cast<std::byte*>(board_.data()), board_.numbers<uint8_t>().size()),
        moe::StreamBoard{.numbers = numbers,
                         .routes = routes,
                         .expert_rows = expert_rows,
                         .expert_offsets = expert_offsets,
                         .moves = moves,
                         .returns = returns,
                         .parity_bytes = parity},
        moe::StreamProxy::Options{.cpu = cpu.is_none() ? -1 : static_cast<int32_t>(to_u32(cpu, "proxy_cpu", INT32_MAX)),
                                  .spin_ns = engine->options().spin_ns,
                                  .timeout_ns = to_ns(timeout_s),
                                  .rows_max = rows_max,
                                  .routes_max = routes_max});
  }
  ~StreamProxyHandle() {
    if (generation_ == fork_generation) {
      const WithoutGil no_gil;
      proxy_.reset();
    } else {
      proxy_.release();  // its thread is the parent's
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
    const WithoutGil no_gil;
    device::open_round({gpu_, stream}, rounds, number, proxy.free_and_asked());
  }
  void publish(const std::string& word, uint64_t number, uint64_t stream, uint64_t table, uint64_t count) const {
    moe::StreamProxy& proxy = get();
    const StreamWord which = word_of(word);
    const WithoutGil no_gil;
    device::publish_round({gpu_, stream}, number, proxy.words(which), {table, count});
  }
  void await(const std::string& word, uint64_t number, uint64_t stream, uint64_t table, uint64_t count,
             bool needs_words) const {
    moe::StreamProxy& proxy = get();
    const StreamWord which = word_of(word);
    const WithoutGil no_gil;
    device::await_round({gpu_, stream}, number, proxy.words(which), {table, count}, needs_words);
  }
  nb::object failure() const {
    const std::optional<moe::StreamFailure> failure = get().failure();
    if (!failure) return nb::none();
    if (failure->error) std::rethrow_exception(failure->error);
    const std::string result = failure->is_over ? "overflow" : result_name(failure->outcome.result);
    return nb::make_tuple(result, failure->outcome.rank, to_text(failure->outcome.detail), step_name(failure->step),
                          failure->round, to_numpy(failure->counts));
  }
  void stop() const {
    moe::StreamProxy& proxy = get();
    const WithoutGil no_gil;
    proxy.stop();
  }
  static int64_t to_ns(double timeout_s) { return static_cast<int64_t>(std::min(timeout_s, 1e9) * 1e9); }

 private:
  static StreamWord word_of(const std::string& name) {
    if (name == "routes") return StreamWord::kRoutes;
    if (name == "packed") return StreamWord::kPacked;
    if (name == "returned") return StreamWord::kReturned;
    if (name == "ended") return StreamWord::kEnded;
    if (name == "rows") return StreamWord::kRows;
    if (name == "results") return StreamWord::kResults;
    throw UsageError("word is '" + name + "', must be one of routes, packed, returned, ended, rows, results");
  }

  const MoeArray board_;
  const int32_t gpu_;
  std::unique_ptr<moe::StreamProxy> proxy_;
  const uint32_t generation_ = fork_generation;
};

}  // namespace

void register_moe_stream_proxy(nb::module_& module) {
  nb::module_ part = module.def_submodule("moe");
  part.attr("STREAM_WORDS_BYTES") = moe::kStreamWords * sizeof(device::RoundWords);
  nb::class_<StreamProxyHandle>(part, "StreamProxy", nb::is_final())
      .def(nb::init<const ProxyHandle&, const moe::Layout&, uint32_t, nb::handle, const std::array<uint64_t, 7>&,
                    int32_t, int32_t, double, nb::handle, int32_t>(),
           nb::keep_alive<1, 2>(), nb::keep_alive<1, 3>(), nb::arg("proxy"), nb::arg("layout"), nb::arg("rank"),
           nb::arg("board"), nb::arg("parts"), nb::arg("rows_max"), nb::arg("routes_max"), nb::arg("timeout_s"),
           nb::arg("cpu").none(), nb::arg("gpu"),
           nb::sig("def __init__(self, proxy: Proxy, layout: Layout, rank: int, board: object, parts: "
                   "collections.abc.Sequence[int], rows_max: int, routes_max: int, timeout_s: float, cpu: int | None, "
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
          "Launches: until the thread has got there, 'rows', 'results', if it needs_words, and other ranks by signals.")
      .def("failure", &StreamProxyHandle::failure,
           nb::sig("def failure(self) -> tuple[str, int, str, str, int, typing.Any] | None"),
           "What ended the rounds: result, rank, detail, step, round, counts. Raises what the thread met.")
      .def(
          "set_timeout",
          [](const StreamProxyHandle& self, double timeout_s) {
            self.get().set_timeout(StreamProxyHandle::to_ns(timeout_s));
          },
          nb::arg("timeout_s"))
      .def("stop", &StreamProxyHandle::stop, "Ends the thread; nothing waits for it any more. Idempotent.");
}

}  // namespace crossrail::bindings
