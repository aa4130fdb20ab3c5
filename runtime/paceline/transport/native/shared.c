/* The inner loop of a sum in shared memory, without Python.
 *
 * `core/collectives/shared.py` says what a rank does and why nothing is locked;
 * `transport/shm/plain_loop.py` is the same in Python. Ranks with and without this loop work
 * together: both write the same words. It runs with the interpreter lock released and takes it
 * never.
 *
 * A rank that waits looks for some microseconds, then sleeps in poll: on its own eventfd, which the
 * last to arrive writes to, and on the peer connections, which the kernel closes with a process.
 */
#include <errno.h>
#include <poll.h>
#include <stdatomic.h>
#include <stdint.h>
#include <string.h>
#include <unistd.h>

#include "common.h"

enum { RANKS_MAX = 1024, BLOCK = 1024 };
enum { DONE = 0, ABORTED = 1, LOST = 2, LEFT = 3, DIFFERENT = 4, CARRY = 5 };

typedef _Atomic uint64_t Word;

/* What a rank says of its buffer. */
typedef struct {
    uint64_t nbytes;
    uint64_t kind;
    uint64_t place; /* In its memory; 0 = not there. */
} Show;

/* The beginning of a rank's block; mirrored by `transport/shm/block.py`. */
typedef struct {
    Word mark;
    Word step;
    char pad0[48];
    Word sleeps;
    char pad1[56];
    Show show[2];
    char pad2[16];
    Word carried; /* Bytes of the own slice of a buffer in place that are complete. */
    char pad3[56];
} Block;

/* The structures below are mirrored by ctypes in `transport/shm/native_loop.py`. */
typedef struct {
    Block *block;
    char *memory;
    uint64_t mark;
    uint64_t place; /* As it has shown, once that is known to be true. */
    int32_t eventfd;
    int32_t gone; /* Its peer connection has closed. */
} Member;

typedef struct {
    Member *members;
    struct pollfd *lines; /* Connections in member order, the own eventfd in the own place; behind
                           * them those to other machines. */
    int32_t count;
    int32_t line_count;
    int32_t own;
    int32_t parts;    /* Slices; the first members have one each. */
    int32_t who;      /* The member that an error is about, or the line to another machine. */
    int32_t far;      /* Such a line has closed; 0 = none. */
    uint64_t step;
    uint64_t uses;    /* Of bounce buffers so far. */
    uint64_t memory_bytes;
    int64_t bounces_at; /* In a block. */
    int64_t bounce_bytes;
    int64_t small_bytes;
    int64_t spin_ns;
    int64_t patience_ns;
    const volatile int32_t *abort;
} Room;

typedef struct {
    char *data;
    int64_t nbytes;
    int32_t kind;
    int32_t itemsize;
    int64_t place;   /* Of the data in the own memory; 0 = not there. */
    int32_t carried;
    int32_t resumed; /* The slice was carried; go on behind that. */
    int64_t low, high;
    int64_t carry_place, carry_bytes; /* The own slice, in the own memory. */
    int64_t carry_at;                 /* The same in the data. */
    int32_t staged;                   /* It is not summed yet: paceline_shared_make does. */
    int64_t *copied;                  /* Of each slice, so many bytes. */
} Call;

/* What a slice that goes to other machines is made and taken with, piece by piece. */
typedef struct {
    Room *room;
    Call *call;
} Stage;

static void relax(void) {
#if defined(__x86_64__) || defined(__i386__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    __asm__ volatile("yield");
#endif
}

void paceline_fence(void) { atomic_thread_fence(memory_order_seq_cst); }

/* ---- additions ---- */

static uint16_t add_bfloat16(uint16_t own, uint16_t other) {
    return to_bfloat16(from_bfloat16(own) + from_bfloat16(other));
}

#define PLUS(a, b) ((a) + (b))

/* Block by block through the first cache, so that a sum of many parts is written once. The target
 * may be one of the parts. */
