// The verbs NIC and memory: what can be locked, of GPUs, inline or not, and when it is quiet.
#include <doctest/doctest.h>

#include <string>
#include <vector>

#if CROSSRAIL_WITH_VERBS

#include "fake_cuda.h"
#include "locked_memory_limit.h"
#include "transport/verbs/queues.h"
#include "util/errors.h"
#include "verbs_rig.h"

using namespace crossrail;
using verbs_test::Fake;
using verbs_test::open_fake;
using verbs_test::Rig;

TEST_CASE("verbs memory: memory that cannot be locked is said with the limit and the remedy") {
  Fake fake;
  const auto nic = open_fake();
  std::vector<std::byte> memory(4096);
  fake.register_error = ENOMEM;
  const test::LockedMemoryLimit limit(48 << 10);
  try {
    (void)nic->register_memory(memory.data(), memory.size(), Access::kRemoteWrite);
    FAIL("it was registered");
  } catch (const TransportError& error) {
    CHECK(error.code() == ENOMEM);
    CHECK(error.remedy().find("may lock 48 KiB") != std::string::npos);
    CHECK(error.remedy().find("ulimit -l unlimited") != std::string::npos);
    CHECK(std::string(error.what()).find("fake0:1") != std::string::npos);
  }
}

TEST_CASE("verbs memory: memory that may only be read is registered for reading") {
  Fake fake;
  const auto nic = open_fake();
  std::vector<std::byte> memory(4096);
  fake.register_refuses_flags = IBV_ACCESS_LOCAL_WRITE;
  CHECK(nic->register_memory(memory.data(), memory.size(), Access::kRemoteRead) != nullptr);
  CHECK_THROWS_AS(nic->register_memory(memory.data(), memory.size(), Access::kRemoteWrite), TransportError);
}

TEST_CASE("verbs memory: memory is not quiet before the kernel says so") {
  Fake fake;
  const auto nic = open_fake();
  std::vector<std::byte> memory(4096);
  const auto region = nic->register_memory(memory.data(), memory.size(), Access::kRemoteWrite);
  fake.deregister_error = EBUSY;
  region->revoke();
  CHECK(!region->is_quiet());
  CHECK(fake.keys.count(region->key) == 1);
  fake.deregister_error = 0;
  CHECK(region->is_quiet());
  CHECK(fake.keys.count(region->key) == 0);
}

TEST_CASE("verbs memory: a NIC without inline data is used without") {
  Fake fake;
  fake.inline_bytes_max = 0;
  Rig rig;
  CHECK(rig.works_of(*rig.paths[0]).inline_bytes == 0);
  CHECK(rig.paths[0]->post(rig.writes(3)) == 3);
}

TEST_CASE("verbs memory: memory of a GPU by dma-buf, else by what nvidia-peermem knows") {
  test::FakeCuda cuda;
  Fake fake;
  const auto nic = open_fake();
  std::byte* const memory = cuda.allocate(8192) + 100;
  {
    const device::GpuMemory gpu(memory, 4096);
    const auto registration = nic->register_gpu_memory(gpu, Access::kRemoteWrite);
    CHECK(registration->given_by == "dma-buf");
    CHECK(registration->remote_base == reinterpret_cast<uint64_t>(memory));
    REQUIRE(fake.dma_bufs.size() == 1);
    CHECK(fake.dma_bufs[0].second == 100);
  }
  fake.dma_buf_error = EOPNOTSUPP;
  const device::GpuMemory gpu(memory, 4096);
  const auto registration = nic->register_gpu_memory(gpu, Access::kRemoteWrite);
  CHECK(registration->given_by.find("peermem, not dma-buf: ibv_reg_dmabuf_mr") == 0);
  fake.register_error = EFAULT;
  try {
    (void)nic->register_gpu_memory(gpu, Access::kRemoteWrite);
    FAIL("it was registered");
  } catch (const TransportError& error) {
    CHECK(error.remedy().find("modprobe nvidia-peermem") != std::string::npos);
  }
}

TEST_CASE("verbs memory: short writes go inline, but for those from a GPU") {
  test::FakeCuda cuda;
  Fake fake;
  Rig rig;
  auto works = rig.writes(1);
  works[0].length_bytes = 16;
  CHECK(rig.paths[0]->post(works) == 1);
  CHECK(fake.inline_count == 1);
  const device::GpuMemory gpu(cuda.allocate(4096), 4096);
  rig.region = rig.nic->register_gpu_memory(gpu, Access::kLocal);
  works = rig.writes(1, 1);
  works[0].length_bytes = 16;
  works[0].local = gpu.base();
  CHECK(rig.paths[0]->post(works) == 1);
  CHECK(fake.inline_count == 1);
}

TEST_CASE("verbs memory: what the NIC is told of has its pages for itself") {
  Fake fake;
  const auto nic = open_fake();
  CHECK(fake.registered.size() >= 4);
  for (const auto& [base, bytes] : fake.registered)
    CHECK(reinterpret_cast<uintptr_t>(base) % static_cast<uintptr_t>(::sysconf(_SC_PAGESIZE)) == 0);
}

#endif
