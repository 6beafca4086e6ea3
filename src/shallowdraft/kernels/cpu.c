/* A decoder's forward pass over a few tokens on a CPU, in float32: one call instead of forty operations a layer.
 * Weights may be 8-bit integers with a scale for each output; they are widened on their way into the registers.
 *
 * For few tokens a pass is bound by reading the weights; whatever else it does must not stand in the way. So all layers
 * run inside one parallel region, threads meet at barriers, and every product reads its weight once, front to back, as
 * panels of two vectors of outputs: weight[panel][column][2 * LANES]. The PyTorch reference is models/decoder.py, the
 * tests compare both. A row's result does not depend on the rows beside it: passes over one token and over many agree
 * to the last bit.
 *
 * Shapes: R = B * T rows of activations (B sequences, T tokens each), S slots of the cache, D head width. */
#include <math.h>
#include <omp.h>
#include <stdint.h>
#include <string.h>
#ifdef __AVX2__
#include <immintrin.h>
#endif

/* LANES (floats in a vector: 16, 8 or 4) and QUERIES (of a head that share one reading of its cache) come from
 * cpu.py. In registers stay 2 * TILE sums of a product's TILE rows, and GROUP * CHUNK of GROUP queries, CHUNK vectors
 * of a head; B3K slots stay in the nearest cache while one group after the other reads them. */
#define GROUP 6
#define B3K 32
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

/* A vector of weights, from memory. */
static inline __attribute__((always_inline)) vec widen(const void *weight, int64_t at, int bytes) {
    if (!bytes) return *(const vec *)((const float *)weight + at);
    const int8_t *from = (const int8_t *)weight + at;
#if LANES == 16 /* gcc widens byte by byte if it is asked in its own vector language */
    return (vec)_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i *)from)));
#elif LANES == 8
    return (vec)_mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i *)from)));
#else
    return __builtin_convertvector(*(const bvec *)from, vec);
#endif
}

/* `rows` rows times `wide` panels. `rows`, `wide` and `bytes` are constants wherever this is inlined, so that sums live
 * in registers. Of one row two panels are taken at once: a sum's next addition waits for the one before it. */
static inline __attribute__((always_inline)) void tile(int rows, int wide, int bytes, const Product *m, int64_t panel,
                                                       const float *x, float *y, int64_t stride, int mode,
                                                       int64_t activation) {
    const int64_t size = m->inputs * PANEL, begin = panel * size, step = PANEL * (bytes ? 1 : sizeof(float));
    const int64_t distance = wide == 1 ? WEIGHTS_AHEAD : wide * m->inputs * step;
    const char *ahead = (const char *)m->weight + panel * m->inputs * step + distance;
    vec acc[TILE][2];
#pragma GCC unroll 12
    for (int a = 0; a < wide * rows; a++)
        for (int half = 0; half < 2; half++) {
            const int64_t at = (panel + a / rows) * PANEL + half * LANES;
            acc[a][half] = m->bias && !bytes ? *(const vec *)(m->bias + at) : (vec){0};
        }
    for (int64_t k = 0; k < m->inputs; k++) {
#pragma GCC unroll 2
        for (int p = 0; p < wide; p++) {
            for (int64_t i = 0; i < step; i += LINE) __builtin_prefetch(ahead + (p * m->inputs + k) * step + i);
            vec left = widen(m->weight, begin + p * size + k * PANEL, bytes);
            vec right = widen(m->weight, begin + p * size + k * PANEL + LANES, bytes);
#pragma GCC unroll 12
            for (int r = 0; r < rows; r++) {
                float value = x[r * m->inputs + k];
                acc[p * rows + r][0] += left * value;
                acc[p * rows + r][1] += right * value;
            }
        }
    }
#pragma GCC unroll 12
    for (int a = 0; a < wide * rows; a++) {
        const int64_t its = panel + a / rows, r = a % rows;
        for (int half = 0; bytes && half < 2; half++) {
            acc[a][half] *= *(const vec *)(m->scale + its * PANEL + half * LANES);
            if (m->bias) acc[a][half] += *(const vec *)(m->bias + its * PANEL + half * LANES);
        }
        if (mode == GATE) { /* a panel holds gates and the values they gate */
            int64_t at = its * LANES;
            put(y + r * stride + at, activate(acc[a][0], activation) * acc[a][1], stride - at);
            continue;
        }
        for (int half = 0; half < 2; half++) {
            int64_t at = its * PANEL + half * LANES;
            if (at >= m->outputs) break;
            float *to = y + r * stride + at;
            int64_t count = m->outputs - at;
            if (mode == ACTIVATE) put(to, activate(acc[a][half], activation), count);
            else if (mode == STORE) put(to, acc[a][half], count);
            else if (count >= LANES) *(vec *)to += acc[a][half];
            else for (int64_t i = 0; i < count; i++) to[i] += acc[a][half][i];
        }
    }
}

