/* A decoder's forward pass over a few tokens on a CPU, in float32: one call instead of forty operations a layer.
 * Weights may be 8-bit integers with a scale for each output; they are widened on their way into the registers.
 *
 * For few tokens a pass is bound by reading the weights from memory, so everything else is arranged around that. Every
 * product reads its weight once, front to back, as panels of two vectors of outputs: weight[panel][input][2 * LANES].
 *
 * Threads. All layers run inside one parallel region, because starting one costs more than a barrier. Every thread
 * executes the same functions; in each of them it takes its share of the rows, panels, heads or tiles of queries
 * (`share` in cpu_vectors.h). A barrier separates the writing of data from the reading by other threads.
 * Each number is computed by one thread, in an order that depends neither on the number of threads nor on the other
 * rows of the pass. So a pass over one token and a pass over many agree to the last bit, and verification with any
 * lookahead chooses the tokens of plain decoding.
 *
 * The PyTorch reference is models/decoder.py; tests compare both. Products are in cpu_product.h, attention is in
 * cpu_attention.h.
 *
 * Shapes: B texts, T tokens of each in a pass, R = B * T rows of activations, C d_model, H query heads, G key/value
 * heads, D head width, L layers, S slots of the KV cache, V rows of the embedding. */
#include "cpu_vectors.h"
#include "cpu_product.h"
#include "cpu_attention.h"

/* Normalise this thread's share of the rows x [rows, width] into y. */
static void norm_rows(const NormWeights *norm, const float *x, float *y, int64_t rows, int64_t width, float eps) {
    int64_t from, to;
    share(rows, &from, &to);
    for (int64_t r = from; r < to; r++) normalise(norm, x + r * width, y + r * width, width, eps);
}

/* Run x [R, C] through all layers in place. Called by every thread of a parallel region, with a barrier between the
 * writing of x and this call, and another before x is read. `cache` is [L, 2, B, G, S, D]; `scratch` holds
 * R * (C + (H + 2 G) * D + H * D + ffn) floats and then QUERIES * (S + LANES) for each thread. */
