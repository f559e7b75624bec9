// GDRCopy, opened at run time: GPU memory that the CPU writes in place, through the GPU's window on PCIe.
//
// Names and types are those of its public interface (gdrapi.h, 2.x). The headers are not needed to build.
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

// [any] Opened with the first call and never closed: the file that CROSSRAIL_LIBGDRAPI names, unless that is "none",
// else the system's. Null: none; *why says what keeps it.
const Gdrcopy* find_gdrcopy(std::string* why = nullptr);
// Tests: this one instead, from now on; null: the real one again. While there is no BarMemory.
void replace_gdrcopy(const Gdrcopy* table);

// Memory of a GPU, zeros at first, that the CPU writes and kernels read where it is: a kernel that polls it does not
// cross PCIe, and what the CPU writes crosses it once. For words: such stores are not cached, and a read by the CPU
// takes a microsecond.
// Invariant: what the CPU writes here arrives at address(); that was tried.
// Owner: of all of it. No kernel that uses it may be under way when it goes. Threads: any; not in a forked child.
class BarMemory {
 public:
  // Throws TransportError: no GDRCopy, or it or the driver refuses. Not while a kernel is waited for that waits for us.
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
  uint64_t address_ = 0;     // the first page of GPUs in it
  size_t bytes_ = 0;         // whole pages of GPUs
  void* gdr_ = nullptr;
  GdrPin pin_{};
  bool is_pinned_ = false;
  void* mapped_ = nullptr;
};

// Stores of this thread to BarMemory, which are not cached: ordered behind all that it stored before, and sent out
// before it goes on. Around each store that others wait for.
void bar_fence();

}  // namespace crossrail::device
