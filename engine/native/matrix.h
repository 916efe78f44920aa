/* Products y = x W of floats and of integers, by tiles of rows and panels of outputs. A part of `step.c`, which includes it. */

/* ---- products: y = x W, by tiles of rows and panels ------------------------------------------------------------------ */

INLINE Vector weight_at(int form, const Matrix *m, int64_t at, int part, Vector scale, Vector least) {
    int64_t from = at * PANEL + part * LANES; /* `at` counts rows of 32 weights, over all panels */
    switch (form) {
    case F32: case UNPACKED: return load((const float *)m->weights + from);
    case BF16: return of_bf16((const uint16_t *)m->weights + from);
    case Q8_0: return multiplied(scale, of_bytes((const int8_t *)m->weights + from));
    default: {
        const uint8_t *bytes = (const uint8_t *)m->weights + at * (PANEL / 2) + part * LANES % (PANEL / 2);
        return multiply_add(scale, of_halves(bytes, part * LANES >= PANEL / 2), least);
    }
    }
}

/* Whether a tile prefetches its weights. Unpacked ones are in cache; one or two rows of floats keep up with memory anyway. */
INLINE int fetches(int form, int rows) { return form == F32 ? rows > 2 : form != UNPACKED; }

/* Prefetches floats of an input: those that are needed 32 inputs later. Prefetching all 4 KiB of 32 inputs at once would
   exceed the CPU's outstanding loads. */
INLINE void fetch_floats(const Matrix *m, int64_t at, int part) {
    if (part * LANES % 16 == 0) /* a cache line */
        _mm_prefetch((const char *)((const float *)m->weights + (at + 32) * PANEL + part * LANES), _MM_HINT_T0);
}

/* Prefetches weights of 32 inputs of a panel in a smaller form: those that are needed about 2 KiB later. */
INLINE void fetch_weights(int form, const Matrix *m, int64_t block) {
    const int bytes = form == BF16 ? 2048 : form == Q8_0 ? 1024 : 512;
    block += bytes < 2048 ? 2048 / bytes : 1;
    UNROLL for (int i = 0; i < bytes; i += 64)
        _mm_prefetch((const char *)m->weights + block * bytes + i, _MM_HINT_T0);
    if (form == Q8_0 || form == Q4_1) _mm_prefetch((const char *)(m->scale + block * PANEL), _MM_HINT_T0);
    if (form == Q4_1) _mm_prefetch((const char *)(m->least + block * PANEL), _MM_HINT_T0);
}

/* A tile: `rows` rows of x by `vectors` vectors of weights, which start with vector `part` of a panel and may continue in
   the next ones; a row of sums is for `panels` panels. Inputs from `first` on are added to the sums of those before. Each
   combination of the five constant arguments is compiled as a separate function. */
INLINE void tile(int form, int rows, int panels, int vectors, int part, const Matrix *m, int panel, const float *x, int ldx,
                 int first, int last, float *sums) {
    const int inputs = m->inputs;
    Vector sum[MAX_TILE_ROWS][4 * PARTS], scale[4 * PARTS], least[4 * PARTS];
    UNROLL for (int r = 0; r < rows; r++)
        UNROLL for (int v = 0; v < vectors; v++)
            sum[r][v] = first ? load(sums + (r * panels * PARTS + part + v) * LANES) : splat(0.0f);
    for (int begin = first; begin < last; begin += 32) {
        UNROLL for (int v = 0; v < vectors; v++) {
            const int64_t block = (int64_t)(panel + (part + v) / PARTS) * (inputs / 32) + begin / 32;
            const int64_t at = block * PANEL + (part + v) % PARTS * LANES;
            if (form == Q8_0 || form == Q4_1) scale[v] = of_float16(m->scale + at);
            if (form == Q4_1) least[v] = of_float16(m->least + at);
            if (form != F32 && v % PARTS == 0 && fetches(form, rows)) fetch_weights(form, m, block);
        }
        const int end = begin + 32 < last ? begin + 32 : last;
        for (int k = begin; k < end; k++) {
            Vector weight[4 * PARTS];
            UNROLL for (int v = 0; v < vectors; v++) {
                const int64_t at = (int64_t)(panel + (part + v) / PARTS) * inputs + k;
                if (form == F32 && fetches(form, rows)) fetch_floats(m, at, (part + v) % PARTS);
                weight[v] = weight_at(form, m, at, (part + v) % PARTS, scale[v], least[v]);
            }
            UNROLL for (int r = 0; r < rows; r++) {
                Vector input = splat(x[(int64_t)r * ldx + k]);
                UNROLL for (int v = 0; v < vectors; v++) sum[r][v] = multiply_add(input, weight[v], sum[r][v]);
            }
        }
    }
    UNROLL for (int r = 0; r < rows; r++)
        UNROLL for (int v = 0; v < vectors; v++) store(sums + (r * panels * PARTS + part + v) * LANES, sum[r][v]);
}

