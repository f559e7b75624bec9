// The words of ranks that share memory (moe/words.h), as seen from Python: one board per rank, with words at its start.
#include <nanobind/nanobind.h>

#include <nanobind/stl/optional.h>
#include <nanobind/stl/vector.h>

#include <atomic>
#include <deque>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "bindings/bindings.h"
#include "bindings/convert.h"
#include "bindings/engine_handle.h"
#include "bindings/handles.h"
#include "moe/words.h"

namespace crossrail::bindings {

namespace {

const char* result_name(moe::WordsResult result) {
  switch (result) {
    case moe::WordsResult::kReady:
      return "ready";
    case moe::WordsResult::kLate:
      return "late";
    case moe::WordsResult::kPeerLost:
      return "peer-lost";
    case moe::WordsResult::kLeft:
      return "left";
    case moe::WordsResult::kClosed:
      return "engine-closed";
    case moe::WordsResult::kInterrupted:
      return "interrupted";
  }
  return "";
}

// Invariant: boards[i] is held, and has `count` words, for as long as this lives; owners[i] is null if it is ours.
class Words {
 public:
  Words(nb::pointer_and_handle<EngineHandle> given, nb::sequence boards, nb::sequence owners, size_t own, size_t count,
        bool masks)
      : engine(nb::borrow(given.h)), engine_(given.p), own_(own), count_(count), masks_(masks) {
    for (nb::handle board : boards) {
      BufferView& view = boards_.emplace_back();
      if (!view.acquire(board, PyBUF_WRITABLE))
        throw UsageError("boards: each must be one contiguous range of writable memory");
      if (static_cast<size_t>(view.get().len) < count * sizeof(moe::Word))
        throw UsageError("boards: one has " + std::to_string(view.get().len) + " bytes, must have at least " +
                         std::to_string(count * sizeof(moe::Word)) + ", for " + std::to_string(count) + " words");
      if (reinterpret_cast<uintptr_t>(view.get().buf) % alignof(moe::Word) != 0)
        throw UsageError("boards: one is not aligned to " + std::to_string(alignof(moe::Word)) + " bytes");
    }
    for (nb::handle owner : owners)
      owners_.push_back(owner.is_none() ? Held<Peer>() : Held<Peer>(given.p->peer(owner)));
    if (owners_.size() != boards_.size())
      throw UsageError("owners has " + std::to_string(owners_.size()) + " entries, must have " +
                       std::to_string(boards_.size()) + ", one for each of boards");
    if (own >= boards_.size())
      throw UsageError("own is " + std::to_string(own) + ", must be the index of one of " +
                       std::to_string(boards_.size()) + " boards");
    if (count < 1) throw UsageError("count is 0, must be 1 or more");
    is_masked_.resize(boards_.size());
    is_left_out_.resize(boards_.size());
  }

  Words(const Words&) = delete;
  Words& operator=(const Words&) = delete;

  // Word 0 is the farewell.
  void watch(nb::handle peer, const std::vector<uint32_t>& imms, bool is_taken_meanwhile) {
    if (imms.size() > count_)
      throw UsageError("imms has " + std::to_string(imms.size()) + " numbers, must have at most " +
                       std::to_string(count_) + ", one for each word");
    FarRank rank{.peer = Held<Peer>(engine_->peer(peer)),
                 .counters = {},
                 .farewell_ns = 0,
                 .is_taken_meanwhile = is_taken_meanwhile};
    for (const uint32_t imm : imms) rank.counters.emplace_back(engine_->core()->imm_counter(imm));
    rank.counters.resize(count_);
    watched_.push_back(std::move(rank));
    is_left_out_.push_back(false);
  }
  // index: of a board, or, after these, of a watched rank.
  void leave_out(size_t index) {
    if (index >= is_left_out_.size()) {
      throw UsageError("index is " + std::to_string(index) + ", must be less than " +
                       std::to_string(is_left_out_.size()));
    }
    is_left_out_[index] = true;
  }

  bool publish(size_t index, uint32_t round) { return moe::publish(word(own_, index), round); }
  bool is_sealed(size_t index, uint32_t round) { return moe::is_sealed(word(own_, index), round); }

  nb::tuple wait(size_t index, uint32_t round, nb::handle timeout_s, std::optional<size_t> then) {
    check_word(index);
    if (then) check_word(*then);
    const EngineRef core = engine_->core();
    const Deadline deadline = to_deadline(timeout_s, core->clock());
    std::vector<moe::Awaited> awaited;
    std::vector<size_t> index_of;  // as callers know them, of all that are not left out
    for (size_t rank = 0; rank < boards_.size(); ++rank) {
      if (is_left_out_[rank]) continue;
      index_of.push_back(rank);
      awaited.push_back({.word = &word(rank, index),
                         .farewell = &word(rank, 0),
                         .then = then ? &word(rank, *then) : nullptr,
                         .owner = owners_[rank] ? owners_[rank].ref().get() : nullptr,
                         .is_masked = is_masked_[rank]});
    }
    std::vector<moe::Watched> watched;
    for (size_t i = 0; i < watched_.size(); ++i) {
      if (is_left_out_[boards_.size() + i]) continue;
      index_of.push_back(boards_.size() + i);
      const auto counter = [&](size_t of) {
        return watched_[i].counters[of] ? watched_[i].counters[of].ref().get() : nullptr;
      };
      watched.push_back({.peer = watched_[i].peer.ref().get(),
                         .part = counter(index),
                         .farewell = counter(0),
                         .then = then ? counter(*then) : nullptr,
                         .farewell_ns = &watched_[i].farewell_ns,
                         .is_taken_meanwhile = watched_[i].is_taken_meanwhile});
    }
    moe::WordsOutcome outcome{};
    std::vector<size_t> absent;
    wait_without_gil([&] {
      absent.clear();
      outcome =
          moe::wait_words(*core, patience_, awaited, watched, round, deadline, interrupted, masks_ ? &absent : nullptr);
      return outcome.result == moe::WordsResult::kInterrupted ? WaitResult::kInterrupted : WaitResult::kReady;
    });
    for (size_t& rank : absent) {
      rank = index_of[rank];
      is_masked_[rank] = true;
    }
    const size_t index_told = outcome.index < index_of.size() ? index_of[outcome.index] : boards_.size();
    return nb::make_tuple(result_name(outcome.result), index_told, absent);
  }

