/* One step of a decoder-only model over paged KV, in plain C. `baton_step` at the end follows the model's forward pass.

   `build.py` compiles it with the parts that it includes, and Python calls it through ctypes without holding the GIL. All
   arithmetic is float32, and each number has a fixed order of summation, independent of the rest of the step and of the number of threads:

       a product's output    one chain of fused multiply-adds, from the first input to the last
       the same of integers  one chain, from the first 32 inputs to the last ones; within them integers, which are exact
       the same of pairs     32 inputs at a time: one chain of the even inputs and one of the odd ones, both from 0; their
                             sum is added to the output, as TDPBF16PS does: floats below 2 to the -126 are 0
       a score q.k           the same as a product's, from the first dimension to the last
       an attended value     the same, from the first visible token to the last; at each 64th position (0, 64, ...)
                             it is scaled by 2 to the (most before - most with the next 64 tokens), where `most` is the
                             largest score in scaled units of 2: a token weighs 2 to the one fused (score * scale - most)
       a softmax's sum       16 chains (lane j: tokens j, j + 16, ...), scaled at the same places, then halves are added
                             until one is left
       a norm's sum          16 chains, then the same
       a sum of experts      one chain, from the first chosen expert to the last

   So a sequence's logits are bit-identical alone, in a batch, in chunks, after a KV transfer, on AVX2, on AVX-512 and on AMX.
   The compiler must not contract or reorder operations (-ffp-contract=off, and no -ffast-math).

   Weights. A matrix [outputs, inputs] is stored in panels of 32 outputs, so that one load fills a vector with the weights of
   neighbouring outputs for one input, and loads are sequential in memory:

       panel 0                                          panel 1
       [input 0: outputs 0..31][input 1: 0..31] ...     [input 0: outputs 32..63] ...         outputs padded with 0

       form   a panel's row of 32 weights          and, for each 32 inputs of a panel
       F32    32 floats
       BF16   32 upper halves of floats
       Q8_0   32 signed bytes c                    scale[32]             weight = scale * c
       Q4_1   16 bytes: c of output j is the       scale[32], least[32]  weight = scale * c + least
              lower half of byte j, that of
              output j + 16 the upper half

   Each form restores the checkpoint's float32 weights bit for bit (`weights.py` verifies it for each matrix).

   Three forms are for products of integers, for which inputs become signed bytes, 32 at a time. The weights of four
   neighbouring inputs are adjacent, so that one instruction multiplies and adds four for each output of a vector:

       form    32 inputs of a panel                                            and
       DOT_Q8  8 times [output 0: inputs 4i..4i+3][output 1: the same] ...     scale[32]             weight = scale * (byte - 128)
       DOT_Q4  4 times the same; the lower half of a byte is of inputs         scale[32], least[32]  weight = scale * c + least
               4i..4i+3, the upper one of inputs 16+4i..16+4i+3
       DOT_FINE  as DOT_Q8, but an input becomes two bytes, and the second one contains the rounding error of the first one

   Three are for products of bfloat16, for which inputs are rounded to upper halves of floats. The weights of two
   neighbouring inputs are adjacent, so that a tile of 16 pairs by 16 outputs (AMX) is loaded without rearrangement; inputs
   are padded with 0 to a multiple of 32. Codes are rounded to the nearest upper halves when they are multiplied:

       form      32 inputs of a panel                                          and
       PAIRS     16 times [output 0: inputs 2i, 2i+1][output 1: the same] ...
       PAIRS_Q8  16 times the same, of signed bytes c                          scale[32]             weight = scale * c
       PAIRS_Q4  16 times the same; the lower half of a byte is of outputs     scale[32], least[32]  weight = scale * c + least
                 0..15, the upper one of outputs 16..31

   A layer whose queries are the result of such a product also attends by pairs: queries, K, weights of tokens and V are
   rounded, scores are products of pairs over the dimensions, and an attended value is a product of pairs over the tokens, in
   blocks of 32 from a multiple of 64 on. The rest is as above, but with less exact powers of 2.

   KV. A layer's pages are those of `KVCache`: page(block, head) = [K of token 0, 1, ... | V of token 0, 1, ...], where the K or
   V of a token is

       KV_F32    dim floats
       KV_BF16   dim upper halves of floats, rounded to the nearest, of two equally near to the even one
       KV_INT8   dim signed bytes c, then one float: value = scale * c, where scale = the largest magnitude / 127

   and is rounded when it is written. All attention reads pages, including a prompt's attention over its own chunk, so a token
   sees the same values of other tokens in any batch and chunking.
*/
#include <immintrin.h>
#include <math.h>
#include <pthread.h>
#include <sched.h>
#include <stdatomic.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <sys/syscall.h>
#include <unistd.h>

