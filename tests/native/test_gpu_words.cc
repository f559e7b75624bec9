// Kernels that add to watched words, by the double of CUDA's driver: its kernels run when the test says so.
#include <doctest/doctest.h>

#include <array>
#include <atomic>
#include <string>
#include <utility>
#include <vector>

#include "device/host_words.h"
#include "engine/engine.h"
#include "fake_cuda.h"
#include "util/clock.h"
#include "util/errors.h"

namespace crossrail::test {
namespace {

constexpr uint64_t kWords = 512;

struct alignas(4096) Page {
  std::atomic<uint64_t> words[kWords]{};
};

struct Rig {
  uint64_t handle(int gpu = 0) { return reinterpret_cast<uint64_t>(&streams.at(static_cast<size_t>(gpu))); }
  // What waits on that stream.
  std::vector<FakeKernels::Launch> take(int gpu = 0) {
    std::vector<FakeKernels::Launch> taken;
    for (FakeKernels::Launch launch{}; cuda.kernels.take(&streams.at(static_cast<size_t>(gpu)), &launch);)
      taken.push_back(launch);
    return taken;
  }
  void run(const std::vector<FakeKernels::Launch>& launches) {
    for (const FakeKernels::Launch& launch : launches) cuda.kernels.run(launch);
  }
  template <typename Error>
  std::string refusal(uint64_t stream, int gpu = -1) {
    try {
      adder.add(&page.words[0], 1, stream, gpu);
    } catch (const Error& error) {
      return error.what();
    }
    return "not refused";
  }

