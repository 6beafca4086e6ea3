/* A decoder's forward pass over a few tokens on a CPU, in float32: one call instead of forty operations a layer.
 * Weights may be 8-bit integers with a scale for each output; they are widened on their way into the registers.
 *
 * For few tokens a pass is bound by reading the weights; whatever else it does must not stand in the way. So all layers
 * run inside one parallel region, threads meet at barriers, and every product reads its weight once, front to back, as
 * panels of two vectors of outputs: weight[panel][column][2 * LANES]. The PyTorch reference is models/decoder.py, the
 * tests compare both. A row's result does not depend on the rows beside it: passes over one token and over many agree
 * to the last bit. Products are in cpu_product.h, attention in cpu_attention.h.
 *
 * Shapes: R = B * T rows of activations (B sequences, T tokens each), S slots of the cache, D head width. */
#include "cpu_vectors.h"
#include "cpu_product.h"
#include "cpu_attention.h"

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
