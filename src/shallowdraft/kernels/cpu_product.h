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
