// Memory of a GPU that another process of this host reaches by itself: CUDA's IPC.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>

#include "device/cuda.h"

namespace crossrail::device {

// What a process tells another of a range of its GPU memory, so that it can map the allocation which the range is in.
struct SharedRange {
  IpcHandle handle{};
  uint64_t allocation_id = 0;  // the driver's, never used again in the owner's process: 0, there is no handle
  uint64_t offset = 0;         // of the range in the allocation
  std::string why_not;         // without a handle: what the driver said

  bool is_shared() const { return allocation_id != 0; }
};

// Of memory that torch or cudaMalloc gave. Memory that other processes cannot map (virtual memory management, torch's
// expandable_segments) comes without a handle.
SharedRange share(const GpuMemory& memory);

// Another process's allocation, mapped here as long as one of these is there. On that GPU of ours it may be copied from and to.
class ImportedMemory {
 public:
  // gpu: of ours, which is to copy. Throws TransportError: the driver does not map it (the owner's GPU is out of reach, or in
  // another container), or one that the owner has freed since is still mapped here by the same handle. Any thread.
  ImportedMemory(const SharedRange& range, int gpu);
  ~ImportedMemory();
  ImportedMemory(const ImportedMemory&) = delete;
  ImportedMemory& operator=(const ImportedMemory&) = delete;
  std::byte* base() const { return base_; }

 private:
  const IpcHandle handle_;
  const int gpu_;
  std::byte* base_ = nullptr;
};

}  // namespace crossrail::device
