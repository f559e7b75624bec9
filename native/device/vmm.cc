#include "device/vmm.h"

#include <pthread.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <map>
#include <mutex>
#include <thread>
#include <utility>
#include <vector>

#include "device/capture.h"
#include "device/stream.h"
#include "util/errors.h"
#include "util/thread.h"

namespace crossrail::device {

namespace {

// cuda.h: CUdevice_attribute, CUpointer_attribute, CUmemAllocationType, CUmemAllocationHandleType, CUmemLocationType,
// CUmemAccess_flags, CUmemAllocationGranularity_flags.
constexpr int kDeviceHasVmm = 102;
constexpr int kDeviceGivesFds = 103;
constexpr int kDeviceRdmaOfVmm = 110;
constexpr int kPointerMappingBytes = 18;
constexpr int kPointerMappingBase = 19;
constexpr int kPinned = 1;
constexpr int kByFd = 1;
constexpr int kOnDevice = 1;
constexpr int kReadWrite = 3;
constexpr int kGranularityMin = 0;

constexpr const char* kInstead = "register memory of torch instead: engine.register(torch.zeros(..., device='cuda'))";
constexpr int kMaskBits = 64;
// Pauses between checks whether a context can be waited for.
constexpr std::chrono::milliseconds kFirstPause{20};
constexpr std::chrono::milliseconds kLongestPause{1000};

// cuda.h: CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED to _CAPTURED_EVENT and CAPTURE_WRONG_THREAD.
constexpr bool is_of_captures(int code) { return code >= 900 && code <= 908; }

constexpr uint64_t bit(int gpu) { return gpu < kMaskBits ? uint64_t{1} << gpu : 0; }

std::string on(int gpu) { return " on GPU " + std::to_string(gpu); }

const Driver& need_driver(const char* call) {
  std::string why;
  const Driver* const driver = find_driver(&why);
  if (driver == nullptr) throw TransportError(call, 0, "memory of a GPU needs its driver: " + why);
  return *driver;
}

bool has_attribute(const Driver& driver, int attribute, int gpu) {
  int value = 0;
  return driver.device_attribute(&value, attribute, gpu) == 0 && value != 0;
}

bool can_map(const Driver& driver) {
  return driver.release_memory != nullptr && driver.reserve_addresses != nullptr && driver.free_addresses != nullptr &&
         driver.map_memory != nullptr && driver.unmap_memory != nullptr && driver.set_access != nullptr;
}

// Mappings of this process, by address. Guarded by the mutex; never destroyed: engines may be closed when the process
// ends.
struct Registry {
  std::mutex mutex;
  std::map<uint64_t, std::weak_ptr<MappedMemory>> mappings;
  // Mappings that kernels may still use, and whether a thread is waiting for these.
  std::vector<MappedMemory*> leaving;
  bool is_waiting = false;
};
Registry& registry() {
  static auto* const instance = new Registry;
  return *instance;
}

}  // namespace

// --- physical memory ---

PhysicalMemory::PhysicalMemory(const Driver& driver, int gpu, uint64_t handle, uint64_t length_bytes)
    : driver_(driver), gpu_(gpu), handle_(handle), length_bytes_(length_bytes), process_(::getpid()) {}

PhysicalMemory::~PhysicalMemory() {
  if (::getpid() != process_) return;
  try {
    const CurrentContext current(driver_, gpu_);
    const OutsideCapture outside(driver_);
    driver_.release_memory(handle_);
  } catch (const TransportError&) {  // the GPU has failed, and its memory is gone
  }
}

std::string why_no_vmm(const Driver& driver, int gpu) {
  if (!can_map(driver) || driver.create_memory == nullptr || driver.memory_granularity == nullptr ||
      driver.export_memory == nullptr || driver.fill_async == nullptr) {
    return "this driver has no virtual memory management (CUDA 10.2 and newer have)";
  }
  if (!has_attribute(driver, kDeviceHasVmm, gpu)) return "the driver has no virtual memory management" + on(gpu);
  if (!has_attribute(driver, kDeviceGivesFds, gpu)) return "the driver exports no file descriptors of memory" + on(gpu);
  return {};
}

void check_gpu(int gpu, const char* call) {
  const Driver& driver = need_driver(call);
  int count = 0;
  if (const int code = driver.device_count(&count); code != 0)
    fail(driver, "cuDeviceGetCount", code, "cannot count the GPUs");
  if (gpu >= 0 && gpu < count) return;
  throw UsageError("device is 'cuda:" + std::to_string(gpu) + "', and GPUs are numbered from 0, " +
                   std::to_string(count) + " in all");
}

std::shared_ptr<const PhysicalMemory> PhysicalMemory::create(int gpu, uint64_t bytes) {
  check_gpu(gpu, "alloc");
  const Driver& driver = need_driver("alloc");
  if (const std::string why = why_no_vmm(driver, gpu); !why.empty()) throw TransportError("alloc", 0, why, kInstead);
  MemoryProperties wanted{};
  wanted.type = kPinned;
  wanted.handle_types = kByFd;
  wanted.location = {kOnDevice, gpu};
  wanted.is_for_rdma = has_attribute(driver, kDeviceRdmaOfVmm, gpu) ? 1 : 0;
  const CurrentContext current(driver, gpu);
  const OutsideCapture outside(driver);
  size_t unit = 0;
  if (const int code = driver.memory_granularity(&unit, &wanted, kGranularityMin); code != 0 || unit == 0)
    fail(driver, "cuMemGetAllocationGranularity", code, "cannot ask in what units memory is given" + on(gpu), kInstead);
  const uint64_t whole = (bytes + unit - 1) / unit * unit;
  uint64_t handle = 0;
  if (const int code = driver.create_memory(&handle, whole, &wanted, 0); code != 0)
    fail(driver, "cuMemCreate", code, "cannot allocate " + std::to_string(whole) + " bytes" + on(gpu),
         "free memory there (torch.cuda.empty_cache()), or ask for less");
  return std::shared_ptr<const PhysicalMemory>(new PhysicalMemory(driver, gpu, handle, whole));
}

std::shared_ptr<const PhysicalMemory> PhysicalMemory::retain(uint64_t address, uint64_t bytes, int gpu) {
  const Driver& driver = need_driver("share");
  if (driver.retain_memory == nullptr || driver.release_memory == nullptr)
    throw TransportError("cuMemRetainAllocationHandle", 0, "this driver has none (CUDA 11.0 and newer have)");
  const CurrentContext current(driver, gpu);
  const OutsideCapture outside(driver);
  uint64_t handle = 0;
  void* const there = reinterpret_cast<void*>(address);  // NOLINT(performance-no-int-to-ptr)
  if (const int code = driver.retain_memory(&handle, there); code != 0)
    throw TransportError("cuMemRetainAllocationHandle", code, text_of(driver, code));
  return std::shared_ptr<const PhysicalMemory>(new PhysicalMemory(driver, gpu, handle, bytes));
}

std::shared_ptr<const PhysicalMemory> PhysicalMemory::import(const Fd& fd, uint64_t bytes, int gpu) {
  const Driver& driver = need_driver("import");
  if (driver.import_memory == nullptr || !can_map(driver))
    throw TransportError("import", 0, "this driver has no virtual memory management (CUDA 10.2 and newer have)");
  const CurrentContext current(driver, gpu);
  const OutsideCapture outside(driver);
  uint64_t handle = 0;
  void* const given = reinterpret_cast<void*>(static_cast<intptr_t>(fd.get()));  // NOLINT(performance-no-int-to-ptr)
  if (const int code = driver.import_memory(&handle, given, kByFd); code != 0)
    throw TransportError("cuMemImportFromShareableHandle", code, text_of(driver, code));
  return std::shared_ptr<const PhysicalMemory>(new PhysicalMemory(driver, gpu, handle, bytes));
}

Fd PhysicalMemory::share() const {
  if (driver_.export_memory == nullptr)
    throw TransportError("cuMemExportToShareableHandle", 0, "this driver has none (CUDA 10.2 and newer have)");
  const CurrentContext current(driver_, gpu_);
  const OutsideCapture outside(driver_);
  int fd = -1;
  if (const int code = driver_.export_memory(&fd, handle_, kByFd, 0); code != 0)
    throw TransportError("cuMemExportToShareableHandle", code, text_of(driver_, code));
  return Fd(fd);
}

bool mapping_of(const Driver& driver, uint64_t address, Allocation* mapping) {
  // Not kPointerRange...: for mapped memory that is the reserved address range, with any number of mappings.
  return driver.pointer_attribute(&mapping->base, kPointerMappingBase, address) == 0 &&
         driver.pointer_attribute(&mapping->length_bytes, kPointerMappingBytes, address) == 0 &&
         address - mapping->base < mapping->length_bytes;
}

// --- mappings ---

std::shared_ptr<MappedMemory> MappedMemory::map(std::shared_ptr<const PhysicalMemory> physical, int gpu) {
  std::shared_ptr<MappedMemory> memory(new MappedMemory(std::move(physical), gpu), &let_go);
  const std::lock_guard lock(registry().mutex);
  registry().mappings[reinterpret_cast<uint64_t>(memory->base_)] = memory;
  return memory;
}

MappedMemory::MappedMemory(std::shared_ptr<const PhysicalMemory> physical, int gpu)
    : physical_(std::move(physical)), driver_(need_driver("map")), gpu_(gpu), process_(::getpid()) {
  const uint64_t bytes = physical_->length_bytes();
  const CurrentContext current(driver_, gpu);
  const OutsideCapture outside(driver_);
  uint64_t address = 0;
  if (const int code = driver_.reserve_addresses(&address, bytes, 0, 0, 0); code != 0)
    fail(driver_, "cuMemAddressReserve", code, "cannot reserve addresses for " + std::to_string(bytes) + " bytes");
  if (const int code = driver_.map_memory(address, bytes, 0, physical_->handle(), 0); code != 0) {
    driver_.free_addresses(address, bytes);
    fail(driver_, "cuMemMap", code, "cannot map " + std::to_string(bytes) + " bytes");
  }
  base_ = reinterpret_cast<std::byte*>(address);  // NOLINT(performance-no-int-to-ptr)
  if (const int code = set_access(gpu); code != 0) {
    driver_.unmap_memory(address, bytes);
    driver_.free_addresses(address, bytes);
    fail(driver_, "cuMemSetAccess", code, "the memory is out of reach" + on(gpu));
  }
}

MappedMemory::~MappedMemory() {
  if (::getpid() != process_) return;
  const auto address = reinterpret_cast<uint64_t>(base_);
  {
    const std::lock_guard lock(registry().mutex);
    registry().mappings.erase(address);  // nobody gets this address before it is free
  }
  try {
    const CurrentContext current(driver_, gpu_);
    const OutsideCapture outside(driver_);
    driver_.unmap_memory(address, length_bytes());
    driver_.free_addresses(address, length_bytes());
  } catch (const TransportError&) {  // the GPU has failed, and its mappings are gone
  }
}

std::shared_ptr<MappedMemory> MappedMemory::find(uint64_t address, uint64_t bytes) {
  std::shared_ptr<MappedMemory> memory;  // released after the mutex, which its destructor takes, too
  const std::lock_guard lock(registry().mutex);
  auto found = registry().mappings.upper_bound(address);
  if (found == registry().mappings.begin()) return nullptr;
  --found;
  memory = found->second.lock();
  if (memory == nullptr) return nullptr;
  const uint64_t offset = address - found->first;
  if (offset > memory->length_bytes() || bytes > memory->length_bytes() - offset) return nullptr;
  return memory;
}

// The context of this or any GPU must be current. Returns the driver's code.
int MappedMemory::set_access(int gpu) {
  const MemoryAccess wanted{.location = {kOnDevice, gpu}, .flags = kReadWrite};
  const int code = driver_.set_access(reinterpret_cast<uint64_t>(base_), length_bytes(), &wanted, 1);
  if (code == 0) open_to_.fetch_or(bit(gpu), std::memory_order_relaxed);
  return code;
}

void MappedMemory::open_to_neighbours() {
  int count = 0;
  if (driver_.can_access_peer == nullptr || driver_.device_count(&count) != 0) return;
  const CurrentContext current(driver_, gpu_);
  const OutsideCapture outside(driver_);
  for (int gpu = 0; gpu < count; ++gpu) {
    int can = 0;
    // If the driver refuses here, it refuses with its reason when the access is requested.
    if (gpu != gpu_ && driver_.can_access_peer(&can, gpu, gpu_) == 0 && can != 0) set_access(gpu);
  }
}

// Like set_access(), unless it is already set.
int MappedMemory::open_to(int gpu) {
  if ((open_to_.load(std::memory_order_relaxed) & bit(gpu)) != 0) return 0;
  const CurrentContext current(driver_, gpu);
  const OutsideCapture outside(driver_);
  return set_access(gpu);
}

bool MappedMemory::opens_to(int gpu) { return open_to(gpu) == 0; }

void MappedMemory::give_to_kernels(int gpu) {
  if (const int code = open_to(gpu); code != 0)
    fail(driver_, "cuMemSetAccess", code, "the memory is out of reach" + on(gpu));
  given_to_.fetch_or(bit(gpu), std::memory_order_relaxed);
}

void MappedMemory::clear() {
  const CurrentContext current(driver_, gpu_);
  const OutsideCapture outside(driver_);
  void* stream = nullptr;
  if (const int code = make_stream(driver_, &stream); code != 0)
    fail(driver_, "cuStreamCreate", code, "cannot clear memory" + on(gpu_));
  int code = driver_.fill_async(reinterpret_cast<uint64_t>(base_), 0, length_bytes(), stream);
  if (code == 0) code = driver_.synchronize_stream(stream);
  driver_.destroy_stream(stream);
  if (code != 0) fail(driver_, "cuMemsetD8Async", code, "cannot clear memory" + on(gpu_));
}

// --- the end of mappings that kernels may use: cuMemUnmap waits for none, and what still runs would fault ---

void MappedMemory::wait_for_kernels() {
  for (int gpu = 0; gpu < kMaskBits; ++gpu) {
    if ((given_to_.load(std::memory_order_relaxed) & bit(gpu)) == 0 || driver_.synchronize_context == nullptr) continue;
    try {
      const CurrentContext current(driver_, gpu);
      const OutsideCapture outside(driver_);
      // A context cannot be waited for while a stream of it is being captured: tried again, at longer and longer
      // intervals.
      auto pause = kFirstPause;
      for (int code = driver_.synchronize_context(); is_of_captures(code); code = driver_.synchronize_context()) {
        std::this_thread::sleep_for(pause);
        pause = std::min(2 * pause, kLongestPause);
      }
    } catch (const TransportError&) {  // the GPU has failed, and its kernels with it
    }
  }
}

// Whoever drops the last reference does not wait: a kernel may be waiting for something that this very thread is to do.
// So a separate thread waits, for all pending mappings, and ends.
void MappedMemory::let_go(MappedMemory* memory) {
  if (memory->given_to_.load(std::memory_order_relaxed) == 0 || ::getpid() != memory->process_) {
    delete memory;
    return;
  }
  {
    const std::lock_guard lock(registry().mutex);
    registry().leaving.push_back(memory);
    if (std::exchange(registry().is_waiting, true)) return;
  }
  const auto wait = [] {
    for (;;) {
      std::vector<MappedMemory*> leaving;
      {
        const std::lock_guard lock(registry().mutex);
        leaving.swap(registry().leaving);
        if (leaving.empty()) {
          registry().is_waiting = false;
          return;
        }
      }
      for (MappedMemory* each : leaving) {
        each->wait_for_kernels();
        delete each;
      }
    }
  };
  try {
    std::thread thread = start_thread(wait);
    pthread_setname_np(thread.native_handle(), "crossrail-unmap");
    thread.detach();
  } catch (const TransportError&) {  // the next one tries again
    const std::lock_guard lock(registry().mutex);
    registry().is_waiting = false;
  }
}

}  // namespace crossrail::device
