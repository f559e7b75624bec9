// The submits of engine.h: convert, release the GIL, forward.
//
// Numbers come as plain objects and are converted here: errors then name argument, value and bound, and the call is
// faster than through nanobind's optional casters.
#include <nanobind/nanobind.h>

#include <string>
#include <utility>
#include <vector>

#include "bindings/arrays.h"
#include "bindings/bindings.h"
#include "bindings/convert.h"
#include "bindings/engine_handle.h"
#include "bindings/handles.h"

namespace crossrail::bindings {

namespace {

constexpr uint64_t kLayoutMax = uint64_t{1} << 56;  // for page offsets and strides, so that their products fit 128 bits

using Self = nb::pointer_and_handle<EngineHandle>;

// Owner until the end of the submit: the Refs in the caller's frame; afterwards the core's own.
template <typename Submit>
TransferHandle submit(Self self, Submit submit_now) {
  TransferRef transfer;
  {
    WithoutGil no_gil;
    transfer = submit_now();
  }
  return TransferHandle{Held<Transfer>(std::move(transfer)), nb::borrow(self.h)};
}

const RegionHandle& own_region(Self self, nb::handle given, const char* argument) {
  if (!nb::isinstance<RegionHandle>(given)) {
    throw UsageError(std::string(argument) + " must be a Region (engine.register(memory) makes one), not " +
                     type_name_of(given));
  }
  const RegionHandle& region = *nb::inst_ptr<RegionHandle>(given);
  if (region.engine() != self.p) {
    throw UsageError(std::string(argument) + " is a region of another engine ('" + region.engine()->address()->name +
                     "')");
  }
  return region;
}

RemoteRegionRef remote_region(Self self, nb::handle given, const char* argument) {
  return self.p->remote(to_descriptor(given, argument));
}

// None: the rest of the local region after the offset.
uint64_t to_length(nb::handle length, const Region& local, uint64_t local_offset) {
  if (!length.is_none()) return to_u64(length, "length");
  return local.length_bytes() > local_offset ? local.length_bytes() - local_offset : 0;
}

// A trigger pair, and what keeps its watcher alive until the transfer does.
struct GivenTrigger {
  Ref<Watcher> watcher;
  uint64_t threshold = 0;

