// A libibverbs of our own behind the real one's table, with one device whose faults the test decides on. Its queue
// pairs move nothing: a work request is remembered, and completes when the test says so.
#pragma once

#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <deque>
#include <functional>
#include <map>
#include <set>
#include <utility>
#include <vector>

#include "transport/verbs/library.h"

namespace crossrail::verbs_test {

struct FakeQueuePair {
  ibv_qp qp{};
  ibv_qp_attr last_address{};         // of the change to ready-to-receive
  uint16_t partition_index = 0xffff;  // of the change to initialised
  ibv_qp_state state = IBV_QPS_RESET;
  std::deque<std::pair<uint64_t, bool>> posted;  // id, signalled
  uint32_t inline_bytes = 0;
};

// What the test turns. One at a time: the functions of a table have no place for a pointer to it.
struct Fake {
  // --- the device ---
  int link_layer = IBV_LINK_LAYER_ETHERNET;
  int transport_type = IBV_TRANSPORT_IB;
  ibv_port_state port_state = IBV_PORT_ACTIVE;
  union ibv_gid gid{};
  uint32_t gid_type = IBV_GID_TYPE_ROCE_V2;
  uint32_t gid_index = 0;
  std::vector<ibv_gid_entry> more_gids;
  uint32_t inline_bytes_max = 1024;
  std::vector<uint16_t> partitions{0xffff};  // the table of P_Keys
  uint8_t port_flags = 0;                    // IBV_QPF_GRH_REQUIRED
  ibv_mtu mtu = IBV_MTU_4096;
  // The address handle of a route; may be called by any thread. Null: the neighbour does not answer.
  std::function<ibv_ah*(const ibv_ah_attr&)> find_route = [](const ibv_ah_attr&) { return new ibv_ah{}; };
  void have_completion_vectors(int count);
  // --- faults ---
  int register_error = 0;
  int dma_buf_error = 0;
  std::vector<std::pair<int, uint64_t>> dma_bufs;  // descriptor and offset of each that was registered
  unsigned register_refuses_flags = 0;             // with EFAULT
  int deregister_error = 0;
  int posts_until_error = -1;  // work requests; -1: never
  int post_error = ENOMEM;
  bool flushes = true;                  // queue pairs in error state give back what was posted
  bool says_idle = true;                // and say that they take no receives any more
  uint64_t receives_room = UINT64_MAX;  // in queues that paths share
  bool is_sink = false;                 // completes what is posted at once, remembers nothing
  // --- what happened ---
  uint64_t posted_count = 0;
  std::vector<int> completion_vectors;  // of each completion queue
  ibv_sge last_entry{};                 // of what was posted last
  uint64_t last_remote_address = 0;
  uint64_t inline_count = 0;
  uint64_t doorbells = 0;
  uint64_t receives_posted = 0;  // to queues that paths share
  std::deque<ibv_async_event> events;
  std::deque<ibv_wc> sends;
  std::deque<ibv_wc> receives;
  std::map<uint32_t, FakeQueuePair*> queue_pairs;
  std::set<uint64_t> keys;                           // of registered memory
  uint64_t registrations = 0;                        // made so far
  std::vector<std::pair<void*, size_t>> registered;  // what they were of, those of dma-bufs aside
  uint32_t domains = 0;                              // protection domains that there are
  // --- how it rings, as ConnectX and libmlx5 have it ---
  // A queue is armed under a number, which grows with each ring that is taken from the channel. It rings once, and a
  // later arming under the number that it rang for is a repetition.
  struct Bell {
    uint32_t number = 0;
    uint32_t rang_for = ~0u;
    bool is_armed = false;
  };
  std::map<ibv_cq*, Bell> bells;
  std::deque<ibv_cq*> rings;  // in the channel, a byte in its pipe for each
  int channel_in = -1;

