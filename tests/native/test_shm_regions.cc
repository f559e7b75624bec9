// What shm knows of its own engine's memory.
#include <fcntl.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <cerrno>
#include <vector>

#include "shm_rig.h"
#include "transport/shm/region_table.h"

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
  const auto home = MemoryMap::create("home", sizeof(HomeSegment));
  CountingSink sink;
  RegionTable table(reinterpret_cast<HomeSegment*>(home->data()), &sink);
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
  const auto home = MemoryMap::create("home", sizeof(HomeSegment));
  CountingSink sink;
  RegionTable table(reinterpret_cast<HomeSegment*>(home->data()), &sink);
  const uint64_t id = uint64_t{1} << kRegionSlotBits;
  const std::unique_ptr<ShmRegion> region = table.allocate(id, 4096, false);
  REQUIRE(table.find(id) != nullptr);
  CHECK(table.find(id | kRevokedId) == nullptr);

  table.revoke(*region);

  CHECK(table.find(id) == nullptr);
  CHECK(table.find(id | kRevokedId) == nullptr);
}

TEST_CASE("shm: what a peer writes into the home segment opens no region that is closed") {
  const auto home = MemoryMap::create("home", sizeof(HomeSegment));
  auto* const segment = reinterpret_cast<HomeSegment*>(home->data());
  CountingSink sink;
  RegionTable table(segment, &sink);
  const uint64_t id = uint64_t{1} << kRegionSlotBits;
  const uint64_t unknown = id + 1;
  std::unique_ptr<ShmRegion> region = table.allocate(id, 4096, false);

  region.reset();
  segment->region_ids[region_slot(id)].store(id);
  segment->region_ids[region_slot(unknown)].store(unknown);

  CHECK(table.find(id) == nullptr);
  CHECK(table.find(unknown) == nullptr);
}

TEST_CASE("shm: signals do not keep memory from being populated, however long that takes") {
  const auto home = MemoryMap::create("home", sizeof(HomeSegment));
  CountingSink sink;
  RegionTable table(reinterpret_cast<HomeSegment*>(home->data()), &sink);
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
