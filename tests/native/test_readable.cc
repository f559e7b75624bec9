// Memory that goes away: what maps a file is told from other memory, and copied to without a signal.
#include "util/readable.h"

#include <doctest/doctest.h>
#include <linux/filter.h>
#include <linux/seccomp.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <array>
#include <atomic>
#include <cerrno>
#include <cstddef>
#include <cstring>
#include <fstream>
#include <string>
#include <thread>
#include <vector>

#include "util/clock.h"
#include "util/memory_map.h"

namespace crossrail {

TEST_CASE("memory that cannot be written is told from other memory, and stays as it is") {
  const auto page = static_cast<size_t>(sysconf(_SC_PAGESIZE));
  void* const room = mmap(nullptr, 3 * page, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  REQUIRE(room != MAP_FAILED);
  auto* const base = static_cast<std::byte*>(room);
  std::memset(base, 7, 3 * page);
  const std::vector<std::byte> before(base, base + 3 * page);

  CHECK_FALSE(is_read_only(base, 3 * page));
  CHECK_FALSE(is_read_only(base + 5, 1));
  REQUIRE(mprotect(base + 2 * page, page, PROT_READ) == 0);
  CHECK(is_read_only(base, 3 * page));
  CHECK(is_read_only(base + 3 * page - 1, 1));
  CHECK(is_read_only(base + 2 * page, page));
  CHECK_FALSE(is_read_only(base, 2 * page));
  CHECK(std::memcmp(base, before.data(), 3 * page) == 0);

  REQUIRE(munmap(base, 3 * page) == 0);
  CHECK_FALSE(is_read_only(base, page));
}

TEST_CASE("files that are mapped are told from other memory, and copied to as far as they are there") {
  const auto page = static_cast<size_t>(sysconf(_SC_PAGESIZE));
  const Fd file(memfd_create("test", MFD_CLOEXEC));
  REQUIRE(ftruncate(file.get(), static_cast<off_t>(2 * page)) == 0);
  // Two pages of nobody's, two of a file, two of nobody's.
  constexpr int kAnonymous = MAP_PRIVATE | MAP_ANONYMOUS;
  void* const room = mmap(nullptr, 6 * page, PROT_READ | PROT_WRITE, kAnonymous, -1, 0);
  REQUIRE(room != MAP_FAILED);
  auto* const base = static_cast<std::byte*>(room);
  std::byte* const mapped = base + 2 * page;
  REQUIRE(mmap(mapped, 2 * page, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_FIXED, file.get(), 0) == mapped);
  std::string lines;
  for (std::ifstream maps("/proc/self/maps"); maps; lines.push_back('\n')) {
    std::string line;
    std::getline(maps, line);
    if (line.empty()) break;
    lines += line;
  }
  const auto check = [&](const std::byte* at, size_t bytes, bool expected) {
    CHECK(maps_file(at, bytes) == expected);
    CHECK(maps_file(lines, at, bytes) == expected);
  };
  check(base, 2 * page, false);
  check(base, 2 * page + 1, true);
  check(mapped, 1, true);
  check(mapped + 2 * page - 1, 1, true);
  check(base + 4 * page, 2 * page, false);
  check(base, 6 * page, true);

  const std::vector<std::byte> bytes(2 * page, std::byte{7});
  CHECK(copy_to_file(mapped, bytes.data(), 2 * page));
  CHECK(std::memcmp(mapped, bytes.data(), 2 * page) == 0);
  REQUIRE(ftruncate(file.get(), static_cast<off_t>(page)) == 0);
  CHECK(copy_to_file(mapped, bytes.data(), page));
  CHECK(!copy_to_file(mapped, bytes.data(), page + 1));
  CHECK(!copy_to_file(mapped + page, bytes.data(), 1));
  munmap(room, 6 * page);
}

TEST_CASE("a file is cut and grows again while bytes are copied to it: they arrive or it is said, and none is fatal") {
  const auto page = static_cast<size_t>(sysconf(_SC_PAGESIZE));
  const Fd file(memfd_create("test", MFD_CLOEXEC));
  REQUIRE(ftruncate(file.get(), static_cast<off_t>(page)) == 0);
  void* const mapped = mmap(nullptr, page, PROT_READ | PROT_WRITE, MAP_SHARED, file.get(), 0);
  REQUIRE(mapped != MAP_FAILED);
  const std::vector<std::byte> bytes(page, std::byte{7});
  std::atomic<bool> stop = false;
  std::thread cutter([&] {
    while (!stop.load(std::memory_order_relaxed)) {
      CHECK(ftruncate(file.get(), 0) == 0);
      CHECK(ftruncate(file.get(), static_cast<off_t>(page)) == 0);
    }
  });
  int copied = 0;
  int missed = 0;
  const int64_t until = now_ns() + 5'000'000'000;
  while ((copied < 1000 || missed < 1000) && now_ns() < until) {
    ++(copy_to_file(static_cast<std::byte*>(mapped), bytes.data(), page) ? copied : missed);
  }
  stop.store(true, std::memory_order_relaxed);
  cutter.join();
  CHECK(copied > 0);
  CHECK(missed > 0);
  munmap(mapped, page);
}

TEST_CASE("bytes are copied to a file where the kernel lets no process be written to") {
  constexpr size_t kBytes = 200'000;  // more than fit into a pipe
  const Fd file(memfd_create("test", MFD_CLOEXEC));
  REQUIRE(ftruncate(file.get(), kBytes) == 0);
  void* const mapped = mmap(nullptr, kBytes, PROT_READ | PROT_WRITE, MAP_SHARED, file.get(), 0);
  REQUIRE(mapped != MAP_FAILED);
  std::vector<std::byte> bytes(kBytes);
  for (size_t i = 0; i < kBytes; ++i) bytes[i] = static_cast<std::byte>(i * 7 >> 3);
  // A filter is of the thread that sets it.
  std::thread filtered([&] {
    std::array<sock_filter, 4> program{{
        BPF_STMT(BPF_LD | BPF_W | BPF_ABS, offsetof(seccomp_data, nr)),
        BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, SYS_process_vm_writev, 0, 1),
        BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ERRNO | EPERM),
        BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ALLOW),
    }};
    const sock_fprog filter{static_cast<unsigned short>(program.size()), program.data()};
    REQUIRE(prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) == 0);
    REQUIRE(prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, &filter) == 0);
    CHECK(copy_to_file(static_cast<std::byte*>(mapped), bytes.data(), kBytes));
    CHECK(std::memcmp(mapped, bytes.data(), kBytes) == 0);
    REQUIRE(ftruncate(file.get(), kBytes / 2) == 0);
    CHECK(copy_to_file(static_cast<std::byte*>(mapped), bytes.data(), kBytes / 2));
    CHECK(!copy_to_file(static_cast<std::byte*>(mapped), bytes.data(), kBytes));
  });
  filtered.join();
  munmap(mapped, kBytes);
}

}  // namespace crossrail
