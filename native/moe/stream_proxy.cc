#include "moe/stream_proxy.h"

#include <pthread.h>
#include <sys/prctl.h>

#include <algorithm>
#include <ctime>
#include <new>
#include <utility>

#include "moe/pin.h"
#include "moe/rows.h"
#include "util/clock.h"
#include "util/errors.h"
#include "util/spinlock.h"
#include "util/thread.h"

namespace crossrail::moe {

namespace {

constexpr int64_t kLookNs = 5'000'000;  // between checks for what delays us
constexpr int64_t kDozeNs = 1'000'000;  // without any progress, after which pauses get longer
constexpr int64_t kShortPauseNs = 5'000;
constexpr int64_t kLongPauseNs = 50'000;

uint32_t wire(uint64_t round) { return static_cast<uint32_t>(round); }

constexpr size_t kFirstTold = kStreamWords - kStreamWordsTold;
static_assert(static_cast<size_t>(StreamWord::kFree) == kFirstTold);

}  // namespace

StreamProxy::StreamProxy(EngineRef engine, Proxy& proxy, const Layout& layout, uint32_t rank,
                         std::span<std::byte> board, const StreamBoard& parts, const Options& options)
    : engine_(std::move(engine)),
      proxy_(proxy),
      layout_(layout),
      rank_(rank),
      group_(layout.group_of(rank)),
      board_(board),
      parts_(parts),
      options_(options),
      timeout_ns_(options.timeout_ns) {
  layout.require_rank(rank);
  begin_words();
  for (uint64_t round = 1; round <= kParities; ++round) tell(StreamWord::kFree, round);
  thread_ = start_thread([this] { run(); });
  pthread_setname_np(thread_.native_handle(), "crossrail-moe");
  if (options.cpu == -1) return;
  try {
    pin_thread(thread_.native_handle(), options.cpu);
  } catch (...) {
    stop();
    throw;
  }
}

StreamProxy::~StreamProxy() { stop(); }

void StreamProxy::stop() {
  stopping_.store(true, std::memory_order_release);  // pairs with the acquire in run()
  const std::lock_guard lock(joining_);
  if (thread_.joinable()) thread_.join();
}

void StreamProxy::begin_words() {
  const uint64_t first = kStreamWords * sizeof(device::RoundWords);
  const uint64_t needed_bytes = first + kParities * parts_.parity_bytes;
  if (board_.size() < needed_bytes)
    throw UsageError("the board of rounds has " + std::to_string(board_.size()) + " bytes, must have at least " +
                     std::to_string(needed_bytes));
  if (reinterpret_cast<uintptr_t>(board_.data()) % alignof(device::RoundWords) != 0)
    throw UsageError("the board of rounds is not aligned to " + std::to_string(alignof(device::RoundWords)) + " bytes");
  if (options_.gpu >= 0) {
    try {
      bar_.emplace(options_.gpu, kStreamWordsTold * sizeof(device::RoundWords));
    } catch (const TransportError& error) {
      why_pinned_ = error.what();
    }
  }
  auto* const in_board = reinterpret_cast<device::RoundWords*>(board_.data());
  auto* const in_gpu = bar_ ? reinterpret_cast<device::RoundWords*>(bar_->mapped()) : nullptr;
  for (size_t i = 0; i < kStreamWords; ++i) {
    const bool is_in_gpu = in_gpu != nullptr && i >= kFirstTold;
    words_[i] = new (is_in_gpu ? in_gpu + (i - kFirstTold) : in_board + i) device::RoundWords();
  }
}

void StreamProxy::close() {
  stop();
  if (!bar_) return;
  auto* const in_board = reinterpret_cast<device::RoundWords*>(board_.data());
  for (size_t i = kFirstTold; i < kStreamWords; ++i) words_[i] = new (in_board + i) device::RoundWords();
  bar_.reset();
  let_go();
}

device::ToldWords StreamProxy::told(StreamWord word) {
  const size_t offset = (static_cast<size_t>(word) - kFirstTold) * sizeof(device::RoundWords);
  return {words(word), bar_ ? bar_->address() + offset : 0};
}

// For GDRCopy memory a release is not enough: see bar_fence().
void StreamProxy::tell(StreamWord word, uint64_t round) {
  if (bar_) device::bar_fence();
  device::publish(words(word), round);
  if (bar_) device::bar_fence();
}

std::optional<StreamFailure> StreamProxy::failure() const {
  const std::lock_guard lock(mutex_);
  return failure_;
}

std::vector<StreamWait> StreamProxy::waits() const {
  const std::lock_guard lock(mutex_);
  std::vector<StreamWait> found;
  for (const std::optional<StreamWait>& wait : waits_) {
    if (wait) found.push_back(*wait);
  }
  return found;
}

void StreamProxy::fail(StreamFailure failure) {
  {
    const std::lock_guard lock(mutex_);
    if (!failure_) failure_ = std::move(failure);
  }
  stopping_.store(true, std::memory_order_relaxed);  // on this thread
}

// Results that the GPU has computed for a round which it was told to go on with: others wait for them, while the GPU,
// which may know from signals that the round is over, waits for nothing of ours.
void StreamProxy::send_last_results() {
  for (std::optional<Open>& round : rounds_) {
    const bool are_due = round && round->is_told && round->stage <= Stage::kExperts;
    if (are_due && device::has_come(words(StreamWord::kReturned), round->number))
      proxy_.send_results(wire(round->number), &*round->placement);
  }
}

// No kernel waits any more, and each finds a mark in place of its round's number that says there is nothing to do. What
// it was told before stays valid: the tables of a round whose rows have arrived are its own to the end.
void StreamProxy::let_go() {
  if (bar_) device::bar_fence();
  for (const StreamWord word : {StreamWord::kFree, StreamWord::kRows, StreamWord::kResults}) {
    // release: pairs with the acquire of a kernel's wait.
    for (device::RoundWord& one : words(word)) one.round.store(device::kNoRound, std::memory_order_release);
  }
  if (bar_) device::bar_fence();
}

void StreamProxy::run() {
  prctl(PR_SET_TIMERSLACK, 1000, 0, 0, 0);  // the default of 50 us would swallow short pauses
  int64_t moved_ns = now_ns();
  while (!stopping_.load(std::memory_order_acquire)) {
    bool moved = false;
    try {
      moved = advance();
    } catch (...) {  // an invalid expert index, or no memory: failure() reports it to the caller
      fail({.outcome = {FarResult::kReady, rank_, {}},
            .step = FarStep::kFarewell,
            .round = next_ - 1,
            .is_over = false,
            .counts = {},
            .error = std::current_exception()});
    }
    const int64_t now = now_ns();
    if (moved) {
      moved_ns = now;
    } else {
      pause(now - moved_ns);
    }
  }
  try {
    send_last_results();
  } catch (const std::exception&) {  // the engine is closed, or out of memory: our waiters learn it from that
  }
  let_go();
}

void StreamProxy::pause(int64_t idle_ns) {
  if (idle_ns < Patience::kYieldAfterNs || options_.cpu != -1) return cpu_relax();
  if (idle_ns < patience_.spin_ns(now_ns())) {
    patience_.yield();
    return;
  }
  const timespec time{.tv_sec = 0, .tv_nsec = idle_ns < kDozeNs ? kShortPauseNs : kLongPauseNs};
  nanosleep(&time, nullptr);
}

bool StreamProxy::advance() {
  bool moved = false;
  const int64_t now = engine_->clock().now_ns();
  // Its slot is free: the GPU has waited for kFree.
  if (device::has_come(words(StreamWord::kRoutes), next_)) {
    begin(next_++, now);
    untold_ns_.reset();
    moved = true;
  } else {
    check_next(now);
  }
  for (std::optional<Open>& round : rounds_) {
    if (!round || stopping_.load(std::memory_order_relaxed)) continue;
    moved |= advance(*round, now);
    if (round->stage == Stage::kEnded) round.reset();
  }
  return moved;
}

void StreamProxy::begin(uint64_t number, int64_t now) {
  Open& round = rounds_[number % kParities].emplace();
  round.number = number;
  round.since_ns = now;
  round.next_look_ns = now + kLookNs;
  const LayoutShape& shape = layout_.shape();
  const std::span<const int32_t> routes{at<int32_t>(parts_.routes, number), size_t{shape.max_tokens} * shape.top_k};
  std::vector<int32_t> counts(shape.experts);
  slots_.resize(routes.size());
  count_routes(routes, shape.top_k, counts, slots_);
  round.hash = shape.dp_size > 1 ? hash_routes(routes, shape.top_k) : 0;
  proxy_.send_routes(wire(number), counts, round.hash);
  round.counts.resize(size_t{layout_.groups()} * shape.experts);
  std::copy(counts.begin(), counts.end(), round.counts.begin() + static_cast<ptrdiff_t>(group_ * shape.experts));
}

bool StreamProxy::advance(Open& round, int64_t now) {
  switch (round.stage) {
    case Stage::kDispatch:
      return dispatch(round, now);
    case Stage::kExperts:
      if (!device::has_come(words(StreamWord::kReturned), round.number)) {
        check_others(round, now);
        check_own(round, FarStep::kResults, now);
        return false;
      }
      proxy_.send_results(wire(round.number), &*round.placement);
      round.stage = Stage::kCombine;
      round.is_told = false;
      round.since_ns = now;
      return true;
    case Stage::kCombine:
      if (!take_and_tell(round, FarStep::kResults, StreamWord::kResults, now)) return false;
      round.stage = Stage::kEnding;
      round.since_ns = now;
      return true;
    case Stage::kEnding:
      return end(round, now);
    case Stage::kEnded:
      return false;
  }
  return false;
}

bool StreamProxy::dispatch(Open& round, int64_t now) {
  if (!round.is_packed && device::has_come(words(StreamWord::kPacked), round.number)) {
    proxy_.send_rows(wire(round.number));
    return round.is_packed = true;
  }
  if (!round.placement) {
    if (!take(round, FarStep::kRoutes, now)) return false;
    place(round);
    return true;
  }
  if (!round.is_packed) {
    check_own(round, FarStep::kRows, now);
    return false;
  }
  if (!round.is_sent) {
    proxy_.send_remainder(wire(round.number), &*round.placement);
    write_tables(round);
    round.since_ns = now;
    return round.is_sent = true;
  }
  if (!take_and_tell(round, FarStep::kRows, StreamWord::kRows, now)) return false;
  round.stage = Stage::kExperts;
  return true;
}

bool StreamProxy::take_and_tell(Open& round, FarStep step, StreamWord word, int64_t now) {
  const bool has_all = take(round, step, now);
  if (!round.is_told && (has_all || proxy_.has_come_unsignalled(step, wire(round.number)))) {
    tell(word, round.number);
    round.is_told = true;
  }
  return has_all;
}

// The next round of this parity begins once everything that we wrote for this one has been sent. If part of it never
// will be, that is a failure only when a next round is requested: others may have ended by then, and closed.
bool StreamProxy::end(Open& round, int64_t now) {
  const uint64_t next = round.number + kParities;
  if (!device::has_come(words(StreamWord::kEnded), round.number)) {
    check_own(round, FarStep::kFarewell, now);
    return false;
  }
  const bool has_sent = proxy_.has_sent(wire(round.number));
  if (!has_sent && !is_time_to_look(round, now)) return false;
  const bool is_asked = device::has_come(words(StreamWord::kAsked), next);
  const FarOutcome outcome = proxy_.wait_sent(wire(round.number), 0, {});
  if (outcome.result == FarResult::kReady) {
    round.stage = Stage::kEnded;
    tell(StreamWord::kFree, next);
    return true;
  }
  if (!is_asked) {
    round.since_ns = now;
    round.next_look_ns = now + kLookNs;
    return false;
  }
  check(round, FarStep::kFarewell, outcome, now);
  return false;
}

// UsageError if a rank that should hold the same tokens as we do sends others: we would disagree on which rank has
// whose rows.
void StreamProxy::check_same_routes(const Open& round) const {
  const uint32_t experts = layout_.shape().experts;
  const std::span<const int32_t> ours = std::span(round.counts).subspan(size_t{group_} * experts, experts);
  const std::string indices = "indices of round " + std::to_string(round.number);
  const std::string alike = ": with dp_size " + std::to_string(layout_.shape().dp_size) +
                            " both must hold the same tokens and route them alike. The rounds of this GraphAllToAll "
                            "have ended";
  for (const uint32_t other : proxy_.far_ranks()) {
    if (layout_.group_of(other) != group_) continue;
    const std::span<const int32_t> theirs = proxy_.routes_of(wire(round.number), other);
    const auto [our, their] = std::ranges::mismatch(ours, theirs);
    if (our != ours.end())
      throw UsageError(indices + " send " + std::to_string(*our) + " tokens to expert " +
                       std::to_string(our - ours.begin()) + ", those of rank " + std::to_string(other) + " " +
                       std::to_string(*their) + alike);
    if (proxy_.hash_of(wire(round.number), other) != round.hash)
      throw UsageError(indices + " send as many tokens to each expert as those of rank " + std::to_string(other) +
                       ", and not the same ones" + alike);
  }
}

void StreamProxy::place(Open& round) {
  check_same_routes(round);
  const uint32_t experts = layout_.shape().experts;
  const uint32_t dp_size = layout_.shape().dp_size;
  for (uint32_t group = 0; group < layout_.groups(); ++group) {
    if (group == group_) continue;
    // All of its members report the same; we receive its rows from this one.
    const std::span<const int32_t> row = proxy_.routes_of(wire(round.number), group * dp_size + rank_ % dp_size);
    std::copy(row.begin(), row.end(), round.counts.begin() + static_cast<ptrdiff_t>(size_t{group} * experts));
  }
  round.placement.emplace(layout_, round.counts);
  if (round.placement->first_over(options_.rows_limits, options_.routes_limits)) {
    proxy_.refuse(wire(round.number), round.is_packed);  // ranks whose calls wait end the round, and need ours for that
    fail({.outcome = {FarResult::kReady, rank_, {}},
          .step = FarStep::kRoutes,
          .round = round.number,
          .is_over = true,
          .counts = round.counts,
          .error = nullptr});
  }
}

void StreamProxy::write_tables(const Open& round) {
  const Placement& placement = *round.placement;
  const std::vector<int32_t> rows = placement.expert_rows(rank_);
  const std::vector<int32_t> offsets = placement.expert_offsets(rank_);
  std::copy(rows.begin(), rows.end(), at<int32_t>(parts_.expert_rows, round.number));
  std::copy(offsets.begin(), offsets.end(), at<int32_t>(parts_.expert_offsets, round.number));
  const std::vector<Move> moves = placement.pull_far(rank_);
  const std::vector<int32_t> own = placement.rows_of(group_, rank_);
  Move* to = std::copy(moves.begin(), moves.end(), at<Move>(parts_.moves, round.number));
  for (size_t i = 0; i < own.size(); ++i) *to++ = {-1 - static_cast<int32_t>(i), own[i]};
  int32_t* const numbers = at<int32_t>(parts_.numbers, round.number);
  numbers[0] = static_cast<int32_t>(moves.size() + own.size());
  numbers[1] = static_cast<int32_t>(write_returns(placement, at<Return>(parts_.returns, round.number)));
}

size_t StreamProxy::write_returns(const Placement& placement, Return* to) const {
  const Return* const first = to;
  const Ranges returns = placement.return_far(rank_);
  const auto packed = static_cast<int32_t>(layout_.shape().world);
  std::optional<uint32_t> packed_group;  // written once for all of its members that are not reached
  for (const uint32_t rank : proxy_.far_ranks()) {
    const uint32_t group = layout_.group_of(rank);
    const bool is_reached = proxy_.is_reached(rank);
    if (!is_reached && std::exchange(packed_group, group) == group) continue;
    const int32_t begin = returns.starts[group];
    const int32_t shift = is_reached ? placement.route_start(group, rank_) - begin : 0;
    for (int32_t i = begin; i < returns.starts[group + 1]; ++i)
      *to++ = {returns.rows[static_cast<size_t>(i)], is_reached ? static_cast<int32_t>(rank) : packed, i + shift};
  }
  int32_t place = 0;
  for (const int32_t row : placement.rows_of(group_, rank_)) *to++ = {row, static_cast<int32_t>(rank_), place++};
  return static_cast<size_t>(to - first);
}

bool StreamProxy::take(Open& round, FarStep step, int64_t now) {
  const bool has_all = proxy_.take(step, wire(round.number));
  if (!has_all && !is_time_to_look(round, now)) return false;
  const FarOutcome outcome = proxy_.wait(step, wire(round.number), 0, {});
  const bool is_ready = outcome.result == FarResult::kReady;
  if (!is_ready || round.is_late) note_wait(round, step, !is_ready);
  if (!is_ready) check(round, step, outcome, now);
  return is_ready;
}

void StreamProxy::note_wait(Open& round, FarStep step, bool is_late) {
  std::optional<StreamWait> wait;
  if (is_late) {
    wait = StreamWait{.step = step, .round = round.number, .ranks = {}};
    for (const uint32_t rank : proxy_.far_ranks()) {
      if (!proxy_.has_come_from(step, wire(round.number), rank)) wait->ranks.push_back(rank);
    }
  }
  round.is_late = is_late;
  const std::lock_guard lock(mutex_);
  waits_[round.number % kParities] = std::move(wait);
}

bool StreamProxy::is_time_to_look(Open& round, int64_t now) {
  if (now < round.next_look_ns) return false;
  round.next_look_ns = now + kLookNs;
  return true;
}

// While the GPU may be waiting for a signal of a rank whose counts have arrived: it may have died in between.
void StreamProxy::check_others(Open& round, int64_t now) {
  if (!is_time_to_look(round, now)) return;
  const FarOutcome outcome = proxy_.wait(FarStep::kResults, wire(round.number), 0, {});
  if (outcome.result != FarResult::kLate) check(round, FarStep::kResults, outcome, now);
}

void StreamProxy::check_own(Open& round, FarStep step, int64_t now) {
  if (!device::has_come(words(StreamWord::kAsked), round.number + kParities)) return;
  if (!round.asked_ns) round.asked_ns = now;
  if (now - *round.asked_ns < timeout_ns_.load(std::memory_order_relaxed)) return;
  fail({.outcome = {FarResult::kLate, rank_, {}},
        .step = step,
        .round = round.number,
        .is_over = false,
        .counts = {},
        .error = nullptr});
}

void StreamProxy::check_next(int64_t now) {
  if (!device::has_come(words(StreamWord::kAsked), next_ + 1)) return;
  if (!untold_ns_) untold_ns_ = now;
  if (now - *untold_ns_ < timeout_ns_.load(std::memory_order_relaxed)) return;
  fail({.outcome = {FarResult::kLate, rank_, {}},
        .step = FarStep::kRoutes,
        .round = next_,
        .is_over = false,
        .counts = {},
        .error = nullptr});
}

void StreamProxy::check(const Open& round, FarStep step, const FarOutcome& outcome, int64_t now) {
  const bool is_patient = now - round.since_ns < timeout_ns_.load(std::memory_order_relaxed);
  if (outcome.result == FarResult::kReady || (outcome.result == FarResult::kLate && is_patient)) return;
  fail({.outcome = outcome, .step = step, .round = round.number, .is_over = false, .counts = {}, .error = nullptr});
}

}  // namespace crossrail::moe
