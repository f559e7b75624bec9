// What posting to 56 ranks costs by itself, beside a transfer for each: where nothing is moved, and through the verbs
// path onto a table of operations that is a sink.
#include <doctest/doctest.h>
#include <sched.h>

#include <algorithm>
#include <functional>
#include <vector>

#include "moe/proxy_thread.h"
#include "moe_rig.h"
#include "util/clock.h"

#if CROSSRAIL_WITH_VERBS
#include "verbs_switch.h"
#endif

namespace crossrail::moe {

namespace {

#if CROSSRAIL_WITH_VERBS
// Keeps this thread off the last core that it may use, if there is another, for as long as this lives.
class LastCore {
 public:
  LastCore() {
    REQUIRE(sched_getaffinity(0, sizeof before_, &before_) == 0);
    while (!CPU_ISSET(static_cast<size_t>(number_), &before_)) --number_;
    cpu_set_t others = before_;
    CPU_CLR(static_cast<size_t>(number_), &others);
    if (CPU_COUNT(&others) > 0) sched_setaffinity(0, sizeof others, &others);
  }
  ~LastCore() { sched_setaffinity(0, sizeof before_, &before_); }
  LastCore(const LastCore&) = delete;
  LastCore& operator=(const LastCore&) = delete;
  int32_t number() const { return number_; }

 private:
  cpu_set_t before_;
  int32_t number_ = CPU_SETSIZE - 1;
};
#endif

// The decode shape of 64 ranks in nodes of 8: 128 tokens, top 8 of 256 experts.
constexpr uint32_t kWorld = 64;
constexpr uint32_t kNode = 8;
constexpr uint32_t kRounds = 400;
constexpr int64_t kSpinNs = 50'000;  // the default of engines

struct Times {
  int64_t routes_ns = INT64_MAX;
  int64_t rows_ns = INT64_MAX;
  int64_t results_ns = INT64_MAX;
  int64_t one_by_one_ns = INT64_MAX;  // routes, by a transfer for each rank
};

// Rank 0 of those, whose far ranks are all at engines that nobody drives while it posts.
class Poster {
 public:
  Poster(TransportKind kind, uint32_t engines) : engine_(open_engine("rank-0", kind, Polling::kManual)) {
    regions_ = alloc(*engine_, memory_, false);
    proxy_ = std::make_unique<Proxy>(engine_, layout_, 0, memory_, regions_);
    for (uint32_t i = 0; i < engines; ++i) {
      far_.push_back(open_engine("far-" + std::to_string(i), kind, Polling::kManual));
      there_.push_back(alloc(*far_.back(), memory_, false));
    }
  }
  ~Poster() {
    proxy_.reset();
    engine_->close(0);
    for (const EngineRef& far : far_) far->close(0);
  }
  Poster(const Poster&) = delete;
  Poster& operator=(const Poster&) = delete;

  // name: makes a descriptor that of another peer, where there are fewer engines than ranks.
  void connect(const std::function<void(RegionDescriptor&, uint32_t rank)>& name) {
    for (const uint32_t rank : proxy_->far_ranks()) {
      const FarRegions<RegionRef>& there = there_[remotes_.size() % there_.size()];
      const auto remote = [&](const RegionRef& region) {
        RegionDescriptor descriptor = region->descriptor();
        name(descriptor, rank);
        return engine_->remote_region(descriptor);
      };
      remotes_.push_back(remote(there.routes));
      const std::vector<uint32_t> imms(kFarSteps * kParities, 1 + rank);
      proxy_->connect(rank, {remotes_.back(), remote(there.rows)}, imms);
      engine_->connect(*remotes_.back()->peer(), 0, {});  // begins
    }
    const Deadline deadline = deadline_in(60);
    while (!is_connected()) {
      REQUIRE(now_ns() < deadline);
      engine_->progress();
      for (const EngineRef& far : far_) far->progress();
    }
  }

#if CROSSRAIL_WITH_VERBS
  // From when the routes are there until the first write of them is posted: the best of many rounds. With a thread of
  // the proxy's it posts, else the caller.
  int64_t first_write_ns(verbs_test::Switch& fabric, bool has_thread) {
    const std::vector<int32_t> counts(kExperts, 4);
    std::unique_ptr<ProxyThread> thread;
    const LastCore core;
    if (has_thread) thread = std::make_unique<ProxyThread>(*proxy_, core.number(), kSpinNs);
    int64_t best_ns = INT64_MAX;
    for (uint32_t round = 1; round <= kRounds; ++round) {
      fabric.forget();
      const int64_t begin = now_ns();
      if (has_thread) {
        thread->send_routes(round, counts);
        REQUIRE(thread->settle(deadline_in(60)));
      } else {
        proxy_->send_routes(round, counts);
      }
      finish();
      best_ns = std::min(best_ns, fabric.first_write_ns() - begin);
    }
    return best_ns;
  }
#endif

