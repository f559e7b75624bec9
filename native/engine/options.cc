#include "engine/options.h"

#include <bit>
#include <string>

#include "engine/engine.h"
#include "util/errors.h"

namespace crossrail {

namespace {

void check_option(bool ok, const char* name, const std::string& value, const char* bound) {
  if (!ok) throw UsageError(std::string(name) + " = " + value + " is not in " + bound);
}

void check_rdma(const RdmaOptions& options) {
  check_option(options.gid_index >= -1 && options.gid_index < 256, "rdma.gid_index", std::to_string(options.gid_index),
               "-1..255");
  check_option(options.traffic_class < 256, "rdma.traffic_class", text(options.traffic_class), "0..255");
  check_option(options.service_level < 16, "rdma.service_level", text(options.service_level), "0..15");
  check_option(options.path_mtu_bytes == 0 || (std::has_single_bit(options.path_mtu_bytes) &&
                                               options.path_mtu_bytes >= 256 && options.path_mtu_bytes <= 4096),
               "rdma.path_mtu", text(options.path_mtu_bytes), "256, 512, 1024, 2048, 4096, or 0: the port's");
  check_option(options.partition <= 0xffff, "rdma.partition", text(options.partition), "0..0xffff");
  check_option(options.chain_length >= 1 && options.chain_length <= RdmaOptions::kChainMax, "rdma.chain_length",
               text(options.chain_length), "1..32");
}

void check_transports(const EngineOptions& options) {
  constexpr size_t kSecretBytesMax = 1024;
  uint32_t transports = 0;
  for (const TransportKind kind : options.transports) {
    if ((transports & transport_bit(kind)) != 0)
      throw UsageError("transports names " + std::string(transport_name(kind)) + " twice");
    transports |= transport_bit(kind);
  }
  if (transports == 0) throw UsageError("transports is empty: an engine has at least one");
  const bool simulated = (transports & transport_bit(TransportKind::kSim)) != 0;
  if (simulated && transports != transport_bit(TransportKind::kSim))
    throw UsageError("transport 'sim' cannot be combined with others: its time is virtual");
  if (simulated != (options.simulation != nullptr))
    throw UsageError(simulated ? "transport 'sim' needs a world: open the engine inside `with sim.World():`, or by "
                                 "world.host(...).engine(...)"
                               : "an engine in a simulated world has transport 'sim' and no other");
  const std::string has = ", and the engine has transport " + transport_names(transports) + " only: open it with ";
  if ((transports & (transport_bit(TransportKind::kTcp) | kRdmaTransports)) == 0 && !options.rails.empty())
    throw UsageError("rails as a list of names needs a network transport" + has +
                     "transport 'tcp', 'verbs', 'ofi' or 'auto'");
  if ((transports & transport_bit(TransportKind::kTcp)) == 0 && options.port != 0)
    throw UsageError("port = " + text(options.port) + " needs tcp" + has + "transport 'tcp' or 'auto'");
  check_rdma(options.rdma);
  if (!options.rails.empty() && options.rails.size() != options.rail_count)
    throw UsageError("rails is a list of " + text(options.rails.size()) + ", must have " + text(options.rail_count) +
                     " entries: rail_count is " + text(options.rail_count));
  check_option(options.secret.size() <= kSecretBytesMax, "secret", "text of " + text(options.secret.size()) + " bytes",
               "0..1024 bytes");
  check_option(options.peer_timeout_ns > 0, "peer_timeout_s",
               std::to_string(static_cast<double>(options.peer_timeout_ns) * 1e-9), "the numbers above 0");
}

void check_tls(const EngineOptions& options) {
  if (!options.tls.is_on()) return;
  uint32_t mask = 0;
  for (const TransportKind kind : options.transports) mask |= transport_bit(kind);
  if ((mask & transport_bit(TransportKind::kTcp)) != 0 && (mask & kRdmaTransports) == 0) return;
  throw UsageError("tls protects only tcp, and the engine has transport " + transport_names(mask) +
                   ": open it with transport 'tcp', 'shm+tcp' or 'auto', or without tls");
}

}  // namespace

void check_options(const EngineOptions& options) {
  check_option(!options.name.empty() && options.name.size() <= 64, "name", "'" + options.name + "'", "1..64 bytes");
  check_option(options.rail_count >= 1 && options.rail_count <= kRailsMax, "rails", text(options.rail_count), "1..16");
  check_transports(options);
  check_tls(options);
  check_option(options.submit_queue_depth >= 16 && options.submit_queue_depth <= 65536 &&
                   std::has_single_bit(options.submit_queue_depth),
               "submit_queue_depth", text(options.submit_queue_depth), "the powers of two 16..65536");
  check_option(options.imm_counters_max >= 1 && options.imm_counters_max <= (1u << 24), "imm_counters_max",
               text(options.imm_counters_max), "1..2**24");
  check_option(options.message_bytes_max >= 1 && options.message_bytes_max <= kMessageBytesMax, "message_bytes_max",
               text(options.message_bytes_max), "1..262144");
  check_option(options.spin_ns >= 0 && options.spin_ns <= 10'000'000'000, "spin_us",
               std::to_string(static_cast<double>(options.spin_ns) * 1e-3), "0..1e7");
  check_option(options.watcher_poll_ns >= 0 && options.watcher_poll_ns <= 1'000'000'000, "watcher_poll_us",
               std::to_string(static_cast<double>(options.watcher_poll_ns) * 1e-3), "0..1e6");
  check_option(options.connect_timeout_ns > 0, "connect_timeout_s",
               std::to_string(static_cast<double>(options.connect_timeout_ns) * 1e-9), "the numbers above 0");
  check_option(
      options.recorder_entries == 0 || (options.recorder_entries >= 64 && options.recorder_entries <= (1u << 20) &&
                                        std::has_single_bit(options.recorder_entries)),
      "recorder_entries", text(options.recorder_entries), "the powers of two 64..2**20, or 0: off");
  check_option(options.watchdog_ns >= 0, "watchdog_s", std::to_string(static_cast<double>(options.watchdog_ns) * 1e-9),
               "the numbers above 0");
  constexpr size_t kDirectoryBytesMax = 512;
  check_option(options.dump_directory.size() <= kDirectoryBytesMax, "dump_dir", "'" + options.dump_directory + "'",
               "the paths of at most 512 bytes");
  check_option(options.heartbeat_ns >= 0, "heartbeat_s",
               std::to_string(static_cast<double>(options.heartbeat_ns) * 1e-9), "the numbers above 0, or none");
  check_option(options.worker_cpu >= -1 && options.worker_cpu < 1024, "worker_cpu", std::to_string(options.worker_cpu),
               "-1..1023");
}

}  // namespace crossrail
