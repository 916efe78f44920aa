/* Norms, rotation, activation, and what is written into pages. A part of `step.c`, which includes it. */

/* ---- norms, rotation, activation -------------------------------------------------------------------------------------- */

/* `width` is a multiple of 16. */
static float sum_of_squares(const float *x, int width) {
    Vector sum[GROUP_PARTS];
    float lane[GROUP];
    for (int v = 0; v < GROUP_PARTS; v++) sum[v] = splat(0.0f);
    for (int i = 0; i < width; i += GROUP)
        for (int v = 0; v < GROUP_PARTS; v++) {
            Vector value = load(x + i + v * LANES);
            sum[v] = multiply_add(value, value, sum[v]);
        }
    for (int v = 0; v < GROUP_PARTS; v++) store(lane + v * LANES, sum[v]);
    return sum_of_lanes(lane);
}

static float sum_of(const float *x, int width) {
    float lane[GROUP];
    for (int j = 0; j < GROUP; j++) lane[j] = 0.0f;
    for (int i = 0; i < width; i += GROUP)
        for (int j = 0; j < GROUP; j++) lane[j] += x[i + j];
    return sum_of_lanes(lane);
}

/* y = x / root mean square of x * weight */
static void normalize(const float *x, const float *weight, float *y, int width, float eps) {
    const float factor = 1.0f / sqrtf(sum_of_squares(x, width) / (float)width + eps);
    for (int i = 0; i < width; i++) y[i] = weight[i] * (x[i] * factor);
}

/* y = (x - mean) / standard deviation of x * weight + bias */
static void normalize_by_variance(const float *x, const float *weight, float *y, int width, float eps) {
    const float mean = sum_of(x, width) / (float)width;
    for (int i = 0; i < width; i++) y[i] = x[i] - mean;
    const float factor = 1.0f / sqrtf(sum_of_squares(y, width) / (float)width + eps);
    for (int i = 0; i < width; i++) y[i] = weight[i] * (y[i] * factor) + weight[width + i];
}

static void norm_job(Step *step, int job, int thread) {
    (void)thread;
    const int width = step->model->hidden;
    float normed[width];
    for (int r = job * ROWS_A_JOB; r < last_row(job, step->norm.rows); r++) {
        const float *x = step->norm.x + (int64_t)(step->norm.row ? step->norm.row[r] : r) * width;
        float *y = step->norm.y + (int64_t)r * width;
        float *into = step->norm.adds ? normed : y;
        if (step->model->norm_kind == BY_VARIANCE) normalize_by_variance(x, step->norm.weight, into, width, step->model->eps);
        else normalize(x, step->norm.weight, into, width, step->model->eps);
        if (step->norm.adds)
            for (int i = 0; i < width; i++) y[i] += step->model->residual_scale * normed[i];
    }
}

/* Returns the rows' norms, or the rows where there is no norm. `row` chooses rows; none: the first ones. */
static const float *normed(Step *step, const float *weight, const int32_t *row, int rows) {
    if (!weight) return step->x;
    step->norm.x = step->x, step->norm.weight = weight, step->norm.y = step->normed;
    step->norm.row = row, step->norm.rows = rows, step->norm.adds = 0;
    run(step, row_jobs(rows), norm_job);
    return step->normed;
}

static void residual_job(Step *step, int job, int thread) {
    (void)thread;
    const Model *model = step->model;
    for (int64_t i = (int64_t)job * ROWS_A_JOB * model->hidden; i < (int64_t)last_row(job, step->norm.rows) * model->hidden; i++)
        step->x[i] += model->residual_scale * step->delta[i];
}

/* Adds `delta` to the residual, through a norm if the layer has one there. */
static void add_delta(Step *step, const float *weight, int rows) {
    step->norm.x = step->delta, step->norm.weight = weight, step->norm.y = step->x;
    step->norm.row = NULL, step->norm.rows = rows, step->norm.adds = 1;
    run(step, row_jobs(rows), weight ? norm_job : residual_job);
}

