#include "bindings/handles.h"

#include "bindings/engine_handle.h"

namespace crossrail::bindings {

RegionHandle::RegionHandle(nb::pointer_and_handle<EngineHandle> engine, RegionRef region, nb::object owner,
                           bool writable)
    : engine_(engine.p),
      engine_object_(nb::borrow(engine.h)),
      region_(std::move(region)),
      buffer_(std::move(owner)),
      writable_(writable) {
  engine_->adopt(this);
}

const RegionRef& RegionHandle::core() const {
  if (!region_) throw UsageError("this Region was already finalized");
  return region_.ref();
}

nb::object RegionHandle::descriptor() {
  // Ids are never reused: if this one still is the region's, it is of the present generation.
  if (!descriptor_.is_valid() || !(region_.inherited() || core()->is_open_as(descriptor_id_))) {
    auto fresh = std::make_shared<const RegionDescriptor>(core()->descriptor());
    descriptor_id_ = fresh->region_id;
    descriptor_ = nb::cast(DescriptorHandle(std::move(fresh)));
  }
  return descriptor_;
}

nb::object RegionHandle::take_quiet_buffer() {
  quiet_ = true;
  if (exports_ > 0) return {};
  return std::move(buffer_);
}

void RegionHandle::check_viewable() const {
  if (core()->base() == kPhantomBase) throw UsageError("a phantom region has no memory to look at");
  if (core()->memory() != MemoryKind::kHost) {
    const std::string device = "cuda:" + std::to_string(core()->gpu());
    throw UsageError("the region is memory of " + device + ", which the CPU cannot look at: use " +
                     (core()->is_own_gpu_memory() ? "torch.as_tensor(region, device='" + device + "')"
                                                  : std::string("the tensor that was registered")));
  }
  if (core()->closed()) throw UsageError("the region is closed: its memory may belong to somebody else by now");
}

void RegionHandle::export_view(PyObject* self, Py_buffer* view, int flags) {
  check_viewable();
  const RegionRef& region = core();
  if (PyBuffer_FillInfo(view, self, region->base(), static_cast<Py_ssize_t>(region->length_bytes()), writable_ ? 0 : 1,
                        flags) != 0) {
    throw nb::python_error();
  }
  exports_++;
}

void RegionHandle::unexport_view() {
  exports_--;
  if (quiet_) take_quiet_buffer();
}

int RegionHandle::traverse(visitproc visit, void* arg) const {
  Py_VISIT(engine_object_.ptr());
  Py_VISIT(buffer_.ptr());
  return 0;
}

void RegionHandle::detach() {
  unlink();
  const nb::object engine_object = std::move(engine_object_);  // lives until we are done
  nb::object buffer = std::move(buffer_);
  if (!region_ || region_.inherited()) return;
  RegionRef region = region_.ref();
  region_.reset();
  region->begin_close();
  engine_->retire(std::move(region), std::move(buffer));
}

}  // namespace crossrail::bindings
