// A write cut in two pieces, each worth half a count, on one path of an RDMA rail: posted, cancelled, in doubt, posted
// again, while the path breaks, acknowledgements are lost and the peer dies. native/engine/work_requests.cc, ending.cc and
// native/transport/rdma/paths.cc are what it is a model of.
//
// Claims, as assertions:
//   source    our NIC reads the source only before the completion
//   target    nothing lands at a peer that is not lost after the completion
//   count     a write that is done is counted once, a cancelled one not at all, no piece ever twice
//   end       every write completes (an execution that stops elsewhere is an invalid end state)
// WRONG_x: a rule left out, and some claim has to fail. REACH_x: a state that has to be reachable.

#define PIECES 2
#define EPOCHS 3       // of the path; each but the last may break
#define SLOTS 6        // PIECES * EPOCHS
#define SLOT(piece, e) ((piece) * EPOCHS + (e))

mtype = { QUEUED, POSTED, DOUBT, DONE, BACK, FAILED };   // a piece, as the engine and the layer see it
mtype = { NOTHING, HELD, FLYING, LANDED };               // its work, by epoch: held by our NIC unsent, on its way, placed
mtype = { OPEN, BREAKING, IDLE };                        // our end of the path
mtype = { PENDING, IS_DONE, IS_CANCELLED, IS_FAILED, IS_LOST };

// CONFIG NAMES_PATHS=1 ORDERED=1
// CONFIG NAMES_PATHS=1 ORDERED=0
// CONFIG NAMES_PATHS=0 ORDERED=0
#define ordered ORDERED          // NicLimits::ordered_paths
#define names_paths NAMES_PATHS  // NicLimits::names_imm_paths: the peer can count the immediates of one epoch

mtype piece[PIECES] = QUEUED;
mtype outcome = PENDING;
bool cancel_asked, cut_short, resumed, scanned;

mtype wire[SLOTS] = NOTHING;
mtype end_a = OPEN;
byte epoch;            // ours, the latest
byte imms_done;        // of this epoch, known to be done

bool open_b = true;    // the peer's end: what arrives by epoch_b lands
byte epoch_b;
byte seen;             // immediates of epoch_b
bool has_closed;       // the peer closed an epoch,
byte closed_epoch;     // this one,
byte closed_seen;      // having seen so many
bool is_dead;
bool is_doomed;        // we gave the peer up

bool asked, answered;  // of the epoch in doubt
byte answer_seen;

byte count;            // halves, at the peer
byte placed[PIECES];   // how often each was counted
bool was_in_doubt, was_reposted;

#define all_retired (piece[0] != QUEUED && piece[0] != POSTED && piece[0] != DOUBT && \
                     piece[1] != QUEUED && piece[1] != POSTED && piece[1] != DOUBT)
#define any_piece(state) (piece[0] == state || piece[1] == state)
#define nic_has(slot_epoch) (end_a != IDLE && epoch == (slot_epoch))

inline close_b() {
  if
  :: open_b -> open_b = false; has_closed = true; closed_epoch = epoch_b; closed_seen = seen
  :: else
  fi
}

// --- the engine and the layer on our side ---

inline post(i) {
  wire[SLOT(i, epoch)] = HELD;
  piece[i] = POSTED
}

// What the peer has said of piece i in doubt. before: pieces of this epoch in doubt before it.
inline settle(i, before, knows) {
  if
  :: piece[i] == DOUBT ->
     if
     :: knows && (ordered -> before < answer_seen - imms_done : answer_seen > imms_done) -> piece[i] = DONE
     :: knows && !(ordered -> before < answer_seen - imms_done : answer_seen > imms_done) ->
        piece[i] = QUEUED; was_reposted = true
     :: !knows -> piece[i] = FAILED
     fi
  :: else
  fi
}

