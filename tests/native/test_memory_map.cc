#include <doctest/doctest.h>
#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <cstdint>
#include <fstream>

#include "util/errors.h"
#include "util/memory_map.h"

namespace crossrail {

namespace {

constexpr size_t kBytes = size_t{64} << 20;

uint64_t address_space_bytes() {
  uint64_t pages = 0;
  std::ifstream("/proc/self/statm") >> pages;
  return pages * static_cast<uint64_t>(sysconf(_SC_PAGESIZE));
}

Fd sealed(int seals) {
  Fd fd(memfd_create("test", MFD_CLOEXEC | MFD_ALLOW_SEALING));
  REQUIRE(ftruncate(fd.get(), kBytes) == 0);
  REQUIRE(fcntl(fd.get(), F_ADD_SEALS, F_SEAL_SHRINK | F_SEAL_GROW | seals) == 0);
  return fd;
}

}  // namespace

TEST_CASE("memory that cannot be mapped leaves nothing behind") {
  const uint64_t before = address_space_bytes();
  for (int i = 0; i < 20; ++i) CHECK_THROWS_AS(MemoryMap::map(sealed(F_SEAL_WRITE), kBytes), TransportError);
  CHECK(address_space_bytes() < before + 4 * kBytes);
}

TEST_CASE("memory whose length can change is not mapped") {
  for (const int seals : {0, F_SEAL_SHRINK, F_SEAL_GROW}) {
    Fd fd(memfd_create("test", MFD_CLOEXEC | MFD_ALLOW_SEALING));
    REQUIRE(ftruncate(fd.get(), kBytes) == 0);
    REQUIRE(fcntl(fd.get(), F_ADD_SEALS, seals) == 0);
    CHECK_THROWS_AS(MemoryMap::map(std::move(fd), kBytes), TransportError);
  }
}

TEST_CASE("large shared memory is mapped once, where huge pages fit, and unmapped") {
  const uint64_t before = address_space_bytes();
  const Fd fd = sealed(0);
  for (int i = 0; i < 20; ++i) {
    const auto map = MemoryMap::map(Fd(dup(fd.get())), kBytes);
    CHECK(reinterpret_cast<uintptr_t>(map->data()) % (size_t{2} << 20) == 0);
    CHECK(MemoryMap::map(Fd(dup(fd.get())), kBytes) == map);
  }
  CHECK(address_space_bytes() < before + 4 * kBytes);
}

}  // namespace crossrail
