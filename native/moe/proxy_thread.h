// A thread that posts for a Proxy: a caller whose rows are ready sets a flag, and continues.
//
// Orders are carried out one after the other, in the order in which they were given. While one is in progress the proxy
// belongs to the thread; after settle() it belongs to the caller again, until the next order. So the proxy needs no
// lock, and orders and waits see the effects of the ones before them.
//
// Lifecycle: 1. constructed: runs, pinned if requested. 2. orders. 3. destroyed, before the proxy: what was ordered is
// carried out first.
#pragma once

#include <array>
#include <atomic>
#include <cstdint>
#include <exception>
#include <span>
#include <thread>
#include <vector>

#include "engine/patience.h"
#include "moe/proxy.h"

namespace crossrail::moe {

// Threads: everything from one at a time. In a forked child, where the thread is missing, leave the object alone.
// Invariant: orders from done_ on are in orders_, done_ <= given_ <= done_ + orders_.size().
class ProxyThread {
 public:
  // cpu: the core to run on, or -1: any that this process may use. Throws UsageError if it cannot run there. spin_ns:
  // how long the thread polls for orders before it sleeps; on a core of its own it does so without yielding.
  ProxyThread(Proxy& proxy, int32_t cpu, int64_t spin_ns);
  ~ProxyThread();
  ProxyThread(const ProxyThread&) = delete;
  ProxyThread& operator=(const ProxyThread&) = delete;

  // Like those of Proxy, but they return at once. counts are copied; the caller keeps a placement until settle() has
  // returned true.
  void send_routes(uint32_t round, std::span<const int32_t> counts, uint64_t hash = 0);
  void send_rows(uint32_t round) { give({.step = Step::kRows, .round = round}); }
  void send_remainder(uint32_t round, const Placement* placement) {
    give({.step = Step::kRemainder, .round = round, .placement = placement});
  }
  void send_results(uint32_t round, const Placement* placement) {
    give({.step = Step::kResults, .round = round, .placement = placement});
  }

  void take_sums(uint32_t round) { give({.step = Step::kTakeSums, .round = round}); }
  void send_sums(uint32_t round, uint32_t origin, uint64_t first_row, uint64_t rows) {
    give({.step = Step::kSums, .round = round, .origin = origin, .first_row = first_row, .rows = rows});
  }

  // Waits until all orders have been carried out; false: the deadline passed first. Throws the exception of the first
  // order that failed; those after it were not carried out.
  bool settle(Deadline deadline);

 private:
  enum class Step : uint8_t { kRoutes, kRows, kRemainder, kResults, kTakeSums, kSums, kStop };
  struct Order {
    Step step = Step::kRoutes;
    uint32_t round = 0;
    const Placement* placement = nullptr;
    uint32_t origin = 0;
    uint64_t first_row = 0;
    uint64_t rows = 0;
  };

  void give(const Order& order);
  void put(const Order& order);
  void stop();
  void run();
  void carry_out(const Order& order);

  Proxy& proxy_;
  const bool has_core_;
  Patience patience_;
  std::vector<Order> orders_;
  std::array<std::vector<int32_t>, kParities> counts_;
  std::array<uint64_t, kParities> hashes_{};
  std::exception_ptr failure_;  // owned by the thread until settled
  // On cache lines of their own: one is written by the caller, the other by the thread.
  alignas(64) std::atomic<uint32_t> given_{0};  // orders, modulo 2^32; also what the thread sleeps on
  std::atomic<bool> sleeps_{false};
  alignas(64) std::atomic<uint32_t> done_{0};  // what settle() sleeps on
  std::atomic<bool> is_awaited_{false};
  std::thread thread_;
};

}  // namespace crossrail::moe
