// Kernels of rounds (device/round_words.h), by the double of CUDA's driver and without a GPU.
#include <doctest/doctest.h>

#include <algorithm>
#include <array>
#include <string>
#include <vector>

#include "device/round_words.h"
#include "fake_cuda.h"
#include "util/errors.h"

namespace crossrail::test {
namespace {

struct alignas(4096) Page {
  std::array<device::RoundWords, 2> free_and_asked;
  device::RoundWords packed;
  std::array<char, 4096 - 3 * sizeof(device::RoundWords)> rest{};
};

uint64_t address(const void* at) { return reinterpret_cast<uint64_t>(at); }

struct Rig {
  device::RoundStream on_gpu() { return {0, address(&stream)}; }
  FakeKernels::Launch taken() {
    FakeKernels::Launch launch{};
    REQUIRE(cuda.kernels.take(&stream, &launch));
    return launch;
  }

  FakeCuda cuda;
  FakeKernels::Stream stream{.gpu = 0};
  Page page;
  uint64_t rounds = 0;
  uint64_t number = 0;
};

}  // namespace

TEST_CASE("gpu rounds: without a GPU steps are done by the caller") {
  Page page;
  uint64_t rounds = 6;
  uint64_t number = 0;
  device::publish(page.free_and_asked[0], 7);
  const device::RoundStream here;
  device::open_round(here, address(&rounds), address(&number), page.free_and_asked[0], page.free_and_asked[1]);
  CHECK(rounds == 7);
  CHECK(number == 7);
  CHECK(page.free_and_asked[1][1].round == 7);
  CHECK(page.free_and_asked[1][0].round == 0);
  device::publish_round(here, address(&number), page.packed);
  CHECK(page.packed[1].round == 7);
  CHECK_FALSE(device::has_come(page.packed, 8));
  device::await_round(here, address(&number), page.packed);
}

TEST_CASE("gpu rounds: a caller that waits may be interrupted, and wait again") {
  Page page;
  uint64_t rounds = 6;
  uint64_t number = 0;
  const device::RoundStream here;
  int asked = 0;
  const auto interrupted = [&] { return ++asked == 2; };
  CHECK_FALSE(device::open_round(here, address(&rounds), address(&number), page.free_and_asked[0],
                                 page.free_and_asked[1], interrupted));
  CHECK(asked == 2);
  CHECK(number == 7);
  asked = 0;
  CHECK_FALSE(device::await_round(here, address(&number), page.packed, {}, true, interrupted));
  CHECK(asked == 2);
  CHECK(number == 7);
  const auto comes = [&] {
    device::publish(page.packed, 7);
    return false;
  };
  CHECK(device::await_round(here, address(&number), page.packed, {}, true, comes));
}

TEST_CASE("gpu rounds: kernels take the number when they run, and know the words by the GPU's address") {
  Rig rig;
  REQUIRE(rig.cuda.kernels.pinned(address(&rig.page), sizeof(Page), 3) == 0);
  device::open_round(rig.on_gpu(), address(&rig.rounds), address(&rig.number), rig.page.free_and_asked[0],
                     rig.page.free_and_asked[1]);
  device::publish_round(rig.on_gpu(), address(&rig.number), rig.page.packed);
  device::await_round(rig.on_gpu(), address(&rig.number), rig.page.packed);
  CHECK(rig.number == 0);
  const FakeKernels::Launch open = rig.taken();
  const FakeKernels::Launch publish = rig.taken();
  const FakeKernels::Launch await = rig.taken();
  for (uint64_t round = 1; round <= 3; ++round) {  // as a graph that is replayed
    CHECK_FALSE(rig.cuda.kernels.run(open));
    CHECK(rig.number == round);
    CHECK(device::has_come(rig.page.free_and_asked[1], round));
    CHECK_FALSE(rig.cuda.kernels.run(await));
    CHECK(rig.cuda.kernels.run(publish));
    CHECK(device::has_come(rig.page.packed, round));
    CHECK(rig.cuda.kernels.run(await));
  }
  CHECK(rig.page.packed[0].round == 2);
  CHECK(rig.page.packed[1].round == 3);
}

TEST_CASE("gpu rounds: signals of others are told and awaited, with the words or without") {
  Rig rig;
  REQUIRE(rig.cuda.kernels.pinned(address(&rig.page), sizeof(Page), 3) == 0);
  std::array<uint64_t, 80> even{};  // more than a warp has threads
  std::array<uint64_t, 80> odd{};
  std::vector<uint64_t> table;
  for (std::array<uint64_t, 80>* half : {&even, &odd}) {
    for (uint64_t& signal : *half) table.push_back(address(&signal));
  }
  const device::Signals all{address(table.data()), 80};
  const auto told = [](const std::array<uint64_t, 80>& half, uint64_t round) {
    return std::all_of(half.begin(), half.end(), [&](uint64_t signal) { return signal == round; });
  };
  for (const device::RoundStream& on : {device::RoundStream{}, rig.on_gpu()}) {
    const auto run = [&] { return on.gpu < 0 || rig.cuda.kernels.run(rig.taken()); };
    const uint64_t first = on.gpu < 0 ? 3 : 5;
    for (rig.number = first; rig.number < first + 2; ++rig.number) {
      device::publish_round(on, address(&rig.number), rig.page.packed, all);
      CHECK(run());
      CHECK(told(rig.number % 2 == 0 ? even : odd, rig.number));
      CHECK(device::has_come(rig.page.packed, rig.number));
      device::await_round(on, address(&rig.number), rig.page.packed, all);
      CHECK(run());
      device::await_round(on, address(&rig.number), rig.page.free_and_asked[0], all, false);  // whose words stand at 0
      CHECK(run());
    }
    CHECK(told(even, first + 1));
    CHECK(told(odd, first));
  }
  rig.number = 7;
  device::await_round(rig.on_gpu(), address(&rig.number), rig.page.packed, all, false);
  const FakeKernels::Launch await = rig.taken();
  std::fill(odd.begin(), odd.end(), 7);
  odd[79] = 5;
  CHECK_FALSE(rig.cuda.kernels.run(await));
  odd[79] = 7;
  CHECK(rig.cuda.kernels.run(await));
}

TEST_CASE("gpu rounds: where the rounds have ended, nothing is signalled, and no signal is waited for") {
  Rig rig;
  REQUIRE(rig.cuda.kernels.pinned(address(&rig.page), sizeof(Page), 3) == 0);
  std::array<uint64_t, 2> signals{};
  const std::array<uint64_t, 2> table{address(&signals[0]), address(&signals[1])};
  const device::Signals one{address(table.data()), 1};
  for (const device::RoundStream& on : {device::RoundStream{}, rig.on_gpu()}) {
    const auto run = [&] { return on.gpu < 0 || rig.cuda.kernels.run(rig.taken()); };
    for (device::RoundWord& word : rig.page.packed) word.round = device::kNoRound;
    for (const bool needs_words : {true, false}) {
      rig.number = 3;
      device::await_round(on, address(&rig.number), rig.page.packed, one, needs_words);
      CHECK(run());
      CHECK(rig.number == device::kNoRound);
      device::publish_round(on, address(&rig.number), rig.page.free_and_asked[0], one);
      CHECK(run());
    }
  }
  CHECK(signals == std::array<uint64_t, 2>{});
}

TEST_CASE("gpu rounds: where nobody publishes any more, nobody waits, and the number says so") {
  Rig rig;
  REQUIRE(rig.cuda.kernels.pinned(address(&rig.page), sizeof(Page), 3) == 0);
  for (const device::RoundStream& on : {device::RoundStream{}, rig.on_gpu()}) {
    rig.number = 3;
    for (device::RoundWord& word : rig.page.packed) word.round = device::kNoRound;
    device::await_round(on, address(&rig.number), rig.page.packed);
    if (on.gpu >= 0) CHECK(rig.cuda.kernels.run(rig.taken()));
    CHECK(rig.number == device::kNoRound);
  }
}

TEST_CASE("gpu rounds: what the driver refuses is said, and nothing is launched") {
  Rig rig;
  const auto refusal = [&] {
    try {
      device::publish_round(rig.on_gpu(), address(&rig.number), rig.page.packed);
    } catch (const TransportError& error) {
      return std::string(error.what());
    }
    return std::string("not refused");
  };
  CHECK(refusal().find("the GPU does not reach the words of rounds") != std::string::npos);
  REQUIRE(rig.cuda.kernels.pinned(address(&rig.page), sizeof(Page), 3) == 0);
  rig.cuda.kernels.launch_error = 700;
  CHECK(refusal().find("cannot launch a kernel of rounds on GPU 0") != std::string::npos);
  FakeKernels::Launch launch{};
  CHECK_FALSE(rig.cuda.kernels.take(&rig.stream, &launch));
}

TEST_CASE("gpu rounds: launches are captured, and nothing that breaks a capture is called") {
  Rig rig;
  REQUIRE(rig.cuda.kernels.pinned(address(&rig.page), sizeof(Page), 3) == 0);
  rig.cuda.kernels.begin_capture();
  device::open_round(rig.on_gpu(), address(&rig.rounds), address(&rig.number), rig.page.free_and_asked[0],
                     rig.page.free_and_asked[1]);
  device::publish_round(rig.on_gpu(), address(&rig.number), rig.page.packed);
  device::await_round(rig.on_gpu(), address(&rig.number), rig.page.packed);
  CHECK(rig.cuda.kernels.end_capture());
}

}  // namespace crossrail::test
