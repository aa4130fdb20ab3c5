/* The inner loop of a reduction over MPI: the steps of one rank's schedule, without Python.
 *
 * `transport/mpi/lanes.py` is the same in Python and says why it is so; both cut buffers alike and
 * send the same messages, so ranks with and without this loop work together. It runs with the
 * interpreter lock released and takes it never: a busy main thread costs one hand-over per
 * reduction instead of several per step.
 *
 * MPI comes as addresses of the functions of the library that mpi4py has loaded. Handles are ints:
 * MPICH's ABI, which the caller has checked.
 */
#include <poll.h>
#include <stdint.h>
#include <string.h>
#include <sys/prctl.h>

#include "common.h"

enum { LANES_MAX = 16, SPINS = 100, LOOK_EVERY = 16 };
enum { DONE = 0, ABORTED = 1, LOST = 2, FAILED = 3, CUT = 4 };
enum { EXACT = 0, ROUNDED = 1, KEPT = 2 };

/* Measured at P = 2, 4 KiB: 0.22 ms per call; 0.39 ms with 50 us and the kernel's usual slack of 50
 * us. Spinning for longer gains nothing where there are more ranks than cores. */
static const int64_t PAUSE_NS = 20000;
static const unsigned long SLACK_NS = 1000;
static const int64_t LONG_PAUSE_NS = 1000000;
static const int64_t PAUSE_PART = 8; /* Of the wait so far: no later by more than that. */
static const int64_t SOON_NS = 100000;
static int patience = SPINS; /* Tests before the first pause. */

typedef int Handle;
typedef int (*Irecv)(void *, int, Handle, int, int, Handle, Handle *);
typedef int (*Isend)(const void *, int, Handle, int, int, Handle, Handle *);
typedef struct {
    int32_t fields[5];
} Status;
typedef int (*Testsome)(int, Handle *, int *, int *, Status *);
typedef int (*GetCount)(const Status *, Handle, int *);

/* The structures below are mirrored by ctypes in `transport/mpi/native_loop.py`. */
typedef struct {
    Irecv irecv;
    Isend isend;
    Testsome testsome;
    GetCount get_count;
    Handle byte;
    Handle request_null;
} Mpi;

typedef struct {
    int32_t send_to, send_chunk; /* Who: an index of the links, or -1. */
    int32_t recv_from, recv_chunk;
    int32_t width;
    int32_t reduce;
    int32_t sent, made; /* EXACT, ROUNDED or KEPT. */
} Step;

typedef struct {
    Handle comm;
    int32_t tag; /* Of lane 0; the others follow. */
} Link;

typedef struct {
    char *data;
    int64_t numel;
    int32_t itemsize;
    int32_t kind;
    float *residual; /* Of float32 that travels as bfloat16, as long as data; else null. */
} Buffer;

/* Whoever makes the numbers of a buffer piece by piece, and takes their sums likewise
 * (`base.Stage`). */
typedef struct {
    void (*make)(void *owner, int64_t low, int64_t high); /* Bytes; null: all is there. */
    void (*take)(void *owner, int64_t done);              /* All bytes below are complete. */
    void *owner;
} Stage;

typedef struct {
    const Mpi *mpi;
    const Link *links;
    const Step *steps;
    int32_t step_count;
    int32_t chunks;
    const Buffer *buffers;
    int32_t buffer_count;
    int32_t lane_count;
    char **scratch; /* One piece for each lane. */
    char **leaving; /* Likewise, for what is sent as bfloat16. */
    int64_t piece_bytes;
    Handle *requests; /* Slots 2k (receive) and 2k + 1 (send) of lane k; all null at first. */
    const volatile int32_t *abort;
    struct pollfd *connections;
    int32_t connection_count;
    int32_t lost; /* Index of the connection that has closed, or of the link that broke. */
    int64_t last_words_ns;
    Stage stage; /* Of the only buffer, if there is one. */
} Call;

typedef struct {
    int32_t buffer;
    int64_t low; /* First element of the piece. */
    int32_t step; /* The one under way. */
    int32_t open; /* Of its requests, how many are not complete. */
} Lane;

#define ADD(type)                                                        \
    do {                                                                 \
        type *restrict own = (type *)target;                             \
        const type *restrict other = (const type *)incoming;             \
        for (int64_t i = 0; i < count; i++) own[i] = own[i] + other[i]; \
    } while (0)

static void add(int32_t kind, char *target, const char *incoming, int64_t count) {
    switch (kind) {
    case FLOAT32: ADD(float); break;
    case FLOAT64: ADD(double); break;
    case INT32: ADD(uint32_t); break; /* Wraps, where a signed sum would be undefined. */
    case INT64: ADD(uint64_t); break;
    default: {
        uint16_t *restrict own = (uint16_t *)target;
        const uint16_t *restrict other = (const uint16_t *)incoming;
        for (int64_t i = 0; i < count; i++)
            own[i] = to_bfloat16(from_bfloat16(own[i]) + from_bfloat16(other[i]));
    }
    }
}

