#include "device/copier.h"

#include <new>
#include <utility>

#include "device/capture.h"
#include "util/errors.h"

namespace crossrail::device {

namespace {

// cuda.h: CU_STREAM_NON_BLOCKING, CU_MEMHOSTREGISTER_PORTABLE.
constexpr unsigned kNonBlocking = 1;
constexpr unsigned kPortable = 1;

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

void Copier::begin(int gpu, std::byte* to, const std::byte* from, uint64_t bytes) {
  if (bytes == 0) return;
  if (driver_ == nullptr) driver_ = find_driver();
  CROSSRAIL_ASSERT(driver_ != nullptr && gpu >= 0);  // the memory was registered
  try {
    const CurrentContext current(*driver_, gpu);
    const OutsideCapture outside(*driver_);
    const auto index = static_cast<size_t>(gpu);
    if (streams_.size() <= index) streams_.resize(index + 1);
    Stream& stream = streams_[index];
    if (stream.handle == nullptr) {
      if (const int code = driver_->create_stream(&stream.handle, kNonBlocking); code != 0) {
        stream.handle = nullptr;
        return note("cuStreamCreate", gpu, code);
      }
    }
    const int code =
        driver_->copy_async(reinterpret_cast<uint64_t>(to), reinterpret_cast<uint64_t>(from), bytes, stream.handle);
    if (code != 0) return note("cuMemcpyAsync", gpu, code);
    stream.is_busy = true;
  } catch (const TransportError& error) {
    failed_ = true;
    trouble_ = error.what();
  }
}

bool Copier::finish() {
  for (size_t index = 0; index < streams_.size(); ++index) {
    Stream& stream = streams_[index];
    if (!stream.is_busy) continue;
    const int gpu = static_cast<int>(index);
    stream.is_busy = false;
    try {
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

PinnedMemory::PinnedMemory(int gpu, std::byte* base, uint64_t bytes) : driver_(find_driver()), gpu_(gpu), base_(base) {
  CROSSRAIL_ASSERT(driver_ != nullptr);
  try {
    const CurrentContext current(*driver_, gpu);
    const OutsideCapture outside(*driver_);
    is_pinned_ = driver_->pin_host(base, bytes, kPortable) == 0;
  } catch (const TransportError&) {  // the GPU has failed: the copy to come says so
  }
}

PinnedMemory::~PinnedMemory() {
  if (!is_pinned_) return;
  try {
    const CurrentContext current(*driver_, gpu_);
    const OutsideCapture outside(*driver_);
    driver_->unpin_host(base_);
  } catch (const TransportError&) {  // the GPU has failed, and has nothing pinned any more
  }
}

static std::byte* allocate_pages(uint64_t bytes) {
  constexpr size_t kPage = 4096;
  void* const memory = std::aligned_alloc(kPage, (bytes + kPage - 1) / kPage * kPage);
  if (memory == nullptr) throw std::bad_alloc();
  return static_cast<std::byte*>(memory);
}

PinnedBuffer::PinnedBuffer(int gpu, uint64_t bytes) : memory_(allocate_pages(bytes)), pinned_(gpu, base(), bytes) {}

}  // namespace crossrail::device
