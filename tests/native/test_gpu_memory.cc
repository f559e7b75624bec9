// Memory of GPUs, by doubles of CUDA's driver and of libfabric as EFA: no GPU has run this. verbs:
// test_verbs_faults.cc.
#include <doctest/doctest.h>

#include <algorithm>
#include <cstring>
#include <functional>
#include <numeric>
#include <string>
#include <vector>

#include "engine/engine.h"
#include "fake_cuda.h"
#include "ofi_double.h"
#include "transport/ofi/library.h"
#include "util/clock.h"
#include "util/errors.h"

namespace crossrail::test {
namespace {

constexpr uint64_t kBytes = 1 << 20;

// Two engines on two EFA devices, and a thread that is this one.
struct EfaEngines {
  explicit EfaEngines(const DoubleSettings& settings = {}) : world(settings) {
    ofi::replace_library(world.library());
    a = open("a", "rdmap0s6");
    b = open("b", "rdmap1s6");
  }
  ~EfaEngines() {
    for (const EngineRef& engine : {a, b}) {
      if (engine) engine->close(0);
    }
    a = b = nullptr;
    ofi::replace_library(nullptr);
    CHECK(world.violations() == std::vector<std::string>{});
  }
  static EngineRef open(const char* name, const char* rail) {
    EngineOptions options;
    options.name = name;
    options.transports = {TransportKind::kOfi};
    options.rdma.provider = "efa";
    options.rails = {rail};
    options.polling = Polling::kManual;
    return Engine::open(options);
  }
  bool until(const std::function<bool()>& wanted) {
    for (const Deadline end = deadline_in(20); !wanted();) {
      if (now_ns() > end) return false;
      a->progress();
      b->progress();
    }
    return true;
  }
  Status end_of(const TransferRef& transfer) {
    REQUIRE(until([&] { return transfer->info().status != Status::kPending; }));
    return transfer->info().status;
  }

