// Host memory that GPU kernels read and write by its own address, while it is pinned.
#include <nanobind/nanobind.h>

#include <memory>
#include <string>

#include "bindings/bindings.h"
#include "bindings/convert.h"
#include "bindings/fork.h"
#include "device/copier.h"
#include "util/errors.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace crossrail::bindings {

namespace {

// Invariant: pinned memory is unpinned before the buffer is released.
class PinnedHandle {
 public:
  PinnedHandle(nb::handle memory, int gpu) {
    if (!memory_.acquire(memory, PyBUF_WRITABLE)) throw UsageError("memory has no buffer that can be written to");
    std::string why;
    if (device::find_driver(&why) == nullptr)
      throw TransportError("pin", 0, "to pin memory takes a GPU's driver: " + why);
    auto* const base = static_cast<std::byte*>(memory_.get().buf);
    const auto length = static_cast<uint64_t>(memory_.get().len);
    const WithoutGil no_gil;
    pinned_ = std::make_unique<device::PinnedMemory>(gpu, base, length, true);
    if (!pinned_->is_pinned()) {
      throw TransportError("cuMemHostRegister", 0,
                           "the driver does not pin " + std::to_string(length) + " bytes of the host",
                           "raise the limit of locked memory (ulimit -l)");
    }
  }
  ~PinnedHandle() {
    if (generation_ != fork_generation) {
      pinned_.release();  // what is pinned belongs to the parent
      return;
    }
    const WithoutGil no_gil;  // it waits for kernels
    pinned_.reset();
  }
  PinnedHandle(const PinnedHandle&) = delete;
  PinnedHandle& operator=(const PinnedHandle&) = delete;

 private:
  BufferView memory_;
  std::unique_ptr<device::PinnedMemory> pinned_;
  const uint32_t generation_ = fork_generation;
};

}  // namespace

void register_pinned(nb::module_& module) {
  nb::class_<PinnedHandle>(
      module, "PinnedMemory", nb::is_final(),
      "Host memory, from a page on, that kernels of a GPU reach by its own address while this is held.")
      .def(nb::init<nb::handle, int>(), "memory"_a, "gpu"_a,
           nb::sig("def __init__(self, memory: object, gpu: int) -> None"));
}

}  // namespace crossrail::bindings
