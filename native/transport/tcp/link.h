// Both directions of talking to a peer: what we send it (OutLink) and what it sends us (InLink).
#pragma once

#include <algorithm>
#include <cstdint>
#include <deque>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <unordered_map>
#include <vector>

#include "transport/tcp/connect.h"
#include "transport/tcp/connection.h"
#include "transport/tcp/pace.h"
#include "transport/tcp/region_table.h"
#include "transport/tcp/wire.h"
#include "transport/transport.h"
#include "util/ring_queue.h"

namespace crossrail::tcp {

class TcpTransport;
struct OutLink;
struct OutChannel;
struct InLink;
struct InChannel;

// Small operations have connections and queues of their own, so that they do not wait behind large ones.
enum class Lane : uint8_t { kSmall = 0, kBulk = 1 };

struct TcpKey final : RemoteKey {
  explicit TcpKey(uint64_t region_id) : region_id(region_id) {}
  const uint64_t region_id;
};

// --- what we send ---

class OutStream final : public Stream {
 public:
  OutStream(TcpTransport* transport, OutChannel* channel, std::shared_ptr<Connection> connection);

 protected:
  bool on_head(const FrameHeader& header, std::span<const std::byte> meta, Placement& place) override;
  bool on_frame() override;
  void fill(TxBatch& batch) override;
  void on_turn_over() override;
  void on_cut(uint64_t missing_bytes) override;
  void on_broken() override;
  void on_fault() override;

 private:
  bool on_share(const ShareMeta& share);
  bool on_refused(std::span<const std::byte> meta);
  bool on_resolved(const ResolvedMeta& resolved);
  bool on_read_data(const ReadDataMeta& data, uint64_t payload_bytes, Placement& place);
  bool on_read_end(std::span<const std::byte> meta);

  TcpTransport* const transport_;
  OutChannel* const channel_;
  const uint32_t epoch_;
  uint64_t read_id_ = 0;  // the read whose data is arriving
  uint64_t read_bytes_ = 0;
};

// Asks the peer whether our operations may use a connection that it made. Ends like a Connector.
class Sharer final : public Stream {
 public:
  Sharer(OutChannel* channel, std::shared_ptr<Connection> connection, const ShareMeta& share, Deadline patience);
  uint32_t epoch() const { return share_.epoch; }
  bool is_overdue(int64_t now) const { return now >= patience_; }

 protected:
  bool on_head(const FrameHeader& header, std::span<const std::byte> meta, Placement& place) override;
  bool on_frame() override { return true; }
  void fill(TxBatch& batch) override;
  void on_turn_over() override {}
  void on_broken() override;

 private:
  void end(ConnectResult result);

  OutChannel* const channel_;
  const ShareMeta share_;
  const Deadline patience_;
  bool asked_ = false;
  bool ended_ = false;
};

// One lane of one pair of rails. Outlives its connections.
// Lifecycle of a connection: 1. attempt (connector, sharer, or both: the first to get through). 2. open (stream).
// 3. broken: what was sent is in doubt until the peer, asked over any open channel of the link, says how much of it was
// placed. The channel then sends the rest anew.
// Invariant: operations acked+1 .. acked+sent.size() are in `sent`, in order; `current` comes after them.
struct OutChannel final : Connector::Owner {
  OutChannel(TcpTransport* transport, OutLink* link, uint32_t index) : transport(transport), link(link), index(index) {}
  void on_connect_result(ConnectResult result) override;
  void on_share_result(ConnectResult result);
  void on_attempt_over(ConnectResult result, bool was_sharing);
  // Its connection is open.
  void on_opened();
  // The attempt failed: tries again later. was_sharing: the attempt was a Sharer's.
  void on_attempt_failed(const ConnectResult& result, bool was_sharing);
  // Concludes from a failed attempt whether the peer is gone, or elsewhere.
  void judge_peer(const ConnectResult& result);
  // Posts operations into a batch.
  void fill(TxBatch& batch);
  // Whether the kernel has all of this operation. If not, no peer can have placed it, and its source is still needed.
  bool is_sent(uint64_t operation) const;

