// Memory of GPUs over transports of the CPU, by a double of CUDA's driver: whoever touches it by the CPU ends the test.
#include <doctest/doctest.h>

#include <algorithm>
#include <cstring>
#include <functional>
#include <numeric>
#include <random>
#include <string>
#include <vector>

#include "device/copier.h"
#include "engine/engine.h"
#include "fake_cuda.h"
#include "util/clock.h"
#include "util/errors.h"

namespace crossrail::test {
namespace {

constexpr uint64_t kBytes = uint64_t{3} << 20;  // more than one frame, or chunk
constexpr uint64_t kPages = 512;
constexpr uint64_t kPageBytes = 4096;

// Two engines in this process. Their workers are threads of their own.
struct Pair {
  explicit Pair(TransportKind kind, PrivatePath private_path = PrivatePath::kAuto)
      : kind(kind), private_path(private_path), a(open("a")), b(open("b")) {}
  ~Pair() {
    for (const EngineRef& engine : {a, b}) engine->close(deadline_in(5));
  }
  EngineRef open(const char* name) const {
    EngineOptions options;
    options.name = name;
    options.transports = {kind};
    options.rail_count = 2;
    options.private_path = private_path;
    if (kind == TransportKind::kTcp) options.rails = {"127.0.0.1", "127.0.0.1"};
    return Engine::open(options);
  }
  static bool until(const std::function<bool()>& wanted) {
    for (const Deadline end = deadline_in(20); !wanted();) {
      if (now_ns() > end) return false;
    }
    return true;
  }
  static Status end_of(const TransferRef& transfer) {
    REQUIRE(until([&] { return transfer->info().status != Status::kPending; }));
    return transfer->info().status;
  }

  const TransportKind kind;
  const PrivatePath private_path;
  const EngineRef a, b;
};

// A region on a GPU, or on the host, and how to look at its bytes.
struct Memory {
  Memory(FakeCuda& cuda, const EngineRef& engine, bool on_gpu, uint64_t bytes) {
    if (on_gpu) {
      std::byte* const address = cuda.allocate(bytes + kPageBytes) + 256;
      region = engine->register_memory(address, bytes, Access::kRemoteWrite, MemoryKind::kCuda);
      seen = cuda.bytes_at(address);
    } else {
      region = engine->alloc(bytes, false);
      seen = region->base();
    }
  }
  ~Memory() { CHECK(region->close(deadline_in(10), {}) == WaitResult::kReady); }  // the other's worker may be at it
  Memory(const Memory&) = delete;
  Memory& operator=(const Memory&) = delete;

