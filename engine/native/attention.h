/* Attention over pages, by floats and by pairs. A part of `step.c`, which includes it. */

/* ---- attention ---------------------------------------------------------------------------------------------------------- */

/* Queries of a KV head meet its keys in blocks of 64 neighbouring tokens: a tile of up to six queries is scored, weighed
   and summed while block and tile are in the first cache. When a query's largest score grows, its previous sums
   are scaled down. A block always starts at a multiple of 64, and tokens that a query does not see have weight 0. So one
   query, as in decoding, and many give the same bits. */
enum { SPAN_ROWS = 384, ATTENTION_ROWS = 6, KEYS = 64, NO_SCORE = -0x7000000 };

typedef struct { /* a query: one token, one head */
    const float *query;
    float *out;       /* its values, summed so far */
    int from, to;     /* tokens that it sees */
    float most;       /* its largest score so far, as the exponent of 2 that it gives */
    float sum[GROUP]; /* of its weights so far, in chains */
} Row;

typedef struct { /* neighbouring tokens of a KV head, in groups of 16 */
    const uint8_t *keys[KEYS / GROUP], *values[KEYS / GROUP];
    int begin, from, to; /* the first one's position, a multiple of 64, and those that are there, from a multiple of 16 on */
} Block;

/* Lanes of 16 neighbouring tokens, of which each has one to four values of K, written by dimension. */
INLINE void split(int form, Vector lanes, Vector scale, float *to) {
    if (form == KV_F32) store(to, lanes);
    else if (form == KV_BF16) store(to, lower_bf16(lanes)), store(to + KEYS, upper_bf16(lanes));
    else
        UNROLL for (int i = 0; i < 4; i++) store(to + i * KEYS, multiplied(byte_of(lanes, i), scale));
}

/* Lays keys of 16 neighbouring tokens out by dimension. */
INLINE void turn_as(int form, const uint8_t *keys, int dim, const float *scale, float *turned) {
    const int lane = form == KV_INT8 ? 4 : form == KV_BF16 ? 2 : 1, stride = kept_bytes(form, dim) / (int)sizeof(float);
    for (int d = 0; d < dim; d += 4 * lane)
        for (int v = 0; v < GROUP_PARTS; v++) {
            const float *from = (const float *)keys + (int64_t)v * LANES * stride + d / lane;
            Vector a = load_fours(from, stride), b = load_fours(from + stride, stride);
            Vector c = load_fours(from + 2 * stride, stride), e = load_fours(from + 3 * stride, stride);
            Vector low_ab = low_singles(a, b), low_ce = low_singles(c, e);
            Vector high_ab = high_singles(a, b), high_ce = high_singles(c, e);
            float *to = turned + (int64_t)d * KEYS + v * LANES;
            const Vector by = form == KV_INT8 ? load(scale + v * LANES) : a;
            split(form, low_pairs(low_ab, low_ce), by, to), split(form, high_pairs(low_ab, low_ce), by, to + lane * KEYS);
            split(form, low_pairs(high_ab, high_ce), by, to + 2 * lane * KEYS);
            split(form, high_pairs(high_ab, high_ce), by, to + 3 * lane * KEYS);
        }
}

static void take_scales(const uint8_t *kept, int dim, float *scale) {
    for (int t = 0; t < GROUP; t++) memcpy(scale + t, kept + t * kept_bytes(KV_INT8, dim) + dim, sizeof(float));
}

/* Data shared by all queries of a block: its keys by dimension, [dimension][KEYS], then scales of K and of V, [KEYS] each. */
static void turn(int form, const Block *block, int dim, float *turned) {
    for (int t = block->from; t < block->to; t += GROUP) {
        const uint8_t *keys = block->keys[t / GROUP];
        float *scale = turned + (int64_t)dim * KEYS + t;
        if (form == KV_F32) turn_as(KV_F32, keys, dim, NULL, turned + t);
        else if (form == KV_BF16) turn_as(KV_BF16, keys, dim, NULL, turned + t);
        else {
            take_scales(keys, dim, scale), take_scales(block->values[t / GROUP], dim, scale + KEYS);
            turn_as(KV_INT8, keys, dim, scale, turned + t);
        }
    }
}

