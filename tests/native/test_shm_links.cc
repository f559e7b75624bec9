// What lies in the rings of a link after it was taken back, and what the sleeper's look says of them.
#include <vector>

#include "shm_rig.h"

namespace crossrail::shm {

namespace {

struct Pair {
  Pair() {
    link = here.transport.connect(std::make_shared<const Address>(there.transport.address()));
    REQUIRE(turn_until({&here, &there}, [&] { return here.sink.ups == 1; }));
  }
  uint32_t post(const WorkRequest& request) {
    uint32_t completed = 0;
    return here.transport.post(*link, 0, {&request, 1}, &completed);
  }
  WorkRequest message(uint64_t bytes) {
    return {.op = WorkOp::kSend, .local = source.data(), .length_bytes = bytes, .context = this};
  }
  void take_all_back() {
    here.transport.withdraw([](void*) { return true; });
  }

  std::vector<std::byte> source{1 << 20};
  Node here{"here"}, there{"there"};
  Link* link = nullptr;
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

}  // namespace crossrail::shm
