#include <nanobind/nanobind.h>
#include <nanobind/stl/string.h>

#include <string>

#include "bindings/bindings.h"
#include "bindings/convert.h"
#include "bindings/handles.h"
#include "bindings/raise.h"
#include "transport/sim/world.h"

namespace crossrail::bindings {

namespace {

using Self = nb::pointer_and_handle<TransferHandle>;

nb::object imm_of(const TransferInfo& info) {
  if (info.imm == kNoImm) return nb::none();
  return nb::int_(info.imm);
}

nb::object region_of(const TransferInfo& info) {
  if (info.region_id == 0) return nb::none();
  return nb::int_(info.region_id);
}

bool waits_for_trigger(const TransferInfo& info) {
  return info.triggered_ns == kUntriggered && info.status == Status::kPending;
}

nb::object exception_of(const TransferHandle& self) {
  const TransferInfo info = self.transfer->info();
  return make_error("transfer_failed", self.engine, op_kind_name(info.kind), status_name(info.status),
                    to_text(info.peer), info.bytes, info.bytes_retired, imm_of(info), region_of(info), info.offset,
                    nb::make_tuple(info.sum_sent, info.sum_found), to_text(info.detail));
}

void wait(const TransferHandle& self, nb::handle timeout_s) {
  const TransferRef transfer = self.transfer.ref();
  if (transfer->done()) {
    to_seconds(timeout_s);  // a mistake in it is reported now, and not only when the transfer is slower
  } else {
    const Deadline deadline = to_deadline(timeout_s, transfer->clock());
    if (wait_without_gil([&] { return transfer->wait(deadline, interrupted); }) == WaitResult::kTimeout) {
      const TransferInfo info = transfer->info();
      raise_object(make_error("transfer_timeout", self.engine, op_kind_name(info.kind), to_text(info.peer), info.bytes,
                              info.bytes_retired, imm_of(info), timeout_s, waits_for_trigger(info)));
    }
  }
  if (transfer->status() != Status::kDone) raise_object(exception_of(self));
}

nb::object exception(const TransferHandle& self) {
  switch (self.transfer->status()) {
    case Status::kPending:
      throw UsageError("exception() of a transfer that is still pending: wait for it first");
    case Status::kDone:
      return nb::none();
    case Status::kCancelled:
    case Status::kPeerLost:
    case Status::kRegionClosed:
    case Status::kRegionRevoked:
    case Status::kOutOfBounds:
    case Status::kAccessDenied:
    case Status::kMessageTooLong:
    case Status::kEngineClosed:
    case Status::kTransportFailed:
    case Status::kChecksumMismatch:
      break;
  }
  return exception_of(self);
}

// In seconds; on a simulated engine, since its world began.
nb::object time_of(const TransferHandle& self, int64_t TransferInfo::* what) {
  const int64_t at_ns = self.transfer->info().*what;
  if (at_ns == kNoTrigger || at_ns == kUntriggered) return nb::none();
  const bool is_simulated = &self.transfer->clock() != &real_clock();
  return nb::float_(static_cast<double>(at_ns - (is_simulated ? sim::World::kOriginNs : 0)) / 1e9);
}

std::string represent(const TransferHandle& self) {
  const TransferInfo info = self.transfer->info();
  const bool has_several = (info.kind == OpKind::kScatter || info.kind == OpKind::kBarrier) && !info.failed_peer;
  return std::string("<Transfer ") + op_kind_name(info.kind) + " of " + std::to_string(info.bytes) + " bytes, " +
         (has_several ? info.peer : "peer '" + info.peer + "'") + ", " + status_name(info.status) +
         (waits_for_trigger(info) ? ", waits for its trigger>" : ">");
}

}  // namespace

void register_transfer(nb::module_& module) {
  nb::class_<TransferHandle>(
      module, "Transfer", nb::is_final(), nb::is_weak_referenceable(), nb::type_slots(engine_slots<TransferHandle>),
      nb::pooled(),
      R"(One operation that was accepted. It completes exactly once: done, failed or cancelled, even if the engine closes.

To learn of the completion use `await transfer`, `transfer.wait()` or `transfer.add_done_callback()`, in any combination
and on any thread. Transfers complete in any order.
Done means that the source may be reused. It does not mean that the target's process can see the bytes: only the count
there says so. After a completion of any kind nothing touches the source or target of this transfer any more.
Dropping the object does not stop the transfer.)")
      .def_prop_ro(
          "done", [](const TransferHandle& self) { return self.transfer->done(); },
          "True once it has completed in any way. Never blocks.")
      .def_prop_ro(
          "status", [](const TransferHandle& self) { return status_name(self.transfer->status()); },
          nb::sig("def status(self) -> str"),
          "'pending', 'done', or why it ended otherwise: 'cancelled', 'peer-lost', ... Never blocks.")
      .def_prop_ro(
          "kind", [](const TransferHandle& self) { return op_kind_name(self.transfer->info().kind); },
          nb::sig("def kind(self) -> str"), "'write', 'read', 'paged-writes', 'scatter', 'barrier' or 'send'.")
      .def_prop_ro(
          "peer", [](const TransferHandle& self) { return to_text(self.transfer->info().peer); },
          "Name of the peer. With several peers, as in a scatter: the one that failed, or how many there are.")
      .def_prop_ro(
          "nbytes", [](const TransferHandle& self) { return self.transfer->info().bytes; },
          "Bytes that it moves, over all pages or targets.")
      .def_prop_ro(
          "imm", [](const TransferHandle& self) { return imm_of(self.transfer->info()); },
          nb::sig("def imm(self) -> int | None"), "Its immediate. None if it has none, or one per target.")
      .def_prop_ro(
          "triggered_at", [](const TransferHandle& self) { return time_of(self, &TransferInfo::triggered_ns); },
          nb::sig("def triggered_at(self) -> float | None"),
          "When a transfer with a trigger began: seconds of time.monotonic(), or of the world's time on a simulated "
          "engine.\nNone: it still waits for the trigger, or has none.")
      .def_prop_ro(
          "completed_at", [](const TransferHandle& self) { return time_of(self, &TransferInfo::ended_ns); },
          nb::sig("def completed_at(self) -> float | None"),
          "When the engine saw a transfer with a trigger complete, in any way: on the clock of triggered_at.\nNone: it "
          "is pending, or has no trigger.")
      .def_prop_ro(
          "_engine", [](const TransferHandle& self) { return self.engine; }, nb::sig("def _engine(self) -> Engine"))
      .def(
          "wait", &wait, nb::arg("timeout_s") = nb::none(),
          nb::sig("def wait(self, timeout_s: float | None = None) -> None"),
          R"(Blocks until the transfer has completed, with the GIL released. Any thread, but it would block an event loop.

timeout_s: seconds; None: no limit. Raises a TransferError (PeerLost, TransferCancelled, RemoteRegionClosed, ...) if the
transfer failed, EngineClosed if the engine was closed first, WaitTimeout after timeout_s (the transfer goes on), and
KeyboardInterrupt on Ctrl-C.)")
      .def(
          "__await__", [](Self self) { return call_package("crossrail.transfers", "await_transfer", self.h); },
          nb::sig("def __await__(self) -> collections.abc.Generator[typing.Any, None, None]"),
          R"(Waits on the running event loop, without polling. Raises what wait() raises.

Cancelling the task that awaits does not cancel the transfer; cancel() does. asyncio's gather, wait_for, shield and
ensure_future take a transfer as it is; asyncio.wait takes tasks, as ensure_future makes them.)")
      .def(
          "cancel",
          [](const TransferHandle& self) {
            const TransferRef transfer = self.transfer.ref();
            WithoutGil no_gil;
            return transfer->cancel();
          },
          R"(Asks for cancellation and returns at once: True, or False if the transfer had completed already. Any thread.

The transfer then completes: as cancelled, once no part of it can touch memory any more, or as done if it was too late
to stop it. Nothing is counted in part: a cancelled write counts nothing, and each page or each target of a scatter
counts 1 or nothing. It is too late once the receiver has begun to count the write, which then runs to its end, even if
a frozen peer delays that. A message that waits for a buffer of the receiver's pool is given back.)")
      .def(
          "add_done_callback",
          [](Self self, nb::handle fn) { call_package("crossrail.transfers", "add_done_callback", self.h, fn); },
          nb::arg("fn").none(),
          nb::sig("def add_done_callback(self, fn: collections.abc.Callable[[Transfer], object]) -> None"),
          R"(Calls fn(transfer) once on the engine's callback thread, even if the transfer has completed already.

What was added before it completed runs in the order in which it was added. fn may submit, wait, and close regions. An
exception in fn is logged, and the engine goes on.)")
      .def("exception", &exception, nb::sig("def exception(self) -> Exception | None"),
           "The error that wait() would raise, or None if it is done. Raises UsageError while it is pending. Never "
           "blocks.")
      .def(
          "_notify",
          [](const TransferHandle& self, const NotifierHandle& notifier, uint64_t cookie) {
            return self.transfer->notify(notifier.notifier.ref().get(), cookie);
          },
          nb::arg("notifier"), nb::arg("cookie"),
          "Posts cookie once at completion; False, and nothing is posted, when complete already.")
      .def("__repr__", [](Self self) {
        return self.p->transfer.inherited() ? nb::str(make_error("inherited", self.h)) : to_shown(represent(*self.p));
      });
}

}  // namespace crossrail::bindings
