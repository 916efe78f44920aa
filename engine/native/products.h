/* The jobs of a product: which thread computes which rows and panels. A part of `step.c`, which includes it. */

/* ---- a product's jobs ----------------------------------------------------------------------------------------------------- */

/* A job's panels stay in the L2 cache, and each tile of rows is read once for all of them, so a job has many rows. */
enum { PANELS_A_JOB = 4, TILES_A_BLOCK = 43, JOBS_A_THREAD = 4 };
/* Panels of which one alone is to be computed: of gates, the next half goes with the first one. */
static int panels_of(const Step *step) {
    const Matrix *m = step->product.matrix;
    return step->product.activates && step->model->gated ? m->panels / 2 : m->panels;
}
static int groups_of_panels(const Step *step) { return (panels_of(step) + PANELS_A_JOB - 1) / PANELS_A_JOB; }
static int blocks_of_rows(const Step *step, int block) { return (step->product.rows + block - 1) / block; }
/* With few jobs per thread, one thread would wait for the other's last job. */
static int rows_a_block(const Step *step) {
    if (is_pairs(step->product.matrix)) return ROWS_OF_PAIRS;
    const int few = step->pool.num_helpers ? JOBS_A_THREAD * (1 + step->pool.num_helpers) : 0;
    int tiles = TILES_A_BLOCK;
    while (tiles > 4 && groups_of_panels(step) * blocks_of_rows(step, tiles * MAX_TILE_ROWS) <= few) tiles = (tiles + 1) / 2;
    return tiles * MAX_TILE_ROWS;
}
static int product_jobs(const Step *step) { return groups_of_panels(step) * blocks_of_rows(step, rows_a_block(step)); }

/* A job of a product: four panels of outputs for a block of rows. */
static void multiply_job(Step *step, int job, int thread) {
    const Matrix *m = step->product.matrix;
    const int panels = panels_of(step), groups = groups_of_panels(step), block = rows_a_block(step);
    const int first = job % groups * PANELS_A_JOB, row = job / groups * block;
    const int last = first + PANELS_A_JOB < panels ? first + PANELS_A_JOB : panels;
    const int rows = step->product.rows - row < block ? step->product.rows - row : block;
    const float *x = step->product.x + (int64_t)row * step->product.ldx;
    if (is_dot(m)) {
        multiply_bytes(step, first, last, row, rows);
        return;
    }
    if (is_pairs(m)) {
        const unsigned before = begin_pairs(step);
        multiply_pairs(step, first, last, row, rows, thread);
        end_pairs(step, before);
        return;
    }
    float sums[MAX_TILE_ROWS * 4 * PANEL];
    const int together = rows == 1 ? 16 / PARTS / 2 : rows <= 4 && PARTS == 2 ? 2 : 1; /* fills the pipelines */
    Matrix unpacked = {UNPACKED, PANELS_A_JOB * PANEL, m->inputs, PANELS_A_JOB, step->panels[thread], NULL, NULL, NULL};
    const int unpacks = rows > 2 * TILE_ROWS && m->form != F32; /* often used weights are unpacked once */
    for (int panel = first; unpacks && panel < last; panel++)
        unpack_panel(m, panel, step->panels[thread] + (int64_t)(panel - first) * m->inputs * PANEL);
    for (int r = 0, tiles = (rows + TILE_ROWS - 1) / TILE_ROWS; tiles; tiles--) {
        const int some = (rows - r + tiles - 1) / tiles;
        for (int panel = first; panel < last; panel += together) {
            const int panels = last - panel < together ? last - panel : together;
            const float *from = x + (int64_t)r * step->product.ldx;
            if (unpacks) tile_unpacked(some, panels, &unpacked, panel - first, from, step->product.ldx, sums);
            else TILES[m->form](some, panels, m, panel, from, step->product.ldx, sums);
            put(step, row + r, some, panel, panels, sums);
        }
        r += some;
    }
}

/* Runs a phase: all jobs, on all idle threads. */
static void run(Step *step, int jobs, Work work) {
    Pool *pool = &step->pool;
    if (pool->num_helpers == 0 || jobs < 2) {
        for (int job = 0; job < jobs; job++) work(step, job, 0);
        return;
    }
    pool->work = work;
    pool->step = step;
    atomic_store(&pool->finished, 0);
    uint64_t phase = (atomic_load(&pool->claim) >> 40) + 1;
    atomic_store(&pool->claim, phase << 40 | (uint64_t)jobs << 20);
    wake_helpers(pool);
    work_on(pool, 0);
    for (int idle = 0; atomic_load_explicit(&pool->finished, memory_order_acquire) < jobs; idle++) pause_or_yield(idle);
}

enum { ROWS_A_JOB = 8 };
static int row_jobs(int rows) { return (rows + ROWS_A_JOB - 1) / ROWS_A_JOB; }
static int last_row(int job, int rows) { return (job + 1) * ROWS_A_JOB < rows ? (job + 1) * ROWS_A_JOB : rows; }

static void quantize_job(Step *step, int job, int thread) {
    (void)thread;
    const int inputs = step->product.matrix->inputs, form = step->product.matrix->form;
    for (int r = job * ROWS_A_JOB; r < last_row(job, step->product.rows); r++) {
        const int64_t at = (int64_t)(r / DOT_ROWS) * (inputs / 32) * DOT_ROWS + r % DOT_ROWS;
        quantize(form, step->product.x + (int64_t)r * step->product.ldx, inputs, step->bytes + at * planes_of(form) * 32,
                 step->of_bytes + at);
    }
}

static void halve_job(Step *step, int job, int thread) {
    (void)thread;
    const int inputs = step->product.matrix->inputs, blocks = pair_blocks(step->product.matrix);
    for (int r = job * ROWS_A_JOB; r < last_row(job, step->product.rows); r++)
        for (int block = 0; block < blocks; block++) {
            const float *x = step->product.x + (int64_t)r * step->product.ldx + block * 32;
            float last[32] = {0.0f};
            if (inputs < (block + 1) * 32) x = memcpy(last, x, sizeof(float) * (size_t)(inputs - block * 32));
            halve(step, x, step->halves, (int64_t)(r / PAIR_ROWS) * blocks + block, r);
        }
}

/* Computes the product that `step->product` describes. */
static void run_product(Step *step) {
    const int rows = step->product.rows;
    step->product.halves = step->product.x ? step->halves : step->active_halves;
    if (is_dot(step->product.matrix)) run(step, row_jobs(rows), quantize_job);
    if (is_pairs(step->product.matrix) && step->product.x) run(step, row_jobs(rows), halve_job);
    run(step, product_jobs(step), multiply_job);
}

/* No `x`: the inputs are the previous activations. */
static void multiply(Step *step, const Matrix *m, const float *x, int ldx, int rows, float *y, int ldy) {
    step->product.matrix = m, step->product.x = x, step->product.ldx = ldx, step->product.rows = rows;
    step->product.y = y, step->product.ldy = ldy, step->product.adds = step->product.activates = 0;
    run_product(step);
}

/* x += scale * (y W), where x are the residual's rows. */
static void multiply_into_residual(Step *step, const Matrix *m, const float *y, int ldy, int rows) {
    const Model *model = step->model;
    step->product.matrix = m, step->product.x = y, step->product.ldx = ldy, step->product.rows = rows;
    step->product.y = step->x, step->product.ldy = model->hidden;
    step->product.adds = 1, step->product.activates = 0, step->product.scale = model->residual_scale;
    run_product(step);
}
