/* Building blocks of the other headers: the weights as cpu.py hands them over, vector functions, and how work is shared
 * among threads. */
#include <math.h>
#include <omp.h>
#include <stdint.h>
#include <string.h>
#ifdef __AVX2__
#include <immintrin.h>
#endif

/* cpu.py defines LANES, the floats in a vector (16, 8 or 4), and QUERIES, the most queries of a head that share one
 * reading of the KV cache. The other sizes keep running sums in registers:
 *   PANEL  outputs of a weight that are stored together, two vectors wide
 *   TILE   rows that a product handles at once: 2 * TILE vectors of sums
 *   GROUP  queries, and CHUNK vectors of a head, that attention handles at once: GROUP * CHUNK vectors of sums
 *   STRIP  slots of the KV cache that stay in the L1 cache while one group after the other reads them */
#define GROUP 6
#define STRIP 32
#define PANEL (2 * LANES)
#if LANES == 16 /* AVX-512 has 32 vector registers, AVX2 has 16 */
#define TILE 12
#define CHUNK 4
#else
#define TILE 6
#define CHUNK 2
#endif
#define LINE 64 /* bytes of a cache line */
/* How many bytes ahead of their use weights and cached entries are prefetched. The processor's own prefetcher stops at
 * the end of a page; the arithmetic of more tokens in a pass would then add to the reading time instead of hiding
 * behind it. A prefetch past the end of an array is harmless: it cannot fault. */
#define WEIGHTS_AHEAD (16 << 10)
#define CACHE_AHEAD (8 << 10)

/* GCC vectors; aligned(4) allows loads from any float's address. */
typedef float vec __attribute__((vector_size(4 * LANES), aligned(4), may_alias));
typedef int32_t ivec __attribute__((vector_size(4 * LANES), aligned(4), may_alias));
typedef int8_t bvec __attribute__((vector_size(LANES), aligned(1), may_alias));

enum { SILU, RELU, GELU, GELU_TANH };   /* activations; cpu.py has the same numbers */
enum { STORE, ADD, ACTIVATE, GATE };    /* what becomes of a product; see tile in cpu_product.h */
enum { SKIP_ATTENTION = 1, SKIP_FFN = 2 }; /* bits of LayerWeights.skips */

/* The structures mirror those of the same names in cpu.py. */

typedef struct {
    const void *weight;        /* [panels, inputs, PANEL]: float, or int8_t where there are scales */
    const float *scale, *bias; /* [panels, PANEL], a number for each output; may be NULL */
    int64_t outputs, inputs;
} PackedWeight;

typedef struct {
    const float *weight, *bias; /* weight NULL: no norm; bias NULL: RMSNorm, else LayerNorm */
} NormWeights;

typedef struct {
    NormWeights attn_norm, ffn_norm, q_norm, k_norm;
    PackedWeight qkv, out, up, down;
    int64_t window; /* positions that a token may attend to, its own included; 0: all */
    int64_t skips;  /* SKIP_ATTENTION | SKIP_FFN */
} LayerWeights;

typedef struct {
    int64_t layers, d_model, heads, kv_heads, head_dim, ffn, gated, activation, post_norm;
    float eps;
    const LayerWeights *layer;
    NormWeights final;
} DecoderWeights;

/* The nodes of a token tree that a pass reads; see models/tree.py. Node n of text b is in slot base[b] + n of the KV
 * cache. */
typedef struct {
    const int64_t *base;   /* [B] slot and position of node 0 */
    const int64_t *nodes;  /* [T] the nodes of this pass */
    const int64_t *seen;   /* [T] bit j: the node may attend to node j */
    const int64_t *depths; /* [N] depth of every node of the tree */
} TreeNodes;

static inline vec splat(float value) { return (vec){0} + value; }

/* Lanes of `yes` where the mask is -1, of `no` where it is 0. */
static inline vec choose(ivec mask, vec yes, vec no) { return (vec)((mask & (ivec)yes) | (~mask & (ivec)no)); }