/* Adds the result of attention or MLP to the residual. */
static void add(Step *step, const Matrix *m, const float *y, int ldy, const float *weight, int rows) {
    if (!weight) {
        multiply_into_residual(step, m, y, ldy, rows);
        return;
    }
    multiply(step, m, y, ldy, rows, step->delta, step->model->hidden);
    add_delta(step, weight, rows);
}

static float embedding_at(const Model *model, int64_t at) {
    union { uint32_t bits; float value; } wide;
    switch (model->embedding_form) {
    case F32: return ((const float *)model->embedding)[at];
    case BF16: wide.bits = (uint32_t)((const uint16_t *)model->embedding)[at] << 16; return wide.value;
    default: return model->embedding_codes_scale[at / 32] * (float)((const int8_t *)model->embedding)[at];
    }
}

static void embed_job(Step *step, int job, int thread) {
    (void)thread;
    const Model *model = step->model;
    for (int r = job * ROWS_A_JOB; r < last_row(job, step->batch->tokens); r++) {
        float *x = step->x + (int64_t)r * model->hidden;
        const int64_t from = (int64_t)step->batch->token_ids[r] * model->hidden;
        for (int i = 0; i < model->hidden; i++) x[i] = embedding_at(model, from + i) * model->embedding_scale;
    }
}

/* Rotates pairs of dimensions: j and j + half. */
static void rotate(float *head, const float *cos, const float *sin, int half) {
    for (int j = 0; j < half; j++) {
        float first = head[j], second = head[j + half];
        head[j] = first * cos[j] - second * sin[j];
        head[j + half] = second * cos[j] + first * sin[j];
    }
}

/* The same for dimensions 2 j and 2 j + 1. */
static void rotate_neighbours(float *head, const float *cos, const float *sin, int half) {
    for (int j = 0; j < half; j++) {
        float first = head[2 * j], second = head[2 * j + 1];
        head[2 * j] = first * cos[j] - second * sin[j];
        head[2 * j + 1] = second * cos[j] + first * sin[j];
    }
}

/* Bytes of a token's K or V in a page. */
INLINE int kept_bytes(int form, int dim) {
    if (form == KV_F32) return dim * (int)sizeof(float);
    return form == KV_BF16 ? dim * (int)sizeof(uint16_t) : dim + (int)sizeof(float);
}

INLINE uint8_t *page_at(const Step *step, int sequence, int position, int kv_head) {
    const Model *model = step->model;
    int32_t block = step->batch->tables[(int64_t)sequence * step->batch->table_stride + position / model->block_size];
    int64_t page = (int64_t)2 * model->block_size * kept_bytes(model->kv_form, model->head_dim);
    return model->kv + step->layer * model->layer_stride + ((int64_t)block * model->kv_heads + kv_head) * page;
}

/* Zeroes the places after a sequence's last token in a block that the step has started. An attention that masks places, as
   transformers' does after a KV transfer, multiplies them by 0, so they must not contain NaN left by another sequence. */
static void clear_behind(const Step *step, int sequence, int end) {
    const Model *model = step->model;
    const int filled = end % model->block_size, size = model->block_size;
    const int64_t kept = kept_bytes(model->kv_form, model->head_dim);
    if (!filled || end - filled < step->batch->begin[sequence]) return;
    for (int head = 0; head < model->kv_heads; head++) {
        uint8_t *page = page_at(step, sequence, end, head);
        memset(page + filled * kept, 0, (size_t)((size - filled) * kept));
        memset(page + (size + filled) * kept, 0, (size_t)((size - filled) * kept));
    }
}

static uint16_t rounded_to_bf16(float x) {
    union { float value; uint32_t bits; } wide = {.value = x};
    const uint32_t rounded = (wide.bits + 0x7fff + ((wide.bits >> 16) & 1)) >> 16;
    return x == x ? (uint16_t)rounded : 0x7fc0;
}

static void keep_bytes(const float *values, int dim, int8_t *kept) {
    Vector most = without_sign(load(values));
    for (int d = LANES; d < dim; d += LANES) most = larger(most, without_sign(load(values + d)));
    const float scale = largest_lane(most) / 127.0f;
    for (int d = 0; d < dim; d += LANES) to_bytes(kept + d, divided(load(values + d), splat(scale > 0.0f ? scale : 1.0f)));
    memcpy(kept + dim, &scale, sizeof(float));
}

