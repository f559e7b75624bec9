// Rounds whose steps are kernels on a stream. A thread reads words in pinned memory to see how far the GPU is. It posts
// for the GPU, and tells it by words and tables what has come and where it belongs. Its own words are in the GPU's
// memory where there is GDRCopy, since kernels poll them. Kernels decide only where a rank's
// own routes go. So a half of dispatch or combine only launches kernels, and can be captured in a CUDA graph. (This is
// the host proxy of arXiv 2510.27656, section 6, except that the host computes the places, not kernels.)
//
// A round, by its words (device/round_words.h); -> publishes a word:
//   GPU                                          this thread
//   -> kAsked; waits for kFree
//   writes routes into the board -> kRoutes      counts the routes and sends the counts
//   packs rows_out; writes rows to ranks that    sends the other rows; once it has the routes of all ranks, sends the
//   it reaches (Proxy::reach) -> kPacked         remainder and writes the tables
//   waits for kRows; moves rows by the tables    -> kRows, once all rows have come, apart from those signalled
//   packs and writes results -> kReturned        sends the other results
//   waits for kResults; sums -> kEnded           -> kResults, once all results have come, apart from those signalled
//                                                -> kFree of the next round of this parity, once this one has ended and
//                                                all that it sends and receives has left and come
//
// Ranks that reach each other's memory signal there (device::Signals) what their kernels have written. The thread
// counts that too, as a write of no bytes, so that it knows who is late or lost.
//
// A failure ends the thread, and no kernel waits any more: kFree, kRows and kResults are set to the last round there
// can be. A kernel that waits for one puts this value in place of its round's number, and the kernels behind it then do
// nothing. A round whose kRows was published goes on as far as signals carry it. failure() says what went wrong.
#pragma once

#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <exception>
#include <mutex>
#include <optional>
#include <span>
#include <string>
#include <thread>
#include <vector>

#include "device/gdrcopy.h"
#include "device/round_words.h"
#include "engine/patience.h"
#include "moe/layout.h"
#include "moe/proxy.h"

namespace crossrail::moe {

enum class StreamWord : uint8_t { kAsked, kRoutes, kPacked, kReturned, kEnded, kFree, kRows, kResults };
inline constexpr size_t kStreamWords = 8;
inline constexpr size_t kStreamWordsTold = 3;  // kFree and those behind it, which the thread publishes

// Where things are in the board, which is pinned memory that the GPU reads and writes. The words are at its start, also
// those that are not used since they are in the GPU's memory.
// These parts follow, for rounds of even number; the part for rounds of odd number is parity_bytes behind each. In
// bytes; all are multiples of 64.
struct StreamBoard {
  uint64_t numbers = 0;         // int32 [2]: moves, returns
  uint64_t routes = 0;          // int32 [max_tokens * top_k]: expert, or -1 for none
  uint64_t expert_rows = 0;     // int32 [experts of the rank]
  uint64_t expert_offsets = 0;  // int32 [experts of the rank + 1], as Placement::expert_offsets
  uint64_t moves = 0;           // int32 [groups * routes_max][2]: row of rows_in, or -1 - i: our i-th own; output row
  uint64_t returns = 0;         // Return [world * routes_max]
  uint64_t parity_bytes = 0;
};

// Where a result goes: output row `from` to row `to` of the results of rank `target`, if that rank is reached or ours.
// Else `target` is the number of ranks, and `to` is a row of results_out.
struct Return {
  int32_t from;
  int32_t target;
  int32_t to;
};
static_assert(sizeof(Return) == 12);  // as moe/graph/board.py has it

// What ended the rounds.
struct StreamFailure {
  FarOutcome outcome;  // kReady: see is_over and error
  FarStep step;        // the step that was waited for, by our own rank where that is late; kFarewell: the round's end
  uint64_t round;
  bool is_over;                 // the round has more rows than some rank has room for; counts has how many
  std::vector<int32_t> counts;  // [groups][experts]
  std::exception_ptr error;     // or null
};

// What a round waits for, and the ranks of which some of that has not come yet.
struct StreamWait {
  FarStep step;
  uint64_t round;
  std::vector<uint32_t> ranks;
};

// Invariant: a round is in rounds_ from when its kRoutes is seen until nothing of it is in use: what it writes, what it
// reads, its tables. Then kFree of the next round of its parity is published. Only after that does the GPU write to the
// board for the next round, and does any rank write to our rows for it. Owner: the caller, also of all arguments, which
// outlive it. The thread alone uses the proxy until stop(). Lifecycle: 1. Made; the thread runs. 2. stop(), once no
// more kernels that wait for it will be launched. 3. close(). Threads: any, close() alone; not in a forked child, where
// the thread is missing.
class StreamProxy {
 public:
  struct Options {
    int32_t cpu = -1;        // the core of the thread; -1: any that this process may use
    int64_t spin_ns = 0;     // how long it polls without a pause after progress; with a core of its own it never pauses
    int64_t timeout_ns = 0;  // of each wait for other ranks
    int32_t gpu = -1;        // whose kernels; -1: steps are the calling threads'
    std::vector<int64_t> rows_limits = {};    // by rank: room of its output (layout "masked": of one expert)
    std::vector<int32_t> routes_limits = {};  // by rank: most routes of one group to it
  };
  // Throws UsageError for a core that this process may not use.
  StreamProxy(EngineRef engine, Proxy& proxy, const Layout& layout, uint32_t rank, std::span<std::byte> board,
              const StreamBoard& parts, const Options& options);
  ~StreamProxy();
  StreamProxy(const StreamProxy&) = delete;
  StreamProxy& operator=(const StreamProxy&) = delete;

