// Checked operations (verify). The bytes travel without an immediate. Once they are in place, the peer's engine gets
// their checksum, compares it with that of its own memory, and only then counts: so nothing is counted that was not
// found right. For a read the sum is computed here, when the bytes have arrived.
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

// What is to be asked about one transfer. Made by the submitting thread, then the progress holder's.
// Invariant: the transfer is not complete while open > 0.
struct VerifyPlan {
  // Of paged writes some pages, of a scatter one target, else all.
  struct Check {
    uint64_t first_page;
    uint32_t pages;
    uint64_t sum;  // of a read, once its bytes have come
    uint32_t target = 0;
    uint32_t imm = kNoImm;  // of its own, of a target
  };
  uint32_t imm = kNoImm;
  std::vector<Check> checks;
  bool is_asked = false;
  uint32_t open = 0;  // asked and not answered
  // Of the first that was found wrong.
  uint64_t sum_sent = 0;
  uint64_t sum_found = 0;
};

// Sums up what the transfer is to send, if it sends, which must not change any more; moves the immediate into the plan.
void make_verify_plan(TransferWork& work);

// Threads: progress holder.
class Verifications {
 public:
  explicit Verifications(EngineCore* core) : core_(core) {}

  // --- of our own transfers ---
  // Everything of it that did not fail is in place: asks about that, at the next work(); now, a transport may be in the
  // middle of telling us. False: there is nothing to ask.
  bool ask(Transfer* transfer);
  // A question did not reach the peer.
  void on_unsent(uint64_t token, Status status, const std::string& detail);
  void on_verdict(const Address& sender, const Verdict& verdict);
  // Those that this peer (null: any) was asked about will not be answered.
  void fail(const Peer* peer, Status status, const std::string& detail);

  // --- of peers' ---
  void on_question(const std::shared_ptr<const Address>& sender, Question question);
  // An answer that was sent has ended. is_untold: it did not reach the asker, who may live: it was forgotten here, or
  // we had no descriptor to connect with. told: how often it was tried before.
  void on_told(const Address& asker, const Bytes& verdict, uint64_t told, bool is_untold);
  // Asked at every round: looks at the clock only where it matters.
  bool has_work() const {
    return !jobs_.empty() || !unsent_.empty() || (untold_.next() != kNoDeadline && untold_.has_due(now_ns()));
  }
  // When the next answer is to be told again.
  Deadline next_timer() const { return untold_.next(); }
  // Asks, and sums up a little more. Returns how many questions were asked, answered or came further.
  uint32_t work();
  // Answers nobody any more.
  void drop_jobs() {
    jobs_.clear();
    untold_.clear();
  }

 private:
  struct Open {
    Transfer* transfer;
    Peer* peer;  // kept by the transfer
    VerifyPlan::Check check;
    Checksum sum{};  // of a read, as far as it was made
    uint64_t summed_bytes = 0;
    bool is_summed = false;
  };
  struct Job {
    std::shared_ptr<const Address> asker;
    Question question;
    RegionUse region;  // none: refused already
    Status status = Status::kDone;
    Checksum sum{};
    size_t page = 0;
    uint64_t done_bytes = 0;  // of that page
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
  std::deque<uint64_t> unsent_;    // tokens; those that are not in open_ any more are skipped
  uint64_t next_token_ = 1;
  std::deque<Job> jobs_;
  UntoldAnswers untold_;
  uint32_t given_up_ = 0;  // of those
};

}  // namespace crossrail