#define INLINE static inline __attribute__((always_inline))
#define UNROLL _Pragma("GCC unroll 32")

enum { PANEL = 32, GROUP = 16, MAX_TILE_ROWS = 12 };
/* Forms of weights; UNPACKED: F32 in a thread's buffer. */
enum { F32, BF16, Q8_0, Q4_1, DOT_Q8, DOT_Q4, DOT_FINE, PAIRS, PAIRS_Q8, PAIRS_Q4, UNPACKED };
enum { SILU, GELU_TANH, RELU_SQUARED };                         /* activations */
enum { QK_PLAIN, QK_BY_HEAD, QK_WHOLE };                        /* norms of queries and keys */
enum { BY_SQUARES, BY_VARIANCE };                               /* kinds of norms: RMSNorm, LayerNorm */
enum { KV_F32, KV_BF16, KV_INT8 };                              /* forms of pages */
enum { OK, TOO_MANY_TOKENS, NO_SUCH_TOKEN, TOO_LONG, NO_SUCH_BLOCK, NO_SUCH_ROW, NO_SUCH_LAYER };

/* ---- values that Python fills in (runner.py has the same fields in the same order) ------------------------------- */

typedef struct {
    int32_t form, outputs, inputs, panels;
    const void *weights;
    const uint16_t *scale, *least; /* [panels][inputs / 32][32], in float16 */
    const float *bias;          /* [panels * 32], or none */
} Matrix;

typedef struct {
    int32_t count, chosen, inner, normalized; /* `chosen` of `count` for a token; normalized: weights sum to 1 */
    Matrix router;
    const Matrix *gate_up, *down; /* [count]; `inner` is the width between them */
} Experts;

typedef struct {
    const float *before_attention, *query, *key, *after_attention, *before_mlp, *after_mlp; /* norms; none: no norm */
    Matrix qkv, out, gate_up, down;
    int32_t window;  /* tokens that a token sees, including itself; 0: all */
    int32_t rotates; /* whether queries and keys are rotated */
    const Experts *experts; /* instead of gate_up and down, which are then empty; or none */
} Layer;

typedef struct {
    int32_t layers, hidden, heads, kv_heads, head_dim, rotary_dim, intermediate, vocab;
    int32_t activation, qk_norm, block_size, blocks, max_len, max_tokens, threads, embedding_form;
    int32_t norm_kind, rotates_neighbours, gated, parallel; /* parallel: attention and MLP have the same input */
    int32_t kv_form;
    float eps, embedding_scale, attention_scale, residual_scale, logits_divisor, clip; /* clip: limit of q, k and v; 0: none */
    const void *embedding;  /* [vocab][hidden], of form F32, BF16 or Q8_0 */
    const float *embedding_codes_scale; /* [vocab][hidden / 32], of Q8_0 */
    const float *cos, *sin; /* [max_len][rotary_dim / 2] */
    const float *norm; /* weights of a norm; those of BY_VARIANCE are followed by the bias */
    const Layer *layer;
    const Matrix *head;
    uint8_t *kv;
    int64_t layer_stride; /* bytes from a layer's pages to the next one's */
} Model;