  FakeCuda cuda;
  std::array<FakeKernels::Stream, 2> streams{FakeKernels::Stream{.gpu = 0}, FakeKernels::Stream{.gpu = 1}};
  Page page;
  device::HostWords adder{&page, sizeof(page)};
};

bool contains(const std::string& text, const std::string& part) { return text.find(part) != std::string::npos; }

}  // namespace

TEST_CASE("gpu words: a kernel adds when it runs, not when it is launched, to that word alone") {
  Rig rig;
  rig.adder.add(&rig.page.words[3], 5, rig.handle(), -1);
  rig.adder.add(&rig.page.words[511], ~uint64_t{0}, rig.handle(), -1);
  CHECK(rig.page.words[3] == 0);

  rig.run(rig.take());

  for (uint64_t i = 0; i < kWords; ++i) {
    CAPTURE(i);
    CHECK(rig.page.words[i] == (i == 3 ? 5 : i == 511 ? ~uint64_t{0} : 0));
  }
  CHECK(rig.cuda.pinned() == 1);  // once, and until the end: FakeCuda looks
}

TEST_CASE("gpu words: the kernel is loaded once a GPU, and streams of either GPU add") {
  Rig rig;
  for (int round = 0; round < 3; ++round) {
    for (const int gpu : {0, 1}) rig.adder.add(&rig.page.words[0], 1, rig.handle(gpu), round == 0 ? gpu : -1);
  }
  CHECK(rig.cuda.kernels.loads <= 2);
  const uint32_t loads = rig.cuda.kernels.loads;
  Page other;
  device::HostWords second(&other, sizeof(other));
  second.add(&other.words[0], 1, rig.handle(1), 1);
  CHECK(rig.cuda.kernels.loads == loads);

  CHECK(rig.take(0).size() == 3);
  rig.run(rig.take(1));
  CHECK(rig.page.words[0] == 3);
  CHECK(other.words[0] == 1);
}

TEST_CASE("gpu words: launches go into a graph that is captured, and what comes before them does not break it") {
  Rig rig;
  rig.cuda.kernels.begin_capture();
  rig.adder.add(&rig.page.words[0], 2, rig.handle(), -1);  // the first: it pins, and loads unless another test has
  const std::vector<FakeKernels::Launch> graph = rig.take();
  CHECK(rig.cuda.kernels.end_capture());
  REQUIRE(graph.size() == 1);

  for (int replay = 1; replay <= 3; ++replay) {
    rig.run(graph);
    CHECK(rig.page.words[0] == static_cast<uint64_t>(2 * replay));
  }
}

TEST_CASE("gpu words: a default stream is the current GPU's") {
  Rig rig;
  CHECK(contains(rig.refusal<TransportError>(0), "make it current first"));

  FakeGpu::context_current = rig.cuda.kernels.context(1);
  rig.adder.add(&rig.page.words[0], 7, 0, -1);
  CHECK(FakeGpu::context_current == rig.cuda.kernels.context(1));
  FakeGpu::context_current = nullptr;
  rig.adder.add(&rig.page.words[0], 1, 0, 0);

  for (const auto& [gpu, delta] : {std::pair{1, 7}, std::pair{0, 1}}) {
    FakeKernels::Launch launch{};
    REQUIRE(rig.cuda.kernels.take(rig.cuda.kernels.default_stream(gpu), &launch));
    CHECK(launch.delta == static_cast<uint64_t>(delta));
  }
}

TEST_CASE("gpu words: refusals say what helps, and nothing is launched") {
  Rig rig;
  FakeKernels& kernels = rig.cuda.kernels;
  CHECK(contains(rig.refusal<UsageError>(rig.handle(), 7), "GPU 7, and this process sees 2"));

  rig.streams[0].is_of_another_context = true;
  CHECK(contains(rig.refusal<UsageError>(rig.handle()), "another context"));
  CHECK(contains(rig.refusal<TransportError>(rig.handle(), 0), "CUDA error 400"));
  rig.streams[0].is_of_another_context = false;

  kernels.launch_error = 700;
  CHECK(contains(rig.refusal<TransportError>(rig.handle()), "no earlier kernel may have failed"));
  kernels.launch_error = 0;

  Page other;
  device::HostWords refused(&other, sizeof(other));
  kernels.pin_error = 2;
  try {
    refused.add(&other.words[0], 1, rig.handle(), -1);
    FAIL("not refused");
  } catch (const TransportError& error) {
    CHECK(error.call() == "cuMemHostRegister");
    CHECK(error.code() == 2);
    CHECK(contains(error.remedy(), "ulimit -l"));
  }
  kernels.pin_error = 0;
  refused.add(&other.words[0], 1, rig.handle(), -1);  // again, after that

  CHECK(rig.take().size() == 1);
  CHECK(FakeGpu::contexts_current == 0);
}

TEST_CASE("gpu words: a GPU that is too old, or a driver that does not take the kernel") {
  // Of its own, since what a driver has loaded is kept.
  Rig rig;
  const device::Driver* const usual = device::find_driver();
  static device::Driver driver;
  driver = *usual;
  driver.stream_context = nullptr;
  device::replace_driver(&driver);
  FakeKernels& kernels = rig.cuda.kernels;

  CHECK(contains(rig.refusal<TransportError>(rig.handle()), "cannot tell which GPU a stream is of"));
  kernels.capability = 6;
  CHECK(contains(rig.refusal<TransportError>(rig.handle(), 0), "there is 6.x on GPU 0"));
  kernels.capability = 9;
  kernels.load_error = 222;
  CHECK(contains(rig.refusal<TransportError>(rig.handle(), 0), "CUDA error 222"));
  kernels.load_error = 0;
  CHECK(rig.take().empty());
  rig.adder.add(&rig.page.words[0], 1, rig.handle(), 0);
  CHECK(rig.take().size() == 1);
  CHECK(kernels.loads == 1);
  device::replace_driver(usual);
}

TEST_CASE("gpu words: an engine's watcher is told, and its word outlives the engine") {
  Rig rig;
  EngineOptions options;
  options.name = "here";
  options.transports = {TransportKind::kShm};
  const EngineRef engine = Engine::open(options);
  const auto notifier = Ref<Notifier>::adopt(new Notifier());
  Ref<Watcher> watcher = engine->alloc_watcher(notifier.get(), 9);
  watcher->add_on(rig.handle(), -1, 3);
  CHECK(watcher->value() == 0);
  const std::vector<FakeKernels::Launch> graph = rig.take();

  rig.run(graph);
  std::vector<uint64_t> told;
  for (const Deadline end = deadline_in(20); told.empty() && now_ns() < end;)
    notifier->drain([&](uint64_t cookie) { told.push_back(cookie); });
  CHECK(told == std::vector<uint64_t>{9});
  CHECK(watcher->take().new_value == 3);

  watcher->close();
  engine->close(deadline_in(5));
  rig.run(graph);
  CHECK(watcher->value() == 6);
  CHECK_FALSE(notifier->has_posts());
}

TEST_CASE("gpu: the driver refuses a GPU that is not there, whatever its number") {
  const FakeCuda cuda;
  for (const int gpu : {-1, 2, 1 << 30}) {
    const auto make_current = [&] { const device::CurrentContext current(*device::find_driver(), gpu); };
    CHECK_THROWS_AS(make_current(), TransportError);
  }
}

}  // namespace crossrail::test
