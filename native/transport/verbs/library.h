// libibverbs, opened at run time: what is built here also runs on machines without RDMA. Its structures and inline
// functions come from its headers; the functions that it exports are called through this table.
#pragma once

#include <infiniband/verbs.h>

#include <string>

// The headers hide these behind macros of the same name that call what the library exports.
#undef ibv_query_port
#undef ibv_reg_mr

namespace crossrail::verbs {

struct Library {
  ibv_device** (*get_device_list)(int* count);
  void (*free_device_list)(ibv_device** list);
  const char* (*get_device_name)(ibv_device* device);
  ibv_context* (*open_device)(ibv_device* device);
  int (*close_device)(ibv_context* context);
  int (*query_device)(ibv_context* context, ibv_device_attr* attributes);
  int (*query_port_old)(ibv_context* context, uint8_t port, _compat_ibv_port_attr* attributes);
  ssize_t (*query_gid_table)(ibv_context* context, ibv_gid_entry* entries, size_t entries_max, uint32_t flags,
                             size_t entry_bytes);
  int (*query_pkey)(ibv_context* context, uint8_t port, int index, __be16* key);
  int (*get_async_event)(ibv_context* context, ibv_async_event* event);
  void (*ack_async_event)(ibv_async_event* event);
  ibv_pd* (*alloc_pd)(ibv_context* context);
  int (*dealloc_pd)(ibv_pd* pd);
  ibv_mr* (*reg_mr)(ibv_pd* pd, void* address, size_t length, uint64_t iova, unsigned access);
  // Null before rdma-core 34.
  ibv_mr* (*reg_dmabuf_mr)(ibv_pd* pd, uint64_t offset, size_t length, uint64_t iova, int fd, int access);
  int (*dereg_mr)(ibv_mr* mr);
  ibv_comp_channel* (*create_comp_channel)(ibv_context* context);
  int (*destroy_comp_channel)(ibv_comp_channel* channel);
  ibv_cq* (*create_cq)(ibv_context* context, int entries, void* user, ibv_comp_channel* channel, int vector);
  int (*destroy_cq)(ibv_cq* cq);
  int (*get_cq_event)(ibv_comp_channel* channel, ibv_cq** cq, void** user);
  void (*ack_cq_events)(ibv_cq* cq, unsigned count);
  ibv_srq* (*create_srq)(ibv_pd* pd, ibv_srq_init_attr* attributes);
  int (*destroy_srq)(ibv_srq* srq);
  ibv_qp* (*create_qp)(ibv_pd* pd, ibv_qp_init_attr* attributes);
  int (*modify_qp)(ibv_qp* qp, ibv_qp_attr* attributes, int mask);
  int (*destroy_qp)(ibv_qp* qp);
  ibv_ah* (*create_ah)(ibv_pd* pd, ibv_ah_attr* attributes);
  int (*destroy_ah)(ibv_ah* ah);
  const char* (*wc_status_str)(ibv_wc_status status);
  const char* (*event_type_str)(ibv_event_type type);
};

// [any] Opened by the first call and never closed. Null: not installed, or too old; *why says what and what helps.
const Library* find_library(std::string* why = nullptr);
// The same where it is known to be available.
const Library& library();
// For tests: use this table from now on; null: the real one again. Only while nothing of another is open.
void replace_library(const Library* table);

int query_port(ibv_context* context, uint8_t port, ibv_port_attr* attributes);

}  // namespace crossrail::verbs