/* y = mode(x W' + b): this thread's panels for all rows. */
static void multiply(const Product *m, const float *x, int64_t rows, float *y, int mode, int64_t activation) {
    int64_t stride = mode == GATE ? m->outputs / 2 : m->outputs, from, to;
    int64_t panels = mode == GATE ? (stride + LANES - 1) / LANES : (m->outputs + PANEL - 1) / PANEL;
    const int64_t tiles = (rows + TILE - 1) / TILE; /* of like size */
    share(panels, &from, &to);
    int64_t panel = from;
    if (m->scale && rows == 1)
        for (; panel + 2 <= to; panel += 2) tile(1, 2, 1, m, panel, x, y, stride, mode, activation);
    for (; panel < to; panel++)
        for (int64_t i = 0; i < tiles; i++) {
            const int64_t r = rows * i / tiles;
            const float *xr = x + r * m->inputs;
            float *yr = y + r * stride;
#define CASE(n) \
    case n: \
        if (m->scale) tile(n, 1, 1, m, panel, xr, yr, stride, mode, activation); \
        else tile(n, 1, 0, m, panel, xr, yr, stride, mode, activation); \
        break;
            switch (rows * (i + 1) / tiles - r) {
                CASE(1) CASE(2) CASE(3) CASE(4) CASE(5) CASE(6)
#if TILE == 12
                CASE(7) CASE(8) CASE(9) CASE(10) CASE(11) CASE(12)
#endif
            }
        }
}

/* Norm of queries and keys, rotary positions, and the cache's new entries: this thread's share of rows and heads. */
static void place(const Model *m, const Layer *l, float *qkv, const int64_t *positions, const Tree *tree, int64_t batch,
                  int64_t tokens, float *keys, float *values, int64_t slots, const float *cosine, const float *sine) {
    const int64_t D = m->head_dim, half = D / 2, all = m->heads + 2 * m->kv_heads;
    int64_t from, to;
    float turned[D];
    share(batch * tokens * all, &from, &to);
    for (int64_t task = from; task < to; task++) {
        int64_t row = task / all, head = task % all, position = positions[row];
        float *x = qkv + task * D;
        int64_t kv = head < m->heads + m->kv_heads ? head - m->heads : head - m->heads - m->kv_heads;
        int64_t where = tree ? tree->base[row / tokens] + tree->nodes[row % tokens] : position;
        int64_t slot = ((row / tokens * m->kv_heads + kv) * slots + where) * D;
        if (head < m->heads + m->kv_heads) {
            const Norm *norm = head < m->heads ? &l->q_norm : &l->k_norm;
            if (norm->weight) normalise(norm, x, x, D, m->eps);
            if (cosine) {
                const float *c = cosine + position * D, *s = sine + position * D;
                for (int64_t i = 0; i < half; i++) {
                    turned[i] = x[i] * c[i] + x[i + half] * s[i];
                    turned[i + half] = x[i + half] * c[i + half] + x[i] * s[i + half];
                }
                memcpy(x, turned, D * sizeof(float));
            }
            if (head >= m->heads) memcpy(keys + slot, x, D * sizeof(float));
        } else {
            memcpy(values + slot, x, D * sizeof(float));
        }
    }
}

/* Adds values of so many slots, weighted by scores, to CHUNK vectors of some queries' heads. `queries` and `parts` are
 * constants wherever this is inlined. */
