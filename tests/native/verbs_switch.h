// Devices of fake_verbs.h that reach each other, all in this process: messages and datagrams are delivered, so that
// engines connect; RDMA writes are a sink, which completes them and moves nothing. Measures what posting costs us,
// without a NIC.
//
// Threads: one at a time, but for address handles and first_write_ns().
#pragma once

#include <atomic>
#include <cstring>
#include <deque>
#include <map>

#include "fake_verbs.h"
#include "util/clock.h"

namespace crossrail::verbs_test {

class Switch {
 public:
  Switch() {
    table_.create_cq = [](ibv_context* context, int, void*, ibv_comp_channel*, int) {
      auto* made = new Completions;
      made->queue.context = context;
      return &made->queue;
    };
    table_.destroy_cq = [](ibv_cq* queue) {
      delete reinterpret_cast<Completions*>(queue);
      return 0;
    };
    table_.create_srq = [](ibv_pd*, ibv_srq_init_attr*) {
      auto* made = new Receives;
      made->queue.context = &g_context;
      return &made->queue;
    };
    table_.destroy_srq = [](ibv_srq* queue) {
      delete reinterpret_cast<Receives*>(queue);
      return 0;
    };
    table_.create_qp = [](ibv_pd*, ibv_qp_init_attr* wanted) { return g_switch->create(*wanted); };
    table_.modify_qp = [](ibv_qp* qp, ibv_qp_attr* attributes, int mask) {
      if ((mask & IBV_QP_DEST_QPN) != 0) pair_of(qp).peer = attributes->dest_qp_num;
      return 0;
    };
    table_.destroy_qp = [](ibv_qp* qp) {
      g_switch->pairs_.erase(qp->qp_num);
      return 0;
    };
    g_context.ops.poll_cq = [](ibv_cq* queue, int count, ibv_wc* out) {
      return take_completions(reinterpret_cast<Completions*>(queue)->entries, count, out);
    };
    g_context.ops.post_send = [](ibv_qp* qp, ibv_send_wr* request, ibv_send_wr**) {
      for (; request != nullptr; request = request->next) g_switch->carry(pair_of(qp), *request);
      return 0;
    };
    g_context.ops.post_recv = [](ibv_qp* qp, ibv_recv_wr* request, ibv_recv_wr**) {
      return keep(pair_of(qp).receives, request);
    };
    g_context.ops.post_srq_recv = [](ibv_srq* queue, ibv_recv_wr* request, ibv_recv_wr**) {
      return keep(*reinterpret_cast<Receives*>(queue), request);
    };
    g_switch = this;
    verbs::replace_library(&table_);
  }
  ~Switch() { g_switch = nullptr; }
  Switch(const Switch&) = delete;
  Switch& operator=(const Switch&) = delete;

  // When the first write was posted since forget(); 0: none was.
  int64_t first_write_ns() const { return first_write_ns_.load(std::memory_order_acquire); }
  void forget() { first_write_ns_.store(0, std::memory_order_release); }

 private:
  struct Completions {
    ibv_cq queue{};  // first: a pointer to it is one to us
    std::deque<ibv_wc> entries;
  };
  struct Receive {
    uint64_t id;
    ibv_sge entry;
  };
  struct Receives {
    ibv_srq queue{};  // first, likewise
    std::deque<Receive> posted;
  };
  struct Pair {
    ibv_qp qp{};  // first, likewise
    bool is_datagram = false;
    uint32_t peer = 0;
    Receives* shared = nullptr;
    Receives receives;
  };
  static inline Switch* g_switch = nullptr;

  static Pair& pair_of(ibv_qp* qp) { return *reinterpret_cast<Pair*>(qp); }
  static void complete(ibv_cq* queue, const ibv_wc& completion) {
    reinterpret_cast<Completions*>(queue)->entries.push_back(completion);
  }
  static int keep(Receives& receives, ibv_recv_wr* request) {
    for (; request != nullptr; request = request->next)
      receives.posted.push_back({request->wr_id, request->num_sge > 0 ? *request->sg_list : ibv_sge{}});
    return 0;
  }

  ibv_qp* create(const ibv_qp_init_attr& wanted) {
    const uint32_t number = next_number_++;
    Pair& made = pairs_[number];
    made.qp.context = &g_context;
    made.qp.qp_context = wanted.qp_context;
    made.qp.qp_num = number;
    made.qp.send_cq = wanted.send_cq;
    made.qp.recv_cq = wanted.recv_cq;
    made.is_datagram = wanted.qp_type == IBV_QPT_UD;
    made.shared = reinterpret_cast<Receives*>(wanted.srq);
    return &made.qp;
  }

  void carry(Pair& from, const ibv_send_wr& request) {
    if (request.opcode != IBV_WR_SEND && first_write_ns_.load(std::memory_order_relaxed) == 0)
      first_write_ns_.store(now_ns(), std::memory_order_release);
    if (request.opcode == IBV_WR_SEND) deliver(from.is_datagram ? request.wr.ud.remote_qpn : from.peer, request);
    if ((request.send_flags & IBV_SEND_SIGNALED) != 0)
      complete(from.qp.send_cq, completion_of(request.wr_id, from.qp, IBV_WC_SUCCESS));
  }

  void deliver(uint32_t number, const ibv_send_wr& request) {
    const auto found = pairs_.find(number);
    if (found == pairs_.end()) return;
    Pair& to = found->second;
    Receives& receives = to.shared != nullptr ? *to.shared : to.receives;
    if (receives.posted.empty()) return;  // a datagram is lost then; of messages there is always room
    const Receive receive = receives.posted.front();
    receives.posted.pop_front();
    const uint32_t head = to.is_datagram ? 40 : 0;
    const uint32_t length = request.num_sge > 0 ? request.sg_list->length : 0;
    if (length > 0) {
      std::memcpy(reinterpret_cast<std::byte*>(receive.entry.addr) + head,
                  reinterpret_cast<const std::byte*>(request.sg_list->addr), length);
    }
    ibv_wc completion = completion_of(receive.id, to.qp, IBV_WC_SUCCESS);
    completion.opcode = IBV_WC_RECV;
    completion.byte_len = head + length;
    complete(to.qp.recv_cq, completion);
  }

  Fake fake_;
  verbs::Library table_ = fake_table();
  std::atomic<int64_t> first_write_ns_{0};
  std::map<uint32_t, Pair> pairs_;  // by number; nodes keep their places
  uint32_t next_number_ = 16;
};

}  // namespace crossrail::verbs_test
