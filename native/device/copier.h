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

// Uses a stream of its own for each GPU: like a NIC, it waits for no kernel of the user's, and no kernel waits for it.
// Invariant: when finish() has returned, nothing that was begun touches memory any more.
// One thread at a time: the progress holder.
class Copier {
 public:
  Copier() = default;
  ~Copier();
  Copier(const Copier&) = delete;
  Copier& operator=(const Copier&) = delete;

  // Begins one: `to` or `from` is memory of that GPU, the other is the host's. Both have to stay until finish().
  void begin(int gpu, std::byte* to, const std::byte* from, uint64_t bytes);
  // Likewise, both are memory of GPUs, which kernels of that one reach (another one's that cudaMalloc gave they do not,
  // and fault). Short ones are gathered, and copied together by a kernel: to ask the driver for each of them takes
  // microseconds.
  void begin_between(int gpu, std::byte* to, const std::byte* from, uint64_t bytes);
  // Waits for all that was begun. False: not all of it was copied, see trouble(), and what was is there in part.
  bool finish();
  // Of the latest that failed, one line.
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

// Pins host memory for as long as it lives, so that GPUs reach it directly and the driver need not stage copies. If the
// driver refuses (a limit on locked memory), is_pinned() is false, and copies are slower.
class PinnedMemory {
 public:
  // gpu: whose context asks for it; it holds for all. base: on a page. for_kernels: they use it too, by its own
  // address.
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
  // gpu: as PinnedMemory has it; -1: it is not to be pinned. Throws std::bad_alloc.
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