  LibfabricDouble world;
  EngineRef a, b;
};

void fill(std::byte* bytes, uint64_t count, uint8_t first) {
  for (uint64_t i = 0; i < count; ++i) bytes[i] = static_cast<std::byte>(first + i * 7);
}

}  // namespace

TEST_CASE("gpu: writes, pages and reads go between GPUs, and no CPU touches them") {
  FakeCuda cuda;
  EfaEngines pair;
  // Off the beginning of a page: what is exported has to begin at one.
  std::byte* const source = cuda.allocate(kBytes + 4096) + 256;
  std::byte* const target = cuda.allocate(kBytes + 4096, 1) + 512;
  fill(cuda.bytes_at(source), kBytes, 3);
  RegionRef from = pair.a->register_memory(source, kBytes, Access::kRemoteWrite, MemoryKind::kCuda);
  RegionRef to = pair.b->register_memory(target, kBytes, Access::kRemoteWrite, MemoryKind::kCuda);
  CHECK(from->given_by() == "dma-buf");
  CHECK(to->gpu() == 1);
  CHECK(cuda.contexts_current == 0);
  CHECK(to->descriptor().memory == MemoryKind::kCuda);
  const RegionDescriptor told = RegionDescriptor::decode(to->descriptor().encode());
  RemoteRegionRef remote = pair.a->remote_region(told);
  const auto same = [&](uint64_t offset, uint64_t count) {
    return std::memcmp(cuda.bytes_at(source) + offset, cuda.bytes_at(target) + offset, count) == 0;
  };

  // 16 bytes would go inline from a host.
  for (const uint64_t count : {uint64_t{16}, uint64_t{5000}, kBytes - 64}) {
    CHECK(pair.end_of(pair.a->submit_write({.src = from.get(),
                                            .src_offset = 64,
                                            .dst = remote.get(),
                                            .dst_offset = 64,
                                            .length_bytes = count > kBytes - 64 ? kBytes - 64 : count,
                                            .imm = 7})) == Status::kDone);
    CHECK(same(64, count));
  }
  REQUIRE(pair.until([&] { return pair.b->imm_counter(7)->poll() == 3; }));

  std::memset(cuda.bytes_at(target), 0, kBytes);
  std::vector<int64_t> pages(64);
  std::iota(pages.begin(), pages.end(), 0);
  PagedWriteRequest paged;
  paged.src = from.get();
  paged.dst = remote.get();
  paged.src_pages = paged.dst_pages = {.data = pages.data(), .count = pages.size()};
  paged.page_bytes = paged.src_stride_bytes = paged.dst_stride_bytes = 4096;
  paged.imm = 8;
  CHECK(pair.end_of(pair.a->submit_paged_writes(paged)) == Status::kDone);
  CHECK(same(0, 64 * 4096));
  REQUIRE(pair.until([&] { return pair.b->imm_counter(8)->poll() == 64; }));

  std::byte* const read_to = cuda.allocate(kBytes);
  RegionRef local = pair.a->register_memory(read_to, kBytes, Access::kLocal, MemoryKind::kCuda);
  CHECK(pair.end_of(pair.a->submit_read({.dst = local.get(), .src = remote.get(), .length_bytes = 64 * 4096})) ==
        Status::kDone);
  CHECK(std::memcmp(cuda.bytes_at(read_to), cuda.bytes_at(source), 64 * 4096) == 0);

  // A host's memory on one side.
  RegionRef host = pair.a->alloc(8192, false);
  fill(host->base(), 8192, 91);
  CHECK(pair.end_of(pair.a->submit_write({.src = host.get(), .dst = remote.get(), .length_bytes = 8192})) ==
        Status::kDone);
  CHECK(std::memcmp(cuda.bytes_at(target), host->base(), 8192) == 0);
}

TEST_CASE("gpu: a revoked region is registered again from the same memory") {
  FakeCuda cuda;
  EfaEngines pair;
  std::byte* const source = cuda.allocate(8192);
  std::byte* const target = cuda.allocate(8192);
  fill(cuda.bytes_at(source), 8192, 1);
  RegionRef from = pair.a->register_memory(source, 8192, Access::kLocal, MemoryKind::kCuda);
  RegionRef to = pair.b->register_memory(target, 8192, Access::kRemoteWrite, MemoryKind::kCuda);
  RemoteRegionRef old = pair.a->remote_region(to->descriptor());
  REQUIRE(to->revoke(deadline_in(5), {}) == WaitResult::kReady);
  CHECK(pair.end_of(pair.a->submit_write({.src = from.get(), .dst = old.get(), .length_bytes = 8192})) !=
        Status::kDone);
  to->renew();
  RemoteRegionRef fresh = pair.a->remote_region(to->descriptor());
  CHECK(pair.end_of(pair.a->submit_write({.src = from.get(), .dst = fresh.get(), .length_bytes = 8192})) ==
        Status::kDone);
  CHECK(std::memcmp(cuda.bytes_at(source), cuda.bytes_at(target), 8192) == 0);
  CHECK(cuda.exports == 4);
}

TEST_CASE("gpu: what arrives late at a GPU is flushed before it is counted, and before a read is done") {
  FakeCuda cuda;
  cuda.writes_ordering = 0;
  EfaEngines pair;
  RegionRef from = pair.a->alloc(4096, false);
  RegionRef to = pair.b->register_memory(cuda.allocate(4096), 4096, Access::kRemoteWrite, MemoryKind::kCuda);
  RemoteRegionRef remote = pair.a->remote_region(to->descriptor());
  CHECK(pair.end_of(pair.a->submit_write({.src = from.get(), .dst = remote.get(), .length_bytes = 4096, .imm = 1})) ==
        Status::kDone);
  REQUIRE(pair.until([&] { return pair.b->imm_counter(1)->poll() == 1; }));
  CHECK(cuda.flushes == 1);

  RegionRef local = pair.a->register_memory(cuda.allocate(4096), 4096, Access::kLocal, MemoryKind::kCuda);
  CHECK(pair.end_of(pair.a->submit_read({.dst = local.get(), .src = remote.get(), .length_bytes = 4096})) ==
        Status::kDone);
  CHECK(cuda.flushes == 2);

  cuda.flush_error = 700;  // the GPU has failed: its memory is not what was sent
  CHECK(pair.end_of(pair.a->submit_read({.dst = local.get(), .src = remote.get(), .length_bytes = 4096})) ==
        Status::kTransportFailed);
  CHECK(pair.end_of(pair.a->submit_write({.src = from.get(), .dst = remote.get(), .length_bytes = 4096, .imm = 2})) ==
        Status::kDone);
  REQUIRE(pair.until([&] { return cuda.flushes == 4; }));
  CHECK(pair.b->imm_counter(2)->poll() == 0);
}

TEST_CASE("gpu: what the CPU would have to read is refused") {
  FakeCuda cuda;
  EfaEngines pair;
  RegionRef from = pair.a->register_memory(cuda.allocate(4096), 4096, Access::kLocal, MemoryKind::kCuda);
  RegionRef to = pair.b->alloc(4096, false);
  RemoteRegionRef remote = pair.a->remote_region(to->descriptor());
  WriteRequest request{.src = from.get(), .dst = remote.get(), .length_bytes = 4096, .verify = true};
  CHECK_THROWS_AS(pair.a->submit_write(request), UsageError);
}

TEST_CASE("gpu: engines whose transports move nothing of it refuse it, by name") {
  FakeCuda cuda;
  EngineOptions options;
  options.name = "a";
  options.transports = {TransportKind::kNull};
  const EngineRef engine = Engine::open(options);
  try {
    (void)engine->register_memory(cuda.allocate(4096), 4096, Access::kRemoteWrite, MemoryKind::kCuda);
    FAIL("it was registered");
  } catch (const TransportError& error) {
    CHECK(std::string(error.what()).find("this engine's transport, null") != std::string::npos);
    CHECK(error.remedy().find("transport='auto'") != std::string::npos);
  }
  engine->close(0);
}

TEST_CASE("gpu: memory that no NIC can be given is refused with the reason") {
  FakeCuda cuda;
  std::byte* const memory = cuda.allocate(4096);
  std::vector<std::byte> host(4096);
  CHECK_THROWS_AS(device::GpuMemory(host.data(), host.size()), UsageError);
  cuda.is_managed = true;
  CHECK_THROWS_AS(device::GpuMemory(memory, 4096), UsageError);
  cuda.is_managed = false;
  cuda.writes_ordering = cuda.flush_options = 0;
  CHECK_THROWS_AS(device::GpuMemory(memory, 4096), TransportError);
  cuda.writes_ordering = 100;
  CHECK(device::is_gpu_address(memory));
  CHECK(!device::is_gpu_address(host.data()));
  CHECK(device::gpus().size() == 2);

  cuda.export_error = 801;
  EfaEngines pair;
  try {
    (void)pair.a->register_memory(memory, 4096, Access::kRemoteWrite, MemoryKind::kCuda);
    FAIL("it was registered");
  } catch (const TransportError& error) {
    CHECK(error.remedy().find("a fake error (CUDA error 801)") != std::string::npos);
  }
}

TEST_CASE("gpu: a libfabric without CUDA moves host memory only") {
  FakeCuda cuda;
  EfaEngines pair(DoubleSettings{.takes_gpu_memory = false});
  try {
    (void)pair.a->register_memory(cuda.allocate(4096), 4096, Access::kLocal, MemoryKind::kCuda);
    FAIL("it was registered");
  } catch (const TransportError& error) {
    CHECK(error.remedy().find("offers none (FI_HMEM)") != std::string::npos);
    CHECK(error.remedy().find("libcudart.so") != std::string::npos);
  }
  CHECK(pair.a->no_gpu_memory() == pair.b->no_gpu_memory());
  RegionRef host = pair.a->alloc(4096, false);
  CHECK(host->given_by().empty());
}

}  // namespace crossrail::test
