/* Products of few rows with a packed weight: y = mode(x W' + b). */

/* LANES weights, from memory to floats in a register; `bytes`: they are 8-bit integers. */
static inline __attribute__((always_inline)) vec widen(const void *weight, int64_t offset, int bytes) {
    if (!bytes) return *(const vec *)((const float *)weight + offset);
    const int8_t *from = (const int8_t *)weight + offset;
#if LANES == 16 /* gcc's own conversion of vectors would widen byte by byte */
    return (vec)_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i *)from)));
#elif LANES == 8
    return (vec)_mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i *)from)));
#else
    return __builtin_convertvector(*(const bvec *)from, vec);
#endif
}

/* Multiply x [rows, inputs] with panels panel to panel + wide - 1 into y [rows, stride], at their outputs.
 *
 * `rows`, `wide` and `bytes` are constants wherever this is inlined, so that the sums acc stay in registers: acc[p *
 * rows + r][half] holds LANES outputs of row r and panel p. Each input k costs two loads of weights a panel, and two
 * multiply-adds for every row; sums run over k = 0, 1, …, whatever rows and wide are, so that a row's result does not
 * depend on the rows beside it. With a single row two panels are taken at once (wide = 2), because each addition to a
 * sum has to wait for the one before it, and two sums a row leave the arithmetic units idle. */
static inline __attribute__((always_inline)) void tile(int rows, int wide, int bytes, const PackedWeight *m,
                                                       int64_t panel, const float *x, float *y, int64_t stride,
                                                       int mode, int64_t activation) {
    /* `size` counts the weights of a panel, `step` the bytes of an input's weights in it. */
    const int64_t size = m->inputs * PANEL, begin = panel * size, step = PANEL * (bytes ? 1 : sizeof(float));
    /* Of one panel, its own bytes further on are prefetched; of two at once, the two panels that come next. */
    const int64_t distance = wide == 1 ? WEIGHTS_AHEAD : wide * m->inputs * step;
    const char *ahead = (const char *)m->weight + panel * m->inputs * step + distance;
    vec acc[TILE][2];
#pragma GCC unroll 12
    for (int a = 0; a < wide * rows; a++)
        for (int half = 0; half < 2; half++) {
            const int64_t output = (panel + a / rows) * PANEL + half * LANES;
            acc[a][half] = m->bias && !bytes ? *(const vec *)(m->bias + output) : (vec){0};
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
        const int64_t own = panel + a / rows, r = a % rows;
        for (int half = 0; bytes && half < 2; half++) { /* an output's scale is a factor of its whole sum */
            acc[a][half] *= *(const vec *)(m->scale + own * PANEL + half * LANES);
            if (m->bias) acc[a][half] += *(const vec *)(m->bias + own * PANEL + half * LANES);
        }
        if (mode == GATE) { /* the first half of a panel holds gates, the second the values they gate */
            int64_t output = own * LANES;
            store(y + r * stride + output, activate(acc[a][0], activation) * acc[a][1], stride - output);
            continue;
        }
        for (int half = 0; half < 2; half++) {
            int64_t output = own * PANEL + half * LANES;
            if (output >= m->outputs) break; /* the last panel is filled up with zeros */
            float *to = y + r * stride + output;
            int64_t count = m->outputs - output;
            if (mode == ACTIVATE) store(to, activate(acc[a][half], activation), count);
            else if (mode == STORE) store(to, acc[a][half], count);
            else if (count >= LANES) *(vec *)to += acc[a][half];
            else for (int64_t i = 0; i < count; i++) to[i] += acc[a][half][i];
        }
    }
}

/* Compute this thread's panels of y = mode(x W' + b) for all rows: x [rows, inputs], y [rows, outputs], or with GATE
 * [rows, outputs / 2]. A panel's weights come from memory for the first tile of rows, from the cache for the others. */
static void multiply(const PackedWeight *m, const float *x, int64_t rows, float *y, int mode, int64_t activation) {
    int64_t stride = mode == GATE ? m->outputs / 2 : m->outputs, from, to;
    int64_t panels = mode == GATE ? (stride + LANES - 1) / LANES : (m->outputs + PANEL - 1) / PANEL;
    const int64_t tiles = (rows + TILE - 1) / TILE; /* of nearly equal numbers of rows */
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
