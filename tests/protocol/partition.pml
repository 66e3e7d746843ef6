/*
 * A model for Spin of one partition, one group and two instances: lease, fence, takeover, fetch,
 * settle and late renewal, as in docs/explanation/leases-and-fencing.md.
 *
 * Every script is one atomic step of the server. A process may pause for any time, because Spin
 * interleaves the steps in every order. These faults cost one of the budget each: a worker dies, a
 * host is lost, the reply of a call is lost, or a call is executed LATE. A late call runs at any
 * later time, after its sender gave up and after newer calls. Without late calls, the model would
 * miss the worst bugs.
 *
 * Checked: (1) each message is in exactly one place; (2) a superseded token changes nothing; (3) the
 * owner starts nothing that is not pending; (4) a handler starts at most 1 + causes times, where a
 * cause is a failure, an own crash, or the loss of the owner after the start; (5) a message is
 * charged at most as often as it crashed, except for marks of the replaced owner; (6) the first
 * starts of the owner are in order; (7) a run without further faults settles all messages.
 *
 * page.py lists the parts of the protocol that the model leaves out. -DNAME enables a mutation;
 * variants.py lists them.
 */

#ifndef N
#define N 2            /* messages, at most 3 */
#endif
#ifndef FAULTS
#define FAULTS 1
#endif
#ifndef ACQUISITIONS
#define ACQUISITIONS 2
#endif
#ifndef EXPIRIES
#define EXPIRIES 2
#endif
#ifndef RELEASES
#define RELEASES 1
#endif
#ifndef RELOADS
#define RELOADS 0
#endif
#ifndef FOREIGN
#define FOREIGN 0      /* entries that another client reads and never acknowledges */
#endif
#define MAX_CRASHES 2

/* The place of a message: unread, pending, delayed, retry unread, retry pending, dead, acknowledged,
   pending at another client. One bit each, so that a message in two places is visible. */
#define UNREAD 1
#define PENDING 2
#define DELAYED 4
#define RETRY_UNREAD 8
#define RETRY_PENDING 16
#define DEAD 32
#define ACKED 64
#define ALIEN 128

/* The state of a message in a worker. */
#define NOT_HELD 0
#define WAITING 1
#define RUNNING 2
#define DONE 3
#define FAILED 4

/* A supervisor's phase for the partition. */
#define FREE 0
#define ACQUIRING 1
#define HELD 2
#define REFENCING 3
#define RELEASING 4
#define CHARGING 5

/* Calls. */
#define NONE 0
#define ACQUIRE 1
#define RENEW 2
#define REFENCE 3
#define RELEASE 4
#define RECOVER 5
#define FETCH 6
#define ACK 7
#define SETTLE 8
#define MARK 9
#define RECLAIM 10
#define CHARGE 11

/* Answers. */
#define OK 1
#define REFUSED 2      /* FENCED, HELD, MOVED: another owner */
#define STALE 3        /* another session is current */

/* --- the server --- */
byte where[N];
byte token, epoch, session, marked, marked_by, lease;
bit solo;
byte charges[N];

/* --- known to the checker only --- */
byte starts[N], causes[N], crashes[N];
bit begun[N];

/* --- budgets, and the next new names --- */
byte faults, acquisitions, expiries, releases, reloads, foreigns, tokens, sessions;

/* --- the call that is still in transit --- */
byte late_kind, late_token, late_arg, late_mains, late_retries, late_one;

/* --- the instances --- */
byte phase[2], held_token[2], seen[2], new_token[2], done_mains[2], done_retries[2], charged[2];
bit alive[2], attached[2], careful[2];
byte worker_token[2], worker_session[2], worker_mark[2];
byte hand[2 * N], place[2 * N];

/* --- answers of the last call, inside one atomic step --- */
byte word, got;
byte x, y;

/* Spin's replay prints the violated invariant. */
#define holds(number, condition) \
  if :: (condition) :: else -> printf("broken %d\n", number); assert(false) fi

#define H(m) hand[i * N + (m)]
#define P(m) place[i * N + (m)]
#define PENDS(m) (where[m] & (PENDING | RETRY_PENDING))
#define BIT(m) (1 << (m))

inline whole() {
  x = 0;
  do
  :: x < N ->
     holds(1, where[x] != 0 && (where[x] & (where[x] - 1)) == 0);
     holds(4, starts[x] <= 1 + causes[x]);
     holds(5, charges[x] <= crashes[x]);
     x++
  :: else -> break
  od
}

