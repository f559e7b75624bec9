#include "transport/tcp/tcp_transport.h"

#include <sys/epoll.h>
#include <sys/resource.h>

#include <algorithm>
#include <cerrno>
#include <utility>

#include "transport/tcp/frames.h"
#include "util/entropy.h"
#include "util/errors.h"
#include "util/readable.h"

namespace crossrail::tcp {

namespace {

// A longer range becomes several work requests, the last of which waits for the others: rare, and short compared with
// 64 MiB.
constexpr uint64_t kSliceBytes = uint64_t{64} << 20;
constexpr uint64_t kPieceBytesMin = 256 << 10;

// A thousand peers need a thousand sockets and more: we use as many descriptors as the administrator allows.
void raise_descriptor_limit() {
  rlimit limit{};
  if (getrlimit(RLIMIT_NOFILE, &limit) != 0 || limit.rlim_cur >= limit.rlim_max) return;
  limit.rlim_cur = limit.rlim_max;
  setrlimit(RLIMIT_NOFILE, &limit);
}

Address with_endpoints(Address address, const std::vector<Rail>& rails) {
  for (const Rail& rail : rails) address.endpoints.push_back(rail.endpoint);
  return address;
}

}  // namespace

TcpTransport::TcpTransport(const TransportOptions& options, Sink* sink)
    : sink_(sink),
      options_(options),
      key_(handshake_key(options.secret, options.identity.incarnation)),
      tls_(options.tls.is_on() ? std::make_shared<TlsContext>(options.tls) : nullptr),
      connections_(&poller_),
      rails_(open_rails(options.rails, options.rail_count, options.port)),
      next_link_id_(kernel_entropy().draw_u64()) {
  address_ = with_endpoints(options.identity, rails_);
  traits_ = {.rail_count = static_cast<uint32_t>(rails_.size()),
             .slice_bytes_max = kSliceBytes,
             .message_bytes_max = options.message_bytes_max,
             .fifo_rails = false,
             .balances_rails = true,
             .moves_while_posting = false,
             .piece_bytes_min = kPieceBytesMin,
             .copies_gpu_memory = true};
  raise_descriptor_limit();
  for (uint32_t rail = 0; rail < rails_.size(); ++rail) {
    listeners_.push_back(std::make_unique<Listener>(this, rail));
    poller_.add(rails_[rail].listener.get(), listeners_.back().get(), EPOLLIN);
  }
  connections_.now = now_ = now_ns();
}

TcpTransport::~TcpTransport() { close(); }

std::vector<std::string> TcpTransport::rail_devices() const {
  std::vector<std::string> devices;
  for (const Rail& rail : rails_) devices.push_back(rail.device);
  return devices;
}

void TcpTransport::close() {
  if (closed_) return;
  closed_ = true;
  connections_.now = now_ = now_ns();
  send_acks(true);
  // First: the end of our operations may end connections that carry both directions.
  for (auto& [key, link] : in_) {
    tell_outcomes_again(*link);
    for (auto& [index, channel] : link->channels) {
      if (channel.is_open()) append_last_words(*link, channel);
    }
    for (auto& [index, channel] : link->channels) {
      if (!channel.is_open()) continue;
      append_end(channel.control, FrameType::kClosing, "the engine was closed");
      channel.stream->pump();
    }
  }
  while (!out_.empty()) {
    OutLink& link = *out_.back();
    say_goodbye(link, "the engine was closed");
    flush(link, Status::kEngineClosed, "the engine was closed");
  }
  out_.clear();
  in_.clear();
  unconnected_ = 0;
  dirty_.clear();
  watched_.clear();
  acks_.clear();
  holding_.clear();
  acceptors_.clear();
  dead_streams_.clear();
  dead_connectors_.clear();
  for (Rail& rail : rails_) {
    poller_.remove(rail.listener.get());
    rail.listener.reset();
  }
  poller_.close();
}

// The child's copies would keep the connections open when the parent dies.
void TcpTransport::abandon_after_fork() { poller_.abandon_after_fork(); }

// --- memory ---

std::unique_ptr<LocalRegion> TcpTransport::register_memory(uint64_t id, std::byte* base, uint64_t length_bytes,
                                                           Access access) {
  return regions_.add(id, base, length_bytes, access, -1, maps_file(base, length_bytes));
}

std::unique_ptr<LocalRegion> TcpTransport::register_gpu_memory(uint64_t id, const device::GpuMemory& memory,
                                                               Access access) {
  connections_.stages.prepare(memory.gpu().ordinal);
  return regions_.add(id, memory.base(), memory.length_bytes(), access, memory.gpu().ordinal);
}

std::unique_ptr<LocalRegion> TcpTransport::allocate(uint64_t id, uint64_t length_bytes, bool populate) {
  return regions_.allocate(id, length_bytes, populate);
}

// The peers from whom a frame is being placed there, or for whom a read is being answered.
std::vector<std::string> TcpTransport::users_of(const LocalRegion& region) {
  std::vector<std::string> names;
  for (const auto& [key, link] : in_) {
    const bool is_at = std::ranges::any_of(link->channels, [&](const auto& item) {
      return item.second.stream != nullptr && item.second.stream->is_at(region);
    });
    if (is_at) names.push_back(link->peer->name);
  }
  return names;
}

void TcpTransport::revoke_region(LocalRegion& region) { regions_.revoke(static_cast<TcpRegion&>(region)); }

bool TcpTransport::is_region_quiet(const LocalRegion& region) {
  return RegionTable::is_quiet(static_cast<const TcpRegion&>(region));
}

// --- peers ---

Link* TcpTransport::connect(const std::shared_ptr<const Address>& address) {
  connections_.now = now_ = now_ns();
  auto owned = std::make_unique<OutLink>(this, next_link_id_++, address,
                                         pair_rails(address_.endpoints, address->endpoints), newest_epoch_);
  OutLink& link = *owned;
  out_.push_back(std::move(owned));
  link.connect_by_ns = now_ + options_.connect_timeout_ns;
  link.down_since_ns = now_;
  for (auto& [key, incoming] : in_) {
    if (key.first == address->incarnation && incoming->is_connected()) pair_twins(link, *incoming);
  }
  if (link.pairs.empty()) {
    link.doom.emplace("none of our rails is of the same address family (IPv4, IPv6) as one of the peer's",
                      LinkEnd::kLost);
  } else {
    link.channel(0, Lane::kSmall).wanted = true;
  }
  watch(link);
  return &link;
}

void TcpTransport::disconnect(Link& link) {
  auto& out = static_cast<OutLink&>(link);
  say_goodbye(out, "it forgot this peer");
  flush(out, Status::kPeerLost, "forgotten on request");
}

std::unique_ptr<RemoteKey> TcpTransport::resolve(Link&, const RegionDescriptor& descriptor) {
  return std::make_unique<TcpKey>(descriptor.region_id);
}

std::vector<PathReport> TcpTransport::explain(Link& link) {
  auto& out = static_cast<OutLink&>(link);
  std::vector<PathReport> reports;
  for (uint32_t pair = 0; pair < out.pairs.size(); ++pair) {
    const RailPair& rails = out.pairs[pair];
    const Rail& rail = rails_[rails.rail];
    PathReport report;
    report.what = "rail " + std::to_string(rails.rail) + " to rail " + std::to_string(rails.peer_rail);
    report.path = "tcp";
    report.reason = to_text(rail.endpoint) + " to " + to_text(out.address->endpoints[rails.peer_rail]);
    if (!rail.netdev.empty()) report.reason += " by " + rail.netdev;
    std::string state = "connected when first needed";
    bool is_open = false;
    bool is_short = false;
    bool is_down = false;
    std::string missing;  // of two lanes, of which one can serve for both
    for (const Lane lane : {Lane::kSmall, Lane::kBulk}) {
      const OutChannel* channel = out.find(pair, lane);
      if (channel == nullptr) continue;
      report.bytes += channel->bytes_acked + channel->bytes_read;
      if (channel->is_open()) {
        is_open = true;
        const char* const cipher = channel->stream->connection()->cipher();
        state = cipher == nullptr ? "connected" : std::string("connected, ") + cipher;
        is_short = is_short || channel->has_short_segments;
      } else if (channel->is_connecting() || channel->wanted) {
        if (!is_open) state = channel->trouble.empty() ? "connecting" : "down: " + channel->trouble;
        const char* const length = lane == Lane::kSmall ? "short" : "long";
        if (!channel->trouble.empty()) {
          is_down = true;
          missing = std::string(length) + " operations have no connection of their own: " + channel->trouble;
        }
      }
    }
    report.reason += ", " + state;
    if (is_down && !is_open) report.down_rail = rails.rail;
    if (is_open && !missing.empty()) report.reason += "; " + missing;
    if (is_short) report.reason += ", by short packets: long ones do not arrive, look at the MTU of the way";
    report.gb_per_s = rate_gb_per_s(report.bytes, out.busy_ns);
    reports.push_back(std::move(report));
  }
  return reports;
}

std::vector<RailReport> TcpTransport::explain_rails(Link& link) {
  std::vector<RailReport> reports;
  for (const RailPair& pair : static_cast<OutLink&>(link).pairs) reports.push_back({pair.rail, pair.peer_rail});
  return reports;
}

uint64_t TcpTransport::rail_depth(Link& link, uint32_t rail) {
  auto& out = static_cast<OutLink&>(link);
  uint64_t depth = 0;
  out.for_each_channel([&](const OutChannel& channel) {
    if (out.pairs[channel.pair()].rail != rail) return;
    depth += channel.reads_open + (channel.current ? 1 : 0);  // a read is over when its data has arrived
    for (size_t i = 0; i < channel.sent.size(); ++i) depth += channel.sent[i].op == WorkOp::kRead ? 0 : 1;
  });
  return depth;
}

}  // namespace crossrail::tcp