static inline __attribute__((always_inline)) void blend(int queries, int parts, float *const *out, const float *values,
                                                        int64_t count, int64_t D, const float *scores, int64_t width) {
    vec mix[GROUP][CHUNK];
#pragma GCC unroll 6
    for (int t = 0; t < queries; t++)
#pragma GCC unroll 4
        for (int c = 0; c < parts; c++) mix[t][c] = *(const vec *)(out[t] + c * LANES);
    for (int64_t j = 0; j < count; j++)
#pragma GCC unroll 4
        for (int c = 0; c < parts; c++) {
            const float *value = values + j * D + c * LANES;
            __builtin_prefetch((const char *)value + CACHE_AHEAD);
            vec v = *(const vec *)value;
#pragma GCC unroll 6
            for (int t = 0; t < queries; t++) mix[t][c] += v * scores[t * width + j];
        }
#pragma GCC unroll 6
    for (int t = 0; t < queries; t++)
#pragma GCC unroll 4
        for (int c = 0; c < parts; c++) *(vec *)(out[t] + c * LANES) = mix[t][c];
}

/* The same over whole heads of at most GROUP queries. */
static void blend_heads(int queries, float *const *out, const float *values, int64_t count, int64_t D,
                        const float *scores, int64_t width) {
    float *to[GROUP];
#define BLEND(n, parts) case n: blend(n, parts, to, values + i, count, D, scores, width); break;
#define EACH(parts) \
    for (int t = 0; t < queries; t++) to[t] = out[t] + i; \
    switch (queries) { \
        BLEND(1, parts) BLEND(2, parts) BLEND(3, parts) BLEND(4, parts) BLEND(5, parts) BLEND(6, parts) \
    }
    int64_t i = 0;
    for (; i + CHUNK * LANES <= D; i += CHUNK * LANES) { EACH(CHUNK) }
    for (; i < D; i += LANES) { EACH(1) }
}

/* Whether a node sees slot j: what stands before its tree, and what leads to it. */
static inline int leads(const Tree *tree, int64_t base, int64_t seen, int64_t position, int64_t window, int64_t j) {
    int64_t where = j < base ? j : base + tree->depths[j - base];
    return (j < base || (seen >> (j - base)) & 1) && (!window || where > position - window);
}

/* Two vectors' lanes, each added to its partner. */
static inline vec halved(vec a, vec b, ivec one, ivec other) {
    return __builtin_shuffle(a, b, one) + __builtin_shuffle(a, b, other);
}

#if LANES == 16
#define IN_FOURS(a, b, c, d) \
    {a, b, c, d, a + 4, b + 4, c + 4, d + 4, a + 8, b + 8, c + 8, d + 8, a + 12, b + 12, c + 12, d + 12}
#elif LANES == 8
#define IN_FOURS(a, b, c, d) {a, b, c, d, a + 4, b + 4, c + 4, d + 4}
#else
#define IN_FOURS(a, b, c, d) {a, b, c, d}
#endif

/* Four vectors as one, each of whose groups of four lanes holds a sum of each. */
static inline vec fours(const vec *v) {
    const ivec low = IN_FOURS(0, LANES, 1, LANES + 1), high = IN_FOURS(2, LANES + 2, 3, LANES + 3);
    const ivec left = IN_FOURS(0, 1, LANES, LANES + 1), right = IN_FOURS(2, 3, LANES + 2, LANES + 3);
    return halved(halved(v[0], v[1], low, high), halved(v[2], v[3], low, high), left, right);
}

/* LANES / 4 of those as the sums over the lanes of LANES vectors, in their order. */
static inline vec sums(const vec *v) {
#if LANES == 16
    const ivec low = {0, 1, 2, 3, 4, 5, 6, 7, 16, 17, 18, 19, 20, 21, 22, 23};
    const ivec high = {8, 9, 10, 11, 12, 13, 14, 15, 24, 25, 26, 27, 28, 29, 30, 31};
    const ivec even = {0, 1, 2, 3, 8, 9, 10, 11, 16, 17, 18, 19, 24, 25, 26, 27};
    const ivec odd = {4, 5, 6, 7, 12, 13, 14, 15, 20, 21, 22, 23, 28, 29, 30, 31};
    return halved(halved(v[0], v[1], low, high), halved(v[2], v[3], low, high), even, odd);
#elif LANES == 8
    const ivec low = {0, 1, 2, 3, 8, 9, 10, 11}, high = {4, 5, 6, 7, 12, 13, 14, 15};
    return halved(v[0], v[1], low, high);
#else
    return v[0];
#endif
}

