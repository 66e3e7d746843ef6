/*
 * A model for Spin of one outbox and two relays, as in
 * docs/explanation/decisions/0035-deduplicate-outbox-rows-in-the-partition.md. A topic of one
 * partition may grow to two. Rows with even numbers have one key and rows with odd numbers another,
 * which moves to the new partition when the topic grows.
 *
 * Every script is one atomic step of the server, and every statement is one of the database. A
 * process may pause for any time, even past its lease. These faults cost one of the budget each: a
 * relay dies, the reply of a publish or of a delete is lost, or one of them is executed LATE, at any
 * later time and after newer calls.
 *
 * Checked: (1) no row is in the topic twice; (2) the rows of a key are in the order in which they were
 * committed; (3) no row is deleted that is not in the topic; (4) in every final state, every committed
 * row is in the topic and the table is empty.
 */

#ifndef N
#define N 3
#endif
#ifndef BATCH
#define BATCH 2
#endif
#ifndef FAULTS
#define FAULTS 1
#endif
#ifndef EXPIRIES
#define EXPIRIES 1
#endif
#ifndef GROWTH
#define GROWTH 0
#endif

#define bit_of(m) (1 << (m))
#define ALL ((1 << N) - 1)

/* --- the server --- */
byte lease, epoch, parts = 1;
byte record_epoch[2], record[2];

/* --- the database --- */
byte table, committed;

/* --- known to the checker only --- */
byte sent, faults, expiries;

/* --- the call that is still in transit --- */
bit late, late_delete;
byte late_p, late_rows, late_epoch, late_parts;

#define OK 0
#define FENCED 1
#define UNFENCED 2
#define MOVED 3

#define holds(number, condition) \
  if :: (condition) :: else -> printf("broken %d\n", number); assert(false) fi

/* The partition of a row, if the topic has n partitions. */
#define routed(m, n) ((n) == 1 -> 0 : (m) % 2)

/* outbox_publish: rows r, all of partition p. */
inline publish(p, r, e, n, answer) {
  d_step {
    if
#ifndef NO_EPOCH
    :: record_epoch[p] > e -> answer = FENCED
    :: record_epoch[p] < e -> answer = UNFENCED
    :: record_epoch[p] == e && parts != n -> answer = MOVED
    :: record_epoch[p] == e && parts == n ->
#else
    :: parts != n -> answer = MOVED
    :: parts == n ->
#endif
       answer = OK;
       y = r & ~record[p];
       x = 0;
       do
       :: x < N && (y & bit_of(x)) ->
          printf("sent %d\n", x);
          holds(1, !(sent & bit_of(x)));
          holds(2, x < 2 || (sent & bit_of(x - 2)));
          sent = sent | bit_of(x);
          x++
       :: x < N && !(y & bit_of(x)) -> x++
       :: x == N -> break
       od;
       if :: y -> record[p] = r :: else fi
    fi;
    x = 0; y = 0
  }
}

inline erase(r) {
  d_step {
    holds(3, !(r & table & ~sent));
    table = table & ~r
  }
}

