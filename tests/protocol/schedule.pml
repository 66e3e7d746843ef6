/*
 * A model for Spin of one schedule and two housekeepers, as in
 * docs/explanation/decisions/0032-run-schedules-without-a-leader.md. Ticks and the server's clock are
 * numbers.
 *
 * Every script is one atomic step of the server. A process may pause for any time. These faults cost
 * one of the budget each: a housekeeper dies between two steps, or a call is executed LATE, at any
 * later time and after newer calls.
 *
 * Checked: (1) no tick is sent twice; (2) nothing is sent before it is due; (3) nothing is sent while
 * the schedule is paused; (4) a specification that was replaced sends nothing; (5) in every final
 * state, each past tick was sent, or skipped because of misfire or an edit.
 *
 * A housekeeper keeps no state after a call, so the model needs no lost replies.
 */

#ifndef TICKS
#define TICKS 3
#endif
#ifndef FAULTS
#define FAULTS 1
#endif
#ifndef EDITS
#define EDITS 1
#endif
#ifndef PAUSES
#define PAUSES 1
#endif
#ifndef BACKS
#define BACKS 1        /* number of times that the clock is set back */
#endif
#ifndef MISSED
#define MISSED 0       /* misfire: 0 sends each missed tick, 1 sends the newest */
#endif

/* --- the server --- */
byte clock, due, spec, last;
byte held_due;
bit held;

/* --- known to the checker only --- */
byte sent[TICKS + 2];
bit left[TICKS + 2];
byte faults, edits, pauses, backs;

/* --- the call of schedule_fire that is still in transit --- */
bit late;
byte late_due, late_tick, late_spec;

byte x;

#define holds(number, condition) \
  if :: (condition) :: else -> printf("broken %d\n", number); assert(false) fi

/* The tick after a tick, 0 after the last one. */
#define after(tick) ((tick) < TICKS -> (tick) + 1 : 0)

/* schedule_fire for one tick: d is the due time that was seen, m the tick that is sent. */
inline fire(d, m, s) {
  if
#ifndef NO_DUE
  :: due != d -> skip                                        /* STALE */
  :: due == d && due != 0 ->
#else
  :: due == 0 && held -> skip
  :: !(due == 0 && held) ->
#endif
     if
#ifndef NO_HASH
     :: spec != s -> skip                                    /* CHANGED */
     :: spec == s ->
#else
     :: true ->
#endif
        if
#ifndef NO_CLOCK
        :: d > clock -> skip                                 /* EARLY */
        :: d <= clock ->
#else
        :: true ->
#endif
           if
#ifndef NO_SENT
           :: m <= last -> skip                              /* SENT */
           :: m > last ->
#else
           :: true ->
#endif
              x = d;
              do
              :: x < m -> left[x] = 1; x++
              :: else -> break
              od;
              x = 0;
              sent[m]++; last = m; printf("sent %d\n", m);
              holds(1, sent[m] <= 1);
              holds(2, d <= clock);
              holds(3, !held);
              holds(4, spec == s)
           fi;
           due = after(m)
        fi
     fi
  :: due == d && due == 0 -> skip
  fi
}

proctype Housekeeper(bit i) {
  byte d, s, m;
  do
  :: atomic {                                                /* schedule_page */
     due != 0 && due <= clock ->
     d = due; s = spec;
     m = (MISSED -> clock : d)
     }
     if
     :: atomic { fire(d, m, s); printf("fire %d %d %d\n", i, d, m); d = 0; s = 0; m = 0 }
     :: atomic { faults < FAULTS ->                          /* dies before it fires */
        faults++; printf("die %d\n", i); d = 0; s = 0; m = 0 }
     :: atomic { faults < FAULTS && !late ->
        faults++; late = 1; late_due = d; late_tick = m; late_spec = s;
        printf("late %d %d\n", i, d); d = 0; s = 0; m = 0 }
     fi
  od
}

/* A deploy or an edit: it reads the clock and the last tick, and declares after that. */
proctype Deploy() {
  byte now, known, next;
  do
  :: atomic { edits < EDITS -> edits++; now = clock; known = last; printf("reads %d\n", now) }
     atomic {
       next = (now > known -> now : known);
       next = after(next);
       spec++;
       x = 1;
       do
       :: x <= TICKS && (next == 0 || x < next) -> if :: sent[x] == 0 -> left[x] = 1 :: else fi; x++
       :: else -> break
       od;
       x = 0;
       if
       :: held -> held_due = next
       :: !held -> due = next
       fi;
       printf("declare %d\n", next); now = 0; known = 0; next = 0
     }
  od
}

proctype Operator() {
  do
  :: atomic { !held && pauses < PAUSES ->
     pauses++; held = 1; held_due = due; printf("pause\n");
#ifndef PAUSE_LEAVES_DUE
     due = 0
#endif
     }
  :: atomic { held ->
     held = 0; due = held_due; held_due = 0; printf("resume\n") }
  od
}

active proctype World() {
  atomic { due = 1; spec = 1; run Housekeeper(0); run Housekeeper(1); run Deploy(); run Operator() }
end:
  do
  :: atomic { clock < TICKS -> clock++; printf("clock %d\n", clock) }
  :: atomic { clock > 0 && backs < BACKS -> backs++; clock--; printf("back %d\n", clock) }
  :: atomic { late -> late = 0; printf("arrives %d\n", late_due);
     fire(late_due, late_tick, late_spec); late_due = 0; late_tick = 0; late_spec = 0 }
  :: atomic {
       timeout ->
       x = 1;
       do
       :: x <= TICKS -> holds(5, sent[x] == 1 || left[x]); x++
       :: else -> break
       od;
       break
     }
  od
}