  explicit GivenTrigger(nb::handle given) {
    if (given.is_none()) return;
    if (!nb::isinstance<nb::tuple>(given) || nb::len(given) != 2 || !nb::isinstance<WatcherHandle>(given[0])) {
      throw UsageError("trigger must be a pair (watcher, value), with a watcher of engine.alloc_watcher(), not " +
                       std::string(nb::repr(given).c_str()));
    }
    watcher = nb::inst_ptr<WatcherHandle>(nb::object(given[0]))->watcher.ref();
    threshold = to_u64(nb::object(given[1]), "trigger[1]");
  }
  Trigger get() const { return {watcher.get(), threshold}; }
};

TransferHandle submit_write(Self self, nb::handle src, nb::handle dst, nb::handle length, nb::handle src_offset,
                            nb::handle dst_offset, nb::handle imm, nb::handle rail, nb::handle verify,
                            nb::handle trigger) {
  const EngineRef engine = self.p->core();
  const RegionRef source = own_region(self, src, "src").core();
  const RemoteRegionRef target = remote_region(self, dst, "dst");
  WriteRequest request;
  request.src = source.get();
  request.src_offset = to_u64(src_offset, "src_offset");
  request.dst = target.get();
  request.dst_offset = to_u64(dst_offset, "dst_offset");
  request.length_bytes = to_length(length, *source, request.src_offset);
  request.imm = to_imm(imm);
  request.rail = to_rail(rail);
  request.verify = to_bool(verify, "verify");
  const GivenTrigger when(trigger);
  request.trigger = when.get();
  return submit(self, [&] { return engine->submit_write(request); });
}

TransferHandle submit_read(Self self, nb::handle dst, nb::handle src, nb::handle length, nb::handle dst_offset,
                           nb::handle src_offset, nb::handle rail, nb::handle verify) {
  const EngineRef engine = self.p->core();
  const RegionHandle& given = own_region(self, dst, "dst");
  const RegionRef target = given.core();
  if (!given.writable()) throw UsageError("dst is a region of read-only memory: it cannot be the target of a read");
  const RemoteRegionRef source = remote_region(self, src, "src");
  ReadRequest request;
  request.dst = target.get();
  request.dst_offset = to_u64(dst_offset, "dst_offset");
  request.src = source.get();
  request.src_offset = to_u64(src_offset, "src_offset");
  request.length_bytes = to_length(length, *target, request.dst_offset);
  request.rail = to_rail(rail);
  request.verify = to_bool(verify, "verify");
  return submit(self, [&] { return engine->submit_read(request); });
}

TransferHandle submit_paged_writes(Self self, nb::handle src, nb::handle src_pages, nb::handle dst,
                                   nb::handle dst_pages, nb::handle page_bytes, nb::handle src_stride,
                                   nb::handle dst_stride, nb::handle src_offset, nb::handle dst_offset, nb::handle imm,
                                   nb::handle rail, nb::handle verify, nb::handle trigger) {
  const EngineRef engine = self.p->core();
  const RegionRef source = own_region(self, src, "src").core();
  const RemoteRegionRef target = remote_region(self, dst, "dst");
  const IndexArray src_indices(src_pages, "src_pages");
  const IndexArray dst_indices(dst_pages, "dst_pages");
  PagedWriteRequest request;
  request.page_bytes = to_u64(page_bytes, "page_bytes", kLayoutMax);
  request.src = source.get();
  request.src_offset = to_u64(src_offset, "src_offset", kLayoutMax);
  request.src_stride_bytes = src_stride.is_none() ? request.page_bytes : to_u64(src_stride, "src_stride", kLayoutMax);
  request.src_pages = src_indices.get();
  request.dst = target.get();
  request.dst_offset = to_u64(dst_offset, "dst_offset", kLayoutMax);
  request.dst_stride_bytes = dst_stride.is_none() ? request.page_bytes : to_u64(dst_stride, "dst_stride", kLayoutMax);
  request.dst_pages = dst_indices.get();
  request.imm = to_imm(imm);
  request.rail = to_rail(rail);
  request.verify = to_bool(verify, "verify");
  const GivenTrigger when(trigger);
  request.trigger = when.get();
  return submit(self, [&] { return engine->submit_paged_writes(request); });
}

std::vector<RemoteRegionRef> resolve_targets(Self self, nb::handle dsts) {
  std::vector<RemoteRegionRef> targets;
  const nb::sequence items = to_sequence(dsts, "dsts", "RegionDescriptors");
  targets.reserve(nb::len(items));
  for (nb::handle item : items) {
    if (!nb::isinstance<DescriptorHandle>(item)) {
      refuse_descriptor(item, "dsts[" + std::to_string(targets.size()) + "]");
    }
    targets.push_back(self.p->remote(*nb::inst_ptr<DescriptorHandle>(item)));
  }
  return targets;
}

const Ref<PeerGroup>& usable(Self self, nb::handle given) {
  const PeerGroupHandle& group = to_group(given);
  if (!group.engine.is(self.h)) throw UsageError("group was made by another engine: its peers are resolved there");
  if (group.removed) throw UsageError("group was removed");
  return group.group.ref();
}

// One number for all targets, or none, becomes the request's `imm`; an array or sequence its `imms`, which are stored
// here.
void set_imms(nb::handle given, ScatterRequest& request, std::vector<uint32_t>& imms) {
  if (given.is_none() || PyLong_Check(given.ptr()) || PySequence_Check(given.ptr()) == 0) {
    request.imm = to_imm(given);
    return;
  }
  const SizeArray numbers(given, "imm", request.dsts.size());
  for (const uint64_t number : numbers.get()) {
    if (number > kImmMax) {
      throw UsageError("imm[" + std::to_string(imms.size()) + "] = " + std::to_string(number) +
                       " is not in 0..2**28-1");
    }
    imms.push_back(static_cast<uint32_t>(number));
  }
  request.imms = imms;
}

TransferHandle submit_scatter(Self self, nb::handle src, nb::handle dsts, nb::handle lengths, nb::handle src_offsets,
                              nb::handle dst_offsets, nb::handle group, nb::handle imm, nb::handle verify) {
  const EngineRef engine = self.p->core();
  const RegionRef source = own_region(self, src, "src").core();
  const std::vector<RemoteRegionRef> targets = resolve_targets(self, dsts);
  std::vector<RemoteRegion*> pointers;
  pointers.reserve(targets.size());
  for (const RemoteRegionRef& target : targets) pointers.push_back(target.get());
  const SizeArray length_array(lengths, "lengths", targets.size());
  const SizeArray src_array(src_offsets, "src_offsets", targets.size());
  const SizeArray dst_array(dst_offsets, "dst_offsets", targets.size());
  const Ref<PeerGroup> peers = group.is_none() ? nullptr : usable(self, group);
  ScatterRequest request;
  request.src = source.get();
  request.dsts = pointers;
  request.lengths = length_array.get();
  request.src_offsets = src_array.get();
  request.dst_offsets = dst_array.get();
  request.group = peers.get();
  std::vector<uint32_t> imms;
  set_imms(imm, request, imms);
  request.verify = to_bool(verify, "verify");
  return submit(self, [&] { return engine->submit_scatter(request); });
}

TransferHandle submit_barrier(Self self, nb::handle group, nb::handle imm) {
  const EngineRef engine = self.p->core();
  const Ref<PeerGroup> peers = usable(self, group);
  const uint32_t number = to_u32(imm, "imm", kImmMax);
  return submit(self, [&] { return engine->submit_barrier(*peers, number); });
}

TransferHandle submit_send(Self self, nb::handle peer, nb::handle message) {
  const EngineRef engine = self.p->core();
  const PeerRef target = self.p->peer(peer);
  BufferView view;
  std::span<const uint8_t> payload;
  if (PyBytes_CheckExact(message.ptr())) {
    payload = bytes_of(message);
  } else {
    if (!view.acquire(message, PyBUF_SIMPLE)) {
      throw UsageError("message must be bytes or another contiguous buffer, not " + type_name_of(message));
    }
    payload = view.bytes();
  }
  return submit(self, [&] { return engine->submit_send(*target, payload); });
}

}  // namespace

void register_operations(nb::class_<EngineHandle>& engine) {
  engine
      .def("submit_write", &submit_write, nb::arg("src").none(), nb::arg("dst").none(), nb::arg("length") = nb::none(),
           nb::kw_only(), nb::arg("src_offset").none() = 0, nb::arg("dst_offset").none() = 0,
           nb::arg("imm") = nb::none(), nb::arg("rail") = nb::none(), nb::arg("verify").none() = false,
           nb::arg("trigger") = nb::none(),
           nb::sig("def submit_write(self, src: Region, dst: RegionDescriptor, length: int | None = None, *, "
                   "src_offset: int = 0, dst_offset: int = 0, imm: int | None = None, rail: int | None = None, "
                   "verify: bool = False, trigger: tuple[Watcher, int] | None = None) -> Transfer"),
           R"(Writes length bytes of src (None: all from src_offset on) into a peer's region. With imm, counts 1 there.

Any thread. Returns at once; blocks (GIL released) only while the submit queue is full. src must not change until the
transfer completes. imm: 0..2**28-1. A write of length 0 moves nothing but is counted. Long writes are split over all
rails unless rail names one. Not ordered with other operations. src and the target must not overlap, where both are
memory of one process: pieces are not copied in an order that would allow it. UsageError for what can be checked now:
ranges, access, and an overlap within this engine.
verify: takes a checksum of src now, on this thread; the target's engine compares it with its memory before it counts,
and only then is the transfer done. If they differ, nothing is counted and the transfer fails with ChecksumMismatch.
No one else may write to the target range meanwhile. Costs one pass over the bytes on each side.
trigger: (watcher, value): the engine begins the write by itself, with no help of Python's, once the watched word has
reached this value or gone past it, counted modulo 2**64. src may change until then, and must not afterwards. A write
that waits can be cancelled, fails when its peer is lost, and is cancelled when the watcher is closed. Not with verify.)")
      .def("submit_read", &submit_read, nb::arg("dst").none(), nb::arg("src").none(), nb::arg("length") = nb::none(),
           nb::kw_only(), nb::arg("dst_offset").none() = 0, nb::arg("src_offset").none() = 0,
           nb::arg("rail") = nb::none(), nb::arg("verify").none() = false,
           nb::sig("def submit_read(self, dst: Region, src: RegionDescriptor, length: int | None = None, *, "
                   "dst_offset: int = 0, src_offset: int = 0, rail: int | None = None, verify: bool = False) "
                   "-> Transfer"),
           R"(Reads length bytes of a peer's region into dst (None: as many as fit from dst_offset on).

Any thread; blocks only while the submit queue is full. Do not use dst until the transfer is done; then the bytes are
there. The peer is not notified. Not ordered with other operations.
verify: after the bytes have arrived, the peer's engine compares their checksum with its memory, which no one may write
to meanwhile; the transfer is done after that, and fails with ChecksumMismatch if they differ.)")
      .def(
          "submit_paged_writes", &submit_paged_writes, nb::arg("src").none(), nb::arg("src_pages").none(),
          nb::arg("dst").none(), nb::arg("dst_pages").none(), nb::arg("page_bytes").none(), nb::kw_only(),
          nb::arg("src_stride") = nb::none(), nb::arg("dst_stride") = nb::none(), nb::arg("src_offset").none() = 0,
          nb::arg("dst_offset").none() = 0, nb::arg("imm") = nb::none(), nb::arg("rail") = nb::none(),
          nb::arg("verify").none() = false, nb::arg("trigger") = nb::none(),
          nb::sig("def submit_paged_writes(self, src: Region, src_pages: typing.Any, dst: RegionDescriptor, "
                  "dst_pages: typing.Any, page_bytes: int, *, src_stride: int | None = None, "
                  "dst_stride: int | None = None, src_offset: int = 0, dst_offset: int = 0, imm: int | None = None, "
                  "rail: int | None = None, verify: bool = False, trigger: tuple[Watcher, int] | None = None) "
                  "-> Transfer"),
          R"(Writes page src_pages[i] of src to page dst_pages[i] of a peer's region, for all i. With imm, counts 1 per page.

Page p is page_bytes bytes at offset + stride * p; strides default to page_bytes. src_pages and dst_pages are
one-dimensional contiguous arrays (numpy, torch on the CPU, any buffer) of int32, uint32, int64 or uint64 and of equal
length; they are copied before this returns. Target pages may overlap: which write lands last is then undefined. They
must not overlap with src's.
Any thread; blocks only while the submit queue is full. Pages are not ordered.
verify: as in submit_write, in groups of 960 pages, each of which is counted as a whole or not at all; pages must then
not overlap at the target.
trigger: as in submit_write.)")
      .def(
          "submit_scatter", &submit_scatter, nb::arg("src").none(), nb::arg("dsts").none(), nb::kw_only(),
          nb::arg("lengths").none(), nb::arg("src_offsets").none(), nb::arg("dst_offsets").none(),
          nb::arg("group").none() = nb::none(), nb::arg("imm") = nb::none(), nb::arg("verify").none() = false,
          nb::sig("def submit_scatter(self, src: Region, dsts: collections.abc.Sequence[RegionDescriptor], *, "
                  "lengths: typing.Any, src_offsets: typing.Any, dst_offsets: typing.Any, "
                  "group: PeerGroup | None = None, imm: typing.Any = None, verify: bool = False) -> Transfer"),
          R"(Writes slice i of src, lengths[i] bytes at src_offsets[i], into dsts[i] at dst_offsets[i]. With imm, counts 1 per target.

lengths and offsets, in bytes, are each a one-dimensional array of int64 or uint64 (fastest), a sequence of ints, or one
int for all targets. So is imm, or None; with several numbers each target counts its own. With a group, dsts[i] must
belong to the group's i-th peer. Any thread; blocks only while the submit queue is full. Targets are not ordered; the
transfer is done when all are, and fails with the first that fails.
verify: as in submit_write, separately for each target: it counts if its own bytes are right.)")
      .def("submit_barrier", &submit_barrier, nb::arg("group").none(), nb::arg("imm").none(),
           nb::sig("def submit_barrier(self, group: PeerGroup, imm: int) -> Transfer"),
           "Sends only imm to each member of the group: counts 1 at each. Not ordered with other operations: first "
           "wait\n"
           "for those that must come before it. Any thread; blocks only while the submit queue is full.")
      .def("submit_send", &submit_send, nb::arg("peer").none(), nb::arg("message").none(),
           nb::sig("def submit_send(self, peer: Address | bytes, message: typing.Any) -> Transfer"),
           R"(Sends a message (bytes or any contiguous buffer, at most message_bytes_max) into the peer's receive pool.

The payload is copied before this returns. Any thread; blocks only while the submit queue is full. The transfer
stays pending while the peer's pool is full or not yet open; MessageTooLong if the pool's buffers are shorter. Messages
are not ordered, not even those of one sender.)");
}

}  // namespace crossrail::bindings