  // The best of many rounds: until all is with the transport.
  Times measure() {
    const std::vector<int32_t> counts(kExperts, 4);  // 16 rows for each rank
    std::vector<int32_t> table;
    for (uint32_t group = 0; group < layout_.groups(); ++group) table.insert(table.end(), counts.begin(), counts.end());
    const Placement placement(layout_, table);
    Times best;
    for (uint32_t round = 1; round <= kRounds; ++round) {
      time(best.one_by_one_ns, [&] { write_one_by_one(); });
      for (const TransferRef& transfer : transfers_) REQUIRE(transfer->wait(deadline_in(60), {}) == WaitResult::kReady);
      transfers_.clear();
      time(best.routes_ns, [&] { proxy_->send_routes(round, counts); });
      time(best.rows_ns, [&] { proxy_->send_rows(round); });
      time(best.results_ns, [&] { proxy_->send_results(round, &placement); });
    }
    return best;
  }

 private:
  bool is_connected() const {
    return std::all_of(remotes_.begin(), remotes_.end(),
                       [](const auto& remote) { return remote->peer()->state() == PeerState::kConnected; });
  }
  void write_one_by_one() {
    for (const RemoteRegionRef& remote : remotes_) {
      transfers_.push_back(engine_->submit_write(
          {.src = regions_.routes.get(), .dst = remote.get(), .length_bytes = memory_.route_bytes, .imm = 1}));
    }
  }
  template <typename Post>
  void time(int64_t& best_ns, Post post) {
    const uint64_t posted_before = engine_->stats().work_requests_posted;
    const int64_t begin = now_ns();
    post();
    while (engine_->stats().work_requests_posted - posted_before < remotes_.size()) engine_->progress();
    best_ns = std::min(best_ns, now_ns() - begin);
    finish();
  }
  void finish() {
    const Deadline deadline = deadline_in(60);
    while (engine_->stats().transfers_inflight > 0) {
      REQUIRE(now_ns() < deadline);
      engine_->progress();
    }
  }

  static std::vector<uint32_t> nodes() {
    std::vector<uint32_t> nodes(kWorld);
    for (uint32_t rank = 0; rank < kWorld; ++rank) nodes[rank] = rank / kNode;
    return nodes;
  }
  const Layout layout_{{.world = kWorld,
                        .experts = kExperts,
                        .top_k = 8,
                        .max_tokens = 128,
                        .private_rows = 24,
                        .node_of_rank = nodes()}};
  const FarMemory memory_ = parts(kWorld, 1024, kStrideBytes, kYBytes);
  EngineRef engine_;
  FarRegions<RegionRef> regions_;
  std::unique_ptr<Proxy> proxy_;
  std::vector<EngineRef> far_;
  std::vector<FarRegions<RegionRef>> there_;
  std::vector<RemoteRegionRef> remotes_;
  std::vector<TransferRef> transfers_;
};

void tell(const std::string& where, const Times& times) {
  MESSAGE("56 ranks, " << where << ": routes " << times.routes_ns << " ns (by a transfer each " << times.one_by_one_ns
                       << "), rows " << times.rows_ns << " ns, results " << times.results_ns << " ns");
}

}  // namespace

TEST_CASE("moe proxy: what posting to 56 ranks costs where nothing is moved") {
  Poster poster(TransportKind::kNull, 1);
  poster.connect([](RegionDescriptor& descriptor, uint32_t rank) {
    descriptor.owner.incarnation[0] = static_cast<uint8_t>(rank);  // another peer each: nothing is sent to any
    descriptor.owner.name = "rank-" + std::to_string(rank);
  });
  tell("null transport", poster.measure());
}

#if CROSSRAIL_WITH_VERBS
TEST_CASE("moe proxy: what posting to 56 ranks costs on the verbs path, onto a sink") {
  verbs_test::Switch fabric;
  Poster poster(TransportKind::kVerbs, kWorld - kNode);
  poster.connect([](RegionDescriptor&, uint32_t) {});
  tell("verbs", poster.measure());
  MESSAGE("routes there to first write posted: by the caller "
          << poster.first_write_ns(fabric, false) << " ns, by a thread " << poster.first_write_ns(fabric, true)
          << " ns");
}
#endif

}  // namespace crossrail::moe
