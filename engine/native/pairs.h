/* Products of pairs of bfloat16: by AMX tiles, or the same sums without AMX. A part of `step.c`, which includes it. */

/* ---- products of pairs ---------------------------------------------------------------------------------------------------

   Weights and inputs are upper halves of floats. A CPU with tiles computes them with one instruction (TDPBF16PS); other CPUs
   emulate it. Denormal floats are 0 in both; MXCSR is set accordingly in each thread. */

enum { PAIR_ROWS = 16, PAIR_WEIGHTS = 32 * PANEL }; /* rows of a tile; weights of 32 inputs of a panel */
enum { ROWS_OF_PAIRS = 512, NEAR_BLOCKS = 9 };      /* rows of a job; blocks of 32 inputs at a time */
static int is_pairs(const Matrix *m) { return m->form == PAIRS || m->form == PAIRS_Q8 || m->form == PAIRS_Q4; }
static int pair_blocks(const Matrix *m) { return (m->inputs + 31) / 32; }

/* Returns 32 inputs of a panel as pairs: their place among the weights, or codes made to pairs in a room. */
INLINE const uint16_t *pairs_at(int form, const Matrix *m, int64_t block, uint16_t *into) {
    const char *weights = (const char *)m->weights;
    const int bytes = form == PAIRS ? 2048 : form == PAIRS_Q8 ? 1024 : 512, ahead = form == PAIRS ? 2 : m->inputs / 32;
    if (form != UNPACKED)
        UNROLL for (int i = 0; i < bytes; i += 64) _mm_prefetch(weights + (block + ahead) * bytes + i, _MM_HINT_T1);
    if (form == PAIRS || form == UNPACKED) return (const uint16_t *)weights + block * PAIR_WEIGHTS;
    const uint8_t *codes = (const uint8_t *)weights + block * bytes;
    Vector scale[2 * PARTS], least[2 * PARTS];
    UNROLL for (int v = 0; v < 2 * PARTS; v++) {
        scale[v] = twice(of_float16(m->scale + block * PANEL + v / 2 * LANES), v % 2);
        if (form == PAIRS_Q4) least[v] = twice(of_float16(m->least + block * PANEL + v / 2 * LANES), v % 2);
    }
    for (int pair = 0; pair < 16; pair++, codes += bytes / 16) {
        Vector weight[2 * PARTS];
        UNROLL for (int v = 0; v < 2 * PARTS; v++) {
            if (form == PAIRS_Q8) weight[v] = multiplied(scale[v], of_bytes((const int8_t *)codes + v * LANES));
            else weight[v] = multiply_add(scale[v], of_halves(codes + v % PARTS * LANES, v >= PARTS), least[v]);
        }
        UNROLL for (int v = 0; v < 2 * PARTS; v += 2)
            to_bf16_twice(into + pair * 2 * PANEL + v * LANES, weight[v], weight[v + 1]);
    }
    return into;
}

INLINE void make_pairs_of(int form, const Matrix *m, int panel, uint16_t *into) {
    for (int blocks = m->inputs / 32, block = 0; block < blocks; block++)
        pairs_at(form, m, (int64_t)panel * blocks + block, into + block * PAIR_WEIGHTS);
}

/* Converts a panel's codes to pairs. */
static void make_pairs(const Matrix *m, int panel, uint16_t *into) {
    if (m->form == PAIRS_Q8) make_pairs_of(PAIRS_Q8, m, panel, into);
    else make_pairs_of(PAIRS_Q4, m, panel, into);
}

/* Rounds 32 inputs of a row. `block` is the place of 32 inputs of a tile. */
static void halve(const Step *step, const float *x, void *halves, int64_t block, int row) {
    uint16_t own[32];
    const int64_t at = (block * PAIR_ROWS + row % PAIR_ROWS) * 32;
    uint16_t *into = step->has_tiles ? (uint16_t *)halves + at : own;
    UNROLL for (int i = 0; i < 32; i += 2 * LANES) to_bf16_twice(into + i, load(x + i), load(x + i + LANES));
    if (!step->has_tiles) UNROLL for (int i = 0; i < 32; i += LANES) store((float *)halves + at + i, of_bf16(own + i));
}