/* Scores of a block's tokens, whether they are there or not. */
INLINE void score(int rows, const Row *row, const float *turned, int dim, float (*scores)[KEYS]) {
    for (int at = 0; at < KEYS; at += ATTENTION_PARTS * LANES) {
        Vector sum[ATTENTION_ROWS][ATTENTION_PARTS], key[ATTENTION_PARTS];
        UNROLL for (int r = 0; r < rows; r++) UNROLL for (int v = 0; v < ATTENTION_PARTS; v++) sum[r][v] = splat(0.0f);
        for (int d = 0; d < dim; d++) {
            UNROLL for (int v = 0; v < ATTENTION_PARTS; v++) key[v] = load(turned + d * KEYS + at + v * LANES);
            UNROLL for (int r = 0; r < rows; r++) {
                Vector query = splat(row[r].query[d]);
                UNROLL for (int v = 0; v < ATTENTION_PARTS; v++) sum[r][v] = multiply_add(query, key[v], sum[r][v]);
            }
        }
        UNROLL for (int r = 0; r < rows; r++) UNROLL for (int v = 0; v < ATTENTION_PARTS; v++)
            store(scores[r] + at + v * LANES, sum[r][v]);
    }
}

/* Limits for scores or weights of a block's tokens, of which a query sees those in the middle. */
static const float MOST_OF_SCORE[3 * KEYS] = {
    [0 ... KEYS - 1] = NO_SCORE, [KEYS ... 2 * KEYS - 1] = INFINITY, [2 * KEYS ... 3 * KEYS - 1] = NO_SCORE};
static const float MOST_OF_WEIGHT[3 * KEYS] = {[KEYS ... 2 * KEYS - 1] = INFINITY};

/* Overwrites the tokens of a block that a query does not see. */
INLINE void hide(const Row *row, int begin, float *scores, const float *most) {
    const int before = row->from - begin, seen = row->to - begin;
    if (before <= 0 && seen >= KEYS) return;
    const float *from = most + KEYS - (before < 0 ? 0 : before < KEYS ? before : KEYS);
    const float *to = most + 2 * KEYS - (seen < 0 ? 0 : seen < KEYS ? seen : KEYS);
    for (int t = 0; t < KEYS; t += LANES) /* also of what is not a number the second one is taken */
        store(scores + t, smaller(smaller(load(scores + t), load(from + t)), load(to + t)));
}

INLINE float largest_of(const float *scores) {
    Vector largest = load(scores);
    UNROLL for (int t = LANES; t < KEYS; t += LANES) largest = larger(largest, load(scores + t));
    return largest_lane(largest);
}

/* Turns a tile's scores of a block's tokens into weights, which are 2 to the one fused (score * scale - most), and returns
   the factor for the previous sums. */
INLINE void weights_of(int rows, Row *row, int begin, float scale, float (*scores)[KEYS], float *factor) {
    float change[GROUP] = {0.0f};
    UNROLL for (int r = 0; r < rows; r++) {
        hide(row + r, begin, scores[r], MOST_OF_SCORE);
        const float most = largest_of(scores[r]) * scale, before = row[r].most;
        row[r].most = most > before ? most : before;
        change[r] = before - row[r].most;
    }
    UNROLL for (int v = 0; v < GROUP; v += LANES) store(factor + v, power_of_two(0, load(change + v)));
    UNROLL for (int r = 0; r < rows; r++) {
        UNROLL for (int t = 0; t < KEYS; t += LANES)
            store(scores[r] + t, power_of_two(0, multiply_add(load(scores[r] + t), splat(scale), splat(-row[r].most))));
        hide(row + r, begin, scores[r], MOST_OF_WEIGHT);
        UNROLL for (int v = 0; v < GROUP_PARTS; v++) {
            Vector sum = multiplied(load(row[r].sum + v * LANES), splat(factor[r]));
            UNROLL for (int t = 0; t < KEYS; t += GROUP) sum = added(sum, load(scores[r] + t + v * LANES));
            store(row[r].sum + v * LANES, sum);
        }
    }
}

INLINE Vector kept_values(int form, const uint8_t *kept, int at) {
    if (form == KV_F32) return load((const float *)kept + at);
    return form == KV_BF16 ? of_bf16((const uint16_t *)kept + at) : of_bytes((const int8_t *)kept + at);
}

