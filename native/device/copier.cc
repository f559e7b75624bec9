#include "device/copier.h"

#include <algorithm>
#include <new>
#include <span>
#include <utility>

#include "device/capture.h"
#include "device/stream.h"
#include "util/errors.h"

namespace crossrail::device {

namespace {

constexpr unsigned kPortable = 1;  // cuda.h: CU_MEMHOSTREGISTER_PORTABLE, _DEVICEMAP
constexpr unsigned kMapped = 2;

constexpr uint64_t kWide = 16;  // bytes that a thread of the kernel moves at once,
// or single bytes if an end is unaligned: longer such pieces are better left to the driver.
constexpr uint64_t kOddBytesMax = 2048;
constexpr uint64_t kGatheredBytesMax = uint64_t{256} << 10;
constexpr size_t kGatheredMin = 3;
constexpr uint64_t kPartBytes = 16 << 10;  // of a piece, per block of the kernel
constexpr unsigned kThreads = 256;

}  // namespace

Copier::~Copier() {
  for (size_t gpu = 0; gpu < streams_.size(); ++gpu) {
    if (streams_[gpu].handle == nullptr) continue;
    try {
      const CurrentContext current(*driver_, static_cast<int>(gpu));
      driver_->destroy_stream(streams_[gpu].handle);
    } catch (const TransportError&) {  // the GPU has failed, and the stream with it
    }
  }
}

void Copier::note(const char* call, int gpu, int code) {
  failed_ = true;
  trouble_ = std::string(call) + " on GPU " + std::to_string(gpu) + ": " + text_of(*driver_, code);
}

// Its context is current. Null: the reason is recorded.
Copier::Stream* Copier::stream_of(int gpu) {
  const auto index = static_cast<size_t>(gpu);
  if (streams_.size() <= index) streams_.resize(index + 1);
  Stream& stream = streams_[index];
  if (stream.handle == nullptr) {
    if (const int code = make_stream(*driver_, &stream.handle); code != 0) {
      stream.handle = nullptr;
      note("cuStreamCreate", gpu, code);
      return nullptr;
    }
  }
  return &stream;
}

void Copier::begin(int gpu, std::byte* to, const std::byte* from, uint64_t bytes) {
  if (bytes == 0) return;
  if (driver_ == nullptr) driver_ = find_driver();
  CROSSRAIL_ASSERT(driver_ != nullptr && gpu >= 0);  // the memory was registered
  try {
    const CurrentContext current(*driver_, gpu);
    const OutsideCapture outside(*driver_);
    Stream* const stream = stream_of(gpu);
    if (stream == nullptr) return;
    const int code =
        driver_->copy_async(reinterpret_cast<uint64_t>(to), reinterpret_cast<uint64_t>(from), bytes, stream->handle);
    if (code != 0) return note("cuMemcpyAsync", gpu, code);
    stream->is_busy = true;
  } catch (const TransportError& error) {
    failed_ = true;
    trouble_ = error.what();
  }
}

void Copier::begin_between(int gpu, std::byte* to, const std::byte* from, uint64_t bytes) {
  const Piece piece{reinterpret_cast<uint64_t>(to), reinterpret_cast<uint64_t>(from), bytes};
  const bool is_even = ((piece.to | piece.from) % kWide) == 0;
  if (bytes == 0 || bytes > (is_even ? kGatheredBytesMax : kOddBytesMax)) return begin(gpu, to, from, bytes);
  if (streams_.size() <= static_cast<size_t>(gpu)) streams_.resize(static_cast<size_t>(gpu) + 1);
  streams_[static_cast<size_t>(gpu)].gathered.push_back(piece);
}

// Null: the GPU is too old, or the driver rejects our kernels.
static const Kernels* find_kernels(const Driver& driver, int gpu) {
  try {
    const CurrentContext current(driver, gpu);
    return &kernels_of(driver, gpu, "a kernel that copies pages");
  } catch (const TransportError&) {
    return nullptr;
  }
}

// One after the other, by the driver, if there are too few for a kernel or there is no kernel.
void Copier::copy_gathered(int gpu, Stream& gathering) {
  std::vector<Piece> pieces = std::exchange(gathering.gathered, {});
  if (driver_ == nullptr) driver_ = find_driver();
  CROSSRAIL_ASSERT(driver_ != nullptr);  // the memory was registered
  const Kernels* const kernels = pieces.size() < kGatheredMin ? nullptr : find_kernels(*driver_, gpu);
  if (kernels == nullptr) {
    for (const Piece& each : pieces) {
      begin(gpu, reinterpret_cast<std::byte*>(each.to),                  // NOLINT(performance-no-int-to-ptr)
            reinterpret_cast<const std::byte*>(each.from), each.bytes);  // NOLINT(performance-no-int-to-ptr)
    }
    return;
  }
  const CurrentContext current(*driver_, gpu);
  const OutsideCapture outside(*driver_);
  Stream* const stream = stream_of(gpu);
  if (stream == nullptr) return;
  pieces.resize((pieces.size() + kPiecesPerLaunch - 1) / kPiecesPerLaunch * kPiecesPerLaunch, Piece{});  // to its end
  for (size_t first = 0; first < pieces.size(); first += kPiecesPerLaunch) {
    const std::span<Piece> batch(pieces.data() + first, kPiecesPerLaunch);
    uint64_t longest = 0;
    unsigned count = 0;
    for (const Piece& each : batch) {
      if (each.bytes == 0) break;
      longest = std::max(longest, each.bytes);
      ++count;
    }
    const auto parts = static_cast<unsigned>((longest + kPartBytes - 1) / kPartBytes);
    void* arguments[] = {batch.data()};
    stream->is_busy = true;
    const int code = driver_->launch_kernel(kernels->copy_pieces, count, parts, 1, kThreads, 1, 1, 0, stream->handle,
                                            arguments, nullptr);
    if (code != 0) return note("cuLaunchKernel", gpu, code);
  }
}

bool Copier::finish() {
  for (size_t index = 0; index < streams_.size(); ++index) {
    const int gpu = static_cast<int>(index);
    try {
      if (!streams_[index].gathered.empty()) copy_gathered(gpu, streams_[index]);
      Stream& stream = streams_[index];
      if (!stream.is_busy) continue;
      stream.is_busy = false;
      const CurrentContext current(*driver_, gpu);
      const OutsideCapture outside(*driver_);
      // No deadline: it ends with the copies, or with an error once the GPU has failed.
      if (const int code = driver_->synchronize_stream(stream.handle); code != 0)
        note("cuStreamSynchronize", gpu, code);
    } catch (const TransportError& error) {
      failed_ = true;
      trouble_ = error.what();
    }
  }
  return !std::exchange(failed_, false);
}

PinnedMemory::PinnedMemory(int gpu, std::byte* base, uint64_t bytes, bool for_kernels)
    : driver_(find_driver()), gpu_(gpu), base_(base) {
  CROSSRAIL_ASSERT(driver_ != nullptr);
  try {
    const CurrentContext current(*driver_, gpu);
    const OutsideCapture outside(*driver_);
    is_pinned_ = driver_->pin_host(base, bytes, for_kernels ? kPortable | kMapped : kPortable) == 0;
  } catch (const TransportError&) {  // the GPU has failed: the next copy reports it
  }
}

PinnedMemory::~PinnedMemory() {
  if (!is_pinned_) return;
  try {
    const CurrentContext current(*driver_, gpu_);
    const OutsideCapture outside(*driver_);
    driver_->unpin_host(base_);
  } catch (const TransportError&) {  // the GPU has failed, so nothing is pinned any more
  }
}

static std::byte* allocate_pages(uint64_t bytes) {
  constexpr size_t kPage = 4096;
  void* const memory = std::aligned_alloc(kPage, (bytes + kPage - 1) / kPage * kPage);
  if (memory == nullptr) throw std::bad_alloc();
  return static_cast<std::byte*>(memory);
}

HostBuffer::HostBuffer(uint64_t bytes, int gpu) : memory_(allocate_pages(bytes)) {
  if (gpu >= 0) pinned_.emplace(gpu, base(), bytes);
}

}  // namespace crossrail::device
