// Both directions of talking to a peer: what we send it (OutLink) and what it sends us (InLink).
#pragma once

#include <algorithm>
#include <array>
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

// Small operations do not wait behind large ones: they have connections of their own, and queues.
enum class Lane : uint8_t { kSmall = 0, kBulk = 1 };
// Longer ones travel with the bulk, and what is part of much.
inline constexpr uint64_t kShortBytesMax = (16 << 10) - 1;

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
  uint64_t read_id_ = 0;  // of the data that is arriving
  uint64_t read_bytes_ = 0;
};

// Asks the peer for leave to use a connection that it made for our operations too. Ends like a Connector.
class Sharer final : public Stream {
 public:
  Sharer(OutChannel* channel, std::shared_ptr<Connection> connection, const ShareMeta& share, Deadline deadline);
  void check_deadline(int64_t now);

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
  const Deadline deadline_;
  bool asked_ = false;
  bool ended_ = false;
};

// One lane of one pair of rails. Outlives its connections.
// Lifecycle of a connection: 1. attempt (connector, or sharer). 2. open (stream). 3. broken: what was sent is in doubt until the
// peer, asked over any open channel of the link, has said how much of it was placed; then the rest is sent anew.
// Invariant: operations acked+1 .. acked+sent.size() are in `sent`, in order; `current` comes after them.
struct OutChannel final : Connector::Owner {
  OutChannel(TcpTransport* transport, OutLink* link, uint32_t index) : transport(transport), link(link), index(index) {}
  void on_connect_result(ConnectResult result) override;
  // Its connection is there.
  void on_opened();
  // There is none: tries again later. was_sharing: the attempt was a Sharer's.
  void on_attempt_failed(const ConnectResult& result, bool was_sharing);
  // What a failed attempt says of the peer: whether it is gone, or elsewhere.
  void judge_peer(const ConnectResult& result);
  // Posts operations into a batch.
  void fill(TxBatch& batch);
  // Whether the kernel has all of this operation. Else no peer can have placed it, and its source is still to be read.
  bool is_sent(uint64_t operation) const;

  Lane lane() const { return static_cast<Lane>(index & 1); }
  uint32_t pair() const { return index >> 1; }
  bool is_open() const { return stream != nullptr && !stream->is_broken(); }
  bool is_connecting() const { return connector != nullptr || sharer != nullptr; }
  // May carry operations: open, and nothing of an earlier connection is in doubt.
  bool is_usable() const { return is_open() && !in_doubt; }
  // Whether the latest connection was good for anything.
  bool was_good(int64_t now) const;
  // Whether it carries little words, but none of what waits and is long: packets as long as ours are dropped on the way.
  bool passes_only_short() const;
  // Whether what was sent over a connection that broke may be lost, or the answer to it.
  bool has_doubts() const;
  // Whether anything waits for its bytes to get through: not only for a peer that has them to take them.
  bool has_unplaced() const;
  // Whether to take the first of this many requests now. Not a long one that others would have done sooner.
  bool should_take(const WorkRequest& next, size_t queued) const;
  // Frames what is next, if it may go now and there is room. False: nothing.
  bool put_next(TxBatch& batch);
  // Frames as many of the queue's first writes as go into one. Returns how many.
  size_t put_writes(TxBatch& batch, RingQueue<WorkRequest>& queue, size_t room);
  // Frames the next part of `current`.
  void put_part(TxBatch& batch);
  // A write whose bytes are not to be had from our GPU: takes its place without them, uncounted, and fails here.
  void put_failed(TxBatch& batch);
  // Tells the engine of what is in `sent` from here on.
  void tell_sent(size_t first);

  TcpTransport* const transport;
  OutLink* const link;
  const uint32_t index;  // 2 * pair + lane
  uint32_t epoch = 0;    // of the latest attempt; increases from one to the next
  std::unique_ptr<Connector> connector;
  int64_t attempted_ns = 0;  // when it began
  std::unique_ptr<Sharer> sharer;
  std::unique_ptr<OutStream> stream;
  bool in_doubt = false;
  uint32_t doubt_epoch = 0;             // of the connection that brought what is in doubt,
  bool doubts_all = false;              // and by which nothing at all was placed, as far as we know
  bool has_faulted = false;             // the connection broke by memory of ours: of what is in doubt
  OutChannel* asked_through = nullptr;  // who carries our question; null: not asked yet
  bool wanted = false;                  // is to be connected, and connected again
  int64_t retry_at_ns = 0;
  int64_t retry_pause_ns = 0;
  bool shuns_sharing = false;  // the peer's connection was good for nothing; until one of our own cannot be made
  int64_t opened_at_ns = 0;
  uint64_t acked_at_opening = 0;
  int64_t broken_at_ns = 0;
  std::string trouble;  // why the last connection or attempt failed