  Lane lane() const { return static_cast<Lane>(index & 1); }
  uint32_t pair() const { return index >> 1; }
  bool is_open() const { return stream != nullptr && !stream->is_broken(); }
  bool is_connecting() const { return connector != nullptr || sharer != nullptr; }
  // Asked for the peer's connection so long ago that it is time to make one of our own beside.
  bool outwaits_sharer(int64_t now) const {
    return connector == nullptr && sharer != nullptr && sharer->is_overdue(now);
  }
  // May carry operations: it is open, and nothing of an earlier connection is in doubt.
  bool is_usable() const { return is_open() && !in_doubt; }
  // Whether the latest connection carried anything useful.
  bool was_good(int64_t now) const;
  // Its connection broke, and ended no operation.
  void note_vain(const std::string& why);
  // Something has got through since.
  bool carries_after(int64_t time_ns) const { return is_usable() && !was_vain && carried_ns > time_ns; }
  // Whether short frames get through but nothing long does: the network drops packets as long as ours.
  bool passes_only_short() const;
  // Whether a broken connection may have lost what was sent, or the answer to it.
  bool has_doubts() const;
  // Whether anything waits for bytes to get through, and not just for the peer to take what it has.
  bool has_unplaced() const;
  // How much of what waits for any channel this one is to take now.
  class Turn;
  // So many paced bytes of operations that it took have got where they go.
  void note_done(uint64_t paced);
  int64_t pace_now() const;
  // Whether so much is ahead of it that small operations wait for long.
  bool is_behind() const;
  // Frames the next operation, if it may go now and there is room. False: none.
  bool put_next(TxBatch& batch, Turn& turn);
  // Frames as many of the queue's first writes as fit into one frame. Returns how many.
  size_t put_writes(TxBatch& batch, RingQueue<WorkRequest>& queue, size_t room, Turn& turn);
  // Frames what is to be asked of messages that were cancelled.
  void put_recalls(TxBatch& batch);
  // Frames the next part of `current`.
  void put_part(TxBatch& batch);
  // Our GPU does not give a write's bytes: frames it without them, uncounted, and fails it here.
  void put_failed(TxBatch& batch);
  // Tells the engine of the requests in `sent`, from the index `first` on.
  void tell_sent(size_t first);

  TcpTransport* const transport;
  OutLink* const link;
  const uint32_t index;  // 2 * pair + lane
  uint32_t epoch = 0;    // of the latest connection: number of the attempt that made it, unique within the link
  std::unique_ptr<Connector> connector;
  uint32_t connector_epoch = 0;
  int64_t attempted_ns = 0;  // when the latest connector began
  std::unique_ptr<Sharer> sharer;
  std::unique_ptr<OutStream> stream;
  bool in_doubt = false;
  uint32_t doubt_epoch = 0;             // epoch of the connection that sent what is in doubt
  bool doubts_all = false;              // as far as we know nothing sent over that one was placed
  bool has_faulted = false;             // that connection broke by a fault of our memory
  OutChannel* asked_through = nullptr;  // the channel that carries our question; null: not asked yet
  bool wanted = false;                  // the channel connects, and reconnects
  int64_t retry_at_ns = 0;
  int64_t retry_pause_ns = 0;
  bool shuns_sharing = false;  // the peer's connection was useless; cleared once we cannot make one of our own
  int64_t opened_at_ns = 0;
  uint64_t acked_at_opening = 0;
  int64_t broken_at_ns = 0;
  std::string trouble;  // why the last connection or attempt failed

