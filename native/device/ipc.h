// GPU memory that another process of this host reaches directly: by CUDA's IPC, or by descriptors of physical memory.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>

#include "device/cuda.h"
#include "device/vmm.h"

namespace crossrail::device {

// The numbers travel.
enum class SharedBy : uint8_t {
  kNothing = 0,
  kIpc = 1,  // cudaMalloc's: the owner has to let it be as long as others have it mapped
  kVmm = 2   // physical memory, which nobody has to wait for
};

// What a process tells another about a range of its GPU memory, so that the other can map the allocation that contains
// it.
struct SharedRange {
  SharedBy by = SharedBy::kNothing;
  uint64_t offset = 0;         // of the range in the allocation
  IpcHandle handle{};          // kIpc, and
  uint64_t allocation_id = 0;  // the driver's, never used again in the owner's process
  // kVmm: the owner's handle, of which descriptors are made; elsewhere the handle that one was taken for, if it was.
  std::shared_ptr<const PhysicalMemory> physical;
  uint64_t allocation_bytes = 0;
  std::string why_not;  // kNothing: what the driver said

  bool is_shared() const { return by != SharedBy::kNothing; }
};

// Of memory that torch or cudaMalloc gave, or PhysicalMemory. A range over several allocations is not shared, nor what
// was mapped without leave to be (torch's expandable_segments, which depends on its version).
SharedRange share(const GpuMemory& memory);

// Another process's allocation, mapped here as long as this object lives. That GPU of ours can copy from and to it.
class ImportedMemory {
 public:
  // gpu: of ours, which is to copy. Throws TransportError: the driver does not map it (the owner's GPU is out of reach,
  // or in another container), or not so much of it as the range needs, or one that the owner has freed since is still
  // mapped here by the same handle. Any thread.
  // length_bytes: of the range.
  ImportedMemory(const SharedRange& range, uint64_t length_bytes, int gpu);
  ~ImportedMemory();
  ImportedMemory(const ImportedMemory&) = delete;
  ImportedMemory& operator=(const ImportedMemory&) = delete;
  // Of the range.
  std::byte* base() const { return base_; }

 private:
  bool holds(uint64_t offset, uint64_t length_bytes) const;
  void open(const SharedRange& range);
  void close();

  std::shared_ptr<const MappedMemory> mapped_;  // kVmm; else there is a handle
  const IpcHandle handle_;
  const int gpu_;
  std::byte* base_ = nullptr;
};

}  // namespace crossrail::device
