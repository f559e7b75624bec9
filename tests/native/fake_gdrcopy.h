// A double of GDRCopy, over that of NVIDIA's driver (fake_cuda.h): memory of the GPU that is mapped is the bytes that
// its kernels see.
#pragma once

#include <doctest/doctest.h>

#include <array>
#include <cerrno>
#include <cstddef>
#include <cstdint>

#include "device/gdrcopy.h"
#include "fake_gpu.h"

namespace crossrail::test {

// One at a time, while a FakeCuda is there.
class FakeGdrcopy {
 public:
  // What it refuses, as a number of errno; 0: nothing.
  int open_error = 0;
  int pin_error = 0;
  int map_error = 0;
  bool loses_stores = false;  // the mapping is of something else

  FakeGdrcopy() {
    static const device::Gdrcopy table = {
        .open = [] { return g_one->opens(); },
        .close = [](void* gdr) { return g_one->ends(gdr, &g_one->opened_); },
        .pin_buffer = [](void* gdr, unsigned long address, size_t bytes, uint64_t token, uint32_t space,
                         device::GdrPin* pin) { return g_one->pins(gdr, address, bytes, token, space, pin); },
        .unpin_buffer = [](void* gdr, device::GdrPin) { return g_one->ends(gdr, &g_one->pinned_); },
        .map = [](void* gdr, device::GdrPin pin, void** mapped,
                  size_t bytes) { return g_one->maps(gdr, pin, mapped, bytes); },
        .unmap = [](void* gdr, device::GdrPin, void*, size_t) { return g_one->ends(gdr, &g_one->mapped_); },
    };
    g_one = this;
    device::replace_gdrcopy(&table);
  }
  ~FakeGdrcopy() {
    CHECK(opened_ == 0);
    CHECK(pinned_ == 0);
    CHECK(mapped_ == 0);
    device::replace_gdrcopy(nullptr);
    g_one = nullptr;
  }
  FakeGdrcopy(const FakeGdrcopy&) = delete;
  FakeGdrcopy& operator=(const FakeGdrcopy&) = delete;

 private:
  static constexpr size_t kPageBytes = 65536;

  void* opens() {
    errno = open_error;
    if (open_error != 0) return nullptr;
    ++opened_;
    return this;
  }
  int ends(const void* gdr, int* count) const {
    CHECK(gdr == this);
    --*count;
    return 0;
  }
  int pins(const void* gdr, unsigned long address, size_t bytes, uint64_t token, uint32_t space, device::GdrPin* pin) {
    if (gdr != this || address % kPageBytes != 0 || bytes % kPageBytes != 0 || token != 0 || space != 0) return EINVAL;
    if (pin_error != 0) return pin_error;
    ++pinned_;
    pin->handle = address;
    return 0;
  }
  int maps(const void* gdr, device::GdrPin pin, void** mapped, size_t bytes) {
    if (gdr != this || bytes > elsewhere_.size()) return EINVAL;
    if (map_error != 0) return map_error;
    ++mapped_;
    const auto* const at = reinterpret_cast<const std::byte*>(pin.handle);  // NOLINT(performance-no-int-to-ptr)
    *mapped = loses_stores ? elsewhere_.data() : g_gpu->bytes_at(at);
    return 0;
  }

  static inline FakeGdrcopy* g_one = nullptr;
  int opened_ = 0;
  int pinned_ = 0;
  int mapped_ = 0;
  alignas(64) std::array<std::byte, kPageBytes> elsewhere_{};
};

}  // namespace crossrail::test