  // Words that kernels publish.
  device::RoundWords& words(StreamWord word) { return *words_[static_cast<size_t>(word)]; }
  // Words that they wait for.
  device::ToldWords told(StreamWord word);
  // Where those are; and why not in the memory of the GPU, if there is one.
  bool tells_in_gpu() const { return bar_.has_value(); }
  const std::string& why_pinned() const { return why_pinned_; }
  void set_timeout(int64_t timeout_ns) { timeout_ns_.store(timeout_ns, std::memory_order_relaxed); }
  std::optional<StreamFailure> failure() const;
  // Waits that have lasted for some milliseconds, as the thread found them when it last looked.
  std::vector<StreamWait> waits() const;
  void stop();
  // Likewise, once no kernel that waits for it runs any more: gives back what it has of the GPU.
  void close();

 private:
  enum class Stage : uint8_t { kDispatch, kExperts, kCombine, kEnding, kEnded };
  struct Open {
    uint64_t number = 0;
    Stage stage = Stage::kDispatch;
    bool is_packed = false;
    bool is_sent = false;                // all of our rows are sent
    bool is_told = false;                // the GPU was told to go on; it still waits for signals itself
    std::optional<Placement> placement;  // once all routes have come
    std::vector<int32_t> counts;         // [groups][experts], with placement
    uint64_t hash = 0;                   // of our routes
    int64_t since_ns = 0;                // the time at which we began to wait for others
    int64_t next_look_ns = 0;
    bool is_late = false;             // its wait is in waits_
    std::optional<int64_t> asked_ns;  // the time at which we saw that the GPU waits for the end of this round
  };

  void run();
  bool advance();
  void begin(uint64_t number, int64_t now);
  bool advance(Open& round, int64_t now);
  bool dispatch(Open& round, int64_t now);
  bool end(Open& round, int64_t now);
  void place(Open& round);
  void check_same_routes(const Open& round) const;
  void write_tables(const Open& round);
  size_t write_returns(const Placement& placement, Return* to) const;
  // Takes what has come of a step. True: all has come, and nothing failed. Else it checks now and then what keeps the
  // rest.
  bool take(Open& round, FarStep step, int64_t now);
  // As take(). Also tells the GPU as soon as it may go on, which may be before all has come.
  bool take_and_tell(Open& round, FarStep step, StreamWord word, int64_t now);
  void note_wait(Open& round, FarStep step, bool is_late);
  bool is_time_to_look(Open& round, int64_t now);
  // Fails if the GPU waits for the next round of this parity, and our own part of this step does not come: the GPU
  // would wait for ever.
  void check_own(Open& round, FarStep step, int64_t now);
  // Fails if the GPU has begun the round after next_, and the routes of next_ do not come: that dispatch was cut short,
  // and all rounds behind it would wait for ever.
  void check_next(int64_t now);
  void check_others(Open& round, int64_t now);
  void check(const Open& round, FarStep step, const FarOutcome& outcome, int64_t now);
  void fail(StreamFailure failure);
  void begin_words();
  // Publishes one of ours.
  void tell(StreamWord word, uint64_t round);
  void send_last_results();
  void let_go();
  void pause(int64_t idle_ns);
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
  Patience patience_{options_.spin_ns};
  std::array<device::RoundWords*, kStreamWords> words_{};
  std::optional<device::BarMemory> bar_;  // has those that we publish, if it is there
  std::string why_pinned_;
  std::array<std::optional<Open>, kParities> rounds_;
  uint64_t next_ = 1;                 // the next round to open
  std::optional<int64_t> untold_ns_;  // the time at which we saw that the GPU has begun the one after it
  std::vector<int32_t> slots_;
  std::atomic<int64_t> timeout_ns_;  // relaxed: a number by itself
  std::atomic<bool> stopping_{false};
  mutable std::mutex mutex_;  // guards what follows
  std::optional<StreamFailure> failure_;
  std::array<std::optional<StreamWait>, kParities> waits_;
  std::mutex joining_;  // guards the end of the thread, which several may wait for
  std::thread thread_;
};

}  // namespace crossrail::moe
