#include "transport/verbs/library.h"

#include <cstring>

#include "util/dynamic_library.h"
#include "util/errors.h"

namespace crossrail::verbs {

namespace {

constexpr const char* kFile = "libibverbs.so.1";

struct Opened {
  Library table{};
  bool is_usable = false;
  std::string why;
};

template <typename Function>
bool bind(void* handle, const char* symbol, Function* function, std::string* why) {
  if (find_function(handle, symbol, function)) return true;
  *why = std::string(kFile) + " is too old, it has no " + symbol + ": rdma-core 33 or newer is needed";
  return false;
}

bool bind_all(void* handle, Library* t, std::string* why) {
  find_function(handle, "ibv_reg_dmabuf_mr", &t->reg_dmabuf_mr);  // may be missing
  const auto take = [&](const char* symbol, auto* function) { return bind(handle, symbol, function, why); };
  return take("ibv_get_device_list", &t->get_device_list) && take("ibv_free_device_list", &t->free_device_list) &&
         take("ibv_get_device_name", &t->get_device_name) && take("ibv_open_device", &t->open_device) &&
         take("ibv_close_device", &t->close_device) && take("ibv_query_device", &t->query_device) &&
         take("ibv_query_port", &t->query_port_old) && take("_ibv_query_gid_table", &t->query_gid_table) &&
         take("ibv_query_pkey", &t->query_pkey) && take("ibv_get_async_event", &t->get_async_event) &&
         take("ibv_ack_async_event", &t->ack_async_event) && take("ibv_alloc_pd", &t->alloc_pd) &&
         take("ibv_dealloc_pd", &t->dealloc_pd) && take("ibv_reg_mr_iova2", &t->reg_mr) &&
         take("ibv_dereg_mr", &t->dereg_mr) && take("ibv_create_comp_channel", &t->create_comp_channel) &&
         take("ibv_destroy_comp_channel", &t->destroy_comp_channel) && take("ibv_create_cq", &t->create_cq) &&
         take("ibv_destroy_cq", &t->destroy_cq) && take("ibv_get_cq_event", &t->get_cq_event) &&
         take("ibv_ack_cq_events", &t->ack_cq_events) && take("ibv_create_srq", &t->create_srq) &&
         take("ibv_destroy_srq", &t->destroy_srq) && take("ibv_create_qp", &t->create_qp) &&
         take("ibv_modify_qp", &t->modify_qp) && take("ibv_destroy_qp", &t->destroy_qp) &&
         take("ibv_create_ah", &t->create_ah) && take("ibv_destroy_ah", &t->destroy_ah) &&
         take("ibv_wc_status_str", &t->wc_status_str) && take("ibv_event_type_str", &t->event_type_str);
}

Opened open_library() {
  Opened opened;
  std::string why;
  void* const handle = load_library(kFile, 0, &why);
  if (handle == nullptr) {
    opened.why = std::string("cannot open ") + kFile + " (" + why +
                 "): install rdma-core's libibverbs (Debian, Ubuntu: libibverbs1 ibverbs-providers)";
    return opened;
  }
  opened.is_usable = bind_all(handle, &opened.table, &opened.why);
  return opened;
}

const Opened& opened() {
  static const Opened once = open_library();
  return once;
}

const Library* g_replacement = nullptr;

}  // namespace

void replace_library(const Library* table) { g_replacement = table; }

const Library* find_library(std::string* why) {
  if (g_replacement != nullptr) return g_replacement;
  if (why != nullptr) *why = opened().why;
  return opened().is_usable ? &opened().table : nullptr;
}

const Library& library() {
  if (g_replacement != nullptr) return *g_replacement;
  CROSSRAIL_ASSERT(opened().is_usable);
  return opened().table;
}

// The header's inline form of this refers to the exported function by name.
int query_port(ibv_context* context, uint8_t port, ibv_port_attr* attributes) {
  std::memset(attributes, 0, sizeof *attributes);
  verbs_context* extended = verbs_get_ctx_op(context, query_port);
  if (extended != nullptr) return extended->query_port(context, port, attributes, sizeof *attributes);
  // An old provider fills in only the beginning.
  return library().query_port_old(context, port, reinterpret_cast<_compat_ibv_port_attr*>(attributes));
}

}  // namespace crossrail::verbs