/* Whole panels. */
INLINE void tile_of_panels(int form, int rows, int panels, const Matrix *m, int panel, const float *x, int ldx, float *sums) {
    tile(form, rows, panels, panels * PARTS, 0, m, panel, x, ldx, 0, m->inputs, sums);
}

/* A panel, two vectors at a time. If it has more, the others follow while its weights of 32 inputs are still in cache. */
INLINE void tiles_of_panel(int form, int rows, const Matrix *m, int panel, const float *x, int ldx, float *sums) {
    for (int begin = 0, end; begin < m->inputs; begin = end) {
        end = PARTS > 2 && begin + 32 < m->inputs ? begin + 32 : m->inputs;
        UNROLL for (int part = 0; part < PARTS; part += 2) tile(form, rows, 1, 2, part, m, panel, x, ldx, begin, end, sums);
    }
}

/* The same for a number of rows and panels known at run time; `panels` is more than 1 only for few rows. */
INLINE void tile_of(int form, int rows, int panels, const Matrix *m, int panel, const float *x, int ldx, float *sums) {
    switch (rows) {
    case 1:
        switch (panels) {
        case 4: tile_of_panels(form, 1, 4, m, panel, x, ldx, sums); return;
        case 3: tile_of_panels(form, 1, 3, m, panel, x, ldx, sums); return;
        case 2: tile_of_panels(form, 1, 2, m, panel, x, ldx, sums); return;
        default: tile_of_panels(form, 1, 1, m, panel, x, ldx, sums); return;
        }
    case 2:
        if (panels == 2) tile_of_panels(form, 2, 2, m, panel, x, ldx, sums);
        else tile_of_panels(form, 2, 1, m, panel, x, ldx, sums);
        return;
    case 3:
        if (panels == 2) tile_of_panels(form, 3, 2, m, panel, x, ldx, sums);
        else tiles_of_panel(form, 3, m, panel, x, ldx, sums);
        return;
    case 4:
        if (panels == 2) tile_of_panels(form, 4, 2, m, panel, x, ldx, sums);
        else tiles_of_panel(form, 4, m, panel, x, ldx, sums);
        return;
    case 5: tiles_of_panel(form, 5, m, panel, x, ldx, sums); return;
    case 6: tiles_of_panel(form, 6, m, panel, x, ldx, sums); return;
#if defined(__AVX512F__)
    case 7: tiles_of_panel(form, 7, m, panel, x, ldx, sums); return;
    case 8: tiles_of_panel(form, 8, m, panel, x, ldx, sums); return;
    case 9: tiles_of_panel(form, 9, m, panel, x, ldx, sums); return;
    case 10: tiles_of_panel(form, 10, m, panel, x, ldx, sums); return;
    case 11: tiles_of_panel(form, 11, m, panel, x, ldx, sums); return;
    case 12: tiles_of_panel(form, 12, m, panel, x, ldx, sums); return;
#endif
    }
}