/* Products of a query with the keys of LANES slots; from `last` on there are none. */
static inline vec score(const float *q, const float *keys, int64_t j, int64_t last, int64_t D) {
    vec found[LANES / 4];
#pragma GCC unroll 4
    for (int g = 0; g < LANES / 4; g++) {
        const float *key[4];
        vec dot[4] = {{0}};
#pragma GCC unroll 4
        for (int s = 0; s < 4; s++) key[s] = keys + (j + 4 * g + s < last ? j + 4 * g + s : last - 1) * D;
        for (int64_t i = 0; i < D; i += LANES) {
            vec x = *(const vec *)(q + i);
#pragma GCC unroll 4
            for (int s = 0; s < 4; s++) dot[s] += x * *(const vec *)(key[s] + i);
        }
        found[g] = fours(dot);
    }
    return sums(found);
}

/* `count` queries of one head against the slots [first, last): scores, softmax, mix. D is a multiple of LANES. */
static void attend(int count, const float *q[], float *out[], const int64_t *limit, int64_t window, const float *keys,
                   const float *values, int64_t first, int64_t last, int64_t D, float *scores, const Tree *tree,
                   int64_t base, const int64_t *led) {
    const int64_t width = (last - first + LANES - 1) / LANES * LANES;
    const float scale = 1 / sqrtf((float)D);
    vec largest[QUERIES];
    for (int t = 0; t < count; t++) largest[t] = splat(-INFINITY);
    for (int64_t j = first; j < last; j += LANES) {
        for (int64_t i = 0; i < LANES * D; i += LINE / sizeof(float))
            __builtin_prefetch((const char *)(keys + j * D + i) + CACHE_AHEAD);
        for (int t = 0; t < count; t++) {
            vec found = score(q[t], keys, j, last, D) * scale;
            if (window || j + LANES > (tree ? base : limit[t] + 1))
                for (int64_t i = 0; i < LANES; i++) {
                    int seen = tree ? j + i < last && leads(tree, base, led[t], limit[t], window, j + i)
                                    : j + i <= limit[t] && (!window || j + i > limit[t] - window);
                    if (!seen) found[i] = -INFINITY;
                }
            largest[t] = pick(found > largest[t], found, largest[t]);
            *(vec *)(scores + t * width + j - first) = found;
        }
    }
    for (int t = 0; t < count; t++) {
        float *s = scores + t * width, most = -INFINITY;
        for (int i = 0; i < LANES; i++) most = largest[t][i] > most ? largest[t][i] : most;
        vec total = {0};
        for (int64_t j = 0; j < width; j += LANES) {
            vec shifted = *(vec *)(s + j) - most;
            vec e = pick(shifted < splat(-86.0f), splat(0), vexp(shifted));
            *(vec *)(s + j) = e;
            total += e;
        }
        const float inverse = 1 / sum(total);
        for (int64_t j = 0; j < width; j += LANES) *(vec *)(s + j) *= inverse;
        memset(out[t], 0, D * sizeof(float));
    }
    const int groups = (count + GROUP - 1) / GROUP;
    for (int64_t j = first; j < last; j += B3K)
        for (int g = 0; g < groups; g++) {
            const int from = count * g / groups, to = count * (g + 1) / groups;
            blend_heads(to - from, out + from, values + j * D, last - j < B3K ? last - j : B3K, D,
                        scores + from * width + j - first, width);
        }
}

