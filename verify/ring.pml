/* Rings of gradients between learners and the server: a model of native/ring.cpp.
 *
 * Every line here that reads or writes something shared is one step, and steps of all processes mix
 * in every order: that is what sequentially consistent atomics promise. Counts go round after TURNS,
 * so that a run never ends and there are finitely many states; the numbers in slots tell one push
 * from the next. README.md says which line of the code is which line here.
 *
 * -DDEATHS        learners die anywhere and are started again; the server's sleep has a limit
 * -DBROKEN_SLEEP  a learner looks for room before it says that it will sleep, and not after
 * -DBROKEN_DOZE   so does the server
 * -DBROKEN_ORDER  a slot is published before it is full
 */

#ifndef LEARNERS
#define LEARNERS 2
#endif
#ifndef SLOTS
#define SLOTS    2
#endif
#define TURNS    (2 * SLOTS)  /* twice the slots: a full ring differs from an empty one */
#define NOBODY   9
#define DEATHS_AT_MOST 3

#define FULL(l)    ((pushed[l] + TURNS - taken[l]) % TURNS == SLOTS)
#define AT(l, n)   ((l) * SLOTS + (n) % SLOTS)

byte pushed[LEARNERS], taken[LEARNERS];
bit awaits[LEARNERS];
bit dozing;
/* Words that sleepers wait for. All that matters of one is whether it has moved since its only
 * reader looked, as it counts to 2^32. */
bit room_moved[LEARNERS], bell_moved;

byte first_half[LEARNERS * SLOTS], second_half[LEARNERS * SLOTS];  /* what a slot holds: its number */

bit learner_sleeps[LEARNERS], server_sleeps;  /* in the kernel */
byte dying = NOBODY, deaths = DEATHS_AT_MOST;
byte serving = NOBODY;

/* The kernel looks at the word and puts to sleep in one step; waking moves nobody who is awake. */
inline futex_wait(moved, sleeps) {
    atomic { if :: !moved -> sleeps = 1 :: else -> skip fi };
    !sleeps
}

inline learn(l) {
    do
    :: number = pushed[l];
       do
       :: !FULL(l) -> break
       :: FULL(l) ->
          room_moved[l] = 0;
#ifdef BROKEN_SLEEP
          if
          :: FULL(l) -> awaits[l] = 1; futex_wait(room_moved[l], learner_sleeps[l])
          :: !FULL(l) -> skip
          fi;
#else
          awaits[l] = 1;
          if
          :: FULL(l) -> futex_wait(room_moved[l], learner_sleeps[l])
          :: !FULL(l) -> skip
          fi;
#endif
          awaits[l] = 0
       od;
#ifdef BROKEN_ORDER
       first_half[AT(l, number)] = number;
       pushed[l] = (number + 1) % TURNS;
       second_half[AT(l, number)] = number;
#else
       first_half[AT(l, number)] = number;
       second_half[AT(l, number)] = number;
       pushed[l] = (number + 1) % TURNS;
#endif
       if
       :: dozing -> bell_moved = 1; server_sleeps = 0
       :: !dozing -> skip
       fi;
       number = 0
    od
}

proctype Learner(byte l) {
    byte number;
#ifdef DEATHS
life:
    { learn(l) } unless {
        atomic { dying == l -> dying = NOBODY; learner_sleeps[l] = 0; number = 0; goto life }
    }
#else
    learn(l)
#endif
}

/* Finds a learner after `last` that has pushed; NOBODY if there is none. */
inline look(found) {
    atomic { step = 1; found = NOBODY };
    do
    :: atomic {
           step <= LEARNERS && pushed[(last + step) % LEARNERS] != taken[(last + step) % LEARNERS] ->
           found = (last + step) % LEARNERS; step = 0; break
       }
    :: atomic {
           step <= LEARNERS && pushed[(last + step) % LEARNERS] == taken[(last + step) % LEARNERS] ->
           step++
       }
    :: atomic { step > LEARNERS -> step = 0; break }
    od
}

proctype Server() {
    byte last = LEARNERS - 1, step, found;
    do
    :: look(found);
       do
       :: found != NOBODY -> break
       :: found == NOBODY ->
          bell_moved = 0;
#ifdef BROKEN_DOZE
          look(found);
          dozing = 1;
#else
          dozing = 1;
          look(found);
#endif
          if
          :: found == NOBODY -> futex_wait(bell_moved, server_sleeps)
          :: found != NOBODY -> skip
          fi;
          dozing = 0;
          if
          :: found == NOBODY -> look(found)
          :: found != NOBODY -> skip
          fi
       od;
       atomic { last = found; found = 0; serving = last };
       assert(first_half[AT(last, taken[last])] == taken[last]);
       atomic {
           assert(second_half[AT(last, taken[last])] == taken[last]);
           first_half[AT(last, taken[last])] = NOBODY; second_half[AT(last, taken[last])] = NOBODY
       };
       taken[last] = (taken[last] + 1) % TURNS;
       if
       :: awaits[last] -> room_moved[last] = 1; learner_sleeps[last] = 0
       :: !awaits[last] -> skip
       fi;
       serving = NOBODY
    od
}

#ifdef DEATHS
/* Strikes the first learner whenever it likes; the other is one like it. */
proctype Death() {
    do
    :: atomic { dying == NOBODY && deaths > 0 -> dying = 0; deaths-- }
    :: deaths == 0 -> break
    od
}

/* The server's sleep has a limit: a learner may die between its push and the bell. */
proctype Timer() {
    do
    :: server_sleeps -> server_sleeps = 0
    od
}
#endif

init {
    atomic {
        byte i = 0;
        do
        :: i < LEARNERS * SLOTS -> first_half[i] = NOBODY; second_half[i] = NOBODY; i++
        :: else -> break
        od;
        run Server();
        run Learner(0);
#if LEARNERS > 1
        run Learner(1);
#endif
#ifdef DEATHS
        run Death();
        run Timer();
#endif
    }
}

/* What is pushed is served, whatever the others do. */
ltl served { [] ((pushed[0] != taken[0]) -> <> (serving == 0)) }
