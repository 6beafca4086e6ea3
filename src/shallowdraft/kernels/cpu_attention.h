/* Attention over the KV cache: rotary positions and new entries, then scores, softmax and weighted values.
 *
 * keys and values are one layer's: [B, G, S, D]. Attention is computed by tiles of up to QUERIES queries of one text
 * and one head, so that a tile reads its keys and values once. D is a multiple of LANES. */

/* Normalise and rotate queries and keys in place, and write keys and values to the KV cache: this thread's share of
 * (row, head). qkv is [R, H + 2 G, D]: queries, keys, values. cosine and sine are [positions, D], the sine with the
 * sign of the half that it is added to, or NULL. */
static void rotate_and_store(const DecoderWeights *m, const LayerWeights *l, float *qkv, const int64_t *positions,
                             const TreeNodes *tree, int64_t batch, int64_t tokens, float *keys, float *values,
                             int64_t slots, const float *cosine, const float *sine) {
    const int64_t D = m->head_dim, half = D / 2, all = m->heads + 2 * m->kv_heads;
    int64_t from, to;
    float turned[D];
    share(batch * tokens * all, &from, &to);
    for (int64_t task = from; task < to; task++) {
        int64_t row = task / all, head = task % all, position = positions[row];
        float *x = qkv + task * D;
        int64_t kv = head < m->heads + m->kv_heads ? head - m->heads : head - m->heads - m->kv_heads;
        /* A token's slot is its position, but nodes of a tree share positions and have a slot each. */
        int64_t index = tree ? tree->base[row / tokens] + tree->nodes[row % tokens] : position;
        int64_t slot = ((row / tokens * m->kv_heads + kv) * slots + index) * D;
        if (head < m->heads + m->kv_heads) {
            const NormWeights *norm = head < m->heads ? &l->q_norm : &l->k_norm;
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

/* Add the values of `count` slots, weighted by scores [queries, width], to `parts` vectors of each query's output.
 * `queries` and `parts` are constants wherever this is inlined, so that the sums stay in registers. */
static inline __attribute__((always_inline)) void add_part(int queries, int parts, float *const *out,
                                                           const float *values, int64_t count, int64_t D,
                                                           const float *scores, int64_t width) {
    vec mixed[GROUP][CHUNK];
#pragma GCC unroll 6
    for (int t = 0; t < queries; t++)
#pragma GCC unroll 4
        for (int c = 0; c < parts; c++) mixed[t][c] = *(const vec *)(out[t] + c * LANES);
    for (int64_t j = 0; j < count; j++)
#pragma GCC unroll 4
        for (int c = 0; c < parts; c++) {
            const float *value = values + j * D + c * LANES;
            __builtin_prefetch((const char *)value + CACHE_AHEAD);
            vec v = *(const vec *)value;
#pragma GCC unroll 6
            for (int t = 0; t < queries; t++) mixed[t][c] += v * scores[t * width + j];
        }
#pragma GCC unroll 6
    for (int t = 0; t < queries; t++)
#pragma GCC unroll 4
        for (int c = 0; c < parts; c++) *(vec *)(out[t] + c * LANES) = mixed[t][c];
}

/* The same for all D / LANES vectors of the outputs of at most GROUP queries: CHUNK vectors at a time, then one by
 * one. */
static void add_values(int queries, float *const *out, const float *values, int64_t count, int64_t D,
                       const float *scores, int64_t width) {
    float *to[GROUP];
#define CASE_OF(n, parts) case n: add_part(n, parts, to, values + i, count, D, scores, width); break;
#define EACH(parts) \
    for (int t = 0; t < queries; t++) to[t] = out[t] + i; \
    switch (queries) { \
        CASE_OF(1, parts) CASE_OF(2, parts) CASE_OF(3, parts) CASE_OF(4, parts) CASE_OF(5, parts) CASE_OF(6, parts) \
    }
    int64_t i = 0;
    for (; i + CHUNK * LANES <= D; i += CHUNK * LANES) { EACH(CHUNK) }
    for (; i < D; i += LANES) { EACH(1) }
}

/* Whether a node at `position` may attend to slot j: all slots before the tree, and in the tree its own path, each
 * within the window. */
static inline int node_sees(const TreeNodes *tree, int64_t base, int64_t seen, int64_t position, int64_t window,
                            int64_t j) {
    int64_t slot_position = j < base ? j : base + tree->depths[j - base];
    return (j < base || (seen >> (j - base)) & 1) && (!window || slot_position > position - window);
}

/* A product of a query with LANES keys needs LANES sums over the lanes of a vector. Summing the vectors one by one
 * takes log2(LANES) shuffles each. Instead two vectors are shuffled together and added, which halves what is left of
 * both at once: 3 of these steps make one vector of four (sum_fours), and LANES / 4 - 1 more join the LANES / 4
 * vectors that come of it (join_fours).
 *
 * fold: each lane of the result is the sum of two lanes of a and b; lane numbers from LANES on are b's. */
static inline vec fold(vec a, vec b, ivec first, ivec second) {
    return __builtin_shuffle(a, b, first) + __builtin_shuffle(a, b, second);
}

/* The same shuffle in every group of four lanes. */
#if LANES == 16
#define IN_FOURS(a, b, c, d) \
    {a, b, c, d, a + 4, b + 4, c + 4, d + 4, a + 8, b + 8, c + 8, d + 8, a + 12, b + 12, c + 12, d + 12}
#elif LANES == 8
#define IN_FOURS(a, b, c, d) {a, b, c, d, a + 4, b + 4, c + 4, d + 4}
#else
#define IN_FOURS(a, b, c, d) {a, b, c, d}
#endif

/* Sum v[0] to v[3] within groups of four lanes: lane 4 g + i of the result is the sum of group g of v[i].
 * After the first fold a group holds {v0[0] + v0[2], v1[0] + v1[2], v0[1] + v0[3], v1[1] + v1[3]}. */
static inline vec sum_fours(const vec *v) {
    const ivec low = IN_FOURS(0, LANES, 1, LANES + 1), high = IN_FOURS(2, LANES + 2, 3, LANES + 3);
    const ivec left = IN_FOURS(0, 1, LANES, LANES + 1), right = IN_FOURS(2, 3, LANES + 2, LANES + 3);
    return fold(fold(v[0], v[1], low, high), fold(v[2], v[3], low, high), left, right);
}

/* Add up the groups of LANES / 4 results of sum_fours: lane 4 i + j of the result is the whole sum of vector j of those
 * that v[i] was made from. */
static inline vec join_fours(const vec *v) {
#if LANES == 16 /* upper half onto lower half of v[0] and v[1], of v[2] and v[3]; then odd groups onto even ones */
    const ivec low = {0, 1, 2, 3, 4, 5, 6, 7, 16, 17, 18, 19, 20, 21, 22, 23};
    const ivec high = {8, 9, 10, 11, 12, 13, 14, 15, 24, 25, 26, 27, 28, 29, 30, 31};
    const ivec even = {0, 1, 2, 3, 8, 9, 10, 11, 16, 17, 18, 19, 24, 25, 26, 27};
    const ivec odd = {4, 5, 6, 7, 12, 13, 14, 15, 20, 21, 22, 23, 28, 29, 30, 31};
    return fold(fold(v[0], v[1], low, high), fold(v[2], v[3], low, high), even, odd);
#elif LANES == 8
    const ivec low = {0, 1, 2, 3, 8, 9, 10, 11}, high = {4, 5, 6, 7, 12, 13, 14, 15};
    return fold(v[0], v[1], low, high);
#else
    return v[0];
#endif
}

/* Products of query q [D] with the keys of slots j to j + LANES - 1, a lane each. A slot from `last` on is read as slot
 * last - 1; the caller masks it. */
static inline vec score(const float *q, const float *keys, int64_t j, int64_t last, int64_t D) {
    vec partial[LANES / 4];
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
        partial[g] = sum_fours(dot);
    }
    return join_fours(partial);
}

/* Attend with `count` queries q[t] [D] of one head, at positions [count], to slots [first, last): out[t] [D]. `scores`
 * is scratch for [count, width] floats. In a tree, `base` is node 0's slot and seen [count] the nodes that a query
 * sees.
 *
 * Three passes: scores and each query's largest; softmax; weighted values. A slot that a query must not see has
 * score -infinity and weight 0, so that a query's sums are the same whichever others are in its tile. */
static void attend_tile(int count, const float *q[], float *out[], const int64_t *positions, int64_t window,
                        const float *keys, const float *values, int64_t first, int64_t last, int64_t D, float *scores,
                        const TreeNodes *tree, int64_t base, const int64_t *seen) {
    const int64_t width = (last - first + LANES - 1) / LANES * LANES;
    const float scale = 1 / sqrtf((float)D);
    vec largest[QUERIES]; /* by lane; their maximum is taken at the end */
    for (int t = 0; t < count; t++) largest[t] = splat(-INFINITY);
    for (int64_t j = first; j < last; j += LANES) {
        for (int64_t i = 0; i < LANES * D; i += LINE / sizeof(float))
            __builtin_prefetch((const char *)(keys + j * D + i) + CACHE_AHEAD);
        for (int t = 0; t < count; t++) {
            vec s = score(q[t], keys, j, last, D) * scale;
            /* Without a window, slots before a query's own, or before its tree, are all seen. */
            if (window || j + LANES > (tree ? base : positions[t] + 1))
                for (int64_t i = 0; i < LANES; i++) {
                    int visible = tree ? j + i < last && node_sees(tree, base, seen[t], positions[t], window, j + i)
                                       : j + i <= positions[t] && (!window || j + i > positions[t] - window);
                    if (!visible) s[i] = -INFINITY;
                }
            largest[t] = choose(s > largest[t], s, largest[t]);
            *(vec *)(scores + t * width + j - first) = s;
        }
    }
    for (int t = 0; t < count; t++) {
        float *s = scores + t * width, most = -INFINITY;
        for (int i = 0; i < LANES; i++) most = largest[t][i] > most ? largest[t][i] : most;
        vec total = {0};
        for (int64_t j = 0; j < width; j += LANES) {
            vec shifted = *(vec *)(s + j) - most;
            vec e = choose(shifted < splat(-86.0f), splat(0), vexp(shifted)); /* vexp never returns 0 */
            *(vec *)(s + j) = e;
            total += e;
        }
        const float inverse = 1 / sum(total);
        for (int64_t j = 0; j < width; j += LANES) *(vec *)(s + j) *= inverse;
        memset(out[t], 0, D * sizeof(float));
    }
    const int groups = (count + GROUP - 1) / GROUP; /* of nearly equal numbers of queries */
    for (int64_t j = first; j < last; j += STRIP)
        for (int g = 0; g < groups; g++) {
            const int from = count * g / groups, to = count * (g + 1) / groups;
            add_values(to - from, out + from, values + j * D, last - j < STRIP ? last - j : STRIP, D,
                       scores + from * width + j - first, width);
        }
}

/* Attend with all heads: qkv [R, H + 2 G, D] -> mixed [R, H, D]. This thread's share of (text, head, tile of queries);
 * a head's tiles follow one another, so that its keys and values are still in the processor's cache. */
static void attend(const DecoderWeights *m, const LayerWeights *l, const float *qkv, const int64_t *positions,
                   const TreeNodes *tree, int64_t batch, int64_t tokens, const float *keys, const float *values,
                   int64_t slots, float *mixed, float *scores) {
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
        attend_tile(count, q, out, positions + start, l->window, keys + base, values + base, first, last, D, scores,
                    tree, tree ? tree->base[b] : 0, tree ? tree->seen + query : NULL);
    }
}
