// crossrail._core.bench: the cost of posting a round's writes (bench/moe_posting.h).
#include <nanobind/nanobind.h>
#include <nanobind/stl/vector.h>

#include <vector>

#include "bench/moe_posting.h"
#include "bindings/bench_arguments.h"
#include "bindings/bindings.h"

using namespace nanobind::literals;

namespace crossrail::bindings {
namespace {

using bench::MoePosting;

template <std::vector<int64_t> (MoePosting::*measure)(uint32_t, bench::Guard&)>
std::vector<int64_t> timed(MoePosting& posting, uint32_t rounds, double timeout_s) {
  nb::gil_scoped_release released;
  bench::Guard guard = make_guard("posting of MoE rounds", timeout_s);
  return (posting.*measure)(rounds, guard);
}

template <std::vector<int64_t> (MoePosting::*measure)(int32_t, uint32_t, bench::Guard&)>
std::vector<int64_t> timed_on(MoePosting& posting, int32_t cpu, uint32_t rounds, double timeout_s) {
  nb::gil_scoped_release released;
  bench::Guard guard = make_guard("posting of MoE rounds", timeout_s);
  return (posting.*measure)(cpu, rounds, guard);
}

}  // namespace

void register_bench_moe(nb::module_& module) {
  nb::class_<MoePosting>(module, "MoePosting")
      .def(nb::init<>())
      .def("routes", &timed<&MoePosting::routes>, "rounds"_a, nb::kw_only(), "timeout_s"_a = 60.0)
      .def("rows", &timed<&MoePosting::rows>, "rounds"_a, nb::kw_only(), "timeout_s"_a = 60.0)
      .def("results", &timed<&MoePosting::results>, "rounds"_a, nb::kw_only(), "timeout_s"_a = 60.0)
      .def("first_write_by_caller", &timed<&MoePosting::first_write_by_caller>, "rounds"_a, nb::kw_only(),
           "timeout_s"_a = 60.0)
      .def("first_write_by_thread", &timed_on<&MoePosting::first_write_by_thread>, "cpu"_a, "rounds"_a, nb::kw_only(),
           "timeout_s"_a = 60.0)
      .def("first_write_of_stream", &timed_on<&MoePosting::first_write_of_stream>, "cpu"_a, "rounds"_a, nb::kw_only(),
           "timeout_s"_a = 60.0);
}

}  // namespace crossrail::bindings
