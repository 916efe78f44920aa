/* Threads that share the jobs of a phase, and the memory of a step. A part of `step.c`, which includes it. */

/* ---- threads -------------------------------------------------------------------------------------------------------

   A phase of a step is a number of jobs. The calling thread and the helpers each claim the next job when they are idle. A
   helper that has no core at the moment has claimed nothing, so no thread waits for it. */

typedef struct Step Step;
typedef void (*Work)(Step *, int job, int thread);

typedef struct {
    _Atomic uint64_t claim; /* phase: 24 bits, its number of jobs: 20 bits, the next job: 20 bits */
    _Atomic int finished, sleeping, stopping;
    Work work;
    Step *step;
    pthread_mutex_t lock;
    pthread_cond_t wake;
    pthread_t *helpers;
    int num_helpers;
} Pool;

typedef struct { Pool *pool; int thread; } Helper;

enum { SPINS = 2000, YIELDS = 100 };
static uint32_t next_job(uint64_t claim) { return claim & 0xfffff; }
static uint32_t num_jobs(uint64_t claim) { return (claim >> 20) & 0xfffff; }

static void pause_or_yield(int idle) {
    if (idle < SPINS) _mm_pause();
    else sched_yield();
}

/* Claims jobs of the phase that is open until there are none; returns whether there was one. */
static int work_on(Pool *pool, int thread) {
    int worked = 0;
    for (;;) {
        uint64_t claim = atomic_load_explicit(&pool->claim, memory_order_acquire);
        if (next_job(claim) >= num_jobs(claim)) return worked;
        claim = atomic_fetch_add_explicit(&pool->claim, 1, memory_order_acq_rel);
        if (next_job(claim) >= num_jobs(claim)) return worked;
        pool->work(pool->step, (int)next_job(claim), thread);
        atomic_fetch_add_explicit(&pool->finished, 1, memory_order_release);
        worked = 1;
    }
}

static void *help(void *argument) {
    Helper *helper = argument;
    Pool *pool = helper->pool;
    int thread = helper->thread, idle = 0;
    free(helper);
    while (!atomic_load(&pool->stopping)) {
        if (work_on(pool, thread)) idle = 0;
        else if (idle++ < SPINS + YIELDS) pause_or_yield(idle);
        else {
            pthread_mutex_lock(&pool->lock);
            atomic_fetch_add(&pool->sleeping, 1);
            uint64_t claim = atomic_load(&pool->claim);
            if (next_job(claim) >= num_jobs(claim) && !atomic_load(&pool->stopping))
                pthread_cond_wait(&pool->wake, &pool->lock);
            atomic_fetch_sub(&pool->sleeping, 1);
            pthread_mutex_unlock(&pool->lock);
            idle = 0;
        }
    }
    return NULL;
}

static void wake_helpers(Pool *pool) {
    if (!atomic_load(&pool->sleeping)) return;
    pthread_mutex_lock(&pool->lock);
    pthread_cond_broadcast(&pool->wake);
    pthread_mutex_unlock(&pool->lock);
}

/* ---- a step's memory ------------------------------------------------------------------------------------------------ */

typedef struct { /* 32 inputs of a row as bytes: input = scale * byte, or scale * (256 * first byte + second one) */
    float scale, total; /* total: of the inputs */
    int32_t offset;     /* what is too much in a product with bytes that are 128 more than a weight, taken away */
} Bytes;
typedef struct { /* buffers of a thread for products of pairs */
    uint16_t *made;   /* weights of two panels */
    float *products;  /* [2][ROWS_OF_PAIRS][PANEL] */
    float *keys;      /* [dimension / 2][KEYS], of which each holds two halves */
    uint16_t *values; /* [KEYS / 2][dimension][2] */
    void *queries;    /* [tiles][dimension / 32][PAIR_ROWS][32], as Step.halves */
    void *weights;    /* [KEYS / 32][PAIR_ROWS][32], the same */
    float *scores, *sums; /* [2][PAIR_ROWS][KEYS], [rows][dimension] */
} PairRoom;
typedef struct { int32_t sequence, row, begin, end; } Span; /* tokens of a sequence whose first one in the step is `row` */

struct Step {
    const Model *model;
    Pool pool;
    float *x, *normed, *qkv, *attended, *gate_up, *active, *delta; /* [max_tokens][...] */
    float *gathered, *routing;                                     /* the same, of a model with experts */
    int8_t *bytes;                                                 /* [tiles][inputs of the product / 32][DOT_ROWS][planes][32] */
    Bytes *of_bytes;                                               /* [tiles][inputs / 32][DOT_ROWS] */
    void *halves, *active_halves;                                  /* [tiles][inputs / 32][PAIR_ROWS][32], see products of pairs */
    int has_tiles;                                                 /* whether the CPU multiplies them by tiles */
    float **keys, **panels;                                        /* [threads]: buffers */
    PairRoom *pair_rooms;                                          /* [threads] */
    int32_t *sequence, *position, *picked;                         /* [max_tokens] */
    Span *spans;
    int num_spans, qkv_width;
    const Batch *batch; /* from here on: what a phase is about */
    int layer;
    struct {
        const Matrix *matrix;
        const float *x;
        const void *halves; /* of x */
        float *y;
        int rows, ldx, ldy, adds, activates;
        float scale;
    } product;
    struct { const float *x, *weight; float *y; const int32_t *row; int rows, adds; } norm;
    struct { int rows, width, inner; } active_rows;
    struct { const float *x; int expert, rows; } mix;
};
