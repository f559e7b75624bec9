// Rounds whose steps are kernels on a stream: a thread that sees by words in pinned memory how far the GPU is, posts for it,
// and tells it by words and tables what has come and where it belongs. Kernels decide nothing but where a rank's own routes
// go; so a half of dispatch or combine only launches, and can be captured in a CUDA graph. (The paper's host proxy, arXiv
// 2510.27656 section 6, with places computed here instead of by kernels.)
//
// A round, by its words (device/round_words.h):
//   GPU                                              this thread
//   asked, then waits for kFree                      kFree: what was sent of this parity's last round has gone
//   routes, int32 [max_tokens * top_k], in the board
//   -> kRoutes                                       counts them, sends them
//   packs rows_out; writes rows for ranks that       sends the other rows; once it has all routes, the remainder; tables
//   it reaches (Proxy::reach) there -> kPacked
//   waits for kRows; moves rows as the tables say    once all rows are here but those that are signalled -> kRows
//   packs and writes results likewise -> kReturned   sends the other results
//   waits for kResults; sums -> kEnded               likewise -> kResults
//                                                    once ended, and all that was sent and is to come has -> kFree
//
// Ranks that reach each other's memory tell each other by signals there (device::Signals) what their kernels have written;
// here that is counted too, as a write of no bytes, to know who is late or lost.
//
// What goes wrong ends the thread, and no kernel waits any more: all words then stand at the last round there can be, and a
// kernel that waits for one puts that in place of its round's number, by which those that follow do nothing. A round whose
// rows were told goes on as far as signals carry it. failure() says what went wrong.
#pragma once

#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <exception>
#include <mutex>
#include <optional>
#include <span>
#include <thread>
#include <vector>

#include "device/round_words.h"
#include "moe/layout.h"
#include "moe/proxy.h"

namespace crossrail::moe {

// Free and asked are neighbours, as device::open_round takes them.
enum class StreamWord : uint8_t { kFree, kAsked, kRoutes, kPacked, kReturned, kEnded, kRows, kResults };
inline constexpr size_t kStreamWords = 8;

// Where things are in the board, pinned memory that the GPU reads and writes: the words at its start; then these parts for
// rounds of even number, and parity_bytes behind each for those of odd ones. In bytes; all multiples of 64.
struct StreamBoard {
  uint64_t numbers = 0;         // int32 [2]: moves, returns
  uint64_t routes = 0;          // int32 [max_tokens * top_k]: expert, or -1 for none
  uint64_t expert_rows = 0;     // int32 [experts of the rank]
  uint64_t expert_offsets = 0;  // int32 [experts of the rank + 1], as Placement::expert_offsets
  uint64_t moves = 0;           // int32 [groups * routes_max][2]: row of rows_in, or -1 - i of our own i-th; output row
  uint64_t returns = 0;         // Return [groups * routes_max]
  uint64_t parity_bytes = 0;
};

// A result: output row `from` goes to row `to` of that rank's results, if it is reached or our own; else, with as many as there
// are ranks, of results_out.
struct Return {
  int32_t from;
  int32_t target;
  int32_t to;
};
static_assert(sizeof(Return) == 12);  // as moe/graph/board.py has it

// What ended the rounds.
struct StreamFailure {
  FarOutcome outcome;  // kReady: is_over or error
  FarStep step;        // that was waited for, of our own rank where it is late; kFarewell: the end of the round
  uint64_t round;
  bool is_over;                 // more rows than there is room for; counts say of what
  std::vector<int32_t> counts;  // [groups][experts]
  std::exception_ptr error;     // or null
};

// Invariant: a round of a parity is in rounds_ from the look at kRoutes until all that it wrote, read and was given tables for
// is done with, which is when kFree of the next round of that parity is published; only then does the GPU write to the board
// for it, and does any rank write to our rows for it.
// Owner: the caller, also of all that is given, which outlives it. The proxy is the thread's until stop().
// Lifecycle: 1. made: runs. 2. stop(), when no kernel that waits for it is to be launched any more.
// Threads: any; not in a forked child, where the thread is missing.
class StreamProxy {
 public:
  struct Options {
    int32_t cpu = -1;        // to run on; -1: wherever this process may
    int64_t spin_ns = 0;     // how long it looks without a pause after something moved; with a core of its own for ever
    int64_t timeout_ns = 0;  // of what it waits for of other ranks
    int32_t rows_max = 0;    // of a rank's output (layout "masked": of an expert)
    int32_t routes_max = 0;  // of a group to a rank
  };
  // Throws UsageError for a core where it may not run.
  StreamProxy(EngineRef engine, Proxy& proxy, const Layout& layout, uint32_t rank, std::span<std::byte> board,
              const StreamBoard& parts, const Options& options);
  ~StreamProxy();
  StreamProxy(const StreamProxy&) = delete;
  StreamProxy& operator=(const StreamProxy&) = delete;

