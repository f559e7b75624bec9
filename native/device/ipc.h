// GPU memory that another process on this host accesses directly: through CUDA IPC, or through descriptors of physical
// memory.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>

#include "device/cuda.h"
#include "device/vmm.h"

namespace crossrail::device {

// The values are part of the wire format.
enum class SharedBy : uint8_t {
  kNothing = 0,
  kIpc = 1,  // from cudaMalloc: the owner must keep it while others have it mapped
  kVmm = 2   // physical memory, which needs no such care
};

// What a process tells another about a range of its GPU memory, so that the other can map the allocation that contains
// it.
struct SharedRange {
  SharedBy by = SharedBy::kNothing;
  uint64_t offset = 0;         // of the range in the allocation
  IpcHandle handle{};          // kIpc, and
  uint64_t allocation_id = 0;  // from the driver, never reused in the owner's process
  // kVmm: in the owner, the handle that descriptors are made from; elsewhere the handle that a descriptor was converted
  // into, if any.
  std::shared_ptr<const PhysicalMemory> physical;
  uint64_t allocation_bytes = 0;
  std::string why_not;  // kNothing: the driver's reason

  bool is_shared() const { return by != SharedBy::kNothing; }
};

// For memory from torch, cudaMalloc or PhysicalMemory. A range over several allocations is not shared, nor memory that
// was mapped without permission to share (torch's expandable_segments, depending on its version).
SharedRange share(const GpuMemory& memory);

// Another process's allocation, mapped here while this object exists. That GPU of ours can copy from and to it.
class ImportedMemory {
 public:
  // gpu: ours, which is to copy. length_bytes: of the range. Throws TransportError: the driver does not map it (the
  // owner's GPU is out of reach, or in another container), maps less than the range needs, or still has a freed
  // allocation of the owner mapped under the same handle. Any thread.
  ImportedMemory(const SharedRange& range, uint64_t length_bytes, int gpu);
  ~ImportedMemory();
  ImportedMemory(const ImportedMemory&) = delete;
  ImportedMemory& operator=(const ImportedMemory&) = delete;
  // Start of the range.
  std::byte* base() const { return base_; }

 private:
  bool holds(uint64_t offset, uint64_t length_bytes) const;
  void open(const SharedRange& range);
  void close();

  std::shared_ptr<const MappedMemory> mapped_;  // kVmm; otherwise there is a handle
  const IpcHandle handle_;
  const int gpu_;
  std::byte* base_ = nullptr;
};

}  // namespace crossrail::device
