// Operations, on the submitting thread: wrong arguments throw here, before anything has happened; otherwise a transfer
// is filled in and handed over.
#include <algorithm>
#include <bit>
#include <limits>
#include <mutex>
#include <string>

#include "engine/core.h"
#include "engine/engine.h"
#include "engine/page_indices.h"
#include "util/errors.h"

namespace crossrail {

namespace {

// Short enough that posting it on the caller's thread is faster than waking the worker.
constexpr uint64_t kShortBytes = 16 << 10;
constexpr uint64_t kShortPages = 64;
constexpr size_t kShortTargets = 128;
constexpr uint64_t kPagesMax = std::numeric_limits<uint32_t>::max();  // works of a transfer are counted in 32 bits
// From this size on, a copy would only push everything else out of the caches.
constexpr uint64_t kBulkBytes = uint64_t{1} << 20;

// The checks of every submit. What they throw is kept separate and cold, so that each check is a few instructions.
[[gnu::cold, noreturn]] void throw_range(const char* what, uint64_t offset, uint64_t length, uint64_t bound) {
  throw UsageError(std::string(what) + ": offset " + text(offset) + " + length " + text(length) +
                   " exceeds the region's " + text(bound) + " bytes");
}
// offset + length within bound, without overflow. `what` names the arguments.
inline void check_range(const char* what, uint64_t offset, uint64_t length, uint64_t bound) {
  if (!fits(offset, length, bound)) throw_range(what, offset, length, bound);
}

[[gnu::cold, noreturn]] void throw_imm(const std::string& name, uint32_t imm) {
  throw UsageError(name + " = " + text(imm) + " is not in 0..2**28-1");
}
inline void check_imm(uint32_t imm) {
  if (imm != kNoImm && imm > kImmMax) throw_imm("imm", imm);
}

void check_imms(std::span<const uint32_t> imms, uint32_t imm_of_all, size_t count) {
  if (imms.empty()) return;
  if (imms.size() != count) {
    throw UsageError("imms has " + text(imms.size()) + " numbers, must have " + text(count) +
                     ", one for each entry of dsts");
  }
  if (imm_of_all != kNoImm) {
    throw UsageError("imm and imms are both given: imm is one number for all targets, imms has one for each");
  }
  for (size_t i = 0; i < count; ++i) {
    if (imms[i] != kNoImm && imms[i] > kImmMax) throw_imm("imms[" + text(i) + "]", imms[i]);
  }
}

[[gnu::cold, noreturn]] void throw_rail(uint32_t rail, uint32_t rail_count) {
  throw UsageError("rail = " + text(rail) + " is not in 0.." + text(rail_count - 1) + ": the engine has " +
                   text(rail_count) + " rails");
}
inline void check_rail(uint32_t rail, uint32_t rail_count) {
  if (rail != kAnyRail && rail >= rail_count) throw_rail(rail, rail_count);
}

[[gnu::cold, noreturn]] void throw_local(const Region* region, const char* name, Engine* owner) {
  if (region == nullptr) throw UsageError(std::string(name) + " is missing");
  if (region->engine() != owner) throw UsageError(std::string(name) + " is a region of another engine");
  owner->core().check_usable();  // whose end may have closed it since our caller looked
  throw UsageError(std::string(name) + " is closed");
}
inline void check_local(const Region* region, const char* name, Engine* owner) {
  if (region == nullptr || region->engine() != owner || region->closed()) throw_local(region, name, owner);
}

[[gnu::cold, noreturn]] void throw_not_of_group(size_t index, const Address& owner, const Address& member) {
  const std::string what = "dsts[" + text(index) + "] belongs to '" + owner.name + "'";
  if (owner.incarnation == member.incarnation) {
    throw UsageError(what + ", which forget_peer() was called for since the group was made: make a new group");
  }
  if (owner.name == member.name) {
    throw UsageError(what + ", the group's peer there is another engine of that name: if it was restarted, get new " +
                     "descriptors from it and make a new group with its new address");
  }
  throw UsageError(what + ", the group's peer there is '" + member.name + "'");
}

// The total of one operation: bytes moved are counted in 64 bits, however often pages or targets name the same bytes.
[[gnu::cold, noreturn]] void throw_total(const char* what, uint64_t count) {
  throw UsageError(std::string(what) + " has " + text(count) + " entries, and they are more than 2**64 bytes together");
}

void check_group(const PeerGroup& group, const Engine* engine) {
  if (group.engine() != engine) throw UsageError("group is a peer group of another engine");
}

[[gnu::cold, noreturn]] void throw_remote(const RemoteRegion* region, const char* name, Access needed) {
  if (region == nullptr) throw UsageError(std::string(name) + " is missing");
  const Access access = region->descriptor().access;
  throw UsageError(std::string(name) + " has access '" + access_name(access) + "', '" + access_name(needed) +
                   "' is needed: its owner registered it so");
}
inline void check_remote(const RemoteRegion* region, const char* name, Access needed) {
  if (region == nullptr || !allows(region->descriptor().access, needed)) throw_remote(region, name, needed);
}

// GPU memory, on either side, needs a transport whose NICs access it, or that has the driver copy it.
[[gnu::cold, gnu::noinline]] void check_special(const Region& local, const RemoteRegion& remote, bool verify) {
  if (local.memory() == MemoryKind::kHost && !local.is_plain())
    throw UsageError("our memory was allocated for peers of this host to map it, and not for transfers");
  const Peer& peer = *remote.peer();
  const bool is_ours = local.memory() != MemoryKind::kHost;
  const std::string what = is_ours ? "our memory is on cuda:" + text(static_cast<uint64_t>(local.gpu()))
                                   : "the memory of '" + peer.address().name + "' is on a GPU";
  if (!peer.takes_gpu_memory()) {
    const std::string& why = peer.no_gpu_memory();
    throw UsageError(what + ", and '" + peer.address().name + "' is reached by " +
                     transport_name(peer.transport_kind()) + ", which moves host memory only: " +
                     (why.empty() ? "open both engines with transport='verbs' (or 'ofi' on EFA)" : why));
  }
  if (verify) throw UsageError("verify computes checksums on the CPU, and " + what + ": check it there");
}
inline void check_memory(const Region& local, const RemoteRegion& remote, bool verify) {
  if (local.is_plain() && remote.descriptor().memory == MemoryKind::kHost) [[likely]]
    return;
  check_special(local, remote, verify);
}

// Copies within one engine's memory start at the front, in pieces, so an overlapping copy would overwrite bytes before
// they are read. A copy onto itself changes nothing.
[[gnu::cold, gnu::noinline]] void check_overlap(EngineCore& core, const std::byte* local, const RemoteRegion& remote,
                                                uint64_t remote_offset, uint64_t length_bytes) {
  const RegionUse region = core.named_regions().use(remote.descriptor().region_id);
  if (!region || region->base() == kPhantomBase) return;  // all phantoms begin at this address
  const auto ours = reinterpret_cast<uint64_t>(local);
  const auto theirs = reinterpret_cast<uint64_t>(region->base()) + remote_offset;
  if (ours == theirs || ours + length_bytes <= theirs || theirs + length_bytes <= ours) return;
  throw UsageError("src and dst are the same memory of this engine, " +
                   text(ours < theirs ? theirs - ours : ours - theirs) + " bytes apart, and overlap with length " +
                   text(length_bytes) + ": copy through another buffer");
}
inline void check_overlap(EngineCore& core, const Region& local, uint64_t local_offset, const RemoteRegion& remote,
                          uint64_t remote_offset, uint64_t length_bytes) {
  if (remote.descriptor().owner.incarnation == core.transports().address().incarnation) [[unlikely]]
    check_overlap(core, local.base() + local_offset, remote, remote_offset, length_bytes);
}

void check_trigger(const Trigger& trigger, const EngineCore& core, bool verify) {
  if (!trigger.watcher->is_of(core.watchers())) throw UsageError("trigger is a watcher of another engine");
  if (trigger.watcher->closed()) {
    core.check_usable();  // whose end may have closed it since our caller looked
    throw UsageError("trigger is a watcher that is closed");
  }
  if (verify) throw UsageError("verify takes the checksum of src now, and with a trigger src is not complete yet");
}

void check_verifiable(const TransferWork& work) {
  const auto moves_nothing = [](const Peer& peer) { return peer.transport_kind() == TransportKind::kNull; };
  const bool is_scatter = work.kind == OpKind::kScatter;
  if (is_scatter ? std::ranges::any_of(work.targets, [&](const auto& target) { return moves_nothing(*target.peer); })
                 : moves_nothing(work.peer()))
    throw UsageError("verify needs a transport that moves bytes, and 'null' does not");
}

}  // namespace

TransferRef EngineCore::make_transfer(OpKind kind) {
  Transfer* transfer = transfers_.take();
  transfer->work_->kind = kind;
  return TransferRef::adopt(transfer);
}

bool EngineCore::set_trigger(TransferWork& work, const Trigger& trigger) {
  if (trigger.watcher == nullptr) return false;
  work.has_trigger = true;
  work.triggered_ns.store(kUntriggered, std::memory_order_relaxed);
  work.trigger = Ref<Watcher>::share(trigger.watcher);
  work.threshold = trigger.threshold;
  return !Triggers::is_reached(trigger.watcher->value(), trigger.threshold);
}

void EngineCore::throw_closed_meanwhile() const {
  check_usable();  // its engine's end may have closed it
  throw UsageError("the region was closed during the submit");
}

void EngineCore::plan_verification(TransferWork& work) {
  check_verifiable(work);
  Region* const local = work.local;
  struct Use {
    explicit Use(Region* region) : region(region) { region->begin_op(); }
    ~Use() { region->end_op(); }
    Region* const region;
  } const use(local);
  // It may have been closed since our caller looked. From begin_op on, close() waits for us; before it, we see it.
  if (local->closed()) {
    work.local = nullptr;
    throw_closed_meanwhile();
  }
  make_verify_plan(work);
}

TransferRef EngineCore::hand_over(TransferRef transfer, bool short_work) {
  Region* const local = transfer->work_->local;
  // The caller's reference, and the engine's until completion. Not published yet: no atomic addition needed.
  transfer->word_.store(2 * Transfer::kOneRef, std::memory_order_relaxed);
  const bool here = short_work && options_.polling != Polling::kSpin && !is_simulated() && try_enter_open(kSubmitting);
  if (!here && local != nullptr) local->begin_op();
  // It may have been closed since our caller looked. From try_enter or begin_op on, close() waits for us; before it, we
  // see it.
  if (local != nullptr && local->closed()) {
    if (here) {
      leave();
    } else {
      local->end_op();
    }
    transfer->word_.store(Transfer::kOneRef, std::memory_order_relaxed);
    transfer->work_->local = nullptr;
    throw_closed_meanwhile();
  }
  if (here) {
    submit_here(transfer.get());
  } else {
    submit(transfer.get());
  }
  return transfer;
}

TransferRef Engine::submit_write(const WriteRequest& request) {
  core_->check_usable();
  check_local(request.src, "src", this);
  check_remote(request.dst, "dst", Access::kRemoteWrite);
  check_memory(*request.src, *request.dst, request.verify);
  if (request.trigger.watcher != nullptr) check_trigger(request.trigger, *core_, request.verify);
  check_range("src", request.src_offset, request.length_bytes, request.src->length_bytes());
  check_range("dst", request.dst_offset, request.length_bytes, request.dst->length_bytes());
  check_overlap(*core_, *request.src, request.src_offset, *request.dst, request.dst_offset, request.length_bytes);
  check_imm(request.imm);
  check_rail(request.rail, rail_count());
  TransferRef transfer = core_->make_transfer(OpKind::kWrite);
  TransferWork& work = EngineCore::work_of(*transfer);
  work.local = request.src;
  work.set_remote(request.dst);
  work.local_offset = request.src_offset;
  work.remote_offset = request.dst_offset;
  work.length_bytes = request.length_bytes;
  work.imm = request.imm;
  work.rail = request.rail;
  work.bulk = request.length_bytes >= kBulkBytes;
  const bool waits = core_->set_trigger(work, request.trigger);
  if (request.verify) core_->plan_verification(work);
  return core_->hand_over(std::move(transfer), waits || request.length_bytes <= kShortBytes);
}

TransferRef Engine::submit_read(const ReadRequest& request) {
  core_->check_usable();
  check_local(request.dst, "dst", this);
  check_remote(request.src, "src", Access::kRemoteRead);
  check_memory(*request.dst, *request.src, request.verify);
  check_range("dst", request.dst_offset, request.length_bytes, request.dst->length_bytes());
  check_range("src", request.src_offset, request.length_bytes, request.src->length_bytes());
  check_overlap(*core_, *request.dst, request.dst_offset, *request.src, request.src_offset, request.length_bytes);
  check_rail(request.rail, rail_count());
  TransferRef transfer = core_->make_transfer(OpKind::kRead);
  TransferWork& work = EngineCore::work_of(*transfer);
  work.local = request.dst;
  work.set_remote(request.src);
  work.local_offset = request.dst_offset;
  work.remote_offset = request.src_offset;
  work.length_bytes = request.length_bytes;
  work.rail = request.rail;
  work.bulk = request.length_bytes >= kBulkBytes;
  if (request.verify) core_->plan_verification(work);
  return core_->hand_over(std::move(transfer), request.length_bytes <= kShortBytes);
}

TransferRef Engine::submit_paged_writes(const PagedWriteRequest& request) {
  core_->check_usable();
  check_local(request.src, "src", this);
  check_remote(request.dst, "dst", Access::kRemoteWrite);
  check_memory(*request.src, *request.dst, request.verify);
  if (request.trigger.watcher != nullptr) check_trigger(request.trigger, *core_, request.verify);
  if (request.src_pages.count != request.dst_pages.count) {
    throw UsageError("src_pages has " + text(request.src_pages.count) + " indices and dst_pages " +
                     text(request.dst_pages.count) + ": both must have one for each page");
  }
  if (request.src_pages.count > kPagesMax)
    throw UsageError("src_pages has " + text(request.src_pages.count) + " indices, more than 2**32-1");
  check_imm(request.imm);
  check_rail(request.rail, rail_count());
  const std::pair<const char*, uint64_t> sizes[] = {{"page_bytes", request.page_bytes},
                                                    {"src_stride", request.src_stride_bytes},
                                                    {"dst_stride", request.dst_stride_bytes},
                                                    {"src_offset", request.src_offset},
                                                    {"dst_offset", request.dst_offset}};
  for (const auto& [name, value] : sizes) {
    if (value > (uint64_t{1} << 56)) throw UsageError(std::string(name) + " = " + text(value) + " is not in 0..2**56");
  }
  TransferRef transfer = core_->make_transfer(OpKind::kPagedWrites);
  TransferWork& work = EngineCore::work_of(*transfer);
  const uint64_t count = request.src_pages.count;
  if (count > work.page_capacity) {
    const uint64_t capacity = std::max<uint64_t>(256, std::bit_ceil(count));
    work.local_pages.reset(new uint32_t[capacity]);
    work.remote_pages.reset(new uint32_t[capacity]);
    work.page_capacity = capacity;
  }
  if (count > 0) {
    copy_page_indices(request.src_pages, "src_pages", request.src_offset, request.src_stride_bytes, request.page_bytes,
                      request.src->length_bytes(), work.local_pages.get());
    copy_page_indices(request.dst_pages, "dst_pages", request.dst_offset, request.dst_stride_bytes, request.page_bytes,
                      request.dst->length_bytes(), work.remote_pages.get());
  }
  work.local = request.src;
  work.set_remote(request.dst);
  work.local_offset = request.src_offset;
  work.remote_offset = request.dst_offset;
  work.page_count = count;
  work.page_bytes = request.page_bytes;
  work.local_stride_bytes = request.src_stride_bytes;
  work.remote_stride_bytes = request.dst_stride_bytes;
  if (__builtin_mul_overflow(count, request.page_bytes, &work.length_bytes)) throw_total("src_pages", count);
  work.imm = request.imm;
  work.rail = request.rail;
  work.bulk = work.length_bytes >= kBulkBytes;
  const bool waits = core_->set_trigger(work, request.trigger);
  if (request.verify) core_->plan_verification(work);
  return core_->hand_over(std::move(transfer), waits || (work.length_bytes <= kShortBytes && count <= kShortPages));
}

TransferRef Engine::submit_scatter(const ScatterRequest& request) {
  core_->check_usable();
  check_local(request.src, "src", this);
  const size_t count = request.dsts.size();
  if (request.lengths.size() != count || request.src_offsets.size() != count || request.dst_offsets.size() != count) {
    throw UsageError("dsts has " + text(count) + " entries, lengths " + text(request.lengths.size()) +
                     ", src_offsets " + text(request.src_offsets.size()) + " and dst_offsets " +
                     text(request.dst_offsets.size()) + ": each must have one for each target");
  }
  if (request.group != nullptr) check_group(*request.group, this);
  if (request.group != nullptr && request.group->size() != count) {
    throw UsageError("dsts has " + text(count) + " entries, must have " + text(request.group->size()) +
                     ", one for each peer of the group");
  }
  check_imm(request.imm);
  check_imms(request.imms, request.imm, count);
  TransferRef transfer = core_->make_transfer(OpKind::kScatter);
  TransferWork& work = EngineCore::work_of(*transfer);
  work.targets.resize(count);
  uint64_t bytes_here = 0;  // bytes that posting would move on the submitting thread
  for (size_t i = 0; i < count; ++i) {
    RemoteRegion* const dst = request.dsts[i];
    if (dst == nullptr || dst->descriptor().access != Access::kRemoteWrite) {
      check_remote(dst, ("dsts[" + text(i) + "]").c_str(), Access::kRemoteWrite);
    }
    check_memory(*request.src, *dst, request.verify);
    if (request.group != nullptr && request.group->peers()[i].get() != dst->peer()) {
      throw_not_of_group(i, dst->peer()->address(), request.group->peers()[i]->address());
    }
    ScatterTarget& target = work.targets[i];
    if (target.dst.get() != dst) target.dst = RemoteRegionRef::share(dst);
    target.peer = dst->peer();
    target.imm = request.imms.empty() ? request.imm : request.imms[i];
    target.src_offset = request.src_offsets[i];
    target.dst_offset = request.dst_offsets[i];
    target.begin(request.lengths[i]);
    // Checked on our copy: the caller's arrays may change meanwhile.
    check_range("src", target.src_offset, target.length_bytes, request.src->length_bytes());
    check_range("dsts", target.dst_offset, target.length_bytes, dst->length_bytes());
    check_overlap(*core_, *request.src, target.src_offset, *dst, target.dst_offset, target.length_bytes);
    if (__builtin_add_overflow(work.length_bytes, target.length_bytes, &work.length_bytes)) throw_total("dsts", count);
    if (target.peer->route_.traits->moves_while_posting) bytes_here += target.length_bytes;
  }
  work.targets_total = count;
  work.local = request.src;
  work.imm = request.imm;
  work.bulk = work.length_bytes >= kBulkBytes;
  if (request.verify) core_->plan_verification(work);
  return core_->hand_over(std::move(transfer), bytes_here <= kShortBytes && count <= kShortTargets);
}

TransferRef Engine::submit_barrier(PeerGroup& group, uint32_t imm) {
  core_->check_usable();
  check_group(group, this);
  if (imm == kNoImm) throw UsageError("imm is missing: a barrier carries nothing but its immediate");
  check_imm(imm);
  TransferRef transfer = core_->make_transfer(OpKind::kBarrier);
  TransferWork& work = EngineCore::work_of(*transfer);
  work.targets.resize(group.size());
  for (size_t i = 0; i < group.size(); ++i) {
    work.targets[i].dst = nullptr;
    work.targets[i].peer = group.peers()[i].get();
    work.targets[i].imm = imm;
    work.targets[i].begin(0);
  }
  work.targets_total = group.size();
  work.group = PeerGroupRef::share(&group);
  work.imm = imm;
  return core_->hand_over(std::move(transfer), true);
}

TransferRef Engine::submit_send(Peer& peer, std::span<const uint8_t> payload) {
  core_->check_usable();
  if (payload.size() > options().message_bytes_max) {
    throw UsageError("message of " + text(payload.size()) +
                     " bytes exceeds message_bytes_max = " + text(options().message_bytes_max) +
                     "; write it instead, or raise the engine's option (at most 262144)");
  }
  TransferRef transfer = core_->make_transfer(OpKind::kSend);
  TransferWork& work = EngineCore::work_of(*transfer);
  work.payload.assign(payload.begin(), payload.end());
  work.receiver = PeerRef::share(&peer);
  work.length_bytes = payload.size();
  return core_->hand_over(std::move(transfer), payload.size() <= kShortBytes);
}

Ref<ReceivePool> Engine::submit_recvs(uint32_t buffer_count, uint32_t buffer_bytes) {
  core_->check_usable();
  if (buffer_count == 0 || buffer_count > (1u << 20))
    throw UsageError("count = " + text(buffer_count) + " is not in 1..2**20");
  if (buffer_bytes == 0 || buffer_bytes > kMessageBytesMax)
    throw UsageError("nbytes = " + text(buffer_bytes) + " is not in 1..262144");
  auto pool = Ref<ReceivePool>::adopt(new ReceivePool(Ref<Engine>::share(this), buffer_count, buffer_bytes));
  if (!core_->receiving_.put(pool)) core_->check_usable();  // closed meanwhile: throws
  core_->wake();                                            // messages may have been waiting for a pool
  return pool;
}

}  // namespace crossrail
