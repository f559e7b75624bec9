#include "engine/verification.h"

#include <algorithm>
#include <utility>
#include <vector>

#include "engine/core.h"
#include "util/errors.h"
#include "util/mutation.h"

namespace crossrail {

namespace {

constexpr size_t kJobsMax = 16384;                      // waiting questions from all peers: 64 MiB at most
static_assert(UntoldAnswers::kAnswersMax >= kJobsMax);  // for an asker that asked this much and was forgotten
constexpr uint32_t kGivenUpTold = 16;                   // per engine: where there is one such event, there may be many
constexpr uint64_t kSummedBytesPerTurn = uint64_t{1} << 20;  // checksummed before others get a turn

std::string hex_text(uint64_t value) {
  std::string text(16, '0');
  for (size_t i = 16; i > 0; --i, value >>= 4) text[i - 1] = "0123456789abcdef"[value & 15];
  return text;
}

std::string mismatch_text(uint64_t sum_sent, uint64_t sum_found, bool reads) {
  return "checksum " + hex_text(sum_sent) + (reads ? " was read" : " was sent") + ", the memory has " +
         hex_text(sum_found);
}

Status check(const Question& question, const RegionUse& region) {
  const Access needed = question.reads ? Access::kRemoteRead : Access::kRemoteWrite;
  if (!allows(region->access(), needed)) return Status::kAccessDenied;
  if (region->memory() != MemoryKind::kHost) return Status::kAccessDenied;  // the CPU cannot read GPU memory
  const uint64_t largest = *std::ranges::max_element(question.pages);
  // 128 bits: every one of these numbers comes from the peer.
  const auto end =
      static_cast<unsigned __int128>(largest) * question.stride_bytes + question.offset + question.page_bytes;
  return end > region->length_bytes() ? Status::kOutOfBounds : Status::kDone;
}

}  // namespace

void make_verify_plan(TransferWork& work) {
  work.verify = std::make_unique<VerifyPlan>();
  work.has_plan = true;
  VerifyPlan& plan = *work.verify;
  const bool also_counts = is_mutated(Mutation::kVerifiedAlsoCounts);
  plan.imm = std::exchange(work.imm, also_counts ? work.imm : kNoImm);
  const std::byte* const base = work.local->base() + work.local_offset;
  if (work.kind == OpKind::kRead) {
    plan.checks.push_back({0, 1, 0});
    return;
  }
  if (work.kind == OpKind::kScatter) {
    for (uint32_t i = 0; i < work.targets.size(); ++i) {
      Checksum sum;
      ScatterTarget& target = work.targets[i];
      sum.add(work.local->base() + target.src_offset, target.length_bytes);
      plan.checks.push_back({0, 1, sum.value(), i, std::exchange(target.imm, also_counts ? target.imm : kNoImm)});
    }
    return;
  }
  if (work.kind == OpKind::kWrite) {
    Checksum sum;
    sum.add(base, work.length_bytes);
    plan.checks.push_back({0, 1, sum.value()});
    return;
  }
  for (uint64_t page = 0; page < work.page_count;) {
    const auto count = static_cast<uint32_t>(std::min<uint64_t>(kPagesPerQuestion, work.page_count - page));
    Checksum sum;
    for (uint64_t i = page; i < page + count; ++i) {
      sum.add(base + work.local_pages[i] * work.local_stride_bytes, work.page_bytes);
    }
    plan.checks.push_back({page, count, sum.value()});
    page += count;
  }
}

// --- of our own transfers ---

bool Verifications::ask(Transfer* transfer) {
  TransferWork& work = EngineCore::work_of(*transfer);
  VerifyPlan& plan = *work.verify;
  plan.is_asked = true;
  for (const VerifyPlan::Check& check : plan.checks) {
    const bool scatters = work.kind == OpKind::kScatter;
    // If nothing came, the memory does not match either, which would look as if bytes had changed on their way.
    if (scatters && work.targets[check.target].is_broken) continue;
    Peer* const peer = scatters ? work.targets[check.target].peer : &work.peer();
    open_[next_token_] = {.transfer = transfer, .peer = peer, .check = check};
    unsent_.push_back(next_token_++);
    ++plan.open;
  }
  return plan.open > 0;
}

Question Verifications::question_of(const Open& open, uint64_t token) {
  const TransferWork& work = EngineCore::work_of(*open.transfer);
  Question question;
  question.token = token;
  question.sum = open.check.sum;
  question.imm = work.verify->imm;
  question.reads = work.kind == OpKind::kRead;
  question.pages = {0};
  if (work.kind == OpKind::kScatter) {
    const ScatterTarget& target = work.targets[open.check.target];
    question.imm = open.check.imm;
    question.region_id = target.dst->descriptor().region_id;
    question.offset = target.dst_offset;
    question.page_bytes = target.length_bytes;
    return question;
  }
  question.region_id = work.remote->descriptor().region_id;
  question.offset = work.remote_offset;
  question.page_bytes = work.length_bytes;
  if (work.kind == OpKind::kPagedWrites) {
    question.page_bytes = work.page_bytes;
    question.stride_bytes = work.remote_stride_bytes;
    const uint32_t* const first = work.remote_pages.get() + open.check.first_page;
    question.pages.assign(first, first + open.check.pages);
  }
  return question;
}

void Verifications::on_unsent(uint64_t token, Status status, const std::string& detail) {
  end(token, status, detail, 0);
}

void Verifications::on_verdict(const Address& sender, const Verdict& verdict) {
  const auto found = open_.find(verdict.token);
  if (found == open_.end()) return;  // of a transfer that has ended: the peer was lost, say, and came back
  if (found->second.peer->address().incarnation != sender.incarnation) {
    core_->on_protocol_error(sender.name, "it answers a question that it was never asked; ignored");
    return;
  }
  const bool reads = EngineCore::work_of(*found->second.transfer).kind == OpKind::kRead;
  const std::string detail = verdict.status == Status::kChecksumMismatch
                                 ? mismatch_text(found->second.check.sum, verdict.sum, reads)
                                 : "when its bytes were in place and to be verified";
  end(verdict.token, verdict.status, detail, verdict.sum);
}

void Verifications::fail(const Peer* peer, Status status, const std::string& detail) {
  std::vector<uint64_t> tokens;
  for (const auto& [token, open] : open_) {
    if (peer == nullptr || open.peer == peer) tokens.push_back(token);
  }
  for (const uint64_t token : tokens) end(token, status, detail, 0);
}

void Verifications::end(uint64_t token, Status status, const std::string& detail, uint64_t sum_found) {
  const auto found = open_.find(token);
  if (found == open_.end()) return;
  const Open open = found->second;
  open_.erase(found);
  TransferWork& work = EngineCore::work_of(*open.transfer);
  --work.verify->open;
  if (status == Status::kChecksumMismatch && work.failure == Status::kDone) {
    work.verify->sum_sent = open.check.sum;
    work.verify->sum_found = sum_found;
  }
  if (status != Status::kDone) core_->fail(open.transfer, status, *open.peer, detail);
  core_->finish_if_done(open.transfer);
}

// --- of peers' ---

void Verifications::on_question(const std::shared_ptr<const Address>& sender, Question question) {
  Job job{.asker = sender, .question = std::move(question), .region = {}};
  if (jobs_.size() >= kJobsMax) {
    job.status = Status::kTransportFailed;
  } else {
    const uint64_t id = job.question.region_id;
    job.region = core_->named_regions().use(id);
    job.status = job.region ? check(job.question, job.region) : core_->status_of_gone(id);
  }
  if (job.status == Status::kDone) {
    jobs_.push_back(std::move(job));
  } else {
    answer(job);
  }
}

void Verifications::on_told(const Address& asker, const Bytes& verdict, uint64_t told, bool is_untold) {
  if (told > 0) untold_.on_ended();
  if (!is_untold) return;
  // Not now, but in the next work() at the earliest: a transport may be in the middle of dropping the asker.
  const auto given_up = untold_.add(now_ns(), {asker, verdict, told});
  if (!given_up || ++given_up_ > kGivenUpTold) return;
  core_->on_protocol_error(given_up->asker.name,
                           "an answer to its checked operation is given up: it could not be reached, and " +
                               std::to_string(UntoldAnswers::kAnswersMax) + " answers are kept already");
}

// For a read: adds up what has arrived. True: finished, or nothing to do.
bool Verifications::sum_up(Open& open, uint64_t* budget) {
  const TransferWork& work = EngineCore::work_of(*open.transfer);
  if (work.kind != OpKind::kRead || open.is_summed) return true;
  const uint64_t length = std::min(work.length_bytes - open.summed_bytes, *budget);
  open.sum.add(work.local->base() + work.local_offset + open.summed_bytes, length);
  open.summed_bytes += length;
  *budget -= length;
  if (open.summed_bytes < work.length_bytes) return false;
  open.check.sum = open.sum.value();
  open.is_summed = true;
  return true;
}

uint32_t Verifications::ask_open(uint64_t* budget) {
  uint32_t moved = 0;
  for (; !unsent_.empty(); ++moved) {
    const uint64_t token = unsent_.front();
    const auto found = open_.find(token);
    if (found != open_.end() && !sum_up(found->second, budget)) return moved + 1;
    unsent_.pop_front();
    if (found == open_.end()) continue;
    // If it cannot be sent, on_unsent() is called before this returns.
    core_->send_service(*found->second.peer, encode(question_of(found->second, token)), token);
  }
  return moved;
}

int64_t Verifications::now_ns() const { return core_->clock().now_ns(); }

// Sends the answers that are due now. One that fails at once is due again later, or in the next work().
uint32_t Verifications::tell_again() {
  std::vector<UntoldAnswers::Answer> due = untold_.take_due(now_ns());
  for (UntoldAnswers::Answer& again : due) {
    if (!core_->tell(again.asker, std::move(again.verdict), again.told)) untold_.on_ended();
  }
  return static_cast<uint32_t>(due.size());
}

uint32_t Verifications::work() {
  uint64_t budget = kSummedBytesPerTurn;
  uint32_t moved = ask_open(&budget) + tell_again();
  while (!jobs_.empty() && budget > 0) {
    ++moved;
    if (!advance(jobs_.front(), &budget)) break;
    const Job job = std::move(jobs_.front());
    jobs_.pop_front();
    answer(job);
  }
  return moved;
}

// True: the job is finished.
bool Verifications::advance(Job& job, uint64_t* budget) {
  const Question& question = job.question;
  for (; job.page < question.pages.size(); ++job.page, job.done_bytes = 0) {
    // The region was closed or revoked meanwhile, and whoever did that is waiting for us.
    if (job.region.is_over()) {
      job.status = core_->status_of_gone(question.region_id);
      return true;
    }
    const uint64_t length = std::min(question.page_bytes - job.done_bytes, *budget);
    const uint64_t at = question.offset + question.stride_bytes * question.pages[job.page] + job.done_bytes;
    job.sum.add(job.region->base() + at, length);
    job.done_bytes += length;
    *budget -= length;
    if (job.done_bytes < question.page_bytes) return false;
  }
  if (job.sum.value() != question.sum && !is_mutated(Mutation::kCountUnverified))
    job.status = Status::kChecksumMismatch;
  return true;
}

void Verifications::answer(const Job& job) {
  const Question& question = job.question;
  const uint64_t sum = job.sum.value();
  if (job.status == Status::kDone && question.imm != kNoImm) {
    core_->on_imm(question.imm, question.pages.size() * uint64_t{kUnitsPerCount});
    core_->imms_.flush_arrivals();  // before the asker hears of it: a checked write that is reported done is counted
  }
  if (job.status == Status::kChecksumMismatch) {
    core_->add_event({EngineEvent::Kind::kChecksumMismatch, job.asker->name,
                      std::string(question.reads ? "a read of" : "a write to") + " region " +
                          std::to_string(question.region_id) + ", offset " + std::to_string(question.offset) + ", " +
                          std::to_string(question.pages.size()) + " x " + std::to_string(question.page_bytes) +
                          " bytes: " + mismatch_text(question.sum, sum, question.reads) +
                          (question.reads ? "" : "; not counted")});
  }
  core_->tell(*job.asker, encode(Verdict{question.token, job.status, sum}), 0);
}

}  // namespace crossrail
