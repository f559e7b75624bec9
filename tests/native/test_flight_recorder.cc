// The flight recorder, what makes it be written, and what finds a stall.
#include <doctest/doctest.h>
#include <fcntl.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <csignal>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <sstream>
#include <string>
#include <thread>
#include <vector>

#include "engine/core.h"
#include "engine/dump_triggers.h"
#include "engine/flight_dump.h"
#include "engine/flight_recorder.h"
#include "engine/watchdog.h"
#include "util/errors.h"

namespace crossrail {

namespace {

FlightEntry entry_of(uint64_t number) {
  return {.ticks = static_cast<int64_t>(number),
          .bytes = number * 3,
          .transfer = static_cast<uint32_t>(number),
          .peer = ~static_cast<uint32_t>(number),
          .imm = static_cast<uint32_t>(number * 7),
          .count = static_cast<uint32_t>(number) & FlightEntry::kCountMax,
          .op = static_cast<uint32_t>(number % 7),
          .repeats = number % 5 == 0,
          .state = static_cast<FlightState>(number % 16)};
}

bool same(const FlightEntry& a, const FlightEntry& b) {
  return a.ticks == b.ticks && a.bytes == b.bytes && a.transfer == b.transfer && a.peer == b.peer && a.imm == b.imm &&
         a.count == b.count && a.op == b.op && a.repeats == b.repeats && a.state == b.state;
}

EngineRef open_null(const char* name, std::string directory = "/tmp") {
  EngineOptions options;
  options.name = name;
  options.transports = {TransportKind::kNull};
  options.polling = Polling::kManual;
  options.dump_directory = std::move(directory);
  return Engine::open(options);
}

std::string dump_of(const Engine& engine) {
  StringSink sink;
  engine.dump("test", &sink);
  return sink.take();
}

size_t count_of(const std::string& text, const std::string& part) {
  size_t count = 0;
  for (size_t at = text.find(part); at != std::string::npos; at = text.find(part, at + 1)) ++count;
  return count;
}

struct TemporaryDirectory {
  TemporaryDirectory() {
    std::string name = std::filesystem::temp_directory_path() / "crossrail-test-XXXXXX";
    REQUIRE(mkdtemp(name.data()) != nullptr);
    path = name;
  }
  ~TemporaryDirectory() { std::filesystem::remove_all(path); }
  std::string only_file() const {
    std::string content;
    int files = 0;
    for (const auto& item : std::filesystem::directory_iterator(path)) {
      std::ostringstream text;
      text << std::ifstream(item.path()).rdbuf();
      content = text.str();
      ++files;
    }
    REQUIRE(files == 1);
    return content;
  }
  std::filesystem::path path;
};

}  // namespace

TEST_CASE("a flight ring keeps its last entries, whole and in order") {
  FlightRing ring("r", 64);
  FlightEntry entry;
  CHECK(ring.oldest() == ring.written());
  for (uint64_t number = 0; number < 1000; ++number) ring.write(entry_of(number));
  CHECK(ring.written() == 1000);
  CHECK(ring.oldest() == 1000 - 63);
  for (uint64_t number = ring.oldest(); number < 1000; ++number) {
    REQUIRE(ring.read(number, &entry));
    CHECK(same(entry, entry_of(number)));
  }
  CHECK(!ring.read(1000 - 64, &entry));  // its slot is the next to be written
  CHECK(!ring.read(0, &entry));
}

TEST_CASE("a count too large for its bits is told as the largest") {
  FlightRing ring("r", 64);
  ring.write({.count = ~0u, .op = 5, .state = FlightState::kForgotten});
  FlightEntry entry;
  REQUIRE(ring.read(0, &entry));
  CHECK(entry.count == FlightEntry::kCountMax);
  CHECK(entry.op == 5);
  CHECK(entry.state == FlightState::kForgotten);
}

TEST_CASE("an entry that repeats counts, and the ring counts each repetition as one entry") {
  FlightRing ring("r", 64);
  FlightEntry entry;
  CHECK(ring.recorded() == 0);
  const FlightEntry moved = {.bytes = 8, .transfer = 5, .imm = ~0u, .count = 1, .op = 1, .repeats = true};
  for (uint64_t number = 1; number <= 200; ++number) {
    ring.write(moved);
    for (int i = 0; i < 9; ++i) FlightRing::count_again(ring.last_count());
    CHECK(ring.recorded() == 10 * number);
  }
  ring.write({.count = 7});
  CHECK(ring.recorded() == 2001);
  CHECK(ring.written() == 201);
  REQUIRE(ring.read(199, &entry));
  CHECK((entry.count == 10 && entry.repeats && entry.transfer == 5 && entry.bytes == 8 && entry.imm == ~0u));
  REQUIRE(ring.read(200, &entry));
  CHECK((entry.count == 7 && !entry.repeats));
}

// Counts how often it is read; moves when told to.
struct HandClock final : Clock {
  int64_t now_ns() const override {
    ++readings;
    return now;
  }
  void pass() override {}
  int64_t now = 1'000'000;
  mutable int readings = 0;
};

std::vector<FlightEntry> entries_of(const FlightRing& ring) {
  std::vector<FlightEntry> entries(ring.written());
  for (uint64_t at = 0; at < entries.size(); ++at) REQUIRE(ring.read(at, &entries[at]));
  return entries;
}

TEST_CASE("entries that come slowly have readings of their own, in a burst they share them") {
  HandClock clock;
  FlightRecorder recorder(4096, &clock, 100);
  const int readings_before = clock.readings;
  for (int i = 0; i < 10; ++i) {
    clock.now += 100;
    recorder.record({.count = 1});
  }
  CHECK(clock.readings - readings_before == 10);
  for (int i = 0; i < 1000; ++i) {
    clock.now += 50;
    recorder.record({.count = 1});
  }
  CHECK(clock.readings - readings_before < 10 + 1000 / 16);
  const std::vector<FlightEntry> entries = entries_of(recorder.ring(0));
  for (int i = 0; i < 10; ++i) CHECK(entries[i].ticks - 1 == 1'000'000 + (i + 1) * 100);
  for (size_t i = 10; i < entries.size(); ++i) {
    const int64_t time = 1'001'000 + (static_cast<int64_t>(i) - 9) * 50;
    REQUIRE(entries[i].ticks > entries[i - 1].ticks);
    REQUIRE(entries[i].ticks <= time + 1);       // never later than it was,
    REQUIRE(entries[i].ticks > time - 32 * 50);  // nor by more than a reading serves earlier
  }
}

TEST_CASE("after a burst, a new moment makes the next entry's time exact") {
  HandClock clock;
  FlightRecorder recorder(64, &clock, 100);
  for (int i = 0; i < 20; ++i) recorder.record({.count = 1});
  clock.now += 5'000'000;
  recorder.new_moment();
  recorder.record({.count = 1});
  CHECK(entries_of(recorder.ring(0)).back().ticks == clock.now + 1);
}

TEST_CASE("transfers that do the same one after the other share an entry, until anything differs") {
  HandClock clock;
  FlightRecorder recorder(4096, &clock, 100);
  const int a = 0, b = 0;  // their addresses stand for peers
  uint32_t serial = 0;
  const auto moved = [&](const void* peer, uint32_t imm, uint64_t bytes) {
    ++serial;
    if (recorder.repeat(peer, kAnyRail, imm, 1, bytes)) return true;
    recorder.record_repeatable(peer, 0, kAnyRail,
                               {.bytes = bytes, .transfer = serial, .imm = imm, .count = 1, .op = 1});
    return false;
  };
  for (int i = 0; i < 100; ++i) moved(&a, 7, 8);  // a burst, so that readings serve many
  recorder.record({.count = 1});
  ++serial;
  CHECK(!moved(&a, 7, 8));  // something lies between
  CHECK(moved(&a, 7, 8));
  CHECK(!moved(&b, 7, 8));
  CHECK(!moved(&a, 7, 8));
  CHECK(!moved(&a, 6, 8));
  CHECK(!moved(&a, 6, 9));
  recorder.new_moment();
  CHECK(!moved(&a, 6, 9));
  CHECK(recorder.ring(0).recorded() == serial);
  int64_t ticks = 0;
  uint32_t next = 1;
  for (const FlightEntry& entry : entries_of(recorder.ring(0))) {
    CHECK(entry.ticks > ticks);
    ticks = entry.ticks + (entry.repeats ? entry.count - 1 : 0);
    if (entry.repeats) CHECK(entry.transfer == next);
    next += entry.count;
  }
}

TEST_CASE("what is read beside the writer is whole or refused") {
  FlightRing ring("r", 64);
  std::atomic<bool> stop{false};
  std::thread writer([&] {
    for (uint64_t number = 0; !stop.load(std::memory_order_relaxed); ++number) ring.write(entry_of(number));
  });
  uint64_t whole = 0;
  uint64_t torn = 0;
  while (whole < 20'000 || torn == 0) {
    for (uint64_t at = ring.oldest(), end = ring.written(); at < end; ++at) {
      FlightEntry entry;
      if (!ring.read(at, &entry)) {
        ++torn;
        continue;
      }
      ++whole;
      if (!same(entry, entry_of(at))) FAIL("entry ", at, " is torn");
    }
  }
  stop.store(true, std::memory_order_relaxed);
  writer.join();
  CHECK(torn > 0);  // the readers did meet the writer
}

TEST_CASE("peers that are gone are forgotten, those in use are not") {
  FlightRecorder recorder(64, nullptr, FlightRecorder::kBurstNs);
  const auto kept = recorder.add_peer("kept", 1, "tcp", PeerState::kConnected, 0);
  for (int i = 0; i < 5000; ++i) recorder.add_peer("passing", 2, "tcp", PeerState::kLost, 0);
  size_t count = 0;
  bool has_kept = false;
  for (; const auto track = recorder.track(count); ++count) has_kept = has_kept || track == kept;
  CHECK(has_kept);
  CHECK(count < 1000);
  CHECK(count >= 256);
}

TEST_CASE("any bytes become valid JSON, also across the buffer's end") {
  StringSink sink;
  std::string name;
  for (int byte = 0; byte < 128; ++byte) name += static_cast<char>(byte);
  {
    JsonLines out(&sink);
    out.line("x", name, -1, ~uint64_t{0});
    out.line(std::string(20'000, 'y'));
  }
  const std::string text = sink.take();
  CHECK(text.starts_with(R"(["x","\u0000\u0001)"));
  CHECK(text.find(R"(\u001f !\"#)") != std::string::npos);
  CHECK(text.find(R"([\\])") != std::string::npos);
  CHECK(text.find("\\u007f\",-1,18446744073709551615]\n[\"yyy") != std::string::npos);
  CHECK(text.ends_with("yyy\"]\n"));
  CHECK(count_of(text, "y") == 20'001);  // and the one of the name
}

TEST_CASE("what an engine did is in its dump, also after it closed") {
  EngineRef engine = open_null("here");
  EngineRef other = open_null("there");
  RegionRef src = engine->alloc(1 << 20, false);
  RegionRef dst = other->alloc(1 << 20, false);
  RemoteRegionRef remote = engine->remote_region(dst->descriptor());
  REQUIRE(engine->connect(*engine->peer(other->address()), deadline_in(5), {}) == WaitResult::kReady);
  TransferRef write = engine->submit_write({.src = src.get(), .dst = remote.get(), .length_bytes = 4096, .imm = 77});
  REQUIRE(write->wait(deadline_in(5), {}) == WaitResult::kReady);
  engine->close();
  const std::string text = dump_of(*engine);
  CHECK(text.starts_with("[\"flight\",1,"));
  CHECK(text.ends_with("\n[\"end\"]\n"));
  CHECK(count_of(text, R"(,1,"moved","write",1,1,4096,77,1])") == 1);
  CHECK(count_of(text, R"(["ring","null:0",1])") == 1);
  CHECK(count_of(text, R"(,0,"connected","",0,1,0,-1,1])") == 1);
  CHECK(count_of(text, R"(["count","transfers_done",1])") == 1);
}

TEST_CASE("a dump tells writes of a burst apart, and misses none") {
  EngineRef engine = open_null("here");
  EngineRef other = open_null("there");
  RegionRef src = engine->alloc(4096, false);
  RegionRef dst = other->alloc(4096, false);
  RemoteRegionRef remote = engine->remote_region(dst->descriptor());
  REQUIRE(engine->connect(*engine->peer(other->address()), deadline_in(5), {}) == WaitResult::kReady);
  constexpr int kWrites = 900;  // fewer than the ring has entries, should none repeat another
  for (int i = 0; i < kWrites; ++i) {
    engine->submit_write({.src = src.get(), .dst = remote.get(), .length_bytes = 8, .imm = 77});
    // Nothing to post, and yet a transfer with a number.
    if (i % 100 == 0) engine->submit_paged_writes({.src = src.get(), .dst = remote.get(), .page_bytes = 8});
  }
  const std::string text = dump_of(*engine);
  CHECK(count_of(text, R"(["ring","null:0",900])") == 1);
  CHECK(count_of(text, R"(,1,8,77,1])") == kWrites);
  CHECK(count_of(text, R"("done","paged-writes",)") == kWrites / 100);
  for (int i = 0, transfer = 0; i < kWrites; ++i) {
    const std::string number = std::to_string(++transfer);
    REQUIRE(count_of(text, ",1,\"moved\",\"write\"," + number + ",1,8,77,1]") == 1);
    if (i % 100 == 0) ++transfer;
  }
}

TEST_CASE("an engine without recorder records nothing and dumps the rest") {
  EngineOptions options;
  options.name = "off";
  options.transports = {TransportKind::kNull};
  options.polling = Polling::kManual;
  options.recorder_entries = 0;
  EngineRef engine = Engine::open(options);
  const std::string text = dump_of(*engine);
  CHECK(text.ends_with("[\"end\"]\n"));
  CHECK(count_of(text, "[\"ring\"") == 0);
  options.recorder_entries = 100;
  CHECK_THROWS_AS(Engine::open(options), UsageError);
}

TEST_CASE("dumps beside an engine that works are whole") {
  EngineRef engine = open_null("here");
  EngineRef other = open_null("there");
  RegionRef src = engine->alloc(1 << 16, false);
  RemoteRegionRef remote = engine->remote_region(other->alloc(1 << 16, false)->descriptor());
  std::atomic<bool> stop{false};
  std::thread worker([&] {
    while (!stop.load(std::memory_order_relaxed)) {
      engine->submit_write({.src = src.get(), .dst = remote.get(), .length_bytes = 64, .imm = 1})
          ->wait(deadline_in(5), {});
    }
  });
  for (int i = 0; i < 20; ++i) {
    const std::string text = dump_of(*engine);
    REQUIRE(text.starts_with("[\"flight\",1,"));
    REQUIRE(text.ends_with("\n[\"end\"]\n"));
  }
  stop.store(true, std::memory_order_relaxed);
  worker.join();
}

TEST_CASE("dumps to a directory are new files, and say when they cannot be written") {
  TemporaryDirectory directory;
  EngineRef engine = open_null("a/b ../c");
  const DumpOutcome first = dump_to_directory(engine->core(), directory.path.native(), "test");
  REQUIRE(first.written());
  CHECK(std::string(first.path.data()).find("/crossrail-a_b_..") != std::string::npos);
  CHECK(directory.only_file().ends_with("[\"end\"]\n"));
  const DumpOutcome second = dump_to_directory(engine->core(), directory.path.native(), "test");
  REQUIRE(second.written());
  CHECK(std::string(second.path.data()) != first.path.data());
  CHECK(dump_to_directory(engine->core(), "/nonexistent", "test").error == ENOENT);
}

TEST_CASE("a failed assertion dumps the engines of the process before it aborts") {
  TemporaryDirectory directory;
  const pid_t child = fork();
  REQUIRE(child >= 0);
  if (child == 0) {
    const int nowhere = open("/dev/null", O_WRONLY);
    dup2(nowhere, STDERR_FILENO);
    std::signal(SIGABRT, SIG_DFL);  // not the test program's
    EngineRef engine = open_null("asserting", directory.path.native());
    fail_assert("two == 3", "here.cc", 1);
  }
  int status = 0;
  REQUIRE(waitpid(child, &status, 0) == child);
  CHECK(WIFSIGNALED(status));
  CHECK(WTERMSIG(status) == SIGABRT);
  const std::string text = directory.only_file();
  CHECK(text.find("\"failed assertion\"") != std::string::npos);
  CHECK(text.ends_with("[\"end\"]\n"));
}

TEST_CASE("a stall is what waits without a move, and is told once") {
  StallFinder finder(100);
  CHECK(!finder.look(1, 5, 0, 0));
  CHECK(!finder.look(1, 5, 0, 99));
  CHECK(finder.look(1, 5, 0, 100));
  CHECK(finder.still_ns(1, 130) == 130);
  CHECK(!finder.look(1, 9, 0, 500));  // more waits, nothing moves: the same stall
  CHECK(!finder.look(1, 9, 1, 501));  // a move ends it
  CHECK(!finder.look(1, 9, 1, 600));
  CHECK(finder.look(1, 9, 1, 601));  // and another begins
  CHECK(!finder.look(2, 1, 0, 601));
  CHECK(!finder.look(1, 0, 1, 700));  // nothing waits any more
  CHECK(!finder.look(1, 1, 1, 750));  // what comes later waits from then on
  CHECK(finder.look(1, 1, 1, 850));
  CHECK(finder.look(2, 1, 0, 850));
}

TEST_CASE("the watchdog tells of submits that nobody takes over") {
  TemporaryDirectory directory;
  EngineRef engine = open_null("idle", directory.path.native());
  EngineRef other = open_null("there");
  constexpr uint64_t kLong = 1 << 20;  // too long to be posted by the submitter
  RegionRef src = engine->alloc(kLong, false);
  RemoteRegionRef remote = engine->remote_region(other->alloc(kLong, false)->descriptor());
  Watchdog watchdog(&engine->core(), 1'000);
  watchdog.look(0);
  engine->submit_write({.src = src.get(), .dst = remote.get(), .length_bytes = kLong});
  watchdog.look(1);
  watchdog.look(900);
  CHECK(engine->take_events().empty());
  watchdog.look(1'001);
  watchdog.look(5'000);
  const std::vector<EngineEvent> events = engine->take_events();
  REQUIRE(events.size() == 1);
  CHECK(events[0].kind == EngineEvent::Kind::kStalled);
  CHECK(events[0].detail.starts_with("1 submitted operation of 1 in flight were not picked up"));
  CHECK(directory.only_file().find("[\"count\",\"submits_waiting\",1]") != std::string::npos);
  while (engine->progress()) {
  }
  watchdog.look(9'000);
  for (const EngineEvent& event : engine->take_events()) CHECK(event.kind != EngineEvent::Kind::kStalled);
}

TEST_CASE("stalls that come again and again are all told, and written down so often and no more") {
  TemporaryDirectory directory;
  EngineRef engine = open_null("flaps", directory.path.native());
  EngineRef other = open_null("there");
  constexpr uint64_t kLong = 1 << 20;  // too long to be posted by the submitter
  RegionRef src = engine->alloc(kLong, false);
  RemoteRegionRef remote = engine->remote_region(other->alloc(kLong, false)->descriptor());
  Watchdog watchdog(&engine->core(), 1'000);
  int64_t now = 0;
  // One more stall, so long after the one before. What is told of it.
  const auto stall = [&](int64_t pause_ns) {
    now += pause_ns;
    watchdog.look(now - 2'000);
    engine->submit_write({.src = src.get(), .dst = remote.get(), .length_bytes = kLong});
    watchdog.look(now - 1'000);
    watchdog.look(now);
    while (engine->progress()) {
    }
    std::string told;
    for (const EngineEvent& event : engine->take_events())
      if (event.kind == EngineEvent::Kind::kStalled) told += event.detail;
    return told;
  };
  const auto files = [&] {
    return static_cast<size_t>(std::distance(std::filesystem::directory_iterator(directory.path), {}));
  };
  CHECK(stall(10'000).find("; flight recorder: ") != std::string::npos);
  const std::string soon = stall(Watchdog::kDumpPauseNs - 1);
  CHECK(soon.find("no new recording, for the last one is 59.9 s old: " + directory.path.native()) != std::string::npos);
  CHECK(files() == 1);
  CHECK(stall(1).find("; flight recorder: ") != std::string::npos);
  for (uint32_t i = 2; i < Watchdog::kDumpsMax; ++i) stall(Watchdog::kDumpPauseNs);
  CHECK(files() == Watchdog::kDumpsMax);
  CHECK(stall(Watchdog::kDumpPauseNs).find("the watchdog of this engine has written 16: ") != std::string::npos);
  CHECK(files() == Watchdog::kDumpsMax);
}

TEST_CASE("of a recording that cannot be written to its end no file is left") {
  TemporaryDirectory directory;
  EngineRef engine = open_null("full");
  const std::string path = directory.path / "here.flight";
  std::ofstream(path) << "what was there";
  const pid_t child = fork();  // the limit is the whole process's
  REQUIRE(child >= 0);
  if (child == 0) {
    std::signal(SIGXFSZ, SIG_IGN);
    const rlimit limit{200, 200};
    setrlimit(RLIMIT_FSIZE, &limit);
    const bool fails = dump_to_directory(engine->core(), directory.path.native(), "test").error == EFBIG &&
                       dump_to_file(engine->core(), path, "test") == EFBIG;
    _exit(fails ? 0 : 1);
  }
  int status = 0;
  REQUIRE(waitpid(child, &status, 0) == child);
  CHECK(status == 0);
  CHECK(directory.only_file() == "what was there");
  CHECK(dump_to_file(engine->core(), path, "test") == 0);
  CHECK(directory.only_file().ends_with("[\"end\"]\n"));
  CHECK(dump_to_file(engine->core(), "/dev/full", "test") == ENOSPC);
}

}  // namespace crossrail