static void run_layers(const DecoderWeights *m, float *x, const int64_t *positions, const TreeNodes *tree,
                       int64_t batch, int64_t tokens, float *cache, int64_t slots, const float *cosine,
                       const float *sine, float *scratch) {
    const int64_t R = batch * tokens, C = m->d_model, D = m->head_dim;
    const int64_t plane = batch * m->kv_heads * slots * D; /* a layer's keys, or its values */
    float *h = scratch, *qkv = h + R * C, *mixed = qkv + R * (m->heads + 2 * m->kv_heads) * D;
    float *ffn = mixed + R * m->heads * D, *scores = ffn + R * m->ffn;
    float *own = scores + omp_get_thread_num() * QUERIES * (slots + LANES);
    for (int64_t index = 0; index < m->layers; index++) {
        const LayerWeights *l = m->layer + index;
        float *keys = cache + 2 * index * plane, *values = keys + plane;
        if (!(l->skips & SKIP_ATTENTION)) {
            if (!m->post_norm) norm_rows(&l->attn_norm, x, h, R, C, m->eps);
#pragma omp barrier /* a product reads every row */
            multiply(&l->qkv, m->post_norm ? x : h, R, qkv, STORE, 0);
#pragma omp barrier /* a head may span the panels of two threads */
            rotate_and_store(m, l, qkv, positions, tree, batch, tokens, keys, values, slots, cosine, sine);
#pragma omp barrier /* queries attend to the keys and values of the whole pass */
            attend(m, l, qkv, positions, tree, batch, tokens, keys, values, slots, mixed, own);
#pragma omp barrier
            multiply(&l->out, mixed, R, x, ADD, 0);
#pragma omp barrier /* a norm reads all panels of its row */
            if (m->post_norm) norm_rows(&l->attn_norm, x, x, R, C, m->eps);
        }
        if (!(l->skips & SKIP_FFN)) {
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

/* Run x [R, C] at positions [R] through all layers in place; `tree` is NULL where tokens follow one another. */
void forward(const DecoderWeights *m, float *x, const int64_t *positions, const TreeNodes *tree, int64_t batch,
             int64_t tokens, float *cache, int64_t slots, const float *cosine, const float *sine, float *scratch,
             int64_t threads) {
#pragma omp parallel num_threads(threads)
    run_layers(m, x, positions, tree, batch, tokens, cache, slots, cosine, sine, scratch);
}

/* Copy a token's row of embedding [V, C] into x; a token past its end, of a target with a padded vocabulary, has the
 * last row. */
static inline void embed(const float *embedding, int64_t vocab, int64_t token, float *x, int64_t width) {
    memcpy(x, embedding + (token < vocab ? token : vocab - 1) * width, width * sizeof(float));
}

/* Compute this thread's outputs of logits [rows, outputs] from x [rows, C], and find the largest of them for each row
 * among the first `counted`: its value and token go to this thread's part of best and chosen [threads, rows]. The first
 * of equal ones is taken, and a NaN before any number, so that it is noticed. */
static void largest_logits(const PackedWeight *head, int64_t counted, const float *x, int64_t rows, float *logits,
                           float *best, int64_t *chosen) {
    int64_t me = omp_get_thread_num(), first, end;
    share((head->outputs + PANEL - 1) / PANEL, &first, &end); /* the panels that multiply gives this thread */
    first *= PANEL;
    end = end * PANEL < counted ? end * PANEL : counted;
    multiply(head, x, rows, logits, STORE, 0);
    for (int64_t r = 0; r < rows; r++) { /* no barrier: a thread reads its own logits, still in its core's cache */
        float most = -INFINITY;
        int64_t token = first;
        const float *row = logits + r * head->outputs;
        for (int64_t i = first; i < end; i++)
            if (!(row[i] <= most)) {
                most = row[i], token = i;
                if (most != most) break;
            }
        best[me * rows + r] = most, chosen[me * rows + r] = token;
    }
}

/* The index in best and chosen [threads, rows] of a row's largest logit. Threads have ascending tokens, so that keeping
 * the first of equal ones is independent of their number; so is keeping the first NaN. */
static inline int64_t largest_of_threads(const float *best, int64_t rows, int64_t row) {
    int64_t largest = row;
    for (int64_t thread = 1; thread < omp_get_num_threads(); thread++) {
        int64_t index = thread * rows + row;
        if (!(best[index] <= best[largest]) && best[largest] == best[largest]) largest = index;
    }
    return largest;
}

/* Decode `steps` tokens greedily after tokens [B, T] at positions [B, T]. Writes drafted [B, steps] and
 * the logit of each to largest [B, steps], NaN where any logit was NaN. Of the head's outputs the first `counted` are
 * looked at; `vocab` is the embedding's number of rows. `x` holds B * (T * C + C + outputs) floats and then B for each
 * thread, `row_positions` B * T integers and then B for each thread. */
void decode(const DecoderWeights *m, const float *embedding, int64_t vocab, const PackedWeight *head, int64_t counted,
            const int64_t *tokens, const int64_t *positions, int64_t batch, int64_t count, int64_t steps,
            int64_t *drafted, float *largest, float *cache, int64_t slots, const float *cosine, const float *sine,
            float *x, int64_t *row_positions, float *scratch, int64_t threads) {
    const int64_t C = m->d_model;
    float *last = x + batch * count * C, *logits = last + batch * C, *best = logits + batch * head->outputs;
    int64_t *chosen = row_positions + batch * count;
#pragma omp parallel num_threads(threads)
    {
        int64_t from, to;
        for (int64_t step = 0; step < steps; step++) {
            const int64_t T = step ? 1 : count; /* the first step reads all tokens, each later one the last choice */
            share(batch * T, &from, &to);
            for (int64_t r = from; r < to; r++) {
                embed(embedding, vocab, step ? drafted[r * steps + step - 1] : tokens[r], x + r * C, C);
                row_positions[r] = step ? positions[r * count + count - 1] + step : positions[r];
            }
#pragma omp barrier
            run_layers(m, x, row_positions, NULL, batch, T, cache, slots, cosine, sine, scratch);
#pragma omp barrier
            share(batch, &from, &to);
            for (int64_t b = from; b < to; b++) memcpy(last + b * C, x + (b * T + T - 1) * C, C * sizeof(float));
#pragma omp barrier
            largest_logits(head, counted, last, batch, logits, best, chosen);
#pragma omp barrier
            for (int64_t b = from; b < to; b++) {
                int64_t index = largest_of_threads(best, batch, b);
                drafted[b * steps + step] = chosen[index];
                largest[b * steps + step] = best[index];
            }
#pragma omp barrier
        }
    }
}

/* Verify proposed [B, d] greedily and commit, in one call. A text's last token and its proposal, T = d + 1 tokens, go
 * through the model; a proposed token is accepted while it is the model's choice too. All T choices are written behind
 * the text in tokens [B, room], whose length [B] grows by the accepted ones and one more, up to `limit` [B]; what lies
 * beyond the length is void. packed [B, d + 2] gets the number accepted, then the choices. Instead of the number it
 * gets `not_finite` if a logit that decided, or one of drafted [B, d] (the draft's, or NULL), is not finite. `x` holds
 * R * (C + outputs) floats and then R for each thread, `row_positions` R integers and then R for each thread. */
void commit_greedy(const DecoderWeights *m, const float *embedding, int64_t vocab, const PackedWeight *head, const
                   int64_t *proposed, const float *drafted, int64_t batch, int64_t count, int64_t *tokens, int64_t room,
                   int64_t *length, const int64_t *limit, int64_t not_finite, int64_t *packed, float *cache, int64_t
                   slots, const float *cosine, const float *sine, float *x, int64_t *row_positions, float *scratch,
                   int64_t threads) {
    const int64_t C = m->d_model, T = count + 1, R = batch * T;
    float *logits = x + R * C, *best = logits + R * head->outputs;
    int64_t *chosen = row_positions + R;
#pragma omp parallel num_threads(threads)
    {
        int64_t from, to;
        share(R, &from, &to);
        for (int64_t r = from; r < to; r++) {
            int64_t b = r / T, t = r % T;
            embed(embedding, vocab, t ? proposed[b * count + t - 1] : tokens[b * room + length[b] - 1], x + r * C, C);
            row_positions[r] = length[b] - 1 + t;
        }
#pragma omp barrier
        run_layers(m, x, row_positions, NULL, batch, T, cache, slots, cosine, sine, scratch);
#pragma omp barrier
        largest_logits(head, head->outputs, x, R, logits, best, chosen);
#pragma omp barrier
        share(batch, &from, &to);
        for (int64_t b = from; b < to; b++) {
            int64_t accepted = 0, finite = 1, *choices = packed + b * (T + 1);
            for (int64_t t = 0; t < T; t++) {
                int64_t index = largest_of_threads(best, R, b * T + t);
                choices[1 + t] = tokens[b * room + length[b] + t] = chosen[index];
                if (accepted == t) { /* all before it were accepted, so this one is emitted */
                    finite = finite && isfinite(best[index]);
                    accepted += t < count && proposed[b * count + t] == chosen[index];
                }
                if (drafted && t < count) finite = finite && isfinite(drafted[b * count + t]);
            }
            choices[0] = finite ? accepted : not_finite;
            length[b] = length[b] + accepted + 1 < limit[b] ? length[b] + accepted + 1 : limit[b];
        }
    }
}

/* y [rows, outputs] = x [rows, inputs] W' + b. */
void product(const PackedWeight *m, const float *x, int64_t rows, float *y, int64_t threads) {
#pragma omp parallel num_threads(threads)
    multiply(m, x, rows, y, STORE, 0);
}

enum { STOPPED = 2, MOST_SPINS = 1 << 16 };

/* Write to a cache line when it is this thread's turn, `rounds` times, and hand it to the other thread. Gives up after
 * MOST_SPINS reads without a turn: the other thread does not run. */
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

/* Seconds in which one thread hands a cache line to another: how far apart their cores are. 0 where one of them did not
 * run. */
double handover(int64_t rounds) {
    _Alignas(64) int turn = 0;
    double seconds = 0;
#pragma omp parallel num_threads(2)
    {
        int me = omp_get_thread_num(), threads = omp_get_num_threads();
#pragma omp barrier
        double begin = omp_get_wtime();
        if (threads == 2) pass_on(&turn, me, rounds);
        if (me == 0 && threads == 2 && turn != STOPPED) seconds = (omp_get_wtime() - begin) / (2 * rounds);
    }
    return seconds;
}

/* Seconds of `rounds` times eight multiply-adds of vectors on every thread: how fast the cores compute now. Eight
 * independent chains, because the next multiply-add of a chain waits about four cycles for the one before it. */
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
