// What shm knows of its own engine's memory.
#include <vector>

#include "shm_rig.h"
#include "transport/shm/region_table.h"

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

}  // namespace crossrail::shm
