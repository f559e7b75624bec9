// Engines over tcp with many threads at once: what ThreadSanitizer looks at.
#include <dlfcn.h>
#include <doctest/doctest.h>
#include <sys/epoll.h>
#include <sys/socket.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <chrono>
#include <cstring>
#include <string>
#include <thread>
#include <vector>

#include "engine/engine.h"
#include "tls_files.h"
#include "util/clock.h"

namespace crossrail {

namespace {

constexpr Deadline kPatience = kNoDeadline;

EngineRef open(const std::string& name, uint32_t rails = 1, int64_t peer_timeout_ns = 30'000'000'000,
               const tcp::TestTls* tls = nullptr) {
  EngineOptions options;
  if (tls != nullptr) options.tls = tls->options();
  options.name = name;
  options.transports = {TransportKind::kTcp};
  for (uint32_t rail = 0; rail < rails; ++rail) options.rails.push_back("127.0.0." + std::to_string(rail + 1));
  options.rail_count = rails;
  options.peer_timeout_ns = peer_timeout_ns;
  return Engine::open(options);
}

void finish(const TransferRef& transfer, Status expected = Status::kDone) {
  REQUIRE(transfer->wait(deadline_in(60), {}) == WaitResult::kReady);
  CHECK(transfer->status() == expected);
}

}  // namespace

namespace {

void write_both_ways(const EngineRef& a, const EngineRef& b) {
  constexpr int kThreads = 3;
  constexpr int kRounds = 60;
  constexpr uint64_t kBytes = 300'000;
  std::vector<std::thread> threads;
  for (int side = 0; side < 2; ++side) {
    for (int number = 0; number < kThreads; ++number) {
      threads.emplace_back([&, side, number] {
        Engine& from = side == 0 ? *a : *b;
        Engine& to = side == 0 ? *b : *a;
        RegionRef src = from.alloc(kBytes, false);
        RegionRef dst = to.alloc(kBytes, false);
        std::memset(src->base(), number + 1, kBytes);
        RemoteRegionRef remote = from.remote_region(dst->descriptor());
        const auto imm = static_cast<uint32_t>(10 + number);
        for (int round = 0; round < kRounds; ++round) {
          const uint64_t length = round % 3 == 0 ? kBytes : 8 + static_cast<uint64_t>(round);
          finish(from.submit_write({.src = src.get(), .dst = remote.get(), .length_bytes = length, .imm = imm}));
        }
        REQUIRE(to.imm_counter(imm)->wait(kRounds, deadline_in(60), {}) == WaitResult::kReady);
        CHECK(std::memcmp(src->base(), dst->base(), kBytes) == 0);
        CHECK(dst->close(deadline_in(60), {}) == WaitResult::kReady);
      });
    }
  }
  for (std::thread& thread : threads) thread.join();
  a->close(kPatience);
  b->close(kPatience);
}

}  // namespace

TEST_CASE("tcp: several threads write both ways and count each other's writes") {
  write_both_ways(open("a", 2), open("b", 2));
}

TEST_CASE("tcp: the same under TLS") {
  const tcp::TestTls tls;
  write_both_ways(open("a", 2, 30'000'000'000, &tls), open("b", 2, 30'000'000'000, &tls));
}

TEST_CASE("tcp: regions close under writes and reads of others") {
  EngineRef a = open("a", 2);
  EngineRef b = open("b");
  constexpr uint64_t kBytes = 400'000;
  RegionRef src = a->alloc(kBytes, false);
  for (int round = 0; round < 12; ++round) {
    RegionRef dst = b->alloc(kBytes, false);
    RemoteRegionRef remote = a->remote_region(dst->descriptor());
    std::vector<TransferRef> transfers;
    for (int i = 0; i < 6; ++i) {
      transfers.push_back(a->submit_write({.src = src.get(), .dst = remote.get(), .length_bytes = kBytes}));
      transfers.push_back(a->submit_write({.src = src.get(), .dst = remote.get(), .length_bytes = 64}));
    }
    CHECK(dst->close(deadline_in(60), {}) == WaitResult::kReady);
    for (const TransferRef& transfer : transfers) {
      REQUIRE(transfer->wait(deadline_in(60), {}) == WaitResult::kReady);
      CHECK((transfer->status() == Status::kDone || transfer->status() == Status::kRegionClosed));
    }
  }
  a->close(0);
  b->close(0);
}

TEST_CASE("tcp: cancels, forgotten peers and closing engines, all at once") {
  EngineRef target = open("target", 2);
  RegionRef dst = target->alloc(1 << 20, false);
  std::atomic<bool> stop{false};
  std::thread canceller([&] {
    EngineRef engine = open("canceller", 2);
    RegionRef src = engine->alloc(1 << 20, false);
    while (!stop.load()) {
      RemoteRegionRef remote = engine->remote_region(dst->descriptor());
      TransferRef transfer = engine->submit_write({.src = src.get(), .dst = remote.get(), .length_bytes = 1 << 20});
      transfer->cancel();
      REQUIRE(transfer->wait(deadline_in(60), {}) == WaitResult::kReady);
    }
    engine->close(0);
  });
  std::thread forgetter([&] {
    EngineRef engine = open("forgetter");
    RegionRef src = engine->alloc(1000, false);
    while (!stop.load()) {
      RemoteRegionRef remote = engine->remote_region(dst->descriptor());
      TransferRef transfer = engine->submit_write({.src = src.get(), .dst = remote.get(), .length_bytes = 1000});
      engine->forget_peer(*engine->peer(target->address()));
      REQUIRE(transfer->wait(deadline_in(60), {}) == WaitResult::kReady);
      const Status status = transfer->status();
      CHECK((status == Status::kDone || status == Status::kPeerLost));
    }
    engine->close(0);
  });
  for (int round = 0; round < 15; ++round) {
    EngineRef guest = open("guest", 2);
    RegionRef src = guest->alloc(100'000, false);
    RemoteRegionRef remote = guest->remote_region(dst->descriptor());
    std::vector<TransferRef> transfers;
    for (int i = 0; i < 10; ++i) {
      transfers.push_back(guest->submit_write({.src = src.get(), .dst = remote.get(), .length_bytes = 100'000}));
    }
    guest->close(0);
    for (const TransferRef& transfer : transfers) CHECK(transfer->status() != Status::kPending);
  }
  stop = true;
  canceller.join();
  forgetter.join();
  target->close(0);
}

// --- a kernel that watches no more sockets ---

namespace {

std::atomic<bool> refuses_watches{false};
std::atomic<int> paused{0};
std::atomic<int> refused{0};

}  // namespace

TEST_CASE("tcp: a socket that epoll does not take back goes on being read and written") {
  EngineRef a = open("a");
  EngineRef b = open("b");
  constexpr uint64_t kBytes = 8 << 20;
  RegionRef src = a->alloc(kBytes, false);
  RegionRef dst = b->alloc(kBytes, false);
  RemoteRegionRef remote = a->remote_region(dst->descriptor());
  const auto write = [&](uint64_t length) {
    finish(a->submit_write({.src = src.get(), .dst = remote.get(), .length_bytes = length, .imm = 1}));
  };
  const Deadline until = now_ns() + 60'000'000'000;
  uint64_t writes = 0;
  const auto write_until = [&](const auto& condition) {
    while (!condition() && now_ns() < until) write(++writes % 64 == 0 ? kBytes : 8);
    REQUIRE(condition());
  };
  write_until([&] { return writes == 64; });  // all is connected
  paused = refused = 0;
  write_until([&] { return paused > 0; });

  EngineRef newcomer = open("newcomer");
  RegionRef theirs = newcomer->alloc(8, false);
  RemoteRegionRef lost = newcomer->remote_region(dst->descriptor());

  refuses_watches = true;
  write_until([&] { return refused > 0; });
  for (int i = 0; i < 10; ++i, ++writes) write(i == 0 ? kBytes : 8);
  finish(newcomer->submit_write({.src = theirs.get(), .dst = lost.get(), .length_bytes = 8}), Status::kPeerLost);
  refuses_watches = false;
  for (int i = 0; i < 10; ++i, ++writes) write(8);

  CHECK(b->imm_counter(1)->wait(static_cast<uint32_t>(writes), deadline_in(60), {}) == WaitResult::kReady);
  for (const EngineRef& engine : {a, b, newcomer}) engine->close(kPatience);
}

// --- a kernel that is short of memory for the moment ---

namespace {

// So many of the next calls fail with ENOBUFS.
std::atomic<int> vain_sends{0};
std::atomic<int> vain_accepts{0};
std::atomic<int> accepted{0};

bool fails_for_memory(std::atomic<int>& vain) {
  int left = vain;
  while (left > 0 && !vain.compare_exchange_weak(left, left - 1)) {
  }
  if (left > 0) errno = ENOBUFS;
  return left > 0;
}

}  // namespace

TEST_CASE("tcp: a kernel without memory for a socket's bytes is asked again, and no connection breaks of it") {
  EngineRef a = open("a");
  EngineRef b = open("b");
  constexpr uint64_t kBytes = 8 << 20;
  RegionRef src = a->alloc(kBytes, false);
  RegionRef dst = b->alloc(kBytes, false);
  RemoteRegionRef remote = a->remote_region(dst->descriptor());
  const auto write = [&](uint64_t length) {
    finish(a->submit_write({.src = src.get(), .dst = remote.get(), .length_bytes = length, .imm = 1}));
  };
  int connections = 0;
  uint32_t writes = 0;
  // Until all is connected: some connections come after the first bytes.
  for (int quiet = 0; quiet < 5; ++quiet, writes += 2) {
    write(8);
    write(kBytes);
    std::this_thread::sleep_for(std::chrono::milliseconds(50));
    if (const int now = accepted; now != connections) quiet = 0;
    connections = accepted;
  }

  for (const uint64_t length : {uint64_t{8}, kBytes}) {
    vain_sends = 100;
    write(length);
    CHECK(vain_sends == 0);
  }

  CHECK(b->imm_counter(1)->wait(writes + 2, deadline_in(60), {}) == WaitResult::kReady);
  CHECK(accepted == connections);
  for (const EngineRef& engine : {a, b}) engine->close(kPatience);
}

TEST_CASE("tcp: a kernel without memory for another connection keeps its peer waiting, not out") {
  EngineRef target = open("target");
  RegionRef dst = target->alloc(8, false);
  EngineRef newcomer = open("newcomer");
  RegionRef src = newcomer->alloc(8, false);
  RemoteRegionRef remote = newcomer->remote_region(dst->descriptor());

  vain_accepts = 2;
  finish(newcomer->submit_write({.src = src.get(), .dst = remote.get(), .length_bytes = 8}));

  CHECK(vain_accepts == 0);
  const std::vector<EngineEvent> events = target->take_events();
  CHECK(std::ranges::any_of(events, [](const EngineEvent& event) {
    return event.detail ==
           "cannot accept more connections: No buffer space available; the kernel is short of memory. "
           "Reported once";
  }));
  for (const EngineRef& engine : {newcomer, target}) engine->close(kPatience);
}

}  // namespace crossrail

// In front of libc's, for the whole program. The next ones are a sanitizer's, or libc's.
extern "C" ssize_t send(int fd, const void* data, size_t size, int flags) {
  static const auto next = reinterpret_cast<decltype(&send)>(dlsym(RTLD_NEXT, "send"));
  return crossrail::fails_for_memory(crossrail::vain_sends) ? -1 : next(fd, data, size, flags);
}

extern "C" ssize_t sendmsg(int fd, const msghdr* message, int flags) {
  static const auto next = reinterpret_cast<decltype(&sendmsg)>(dlsym(RTLD_NEXT, "sendmsg"));
  return crossrail::fails_for_memory(crossrail::vain_sends) ? -1 : next(fd, message, flags);
}

extern "C" int accept4(int fd, sockaddr* address, socklen_t* size, int flags) {
  static const auto next = reinterpret_cast<decltype(&accept4)>(dlsym(RTLD_NEXT, "accept4"));
  if (crossrail::fails_for_memory(crossrail::vain_accepts)) return -1;
  const int taken = next(fd, address, size, flags);
  if (taken >= 0) ++crossrail::accepted;
  return taken;
}

extern "C" int epoll_ctl(int set, int operation, int fd, epoll_event* event) {
  using namespace crossrail;
  if (operation == EPOLL_CTL_ADD && refuses_watches) {
    ++refused;
    errno = ENOSPC;
    return -1;
  }
  if (operation == EPOLL_CTL_DEL) ++paused;
  static const auto next = reinterpret_cast<decltype(&epoll_ctl)>(dlsym(RTLD_NEXT, "epoll_ctl"));
  return next(set, operation, fd, event);
}