/* out = factor * out + weights times values, for `parts` vectors of the values' dimensions. */
INLINE void weigh(int form, int rows, int parts, const Row *row, const Block *block, int to, int dim, int at,
                  float (*weights)[KEYS], const float *factor) {
    Vector sum[ATTENTION_ROWS][ATTENTION_PARTS], value[ATTENTION_PARTS];
    UNROLL for (int r = 0; r < rows; r++) UNROLL for (int v = 0; v < parts; v++)
        sum[r][v] = multiplied(load(row[r].out + at + v * LANES), splat(factor[r]));
    const int kept = kept_bytes(form, dim);
    for (int begin = block->from; begin < to; begin += GROUP) {
        const uint8_t *from = block->values[begin / GROUP];
        const int end = begin + GROUP < to ? begin + GROUP : to;
        for (int t = begin; t < end; t++, from += kept) {
            UNROLL for (int v = 0; v < parts; v++) value[v] = kept_values(form, from, at + v * LANES);
            UNROLL for (int r = 0; r < rows; r++) {
                Vector weight = splat(weights[r][t]);
                UNROLL for (int v = 0; v < parts; v++) sum[r][v] = multiply_add(weight, value[v], sum[r][v]);
            }
        }
    }
    UNROLL for (int r = 0; r < rows; r++) UNROLL for (int v = 0; v < parts; v++)
        store(row[r].out + at + v * LANES, sum[r][v]);
}

/* A tile of queries and a block of tokens. */
INLINE void attend_tile(int form, int rows, Row *row, const Block *block, const float *turned, int dim, float scale) {
    float scores[ATTENTION_ROWS][KEYS], factor[GROUP];
    if (dim == 64) score(rows, row, turned, 64, scores);
    else score(rows, row, turned, dim, scores);
    weights_of(rows, row, block->begin, scale, scores, factor);
    if (form == KV_INT8) /* a weight times (scale times c) */
        for (int r = 0; r < rows; r++)
            UNROLL for (int t = 0; t < KEYS; t += LANES)
                store(scores[r] + t, multiplied(load(scores[r] + t), load(turned + (int64_t)(dim + 1) * KEYS + t)));
    const int last = row[rows - 1].to - block->begin, to = last < block->to ? last : block->to;
    int at = 0;
    for (; at + ATTENTION_PARTS * LANES <= dim; at += ATTENTION_PARTS * LANES)
        weigh(form, rows, ATTENTION_PARTS, row, block, to, dim, at, scores, factor);
    for (; at < dim; at += LANES) weigh(form, rows, 1, row, block, to, dim, at, scores, factor);
}

INLINE void attend_as(int form, int rows, Row *row, const Block *block, const float *turned, int dim, float scale) {
    switch (rows) {
    case 1: attend_tile(form, 1, row, block, turned, dim, scale); return;
    case 2: attend_tile(form, 2, row, block, turned, dim, scale); return;
    case 3: attend_tile(form, 3, row, block, turned, dim, scale); return;
    case 4: attend_tile(form, 4, row, block, turned, dim, scale); return;
    case 5: attend_tile(form, 5, row, block, turned, dim, scale); return;
    default: attend_tile(form, 6, row, block, turned, dim, scale); return;
    }
}

static void attend_rows(const Model *model, int rows, Row *row, const Block *block, const float *turned) {
    const float scale = model->attention_scale * LOG2_E;
    switch (model->kv_form) {
    case KV_F32: attend_as(KV_F32, rows, row, block, turned, model->head_dim, scale); return;
    case KV_BF16: attend_as(KV_BF16, rows, row, block, turned, model->head_dim, scale); return;
    default: attend_as(KV_INT8, rows, row, block, turned, model->head_dim, scale); return;
    }
}

/* The first token that a span sees in the layer, down to a multiple of 16. */
static int first_seen(const Step *step, const Span *span) {
    const int end = step->batch->begin[span->sequence] + span->begin + 1, window = step->model->layer[step->layer].window;
    return window && end > window ? (end - window) / GROUP * GROUP : 0;
}

/* The rows of a span for a KV head, counted token by token and within one by head. */
static void rows_of(const Step *step, const Span *span, int head, Row *row) {
    const Model *model = step->model;
    const int shared = model->heads / model->kv_heads, dim = model->head_dim, window = model->layer[step->layer].window;
    for (int token = span->begin; token < span->end; token++) {
        const int position = step->batch->begin[span->sequence] + token, at = span->row + token;
        for (int i = 0; i < shared; i++, row++) {
            row->query = step->qkv + (int64_t)at * step->qkv_width + (head * shared + i) * dim;
            row->out = step->attended + ((int64_t)at * model->heads + head * shared + i) * dim;
            row->from = window && position + 1 > window ? position + 1 - window : 0;
            row->to = position + 1;
            row->most = NO_SCORE;
            memset(row->sum, 0, sizeof(row->sum));
            memset(row->out, 0, sizeof(float) * dim);
        }
    }
}