/* A tile of floats by vector `part` of `width` outputs, added to the sums as the CPU's tiles are. */
INLINE void pair_tile(int rows, int width, int part, const float *x, const uint16_t *weights, int blocks, float *sums) {
    for (int block = 0; block < blocks; block++, x += PAIR_ROWS * 32, weights += 32 * width) {
        Vector even[PAIR_ROWS / 2], odd[PAIR_ROWS / 2];
        UNROLL for (int r = 0; r < rows; r++) even[r] = odd[r] = splat(0.0f);
        for (int k = 0; k < 32; k += 2) {
            const Vector both = load((const float *)(weights + k * width) + part * LANES);
            const Vector first = lower_bf16(both), second = upper_bf16(both);
            UNROLL for (int r = 0; r < rows; r++) {
                even[r] = multiply_add(splat(x[r * 32 + k]), first, even[r]);
                odd[r] = multiply_add(splat(x[r * 32 + k + 1]), second, odd[r]);
            }
        }
        UNROLL for (int r = 0; r < rows; r++) {
            float *sum = sums + r * width + part * LANES;
            store(sum, added(load(sum), added(even[r], odd[r])));
        }
    }
}

/* Up to 16 rows. */
static void pair_rows(int rows, int width, const float *x, const uint16_t *weights, int blocks, float *sums) {
    for (int part = 0; part < width / LANES; part++) {
        int r = 0;
        for (; r + LANES / 2 <= rows; r += LANES / 2)
            pair_tile(LANES / 2, width, part, x + r * 32, weights, blocks, sums + r * width);
        for (; r + 2 <= rows; r += 2) pair_tile(2, width, part, x + r * 32, weights, blocks, sums + r * width);
        if (r < rows) pair_tile(1, width, part, x + r * 32, weights, blocks, sums + r * width);
    }
}

#if defined(__AMX_BF16__)
typedef struct { uint8_t palette, start, none[14]; uint16_t bytes[16]; uint8_t rows[16]; } TileShapes;

static void take_tiles(void) { /* eight tiles of 16 rows of 64 bytes */
    TileShapes shapes = {.palette = 1};
    for (int i = 0; i < 8; i++) shapes.bytes[i] = 64, shapes.rows[i] = PAIR_ROWS;
    _tile_loadconfig(&shapes);
}
static void give_tiles(void) { _tile_release(); }

/* 16 rows by a panel, or 32, in blocks of inputs [begin, end); adds to the sums, or starts them. Codes are converted to
   pairs one block before they are multiplied, so that both run at the same time. */
INLINE void multiply_tiles(int form, int both, int adds, const Matrix *m, int panel, int begin, int end, const uint16_t *x,
                           float *sums) {
    enum { STRIDE = 4 * PANEL };
    _Alignas(64) uint16_t room[2][PAIR_WEIGHTS];
    const int64_t first = (int64_t)panel * pair_blocks(m);
    const uint16_t *below = x + (int64_t)pair_blocks(m) * PAIR_ROWS * 32;
    const uint16_t *weights, *next = pairs_at(form, m, first + begin, room[0]);
    float *sums_below = sums + PAIR_ROWS * PANEL;
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
    if (adds) {
        _tile_loadd(0, sums, STRIDE);
        _tile_loadd(1, sums + 16, STRIDE);
    }
    if (adds && both) {
        _tile_loadd(2, sums_below, STRIDE);
        _tile_loadd(3, sums_below + 16, STRIDE);
    }
    for (int block = begin; block < end; block++) {
        const int64_t at = (int64_t)block * PAIR_ROWS * 32;
        weights = next;
        if (block + 1 < end) next = pairs_at(form, m, first + block + 1, room[(block + 1 - begin) % 2]);
        _tile_loadd(4, x + at, 64);
        _tile_loadd(6, weights, STRIDE);
        if (both) _tile_loadd(5, below + at, 64);
        _tile_loadd(7, weights + PANEL, STRIDE);
        _tile_dpbf16ps(0, 4, 6);
        _tile_dpbf16ps(1, 4, 7);
        if (!both) continue;
        _tile_dpbf16ps(2, 5, 6);
        _tile_dpbf16ps(3, 5, 7);
    }
    _tile_stored(0, sums, STRIDE);
    _tile_stored(1, sums + 16, STRIDE);
    if (!both) return;
    _tile_stored(2, sums_below, STRIDE);
    _tile_stored(3, sums_below + 16, STRIDE);
}

