// Memory of GPUs by CUDA's virtual memory management, by the double of its driver. Between processes:
// tests/engine/test_gpu_vmm.py.
#include <doctest/doctest.h>
#include <sys/eventfd.h>
#include <sys/mman.h>
#include <unistd.h>

#include <cstring>
#include <filesystem>
#include <functional>
#include <iterator>
#include <memory>
#include <string>
#include <thread>

#include "device/ipc.h"
#include "device/vmm.h"
#include "engine/engine.h"
#include "fake_cuda.h"
#include "util/clock.h"
#include "util/errors.h"

namespace crossrail::test {
namespace {

using device::MappedMemory;
using device::PhysicalMemory;

constexpr uint64_t kUnit = FakeVmm::kUnit;

size_t open_fds() {
  return static_cast<size_t>(std::distance(std::filesystem::directory_iterator("/proc/self/fd"), {}));
}

bool until(const std::function<bool()>& wanted) {
  for (const Deadline end = deadline_in(20); !wanted();) {
    if (now_ns() > end) return false;
    std::this_thread::yield();
  }
  return true;
}

EngineRef open(const char* name) {
  EngineOptions options;
  options.name = name;
  options.transports = {TransportKind::kShm};
  return Engine::open(options);
}

device::SharedRange share(const std::byte* base, uint64_t bytes) {
  return device::share(device::GpuMemory(const_cast<std::byte*>(base), bytes, false));
}

}  // namespace

TEST_CASE("gpu vmm: memory is there as long as somebody has it, a handle or a mapping") {
  FakeCuda cuda;
  const size_t fds = open_fds();
  auto physical = PhysicalMemory::create(0, 5000);
  CHECK(physical->length_bytes() == kUnit);
  auto first = MappedMemory::map(physical, 0);
  const auto second = MappedMemory::map(PhysicalMemory::import(physical->share(), kUnit, 0), 0);
  CHECK(first->base() != second->base());
  *cuda.bytes_at(first->base() + 5) = std::byte{7};

  physical.reset();
  first.reset();

  CHECK(*cuda.bytes_at(second->base() + 5) == std::byte{7});
  CHECK(cuda.mappings() == 1);
  CHECK(cuda.handles() == 1);
  CHECK(open_fds() == fds + 2);  // the double's own: of the handle, of the mapping
}

TEST_CASE("gpu vmm: a mapping is found by addresses in it, and by no others") {
  FakeCuda cuda;
  auto memory = MappedMemory::map(PhysicalMemory::create(0, 2 * kUnit), 0);
  const auto base = reinterpret_cast<uint64_t>(memory->base());
  CHECK(MappedMemory::find(base, 2 * kUnit) == memory);
  CHECK(MappedMemory::find(base + kUnit, kUnit) == memory);
  CHECK(MappedMemory::find(base + kUnit, kUnit + 1) == nullptr);
  CHECK(MappedMemory::find(base + 2 * kUnit, 1) == nullptr);
  CHECK(MappedMemory::find(base - 1, 1) == nullptr);
  CHECK(MappedMemory::find(base + 1, ~uint64_t{0}) == nullptr);
  memory.reset();
  CHECK(MappedMemory::find(base, 1) == nullptr);
}

TEST_CASE("gpu vmm: cleared memory is zero, also while somebody captures a graph, whose kernels run on") {
  FakeCuda cuda;
  cuda.kernels.begin_capture();
  cuda.kernels_run = true;
  {
    const auto memory = MappedMemory::map(PhysicalMemory::create(1, kUnit), 1);
    CHECK(*cuda.bytes_at(memory->base() + kUnit / 2) == std::byte{'d'});
    memory->clear();
    CHECK(*cuda.bytes_at(memory->base() + kUnit / 2) == std::byte{0});
  }
  cuda.kernels_run = false;
  CHECK(cuda.kernels.end_capture());
}

TEST_CASE("gpu vmm: what kernels may use is unmapped once they have ended, and who drops it does not wait") {
  FakeCuda cuda;
  auto memory = MappedMemory::map(PhysicalMemory::create(0, kUnit), 0);
  auto another = MappedMemory::map(PhysicalMemory::create(0, kUnit), 0);
  memory->give_to_kernels(0);
  another->give_to_kernels(0);
  cuda.kernels_run = true;
  const std::byte* const base = memory->base();

  memory.reset();
  another.reset();

  std::this_thread::sleep_for(std::chrono::milliseconds(20));
  CHECK(cuda.mappings() == 2);
  *cuda.bytes_at(base) = std::byte{1};  // as a kernel does
  cuda.kernels_run = false;
  CHECK(until([&] { return cuda.mappings() == 0 && cuda.handles() == 0; }));
}

TEST_CASE("gpu vmm: no mapping ends while somebody captures a graph, which no context can be waited for in") {
  FakeCuda cuda;
  auto memory = MappedMemory::map(PhysicalMemory::create(0, kUnit), 0);
  memory->give_to_kernels(0);
  cuda.kernels.begin_capture();
  memory.reset();
  std::this_thread::sleep_for(std::chrono::milliseconds(60));
  CHECK(cuda.mappings() == 1);
  CHECK(cuda.kernels.end_capture());
  CHECK(until([&] { return cuda.mappings() == 0 && cuda.handles() == 0; }));
}

TEST_CASE("gpu vmm: a GPU that does not reach the memory is refused, and nothing is left of the attempt") {
  FakeCuda cuda;
  cuda.out_of_reach = 1;
  const auto physical = PhysicalMemory::create(0, kUnit);
  CHECK_THROWS_WITH_AS(MappedMemory::map(physical, 1), doctest::Contains("CUDA error 217"), TransportError);
  CHECK(cuda.mappings() == 0);
  auto memory = MappedMemory::map(physical, 0);
  memory->open_to_neighbours();
  CHECK_THROWS_WITH_AS(memory->give_to_kernels(1), doctest::Contains("out of reach on GPU 1"), TransportError);
  cuda.out_of_reach = -1;
  memory->give_to_kernels(1);
  memory.reset();
  CHECK(until([&] { return cuda.mappings() == 0; }));
}

TEST_CASE("gpu vmm: descriptors of other things, and lengths that are none, are refused") {
  FakeCuda cuda;
  const size_t fds = open_fds();
  {
    const Fd event(::eventfd(0, EFD_CLOEXEC));
    const Fd file(::memfd_create("other", MFD_CLOEXEC));
    for (const Fd* fd : {&event, &file})
      CHECK_THROWS_WITH_AS(PhysicalMemory::import(*fd, kUnit, 0), doctest::Contains("CUDA error 1"), TransportError);
    CHECK_THROWS_AS(PhysicalMemory::import(Fd(), kUnit, 0), TransportError);
    const auto physical = PhysicalMemory::create(0, kUnit);
    const Fd honest = physical->share();
    for (const uint64_t bytes : {uint64_t{0}, uint64_t{5}, 2 * kUnit, uint64_t{1} << 62, ~uint64_t{0}}) {
      CAPTURE(bytes);
      CHECK_THROWS_AS(MappedMemory::map(PhysicalMemory::import(honest, bytes, 0), 0), TransportError);
    }
  }
  CHECK(open_fds() == fds);
}

TEST_CASE("gpu vmm: what is mapped is shared by a descriptor, from where it begins in its mapping") {
  FakeCuda cuda;
  const size_t fds = open_fds();
  {
    std::byte* const segments = cuda.allocate_segments(3, true);
    const device::SharedRange range = share(segments + kUnit + 256, 4096);
    REQUIRE(range.by == device::SharedBy::kVmm);
    CHECK(range.offset == 256);
    CHECK(range.allocation_bytes == kUnit);
    device::SharedRange theirs = range;
    theirs.physical = PhysicalMemory::import(range.physical->share(), range.allocation_bytes, 1);
    const device::ImportedMemory here(theirs, 4096, 1);
    *cuda.bytes_at(here.base() + 9) = std::byte{3};
    CHECK(*cuda.bytes_at(segments + kUnit + 256 + 9) == std::byte{3});
    CHECK_THROWS_WITH_AS(device::ImportedMemory(theirs, kUnit, 1), doctest::Contains("past the end"), TransportError);
    theirs.offset = ~uint64_t{0};
    CHECK_THROWS_WITH_AS(device::ImportedMemory(theirs, 4096, 1), doctest::Contains("past the end"), TransportError);
    cuda.free_segments(segments);
    CHECK(*cuda.bytes_at(here.base() + 9) == std::byte{3});  // whoever has it keeps it
  }
  CHECK(open_fds() == fds);
}

TEST_CASE("gpu vmm: what cannot be shared says why") {
  FakeCuda cuda;
  std::byte* const segments = cuda.allocate_segments(2, true);
  std::byte* const closed = cuda.allocate_segments(1, false);
  const auto why_not = [](const std::byte* base, uint64_t bytes) {
    const device::SharedRange range = share(base, bytes);
    CHECK(!range.is_shared());
    CHECK(range.physical == nullptr);
    return range.why_not;
  };
  CHECK(why_not(segments + kUnit - 4096, 8192).find("several allocations") != std::string::npos);
  CHECK(why_not(closed, 4096).find("cuMemExportToShareableHandle: a fake error (CUDA error 1)") != std::string::npos);
  cuda.knows_mappings = false;
  CHECK(why_not(segments, 4096).find("CUDA error 1") != std::string::npos);
  cuda.free_segments(segments);
  cuda.free_segments(closed);
}

TEST_CASE("gpu vmm: an old driver shares what it could, and says that it allocates nothing") {
  FakeCuda cuda(true);
  const EngineRef engine = open("here");
  CHECK(share(cuda.allocate(8192), 4096).by == device::SharedBy::kIpc);
  std::byte* const segments = cuda.allocate_segments(1, true);
  CHECK(!share(segments, 4096).is_shared());
  CHECK_THROWS_WITH_AS(engine->alloc_on_gpu(100, 0), doctest::Contains("no virtual memory management"), TransportError);
  cuda.free_segments(segments);
  engine->close(0);
}

TEST_CASE("gpu vmm: what is missing for memory on a GPU is named") {
  FakeCuda cuda;
  const EngineRef engine = open("here");
  CHECK_THROWS_WITH_AS(engine->alloc_on_gpu(100, 2), doctest::Contains("'cuda:2'"), UsageError);
  CHECK_THROWS_AS(engine->alloc_on_gpu(0, 0), UsageError);
  cuda.vmm.gives_fds = false;
  CHECK_THROWS_WITH_AS(engine->alloc_on_gpu(100, 0), doctest::Contains("no file descriptors"), TransportError);
  cuda.vmm.has_vmm = false;
  CHECK_THROWS_WITH_AS(engine->alloc_on_gpu(100, 1), doctest::Contains("on GPU 1"), TransportError);
  cuda.vmm.has_vmm = cuda.vmm.gives_fds = true;
  cuda.vmm.create_error = 2;
  CHECK_THROWS_WITH_AS(engine->alloc_on_gpu(100, 0), doctest::Contains("2097152 bytes on GPU 0"), TransportError);
  engine->close(0);
}

TEST_CASE("gpu vmm: a region of the engine's own is written, revoked, renewed, and given back with its last use") {
  FakeCuda cuda;
  const EngineRef here = open("here");
  const EngineRef there = open("there");
  {
    const RegionRef source = here->alloc_on_gpu(3 * kUnit / 2, 0);
    RegionRef target = there->alloc_on_gpu(3 * kUnit / 2, 1);
    CHECK(source->is_own_gpu_memory());
    for (const bool renewed : {false, true}) {
      if (renewed) {
        REQUIRE(target->revoke(deadline_in(10), {}) == WaitResult::kReady);
        target->renew();
      }
      std::memset(cuda.bytes_at(source->base()), renewed ? 9 : 5, 3 * kUnit / 2);
      const RemoteRegionRef remote = here->remote_region(target->descriptor());
      const TransferRef transfer =
          here->submit_write({.src = source.get(), .dst = remote.get(), .length_bytes = 3 * kUnit / 2, .imm = 7});
      REQUIRE(until([&] { return transfer->info().status != Status::kPending; }));
      CHECK(transfer->info().status == Status::kDone);
      CHECK(std::memcmp(cuda.bytes_at(source->base()), cuda.bytes_at(target->base()), 3 * kUnit / 2) == 0);
    }
    CHECK(cuda.mappings() == 2);
    CHECK(target->close(deadline_in(10), {}) == WaitResult::kReady);
    target = nullptr;
    CHECK(until([&] { return cuda.mappings() == 1; }));
  }
  here->close(0);
  there->close(0);
  CHECK(until([&] { return cuda.mappings() == 0 && cuda.handles() == 0; }));
}

TEST_CASE("gpu vmm: within a process a region is mapped where its owner has it, and outlives it there") {
  FakeCuda cuda;
  const EngineRef here = open("here");
  const EngineRef there = open("there");
  Mapping mapping;
  Status status = Status::kPending;
  const auto map = [&](const RegionDescriptor& descriptor, int gpu) {
    mapping = {};
    const RemoteRegionRef remote = here->remote_region(descriptor);
    REQUIRE(here->map(*remote, gpu, deadline_in(10), {}, &mapping, &status) == WaitResult::kReady);
    return status;
  };
  {
    RegionRef region = there->alloc_on_gpu(4096, 0);
    std::byte* const base = region->base();
    RegionDescriptor longer = region->descriptor();
    longer.length_bytes += kUnit;
    CHECK(map(longer, 0) == Status::kOutOfBounds);
    CHECK(map(region->descriptor(), -1) == Status::kAccessDenied);
    cuda.out_of_reach = 1;
    CHECK(map(region->descriptor(), 0) == Status::kDone);
    CHECK(mapping.base == base);
    const RegionRef part = there->register_memory(base + 1000, 100, Access::kRemoteRead, MemoryKind::kCuda);
    CHECK(map(part->descriptor(), 0) == Status::kAccessDenied);
    const RegionRef other = there->register_memory(base + 1000, 100, Access::kRemoteWrite, MemoryKind::kCuda);
    CHECK(map(other->descriptor(), 0) == Status::kDone);
    CHECK(mapping.base == base + 1000);
    const RegionRef cuda_malloc =
        there->register_memory(cuda.allocate(8192), 4096, Access::kRemoteWrite, MemoryKind::kCuda);
    CHECK(map(cuda_malloc->descriptor(), 0) == Status::kAccessDenied);
    CHECK(mapping.trouble.find("cudaMalloc") != std::string::npos);
    REQUIRE(map(region->descriptor(), 0) == Status::kDone);
    for (const RegionRef& each : {region, part, other, cuda_malloc})
      CHECK(each->close(deadline_in(10), {}) == WaitResult::kReady);
  }
  here->close(0);
  there->close(0);
  CHECK(cuda.mappings() == 1);
  *cuda.bytes_at(mapping.base) = std::byte{1};
  mapping = {};
  CHECK(until([&] { return cuda.mappings() == 0 && cuda.handles() == 0; }));
}

TEST_CASE("gpu vmm: within a process other mapped memory is mapped once more") {
  FakeCuda cuda;
  std::byte* const segments = cuda.allocate_segments(2, true);
  const EngineRef here = open("here");
  const EngineRef there = open("there");
  Mapping mapping;
  {
    const RegionRef region =
        there->register_memory(segments + kUnit + 64, 4096, Access::kRemoteWrite, MemoryKind::kCuda);
    const RemoteRegionRef remote = here->remote_region(region->descriptor());
    Status status = Status::kPending;
    REQUIRE(here->map(*remote, 1, deadline_in(10), {}, &mapping, &status) == WaitResult::kReady);
    CHECK(status == Status::kDone);
    *cuda.bytes_at(mapping.base + 5) = std::byte{8};
    CHECK(*cuda.bytes_at(segments + kUnit + 64 + 5) == std::byte{8});
    CHECK(region->close(deadline_in(10), {}) == WaitResult::kReady);
  }
  cuda.free_segments(segments);
  CHECK(*cuda.bytes_at(mapping.base + 5) == std::byte{8});
  mapping = {};
  CHECK(until([&] { return cuda.mappings() == 0 && cuda.handles() == 0; }));
  here->close(0);
  there->close(0);
}

}  // namespace crossrail::test
