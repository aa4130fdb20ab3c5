/* Copies of large buffers that write past the caches.
 *
 * A usual store reads the line that it writes to first. For a buffer that is larger than the caches
 * this is a third of what moves, and it pushes out what is used next. A product is that of one
 * multiplication, as in torch, so its bits are the same.
 */
#include <stdint.h>
#include <string.h>

#ifdef __SSE2__
#include <emmintrin.h>

/* Bytes of a line of the caches, and how far ahead of the loop the source is fetched. */
enum { LINE = 64, AHEAD = 1024 };

/* Bytes of the target in front of its first whole line. */
static int64_t before_line(const void *target, int64_t size) {
    int64_t bytes = (int64_t)(-(uintptr_t)target & (LINE - 1));
    return bytes < size ? bytes : size;
}
#endif

void paceline_scale(const float *source, float *target, int64_t count, float factor) {
    int64_t i = 0;
#ifdef __SSE2__
    const int64_t first = before_line(target, 4 * count) / 4;
    const __m128 factors = _mm_set1_ps(factor);
    for (; i < first; i++) target[i] = source[i] * factor;
    for (; i + LINE / 4 <= count; i += LINE / 4) {
        _mm_prefetch((const char *)(source + i) + AHEAD, _MM_HINT_T0);
        for (int64_t k = i; k < i + LINE / 4; k += 4)
            _mm_stream_ps(target + k, _mm_mul_ps(_mm_loadu_ps(source + k), factors));
    }
    _mm_sfence(); /* Others may read the target as soon as this has returned. */
#endif
    for (; i < count; i++) target[i] = source[i] * factor;
}

void paceline_copy(const char *source, char *target, int64_t size) {
    int64_t i = 0;
#ifdef __SSE2__
    i = before_line(target, size);
    memcpy(target, source, (size_t)i);
    for (; i + LINE <= size; i += LINE) {
        _mm_prefetch(source + i + AHEAD, _MM_HINT_T0);
        for (int64_t k = i; k < i + LINE; k += 16)
            _mm_stream_si128((__m128i *)(target + k),
                             _mm_loadu_si128((const __m128i *)(source + k)));
    }
    _mm_sfence();
#endif
    memcpy(target + i, source + i, (size_t)(size - i));
}
