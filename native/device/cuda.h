// NVIDIA's driver, opened at run time: preparing GPU memory for NICs, copies, sharing between processes, and a few
// kernels (kernels.h).
//
// Constants and names are those of CUDA's public driver interface (cuda.h), whose headers are not needed to build.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

namespace crossrail::device {

using IpcHandle = std::array<uint8_t, 64>;  // cuda.h: CUipcMemHandle, a structure with just this

// cuda.h: CUmemLocation, CUmemAllocationProp, CUmemAccessDesc.
struct MemoryLocation {
  int type;
  int id;
};
struct MemoryProperties {
  int type;
  int handle_types;
  MemoryLocation location;
  void* win32_meta_data;
  uint8_t compression_type;
  uint8_t is_for_rdma;
  uint16_t usage;
  uint8_t reserved[4];
};
static_assert(sizeof(MemoryProperties) == 32);
struct MemoryAccess {
  MemoryLocation location;
  int flags;
};
static_assert(sizeof(MemoryAccess) == 12);

// The functions of libcuda.so.1 that we call. They return a CUresult: 0 is success.
struct Driver {
  int (*init)(unsigned flags);
  int (*error_string)(int code, const char** text);
  int (*device_count)(int* count);
  int (*device_name)(char* name, int bytes, int device);
  int (*device_attribute)(int* value, int attribute, int device);
  int (*retain_context)(void** context, int device);
  int (*push_context)(void* context);
  int (*pop_context)(void** context);
  int (*pointer_attribute)(void* value, int attribute, uint64_t address);
  int (*set_pointer_attribute)(const void* value, int attribute, uint64_t address);
  int (*create_stream)(void** stream, unsigned flags);
  int (*destroy_stream)(void* stream);
  int (*synchronize_stream)(void* stream);
  int (*copy_async)(uint64_t to, uint64_t from, size_t bytes, void* stream);
  int (*pin_host)(void* base, size_t bytes, unsigned flags);
  int (*unpin_host)(void* base);
  int (*allocate)(uint64_t* address, size_t bytes);
  int (*free)(uint64_t address);
  // Null if older than CUDA 11.7, 11.3, 10.1.
  int (*export_range)(void* handle, uint64_t address, size_t bytes, int kind, unsigned long long flags);
  int (*flush_writes)(int target, int scope);
  int (*exchange_capture_mode)(int* mode);
  // Every driver for a data-centre GPU has them; null otherwise.
  int (*get_ipc_handle)(IpcHandle* handle, uint64_t address);
  int (*open_ipc_handle)(uint64_t* address, IpcHandle handle, unsigned flags);
  int (*close_ipc_handle)(uint64_t address);
  // Kernels of ours, see kernels.h. The last is null if older than CUDA 9.2.
  int (*load_module)(void** module, const void* image);
  int (*module_function)(void** function, void* module, const char* name);
  int (*launch_kernel)(void* function, unsigned grid_x, unsigned grid_y, unsigned grid_z, unsigned block_x,
                       unsigned block_y, unsigned block_z, unsigned shared_bytes, void* stream, void** arguments,
                       void** extra);
  int (*pinned_address)(uint64_t* address, void* pinned, unsigned flags);
  int (*context_device)(int* device);
  int (*stream_context)(void* stream, void** context);
  // Null if older than CUDA 5.5.
  int (*create_stream_with_priority)(void** stream, unsigned flags, int priority);
  int (*stream_priorities)(int* least, int* greatest);
  // Virtual memory management, see vmm.h. Null if older than CUDA 10.2, the last if older than 11.0.
  int (*create_memory)(uint64_t* handle, size_t bytes, const MemoryProperties* wanted, unsigned long long flags);
  int (*release_memory)(uint64_t handle);
  int (*reserve_addresses)(uint64_t* address, size_t bytes, size_t alignment, uint64_t wanted,
                           unsigned long long flags);
  int (*free_addresses)(uint64_t address, size_t bytes);
  int (*map_memory)(uint64_t address, size_t bytes, size_t offset, uint64_t handle, unsigned long long flags);
  int (*unmap_memory)(uint64_t address, size_t bytes);
  int (*set_access)(uint64_t address, size_t bytes, const MemoryAccess* wanted, size_t count);
  int (*memory_granularity)(size_t* bytes, const MemoryProperties* wanted, int kind);
  int (*export_memory)(void* fd, uint64_t handle, int kind, unsigned long long flags);
  int (*import_memory)(uint64_t* handle, void* fd, int kind);
  int (*retain_memory)(uint64_t* handle, void* address);
  // Likewise for its users; every driver with the functions above has these.
  int (*can_access_peer)(int* can, int device, int owner);
  int (*fill_async)(uint64_t address, unsigned char value, size_t bytes, void* stream);
  int (*synchronize_context)();
};

// [any] Opened by the first call and never closed. Null: not installed, or no GPU; *why says what and what helps.
const Driver* find_driver(std::string* why = nullptr);
// For tests: use this table from now on; null: the real driver again. Only while no region is in GPU memory.
void replace_driver(const Driver* table);
// Likewise, the driver in that file; empty: the real one again. Throws TransportError if it is not a driver.
void replace_driver_by(const std::string& file);

struct Gpu {
  int ordinal = 0;
  std::string name;
  bool exports_dma_buf = false;
  bool has_gpudirect = false;  // NICs can be given access to its memory at all
  bool needs_flush = false;    // a NIC's write may still be in flight when the CPU learns of it
  bool can_flush = false;      // and the driver can wait for it
};
// Empty if there is no driver. Throws TransportError if there is one and it fails.
std::vector<Gpu> gpus();
// "0000:53:00.0", its name for the rest of the machine; empty: unknown, or there is no such GPU.
std::string pci_address(int ordinal);

// Makes the GPU's primary context, which other users in this process share, current on this thread; restores the
// previous one on destruction.
class CurrentContext {
 public:
  // Throws TransportError.
  CurrentContext(const Driver& driver, int ordinal);
  ~CurrentContext();
  CurrentContext(const CurrentContext&) = delete;
  CurrentContext& operator=(const CurrentContext&) = delete;
  const void* handle() const { return handle_; }

