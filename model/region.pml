// A region that is revoked, then closed, and whose memory is used for something else at once. Against it: a thread that
// submits, the progress holder that posts, a peer of this host that copies under a hazard, a peer's NIC.
// native/engine/region.cc, EngineCore::hand_over, native/transport/shm (hazards), native/transport/rdma/region.cc.
//
// Claims, as assertions:
//   own    nothing of ours touches the memory once close() returned
//   peers  no peer touches it once revoke() returned, and so none once close() did
//   end    everybody comes to an end: the submits that were accepted are done, close() returns
// WRONG_x: a rule left out, and some claim has to fail. REACH_x: a state that has to be reachable.
//
// All accesses below are one step each, as sequentially consistent ones are; with anything weaker the two look-and-store
// pairs (hazard and id, operations and phase) would both be wrong.

#define SUBMITS 2
#define COPIES 2
#define NIC_WRITES 2

bool is_open = true;        // Region::phase_ == kOpen
byte ops;                   // Region::inflight_ops()
bool lock;                  // somebody drives,
bool is_submitting;         // and is in submit_here
byte queued;                // transfers of this region in the submit queue
byte at_nic;                // and with our NIC, which reads the region
bool id_stands = true;      // the region's id in its owner's table
bool hazard;                // a peer says that it is at the region
bool key_stands = true;     // the NIC lets peers in
byte landing;               // writes that it let in and that are not in place
bool fenced, closed;        // revoke() returned, close() returned
byte ended;                 // processes

#define touches_own assert(!closed)
#define touches_from_afar assert(!fenced && !closed)

// hand_over(): as the progress holder at once, or through the queue.
active proctype Submitter() {
  byte left = SUBMITS;
  bool here;
  do
  :: left == 0 -> break
  :: left > 0 ->
     left--;
     here = false;
     if
     :: is_open -> skip                   // check_local(): our caller's look
     :: !is_open -> goto done
     fi;
     if
     :: atomic { !lock -> lock = true; is_submitting = true; here = true }
     :: true
     fi;
#ifndef WRONG_LOOK_BEFORE_BEGINNING
     if :: !here -> ops++ :: else fi;
     if
     :: is_open -> skip                   // once more, now that close() would wait for us
     :: !is_open ->
        if :: here -> atomic { lock = false; is_submitting = false } :: else -> ops-- fi;
        goto done
     fi;
#else
     if :: !here -> ops++ :: else fi;
#endif
     if
     :: here ->
        touches_own;                      // posts
        if
        :: touches_own                    // complete when post() returned
        :: atomic { ops++; at_nic++ }
        fi;
        atomic { lock = false; is_submitting = false }
     :: !here -> queued++
     fi
  od;
done:
  ended++
}

active proctype Holder() {
end:
  do
  :: atomic { queued > 0 && !lock -> lock = true; queued--; at_nic++ };
     touches_own;
     lock = false
  :: atomic { at_nic > 0 && !lock -> lock = true; touches_own; at_nic-- };
     ops--;                               // finish(), after the last touch
     lock = false
  od
}

// A peer of this host: the id into its hazard word, then a look at the id.
active proctype Peer() {
  byte left = COPIES;
  bool may;
  do
  :: left == 0 -> break
  :: left > 0 ->
     left--;
#ifdef WRONG_LOOK_BEFORE_HAZARD
     may = id_stands;
     hazard = true;
#else
     hazard = true;
     may = id_stands;
#endif
     if
     :: may -> touches_from_afar
     :: else
     fi;
#ifdef REACH_PEER_REFUSED
     assert(may);
#endif
     hazard = false
  od;
  ended++
}

// A NIC looks at the key once, and places the bytes later.
active proctype PeerNic() {
  byte left = NIC_WRITES;
  do
  :: left == 0 -> break
  :: left > 0 ->
     left--;
     if
     :: atomic { key_stands -> landing++ }
        touches_from_afar;
#ifdef REACH_LANDS_WHILE_REVOKED
        assert(key_stands);
#endif
        landing--
     :: !key_stands                       // refused, by the NIC
     fi
  od;
  ended++
}

// revoke(): peers are refused, and what they had begun is over. Own transfers go on. Then close().
active proctype Owner() {
  if
  :: true ->                              // revoke() first
     id_stands = false;
#ifndef WRONG_REVOKE_WITHOUT_KEY
     key_stands = false;
#endif
#ifndef WRONG_REVOKE_WITHOUT_WAIT
     !hazard;
     landing == 0;
#endif
     fenced = true
  :: true                                 // or none
  fi;

  is_open = false;                        // begin_close()
  id_stands = false;
look:                                     // until all of it is so in one go
#ifdef WRONG_OPS_BEFORE_SUBMITTERS
  if :: ops != 0 -> goto look :: else fi;
  if :: is_submitting -> goto look :: else fi;
#else
#ifndef WRONG_SUBMITTERS_FORGOTTEN
  if :: is_submitting -> goto look :: else fi;
#endif
#ifndef WRONG_OPS_FORGOTTEN
  if :: ops != 0 -> goto look :: else fi;
#endif
#endif
  key_stands = false;                     // RdmaRegion::is_quiet(): only now, our own works were using it
#ifndef WRONG_HAZARD_FORGOTTEN
  if :: hazard -> goto look :: else fi;
#endif
#ifndef WRONG_LANDING_FORGOTTEN
  if :: landing != 0 -> goto look :: else fi;
#endif
  closed = true;                          // whose memory it is now may write into it
#ifdef REACH_CLOSED_UNDER_SUBMIT
  assert(ended == 3);
#endif
  ended == 3;
  ops == 0 && queued == 0 && at_nic == 0 && landing == 0
}
