// The transports of one engine, operated as one.
#pragma once

#include <algorithm>
#include <array>
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "engine/region_ids.h"
#include "engine/routes.h"
#include "transport/sleep.h"
#include "transport/transport.h"

namespace crossrail {

struct EngineOptions;

// The transports' parts of one local region, under one id. The first transport's part may own the memory, so it is
// destroyed last.
class LocalRegions {
 public:
  LocalRegions(LocalRegions&& other) noexcept;
  ~LocalRegions();

  uint64_t id() const { return id_; }
  std::byte* base() const { return base_; }
  uint64_t length_bytes() const { return length_bytes_; }
  bool is_mapped() const { return halves_[0] != nullptr && halves_[0]->is_mapped; }
  bool is_for_mapping() const { return is_for_mapping_; }
  MemoryKind memory() const { return memory_; }
  // For GPU memory: which GPU, whether NICs' writes to it must be flushed, and how the NICs got access to it.
  int gpu() const { return gpu_; }
  bool needs_flush() const { return needs_flush_; }
  std::string given_by() const;
  // Null for a transport that does not move this kind of memory, and, for memory that is only for mapping, for all but
  // the first transport.
  LocalRegion* on(uint32_t transport) const { return halves_[transport].get(); }
  // For a forked child, where the transports' locks may stay locked for ever: never destroyed.
  void leak();
  void swap(LocalRegions& other) noexcept;

 private:
  friend class TransportSet;
  LocalRegions(RegionIds* ids, std::byte* base, uint64_t length_bytes)
      : ids_(ids), id_(ids->draw()), base_(base), length_bytes_(length_bytes) {}
  RegionIds* ids_;
  uint64_t id_;
  std::byte* base_;
  uint64_t length_bytes_;
  MemoryKind memory_ = MemoryKind::kHost;
  int gpu_ = -1;
  bool needs_flush_ = false;
  bool is_for_mapping_ = false;
  std::array<std::unique_ptr<LocalRegion>, kTransportsMax> halves_;
};

// How a peer is reached. The transport belongs to the set.
struct Route {
  Transport* transport = nullptr;
  const Traits* traits = nullptr;  // the transport's
  uint32_t index = 0;              // in the set
  TransportKind kind = TransportKind::kShm;
  std::string reason;  // for people
};

// Threads: as Transport says for the call of the same name.
// Invariant: ordered by TransportKind, so shm, if present, comes first: it allocates, since peers can map only its
// memory. Transports are opened in the opposite order: each adds its rails to the address, which the next one shows to
// its peers. Those opened earlier get the complete address by complete_address().
class TransportSet {
 public:
  // `sink` must outlive the set. Throws TransportError, UsageError.
  TransportSet(const EngineOptions& options, Place place, Sink* sink);

  uint32_t size() const { return size_; }
  Transport& at(uint32_t index) const { return *transports_[index]; }
  TransportKind kind_at(uint32_t index) const { return kinds_[index]; }
  const Address& address() const { return first_->address(); }
  uint32_t rail_count() const { return rail_count_; }  // of the transport with the most
  const std::vector<std::string>& rail_devices(uint32_t index) const { return rail_devices_[index]; }
  uint32_t gpu_transports() const;    // mask of the transports that move GPU memory
  std::string no_gpu_memory() const;  // why the first transport that could does not; empty: none could, or unknown
  // What EngineOptions::adds_rdma would have added.
  std::span<const Absent> absent() const { return absent_; }

  // Throws UsageError that says what to change if there is no route to that address.
  Route choose(const Address& peer) const;

  // --- memory [any] ---
  LocalRegions register_memory(std::byte* base, uint64_t length_bytes, Access access,
                               MemoryKind memory = MemoryKind::kHost);
  // is_for_mapping: no transfer will use it, so only the first transport needs to know about it.
  LocalRegions allocate(uint64_t length_bytes, bool populate, bool is_for_mapping = false);
  // Throws TransportError if none of them does.
  void check_moves_gpu_memory() const;
  // Fills in what the transports tell peers about the region.
  void describe(const LocalRegions& region, RegionDescriptor* descriptor) const;
  void revoke_region(LocalRegions& region);
  bool is_region_quiet(const LocalRegions& region) const;
  // Names of peers that keep the revoked region from becoming quiet, as far as the transports know.
  std::vector<std::string> users_of(const LocalRegions& region) const;
  // Progress holder: calls Transport::move_source of each.
  bool move_source(const LocalRegions& from, const LocalRegions& to) const;

  // --- all at once ---
  uint32_t poll() {
    uint32_t moved = first_->poll();
    for (uint32_t i = 1; i < size_; ++i) moved += transports_[i]->poll();
    return moved;
  }
  void withdraw(bool (*wanted)(void* context));
  void arm() {
    first_->arm();
    for (uint32_t i = 1; i < size_; ++i) transports_[i]->arm();
  }
  void disarm() {
    first_->disarm();
    for (uint32_t i = 1; i < size_; ++i) transports_[i]->disarm();
  }
  void let_go() {
    first_->let_go();
    for (uint32_t i = 1; i < size_; ++i) transports_[i]->let_go();
  }
  bool is_armed() const {
    bool armed = first_->is_armed();
    for (uint32_t i = 1; i < size_; ++i) armed = armed && transports_[i]->is_armed();
    return armed;
  }
  bool has_arrivals() {
    bool arrived = first_->has_arrivals();
    for (uint32_t i = 1; i < size_; ++i) arrived = arrived || transports_[i]->has_arrivals();
    return arrived;
  }
  Deadline next_timer() const {
    Deadline next = first_->next_timer();
    for (uint32_t i = 1; i < size_; ++i) next = std::min(next, transports_[i]->next_timer());
    return next;
  }
  SleepingPlace& sleeping_place() { return *sleeping_place_; }  // not in a simulation
  // A sleeping thread sleeps on all transports: ringing one is enough.
  void wake() { first_->wake(); }
  void close();
  void abandon_after_fork();

 private:
  LocalRegions register_gpu_memory(std::byte* base, uint64_t length_bytes, Access access);
  using Opened = std::array<std::unique_ptr<Transport>, kTransportKinds + 1>;  // by kind
  std::vector<std::string> add_rdma(const EngineOptions& options, Address* identity, Opened* opened, Sink* sink);
  void keep(Opened opened, bool is_simulated);

  RegionIds region_ids_;
  std::vector<Absent> absent_;
  Transport* first_ = nullptr;
  uint32_t size_ = 0;
  uint32_t rail_count_ = 1;
  std::array<TransportKind, kTransportsMax> kinds_{};
  std::array<Traits, kTransportsMax> traits_;
  std::array<std::vector<std::string>, kTransportsMax> rail_devices_;
  std::array<Transport*, kTransportsMax> sleepers_{};
  std::array<std::unique_ptr<Transport>, kTransportsMax> transports_;
  std::unique_ptr<SleepingPlace> sleeping_place_;
};

}  // namespace crossrail
