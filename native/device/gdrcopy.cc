#include "device/gdrcopy.h"

#include <atomic>
#include <cerrno>
#include <cstdlib>
#include <cstring>
#include <string_view>

#include "device/capture.h"
#include "util/dynamic_library.h"
#include "util/errors.h"

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace crossrail::device {

namespace {

constexpr const char* kGdrcopyFile = "libgdrapi.so.2";
constexpr const char* kGdrcopyVariable = "CROSSRAIL_LIBGDRAPI";
constexpr size_t kGpuPageBytes = 65536;  // gdrapi.h: GPU_PAGE_SIZE
constexpr int kSyncMemopsOfPointer = 6;  // cuda.h: CU_POINTER_ATTRIBUTE_SYNC_MEMOPS

struct OpenedGdrcopy {
  Gdrcopy table{};
  bool is_usable = false;
  std::string why;
};

OpenedGdrcopy open_gdrcopy() {
  OpenedGdrcopy opened;
  const char* const wanted = std::getenv(kGdrcopyVariable);
  if (wanted != nullptr && std::string_view(wanted) == "none") {
    opened.why = std::string(kGdrcopyVariable) + " is none";
    return opened;
  }
  const char* const file = wanted == nullptr || *wanted == '\0' ? kGdrcopyFile : wanted;
  std::string why;
  void* const handle = load_library(file, 0, &why);
  if (handle == nullptr) {
    opened.why = "no GDRCopy: " + why;
    return opened;
  }
  std::string missing;
  const auto take = [&]<typename Function>(const char* symbol, Function* function) {
    if (!find_function(handle, symbol, function)) missing = symbol;
  };
  take("gdr_open", &opened.table.open);
  take("gdr_close", &opened.table.close);
  take("gdr_pin_buffer", &opened.table.pin_buffer);
  take("gdr_unpin_buffer", &opened.table.unpin_buffer);
  take("gdr_map", &opened.table.map);
  take("gdr_unmap", &opened.table.unmap);
  opened.is_usable = missing.empty();
  if (!opened.is_usable) opened.why = std::string(file) + " has no " + missing + ": it is not GDRCopy 2";
  return opened;
}

const OpenedGdrcopy& opened_gdrcopy() {
  static const OpenedGdrcopy once = open_gdrcopy();
  return once;
}

const Gdrcopy* g_gdrcopy = nullptr;

[[noreturn]] void refuse_by_gdrcopy(const char* call, int error, const std::string& what) {
  throw TransportError(call, error, what + ": " + std::strerror(error), "see crossrail doctor --only gpu");
}

}  // namespace

const Gdrcopy* find_gdrcopy(std::string* why) {
  if (g_gdrcopy != nullptr) return g_gdrcopy;
  if (why != nullptr) *why = opened_gdrcopy().why;
  return opened_gdrcopy().is_usable ? &opened_gdrcopy().table : nullptr;
}

void replace_gdrcopy(const Gdrcopy* table) { g_gdrcopy = table; }

#if defined(__x86_64__)
void bar_fence() { _mm_sfence(); }
#elif defined(__aarch64__)
void bar_fence() { asm volatile("dsb st" ::: "memory"); }
#else
void bar_fence() { std::atomic_thread_fence(std::memory_order_seq_cst); }
#endif

BarMemory::BarMemory(int gpu, size_t bytes) : gpu_(gpu) {
  std::string why;
  driver_ = find_driver(&why);
  if (driver_ == nullptr) throw TransportError("cuMemAlloc", 0, why);
  gdrcopy_ = find_gdrcopy(&why);
  if (gdrcopy_ == nullptr) throw TransportError("gdr_open", 0, why);
  try {
    const CurrentContext current(*driver_, gpu_);
    const OutsideCapture outside(*driver_);
    allocate(*driver_, bytes);
    map(*gdrcopy_);
    std::memset(mapped_, 0, bytes_);
    try_it(*driver_);
  } catch (...) {
    release();
    throw;
  }
}

void BarMemory::allocate(const Driver& driver, size_t bytes) {
  bytes_ = (bytes + kGpuPageBytes - 1) / kGpuPageBytes * kGpuPageBytes;
  if (const int code = driver.allocate(&allocation_, bytes_ + kGpuPageBytes); code != 0)
    fail(driver, "cuMemAlloc", code, "cannot allocate words on GPU " + std::to_string(gpu_));
  address_ = (allocation_ + kGpuPageBytes - 1) / kGpuPageBytes * kGpuPageBytes;
  // Makes the driver's copies there synchronous (there are none but ours): required for memory that others access.
  const unsigned on = 1;
  if (const int code = driver.set_pointer_attribute(&on, kSyncMemopsOfPointer, allocation_); code != 0)
    fail(driver, "cuPointerSetAttribute", code, "cannot share words on GPU " + std::to_string(gpu_));
}

void BarMemory::map(const Gdrcopy& gdrcopy) {
  errno = 0;
  gdr_ = gdrcopy.open();
  if (gdr_ == nullptr) refuse_by_gdrcopy("gdr_open", errno == 0 ? ENODEV : errno, "GDRCopy's driver cannot be opened");
  if (const int error = gdrcopy.pin_buffer(gdr_, address_, bytes_, 0, 0, &pin_); error != 0)
    refuse_by_gdrcopy("gdr_pin_buffer", error, "GDRCopy cannot pin memory of GPU " + std::to_string(gpu_));
  is_pinned_ = true;
  if (const int error = gdrcopy.map(gdr_, pin_, &mapped_, bytes_); error != 0) {
    mapped_ = nullptr;
    refuse_by_gdrcopy("gdr_map", error, "GDRCopy cannot map memory of GPU " + std::to_string(gpu_));
  }
}

void BarMemory::try_it(const Driver& driver) {
  constexpr uint64_t kPattern = 0x5aa5'c33c'0ff0'9669;
  auto* const word = reinterpret_cast<uint64_t*>(mapped());
  const std::atomic_ref<uint64_t> first(*word);
  const auto write = [&](uint64_t value) {
    bar_fence();
    first.store(value, std::memory_order_relaxed);
    bar_fence();
  };
  const auto check = [&](const char* call, int code) {
    if (code != 0) fail(driver, call, code, "cannot read words on GPU " + std::to_string(gpu_));
  };
  write(kPattern);
  uint64_t seen = 0;
  void* stream = nullptr;
  check("cuStreamCreate", driver.create_stream(&stream, 1));  // cuda.h: CU_STREAM_NON_BLOCKING
  int code = driver.copy_async(reinterpret_cast<uint64_t>(&seen), address_, sizeof seen, stream);
  if (code == 0) code = driver.synchronize_stream(stream);
  driver.destroy_stream(stream);
  check("cuMemcpyAsync", code);
  if (seen != kPattern)
    throw TransportError("gdr_map", 0, "what the CPU writes by GDRCopy does not arrive on GPU " + std::to_string(gpu_));
  write(0);
}

void BarMemory::release() {
  if (mapped_ != nullptr) gdrcopy_->unmap(gdr_, pin_, mapped_, bytes_);
  if (is_pinned_) gdrcopy_->unpin_buffer(gdr_, pin_);
  if (gdr_ != nullptr) gdrcopy_->close(gdr_);
  mapped_ = gdr_ = nullptr;
  is_pinned_ = false;
  if (allocation_ == 0) return;
  try {
    const CurrentContext current(*driver_, gpu_);
    const OutsideCapture outside(*driver_);
    driver_->free(allocation_);
  } catch (const TransportError&) {  // the GPU has failed, and its memory is gone
  }
  allocation_ = 0;
}

}  // namespace crossrail::device