/* The part of the block starting at a token that a job's span sees. */
static Block block_at(const Step *step, int job, int begin) {
    const Model *model = step->model;
    const Span *span = &step->spans[job / model->kv_heads];
    const int64_t kept = kept_bytes(model->kv_form, model->head_dim), size = model->block_size;
    const int from = first_seen(step, span), to = step->batch->begin[span->sequence] + span->end;
    Block block = {.begin = begin, .from = from > begin ? from - begin : 0, .to = to < begin + KEYS ? to - begin : KEYS};
    for (int t = block.from; t < block.to; t += GROUP) {
        const int64_t place = (begin + t) % size;
        const uint8_t *page = page_at(step, span->sequence, begin + t, job % model->kv_heads);
        block.keys[t / GROUP] = page + place * kept;
        block.values[t / GROUP] = page + (size + place) * kept;
    }
    return block;
}

/* The first block of a job, or none. */
static Block first_block(const Step *step, int job) {
    if (job >= step->num_spans * step->model->kv_heads) return (Block){0};
    return block_at(step, job, first_seen(step, &step->spans[job / step->model->kv_heads]) / KEYS * KEYS);
}

/* Prefetches a share of a block: every `shares`th cache line. */
static void fetch(const Block *block, int kept, int share, int shares) {
    for (int t = block->from; t < block->to; t += GROUP)
        for (int i = share * 64; i < GROUP * kept; i += shares * 64) {
            _mm_prefetch((const char *)(block->keys[t / GROUP] + i), _MM_HINT_T1);
            _mm_prefetch((const char *)(block->values[t / GROUP] + i), _MM_HINT_T1);
        }
}

/* A job of attention: some tokens of a sequence, in all query heads that share a KV head. */
static void attend_job(Step *step, int job, int thread) {
    const Model *model = step->model;
    const Span *span = &step->spans[job / model->kv_heads];
    const int head = job % model->kv_heads, dim = model->head_dim, kept = kept_bytes(model->kv_form, dim);
    const int num_rows = (span->end - span->begin) * (model->heads / model->kv_heads);
    const int tiles = (num_rows + ATTENTION_ROWS - 1) / ATTENTION_ROWS;
    float *turned = step->keys[thread];
    Row row[num_rows];
    rows_of(step, span, head, row);
    const int to = row[num_rows - 1].to;
    Block block, next = first_block(step, job);
    for (int begin = next.begin; begin < to; begin += KEYS) {
        block = next;
        next = begin + KEYS < to ? block_at(step, job, begin + KEYS) : first_block(step, job + 1);
        fetch(&next, kept, 0, tiles);
        turn(model->kv_form, &block, dim, turned);
        for (int tile = 0, r = 0; tile < tiles; tile++, r += ATTENTION_ROWS) {
            const int rows = num_rows - r < ATTENTION_ROWS ? num_rows - r : ATTENTION_ROWS;
            if (tile) fetch(&next, kept, tile, tiles);
            if (row[r + rows - 1].to > begin && row[r].from < begin + KEYS)
                attend_rows(model, rows, row + r, &block, turned);
        }
    }
    for (int r = 0; r < num_rows; r++) {
        const Vector factor = splat(1.0f / sum_of_lanes(row[r].sum));
        for (int d = 0; d < dim; d += LANES) store(row[r].out + d, multiplied(load(row[r].out + d), factor));
    }
}

/* ---- attention by pairs -----------------------------------------------------------------------------------------------------

   The same with halves, in a layer whose products are of pairs: queries, weights and the contents of pages are rounded when
   they are multiplied; scores, maximum scores and sums of weights are floats. A tile has sixteen queries. */

