// The bare loop over libfabric: one domain and one endpoint. A write is complete only when it is delivered
// (FI_DELIVERY_COMPLETE), as in the engine; the target reads its queue.
#pragma once

#include <cstddef>
#include <cstdint>
#include <list>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "bench/bare_loop.h"
#include "transport/ofi/domain.h"

namespace crossrail::bench {

class FabricLoop final : public BareLoop {
 public:
  FabricLoop(const std::string& provider, const std::string& rail);

  const std::vector<uint8_t>& name() const override { return name_; }
  Target add_memory(std::span<std::byte> memory) override;
  void meet(const std::vector<uint8_t>& peer_name) override;
  int64_t writes(std::span<std::byte> source, Target target, uint64_t length_bytes, uint64_t count, uint32_t window,
                 Guard& guard) override;
  int64_t pages(std::span<std::byte> source, Target target, std::span<const int64_t> src_pages,
                std::span<const int64_t> dst_pages, uint64_t page_bytes, uint32_t window, bool imm_each,
                Guard& guard) override;
  int64_t ping_pong(std::span<std::byte> source, Target target, uint64_t rounds, bool first, Guard& guard) override;
  void receive(uint64_t count, Guard& guard) override;
  void progress() override;

 private:
  struct Entry {
    std::byte* base;
    ofi::Fid<fid_mr> memory;
  };
  void post(std::byte* from, uint64_t length_bytes, uint64_t to, uint64_t key, bool with_imm, Guard& guard);
  uint64_t read();
  void* descriptor_of(const std::byte* base) const;

  std::unique_ptr<ofi::Domain> domain_;
  std::unique_ptr<ofi::Peers> peers_;
  ofi::Fid<fid_ep> endpoint_;
  std::vector<uint8_t> name_;
  std::list<Entry> memories_;
  fi_addr_t peer_ = FI_ADDR_NOTAVAIL;
  uint64_t completed_ = 0;
  uint64_t arrived_ = 0;
  void* descriptor_ = nullptr;  // of the current loop's source
};

}  // namespace crossrail::bench