typedef struct {
    int32_t sequences, tokens, table_stride, rows;
    const int32_t *token_ids; /* [tokens], sequence after sequence */
    const int32_t *begin;     /* [sequences]: tokens before the step */
    const int32_t *count;     /* [sequences]: tokens in the step */
    const int32_t *tables;    /* [sequences][table_stride]: block ids; < 0: empty, never read */
    const int32_t *row;       /* [rows]: tokens of the step whose logits are returned */
    float *logits;            /* [rows][panels of the head * 32] */
} Batch;

#include "vectors.h"
#include "threads.h"
#include "matrix.h"
#include "pairs.h"
#include "products.h"
#include "norms.h"
#include "experts.h"
#include "attention.h"

/* ---- the step --------------------------------------------------------------------------------------------------------------- */

/* Checks every index, so that nothing below can access memory out of bounds. */
static int check(const Step *step, const Batch *batch) {
    const Model *model = step->model;
    int64_t tokens = 0;
    for (int s = 0; s < batch->sequences; s++) {
        const int32_t begin = batch->begin[s], count = batch->count[s];
        if (begin < 0 || count < 1 || begin > model->max_len - count) return TOO_LONG;
        tokens += count;
        const int blocks = (begin + count + model->block_size - 1) / model->block_size;
        if (blocks > batch->table_stride) return NO_SUCH_BLOCK;
        int window = 0, sees_all = 0;
        for (int l = 0; l < model->layers; l++) {
            if (!model->layer[l].window) sees_all = 1;
            if (model->layer[l].window > window) window = model->layer[l].window;
        }
        const int from = sees_all || begin + 1 <= window ? 0 : begin + 1 - window;
        for (int b = from / GROUP * GROUP / model->block_size; b < blocks; b++) {
            const int32_t block = batch->tables[(int64_t)s * batch->table_stride + b];
            if (block < 0 || block >= model->blocks) return NO_SUCH_BLOCK;
        }
    }
    if (tokens != batch->tokens || tokens > model->max_tokens) return TOO_MANY_TOKENS;
    for (int r = 0; r < batch->tokens; r++)
        if (batch->token_ids[r] < 0 || batch->token_ids[r] >= model->vocab) return NO_SUCH_TOKEN;
    for (int r = 0; r < batch->rows; r++)
        if (batch->row[r] < 0 || batch->row[r] >= batch->tokens) return NO_SUCH_ROW;
    return OK;
}

static int span_tokens(const Model *model) {
    const int tokens = SPAN_ROWS / (model->heads / model->kv_heads);
    return tokens ? tokens : 1;
}

static void lay_out(Step *step, const Batch *batch) {
    int row = 0;
    step->num_spans = 0;
    for (int s = 0; s < batch->sequences; s++) {
        const int first = row;
        for (int i = 0; i < batch->count[s]; i++, row++) {
            step->sequence[row] = s;
            step->position[row] = batch->begin[s] + i;
        }
        for (int i = 0; i < batch->count[s]; i += span_tokens(step->model)) {
            const int end = i + span_tokens(step->model) < batch->count[s] ? i + span_tokens(step->model) : batch->count[s];
            step->spans[step->num_spans++] = (Span){s, first, i, end};
        }
    }
}

static void divide_logits(Step *step, const Batch *batch) {
    const int64_t width = (int64_t)step->model->head->panels * PANEL;
    for (int64_t i = 0; i < batch->rows * width; i++) batch->logits[i] /= step->model->logits_divisor;
}

/* Computes layers [first, last) of a step: the embedding before layer 0, the logits after the last one. Between the
   calls for one batch no other batch may be computed. Returns OK, or an error code for an invalid batch. */