/* A token's K or V as halves. */
INLINE void halves_of(int form, const uint8_t *kept, int dim, uint16_t *halves) {
    Vector scale = splat(1.0f);
    if (form == KV_BF16) memcpy(halves, kept, sizeof(uint16_t) * (size_t)dim);
    if (form == KV_INT8) {
        float of_codes;
        memcpy(&of_codes, kept + dim, sizeof(float));
        scale = splat(of_codes);
    }
    for (int d = 0; form != KV_BF16 && d < dim; d += LANES) {
        if (form == KV_F32) to_bf16(halves + d, load((const float *)kept + d));
        else to_bf16(halves + d, multiplied(scale, of_bytes((const int8_t *)kept + d)));
    }
}

/* Lays a block out in pairs: of neighbouring dimensions of K, and of neighbouring tokens of V, which is 0 for missing
   tokens. */
INLINE void pair_up_as(int form, const Block *block, int dim, const PairRoom *room) {
    const int kept = kept_bytes(form, dim);
    uint16_t halves[GROUP * dim], none[dim];
    memset(none, 0, sizeof(none));
    for (int t = 0; t < KEYS; t += GROUP) {
        const int there = t < block->from || t >= block->to ? 0 : block->to - t < GROUP ? block->to - t : GROUP;
        const uint8_t *keys = block->keys[t / GROUP], *values = block->values[t / GROUP];
        if (there) {
            for (int i = 0; form != KV_BF16 && i < GROUP; i++) halves_of(form, keys + i * kept, dim, halves + i * dim);
            turn_as(KV_F32, form == KV_BF16 ? keys : (const uint8_t *)halves, dim / 2, NULL, room->keys + t);
        }
        for (int i = 0; i < there; i++) halves_of(form, values + i * kept, dim, halves + i * dim);
        for (int i = 0; i < GROUP; i += 2) {
            const uint16_t *first = i < there ? halves + i * dim : none, *second = i + 1 < there ? halves + (i + 1) * dim : none;
            uint16_t *to = room->values + (t + i) * dim;
            for (int d = 0; d < dim; d += LANES) store((float *)to + d, joined(first + d, second + d));
        }
    }
}

static void pair_up(int form, const Block *block, int dim, const PairRoom *room) {
    if (form == KV_F32) pair_up_as(KV_F32, block, dim, room);
    else if (form == KV_BF16) pair_up_as(KV_BF16, block, dim, room);
    else pair_up_as(KV_INT8, block, dim, room);
}

/* Adds to sums of up to 16 rows their products with `width` outputs, or starts the sums. */
static void add_pairs(const Step *step, int adds, int rows, int width, const void *x, const uint16_t *weights, int blocks,
                      float *sums) {
    if (step->has_tiles) {
        add_tile_rows(adds, width, x, weights, blocks, sums);
        return;
    }
    if (!adds) memset(sums, 0, sizeof(float) * (size_t)(rows * width));
    pair_rows(rows, width, x, weights, blocks, sums);
}

/* Turns a tile's scores of a block's tokens into weights, and scales the sums so far. */
static void weigh_pairs(const Step *step, int rows, Row *row, int begin, float (*scores)[KEYS], void *weights, float *sums) {
    const int dim = step->model->head_dim;
    const Vector scale = splat(step->model->attention_scale * LOG2_E);
    float most[PAIR_ROWS] = {0.0f}, before[PAIR_ROWS] = {0.0f}, factor[PAIR_ROWS];
    for (int r = 0; r < rows; r++) {
        hide(&row[r], begin, scores[r], MOST_OF_SCORE);
        most[r] = largest_of(scores[r]), before[r] = row[r].most;
    }
    for (int v = 0; v < PAIR_ROWS; v += LANES) {
        const Vector now = larger(multiplied(load(most + v), scale), load(before + v));
        store(factor + v, power_of_two(1, subtracted(load(before + v), now))), store(most + v, now);
    }
    for (int r = 0; r < rows; r++) {
        const Vector shift = splat(-most[r]), by = splat(factor[r]);
        UNROLL for (int t = 0; t < KEYS; t += LANES)
            store(scores[r] + t, power_of_two(1, multiply_add(load(scores[r] + t), scale, shift)));
        hide(&row[r], begin, scores[r], MOST_OF_WEIGHT);
        UNROLL for (int v = 0; v < GROUP_PARTS; v++) {
            Vector sum = multiplied(load(row[r].sum + v * LANES), by);
            UNROLL for (int t = 0; t < KEYS; t += GROUP) sum = added(sum, load(scores[r] + t + v * LANES));
            store(row[r].sum + v * LANES, sum);
        }
        UNROLL for (int block = 0; block < KEYS / 32; block++) halve(step, scores[r] + block * 32, weights, block, r);
        row[r].most = most[r];
        if (factor[r] == 1.0f) continue;
        for (int d = 0; d < dim; d += LANES) store(sums + r * dim + d, multiplied(load(sums + r * dim + d), by));
    }
}