  uint64_t acked = 0;
  RingQueue<WorkRequest> sent;
  // Those of link->reads that this channel carries.
  uint32_t reads_open = 0;
  uint64_t reads_bytes = 0;
  Pace pace;
  struct Refusal {
    Status status;
    std::string text;
  };
  std::map<uint64_t, Refusal> refusals;  // by operation, for those after `acked`
  std::optional<WorkRequest> current;    // a long range; current_offset bytes of it are framed
  uint64_t current_offset = 0;
  uint64_t frame_bytes = kFrameBytesMax;  // limit of one frame of writes; lowered if connections break before that many
  std::vector<std::byte> control;         // frames to send first
  int64_t pinged_ns = 0;
  int64_t moved_ns = 0;  // when the peer last gave a sign of life, or the kernel got rid of bytes
  // When operations, or parts of them, last seemed to get through by this connection. The kernel getting rid of bytes
  // may be a box on the way that takes them: the word of a channel whose last connection brought nothing through, and
  // of which nothing has since, is worth nothing.
  int64_t carried_ns = 0;
  bool was_vain = false;
  int outq_bytes = 0;  // at the last look
  uint64_t bytes_acked = 0;
  uint64_t bytes_acked_at_opening = 0;
  // Bytes that got through by this connection: of operations that ended and data of reads; and of all that we sent, as
  // the kernel knew at the last look, if there was reason for one.
  uint64_t carried_bytes = 0;
  uint64_t kernel_carried_bytes = 0;
  // New connections use short segments: nothing long got through an earlier one.
  bool has_short_segments = false;
};

struct SentMessage {
  WorkRequest request;
  uint64_t id = 0;
  uint64_t operation = 0;
  uint32_t channel = 0;
  bool over = false;  // retired, or sent anew under another id
  // Cancelled. It ends when the peer, who may have given it to a buffer, says so; a connection that broke may have lost
  // the question.
  bool is_recalled = false;
  bool is_recall_sent = false;
};

struct PendingRead {
  WorkRequest request;
  uint32_t channel = 0;
  uint64_t received_bytes = 0;
  bool failed = false;  // our GPU's memory could not be reached
};

// A first connection that takes longer is attempted over the next rail as well.
inline constexpr int64_t kNextRailNs = 300'000'000;
// How long an attempt to connect to a peer that was reached before may take, at least.
inline constexpr int64_t kAttemptNs = 2'000'000'000;

// Operations of ours towards one peer.
struct OutLink final : Link {
  OutLink(TcpTransport* transport, uint64_t id, std::shared_ptr<const Address> address, std::vector<RailPair> pairs,
          uint32_t newest_epoch);
  uint32_t lanes() const override { return static_cast<uint32_t>(pairs.size()); }
  OutChannel& channel(uint32_t pair, Lane lane);  // made when first asked for
  OutChannel* find(uint32_t pair, Lane lane) { return channels[2 * pair + static_cast<uint32_t>(lane)].get(); }
  // Connects the channels that works for this rail (kAnyRail: any) and lane need.
  void want(uint32_t rail, Lane lane);
  // Connects this lane over all pairs of rails.
  void want_all(Lane lane);
  bool reaches(uint32_t rail) const;
  // Queue of `rail` (kAnyRail: of all rails).
  RingQueue<WorkRequest>& queue(uint32_t rail, Lane lane) {
    return queues[2 * (rail == kAnyRail ? 0 : rail + 1) + static_cast<uint32_t>(lane)];
  }
  // In the queues of this lane.
  size_t queued_in(Lane lane) const {
    size_t count = 0;
    for (size_t i = static_cast<size_t>(lane); i < queues.size(); i += 2) count += queues[i].size();
    return count;
  }
  // Nothing is under way: memory of long queues is given back. Not after each operation, since the next may follow.
  void release_idle();
  // Puts the request back at the head of its queue.
  void requeue(const WorkRequest& request);
  template <typename Function>
  void for_each_channel(Function&& function) {
    for (auto& channel : channels) {
      if (channel) function(*channel);
    }
  }

  TcpTransport* const transport;
  const uint64_t id;
  const std::shared_ptr<const Address> address;
  const std::vector<RailPair> pairs;
  std::vector<std::unique_ptr<OutChannel>> channels;  // by index
  std::vector<RingQueue<WorkRequest>> queues;
  RingQueue<WorkRequest> sends;  // apart, since a receiver without buffers holds back messages only
  std::vector<bool> wanted;      // by queue
  size_t queued = 0;             // in all queues and `sends`
  uint64_t outstanding = 0;      // accepted and not retired
  bool up = false;               // on_link_up was said
  bool frozen = false;
  bool is_dirty = false;    // in the transport's list of links with something to send
  bool is_watched = false;  // in the transport's list of links with something to wait for
  uint32_t newest_epoch;    // of its channels
  int64_t connect_by_ns = 0;
  int64_t attempt_ns = kAttemptNs;  // how long the next attempts may take
  int64_t held_since_ns = 0;        // since when it has no connection and waits for others' attempts; 0: it does not
  int64_t waits_since_ns = 0;       // since when something is outstanding; silence before that does not matter
  int64_t down_since_ns = 0;        // since when no channel is open; 0: one is
  // How many connections in a row broke before anything that waits got through.
  uint32_t vain_connections = 0;
  int64_t vain_since_ns = 0;
  std::string vain_trouble;     // why the latest of them broke
  std::vector<bool> nobody_at;  // by pair: the latest attempt found nobody at that port of the peer
  std::string refusal;          // what the peer, or whoever is there, said since a channel was last open
  std::optional<std::pair<std::string, LinkEnd>> doom;  // the link goes down at the end of this poll
  bool lacked_here = false;  // the latest attempt to connect failed for want of something of this process
  InLink* twin = nullptr;    // the same peer's operations towards us. Invariant: twin->twin == this

