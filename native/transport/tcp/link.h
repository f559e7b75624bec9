// Both directions of talking to a peer: operations that we send (OutLink) and operations that it sends us (InLink).
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
// Lifecycle of a connection: 1. attempt (connector, sharer, or both: the first to succeed wins). 2. open (stream). 3.
// broken: everything sent is in doubt until the peer, asked over any open channel of the link, says how much of it was
// placed. The channel then retransmits the rest.
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
  // Decides from a failed attempt whether the peer is gone, or is at another address.
  void judge_peer(const ConnectResult& result);
  // Adds operations to a batch.
  void fill(TxBatch& batch);
  // Whether the kernel has all of this operation. If not, the peer cannot have placed it, and its source is still
  // needed.
  bool is_sent(uint64_t operation) const;

  Lane lane() const { return static_cast<Lane>(index & 1); }
  uint32_t pair() const { return index >> 1; }
  bool is_open() const { return stream != nullptr && !stream->is_broken(); }
  bool is_connecting() const { return connector != nullptr || sharer != nullptr; }
  // The request to use the peer's connection is unanswered for so long that it is time to make one of our own as well.
  bool outwaits_sharer(int64_t now) const {
    return connector == nullptr && sharer != nullptr && sharer->is_overdue(now);
  }
  // May carry operations: it is open, and nothing sent on an earlier connection is in doubt.
  bool is_usable() const { return is_open() && !doubt; }
  // Whether the latest connection carried anything useful.
  bool was_good(int64_t now) const;
  // Its connection broke before it completed any operation.
  void note_vain(const std::string& why);
  // Something has got through since then.
  bool carries_after(int64_t time_ns) const { return is_usable() && !was_vain && carried_ns > time_ns; }
  // Whether short frames get through but nothing long does: the network drops packets as long as ours.
  bool passes_only_short() const;
  // It is broken off for silence while others answer.
  void note_silence();
  void forget_silence();
  // Whether a broken connection may have lost what was sent, or the answer to it.
  bool has_doubts() const;
  // Whether something is waiting for bytes to get through, rather than for the peer to process what it has.
  bool has_unplaced() const;
  // How much of the work that any channel may take this one is to take now.
  class Turn;
  // This many paced bytes of operations that it took on have been delivered.
  void note_done(uint64_t paced);
  // The time by which the pace is measured.
  int64_t pace_now() const;
  // Whether so many bytes are in flight on it that small operations wait for long.
  bool is_behind() const;
  // Frames the next operation, if it may be sent now and there is room. False: none.
  bool put_next(TxBatch& batch, Turn& turn);
  // Frames as many of the queue's first writes as fit into one frame. Returns their number.
  size_t put_writes(TxBatch& batch, RingQueue<WorkRequest>& queue, size_t room, Turn& turn);
  // Frames the questions about cancelled messages.
  void put_recalls(TxBatch& batch);
  // Frames the next part of `current`.
  void put_part(TxBatch& batch);
  // Our GPU does not deliver a write's bytes: frames it without them, uncounted, and fails it here.
  void put_failed(TxBatch& batch);
  // Reports the requests in `sent`, from index `first` on, to the engine.
  void tell_sent(size_t first);

  TcpTransport* const transport;
  OutLink* const link;
  const uint32_t index;  // 2 * pair + lane
  uint32_t epoch = 0;    // of the latest connection: the number of its attempt, unique within the link
  std::unique_ptr<Connector> connector;
  uint32_t connector_epoch = 0;
  int64_t attempted_ns = 0;  // when the latest connector was started
  std::unique_ptr<Sharer> sharer;
  std::unique_ptr<OutStream> stream;
  // What was sent over a connection that broke: how much of it the peer has placed is not known yet.
  struct Doubt {
    uint32_t epoch = 0;                   // of that connection
    bool is_vain = false;                 // as far as we know, nothing sent over it was placed
    OutChannel* asked_through = nullptr;  // the channel that carries our question; null: not asked yet
  };
  std::optional<Doubt> doubt;
  bool has_faulted = false;  // the latest connection broke because our memory could not be read
  bool wanted = false;       // the channel is to be connected, and reconnected
  int64_t retry_at_ns = 0;
  int64_t retry_pause_ns = 0;
  bool shuns_sharing = false;  // the peer's connection was useless; cleared when we cannot make one of our own
  int64_t opened_at_ns = 0;
  uint64_t acked_at_opening = 0;
  int64_t broken_at_ns = 0;
  std::string trouble;  // why the last connection or attempt failed

  uint64_t acked = 0;
  RingQueue<WorkRequest> sent;
  // The reads in link->reads that this channel carries.
  uint32_t reads_open = 0;
  uint64_t reads_bytes = 0;
  Pace pace;
  struct Refusal {
    Status status;
    std::string text;
  };
  std::map<uint64_t, Refusal> refusals;  // by operation; only those after `acked`
  std::optional<WorkRequest> current;    // a long range; current_offset bytes of it are framed
  uint64_t current_offset = 0;
  uint64_t frame_bytes = kFrameBytesMax;  // limit of a frame of writes; lowered if connections break too soon
  std::vector<std::byte> control;         // frames to send first
  int64_t pinged_ns = 0;
  int64_t moved_ns = 0;  // when the peer last gave a sign of life, or the kernel's send queue became shorter
  // When operations, or parts of them, last seemed to get through on this connection. A shorter send queue may only
  // mean that a middlebox accepts the bytes: the claim is worthless for a channel whose last connection delivered
  // nothing and that has delivered nothing since.
  int64_t carried_ns = 0;
  bool was_vain = false;
  int outq_bytes = 0;        // kernel's send queue at the last look
  uint64_t bytes_acked = 0;  // of writes
  uint64_t bytes_acked_at_opening = 0;
  uint64_t bytes_read = 0;  // of reads that are done
  // Bytes delivered by this connection: those of completed operations and of read data, and of everything that we sent,
  // as the kernel reported at the last look, if there was a reason to look.
  uint64_t carried_bytes = 0;
  uint64_t kernel_carried_bytes = 0;
  // The epoch of the latest connection that fell silent before it had carried anything long; 0: none did lately.
  uint32_t silent_epoch = 0;
  // New connections use short segments: nothing long got through on two connections in a row.
  bool has_short_segments = false;
};