static void tile_f32(int rows, int panels, const Matrix *m, int panel, const float *x, int ldx, float *sums) {
    tile_of(F32, rows, panels, m, panel, x, ldx, sums);
}
static void tile_unpacked(int rows, int panels, const Matrix *m, int panel, const float *x, int ldx, float *sums) {
    tile_of(UNPACKED, rows, panels, m, panel, x, ldx, sums);
}
static void tile_bf16(int rows, int panels, const Matrix *m, int panel, const float *x, int ldx, float *sums) {
    tile_of(BF16, rows, panels, m, panel, x, ldx, sums);
}
static void tile_q8_0(int rows, int panels, const Matrix *m, int panel, const float *x, int ldx, float *sums) {
    tile_of(Q8_0, rows, panels, m, panel, x, ldx, sums);
}
static void tile_q4_1(int rows, int panels, const Matrix *m, int panel, const float *x, int ldx, float *sums) {
    tile_of(Q4_1, rows, panels, m, panel, x, ldx, sums);
}

typedef void (*Tile)(int, int, const Matrix *, int, const float *, int, float *);
static const Tile TILES[] = {tile_f32, tile_bf16, tile_q8_0, tile_q4_1};

INLINE void unpack(int form, const Matrix *m, int panel, float *into) {
    for (int begin = 0; begin < m->inputs; begin += 32)
        for (int part = 0; part < PARTS; part++) {
            const int64_t at = ((int64_t)panel * (m->inputs / 32) + begin / 32) * PANEL + part * LANES;
            const Vector scale = form == BF16 ? splat(0.0f) : of_float16(m->scale + at);
            const Vector least = form == Q4_1 ? of_float16(m->least + at) : scale;
            for (int k = begin; k < begin + 32 && k < m->inputs; k++)
                store(into + k * PANEL + part * LANES,
                      weight_at(form, m, (int64_t)panel * m->inputs + k, part, scale, least));
        }
}

static void unpack_panel(const Matrix *m, int panel, float *into) {
    if (m->form == BF16) unpack(BF16, m, panel, into);
    else if (m->form == Q8_0) unpack(Q8_0, m, panel, into);
    else unpack(Q4_1, m, panel, into);
}

/* Stores a tile's sums: y = sum + bias, or y += scale * (sum + bias). */
static void put(const Step *step, int row, int rows, int panel, int panels, const float *sums) {
    const Matrix *m = step->product.matrix;
    for (int r = 0; r < rows; r++) {
        float *y = step->product.y + (int64_t)(row + r) * step->product.ldy + panel * PANEL;
        const float *sum = sums + r * panels * PANEL;
        for (int v = 0; v < panels * PARTS; v++) {
            Vector value = load(sum + v * LANES);
            if (m->bias) value = added(value, load(m->bias + panel * PANEL + v * LANES));
            if (step->product.adds)
                value = added(load(y + v * LANES), multiplied(value, splat(step->product.scale)));
            store(y + v * LANES, value);
        }
    }
}

/* ---- products of integers ------------------------------------------------------------------------------------------------ */

/* Rows of a tile. The bytes of its rows lie together for each 32 inputs: [tile][32 inputs][row of the tile][plane][32]. */
enum { DOT_ROWS = LANES == 16 ? 12 : 4 };
static int is_dot(const Matrix *m) { return m->form == DOT_Q8 || m->form == DOT_Q4 || m->form == DOT_FINE; }
INLINE int planes_of(int form) { return form == DOT_FINE ? 2 : 1; } /* bytes that an input becomes */

