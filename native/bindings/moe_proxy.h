// The object behind crossrail._core.moe.Proxy: a moe::Proxy, with or without a thread that posts for it.
#pragma once

#include <nanobind/nanobind.h>

#include <array>
#include <cstdint>
#include <deque>
#include <memory>
#include <vector>

#include "bindings/convert.h"
#include "bindings/engine_handle.h"
#include "bindings/fork.h"
#include "bindings/handles.h"
#include "moe/proxy.h"
#include "moe/proxy_thread.h"

namespace crossrail::bindings {

namespace nb = nanobind;

inline const char* result_name(moe::FarResult result) {
  using moe::FarResult;
  switch (result) {
    case FarResult::kReady:
      return "ready";
    case FarResult::kLate:
      return "late";
    case FarResult::kPeerLost:
      return "peer-lost";
    case FarResult::kLeft:
      return "left";
    case FarResult::kMaskedOut:
      return "masked-out";
    case FarResult::kFailed:
      return "failed";
    case FarResult::kClosed:
      return "engine-closed";
    case FarResult::kInterrupted:
      return "interrupted";
  }
  return "";
}

class ProxyHandle {
 public:
  ProxyHandle(nb::pointer_and_handle<EngineHandle> given, const moe::Layout& layout, uint32_t rank,
              const moe::FarMemory& memory, const RegionHandle& routes, const RegionHandle& rows, bool masks)
      : engine(nb::borrow(given.h)), engine_(given.p), rank_(rank) {
    const moe::FarRegions<RegionRef> regions{routes.core(), rows.core()};
    proxy_ = std::make_unique<moe::Proxy>(given.p->core(), layout, rank, memory, regions, masks);
  }
  ~ProxyHandle() {
    if (generation_ != fork_generation) {  // what there is to end belongs to the parent
      thread_.release();
      proxy_.release();
      return;
    }
    const WithoutGil no_gil;
    thread_.reset();  // it carries out its orders, with placements that we keep until then
    proxy_.reset();
  }
  ProxyHandle(const ProxyHandle&) = delete;
  ProxyHandle& operator=(const ProxyHandle&) = delete;

  const EngineRef& core_engine() const { return engine_->core(); }
  moe::Proxy& get() const {
    if (generation_ != fork_generation) throw_forked();
    return *proxy_;
  }

  void start_thread(nb::handle cpu) {
    const EngineOptions& options = engine_->core()->options();
    if (options.simulation != nullptr) throw UsageError("proxy is 'thread', and simulated engines have no threads");
    if (thread_) throw UsageError("a thread posts already");
    const int32_t number = cpu.is_none() ? -1 : static_cast<int32_t>(to_u32(cpu, "proxy_cpu", INT32_MAX));
    thread_ = std::make_unique<moe::ProxyThread>(get(), number, options.spin_ns);
  }
  void stop_thread() {
    get();
    const WithoutGil no_gil;
    thread_.reset();
  }
  // Posts through the thread, if there is one.
  template <typename Post>
  void post(Post post) {
    moe::Proxy& proxy = get();
    const WithoutGil no_gil;
    thread_ ? post(*thread_) : post(proxy);
  }
  void post_placed(uint32_t round, nb::handle placement, bool is_results) {
    const moe::Placement* const places = placement.is_none() ? nullptr : nb::cast<const moe::Placement*>(placement);
    // Kept until that round's memory is reused, which requires a wait: by then the thread is done with it.
    if (places != nullptr) placements_[round % moe::kParities] = nb::borrow(placement);
    post([&](auto& to) { is_results ? to.send_results(round, places) : to.send_remainder(round, places); });
  }
  void connect(uint32_t rank, DescriptorHandle& routes, DescriptorHandle& rows, const std::vector<uint32_t>& imms) {
    get().connect(rank, {engine_->remote(routes), engine_->remote(rows)}, imms);
  }
  void watch(nb::handle address, uint32_t rank, nb::handle board, uint32_t results) {
    BufferView& view = boards_.emplace_back();
    const size_t words = uint64_t{results} + moe::kParities;
    if (!view.acquire(board, PyBUF_SIMPLE)) throw UsageError("board is not one contiguous range of memory");
    if (static_cast<size_t>(view.get().len) < words * sizeof(moe::Word))
      throw UsageError("board has " + std::to_string(view.get().len) + " bytes, must have at least " +
                       std::to_string(words * sizeof(moe::Word)) + ", for " + std::to_string(words) + " words");
    const auto* const first = static_cast<const moe::Word*>(view.get().buf);
    get().watch(engine_->peer(address), rank, *first,
                std::span<const moe::Word, moe::kParities>(first + results, moe::kParities));
  }

  // A late result about our own rank: the thread has not posted what it was told to.
  template <typename Wait>
  nb::tuple wait(nb::handle timeout_s, Wait wait) const {
    moe::Proxy& proxy = get();
    const Deadline deadline = to_deadline(timeout_s, engine_->core()->clock());
    moe::FarOutcome outcome{};
    wait_without_gil([&] {
      const bool is_ours = !thread_ || thread_->settle(deadline);
      outcome = is_ours ? wait(proxy, deadline) : moe::FarOutcome{moe::FarResult::kLate, rank_, {}};
      return outcome.result == moe::FarResult::kInterrupted ? WaitResult::kInterrupted : WaitResult::kReady;
    });
    return nb::make_tuple(result_name(outcome.result), outcome.rank, to_text(outcome.detail));
  }

  nb::object engine;

 private:
  EngineHandle* const engine_;
  const uint32_t rank_;
  std::deque<BufferView> boards_;  // of watched ranks
  std::unique_ptr<moe::Proxy> proxy_;
  std::unique_ptr<moe::ProxyThread> thread_;  // destroyed before the proxy
  std::array<nb::object, moe::kParities> placements_;
  const uint32_t generation_ = fork_generation;
};

}  // namespace crossrail::bindings