  bool has_come(size_t rank, size_t index, uint32_t round) {
    // acquire, also for earlier reads: the owner sets a word before it writes what we may have been reading.
    std::atomic_thread_fence(std::memory_order_acquire);
    return moe::has_come(word(rank, index), round);
  }

  uint32_t value(size_t rank, size_t index) { return word(rank, index).value.load(std::memory_order_acquire); }

  nb::object engine;

 private:
  struct FarRank {
    Held<Peer> peer;
    std::vector<Held<ImmCounter>> counters;  // by word
    int64_t farewell_ns = 0;
    bool is_taken_meanwhile = false;
  };
  void check_word(size_t index) const {
    if (index < count_) return;
    throw UsageError("word is " + std::to_string(index) + ", must be less than " + std::to_string(count_));
  }
  moe::Word& word(size_t rank, size_t index) {
    check_word(index);
    if (rank >= boards_.size())
      throw UsageError("rank is " + std::to_string(rank) + ", must be less than " + std::to_string(boards_.size()));
    return static_cast<moe::Word*>(boards_[rank].get().buf)[index];
  }

  EngineHandle* const engine_;
  std::deque<BufferView> boards_;
  std::vector<Held<Peer>> owners_;
  std::vector<FarRank> watched_;
  const size_t own_;
  const size_t count_;
  const bool masks_;
  Patience patience_{engine_->core()->options().spin_ns};
  std::vector<bool> is_masked_;    // by board: one of its words was sealed
  std::vector<bool> is_left_out_;  // by board, then of the watched ranks
};

}  // namespace

void register_moe_words(nb::module_& module) {
  nb::module_ part = module.def_submodule("moe");
  part.attr("WORD_BYTES") = sizeof(moe::Word);
  nb::class_<Words>(
      part, "Words", nb::is_final(), nb::type_slots(engine_slots<Words>),
      "Words of ranks that share memory; word 0 of each is its farewell. Threads: one at a time publishes.")
      .def(nb::init<nb::pointer_and_handle<EngineHandle>, nb::sequence, nb::sequence, size_t, size_t, bool>(),
           nb::arg("engine"), nb::arg("boards"), nb::arg("owners"), nb::arg("own"), nb::arg("count"), nb::arg("masks"),
           nb::sig(
               "def __init__(self, engine: crossrail._core.Engine, boards: collections.abc.Sequence[memoryview], "
               "owners: "
               "collections.abc.Sequence[crossrail._core.Address | None], own: int, count: int, masks: bool) -> None"))
      .def("publish", &Words::publish, nb::arg("index"), nb::arg("round"),
           "Sets our own word. What this thread wrote before is seen by whoever sees it. False: others gave up on us, "
           "and\n"
           "sealed it; nothing was set.")
      .def("is_sealed", &Words::is_sealed, nb::arg("index"), nb::arg("round"),
           "Whether others gave up on our own word, whose rounds are even or odd as this one.")
      .def("has_come", &Words::has_come, nb::arg("rank"), nb::arg("index"), nb::arg("round"),
           "Whether that word of that board stands at the round, or later.")
      .def("value", &Words::value, nb::arg("rank"), nb::arg("index"), "Where that word of that board stands.")
      .def("watch", &Words::watch, nb::arg("peer"), nb::arg("imms"), nb::arg("is_taken_meanwhile"),
           nb::sig("def watch(self, peer: crossrail._core.Address, imms: collections.abc.Sequence[int], "
                   "is_taken_meanwhile: bool) -> None"),
           "A rank without a board here, whose loss ends waits too, unless it had ended in order. imms: by word, the "
           "numbers\n"
           "by which it counts here what words tell of others. Unless counts are taken while words are waited for, "
           "waits end\n"
           "when it leaves before its part, too.")
      .def(
          "leave_out", &Words::leave_out, nb::arg("index"),
          "Waits go on without that board's words; or without looking at that watched rank, counted behind the boards.")
      .def("wait", &Words::wait, nb::arg("index"), nb::arg("round"), nb::arg("timeout_s").none(),
           nb::arg("then") = nb::none(),
           nb::sig("def wait(self, index: int, round: int, timeout_s: float | None, then: int | None = None) -> "
                   "tuple[str, int, list[int]]"),
           R"(Until that word of every board stands at the round or later: ('ready', boards, []).

Else 'late' or 'engine-closed', and the first board whose word does not; or 'peer-lost' or 'left', and whose owner is:
from the number of boards on, of those watched. then: the word that owners set later in that round; without masks one
that has left before it has left, too. With masks nobody waits for who is lost: its word is sealed, and the
boards whose word is sealed before that round are listed. Blocks, GIL released.)");
}

}  // namespace crossrail::bindings