#define ADD(type, plus)                                                                     \
    static void add_##type(type *target, const char *const *parts, int32_t n, int64_t count) { \
        type sum[BLOCK];                                                                    \
        for (int64_t low = 0; low < count; low += BLOCK) {                                  \
            int64_t length = count - low < BLOCK ? count - low : BLOCK;                     \
            const type *restrict a = (const type *)parts[0] + low;                          \
            const type *restrict b = (const type *)parts[1] + low;                          \
            for (int64_t i = 0; i < length; i++) sum[i] = plus(a[i], b[i]);                 \
            for (int32_t k = 2; k < n; k++) {                                               \
                const type *restrict c = (const type *)parts[k] + low;                      \
                for (int64_t i = 0; i < length; i++) sum[i] = plus(sum[i], c[i]);           \
            }                                                                               \
            memcpy(target + low, sum, (size_t)length * sizeof(type));                       \
        }                                                                                   \
    }

ADD(float, PLUS)
ADD(double, PLUS)
ADD(uint32_t, PLUS) /* Wraps, where a signed sum would be undefined. */
ADD(uint64_t, PLUS)
ADD(uint16_t, add_bfloat16)

static void add(int32_t kind, char *target, const char *const *parts, int32_t n, int64_t count) {
    switch (kind) {
    case FLOAT32: add_float((float *)target, parts, n, count); break;
    case FLOAT64: add_double((double *)target, parts, n, count); break;
    case INT32: add_uint32_t((uint32_t *)target, parts, n, count); break;
    case INT64: add_uint64_t((uint64_t *)target, parts, n, count); break;
    default: add_uint16_t((uint16_t *)target, parts, n, count);
    }
}

/* ---- barriers ---- */

static int all_there(const Room *room, uint64_t step) {
    for (int32_t k = 0; k < room->count; k++)
        if (atomic_load_explicit(&room->members[k].block->step, memory_order_seq_cst) < step)
            return 0;
    atomic_thread_fence(memory_order_acquire);
    return 1;
}

/* What has been read so far is true. */
static int look(Room *room) {
    atomic_thread_fence(memory_order_acquire);
    for (int32_t k = 0; k < room->count; k++)
        if (atomic_load_explicit(&room->members[k].block->mark, memory_order_relaxed) !=
            room->members[k].mark) {
            room->who = k;
            return LEFT;
        }
    return DONE;
}

static void wake(Room *room) {
    const uint64_t one = 1;
    for (int32_t k = 0; k < room->count; k++)
        if (k != room->own &&
            atomic_load_explicit(&room->members[k].block->sleeps, memory_order_seq_cst))
            while (write(room->members[k].eventfd, &one, sizeof one) < 0 && errno == EINTR) {}
}

/* Who is gone has not waited for this barrier to be complete, so it has given up or died. */
static int somebody_gone(Room *room) {
    if (room->far) {
        room->who = room->far;
        return LOST;
    }
    for (int32_t k = 0; k < room->count; k++)
        if (room->members[k].gone) {
            room->who = k;
            return look(room) ? LEFT : LOST;
        }
    return DONE;
}

static int sleep_until(Room *room, uint64_t step, int32_t lines) {
    Block *own = room->members[room->own].block;
    uint64_t told;
    int result = DONE;
    uint64_t always = atomic_exchange_explicit(&own->sleeps, 1, memory_order_seq_cst);
    while (!all_there(room, step)) { /* Looked at after what the peer connections said. */
        if (*room->abort) { result = ABORTED; break; }
        if ((result = somebody_gone(room))) break;
        if (poll(room->lines, (nfds_t)lines, -1) <= 0) continue;
        for (int32_t k = 0; k < lines; k++) {
            if (!room->lines[k].revents) continue;
            if (k == room->own) {
                if (read(room->lines[k].fd, &told, sizeof told) < 0) continue; /* Read already. */
            } else if (k >= room->count) {
                room->far = k;
            } else {
                room->members[k].gone = 1;
                room->lines[k].fd = -1; /* It would end each further wait. */
            }
        }
    }
    atomic_store_explicit(&own->sleeps, always, memory_order_relaxed);
    return result;
}