static void multiply_tiles_of(int rows, const Matrix *m, int panel, int begin, int end, const uint16_t *x, float *sums) {
    const int both = rows > PAIR_ROWS;
    switch (m->form) {
    case PAIRS:
        if (both) multiply_tiles(PAIRS, 1, 0, m, panel, begin, end, x, sums);
        else multiply_tiles(PAIRS, 0, 0, m, panel, begin, end, x, sums);
        return;
    case PAIRS_Q8:
        if (both) multiply_tiles(PAIRS_Q8, 1, 0, m, panel, begin, end, x, sums);
        else multiply_tiles(PAIRS_Q8, 0, 0, m, panel, begin, end, x, sums);
        return;
    case PAIRS_Q4:
        if (both) multiply_tiles(PAIRS_Q4, 1, 0, m, panel, begin, end, x, sums);
        else multiply_tiles(PAIRS_Q4, 0, 0, m, panel, begin, end, x, sums);
        return;
    default:
        if (begin && both) multiply_tiles(UNPACKED, 1, 1, m, panel, begin, end, x, sums);
        else if (begin) multiply_tiles(UNPACKED, 0, 1, m, panel, begin, end, x, sums);
        else if (both) multiply_tiles(UNPACKED, 1, 0, m, panel, begin, end, x, sums);
        else multiply_tiles(UNPACKED, 0, 0, m, panel, begin, end, x, sums);
    }
}

/* Adds to sums of 16 rows their products with `count` times 16 of `width` outputs, or starts the sums. */
INLINE void add_tiles(int count, int adds, int width, const uint16_t *x, const uint16_t *weights, int blocks, float *sums) {
    const int stride = 4 * width;
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
    if (adds) _tile_loadd(0, sums, stride);
    if (adds && count > 1) _tile_loadd(1, sums + 16, stride);
    if (adds && count > 2) _tile_loadd(2, sums + 32, stride);
    if (adds && count > 3) _tile_loadd(3, sums + 48, stride);
    for (int block = 0; block < blocks; block++, x += PAIR_ROWS * 32, weights += 32 * width) {
        _tile_loadd(4, x, 64);
        _tile_loadd(5, weights, stride);
        if (count > 1) _tile_loadd(6, weights + 32, stride);
        if (count > 2) _tile_loadd(7, weights + 64, stride);
        _tile_dpbf16ps(0, 4, 5);
        if (count > 3) _tile_loadd(5, weights + 96, stride);
        if (count > 1) _tile_dpbf16ps(1, 4, 6);
        if (count > 2) _tile_dpbf16ps(2, 4, 7);
        if (count > 3) _tile_dpbf16ps(3, 4, 5);
    }
    _tile_stored(0, sums, stride);
    if (count > 1) _tile_stored(1, sums + 16, stride);
    if (count > 2) _tile_stored(2, sums + 32, stride);
    if (count > 3) _tile_stored(3, sums + 48, stride);
}

INLINE void add_tiles_of(int count, int adds, int width, const uint16_t *x, const uint16_t *weights, int blocks, float *sums) {
    if (adds) add_tiles(count, 1, width, x, weights, blocks, sums);
    else add_tiles(count, 0, width, x, weights, blocks, sums);
}

/* The same for all of them. */
static void add_tile_rows(int adds, int width, const uint16_t *x, const uint16_t *weights, int blocks, float *sums) {
    for (int at = 0; at < width; at += 64, weights += 128, sums += 64) {
        switch (width - at) {
        case 16: add_tiles_of(1, adds, width, x, weights, blocks, sums); break;
        case 32: add_tiles_of(2, adds, width, x, weights, blocks, sums); break;
        case 48: add_tiles_of(3, adds, width, x, weights, blocks, sums); break;
        default: add_tiles_of(4, adds, width, x, weights, blocks, sums); break;
        }
    }
}

/* Asks the system for permission to use tiles. It refuses if it does not support them, or if a thread's signal stack is too
   small for them. */
static int may_use_tiles(void) {
    enum { REQUEST = 0x1023, TILE_DATA = 18 };
    return syscall(SYS_arch_prctl, REQUEST, TILE_DATA) == 0;
}
#else
static void take_tiles(void) {}
static void give_tiles(void) {}
static void multiply_tiles_of(int rows, const Matrix *m, int panel, int begin, int end, const uint16_t *x, float *sums) {
    (void)rows, (void)m, (void)panel, (void)begin, (void)end, (void)x, (void)sums;
}
static void add_tile_rows(int adds, int width, const uint16_t *x, const uint16_t *weights, int blocks, float *sums) {
    (void)adds, (void)width, (void)x, (void)weights, (void)blocks, (void)sums;
}
static int may_use_tiles(void) { return 0; }
#endif