/* All heads: this thread's share of (sequence, head, tile of queries), a head's tiles one after the other. */
static void mix(const Model *m, const Layer *l, const float *qkv, const int64_t *positions, const Tree *tree,
                int64_t batch, int64_t tokens, const float *keys, const float *values, int64_t slots, float *mixed,
                float *scores) {
    const int64_t D = m->head_dim, group = m->heads / m->kv_heads, stride = (m->heads + 2 * m->kv_heads) * D;
    const int64_t tiles = (tokens + QUERIES - 1) / QUERIES;
    int64_t from, to;
    share(batch * m->heads * tiles, &from, &to);
    for (int64_t task = from; task < to; task++) {
        int64_t head = task / tiles % m->heads, b = task / tiles / m->heads;
        int64_t query = tokens * (task % tiles) / tiles, start = b * tokens + query, last = 0, first = slots;
        int count = tokens * (task % tiles + 1) / tiles - query;
        const float *q[QUERIES];
        float *out[QUERIES];
        for (int t = 0; t < count; t++) {
            int64_t position = positions[start + t];
            int64_t end = tree ? tree->base[b] + tree->nodes[query + t] + 1 : position + 1;
            int64_t begin = l->window && position >= l->window ? position - l->window + 1 : 0;
            q[t] = qkv + (start + t) * stride + head * D;
            out[t] = mixed + ((start + t) * m->heads + head) * D;
            last = end > last ? end : last;
            first = begin < first ? begin : first;
        }
        first -= first % LANES; /* a slot keeps its lane, so sums round alike however many queries share the tile */
        int64_t base = (b * m->kv_heads + head / group) * slots * D;
        attend(count, q, out, positions + start, l->window, keys + base, values + base, first, last, D, scores, tree,
               tree ? tree->base[b] : 0, tree ? tree->seen + query : NULL);
    }
}

static void norm_rows(const Norm *norm, const float *x, float *y, int64_t rows, int64_t width, float eps) {
    int64_t from, to;
    share(rows, &from, &to);
    for (int64_t r = from; r < to; r++) normalise(norm, x + r * width, y + r * width, width, eps);
}

/* All layers, by every thread of a parallel region; x [R, C] must be there. `cache` is [L, 2, B, G, S, D]; `scratch`
 * holds R * (C + qkv + H * D + ffn) floats and then QUERIES * (S + LANES) for each thread. */
static void layers(const Model *m, float *x, const int64_t *positions, const Tree *tree, int64_t batch, int64_t tokens,
                   float *cache, int64_t slots, const float *cosine, const float *sine, float *scratch) {
    const int64_t R = batch * tokens, C = m->d_model, D = m->head_dim;
    const int64_t plane = batch * m->kv_heads * slots * D;
    float *h = scratch, *qkv = h + R * C, *mixed = qkv + R * (m->heads + 2 * m->kv_heads) * D;
    float *ffn = mixed + R * m->heads * D, *scores = ffn + R * m->ffn;
    float *own = scores + omp_get_thread_num() * QUERIES * (slots + LANES);
    for (int64_t index = 0; index < m->layers; index++) {
        const Layer *l = m->layer + index;
        float *keys = cache + 2 * index * plane, *values = keys + plane;
        if (!(l->skips & 1)) {
            if (!m->post_norm) norm_rows(&l->attn_norm, x, h, R, C, m->eps);
#pragma omp barrier
            multiply(&l->qkv, m->post_norm ? x : h, R, qkv, STORE, 0);
#pragma omp barrier
            place(m, l, qkv, positions, tree, batch, tokens, keys, values, slots, cosine, sine);
#pragma omp barrier
            mix(m, l, qkv, positions, tree, batch, tokens, keys, values, slots, mixed, own);
#pragma omp barrier
            multiply(&l->out, mixed, R, x, ADD, 0);
#pragma omp barrier
            if (m->post_norm) norm_rows(&l->attn_norm, x, x, R, C, m->eps);
        }
        if (!(l->skips & 2)) {
            if (!m->post_norm) norm_rows(&l->ffn_norm, x, h, R, C, m->eps);
#pragma omp barrier
            multiply(&l->up, m->post_norm ? x : h, R, ffn, m->gated ? GATE : ACTIVATE, m->activation);
#pragma omp barrier
            multiply(&l->down, ffn, R, x, ADD, 0);
#pragma omp barrier
            if (m->post_norm) norm_rows(&l->ffn_norm, x, x, R, C, m->eps);
        }
    }
    if (m->final.weight) norm_rows(&m->final, x, x, R, C, m->eps);
}

/* Run x [R, C] through all layers in place; `tree` is NULL where tokens follow one another. */
void forward(const Model *m, float *x, const int64_t *positions, const Tree *tree, int64_t batch, int64_t tokens,
             float *cache, int64_t slots, const float *cosine, const float *sine, float *scratch, int64_t threads) {
#pragma omp parallel num_threads(threads)
    layers(m, x, positions, tree, batch, tokens, cache, slots, cosine, sine, scratch);
}

/* A token's embedding; beyond the `known` ones that of the last. */
static inline void enter(const float *embedding, int64_t known, int64_t token, float *x, int64_t width) {
    memcpy(x, embedding + (token < known ? token : known - 1) * width, width * sizeof(float));
}

