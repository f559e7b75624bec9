// Allocations of other processes that are mapped here, by the double of CUDA's driver. Writes to them:
// tests/engine/test_gpu_ipc.py.
#include <doctest/doctest.h>
#include <fcntl.h>
#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cstring>
#include <memory>

#include "device/ipc.h"
#include "fake_cuda.h"
#include "util/errors.h"

namespace crossrail::test {
namespace {

constexpr uint64_t kBytes = 8192;

// A process that has what is open here now, and does nothing.
struct Twin {
  Twin() : pid(::fork()) {
    if (pid == 0) {
      ::pause();
      ::_exit(0);
    }
  }
  ~Twin() {
    ::kill(pid, SIGKILL);
    ::waitpid(pid, nullptr, 0);
  }
  Twin(const Twin&) = delete;
  Twin& operator=(const Twin&) = delete;
  const pid_t pid;
};

// The range as the twin would share it.
device::SharedRange share_of(const Twin& twin, const device::SharedRange& ours) {
  device::SharedRange theirs = ours;
  static_assert(sizeof twin.pid == sizeof(int));
  std::memcpy(theirs.handle.data(), &twin.pid, sizeof twin.pid);  // the first field of the double's handles
  return theirs;
}

}  // namespace

TEST_CASE("gpu ipc: an allocation is mapped once, and as long as somebody has it") {
  FakeCuda cuda;
  std::byte* const memory = cuda.allocate(kBytes);
  const device::SharedRange ours = device::share(device::GpuMemory(memory + 256, 4096, false));
  REQUIRE(ours.is_shared());
  CHECK(ours.offset == 256);
  CHECK_THROWS_WITH_AS(device::ImportedMemory(ours, 4096, 0), doctest::Contains("201"), TransportError);  // our own

  const Twin twin;
  const device::SharedRange theirs = share_of(twin, ours);
  auto first = std::make_unique<device::ImportedMemory>(theirs, 4096, 0);
  const auto second = std::make_unique<device::ImportedMemory>(theirs, 4096, 0);
  CHECK(first->base() == second->base());
  CHECK(cuda.imports() == 1);
  *cuda.bytes_at(first->base() + 44) = std::byte{7};
  CHECK(*cuda.bytes_at(memory + 300) == std::byte{7});
  first.reset();
  CHECK(cuda.imports() == 1);
  CHECK(*cuda.bytes_at(second->base() + 44) == std::byte{7});
}

TEST_CASE("gpu ipc: what is shared, mapped and let go while somebody captures a graph does not break it") {
  FakeCuda cuda;
  std::byte* const memory = cuda.allocate(kBytes);
  const Twin twin;
  cuda.kernels.begin_capture();
  const device::SharedRange ours = device::share(device::GpuMemory(memory, 4096, true));
  REQUIRE(ours.is_shared());
  device::ImportedMemory(share_of(twin, ours), 4096, 0);
  device::flush_writes(0);
  CHECK(cuda.imports() == 0);
  CHECK(cuda.kernels.end_capture());
}

TEST_CASE("gpu ipc: another allocation of a handle that is still mapped is not taken for the first") {
  FakeCuda cuda;
  const device::SharedRange ours = device::share(device::GpuMemory(cuda.allocate(kBytes), 4096, false));
  const Twin twin;
  const device::SharedRange theirs = share_of(twin, ours);
  device::SharedRange later = theirs;
  ++later.allocation_id;
  {
    const device::ImportedMemory first(theirs, 4096, 0);
    CHECK_THROWS_WITH_AS(device::ImportedMemory(later, 4096, 0), doctest::Contains("freed"), TransportError);
  }
  const device::ImportedMemory second(later, 4096, 0);
  CHECK(cuda.imports() == 1);
}

TEST_CASE("gpu ipc: what cannot be shared says why") {
  FakeCuda cuda;
  std::byte* const memory = cuda.allocate(kBytes);
  cuda.ipc_error = 801;
  const device::SharedRange refused = device::share(device::GpuMemory(memory, 4096, false));
  CHECK(!refused.is_shared());
  CHECK(refused.why_not.find("801") != std::string::npos);
  cuda.ipc_error = 0;
  device::SharedRange garbage;
  garbage.by = device::SharedBy::kIpc;
  garbage.allocation_id = 1;
  garbage.handle.fill(0xA5);
  CHECK_THROWS_AS(device::ImportedMemory(garbage, 4096, 0), TransportError);
  CHECK(cuda.imports() == 0);
}

TEST_CASE("gpu ipc: a range that its owner says is longer than its allocation is not mapped") {
  FakeCuda cuda;
  const device::SharedRange ours = device::share(device::GpuMemory(cuda.allocate(kBytes) + 256, 4096, false));
  const Twin twin;
  device::SharedRange theirs = share_of(twin, ours);
  CHECK_THROWS_WITH_AS(device::ImportedMemory(theirs, kBytes, 0), doctest::Contains("past the end"), TransportError);
  theirs.offset = ~uint64_t{0};
  CHECK_THROWS_WITH_AS(device::ImportedMemory(theirs, 4096, 0), doctest::Contains("past the end"), TransportError);
  CHECK(cuda.imports() == 0);
}

}  // namespace crossrail::test