inline acknowledge(mains, retries) {
  x = 0;
  do
  :: x < N ->
     if
     :: ((mains & BIT(x)) && where[x] == PENDING) || ((retries & BIT(x)) && where[x] == RETRY_PENDING) ->
        holds(2, t == token || k == REFENCE);
        where[x] = ACKED; begun[x] = 0
     :: else
     fi;
     x++
  :: else -> break
  od
}

/* The effect of the call k(t, a, mains, retries, one) on the server. */
inline execute() {
  word = OK; got = 0;
  if
  :: k == ACQUIRE ->
     if
     :: lease != 0 && lease != t -> word = REFUSED
     :: else ->
        if
        :: token == t -> lease = t
#ifndef NO_EPOCH
        :: token != t && epoch != a -> word = REFUSED
        :: token != t && epoch == a ->
#else
        :: token != t ->
#endif
           if
           :: token != 0 ->
              solo = 1;
              if
              :: marked != 0 && PENDS(marked - 1) ->
                 holds(5, marked_by == token);
                 charges[marked - 1]++; crashes[marked - 1]++
              :: else
              fi;
              x = 0;
              do
              :: x < N ->
                 if :: begun[x] && PENDS(x) -> causes[x]++; begun[x] = 0 :: else fi;
                 x++
              :: else -> break
              od
           :: else
           fi;
           marked = 0; marked_by = 0; session = 0;
           epoch++; token = t; lease = t
        fi
     fi
  :: k == RENEW ->
     if
     :: token != t -> word = REFUSED
     :: else -> lease = t
     fi
  :: k == REFENCE ->
     if
#ifndef SAME_TOKEN
     :: token == a && token != t
#endif
     :: token == t ->
        if
        :: one != 0 && PENDS(one - 1) -> charges[one - 1]++
        :: else
        fi;
#ifndef MARK_KEPT
        marked = 0; marked_by = 0;
#endif
        session = 0;
        acknowledge(mains, retries);
        epoch++; token = a; lease = a
     :: token != t && token != a -> word = REFUSED
     fi
  :: k == CHARGE ->
     if
     :: token != t -> word = REFUSED
     :: else -> if :: one != 0 && PENDS(one - 1) -> charges[one - 1]++ :: else fi
     fi
  :: k == RELEASE ->
     if
     :: token != t -> word = REFUSED
     :: else ->
        token = 0; session = 0; marked = 0; marked_by = 0; solo = 0;
        if :: lease == t -> lease = 0 :: else fi
     fi
  :: k == RECOVER ->
     if
     :: token != t -> word = REFUSED
     :: else -> session = a
     fi
  :: k == FETCH ->
     if
#if !defined(NO_FENCE)
     :: token != t -> word = REFUSED
#if !defined(NO_SESSION)
     :: token == t && session != a -> word = STALE
     :: token == t && session == a ->
#else
     :: token == t ->
#endif
#else
     :: true ->
#endif
        acknowledge(mains, retries);
        x = 0;
        do
        :: x < N ->
           if
           :: where[x] == UNREAD -> holds(2, t == token); where[x] = PENDING; got = got | BIT(x)
           :: where[x] == RETRY_UNREAD -> holds(2, t == token); where[x] = RETRY_PENDING; got = got | BIT(x)
           :: else
           fi;
           x++
        :: else -> break
        od
     fi
  :: k == ACK ->
     if
     :: token != t -> word = REFUSED
     :: else -> acknowledge(mains, retries)
     fi
  :: k == SETTLE ->          /* a = the place it was read at, mains = 1: dead */
     if
     :: token != t -> word = REFUSED
#ifndef NO_GATE
     :: token == t && where[one - 1] != a
     :: token == t && where[one - 1] == a ->
#else
     :: token == t ->
#endif
#ifdef ACK_FIRST
        where[one - 1] = 0;  /* and the insertion is refused: memory is full */
#endif
        where[one - 1] = (where[one - 1] & ~a) | (mains -> DEAD : DELAYED);
        begun[one - 1] = 0;
#ifdef ACK_FIRST
        where[one - 1] = where[one - 1] & ~(DEAD | DELAYED)
#endif
     fi
  :: k == MARK ->
     if
     :: token != t -> word = REFUSED
     :: token == t && session != a -> word = STALE
     :: token == t && session == a ->
        marked = one; marked_by = (one -> t : 0);
        if :: one == 0 -> solo = 0 :: else fi
     fi
  :: k == RECLAIM ->
     if
     :: token != t -> word = REFUSED
#ifndef NO_RECLAIM_SESSION
     :: token == t && session != a -> word = STALE
     :: token == t && session == a ->
#else
     :: token == t ->
#endif
        x = 0;
        do
        :: x < N ->
           if :: where[x] == ALIEN -> where[x] = PENDING; got = got | BIT(x) :: else fi;
           x++
        :: else -> break
        od
     fi
  fi;
  whole()
}