 private:
  const Driver& driver_;
  void* handle_ = nullptr;
};

// The driver's text for an error, with its number.
std::string text_of(const Driver& driver, int code);
// Throws TransportError with `what` and that text. call: the driver function that failed.
[[noreturn]] void fail(const Driver& driver, const char* call, int code, const std::string& what,
                       const std::string& remedy = {});

// Memory of one GPU, for as long as transports are told about it: an exported handle is closed with it.
class GpuMemory {
 public:
  // for_nics: NICs are to access it directly; otherwise it is copied. Throws UsageError for memory that cannot be made
  // accessible to them (managed by CUDA, or not GPU memory), TransportError if the driver is missing or refuses.
  GpuMemory(std::byte* base, uint64_t length_bytes, bool for_nics = true);
  ~GpuMemory();
  GpuMemory(const GpuMemory&) = delete;
  GpuMemory& operator=(const GpuMemory&) = delete;

  std::byte* base() const { return base_; }
  uint64_t length_bytes() const { return length_bytes_; }
  const Gpu& gpu() const { return gpu_; }
  // A dma-buf that contains the range, which begins at dma_buf_offset(); -1: none, and why.
  int dma_buf() const { return dma_buf_; }
  uint64_t dma_buf_offset() const { return dma_buf_offset_; }
  const std::string& why_no_dma_buf() const { return why_; }

 private:
  void export_dma_buf(const Driver& driver);
  std::byte* const base_;
  const uint64_t length_bytes_;
  Gpu gpu_;
  int dma_buf_ = -1;
  uint64_t dma_buf_offset_ = 0;
  std::string why_;
};

// The GPU whose memory that is; -1: of no GPU that the driver knows. Any thread.
int gpu_of(const Driver& driver, const void* address);

// Whether an address is GPU memory. False without asking if this process has not opened the driver: nobody in it can
// have such an address then.
bool is_gpu_address(const void* address);
// Likewise, of which GPU; -1: none.
int gpu_of_address(const void* address);

struct Allocation {
  uint64_t base = 0;
  uint64_t length_bytes = 0;
};
// The driver's allocation that contains a GPU address: a range that spans two of them cannot be exported, or copied at
// once. Throws UsageError for other memory, TransportError if the driver is missing or does not say.
Allocation allocation_of(const void* address);

// Returns once everything that NICs have written to that GPU before is visible to what the GPU does next. Any thread.
// Throws TransportError.
void flush_writes(int ordinal);

}  // namespace crossrail::device