/* The sum of all lanes, in halves: a chain of sixteen additions would take four times as long. */
static inline float sum(vec v) {
    typedef float four __attribute__((vector_size(16)));
    union { vec whole; four parts[LANES / 4]; } a = {v};
#if LANES == 16
    four q = (a.parts[0] + a.parts[2]) + (a.parts[1] + a.parts[3]);
#elif LANES == 8
    four q = a.parts[0] + a.parts[1];
#else
    four q = a.whole;
#endif
    return (q[0] + q[1]) + (q[2] + q[3]);
}

/* e^x = 2^n * e^r with n = round(x / ln 2) and |r| <= ln 2 / 2, e^r by a polynomial; relative error 2e-7. */
static inline vec vexp(vec x) {
    x = choose(x < splat(-87.0f), splat(-87.0f), x); /* beyond these e^x leaves the normal floats */
    x = choose(x > splat(88.0f), splat(88.0f), x);
    const vec magic = splat(12582912.0f); /* adding and subtracting 1.5 * 2^23 rounds to an integer */
    vec n = (x * 1.44269504f + magic) - magic;
    vec r = x - n * 0.693359375f + n * 2.12194440e-4f; /* ln 2 in two parts, so that r keeps its precision */
    vec p = splat(1.9875691500e-4f);
    p = p * r + 1.3981999507e-3f;
    p = p * r + 8.3334519073e-3f;
    p = p * r + 4.1665795894e-2f;
    p = p * r + 1.6666665459e-1f;
    p = p * r + 5.0000001201e-1f;
    p = p * r * r + r + 1.0f;
    ivec exponent = __builtin_convertvector(n, ivec);
    return p * (vec)((exponent + 127) << 23); /* the bits of 2^n */
}

static __attribute__((noinline)) vec activate(vec x, int64_t kind) {
    if (kind == RELU) return choose(x < splat(0), splat(0), x);
    if (kind == SILU) return x / (vexp(-x) + 1.0f);
    for (int i = 0; i < LANES; i++)
        x[i] = kind == GELU ? 0.5f * x[i] * (1 + erff(x[i] * 0.70710678f))
                            : 0.5f * x[i] * (1 + tanhf(0.79788456f * (x[i] + 0.044715f * x[i] * x[i] * x[i])));
    return x;
}

/* RMSNorm or LayerNorm of one row x [width] into y [width], which may be x. */
static inline void normalise(const NormWeights *norm, const float *x, float *y, int64_t width, float eps) {
    vec squares = {0}, plain = {0};
    int64_t i = 0;
    for (; i + LANES <= width; i += LANES) {
        vec v = *(const vec *)(x + i);
        squares += v * v;
        plain += v;
    }
    float square = sum(squares), mean = sum(plain);
    for (; i < width; i++) square += x[i] * x[i], mean += x[i];
    mean = norm->bias ? mean / width : 0;
    if (norm->bias) { /* the variance around the mean, not the difference of two large sums */
        square = 0;
        for (i = 0; i < width; i++) square += (x[i] - mean) * (x[i] - mean);
    }
    float scale = 1 / sqrtf(square / width + eps);
    if (norm->bias)
        for (i = 0; i < width; i++) y[i] = (x[i] - mean) * scale * norm->weight[i] + norm->bias[i];
    else
        for (i = 0; i < width; i++) y[i] = x[i] * scale * norm->weight[i];
}

/* This thread's part [from, to) of `count` tasks. Each task (a row, a panel of outputs, a tile of queries) is computed
 * by one thread in a fixed order, and no sum spans two threads: so results do not depend on the number of threads. */
static inline void share(int64_t count, int64_t *from, int64_t *to) {
    int64_t me = omp_get_thread_num(), threads = omp_get_num_threads();
    *from = count * me / threads;
    *to = count * (me + 1) / threads;
}

/* Store the first `count` lanes. */
static inline void store(float *y, vec value, int64_t count) {
    if (count >= LANES) *(vec *)y = value;
    else for (int64_t i = 0; i < count; i++) y[i] = value[i];
}
