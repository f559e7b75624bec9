#include "bench/window.h"

#include <string>

#include "util/errors.h"

namespace crossrail::bench {
namespace {

[[noreturn]] void throw_failed(const Transfer& transfer) {
  const TransferInfo info = transfer.info();
  throw TransportError("bench", 0,
                       std::string(op_kind_name(info.kind)) + " to " + info.peer + " ended as " +
                           status_name(info.status) + (info.detail.empty() ? "" : ": " + info.detail),
                       "look whether the other process still runs");
}

}  // namespace

void settle(Engine& engine, const TransferRef& transfer, Guard& guard) {
  if (!transfer) return;
  if (engine.options().polling == Polling::kManual) {
    while (!transfer->done()) {
      engine.progress();
      guard.tick();
    }
  } else if (!transfer->done()) {
    guard.check(transfer->wait(guard.deadline(), guard.interrupted()));
  }
  if (transfer->status() != Status::kDone) throw_failed(*transfer);
}

void await_count(Engine& engine, ImmCounter& counter, uint64_t count, Guard& guard) {
  if (engine.options().polling != Polling::kManual) {
    guard.check(counter.wait(count, guard.deadline(), guard.interrupted()));
    return;
  }
  while (!counter.try_consume(count)) {
    engine.progress();
    guard.tick();
  }
}

Window::Window(Engine& engine, uint32_t width, Guard& guard) : engine_(engine), guard_(guard), ring_(width) {
  if (width == 0) throw UsageError("window is 0 and must be at least 1");
}

void Window::settle_all() {
  for (size_t i = 0; i < ring_.size(); ++i) {
    make_room();
    add(nullptr);
  }
}

}  // namespace crossrail::bench