  Fake();
  ~Fake();
  // Completes the oldest `count` works of a queue pair; the last with `status`, the others well.
  void complete(FakeQueuePair& queue_pair, size_t count, ibv_wc_status status = IBV_WC_SUCCESS);
  // What a completion does to a queue that is armed, in two steps, since the channel has it later.
  bool ring(ibv_cq* queue);
  void deliver_ring(ibv_cq* queue);
  void tell(ibv_event_type type, ibv_qp* queue_pair = nullptr);
  FakeQueuePair& queue_pair(uint32_t number) { return *queue_pairs.at(number); }
};

inline Fake* g_fake = nullptr;

inline ibv_device g_device{};
inline ibv_device* g_list[2] = {&g_device, nullptr};
inline ibv_context g_context{};
inline ibv_pd g_domain{};
inline ibv_cq g_sends{};
inline ibv_cq g_receives{};
inline std::vector<ibv_srq> g_receive_queues(2);
inline uint32_t g_numbers = 16;
inline uint64_t g_memory_key = 1;

inline int take_completions(std::deque<ibv_wc>& from, int count, ibv_wc* out) {
  int taken = 0;
  while (taken < count && !from.empty()) {
    out[taken++] = from.front();
    from.pop_front();
  }
  return taken;
}

inline int fake_poll(ibv_cq* queue, int count, ibv_wc* out) {
  return take_completions(queue == &g_sends ? g_fake->sends : g_fake->receives, count, out);
}

inline ibv_wc completion_of(uint64_t id, const ibv_qp& queue_pair, ibv_wc_status status) {
  ibv_wc completion{};
  completion.wr_id = id;
  completion.status = status;
  completion.qp_num = queue_pair.qp_num;
  return completion;
}

inline int fake_post_send(ibv_qp* qp, ibv_send_wr* request, ibv_send_wr** refused) {
  Fake& fake = *g_fake;
  FakeQueuePair& queue_pair = *fake.queue_pairs.at(qp->qp_num);
  ++fake.doorbells;
  for (; request != nullptr; request = request->next) {
    if (fake.posts_until_error == 0) {
      *refused = request;
      return fake.post_error;
    }
    if (fake.posts_until_error > 0) --fake.posts_until_error;
    ++fake.posted_count;
    if (request->num_sge > 0) fake.last_entry = *request->sg_list;
    fake.last_remote_address = request->wr.rdma.remote_addr;
    if ((request->send_flags & IBV_SEND_INLINE) != 0) ++fake.inline_count;
    const bool is_signalled = (request->send_flags & IBV_SEND_SIGNALED) != 0;
    if (!fake.is_sink) queue_pair.posted.emplace_back(request->wr_id, is_signalled);
    if (fake.is_sink && is_signalled) fake.sends.push_back(completion_of(request->wr_id, *qp, IBV_WC_SUCCESS));
  }
  return 0;
}

inline int fake_post_receives(ibv_srq*, ibv_recv_wr* request, ibv_recv_wr** refused) {
  for (; request != nullptr; request = request->next) {
    if (g_fake->receives_room == 0) {
      *refused = request;
      return ENOMEM;
    }
    --g_fake->receives_room;
    ++g_fake->receives_posted;
  }
  return 0;
}

// --- the table ---

inline int fake_query_port(ibv_context*, uint8_t, _compat_ibv_port_attr* out) {
  auto* attributes = reinterpret_cast<ibv_port_attr*>(out);
  attributes->state = g_fake->port_state;
  attributes->max_mtu = attributes->active_mtu = g_fake->mtu;
  attributes->flags = g_fake->port_flags;
  attributes->pkey_tbl_len = static_cast<uint16_t>(g_fake->partitions.size());
  attributes->max_msg_sz = 1u << 31;
  attributes->lid = 5;
  attributes->link_layer = static_cast<uint8_t>(g_fake->link_layer);
  return 0;
}

inline int fake_query_device(ibv_context*, ibv_device_attr* attributes) {
  std::memset(attributes, 0, sizeof *attributes);
  attributes->phys_port_cnt = 1;
  attributes->max_cqe = 1 << 20;
  attributes->max_srq_wr = 1 << 15;
  attributes->max_qp_rd_atom = attributes->max_qp_init_rd_atom = 16;
  return 0;
}

inline ssize_t fake_query_gids(ibv_context*, ibv_gid_entry* entries, size_t, uint32_t, size_t) {
  entries[0] = {};
  entries[0].gid = g_fake->gid;
  entries[0].gid_index = g_fake->gid_index;
  entries[0].port_num = 1;
  entries[0].gid_type = g_fake->gid_type;
  std::ranges::copy(g_fake->more_gids, entries + 1);
  return static_cast<ssize_t>(1 + g_fake->more_gids.size());
}

inline int fake_query_partition(ibv_context*, uint8_t, int index, __be16* key) {
  *key = static_cast<__be16>(__builtin_bswap16(g_fake->partitions.at(static_cast<size_t>(index))));
  return 0;
}

inline int fake_get_async_event(ibv_context*, ibv_async_event* event) {
  if (g_fake->events.empty()) return -1;
  *event = g_fake->events.front();
  g_fake->events.pop_front();
  return 0;
}

inline ibv_mr* fake_register(ibv_pd*, void* address, size_t length, uint64_t, unsigned access) {
  const bool refuses = (access & g_fake->register_refuses_flags) != 0;
  if (g_fake->register_error != 0 || refuses) {
    errno = refuses ? EFAULT : g_fake->register_error;
    return nullptr;
  }
  auto* memory = new ibv_mr{};
  memory->addr = address;
  memory->length = length;
  memory->lkey = memory->rkey = static_cast<uint32_t>(g_memory_key++);
  g_fake->keys.insert(memory->rkey);
  ++g_fake->registrations;
  g_fake->registered.emplace_back(address, length);
  return memory;
}

inline ibv_mr* fake_register_dma_buf(ibv_pd*, uint64_t offset, size_t length, uint64_t iova, int fd, int) {
  if (g_fake->dma_buf_error != 0) {
    errno = g_fake->dma_buf_error;
    return nullptr;
  }
  auto* memory = new ibv_mr{};
  memory->addr = reinterpret_cast<void*>(iova);  // NOLINT(performance-no-int-to-ptr)
  memory->length = length;
  memory->lkey = memory->rkey = static_cast<uint32_t>(g_memory_key++);
  g_fake->keys.insert(memory->rkey);
  ++g_fake->registrations;
  g_fake->dma_bufs.emplace_back(fd, offset);
  return memory;
}

inline int fake_deregister(ibv_mr* memory) {
  if (g_fake->deregister_error != 0) return g_fake->deregister_error;
  g_fake->keys.erase(memory->rkey);
  delete memory;
  return 0;
}

inline ibv_comp_channel* fake_create_channel(ibv_context*) {
  auto* channel = new ibv_comp_channel{};
  int ends[2];
  if (::pipe(ends) != 0) return nullptr;
  channel->fd = ends[0];
  channel->refcnt = g_fake->channel_in = ends[1];
  return channel;
}

inline int fake_destroy_channel(ibv_comp_channel* channel) {
  ::close(channel->fd);
  ::close(channel->refcnt);
  delete channel;
  return 0;
}

inline int fake_arm(ibv_cq* queue, int) {
  Fake::Bell& bell = g_fake->bells[queue];
  bell.is_armed = bell.rang_for != bell.number;
  return 0;
}

inline int fake_take_ring(ibv_comp_channel* channel, ibv_cq** queue, void** user) {
  if (g_fake->rings.empty()) return -1;
  char byte;
  if (::read(channel->fd, &byte, 1) != 1) std::abort();
  *queue = g_fake->rings.front();
  *user = nullptr;
  g_fake->rings.pop_front();
  ++g_fake->bells[*queue].number;
  return 0;
}

inline ibv_cq* fake_create_cq(ibv_context* context, int, void*, ibv_comp_channel*, int vector) {
  g_fake->completion_vectors.push_back(vector);
  static bool is_second = false;
  ibv_cq* queue = is_second ? &g_receives : &g_sends;  // VerbsNic makes that of sends first
  is_second = !is_second;
  queue->context = context;
  return queue;
}

inline ibv_srq* fake_create_srq(ibv_pd*, ibv_srq_init_attr*) {
  static size_t which = 0;
  ibv_srq* queue = &g_receive_queues[which++ % 2];
  queue->context = &g_context;
  return queue;
}

inline ibv_qp* fake_create_qp(ibv_pd*, ibv_qp_init_attr* wanted) {
  if (wanted->cap.max_inline_data > g_fake->inline_bytes_max) {
    errno = EINVAL;
    return nullptr;
  }
  auto* made = new FakeQueuePair;
  made->qp.context = &g_context;
  made->qp.qp_context = wanted->qp_context;
  made->qp.qp_num = g_numbers++;
  made->qp.send_cq = wanted->send_cq;
  made->inline_bytes = wanted->cap.max_inline_data;
  g_fake->queue_pairs[made->qp.qp_num] = made;
  return &made->qp;
}

inline int fake_modify_qp(ibv_qp* qp, ibv_qp_attr* attributes, int) {
  FakeQueuePair& queue_pair = *g_fake->queue_pairs.at(qp->qp_num);
  queue_pair.state = attributes->qp_state;
  if (attributes->qp_state == IBV_QPS_INIT) queue_pair.partition_index = attributes->pkey_index;
  if (attributes->qp_state == IBV_QPS_RTR) queue_pair.last_address = *attributes;
  if (attributes->qp_state != IBV_QPS_ERR) return 0;
  if (g_fake->flushes) {
    for (const auto& [id, is_signalled] : queue_pair.posted)
      g_fake->sends.push_back(completion_of(id, *qp, IBV_WC_WR_FLUSH_ERR));
    queue_pair.posted.clear();
  }
  if (g_fake->says_idle) g_fake->tell(IBV_EVENT_QP_LAST_WQE_REACHED, qp);
  return 0;
}

inline int fake_destroy_qp(ibv_qp* qp) {
  FakeQueuePair* queue_pair = g_fake->queue_pairs.at(qp->qp_num);
  g_fake->queue_pairs.erase(qp->qp_num);
  delete queue_pair;
  return 0;
}

inline verbs::Library fake_table() {
  verbs::Library table{};
  table.get_device_list = [](int* count) {
    *count = 1;
    return g_list;
  };
  table.free_device_list = [](ibv_device**) {};
  table.get_device_name = [](ibv_device*) -> const char* { return "fake0"; };
  table.open_device = [](ibv_device*) { return &g_context; };
  table.close_device = [](ibv_context*) { return 0; };
  table.query_device = fake_query_device;
  table.query_port_old = fake_query_port;
  table.query_gid_table = fake_query_gids;
  table.query_pkey = fake_query_partition;
  table.get_async_event = fake_get_async_event;
  table.ack_async_event = [](ibv_async_event*) {};
  table.alloc_pd = [](ibv_context*) {
    ++g_fake->domains;
    return &g_domain;
  };
  table.dealloc_pd = [](ibv_pd*) {
    --g_fake->domains;
    return 0;
  };
  table.reg_mr = fake_register;
  table.reg_dmabuf_mr = fake_register_dma_buf;
  table.dereg_mr = fake_deregister;
  table.create_comp_channel = fake_create_channel;
  table.destroy_comp_channel = fake_destroy_channel;
  table.create_cq = fake_create_cq;
  table.destroy_cq = [](ibv_cq*) { return 0; };
  table.get_cq_event = fake_take_ring;
  table.ack_cq_events = [](ibv_cq*, unsigned) {};
  table.create_srq = fake_create_srq;
  table.destroy_srq = [](ibv_srq*) { return 0; };
  table.create_qp = fake_create_qp;
  table.modify_qp = fake_modify_qp;
  table.destroy_qp = fake_destroy_qp;
  table.create_ah = [](ibv_pd*, ibv_ah_attr* route) { return g_fake->find_route(*route); };
  table.destroy_ah = [](ibv_ah* ah) {
    delete ah;
    return 0;
  };
  table.wc_status_str = [](ibv_wc_status) -> const char* { return "status"; };
  table.event_type_str = [](ibv_event_type) -> const char* { return "event"; };
  return table;
}

inline Fake::Fake() {
  g_fake = this;
  gid.raw[10] = gid.raw[11] = 0xff;
  gid.raw[12] = 192;
  gid.raw[13] = 168;
  gid.raw[15] = 1;
  int ends[2] = {-1, -1};
  if (::pipe(ends) != 0) std::abort();
  g_device.transport_type = static_cast<ibv_transport_type>(transport_type);
  g_context = {};
  g_context.device = &g_device;
  g_context.async_fd = ends[0];
  g_context.cmd_fd = ends[1];
  g_context.ops.poll_cq = fake_poll;
  g_context.ops.req_notify_cq = fake_arm;
  g_context.ops.post_send = fake_post_send;
  g_context.ops.post_recv = [](ibv_qp*, ibv_recv_wr*, ibv_recv_wr**) { return 0; };
  g_context.ops.post_srq_recv = fake_post_receives;
  static const verbs::Library table = fake_table();
  verbs::replace_library(&table);
}

inline void Fake::have_completion_vectors(int count) { g_context.num_comp_vectors = count; }

inline Fake::~Fake() {
  verbs::replace_library(nullptr);
  ::close(g_context.async_fd);
  ::close(g_context.cmd_fd);
  g_fake = nullptr;
}

inline void Fake::complete(FakeQueuePair& queue_pair, size_t count, ibv_wc_status status) {
  for (size_t i = 1; i <= count; ++i) {
    const auto [id, is_signalled] = queue_pair.posted.front();
    queue_pair.posted.pop_front();
    const bool is_bad = i == count && status != IBV_WC_SUCCESS;
    if (is_signalled || is_bad) sends.push_back(completion_of(id, queue_pair.qp, is_bad ? status : IBV_WC_SUCCESS));
  }
}

inline bool Fake::ring(ibv_cq* queue) {
  Bell& bell = bells[queue];
  if (!std::exchange(bell.is_armed, false)) return false;
  bell.rang_for = bell.number;
  return true;
}

inline void Fake::deliver_ring(ibv_cq* queue) {
  rings.push_back(queue);
  if (::write(channel_in, "r", 1) != 1) std::abort();
}

inline void Fake::tell(ibv_event_type type, ibv_qp* queue_pair) {
  ibv_async_event event{};
  event.event_type = type;
  if (queue_pair != nullptr) {
    event.element.qp = queue_pair;
  } else {
    event.element.port_num = 1;
  }
  events.push_back(event);
}

}  // namespace crossrail::verbs_test
