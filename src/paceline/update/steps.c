/*
 * Steps of update rules on float32: the sum of the gradients, their check, the divisor and the rule in one pass, with
 * each element read and written once. steps.py calls it where its results are those of torch's operations bit for bit.
 *
 * Nothing here allocates, keeps state or takes a lock: all memory is the caller's, and calls that share no memory may
 * run at once. A process that is killed in the middle of a step leaves, in memory that outlives it, what the elements at
 * hand looked like before. What is multiplied and added is rounded once where it says fma, and twice elsewhere: the
 * options of the build forbid the compiler to join the two by itself.
 */
#include <stddef.h>
#include <stdint.h>
#include <string.h>

#ifndef SOURCE_CRC
#define SOURCE_CRC 0 /* of this file, as hatch_build.py gives it */
#endif

uint32_t paceline_source(void)
{
    return SOURCE_CRC;
}

#if defined(__x86_64__) && defined(__GNUC__)
#include <immintrin.h>

#define FAST __attribute__((target("avx2,fma")))
#define INLINE static inline __attribute__((always_inline)) FAST
#define WIDTH 8

/* The gradients of one step: what is added is (g[0] + g[1]) + ..., each times its weight if there are weights. */
typedef struct {
    const float *const *gradients;
    const float *weights;
    int64_t num;
} sum_t;

typedef struct {
    float lr, momentum, undamped, decay, divisor;
} sgd_t;

typedef struct {
    float divisor, decay, kept, rest1, beta2, rest2, size, root, eps;
} adam_t;

/*
 * Two copies of what elements look like before they change, in memory that outlives the process. The first word says
 * after how many words the one that counts begins, 0 for none; a copy has how many elements were changed before these,
 * where these begin in the chunk, how many they are and which arrays they are of, as bits; then a block of each array.
 */
typedef struct {
    int64_t *memory; /* NULL to keep nothing */
    int64_t num_changed, start; /* before the first element of the step; where that lies in the chunk */
    int64_t block; /* most elements in a copy, a multiple of WIDTH */
    int64_t *copy; /* that counts */
    int64_t from; /* its first element in the step */
} undo_t;

enum { HEAD_WORDS = 8, SGD_ARRAYS = 2, ADAM_ARRAYS = 4 };
enum { STRIDE = 64 }; /* elements that are kept at once: little, so that memory is read once and in parallel */

/* A kill lets all writes before this happen that come first in the program, and none behind it without them. */
#define IN_ORDER __asm__ volatile("" ::: "memory")

/* FUSED: as torch's fused operation, which rounds another product in the last elements of a tensor. */
enum { NESTEROV = 1, MAXIMIZE = 2, FRESH = 4, FUSED = 8 };

/* The elements from `at` on: all of them, or those with the highest bit of their lane set. */
INLINE __m256 load(const float *from, int64_t at, const __m256i *lanes)
{
    return lanes ? _mm256_maskload_ps(from + at, *lanes) : _mm256_loadu_ps(from + at);
}

INLINE void store(float *to, int64_t at, const __m256i *lanes, __m256 value)
{
    if (lanes)
        _mm256_maskstore_ps(to + at, *lanes, value);
    else
        _mm256_storeu_ps(to + at, value);
}

INLINE __m256 weighted(sum_t of, int64_t number, int64_t at, const __m256i *lanes)
{
    __m256 gradient = load(of.gradients[number], at, lanes);
    return of.weights ? _mm256_mul_ps(gradient, _mm256_set1_ps(of.weights[number])) : gradient;
}

/* Adds NaN to `bad` where the sum is not finite. */
INLINE __m256 sum_of(sum_t of, int64_t at, const __m256i *lanes, __m256 *bad)
{
    __m256 sum = weighted(of, 0, at, lanes);
    for (int64_t number = 1; number < of.num; number++)
        sum = _mm256_add_ps(sum, weighted(of, number, at, lanes));
    *bad = _mm256_fmadd_ps(sum, _mm256_setzero_ps(), *bad);
    return sum;
}

/* a * b + c * d, of which one product is rounded by itself: c * d at the end of a fused operation, else a * b. */
INLINE __m256 both(__m256 a, __m256 b, __m256 c, __m256 d, int is_end)
{
    if (is_end)
        return _mm256_fmadd_ps(a, b, _mm256_mul_ps(c, d));
    return _mm256_fmadd_ps(c, d, _mm256_mul_ps(a, b));
}

/* The gradient to descend, but for weight decay. */
INLINE __m256 descended(sum_t of, int64_t at, const __m256i *lanes, float divisor, int how, __m256 *bad)
{
    __m256 gradient = sum_of(of, at, lanes, bad);
    if (divisor != 1.0f)
        gradient = _mm256_div_ps(gradient, _mm256_set1_ps(divisor));
    return how & MAXIMIZE ? _mm256_xor_ps(gradient, _mm256_set1_ps(-0.0f)) : gradient;
}

