// GPU memory through CUDA's virtual memory management: physical memory has handles, which travel as file descriptors,
// and is mapped wherever it is used.
#pragma once

#include <sys/types.h>

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>

#include "device/cuda.h"
#include "util/memory_map.h"

namespace crossrail::device {

// A handle of ours. The memory exists as long as any handle, descriptor or mapping of it does, in any process: its
// first owner may free it, or die. Any thread. In a forked child, where CUDA does not work, nothing is released.
class PhysicalMemory {
 public:
  // New memory on that GPU: whole driver units (2 MiB), uninitialised. Throws UsageError: there is no such GPU;
  // TransportError: the driver is missing, too old, or refuses.
  static std::shared_ptr<const PhysicalMemory> create(int gpu, uint64_t bytes);
  // The memory mapped at an address of that GPU where such a mapping begins; bytes: its length. Throws TransportError
  // if there is none, since it is from cudaMalloc.
  static std::shared_ptr<const PhysicalMemory> retain(uint64_t address, uint64_t bytes, int gpu);
  // From a descriptor that share() made, in any process. bytes: as stated by the sender; verified when mapped. gpu: any
  // of ours. Throws TransportError.
  static std::shared_ptr<const PhysicalMemory> import(const Fd& fd, uint64_t bytes, int gpu);

  ~PhysicalMemory();
  PhysicalMemory(const PhysicalMemory&) = delete;
  PhysicalMemory& operator=(const PhysicalMemory&) = delete;

  // A descriptor that any process may import. Throws TransportError for memory that was created without permission to
  // share.
  Fd share() const;
  uint64_t length_bytes() const { return length_bytes_; }
  uint64_t handle() const { return handle_; }

 private:
  PhysicalMemory(const Driver& driver, int gpu, uint64_t handle, uint64_t length_bytes);
  const Driver& driver_;
  const int gpu_;
  const uint64_t handle_;
  const uint64_t length_bytes_;
  const pid_t process_;
};

// Maps all of it at an address of ours, for kernels and copies on at least one GPU. Any thread.
class MappedMemory {
 public:
  // Throws TransportError: that GPU cannot reach the memory, or its length is invalid.
  static std::shared_ptr<MappedMemory> map(std::shared_ptr<const PhysicalMemory> physical, int gpu);
  // The mapping of ours that contains these addresses; null: none, or only partly.
  static std::shared_ptr<MappedMemory> find(uint64_t address, uint64_t bytes);

  ~MappedMemory();
  MappedMemory(const MappedMemory&) = delete;
  MappedMemory& operator=(const MappedMemory&) = delete;

  std::byte* base() const { return base_; }
  uint64_t length_bytes() const { return physical_->length_bytes(); }
  // Lets copies on all our GPUs that can reach it do so, not only on the one that it was mapped for.
  void open_to_neighbours();
  // Whether copies and kernels of ours on that GPU reach it, from now on at the latest. Throws TransportError: the GPU
  // has failed.
  bool opens_to(int gpu);
  // Kernels of the user's on that GPU may use it from now on. They are waited for before it is unmapped: when the last
  // reference is dropped, a thread starts that does both. Throws TransportError: that GPU does not reach it.
  void give_to_kernels(int gpu);
  // Zeroes it, and returns when that is done. Waits for no kernel of the user's. Throws TransportError.
  void clear();

 private:
  MappedMemory(std::shared_ptr<const PhysicalMemory> physical, int gpu);
  static void let_go(MappedMemory* memory);
  int set_access(int gpu);
  int open_to(int gpu);
  void wait_for_kernels();

  const std::shared_ptr<const PhysicalMemory> physical_;
  const Driver& driver_;
  const int gpu_;
  const pid_t process_;
  std::byte* base_ = nullptr;
  // By ordinal; GPUs above 63 are not recorded, and not shared with. relaxed: whoever sets a bit holds a reference, and
  // whoever drops the last one acquires what the others did.
  std::atomic<uint64_t> open_to_{0};
  std::atomic<uint64_t> given_to_{0};
};

// Throws UsageError: there is no such GPU; TransportError: no driver. call: for the error message.
void check_gpu(int gpu, const char* call);

// Why that GPU's memory cannot be allocated this way, with what helps; empty: it can. Throws TransportError if the
// driver fails.
std::string why_no_vmm(const Driver& driver, int gpu);

// Start and length of the mapping at an address; for cudaMalloc memory, of the allocation. False: the driver does not
// say.
bool mapping_of(const Driver& driver, uint64_t address, Allocation* mapping);

}  // namespace crossrail::device
