// What bare libfabric can do on this machine: the limit of the engine over ofi, with the same completions.
//
// One domain and one endpoint, one process at each end, no engine. The initiator writes, each write with an immediate
// and complete only when it is delivered (FI_DELIVERY_COMPLETE); the target reads its queue. Threads: the caller's.
#pragma once

#include <cstddef>
#include <cstdint>
#include <list>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "bench/guard.h"
#include "transport/ofi/domain.h"

namespace crossrail::bench {

class FabricLoop {
 public:
  // At an address (tcp) or device of a provider of libfabric. Throws TransportError.
  FabricLoop(const std::string& provider, const std::string& rail);
  ~FabricLoop();
  FabricLoop(const FabricLoop&) = delete;
  FabricLoop& operator=(const FabricLoop&) = delete;

  struct Target {
    uint64_t base = 0;
    uint64_t key = 0;
  };
  const std::vector<uint8_t>& name() const { return name_; }
  // Memory that stays where it is until this is destroyed.
  Target add_memory(std::span<std::byte> memory);
  void meet(const std::vector<uint8_t>& peer_name);

  // `count` writes of `length_bytes`, each at the next place, `window` of them not complete. Nanoseconds.
  int64_t writes(std::span<std::byte> source, Target target, uint64_t length_bytes, uint64_t count, uint32_t window,
                 Guard& guard);
  // Page src_pages[i] to page dst_pages[i]. Nanoseconds.
  int64_t pages(std::span<std::byte> source, Target target, std::span<const int64_t> src_pages,
                std::span<const int64_t> dst_pages, uint64_t page_bytes, uint32_t window, Guard& guard);
  // The target: until `count` immediates came.
  void receive(uint64_t count, Guard& guard);

 private:
  struct Entry {
    std::byte* base;
    ofi::Fid<fid_mr> memory;
  };
  void post(std::byte* from, uint64_t length_bytes, uint64_t to, uint64_t key, Guard& guard);
  uint64_t read();
  void* descriptor_of(const std::byte* base) const;

  std::unique_ptr<ofi::Domain> domain_;
  ofi::Fid<fid_ep> endpoint_;
  std::vector<uint8_t> name_;
  std::list<Entry> memories_;
  fi_addr_t peer_ = FI_ADDR_NOTAVAIL;
  uint64_t completed_ = 0;
  uint64_t arrived_ = 0;
  void* descriptor_ = nullptr;  // of the source of the loop that runs
};

}  // namespace crossrail::bench
