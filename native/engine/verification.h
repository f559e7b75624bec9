// Checked operations (verify). The bytes travel without an immediate. Once they are in place, the peer's engine gets
// their checksum, compares it with that of its own memory, and only then counts, so that nothing is counted that was
// not found correct. For a read the checksum is computed here, when the bytes have arrived.
#pragma once

#include <cstdint>
#include <deque>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "engine/region.h"
#include "engine/service_wire.h"
#include "engine/transfer.h"
#include "engine/untold_answers.h"
#include "util/checksum.h"
#include "util/clock.h"

namespace crossrail {

class EngineCore;
class Peer;
struct TransferWork;

// The questions to ask about one transfer. Made by the submitting thread, then owned by the progress holder.
// Invariant: the transfer is not complete while open > 0.
struct VerifyPlan {
  // For paged writes some of the pages, for a scatter one target, otherwise everything.
  struct Check {
    uint64_t first_page;
    uint32_t pages;
    uint64_t sum;  // for a read, once its bytes have arrived
    uint32_t target = 0;
    uint32_t imm = kNoImm;  // the target's own, in a scatter
  };
  uint32_t imm = kNoImm;
  std::vector<Check> checks;
  bool is_asked = false;
  uint32_t open = 0;  // asked and not answered yet
  // Of the first mismatch.
  uint64_t sum_sent = 0;
  uint64_t sum_found = 0;
};

// Computes the checksums of what the transfer is going to send, if it sends; that must not change any more. Moves the
// immediate into the plan.
void make_verify_plan(TransferWork& work);

// Threads: progress holder.
class Verifications {
 public:
  explicit Verifications(EngineCore* core) : core_(core) {}

  // --- of our own transfers ---
  // All parts that did not fail are in place: their questions are sent by the next work(), since the transport that
  // reports this may be in the middle of something. False: there is nothing to ask.
  bool ask(Transfer* transfer);
  // A question did not reach the peer.
  void on_unsent(uint64_t token, Status status, const std::string& detail);
  void on_verdict(const Address& sender, const Verdict& verdict);
  // Questions to this peer (null: to any) will not be answered.
  void fail(const Peer* peer, Status status, const std::string& detail);

  // --- of peers' ---
  void on_question(const std::shared_ptr<const Address>& sender, Question question);
  // An answer that was sent has ended. is_untold: it did not reach the asker, which may be alive: it was forgotten
  // here, or we had no descriptor to connect with. told: the number of attempts before this one.
  void on_told(const Address& asker, const Bytes& verdict, uint64_t told, bool is_untold);
  // Called in every round: reads the clock only if it matters.
  bool has_work() const {
    return !jobs_.empty() || !unsent_.empty() || (untold_.next() != kNoDeadline && untold_.has_due(now_ns()));
  }
  // When the next undelivered answer is to be sent again.
  Deadline next_timer() const { return untold_.next(); }
  // Sends questions and continues checksums, a little at a time. Returns how many questions were asked, answered or
  // advanced.
  uint32_t work();
  // Answers nobody any more.
  void drop_jobs() {
    jobs_.clear();
    untold_.clear();
  }

 private:
  struct Open {
    Transfer* transfer;
    Peer* peer;  // kept alive by the transfer
    VerifyPlan::Check check;
    Checksum sum{};  // of a read, as far as it is computed
    uint64_t summed_bytes = 0;
    bool is_summed = false;
  };
  struct Job {
    std::shared_ptr<const Address> asker;
    Question question;
    RegionUse region;  // none: already refused
    Status status = Status::kDone;
    Checksum sum{};
    size_t page = 0;
    uint64_t done_bytes = 0;  // of the current page
  };
  static Question question_of(const Open& open, uint64_t token);
  uint32_t ask_open(uint64_t* budget);
  static bool sum_up(Open& open, uint64_t* budget);
  void end(uint64_t token, Status status, const std::string& detail, uint64_t sum_found);
  bool advance(Job& job, uint64_t* budget);
  void answer(const Job& job);
  uint32_t tell_again();
  int64_t now_ns() const;

  EngineCore* const core_;
  std::map<uint64_t, Open> open_;  // by token
  std::deque<uint64_t> unsent_;    // tokens; those no longer in open_ are skipped
  uint64_t next_token_ = 1;
  std::deque<Job> jobs_;
  UntoldAnswers untold_;
  uint32_t given_up_ = 0;  // answers that were dropped
};

}  // namespace crossrail