proctype Relay(bit i) {
  byte e, n, rows, done, part, answer, x, y, p;
  bit fenced;

standby:
  atomic {
    (lease == 0 || lease == i + 1) && (committed != ALL || table) ->
    lease = i + 1; epoch++; e = epoch; printf("take %d %d\n", i, e);
    fenced = 0; done = 0; rows = 0; n = parts
  }

reads:
  if
  :: atomic { table -> rows = table; printf("reads %d %d\n", i, rows) }
  :: atomic { committed == ALL && !table -> goto over }
  :: atomic { faults < FAULTS -> faults++; printf("dies %d\n", i); e = 0; rows = 0; done = 0; goto standby }
  fi;
  if
  :: fenced -> goto deletes
  :: else
  fi;

fences:
  p = 0;
  do
  :: atomic { p < n ->
#ifdef FENCE_USED
     if
     :: n == 2 && !((p == 0 && (rows & 5)) || (p == 1 && (rows & 10))) -> p++; goto next
     :: else
     fi;
#endif
     if
     :: record_epoch[p] > e -> printf("refused %d\n", i); p = 0; goto standby
     :: record_epoch[p] <= e && parts != n -> n = parts; p = 0; goto fences
     :: record_epoch[p] <= e && parts == n ->
        record_epoch[p] = e; done = done | record[p]; printf("fence %d %d\n", i, p)
     fi;
     p++;
next: skip
     }
  :: atomic { p == n -> p = 0; fenced = 1; break }
  od;
#ifndef NO_REREAD
  rows = 0;
  goto reads;
#endif

deletes:
  /* Rows that are in the topic: of an earlier relay, or of a delete whose outcome is unknown. */
  done = done & rows;
  if
#ifdef DELETE_LATER
  :: done && done == table ->
#else
  :: done ->
#endif
     if
     :: atomic { erase(done); printf("deletes %d %d\n", i, done); done = 0; rows = 0; goto reads }
     :: atomic { faults < FAULTS -> faults++; printf("unknown %d %d\n", i, done);
        if :: erase(done) :: skip fi; rows = 0; goto reads }
     :: atomic { faults < FAULTS && !late -> faults++; printf("latedelete %d %d\n", i, done);
        late = 1; late_delete = 1; late_rows = done; rows = 0; goto reads }
     :: atomic { faults < FAULTS -> faults++; printf("dies %d\n", i); e = 0; rows = 0; done = 0; goto standby }
     fi
  :: else
  fi;

  /* The oldest rows, at most BATCH. */
  d_step {
    part = 0; x = 0; y = 0;
    do
    :: x < N && y < BATCH && (rows & ~done & bit_of(x)) -> part = part | bit_of(x); x++; y++
    :: x < N && !(y < BATCH && (rows & ~done & bit_of(x))) -> x++
    :: x == N -> break
    od;
    rows = part; part = 0; x = 0; y = 0
  }

  p = 0;
  do
  :: atomic { p < n ->
     x = 0;
     do
     :: x < N -> if :: (rows & bit_of(x)) && routed(x, n) == p -> part = part | bit_of(x) :: else fi; x++
     :: else -> break
     od;
     x = 0
     };
     if
     :: atomic { part == 0 -> p++ }
     :: atomic { part != 0 ->
        publish(p, part, e, n, answer); printf("publish %d %d %d\n", i, p, part);
        if
        :: answer == OK -> done = done | part; part = 0; p++
        :: answer == FENCED ->
           printf("refused %d\n", i); answer = 0; part = 0; p = 0; rows = 0; done = 0; goto standby
        :: answer == UNFENCED || answer == MOVED ->
           n = parts; fenced = 0; answer = 0; part = 0; p = 0; rows = 0; goto reads
        fi
        }
     :: atomic { part != 0 && faults < FAULTS -> faults++;
        publish(p, part, e, n, answer); printf("lost %d %d %d\n", i, p, part); goto again }
     :: atomic { part != 0 && faults < FAULTS && !late -> faults++;
        late = 1; late_delete = 0; late_p = p; late_rows = part; late_epoch = e; late_parts = n;
        printf("late %d %d %d\n", i, p, part); goto again }
     :: atomic { part != 0 && faults < FAULTS -> faults++; printf("dies %d\n", i);
        part = 0; p = 0; e = 0; rows = 0; done = 0; goto standby }
     fi
  :: atomic { p == n -> p = 0; break }
  od;
#ifdef DELETE_LATER
  goto reads;
#endif
  rows = rows | done;
  if
  :: done -> goto deletes
  :: else -> goto reads
  fi;

again:
  /* After a lost reply, take a new epoch, so that the server refuses the lost call if it runs late. */
  atomic {
    answer = 0; part = 0; p = 0; rows = 0; fenced = 0;
#ifndef SAME_EPOCH
    done = 0;
    goto standby
#else
    goto reads
#endif
  }

over:
  skip
}

active proctype World() {
  byte x, y, answer;
  atomic { run Relay(0); run Relay(1) }
end:
  do
  :: atomic { committed != ALL ->
     x = 0;
     if
     :: x = 0 :: x = 1 :: x = 2 :: x = 3
     fi;
     if
     :: x < N && !(committed & bit_of(x)) && (x < 2 || (committed & bit_of(x - 2))) ->
        committed = committed | bit_of(x); table = table | bit_of(x); printf("commit %d\n", x)
     :: else
     fi;
     x = 0 }
  :: atomic { lease && expiries < EXPIRIES -> expiries++; lease = 0; printf("expires\n") }
#if GROWTH
  :: atomic { parts == 1 -> parts = 2; printf("grows\n") }
#endif
  :: atomic { late && !late_delete -> late = 0; printf("arrives\n");
     publish(late_p, late_rows, late_epoch, late_parts, answer);
     answer = 0; late_p = 0; late_rows = 0; late_epoch = 0; late_parts = 0 }
  :: atomic { late && late_delete -> late = 0; late_delete = 0; printf("arrivesdelete\n");
     erase(late_rows); late_rows = 0 }
  :: atomic {
       timeout ->
       holds(4, sent == ALL && !table);
       break
     }
  od
}
