#include "device/ipc.h"

#include <map>
#include <mutex>
#include <utility>

#include "util/errors.h"

namespace crossrail::device {

namespace {

// cuda.h: CUpointer_attribute, CUipcMem_flags.
constexpr int kPointerBufferId = 7;
constexpr unsigned kLazyPeerAccess = 1;

// What is mapped in this process, by the GPU that copies and the handle. A handle may come again once its allocation was
// freed, and as long as the old one is mapped the driver gives out that: allocation_id tells.
struct Mapping {
  uint64_t allocation_id = 0;
  uint64_t base = 0;
  uint32_t uses = 0;
  const Driver* driver = nullptr;
};
using Mappings = std::map<std::pair<int, IpcHandle>, Mapping>;

std::mutex g_mutex;

// Guarded by the mutex, while it is mapped and unmapped too.
Mappings& mappings() {
  static Mappings* const all = new Mappings;  // engines may be closed when the process ends
  return *all;
}

}  // namespace

SharedRange share(const GpuMemory& memory) {
  SharedRange range;
  const Driver* driver = find_driver();
  CROSSRAIL_ASSERT(driver != nullptr);  // the memory was registered
  if (driver->get_ipc_handle == nullptr || driver->open_ipc_handle == nullptr) {
    range.why_not = "the driver has no CUDA IPC";
    return range;
  }
  const Allocation allocation = allocation_of(memory.base());
  const auto base = reinterpret_cast<uint64_t>(memory.base());
  const uint64_t offset = base - allocation.base;
  if (memory.length_bytes() > allocation.length_bytes - offset) {
    range.why_not = "the range is in several allocations of CUDA's";
    return range;
  }
  const CurrentContext current(*driver, memory.gpu().ordinal);
  if (const int code = driver->get_ipc_handle(&range.handle, allocation.base); code != 0) {
    range.why_not = "cuIpcGetMemHandle: " + text_of(*driver, code);
    return range;
  }
  uint64_t id = 0;
  if (const int code = driver->pointer_attribute(&id, kPointerBufferId, base); code != 0 || id == 0) {
    range.why_not = "the driver does not number its allocations: " + text_of(*driver, code);
    return range;
  }
  range.allocation_id = id;
  range.offset = offset;
  return range;
}

ImportedMemory::ImportedMemory(const SharedRange& range, int gpu) : handle_(range.handle), gpu_(gpu) {
  std::string why;
  const Driver* driver = find_driver(&why);
  if (driver == nullptr) throw TransportError("import", 0, "memory of a GPU needs its driver: " + why);
  if (driver->open_ipc_handle == nullptr) throw TransportError("import", 0, "the driver has no CUDA IPC");
  const std::lock_guard lock(g_mutex);
  const auto found = mappings().find({gpu, range.handle});
  if (found != mappings().end()) {
    Mapping& mapping = found->second;
    if (mapping.allocation_id != range.allocation_id) {
      throw TransportError("import", 0, "an allocation of the same handle, which its owner has freed, is still mapped",
                           "close regions before their memory is freed");
    }
    ++mapping.uses;
    base_ = reinterpret_cast<std::byte*>(mapping.base);  // NOLINT(performance-no-int-to-ptr)
    return;
  }
  const CurrentContext current(*driver, gpu);
  uint64_t base = 0;
  if (const int code = driver->open_ipc_handle(&base, range.handle, kLazyPeerAccess); code != 0)
    throw TransportError("cuIpcOpenMemHandle", code, text_of(*driver, code));
  mappings()[{gpu, range.handle}] = {range.allocation_id, base, 1, driver};
  base_ = reinterpret_cast<std::byte*>(base);  // NOLINT(performance-no-int-to-ptr)
}

ImportedMemory::~ImportedMemory() {
  const std::lock_guard lock(g_mutex);
  const auto found = mappings().find({gpu_, handle_});
  if (--found->second.uses > 0) return;
  const Driver* const driver = found->second.driver;
  mappings().erase(found);
  try {
    const CurrentContext current(*driver, gpu_);
    driver->close_ipc_handle(reinterpret_cast<uint64_t>(base_));
  } catch (const TransportError&) {  // the GPU has failed, and its mappings with it
  }
}

}  // namespace crossrail::device
