#include "util/readable.h"

#include <fcntl.h>
#include <linux/futex.h>
#include <sys/ioctl.h>
#include <sys/syscall.h>
#include <sys/uio.h>
#include <unistd.h>

#include <array>
#include <cerrno>
#include <cstdio>
#include <string>

#include "util/memory_map.h"

namespace crossrail {

bool is_readable(const std::byte* base, uint64_t length_bytes) {
  constexpr uintptr_t kPage = 4096;  // or larger: then some are asked for more than once
  constexpr int kNoSuchHow = -1;
  constexpr size_t kMaskBytes = 8;
  const auto end = reinterpret_cast<uintptr_t>(base) + length_bytes;
  for (uintptr_t page = reinterpret_cast<uintptr_t>(base) / kPage * kPage; page < end; page += kPage) {
    // The kernel reads a mask there before it notices that the operation is invalid.
    if (syscall(SYS_rt_sigprocmask, kNoSuchHow, page, nullptr, kMaskBytes) != 0 && errno == EFAULT) return false;
  }
  return true;
}

bool is_read_only(const std::byte* base, uint64_t length_bytes) {
  for (const std::byte* byte : {base, base + (length_bytes - 1)}) {
    constexpr uintptr_t kWord = 4;
    const uintptr_t word = reinterpret_cast<uintptr_t>(byte) / kWord * kWord;
    uint32_t own = 0;
    // The kernel adds 0 to the word, atomically. There is nobody to wake.
    const long result = syscall(SYS_futex, &own, FUTEX_WAKE_OP | FUTEX_PRIVATE_FLAG, 0, nullptr, word,
                                FUTEX_OP(FUTEX_OP_ADD, 0, FUTEX_OP_CMP_EQ, 0));
    if (result < 0 && errno == EFAULT && is_readable(byte, 1)) return true;
  }
  return false;
}

namespace {

// PROCMAP_QUERY of <linux/fs.h>, available since Linux 6.11 but often missing from headers.
struct MapQuery {
  uint64_t size = sizeof(MapQuery);
  uint64_t flags = 0;
  uint64_t address = 0;
  uint64_t start = 0;
  std::array<uint64_t, 9> rest{};
};
static_assert(sizeof(MapQuery) == 104);
constexpr unsigned long kQueryMap = _IOWR('f', 17, MapQuery);
constexpr uint64_t kThisOrNext = 0x10;
constexpr uint64_t kOfFiles = 0x20;

std::string text_of(int maps) {
  std::string text;
  std::array<char, 16 << 10> part;
  for (ssize_t got = 0; (got = read(maps, part.data(), part.size())) > 0;) {
    text.append(part.data(), static_cast<size_t>(got));
  }
  return text;
}

}  // namespace

bool maps_file(const std::string& maps, const std::byte* base, uint64_t length_bytes) {
  const auto begin = reinterpret_cast<uintptr_t>(base);
  const uintptr_t end = begin + length_bytes;
  for (size_t at = 0; at < maps.size();) {
    unsigned long first = 0;
    unsigned long last = 0;
    unsigned long inode = 0;
    if (std::sscanf(maps.c_str() + at, "%lx-%lx %*s %*x %*x:%*x %lu", &first, &last, &inode) != 3) return true;
    if (inode != 0 && first < end && last > begin) return true;
    const size_t line_end = maps.find('\n', at);
    at = line_end == std::string::npos ? maps.size() : line_end + 1;
  }
  return false;
}

bool maps_file(const std::byte* base, uint64_t length_bytes) {
  const auto begin = reinterpret_cast<uintptr_t>(base);
  const Fd maps(open("/proc/self/maps", O_RDONLY | O_CLOEXEC));
  if (!maps) return true;
  MapQuery query{.flags = kThisOrNext | kOfFiles, .address = begin};
  if (ioctl(maps.get(), kQueryMap, &query) == 0) return query.start < begin + length_bytes;
  return errno != ENOENT && maps_file(text_of(maps.get()), base, length_bytes);
}

namespace {

// The kernel reads from the pipe into memory that may disappear: a fault is an error of read(2), not a signal.
bool copy_through_pipe(std::byte* target, const std::byte* source, size_t bytes) {
  std::array<int, 2> ends{};
  if (pipe2(ends.data(), O_CLOEXEC | O_NONBLOCK) != 0) return false;
  const Fd out(ends[0]);
  const Fd in(ends[1]);
  while (bytes > 0) {
    const ssize_t put = write(in.get(), source, bytes);
    if (put <= 0) return false;
    for (ssize_t left = put; left > 0;) {
      const ssize_t taken = read(out.get(), target, static_cast<size_t>(left));
      if (taken <= 0) return false;
      target += taken;
      left -= taken;
    }
    source += put;
    bytes -= static_cast<size_t>(put);
  }
  return true;
}

}  // namespace

bool copy_to_file(std::byte* target, const std::byte* source, size_t bytes) {
  const iovec from{const_cast<std::byte*>(source), bytes};
  const iovec to{target, bytes};
  return process_vm_writev(getpid(), &from, 1, &to, 1, 0) == static_cast<ssize_t>(bytes) ||
         copy_through_pipe(target, source, bytes);
}

}  // namespace crossrail