struct SentMessage {
  WorkRequest request;
  uint64_t id = 0;
  uint64_t operation = 0;
  uint32_t channel = 0;
  bool over = false;  // retired, or sent again under another id
  // Cancelled. It ends when the peer, which may have given it to a buffer, says so; if a connection broke, the question
  // may be lost.
  bool is_recalled = false;
  bool is_recall_sent = false;
};

struct PendingRead {
  WorkRequest request;
  uint32_t channel = 0;
  uint64_t received_bytes = 0;
  bool failed = false;  // the memory of our GPU could not be accessed
};

// A first connection that takes longer than this is also attempted over the next rail.
inline constexpr int64_t kNextRailNs = 300'000'000;
// The minimum time limit for an attempt to connect to a peer that was reached before.
inline constexpr int64_t kAttemptNs = 2'000'000'000;

// Our operations towards one peer.
struct OutLink final : Link {
  OutLink(TcpTransport* transport, uint64_t id, std::shared_ptr<const Address> address, std::vector<RailPair> pairs,
          uint32_t newest_epoch);
  uint32_t lanes() const override { return static_cast<uint32_t>(pairs.size()); }
  OutChannel& channel(uint32_t pair, Lane lane);  // created when first asked for
  OutChannel* find(uint32_t pair, Lane lane) { return channels[2 * pair + static_cast<uint32_t>(lane)].get(); }
  // Connects the channels that work for this rail (kAnyRail: any) and lane needs.
  void want(uint32_t rail, Lane lane);
  // Connects this lane over all pairs of rails.
  void want_all(Lane lane);
  bool reaches(uint32_t rail) const;
  // The queue for `rail` (kAnyRail: for all rails).
  RingQueue<WorkRequest>& queue(uint32_t rail, Lane lane) {
    return queues[2 * (rail == kAnyRail ? 0 : rail + 1) + static_cast<uint32_t>(lane)];
  }
  // Works in the queues of this lane.
  size_t queued_in(Lane lane) const {
    size_t count = 0;
    for (size_t i = static_cast<size_t>(lane); i < queues.size(); i += 2) count += queues[i].size();
    return count;
  }
  // Nothing is outstanding: gives back the memory of long queues. Not called after each operation, since the next may
  // follow.
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
  RingQueue<WorkRequest> sends;  // kept apart: a receiver without buffers holds back messages only
  std::vector<bool> wanted;      // by queue
  size_t queued = 0;             // in all queues and `sends`
  uint64_t outstanding = 0;      // accepted and not retired
  bool up = false;               // on_link_up was called
  bool frozen = false;
  bool is_dirty = false;    // in the transport's list of links with something to send
  bool is_watched = false;  // in the transport's list of links that wait for something
  uint32_t newest_epoch;    // of any of its channels
  int64_t connect_by_ns = 0;
  int64_t attempt_ns = kAttemptNs;  // time limit of the next attempts
  int64_t held_since_ns = 0;   // since when it has no connection and waits for other links' attempts; 0: it does not
  int64_t waits_since_ns = 0;  // since when something is outstanding; silence before that does not matter
  int64_t down_since_ns = 0;   // since when no channel is open; 0: one is
  // Number of consecutive connections that broke before anything outstanding got through.
  uint32_t vain_connections = 0;
  int64_t vain_since_ns = 0;
  std::string vain_trouble;     // why the latest of them broke
  std::vector<bool> nobody_at;  // by pair: the latest attempt found that port of the peer closed
  std::string refusal;          // what the peer, or whoever is there, answered since a channel was last open
  std::optional<std::pair<std::string, LinkEnd>> doom;  // set: the link goes down at the end of this poll
  bool lacked_here = false;  // the latest attempt to connect failed because this process lacked resources
  InLink* twin = nullptr;    // the same peer's operations towards us. Invariant: twin->twin == this

