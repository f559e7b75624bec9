// Driving: taking the progress lock, a round, the worker, submits on the caller's own thread. See core.h.
#include <pthread.h>
#include <sched.h>

#include <algorithm>
#include <chrono>
#include <exception>
#include <new>
#include <thread>
#include <utility>

#include "engine/core.h"
#include "util/errors.h"
#include "util/futex.h"

namespace crossrail {

bool EngineCore::try_enter(uint8_t mark) {
  if (!progress_lock_.try_lock(mark)) return false;
  transports_.disarm();
  return true;
}

bool EngineCore::try_enter_open(uint8_t mark) {
  if (!try_enter(mark)) return false;
  if (!closed()) return true;
  progress_lock_.unlock();
  return false;
}

// Whether a round would find something to move. May say yes too often, never no too often.
bool EngineCore::has_work() {
  return !submits_.empty() || runnable_ || cancel_scan_.load(std::memory_order_acquire) ||
         look_wanted_.load(std::memory_order_relaxed) || verifications_.has_work() || transports_.has_arrivals();
}

// Releases the progress lock without leaving work behind: from arm() on, everybody with news rings the bell, and
// has_work() sees what came before. A ring between arm() and unlock() may have woken a worker that found the lock taken
// and went back to sleep: then the bell is no longer armed, and we ring once more.
void EngineCore::leave() {
  assert_holder();
  if (is_simulated()) {
    progress_lock_.unlock();
    options_.simulation->wake(seat_.number);
    return;
  }
  transports_.arm();
  const bool work = has_work();
  if (work) transports_.disarm();
  const Deadline timer = next_due();
  progress_lock_.unlock();
  if (!has_worker()) return;
  // A worker that is just falling asleep may miss both: it then looks again soon (worker_main).
  const bool unwatched = sleeps_for_good_.load(std::memory_order_seq_cst) && inflight() > 0;
  // seq_cst, after the fence in arm(): either we see until when the worker sleeps, or it sees what we moved, or our
  // errand (is_stale in worker_main).
  const bool oversleeps = timer < wakes_at_.load(std::memory_order_seq_cst);
  if (work || unwatched || oversleeps || !transports_.is_armed()) transports_.sleeping_place().call_behind();
}

// For a thread that is not going to sleep. Without a worker there is nobody for bells to wake: they stay off, which
// saves peers the system call.
void EngineCore::leave_awake() {
  assert_holder();
  if (has_worker()) {
    leave();
    return;
  }
  transports_.let_go();
  progress_lock_.unlock();
}

// Others may wait for what has just ended before they can post, and the driving thread may leave before its next chance
// to post.
uint32_t EngineCore::poll_transports() {
  assert_holder();
  const uint32_t moved = transports_.poll();
  runnable_ = runnable_ || (moved > 0 && !busy_.empty());
  return moved;
}

// An exception would leave the holder's work half done and the progress lock taken: everybody would wait for ever.
// Nothing here throws except allocation, and then the worker could not go on either.
uint32_t EngineCore::round() try {
  assert_holder();
  constexpr uint32_t kIdleRounds = 32;  // take longer than the gaps between entries of a burst
  bump(counters_.rounds);
  // acq_rel: pairs with the release in wake(): what the caller wants looked at is visible to what follows.
  if (look_wanted_.load(std::memory_order_relaxed)) look_wanted_.exchange(false, std::memory_order_acq_rel);
  if (cancel_scan_.load(std::memory_order_relaxed)) scan_cancels();
  uint32_t moved = take_submits();
  moved += post_backlogs();
  moved += begin_triggered();  // after what looks at the backlogs: it must not be forgotten that more is due
  moved += poll_transports();
  moved += serve();
  imms_.flush_arrivals();  // first: somebody waits for these counts
  record_arrivals();
  if (moved > 0) {
    bump(moves_);
    idle_rounds_ = 0;
  } else if (++idle_rounds_ % kIdleRounds == 0) {
    recorder_.new_moment();
  }
  return moved;
} catch (const std::bad_alloc&) {
  fail_out_of_memory(options_.name.c_str());
}

void EngineCore::worker_main() {
  pthread_setname_np(pthread_self(), "crossrail-work");
  if (options_.worker_cpu >= 0) {
    cpu_set_t cpus;
    CPU_ZERO(&cpus);
    CPU_SET(static_cast<size_t>(options_.worker_cpu), &cpus);
    const int failure = pthread_setaffinity_np(pthread_self(), sizeof cpus, &cpus);
    if (failure != 0) {
      add_event({EngineEvent::Kind::kProtocolError, "",
                 "worker_cpu = " + std::to_string(options_.worker_cpu) + " cannot be used: the worker is not pinned"});
    }
  }
  constexpr int64_t kLookAgainNs =
      20'000'000;  // no later than the transports' ticks: otherwise each leave() rings (oversleeps)
  constexpr uint32_t kQuietSleepsMax = 10;
  uint64_t moves_seen = 0;
  uint32_t quiet_sleeps = 0;  // consecutive ones during which nothing moved
  Patience patience(options_.spin_ns);
  while (!stopping_.load(std::memory_order_acquire)) {
    const bool wanted = guests_.load(std::memory_order_relaxed) != 0;
    if (wanted && !progress_lock_.is_locked()) {
      std::this_thread::yield();  // a guest is about to enter, or to leave
      continue;
    }
    // If another thread holds the lock, sleep: its leave() rings us if it leaves work behind.
    bool knows_timer = false;
    Deadline timer = kNoDeadline;
    uint64_t moves_at_timer = 0;
    uint64_t errands_at_timer = 0;
    if (!wanted && try_enter() && drive_until_idle(patience)) {
      transports_.arm();
      const bool work = has_work();
      if (work) transports_.disarm();
      timer = next_due();
      knows_timer = true;
      moves_at_timer = moves_.load(std::memory_order_relaxed);
      errands_at_timer = errands_.load(std::memory_order_relaxed);
      progress_lock_.unlock();
      if (work || !transports_.is_armed() || guests_.load(std::memory_order_relaxed) != 0) continue;
    }
    // close() sets the flag, then rings.
    if (stopping_.load(std::memory_order_acquire)) break;
    bump(counters_.sleeps);
    // While anybody drives, look again from time to time, so that frozen peers are noticed; after 0.2 s without events,
    // sleep until woken. The fence pairs with the one in arm(), which leave() calls before it loads the flag: whoever
    // leaves a transfer behind sees the flag, or we see the transfer in inflight().
    const uint64_t moves = moves_.load(std::memory_order_relaxed);
    quiet_sleeps = moves == moves_seen ? quiet_sleeps + 1 : 0;
    moves_seen = moves;
    const bool is_quiet = quiet_sleeps > kQuietSleepsMax && knows_timer;
    sleeps_for_good_.store(is_quiet, std::memory_order_relaxed);
    std::atomic_thread_fence(std::memory_order_seq_cst);
    const bool for_good = is_quiet && inflight() == 0;
    const Deadline until = std::min(timer, for_good ? kNoDeadline : now_ns() + kLookAgainNs);
    wakes_at_.store(until, std::memory_order_seq_cst);
    std::atomic_thread_fence(std::memory_order_seq_cst);  // see leave()
    // A guest that came and went since we read the timer may have set an earlier one without seeing wakes_at_.
    const bool is_stale = knows_timer && (moves_.load(std::memory_order_relaxed) != moves_at_timer ||
                                          errands_.load(std::memory_order_relaxed) != errands_at_timer);
    if (!is_stale) {
      const int64_t slept_at = now_ns();
      transports_.sleeping_place().sleep_behind(until);
      patience.note_sleep(now_ns() - slept_at);
    }
    wakes_at_.store(0, std::memory_order_relaxed);
    sleeps_for_good_.store(false, std::memory_order_relaxed);
  }
}

// The worker's turn, which begins as the holder: until nothing has moved for as long as it spins, a guest asks, or the
// engine stops. Returns whether it is still the holder; if not, another thread is, which arms the bells as it leaves.
bool EngineCore::drive_until_idle(Patience& patience) {
  const bool spins = options_.polling == Polling::kSpin;
  const int64_t spin_ns = patience.spin_ns(now_ns());
  bool holds = true;
  int64_t idle_since = 0;
  uint64_t moves_seen = 0;
  while (!stopping_.load(std::memory_order_relaxed) && guests_.load(std::memory_order_relaxed) == 0) {
    if (!holds) holds = try_enter();
    if (holds) round();
    const uint64_t moves = moves_.load(std::memory_order_relaxed);
    if (std::exchange(moves_seen, moves) != moves) {
      idle_since = 0;
      continue;
    }
    cpu_relax();
    if (spins) continue;
    const int64_t now = now_ns();
    if (idle_since == 0) idle_since = now;
    if (now - idle_since >= spin_ns) break;
    if (now - idle_since < Patience::kYieldAfterNs) continue;
    // The thread we have just woken may need this very core. It finds the lock free and can post its next submit
    // itself, rather than wait until we run again.
    if (std::exchange(holds, false)) progress_lock_.unlock();
    if (patience.yield(&moves_)) break;
  }
  return holds || try_enter();
}

void EngineCore::wake() {
  if (is_simulated()) {
    options_.simulation->wake(seat_.number);
    return;
  }
  // By ringing the bells rather than calling the worker, which might find the lock taken: a thread that is about to
  // leave either sees the flag in has_work(), which comes after arm(), or had armed before the fence in
  // Transport::wake() and sees the ring.
  look_wanted_.store(true, std::memory_order_release);
  transports_.wake();
}

void EngineCore::sleep_on(Guest& guest, std::atomic<uint32_t>* word, uint32_t expected, Deadline until) {
  SleepingPlace& place = transports_.sleeping_place();
  // A spinning worker would take the transports' news before they could wake anybody.
  const bool may_be_woken =
      options_.polling == Polling::kManual || (options_.polling != Polling::kSpin && place.has_front());
  if (!guest.is_in_front) guest.is_in_front = may_be_woken && place.take_front();
  if (!guest.is_in_front) {
    futex_wait(word, expected, until, FutexScope::kProcess);
    return;
  }
  in_front_.store(word, std::memory_order_relaxed);
  // seq_cst: pairs with the one in wake_sleepers(): either we see the changed word, or it sees us there.
  std::atomic_thread_fence(std::memory_order_seq_cst);
  if (word->load(std::memory_order_acquire) == expected) guest.has_news |= place.sleep_in_front(until);
  in_front_.store(nullptr, std::memory_order_relaxed);
}

void EngineCore::wake_sleepers(std::atomic<uint32_t>* word) {
  futex_wake_all(word, FutexScope::kProcess);
  std::atomic_thread_fence(std::memory_order_seq_cst);  // see sleep_on()
  if (in_front_.load(std::memory_order_relaxed) == word) transports_.sleeping_place().call_front();
}

void EngineCore::run_as_holder(const std::function<void()>& work) { run_as_holder(work, kNoDeadline); }

bool EngineCore::run_as_holder(const std::function<void()>& work, Deadline until) {
  constexpr uint32_t kTriesPerLook = 64;  // at the clock
  constexpr auto kNap = std::chrono::microseconds(50);
  guests_.fetch_add(1, std::memory_order_relaxed);
  bool enters = try_enter();
  for (uint32_t tries = 1; !enters; ++tries) {
    std::this_thread::yield();
    if (until != kNoDeadline && tries % kTriesPerLook == 0) {
      if (now_ns() >= until) break;
      std::this_thread::sleep_for(kNap);
    }
    enters = try_enter();
  }
  guests_.fetch_sub(1, std::memory_order_relaxed);
  if (!enters) return false;
  bump(errands_);
  try {
    work();
  } catch (const std::bad_alloc&) {
    fail_out_of_memory(options_.name.c_str());
  }
  if (closed()) {
    progress_lock_.unlock();  // there is nobody to hand over to
  } else {
    leave();
  }
  return true;
}

bool EngineCore::look_as_holder(const std::function<void()>& work, Deadline until) {
  std::exception_ptr failure;
  const bool has_run = run_as_holder(
      [&] {
        try {
          work();
        } catch (const std::bad_alloc&) {
          failure = std::current_exception();
        }
      },
      until);
  if (failure) std::rethrow_exception(failure);
  return has_run;
}

bool EngineCore::progress() {
  if (is_simulated()) {
    const Simulation::Wait wait(options_.simulation.get());
    options_.simulation->wake(seat_.number);
    return options_.simulation->advance(clock().now_ns()) == Simulation::Step::kMoved;
  }
  if (!try_enter_open()) return false;
  const bool moved = round() > 0;
  leave_awake();  // even if something moved: the caller may never come back
  return moved;
}

// --- submitting ---

// Short work while nobody drives: posted here, as the progress holder, without the queue. As long as nobody else knows
// of the transfer, none of its state needs an atomic.
void EngineCore::submit_here(Transfer* transfer) try {
  assert_holder();
  TransferWork& work = *transfer->work_;
  take_submits();  // earlier submits
  bump(started_here_);
  bump(moves_);
  work.at_once = true;
  start(transfer);     // it knows if the engine has closed meanwhile
  if (work.at_once) {  // not complete yet: from here on, others may complete it
    work.at_once = false;
    recorder_.new_moment();  // what waits may be what hangs: give it an exact time
    record_transfer(FlightState::kSubmitted, *transfer);
    if (work.local != nullptr) work.local->begin_op();
  }
  leave_awake();
} catch (const std::bad_alloc&) {
  fail_out_of_memory(options_.name.c_str());
}

void EngineCore::submit(Transfer* transfer) {
  int attempts = 0;
  while (!submits_.try_push(transfer)) {
    // Back-pressure: help until there is room. If the engine closes meanwhile, close() empties the queue.
    if (is_simulated()) {
      bool pushed = false;
      wait_in_simulation([&] { return closed() || (pushed = submits_.try_push(transfer)); }, kNoDeadline, {});
      if (pushed) break;
      continue;
    }
    if (try_enter_open()) {
      round();
      leave();
    } else if (++attempts % 64 == 0) {
      std::this_thread::yield();
    } else {
      cpu_relax();
    }
  }
  if (is_simulated()) {
    options_.simulation->wake(seat_.number);
  } else {
    transports_.wake();
  }
  std::atomic_thread_fence(std::memory_order_seq_cst);  // pairs with the seq_cst store of closed_ in close()
  if (closed()) drain_after_close();
}

void EngineCore::request_cancel_scan() {
  cancel_scan_.store(true, std::memory_order_release);
  if (is_simulated()) {
    options_.simulation->wake(seat_.number);
  } else {
    transports_.wake();
  }
}

}  // namespace crossrail