  RingQueue<SentMessage> messages;  // by id, from first_message_id
  uint64_t first_message_id = 1;
  uint64_t messages_bytes = 0;  // sent and not taken
  bool has_recalls = false;     // of messages, some may be recalled and not told
  uint64_t next_read_id = 1;
  std::unordered_map<uint64_t, PendingRead> reads;

  // `count` outstanding works have ended.
  void end(uint32_t count, int64_t now) {
    outstanding -= count;
    if (outstanding == 0) busy_ns += std::max<int64_t>(0, now - busy_since_ns);
  }
  int64_t busy_ns = 0;  // total time with something outstanding, without the period since busy_since_ns
  int64_t busy_since_ns = 0;
  int64_t all_silent_ns = 0;  // when all that was open was last seen to be silent
};

// The transport notes in its copies of work requests the rail asked for and the lane, in case it sends them again, and
// how much is transferred already.
inline constexpr uint32_t kRoutingBits = 6;
static_assert((kRailsMax + 1) << 1 <= 1u << kRoutingBits);
inline uint32_t routing_of(uint32_t rail, Lane lane) {
  return (rail + 1) << 1 | static_cast<uint32_t>(lane);  // kAnyRail + 1 is 0
}
inline uint32_t rail_of(const WorkRequest& request) {
  return ((request.reserved & ((1u << kRoutingBits) - 1)) >> 1) - 1;
}
// A multiple of kResumeBytes. It fits for ranges of up to 256 GiB; longer ones resume there at most.
inline constexpr uint64_t kResumeBytes = 4096;
inline uint64_t resumed_at(const WorkRequest& request) { return (request.reserved >> kRoutingBits) * kResumeBytes; }
inline void resume_at(WorkRequest& request, uint64_t offset) {
  constexpr uint64_t kUnitsMax = (uint64_t{1} << (32 - kRoutingBits)) - 1;
  const auto units = static_cast<uint32_t>(std::min(offset / kResumeBytes, kUnitsMax));
  request.reserved = units << kRoutingBits | (request.reserved & ((1u << kRoutingBits) - 1));
}
inline Lane lane_of(const WorkRequest& request) { return static_cast<Lane>(request.reserved & 1); }

// The peer has placed the operations of one channel up to this one. False: it cannot have.
bool take_ack(OutLink& link, const AckMeta& ack);
// The peer's pool has these messages. False: nonsense.
bool take_taken(OutLink& link, const TakenMeta& taken);
// Frames what the peer is to know of messages that were taken.
void put_taken(InLink& link, TxBatch& batch);
// What we have told by any connection of the link, once more by this one: who hears of our end by one of them reads no
// further by the others.
void append_last_words(const InLink& link, InChannel& by);
// Makes the two each other's twins; their former twins have none.
void pair_twins(OutLink& out, InLink& in);

// --- what we receive ---

class InStream final : public Stream {
 public:
  InStream(TcpTransport* transport, InChannel* channel, std::shared_ptr<Connection> connection);
  // A region was revoked: the stream places nothing more into it and reads nothing from it.
  void check_region();
  // Whether the stream is placing a frame into the region, or reading from it.
  bool is_at(const LocalRegion& region) const {
    return region_.is_of(region) ||
           std::ranges::any_of(reads_, [&](const auto& job) { return job.region.is_of(region); }) ||
           std::ranges::any_of(views_, [&](const RegionUse& view) { return view.is_of(region); });
  }

 protected:
  bool on_head(const FrameHeader& header, std::span<const std::byte> meta, Placement& place) override;
  bool on_frame() override;
  void fill(TxBatch& batch) override;
  void on_batch_sent() override { views_.clear(); }
  bool has_backlog() const override { return !reads_.empty(); }
  void on_turn_over() override;
  void on_broken() override;
  void on_fault() override;

 private:
  struct ReadJob {
    RegionUse region;  // none any more: closed meanwhile
    uint64_t region_id;
    uint64_t read_id;
    uint64_t offset;
    uint64_t length;
    uint64_t done;
  };
  bool on_write(const FrameHeader& header, std::span<const std::byte> meta, Placement& place);
  bool on_read(const FrameHeader& header, std::span<const std::byte> meta);
  bool on_message(const FrameHeader& header, std::span<const std::byte> meta, Placement& place);
  bool on_resolve(const ResolveMeta& resolve);
  void fill_outcomes(TxBatch& batch);
  bool finish_write();
  bool finish_message();
  void refuse(uint64_t operation, Status status, const std::string& text);
  Status check_range(const RegionUse& region, uint64_t region_id, Access needed, uint64_t offset, uint64_t length);
  void fill_reads(TxBatch& batch);
  const std::byte* readable(const TcpRegion& region, uint64_t offset, uint64_t length, TxBatch& batch);

