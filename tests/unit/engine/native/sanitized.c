/* Steps of a small random model with every kind of layer and weight, for the compiler's sanitizers: argv[1] threads,
   argv[2]: 0 a model as most are, 1 one with the other norms, activation and order; argv[3] the form of its pages.
   What is computed at once, in chunks and token by token must be the same bits. */
#include "step.c"
#include <stdio.h>

enum {
    FORMS = 9, LAYERS = FORMS + 2, DENSE = FORMS, EXPERTS = FORMS, WIDER = 112, HIDDEN = 64, HEADS = 6, KV_HEADS = 2, DIM = 32, INNER = 320, VOCAB = 50, BLOCK = 16, BLOCKS = 12,
    LENGTH = 90, MOST = 100
};
static const int forms[FORMS] = {F32, BF16, Q8_0, Q4_1, DOT_Q8, DOT_Q4, PAIRS, PAIRS_Q8, PAIRS_Q4};
static uint32_t state = 1;
static float number(void) {
    state = state * 1664525u + 1013904223u;
    return (float)(state >> 8) / 8388608.0f - 1.0f;
}
static float *numbers(int64_t count, float scale) {
    float *found = malloc(sizeof(float) * (size_t)count);
    for (int64_t i = 0; i < count; i++) found[i] = number() * scale;
    return found;
}

static uint16_t *float16s(int64_t count, float scale) {
    uint16_t *found = malloc(sizeof(uint16_t) * (size_t)count);
    for (int64_t i = 0; i < count; i++) found[i] = _cvtss_sh(number() * scale, 0);
    return found;
}

static int is_of_bytes(int form) { return form == Q8_0 || form == DOT_Q8 || form == DOT_FINE || form == PAIRS_Q8; }

/* Exactly as large as it says: a byte read beyond it is found. */
static Matrix matrix(int form, int outputs, int inputs, int has_bias) {
    Matrix m = {form, outputs, inputs, (outputs + PANEL - 1) / PANEL, NULL, NULL, NULL, NULL};
    const int64_t count = (int64_t)m.panels * PANEL * (form == PAIRS ? (inputs + 31) / 32 * 32 : inputs), blocks = count / 32;
    if (form == F32) m.weights = numbers(count, 0.2f);
    else if (form == BF16 || form == PAIRS) {
        uint16_t *halves = malloc(sizeof(uint16_t) * (size_t)count);
        for (int64_t i = 0; i < count; i++) {
            union { float value; uint32_t bits; } wide = {.value = number() * 0.2f};
            halves[i] = (uint16_t)(wide.bits >> 16);
        }
        m.weights = halves;
    } else {
        uint8_t *bytes = malloc((size_t)(is_of_bytes(form) ? count : count / 2));
        for (int64_t i = 0; i < (is_of_bytes(form) ? count : count / 2); i++) bytes[i] = (uint8_t)(number() * 127.0f + 128.0f);
        m.weights = bytes, m.scale = float16s(blocks, is_of_bytes(form) ? 0.002f : 0.03f);
        if (!is_of_bytes(form)) m.least = float16s(blocks, 0.2f);
    }
    if (has_bias) m.bias = numbers(m.panels * PANEL, 0.1f);
    return m;
}

/* The same weights for inputs of two bytes. */
static Matrix fine(const Matrix *codes) {
    Matrix m = *codes;
    uint8_t *bytes = malloc((size_t)(m.panels * PANEL * m.inputs));
    for (int at = 0, panel = 0; panel < m.panels; panel++)
        for (int input = 0; input < m.inputs; input += 4)
            for (int output = 0; output < PANEL; output++)
                for (int i = 0; i < 4; i++)
                    bytes[at++] = (uint8_t)(((const int8_t *)m.weights)[(panel * m.inputs + input + i) * PANEL + output] + 128);
    m.form = DOT_FINE, m.weights = bytes;
    return m;
}

static Matrix *matrices(int outputs, int inputs) { /* one of each form */
    Matrix *found = malloc(sizeof(Matrix) * EXPERTS);
    for (int e = 0; e < EXPERTS; e++)
        found[e] = matrix(inputs % 32 && forms[e] > BF16 && forms[e] != PAIRS ? F32 : forms[e], outputs, inputs, 0);
    return found;
}