INLINE void sgd_step(float *values, float *buffer, sum_t of, int64_t at, const __m256i *lanes, const sgd_t *by, int how,
                     __m256 *bad)
{
    __m256 gradient = descended(of, at, lanes, by->divisor, how, bad), value = load(values, at, lanes);
    if (by->decay != 0.0f)
        gradient = _mm256_fmadd_ps(value, _mm256_set1_ps(by->decay), gradient);
    if (buffer) {
        __m256 momentum = gradient;
        if (!(how & FRESH))
            momentum = both(load(buffer, at, lanes), _mm256_set1_ps(by->momentum), gradient,
                            _mm256_set1_ps(by->undamped), lanes && how & FUSED);
        store(buffer, at, lanes, momentum);
        gradient = how & NESTEROV ? _mm256_fmadd_ps(momentum, _mm256_set1_ps(by->momentum), gradient) : momentum;
    }
    store(values, at, lanes, _mm256_fmadd_ps(gradient, _mm256_set1_ps(-by->lr), value));
}

/* `rest1` of the way from the average to the gradient, from the end that is nearer. */
INLINE __m256 between(__m256 average, __m256 gradient, float rest1)
{
    __m256 way = _mm256_sub_ps(gradient, average);
    if (rest1 < 0.5f)
        return _mm256_fmadd_ps(_mm256_set1_ps(rest1), way, average);
    return _mm256_fmadd_ps(_mm256_set1_ps(rest1 - 1.0f), way, gradient);
}

/* The greater one of both, NaN if one of them is; at the end of a fused operation `most` if one of them is. */
INLINE __m256 greater(__m256 most, __m256 square, const __m256i *lanes)
{
    if (lanes)
        return _mm256_max_ps(square, most);
    return _mm256_or_ps(_mm256_max_ps(most, square), _mm256_cmp_ps(most, square, _CMP_UNORD_Q));
}

INLINE void adam_step(float *values, float *averages, float *squares, float *most, sum_t of, int64_t at,
                      const __m256i *lanes, const adam_t *by, int how, __m256 *bad)
{
    __m256 gradient = descended(of, at, lanes, by->divisor, how, bad), value = load(values, at, lanes);
    if (by->kept != 1.0f)
        value = _mm256_mul_ps(value, _mm256_set1_ps(by->kept));
    if (by->decay != 0.0f)
        gradient = _mm256_fmadd_ps(value, _mm256_set1_ps(by->decay), gradient);
    __m256 average = between(load(averages, at, lanes), gradient, by->rest1);
    __m256 square = both(load(squares, at, lanes), _mm256_set1_ps(by->beta2),
                         _mm256_mul_ps(_mm256_set1_ps(by->rest2), gradient), gradient, lanes != NULL);
    store(averages, at, lanes, average);
    store(squares, at, lanes, square);
    if (most) {
        square = greater(load(most, at, lanes), square, lanes);
        store(most, at, lanes, square);
    }
    __m256 below = _mm256_div_ps(_mm256_sqrt_ps(square), _mm256_set1_ps(by->root));
    below = _mm256_add_ps(below, _mm256_set1_ps(by->eps));
    __m256 change = _mm256_div_ps(_mm256_mul_ps(_mm256_set1_ps(-by->size), average), below);
    store(values, at, lanes, _mm256_add_ps(value, change));
}

INLINE __m256i first_lanes(int64_t num)
{
    const __m256i numbers = _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7);
    return _mm256_cmpgt_epi32(_mm256_set1_epi32((int)num), numbers);
}

INLINE int has_nan(__m256 bad)
{
    return _mm256_movemask_ps(_mm256_cmp_ps(bad, bad, _CMP_UNORD_Q)) != 0;
}

/* Begins a copy of elements from `at` on; the one before it counts until then. */
static void begin_copy(undo_t *undo, const float *const *arrays, int num_arrays, int64_t at)
{
    int64_t second = 2 * HEAD_WORDS + num_arrays * undo->block / 2, kept = 0;
    int64_t begin = undo->memory[0] == HEAD_WORDS ? second : HEAD_WORDS, *copy = undo->memory + begin;
    for (int number = 0; number < num_arrays; number++)
        kept |= (int64_t)(arrays[number] != NULL) << number;
    copy[0] = undo->num_changed + at, copy[1] = undo->start + at, copy[2] = 0, copy[3] = kept;
    IN_ORDER;
    undo->memory[0] = begin;
    undo->copy = copy, undo->from = at;
}

/* Keeps the next elements of a step, which are about to change; returns where they end. */
INLINE int64_t keep_next(undo_t *undo, const float *const *arrays, int num_arrays, int64_t at, int64_t length)
{
    if (!undo->memory)
        return length;
    if (!undo->copy || at == undo->from + undo->block)
        begin_copy(undo, arrays, num_arrays, at);
    int64_t end = at + STRIDE, place = at - undo->from;
    end = end < undo->from + undo->block ? end : undo->from + undo->block;
    end = end < length ? end : length;
    float *kept = (float *)(undo->copy + HEAD_WORDS) + place;
    for (int number = 0; number < num_arrays; number++, kept += undo->block) {
        const float *array = arrays[number];
        if (array && end - at == STRIDE)
            memcpy(kept, array + at, STRIDE * sizeof(float)); /* of a size that the compiler knows */
        else if (array)
            memcpy(kept, array + at, (size_t)(end - at) * sizeof(float));
    }
    IN_ORDER;
    undo->copy[2] = end - undo->from;
    IN_ORDER;
    return end;
}