  uint64_t acked = 0;
  RingQueue<WorkRequest> sent;
  // Of link->reads, those of this channel.
  uint32_t reads_open = 0;
  uint64_t reads_bytes = 0;
  Pace pace;
  struct Refusal {
    Status status;
    std::string text;
  };
  std::map<uint64_t, Refusal> refusals;  // by operation, of those after `acked`
  std::optional<WorkRequest> current;    // a long range, of which current_offset bytes are framed
  uint64_t current_offset = 0;
  uint64_t frame_bytes = kFrameBytesMax;  // of one frame of writes; shorter where connections live for less than that
  std::vector<std::byte> control;         // frames to send first
  int64_t pinged_ns = 0;
  int64_t moved_ns = 0;  // sign of life, or of the kernel getting rid of bytes
  int outq_bytes = 0;    // at the last look
  uint64_t bytes_acked = 0;
  uint64_t bytes_acked_at_opening = 0;
  uint64_t carried_bytes = 0;  // by this connection, either way, of what has arrived
  // Of its connections from now on: one was made, and then nothing long got through it.
  bool has_short_segments = false;
};

struct SentMessage {
  WorkRequest request;
  uint64_t id = 0;
  uint64_t operation = 0;
  uint32_t channel = 0;
  bool over = false;  // retired, or sent anew under another id
};

struct PendingRead {
  WorkRequest request;
  uint32_t channel = 0;
  uint64_t received_bytes = 0;
  bool failed = false;  // to reach the memory of our GPU
};

// A first connection that takes longer is attempted over the next rail as well.
inline constexpr int64_t kNextRailNs = 300'000'000;

// Operations of ours towards one peer.
struct OutLink final : Link {
  OutLink(TcpTransport* transport, uint64_t id, std::shared_ptr<const Address> address, std::vector<RailPair> pairs,
          uint32_t newest_epoch);
  uint32_t lanes() const override { return static_cast<uint32_t>(pairs.size()); }
  OutChannel& channel(uint32_t pair, Lane lane);  // made when first asked for
  OutChannel* find(uint32_t pair, Lane lane) { return channels[2 * pair + static_cast<uint32_t>(lane)].get(); }
  // Has the channels connected that work for this rail (kAnyRail: any) and lane needs.
  void want(uint32_t rail, Lane lane);
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
  // Back to where it came from, before all others.
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
  bool up = false;               // on_link_up was said
  bool frozen = false;
  bool is_dirty = false;    // in the transport's list of links with something to send
  bool is_watched = false;  // in the transport's list of links with something to wait for
  uint32_t newest_epoch;    // of its channels
  int64_t connect_by_ns = 0;
  int64_t held_since_ns = 0;   // without a connection, waits for others' attempts; 0: it does not
  int64_t waits_since_ns = 0;  // something is outstanding since; before that, silence was nothing to worry about
  int64_t down_since_ns = 0;   // no channel open since; 0: one is
  // Connections, one after the other, that broke before anything of what waits had got through.
  uint32_t vain_connections = 0;
  int64_t vain_since_ns = 0;
  std::string vain_trouble;     // what the latest of them broke of
  std::vector<bool> nobody_at;  // by pair: the latest attempt found nobody at that port of the peer
  std::string refusal;          // since a channel was last open: what the peer, or whoever is there, said
  std::optional<std::pair<std::string, bool>> doom;  // reason, orderly: goes down at the end of this poll
  InLink* twin = nullptr;  // the same peer's operations towards us. Invariant: twin->twin == this

  RingQueue<SentMessage> messages;  // by id, from first_message_id
  uint64_t first_message_id = 1;
  uint64_t messages_bytes = 0;  // sent and not taken
  uint64_t next_read_id = 1;
  std::unordered_map<uint64_t, PendingRead> reads;