static Model model;
static Step *step;
static int32_t tokens[LENGTH], begin[2], count[2], tables[2][6] = {{3, 9, 0, 7, 11, 5}, {1, 2, 4, 6, 8, 10}}, rows[MOST];

/* Computes both sequences in chunks; the logits of every token go to their place. */
static int compute(int chunk, float *logits) {
    const int width = model.head->panels * PANEL;
    float *some = malloc(sizeof(float) * MOST * (size_t)width);
    int32_t ids[MOST];
    for (int done = 0; done < LENGTH;) {
        const int end = done + chunk < LENGTH ? done + chunk : LENGTH, others = done < 20 ? 1 : 0;
        memcpy(ids, tokens + done, sizeof(int32_t) * (size_t)(end - done));
        ids[end - done] = tokens[done];
        begin[0] = done, count[0] = end - done, begin[1] = done, count[1] = 1;
        Batch batch = {1 + others, end - done + others, 6, end - done, ids, begin, count, tables[0], rows, some};
        for (int layer = 0; layer < LAYERS; layer++) {
            const int fault = baton_step(step, &batch, layer, layer + 1);
            if (fault) return fault;
        }
        memcpy(logits + (int64_t)done * width, some, sizeof(float) * (size_t)((end - done) * width));
        done = end;
    }
    free(some);
    return OK;
}