/* In place; what it takes away is added to the residual, if that is kept here. */
static void round_part(int32_t how, float *restrict own, float *restrict residual, int64_t count) {
    if (how == EXACT) return;
    for (int64_t i = 0; i < count; i++) {
        float rounded = from_bfloat16(to_bfloat16(own[i]));
        if (how == KEPT) residual[i] += own[i] - rounded;
        own[i] = rounded;
    }
}

/* Numbers that are bfloat16 already: the upper halves of their bits. */
static void narrow(uint16_t *restrict leaving, const float *restrict own, int64_t count) {
    for (int64_t i = 0; i < count; i++) {
        uint32_t bits;
        memcpy(&bits, &own[i], sizeof bits);
        leaving[i] = (uint16_t)(bits >> 16);
    }
}

static void widen(int32_t reduce, float *restrict own, const uint16_t *restrict incoming,
                  int64_t count) {
    if (reduce)
        for (int64_t i = 0; i < count; i++) own[i] = own[i] + from_bfloat16(incoming[i]);
    else
        for (int64_t i = 0; i < count; i++) own[i] = from_bfloat16(incoming[i]);
}

/* The next piece, over empty buffers; buffer_count where there is none. */
static void next_piece(const Call *call, Lane *lane, int32_t times) {
    while (times-- > 0 && lane->buffer < call->buffer_count) {
        lane->low += call->piece_bytes / call->buffers[lane->buffer].itemsize;
        while (lane->buffer < call->buffer_count
               && lane->low >= call->buffers[lane->buffer].numel) {
            lane->buffer++;
            lane->low = 0;
        }
    }
}

/* First element of a chunk of the lane's piece; sizes of chunks differ by at most one. */
static int64_t chunk_at(const Call *call, const Lane *lane, int32_t chunk) {
    const Buffer *buffer = &call->buffers[lane->buffer];
    int64_t length = call->piece_bytes / buffer->itemsize;
    int64_t left = buffer->numel - lane->low;
    if (left < length) length = left;
    int64_t share = length / call->chunks, extra = length % call->chunks;
    return lane->low + chunk * share + (chunk < extra ? chunk : extra);
}

static void make(const Call *call, const Lane *lane) {
    int64_t cell = call->buffers[lane->buffer].itemsize;
    int64_t high = chunk_at(call, lane, call->chunks);
    call->stage.make(call->stage.owner, lane->low * cell, high * cell);
}

/* So far all pieces are complete. Those of a lane come in order. */
static void take(const Call *call, const Lane *lanes) {
    const Buffer *buffer = call->buffers;
    int64_t done = buffer->numel;
    for (int32_t k = 0; k < call->lane_count; k++)
        if (!lanes[k].buffer && lanes[k].low < done) done = lanes[k].low;
    call->stage.take(call->stage.owner, done * buffer->itemsize);
}

/* Bytes of each element of a message: what is rounded travels as bfloat16. */
static int64_t wire_bytes(const Buffer *buffer) {
    return buffer->residual ? (int64_t)sizeof(uint16_t) : buffer->itemsize;
}

/* Start the next step that has something to move; lane->open == 0 means that all is done. */
static int post(const Call *call, Lane *lane, int32_t index) {
    const Mpi *mpi = call->mpi;
    for (; lane->buffer < call->buffer_count; lane->step++) {
        if (lane->step == call->step_count) {
            lane->step = -1;
            next_piece(call, lane, call->lane_count);
            continue;
        }
        if (!lane->step && call->stage.make) make(call, lane);
        const Step *step = &call->steps[lane->step];
        const Buffer *buffer = &call->buffers[lane->buffer];
        int64_t low = chunk_at(call, lane, step->recv_chunk);
        int64_t count = chunk_at(call, lane, step->recv_chunk + step->width) - low;
        int64_t cell = wire_bytes(buffer);
        int error = 0;
        if (step->recv_from >= 0 && count > 0) {
            const Link *link = &call->links[step->recv_from];
            char *target = step->reduce || buffer->residual
                               ? call->scratch[index]
                               : buffer->data + low * buffer->itemsize;
            error = mpi->irecv(target, (int)(count * cell), mpi->byte, 0,
                               link->tag + index, link->comm, &call->requests[2 * index]);
            if (error) return error;
            lane->open++;
        }
        low = chunk_at(call, lane, step->send_chunk);
        count = chunk_at(call, lane, step->send_chunk + step->width) - low;
        if (step->send_to >= 0 && count > 0) {
            const Link *link = &call->links[step->send_to];
            const char *source = buffer->data + low * buffer->itemsize;
            if (buffer->residual) {
                round_part(step->sent, (float *)source, buffer->residual + low, count);
                narrow((uint16_t *)call->leaving[index], (const float *)source, count);
                source = call->leaving[index];
            }
            error = mpi->isend(source, (int)(count * cell), mpi->byte, 0,
                               link->tag + index, link->comm, &call->requests[2 * index + 1]);
            if (error) return error;
            lane->open++;
        }
        if (lane->open) return 0;
    }
    return 0;
}

