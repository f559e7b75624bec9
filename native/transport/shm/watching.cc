// The initiator's links as a whole: polling, the path for private memory, whether the peer still moves, explain().
#include <fstream>
#include <utility>

#include "transport/shm/shm_transport.h"
#include "util/clock.h"

namespace crossrail::shm {

namespace {

constexpr int64_t kPingAfterNs = 100'000'000;
constexpr int64_t kFrozenAfterNs = 250'000'000;

std::string format_rate(double rate) {
  char text[32];
  std::snprintf(text, sizeof text, "%.1f GB/s", rate);
  return text;
}

// The state letter of the process in /proc, that of its main thread. 0 if it is not visible.
char process_state(uint32_t pid) {
  std::ifstream file("/proc/" + std::to_string(pid) + "/stat");
  std::string line;
  if (pid == 0 || !std::getline(file, line)) return 0;
  const size_t after_name = line.rfind(") ");
  if (after_name == std::string::npos || after_name + 2 >= line.size()) return 0;
  return line[after_name + 2];
}

}  // namespace

std::string silence_named(char state) {
  const std::string letter = std::string(" (state ") + state + ")";
  switch (state) {
    case 0:
      return {};
    case 'T':
    case 't':
      return ": it is stopped (SIGSTOP or a debugger)";
    case 'Z':
    case 'X':
      return ": its main thread has ended" + letter;
    case 'D':
      return ": it is not stopped; it waits for a disk or a device, or swaps" + letter;
    case 'R':
      return ": it is not stopped, its main thread has work" + letter + "; perhaps it gets too little CPU time";
    default:
      return ": it is not stopped by a signal, its main thread waits" + letter +
             "; perhaps it gets no CPU time, or is paused with its container";
  }
}

uint32_t ShmTransport::poll_outgoing(Outgoing& link, int64_t now) {
  const int64_t since = link.staging_ns;
  uint32_t moved = retire_staged(link, link.messages);
  moved += retire_staged(link, link.services);
  if (link.messages_wanted) moved += retry_messages(link);
  moved += take_responses(link);
  uint32_t pushed = 0;
  bool is_staging = link.responses_due > 0;
  for (RailQueue& rail : link.rails) {
    moved += retire_staged(link, rail);
    if (!rail.pending.empty()) pushed += push_pending(link, rail);
    is_staging = is_staging || rail.staged_inflight > 0 || !rail.pending.empty();
    if (rail.pending.empty()) continue;
    const WorkRequest& head = rail.pending.front().request;
    const Import& import = *static_cast<ShmKey*>(head.remote)->import;
    if (import.is_gpu || gpu_of(head) >= 0) {
      const bool waits_for_us = import.state != Import::State::kPending && rail.writer.has_room();
      gpu_copies_wait_ = gpu_copies_wait_ || (waits_for_us && goes_by_gpu(rail.pending.front()));
    }
  }
  if (link.full_queues > 0) moved += note_room(link);  // last: the above notices room as well
  time_staging(link, since, now);
  if (!is_staging) link.staging_ns = 0;
  if (moved + pushed > 0) {
    ring_later(*link.home, kForWork);
    link.moved_ns = now;
  } else if (link.awaits_progress()) {
    check_liveness(link, now);
  }
  return moved + pushed;
}

// The number of full queues from which the target has taken something since.
uint32_t ShmTransport::note_room(Outgoing& link) {
  uint32_t freed = 0;
  const auto look = [&](RailQueue& queue) {
    if (!queue.was_full || !queue.writer.has_room()) return;
    queue.was_full = false;
    ++freed;
  };
  look(link.messages);
  look(link.services);
  for (RailQueue& rail : link.rails) look(rail);
  link.full_queues -= freed;
  return freed;
}

// Timed work done since the last of it was done, or since it began.
void ShmTransport::time_staging(Outgoing& link, int64_t since, int64_t now) {
  for (size_t bulk = 0; bulk < link.choices.size(); ++bulk) {
    const uint64_t bytes = std::exchange(link.staged_bytes[bulk], 0);
    if (bytes == 0 || since == 0) continue;
    PrivateChoice& choice = link.choices[bulk];
    choice.staged.add(bytes, now - since);
    link.staging_ns = now;
    if (choice.tries_staged) weigh_private_paths(link, choice);
    if (choice.is_outdated()) choice.try_again();
  }
}

void ShmTransport::weigh_private_paths(const Outgoing& link, PrivateChoice& choice) {
  if (choice.tries_staged) {
    if (choice.staged.bytes < kTrialBytes) return;
    choice.tries_staged = false;
    if (link.pid == 0) {
      choice.settle(PrivateChoice::Way::kStaged,
                    "cross-memory attach is not possible: the peer is in another pid namespace");
    }
    return;
  }
  if (!choice.weigh()) return;
  const bool is_bulk = &choice == &link.choices[1];
  choice.reason = is_bulk ? "measured on this link: staged " : "measured on this link, transfers below 1 MiB: staged ";
  choice.reason += format_rate(choice.staged.best);
  const double ahead = choice.attaching[0].trial.best;
  const double behind = choice.attaching[1].trial.best;
  if (ahead > 0) choice.reason += ", cross-memory attach " + format_rate(ahead);
  if (behind > 0) {
    choice.reason += ", cross-memory attach to less than 64 bytes behind the source in its page " + format_rate(behind);
  }
}

void ShmTransport::check_liveness(Outgoing& link, int64_t now) {
  if (link.frozen || now - link.moved_ns < kPingAfterNs) return;
  if (link.pinged_ns == 0) {
    link.pinged_ns = now;
    control_->ping(link.id);
  } else if (now - link.pinged_ns > kFrozenAfterNs) {
    link.frozen = true;
    sink_->on_link_frozen(link, true,
                          process_named(link.pid) + " does not answer" + silence_named(process_state(link.pid)));
  }
}

// --- explaining ---

uint64_t ShmTransport::rail_depth(Link& base, uint32_t rail_index) {
  const RailQueue& rail = static_cast<Outgoing&>(base).rails[rail_index];
  uint64_t depth = rail.pending.size();
  for (uint64_t at = rail.retired; rail.staged_inflight > 0 && at < rail.writer.position(); ++at) {
    const InFlight& slot = rail.inflight[at % kRingEntries];
    if (slot.staged && slot.context != nullptr) depth += slot.retires;  // else a chunk of an unfinished one
  }
  return depth;
}

std::vector<PathReport> ShmTransport::explain(Link& base) {
  auto& link = static_cast<Outgoing&>(base);
  std::vector<PathReport> reports;
  for (const auto& [region_id, import] : link.imports) {
    PathReport report;
    report.what = "region " + std::to_string(region_id) + " (" + std::to_string(import->length_bytes) + " bytes)";
    report.bytes = import->bytes_moved;
    report.gb_per_s = rate_gb_per_s(import->timed_bytes, import->timed_ns);
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
      case Import::State::kPrivate: {
        if (import->is_gpu) {
          if (import->was_copied_by_gpu) {
            report.path = import->is_local                              ? "local"
                          : import->shared.by == device::SharedBy::kVmm ? "cuda-vmm"
                                                                        : "cuda-ipc";
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
        const PrivateChoice& choice = link.choices[link.choices[1].bytes() >= link.choices[0].bytes()];
        const bool attaches = choice.attaches() && !choice.has_only_short();
        report.path = attaches ? "cross-memory-attach" : "staged";
        report.reason = "the region is private memory of the peer; ";
        report.reason += choice.has_only_short() ? "pieces shorter than " + std::to_string(kAttachBytesMin >> 10) +
                                                       " KiB are staged, and none that are longer were attached yet"
                                                 : choice.reason;
        if (!attaches && choice.staged.bytes >= kRateBytesMin) report.gb_per_s = choice.staged.best;
        break;
      }
    }
    reports.push_back(std::move(report));
  }
  return reports;
}

}  // namespace crossrail::shm
