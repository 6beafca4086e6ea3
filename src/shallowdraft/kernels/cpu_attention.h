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
    for (int64_t j = first; j < last; j += STRIP)
        for (int g = 0; g < groups; g++) {
            const int from = count * g / groups, to = count * (g + 1) / groups;
            blend_heads(to - from, out + from, values + j * D, last - j < STRIP ? last - j : STRIP, D,
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
