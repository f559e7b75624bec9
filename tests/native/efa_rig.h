// EFA devices of a doubled libfabric, and paths between them.
#pragma once
#include <doctest/doctest.h>

#include <algorithm>
#include <functional>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "ofi_double.h"
#include "ofi_rig.h"
#include "transport/ofi/open.h"

namespace crossrail::test {

inline std::unique_ptr<ofi::OfiNic> open_efa_nic(LibfabricDouble& world, const std::string& fabric,
                                                 const std::string& name) {
  const auto library = world.library();
  const ofi::Rules rules = ofi::rules_for(fabric);
  auto devices = ofi::choose(*library, rules, {name}, 1);
  return std::make_unique<ofi::OfiNic>(library, rules, std::move(devices.front()));
}

struct EfaPair {
  explicit EfaPair(DoubleSettings settings = {}, uint32_t seed = 1, const std::string& fabric = "efa")
      : world(settings, seed),
        pair(std::make_unique<OfiPair>(open_efa_nic(world, fabric, "rdmap0s6"),
                                       open_efa_nic(world, fabric, "rdmap1s6"))) {
    pair->connect();
  }
  ~EfaPair() {
    if (pair != nullptr) finish();
    CHECK(world.violations() == std::vector<std::string>{});
    CHECK(world.endpoints_open() == 0);
  }
  void finish() {
    if (pair->at_a) CHECK(pair->end(pair->a, pair->at_a));
    if (pair->at_b) CHECK(pair->end(pair->b, pair->at_b));
    pair.reset();
  }
  std::vector<uint64_t>& done() { return pair->a.events.done[pair->at_a.get()]; }
  std::vector<NicRecorder::Failure>& failed() { return pair->a.events.failed[pair->at_a.get()]; }

  LibfabricDouble world;
  std::unique_ptr<OfiPair> pair;
};

// Another NIC, the third device's, and paths to it: each like one to a peer of its own.
struct EfaThird {
  explicit EfaThird(EfaPair& pair, size_t count = 1) : it(pair), side(open_efa_nic(pair.world, "efa", "rdmap2s6")) {
    OfiSide& a = it.pair->a;
    for (size_t i = 0; i < count; ++i) {
      paths.push_back(a.nic->make_path());
      ends.push_back(side.nic->make_path());
      paths.back()->connect(side.nic->endpoint(), ends.back()->offer());
      ends.back()->connect(a.nic->endpoint(), paths.back()->offer());
    }
    const auto is_sent = [](const auto& path) { return path->is_sent(); };
    REQUIRE(until([&] {
      return std::ranges::all_of(paths, is_sent) && std::ranges::all_of(ends, is_sent) && it.pair->at_a->is_sent();
    }));
  }
  bool until(const std::function<bool()>& wanted) {
    return it.pair->until([&] {
      side.poll();
      return wanted();
    });
  }
  void finish() {
    for (auto& path : paths) path->break_off("end");
    for (auto& path : ends) path->break_off("end");
    CHECK(until([&] {
      return std::ranges::all_of(paths, [&](auto& path) { return it.pair->a.events.flushed[path.get()] == 1; }) &&
             std::ranges::all_of(ends, [&](auto& path) { return side.events.flushed[path.get()] == 1; });
    }));
    paths.clear();
    ends.clear();
    it.finish();
    side.registration.reset();
    side.nic.reset();
  }

  EfaPair& it;
  OfiSide side;
  std::vector<std::unique_ptr<rdma::NicPath>> paths;
  std::vector<std::unique_ptr<rdma::NicPath>> ends;
};

inline std::vector<rdma::NicWork> efa_pages(const EfaPair& it, uint64_t count) {
  std::vector<rdma::NicWork> works;
  for (uint64_t i = 0; i < count; ++i) {
    works.push_back(it.pair->a.write_to(it.pair->b, i, (i % 200) * 4096, 4096));
    works.back().has_imm = true;
    works.back().imm = static_cast<uint32_t>(i);
  }
  return works;
}

inline bool each_once(std::vector<uint64_t> cookies, uint64_t count) {
  std::sort(cookies.begin(), cookies.end());
  if (cookies.size() != count) return false;
  for (uint64_t i = 0; i < count; ++i) {
    if (cookies[i] != i) return false;
  }
  return true;
}

}  // namespace crossrail::test
