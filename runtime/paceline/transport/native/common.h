/* What the native loops have in common: types, their bits, and the clock. */
#ifndef PACELINE_COMMON_H
#define PACELINE_COMMON_H

#include <stdint.h>
#include <string.h>
#include <time.h>

/* Mirrored by `transport/native/layout.py`. */
enum { FLOAT32 = 0, FLOAT64 = 1, INT32 = 2, INT64 = 3, BFLOAT16 = 4 };

static inline int64_t now_ns(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (int64_t)t.tv_sec * 1000000000 + t.tv_nsec;
}

static inline float from_bfloat16(uint16_t half) {
    uint32_t bits = (uint32_t)half << 16;
    float value;
    memcpy(&value, &bits, sizeof value);
    return value;
}

/* Round to the nearest, ties to even, as torch does. */
static inline uint16_t to_bfloat16(float value) {
    uint32_t bits;
    memcpy(&bits, &value, sizeof bits);
    if (value != value) return 0x7fc0;
    return (uint16_t)((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}

#endif