inline drop_hand() {
  y = 0;
  do
  :: y < N -> H(y) = NOT_HELD; P(y) = 0; y++
  :: else -> break
  od;
  alive[i] = 0; attached[i] = 0; careful[i] = 0;
  worker_token[i] = 0; worker_session[i] = 0; worker_mark[i] = 0
}

inline born() {
  alive[i] = 1; attached[i] = 0; careful[i] = 0; worker_token[i] = held_token[i];
  worker_session[i] = 0; worker_mark[i] = 0
}

inline forget() {
  drop_hand();
  phase[i] = FREE; held_token[i] = 0; seen[i] = 0; new_token[i] = 0;
  done_mains[i] = 0; done_retries[i] = 0; charged[i] = 0
}

/* The finished entries of a worker: for an acknowledgment, and for the supervisor after a crash. */
inline ended(mains_out, retries_out) {
  mains_out = 0; retries_out = 0; y = 0;
  do
  :: y < N ->
     if
     :: H(y) == DONE && P(y) == PENDING -> mains_out = mains_out | BIT(y)
     :: H(y) == DONE && P(y) == RETRY_PENDING -> retries_out = retries_out | BIT(y)
     :: else
     fi;
     y++
  :: else -> break
  od
}

/* The supervisor has reaped its worker: blame(one) is message + 1, or 0. */
inline reaped(blame) {
  ended(done_mains[i], done_retries[i]);
#ifdef RUNNING_ONLY
  done_mains[i] = 0; done_retries[i] = 0;
#endif
  charged[i] = blame;
  drop_hand();
#ifdef SAME_TOKEN
  new_token[i] = held_token[i];
#else
  tokens++; new_token[i] = tokens;
#endif
#ifdef SEPARATE_CHARGE
  phase[i] = (blame -> CHARGING : REFENCING)
#else
  phase[i] = REFENCING
#endif
}

/* The oldest waiting entry, and whether a handler runs. */
#define first_waiting (H(0) == WAITING -> 0 : (H(1) == WAITING -> 1 : (N > 2 && H(N - 1) == WAITING -> N - 1 : N)))
#define running (H(0) == RUNNING -> 0 : (H(1) == RUNNING -> 1 : (N > 2 && H(N - 1) == RUNNING -> N - 1 : N)))
#define failed (H(0) == FAILED -> 0 : (H(1) == FAILED -> 1 : (N > 2 && H(N - 1) == FAILED -> N - 1 : N)))
#ifdef REFENCE_EARLY
#define quiet true
#else
#define quiet (running == N)
#endif
#define any_done (H(0) == DONE || H(1) == DONE || H(N - 1) == DONE)
#define any_unread ((where[0] | where[1] | where[N - 1]) & (UNREAD | RETRY_UNREAD))
#define any_alien ((where[0] | where[1] | where[N - 1]) & ALIEN)
#define serving (alive[i] && attached[i] && phase[i] != REFENCING && running == N)

