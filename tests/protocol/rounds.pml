/*
 * A model for Spin of the recovery in rounds after a crash (docs/explanation/decisions/0029): the
 * partitions of one group on one host, and several runs at a time in each worker. Another host takes
 * over from a lost one.
 *
 * Any message may be guilty: it kills its process (POISONS) or its host (KILLERS) whenever it runs.
 * A budget pays for external faults: a process is killed (KILLS), a host is lost (LOSSES).
 *
 * Checked: (1) an innocent message is charged only for an external fault while it ran alone; (2) a
 * message starts at most STARTS times, once more for each crash that it causes, and STARTS times more
 * for each lost host; (3) without kills, a message takes down at most three hosts; (4) a message
 * starts only after earlier messages of its key; (5) in every final state, all messages are
 * acknowledged or dead-lettered.
 *
 * Every run is finite, because (2) bounds the starts. -DNAME enables a mutation; variants.py lists
 * them.
 */

#ifndef PARTITIONS
#define PARTITIONS 1   /* at most 2 */
#endif
#ifndef N
#define N 4            /* messages of each partition, at most 8 */
#endif
#ifndef LANES
#define LANES 4        /* runs of a worker at a time, which is the largest round */
#endif
#ifndef STARTS
#define STARTS 3       /* 1 + log2(LANES) */
#endif
#ifndef POISONS
#define POISONS 0
#endif
#ifndef KILLERS
#define KILLERS 0
#endif
#ifndef KILLS
#define KILLS 0
#endif
#ifndef LOSSES
#define LOSSES 0
#endif
#ifndef KEYED
#define KEYED 0        /* 1: the first two messages of each partition have the same key */
#endif
#ifndef BATCH
#define BATCH 0        /* 1: messages that run together finish together */
#endif
#define MAX_CRASHES 3
#define ALL (PARTITIONS * N)

/* The effect of a message when it runs. */
#define INNOCENT 0
#define POISON 1
#define KILLER 2

/* A turn: the right to run inherited messages, shared by the workers of the host. */
#define SHARED 1
#define EXCLUSIVE 2

/* --- messages: one bit each, in the masks of their partition. Acknowledged ones are in none --- */
byte waiting[PARTITIONS], running[PARTITIONS], ended[PARTITIONS], dead[PARTITIONS];
byte charges[ALL];

/* --- the supervisor --- */
byte limit[ALL];       /* the largest round of a suspect, 0 = not a suspect */
byte suspects[PARTITIONS];

/* --- the fence --- */
byte mark[PARTITIONS], accused[PARTITIONS];
bit solo[PARTITIONS];

/* --- the worker --- */
bit alive[PARTITIONS], inherited[PARTITIONS];
byte round[PARTITIONS], growing[PARTITIONS], turn[PARTITIONS];

/* --- used by the checker only --- */
byte kind[ALL], starts[ALL], excuses[ALL], chargeable[ALL], lost_hosts[ALL];
byte kills, losses;
byte x, y, size, most;
bit enough;

/* Spin's replay prints the violated invariant. */
#define holds(number, condition) \
  if :: (condition) :: else -> printf("broken %d\n", number); assert(false) fi

#define AT(m) (p * N + (m))
#define BIT(m) (1 << (m))
#define HAS(mask, m) (((mask) & BIT(m)) != 0)
#define COUNT(b) (((b) & 1) + ((b) >> 1 & 1) + ((b) >> 2 & 1) + ((b) >> 3 & 1) \
  + ((b) >> 4 & 1) + ((b) >> 5 & 1) + ((b) >> 6 & 1) + ((b) >> 7 & 1))
#define FIRST_GROWING (LANES > 1 -> 2 : 1)
#define busy(p) (running[p] | ended[p])
/* The second message of a key waits for the first. */
#define startable(p, mask) \
  ((waiting[p] & (mask)) & ~((KEYED && ((waiting[p] | running[p]) & 1)) -> 2 : 0))

inline charge(m, hits) {
  charges[m] = charges[m] + hits;
  printf("charges %d\n", m);
  holds(1, kind[m] != INNOCENT || charges[m] <= chargeable[m])
}