int baton_step(Step *step, const Batch *batch, int first, int last) {
    const Model *model = step->model;
    const int tokens = batch->tokens, attended = model->heads * model->head_dim;
    if (first < 0 || last > model->layers || first > last) return NO_SUCH_LAYER;
    step->batch = batch;
    if (first == 0) {
        const int fault = check(step, batch);
        if (fault) return fault;
        lay_out(step, batch);
        run(step, row_jobs(tokens), embed_job);
    }
    for (step->layer = first; step->layer < last; step->layer++) {
        const Layer *layer = &model->layer[step->layer];
        const float *x = normed(step, layer->before_attention, NULL, tokens);
        multiply(step, &layer->qkv, x, model->hidden, tokens, step->qkv, step->qkv_width);
        run(step, row_jobs(tokens), keep_job);
        run(step, step->num_spans * model->kv_heads, is_pairs(&layer->qkv) ? attend_pairs_job : attend_job);
        add(step, &layer->out, step->attended, attended, layer->after_attention, tokens);

        if (!model->parallel) x = normed(step, layer->before_mlp, NULL, tokens);
        if (layer->experts) {
            mix(step, layer->experts, x, tokens);
            add_delta(step, layer->after_mlp, tokens);
        } else {
            const float *active = activate(step, &layer->gate_up, &layer->down, x, tokens, model->intermediate);
            add(step, &layer->down, active, active_width(model->intermediate), layer->after_mlp, tokens);
        }
    }
    if (last == model->layers && batch->rows) {
        const float *x = normed(step, model->norm, batch->row, batch->rows);
        multiply(step, model->head, x, model->hidden, batch->rows, batch->logits, model->head->panels * PANEL);
        if (model->logits_divisor != 1.0f) divide_logits(step, batch);
    }
    return OK;
}

/* ---- construction and destruction ----------------------------------------------------------------------------------- */

static void *room(int64_t count, int64_t size) { /* for whole vectors, aligned to a cache line */
    return aligned_alloc(64, (size_t)((count * size + 127) / 64 * 64));
}

void baton_close(Step *step) {
    atomic_store(&step->pool.stopping, 1);
    pthread_mutex_lock(&step->pool.lock);
    pthread_cond_broadcast(&step->pool.wake);
    pthread_mutex_unlock(&step->pool.lock);
    for (int i = 0; i < step->pool.num_helpers; i++) pthread_join(step->pool.helpers[i], NULL);
    for (int i = 0; i < step->model->threads; i++) {
        const PairRoom *pairs = &step->pair_rooms[i];
        free(step->keys[i]), free(step->panels[i]), free(pairs->keys), free(pairs->values), free(pairs->queries);
        free(pairs->made), free(pairs->products), free(pairs->weights), free(pairs->scores), free(pairs->sums);
    }
    free(step->pair_rooms), free(step->keys), free(step->panels), free(step->pool.helpers), free(step->spans);
    free(step->x), free(step->normed), free(step->qkv), free(step->attended), free(step->gate_up), free(step->active);
    free(step->delta), free(step->sequence), free(step->position);
    free(step->gathered), free(step->routing), free(step->picked), free(step->bytes), free(step->of_bytes);
    free(step->halves), free(step->active_halves), free(step);
}

static int larger_of(int a, int b) { return a > b ? a : b; }

/* The maximum that the layers need. */
typedef struct { int input, gate_up, inner, router; } Widths;

static Widths widest(const Model *model) {
    Widths most = {model->head->inputs, 0, model->intermediate, 0};
    for (int l = 0; l < model->layers; l++) {
        const Layer *layer = &model->layer[l];
        const Matrix *gate_up = layer->experts ? layer->experts->gate_up : &layer->gate_up;
        const Matrix *all[] = {&layer->qkv, &layer->out, gate_up, layer->experts ? layer->experts->down : &layer->down};
        for (int i = 0; i < 4; i++) most.input = larger_of(most.input, all[i]->inputs);
        most.gate_up = larger_of(most.gate_up, gate_up->panels * PANEL);
        if (!layer->experts) continue;
        most.inner = larger_of(most.inner, layer->experts->inner);
        most.router = larger_of(most.router, layer->experts->router.panels * PANEL);
    }
    return most;
}