  device::RoundWords& words(StreamWord word) { return words_[static_cast<size_t>(word)]; }
  std::array<device::RoundWords, 2>& free_and_asked();
  void set_timeout(int64_t timeout_ns) { timeout_ns_.store(timeout_ns, std::memory_order_relaxed); }
  std::optional<StreamFailure> failure() const;
  void stop();

 private:
  enum class Stage : uint8_t { kDispatch, kExperts, kCombine, kEnding, kEnded };
  struct Open {
    uint64_t number = 0;
    Stage stage = Stage::kDispatch;
    bool is_packed = false;
    bool is_sent = false;                // all of our rows
    bool is_told = false;                // that the GPU may go on, but for what is signalled to it
    std::optional<Placement> placement;  // once all routes are here
    std::vector<int32_t> counts;         // [groups][experts], with placement
    int64_t since_ns = 0;                // when we began to wait for others
    int64_t next_look_ns = 0;
    std::optional<int64_t> asked_ns;  // when we saw that the GPU waits for the end of this one
  };

  void run();
  bool advance();
  void begin(uint64_t number, int64_t now);
  bool advance(Open& round, int64_t now);
  bool dispatch(Open& round, int64_t now);
  bool end(Open& round, int64_t now);
  void place(Open& round);
  void write_tables(const Open& round);
  size_t write_returns(const Placement& placement, Return* to) const;
  // What has come of a step: all, in which case nothing failed; else, now and then, looks for what keeps it.
  bool take(Open& round, FarStep step, int64_t now);
  // Likewise; tells the GPU as soon as it may go on, which may be before all has come.
  bool take_and_tell(Open& round, FarStep step, StreamWord word, int64_t now);
  bool is_time_to_look(Open& round, int64_t now);
  // Our own part of a step does not come, and the GPU is at the next round of this parity: it would wait for ever.
  void check_own(Open& round, FarStep step, int64_t now);
  void check_others(Open& round, int64_t now);
  void check(const Open& round, FarStep step, const FarOutcome& outcome, int64_t now);
  void fail(StreamFailure failure);
  void send_last_results();
  void let_go();
  void pause(int64_t idle_ns) const;
  template <typename T>
  T* at(uint64_t part, uint64_t round) const {
    return reinterpret_cast<T*>(board_.data() + part + round % kParities * parts_.parity_bytes);
  }

  const EngineRef engine_;
  Proxy& proxy_;
  const Layout& layout_;
  const uint32_t rank_;
  const uint32_t group_;
  const std::span<std::byte> board_;
  const StreamBoard parts_;
  const Options options_;
  const std::span<device::RoundWords> words_;
  std::array<std::optional<Open>, kParities> rounds_;
  uint64_t next_ = 1;  // round to be opened
  std::vector<int32_t> slots_;
  std::atomic<int64_t> timeout_ns_;  // relaxed: a number by itself
  std::atomic<bool> stopping_{false};
  mutable std::mutex mutex_;  // guards what follows
  std::optional<StreamFailure> failure_;
  std::thread thread_;
};

}  // namespace crossrail::moe
