#include "device/ipc.h"

#include <map>
#include <mutex>
#include <utility>

#include "device/capture.h"
#include "util/errors.h"

namespace crossrail::device {

namespace {

// cuda.h: CUpointer_attribute, CUipcMem_flags.
constexpr int kPointerBufferId = 7;
constexpr int kPointerHasIpc = 10;
constexpr unsigned kLazyPeerAccess = 1;

constexpr const char* kInSeveral = "the range is in several allocations of CUDA's";

// What is mapped in this process, by the copying GPU and the handle. A handle may be reused after its allocation was
// freed, and while the old one is mapped the driver returns that: allocation_id tells them apart.
struct Mapping {
  uint64_t allocation_id = 0;
  uint64_t base = 0;
  uint32_t uses = 0;
  const Driver* driver = nullptr;
};
using Mappings = std::map<std::pair<int, IpcHandle>, Mapping>;

std::mutex g_mutex;

// Guarded by the mutex, which is also held while mapping and unmapping.
Mappings& mappings() {
  static Mappings* const all = new Mappings;  // engines may be closed when the process ends
  return *all;
}

}  // namespace

namespace {

bool has_ipc_handle(const Driver& driver, uint64_t address) {
  if (driver.get_ipc_handle == nullptr || driver.open_ipc_handle == nullptr) return false;
  // Older drivers do not know the attribute; they reject the handle instead.
  int is_capable = 0;
  return driver.pointer_attribute(&is_capable, kPointerHasIpc, address) != 0 || is_capable != 0;
}

// False: not possible, range->why_not says why.
bool share_by_ipc(const Driver& driver, const GpuMemory& memory, SharedRange* range) {
  const auto base = reinterpret_cast<uint64_t>(memory.base());
  if (driver.get_ipc_handle == nullptr || driver.open_ipc_handle == nullptr) {
    range->why_not = "the driver has no CUDA IPC";
    return false;
  }
  const Allocation allocation = allocation_of(memory.base());
  const uint64_t offset = base - allocation.base;
  if (memory.length_bytes() > allocation.length_bytes - offset) {
    range->why_not = kInSeveral;
    return false;
  }
  if (!has_ipc_handle(driver, base)) {
    range->why_not = "it is not cudaMalloc's and has no handle of CUDA IPC";
    return false;
  }
  const CurrentContext current(driver, memory.gpu().ordinal);
  const OutsideCapture outside(driver);
  if (const int code = driver.get_ipc_handle(&range->handle, allocation.base); code != 0) {
    range->why_not = "cuIpcGetMemHandle: " + text_of(driver, code);
    return false;
  }
  uint64_t id = 0;
  if (const int code = driver.pointer_attribute(&id, kPointerBufferId, base); code != 0 || id == 0) {
    range->why_not = "the driver does not number its allocations: " + text_of(driver, code);
    return false;
  }
  range->by = SharedBy::kIpc;
  range->allocation_id = id;
  range->offset = offset;
  return true;
}

// Throws TransportError if that is not possible.
void share_by_vmm(const Driver& driver, const GpuMemory& memory, SharedRange* range) {
  const auto base = reinterpret_cast<uint64_t>(memory.base());
  Allocation mapping;
  if (!mapping_of(driver, base, &mapping))
    throw TransportError("cuPointerGetAttribute", 0, "the driver does not say what is mapped there");
  auto physical = PhysicalMemory::retain(base, mapping.length_bytes, memory.gpu().ordinal);
  if (memory.length_bytes() > mapping.length_bytes - (base - mapping.base))
    throw TransportError("share", 0, kInSeveral);
  physical->share();  // tests that it can be shared: each peer that asks gets its own descriptor
  range->by = SharedBy::kVmm;
  range->physical = std::move(physical);
  range->allocation_bytes = mapping.length_bytes;
  range->offset = base - mapping.base;
}

}  // namespace

SharedRange share(const GpuMemory& memory) {
  SharedRange range;
  const Driver* driver = find_driver();
  CROSSRAIL_ASSERT(driver != nullptr);  // the memory was registered
  if (share_by_ipc(*driver, memory, &range)) return range;
  try {
    share_by_vmm(*driver, memory, &range);
    range.why_not.clear();
  } catch (const TransportError& error) {
    range.why_not += range.why_not == error.text() ? "" : "; " + error.call() + ": " + error.text();
  }
  return range;
}

ImportedMemory::ImportedMemory(const SharedRange& range, uint64_t length_bytes, int gpu)
    : handle_(range.handle), gpu_(gpu) {
  switch (range.by) {
    case SharedBy::kNothing:
      throw TransportError("import", 0, range.why_not);
    case SharedBy::kIpc:
      open(range);
      break;
    case SharedBy::kVmm:
      if (range.physical == nullptr) throw TransportError("import", 0, range.why_not);
      mapped_ = MappedMemory::map(range.physical, gpu);
      base_ = mapped_->base();
      break;
  }
  if (!holds(range.offset, length_bytes)) {  // the owner's claims are untrusted
    if (mapped_ == nullptr) close();
    throw TransportError("import", 0, "the range is past the end of its allocation");
  }
  base_ += range.offset;
}

// Whether that range of the mapping at base_ exists here, as far as the driver says.
bool ImportedMemory::holds(uint64_t offset, uint64_t length_bytes) const {
  const auto base = reinterpret_cast<uint64_t>(base_);
  uint64_t rest = mapped_ == nullptr ? 0 : mapped_->length_bytes();
  if (mapped_ == nullptr) {
    try {
      const Allocation around = allocation_of(base_);
      rest = around.base + around.length_bytes - base;
    } catch (const std::exception&) {
      return true;
    }
  }
  return offset <= rest && length_bytes <= rest - offset;
}

void ImportedMemory::open(const SharedRange& range) {
  std::string why;
  const Driver* driver = find_driver(&why);
  if (driver == nullptr) throw TransportError("import", 0, "memory of a GPU needs its driver: " + why);
  if (driver->open_ipc_handle == nullptr) throw TransportError("import", 0, "the driver has no CUDA IPC");
  const std::lock_guard lock(g_mutex);
  const auto found = mappings().find({gpu_, range.handle});
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
  const CurrentContext current(*driver, gpu_);
  const OutsideCapture outside(*driver);
  uint64_t base = 0;
  if (const int code = driver->open_ipc_handle(&base, range.handle, kLazyPeerAccess); code != 0)
    throw TransportError("cuIpcOpenMemHandle", code, text_of(*driver, code));
  mappings()[{gpu_, range.handle}] = {range.allocation_id, base, 1, driver};
  base_ = reinterpret_cast<std::byte*>(base);  // NOLINT(performance-no-int-to-ptr)
}

void ImportedMemory::close() {
  const std::lock_guard lock(g_mutex);
  const auto found = mappings().find({gpu_, handle_});
  if (--found->second.uses > 0) return;
  const Mapping mapping = found->second;
  mappings().erase(found);
  try {
    const CurrentContext current(*mapping.driver, gpu_);
    const OutsideCapture outside(*mapping.driver);
    mapping.driver->close_ipc_handle(mapping.base);
  } catch (const TransportError&) {  // the GPU has failed, and its mappings are gone
  }
}

ImportedMemory::~ImportedMemory() {
  if (mapped_ == nullptr) close();
}

}  // namespace crossrail::device
