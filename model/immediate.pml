// One immediate number for one request after the other: a receiver hands it to a writer, and reuses it when the request
// is complete, cancelled, or the writer lost. This is the rule that users of counters have to keep (docs of
// Engine.alloc_imm), on what the engine promises: writes and messages are not ordered, and a write that is done at its
// sender *will* be counted, perhaps after a message that was sent later has arrived.
//
// Claim, as an assertion: what is counted belongs to the request that has the number now.
// WRONG_x: a rule left out, and the claim has to fail. REACH_x: a state that has to be reachable.

#define REQUESTS 2
#define WRITES 2       // counted ones of a request

bool has_number;       // some request has the number,
byte current;          // this one,
byte count;            // and so much was counted for it

// Messages on their way, by request; they overtake each other and everything else.
bool dispatch[REQUESTS], cancel[REQUESTS], cancelled[REQUESTS];
byte writes_done[REQUESTS];   // in `cancelled`: how many writes were done

// The writer, by request.
bool knows[REQUESTS], stopped[REQUESTS], told[REQUESTS];
byte posted[REQUESTS], done[REQUESTS];

byte flying[REQUESTS];        // writes on their way
byte unread[REQUESTS];        // landed at the receiver's NIC; its engine has not looked yet
bool revoked[REQUESTS];       // the region that the request's writes go to: the receiver's NIC refuses them

active proctype Receiver() {
  byte r;
  do
  :: r == REQUESTS -> break
  :: r < REQUESTS ->
     d_step { has_number = true; current = r; count = 0; dispatch[r] = true };
     if
     :: count == WRITES
#ifdef REACH_COMPLETE_SECOND
        assert(r == 0);
#endif
     :: cancel[r] = true;
#ifndef WRONG_REUSE_WHEN_ASKED
        if
        :: cancelled[r] ->
#ifdef REACH_CANCELLED_HALFWAY
           assert(writes_done[r] != 1);
#endif
#ifndef WRONG_REUSE_BEFORE_COUNT
           count == writes_done[r]
#endif
        :: goto lost                      // no answer
        fi
#endif
     :: goto lost                         // it seems dead; perhaps it is only slow, and even the request still on its way
     fi;
     goto free;
lost:
#ifndef WRONG_REUSE_ON_SUSPICION
     revoked[r] = true;                   // region.revoke(), or close(): nothing more of it lands,
#ifndef WRONG_REUSE_BEFORE_READ
     unread[r] == 0;                      // and what has landed is read to the end
#endif
#endif
free:
     has_number = false;                  // ImmCounter.release()
     r++
  od
}

active proctype ReceiverEngine() {
end:
  do
  :: d_step { unread[0] > 0 -> unread[0]--; assert(has_number && current == 0); count++ }
  :: d_step { unread[1] > 0 -> unread[1]--; assert(has_number && current == 1); count++ }
  od
}

#define serves(r) \
  :: d_step { dispatch[r] && !knows[r] -> knows[r] = true } \
  :: d_step { knows[r] && !stopped[r] && posted[r] < WRITES -> posted[r]++; flying[r]++ } \
  :: d_step { CANCEL_SEEN(r) && !stopped[r] -> stopped[r] = true } \
  :: d_step { stopped[r] && !told[r] && ALL_RETIRED(r) -> told[r] = true; cancelled[r] = true; writes_done[r] = done[r] }

#ifdef WRONG_CANCEL_BEFORE_DISPATCH_FORGOTTEN
// Answers a cancel of what it never heard of, and takes the request when it comes.
#define CANCEL_SEEN(r) (cancel[r] && knows[r])
#define FORGETS(r) :: d_step { cancel[r] && !knows[r] && !told[r] -> told[r] = true; cancelled[r] = true; writes_done[r] = 0 }
#else
#define CANCEL_SEEN(r) (cancel[r])
#define FORGETS(r)
#endif
#ifdef WRONG_CONFIRMED_BEFORE_RETIRED
#define ALL_RETIRED(r) true
#else
#define ALL_RETIRED(r) (done[r] == posted[r])
#endif

active proctype Writer() {
end:
  do
  serves(0)
  serves(1)
  FORGETS(0)
  FORGETS(1)
  od
}

#define lands(r) \
  :: d_step { flying[r] > 0 && !revoked[r] -> flying[r]--; done[r]++; unread[r]++ } \
  :: d_step { flying[r] > 0 && revoked[r] -> flying[r]--; posted[r]--; stopped[r] = true }   /* refused: it fails */

active proctype Wire() {
end:
  do
  lands(0)
  lands(1)
  od
}
