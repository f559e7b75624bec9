// Two engines in one process, many threads: what ThreadSanitizer and AddressSanitizer look at.
#include <doctest/doctest.h>
#include <sys/uio.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <cstring>
#include <numeric>
#include <random>
#include <thread>
#include <vector>

#include "engine/core.h"
#include "engine/engine.h"
#include "engine/transfer_pool.h"
#include "engine_pair.h"
#include "util/clock.h"

namespace crossrail::test {

namespace {

// A container may forbid it, and emulators do not know it.
bool kernel_attaches() {
  uint8_t from = 1, to = 0;
  const iovec local{&to, 1}, remote{&from, 1};
  return process_vm_readv(getpid(), &local, 1, &remote, 1, 0) == 1;
}

}  // namespace

TEST_CASE("a write lands, is counted once, and its region can close") {
  Pair pair;
  RegionRef src = pair.a->alloc(1 << 20, false);
  RegionRef dst = pair.b->alloc(1 << 20, false);
  std::memset(src->base(), 0x5a, 1 << 20);
  RemoteRegionRef remote = pair.a->remote_region(dst->descriptor());
  require_done(pair.a->submit_write({.src = src.get(), .dst = remote.get(), .length_bytes = 1 << 20, .imm = 3}));
  require_counted(*pair.b, 3, 1);
  CHECK(std::memcmp(src->base(), dst->base(), 1 << 20) == 0);
  CHECK(dst->close(deadline_in(5), {}) == WaitResult::kReady);
  TransferRef late = pair.a->submit_write({.src = src.get(), .dst = remote.get(), .length_bytes = 8, .imm = 3});
  REQUIRE(late->wait(deadline_in(5), {}) == WaitResult::kReady);
  CHECK(late->status() == Status::kRegionClosed);
  CHECK(pair.b->imm_counter(3)->poll_units() == 0);
}

TEST_CASE("many threads submit to one engine, every byte and count arrives") {
  for (const Polling polling : {Polling::kAdaptive, Polling::kSpin}) {
    Pair pair(4, 2, polling);
    constexpr uint32_t kThreads = 4;
    constexpr uint64_t kWrites = 2000;
    constexpr uint64_t kStride = 64;
    RegionRef src = pair.a->alloc(kThreads * kWrites * kStride, false);
    RegionRef dst = pair.b->alloc(kThreads * kWrites * kStride, false);
    RemoteRegionRef remote = pair.a->remote_region(dst->descriptor());
    std::vector<std::thread> threads;
    for (uint32_t t = 0; t < kThreads; ++t) {
      threads.emplace_back([&, t] {
        TransferRef last;
        for (uint64_t i = 0; i < kWrites; ++i) {
          const uint64_t offset = (t * kWrites + i) * kStride;
          std::memcpy(src->base() + offset, &offset, sizeof offset);
          last = pair.a->submit_write({.src = src.get(),
                                       .src_offset = offset,
                                       .dst = remote.get(),
                                       .dst_offset = offset,
                                       .length_bytes = kStride,
                                       .imm = 9});
        }
        require_done(last);
      });
    }
    std::thread waiter([&] { require_counted(*pair.b, 9, kThreads * kWrites / 2); });
    require_counted(*pair.b, 9, kThreads * kWrites / 2);
    waiter.join();
    for (std::thread& thread : threads) thread.join();
    for (uint64_t offset = 0; offset < kThreads * kWrites * kStride; offset += kStride) {
      uint64_t word = 0;
      std::memcpy(&word, dst->base() + offset, sizeof word);
      REQUIRE(word == offset);
    }
    CHECK(pair.b->imm_counter(9)->poll_units() == 0);
  }
}

TEST_CASE("a scatter counts each target on its own number, and none where it has none") {
  Pair pair;
  RegionRef src = pair.a->alloc(4096, false);
  RegionRef dst = pair.b->alloc(4096, false);
  const RemoteRegionRef remote = pair.a->remote_region(dst->descriptor());
  const std::array<RemoteRegion*, 3> dsts = {remote.get(), remote.get(), remote.get()};
  const std::array<uint64_t, 3> lengths = {16, 16, 0};
  const std::array<uint64_t, 3> offsets = {0, 16, 32};
  const std::array<uint32_t, 3> imms = {3, kNoImm, 4};
  ScatterRequest request{
      .src = src.get(), .dsts = dsts, .src_offsets = offsets, .dst_offsets = offsets, .lengths = lengths, .imms = imms};

  require_done(pair.a->submit_scatter(request));

  require_counted(*pair.b, 3, 1);
  require_counted(*pair.b, 4, 1);
  CHECK(pair.b->stats().imm_units_received == 2 * kUnitsPerCount);

  request.imm = 5;
  CHECK_THROWS_WITH_AS(pair.a->submit_scatter(request), doctest::Contains("imm and imms"), UsageError);
  request.imm = kNoImm;
  request.imms = std::span(imms).first(2);
  CHECK_THROWS_WITH_AS(pair.a->submit_scatter(request), doctest::Contains("imms has 2"), UsageError);
  const std::array<uint32_t, 3> too_large = {3, kImmMax + 1, 4};
  request.imms = too_large;
  CHECK_THROWS_WITH_AS(pair.a->submit_scatter(request), doctest::Contains("imms[1]"), UsageError);
}

TEST_CASE("paged writes with runs and shuffles count every page") {
  Pair pair(3, 1);
  constexpr uint64_t kPages = 5000;
  constexpr uint64_t kPageBytes = 512;
  RegionRef src = pair.a->alloc(kPages * kPageBytes, false);
  RegionRef dst = pair.b->alloc(kPages * kPageBytes, false);
  RemoteRegionRef remote = pair.a->remote_region(dst->descriptor());
  std::mt19937 random(11);
  std::vector<uint32_t> from(kPages), to(kPages);
  std::iota(from.begin(), from.end(), 0u);
  std::iota(to.begin(), to.end(), 0u);
  std::shuffle(from.begin() + 1000, from.end(), random);
  std::shuffle(to.begin() + 2000, to.end(), random);
  for (uint64_t page = 0; page < kPages; ++page) std::memcpy(src->base() + page * kPageBytes, &page, sizeof page);
  PagedWriteRequest request;
  request.src = src.get();
  request.dst = remote.get();
  request.src_stride_bytes = request.dst_stride_bytes = request.page_bytes = kPageBytes;
  request.src_pages = {from.data(), kPages, IndexType::kUint32};
  request.dst_pages = {to.data(), kPages, IndexType::kUint32};
  request.imm = 77;
  require_done(pair.a->submit_paged_writes(request));
  require_counted(*pair.b, 77, kPages);
  for (uint64_t i = 0; i < kPages; ++i) {
    uint64_t page = 0;
    std::memcpy(&page, dst->base() + to[i] * kPageBytes, sizeof page);
    REQUIRE(page == from[i]);
  }
}

TEST_CASE("more pages than a transfer can count works are refused") {
  Pair pair;
  RegionRef src = pair.a->alloc(64, false);
  RegionRef dst = pair.b->alloc(64, false);
  const RemoteRegionRef remote = pair.a->remote_region(dst->descriptor());
  const int64_t first = 0;
  const PageIndices pages{.data = &first, .count = uint64_t{1} << 32};
  CHECK_THROWS_AS(pair.a->submit_paged_writes(
                      {.src = src.get(), .src_pages = pages, .dst = remote.get(), .dst_pages = pages, .page_bytes = 8}),
                  UsageError);
}

TEST_CASE("a burst of long paged writes keeps no more room for page indices than the pool's bound") {
  EngineRef a = open_engine("a", 1, Polling::kManual);
  RegionRef memory = a->alloc(4096, false);
  RemoteRegionRef there = a->remote_region(memory->descriptor());
  const std::vector<uint32_t> indices(16384);
  const PageIndices pages{.data = indices.data(), .count = indices.size(), .type = IndexType::kUint32};
  std::vector<TransferRef> transfers;  // all at once: nobody drives
  while (transfers.size() * indices.size() * 2 * sizeof(uint32_t) < 2 * TransferPool::kBytesKeptMax) {
    transfers.push_back(a->submit_paged_writes(
        {.src = memory.get(), .src_pages = pages, .dst = there.get(), .dst_pages = pages, .page_bytes = 8}));
  }
  a->close(0);
  for (const TransferRef& transfer : transfers) REQUIRE(transfer->status() == Status::kEngineClosed);
  transfers.clear();
  CHECK(a->core().transfers().bytes_kept() > 0);
  CHECK(a->core().transfers().bytes_kept() <= TransferPool::kBytesKeptMax);
}

TEST_CASE("a burst of messages that nobody receives keeps no more room than the pool's bound") {
  EngineRef a = open_engine("a", 1, Polling::kManual);
  PeerRef self = a->peer(a->address());
  const std::vector<uint8_t> message(a->options().message_bytes_max);
  std::vector<TransferRef> transfers;
  while (transfers.size() * message.size() < 2 * TransferPool::kBytesKeptMax)
    transfers.push_back(a->submit_send(*self, message));
  a->close(0);
  transfers.clear();
  CHECK(a->core().transfers().bytes_kept() > TransferPool::kBytesKeptMax / 2);
  CHECK(a->core().transfers().bytes_kept() <= TransferPool::kBytesKeptMax);
}

TEST_CASE("of the transfers of a burst those beyond the pool's bound are deleted as others are submitted") {
  EngineRef a = open_engine("a", 1, Polling::kManual);
  RegionRef memory = a->alloc(64, false);
  RemoteRegionRef there = a->remote_region(memory->descriptor());
  TransferPool& pool = a->core().transfers();
  constexpr uint64_t kSurplus = 100;
  std::vector<TransferRef> burst;
  while (burst.size() < TransferPool::kIdleMax + kSurplus) burst.push_back(TransferRef::adopt(pool.take()));
  burst.clear();
  REQUIRE(pool.idle() == TransferPool::kIdleMax + kSurplus);
  for (uint64_t i = 0; i < kSurplus; ++i) TransferRef::adopt(pool.take());
  CHECK(pool.idle() == TransferPool::kIdleMax);
}

TEST_CASE("private memory: staged and attached writes and reads move every byte") {
  for (const PrivatePath path : {PrivatePath::kStaged, PrivatePath::kCrossMemoryAttach}) {
    EngineRef a = open_engine("a", 3, Polling::kAdaptive, path);
    EngineRef b = open_engine("b", 2, Polling::kAdaptive, path);
    constexpr uint64_t kBytes = (5 << 20) + 13;
    std::vector<uint8_t> from(kBytes), to(kBytes + 2, 0xee), back(kBytes);
    std::mt19937 random(5);
    for (uint8_t& byte : from) byte = static_cast<uint8_t>(random());
    RegionRef src = a->register_memory(from.data(), kBytes, Access::kLocal);
    RegionRef dst = b->register_memory(to.data() + 1, kBytes, Access::kRemoteWrite);
    RegionRef home = a->register_memory(back.data(), kBytes, Access::kLocal);
    RemoteRegionRef remote = a->remote_region(dst->descriptor());
    require_done(a->submit_write({.src = src.get(), .dst = remote.get(), .length_bytes = kBytes, .imm = 1}));
    require_counted(*b, 1, 1);
    CHECK(std::memcmp(from.data(), to.data() + 1, kBytes) == 0);
    CHECK(to.front() == 0xee);
    CHECK(to.back() == 0xee);
    require_done(a->submit_read({.dst = home.get(), .src = remote.get(), .length_bytes = kBytes}));
    CHECK(from == back);
    // Small pages, packed into chunks.
    constexpr uint32_t kPages = 3000;
    std::vector<uint32_t> pages(kPages);
    std::iota(pages.begin(), pages.end(), 0u);
    std::shuffle(pages.begin(), pages.end(), random);
    std::fill(to.begin(), to.end(), uint8_t{0});
    PagedWriteRequest request;
    request.src = src.get();
    request.dst = remote.get();
    request.src_stride_bytes = request.dst_stride_bytes = request.page_bytes = 1000;
    request.src_pages = request.dst_pages = {pages.data(), kPages, IndexType::kUint32};
    request.imm = 2;
    require_done(a->submit_paged_writes(request));
    require_counted(*b, 2, kPages);
    CHECK(std::memcmp(from.data(), to.data() + 1, kPages * 1000) == 0);
    const PeerExplanation explanation = a->explain(*a->peer(b->address()));
    REQUIRE(explanation.paths.size() == 1);
    const bool attaches = path == PrivatePath::kCrossMemoryAttach && kernel_attaches();
    CHECK(explanation.paths[0].path == (attaches ? "cross-memory-attach" : "staged"));
    CHECK(dst->close(deadline_in(5), {}) == WaitResult::kReady);
    TransferRef late = a->submit_write({.src = src.get(), .dst = remote.get(), .length_bytes = kBytes, .imm = 1});
    REQUIRE(late->wait(deadline_in(5), {}) == WaitResult::kReady);
    CHECK(late->status() == Status::kRegionClosed);
    a->close(0);
    b->close(0);
  }
}

TEST_CASE("threads wait, notify and withdraw on one counter while counts arrive") {
  Pair pair;
  RegionRef src = pair.a->alloc(4096, false);
  RegionRef dst = pair.b->alloc(4096, false);
  RemoteRegionRef remote = pair.a->remote_region(dst->descriptor());
  Ref<ImmCounter> counter = pair.b->imm_counter(1);
  std::atomic<uint64_t> consumed{0};
  std::atomic<bool> stop{false};
  std::vector<std::thread> threads;
  for (int t = 0; t < 3; ++t) {
    threads.emplace_back([&] {
      while (!stop) {
        if (counter->wait(2, now_ns() + 300'000, {}) == WaitResult::kReady) consumed += 2;
      }
    });
  }
  auto notifier = Ref<Notifier>::adopt(new Notifier);
  constexpr uint64_t kWrites = 6000;
  std::thread notified([&] {
    while (!stop) {
      const uint64_t ticket = counter->notify(1, notifier.get(), 5);
      std::this_thread::yield();
      if (!counter->cancel_notify(ticket)) consumed += 1;
    }
  });
  for (uint64_t i = 0; i < kWrites; ++i) {
    pair.a->submit_write({.src = src.get(), .dst = remote.get(), .length_bytes = 8, .imm = 1});
  }
  const Deadline deadline = deadline_in(20);
  while (consumed + counter->poll() < kWrites && now_ns() < deadline) std::this_thread::yield();
  stop = true;
  for (std::thread& thread : threads) thread.join();
  notified.join();
  CHECK(consumed + counter->poll() == kWrites);
  std::vector<uint64_t> cookies;
  notifier->drain([&](uint64_t cookie) { cookies.push_back(cookie); });
  CHECK(cookies.size() <= kWrites);
}

TEST_CASE("messages cross both ways, an exhausted pool holds senders back") {
  Pair pair;
  Ref<ReceivePool> pool = pair.b->submit_recvs(4, 256);
  PeerRef b = pair.a->peer(pair.b->address());
  std::vector<TransferRef> sent;
  for (uint8_t i = 0; i < 100; ++i) {
    const std::vector<uint8_t> payload(i + 1, i);
    sent.push_back(pair.a->submit_send(*b, payload));
  }
  std::vector<Message> got;
  const Deadline deadline = deadline_in(20);
  while (got.size() < 100 && now_ns() < deadline) {
    REQUIRE(pool->wait(deadline, {}) == WaitResult::kReady);
    pool->poll(2, &got);
  }
  REQUIRE(got.size() == 100);
  for (const TransferRef& transfer : sent) require_done(transfer);
  uint64_t bytes = 0;
  for (const Message& message : got) {
    CHECK(message.sender->name == "a");
    bytes += message.payload.size();
  }
  CHECK(bytes == 5050);
  TransferRef too_long = pair.a->submit_send(*b, std::vector<uint8_t>(257));
  REQUIRE(too_long->wait(deadline_in(5), {}) == WaitResult::kReady);
  CHECK(too_long->status() == Status::kMessageTooLong);
}

TEST_CASE("a cancelled transfer counts whole or not at all, on every path") {
  for (const PrivatePath path : {PrivatePath::kAuto, PrivatePath::kStaged, PrivatePath::kCrossMemoryAttach}) {
    EngineRef a = open_engine("a", 4, Polling::kAdaptive, path);
    EngineRef b = open_engine("b", 2, Polling::kAdaptive, path);
    constexpr uint64_t kBytes = 3'000'003;
    RegionRef src = a->alloc(kBytes, true);
    std::vector<std::byte> memory(kBytes);
    RegionRef dst = b->register_memory(memory.data(), kBytes, Access::kRemoteWrite);
    RemoteRegionRef remote = a->remote_region(dst->descriptor());
    std::array<uint64_t, 8> offsets{}, lengths{};
    std::array<RemoteRegion*, 8> targets;
    targets.fill(remote.get());
    lengths.fill(kBytes / 3);
    uint64_t counted_least = 0, counted_most = 0;
    std::mt19937 random(7);
    for (int i = 0; i < 90; ++i) {
      const bool is_scatter = i % 3 == 2;
      std::vector<TransferRef> sent;
      for (int k = 0; k < 2; ++k) {
        sent.push_back(
            is_scatter ? a->submit_scatter({.src = src.get(),
                                            .dsts = targets,
                                            .src_offsets = offsets,
                                            .dst_offsets = offsets,
                                            .lengths = lengths,
                                            .imm = 8})
                       : a->submit_write({.src = src.get(), .dst = remote.get(), .length_bytes = kBytes, .imm = 8}));
      }
      std::this_thread::sleep_for(std::chrono::microseconds(random() % 1500));
      for (const TransferRef& transfer : sent) transfer->cancel();
      for (const TransferRef& transfer : sent) {
        REQUIRE(transfer->wait(deadline_in(20), {}) == WaitResult::kReady);
        const bool done = transfer->status() == Status::kDone;
        CHECK((done || transfer->status() == Status::kCancelled));
        if (!done) CHECK(transfer->info().bytes_retired < transfer->info().bytes);
        counted_least += done ? lengths.size() * is_scatter + !is_scatter : 0;
        counted_most += is_scatter ? lengths.size() : done;
      }
    }
    // What the last ones left in the rings: the marker comes after it on every rail.
    for (uint32_t rail = 0; rail < 4; ++rail)
      require_done(a->submit_write({.src = src.get(), .dst = remote.get(), .length_bytes = 0, .imm = 9, .rail = rail}));
    require_counted(*b, 9, 4);
    const uint64_t units = b->imm_counter(8)->poll_units();
    CHECK(units % kUnitsPerCount == 0);
    CHECK(units / kUnitsPerCount >= counted_least);
    CHECK(units / kUnitsPerCount <= counted_most);
    a->close(0);
    b->close(0);
  }
}

TEST_CASE("a message that no buffer awaits can always be cancelled") {
  Pair pair;
  PeerRef b = pair.a->peer(pair.b->address());
  for (int i = 0; i < 300; ++i) {
    TransferRef transfer = pair.a->submit_send(*b, std::vector<uint8_t>(200));
    transfer->cancel();
    REQUIRE(transfer->wait(deadline_in(20), {}) == WaitResult::kReady);
    CHECK(transfer->status() == Status::kCancelled);
  }
}

TEST_CASE("every cookie posted by many threads is drained once") {
  auto notifier = Ref<Notifier>::adopt(new Notifier);
  constexpr uint64_t kPerThread = 20'000;
  std::vector<std::thread> threads;
  for (uint64_t t = 0; t < 3; ++t) {
    threads.emplace_back([&, t] {
      for (uint64_t i = 0; i < kPerThread; ++i) notifier->post(t * kPerThread + i);
    });
  }
  std::vector<uint64_t> cookies;
  const Deadline deadline = deadline_in(20);
  while (cookies.size() < 3 * kPerThread && now_ns() < deadline) {
    notifier->wait(now_ns() + 10'000'000);
    notifier->drain([&](uint64_t cookie) { cookies.push_back(cookie); });
  }
  for (std::thread& thread : threads) thread.join();
  std::sort(cookies.begin(), cookies.end());
  REQUIRE(cookies.size() == 3 * kPerThread);
  for (uint64_t i = 0; i < cookies.size(); ++i) REQUIRE(cookies[i] == i);
}

TEST_CASE("watchers: add_up_to() never takes the word past its limit, whoever adds, and wraps as a counter does") {
  EngineRef engine = open_engine("w");
  auto notifier = Ref<Notifier>::adopt(new Notifier);
  Ref<Watcher> watcher = engine->alloc_watcher(notifier.get(), 1);
  const uint64_t before_wrap = ~uint64_t{0} - 1;
  watcher->store(before_wrap);
  CHECK_FALSE(watcher->add_up_to(before_wrap - 1, 0));  // past it already
  CHECK(watcher->add_up_to(before_wrap, 0));
  CHECK_FALSE(watcher->add_up_to(before_wrap, 1));
  CHECK_FALSE(watcher->add_up_to(before_wrap + 3, ~uint64_t{0}));
  CHECK(watcher->value() == before_wrap);
  CHECK(watcher->add_up_to(before_wrap + 3, 3));
  CHECK(watcher->value() == 1);

  std::atomic<int> added{0};
  std::vector<std::thread> threads(3);
  for (std::thread& thread : threads) {
    thread = std::thread([&] {
      for (int i = 0; i < 10'000; ++i) added += watcher->add_up_to(20'001, 1) ? 1 : 0;
    });
  }
  for (std::thread& thread : threads) thread.join();
  CHECK(added == 20'000);
  CHECK(watcher->value() == 20'001);
}

TEST_CASE("watchers report the last value") {
  EngineRef engine = open_engine("w");
  auto notifier = Ref<Notifier>::adopt(new Notifier);
  Ref<Watcher> watcher = engine->alloc_watcher(notifier.get(), 1);
  std::thread kernel([&] {
    for (int i = 0; i < 10'000; ++i) watcher->add(1);
  });
  uint64_t value = 0;
  const Deadline deadline = deadline_in(20);
  while (value < 10'000 && now_ns() < deadline) {
    notifier->wait(now_ns() + 10'000'000);
    std::vector<uint64_t> cookies;
    notifier->drain([&](uint64_t cookie) { cookies.push_back(cookie); });
    const Watcher::Change change = watcher->take();
    CHECK(change.old_value == value);
    CHECK(change.new_value >= value);
    value = change.new_value;
  }
  kernel.join();
  CHECK(value == 10'000);
  engine->close(0);
}

}  // namespace crossrail::test
