/* Mixtures of experts: which ones a token gets, and the sum of what they make of it. A part of `step.c`, which includes it. */

/* ---- experts -------------------------------------------------------------------------------------------------------------

   A token's scores become its weights for the chosen experts, and NOT_CHOSEN for the others. Then, expert by expert, the rows
   that chose it are gathered, computed together, and added to their tokens. So a token's sum has the order of its experts,
   independent of other tokens. */

static const float NOT_CHOSEN = -1.0f;

/* Among equal probabilities the lower expert comes first. */
static void choose(const Experts *experts, float *score) {
    const int count = experts->count, chosen = experts->chosen;
    float largest = -INFINITY, sum = 0.0f, total = 0.0f, weight[chosen];
    int32_t expert[chosen];
    for (int e = 0; e < count; e++) largest = score[e] > largest ? score[e] : largest;
    for (int e = 0; e < count; e += LANES) /* a row of scores is as wide as panels make it */
        store(score + e, exponential(subtracted(load(score + e), splat(largest))));
    for (int e = 0; e < count; e++) sum += score[e];
    for (int e = 0; e < count; e++) score[e] /= sum;
    for (int i = 0; i < chosen; i++) {
        int best = 0;
        for (int e = 1; e < count; e++)
            if (score[e] > score[best]) best = e;
        expert[i] = best, weight[i] = score[best], total += score[best];
        score[best] = NOT_CHOSEN;
    }
    for (int e = 0; e < count; e++) score[e] = NOT_CHOSEN;
    for (int i = 0; i < chosen; i++) score[expert[i]] = experts->normalized ? weight[i] / total : weight[i];
}

static void choose_job(Step *step, int job, int thread) {
    (void)thread;
    const Experts *experts = step->model->layer[step->layer].experts;
    for (int r = job * ROWS_A_JOB; r < last_row(job, step->batch->tokens); r++)
        choose(experts, step->routing + (int64_t)r * experts->router.panels * PANEL);
}

static float weight_of(const Step *step, int token, int expert) {
    return step->routing[(int64_t)token * step->model->layer[step->layer].experts->router.panels * PANEL + expert];
}

static void gather_job(Step *step, int job, int thread) {
    (void)thread;
    const int width = step->model->hidden;
    for (int r = job * ROWS_A_JOB; r < last_row(job, step->mix.rows); r++)
        memcpy(step->gathered + (int64_t)r * width, step->mix.x + (int64_t)step->picked[r] * width, sizeof(float) * width);
}

static void scatter_job(Step *step, int job, int thread) {
    (void)thread;
    const int width = step->model->hidden;
    for (int r = job * ROWS_A_JOB; r < last_row(job, step->mix.rows); r++) {
        const float weight = weight_of(step, step->picked[r], step->mix.expert), *y = step->gathered + (int64_t)r * width;
        float *sum = step->delta + (int64_t)step->picked[r] * width;
        for (int i = 0; i < width; i++) sum[i] += weight * y[i];
    }
}

/* delta = the weighted sum of the outputs of a token's experts for x. */
static void mix(Step *step, const Experts *experts, const float *x, int tokens) {
    const int width = step->model->hidden;
    multiply(step, &experts->router, x, width, tokens, step->routing, experts->router.panels * PANEL);
    run(step, row_jobs(tokens), choose_job);
    memset(step->delta, 0, sizeof(float) * (size_t)tokens * (size_t)width);
    step->mix.x = x;
    for (int e = 0; e < experts->count; e++) {
        step->mix.expert = e, step->mix.rows = 0;
        for (int r = 0; r < tokens; r++)
            if (weight_of(step, r, e) != NOT_CHOSEN) step->picked[step->mix.rows++] = r;
        if (!step->mix.rows) continue;
        run(step, row_jobs(step->mix.rows), gather_job);
        const Matrix *gate_up = &experts->gate_up[e], *down = &experts->down[e];
        const float *active = activate(step, gate_up, down, step->gathered, step->mix.rows, experts->inner);
        multiply(step, down, active, active_width(experts->inner), step->mix.rows, step->gathered, width);
        run(step, row_jobs(step->mix.rows), scatter_job);
    }
}