/* Of this thread's share of the first `vocab` logits of rows x [R, C] the largest: into its places of best and chosen
 * [threads, R]; no number if one was none. */
static void seek(const Product *head, int64_t vocab, const float *x, int64_t rows, float *logits, float *best,
                 int64_t *chosen) {
    int64_t me = omp_get_thread_num(), first, end;
    share((head->outputs + PANEL - 1) / PANEL, &first, &end);
    first *= PANEL;
    end = end * PANEL < vocab ? end * PANEL : vocab;
    multiply(head, x, rows, logits, STORE, 0);
    for (int64_t r = 0; r < rows; r++) { /* while its own logits are still in its cache */
        float most = -INFINITY;
        int64_t at = first;
        const float *row = logits + r * head->outputs;
        for (int64_t i = first; i < end; i++)
            if (!(row[i] <= most)) {
                most = row[i], at = i;
                if (most != most) break;
            }
        best[me * rows + r] = most, chosen[me * rows + r] = at;
    }
}

/* Which thread found the largest logit of a row, as a place in best and chosen. */
static inline int64_t winner(const float *best, int64_t rows, int64_t row) {
    int64_t won = row;
    for (int64_t other = 1; other < omp_get_num_threads(); other++) {
        int64_t at = other * rows + row;
        if (!(best[at] <= best[won]) && best[won] == best[won]) won = at;
    }
    return won;
}

/* Decode `steps` tokens greedily after tokens [B, T] at positions [B, T], which end one before the first new one: into
 * drafted [B, steps], with the logit of each in largest [B, steps], NaN where there was one. Of the head's outputs the
 * first `vocab` count; `known` is the embedding's number of rows. `x` holds B * (T * C + C + outputs) floats and then B
 * for each thread, `place_of` B * T places and then B for each thread. */
void decode(const Model *m, const float *embedding, int64_t known, const Product *head, int64_t vocab,
            const int64_t *tokens, const int64_t *positions, int64_t batch, int64_t count, int64_t steps,
            int64_t *drafted, float *largest, float *cache, int64_t slots, const float *cosine, const float *sine,
            float *x, int64_t *place_of, float *scratch, int64_t threads) {
    const int64_t C = m->d_model;
    float *last = x + batch * count * C, *logits = last + batch * C, *best = logits + batch * head->outputs;
    int64_t *chosen = place_of + batch * count;
#pragma omp parallel num_threads(threads)
    {
        int64_t from, to;
        for (int64_t step = 0; step < steps; step++) {
            const int64_t T = step ? 1 : count;
            share(batch * T, &from, &to);
            for (int64_t r = from; r < to; r++) {
                enter(embedding, known, step ? drafted[r * steps + step - 1] : tokens[r], x + r * C, C);
                place_of[r] = step ? positions[r * count + count - 1] + step : positions[r];
            }
#pragma omp barrier
            layers(m, x, place_of, NULL, batch, T, cache, slots, cosine, sine, scratch);
#pragma omp barrier
            share(batch, &from, &to);
            for (int64_t b = from; b < to; b++) memcpy(last + b * C, x + (b * T + T - 1) * C, C * sizeof(float));
#pragma omp barrier
            seek(head, vocab, last, batch, logits, best, chosen);
#pragma omp barrier
            for (int64_t b = from; b < to; b++) {
                int64_t won = winner(best, batch, b);
                drafted[b * steps + step] = chosen[won];
                largest[b * steps + step] = best[won];
            }
#pragma omp barrier
        }
    }
}

/* Greedy verification and commit at once. The last of tokens [B, room], which are `length` [B] long, and `count`
 * proposed ones [B, count] go through the model; they are accepted while it chooses them too. Its choices are
 * appended to tokens, whose length grows by the accepted and one, to `limit` [B] at most. packed [B, count + 2]: how
 * many were accepted, or `unsound` if a logit that decided, or one of drafted [B, count] (or NULL), is no number;
 * then the choices. `x` holds R * (C + outputs) floats for R = B * (count + 1) and then R for each thread, `place_of`
 * R places and R a thread. */
