#include "moe/proxy_thread.h"

#include <pthread.h>

#include <algorithm>
#include <bit>
#include <utility>

#include "moe/pin.h"
#include "util/clock.h"
#include "util/copy.h"
#include "util/errors.h"
#include "util/futex.h"
#include "util/spinlock.h"
#include "util/thread.h"

namespace crossrail::moe {

namespace {

constexpr int64_t kSleepMaxNs = 1'000'000'000;  // then it checks again, whatever happened

}  // namespace

ProxyThread::ProxyThread(Proxy& proxy, int32_t cpu, int64_t spin_ns)
    // For each open round four orders, or these and one per origin, plus the one to stop. A power of two: order
    // numbers wrap around.
    : proxy_(proxy),
      has_core_(cpu != -1),
      patience_(spin_ns),
      orders_(std::bit_ceil(kParities * (4 + proxy.far_ranks().size()) + 1)) {
  thread_ = start_thread([this] { run(); });
  pthread_setname_np(thread_.native_handle(), "crossrail-moe");
  if (cpu == -1) return;
  try {
    pin_thread(thread_.native_handle(), cpu);
  } catch (...) {
    stop();
    throw;
  }
}

ProxyThread::~ProxyThread() { stop(); }

void ProxyThread::stop() {
  put({.step = Step::kStop});
  thread_.join();
}

void ProxyThread::send_routes(uint32_t round, std::span<const int32_t> counts, uint64_t hash) {
  hashes_[round % kParities] = hash;
  counts_[round % kParities].assign(counts.begin(), counts.end());
  give({.step = Step::kRoutes, .round = round});
}

void ProxyThread::give(const Order& order) {
  const uint32_t number = given_.load(std::memory_order_relaxed);
  // acquire: pairs with the release of done_, so that the slot is free.
  if (number - done_.load(std::memory_order_acquire) >= orders_.size() - 1)
    throw UsageError("more steps are queued than two rounds have: wait for an earlier round to end first");
  put(order);
}

void ProxyThread::put(const Order& order) {
  const uint32_t number = given_.load(std::memory_order_relaxed);
  orders_[number % orders_.size()] = order;
  copy_fence();  // this thread may have packed rows with streaming stores, which no fence in the other orders
  // seq_cst, like the store of the flag and the load of given_ in run(): either the thread sees the order, or we see
  // that it sleeps. Also a release: pairs with the acquire in run().
  given_.store(number + 1, std::memory_order_seq_cst);
  if (sleeps_.load(std::memory_order_seq_cst)) futex_wake_all(&given_, FutexScope::kProcess);
}

bool ProxyThread::settle(Deadline deadline) {
  const uint32_t given = given_.load(std::memory_order_relaxed);
  const int64_t begun = now_ns();
  int64_t spin_until = begun + patience_.spin_ns(begun);
  // acquire: pairs with the release of done_ in run(); from here on the proxy and failure_ are ours.
  for (uint32_t done; (done = done_.load(std::memory_order_acquire)) != given;) {
    const int64_t now = now_ns();
    if (now >= deadline) return false;
    if (now < spin_until) {
      if (patience_.yield()) spin_until = now;
      continue;
    }
    is_awaited_.store(true, std::memory_order_seq_cst);
    done = done_.load(std::memory_order_seq_cst);
    if (done != given) futex_wait(&done_, done, std::min(deadline, now + kSleepMaxNs), FutexScope::kProcess);
    is_awaited_.store(false, std::memory_order_relaxed);
  }
  if (failure_) std::rethrow_exception(std::exchange(failure_, nullptr));
  return true;
}

void ProxyThread::run() {
  uint32_t done = 0;
  int64_t idle_since = 0;
  while (true) {
    // acquire: pairs with the store in put(), so that the order and its data are visible.
    if (given_.load(std::memory_order_acquire) != done) {
      const Order& order = orders_[done % orders_.size()];
      if (order.step == Step::kStop) return;
      carry_out(order);
      // seq_cst, like the load of is_awaited_: either settle() sees it, or we see that it sleeps. Also a release: pairs
      // with the acquire in settle() and give().
      done_.store(++done, std::memory_order_seq_cst);
      if (is_awaited_.load(std::memory_order_seq_cst)) futex_wake_all(&done_, FutexScope::kProcess);
      idle_since = 0;
      continue;
    }
    const int64_t now = now_ns();
    if (idle_since == 0) idle_since = now;
    if (now - idle_since < patience_.spin_ns(now)) {
      if (has_core_ || now - idle_since < Patience::kYieldAfterNs) {
        cpu_relax();
      } else {
        patience_.yield();
      }
      continue;
    }
    sleeps_.store(true, std::memory_order_seq_cst);
    if (given_.load(std::memory_order_seq_cst) == done)
      futex_wait(&given_, done, now + kSleepMaxNs, FutexScope::kProcess);
    sleeps_.store(false, std::memory_order_relaxed);
  }
}

void ProxyThread::carry_out(const Order& order) {
  if (failure_) return;
  try {
    switch (order.step) {
      case Step::kRoutes:
        return proxy_.send_routes(order.round, counts_[order.round % kParities], hashes_[order.round % kParities]);
      case Step::kRows:
        return proxy_.send_rows(order.round);
      case Step::kRemainder:
        return proxy_.send_remainder(order.round, order.placement);
      case Step::kResults:
        return proxy_.send_results(order.round, order.placement);
      case Step::kTakeSums:
        return proxy_.take_sums(order.round);
      case Step::kSums:
        return proxy_.send_sums(order.round, order.origin, order.first_row, order.rows);
      case Step::kStop:
        return;
    }
  } catch (...) {  // a closed engine, say: reported by settle()
    failure_ = std::current_exception();
  }
}

}  // namespace crossrail::moe