  RingQueue<SentMessage> messages;  // by id, from first_message_id
  uint64_t first_message_id = 1;
  uint64_t messages_bytes = 0;  // sent and not taken
  bool has_recalls = false;     // there may be recalled messages that the peer has not been told about
  uint64_t next_read_id = 1;
  std::unordered_map<uint64_t, PendingRead> reads;

  // `count` outstanding works have ended.
  void end(uint32_t count, int64_t now) {
    outstanding -= count;
    if (outstanding == 0) busy_ns += std::max<int64_t>(0, now - busy_since_ns);
  }
  int64_t busy_ns = 0;  // total time with something outstanding, up to busy_since_ns
  int64_t busy_since_ns = 0;
  int64_t all_silent_ns = 0;  // when all open channels were last seen to be silent
};

// In its copies of work requests the transport records the requested rail and the lane, in case it sends them again,
// and how much is transferred already.
inline constexpr uint32_t kRoutingBits = 6;
static_assert((kRailsMax + 1) << 1 <= 1u << kRoutingBits);
inline uint32_t routing_of(uint32_t rail, Lane lane) {
  return (rail + 1) << 1 | static_cast<uint32_t>(lane);  // kAnyRail + 1 is 0
}
inline uint32_t rail_of(const WorkRequest& request) {
  return ((request.reserved & ((1u << kRoutingBits) - 1)) >> 1) - 1;
}
// A multiple of kResumeBytes. Sufficient for ranges of up to 256 GiB; longer ones resume there at the latest.
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
// The peer's pool has taken these messages. False: invalid.
bool take_taken(OutLink& link, const TakenMeta& taken);
// Frames what the peer is to be told about messages that were taken.
void put_taken(InLink& link, TxBatch& batch);
// Repeats on this connection what we have told the peer on any connection of the link: a peer that reads of our end on
// one of them reads no further on the others.
void append_last_words(const InLink& link, InChannel& by);
// Makes the two each other's twins; their former twins, if any, have none then.
void pair_twins(OutLink& out, InLink& in);