inline finish(with) {
  outcome = with;
#ifdef REACH_DONE_AFTER_DOUBT
  assert(!(with == IS_DONE && was_in_doubt && !was_reposted));
#endif
#ifdef REACH_DONE_AFTER_REPOST
  assert(!(with == IS_DONE && was_reposted));
#endif
#ifdef REACH_DONE_AFTER_CANCEL
  assert(!(with == IS_DONE && resumed));
#endif
#ifdef REACH_CANCELLED
  assert(with != IS_CANCELLED);
#endif
#ifdef REACH_CANCELLED_AFTER_DOUBT
  assert(!(with == IS_CANCELLED && was_in_doubt));
#endif
#ifdef REACH_FAILED_UNKNOWN
  assert(with != IS_FAILED);
#endif
#ifdef REACH_LOST
  assert(!(with == IS_LOST && count == 1));
#endif
  assert(with != IS_DONE || count == PIECES);
  assert(with != IS_CANCELLED || count == 0)
}

active proctype Engine() {
  byte in_doubt, before;
  bool knows;
  do
  :: outcome != PENDING -> break

  // Post what is queued, in order.
  :: d_step { outcome == PENDING && end_a == OPEN && !is_doomed && piece[0] == QUEUED -> post(0) }
  :: d_step { outcome == PENDING && end_a == OPEN && !is_doomed && piece[0] != QUEUED && piece[1] == QUEUED -> post(1) }

  // scan_cancels(): takes back what is with no NIC.
  :: d_step { cancel_asked && !scanned && !resumed && outcome == PENDING ->
       scanned = true;
       if :: piece[1] == QUEUED -> piece[1] = BACK; cut_short = true :: else fi;
       if :: piece[0] == QUEUED -> piece[0] = BACK; cut_short = true :: else fi;
#ifdef WRONG_CANCEL_EARLY
       outcome = IS_CANCELLED
#endif
     }

  // The path breaks at our end, for whatever reason; then the NIC says flushed.
  :: d_step { end_a == OPEN && (epoch < EPOCHS - 1 || is_doomed) && outcome == PENDING ->
       end_a = BREAKING;
#ifdef WRONG_COMPLETE_BEFORE_FLUSH
       if :: is_doomed -> outcome = IS_LOST :: else fi
#endif
     }
  :: d_step { end_a == BREAKING && outcome == PENDING ->
       end_a = IDLE;
#ifdef WRONG_REPOST_UNASKED
       if :: piece[0] == POSTED -> piece[0] = QUEUED :: else fi;
       if :: piece[1] == POSTED -> piece[1] = QUEUED :: else fi
#else
       if :: piece[0] == POSTED -> piece[0] = DOUBT; was_in_doubt = true :: else fi;
       if :: piece[1] == POSTED -> piece[1] = DOUBT; was_in_doubt = true :: else fi
#endif
     }

  // Ask, and settle by the answer.
  :: d_step { end_a == IDLE && any_piece(DOUBT) && !asked && !is_doomed && outcome == PENDING -> asked = true }
  :: d_step { answered && end_a == IDLE && !is_doomed && outcome == PENDING ->
       in_doubt = 0;
       if :: piece[0] == DOUBT -> in_doubt++ :: else fi;
       if :: piece[1] == DOUBT -> in_doubt++ :: else fi;
#ifdef WRONG_UNORDERED_GUESS
       knows = names_paths;
#else
       knows = names_paths &&
               (ordered || answer_seen == imms_done || answer_seen - imms_done >= in_doubt);
#endif
       before = (piece[0] == DOUBT -> 1 : 0);
       settle(0, 0, knows);
       settle(1, before, knows);
       asked = false;
       answered = false
     }

  // The next epoch, once nothing is in doubt.
#ifdef WRONG_EPOCH_BEFORE_ANSWER
  :: d_step { end_a == IDLE && epoch < EPOCHS - 1 && !is_doomed && outcome == PENDING ->
#else
  :: d_step { end_a == IDLE && !any_piece(DOUBT) && epoch < EPOCHS - 1 && !is_doomed && outcome == PENDING ->
#endif
       epoch++; end_a = OPEN; imms_done = 0;
       if
       :: !is_dead -> close_b(); open_b = true; epoch_b = epoch; seen = 0
       :: else
       fi
     }

  // The peer is given up: all that is left fails once nothing is with the NIC.
  :: d_step { is_dead && !is_doomed && outcome == PENDING -> is_doomed = true }
  :: d_step { is_doomed && end_a == IDLE && outcome == PENDING -> finish(IS_LOST) }

  // finish_if_done()
  :: d_step { all_retired && outcome == PENDING && !is_doomed ->
       if
       :: any_piece(FAILED) -> finish(IS_FAILED)
       :: !any_piece(FAILED) && !any_piece(BACK) -> finish(IS_DONE)
       :: !any_piece(FAILED) && any_piece(BACK) && any_piece(DONE) ->
#ifdef WRONG_CANCEL_LEAVES_SHARE
          finish(IS_CANCELLED)
#else
          resumed = true;      // go_on(): the cancel came too late
          if :: piece[0] == BACK -> piece[0] = QUEUED :: else fi;
          if :: piece[1] == BACK -> piece[1] = QUEUED :: else fi
#endif
       :: !any_piece(FAILED) && !any_piece(DONE) -> finish(IS_CANCELLED)
       fi
     }
  od
}

active proctype User() {
  if
  :: cancel_asked = true
  :: true
  fi
}

// --- our NIC, the wire, the peer's NIC ---

// Sends, and sends again, until it has the acknowledgement or is flushed: each time it reads the source.
#define sends(i) \
  d_step { nic_has(epoch) && wire[SLOT(i, epoch)] == HELD && (!ordered || i == 0 || wire[SLOT(0, epoch)] != HELD) -> \
           assert(outcome == PENDING); wire[SLOT(i, epoch)] = FLYING }
#define sends_again(i) \
  d_step { nic_has(epoch) && wire[SLOT(i, epoch)] == FLYING && outcome != PENDING -> assert(false) }
#define is_told(i) \
  d_step { end_a != IDLE && wire[SLOT(i, epoch)] == LANDED && piece[i] == POSTED -> piece[i] = DONE; imms_done++ }

active proctype Nic() {
end:
  do
  :: sends(0)
  :: sends(1)
  :: sends_again(0)
  :: sends_again(1)
  :: is_told(0)
  :: is_told(1)
  od
}

// What is on its way may arrive at any time, also long after its sender forgot it.
#define lands(i, e) \
  d_step { wire[SLOT(i, e)] == FLYING && open_b && epoch_b == e && (!ordered || i == 0 || wire[SLOT(0, e)] != FLYING) -> \
           wire[SLOT(i, e)] = LANDED; seen++; count++; placed[i]++; \
           assert(outcome == PENDING || outcome == IS_LOST); \
           assert(!is_dead); \
           assert(placed[i] <= 1) }

active proctype Wire() {
end:
  do
  :: lands(0, 0)
  :: lands(1, 0)
  :: lands(0, 1)
  :: lands(1, 1)
  :: lands(0, 2)
  :: lands(1, 2)
  od
}

// --- the peer's layer ---

active proctype Peer() {
end:
  do
  // Its end may break first.
  :: d_step { open_b && epoch_b < EPOCHS - 1 && !is_dead -> close_b() }
  // Asked: closes its end of that epoch, then says what it saw in it.
  :: d_step { asked && !answered && !is_dead && epoch_b == epoch ->
#ifdef WRONG_ANSWER_BEFORE_CLOSING
       answer_seen = (open_b -> seen : closed_seen);
#else
       close_b();
       answer_seen = closed_seen;
#endif
       answered = true
     }
  :: d_step { !is_dead ->
       is_dead = true;
#ifdef WRONG_STALE_INCARNATION
       skip                       // who has its name and address now takes what is still on its way
#else
       open_b = false
#endif
     }
  od
}