/* `lines`: all, as long as nobody elsewhere can be through with this call, so that who closes has
 * died or given up; else those of the members. */
static int barrier(Room *room, int32_t lines) {
    int result = look(room);
    if (result) return result;
    uint64_t step = ++room->step;
    atomic_store_explicit(&room->members[room->own].block->step, step, memory_order_seq_cst);
    if (all_there(room, step)) {
        wake(room); /* Who is not the last leaves this to the last. */
        return DONE;
    }
    if (room->patience_ns) {
        int64_t until_ns = now_ns() + room->patience_ns;
        do {
            for (int i = 0; i < 32; i++) {
                relax();
                if (all_there(room, step)) {
                    room->patience_ns = room->spin_ns;
                    return DONE;
                }
            }
        } while (now_ns() < until_ns);
    }
    /* A look costs the others nothing where a core is free; where it was in vain it is shorter the
     * next time. */
    int64_t begun_ns = now_ns();
    result = sleep_until(room, step, lines);
    if (now_ns() - begun_ns > room->spin_ns)
        room->patience_ns /= 2;
    else
        room->patience_ns = room->spin_ns;
    return result;
}

/* ---- a reduction ---- */

static char *bounce(const Room *room, int32_t who) {
    return (char *)room->members[who].block + room->bounces_at +
           (int64_t)(room->uses & 1) * room->bounce_bytes;
}

/* Where the byte `at` of a member's buffer can be read. */
static char *shown(const Room *room, const Call *call, int32_t who, int64_t at) {
    const Member *member = &room->members[who];
    if (member->place) return member->memory + member->place + at;
    return bounce(room, who) + (at - call->low);
}

static int64_t slice_at(const Room *room, const Call *call, int32_t part) {
    int64_t lines = (call->high - call->low + 63) / 64;
    int64_t share = lines / room->parts, extra = lines % room->parts;
    int64_t at = call->low + 64 * (part * share + (part < extra ? part : extra));
    return at < call->high ? at : call->high;
}

/* Everybody sums the same; how many of them show theirs in place. */
static int compare(Room *room, const Call *call, int small, int32_t *in_place) {
    *in_place = 0;
    int32_t different = -1;
    for (int32_t k = 0; k < room->count; k++) {
        const Show *show = &room->members[k].block->show[room->uses & 1];
        uint64_t nbytes = show->nbytes, place = show->place;
        int fits = place <= room->memory_bytes && nbytes <= room->memory_bytes - place;
        if (nbytes != (uint64_t)call->nbytes || show->kind != (uint64_t)call->kind || !fits ||
            (small && place))
            different = k;
        room->members[k].place = place;
        *in_place += place != 0;
    }
    int result = look(room); /* Who has left may show anything. */
    if (result) return result;
    room->who = different;
    return different >= 0 ? DIFFERENT : DONE;
}

static void sum(Room *room, const Call *call, char *target, int64_t low, int64_t high) {
    const char *parts[RANKS_MAX];
    if (low >= high) return;
    for (int32_t k = 0; k < room->count; k++) parts[k] = shown(room, call, k, low);
    if (room->count == 1) { /* Of one that is alone on its machine: only carried. */
        if (target != parts[0]) memcpy(target, parts[0], (size_t)(high - low));
        return;
    }
    add(call->kind, target, parts, room->count, (high - low) / call->itemsize);
}