proctype Instance(bit i) {
  byte k, t, a, mains, retries, one, m;
  bit lost;
  do
  :: atomic {
     k = NONE; mains = 0; retries = 0; one = 0; a = 0; m = 0; lost = 0;
     if
     /* --- the supervisor --- */
     :: phase[i] == FREE && !alive[i] && lease == 0 && acquisitions < ACQUISITIONS ->
        acquisitions++; tokens++; held_token[i] = tokens; seen[i] = epoch; phase[i] = ACQUIRING
     :: phase[i] == ACQUIRING -> k = ACQUIRE; t = held_token[i]; a = seen[i]
     :: phase[i] == HELD && lease != held_token[i] -> k = RENEW; t = held_token[i]
     :: phase[i] == CHARGING -> k = CHARGE; t = held_token[i]; one = charged[i]
     :: phase[i] == REFENCING ->
        k = REFENCE; t = held_token[i]; a = new_token[i];
        mains = done_mains[i]; retries = done_retries[i];
#ifndef SEPARATE_CHARGE
        one = charged[i]
#endif
     :: phase[i] == RELEASING -> k = RELEASE; t = held_token[i]
     :: phase[i] == HELD && serving && !any_done && failed == N && releases < RELEASES ->
        releases++; drop_hand(); phase[i] = RELEASING; printf("drain %d\n", i)
     :: phase[i] == HELD && alive[i] && attached[i] && reloads < RELOADS && quiet ->
        reloads++; reaped(0); printf("reload %d\n", i)
     /* --- the worker --- */
     :: alive[i] && !attached[i] ->
        sessions++; k = RECOVER; t = worker_token[i]; a = sessions
     :: serving && failed == N && first_waiting < N ->
        m = first_waiting;
        if
        :: charges[m] >= MAX_CRASHES ->                      /* dead-lettered before it runs */
           H(m) = FAILED; printf("bury %d %d\n", i, m)
        :: charges[m] < MAX_CRASHES && careful[i] && worker_mark[i] != m + 1 ->
           if
           :: any_done -> k = ACK; t = worker_token[i]; ended(mains, retries)
           :: else -> k = MARK; t = worker_token[i]; a = worker_session[i]; one = m + 1
           fi
        :: charges[m] < MAX_CRASHES && !(careful[i] && worker_mark[i] != m + 1) ->
           H(m) = RUNNING; starts[m]++; printf("start %d %d\n", i, m);
           if
           :: token == worker_token[i] ->
              holds(3, where[m] == P(m));
              if
              :: P(m) == PENDING && !begun[m] && FOREIGN == 0 ->
                 x = 0;
                 do
                 :: x < m -> holds(6, where[x] != UNREAD); x++
                 :: else -> break
                 od
              :: else
              fi;
              begun[m] = 1
           :: else -> causes[m]++          /* no longer the owner, without knowing it */
           fi;
           holds(4, starts[m] <= 1 + causes[m])
        fi
     :: alive[i] && running < N ->
        m = running;
        if
        :: H(m) = DONE; printf("return %d %d\n", i, m)
        :: H(m) = FAILED; causes[m]++; printf("raise %d %d\n", i, m)
        :: faults < FAULTS && phase[i] == HELD ->                    /* dies in the handler */
           faults++; crashes[m]++; causes[m]++; reaped(m + 1);
           printf("die %d %d\n", i, m)
        fi
     :: serving && phase[i] == HELD && faults < FAULTS ->            /* dies between messages */
        faults++; reaped(0); printf("die %d 9\n", i)
     :: phase[i] != FREE && faults < FAULTS ->                       /* the host is lost */
        faults++; forget(); printf("host %d\n", i)
     :: serving && any_done -> k = ACK; t = worker_token[i]; ended(mains, retries)
     :: serving && failed < N ->
        m = failed; k = SETTLE; t = worker_token[i]; a = P(m); one = m + 1;
        mains = (P(m) == RETRY_PENDING || charges[m] >= MAX_CRASHES)
     :: serving && first_waiting == N && failed == N && careful[i] && !any_done ->
        k = MARK; t = worker_token[i]; a = worker_session[i]
     :: serving && first_waiting == N && failed == N && !careful[i] && any_unread ->
        k = FETCH; t = worker_token[i]; a = worker_session[i]; ended(mains, retries)
#ifndef HOUSEKEEPER_RECLAIMS
     :: serving && first_waiting == N && failed == N && !careful[i] && any_alien ->
        k = RECLAIM; t = worker_token[i]; a = worker_session[i]
#endif
     fi;

     /* --- the call, if any, and its answer --- */
     if
     :: k == NONE
     :: k != NONE ->
        if
        :: execute(); printf("call %d %d %d %d %d %d\n", i, k, t, word, one, got)
        :: faults < FAULTS ->
           faults++; execute(); lost = 1;
           printf("lost %d %d %d %d %d %d\n", i, k, t, word, one, got)
        :: faults < FAULTS && late_kind == NONE ->
           faults++; lost = 1; printf("late %d %d %d\n", i, k, t);
           late_kind = k; late_token = t; late_arg = a;
           late_mains = mains; late_retries = retries; late_one = one
        fi;
        if
        :: lost && k < RECOVER -> 
#ifdef TOKEN_REUSED
           if
           :: k == RELEASE -> phase[i] = ACQUIRING; seen[i] = epoch
           :: else
           fi
#else
           skip                            /* the supervisor repeats the same call */
#endif
        :: lost && k == CHARGE -> skip
        :: lost && k >= RECOVER && k != CHARGE ->
#ifdef NO_RECONCILE
           attached[i] = (k != RECOVER)
#else
           attached[i] = 0
#endif
        :: !lost && k == ACQUIRE ->
           if
           :: word == OK -> phase[i] = HELD; born()
           :: else -> forget()
           fi
        :: !lost && k == RENEW -> if :: word == REFUSED -> forget() :: else fi
        :: !lost && k == CHARGE -> if :: word == OK -> phase[i] = REFENCING :: else -> forget() fi
        :: !lost && k == REFENCE ->
           if
           :: word == OK ->
              held_token[i] = new_token[i]; new_token[i] = 0;
              done_mains[i] = 0; done_retries[i] = 0; charged[i] = 0;
              phase[i] = HELD; born()
           :: else -> forget()
           fi
        :: !lost && k == RELEASE -> forget()
        :: !lost && k >= RECOVER && k != CHARGE && word == REFUSED -> forget()
        :: !lost && word == STALE -> attached[i] = 0
        :: !lost && k == RECOVER && word == OK ->
           worker_session[i] = a; careful[i] = solo; worker_mark[i] = 0; attached[i] = 1;
           y = 0;
           do
           :: y < N ->
              if
              :: PENDS(y) && H(y) == NOT_HELD -> H(y) = WAITING; P(y) = where[y]
              :: !PENDS(y) && H(y) == WAITING -> H(y) = NOT_HELD; P(y) = 0
              :: else
              fi;
              y++
           :: else -> break
           od
        :: !lost && (k == FETCH || k == ACK) && word == OK ->
           y = 0;
           do
           :: y < N ->
              if
              :: ((mains | retries) & BIT(y)) && H(y) == DONE -> H(y) = NOT_HELD; P(y) = 0
              :: else
              fi;
              if
              :: got & BIT(y) -> H(y) = WAITING; P(y) = where[y]
              :: else
              fi;
              y++
           :: else -> break
           od
        :: !lost && k == RECLAIM && word == OK ->
           y = 0;
           do
           :: y < N -> if :: got & BIT(y) -> H(y) = WAITING; P(y) = where[y] :: else fi; y++
           :: else -> break
           od
        :: !lost && k == SETTLE && word == OK -> H(one - 1) = NOT_HELD; P(one - 1) = 0
        :: !lost && k == MARK && word == OK ->
           worker_mark[i] = one;
           if :: one == 0 -> careful[i] = 0 :: else fi
        fi
     fi;
     k = NONE; t = 0; a = 0; mains = 0; retries = 0; one = 0; m = 0; lost = 0;
     word = 0; got = 0; x = 0; y = 0
     }
  od
}