  // `count` of what is outstanding is over.
  void end(uint32_t count, int64_t now) {
    outstanding -= count;
    if (outstanding == 0) busy_ns += std::max<int64_t>(0, now - busy_since_ns);
  }
  int64_t busy_ns = 0;  // with something outstanding, until now or, while there is, until it began
  int64_t busy_since_ns = 0;
};

// What the transport notes in its copies of work requests: the rail asked for and the lane, in case it goes out again, and
// how much of it is over there, or here, already.
inline constexpr uint32_t kRoutingBits = 6;
static_assert((kRailsMax + 1) << 1 <= 1u << kRoutingBits);
inline uint32_t routing_of(uint32_t rail, Lane lane) {
  return (rail + 1) << 1 | static_cast<uint32_t>(lane);  // kAnyRail + 1 is 0
}
inline uint32_t rail_of(const WorkRequest& request) {
  return ((request.reserved & ((1u << kRoutingBits) - 1)) >> 1) - 1;
}
// A multiple of kResumeBytes, which fits for ranges of up to 256 GiB; of what is longer not all is kept.
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
// Puts what is to be told of messages that were taken.
void put_taken(InLink& link, TxBatch& batch);
// Makes the two each other's twins, and those that were theirs nobody's.
void pair_twins(OutLink& out, InLink& in);

// --- what we receive ---

class InStream final : public Stream {
 public:
  InStream(TcpTransport* transport, InChannel* channel, std::shared_ptr<Connection> connection);
  // A region was revoked: nothing more goes into it, or comes out of it.
  void check_region();
  // Whether a frame is being placed there, or read from there.
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
  bool operation_refused_ = false;  // of an operation in several frames, one was refused
  uint64_t begun_bytes_ = 0;        // of such a one, that are in place
  std::deque<ReadJob> reads_;
  std::vector<RegionUse> views_;  // regions that the batch on its way has views of
};

struct HeldMessage {
  std::vector<uint8_t> payload;
  uint64_t id;
};

// What became of messages is kept of so many. Of an honest peer's it is less: kMessagesUnderWayMax that it was not told, and as
// many before the newest one (InLink::outcomes), which it is told again.
inline constexpr size_t kOutcomesMax = 4 * kMessagesUnderWayMax;

// What became of a message.
struct MessageOutcome {
  uint64_t id;
  uint64_t bytes;  // of one that was too long; kTaken
  static constexpr uint64_t kTaken = ~uint64_t{0};
};

// Invariant: `placed` counts exactly the operations whose bytes are in place and whose immediates were counted, or which
// were refused.
struct InChannel {
  InLink* link = nullptr;
  uint32_t index = 0;
  uint32_t epoch_min = 1;  // connections of earlier epochs are over
  uint64_t placed = 0;
  uint64_t ack_sent = 0;
  // Of the operation after those, the bytes in place, and which connection brought them. Kept while the initiator may ask.
  uint64_t begun_bytes = 0;
  uint32_t begun_epoch = 0;
  std::vector<std::byte> control;  // frames to send first
  struct Refusal {
    uint64_t operation;
    Status status;
    std::string text;
  };
  // Kept while the initiator may have to ask again. Invariant: of operations later than placed - kOperationsUnderWayMax,
  // one for each at most.
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
  // To be told, by whichever channel speaks next.
  std::vector<TakenMeta> taken;
  std::vector<MessageOutcome> too_long;
  // Told, and told again when a connection broke that may have had it. Of ids later than newest_id - kMessagesUnderWayMax.
  std::deque<MessageOutcome> outcomes;
  uint64_t newest_id = 0;  // of a message that arrived
  OutLink* twin = nullptr;
  bool over = false;  // it said goodbye, or began another
  bool is_connected() const {
    return std::any_of(channels.begin(), channels.end(), [](const auto& item) { return item.second.is_open(); });
  }
  int64_t unconnected_since_ns = 0;
  // Acknowledgements travel with our own next operation to this peer if there is one soon.
  bool ack_due = false;
  bool ack_now = false;
  bool ack_listed = false;  // in the transport's list
  int64_t ack_due_since_ns = 0;
  int32_t rides = 4;  // how well waiting for a ride has paid of late: 0 not at all, to 8
  int64_t acked_alone_ns = 0;
};

}  // namespace crossrail::tcp
