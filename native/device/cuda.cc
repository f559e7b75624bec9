#include "device/cuda.h"

#include <dlfcn.h>
#include <unistd.h>

#include <array>
#include <cstdio>
#include <map>
#include <mutex>
#include <utility>

#include "device/capture.h"
#include "util/dynamic_library.h"
#include "util/errors.h"

namespace crossrail::device {

std::string text_of(const Driver& driver, int code) {
  const char* text = nullptr;
  if (driver.error_string == nullptr || driver.error_string(code, &text) != 0 || text == nullptr) text = "unknown";
  return std::string(text) + " (CUDA error " + std::to_string(code) + ")";
}

void fail(const Driver& driver, const char* call, int code, const std::string& what, const std::string& remedy) {
  throw TransportError(call, code, what + ": " + text_of(driver, code), remedy);
}

namespace {

constexpr const char* kFile = "libcuda.so.1";

// cuda.h: CUpointer_attribute, CUmemorytype, CUdevice_attribute and others.
constexpr int kPointerMemoryType = 2;
constexpr int kPointerSyncMemops = 6;
constexpr int kPointerIsManaged = 8;
constexpr int kPointerDeviceOrdinal = 9;
constexpr int kPointerRangeStart = 11;
constexpr int kPointerRangeBytes = 12;
constexpr unsigned kMemoryTypeDevice = 2;
constexpr int kDevicePciBus = 33;
constexpr int kDevicePciDevice = 34;
constexpr int kDevicePciDomain = 50;
constexpr int kDeviceGpudirect = 116;
constexpr int kDeviceFlushOptions = 117;
constexpr int kDeviceWritesOrdering = 118;
constexpr int kDeviceDmaBuf = 124;
constexpr int kFlushByHost = 1;
constexpr int kOrderedForOwner = 100;  // larger numbers order more
constexpr int kHandleDmaBuf = 1;
constexpr unsigned long long kMapByPcie = 1;
constexpr int kFlushCurrentContext = 0;
constexpr int kFlushToOwner = 100;

struct Opened {
  Driver table{};
  bool is_usable = false;
  std::string why;
};

// The first missing function among those that every driver since CUDA 6.5 has; empty: none.
std::string bind_all(void* handle, Driver* t) {
  std::string missing;
  const auto take = [&](const char* symbol, auto* function) {
    if (!find_function(handle, symbol, function)) missing = symbol;
  };
  take("cuInit", &t->init);
  take("cuGetErrorString", &t->error_string);
  take("cuDeviceGetCount", &t->device_count);
  take("cuDeviceGetName", &t->device_name);
  take("cuDeviceGetAttribute", &t->device_attribute);
  take("cuDevicePrimaryCtxRetain", &t->retain_context);
  take("cuCtxPushCurrent_v2", &t->push_context);
  take("cuCtxPopCurrent_v2", &t->pop_context);
  take("cuPointerGetAttribute", &t->pointer_attribute);
  take("cuPointerSetAttribute", &t->set_pointer_attribute);
  take("cuStreamCreate", &t->create_stream);
  take("cuStreamDestroy_v2", &t->destroy_stream);
  take("cuStreamSynchronize", &t->synchronize_stream);
  take("cuMemcpyAsync", &t->copy_async);
  take("cuMemHostRegister_v2", &t->pin_host);
  take("cuMemHostUnregister", &t->unpin_host);
  take("cuMemAlloc_v2", &t->allocate);
  take("cuMemFree_v2", &t->free);
  take("cuModuleLoadData", &t->load_module);
  take("cuModuleGetFunction", &t->module_function);
  take("cuLaunchKernel", &t->launch_kernel);
  take("cuMemHostGetDevicePointer_v2", &t->pinned_address);
  take("cuCtxGetDevice", &t->context_device);
  find_function(handle, "cuMemGetHandleForAddressRange", &t->export_range);
  find_function(handle, "cuFlushGPUDirectRDMAWrites", &t->flush_writes);
  find_function(handle, "cuThreadExchangeStreamCaptureMode", &t->exchange_capture_mode);
  find_function(handle, "cuIpcGetMemHandle", &t->get_ipc_handle);
  find_function(handle, "cuIpcOpenMemHandle_v2", &t->open_ipc_handle);
  find_function(handle, "cuIpcCloseMemHandle", &t->close_ipc_handle);
  find_function(handle, "cuStreamGetCtx", &t->stream_context);
  find_function(handle, "cuStreamCreateWithPriority", &t->create_stream_with_priority);
  find_function(handle, "cuCtxGetStreamPriorityRange", &t->stream_priorities);
  find_function(handle, "cuMemCreate", &t->create_memory);
  find_function(handle, "cuMemRelease", &t->release_memory);
  find_function(handle, "cuMemAddressReserve", &t->reserve_addresses);
  find_function(handle, "cuMemAddressFree", &t->free_addresses);
  find_function(handle, "cuMemMap", &t->map_memory);
  find_function(handle, "cuMemUnmap", &t->unmap_memory);
  find_function(handle, "cuMemSetAccess", &t->set_access);
  find_function(handle, "cuMemGetAllocationGranularity", &t->memory_granularity);
  find_function(handle, "cuMemExportToShareableHandle", &t->export_memory);
  find_function(handle, "cuMemImportFromShareableHandle", &t->import_memory);
  find_function(handle, "cuMemRetainAllocationHandle", &t->retain_memory);
  find_function(handle, "cuDeviceCanAccessPeer", &t->can_access_peer);
  find_function(handle, "cuMemsetD8Async", &t->fill_async);
  find_function(handle, "cuCtxSynchronize", &t->synchronize_context);
  return missing;
}

Opened open_driver(const char* file) {
  Opened opened;
  std::string why;
  void* const handle = load_library(file, 0, &why);
  if (handle == nullptr) {
    opened.why = std::string("cannot open ") + file + " (" + why +
                 "): install NVIDIA's driver; in a container, start it with the GPUs (--gpus all)";
    return opened;
  }
  if (const std::string missing = bind_all(handle, &opened.table); !missing.empty()) {
    opened.why = std::string(file) + " has no " + missing + ": it is not NVIDIA's driver, or a very old one";
    return opened;
  }
  const int code = opened.table.init(0);
  if (code != 0) opened.why = "cuInit: " + text_of(opened.table, code) + "; see nvidia-smi";
  opened.is_usable = code == 0;
  return opened;
}

const Opened& opened() {
  static const Opened once = open_driver(kFile);
  return once;
}

const Driver* g_replacement = nullptr;

int attribute_of(const Driver& driver, int attribute, int ordinal) {
  int value = 0;
  // A driver that does not know the attribute returns an error: equivalent to a device without it.
  return driver.device_attribute(&value, attribute, ordinal) == 0 ? value : 0;
}

Gpu describe(const Driver& driver, int ordinal) {
  Gpu gpu;
  gpu.ordinal = ordinal;
  std::array<char, 256> name{};
  if (const int code = driver.device_name(name.data(), name.size() - 1, ordinal); code != 0)
    fail(driver, "cuDeviceGetName", code, "cannot ask for the name of GPU " + std::to_string(ordinal));
  gpu.name = name.data();
  gpu.exports_dma_buf = driver.export_range != nullptr && attribute_of(driver, kDeviceDmaBuf, ordinal) != 0;
  gpu.has_gpudirect = gpu.exports_dma_buf || attribute_of(driver, kDeviceGpudirect, ordinal) != 0;
  gpu.needs_flush = attribute_of(driver, kDeviceWritesOrdering, ordinal) < kOrderedForOwner;
  gpu.can_flush =
      driver.flush_writes != nullptr && (attribute_of(driver, kDeviceFlushOptions, ordinal) & kFlushByHost) != 0;
  return gpu;
}

template <typename Value>
bool ask(const Driver& driver, int attribute, const void* address, Value* value) {
  return driver.pointer_attribute(value, attribute, reinterpret_cast<uint64_t>(address)) == 0;
}

std::string range_text(const std::byte* base, uint64_t length_bytes) {
  return std::to_string(length_bytes) + " bytes at " + std::to_string(reinterpret_cast<uint64_t>(base));
}

}  // namespace

void replace_driver(const Driver* table) { g_replacement = table; }

void replace_driver_by(const std::string& file) {
  static std::map<std::string, Opened> others;  // kept: their streams and contexts may be used later
  if (file.empty()) return replace_driver(nullptr);
  const Opened& other = others.try_emplace(file, open_driver(file.c_str())).first->second;
  if (!other.is_usable) throw TransportError("replace_driver_by", 0, other.why);
  replace_driver(&other.table);
}

const Driver* find_driver(std::string* why) {
  if (g_replacement != nullptr) return g_replacement;
  if (why != nullptr) *why = opened().why;
  return opened().is_usable ? &opened().table : nullptr;
}

std::vector<Gpu> gpus() {
  std::vector<Gpu> found;
  const Driver* driver = find_driver();
  if (driver == nullptr) return found;
  int count = 0;
  if (const int code = driver->device_count(&count); code != 0)
    fail(*driver, "cuDeviceGetCount", code, "cannot count the GPUs");
  for (int ordinal = 0; ordinal < count; ++ordinal) found.push_back(describe(*driver, ordinal));
  return found;
}

std::string pci_address(int ordinal) {
  const Driver* driver = find_driver();
  if (driver == nullptr) return {};
  const int domain = attribute_of(*driver, kDevicePciDomain, ordinal);
  const int bus = attribute_of(*driver, kDevicePciBus, ordinal);
  const int device = attribute_of(*driver, kDevicePciDevice, ordinal);
  if (domain == 0 && bus == 0 && device == 0) return {};  // the host's own address
  char text[24];
  std::snprintf(text, sizeof text, "%04x:%02x:%02x.0", static_cast<unsigned>(domain), static_cast<unsigned>(bus),
                static_cast<unsigned>(device));
  return text;
}

int gpu_of(const Driver& driver, const void* address) {
  int ordinal = -1;
  return ask(driver, kPointerDeviceOrdinal, address, &ordinal) ? ordinal : -1;
}

int gpu_of_address(const void* address) { return is_gpu_address(address) ? gpu_of(*find_driver(), address) : -1; }

bool is_gpu_address(const void* address) {
  if (g_replacement == nullptr) {
    void* loaded = ::dlopen(kFile, RTLD_NOW | RTLD_NOLOAD);
    if (loaded == nullptr) return false;
    ::dlclose(loaded);
  }
  const Driver* driver = find_driver();
  unsigned type = 0;
  return driver != nullptr && ask(*driver, kPointerMemoryType, address, &type) && type == kMemoryTypeDevice;
}

Allocation allocation_of(const void* address) {
  std::string why;
  const Driver* driver = find_driver(&why);
  if (driver == nullptr) throw TransportError("register", 0, "memory of a GPU needs its driver: " + why);
  if (!is_gpu_address(address)) {
    throw UsageError("the address " + std::to_string(reinterpret_cast<uint64_t>(address)) +
                     " is not in the memory of a GPU that CUDA knows");
  }
  Allocation found;
  for (const auto& [attribute, value] :
       {std::pair{kPointerRangeStart, &found.base}, std::pair{kPointerRangeBytes, &found.length_bytes}}) {
    const int code = driver->pointer_attribute(value, attribute, reinterpret_cast<uint64_t>(address));
    if (code != 0) fail(*driver, "cuPointerGetAttribute", code, "cannot ask which allocation an address is in");
  }
  return found;
}

// Retained once and kept, as the GPU's other users do.
CurrentContext::CurrentContext(const Driver& driver, int ordinal) : driver_(driver) {
  {
    static std::mutex mutex;
    static auto& retained = *new std::map<int, void*>;  // a thread that unmaps may outlive other statics
    static const Driver* of = nullptr;
    const std::lock_guard lock(mutex);
    if (of != &driver) retained.clear();  // a different test double
    of = &driver;
    auto found = retained.find(ordinal);
    if (found == retained.end()) {
      void* context = nullptr;
      if (const int code = driver.retain_context(&context, ordinal); code != 0)
        fail(driver, "cuDevicePrimaryCtxRetain", code, "cannot use GPU " + std::to_string(ordinal));
      found = retained.emplace(ordinal, context).first;
    }
    handle_ = found->second;
  }
  if (const int code = driver.push_context(handle_); code != 0)
    fail(driver, "cuCtxPushCurrent", code, "cannot use GPU " + std::to_string(ordinal));
}

CurrentContext::~CurrentContext() {
  void* popped = nullptr;
  driver_.pop_context(&popped);
}

GpuMemory::GpuMemory(std::byte* base, uint64_t length_bytes, bool for_nics) : base_(base), length_bytes_(length_bytes) {
  std::string why;
  const Driver* driver = find_driver(&why);
  if (driver == nullptr) throw TransportError("register", 0, "memory of a GPU needs its driver: " + why);
  unsigned type = 0;
  const int ordinal = gpu_of(*driver, base);
  if (!ask(*driver, kPointerMemoryType, base, &type) || type != kMemoryTypeDevice || ordinal < 0)
    throw UsageError("the buffer, " + range_text(base, length_bytes) +
                     ", is not in the memory of a GPU that CUDA knows");
  int is_managed = 0;
  if (ask(*driver, kPointerIsManaged, base, &is_managed) && is_managed != 0)
    throw UsageError(
        "the buffer is managed memory (cudaMallocManaged), which moves between host and GPU: transports need "
        "memory that stays, as cudaMalloc and torch give it");
  gpu_ = describe(*driver, ordinal);
  if (for_nics && gpu_.needs_flush && !gpu_.can_flush) {
    throw TransportError("register", 0,
                         gpu_.name +
                             " and this driver neither order what NICs write nor wait for it: a count could come "
                             "before its bytes",
                         "update NVIDIA's driver (CUDA 11.3 or newer); else copy to the host first");
  }
  if (!for_nics) return;
  const CurrentContext current(*driver, ordinal);
  const OutsideCapture outside(*driver);
  // Makes the driver's "synchronous" copies truly synchronous for this memory, which NICs read behind its back.
  const int yes = 1;
  driver->set_pointer_attribute(&yes, kPointerSyncMemops, reinterpret_cast<uint64_t>(base));
  export_dma_buf(*driver);
}

GpuMemory::~GpuMemory() {
  if (dma_buf_ >= 0) ::close(dma_buf_);
}

void GpuMemory::export_dma_buf(const Driver& driver) {
  if (!gpu_.exports_dma_buf) {
    why_ = gpu_.name + " and this driver export no dma-buf (Linux 5.12, CUDA 11.7 and open kernel modules do)";
    return;
  }
  const auto page = static_cast<uint64_t>(::sysconf(_SC_PAGESIZE));
  const auto first = reinterpret_cast<uint64_t>(base_);
  const uint64_t from = first & ~(page - 1);
  const uint64_t to = (first + length_bytes_ + page - 1) & ~(page - 1);
  int fd = -1;
  // Over PCIe, where the NICs are: on machines with another link to the CPU this must be stated, on others it must not.
  int code = driver.export_range(&fd, from, to - from, kHandleDmaBuf, kMapByPcie);
  if (code != 0) code = driver.export_range(&fd, from, to - from, kHandleDmaBuf, 0);
  if (code != 0) {
    why_ = "cuMemGetHandleForAddressRange: " + text_of(driver, code);
    return;
  }
  dma_buf_ = fd;
  dma_buf_offset_ = first - from;
}

void flush_writes(int ordinal) {
  const Driver* driver = find_driver();
  CROSSRAIL_ASSERT(driver != nullptr && driver->flush_writes != nullptr);
  const CurrentContext current(*driver, ordinal);
  const OutsideCapture outside(*driver);
  if (const int code = driver->flush_writes(kFlushCurrentContext, kFlushToOwner); code != 0)
    fail(*driver, "cuFlushGPUDirectRDMAWrites", code, "cannot flush writes to GPU " + std::to_string(ordinal));
}

}  // namespace crossrail::device
