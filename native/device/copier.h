// Copies between GPU memory and host memory, by the driver: for transports whose rails do not reach a GPU.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "device/cuda.h"
#include "device/kernels.h"

namespace crossrail::device {

// Has its own stream for each GPU: like a NIC, it waits for no kernel of the user's, and no kernel waits for it.
// Invariant: once finish() has returned, no copy that was begun touches memory any more.
// One thread at a time: the progress holder.
class Copier {
 public:
  Copier() = default;
  ~Copier();
  Copier(const Copier&) = delete;
  Copier& operator=(const Copier&) = delete;

  // Begins a copy: `to` or `from` is memory of that GPU, the other is host memory. Both must stay valid until finish().
  void begin(int gpu, std::byte* to, const std::byte* from, uint64_t bytes);
  // Likewise, with GPU memory on both sides that kernels of this GPU reach (they cannot access another GPU's cudaMalloc
  // memory, and fault). Short copies are gathered and carried out together by a kernel: asking the driver for each of
  // them takes microseconds.
  void begin_between(int gpu, std::byte* to, const std::byte* from, uint64_t bytes);
  // Waits for all copies that were begun. False: not all were carried out, see trouble(), and some may be incomplete.
  bool finish();
  // About the latest one that failed, one line.
  const std::string& trouble() const { return trouble_; }
  bool copy(int gpu, std::byte* to, const std::byte* from, uint64_t bytes) {
    begin(gpu, to, from, bytes);
    return finish();
  }

 private:
  struct Stream {
    void* handle = nullptr;
    bool is_busy = false;
    std::vector<Piece> gathered;
  };
  Stream* stream_of(int gpu);
  void copy_gathered(int gpu, Stream& stream);
  void note(const char* call, int gpu, int code);

  const Driver* driver_ = nullptr;
  std::vector<Stream> streams_;  // by GPU
  bool failed_ = false;
  std::string trouble_;
};

// Pins host memory for as long as it exists, so that GPUs access it directly and the driver need not stage copies. If
// the driver refuses (a limit on locked memory), is_pinned() is false, and copies are slower.
class PinnedMemory {
 public:
  // gpu: the one whose context pins it; the pinning applies to all. base: on a page boundary. for_kernels: kernels use
  // it as well, by its own address.
  PinnedMemory(int gpu, std::byte* base, uint64_t bytes, bool for_kernels = false);
  ~PinnedMemory();
  PinnedMemory(const PinnedMemory&) = delete;
  PinnedMemory& operator=(const PinnedMemory&) = delete;
  bool is_pinned() const { return is_pinned_; }

 private:
  const Driver* const driver_;
  const int gpu_;
  std::byte* const base_;
  bool is_pinned_ = false;
};

// Owns host memory, pinned if the driver allows it.
class HostBuffer {
 public:
  // gpu: as for PinnedMemory; -1: do not pin. Throws std::bad_alloc.
  explicit HostBuffer(uint64_t bytes, int gpu = -1);
  std::byte* base() const { return memory_.get(); }
  bool is_pinned() const { return pinned_ && pinned_->is_pinned(); }

 private:
  struct Free {
    void operator()(std::byte* memory) const { std::free(memory); }
  };
  const std::unique_ptr<std::byte, Free> memory_;
  std::optional<PinnedMemory> pinned_;
};

}  // namespace crossrail::device