/* The process of p dies. Its supervisor reads the running messages from the scoreboard. */
inline crash() {
#ifdef NOT_HALVED
  most = COUNT(running[p]);
#else
  most = COUNT(running[p]) / 2;
#endif
  most = (most > 1 -> most : 1);
  x = 0; y = 0;
  do
  :: x < N ->
     if
#ifdef CHARGES_THE_OLDEST
     :: HAS(running[p], x) && y == 0 -> charge(AT(x), 1); y = 1
     :: else
#else
     :: HAS(running[p], x) && COUNT(running[p]) == 1 -> charge(AT(x), 1)
     :: else
#endif
     fi;
     if
     :: HAS(running[p], x) && (limit[AT(x)] == 0 || limit[AT(x)] > most) -> limit[AT(x)] = most
     :: HAS(ended[p], x) -> limit[AT(x)] = 0
     :: else
#ifdef OTHERS_FORGOTTEN
        if :: !HAS(running[p], x) -> limit[AT(x)] = 0; suspects[p] = suspects[p] & ~BIT(x) :: else fi
#endif
     fi;
     x++
  :: else -> break
  od;
  suspects[p] = (suspects[p] | running[p]) & ~ended[p];
  waiting[p] = waiting[p] | running[p];
  running[p] = 0; ended[p] = 0; alive[p] = 0; round[p] = 0; turn[p] = 0; growing[p] = 0;
  mark[p] = 0;         /* by the refence */
  x = 0; y = 0; most = 0
}

/* The host is lost. Only Redis remains. */
inline lose() {
  x = 0;
  do
  :: x < ALL ->
     excuses[x] = excuses[x] + STARTS;       /* the limits of the suspects are lost too */
     limit[x] = 0; x++
  :: else -> break
  od;
  x = 0;
  do
  :: x < PARTITIONS ->
     waiting[x] = waiting[x] | busy(x);
     running[x] = 0; ended[x] = 0; suspects[x] = 0; alive[x] = 0; inherited[x] = 1;
     round[x] = 0; turn[x] = 0; growing[x] = 0; x++
  :: else -> break
  od;
  x = 0
}

/* A loss for another reason charges the accused message that runs alone in partition q. */
inline excuse_alone(q) {
  y = 0;
  do
  :: y < N ->
     if
     :: mark[q] == BIT(y) && (HAS(accused[q], y) || charges[q * N + y]) ->
        chargeable[q * N + y] = chargeable[q * N + y] + 3
     :: else
     fi;
     y++
  :: else -> break
  od;
  y = 0
}

/* The next owner takes the partition and judges the mark: lease_acquire. */
inline acquire() {
  x = 0;
  do
  :: x < N ->
     if
     :: mark[p] == BIT(x) && HAS(waiting[p], x) ->
        if
#ifdef CHARGES_THE_FIRST_MARK
        :: true -> charge(AT(x), 3)
#else
        :: charges[AT(x)] > 0 -> charge(AT(x), 1)
        :: charges[AT(x)] == 0 && HAS(accused[p], x) -> charge(AT(x), 3)
        :: charges[AT(x)] == 0 && !HAS(accused[p], x) -> accused[p] = accused[p] | BIT(x)
#endif
        fi
     :: else
     fi;
     x++
  :: else -> break
  od;
  if :: COUNT(mark[p]) > 1 -> accused[p] = accused[p] | mark[p] :: else fi;
  mark[p] = 0; solo[p] = 1; inherited[p] = 0; alive[p] = 1; growing[p] = FIRST_GROWING;
  x = 0
}

