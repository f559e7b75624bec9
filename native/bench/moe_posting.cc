#include "bench/moe_posting.h"

#include <string>
#include <utility>

#include "moe/proxy_thread.h"
#include "moe/stream_proxy.h"
#include "transport/null/null_transport.h"
#include "util/clock.h"

namespace crossrail::bench {

namespace {

constexpr uint32_t kWorld = 64;
constexpr uint32_t kNode = 8;
constexpr uint32_t kExperts = 256;
constexpr uint32_t kTopK = 8;
constexpr uint32_t kTokens = 128;
constexpr int32_t kRowsOfExpert = 4;         // per rank, if all experts are equally popular
constexpr uint64_t kStrideBytes = 7392;      // 7168 of fp8, their scales, rounded up
constexpr uint64_t kYBytes = 14336;          // in bfloat16
constexpr uint64_t kRows = kTokens * kTopK;  // of each part: nothing is moved
constexpr int64_t kSpinNs = 50'000;          // the default of engines
constexpr int64_t kPatienceNs = 600'000'000'000;

moe::LayoutShape shape() {
  std::vector<uint32_t> nodes(kWorld);
  for (uint32_t rank = 0; rank < kWorld; ++rank) nodes[rank] = rank / kNode;
  return {.world = kWorld,
          .experts = kExperts,
          .top_k = kTopK,
          .max_tokens = kTokens,
          .private_rows = 19,
          .node_of_rank = std::move(nodes)};
}

moe::FarMemory parts() {
  moe::FarMemory memory{
      .route_bytes = kExperts * 4 + moe::kFarewellBytes, .stride_bytes = kStrideBytes, .y_bytes = kYBytes};
  const auto place = [](uint64_t& end, uint64_t bytes) { return std::exchange(end, end + bytes); };
  memory.routes_in = place(memory.routes_parity_bytes, kWorld * memory.route_bytes);
  memory.routes_out = place(memory.routes_parity_bytes, memory.route_bytes);
  memory.rows_in = place(memory.rows_parity_bytes, kRows * kStrideBytes);
  memory.results_in = place(memory.rows_parity_bytes, kRows * kYBytes);
  memory.rows_out = place(memory.rows_parity_bytes, kRows * kStrideBytes);
  memory.results_out = place(memory.rows_parity_bytes, kRows * kYBytes);
  return memory;
}

EngineRef open_engine(const char* name) {
  EngineOptions options;
  options.name = name;
  options.transports = {TransportKind::kNull};
  options.polling = Polling::kManual;  // this thread drives the engine, so the result depends on no other
  return Engine::open(options);
}

moe::FarRegions<RegionRef> alloc(Engine& engine, const moe::FarMemory& memory) {
  return {engine.alloc(moe::kParities * memory.routes_parity_bytes, false),
          engine.alloc(moe::kParities * memory.rows_parity_bytes, false)};
}

int64_t first_post_since(int64_t begin, Engine& engine, Guard& guard) {
  int64_t posted = 0;
  // acquire: pairs with NullTransport::post().
  while ((posted = NullTransport::first_post_ns.load(std::memory_order_acquire)) == 0) {
    engine.progress();
    guard.tick();
  }
  return posted - begin;
}

void forget_posts() { NullTransport::first_post_ns.store(0, std::memory_order_release); }

const std::vector<int32_t> kCounts(kExperts, kRowsOfExpert);

}  // namespace

MoePosting::MoePosting()
    : layout_(shape()),
      memory_(parts()),
      engine_(open_engine("bench-moe-0")),
      far_(open_engine("bench-moe-far")),
      regions_(alloc(*engine_, memory_)),
      there_(alloc(*far_, memory_)) {
  meet();
}

MoePosting::~MoePosting() {
  NullTransport::first_post_ns.store(-1, std::memory_order_relaxed);
  proxy_.reset();
  engine_->close(0);
  far_->close(0);
}

// A proxy whose rounds start again. One engine stands for all other ranks: nothing is sent to any.
void MoePosting::meet() {
  proxy_.reset();
  proxy_ = std::make_unique<moe::Proxy>(engine_, layout_, 0, memory_, regions_);
  round_ = 0;
  for (const uint32_t rank : proxy_->far_ranks()) {
    const auto remote = [&](const RegionRef& region) {
      RegionDescriptor descriptor = region->descriptor();
      descriptor.owner.incarnation[0] = static_cast<uint8_t>(rank);
      descriptor.owner.name = "rank-" + std::to_string(rank);
      return engine_->remote_region(descriptor);
    };
    const moe::FarRegions<RemoteRegionRef> there{remote(there_.routes), remote(there_.rows)};
    const std::vector<uint32_t> imms(moe::kFarSteps * moe::kParities, 1 + rank);
    engine_->connect(*there.rows->peer(), 0, {});  // begins
    while (there.rows->peer()->state() != PeerState::kConnected) engine_->progress();
    proxy_->connect(rank, there, imms);
  }
}

void MoePosting::drain(Guard& guard) {
  while (engine_->stats().transfers_inflight > 0) {
    engine_->progress();
    guard.tick();
  }
}

template <typename Post>
std::vector<int64_t> MoePosting::until_all(uint32_t rounds, Guard& guard, Post post) {
  std::vector<int64_t> took_ns;
  for (uint32_t i = 0; i < rounds; ++i) {
    proxy_->send_routes(++round_, kCounts);
    drain(guard);
    const uint64_t before = engine_->stats().work_requests_posted;
    const int64_t begin = now_ns();
    post(round_);
    while (engine_->stats().work_requests_posted - before < kWorld - kNode) {
      engine_->progress();
      guard.tick();
    }
    took_ns.push_back(now_ns() - begin);
    drain(guard);
  }
  return took_ns;
}

std::vector<int64_t> MoePosting::routes(uint32_t rounds, Guard& guard) {
  return until_all(rounds, guard, [&](uint32_t) { proxy_->send_routes(++round_, kCounts); });
}

std::vector<int64_t> MoePosting::rows(uint32_t rounds, Guard& guard) {
  return until_all(rounds, guard, [&](uint32_t round) { proxy_->send_rows(round); });
}

std::vector<int64_t> MoePosting::results(uint32_t rounds, Guard& guard) {
  std::vector<int32_t> table;
  for (uint32_t group = 0; group < layout_.groups(); ++group) table.insert(table.end(), kCounts.begin(), kCounts.end());
  const moe::Placement placement(layout_, table);
  return until_all(rounds, guard, [&](uint32_t round) { proxy_->send_results(round, &placement); });
}

std::vector<int64_t> MoePosting::first_write_by_caller(uint32_t rounds, Guard& guard) {
  std::vector<int64_t> took_ns;
  for (uint32_t i = 0; i < rounds; ++i) {
    forget_posts();
    const int64_t begin = now_ns();
    proxy_->send_routes(++round_, kCounts);
    took_ns.push_back(first_post_since(begin, *engine_, guard));
    drain(guard);
  }
  return took_ns;
}

std::vector<int64_t> MoePosting::first_write_by_thread(int32_t cpu, uint32_t rounds, Guard& guard) {
  moe::ProxyThread thread(*proxy_, cpu, kSpinNs);
  std::vector<int64_t> took_ns;
  for (uint32_t i = 0; i < rounds; ++i) {
    forget_posts();
    const int64_t begin = now_ns();
    thread.send_routes(++round_, kCounts);
    took_ns.push_back(first_post_since(begin, *engine_, guard));
    if (!thread.settle(guard.deadline())) guard.look();
    drain(guard);
  }
  return took_ns;
}

// No other rank sends anything, so no round ends: of each StreamProxy the second round is measured, the last that may
// begin.
std::vector<int64_t> MoePosting::first_write_of_stream(int32_t cpu, uint32_t rounds, Guard& guard) {
  constexpr uint64_t kLine = 64;
  moe::StreamBoard parts{};
  uint64_t end = moe::kStreamWords * sizeof(device::RoundWords);
  const uint64_t begin_bytes = end;
  const auto place = [&end](uint64_t bytes) { return std::exchange(end, end + (bytes + kLine - 1) / kLine * kLine); };
  const uint64_t most = uint64_t{layout_.groups()} * kTokens * 4;
  parts.numbers = place(2 * sizeof(int32_t));
  parts.routes = place(kRows * sizeof(int32_t));
  parts.expert_rows = place(kExperts * sizeof(int32_t));
  parts.expert_offsets = place((kExperts + 1) * sizeof(int32_t));
  parts.moves = place(most * sizeof(moe::Move));
  parts.returns = place(most * sizeof(moe::Return));
  parts.parity_bytes = end - begin_bytes;
  struct alignas(kLine) Line {
    std::byte bytes[kLine];
  };
  std::vector<int64_t> took_ns;
  for (uint32_t i = 0; i < rounds; ++i) {
    meet();
    std::vector<Line> board((begin_bytes + moe::kParities * parts.parity_bytes + kLine - 1) / kLine);
    const std::span<std::byte> bytes(board.front().bytes, board.size() * kLine);
    for (uint64_t parity = 0; parity < moe::kParities; ++parity) {
      auto* const routes = reinterpret_cast<int32_t*>(bytes.data() + parts.routes + parity * parts.parity_bytes);
      for (uint64_t route = 0; route < kRows; ++route) routes[route] = static_cast<int32_t>(route % kExperts);
    }
    moe::StreamProxy stream(engine_, *proxy_, layout_, 0, bytes, parts,
                            {.cpu = cpu,
                             .spin_ns = kSpinNs,
                             .timeout_ns = kPatienceNs,
                             .rows_limits = std::vector<int64_t>(kWorld, static_cast<int64_t>(most)),
                             .routes_limits = std::vector<int32_t>(kWorld, kTokens * 4)});
    for (uint64_t round = 1; round <= moe::kParities; ++round) {
      forget_posts();
      const int64_t begin = now_ns();
      device::publish(stream.words(moe::StreamWord::kRoutes), round);
      const int64_t took = first_post_since(begin, *engine_, guard);
      if (round == moe::kParities) took_ns.push_back(took);
      drain(guard);
    }
    stream.stop();
  }
  return took_ns;
}

}  // namespace crossrail::bench
