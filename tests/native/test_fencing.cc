// Regions that are revoked and renewed while peers write: what ThreadSanitizer looks at. Engines of one process see
// each other's memory at one address, so that a copy that goes on after revoke() is a race with what the owner does
// next.
#include <doctest/doctest.h>

#include <algorithm>
#include <atomic>
#include <cstring>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "engine/engine.h"
#include "util/clock.h"

namespace crossrail {

namespace {

EngineRef open(const std::string& name, TransportKind kind, PrivatePath path) {
  EngineOptions options;
  options.name = name;
  options.transports = {kind};
  options.rail_count = 2;
  if (kind == TransportKind::kTcp) options.rails = {"127.0.0.1", "127.0.0.2"};
  options.private_path = path;
  return Engine::open(options);
}

void fence_under_load(TransportKind kind, PrivatePath path, bool is_mapped, bool verifies) {
  constexpr uint64_t kBytes = 300'000;
  constexpr int kRounds = 25;
  EngineRef owner = open("owner", kind, path);
  EngineRef peer = open("peer", kind, path);
  std::vector<std::byte> memory(kBytes);
  RegionRef region =
      is_mapped ? owner->alloc(kBytes, false) : owner->register_memory(memory.data(), kBytes, Access::kRemoteWrite);
  std::mutex mutex;
  RegionDescriptor descriptor = region->descriptor();
  std::atomic<bool> stopping{false};
  std::atomic<int> done{0};
  std::vector<std::thread> writers;
  for (int number = 0; number < 2; ++number) {
    writers.emplace_back([&, number] {
      RegionRef src = peer->alloc(kBytes, false);
      std::memset(src->base(), 100 + number, kBytes);
      while (!stopping.load()) {
        RegionDescriptor now;
        {
          std::lock_guard lock(mutex);
          now = descriptor;
        }
        RemoteRegionRef remote = peer->remote_region(now);
        TransferRef write = peer->submit_write({.src = src.get(),
                                                .dst = remote.get(),
                                                .length_bytes = kBytes,
                                                .imm = 1,
                                                .verify = verifies && number == 0});
        REQUIRE(write->wait(deadline_in(60), {}) == WaitResult::kReady);
        const Status status = write->status();
        // Two writers to one range: a checked write may find the other's bytes.
        const bool is_expected =
            status == Status::kDone || status == Status::kRegionRevoked || status == Status::kChecksumMismatch;
        CHECK_MESSAGE(is_expected, status_name(status) << ": " << write->info().detail);
        if (status == Status::kDone) ++done;
      }
    });
  }
  for (int round = 0; round < kRounds; ++round) {
    const int before = done.load();
    const Deadline patience = deadline_in(60);
    while (done.load() == before && now_ns() < patience) std::this_thread::yield();
    CHECK(done.load() > before);
    REQUIRE(region->revoke(deadline_in(60), {}) == WaitResult::kReady);
    std::memset(region->base(), round, kBytes);
    CHECK(std::all_of(region->base(), region->base() + kBytes,
                      [&](std::byte byte) { return byte == static_cast<std::byte>(round); }));
    region->renew();
    std::lock_guard lock(mutex);
    descriptor = region->descriptor();
  }
  stopping.store(true);
  for (std::thread& writer : writers) writer.join();
  CHECK(region->close(deadline_in(60), {}) == WaitResult::kReady);
  std::memset(region->base(), 7, kBytes);
  owner->close();
  peer->close();
}

}  // namespace

TEST_CASE("fence: after revoke the memory is the owner's, on every path") {
  fence_under_load(TransportKind::kShm, PrivatePath::kAuto, true, false);
  fence_under_load(TransportKind::kShm, PrivatePath::kStaged, false, false);
  fence_under_load(TransportKind::kTcp, PrivatePath::kAuto, false, false);
}

TEST_CASE("fence: likewise while the owner's engine verifies what was written") {
  fence_under_load(TransportKind::kShm, PrivatePath::kStaged, false, true);
  fence_under_load(TransportKind::kTcp, PrivatePath::kAuto, false, true);
}

TEST_CASE("fence: what was revoked is said to be revoked, though its place went to a later generation") {
  EngineRef owner = open("owner", TransportKind::kShm, PrivatePath::kAuto);
  EngineRef peer = open("peer", TransportKind::kShm, PrivatePath::kAuto);
  RegionRef region = owner->alloc(4096, false);
  RegionRef src = peer->alloc(4096, false);
  const auto write = [&](const RemoteRegionRef& target) {
    TransferRef transfer = peer->submit_write({.src = src.get(), .dst = target.get(), .length_bytes = 64});
    REQUIRE(transfer->wait(deadline_in(60), {}) == WaitResult::kReady);
    return transfer->status();
  };
  for (int round = 0; round < 200; ++round) {
    RemoteRegionRef remote = peer->remote_region(region->descriptor());
    REQUIRE(write(remote) == Status::kDone);
    for (int generation = 0; generation < 2; ++generation) {
      REQUIRE(region->revoke(deadline_in(60), {}) == WaitResult::kReady);
      region->renew();
    }
    // Often before the owner's control thread has told the peer.
    REQUIRE(write(remote) == Status::kRegionRevoked);
  }
  CHECK(region->close(deadline_in(60), {}) == WaitResult::kReady);
  owner->close();
  peer->close();
}

}  // namespace crossrail
