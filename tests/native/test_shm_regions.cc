// What shm knows of its own engine's memory.
#include <fcntl.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <cerrno>
#include <vector>

#include "shm_packets.h"
#include "shm_rig.h"
#include "transport/shm/region_table.h"
#include "util/errors.h"

namespace {
uint32_t signals_to_come = 0;  // before each call but the last of so many
bool fails_long_calls = false;
}  // namespace

// Instead of libc's, and as kernels do it: a signal ends the call, and nothing of it stays.
extern "C" int posix_fallocate(int fd, off_t offset, off_t length) {
  if (signals_to_come > 0 && --signals_to_come > 0) return EINTR;
  constexpr off_t kBeforeTheNext = 8 << 20;
  if (fails_long_calls && length > kBeforeTheNext) return EINTR;
  return syscall(SYS_fallocate, fd, 0, offset, length) == 0 ? 0 : errno;
}

namespace crossrail::shm {

TEST_CASE("shm: memory that is gone is swept up now and then, and not by every allocation") {
  constexpr size_t kMany = 500;
  CountingSink sink;
  RegionTable table(&sink);
  uint64_t next_id = uint64_t{1} << kRegionSlotBits;
  std::vector<std::unique_ptr<ShmRegion>> regions;
  const auto allocate = [&](uint64_t pages) { regions.push_back(table.allocate(next_id++, pages * 4096, false)); };

  while (regions.size() < kMany) allocate(1);
  regions.resize(1);
  allocate(1);
  CHECK(table.maps_known() >= kMany);

  for (uint64_t pages = 1; pages <= 8; ++pages) {  // of another length, they lie elsewhere
    while (regions.size() < kMany) allocate(pages);
    CHECK(table.maps_known() <= 2 * (kMany + 1));
    regions.clear();
  }
}

TEST_CASE("shm: what a revoked region leaves in its slot names no region") {
  CountingSink sink;
  RegionTable table(&sink);
  const uint64_t id = uint64_t{1} << kRegionSlotBits;
  const std::unique_ptr<ShmRegion> region = table.allocate(id, 4096, false);
  REQUIRE(table.find(id) != nullptr);
  CHECK(table.find(id | kRevokedId) == nullptr);

  table.revoke(*region);

  CHECK(table.find(id) == nullptr);
  CHECK(table.find(id | kRevokedId) == nullptr);
}

TEST_CASE("shm: peers read which regions are open, and cannot write it") {
  CountingSink sink;
  RegionTable table(&sink);
  const Fd passed(fcntl(table.seen_by_peers().fd(), F_DUPFD_CLOEXEC, 0));

  CHECK(mmap(nullptr, 4096, PROT_READ | PROT_WRITE, MAP_SHARED, passed.get(), 0) == MAP_FAILED);
  CHECK(pwrite(passed.get(), "x", 1, 0) < 0);
  void* const read = mmap(nullptr, 4096, PROT_READ, MAP_SHARED, passed.get(), 0);
  REQUIRE(read != MAP_FAILED);
  CHECK(mprotect(read, 4096, PROT_READ | PROT_WRITE) != 0);
  munmap(read, 4096);
}

TEST_CASE("shm: a peer's memory that we only read is not taken for memory that we write") {
  Fd open = sealed_memory("open", sizeof(OpenRegions), kOpenRegionsMagic);
  Fd again(fcntl(open.get(), F_DUPFD_CLOEXEC, 0));
  const auto map = MemoryMap::map(std::move(open), sizeof(OpenRegions), MemoryMap::Writers::kOwner);
  CHECK_THROWS_AS(MemoryMap::map(std::move(again), 4096), TransportError);
}

TEST_CASE("shm: signals do not keep memory from being populated, however long that takes") {
  CountingSink sink;
  RegionTable table(&sink);
  constexpr uint64_t kBytes = (16 << 20) + 4096;

  signals_to_come = 3;
  fails_long_calls = true;
  std::unique_ptr<ShmRegion> region;
  CHECK_NOTHROW(region = table.allocate(uint64_t{1} << kRegionSlotBits, kBytes, true));
  signals_to_come = 0;
  fails_long_calls = false;

  REQUIRE(region != nullptr);
  std::vector<unsigned char> resident(kBytes / 4096);
  REQUIRE(mincore(region->base, kBytes, resident.data()) == 0);
  for (const unsigned char page : resident) REQUIRE((page & 1) != 0);
}

}  // namespace crossrail::shm