/* Writes a token's K or V into its page. */
static void keep(int form, const float *values, int dim, uint8_t *kept) {
    if (form == KV_F32) memcpy(kept, values, sizeof(float) * (size_t)dim);
    else if (form == KV_INT8) keep_bytes(values, dim, (int8_t *)kept);
    else for (int d = 0; d < dim; d++) ((uint16_t *)kept)[d] = rounded_to_bf16(values[d]);
}

/* Norms and rotates queries and keys, and writes keys and values into their pages. */
static void keep_job(Step *step, int job, int thread) {
    (void)thread;
    const Model *model = step->model;
    const Layer *layer = &model->layer[step->layer];
    const int dim = model->head_dim, heads = model->heads, kv_heads = model->kv_heads, half = model->rotary_dim / 2;
    const int64_t kept = kept_bytes(model->kv_form, dim);
    for (int r = job * ROWS_A_JOB; r < last_row(job, step->batch->tokens); r++) {
        float *query = step->qkv + (int64_t)r * step->qkv_width, *key = query + heads * dim;
        const float *value = key + kv_heads * dim;
        const int sequence = step->sequence[r], position = step->position[r], place = position % model->block_size;
        if (model->qk_norm == QK_WHOLE) {
            normalize(query, layer->query, query, heads * dim, model->eps);
            normalize(key, layer->key, key, kv_heads * dim, model->eps);
        }
        for (int i = 0; model->clip > 0.0f && i < (heads + 2 * kv_heads) * dim; i++)
            query[i] = query[i] < -model->clip ? -model->clip : query[i] > model->clip ? model->clip : query[i];
        for (int head = 0; head < heads + kv_heads; head++) {
            float *one = query + head * dim;
            if (model->qk_norm == QK_BY_HEAD)
                normalize(one, head < heads ? layer->query : layer->key, one, dim, model->eps);
            if (layer->rotates)
                (model->rotates_neighbours ? rotate_neighbours : rotate)(
                    one, model->cos + (int64_t)position * half, model->sin + (int64_t)position * half, half);
        }
        for (int head = 0; head < kv_heads; head++) {
            uint8_t *page = page_at(step, sequence, position, head);
            keep(model->kv_form, key + head * dim, dim, page + place * kept);
            keep(model->kv_form, value + head * dim, dim, page + (model->block_size + place) * kept);
        }
        const int end = step->batch->begin[sequence] + step->batch->count[sequence];
        if (position == end - 1) clear_behind(step, sequence, end);
    }
}

/* Rows of gates and of gated values are padded to whole panels; the padding is 0. */
static int active_width(int inner) { return (inner + PANEL - 1) / PANEL * PANEL; }

static void activate_job(Step *step, int job, int thread) {
    (void)thread;
    const Model *model = step->model;
    const int width = step->active_rows.width, inner = active_width(step->active_rows.inner);
    for (int r = job * ROWS_A_JOB; r < last_row(job, step->active_rows.rows); r++) {
        const float *gate = step->gate_up + (int64_t)r * width, *up = gate + width / 2;
        float *y = step->active + (int64_t)r * inner;
        for (int i = 0; i < inner; i += LANES) {
            const Vector active = activated(model->activation, load(gate + i));
            store(y + i, model->gated ? multiplied(active, load(up + i)) : active);
        }
    }
}

/* First half of an MLP: returns activation(x gate) * (x up), or none if the result is already among the inputs of `down`. */
static const float *activate(Step *step, const Matrix *gate_up, const Matrix *down, const float *x, int rows, int inner) {
    if (is_pairs(gate_up) && is_pairs(down)) {
        step->product.matrix = gate_up, step->product.x = x, step->product.ldx = step->model->hidden;
        step->product.rows = rows, step->product.activates = 1;
        run_product(step);
        return NULL;
    }
    step->active_rows.rows = rows, step->active_rows.width = gate_up->panels * PANEL, step->active_rows.inner = inner;
    multiply(step, gate_up, x, step->model->hidden, rows, step->gate_up, step->active_rows.width);
    run(step, row_jobs(rows), activate_job);
    return step->active;
}
