// GDRCopy, opened at run time: GPU memory that the CPU writes in place, through the GPU's PCIe BAR.
//
// Names and types are those of its public interface (gdrapi.h, 2.x), whose headers are not needed to build.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>

#include "device/cuda.h"

namespace crossrail::device {

struct GdrPin {  // gdrapi.h: gdr_mh_t
  unsigned long handle;
};

// The functions of libgdrapi.so.2 that we call. They return 0, or an errno.
struct Gdrcopy {
  void* (*open)();
  int (*close)(void* gdr);
  int (*pin_buffer)(void* gdr, unsigned long address, size_t bytes, uint64_t p2p_token, uint32_t va_space, GdrPin* pin);
  int (*unpin_buffer)(void* gdr, GdrPin pin);
  int (*map)(void* gdr, GdrPin pin, void** mapped, size_t bytes);
  int (*unmap)(void* gdr, GdrPin pin, void* mapped, size_t bytes);
};

// [any] Opened by the first call and never closed: the file named by CROSSRAIL_LIBGDRAPI, unless that is "none", else
// the system's. Null: none; *why says why not.
const Gdrcopy* find_gdrcopy(std::string* why = nullptr);
// For tests: use this table from now on; null: the real one again. Only while there is no BarMemory.
void replace_gdrcopy(const Gdrcopy* table);

// GPU memory, initially zero, that the CPU writes and kernels read in place: a kernel that polls it does not cross
// PCIe, and a write by the CPU crosses it once. For single words: such stores are not cached, and a read by the CPU
// takes a microsecond.
// Invariant: what the CPU writes here arrives at address(); this is verified on construction.
// Owns all of it. On destruction no kernel that uses it may be running. Threads: any; not in a forked child.
class BarMemory {
 public:
  // Throws TransportError: there is no GDRCopy, or it or the driver refuses. Not while we wait for a kernel that waits
  // for us.
  BarMemory(int gpu, size_t bytes);
  ~BarMemory() { release(); }
  BarMemory(const BarMemory&) = delete;
  BarMemory& operator=(const BarMemory&) = delete;

  std::byte* mapped() const { return static_cast<std::byte*>(mapped_); }
  uint64_t address() const { return address_; }

 private:
  void allocate(const Driver& driver, size_t bytes);
  void map(const Gdrcopy& gdrcopy);
  void try_it(const Driver& driver);
  void release();

  const int gpu_;
  const Driver* driver_ = nullptr;
  const Gdrcopy* gdrcopy_ = nullptr;
  uint64_t allocation_ = 0;  // 0: none
  uint64_t address_ = 0;     // its first GPU page
  size_t bytes_ = 0;         // whole GPU pages
  void* gdr_ = nullptr;
  GdrPin pin_{};
  bool is_pinned_ = false;
  void* mapped_ = nullptr;
};

// Orders this thread's stores to BarMemory, which are not cached, after everything that it stored before, and flushes
// them before it continues. Put around each store that others wait for.
void bar_fence();

}  // namespace crossrail::device
