#include <nanobind/nanobind.h>

#include <vector>

#include "bindings/bindings.h"
#include "bindings/convert.h"
#include "bindings/engine_handle.h"
#include "bindings/handles.h"
#include "bindings/raise.h"

namespace crossrail::bindings {

namespace {

constexpr size_t kSendersMax = 1024;

void init(ReceivePoolHandle* self, nb::pointer_and_handle<EngineHandle> engine, nb::handle count, nb::handle nbytes,
          bool has_callback) {
  Ref<ReceivePool> pool = engine.p->core()->submit_recvs(to_u32(count, "count"), to_u32(nbytes, "nbytes"));
  new (self) ReceivePoolHandle(std::move(pool), nb::borrow(engine.h), has_callback);
}

nb::object sender_object(ReceivePoolHandle& self, const std::shared_ptr<const Address>& sender) {
  for (const auto& [address, object] : self.senders) {
    if (address == sender) return object;
  }
  if (self.senders.size() == kSendersMax) self.senders.clear();
  self.senders.emplace_back(sender, nb::cast(AddressHandle(sender)));
  // The latest first: whoever sends now will soon send again.
  std::swap(self.senders.front(), self.senders.back());
  return self.senders.front().second;
}

nb::object to_python(ReceivePoolHandle& self, const Message& message) {
  return nb::cast(MessageHandle{sender_object(self, message.sender), to_bytes(message.payload)});
}

nb::list take(ReceivePoolHandle& self, size_t limit) {
  std::vector<Message> messages;
  self.pool->poll(limit, &messages);
  nb::list list;
  for (const Message& message : messages) list.append(to_python(self, message));
  return list;
}

void refuse_beside_callback(const ReceivePoolHandle& self) {
  if (self.has_callback) throw UsageError("this pool was opened with on_message: its messages go there");
}

nb::list poll(ReceivePoolHandle& self, nb::handle limit) {
  refuse_beside_callback(self);
  return take(self, to_u64(limit, "limit"));
}

nb::object recv(ReceivePoolHandle& self, nb::handle timeout_s) {
  refuse_beside_callback(self);
  const Ref<ReceivePool> pool = self.pool.ref();
  const Deadline deadline = to_deadline(timeout_s, pool->clock());
  std::vector<Message> messages;
  const InterruptCheck check = interrupted;  // for the whole wait, also if other threads take what wakes us
  for (;;) {
    // Once the message is taken, what a signal handler raises as we return to Python would lose it.
    if (PyErr_CheckSignals() != 0) throw nb::python_error();
    pool->poll(1, &messages);
    if (!messages.empty()) return to_python(self, messages.front());
    if (pool->closed()) raise_object(make_error("pool_closed", self.engine));
    const WaitResult result = wait_without_gil([&] { return pool->wait(deadline, check); });
    if (result == WaitResult::kTimeout) raise_object(make_error("recv_timeout", self.engine, timeout_s));
  }
}

void close(const ReceivePoolHandle& self) {
  if (self.pool.inherited()) return;
  const Ref<ReceivePool> pool = self.pool.ref();
  WithoutGil no_gil;
  pool->close();
}

}  // namespace

void register_recv_pool(nb::module_& module) {
  nb::class_<MessageHandle>(module, "Message", nb::is_final(), nb::pooled(),
                            "One received message: a copy, whose buffer in the pool is free again.")
      .def_prop_ro(
          "peer", [](const MessageHandle& self) { return self.peer; }, nb::sig("def peer(self) -> Address"),
          "Address of the sender, to answer to.")
      .def_prop_ro(
          "data", [](const MessageHandle& self) { return self.data; }, nb::sig("def data(self) -> bytes"),
          "The bytes that were sent.")
      .def("__repr__", [](const MessageHandle& self) {
        return nb::str("<Message of {} bytes from {!r}>").format(nb::len(self.data), self.peer);
      });

  nb::class_<ReceivePoolHandle>(module, "ReceivePool", nb::type_slots(engine_slots<ReceivePoolHandle>))
      .def("__init__", &init, nb::arg("engine"), nb::arg("count").none(), nb::arg("nbytes").none(),
           nb::arg("has_callback"),
           nb::sig("def __init__(self, engine: Engine, count: int, nbytes: int, has_callback: bool) -> None"))
      .def_prop_ro(
          "count", [](const ReceivePoolHandle& self) { return self.pool->buffer_count(); },
          "Messages that may wait here before senders are held back.")
      .def_prop_ro(
          "nbytes", [](const ReceivePoolHandle& self) { return self.pool->buffer_bytes(); },
          "Longest message that fits.")
      .def_prop_ro("closed", [](const ReceivePoolHandle& self) { return self.pool->closed(); })
      .def("poll", &poll, nb::arg("limit").none() = 64, nb::sig("def poll(self, limit: int = 64) -> list[Message]"),
           "Takes up to limit messages, oldest first, none if there are none. Any thread, never blocks.")
      .def("recv", &recv, nb::arg("timeout_s") = nb::none(),
           nb::sig("def recv(self, timeout_s: float | None = None) -> Message"),
           R"(Blocks until there is a message and takes it, GIL released. Any thread.

Raises WaitTimeout, EngineClosed once the engine is closed, UsageError once the pool is closed and empty.)")
      .def_prop_ro(
          "_engine", [](const ReceivePoolHandle& self) { return self.engine; }, nb::sig("def _engine(self) -> Engine"))
      .def("_take", &take, nb::arg("limit"), nb::sig("def _take(self, limit: int) -> list[Message]"))
      .def(
          "_notify",
          [](const ReceivePoolHandle& self, const NotifierHandle& notifier, uint64_t cookie) {
            self.pool->notify(notifier.notifier.ref().get(), cookie);
          },
          nb::arg("notifier"), nb::arg("cookie"),
          "Posts cookie once, when there are messages or the engine closed. Replaces an earlier one.")
      .def("_close", &close);
}

}  // namespace crossrail::bindings
