// The kernels that we launch, in PTX: the driver compiles them for the GPU that it finds, and building needs nothing
// from CUDA.
#pragma once

#include <cstddef>
#include <cstdint>

#include "device/cuda.h"

namespace crossrail::device {

// One of many copies, in the layout of copy_pieces.
struct Piece {
  uint64_t to;
  uint64_t from;
  uint64_t bytes;
};
inline constexpr size_t kPiecesPerLaunch = 170;  // as many as fit into a kernel's arguments

// cuLaunchKernel's function handles, for one GPU.
struct Kernels {
  // (uint64_t word, uint64_t delta), one thread: adds after a system-wide fence.
  void* add_to_word = nullptr;
  // (uint64_t words, uint64_t count, uint64_t timeout_ns), one thread: waits for counts (CountWords, host_words.h).
  void* await_counts = nullptr;
  // (Piece pieces[kPiecesPerLaunch]), grid: pieces x parts of each, any number of threads: copies all of them at once.
  // Pieces with both ends aligned to 16 bytes are copied 16 bytes at a time, others byte by byte.
  void* copy_pieces = nullptr;
  // Rounds whose steps are kernels (round_words.h): (uint64_t rounds, uint64_t number, uint64_t free, uint64_t asked),
  // one thread; (uint64_t number, uint64_t table, uint64_t count, uint64_t words), and (uint64_t number, uint64_t
  // table, uint64_t count, uint64_t needs_words, uint64_t words), a warp.
  void* open_round = nullptr;
  void* publish_round = nullptr;
  void* await_round = nullptr;
};

// The GPU's context is current. Loaded once and kept, since graphs refer to them. what_for: for the error message.
// Throws TransportError: the GPU is older than Volta, or the driver refuses. Any thread, also during a capture.
const Kernels& kernels_of(const Driver& driver, int gpu, const char* what_for);

}  // namespace crossrail::device
