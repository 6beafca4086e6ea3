/* What the others are made of: a model's weights as cpu.py hands them over, vectors, a thread's share of the work. */
#include <math.h>
#include <omp.h>
#include <stdint.h>
#include <string.h>
#ifdef __AVX2__
#include <immintrin.h>
#endif

/* LANES (floats in a vector: 16, 8 or 4) and QUERIES (of a head that share one reading of its cache) come from
 * cpu.py. In registers stay 2 * TILE sums of a product's TILE rows, and GROUP * CHUNK of GROUP queries, CHUNK vectors
 * of a head; STRIP slots stay in the nearest cache while one group after the other reads them. */
#define GROUP 6
#define STRIP 32
#define PANEL (2 * LANES)
#if LANES == 16
#define TILE 12
#define CHUNK 4
#else
#define TILE 6
#define CHUNK 2
#endif
#define LINE 64 /* bytes of a cache line */
/* Bytes that weights and cached entries are asked for ahead of their use: a processor by itself stops at the end of a
 * page, and more tokens in a pass would then cost their arithmetic on top of the reading instead of beside it. */
#define WEIGHTS_AHEAD (16 << 10)
#define CACHE_AHEAD (8 << 10)

typedef float vec __attribute__((vector_size(4 * LANES), aligned(4), may_alias));
typedef int32_t ivec __attribute__((vector_size(4 * LANES), aligned(4), may_alias));
typedef int8_t bvec __attribute__((vector_size(LANES), aligned(1), may_alias));

enum { SILU, RELU, GELU, GELU_TANH };
enum { STORE, ADD, ACTIVATE, GATE };

typedef struct {
    const void *weight;        /* float, or int8_t where there are scales */
    const float *scale, *bias; /* of each output; may be NULL */
    int64_t outputs, inputs;
} Product;

typedef struct {
    const float *weight, *bias; /* weight NULL: no norm; bias NULL: RMSNorm, else LayerNorm */
} Norm;

typedef struct {
    Norm attn_norm, ffn_norm, q_norm, k_norm;
    Product qkv, out, up, down;
    int64_t window; /* 0: everything */
    int64_t skips;  /* 1: attention, 2: FFN */
} Layer;

typedef struct {
    int64_t layers, d_model, heads, kv_heads, head_dim, ffn, gated, activation, post_norm;
    float eps;
    const Layer *layer;
    Norm final;
} Model;

typedef struct { /* nodes of a token tree, which lie behind its node 0 in the cache; see models/tree.py */
    const int64_t *base, *nodes, *seen, *depths; /* [B], [T], [T], [N] */
} Tree;

static inline vec splat(float value) { return (vec){0} + value; }

static inline vec pick(ivec mask, vec yes, vec no) { return (vec)((mask & (ivec)yes) | (~mask & (ivec)no)); }

static inline float sum(vec v) { /* halves onto halves: a chain of sixteen additions would take four times as long */
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

static inline vec vexp(vec x) { /* 2^n * e^r, |r| <= ln 2 / 2; relative error 2e-7 */
    x = pick(x < splat(-87.0f), splat(-87.0f), x);
    x = pick(x > splat(88.0f), splat(88.0f), x);
    const vec magic = splat(12582912.0f); /* adding and subtracting 1.5 * 2^23 rounds */
    vec n = (x * 1.44269504f + magic) - magic;
    vec r = x - n * 0.693359375f + n * 2.12194440e-4f;
    vec p = splat(1.9875691500e-4f);
    p = p * r + 1.3981999507e-3f;
    p = p * r + 8.3334519073e-3f;
    p = p * r + 4.1665795894e-2f;
    p = p * r + 1.6666665459e-1f;
    p = p * r + 5.0000001201e-1f;
    p = p * r * r + r + 1.0f;
    ivec exponent = __builtin_convertvector(n, ivec);
    return p * (vec)((exponent + 127) << 23);
}

static __attribute__((noinline)) vec activate(vec x, int64_t kind) {
    if (kind == RELU) return pick(x < splat(0), splat(0), x);
    if (kind == SILU) return x / (vexp(-x) + 1.0f);
    for (int i = 0; i < LANES; i++)
        x[i] = kind == GELU ? 0.5f * x[i] * (1 + erff(x[i] * 0.70710678f))
                            : 0.5f * x[i] * (1 + tanhf(0.79788456f * (x[i] + 0.044715f * x[i] * x[i] * x[i])));
    return x;
}

static inline void normalise(const Norm *norm, const float *x, float *y, int64_t width, float eps) {
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

/* The share of `count` that belongs to this thread. */
static inline void share(int64_t count, int64_t *from, int64_t *to) {
    int64_t me = omp_get_thread_num(), all = omp_get_num_threads();
    *from = count * me / all;
    *to = count * (me + 1) / all;
}

static inline void put(float *y, vec value, int64_t count) {
    if (count >= LANES) *(vec *)y = value;
    else for (int64_t i = 0; i < count; i++) y[i] = value[i];
}
