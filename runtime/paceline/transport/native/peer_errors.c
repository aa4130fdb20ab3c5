/* Lets a process outlive its peers: errors of connections do not end it.
 *
 * MPICH (5.0.2, `MPIDI_OFI_handle_cq_error`) calls every error of libfabric fatal that it does not
 * know, and a fatal error ends the process whatever error handler is set. A peer that dies in the
 * middle of a message is such an error if the tcp provider finds out by a system call that fails
 * (ECONNRESET, ENOTCONN, EPIPE); if it finds out otherwise it cancels what was open, which MPICH
 * knows. Measured: 3 of 144 survivors of a kill in a reduction ended with `OFI poll failed`. So such
 * an error is changed into a cancellation here. A send that was cancelled never completes; a receive
 * completes without its data, for which the loops over MPI look (`reduce.c`, `mpi/transport.py`).
 *
 * MPICH calls `fi_fabric` of libfabric, and all other functions through tables in what that
 * returned. The process loads this library for all to see, before MPICH, so MPICH calls the
 * `fi_fabric` below. It replaces one entry in each table on the way to `readerr`. Other libraries
 * that use libfabric get what they would get without this one.
 *
 * The structures are the beginning of those in libfabric's headers (rdma/fabric.h, fi_domain.h,
 * fi_eq.h), whose layout is fixed by its interface version 1.
 */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <stdatomic.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <sys/types.h>

typedef void (*Function)(void);

/* Functions of an object; `size` is that of the whole table in bytes. */
typedef struct {
    size_t size;
    Function entries[];
} Table;

/* How a fabric, a domain and a completion queue begin. */
typedef struct {
    size_t class;
    void *context;
    Table *common;
    Table *own;
} Object;

typedef struct {
    void *request; /* Null if nobody waits for the operation. */
    uint64_t flags;
    size_t length;
    void *buffer;
    uint64_t data, tag;
    size_t overflow;
    int error;
} ErrorEntry;

typedef int (*Open)(Object *parent, void *attributes, Object **opened, void *context);
typedef int (*OpenFabric)(void *attributes, Object **opened, void *context);
typedef ssize_t (*ReadError)(Object *queue, ErrorEntry *entry, uint64_t flags);

/* A table with one entry replaced, and the function that was there. */
typedef struct {
    Function original;
    Table table;
} Replaced;

enum { FABRIC_DOMAIN = 0, DOMAIN_QUEUE = 1, QUEUE_READ_ERROR = 2 }; /* Indices of entries. */

static atomic_int queues, broken;

/* Queues that are watched: 0 if MPICH has not called this library. */
int paceline_queues(void) { return queues; }

/* Operations that a broken connection has ended. */
int paceline_broken(void) { return broken; }

static Function original(const Object *object) {
    const char *table = (const char *)object->own;
    return ((const Replaced *)(table - offsetof(Replaced, table)))->original;
}

static int replace(Object *object, int entry, Function function) {
    size_t size = object->own->size;
    if (size < offsetof(Table, entries) + (size_t)(entry + 1) * sizeof(Function)) return -ENOSYS;
    Replaced *replaced = malloc(offsetof(Replaced, table) + size);
    if (!replaced) return -ENOMEM;
    memcpy(&replaced->table, object->own, size);
    replaced->original = replaced->table.entries[entry];
    replaced->table.entries[entry] = function;
    object->own = &replaced->table; /* Lives as long as the process, like MPI's objects. */
    return 0;
}

static int of_a_connection(int error) {
    switch (error) {
    case ECONNRESET: case ECONNABORTED: case ECONNREFUSED: case ENOTCONN: case EPIPE:
    case ESHUTDOWN: case ETIMEDOUT: case EHOSTUNREACH: case EHOSTDOWN: case ENETUNREACH:
    case ENETDOWN: case ENETRESET:
    case EIO: /* RDMA devices: the other end answers no more. */
    case EREMOTEIO:
        return 1;
    default:
        return 0;
    }
}

static ssize_t read_error(Object *queue, ErrorEntry *entry, uint64_t flags) {
    ssize_t count = ((ReadError)original(queue))(queue, entry, flags);
    if (count <= 0 || !of_a_connection(entry->error)) return count;
    broken++;
    if (!entry->request) return -EAGAIN; /* As if another thread had read it. */
    entry->error = ECANCELED;
    return count;
}

static int open_queue(Object *domain, void *attributes, Object **opened, void *context) {
    int error = ((Open)original(domain))(domain, attributes, opened, context);
    if (!error && !replace(*opened, QUEUE_READ_ERROR, (Function)read_error)) queues++;
    return error;
}

static int open_domain(Object *fabric, void *attributes, Object **opened, void *context) {
    int error = ((Open)original(fabric))(fabric, attributes, opened, context);
    if (!error) replace(*opened, DOMAIN_QUEUE, (Function)open_queue);
    return error;
}

/* In place of libfabric's function, whichever copy of libfabric the caller is linked with. */
int fi_fabric(void *attributes, Object **opened, void *context) {
    Dl_info caller;
    if (!dladdr(__builtin_return_address(0), &caller)) return -ENOSYS;
    void *library = dlopen(caller.dli_fname, RTLD_LAZY | RTLD_NOLOAD);
    if (!library) return -ENOSYS;
    OpenFabric open = (OpenFabric)dlsym(library, "fi_fabric");
    if (!open) return -ENOSYS;
    int error = open(attributes, opened, context);
    if (!error && dlsym(library, "MPI_Init_thread"))
        replace(*opened, FABRIC_DOMAIN, (Function)open_domain);
    return error;
}