/* Up to 32 rows by a panel, in blocks of inputs [begin, end). */
static void multiply_both(const Step *step, const Matrix *m, int panel, int row, int rows, int begin, int end, float *sums) {
    const int blocks = pair_blocks(m);
    const int64_t tile = (int64_t)blocks * PAIR_ROWS * 32, at = row / PAIR_ROWS * tile;
    if (step->has_tiles) {
        multiply_tiles_of(rows, m, panel, begin, end, (const uint16_t *)step->product.halves + at, sums);
        return;
    }
    const uint16_t *weights = (const uint16_t *)m->weights + ((int64_t)panel * blocks + begin) * PAIR_WEIGHTS;
    const float *x = (const float *)step->product.halves + at + begin * PAIR_ROWS * 32;
    if (!begin) memset(sums, 0, sizeof(float) * (size_t)rows * PANEL);
    pair_rows(rows < PAIR_ROWS ? rows : PAIR_ROWS, PANEL, x, weights, end - begin, sums);
    if (rows > PAIR_ROWS) pair_rows(rows - PAIR_ROWS, PANEL, x + tile, weights, end - begin, sums + PAIR_ROWS * PANEL);
}

/* Stores the gated values of a panel among the next product's inputs. */
static void put_active(const Step *step, int row, int rows, int panel, const float *gate, const float *up) {
    const Matrix *m = step->product.matrix;
    const Model *model = step->model;
    const int panels = model->gated ? m->panels / 2 : m->panels;
    for (int r = row; r < row + rows; r++, gate += PANEL, up += PANEL) {
        _Alignas(64) float active[PANEL];
        for (int i = 0; i < PANEL; i += LANES) {
            Vector value = load(gate + i), through = load(up + i);
            if (m->bias) value = added(value, load(m->bias + panel * PANEL + i));
            if (m->bias && model->gated) through = added(through, load(m->bias + (panels + panel) * PANEL + i));
            value = activated(model->activation, value);
            store(active + i, model->gated ? multiplied(value, through) : value);
        }
        halve(step, active, step->active_halves, (int64_t)(r / PAIR_ROWS) * panels + panel, r);
    }
}

/* Panels [first, last) for rows of the product, the first of which starts a tile; gates together with the gated values.
   For many rows, inputs are processed in blocks whose weights stay in the L1 cache. */
static __attribute__((noinline)) void multiply_pairs(const Step *step, int first, int last, int row, int rows, int thread) {
    const Matrix *m = step->product.matrix;
    const int parts = step->product.activates && step->model->gated ? 2 : 1, is_many = rows > 2 * PAIR_ROWS;
    const int makes = m->form != PAIRS && (is_many || !step->has_tiles); /* often used weights */
    const int blocks = pair_blocks(m), chunks = is_many ? (blocks + NEAR_BLOCKS - 1) / NEAR_BLOCKS : 1;
    uint16_t *made = step->pair_rooms[thread].made;
    float *sums[2] = {step->pair_rooms[thread].products, step->pair_rooms[thread].products + ROWS_OF_PAIRS * PANEL};
    for (int panel = first; panel < last; panel++) {
        Matrix of[2];
        int at[2];
        for (int i = 0; i < parts; i++) {
            of[i] = *m, at[i] = panel + i * m->panels / 2;
            if (makes) of[i].weights = made + (int64_t)i * blocks * PAIR_WEIGHTS;
            if (makes) make_pairs(m, at[i], made + (int64_t)i * blocks * PAIR_WEIGHTS), at[i] = 0;
            if (makes || is_many) of[i].form = UNPACKED;
        }
        for (int i = 0; i < parts * chunks; i++) {
            const int part = i % parts, chunk = i / parts, begin = blocks * chunk / chunks, end = blocks * (chunk + 1) / chunks;
            for (int r = 0; r < rows; r += 2 * PAIR_ROWS) {
                const int some = rows - r < 2 * PAIR_ROWS ? rows - r : 2 * PAIR_ROWS;
                multiply_both(step, &of[part], at[part], row + r, some, begin, end, sums[part] + r * PANEL);
                if (i < parts * chunks - 1) continue;
                const float *sum = sums[0] + r * PANEL, *through = sums[parts - 1] + r * PANEL;
                if (step->product.activates) put_active(step, row + r, some, panel, sum, through);
                else put(step, row + r, some, panel, 1, sum);
            }
        }
    }
}

enum { FLUSHES = 0x8040 }; /* of MXCSR: a float below 2 to the -126 is 0, as an input and as a result */

/* Starts computing in the mode of tiles; returns the argument for `end_pairs`. */
static unsigned begin_pairs(const Step *step) {
    const unsigned before = _mm_getcsr();
    _mm_setcsr(before | FLUSHES);
    if (step->has_tiles) take_tiles();
    return before;
}
static void end_pairs(const Step *step, unsigned before) {
    if (step->has_tiles) give_tiles(); /* no thread keeps them in code outside this file */
    _mm_setcsr(before);
}
