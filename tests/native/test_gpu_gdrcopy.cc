// Memory of a GPU that the CPU writes in place: device/gdrcopy.h, by doubles of the driver and of GDRCopy.
#include <doctest/doctest.h>

#include <array>
#include <cerrno>
#include <cstdlib>
#include <cstring>
#include <string>

#include "device/gdrcopy.h"
#include "device/round_words.h"
#include "fake_cuda.h"
#include "fake_gdrcopy.h"
#include "util/errors.h"

namespace crossrail::test {
namespace {

std::byte* in_gpu(FakeCuda& cuda, const device::BarMemory& memory) {
  return cuda.bytes_at(reinterpret_cast<std::byte*>(memory.address()));  // NOLINT(performance-no-int-to-ptr)
}

std::string refusal_of_memory() {
  try {
    const device::BarMemory memory(0, 384);
  } catch (const TransportError& error) {
    return error.what();
  }
  return "not refused";
}

}  // namespace

TEST_CASE("gpu gdrcopy: what the CPU writes is in the GPU's memory, which begins with zeros") {
  FakeCuda cuda;
  const FakeGdrcopy gdrcopy;
  {
    const device::BarMemory memory(1, 384);
    CHECK(memory.address() % 65536 == 0);
    const std::array<std::byte, 384> zeros{};
    CHECK(std::memcmp(in_gpu(cuda, memory), zeros.data(), zeros.size()) == 0);
    std::memset(memory.mapped(), 7, 384);
    device::bar_fence();
    CHECK(in_gpu(cuda, memory)[383] == std::byte{7});
    CHECK(cuda.allocated() == 1);
  }
  CHECK(cuda.allocated() == 0);
}

TEST_CASE("gpu gdrcopy: what is refused, or does not arrive, is said, and all is given back") {
  FakeCuda cuda;
  FakeGdrcopy gdrcopy;
  const auto refuses = [&](int* error, const char* what) {
    *error = EPERM;
    const std::string refusal = refusal_of_memory();
    CHECK(refusal.find(what) != std::string::npos);
    CHECK(refusal.find(std::strerror(EPERM)) != std::string::npos);
    *error = 0;
    CHECK(cuda.allocated() == 0);
  };
  refuses(&gdrcopy.open_error, "GDRCopy's driver cannot be opened");
  refuses(&gdrcopy.pin_error, "GDRCopy cannot pin memory of GPU 0");
  refuses(&gdrcopy.map_error, "GDRCopy cannot map memory of GPU 0");
  cuda.allocate_error = 2;
  CHECK(refusal_of_memory().find("cannot allocate words on GPU 0") != std::string::npos);
  cuda.allocate_error = 0;
  cuda.copies_good = 0;
  cuda.copy_error = 700;
  CHECK(refusal_of_memory().find("cannot read words on GPU 0") != std::string::npos);
  cuda.copy_error = 0;
  CHECK(cuda.allocated() == 0);
  gdrcopy.loses_stores = true;
  CHECK(refusal_of_memory().find("does not arrive on GPU 0") != std::string::npos);
  CHECK(cuda.allocated() == 0);
}

TEST_CASE("gpu gdrcopy: without the library it is said which one is missing") {
  const FakeCuda cuda;
  std::string why;
  if (std::getenv("CROSSRAIL_LIBGDRAPI") != nullptr) return;  // it was asked for another
  if (device::find_gdrcopy(&why) != nullptr) return;          // this machine has it
  CHECK(why.find("libgdrapi.so.2") != std::string::npos);
  CHECK(refusal_of_memory().find("libgdrapi.so.2") != std::string::npos);
}

TEST_CASE("gpu gdrcopy: kernels of rounds wait for words there") {
  FakeCuda cuda;
  const FakeGdrcopy gdrcopy;
  FakeKernels::Stream stream{.gpu = 0};
  struct alignas(4096) Page {
    device::RoundWords asked;
    std::array<char, 4096 - sizeof(device::RoundWords)> rest{};
  } page;
  REQUIRE(cuda.kernels.pinned(reinterpret_cast<uint64_t>(&page), sizeof page, 3) == 0);
  uint64_t rounds = 0;
  uint64_t number = 0;
  const auto address = [](const void* at) { return reinterpret_cast<uint64_t>(at); };
  {
    const device::BarMemory memory(0, 2 * sizeof(device::RoundWords));
    auto* const words = new (memory.mapped()) std::array<device::RoundWords, 2>;
    const device::RoundStream on{0, address(&stream)};
    const device::ToldWords free{(*words)[0], memory.address()};
    const device::ToldWords rows{(*words)[1], memory.address() + sizeof(device::RoundWords)};
    device::open_round(on, address(&rounds), address(&number), free, page.asked);
    device::await_round(on, address(&number), rows);
    FakeKernels::Launch open{};
    FakeKernels::Launch await{};
    REQUIRE(cuda.kernels.take(&stream, &open));
    REQUIRE(cuda.kernels.take(&stream, &await));
    device::publish((*words)[0], 1);
    CHECK(cuda.kernels.run(open));
    CHECK(number == 1);
    CHECK(device::has_come(page.asked, 1));
    CHECK_FALSE(cuda.kernels.run(await));
    device::publish((*words)[1], 1);
    CHECK(cuda.kernels.run(await));
  }
}

}  // namespace crossrail::test