void settle(const Model *m, const float *embedding, int64_t known, const Product *head, const int64_t *proposed,
            const float *drafted, int64_t batch, int64_t count, int64_t *tokens, int64_t room, int64_t *length,
            const int64_t *limit, int64_t unsound, int64_t *packed, float *cache, int64_t slots, const float *cosine,
            const float *sine, float *x, int64_t *place_of, float *scratch, int64_t threads) {
    const int64_t C = m->d_model, T = count + 1, R = batch * T;
    float *logits = x + R * C, *best = logits + R * head->outputs;
    int64_t *chosen = place_of + R;
#pragma omp parallel num_threads(threads)
    {
        int64_t from, to;
        share(R, &from, &to);
        for (int64_t r = from; r < to; r++) {
            int64_t b = r / T, t = r % T;
            enter(embedding, known, t ? proposed[b * count + t - 1] : tokens[b * room + length[b] - 1], x + r * C, C);
            place_of[r] = length[b] - 1 + t;
        }
#pragma omp barrier
        layers(m, x, place_of, NULL, batch, T, cache, slots, cosine, sine, scratch);
#pragma omp barrier
        seek(head, head->outputs, x, R, logits, best, chosen);
#pragma omp barrier
        share(batch, &from, &to);
        for (int64_t b = from; b < to; b++) {
            int64_t accepted = 0, sound = 1, *made = packed + b * (T + 1);
            for (int64_t t = 0; t < T; t++) {
                int64_t won = winner(best, R, b * T + t);
                made[1 + t] = tokens[b * room + length[b] + t] = chosen[won];
                if (accepted == t) { /* all before it were accepted, so this one is emitted */
                    sound = sound && isfinite(best[won]);
                    accepted += t < count && proposed[b * count + t] == chosen[won];
                }
                if (drafted && t < count) sound = sound && isfinite(drafted[b * count + t]);
            }
            made[0] = sound ? accepted : unsound;
            length[b] = length[b] + accepted + 1 < limit[b] ? length[b] + accepted + 1 : limit[b];
        }
    }
}

/* y [rows, outputs] = x W' + b. */
void product(const Product *m, const float *x, int64_t rows, float *y, int64_t threads) {
#pragma omp parallel num_threads(threads)
    multiply(m, x, rows, y, STORE, 0);
}

enum { STOPPED = 2, MOST_SPINS = 1 << 16 };

/* One side of passing a cache line back and forth; stops where the other side does not run. */
static void pass_on(int *turn, int me, int64_t rounds) {
    for (int64_t round = 0; round < rounds; round++) {
        int64_t spins = 0;
        for (int now; (now = __atomic_load_n(turn, __ATOMIC_ACQUIRE)) != me;) {
            if (now == STOPPED) return;
            if (++spins == MOST_SPINS) return __atomic_store_n(turn, STOPPED, __ATOMIC_RELEASE);
        }
        __atomic_store_n(turn, 1 - me, __ATOMIC_RELEASE);
    }
}

/* Seconds in which one thread hands a cache line to another: how far apart their cores are. 0 where that is unknown. */
double handover(int64_t rounds) {
    _Alignas(64) int turn = 0;
    double seconds = 0;
#pragma omp parallel num_threads(2)
    {
        int me = omp_get_thread_num(), all = omp_get_num_threads();
#pragma omp barrier
        double begin = omp_get_wtime();
        if (all == 2) pass_on(&turn, me, rounds);
        if (me == 0 && all == 2 && turn != STOPPED) seconds = (omp_get_wtime() - begin) / (2 * rounds);
    }
    return seconds;
}

/* Seconds of so many multiply-adds of vectors on every thread: how fast the cores compute now. */
double arithmetic(int64_t rounds, int64_t threads) {
    double begin = omp_get_wtime();
#pragma omp parallel num_threads(threads)
    {
        vec a = {1}, b = {2}, c = {3}, d = {4}, e = {5}, f = {6}, g = {7}, h = {8}, half = (vec){} + 0.5f;
        for (int64_t round = 0; round < rounds; round++) {
            a = a * half + half, b = b * half + half, c = c * half + half, d = d * half + half;
            e = e * half + half, f = f * half + half, g = g * half + half, h = h * half + half;
        }
        volatile vec sink = a + b + c + d + e + f + g + h;
        (void)sink;
    }
    return omp_get_wtime() - begin;
}