// --- what we receive ---

class InStream final : public Stream {
 public:
  InStream(TcpTransport* transport, InChannel* channel, std::shared_ptr<Connection> connection);
  // A region was revoked: the stream places nothing more into it and reads nothing more from it.
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
    RegionUse region;  // none: closed meanwhile
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
  bool operation_refused_ = false;  // a frame of the current operation, which has several, was refused
  uint64_t begun_bytes_ = 0;        // bytes of that operation that are in place
  std::deque<ReadJob> reads_;
  std::vector<RegionUse> views_;  // regions that the batch being sent has views of
};

struct HeldMessage {
  std::vector<uint8_t> payload;
  uint64_t id;
};

// How many message outcomes we keep. An honest peer needs fewer: kMessagesUnderWayMax that it has not been told, and as
// many before the newest one (InLink::outcomes), which it is told again.
inline constexpr size_t kOutcomesMax = 4 * kMessagesUnderWayMax;

// What became of a message.
struct MessageOutcome {
  uint64_t id;
  Status status;
  uint64_t bytes = 0;  // for kMessageTooLong: its length
};
// How the initiator is told that no buffer received it.
RefusedMeta meta_of(const MessageOutcome& message);
std::string text_of(const MessageOutcome& message);

// Invariant: `placed` counts exactly the operations that were refused, or whose bytes are in place and whose immediates
// were counted.
struct InChannel {
  InLink* link = nullptr;
  uint32_t index = 0;
  uint32_t epoch_min = 1;  // connections of earlier epochs are over
  uint64_t placed = 0;
  uint64_t ack_sent = 0;
  // How many bytes of the next operation are in place, and which connection delivered them. Kept while the initiator
  // may ask.
  uint64_t begun_bytes = 0;
  uint32_t begun_epoch = 0;
  std::vector<std::byte> control;  // frames to send first
  struct Refusal {
    uint64_t operation;
    Status status;
    std::string text;
  };
  // Kept while the initiator may have to ask again. Invariant: they belong to operations later than placed -
  // kOperationsUnderWayMax, at most one for each.
  std::deque<Refusal> refusals;
  uint64_t newest_refused = 0;  // operation; 0: none
  std::unique_ptr<InStream> stream;
  bool is_open() const { return stream != nullptr && !stream->is_broken(); }
};

// One peer's operations towards us.
struct InLink {
  TcpTransport* transport = nullptr;
  uint64_t id = 0;
  std::shared_ptr<const Address> peer;
  std::map<uint32_t, InChannel> channels;  // by the initiator's index
  std::deque<HeldMessage> held;
  uint64_t held_bytes = 0;
  // To be told by whichever channel sends next.
  std::vector<TakenMeta> taken;
  std::vector<MessageOutcome> untaken;
  // Already told; told again if a connection that may have carried them broke. Ids are later than newest_id -
  // kMessagesUnderWayMax.
  std::deque<MessageOutcome> outcomes;
  uint64_t newest_id = 0;  // the newest message that arrived
  OutLink* twin = nullptr;
  bool over = false;  // it said goodbye, or began another link
  bool is_connected() const {
    return std::any_of(channels.begin(), channels.end(), [](const auto& item) { return item.second.is_open(); });
  }
  int64_t unconnected_since_ns = 0;  // 0: connected. Set by TcpTransport::note_connected
  // An acknowledgement is due: it rides on our own next operation to this peer if there is one soon.
  bool ack_due = false;
  bool ack_now = false;
  bool ack_listed = false;  // in the transport's list
  int64_t ack_due_since_ns = 0;
  int32_t rides = 4;  // how often waiting for a ride paid off recently: 0 never, up to 8
  int64_t acked_alone_ns = 0;
};

}  // namespace crossrail::tcp
