#include "util/ring_queue.h"

#include <doctest/doctest.h>

#include <algorithm>
#include <deque>
#include <random>

namespace crossrail {

TEST_CASE("a ring queue behaves as a deque") {
  std::mt19937 random(3);
  RingQueue<uint32_t> ring;
  std::deque<uint32_t> model;
  for (uint32_t step = 0; step < 200'000; ++step) {
    switch (random() % 16) {
      case 0:
      case 1:
        ring.push_front(step);
        model.push_front(step);
        break;
      case 2:
        ring.filter([&](uint32_t item) { return item % 3 != step % 3; });
        std::erase_if(model, [&](uint32_t item) { return item % 3 == step % 3; });
        break;
      case 3:
        if (random() % 50 == 0) {
          ring.clear();
          model.clear();
          ring.release();
          CHECK(ring.capacity() == 0);
        }
        break;
      case 4:
      case 5:
      case 6:
      case 7:
      case 8:
        if (!model.empty()) {
          CHECK(ring.pop_front() == model.front());
          model.pop_front();
        }
        break;
      case 9: {
        const auto run = ring.first_run(1 + random() % 8);
        CHECK(run.empty() == model.empty());
        REQUIRE(run.size() <= model.size());
        CHECK(std::equal(run.begin(), run.end(), model.begin()));
        ring.drop_front(run.size());
        model.erase(model.begin(), model.begin() + static_cast<std::ptrdiff_t>(run.size()));
        break;
      }
      default:
        CHECK(ring.push_back(step) == step);
        model.push_back(step);
    }
    REQUIRE(ring.size() == model.size());
    const auto is_like = [&](uint32_t item) { return item % 64 == step % 64; };
    CHECK(ring.any_of(is_like) == std::ranges::any_of(model, is_like));
    if (model.empty()) continue;
    CHECK(ring.front() == model.front());
    CHECK(ring.back() == model.back());
    const size_t at = random() % model.size();
    CHECK(ring[at] == model[at]);
  }
}

}  // namespace crossrail
