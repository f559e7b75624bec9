#include "transport/verbs/verbs_nic.h"

#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <optional>
#include <utility>

#include "util/errors.h"

namespace crossrail::verbs {

namespace {

constexpr uint64_t kWorkBytesMax = 1 << 30;  // and a work request's length has 32 bits

// Which of the device's completion vectors interrupts for a rail. A vector's interrupts go to one core.
int vector_of(const ibv_context& context, uint32_t number) {
  return static_cast<int>(number % static_cast<uint32_t>(std::max(context.num_comp_vectors, 1)));
}

// vector: see vector_of().
CompletionQueue make_completion_queue(const Adapter& adapter, uint32_t entries, ibv_comp_channel* channel, int vector) {
  if (static_cast<uint32_t>(adapter.limits().max_cqe) < entries)
    fail(adapter, "ibv_create_cq", EINVAL,
         "its completion queues hold too few entries: " + std::to_string(adapter.limits().max_cqe) + " of " +
             std::to_string(entries));
  CompletionQueue queue(library().create_cq(adapter.context(), static_cast<int>(entries), nullptr, channel, vector));
  if (queue == nullptr) fail(adapter, "ibv_create_cq", errno, "cannot make a completion queue");
  return queue;
}

std::string describe(const Adapter& adapter, int vector) {
  const Port& port = adapter.detail.port;
  std::string text = port.name + ", " + port.gid_type + ", " + port.address;
  if (!port.netdev.empty()) text += " on " + port.netdev;
  const int vectors = adapter.context()->num_comp_vectors;
  if (vectors > 1) text += ", completion vector " + std::to_string(vector) + " of " + std::to_string(vectors);
  return text;
}

}  // namespace

VerbsNic::VerbsNic(std::shared_ptr<OpenDevice> device, PortDetail detail, const RdmaOptions& options,
                   uint32_t vector_number)
    : adapter_(std::make_shared<Adapter>(std::move(device), std::move(detail), options)),
      completion_vector_(vector_of(*adapter_->context(), vector_number)),
      sleeper_(adapter_->context()),
      sends_(make_completion_queue(*adapter_, kSendEntries, sleeper_.channel(), completion_vector_)),
      receives_done_(make_completion_queue(*adapter_, kReceiveEntries, sleeper_.channel(), completion_vector_)),
      receives_(std::make_unique<Receives>(*adapter_)),
      fragment_slots_(
          std::make_unique<Slots>(*adapter_, kFragmentSlots, static_cast<uint32_t>(rdma::kFragmentBytesMax))),
      datagrams_(
          std::make_unique<Datagrams>(adapter_, sends_.get(), receives_done_.get(), [this] { sleeper_.ring(); })),
      description_(describe(*adapter_, completion_vector_)),
      is_port_up_(adapter_->detail.port.is_active),
      speed_mbps_(adapter_->detail.port.speed_mbps),
      budget_(kSendsOutstanding) {
  Endpoint endpoint = adapter_->detail.endpoint;
  endpoint.queue_pair = datagrams_->number();
  endpoint.queue_key = datagrams_->key();
  endpoint_ = encode(endpoint);
  limits_.work_bytes_max = std::min(adapter_->detail.work_bytes_max, kWorkBytesMax);
  limits_.path_works_max = kPathWorks;
  limits_.ordered_paths = true;
  limits_.names_imm_paths = true;
  limits_.takes_gpu_memory = true;
  adapter_->device->nics.push_back(this);
}

VerbsNic::~VerbsNic() { std::erase(adapter_->device->nics, this); }

// The device stays open, for registrations and for sleepers.
void VerbsNic::close() {
  datagrams_.reset();
  fragment_slots_.reset();
  receives_.reset();
}

bool VerbsNic::shares_registrations_with(const rdma::Nic& other) const {
  return static_cast<const VerbsNic&>(other).adapter_->device == adapter_->device;
}

int VerbsNic::nearness(std::span<const uint8_t> peer_endpoint) const {
  const std::optional<Endpoint> peer = decode_endpoint(peer_endpoint);
  return peer ? verbs::nearness(adapter_->detail.endpoint, *peer) : 0;
}

std::unique_ptr<rdma::Registration> VerbsNic::register_memory(std::byte* base, uint64_t length_bytes, Access access) {
  return std::make_unique<VerbsRegistration>(adapter_, base, length_bytes, access);
}

std::unique_ptr<rdma::Registration> VerbsNic::register_gpu_memory(const device::GpuMemory& memory, Access access) {
  return std::make_unique<VerbsRegistration>(adapter_, memory, access);
}

void VerbsNic::send_datagram(std::span<const uint8_t> peer_endpoint, std::span<const uint8_t> bytes) {
  if (fatal_.empty()) datagrams_->send(peer_endpoint, bytes);
}

// Datagrams have at most 1024 bytes, and pass where longer packets do not.
std::string VerbsNic::silence_hint(std::span<const uint8_t> peer_endpoint) const {
  const std::optional<Endpoint> peer = decode_endpoint(peer_endpoint);
  const uint8_t mtu = peer ? std::min(adapter_->detail.endpoint.mtu, peer->mtu) : uint8_t{0};
  if (mtu <= IBV_MTU_1024) return {};
  return "packets have up to " + std::to_string(128u << mtu) +
         " bytes (the path MTU): if a switch on the way drops such, RdmaOptions(path_mtu=1024) makes them shorter";
}

std::unique_ptr<rdma::NicPath> VerbsNic::make_path() {
  if (!fatal_.empty()) throw TransportError("make_path", EIO, name() + ": the device is gone: " + fatal_);
  if (free_.empty()) {
    if (paths_.size() == kPathsMax) throw TransportError("make_path", ENOSPC, name() + ": too many paths");
    free_.push_back(static_cast<uint32_t>(paths_.size()));
    paths_.push_back(nullptr);
  }
  const uint32_t index = free_.back();
  auto path = std::make_unique<VerbsPath>(*this, index);
  free_.pop_back();
  paths_[index] = path.get();
  by_queue_pair_[path->messages_->qp_num] = path.get();
  by_queue_pair_[path->works_->qp_num] = path.get();
  return path;
}

// Slots that a frozen peer keeps are not missed by others: more are allocated then, at most one for each of the budget.
uint32_t VerbsNic::take_fragment_slot() {
  if (const uint32_t slot = fragment_slots_->take(); slot != Slots::kNone) return slot;
  try {
    fragment_slots_->grow();
  } catch (const TransportError&) {  // a limit on locked memory: retried with the next request
    return Slots::kNone;
  }
  return fragment_slots_->take();
}

VerbsPath* VerbsNic::path_by_queue_pair(uint32_t number) {
  if (number == last_number_) return last_path_;
  const auto found = by_queue_pair_.find(number);
  if (found == by_queue_pair_.end()) return nullptr;
  last_number_ = number;
  last_path_ = found->second;
  return last_path_;
}

void VerbsNic::forget_queue_pairs(const VerbsPath& path) {
  if (path.messages_ != nullptr) by_queue_pair_.erase(path.messages_->qp_num);
  if (path.works_ != nullptr) by_queue_pair_.erase(path.works_->qp_num);
  last_number_ = 0;
  last_path_ = nullptr;
}

void VerbsNic::remove(const VerbsPath& path) {
  if (path.index_ >= paths_.size() || paths_[path.index_] != &path) return;  // its constructor threw
  std::erase_if(by_queue_pair_, [&](const auto& entry) { return entry.second == &path; });
  last_number_ = 0;
  std::erase(draining_, path.index_);
  std::erase(troubled_, path.index_);
  budget_owed_ += path.works_outstanding();
  paths_[path.index_] = nullptr;
  freed_.push_back(path.index_);
}

// --- progress ---

uint32_t VerbsNic::poll(rdma::NicEvents& events) {
  if (!fatal_.empty()) {
    const uint32_t told = is_fatal_told_ ? 0 : 1;
    on_fatal(fatal_, events);
    return told + drain_paths(events);
  }
  uint32_t told = 0;
  try {
    told += take_receives(events);
    receives_->replenish();
    told += take_sends(events);
    told += datagrams_->send_waiting();
    told += watch_device(events);
  } catch (const TransportError& error) {  // for datagrams: without them no new peer can be reached
    on_fatal(error.what(), events);
  }
  if (!troubled_.empty()) told += tell_troubles(events);
  if (!draining_.empty()) told += drain_paths(events);
  return told;
}

uint32_t VerbsNic::tell_troubles(rdma::NicEvents& events) {
  uint32_t told = 0;
  for (const uint32_t index : std::exchange(troubled_, {})) {
    VerbsPath* path = path_by_index(index);
    if (path == nullptr || path->trouble_.empty()) continue;
    path->tell_broken(events, path->is_trouble_peers_, std::exchange(path->trouble_, {}));
    ++told;
  }
  return told;
}

uint32_t VerbsNic::drain_paths(rdma::NicEvents& events) {
  const int64_t now = now_ns();
  const auto is_drained = [&](uint32_t index) {
    VerbsPath* path = path_by_index(index);
    if (path == nullptr) return true;
    const bool is_over = path->drain(events, now);
    if (is_over && !adapter_->detail.port.is_hardware) receives_->make_up_for_path();
    return is_over;
  };
  return static_cast<uint32_t>(std::erase_if(draining_, is_drained));
}

bool VerbsNic::has_arrivals() {
  if (!fatal_.empty()) return !is_fatal_told_;
  if (!troubled_.empty() || port_news_ != nullptr) return true;
  // Their rings may have been consumed by arm().
  if (sleeper_.has_device_news() || datagrams_->has_answers()) return true;
  refill(sends_.get(), &send_batch_);
  refill(receives_done_.get(), &receive_batch_);
  return !send_batch_.is_empty() || !receive_batch_.is_empty();
}

// The device reports when a draining queue pair is idle, but not if it failed to report it in time.
Deadline VerbsNic::next_timer() const {
  Deadline next = kNoDeadline;
  for (const uint32_t index : draining_) {
    const VerbsPath* path = path_by_index(index);
    if (path == nullptr) continue;
    const int64_t now = now_ns();
    next =
        std::min(next, now < path->idle_by_ns_ ? path->idle_by_ns_ : std::min(now + kDeviceLookNs, path->give_up_ns_));
  }
  return next;
}

void VerbsNic::abandon_after_fork() {
  sleeper_.abandon_after_fork();
  if (std::exchange(adapter_->device->is_abandoned, true)) return;
  ::close(adapter_->context()->async_fd);
  ::close(adapter_->context()->cmd_fd);
}

}  // namespace crossrail::verbs