/* Inputs of a row as bytes, the largest of each 32 as 127 or -127; smaller ones than 2 to the -100 are 0. */
INLINE void quantize_as(int planes, const float *x, int width, int8_t *bytes, Bytes *of) {
    for (int block = 0; block < width / 32; block++, x += 32, bytes += DOT_ROWS * planes * 32, of += DOT_ROWS) {
        Vector largest = without_sign(load(x)), total = splat(0.0f);
        for (int i = LANES; i < 32; i += LANES) largest = larger(largest, without_sign(load(x + i)));
        const float most = largest_lane(largest), scale = most / 127.0f * (planes == 2 ? 1 / 256.0f : 1.0f);
        const Vector inverse = splat(most > 0x1p-100f ? 127.0f / most : 0.0f);
        for (int i = 0; i < 32; i += LANES) {
            const Vector value = multiplied(load(x + i), inverse);
            Vector whole = rounded(value);
            to_bytes(bytes + i, whole);
            if (planes == 2) {
                const Vector rest = smaller(rounded(multiplied(subtracted(value, whole), splat(256.0f))), splat(127.0f));
                to_bytes(bytes + 32 + i, rest);
                whole = multiply_add(whole, splat(256.0f), rest);
            }
            total = added(total, whole);
        }
        const float sum = total_of_lanes(total);
        *of = (Bytes){scale, scale * sum, -128 * (int32_t)sum};
    }
}

static void quantize(int form, const float *x, int width, int8_t *bytes, Bytes *of) {
    if (form == DOT_FINE) quantize_as(2, x, width, bytes, of);
    else quantize_as(1, x, width, bytes, of);
}

/* Prefetches a share of the weights of 32 inputs of the next panel: at most a cache line, so that the CPU's outstanding loads
   are not exceeded. There are 8 shares for each vector of a panel. */
INLINE void fetch_bytes(int form, const Matrix *m, int64_t block, int share) {
    const int size = form == DOT_Q4 ? 512 : 1024, at = share * (size / 8 / PARTS);
    block += m->inputs / 32;
    if (at % 64 == 0) _mm_prefetch((const char *)m->weights + block * size + at, _MM_HINT_T1);
    if (share == 1) _mm_prefetch((const char *)(m->scale + block * PANEL), _MM_HINT_T1);
    if (share == 9 && form == DOT_Q4) _mm_prefetch((const char *)(m->least + block * PANEL), _MM_HINT_T1);
}

/* A tile's inputs as bytes. */
typedef struct { const int8_t *bytes; const Bytes *of; } ByteRows;

/* A tile: `rows` rows of bytes by vector `part` of a panel's outputs. */
INLINE void dot_tile(int form, int rows, int part, const Matrix *m, int panel, const ByteRows *x, float *sums) {
    const int blocks = m->inputs / 32, size = form == DOT_Q4 ? 512 : 1024, planes = planes_of(form);
    const int8_t *bytes = x->bytes;
    const Bytes *of = x->of;
    Vector sum[DOT_ROWS];
    UNROLL for (int r = 0; r < rows; r++) sum[r] = splat(0.0f);
    for (int block = 0; block < blocks; block++, bytes += DOT_ROWS * planes * 32, of += DOT_ROWS) {
        const int64_t at = (int64_t)panel * blocks + block, outputs = at * PANEL + part * LANES;
        const uint8_t *weights = (const uint8_t *)m->weights + at * size + part * LANES * 4;
        Integers dot[DOT_ROWS];
        UNROLL for (int r = 0; r < rows; r++) dot[r] = splat_integer(form == DOT_Q8 ? of[r].offset : 0);
        UNROLL for (int plane = 0; plane < planes; plane++) {
            if (plane == 1) UNROLL for (int r = 0; r < rows; r++) dot[r] = times_256_plus(dot[r], of[r].offset);
            UNROLL for (int i = 0; i < 32; i += 4) {
                Integers weight;
                if (plane == 0) fetch_bytes(form, m, at, part * 8 + i / 4);
                if (form != DOT_Q4) weight = load_bytes(weights + i * PANEL);
                else if (i < 16) weight = lower_halves(load_bytes(weights + i * PANEL));
                else weight = upper_halves(load_bytes(weights + (i - 16) * PANEL));
                UNROLL for (int r = 0; r < rows; r++) {
                    int32_t four;
                    memcpy(&four, bytes + (r * planes + plane) * 32 + i, 4);
                    dot[r] = add_products(dot[r], weight, splat_integer(four));
                }
            }
        }
        const Vector scale = of_float16(m->scale + outputs), least = form == DOT_Q4 ? of_float16(m->least + outputs) : scale;
        UNROLL for (int r = 0; r < rows; r++) {
            sum[r] = multiply_add(of_integers(dot[r]), multiplied(scale, splat(of[r].scale)), sum[r]);
            if (form == DOT_Q4) sum[r] = multiply_add(least, splat(of[r].total), sum[r]);
        }
    }
    UNROLL for (int r = 0; r < rows; r++) store(sums + r * PANEL + part * LANES, sum[r]);
}