/* The next round: the first waiting messages, as many as each of them allows. */
inline choose() {
  size = 0; most = 255; enough = 0; x = 0;
  do
  :: x < N ->
     if
     :: HAS(waiting[p], x) && charges[AT(x)] >= MAX_CRASHES ->
        waiting[p] = waiting[p] & ~BIT(x); suspects[p] = suspects[p] & ~BIT(x);
        dead[p] = dead[p] | BIT(x); limit[AT(x)] = 0; printf("buries %d\n", AT(x))
     :: HAS(waiting[p], x) && charges[AT(x)] < MAX_CRASHES &&
        (solo[p] || HAS(suspects[p], x)) && !enough ->
        if
        :: charges[AT(x)] > 0 || HAS(accused[p], x) -> y = 1
        :: else -> y = (HAS(suspects[p], x) -> limit[AT(x)] : growing[p])
        fi;
        most = (y < most -> y : most);
        if
        :: size < most -> round[p] = round[p] | BIT(x); size++
        :: else -> enough = 1
        fi
     :: else
     fi;
     x++
  :: else -> break
  od;
  x = 0; y = 0; size = 0; most = 0; enough = 0
}

/* Start the first of some messages. */
inline start(mask) {
  x = 0;
  do
  :: HAS(mask, x) -> break
  :: else -> x++
  od;
  holds(4, !(KEYED && x == 1 && ((waiting[p] | running[p]) & 1)));
  waiting[p] = waiting[p] & ~BIT(x); running[p] = running[p] | BIT(x);
  starts[AT(x)]++; printf("starts %d\n", AT(x));
  holds(2, starts[AT(x)] <= STARTS + excuses[AT(x)]);
  x = 0
}

#define others_turn (PARTITIONS > 1 -> turn[PARTITIONS - 1 - p] : 0)
#define left(p) (waiting[p] & round[p])
/* A round with an accused or charged message has no other member. */
#define is_alone(p) ((left(p) & accused[p]) || (COUNT(left(p)) == 1 && charged_one(p)))
#define charged_one(p) ((HAS(left(p), 0) && charges[p * N]) || (N > 1 && HAS(left(p), 1) && charges[p * N + 1 % N]) \
  || (N > 2 && HAS(left(p), 2) && charges[p * N + 2 % N]) || (N > 3 && HAS(left(p), 3) && charges[p * N + 3 % N]))

#ifdef NO_TURNS
#define turn_is_free true
#else
#define turn_is_free (others_turn == 0 || (others_turn == SHARED && !is_alone(p)))
#endif
#ifdef NEW_BESIDE
#define is_fresh (round[p] == 0 || !solo[p])
#else
#define is_fresh (round[p] == 0 && (waiting[p] & suspects[p]) == 0)
#endif
#ifdef MARK_LATE
#define is_marked (turn[p] != 0)
#else
#define is_marked (turn[p] != 0 && (running[p] || mark[p] == left(p) MARK_ENOUGH))
#endif
#ifdef MARKS_THE_FIRST
#define MARK_ENOUGH || true
#define MARKED (left(p) & -left(p))
#else
#define MARK_ENOUGH
#define MARKED left(p)
#endif