/* Time, the housekeeper, another client, and the late call. */
active proctype World() {
  byte k, t, a, mains, retries, one;
  atomic {
    x = 0;
    do
    :: x < N -> where[x] = UNREAD; x++
    :: else -> break
    od;
    x = 0;
    run Instance(0); run Instance(1)
  }
end:
  do
  :: atomic { lease != 0 && expiries < EXPIRIES -> expiries++; lease = 0; printf("expire\n") }
  :: atomic { where[0] == DELAYED -> where[0] = RETRY_UNREAD; printf("promote %d\n", 0) }
  :: atomic { where[1] == DELAYED -> where[1] = RETRY_UNREAD; printf("promote %d\n", 1) }
  :: atomic { where[N - 1] == DELAYED -> where[N - 1] = RETRY_UNREAD; printf("promote %d\n", N - 1) }
  :: atomic { where[0] == UNREAD && foreigns < FOREIGN -> foreigns++; where[0] = ALIEN; printf("foreign\n") }
#ifdef HOUSEKEEPER_RECLAIMS
  :: atomic { where[0] == ALIEN && token != 0 -> where[0] = PENDING; printf("claim\n") }
#endif
  :: atomic {
       late_kind != NONE ->
       k = late_kind; t = late_token; a = late_arg;
       mains = late_mains; retries = late_retries; one = late_one;
       printf("arrives %d %d\n", k, t); execute();
       k = NONE; t = 0; a = 0; mains = 0; retries = 0; one = 0; word = 0; got = 0; x = 0;
       late_kind = NONE; late_token = 0; late_arg = 0;
       late_mains = 0; late_retries = 0; late_one = 0
     }
  :: atomic {
       timeout ->                            /* no process can take another step */
       if
       :: (alive[0] && worker_token[0] == token) || (alive[1] && worker_token[1] == token) ->
          x = 0;
          do
          :: x < N -> holds(7, where[x] == ACKED || where[x] == DEAD); x++
          :: else -> break
          od
       :: else
       fi;
       break
     }
  od
}
