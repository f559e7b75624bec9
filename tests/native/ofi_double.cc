#include "ofi_double.h"

#include <algorithm>
#include <cstring>
#include <utility>

#include "fake_cuda.h"
#include "ofi_double_infos.h"
#include "ofi_double_world.h"

namespace crossrail::test {

namespace {

using namespace libfabric_double;

constexpr size_t kNameBytes = 32;

LibfabricDouble::World* g_world = nullptr;

int get_info(uint32_t version, const char*, const char*, uint64_t, const fi_info* hints, fi_info** list) {
  if (version > g_world->settings.version) return -FI_ENOSYS;
  return offer_infos(g_world->settings, hints, g_world->violations, list);
}

uint32_t version() { return g_world->settings.version; }
const char* error_text(int code) { return code == FI_EAGAIN ? "Try again" : "an error of the double"; }

// --- memory ---

int close_memory(struct fid* object) {
  auto* memory = reinterpret_cast<Memory*>(object);
  memory->domain->memories.erase(memory->fid.key);
  delete memory;
  return 0;
}
fi_ops g_memory_ops = {.size = sizeof(fi_ops), .close = close_memory};

int register_memory(struct fid* object, const fi_mr_attr* attributes, uint64_t flags, fid_mr** out) {
  auto* domain = reinterpret_cast<Domain*>(object);
  if (attributes->iov_count != 1) return -FI_EINVAL;
  if (g_world->settings.register_error != 0) return -g_world->settings.register_error;
  const bool is_gpu = attributes->iface == FI_HMEM_CUDA;
  if (is_gpu && !domain->has_hmem) g_world->violate("memory of a GPU, and FI_HMEM was not asked for");
  if (is_gpu && (flags & FI_MR_DMABUF) == 0) return -FI_EOPNOTSUPP;  // no nvidia-peermem here
  auto* memory = new Memory;
  memory->fid.fid.ops = &g_memory_ops;
  memory->fid.key = g_world->next_key++;
  memory->fid.mem_desc = memory;
  memory->domain = domain;
  if (is_gpu) {
    const fi_mr_dmabuf& shared = *attributes->dmabuf;
    memory->base = static_cast<std::byte*>(shared.base_addr) + shared.offset;
    memory->bytes = shared.len;
    memory->reached = g_gpu->reach(shared.fd, shared.offset, shared.len);
  } else {
    memory->base = memory->reached = static_cast<std::byte*>(attributes->mr_iov->iov_base);
    memory->bytes = attributes->mr_iov->iov_len;
  }
  memory->access = attributes->access;
  domain->memories[memory->fid.key] = memory;
  *out = &memory->fid;
  return 0;
}

// --- queues ---

ssize_t read_sunk(void* buffer, size_t count) {
  auto* out = static_cast<fi_cq_data_entry*>(buffer);
  size_t got = 0;
  for (; got < count && !g_world->sunk.empty(); ++got) {
    out[got] = {g_world->sunk.back(), FI_WRITE | FI_RMA, 0, nullptr, 0};
    g_world->sunk.pop_back();
  }
  return static_cast<ssize_t>(got);
}

ssize_t read_queue(fid_cq* object, void* buffer, size_t count) {
  auto* queue = reinterpret_cast<Queue*>(object);
  if (!g_world->sunk.empty()) return read_sunk(buffer, count);
  if (g_world->broken_queues.contains(queue->device)) return -FI_EIO;
  if (queue->entries.empty()) g_world->progress();
  if (queue->entries.empty()) return -FI_EAGAIN;
  if (queue->entries.front().error != 0) return -FI_EAVAIL;
  auto* out = static_cast<fi_cq_data_entry*>(buffer);
  size_t got = 0;
  while (got < count && !queue->entries.empty() && queue->entries.front().error == 0) {
    out[got++] = queue->entries.front().entry;
    queue->entries.pop_front();
  }
  return static_cast<ssize_t>(got);
}

ssize_t read_error(fid_cq* object, fi_cq_err_entry* out, uint64_t) {
  auto* queue = reinterpret_cast<Queue*>(object);
  if (queue->entries.empty() || queue->entries.front().error == 0) return -FI_EAGAIN;
  const Completion completion = queue->entries.front();
  queue->entries.pop_front();
  out->op_context = completion.entry.op_context;
  out->flags = completion.entry.flags;
  out->err = completion.error;
  out->prov_errno = completion.status;
  return 1;
}

const char* queue_error(fid_cq*, int, const void*, char*, size_t) { return "said by the double's device"; }

int close_queue(struct fid* object) {
  delete reinterpret_cast<Queue*>(object);
  return 0;
}
int no_control(struct fid*, int, void*) { return -FI_ENOSYS; }
fi_ops g_queue_fid_ops = {.size = sizeof(fi_ops), .close = close_queue, .control = no_control};
fi_ops_cq g_queue_ops = {.size = sizeof(fi_ops_cq), .read = read_queue, .readerr = read_error, .strerror = queue_error};

int open_queue(fid_domain* domain, fi_cq_attr* attributes, fid_cq** out, void*) {
  if (attributes->wait_obj != FI_WAIT_NONE) {
    if (!g_world->settings.offers_descriptor) return -FI_ENOSYS;
    g_world->violate("a queue that can be slept on is read through a software queue");
  }
  if (attributes->size > g_world->settings.queue_entries_max) return -FI_EINVAL;
  if (attributes->format != FI_CQ_FORMAT_DATA) return -FI_ENOSYS;
  auto* queue = new Queue;
  queue->fid.fid.ops = &g_queue_fid_ops;
  queue->fid.ops = &g_queue_ops;
  queue->size = attributes->size;
  queue->device = reinterpret_cast<Domain*>(domain)->device;
  *out = &queue->fid;
  return 0;
}

// --- addresses ---

int insert_address(fid_av* object, const void* address, size_t count, fi_addr_t* out, uint64_t, void*) {
  auto* addresses = reinterpret_cast<Addresses*>(object);
  if (count != 1) return -FI_EINVAL;
  PeerName name;
  std::memcpy(&name, address, sizeof name);
  if (name.number == 0) return 0;
  *out = addresses->next++;
  addresses->names[*out] = name;
  return 1;
}

int remove_address(fid_av* object, fi_addr_t* address, size_t, uint64_t) {
  auto* addresses = reinterpret_cast<Addresses*>(object);
  const auto found = addresses->names.find(*address);
  if (found == addresses->names.end()) return -FI_EINVAL;
  for (const Operation& operation : g_world->pending) {
    if (operation.to == found->second && operation.from->addresses == addresses)
      g_world->violate("an address was removed that operations are still under way to");
  }
  addresses->names.erase(found);
  return 0;
}

int close_addresses(struct fid* object) {
  auto* addresses = reinterpret_cast<Addresses*>(object);
  for (const Endpoint* endpoint : g_world->endpoints) {
    if (endpoint->addresses == addresses) g_world->violate("an address vector closed before its endpoints");
  }
  delete addresses;
  return 0;
}
fi_ops g_addresses_fid_ops = {.size = sizeof(fi_ops), .close = close_addresses};
fi_ops_av g_addresses_ops = {.size = sizeof(fi_ops_av), .insert = insert_address, .remove = remove_address};

int open_addresses(fid_domain*, fi_av_attr*, fid_av** out, void*) {
  auto* addresses = new Addresses;
  addresses->fid.fid.ops = &g_addresses_fid_ops;
  addresses->fid.ops = &g_addresses_ops;
  *out = &addresses->fid;
  return 0;
}

// --- endpoints ---

ssize_t post(Operation operation, fi_addr_t to) {
  Endpoint& endpoint = *operation.from;
  const auto& names = endpoint.addresses->names;
  if (!endpoint.is_enabled) g_world->violate("a post on an endpoint that is not enabled");
  if (!names.contains(to)) {
    g_world->violate("a post to an address that is not in the vector");
    return -FI_EINVAL;
  }
  if (endpoint.outstanding >= g_world->settings.transmit_size || g_world->chance(g_world->settings.refuse_percent))
    return -FI_EAGAIN;
  operation.to = names.at(to);
  operation.wait = static_cast<uint32_t>(g_world->random() % std::max(g_world->settings.delay_max, 1u));
  for (size_t i = 0; i < sizeof(fi_context2) / sizeof kContextMark; ++i)
    std::memcpy(static_cast<std::byte*>(operation.context) + i * sizeof kContextMark, &kContextMark,
                sizeof kContextMark);
  ++endpoint.outstanding;
  g_world->pending.push_back(std::move(operation));
  return 0;
}

void check_local(const Endpoint& endpoint, void* const* descriptors, const iovec& range) {
  const auto* memory = descriptors != nullptr ? static_cast<const Memory*>(*descriptors) : nullptr;
  if (memory == nullptr || memory->domain != endpoint.domain || range.iov_base < memory->base ||
      static_cast<std::byte*>(range.iov_base) + range.iov_len > memory->base + memory->bytes)
    g_world->violate("local memory without the descriptor of its registration");
}

ssize_t post_rma(Operation::Kind kind, fid_ep* object, const fi_msg_rma* message, uint64_t flags) {
  Operation operation{kind, reinterpret_cast<Endpoint*>(object), {}};
  if (message->rma_iov_count != 1 || message->iov_count > 1) {
    g_world->violate("RMA takes one local and one remote range");
    return -FI_EINVAL;
  }
  if (message->iov_count == 1) {
    check_local(*operation.from, message->desc, *message->msg_iov);
    const auto* memory = message->desc != nullptr ? static_cast<const Memory*>(*message->desc) : nullptr;
    if (memory == nullptr) return -FI_EINVAL;
    operation.local = memory->reached + (static_cast<std::byte*>(message->msg_iov->iov_base) - memory->base);
    operation.bytes = message->msg_iov->iov_len;
  }
  if (operation.bytes == 0 && operation.from->domain->direct)
    g_world->violate("an RMA without bytes, which efa-direct does not have everywhere");
  if (operation.bytes != message->rma_iov->len) g_world->violate("local and remote lengths differ");
  if (operation.bytes > g_world->settings.rma_bytes_max) g_world->violate("an RMA longer than the device's longest");
  operation.remote = message->rma_iov->addr;
  operation.key = message->rma_iov->key;
  operation.has_imm = (flags & FI_REMOTE_CQ_DATA) != 0;
  operation.imm = message->data;
  operation.context = message->context;
  return post(std::move(operation), message->addr);
}

ssize_t write_message(fid_ep* object, const fi_msg_rma* message, uint64_t flags) {
  return post_rma(Operation::Kind::kWrite, object, message, flags);
}
ssize_t sink_message(fid_ep*, const fi_msg_rma* message, uint64_t) {
  g_world->sunk.push_back(message->context);
  return 0;
}
ssize_t read_message(fid_ep* object, const fi_msg_rma* message, uint64_t flags) {
  return post_rma(Operation::Kind::kRead, object, message, flags);
}

ssize_t send_message(fid_ep* object, const fi_msg* message, uint64_t flags) {
  Operation operation{Operation::Kind::kSend, reinterpret_cast<Endpoint*>(object), {}};
  if ((flags & FI_DELIVERY_COMPLETE) != 0) g_world->violate("a message with a receipt, which fi_close() waits for");
  check_local(*operation.from, message->desc, *message->msg_iov);
  const auto* bytes = static_cast<const std::byte*>(message->msg_iov->iov_base);
  operation.payload.assign(bytes, bytes + message->msg_iov->iov_len);
  if (operation.payload.size() > 8192) g_world->violate("a message longer than the MTU");
  operation.context = message->context;
  if (g_world->send_error != 0) return g_world->send_error;
  return post(std::move(operation), message->addr);
}

ssize_t receive(fid_ep* object, void* buffer, size_t bytes, void* descriptor, fi_addr_t, void* context) {
  auto* endpoint = reinterpret_cast<Endpoint*>(object);
  check_local(*endpoint, &descriptor, {buffer, bytes});
  for (const Receive& posted : endpoint->receives) {
    if (posted.context == context) g_world->violate("a receive posted twice");
  }
  if (g_world->chance(g_world->settings.refuse_percent)) return -FI_EAGAIN;
  endpoint->receives.push_back({buffer, bytes, context});
  return 0;
}

int set_option(fid_t object, int, int option, const void* value, size_t) {
  auto* endpoint = reinterpret_cast<Endpoint*>(object);
  if (endpoint->is_enabled) g_world->violate("an option set after fi_enable");
  if (option == FI_OPT_SHARED_MEMORY_PERMITTED) {
    if (!g_world->settings.takes_shm_option) return -FI_EOPNOTSUPP;
    endpoint->shm_refused = !*static_cast<const bool*>(value);
    return 0;
  }
  return option == FI_OPT_CUDA_API_PERMITTED ? -FI_EINVAL : -FI_ENOPROTOOPT;  // as a build without CUDA
}

constexpr int kEmulatedWrite = -(0xefa << 16) + 2;  // FI_OPT_EFA_EMULATED_WRITE

int get_option(fid_t, int, int option, void* value, size_t* bytes) {
  if (option == kEmulatedWrite && *bytes == sizeof(bool)) {
    std::memcpy(value, &g_world->settings.emulates_writes, sizeof(bool));
    return 0;
  }
  if (option != FI_OPT_MAX_RMA_SIZE || *bytes < sizeof(size_t)) return -FI_ENOPROTOOPT;
  const size_t longest = g_world->settings.rma_bytes_max;
  std::memcpy(value, &longest, sizeof longest);
  return 0;
}

int get_name(fid_t object, void* address, size_t* bytes) {
  if (*bytes < kNameBytes) return -FI_ETOOSMALL;
  std::memset(address, 0, kNameBytes);
  std::memcpy(address, &reinterpret_cast<Endpoint*>(object)->name, sizeof(PeerName));
  *bytes = kNameBytes;
  return 0;
}

ssize_t read_error(fid_eq* object, fi_eq_err_entry* error, uint64_t) {
  auto* errors = reinterpret_cast<Errors*>(object);
  if (errors->statuses.empty()) return -FI_EAGAIN;
  error->err = FI_EHOSTUNREACH;
  error->prov_errno = errors->statuses.front();
  errors->statuses.pop_front();
  return sizeof *error;
}

int close_errors(struct fid* object) {
  auto* errors = reinterpret_cast<Errors*>(object);
  for (const Endpoint* endpoint : g_world->endpoints) {
    if (endpoint->errors == errors) g_world->violate("an event queue closed before its endpoints");
  }
  g_world->errors.erase(errors);
  delete errors;
  return 0;
}
fi_ops g_errors_fid_ops = {.size = sizeof(fi_ops), .close = close_errors};
fi_ops_eq g_errors_ops = {.size = sizeof(fi_ops_eq), .readerr = read_error};

int open_errors(fid_fabric*, fi_eq_attr*, fid_eq** out, void*) {
  auto* errors = new Errors;
  errors->fid.fid.ops = &g_errors_fid_ops;
  errors->fid.ops = &g_errors_ops;
  g_world->errors.insert(errors);
  *out = &errors->fid;
  return 0;
}

int bind_endpoint(struct fid* object, struct fid* other, uint64_t) {
  auto* endpoint = reinterpret_cast<Endpoint*>(object);
  if (other->ops == &g_queue_fid_ops) endpoint->queue = reinterpret_cast<Queue*>(other);
  if (other->ops == &g_addresses_fid_ops) {
    endpoint->addresses = reinterpret_cast<Addresses*>(other);
    // efa_base_ep_bind_av() until libfabric's pull request 10649, which came after 2.1.
    if (std::exchange(endpoint->addresses->is_bound, true) && g_world->settings.version < FI_VERSION(2, 2))
      return -FI_ENOSYS;
  }
  if (other->ops == &g_errors_fid_ops) endpoint->errors = reinterpret_cast<Errors*>(other);
  return 0;
}

int enable_endpoint(struct fid* object, int command, void*) {
  auto* endpoint = reinterpret_cast<Endpoint*>(object);
  if (command != FI_ENABLE) return -FI_ENOSYS;
  if (!endpoint->domain->direct && !endpoint->shm_refused) g_world->violate("the provider may use shared memory");
  if (endpoint->queue == nullptr) g_world->violate("an endpoint without a queue");
  if (endpoint->addresses == nullptr) g_world->violate("an endpoint without an address vector");
  if (endpoint->errors == nullptr) g_world->violate("an endpoint without an event queue: efa would abort()");
  endpoint->is_enabled = true;
  return 0;
}

// The queue pair is destroyed: nothing of it moves any more, and nothing of it completes.
int close_endpoint(struct fid* object) {
  auto* endpoint = reinterpret_cast<Endpoint*>(object);
  for (const Operation& operation : g_world->pending) {
    if (operation.from == endpoint) g_world->closed_under[endpoint->queue].push_back(operation.context);
  }
  std::erase_if(g_world->pending, [&](const Operation& operation) { return operation.from == endpoint; });
  g_world->endpoints.erase(endpoint);
  delete endpoint;
  return 0;
}

fi_ops g_endpoint_fid_ops = {
    .size = sizeof(fi_ops), .close = close_endpoint, .bind = bind_endpoint, .control = enable_endpoint};
fi_ops_ep g_endpoint_ops = {.size = sizeof(fi_ops_ep), .getopt = get_option, .setopt = set_option};
fi_ops_cm g_cm_ops = {.size = sizeof(fi_ops_cm), .getname = get_name};
fi_ops_msg g_msg_ops = {.size = sizeof(fi_ops_msg), .recv = receive, .sendmsg = send_message};
fi_ops_rma g_rma_ops = {.size = sizeof(fi_ops_rma), .readmsg = read_message, .writemsg = write_message};
fi_ops_rma g_sink_ops = {.size = sizeof(fi_ops_rma), .readmsg = read_message, .writemsg = sink_message};

int open_endpoint(fid_domain* object, fi_info*, fid_ep** out, void*) {
  auto* endpoint = new Endpoint;
  endpoint->fid.fid.ops = &g_endpoint_fid_ops;
  endpoint->fid.ops = &g_endpoint_ops;
  endpoint->fid.cm = &g_cm_ops;
  endpoint->fid.msg = &g_msg_ops;
  endpoint->fid.rma = g_world->settings.is_sink ? &g_sink_ops : &g_rma_ops;
  endpoint->domain = reinterpret_cast<Domain*>(object);
  endpoint->name = {endpoint->domain->device, g_world->next_number++};
  g_world->endpoints.insert(endpoint);
  *out = &endpoint->fid;
  return 0;
}

// --- domains and fabrics ---

int close_domain(struct fid* object) {
  auto* domain = reinterpret_cast<Domain*>(object);
  if (!domain->memories.empty()) g_world->violate("a domain closed before its registrations");
  for (const Endpoint* endpoint : g_world->endpoints) {
    if (endpoint->domain == domain) g_world->violate("a domain closed before its endpoints");
  }
  delete domain;
  return 0;
}
fi_ops g_domain_fid_ops = {.size = sizeof(fi_ops), .close = close_domain};
fi_ops_domain g_domain_ops = {
    .size = sizeof(fi_ops_domain), .av_open = open_addresses, .cq_open = open_queue, .endpoint = open_endpoint};
fi_ops_mr g_mr_ops = {.size = sizeof(fi_ops_mr), .regattr = register_memory};

int open_domain(fid_fabric*, fi_info* info, fid_domain** out, void*) {
  auto* domain = new Domain;
  domain->fid.fid.ops = &g_domain_fid_ops;
  domain->fid.ops = &g_domain_ops;
  domain->fid.mr = &g_mr_ops;
  domain->device = info->nic->bus_attr->attr.pci.bus_id;
  domain->has_hmem = (info->caps & FI_HMEM) != 0;
  domain->direct = std::strcmp(info->fabric_attr->name, "efa-direct") == 0;
  *out = &domain->fid;
  return 0;
}

int close_fabric(struct fid* object) {
  delete reinterpret_cast<fid_fabric*>(object);
  return 0;
}
int try_wait(fid_fabric*, struct fid**, int) { return -FI_ENOSYS; }
fi_ops g_fabric_fid_ops = {.size = sizeof(fi_ops), .close = close_fabric};
fi_ops_fabric g_fabric_ops = {
    .size = sizeof(fi_ops_fabric), .domain = open_domain, .eq_open = open_errors, .trywait = try_wait};

int open_fabric(fi_fabric_attr*, fid_fabric** out, void*) {
  auto* fabric = new fid_fabric{};
  fabric->fid.ops = &g_fabric_fid_ops;
  fabric->ops = &g_fabric_ops;
  *out = fabric;
  return 0;
}

}  // namespace

LibfabricDouble::LibfabricDouble(const DoubleSettings& settings, uint32_t seed) : world_(std::make_unique<World>()) {
  world_->settings = settings;
  world_->random.seed(seed);
  if (settings.is_sink) world_->sunk.reserve(1 << 16);
  g_world = world_.get();
}

LibfabricDouble::~LibfabricDouble() { g_world = nullptr; }

std::shared_ptr<const ofi::Library> LibfabricDouble::library() {
  return ofi::make_library({get_info, free_info, duplicate_info, open_fabric, version, error_text}, "the double");
}

std::vector<std::string>& LibfabricDouble::violations() { return world_->violations; }

void LibfabricDouble::freeze(uint32_t device, bool frozen) {
  if (frozen) {
    world_->frozen.insert(device);
  } else {
    world_->frozen.erase(device);
  }
}

void LibfabricDouble::fail_towards(uint32_t device, int status) {
  world_->failing.erase(device);
  if (status != 0) world_->failing[device] = status;
}

void LibfabricDouble::refuse_sends(int code) { world_->send_error = code; }

void LibfabricDouble::refuse(uint32_t percent) { world_->settings.refuse_percent = percent; }

void LibfabricDouble::refuse_registrations(int code) { world_->settings.register_error = code; }

void LibfabricDouble::break_queue(uint32_t device) { world_->broken_queues.insert(device); }

void LibfabricDouble::fail_receipt(uint32_t device) {
  for (Endpoint* endpoint : world_->endpoints) {
    if (endpoint->domain->device != device || endpoint->receives.empty()) continue;
    Completion completion{.error = FI_EHOSTUNREACH, .status = 0};
    completion.entry.op_context = endpoint->receives.back().context;
    completion.entry.flags = FI_RECV | FI_MSG;
    endpoint->queue->entries.push_back(completion);
  }
}

void LibfabricDouble::complete_late(uint32_t device) {
  for (auto& [queue, contexts] : world_->closed_under) {
    if (queue->device != device) continue;
    for (void* context : contexts) {
      Completion completion{.error = FI_ECANCELED, .status = 1};
      completion.entry.op_context = context;
      queue->entries.push_back(completion);
    }
    contexts.clear();
  }
}

void LibfabricDouble::fail_by_itself(int status) {
  for (Errors* errors : world_->errors) errors->statuses.push_back(status);
}

uint32_t LibfabricDouble::endpoints_open() const { return static_cast<uint32_t>(world_->endpoints.size()); }
uint32_t LibfabricDouble::operations_pending() const { return static_cast<uint32_t>(world_->pending.size()); }

}  // namespace crossrail::test