  TcpTransport* const transport_;
  InChannel* const channel_;
  const uint32_t epoch_;
  // The frame that is arriving.
  FrameType type_ = FrameType::kBye;
  uint32_t operations_ = 0;
  RegionUse region_;
  uint64_t region_id_ = 0;
  bool region_closed_ = false;  // while the frame was arriving
  std::vector<WriteEntry> entries_;
  std::vector<Status> statuses_;  // of the entries; empty: all good
  std::vector<uint8_t> message_;
  uint64_t message_id_ = 0;
  bool operation_refused_ = false;  // a frame of the operation, which has several, was refused
  uint64_t begun_bytes_ = 0;        // bytes of such an operation that are in place
  std::deque<ReadJob> reads_;
  std::vector<RegionUse> views_;  // regions that the batch on its way has views of
};

struct HeldMessage {
  std::vector<uint8_t> payload;
  uint64_t id;
};

// We keep the outcomes of so many messages. An honest peer needs fewer: kMessagesUnderWayMax that it was not told, and
// as many before the newest one (InLink::outcomes), which it is told again.
inline constexpr size_t kOutcomesMax = 4 * kMessagesUnderWayMax;

// What became of a message.
struct MessageOutcome {
  uint64_t id;
  Status status;
  uint64_t bytes = 0;  // of kMessageTooLong: its length
};
// How the initiator is told that no buffer got it.
RefusedMeta meta_of(const MessageOutcome& message);
std::string text_of(const MessageOutcome& message);

// Invariant: `placed` counts exactly the operations whose bytes are in place and whose immediates were counted, or
// which were refused.
struct InChannel {
  InLink* link = nullptr;
  uint32_t index = 0;
  uint32_t epoch_min = 1;  // connections of earlier epochs are over
  uint64_t placed = 0;
  uint64_t ack_sent = 0;
  // How many bytes of the next operation are in place, and which connection brought them. Kept while the initiator may
  // ask.
  uint64_t begun_bytes = 0;
  uint32_t begun_epoch = 0;
  std::vector<std::byte> control;  // frames to send first
  struct Refusal {
    uint64_t operation;
    Status status;
    std::string text;
  };
  // Kept while the initiator may have to ask again. Invariant: they are of operations later than placed -
  // kOperationsUnderWayMax, at most one for each.
  std::deque<Refusal> refusals;
  uint64_t newest_refused = 0;  // operation; 0: none
  std::unique_ptr<InStream> stream;
  bool is_open() const { return stream != nullptr && !stream->is_broken(); }
};

// Operations of one peer towards us.
struct InLink {
  TcpTransport* transport = nullptr;
  uint64_t id = 0;
  std::shared_ptr<const Address> peer;
  std::map<uint32_t, InChannel> channels;  // by the initiator's index
  std::deque<HeldMessage> held;
  uint64_t held_bytes = 0;
  // The channel that sends next tells these.
  std::vector<TakenMeta> taken;
  std::vector<MessageOutcome> untaken;
  // Told already; told again if a connection that may have carried them broke. Ids are later than newest_id -
  // kMessagesUnderWayMax.
  std::deque<MessageOutcome> outcomes;
  uint64_t newest_id = 0;  // the newest message that arrived
  OutLink* twin = nullptr;
  bool over = false;  // it said goodbye, or began another
  bool is_connected() const {
    return std::any_of(channels.begin(), channels.end(), [](const auto& item) { return item.second.is_open(); });
  }
  int64_t unconnected_since_ns = 0;  // 0: connected. Set by TcpTransport::note_connected
  // Acknowledgements travel with our own next operation to this peer if there is one soon.
  bool ack_due = false;
  bool ack_now = false;
  bool ack_listed = false;  // in the transport's list
  int64_t ack_due_since_ns = 0;
  int32_t rides = 4;  // how often waiting for a ride paid of late: 0 never, to 8
  int64_t acked_alone_ns = 0;
};

}  // namespace crossrail::tcp