int main(int argc, char **argv) {
    (void)argc;
    const int other = atoi(argv[2]), norm = other ? 2 * HIDDEN : HIDDEN;
    Layer layers[LAYERS] = {0};
    const Experts experts = {EXPERTS, 2, WIDER, !other, matrix(BF16, EXPERTS, HIDDEN, 0),
                             matrices(other ? WIDER : 2 * 128, HIDDEN), matrices(HIDDEN, WIDER)};
    for (int l = 0; l < LAYERS; l++) {
        const int form = forms[l % FORMS]; /* a layer of each, and two with experts */
        layers[l].qkv = matrix(form, (HEADS + 2 * KV_HEADS) * DIM, HIDDEN, l % 2);
        layers[l].out = matrix(form, HIDDEN, HEADS * DIM, 0);
        if (l < DENSE) {
            layers[l].gate_up = matrix(form, (other ? 1 : 2) * INNER, HIDDEN, l % 2);
            layers[l].down = matrix(form, HIDDEN, INNER, 1);
        } else layers[l].experts = &experts;
        layers[l].query = numbers(DIM, 1.0f), layers[l].key = numbers(DIM, 1.0f);
        if (l != 2 || other) layers[l].before_attention = numbers(norm, 1.0f), layers[l].before_mlp = numbers(norm, 1.0f);
        if (l == 2 || l == 6 || l == LAYERS - 1) layers[l].after_attention = numbers(norm, 1.0f), layers[l].after_mlp = numbers(norm, 1.0f);
        layers[l].window = l % 2 ? 24 : 0, layers[l].rotates = l != 3;
    }
    Matrix head = matrix(Q8_0, VOCAB, HIDDEN, 0);
    int8_t *codes = malloc(VOCAB * HIDDEN);
    for (int i = 0; i < VOCAB * HIDDEN; i++) codes[i] = (int8_t)(number() * 127.0f);
    const int form = atoi(argv[3]);
    const int64_t stride = (int64_t)BLOCKS * KV_HEADS * 2 * BLOCK * (form == KV_F32 ? 4 * DIM : form == KV_BF16 ? 2 * DIM : DIM + 4);
    model = (Model){
        .layers = LAYERS, .hidden = HIDDEN, .heads = HEADS, .kv_heads = KV_HEADS, .head_dim = DIM, .rotary_dim = DIM,
        .intermediate = INNER, .vocab = VOCAB, .activation = other ? RELU_SQUARED : GELU_TANH, .norm_kind = other,
        .gated = !other, .parallel = other, .rotates_neighbours = other, .clip = other ? 0.4f : 0.0f, .qk_norm = QK_BY_HEAD, .block_size = BLOCK,
        .blocks = BLOCKS, .max_len = 96, .max_tokens = MOST, .threads = atoi(argv[1]), .embedding_form = Q8_0,
        .eps = 1e-5f, .embedding_scale = 2.0f, .attention_scale = 0.2f, .residual_scale = 0.5f, .logits_divisor = 2.0f,
        .embedding = codes, .embedding_codes_scale = numbers(VOCAB * HIDDEN / 32, 0.01f), .cos = numbers(96 * DIM / 2, 1.0f), .sin = numbers(96 * DIM / 2, 1.0f),
        .norm = numbers(norm, 1.0f), .layer = layers, .head = &head, .kv = malloc((size_t)(LAYERS * stride)),
        .layer_stride = stride, .kv_form = form,
    };
    for (int i = 0; i < LENGTH; i++) tokens[i] = (i * 7 + 3) % VOCAB;
    for (int i = 0; i < MOST; i++) rows[i] = i;
    memset(model.kv, 0xff, (size_t)(LAYERS * stride)); /* of others: no numbers in any form */
    step = baton_open(&model);
    const size_t width = (size_t)head.panels * PANEL;
    float *expected = malloc(sizeof(float) * LENGTH * width), *found = malloc(sizeof(float) * LENGTH * width);
    const int chunks[] = {90, 1, 2, 3, 17, 40};
    for (int i = 0; i < 6; i++) {
        if (compute(chunks[i], i ? found : expected)) return 2;
        if (i && memcmp(found, expected, sizeof(float) * LENGTH * width)) return printf("chunks of %d differ\n", chunks[i]), 3;
    }
    const int had_tiles = step->has_tiles; /* what is computed with them, where the CPU has some, is the same without */
    step->has_tiles = 0;
    for (int i = 0; had_tiles && i < 2; i++) {
        if (compute(chunks[i], found)) return 13;
        if (memcmp(found, expected, sizeof(float) * LENGTH * width)) return printf("without tiles chunks of %d differ\n", chunks[i]), 14;
    }
    step->has_tiles = had_tiles;
    for (size_t i = 0; i < LENGTH * width; i++)
        if (i % width < VOCAB && !isfinite(expected[i])) return printf("logit %zu is no number\n", i), 4;
    const Matrix fine_head = fine(&head);
    float largest = 0.0f, *fine_logits = malloc(sizeof(float) * LENGTH * width);
    model.head = &fine_head;
    for (int i = 0; i < 3; i++) {
        if (compute(chunks[i], i ? found : fine_logits)) return 10;
        if (i && memcmp(found, fine_logits, sizeof(float) * LENGTH * width)) return printf("fine chunks of %d differ\n", chunks[i]), 11;
    }
    for (size_t i = 0; i < LENGTH * width; i++)
        if (i % width < VOCAB) largest = fmaxf(largest, fabsf(expected[i]));
    for (size_t i = 0; i < LENGTH * width; i++)
        if (i % width < VOCAB && !(fabsf(fine_logits[i] - expected[i]) < 2e-4f * largest)) return printf("logit %zu is too coarse\n", i), 12;
    int32_t far[] = {95}, two[] = {2}, wrong[] = {VOCAB}, beyond[6] = {3, 9, 0, 7, 11, BLOCKS};
    Batch batch = {1, 1, 6, 1, tokens, far, two, tables[0], rows, found};
    if (baton_step(step, &batch, 0, LAYERS) != TOO_LONG) return 5;
    batch.begin = begin, begin[0] = 80, count[0] = 1, batch.count = count, batch.tables = beyond;
    if (baton_step(step, &batch, 0, LAYERS) != NO_SUCH_BLOCK) return 6;
    batch.tables = tables[0], batch.token_ids = wrong;
    if (baton_step(step, &batch, 0, LAYERS) != NO_SUCH_TOKEN) return 7;
    batch.token_ids = tokens, rows[0] = 1;
    if (baton_step(step, &batch, 0, LAYERS) != NO_SUCH_ROW) return 8;
    if (baton_step(step, &batch, 0, LAYERS + 1) != NO_SUCH_LAYER) return 9;
    baton_close(step);
    puts("the same bits");
    return 0;
}