/* Queries of a job and the block of tokens in the buffer: a tile's scores are computed while earlier ones are weighted. */
static void attend_block(const Step *step, int num_rows, Row *row, int begin, const PairRoom *room) {
    const int dim = step->model->head_dim, blocks = (dim + 31) / 32, of_tile = blocks * 32 * PAIR_ROWS * (step->has_tiles ? 2 : 4);
    float(*scores)[PAIR_ROWS][KEYS] = (float(*)[PAIR_ROWS][KEYS])room->scores;
    int first = 0, last = 0; /* rows of tiles that see a token of it */
    for (int r = 0; r < num_rows; r += PAIR_ROWS) {
        const int end = r + PAIR_ROWS < num_rows ? r + PAIR_ROWS : num_rows;
        if (row[end - 1].to <= begin) first = r + PAIR_ROWS;
        if (row[r].from < begin + KEYS) last = end;
    }
    for (int tile = first / PAIR_ROWS - 1, r = tile * PAIR_ROWS; r < last; tile++, r += PAIR_ROWS) {
        const int next = r + PAIR_ROWS, ahead = last - next < PAIR_ROWS ? last - next : PAIR_ROWS;
        if (next < last)
            add_pairs(step, 0, ahead, KEYS, (const char *)room->queries + (tile + 1) * of_tile, (const uint16_t *)room->keys,
                      blocks, scores[(tile + 1) % 2][0]);
        if (r < first) continue;
        const int rows = last - r < PAIR_ROWS ? last - r : PAIR_ROWS;
        weigh_pairs(step, rows, row + r, begin, scores[tile % 2], room->weights, room->sums + r * dim);
        add_pairs(step, 1, rows, dim, room->weights, room->values, KEYS / 32, room->sums + r * dim);
    }
}

static void halve_queries(const Step *step, const Row *row, int num_rows, void *queries) {
    const int dim = step->model->head_dim, blocks = (dim + 31) / 32;
    for (int r = 0; r < num_rows; r++)
        for (int block = 0; block < blocks; block++) {
            float last[32] = {0.0f};
            const float *query = row[r].query + block * 32;
            if (dim < (block + 1) * 32) query = memcpy(last, query, sizeof(float) * GROUP);
            halve(step, query, queries, (int64_t)(r / PAIR_ROWS) * blocks + block, r);
        }
}

/* A job of attention by pairs. */
static __attribute__((noinline)) void attend_pairs(const Step *step, int job, int thread) {
    const Model *model = step->model;
    const Span *span = &step->spans[job / model->kv_heads];
    const PairRoom *room = &step->pair_rooms[thread];
    const int dim = model->head_dim, kept = kept_bytes(model->kv_form, dim);
    const int num_rows = (span->end - span->begin) * (model->heads / model->kv_heads);
    Row row[num_rows];
    rows_of(step, span, job % model->kv_heads, row);
    halve_queries(step, row, num_rows, room->queries);
    memset(room->sums, 0, sizeof(float) * (size_t)(num_rows * dim));
    const int to = row[num_rows - 1].to;
    Block block, next = first_block(step, job);
    for (int begin = next.begin; begin < to; begin += KEYS) {
        block = next;
        next = begin + KEYS < to ? block_at(step, job, begin + KEYS) : first_block(step, job + 1);
        pair_up(model->kv_form, &block, dim, room);
        if (num_rows <= 2 * PAIR_ROWS) fetch(&next, kept, 0, 1);
        attend_block(step, num_rows, row, begin, room);
    }
    for (int r = 0; r < num_rows; r++) {
        const Vector factor = splat(1.0f / sum_of_lanes(row[r].sum));
        for (int d = 0; d < dim; d += LANES) store(row[r].out + d, multiplied(load(room->sums + r * dim + d), factor));
    }
}

static void attend_pairs_job(Step *step, int job, int thread) {
    const unsigned before = begin_pairs(step);
    attend_pairs(step, job, thread);
    end_pairs(step, before);
}
