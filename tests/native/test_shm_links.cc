// What lies in the rings of a link after it was taken back, and what the sleeper's look says of them.
#include <vector>

#include "shm_rig.h"

namespace crossrail::shm {

namespace {

constexpr uint64_t kRegionId = uint64_t{1} << kRegionSlotBits | 1;
constexpr uint64_t kReadBytes = kReadChunks * kReadChunkBytes;
constexpr uint32_t kMoreReadsThanFit = kStageBytes / kReadBytes + 1;

struct Pair {
  Pair() {
    link = here.transport.connect(std::make_shared<const Address>(there.transport.address()));
    REQUIRE(turn_until({&here, &there}, [&] { return here.sink.ups == 1; }));
  }
  // Memory there that is reached through the rings.
  std::unique_ptr<RemoteKey> target() {
    region = there.transport.register_memory(kRegionId, memory.data(), memory.size(), Access::kRemoteWrite);
    RegionDescriptor descriptor;
    descriptor.region_id = kRegionId;
    auto key = here.transport.resolve(*link, descriptor);
    REQUIRE(turn_until({&here, &there}, [&] {
      Mapping none;
      return here.transport.map(*link, *key, -1, &none) != Status::kPending;
    }));
    return key;
  }
  uint32_t post(const WorkRequest& request) {
    uint32_t completed = 0;
    return here.transport.post(*link, 0, {&request, 1}, &completed);
  }
  WorkRequest message(uint64_t bytes) {
    return {.op = WorkOp::kSend, .local = source.data(), .length_bytes = bytes, .context = this};
  }
  // The longest that one entry asks for.
  WorkRequest read(RemoteKey& key) {
    return {.op = WorkOp::kRead, .local = source.data(), .length_bytes = kReadBytes, .remote = &key, .context = this};
  }
  void take_all_back() {
    here.transport.withdraw([](void*) { return true; });
  }

  std::vector<std::byte> source{1 << 20}, memory{1 << 20};
  Node here{"here"}, there{"there"};
  Link* link = nullptr;
  std::unique_ptr<LocalRegion> region;
};

}  // namespace

TEST_CASE("shm: messages that were taken back out of a full ring leave it room for others") {
  Pair pair;
  pair.there.sink.holds = true;
  const uint32_t fitting = kStageBytes / (256 << 10);
  for (uint32_t i = 0; i < fitting; ++i) REQUIRE(pair.post(pair.message(256 << 10)) == 1);
  REQUIRE(pair.post(pair.message(256 << 10)) == 0);
  pair.there.transport.poll();
  pair.take_all_back();
  REQUIRE(pair.here.sink.withdrawn == fitting);

  pair.there.sink.holds = false;
  pair.there.transport.poll();

  CHECK(pair.here.transport.has_arrivals());
  CHECK(pair.here.transport.poll() > 0);
  CHECK(pair.post(pair.message(256 << 10)) == 1);
  CHECK(turn_until({&pair.here, &pair.there}, [&] { return pair.here.sink.done == 1; }));
  CHECK(pair.there.sink.messages == 1);
}

TEST_CASE("shm: answers to reads that were taken back hold up nothing that comes after them") {
  Pair pair;
  const auto key = pair.target();
  for (uint32_t i = 0; i < kMoreReadsThanFit; ++i) {
    REQUIRE(pair.post(pair.read(*key)) == 1);
    pair.take_all_back();
    pair.there.transport.poll();
  }
  REQUIRE(pair.here.sink.withdrawn == kMoreReadsThanFit);
  CHECK(pair.here.transport.has_arrivals());

  REQUIRE(pair.post({.has_imm = true, .wire_imm = 7}) == 1);

  CHECK(turn_until({&pair.here, &pair.there}, [&] { return pair.there.sink.imm_units > 0; }));
}

TEST_CASE("shm: who cannot answer a read for want of room sleeps until answers were taken") {
  Pair pair;
  const auto key = pair.target();
  for (uint32_t i = 0; i < kMoreReadsThanFit; ++i) {
    REQUIRE(pair.post(pair.read(*key)) == 1);
    pair.take_all_back();
    pair.there.transport.poll();
  }
  pair.there.transport.poll();

  CHECK(!pair.there.transport.has_arrivals());
  REQUIRE(pair.here.transport.poll() > 0);  // takes answers
  CHECK(pair.there.transport.has_arrivals());
  CHECK(pair.there.transport.has_arrivals());  // it is not the first look that counts
  CHECK(pair.there.transport.poll() > 0);
}

TEST_CASE("shm: what a peer counted before it left is counted before it is lost") {
  Pair pair;
  Link* const back = pair.there.transport.connect(std::make_shared<const Address>(pair.here.transport.address()));
  REQUIRE(turn_until({&pair.here, &pair.there}, [&] { return pair.there.sink.ups == 1; }));

  const WorkRequest imm{.has_imm = true, .wire_imm = 7};
  uint32_t completed = 0;
  REQUIRE(pair.there.transport.post(*back, 0, {&imm, 1}, &completed) == 1);
  REQUIRE(completed == 1);
  pair.there.transport.close();
  std::this_thread::sleep_for(std::chrono::milliseconds(200));  // for the news of it, here

  REQUIRE(turn_until({&pair.here}, [&] { return !pair.here.sink.why_down.empty(); }));
  CHECK(pair.here.sink.units_when_down > 0);
}

}  // namespace crossrail::shm
