#include "transport/verbs/verbs_path.h"

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstring>
#include <optional>
#include <utility>

#include "transport/verbs/route.h"
#include "transport/verbs/verbs_nic.h"
#include "util/entropy.h"
#include "util/errors.h"

namespace crossrail::verbs {

namespace {

constexpr uint32_t kPsnMask = 0xffffff;
constexpr uint8_t kTimeout = 14;  // 4.096 us * 2^14 = 67 ms until a packet is retransmitted
// So a NIC that does not answer is given up after half a second to two. Not 7: Soft-RoCE takes that for "for ever".
constexpr uint8_t kRetries = 6;
constexpr uint8_t kRnrForever = 7;   // a peer without receives is waited for
constexpr uint8_t kMinRnrTimer = 4;  // 0.04 ms
constexpr uint32_t kReadsMax = 16;
constexpr int64_t kIdleGraceNs = 50'000'000;
constexpr int64_t kDrainNs = 2'000'000'000;
constexpr uint32_t kInline = Slots::kNone;  // a fragment without a slot

struct Shape {
  ibv_srq* receives;
  uint32_t sends;
  uint32_t inline_bytes;
};

QueuePair make_queue_pair(const Adapter& adapter, VerbsPath* owner, ibv_cq* sends, ibv_cq* receives, const Shape& shape,
                          uint32_t* inline_bytes) {
  ibv_qp_init_attr wanted{};
  wanted.qp_context = owner;
  wanted.send_cq = sends;
  wanted.recv_cq = receives;
  wanted.srq = shape.receives;
  wanted.qp_type = IBV_QPT_RC;
  wanted.cap.max_send_wr = shape.sends;
  wanted.cap.max_send_sge = 1;
  wanted.cap.max_inline_data = shape.inline_bytes;
  QueuePair made(library().create_qp(adapter.domain(), &wanted));
  if (made == nullptr && errno == EINVAL) {  // a NIC that does not support this much inline data
    wanted.cap.max_inline_data = 0;
    made.reset(library().create_qp(adapter.domain(), &wanted));
  }
  if (made == nullptr) fail(adapter, "ibv_create_qp", errno, "cannot make a queue pair");
  *inline_bytes = std::min(wanted.cap.max_inline_data, shape.inline_bytes);
  return made;
}

int to_init(const Adapter& adapter, ibv_qp* queue_pair, int access) {
  ibv_qp_attr attributes{};
  attributes.qp_state = IBV_QPS_INIT;
  attributes.port_num = adapter.detail.port.number;
  attributes.pkey_index = adapter.detail.partition_index;
  attributes.qp_access_flags = static_cast<unsigned>(access);
  return library().modify_qp(queue_pair, &attributes,
                             IBV_QP_STATE | IBV_QP_PKEY_INDEX | IBV_QP_PORT | IBV_QP_ACCESS_FLAGS);
}

uint8_t reads_max(int limit) { return static_cast<uint8_t>(std::clamp<int>(limit, 0, kReadsMax)); }

struct Far {
  const Endpoint& endpoint;
  uint32_t queue_pair;
  uint32_t psn;
  uint8_t reads_max;
};

int to_receive(const Adapter& adapter, ibv_qp* queue_pair, const Far& far) {
  ibv_qp_attr attributes{};
  attributes.qp_state = IBV_QPS_RTR;
  attributes.path_mtu = static_cast<ibv_mtu>(std::min(adapter.detail.endpoint.mtu, far.endpoint.mtu));
  attributes.dest_qp_num = far.queue_pair;
  attributes.rq_psn = far.psn;
  attributes.max_dest_rd_atomic = reads_max(adapter.limits().max_qp_rd_atom);
  attributes.min_rnr_timer = kMinRnrTimer;
  attributes.ah_attr = route_to(adapter, far.endpoint);
  return library().modify_qp(queue_pair, &attributes,
                             IBV_QP_STATE | IBV_QP_AV | IBV_QP_PATH_MTU | IBV_QP_DEST_QPN | IBV_QP_RQ_PSN |
                                 IBV_QP_MAX_DEST_RD_ATOMIC | IBV_QP_MIN_RNR_TIMER);
}

int to_send(const Adapter& adapter, ibv_qp* queue_pair, const Far& far, uint32_t psn) {
  ibv_qp_attr attributes{};
  attributes.qp_state = IBV_QPS_RTS;
  attributes.sq_psn = psn;
  attributes.timeout = kTimeout;
  attributes.retry_cnt = kRetries;
  attributes.rnr_retry = kRnrForever;
  attributes.max_rd_atomic = std::min(reads_max(adapter.limits().max_qp_init_rd_atom), far.reads_max);
  return library().modify_qp(
      queue_pair, &attributes,
      IBV_QP_STATE | IBV_QP_SQ_PSN | IBV_QP_TIMEOUT | IBV_QP_RETRY_CNT | IBV_QP_RNR_RETRY | IBV_QP_MAX_QP_RD_ATOMIC);
}

rdma::NicFault fault_of(ibv_wc_status status) {
  switch (status) {
    case IBV_WC_WR_FLUSH_ERR:
      return rdma::NicFault::kFlushed;
    case IBV_WC_REM_ACCESS_ERR:
    case IBV_WC_REM_INV_REQ_ERR:
    case IBV_WC_REM_INV_RD_REQ_ERR:
      return rdma::NicFault::kRemoteAccess;
    case IBV_WC_LOC_LEN_ERR:
    case IBV_WC_LOC_QP_OP_ERR:
    case IBV_WC_LOC_PROT_ERR:
    case IBV_WC_LOC_ACCESS_ERR:
      return rdma::NicFault::kLocal;
    case IBV_WC_SUCCESS:
    case IBV_WC_LOC_EEC_OP_ERR:
    case IBV_WC_MW_BIND_ERR:
    case IBV_WC_BAD_RESP_ERR:
    case IBV_WC_REM_OP_ERR:
    case IBV_WC_RETRY_EXC_ERR:
    case IBV_WC_RNR_RETRY_EXC_ERR:
    case IBV_WC_LOC_RDD_VIOL_ERR:
    case IBV_WC_REM_ABORT_ERR:
    case IBV_WC_INV_EECN_ERR:
    case IBV_WC_INV_EEC_STATE_ERR:
    case IBV_WC_FATAL_ERR:
    case IBV_WC_RESP_TIMEOUT_ERR:
    case IBV_WC_GENERAL_ERR:
    case IBV_WC_TM_ERR:
    case IBV_WC_TM_RNDV_INCOMPLETE:
      return rdma::NicFault::kUnreachable;
  }
  return rdma::NicFault::kUnreachable;
}

// For a queue pair on which none of our works failed: its responder half, which answers the peer, refused something.
bool is_flush(const ibv_wc& completion) { return completion.status == IBV_WC_WR_FLUSH_ERR; }

std::string text_of(const ibv_wc& completion) {
  return std::string(library().wc_status_str(completion.status)) + " (vendor code " +
         std::to_string(completion.vendor_err) + ")";
}

}  // namespace

VerbsPath::VerbsPath(VerbsNic& nic, uint32_t index)
    : nic_(nic),
      index_(index),
      message_psn_(kernel_entropy().draw_u32() & kPsnMask),
      work_psn_(kernel_entropy().draw_u32() & kPsnMask) {
  const Adapter& adapter = *nic.adapter_;
  messages_ =
      make_queue_pair(adapter, this, nic.sends_.get(), nic.receives_done_.get(),
                      {nic.receives_->fragment_queue(), kPathFragments, kFragmentInlineBytes}, &fragment_inline_bytes_);
  works_ = make_queue_pair(adapter, this, nic.sends_.get(), nic.receives_done_.get(),
                           {nic.receives_->imm_queue(), kPathWorks, kWorkInlineBytes}, &work_inline_bytes_);
  int error = to_init(adapter, messages_.get(), 0);
  if (error == 0) error = to_init(adapter, works_.get(), IBV_ACCESS_REMOTE_WRITE | IBV_ACCESS_REMOTE_READ);
  if (error != 0) fail(adapter, "ibv_modify_qp", error, "cannot initialise a queue pair");
  offer_ = encode(
      Offer{reads_max(adapter.limits().max_qp_rd_atom), messages_->qp_num, message_psn_, works_->qp_num, work_psn_});
}

VerbsPath::~VerbsPath() {
  give_up_fragments();
  nic_.remove(*this);
}

void VerbsPath::connect(std::span<const uint8_t> peer_endpoint, std::span<const uint8_t> peer_offer) {
  const std::optional<Endpoint> endpoint = decode_endpoint(peer_endpoint);
  const std::optional<Offer> offer = decode_offer(peer_offer);
  const Adapter& adapter = *nic_.adapter_;
  if (!endpoint || !offer || nearness(adapter.detail.endpoint, *endpoint) == 0)
    throw TransportError("connect", EPROTO,
                         adapter.name() + ": the peer's NIC describes itself in a way that makes no sense");
  if (state_ != State::kMade)  // the device died after the peer answered
    throw TransportError("connect", EIO, adapter.name() + ": the path has ended already");
  const Far messages{*endpoint, offer->message_queue_pair, offer->message_psn, offer->reads_max};
  const Far works{*endpoint, offer->work_queue_pair, offer->work_psn, offer->reads_max};
  int error = to_receive(adapter, messages_.get(), messages);
  if (error == 0) error = to_receive(adapter, works_.get(), works);
  if (error == 0) error = to_send(adapter, messages_.get(), messages, message_psn_);
  if (error == 0) error = to_send(adapter, works_.get(), works, work_psn_);
  if (error != 0)
    fail(adapter, "ibv_modify_qp", error, "cannot connect a queue pair to " + address_text(endpoint->gid));
  state_ = State::kConnected;
}

// The queue has room for everything that the path's budget allows, so a refusal is the device's or our fault: the path
// breaks. Works accepted before may lack a signalled one behind them, and return through the flush.
uint32_t VerbsPath::post(std::span<const rdma::NicWork> works) {
  if (state_ != State::kConnected) return 0;
  const uint32_t room = room_for(works_outstanding(), kPathWorks, kPathWorksKept);
  const auto wanted = static_cast<uint32_t>(std::min<size_t>(works.size(), room));
  uint32_t taken = 0;
  while (taken < wanted) {
    const uint32_t count = std::min(wanted - taken, nic_.adapter_->options.chain_length);
    for (uint32_t i = 0; i < count; ++i) {
      const bool is_signalled = ++unsignalled_ >= kSignalEvery || taken + i + 1 == wanted;
      if (is_signalled) unsignalled_ = 0;
      const rdma::NicWork& work = works[taken + i];
      nic_.chain_.fill(i, work, tagged(Tag::kWork, index_, static_cast<uint32_t>(work.cookie)), is_signalled,
                       work_inline_bytes_);
    }
    int error = 0;
    const uint32_t accepted = nic_.chain_.post(works_.get(), count, &error);
    posted_ += accepted;
    nic_.budget_ -= accepted;
    taken += accepted;
    if (error != 0) {
      note_trouble(std::string("ibv_post_send: ") + std::strerror(error));
      break;
    }
  }
  return taken;
}

bool VerbsPath::send(std::span<const uint8_t> head, std::span<const uint8_t> body) {
  const size_t length = head.size() + body.size();
  CROSSRAIL_ASSERT(length <= rdma::kFragmentBytesMax);
  if (state_ != State::kConnected) return false;
  std::array<uint8_t, kFragmentInlineBytes> inline_bytes;
  const bool is_inline = length <= fragment_inline_bytes_;
  const bool is_short = length <= kFragmentInlineBytes;
  const uint32_t kept = is_short ? kPathShortFragmentsKept : kPathFragmentsKept;
  if (room_for(fragments_outstanding_, kPathFragments, kept) == 0) return false;
  const uint32_t slot = is_inline ? kInline : nic_.take_fragment_slot();
  if (!is_inline && slot == Slots::kNone) return false;
  uint8_t* bytes = is_inline ? inline_bytes.data() : nic_.fragment_slots_->at(slot);
  std::copy(head.begin(), head.end(), bytes);
  std::copy(body.begin(), body.end(), bytes + head.size());

  ibv_sge entry{reinterpret_cast<uint64_t>(bytes), static_cast<uint32_t>(length), 0};
  if (!is_inline) entry = nic_.fragment_slots_->entry(slot, static_cast<uint32_t>(length));
  ibv_send_wr request{};
  request.wr_id = tagged(Tag::kFragment, index_, slot);
  request.sg_list = &entry;
  request.num_sge = length > 0 ? 1 : 0;
  request.opcode = IBV_WR_SEND;
  request.send_flags = unsigned{IBV_SEND_SIGNALED} | (is_inline ? unsigned{IBV_SEND_INLINE} : 0);
  ibv_send_wr* refused = nullptr;
  if (const int error = ibv_post_send(messages_.get(), &request, &refused); error != 0) {
    if (!is_inline) nic_.fragment_slots_->give_back(slot);
    note_trouble(std::string("ibv_post_send: ") + std::strerror(error));
    return false;
  }
  if (!is_inline) slots_.push_back(slot);
  ++fragments_outstanding_;
  --nic_.budget_;
  return true;
}

// Its share of the NIC's budget: queues.h.
uint32_t VerbsPath::room_for(uint32_t outstanding, uint32_t path_max, uint32_t kept) const {
  const uint32_t free = nic_.budget_ > kSendsKept ? nic_.budget_ - kSendsKept : 0;
  const uint32_t share = std::min(free / kShareDivisor, path_max);
  if (outstanding < share) return share - outstanding;
  return outstanding < kept ? std::min(kept - outstanding, nic_.budget_) : 0;
}

void VerbsPath::break_off(const std::string&) {
  if (state_ == State::kDraining || state_ == State::kFlushed) return;
  const bool was_connected = state_ != State::kMade;
  state_ = State::kDraining;
  const int64_t now = now_ns();
  idle_by_ns_ = was_connected ? now + kIdleGraceNs : now;
  give_up_ns_ = now + kDrainNs;
  to_error_state();
  nic_.draining_.push_back(index_);
}

// A queue pair that does not even do this is destroyed in the end, which stops it in any case.
void VerbsPath::to_error_state() {
  ibv_qp_attr attributes{};
  attributes.qp_state = IBV_QPS_ERR;
  library().modify_qp(messages_.get(), &attributes, IBV_QP_STATE);
  library().modify_qp(works_.get(), &attributes, IBV_QP_STATE);
}

void VerbsPath::on_work(const ibv_wc& completion, rdma::NicEvents& events) {
  // The id holds the lower half of a cookie, and at most kPathWorks are outstanding.
  const uint64_t cookie = oldest_ + (value_of(completion.wr_id) - static_cast<uint32_t>(oldest_));
  if (cookie - oldest_ >= works_outstanding()) return;  // of works reported long ago
  const bool is_done = completion.status == IBV_WC_SUCCESS;
  nic_.budget_ += static_cast<uint32_t>(cookie + 1 - oldest_);
  // Works end in order: those before it are done, or it would not be its turn.
  const uint64_t before = cookie - oldest_;
  oldest_ = cookie + 1;
  if (is_done) {
    events.on_work_done(*this, cookie, true);
    return;
  }
  if (before > 0) events.on_work_done(*this, cookie - 1, true);
  const std::string text = text_of(completion);
  events.on_work_failed(*this, cookie, fault_of(completion.status), completion.status, text);
  tell_broken(events, is_flush(completion), text);
}

void VerbsPath::on_fragment_sent(const ibv_wc& completion, rdma::NicEvents& events) {
  if (fragments_outstanding_ == 0) return;
  --fragments_outstanding_;
  ++nic_.budget_;
  if (const uint32_t slot = value_of(completion.wr_id); slot != kInline) {
    // Mostly the first one: they end in order.
    slots_.erase(std::find(slots_.begin(), slots_.end(), slot));
    nic_.fragment_slots_->give_back(slot);
  }
  if (completion.status != IBV_WC_SUCCESS) tell_broken(events, is_flush(completion), text_of(completion));
}

void VerbsPath::note_trouble(std::string trouble, bool by_peer) {
  trouble_ = std::move(trouble);
  is_trouble_peers_ = by_peer;
  nic_.troubled_.push_back(index_);
}

void VerbsPath::tell_broken(rdma::NicEvents& events, bool by_peer, const std::string& reason) {
  if (state_ != State::kConnected) return;
  state_ = State::kBroken;
  events.on_path_broken(*this, by_peer, reason);
}

// The peer's writes have ended once the queue pairs take no more receives (the device reports that, or should have by
// now) and all earlier entries were taken from the queue of receive completions.
bool VerbsPath::drain(rdma::NicEvents& events, int64_t now) {
  const bool is_idle = (are_messages_idle_ && are_works_idle_) || now >= idle_by_ns_;
  if (is_idle && receives_due_ == 0) receives_due_ = nic_.receives_passed_ + kReceiveEntries;
  const bool is_received = is_idle && nic_.receives_passed_ >= receives_due_;
  const bool is_quiet = works_outstanding() == 0 && fragments_outstanding_ == 0;
  // What was received is in our own queue, and is taken however late we get to it: the peer was told that it is done.
  if (!is_received || (!is_quiet && now < give_up_ns_)) return false;
  finish(events);
  return true;
}

void VerbsPath::finish(rdma::NicEvents& events) {
  if (state_ == State::kFlushed) return;
  state_ = State::kFlushed;
  nic_.forget_queue_pairs(*this);
  messages_.reset();
  works_.reset();
  // Their completions may still be in the queue: the budget is returned once it was seen empty.
  nic_.budget_owed_ += works_outstanding() + fragments_outstanding_;
  give_up_fragments();
  while (oldest_ < posted_)
    events.on_work_failed(*this, oldest_++, rdma::NicFault::kFlushed, IBV_WC_WR_FLUSH_ERR,
                          "its queue pair was destroyed");
  events.on_path_flushed(*this);
}

void VerbsPath::give_up_fragments() {
  messages_.reset();  // first, since it might be reading them
  for (const uint32_t slot : std::exchange(slots_, {})) nic_.fragment_slots_->give_back(slot);
  fragments_outstanding_ = 0;
}

}  // namespace crossrail::verbs