/* Slice k up to so many bytes, from where it ended the last time. */
static void copy_part(Room *room, const Call *call, int32_t k, int64_t bytes) {
    int64_t low = slice_at(room, call, k) + call->copied[k];
    int64_t high = slice_at(room, call, k) + bytes;
    if (low >= high) return;
    const char *source = shown(room, call, k, low);
    if (source != call->data + low) memcpy(call->data + low, source, (size_t)(high - low));
    call->copied[k] = bytes;
}

static void copy(Room *room, const Call *call) {
    for (int32_t k = 0; k < room->parts; k++) {
        call->copied[k] = call->staged ? call->copied[k] : 0;
        copy_part(room, call, k, slice_at(room, call, k + 1) - slice_at(room, call, k));
    }
}

/* The bytes low..high of the own slice. */
void paceline_shared_make(void *owner, int64_t low, int64_t high) {
    Stage *stage = owner;
    Call *call = stage->call;
    char *target = stage->room->members[stage->room->own].memory + call->carry_place;
    sum(stage->room, call, target + low, call->carry_at + low, call->carry_at + high);
}

/* So much of the own slice is complete; take what is of the others'. Whether they are still there
 * when it was read is looked at in the end. */
void paceline_shared_take(void *owner, int64_t done) {
    Room *room = ((Stage *)owner)->room;
    const Call *call = ((Stage *)owner)->call;
    atomic_store_explicit(&room->members[room->own].block->carried, (uint64_t)done,
                          memory_order_release);
    for (int32_t k = 0; k < room->parts; k++) {
        if (k == room->own) continue;
        int64_t whole = slice_at(room, call, k + 1) - slice_at(room, call, k);
        uint64_t told =
            atomic_load_explicit(&room->members[k].block->carried, memory_order_acquire);
        copy_part(room, call, k, told < (uint64_t)whole ? (int64_t)told : whole);
    }
}

/* DONE, or why not, with `who`; CARRY: the caller has to sum the own slice with those of other
 * machines, and calls again. */
int paceline_shared(Room *room, Call *call) {
    const int small = call->nbytes <= room->small_bytes && !call->carried;
    int32_t in_place = 0;
    int result;
    if (call->resumed) {
        for (int32_t k = 0; k < room->count; k++)
            in_place += room->members[k].place != 0;
        if ((result = look(room))) return result;
        call->resumed = 0;
        goto carried;
    }
    while (call->low < call->nbytes) {
        int64_t rest = call->nbytes - call->low;
        call->high = call->low + (rest < room->bounce_bytes ? rest : room->bounce_bytes);
        room->uses++;
        Show *show = &room->members[room->own].block->show[room->uses & 1];
        show->nbytes = (uint64_t)call->nbytes;
        show->kind = (uint64_t)call->kind;
        show->place = small ? 0 : (uint64_t)call->place;
        atomic_store_explicit(&room->members[room->own].block->carried, 0, memory_order_relaxed);
        if (small || !call->place)
            memcpy(bounce(room, room->own), call->data + call->low,
                   (size_t)(call->high - call->low));
        if ((result = barrier(room, room->line_count))) return result;
        if ((result = compare(room, call, small, &in_place))) return result;
        if (small) {
            sum(room, call, call->data + call->low, call->low, call->high);
        } else {
            if (in_place == room->count) call->high = call->nbytes;
            if (room->own < room->parts) {
                int64_t low = slice_at(room, call, room->own);
                int64_t high = slice_at(room, call, room->own + 1);
                char *target = shown(room, call, room->own, low);
                call->carry_place = target - room->members[room->own].memory;
                call->carry_bytes = high - low;
                call->carry_at = low;
                call->staged = call->carried && in_place == room->count;
                if (!call->staged) sum(room, call, target, low, high);
                if (call->carried) {
                    if ((result = look(room))) return result;
                    return CARRY;
                }
            }
        carried:
            if ((result = barrier(room, room->count))) return result;
            copy(room, call);
        }
        call->low = call->high;
    }
    if ((result = look(room))) return result;
    return in_place ? barrier(room, room->count) : DONE;
}
