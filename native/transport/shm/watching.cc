// The initiator's links as a whole: polling, which path private memory takes, whether the peer still moves, explain().
#include <algorithm>
#include <fstream>

#include "transport/shm/shm_transport.h"
#include "util/clock.h"

namespace crossrail::shm {

namespace {

constexpr uint64_t kTrialBytes = uint64_t{32} << 20;  // moved each way before the private paths are compared
constexpr double kAttachMargin = 1.15;  // attaching costs the initiator alone, but stalls on the kernel's page work
constexpr int64_t kPingAfterNs = 100'000'000;
constexpr int64_t kFrozenAfterNs = 250'000'000;

double gb_per_s(uint64_t bytes, int64_t ns) {
  return ns > 0 ? static_cast<double>(bytes) / static_cast<double>(ns) : 0;
}

std::string format_rate(double rate) {
  char text[32];
  std::snprintf(text, sizeof text, "%.1f GB/s", rate);
  return text;
}

// What /proc says of the process: 'T' is stopped. Empty when it cannot be seen.
std::string process_state(uint32_t pid) {
  std::ifstream file("/proc/" + std::to_string(pid) + "/stat");
  std::string line;
  if (pid == 0 || !std::getline(file, line)) return {};
  const size_t after_name = line.rfind(") ");
  if (after_name == std::string::npos || after_name + 2 >= line.size()) return {};
  const char state = line[after_name + 2];
  return state == 'T' || state == 't' ? "it is stopped (SIGSTOP or a debugger)"
                                      : std::string("its process state is ") + state;
}

}  // namespace

uint32_t ShmTransport::poll_outgoing(Outgoing& link, int64_t now) {
  const uint64_t staged_before = link.staged_bytes;
  uint32_t moved = retire_staged(link, link.messages);
  moved += retire_staged(link, link.services);
  if (link.messages_wanted) moved += retry_messages(link);
  if (link.responses_due > 0) moved += take_responses(link);
  uint32_t pushed = 0;
  bool backlog = false;
  for (RailQueue& rail : link.rails) {
    moved += retire_staged(link, rail);
    if (!rail.pending.empty()) pushed += push_pending(link, rail);
    if (rail.pending.empty()) continue;
    const WorkRequest& head = rail.pending.front().request;
    const Import& import = *static_cast<ShmKey*>(head.remote)->import;
    if (import.is_gpu || gpu_of(head) >= 0) {  // says nothing of the way between hosts' memory
      const bool waits_for_us = import.state != Import::State::kPending && rail.writer.has_room();
      gpu_copies_wait_ = gpu_copies_wait_ || (waits_for_us && goes_by_gpu(rail.pending.front()));
    } else {
      backlog = true;
    }
  }
  // The staged path is timed only while it has as much work as it can take.
  if (link.backlog_ns != 0) link.choice.staged.add(link.staged_bytes - staged_before, now - link.backlog_ns);
  link.backlog_ns = backlog ? now : 0;
  if (link.choice.phase == PrivateChoice::Phase::kTryStaged) weigh_private_paths(link);
  if (moved + pushed > 0) {
    ring_later(*link.home);
    link.moved_ns = now;
  } else if (link.outstanding > 0) {
    check_liveness(link, now);
  }
  return moved + pushed;
}

void ShmTransport::weigh_private_paths(Outgoing& link) {
  PrivateChoice& choice = link.choice;
  if (choice.phase == PrivateChoice::Phase::kTryStaged && choice.staged.bytes >= kTrialBytes) {
    if (link.pid == 0) {
      choice.phase = PrivateChoice::Phase::kStaged;
      choice.reason = "cross-memory attach is not possible: the peer is in another pid namespace";
    } else {
      choice.phase = PrivateChoice::Phase::kTryAttach;
    }
  } else if (choice.phase == PrivateChoice::Phase::kTryAttach && choice.attach.bytes >= kTrialBytes) {
    const bool attach_wins = choice.attach.best > kAttachMargin * choice.staged.best;
    choice.phase = attach_wins ? PrivateChoice::Phase::kAttach : PrivateChoice::Phase::kStaged;
    choice.reason = "measured on this link: staged " + format_rate(choice.staged.best) + ", cross-memory attach " +
                    format_rate(choice.attach.best);
  }
}

void ShmTransport::check_liveness(Outgoing& link, int64_t now) {
  if (link.frozen || now - link.moved_ns < kPingAfterNs) return;
  if (link.pinged_ns == 0) {
    link.pinged_ns = now;
    control_->ping(link.id);
  } else if (now - link.pinged_ns > kFrozenAfterNs) {
    link.frozen = true;
    const std::string state = process_state(link.pid);
    sink_->on_link_frozen(
        link, true, "process " + std::to_string(link.pid) + " does not answer" + (state.empty() ? "" : ": " + state));
  }
}

// --- explaining ---

uint64_t ShmTransport::rail_depth(Link& base, uint32_t rail_index) {
  const RailQueue& rail = static_cast<Outgoing&>(base).rails[rail_index];
  uint64_t depth = rail.pending.size();
  for (uint64_t at = rail.retired; rail.staged_inflight > 0 && at < rail.writer.position(); ++at) {
    const InFlight& slot = rail.inflight[at % kRingEntries];
    if (slot.staged && slot.context != nullptr) depth += slot.retires;  // else a chunk of one whose end is to come
  }
  return depth;
}

std::vector<PathReport> ShmTransport::explain(Link& base) {
  auto& link = static_cast<Outgoing&>(base);
  std::vector<PathReport> reports;
  for (const auto& [region_id, import] : link.imports) {
    PathReport report;
    report.what = "region " + std::to_string(region_id >> kRegionSlotBits) + " (" +
                  std::to_string(import->length_bytes) + " bytes)";
    report.bytes = import->bytes_moved;
    report.gb_per_s = gb_per_s(import->timed_bytes, import->timed_ns);
    switch (import->state) {
      case Import::State::kPending:
        report.path = "unresolved";
        report.reason = "waiting for the peer to describe the region";
        break;
      case Import::State::kRefused:
        report.path = "closed";
        report.reason = import->text.empty() ? "the peer has no such region (any more)" : import->text;
        break;
      case Import::State::kDirect:
        report.path = import->is_local ? "local" : "mapped";
        report.reason =
            import->is_local ? "both engines live in this process" : "the region is engine-owned memory, mapped here";
        break;
      case Import::State::kPrivate:
        if (import->is_gpu) {
          if (import->was_copied_by_gpu) {
            report.path = import->is_local ? "local" : "cuda-ipc";
            report.reason = "the region is memory of a GPU, and our GPU copies to and from it; host memory is staged";
            break;
          }
          report.path = "staged";
          report.reason = "the region is memory of a GPU: the driver copies between it and host memory that both map";
          if (!import->why_staged.empty()) report.reason += "; our GPU does not reach it: " + import->why_staged;
          if (link.pinned && !link.pinned->is_pinned())
            report.reason += ", which it would not pin, so slowly: raise the limit of locked memory (ulimit -l)";
          break;
        }
        report.path = link.choice.uses_attach() ? "cross-memory-attach" : "staged";
        report.reason = "the region is private memory of the peer; " + link.choice.reason;
        if (!link.choice.uses_attach()) report.gb_per_s = link.choice.staged.best;
        break;
    }
    reports.push_back(std::move(report));
  }
  return reports;
}

}  // namespace crossrail::shm