  RegionRef region;
  std::byte* seen = nullptr;
};

void fill(Memory& memory, uint64_t bytes, uint32_t seed) {
  std::mt19937 random(seed);
  for (uint64_t i = 0; i < bytes; ++i) memory.seen[i] = static_cast<std::byte>(random());
}

struct Case {
  TransportKind kind;
  bool from_gpu;
  bool to_gpu;
  PrivatePath private_path = PrivatePath::kAuto;
};

const std::vector<Case> kCases = {{TransportKind::kShm, true, true, PrivatePath::kStaged},
                                  {TransportKind::kShm, true, true},
                                  {TransportKind::kShm, true, false},
                                  {TransportKind::kShm, false, true},
                                  {TransportKind::kTcp, true, true},
                                  {TransportKind::kTcp, true, false},
                                  {TransportKind::kTcp, false, true}};

}  // namespace

TEST_CASE("gpu copies: writes of all lengths land whole and are counted after that") {
  for (const Case& each : kCases) {
    CAPTURE(static_cast<int>(each.kind));
    CAPTURE(each.from_gpu);
    CAPTURE(each.to_gpu);
    FakeCuda cuda;
    const Pair pair(each.kind, each.private_path);
    Memory source(cuda, pair.a, each.from_gpu, kBytes);
    Memory target(cuda, pair.b, each.to_gpu, kBytes);
    fill(source, kBytes, 1);
    RemoteRegionRef remote = pair.a->remote_region(target.region->descriptor());
    uint64_t counted = 0;
    for (const uint64_t count :
         {uint64_t{0}, uint64_t{1}, uint64_t{511}, uint64_t{4097}, uint64_t{1000003}, kBytes - 5}) {
      std::memset(target.seen, 0, kBytes);
      const TransferRef transfer = pair.a->submit_write({.src = source.region.get(),
                                                         .src_offset = 3,
                                                         .dst = remote.get(),
                                                         .dst_offset = 5,
                                                         .length_bytes = count,
                                                         .imm = 7});
      ++counted;
      // By the count alone: what it stands for has to be there.
      REQUIRE(Pair::until([&] { return pair.b->imm_counter(7)->poll() == counted; }));
      CHECK(std::memcmp(source.seen + 3, target.seen + 5, count) == 0);
      CHECK(Pair::end_of(transfer) == Status::kDone);
      CHECK(std::all_of(target.seen + 5 + count, target.seen + kBytes, [](std::byte b) { return b == std::byte{0}; }));
    }
  }
}

TEST_CASE("gpu copies: pages go where they are to, many to a wait for the GPU") {
  for (const Case& each : kCases) {
    FakeCuda cuda;
    const Pair pair(each.kind, each.private_path);
    Memory source(cuda, pair.a, each.from_gpu, kPages * kPageBytes);
    Memory target(cuda, pair.b, each.to_gpu, kPages * kPageBytes);
    fill(source, kPages * kPageBytes, 2);
    RemoteRegionRef remote = pair.a->remote_region(target.region->descriptor());
    std::vector<int64_t> from(kPages);
    std::iota(from.begin(), from.end(), 0);
    std::vector<int64_t> to = from;
    std::shuffle(to.begin(), to.end(), std::mt19937(3));
    for (const uint64_t page_bytes : {uint64_t{64}, uint64_t{1024}, kPageBytes}) {
      PagedWriteRequest paged;
      paged.src = source.region.get();
      paged.dst = remote.get();
      paged.src_pages = {.data = from.data(), .count = kPages};
      paged.dst_pages = {.data = to.data(), .count = kPages};
      paged.page_bytes = page_bytes;
      paged.src_stride_bytes = paged.dst_stride_bytes = kPageBytes;
      paged.imm = static_cast<uint32_t>(page_bytes);
      CHECK(Pair::end_of(pair.a->submit_paged_writes(paged)) == Status::kDone);
      REQUIRE(Pair::until([&] { return pair.b->imm_counter(static_cast<uint32_t>(page_bytes))->poll() == kPages; }));
      for (uint64_t page = 0; page < kPages; ++page) {
        REQUIRE(std::memcmp(source.seen + page * kPageBytes, target.seen + static_cast<uint64_t>(to[page]) * kPageBytes,
                            page_bytes) == 0);
      }
    }
    const bool by_kernel =
        each.from_gpu && each.to_gpu && each.private_path == PrivatePath::kAuto && each.kind == TransportKind::kShm;
    CHECK(cuda.waits < 3 * kPages / 8);
    CHECK((by_kernel ? cuda.copies < 3 * kPages / 8 : cuda.copies > 2 * kPages));
  }
}

TEST_CASE("gpu copies: on a GPU short ones are gathered, and all lengths arrive") {
  FakeCuda cuda;
  constexpr uint64_t kRoom = uint64_t{4} << 20;
  std::byte* const from = cuda.allocate(kRoom);
  std::byte* const to = cuda.allocate(kRoom);
  std::mt19937 random(7);
  for (const size_t count : {size_t{1}, size_t{2}, size_t{3}, size_t{170}, size_t{171}, size_t{341}, size_t{1000}}) {
    for (uint64_t i = 0; i < kRoom; ++i) cuda.bytes_at(from)[i] = static_cast<std::byte>(random());
    std::memset(cuda.bytes_at(to), 0, kRoom);
    std::vector<std::byte> wanted(kRoom, std::byte{0});
    device::Copier copier;
    const uint64_t step = kRoom / count / 16 * 16;
    for (size_t i = 0; i < count; ++i) {
      const uint64_t at = i * step + (random() % 3 == 0 ? random() % 16 : 0);
      const uint64_t bytes = random() % std::min<uint64_t>(step - 16, random() % 2 == 0 ? 100 : 300'000);
      copier.begin_between(0, to + at, from + at, bytes);
      std::copy_n(cuda.bytes_at(from) + at, bytes, wanted.data() + at);
    }
    CHECK(copier.finish());
    CHECK(std::memcmp(cuda.bytes_at(to), wanted.data(), kRoom) == 0);
  }
  cuda.kernels.launch_error = 719;
  device::Copier copier;
  for (int i = 0; i < 3; ++i) copier.begin_between(0, to + 64 * i, from, 64);
  CHECK(!copier.finish());
  CHECK(copier.trouble().find("cuLaunchKernel") != std::string::npos);
  CHECK(copier.finish());  // that was that one
}

TEST_CASE("gpu copies: where no kernel can be loaded the driver copies one by one") {
  FakeCuda cuda;
  static device::Driver other = *device::find_driver();  // of which no kernel is loaded yet
  device::replace_driver(&other);
  cuda.kernels.capability = 6;
  std::byte* const from = cuda.allocate(kPageBytes);
  std::byte* const to = cuda.allocate(kPageBytes);
  std::memset(cuda.bytes_at(from), 5, kPageBytes);
  {
    device::Copier copier;
    for (int i = 0; i < 4; ++i) copier.begin_between(0, to + 64 * i, from, 64);
    CHECK(copier.finish());
  }
  CHECK(cuda.copies == 4);
  CHECK(std::all_of(cuda.bytes_at(to), cuda.bytes_at(to) + 256, [](std::byte b) { return b == std::byte{5}; }));
}

TEST_CASE("gpu copies: reads, from and to a GPU") {
  for (const Case& each : kCases) {
    FakeCuda cuda;
    const Pair pair(each.kind, each.private_path);
    Memory local(cuda, pair.a, each.to_gpu, kBytes);
    Memory far(cuda, pair.b, each.from_gpu, kBytes);
    fill(far, kBytes, 4);
    RemoteRegionRef remote = pair.a->remote_region(far.region->descriptor());
    for (const uint64_t count : {uint64_t{1}, uint64_t{70000}, kBytes - 1}) {
      std::memset(local.seen, 0, kBytes);
      CHECK(Pair::end_of(pair.a->submit_read(
                {.dst = local.region.get(), .src = remote.get(), .src_offset = 1, .length_bytes = count})) ==
            Status::kDone);
      CHECK(std::memcmp(local.seen, far.seen + 1, count) == 0);
    }
  }
}

TEST_CASE("gpu copies: one that fails fails its transfer, is not counted, and harms no other") {
  for (const Case& each : kCases) {
    for (const uint32_t good : {0u, 1u}) {
      CAPTURE(static_cast<int>(each.kind));
      CAPTURE(each.from_gpu);
      CAPTURE(each.to_gpu);
      CAPTURE(good);
      FakeCuda cuda;
      const Pair pair(each.kind, each.private_path);
      Memory source(cuda, pair.a, each.from_gpu, kBytes);
      Memory target(cuda, pair.b, each.to_gpu, kBytes);
      RemoteRegionRef remote = pair.a->remote_region(target.region->descriptor());
      const auto write = [&](uint32_t imm) {
        return pair.a->submit_write(
            {.src = source.region.get(), .dst = remote.get(), .length_bytes = kBytes, .imm = imm});
      };
      CHECK(Pair::end_of(write(1)) == Status::kDone);
      cuda.copies_good = good;  // one part of the write goes well, or none
      cuda.copy_error = 700;
      const TransferRef failed = write(2);
      CHECK(Pair::end_of(failed) == Status::kTransportFailed);
      const TransferRef read =
          pair.a->submit_read({.dst = source.region.get(), .src = remote.get(), .length_bytes = 100000});
      CHECK(Pair::end_of(read) == Status::kTransportFailed);
      cuda.copy_error = 0;
      fill(source, kBytes, 5);
      CHECK(Pair::end_of(write(3)) == Status::kDone);
      REQUIRE(Pair::until([&] { return pair.b->imm_counter(3)->poll() == 1; }));
      CHECK(std::memcmp(source.seen, target.seen, kBytes) == 0);
      CHECK(pair.b->imm_counter(1)->poll() == 1);
      CHECK(pair.b->imm_counter(2)->poll() == 0);
    }
  }
}

TEST_CASE("gpu copies: where one part fails and those behind it go well, nothing is counted") {
  for (const Case& each : kCases) {
    for (const uint32_t good : {0u, 1u, 5u}) {
      CAPTURE(static_cast<int>(each.kind));
      CAPTURE(each.from_gpu);
      CAPTURE(each.to_gpu);
      CAPTURE(good);
      FakeCuda cuda;
      const Pair pair(each.kind, each.private_path);
      constexpr uint64_t kMuch = uint64_t{24} << 20;  // in parts, and each of them in chunks
      Memory source(cuda, pair.a, each.from_gpu, kMuch);
      Memory target(cuda, pair.b, each.to_gpu, kMuch);
      RemoteRegionRef remote = pair.a->remote_region(target.region->descriptor());
      cuda.copies_good = good;
      cuda.copies_bad = 1;
      cuda.copy_error = 1;
      const TransferRef write = pair.a->submit_write(
          {.src = source.region.get(), .dst = remote.get(), .length_bytes = kMuch, .imm = 1, .rail = 0});
      const Status status = Pair::end_of(write);
      cuda.copy_error = 0;
      CHECK((status == Status::kTransportFailed || (status == Status::kDone && cuda.copies_bad == 1)));
      const TransferRef next = pair.a->submit_write(
          {.src = source.region.get(), .dst = remote.get(), .length_bytes = kPageBytes, .imm = 2, .rail = 0});
      CHECK(Pair::end_of(next) == Status::kDone);
      REQUIRE(Pair::until([&] { return pair.b->imm_counter(2)->poll() == 1; }));
      CHECK(pair.b->imm_counter(1)->poll() == (status == Status::kDone ? 1 : 0));
    }
  }
}

TEST_CASE("gpu copies: a target of a scatter is counted if its own parts went well, whichever it is") {
  for (const Case& each : kCases) {
    for (const uint32_t good : {0u, 1u, 4u, 9u}) {
      CAPTURE(static_cast<int>(each.kind));
      CAPTURE(each.from_gpu);
      CAPTURE(each.to_gpu);
      CAPTURE(good);
      FakeCuda cuda;
      const Pair pair(each.kind, each.private_path);
      constexpr uint64_t kEach = uint64_t{9} << 20;
      Memory source(cuda, pair.a, each.from_gpu, kEach);
      Memory target(cuda, pair.b, each.to_gpu, 2 * kEach);
      fill(source, kEach, 8);
      RemoteRegionRef remote = pair.a->remote_region(target.region->descriptor());
      const std::vector<RemoteRegion*> dsts = {remote.get(), remote.get()};
      const std::vector<uint64_t> lengths = {kEach, kEach}, src_offsets = {0, 0}, dst_offsets = {0, kEach};
      const std::vector<uint32_t> imms = {1, 2};
      cuda.copies_good = good;
      cuda.copies_bad = 1;
      cuda.copy_error = 1;
      const TransferRef scatter = pair.a->submit_scatter({.src = source.region.get(),
                                                          .dsts = dsts,
                                                          .src_offsets = src_offsets,
                                                          .dst_offsets = dst_offsets,
                                                          .lengths = lengths,
                                                          .imms = imms});
      Pair::end_of(scatter);
      cuda.copy_error = 0;
      const TransferRef next = pair.a->submit_write(
          {.src = source.region.get(), .dst = remote.get(), .length_bytes = 0, .imm = 3, .rail = 0});
      CHECK(Pair::end_of(next) == Status::kDone);
      REQUIRE(Pair::until([&] { return pair.b->imm_counter(3)->poll() == 1; }));
      for (const uint32_t i : {0u, 1u}) {
        const bool is_whole = std::memcmp(source.seen, target.seen + i * kEach, kEach) == 0;
        CHECK(pair.b->imm_counter(1 + i)->poll() == (is_whole ? 1 : 0));
      }
    }
  }
}

TEST_CASE("gpu copies: nothing lands in a region that was revoked, nor after a cancel") {
  for (const Case& each : kCases) {
    FakeCuda cuda;
    const Pair pair(each.kind, each.private_path);
    Memory source(cuda, pair.a, each.from_gpu, kBytes);
    Memory target(cuda, pair.b, each.to_gpu, kBytes);
    fill(source, kBytes, 6);
    RemoteRegionRef remote = pair.a->remote_region(target.region->descriptor());
    const auto write = [&] {
      return pair.a->submit_write({.src = source.region.get(), .dst = remote.get(), .length_bytes = kBytes, .imm = 1});
    };
    for (int round = 0; round < 4; ++round) {
      const TransferRef transfer = write();
      transfer->cancel();
      const Status status = Pair::end_of(transfer);
      CHECK((status == Status::kDone || status == Status::kCancelled));
      std::memset(source.seen, round, kBytes);  // ours again
    }
    const TransferRef late = write();
    REQUIRE(target.region->revoke(deadline_in(10), {}) == WaitResult::kReady);
    std::memset(target.seen, 99, kBytes);
    Pair::end_of(late);
    CHECK(Pair::end_of(write()) != Status::kDone);
    CHECK(std::all_of(target.seen, target.seen + kBytes, [](std::byte b) { return b == std::byte{99}; }));
  }
}

TEST_CASE("gpu copies: the region says that no NIC is given its memory") {
  FakeCuda cuda;
  cuda.writes_ordering = cuda.flush_options = 0;  // which would be refused for NICs
  const Pair pair(TransportKind::kTcp);
  Memory memory(cuda, pair.a, true, 8192);
  CHECK(memory.region->given_by() == "no: no NIC reads or writes it");
  CHECK(cuda.exports == 0);
}

}  // namespace crossrail::test