/* Whether a receive that MPI calls complete has its data. It has none if the sender died in the
 * middle of the message: MPICH completes such a receive as cancelled, and without an error. */
static int whole(Call *call, const Lane *lane, const Status *status) {
    const Step *step = &call->steps[lane->step];
    int64_t numbers = chunk_at(call, lane, step->recv_chunk + step->width)
                      - chunk_at(call, lane, step->recv_chunk);
    int bytes = 0;
    call->lost = step->recv_from;
    return !call->mpi->get_count(status, call->mpi->byte, &bytes)
           && bytes == numbers * wire_bytes(&call->buffers[lane->buffer]);
}

/* One request of the lane's step is complete; after the last, add and go on. */
static int arrived(const Call *call, Lane *lane, int32_t index) {
    if (--lane->open) return 0;
    const Step *step = &call->steps[lane->step];
    const Buffer *buffer = &call->buffers[lane->buffer];
    if (step->recv_from >= 0 && (step->reduce || buffer->residual)) {
        int64_t low = chunk_at(call, lane, step->recv_chunk);
        int64_t count = chunk_at(call, lane, step->recv_chunk + step->width) - low;
        char *own = buffer->data + low * buffer->itemsize;
        if (buffer->residual) {
            widen(step->reduce, (float *)own, (const uint16_t *)call->scratch[index], count);
            round_part(step->made, (float *)own, buffer->residual + low, count);
        } else {
            add(buffer->kind, own, call->scratch[index], count);
        }
    }
    lane->step++;
    return post(call, lane, index);
}

static int lost(Call *call) {
    if (poll(call->connections, (nfds_t)call->connection_count, 0) <= 0) return 0;
    for (call->lost = 0; !call->connections[call->lost].revents; call->lost++) {}
    return 1;
}

/* Tests pay as long as messages come soon after; ranks that share cores take those of the sender. */
static void learn(int64_t waited_ns) {
    patience = waited_ns < SOON_NS ? 2 * patience + 1 : patience / 2;
    if (patience > SPINS) patience = SPINS;
}

/* DONE, ABORTED, LOST, CUT, or FAILED with MPI's code in *error. Requests that are not null are
 * open. */
int paceline_reduce(Call *call, int *error) {
    Lane lanes[LANES_MAX];
    int indices[2 * LANES_MAX];
    Status statuses[2 * LANES_MAX];
    int32_t begun = 0, under_way = 0, idle = 0;
    int64_t idle_since_ns = 0, lost_since_ns = 0;
    memset(lanes, 0, sizeof lanes);
    prctl(PR_SET_TIMERSLACK, SLACK_NS, 0, 0, 0); /* Of this thread: the communication thread. */
    for (int32_t k = 0; k < call->lane_count; k++) {
        while (lanes[k].buffer < call->buffer_count && !call->buffers[lanes[k].buffer].numel)
            lanes[k].buffer++;
        next_piece(call, &lanes[k], k);
    }
    while (under_way || begun < call->lane_count) {
        int count = 0;
        /* One by one: what the first ones send is on its way while the next ones are made. */
        if (begun < call->lane_count) {
            if ((*error = post(call, &lanes[begun], begun))) return FAILED;
            under_way += lanes[begun++].open > 0;
        }
        *error = call->mpi->testsome(2 * call->lane_count, call->requests, &count, indices,
                                     statuses);
        if (*error) return FAILED;
        if (count > 0) {
            if (idle) learn(idle > patience ? now_ns() - idle_since_ns : 0);
            idle = 0;
            for (int i = 0; i < count; i++) {
                Lane *lane = &lanes[indices[i] / 2];
                if (indices[i] % 2 == 0 && !whole(call, lane, &statuses[i])) return CUT;
                if ((*error = arrived(call, lane, indices[i] / 2))) return FAILED;
                under_way -= lane->open == 0;
            }
            if (call->stage.take) take(call, lanes);
            continue;
        }
        if (begun < call->lane_count) continue;
        if (call->stage.take) take(call, lanes);
        if (++idle <= patience) continue;
        if (*call->abort) return ABORTED;
        int64_t now = now_ns();
        if (idle == patience + 1) {
            idle_since_ns = now;
            lost_since_ns = 0;
        }
        if (idle % LOOK_EVERY == 0 && lost(call)) {
            if (!lost_since_ns) lost_since_ns = now;
            if (now - lost_since_ns > call->last_words_ns) return LOST;
        }
        int64_t part = (now - idle_since_ns) / PAUSE_PART;
        if (part < PAUSE_NS) part = PAUSE_NS;
        struct timespec pause = {0, part < LONG_PAUSE_NS ? part : LONG_PAUSE_NS};
        nanosleep(&pause, NULL);
    }
    return DONE;
}