int paceline_can_step(void)
{
    __builtin_cpu_init();
    return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
}

/*
 * One step of torch.optim.SGD; returns whether some sum of gradients is not finite. `buffer` is NULL without momentum,
 * `weights` where every gradient counts once; `undo_memory` and what follows it are an undo_t. The processor must be one
 * that can step.
 */
FAST int paceline_sgd(float *values, float *buffer, int64_t length, const float *const *gradients, const float *weights,
                      int64_t num_gradients, float divisor, int64_t *undo_memory, int64_t num_changed, int64_t start,
                      int64_t block, float lr, float momentum, float undamped, float decay, int how)
{
    sum_t of = {gradients, weights, num_gradients};
    sgd_t by = {lr, momentum, undamped, decay, divisor};
    undo_t undo = {undo_memory, num_changed, start, block, NULL, 0};
    const float *const arrays[SGD_ARRAYS] = {values, buffer};
    __m256 bad = _mm256_setzero_ps();
    for (int64_t at = 0; at < length;) {
        int64_t end = keep_next(&undo, arrays, SGD_ARRAYS, at, length);
        for (; at + WIDTH <= end; at += WIDTH)
            sgd_step(values, buffer, of, at, NULL, &by, how, &bad);
        if (at < end) {
            __m256i lanes = first_lanes(end - at);
            sgd_step(values, buffer, of, at, &lanes, &by, how, &bad);
            at = end;
        }
    }
    return has_nan(bad);
}

/*
 * One step of torch.optim.Adam or AdamW, as their fused operations make it; returns as above. `most` is NULL without
 * amsgrad; `kept` is what decoupled weight decay leaves of a value, 1 without; `rest1` and `rest2` are 1 - beta1 and
 * 1 - beta2; `size` and `root` are the step size and the square root, both corrected for the number of steps.
 */
FAST int paceline_adam(float *values, float *averages, float *squares, float *most, int64_t length,
                       const float *const *gradients, const float *weights, int64_t num_gradients, float divisor,
                       int64_t *undo_memory, int64_t num_changed, int64_t start, int64_t block, float decay, float kept,
                       float rest1, float beta2, float rest2, float size, float root, float eps, int how)
{
    sum_t of = {gradients, weights, num_gradients};
    adam_t by = {divisor, decay, kept, rest1, beta2, rest2, size, root, eps};
    undo_t undo = {undo_memory, num_changed, start, block, NULL, 0};
    const float *const arrays[ADAM_ARRAYS] = {values, averages, squares, most};
    __m256 bad = _mm256_setzero_ps();
    for (int64_t at = 0; at < length;) {
        int64_t end = keep_next(&undo, arrays, ADAM_ARRAYS, at, length);
        for (; at + WIDTH <= end; at += WIDTH)
            adam_step(values, averages, squares, most, of, at, NULL, &by, how, &bad);
        if (at < end) {
            __m256i lanes = first_lanes(end - at);
            adam_step(values, averages, squares, most, of, at, &lanes, &by, how, &bad);
            at = end;
        }
    }
    return has_nan(bad);
}
#else
int paceline_can_step(void)
{
    return 0;
}

int paceline_sgd(float *values, float *buffer, int64_t length, const float *const *gradients, const float *weights,
                 int64_t num_gradients, float divisor, int64_t *undo_memory, int64_t num_changed, int64_t start,
                 int64_t block, float lr, float momentum, float undamped, float decay, int how)
{
    (void)values, (void)buffer, (void)length, (void)gradients, (void)weights, (void)num_gradients;
    (void)undo_memory, (void)num_changed, (void)start, (void)block;
    (void)lr, (void)momentum, (void)undamped, (void)decay, (void)divisor, (void)how;
    return 1;
}

int paceline_adam(float *values, float *averages, float *squares, float *most, int64_t length,
                  const float *const *gradients, const float *weights, int64_t num_gradients, float divisor,
                  int64_t *undo_memory, int64_t num_changed, int64_t start, int64_t block, float decay, float kept,
                  float rest1, float beta2, float rest2, float size, float root, float eps, int how)
{
    (void)values, (void)averages, (void)squares, (void)most, (void)length, (void)gradients, (void)weights;
    (void)undo_memory, (void)num_changed, (void)start, (void)block;
    (void)num_gradients, (void)divisor, (void)decay, (void)kept, (void)rest1, (void)beta2, (void)rest2;
    (void)size, (void)root, (void)eps, (void)how;
    return 1;
}
#endif