proctype Worker(bit p) {
  byte m;
  do
  :: atomic { inherited[p] -> acquire(); printf("takes %d\n", p) }
  :: atomic { !alive[p] && !inherited[p] -> alive[p] = 1; growing[p] = FIRST_GROWING }

  /* --- rounds: each starts when the last one is settled --- */
  :: atomic { alive[p] && round[p] == 0 && !busy(p) && waiting[p] && (solo[p] || (waiting[p] & suspects[p])) ->
       choose() }
  :: atomic { alive[p] && round[p] && !busy(p) && !left(p) ->
       round[p] = 0; turn[p] = 0;
       if
       :: solo[p] -> growing[p] = (4 * growing[p] > LANES -> LANES : 4 * growing[p])
       :: else
       fi }
  :: atomic { alive[p] && solo[p] && !busy(p) && !waiting[p] ->
       solo[p] = 0; accused[p] = 0; mark[p] = 0; turn[p] = 0; round[p] = 0 }
  :: atomic { alive[p] && solo[p] && left(p) && !running[p] && !(turn[p] && mark[p] == MARKED) && turn_is_free ->
       turn[p] = (is_alone(p) -> EXCLUSIVE : SHARED);
#ifndef MARK_LATE
       mark[p] = MARKED; printf("marks %d %d\n", p, mark[p] << (p * N))
#endif
     }
#ifdef MARK_LATE
  :: atomic { alive[p] && solo[p] && turn[p] && running[p] && mark[p] != running[p] ->
       mark[p] = running[p] }
#endif
  :: atomic { alive[p] && solo[p] && is_marked && startable(p, round[p]) -> start(startable(p, round[p])) }
  :: atomic { alive[p] && !solo[p] && startable(p, round[p]) -> start(startable(p, round[p])) }

  /* --- no suspect is left: any waiting message, up to LANES --- */
  :: atomic { alive[p] && !solo[p] && is_fresh && COUNT(running[p]) < LANES &&
       startable(p, ~suspects[p]) -> start(startable(p, ~suspects[p])) }

  /* --- the runs --- */
  :: atomic { alive[p] && running[p] && (!BATCH || !startable(p, round[p])) ->
       if
       :: HAS(running[p], 0) -> m = 0
       :: HAS(running[p], 1) -> m = 1
       :: HAS(running[p], 2) -> m = 2
       :: HAS(running[p], 3) -> m = 3
       :: HAS(running[p], 4) -> m = 4
       :: HAS(running[p], 5) -> m = 5
       :: HAS(running[p], 6) -> m = 6
       :: HAS(running[p], 7) -> m = 7
       fi;
       if
       :: kind[AT(m)] == INNOCENT && BATCH == 0 ->
          running[p] = running[p] & ~BIT(m); ended[p] = ended[p] | BIT(m); printf("returns %d\n", AT(m))
       :: kind[AT(m)] == INNOCENT && BATCH != 0 ->
          x = 0;
          do
          :: x < N && !(HAS(running[p], x) && kind[AT(x)] != INNOCENT) -> x++
          :: else -> break
          od;
          if
          :: x == N -> ended[p] = ended[p] | running[p]; running[p] = 0; printf("returns %d\n", AT(m))
          :: else                              /* the guilty member decides */
          fi;
          x = 0
       :: kind[AT(m)] == POISON ->
          excuses[AT(m)]++; printf("crashes %d\n", AT(m)); crash()
       :: kind[AT(m)] == KILLER ->
          lost_hosts[AT(m)]++; printf("kills %d\n", AT(m));
          holds(3, lost_hosts[AT(m)] <= 3 || KILLS > 0);
#if PARTITIONS > 1
          if :: !solo[p] -> excuse_alone(PARTITIONS - 1 - p) :: else fi;
#endif
          lose()
       fi;
       m = 0 }
  :: atomic { alive[p] && ended[p] ->
       x = 0;
       do
       :: x < N -> if :: HAS(ended[p], x) -> limit[AT(x)] = 0 :: else fi; x++
       :: else -> break
       od;
       suspects[p] = suspects[p] & ~ended[p]; ended[p] = 0; x = 0 }

  /* --- external faults --- */
  :: atomic { alive[p] && kills < KILLS ->
       kills++; printf("struck %d\n", p);
       m = 0;
       do
       :: m < N ->
          if
          :: running[p] == BIT(m) -> chargeable[AT(m)]++; excuses[AT(m)]++
          :: else
          fi;
          m++
       :: else -> break
       od;
       m = 0; crash() }
  od
}

active proctype World() {
  byte k, m;
  atomic {
    k = 0;
    do
    :: k < PARTITIONS -> waiting[k] = (1 << N) - 1; k++
    :: else -> break
    od;
    k = 0;
    do
    :: k < POISONS + KILLERS ->
       m = 0;
       do
       :: m < ALL - 1 -> m++
       :: break
       od;
       kind[m] = (k < POISONS -> POISON : KILLER);
       k++
    :: else -> break
    od;
    k = 0; m = 0;
    run Worker(0);
#if PARTITIONS > 1
    run Worker(1)
#endif
  }
end:
  do
  :: atomic { losses < LOSSES ->
       losses++; printf("loses\n");
       excuse_alone(0);
#if PARTITIONS > 1
       excuse_alone(1);
#endif
       lose() }
  :: atomic {
       timeout ->
       holds(5, (waiting[0] | running[0] | ended[0]) == 0);
#if PARTITIONS > 1
       holds(5, (waiting[1] | running[1] | ended[1]) == 0);
#endif
       break
     }
  od
}
