#include "moe/proxy.h"

#include <algorithm>
#include <array>
#include <cstring>
#include <numeric>
#include <utility>

#include "moe/node_sums.h"
#include "util/copy.h"
#include "util/errors.h"
#include "util/mutation.h"

namespace crossrail::moe {

namespace {

// How long a wait goes on without checking for lost ranks: a rank that dies counts nothing.
constexpr int64_t kLookEveryNs = 5'000'000;

FarResult result_of(Status status, bool masks) {
  switch (status) {
    case Status::kPeerLost:
      return FarResult::kPeerLost;
    case Status::kRegionClosed:
      return FarResult::kLeft;
    case Status::kRegionRevoked:
      return masks ? FarResult::kMaskedOut : FarResult::kLeft;
    case Status::kEngineClosed:
      return FarResult::kClosed;
    case Status::kPending:
    case Status::kDone:
      return FarResult::kReady;
    case Status::kCancelled:
    case Status::kOutOfBounds:
    case Status::kAccessDenied:
    case Status::kMessageTooLong:
    case Status::kTransportFailed:
    case Status::kChecksumMismatch:
      return FarResult::kFailed;
  }
  return FarResult::kFailed;
}

// The region that a step uses.
template <typename RegionOf>
const RegionOf& region_of(FarStep step, const FarRegions<RegionOf>& regions) {
  return step == FarStep::kRows || step == FarStep::kResults ? regions.rows : regions.routes;
}

void check_same_length(uint32_t rank, const char* what, const RemoteRegion& theirs, const Region& ours) {
  if (theirs.length_bytes() == ours.length_bytes()) return;
  throw UsageError("rank " + std::to_string(rank) + " has " + std::to_string(theirs.length_bytes()) +
                   " bytes for far " + what + ", we have " + std::to_string(ours.length_bytes()));
}

// In a farewell. 0, the initial content of engine memory, means no reason.
void store_why(std::byte* to, const Reason& why) {
  const uint32_t number = why.number ? *why.number + 1 : 0;
  std::memcpy(to, &number, sizeof number);
  std::memset(to + sizeof number, 0, kFarewellWords);
  std::memcpy(to + sizeof number, why.words.data(), std::min<size_t>(why.words.size(), kFarewellWords));
}

Reason load_why(const std::byte* from) {
  std::array<char, kFarewellBytes> copy;  // the other side may write meanwhile
  std::memcpy(copy.data(), from, copy.size());
  uint32_t number;
  std::memcpy(&number, copy.data(), sizeof number);
  const auto words = std::span(copy).subspan<sizeof number>();
  return {number == 0 ? std::nullopt : std::optional(number - 1), {words.begin(), std::ranges::find(words, '\0')}};
}

}  // namespace

Proxy::Proxy(EngineRef engine, const Layout& layout, uint32_t rank, const FarMemory& memory,
             FarRegions<RegionRef> regions, bool masks)
    : engine_(std::move(engine)),
      layout_(layout),
      rank_(rank),
      group_(layout.group_of(rank)),
      memory_(memory),
      regions_(std::move(regions)),
      masks_(masks) {
  layout.require_rank(rank);
  if (memory.route_bytes < counts_bytes() + hash_bytes() + kFarewellBytes)
    throw UsageError("route_bytes is " + std::to_string(memory.route_bytes) + ": no room for routes and a farewell");
  const uint32_t dp_size = layout.shape().dp_size;
  for (uint32_t other = 0; other < layout.shape().world; ++other) {
    if (layout.same_node(other, rank)) continue;
    Member& member = members_.emplace_back();
    member.rank = other;
    member.sends_rows = other % dp_size == rank % dp_size;
    member.slot_offset = uint64_t{layout.far_index(group_, other)} * layout.shape().private_rows * memory.stride_bytes;
    if (is_mutated(Mutation::kSlotOneRowLate)) member.slot_offset += memory.stride_bytes;
    for (Ref<ImmCounter>& counter : member.counters) counter = engine_->alloc_imm();
  }
  const std::vector<uint32_t> ranks = layout.far_ranks_in_turn(rank);
  for (uint32_t turn = 0; turn < ranks.size(); ++turn) member(ranks[turn]).turn = turn;
  for (const uint32_t partner : partners(layout, rank)) member(partner).is_partner = true;
  batch_.resize(members_.size());
  for (auto& expected : rows_expected_) expected.resize(members_.size());
}

Proxy::~Proxy() {
  if (engine_->closed()) return;
  for (Member& member : members_) {
    // Forced: parts of an interrupted round may have arrived, and nobody waits for them any more.
    for (const Ref<ImmCounter>& counter : member.counters) engine_->release_imm(counter->imm(), true);
  }
}

std::vector<uint32_t> Proxy::far_ranks() const {
  std::vector<uint32_t> ranks;
  for (const Member& member : members_) ranks.push_back(member.rank);
  return ranks;
}

Proxy::Member& Proxy::member(uint32_t rank) {
  const auto found = std::find_if(members_.begin(), members_.end(), [&](const Member& m) { return m.rank == rank; });
  if (found == members_.end())
    throw UsageError("rank " + std::to_string(rank) + " is not a far rank (one that shares no memory with us)");
  return *found;
}

std::vector<uint32_t> Proxy::imms_for(uint32_t rank) const {
  std::vector<uint32_t> imms;
  for (const Ref<ImmCounter>& counter : member(rank).counters) imms.push_back(counter->imm());
  return imms;
}

void Proxy::connect(uint32_t rank, FarRegions<RemoteRegionRef> regions, std::span<const uint32_t> imms) {
  Member& to = member(rank);
  if (imms.size() != to.imms.size())
    throw UsageError("imms has " + std::to_string(imms.size()) + " numbers, must have " +
                     std::to_string(to.imms.size()));
  check_same_length(rank, "routes", *regions.routes, *regions_.routes);
  check_same_length(rank, "rows", *regions.rows, *regions_.rows);
  to.regions = std::move(regions);
  std::copy(imms.begin(), imms.end(), to.imms.begin());
  watched_.push_back({PeerRef::share(to.regions.rows->peer()), rank, nullptr, nullptr});
}

void Proxy::watch(PeerRef near, uint32_t rank, const Word& farewell, std::span<const Word, kParities> results) {
  watched_.push_back({std::move(near), rank, &farewell, results.data()});
}

void Proxy::reach(uint32_t rank) { member(rank).is_reached = true; }
bool Proxy::is_reached(uint32_t rank) const { return member(rank).is_reached; }
void Proxy::hear(uint32_t rank) { member(rank).is_heard = true; }

void Proxy::leave_out(uint32_t rank) {
  for (Member& member : members_) member.is_left_out |= member.rank == rank;
  for (Watched& watched : watched_) watched.is_left_out |= watched.rank == rank;
}

// --- what is written ---

uint64_t Proxy::at_rows(uint64_t part, uint32_t round) const {
  if (is_mutated(Mutation::kOneParity)) return part;
  return part + parity_of(round) * memory_.rows_parity_bytes;
}

void Proxy::Batch::resize(size_t members) {
  to.resize(members);
  dsts.resize(members);
  src_offsets.resize(members);
  dst_offsets.resize(members);
  lengths.resize(members);
  imms.resize(members);
}

void Proxy::Batch::move(size_t from, size_t here) {
  to[here] = to[from];
  dsts[here] = dsts[from];
  src_offsets[here] = src_offsets[from];
  dst_offsets[here] = dst_offsets[from];
  lengths[here] = lengths[from];
  imms[here] = imms[from];
}

void Proxy::add(const Member& to, FarStep step, uint32_t round, uint64_t from_offset, uint64_t to_offset,
                uint64_t length_bytes) {
  if (to.is_left_out) return;
  batch_.to[to.turn] = &to;
  batch_.dsts[to.turn] = region_of(step, to.regions).get();
  batch_.src_offsets[to.turn] = from_offset;
  batch_.dst_offsets[to.turn] = to_offset;
  batch_.lengths[to.turn] = length_bytes;
  batch_.imms[to.turn] = to.imms[slot_of(step, round)];
}

void Proxy::post(FarStep step, uint32_t round) {
  struct Emptied {  // a destructor, so that it also runs if a submit throws
    std::vector<RemoteRegion*>& dsts;
    ~Emptied() { std::ranges::fill(dsts, nullptr); }
  } const emptied{batch_.dsts};
  size_t count = 0;
  for (size_t turn = 0; turn < batch_.dsts.size(); ++turn) {
    if (batch_.dsts[turn] == nullptr) continue;
    if (count != turn) batch_.move(turn, count);
    ++count;
  }
  const size_t part = masks_ ? 1 : count;
  for (size_t begin = 0; begin < count; begin += part) post_part(step, round, begin, part);
}

void Proxy::post_part(FarStep step, uint32_t round, size_t begin, size_t count) {
  const auto of = [&]<typename T>(std::vector<T>& all) { return std::span(all).subspan(begin, count); };
  sent_[parity_of(round)].push_back({engine_->submit_scatter({.src = region_of(step, regions_).get(),
                                                              .dsts = of(batch_.dsts),
                                                              .src_offsets = of(batch_.src_offsets),
                                                              .dst_offsets = of(batch_.dst_offsets),
                                                              .lengths = of(batch_.lengths),
                                                              .imms = of(batch_.imms)}),
                                     masks_ ? batch_.to[begin] : nullptr});
}

void Proxy::send_routes(uint32_t round, std::span<const int32_t> counts, uint64_t hash) {
  if (counts.size() != layout_.shape().experts)
    throw UsageError("counts has " + std::to_string(counts.size()) + " entries, must have " +
                     std::to_string(layout_.shape().experts) + ", one for each expert");
  const uint32_t parity = parity_of(round);
  sent_[parity].clear();
  counts_[parity].assign(counts.begin(), counts.end());
  takes_sums_[parity] = false;
  for (uint32_t step = 0; step < kFarSteps; ++step) next_[slot_of(static_cast<FarStep>(step), round)] = 0;
  const uint64_t from = at_routes(memory_.routes_out, round);
  // A phantom has no bytes: simulated engines post the same writes from it.
  std::byte* const base = regions_.routes->base();
  if (base != kPhantomBase) {
    std::memcpy(base + from, counts.data(), counts.size_bytes());
    std::memcpy(base + from + counts_bytes(), &hash, hash_bytes());
  }
  const uint64_t to = at_routes(memory_.routes_in, round) + rank_ * memory_.route_bytes;
  for (const Member& member : members_) add(member, FarStep::kRoutes, round, from, to, counts_bytes() + hash_bytes());
  post(FarStep::kRoutes, round);
}

void Proxy::send_rows(uint32_t round) {
  copy_fence();  // rows may have been packed with streaming stores
  const std::vector<int32_t>& counts = counts_[parity_of(round)];
  const auto slot = static_cast<int32_t>(layout_.shape().private_rows);
  uint64_t from = at_rows(memory_.rows_out, round);
  for (const Member& to : members_) {
    if (!to.sends_rows) continue;
    const auto* first = counts.data() + layout_.first_expert(to.rank);
    const int32_t rows = std::accumulate(first, first + layout_.expert_count(to.rank), 0);
    // Even if there are no rows: the other side cannot know that yet, and counts one write from each rank.
    add(to, FarStep::kRows, round, from, at_rows(memory_.rows_in, round) + to.slot_offset,
        to.is_reached ? 0 : static_cast<uint64_t>(std::min(rows, slot)) * memory_.stride_bytes);
    from += static_cast<uint64_t>(rows) * memory_.stride_bytes;
  }
  post(FarStep::kRows, round);
}

std::span<const int32_t> Proxy::routes_of(uint32_t round, uint32_t rank) const {
  layout_.require_rank(rank);
  const std::byte* row = regions_.routes->base() + at_routes(memory_.routes_in, round) + rank * memory_.route_bytes;
  return {reinterpret_cast<const int32_t*>(row), layout_.shape().experts};
}

uint64_t Proxy::hash_of(uint32_t round, uint32_t rank) const {
  uint64_t hash = 0;
  std::memcpy(&hash, reinterpret_cast<const std::byte*>(routes_of(round, rank).data()) + counts_bytes(), hash_bytes());
  return hash;
}

void Proxy::send_remainder(uint32_t round, const Placement* placement) {
  const auto slot = static_cast<int32_t>(layout_.shape().private_rows);
  std::vector<uint32_t>& expected = rows_expected_[parity_of(round)];
  uint64_t from = at_rows(memory_.rows_out, round);
  for (size_t i = 0; i < members_.size(); ++i) {
    const Member& other = members_[i];
    expected[i] = other.sends_rows ? 1 : 0;
    if (!other.sends_rows || placement == nullptr) continue;
    if (placement->routes(layout_.group_of(other.rank), rank_) > slot && !is_mutated(Mutation::kForgetRemainder))
      ++expected[i];
    const int32_t rows = placement->routes(group_, other.rank);
    if (rows > slot) {
      const auto target = static_cast<uint64_t>(placement->remainder_start(group_, other.rank));
      add(other, FarStep::kRows, round, from + static_cast<uint64_t>(slot) * memory_.stride_bytes,
          at_rows(memory_.rows_in, round) + target * memory_.stride_bytes,
          static_cast<uint64_t>(rows - slot) * memory_.stride_bytes);
    }
    from += static_cast<uint64_t>(rows) * memory_.stride_bytes;
  }
  post(FarStep::kRows, round);
}

void Proxy::send_results(uint32_t round, const Placement* placement) {
  copy_fence();
  uint64_t from = at_rows(memory_.results_out, round);
  uint32_t group_before = ~0u;
  uint64_t group_bytes = 0;
  for (const Member& to : members_) {  // ascending: the members of a group are neighbours, and get the same rows
    const uint32_t group = layout_.group_of(to.rank);
    uint64_t target = 0;
    if (placement != nullptr && group != group_before) {
      from += group_bytes;
      group_bytes = static_cast<uint64_t>(placement->routes(group, rank_)) * memory_.y_bytes;
      group_before = group;
    }
    if (placement != nullptr) target = static_cast<uint64_t>(placement->route_start(group, rank_)) * memory_.y_bytes;
    add(to, FarStep::kResults, round, from, at_rows(memory_.results_in, round) + target,
        to.is_reached ? 0 : group_bytes);
  }
  post(FarStep::kResults, round);
}

void Proxy::refuse(uint32_t round, bool has_sent_rows) {
  if (!has_sent_rows) {
    std::ranges::fill(counts_[parity_of(round)], 0);
    send_rows(round);
  }
  send_remainder(round, nullptr);
  send_results(round, nullptr);
}

void Proxy::send_sums(uint32_t round, uint32_t origin, uint64_t first_row, uint64_t rows) {
  copy_fence();
  const uint64_t target = uint64_t{far_node(layout_, origin, rank_)} * layout_.shape().max_tokens;
  add(member(origin), FarStep::kResults, round, at_rows(memory_.results_out, round) + first_row * memory_.y_bytes,
      at_rows(memory_.results_in, round) + target * memory_.y_bytes, rows * memory_.y_bytes);
  post(FarStep::kResults, round);
}

// --- what is waited for ---

// Ended properly: everything that it owed to those who wait has arrived, so none of them gives up because of it.
bool Proxy::has_ended(uint32_t far_rank, FarStep step, uint32_t round) {
  return has_come_from(FarStep::kFarewell, 0, far_rank) && has_come_from(step, round, far_rank);
}

FarOutcome Proxy::trouble(std::optional<FarStep> step, uint32_t round, Member& awaited) {
  if (engine_->closed()) return {FarResult::kClosed, awaited.rank, {}};
  for (const Watched& watched : watched_) {
    if (watched.is_left_out || watched.peer->state() != PeerState::kLost) continue;
    // acquire: as for any word.
    const bool is_over = watched.farewell != nullptr ? watched.farewell->value.load(std::memory_order_acquire) != 0
                                                     : step && has_ended(watched.rank, *step, round);
    if (!step || !is_over) return {FarResult::kPeerLost, watched.rank, {}};
  }
  if (step) {
    if (const auto gone = left_before(*step, round)) return {FarResult::kLeft, *gone, {}};
  } else if (has_left(awaited, false)) {
    return {FarResult::kLeft, awaited.rank, {}};
  }
  return failed_write(step, round);
}

// A rank that will send nothing more, and from which this step, or what it owes the round after that, has not arrived:
// whichever rank is waited for now, the round will not end.
std::optional<uint32_t> Proxy::left_before(FarStep step, uint32_t round) {
  const bool results_are_owed = !masks_ && step != FarStep::kResults;
  for (size_t i = 0; i < members_.size(); ++i) {
    Member& member = members_[i];
    if (member.is_left_out || !has_left(member, false)) continue;
    const bool owes_results = results_are_owed && !has_come(FarStep::kResults, round, i);
    if (owes_results || !has_come(step, round, i)) return member.rank;
  }
  for (const Watched& watched : watched_) {
    if (watched.farewell == nullptr || watched.is_left_out || !results_are_owed) continue;
    // acquire: what its owner published before the farewell is visible here.
    if (watched.farewell->value.load(std::memory_order_acquire) == 0) continue;
    if (!moe::has_come(watched.results[parity_of(round)], round)) return watched.rank;
  }
  return std::nullopt;
}

// Whether it will send nothing more. was_refused: its regions are closed; its farewell, sent before that, may still be
// in flight.
bool Proxy::has_left(Member& member, bool was_refused) {
  if (!was_refused && member.counters[slot_of(FarStep::kFarewell, 0)]->poll() == 0) return false;
  const int64_t now = engine_->clock().now_ns();
  if (!member.farewell_ns) member.farewell_ns = now;
  return now >= *member.farewell_ns + kAfterFarewellNs;
}

FarOutcome Proxy::failed_write(std::optional<FarStep> step, uint32_t round) {
  for (const Sent& sent : sent_[parity_of(round)]) {
    const FarResult result = result_of(sent.transfer->status(), masks_);
    if (result == FarResult::kReady || (sent.to != nullptr && sent.to->is_left_out)) continue;
    const TransferInfo info = sent.transfer->info();
    const uint32_t rank = sent.to != nullptr ? sent.to->rank : rank_of(info);
    // A rank that has ended has received what we wrote, and closed its engine before ours learned that.
    if (result == FarResult::kPeerLost && step && has_ended(rank, *step, round)) continue;
    if (result == FarResult::kLeft && !has_left(member(rank), true)) continue;
    return {result, rank, info.detail};
  }
  return {FarResult::kReady, 0, {}};
}

// The target that a failed batch failed for.
uint32_t Proxy::rank_of(const TransferInfo& failed) const {
  const auto found = std::find_if(members_.begin(), members_.end(), [&](const Member& member) {
    return failed.failed_peer && member.regions.rows->peer()->address().incarnation == failed.failed_peer->incarnation;
  });
  return found == members_.end() ? members_.front().rank : found->rank;
}

// The rank that most likely delays a pending batch: a batch does not report which targets are done.
uint32_t Proxy::slowest() const {
  const auto found = std::find_if(members_.begin(), members_.end(), [](const Member& member) {
    return member.regions.rows->peer()->state() != PeerState::kConnected;
  });
  return found == members_.end() ? members_.front().rank : found->rank;
}

FarOutcome Proxy::say_farewell(const Reason& why, Deadline deadline, const InterruptCheck& interrupted) {
  const FarOutcome cut_short{FarResult::kInterrupted, rank_, {}};
  const auto wait_for_all = [&] {  // whatever becomes of it: a rank that is gone needs neither
    for (const std::vector<Sent>& sent : sent_) {
      for (const Sent& one : sent) {
        if (one.transfer->wait(deadline, interrupted) == WaitResult::kInterrupted) return false;
      }
    }
    return true;
  };
  if (!wait_for_all()) return cut_short;  // a farewell must not overtake writes that are still in flight
  // Only a reason has bytes: ranks that have closed their regions would refuse them, and they close at the same time as
  // we do.
  const bool has_reason = why.number || !why.words.empty();
  const uint64_t length = has_reason ? kFarewellBytes : 0;
  const uint64_t from = at_farewell(memory_.routes_out);
  std::byte* const base = regions_.routes->base();
  if (has_reason && base != kPhantomBase) store_why(base + from, why);
  const uint64_t to = at_farewell(memory_.routes_in + rank_ * memory_.route_bytes);
  for (const Member& member : members_) {
    if (member.regions.rows && member.regions.rows->peer()->state() != PeerState::kLost &&
        !has_come_from(FarStep::kFarewell, 0, member.rank))
      add(member, FarStep::kFarewell, 0, from, to, length);
  }
  post(FarStep::kFarewell, 0);
  return wait_for_all() ? FarOutcome{} : cut_short;
}

Reason Proxy::why_left(uint32_t rank) const {
  layout_.require_rank(rank);
  return load_why(regions_.routes->base() + at_farewell(memory_.routes_in + rank * memory_.route_bytes));
}

FarOutcome Proxy::wait_sent(uint32_t round, Deadline deadline, const InterruptCheck& interrupted) {
  for (const Sent& sent : sent_[parity_of(round)]) {
    while (true) {
      const Deadline next_look = std::min(deadline, engine_->clock().now_ns() + kLookEveryNs);
      const WaitResult waited = sent.transfer->wait(next_look, interrupted);
      if (waited == WaitResult::kReady) break;
      const uint32_t rank = sent.to != nullptr ? sent.to->rank : slowest();
      if (waited == WaitResult::kInterrupted) return {FarResult::kInterrupted, rank, {}};
      const FarOutcome found = trouble(std::nullopt, round, member(rank));
      // If we go on without lost ranks, a single lost one is no reason to give up: writes to it end soon in any case.
      const bool is_one_lost = found.result == FarResult::kPeerLost || found.result == FarResult::kFailed;
      if (found.result != FarResult::kReady && !(masks_ && is_one_lost)) return found;
      if (engine_->clock().now_ns() >= deadline) return {FarResult::kLate, rank, {}};
    }
  }
  return failed_write(std::nullopt, round);
}

// The number of writes of a member that complete this step.
uint32_t Proxy::expected_of(FarStep step, uint32_t round, size_t member) const {
  if (step == FarStep::kRows) return rows_expected_[parity_of(round)][member];
  if (step == FarStep::kResults && takes_sums_[parity_of(round)]) return members_[member].is_partner ? 1 : 0;
  return 1;
}

bool Proxy::take(FarStep step, uint32_t round) {
  size_t& next = next_[slot_of(step, round)];
  for (; next < members_.size(); ++next) {
    const Member& source = members_[next];
    const uint32_t expected = source.is_left_out ? 0 : expected_of(step, round, next);
    if (expected != 0 && !source.counters[slot_of(step, round)]->try_consume(expected)) return false;
  }
  return true;
}

bool Proxy::has_come_unsignalled(FarStep step, uint32_t round) {
  for (size_t i = next_[slot_of(step, round)]; i < members_.size(); ++i) {
    const uint32_t signalled = members_[i].is_heard && step != FarStep::kRoutes ? 1 : 0;
    if (expected_of(step, round, i) > signalled && !has_come(step, round, i)) return false;
  }
  return true;
}

bool Proxy::has_sent(uint32_t round) const {
  const std::vector<Sent>& sent = sent_[parity_of(round)];
  return std::all_of(sent.begin(), sent.end(),
                     [](const Sent& one) { return one.transfer->status() != Status::kPending; });
}

FarOutcome Proxy::wait(FarStep step, uint32_t round, Deadline deadline, const InterruptCheck& interrupted) {
  size_t& next = next_[slot_of(step, round)];
  while (!take(step, round)) {
    Member& source = members_[next];
    const uint32_t expected = expected_of(step, round, next);
    ImmCounter& counter = *source.counters[slot_of(step, round)];
    const Deadline next_look = std::min(deadline, engine_->clock().now_ns() + kLookEveryNs);
    const WaitResult waited = counter.wait(expected, next_look, interrupted);
    if (waited == WaitResult::kReady) {
      ++next;
      continue;
    }
    if (waited == WaitResult::kInterrupted) return {FarResult::kInterrupted, source.rank, {}};
    const FarOutcome found = trouble(step, round, source);
    // Its last writes may have arrived just before its end.
    if (found.result != FarResult::kReady && counter.poll() < expected) return found;
    if (engine_->clock().now_ns() >= deadline) return {FarResult::kLate, source.rank, {}};
  }
  // Everybody else's writes arrived, but some rank did not get ours, and must not be waited for later.
  return failed_write(step, round);
}

bool Proxy::has_come_from(FarStep step, uint32_t round, uint32_t rank) {
  return has_come(step, round, static_cast<size_t>(&member(rank) - members_.data()));
}

bool Proxy::has_come(FarStep step, uint32_t round, size_t index) {
  if (index < next_[slot_of(step, round)]) return true;
  return members_[index].counters[slot_of(step, round)]->poll() >= expected_of(step, round, index);
}

}  // namespace crossrail::moe