static PairRoom pair_room(const Model *model, int most_inputs) {
    const int64_t dim = (model->head_dim + 31) / 32 * 32, shared = model->heads / model->kv_heads;
    const int64_t rows = (larger_of(SPAN_ROWS, (int)shared) + PAIR_ROWS - 1) / PAIR_ROWS * PAIR_ROWS;
    const PairRoom made = {
        .made = room((most_inputs + 31) / 32 * 2 * PAIR_WEIGHTS, sizeof(uint16_t)),
        .products = room(2 * ROWS_OF_PAIRS * PANEL, sizeof(float)),
        .keys = room(KEYS * dim, sizeof(uint16_t)), .values = room(KEYS * dim, sizeof(uint16_t)),
        .queries = room(rows * dim, sizeof(float)), .weights = room(PAIR_ROWS * KEYS, sizeof(float)),
        .scores = room(2 * PAIR_ROWS * KEYS, sizeof(float)), .sums = room(rows * dim, sizeof(float)),
    };
    memset(made.keys, 0, sizeof(uint16_t) * (size_t)(KEYS * dim)); /* the padding of a head stays 0 */
    return made;
}

/* Returns the state for steps of a model, including helper threads. `model` and all it points to must outlive it. */
Step *baton_open(const Model *model) {
    Step *step = calloc(1, sizeof(Step));
    const int64_t tokens = model->max_tokens;
    const Widths most = widest(model);
    step->model = model;
    step->qkv_width = model->layer[0].qkv.panels * PANEL;
    step->x = room(tokens * model->hidden, sizeof(float));
    step->normed = room(tokens * model->hidden, sizeof(float));
    step->delta = room(tokens * model->hidden, sizeof(float));
    step->qkv = room(tokens * step->qkv_width, sizeof(float));
    step->attended = room(tokens * model->heads * model->head_dim, sizeof(float));
    step->gate_up = room(tokens * most.gate_up, sizeof(float));
    step->active = room(tokens * active_width(most.inner), sizeof(float));
    if (most.router) {
        step->gathered = room(tokens * model->hidden, sizeof(float));
        step->routing = room(tokens * most.router, sizeof(float));
        step->picked = room(tokens, sizeof(int32_t));
    }
    const int64_t in_tiles = (tokens + DOT_ROWS - 1) / DOT_ROWS * DOT_ROWS;
    step->bytes = room(in_tiles * most.input, planes_of(DOT_FINE));
    step->of_bytes = room(in_tiles * (most.input / 32), sizeof(Bytes));
    const int64_t of_pairs = (tokens + PAIR_ROWS - 1) / PAIR_ROWS * PAIR_ROWS;
    step->halves = room(of_pairs * ((most.input + 31) / 32 * 32), sizeof(float));
    step->active_halves = room(of_pairs * active_width(most.inner), sizeof(float));
    step->has_tiles = may_use_tiles();
    step->sequence = room(tokens, sizeof(int32_t));
    step->position = room(tokens, sizeof(int32_t));
    step->spans = room(tokens, sizeof(Span));
    step->keys = calloc((size_t)model->threads, sizeof(float *));
    step->panels = calloc((size_t)model->threads, sizeof(float *));
    step->pair_rooms = calloc((size_t)model->threads, sizeof(PairRoom));
    for (int i = 0; i < model->threads; i++) {
        step->keys[i] = room((int64_t)KEYS * (model->head_dim + 2), sizeof(float));
        memset(step->keys[i], 0, sizeof(float) * KEYS * (size_t)(model->head_dim + 2));
        step->pair_rooms[i] = pair_room(model, most.input);
        step->panels[i] = room((int64_t)most.input * PANELS_A_JOB * PANEL, sizeof(float));
    }
    pthread_mutex_init(&step->pool.lock, NULL);
    pthread_cond_init(&step->pool.wake, NULL);
    step->pool.helpers = calloc((size_t)model->threads, sizeof(pthread_t));
    for (int i = 1; i < model->threads; i++) {
        Helper *helper = malloc(sizeof(Helper));
        *helper = (Helper){&step->pool, i};
        if (pthread_create(&step->pool.helpers[step->pool.num_helpers], NULL, help, helper)) free(helper);
        else step->pool.num_helpers++;
    }
    return step;
}