INLINE void dot_tiles(int form, int rows, const Matrix *m, int panel, const ByteRows *x, float *sums) {
    UNROLL for (int part = 0; part < PARTS; part++) dot_tile(form, rows, part, m, panel, x, sums);
}

/* The same for a number of rows that is known when it runs. */
INLINE void dot_tiles_of(int form, int rows, const Matrix *m, int panel, const ByteRows *x, float *sums) {
    switch (rows) {
    case 1: dot_tiles(form, 1, m, panel, x, sums); return;
    case 2: dot_tiles(form, 2, m, panel, x, sums); return;
    case 3: dot_tiles(form, 3, m, panel, x, sums); return;
    case 4: dot_tiles(form, 4, m, panel, x, sums); return;
#if defined(__AVX512F__)
    case 5: dot_tiles(form, 5, m, panel, x, sums); return;
    case 6: dot_tiles(form, 6, m, panel, x, sums); return;
    case 7: dot_tiles(form, 7, m, panel, x, sums); return;
    case 8: dot_tiles(form, 8, m, panel, x, sums); return;
    case 9: dot_tiles(form, 9, m, panel, x, sums); return;
    case 10: dot_tiles(form, 10, m, panel, x, sums); return;
    case 11: dot_tiles(form, 11, m, panel, x, sums); return;
    case 12: dot_tiles(form, 12, m, panel, x, sums); return;
#endif
    }
}

static void dot_q8(int rows, const Matrix *m, int panel, const ByteRows *x, float *sums) {
    dot_tiles_of(DOT_Q8, rows, m, panel, x, sums);
}
static void dot_q4(int rows, const Matrix *m, int panel, const ByteRows *x, float *sums) {
    dot_tiles_of(DOT_Q4, rows, m, panel, x, sums);
}
static void dot_fine(int rows, const Matrix *m, int panel, const ByteRows *x, float *sums) {
    dot_tiles_of(DOT_FINE, rows, m, panel, x, sums);
}

typedef void (*DotTiles)(int, const Matrix *, int, const ByteRows *, float *);
static const DotTiles DOT_TILES[] = {dot_q8, dot_q4, dot_fine}; /* from DOT_Q8 on */

/* Panels [first, last) for rows of the product, the first of which starts a tile. Few rows are computed panel by panel, so
   that the next panel's weights are loaded meanwhile; many rows tile by tile, so that each is read once. */
static void multiply_bytes(const Step *step, int first, int last, int row, int rows) {
    const Matrix *m = step->product.matrix;
    const int is_many = rows > 4 * DOT_ROWS, together = is_many ? last - first : 1;
    float sums[DOT_ROWS * PANEL];
    for (int begin = first; begin < last; begin += together)
        for (int r = row; r < row + rows; r += DOT_ROWS) {
            const int some = row + rows - r < DOT_ROWS ? row + rows - r : DOT_ROWS;
            const ByteRows x = {step->bytes + (int64_t)r * planes_of(m->form) * m->inputs, step->of_bytes + (int64_t)r * (m->inputs / 32)};
            for (int panel = begin; panel < begin + together; panel++) {
                DOT_TILES[m->form - DOT_Q8](some, m, panel, &x, sums);
                put(step, r, some, panel, 1, sums);
            }
        }
}
