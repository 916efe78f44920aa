/* One step of a decoder-only model over paged KV, in plain C. `baton_step` at the end follows the model's forward pass.

   `build.py` compiles it, and Python calls it through ctypes without holding the GIL. All arithmetic is float32, and each
   number has a fixed order of summation, independent of the rest of the step and of the number of threads:

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

/* ---- vectors ------------------------------------------------------------------------------------------------------ */

#if defined(__AVX512F__)
enum { LANES = 16, TILE_ROWS = 12, ATTENTION_PARTS = 4 };
typedef __m512 Vector;
INLINE Vector load(const float *p) { return _mm512_loadu_ps(p); }
INLINE void store(float *p, Vector v) { _mm512_storeu_ps(p, v); }
INLINE Vector splat(float x) { return _mm512_set1_ps(x); }
INLINE Vector multiply_add(Vector a, Vector b, Vector c) { return _mm512_fmadd_ps(a, b, c); }
INLINE Vector multiplied(Vector a, Vector b) { return _mm512_mul_ps(a, b); }
INLINE Vector added(Vector a, Vector b) { return _mm512_add_ps(a, b); }
INLINE Vector subtracted(Vector a, Vector b) { return _mm512_sub_ps(a, b); }
INLINE Vector divided(Vector a, Vector b) { return _mm512_div_ps(a, b); }
INLINE Vector larger(Vector a, Vector b) { return _mm512_max_ps(a, b); }
INLINE Vector smaller(Vector a, Vector b) { return _mm512_min_ps(a, b); }
INLINE float largest_lane(Vector v) { return _mm512_reduce_max_ps(v); }
INLINE float total_of_lanes(Vector v) { return _mm512_reduce_add_ps(v); } /* of whole numbers: any order gives the same */
INLINE Vector without_sign(Vector v) { return _mm512_abs_ps(v); }
INLINE Vector times_power(Vector a, Vector n) { /* a times 2 to the power that n's lowest bits are */
    return _mm512_castsi512_ps(_mm512_add_epi32(_mm512_castps_si512(a), _mm512_slli_epi32(_mm512_castps_si512(n), 23)));
}
INLINE Vector load_fours(const float *p, int stride) { /* four floats from each of p, p + 4 strides, p + 8 strides, ... */
    __m512 four = _mm512_castps128_ps512(_mm_loadu_ps(p));
    four = _mm512_insertf32x4(four, _mm_loadu_ps(p + 4 * stride), 1);
    four = _mm512_insertf32x4(four, _mm_loadu_ps(p + 8 * stride), 2);
    return _mm512_insertf32x4(four, _mm_loadu_ps(p + 12 * stride), 3);
}
/* Of each four floats of a and of b: a0 b0 a1 b1, a2 b2 a3 b3, a0 a1 b0 b1, a2 a3 b2 b3. */
INLINE Vector low_singles(Vector a, Vector b) { return _mm512_unpacklo_ps(a, b); }
INLINE Vector high_singles(Vector a, Vector b) { return _mm512_unpackhi_ps(a, b); }
INLINE Vector low_pairs(Vector a, Vector b) { return _mm512_shuffle_ps(a, b, 0x44); }
INLINE Vector high_pairs(Vector a, Vector b) { return _mm512_shuffle_ps(a, b, 0xEE); }
INLINE Vector of_bf16(const uint16_t *p) {
    return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_loadu_si256((const void *)p)), 16));
}
INLINE Vector of_float16(const uint16_t *p) { return _mm512_cvtph_ps(_mm256_loadu_si256((const void *)p)); }
INLINE Vector of_bytes(const int8_t *p) {
    return _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128((const void *)p)));
}
INLINE void to_bytes(int8_t *p, Vector v) { /* rounded as `rounded` does, from -128 to 127 */
    _mm_storeu_si128((void *)p, _mm512_cvtsepi32_epi8(_mm512_cvtps_epi32(v)));
}
/* Each lane holds the neighbouring values of a token that fit into it. */
INLINE Vector lower_bf16(Vector v) { return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_castps_si512(v), 16)); }
INLINE Vector upper_bf16(Vector v) {
    return _mm512_castsi512_ps(_mm512_and_si512(_mm512_castps_si512(v), _mm512_set1_epi32((int)0xffff0000)));
}
INLINE Vector byte_of(Vector v, int index) {
    return _mm512_cvtepi32_ps(_mm512_srai_epi32(_mm512_slli_epi32(_mm512_castps_si512(v), (unsigned)(24 - 8 * index)), 24));
}
INLINE Vector joined(const uint16_t *lower, const uint16_t *upper) { /* lanes of two halves, LANES of each */
    const __m512i low = _mm512_cvtepu16_epi32(_mm256_loadu_si256((const void *)lower));
    const __m512i high = _mm512_cvtepu16_epi32(_mm256_loadu_si256((const void *)upper));
    return _mm512_castsi512_ps(_mm512_or_si512(low, _mm512_slli_epi32(high, 16)));
}
INLINE Vector twice(Vector v, int upper) { /* each lane of the lower or the upper half two times */
    const __m512i lower = _mm512_set_epi32(7, 7, 6, 6, 5, 5, 4, 4, 3, 3, 2, 2, 1, 1, 0, 0);
    return _mm512_permutexvar_ps(upper ? _mm512_add_epi32(lower, _mm512_set1_epi32(8)) : lower, v);
}
#if defined(__AVX512BF16__)
/* Writes LANES halves, rounded to the nearest, of two equally near to the even one; what is smaller than 2 to the -126 is 0. */
INLINE void to_bf16(uint16_t *p, Vector v) { _mm256_storeu_si256((void *)p, (__m256i)_mm512_cvtneps_pbh(v)); }
INLINE void to_bf16_twice(uint16_t *p, Vector a, Vector b) { _mm512_storeu_si512(p, (__m512i)_mm512_cvtne2ps_pbh(b, a)); }
#else
INLINE void to_bf16(uint16_t *p, Vector v) {
    const __m512i bits = _mm512_castps_si512(v), even = _mm512_and_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(1));
    __m512i half = _mm512_srli_epi32(_mm512_add_epi32(_mm512_add_epi32(bits, _mm512_set1_epi32(0x7fff)), even), 16);
    const __mmask16 tiny = _mm512_testn_epi32_mask(bits, _mm512_set1_epi32(0x7f800000)), none = _mm512_cmpneq_ps_mask(v, v);
    half = _mm512_mask_and_epi32(half, tiny, half, _mm512_set1_epi32(0x8000));
    half = _mm512_mask_or_epi32(half, none, _mm512_srli_epi32(bits, 16), _mm512_set1_epi32(0x40));
    _mm256_storeu_si256((void *)p, _mm512_cvtepi32_epi16(half));
}
INLINE void to_bf16_twice(uint16_t *p, Vector a, Vector b) { to_bf16(p, a), to_bf16(p + LANES, b); }
#endif
INLINE Vector of_halves(const uint8_t *p, int upper) { /* LANES bytes, the lower or the upper half of each */
    const __m512 values = _mm512_set_ps(15, 14, 13, 12, 11, 10, 9, 8, 7, 6, 5, 4, 3, 2, 1, 0); /* chosen by four bits */
    __m512i bytes = _mm512_cvtepu8_epi32(_mm_loadu_si128((const void *)p));
    return _mm512_permutexvar_ps(upper ? _mm512_srli_epi32(bytes, 4) : bytes, values);
}
typedef __m512i Integers;
INLINE Integers load_bytes(const uint8_t *p) { return _mm512_loadu_si512(p); }
INLINE Integers splat_integer(int32_t x) { return _mm512_set1_epi32(x); }
INLINE Integers lower_halves(Integers v) { return _mm512_and_si512(v, _mm512_set1_epi8(15)); }
INLINE Integers upper_halves(Integers v) { return lower_halves(_mm512_srli_epi16(v, 4)); }
INLINE Integers times_256_plus(Integers v, int32_t more) {
    return _mm512_add_epi32(_mm512_slli_epi32(v, 8), splat_integer(more));
}
INLINE Vector of_integers(Integers v) { return _mm512_cvtepi32_ps(v); }
#if defined(__AVX512VNNI__)
/* Adds to each lane the products of its four unsigned bytes with four signed ones. */
INLINE Integers add_products(Integers sum, Integers bytes, Integers with) { return _mm512_dpbusd_epi32(sum, bytes, with); }
#else
INLINE Integers add_products(Integers sum, Integers bytes, Integers with) {
    Integers even = _mm512_and_si512(bytes, _mm512_set1_epi16(255)), odd = _mm512_srli_epi16(bytes, 8);
    Integers with_even = _mm512_srai_epi16(_mm512_slli_epi16(with, 8), 8), with_odd = _mm512_srai_epi16(with, 8);
    return _mm512_add_epi32(sum, _mm512_add_epi32(_mm512_madd_epi16(even, with_even), _mm512_madd_epi16(odd, with_odd)));
}
#endif
#elif defined(__AVX2__) && defined(__FMA__)
enum { LANES = 8, TILE_ROWS = 6, ATTENTION_PARTS = 2 };
typedef __m256 Vector;
INLINE Vector load(const float *p) { return _mm256_loadu_ps(p); }
INLINE void store(float *p, Vector v) { _mm256_storeu_ps(p, v); }
INLINE Vector splat(float x) { return _mm256_set1_ps(x); }
INLINE Vector multiply_add(Vector a, Vector b, Vector c) { return _mm256_fmadd_ps(a, b, c); }
INLINE Vector multiplied(Vector a, Vector b) { return _mm256_mul_ps(a, b); }
INLINE Vector added(Vector a, Vector b) { return _mm256_add_ps(a, b); }
INLINE Vector subtracted(Vector a, Vector b) { return _mm256_sub_ps(a, b); }
INLINE Vector divided(Vector a, Vector b) { return _mm256_div_ps(a, b); }
INLINE Vector larger(Vector a, Vector b) { return _mm256_max_ps(a, b); }
INLINE Vector smaller(Vector a, Vector b) { return _mm256_min_ps(a, b); }
INLINE float largest_lane(Vector v) {
    __m128 four = _mm_max_ps(_mm256_castps256_ps128(v), _mm256_extractf128_ps(v, 1));
    four = _mm_max_ps(four, _mm_movehl_ps(four, four));
    return _mm_cvtss_f32(_mm_max_ss(four, _mm_movehdup_ps(four)));
}
INLINE float total_of_lanes(Vector v) {
    __m128 four = _mm_add_ps(_mm256_castps256_ps128(v), _mm256_extractf128_ps(v, 1));
    four = _mm_add_ps(four, _mm_movehl_ps(four, four));
    return _mm_cvtss_f32(_mm_add_ss(four, _mm_movehdup_ps(four)));
}
INLINE Vector without_sign(Vector v) { return _mm256_andnot_ps(_mm256_set1_ps(-0.0f), v); }
INLINE Vector times_power(Vector a, Vector n) {
    return _mm256_castsi256_ps(_mm256_add_epi32(_mm256_castps_si256(a), _mm256_slli_epi32(_mm256_castps_si256(n), 23)));
}
INLINE Vector load_fours(const float *p, int stride) {
    return _mm256_insertf128_ps(_mm256_castps128_ps256(_mm_loadu_ps(p)), _mm_loadu_ps(p + 4 * stride), 1);
}
INLINE Vector low_singles(Vector a, Vector b) { return _mm256_unpacklo_ps(a, b); }
INLINE Vector high_singles(Vector a, Vector b) { return _mm256_unpackhi_ps(a, b); }
INLINE Vector low_pairs(Vector a, Vector b) { return _mm256_shuffle_ps(a, b, 0x44); }
INLINE Vector high_pairs(Vector a, Vector b) { return _mm256_shuffle_ps(a, b, 0xEE); }
INLINE Vector of_bf16(const uint16_t *p) {
    return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(_mm_loadu_si128((const void *)p)), 16));
}
INLINE Vector of_float16(const uint16_t *p) { return _mm256_cvtph_ps(_mm_loadu_si128((const void *)p)); }
INLINE Vector of_bytes(const int8_t *p) {
    return _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64((const void *)p)));
}
INLINE void to_bytes(int8_t *p, Vector v) {
    const __m256i whole = _mm256_cvtps_epi32(v);
    const __m128i halves = _mm_packs_epi32(_mm256_castsi256_si128(whole), _mm256_extracti128_si256(whole, 1));
    _mm_storel_epi64((void *)p, _mm_packs_epi16(halves, halves));
}
INLINE Vector lower_bf16(Vector v) { return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_castps_si256(v), 16)); }
INLINE Vector upper_bf16(Vector v) {
    return _mm256_castsi256_ps(_mm256_and_si256(_mm256_castps_si256(v), _mm256_set1_epi32((int)0xffff0000)));
}
INLINE Vector byte_of(Vector v, int index) {
    return _mm256_cvtepi32_ps(_mm256_srai_epi32(_mm256_slli_epi32(_mm256_castps_si256(v), 24 - 8 * index), 24));
}
INLINE Vector joined(const uint16_t *lower, const uint16_t *upper) {
    const __m256i low = _mm256_cvtepu16_epi32(_mm_loadu_si128((const void *)lower));
    const __m256i high = _mm256_cvtepu16_epi32(_mm_loadu_si128((const void *)upper));
    return _mm256_castsi256_ps(_mm256_or_si256(low, _mm256_slli_epi32(high, 16)));
}
INLINE Vector twice(Vector v, int upper) {
    const __m256i lower = _mm256_set_epi32(3, 3, 2, 2, 1, 1, 0, 0);
    return _mm256_permutevar8x32_ps(v, upper ? _mm256_add_epi32(lower, _mm256_set1_epi32(4)) : lower);
}
INLINE void to_bf16(uint16_t *p, Vector v) {
    const __m256i bits = _mm256_castps_si256(v), even = _mm256_and_si256(_mm256_srli_epi32(bits, 16), _mm256_set1_epi32(1));
    __m256i half = _mm256_srli_epi32(_mm256_add_epi32(_mm256_add_epi32(bits, _mm256_set1_epi32(0x7fff)), even), 16);
    const __m256i exponent = _mm256_and_si256(bits, _mm256_set1_epi32(0x7f800000));
    const __m256i sign = _mm256_and_si256(half, _mm256_set1_epi32(0x8000));
    const __m256i quiet = _mm256_or_si256(_mm256_srli_epi32(bits, 16), _mm256_set1_epi32(0x40));
    half = _mm256_blendv_epi8(half, sign, _mm256_cmpeq_epi32(exponent, _mm256_setzero_si256()));
    half = _mm256_blendv_epi8(half, quiet, _mm256_castps_si256(_mm256_cmp_ps(v, v, _CMP_UNORD_Q)));
    half = _mm256_permute4x64_epi64(_mm256_packus_epi32(half, half), 0x08);
    _mm_storeu_si128((void *)p, _mm256_castsi256_si128(half));
}
INLINE void to_bf16_twice(uint16_t *p, Vector a, Vector b) { to_bf16(p, a), to_bf16(p + LANES, b); }
INLINE Vector of_halves(const uint8_t *p, int upper) {
    __m256i bytes = _mm256_cvtepu8_epi32(_mm_loadl_epi64((const void *)p));
    return _mm256_cvtepi32_ps(upper ? _mm256_srli_epi32(bytes, 4) : _mm256_and_si256(bytes, _mm256_set1_epi32(15)));
}
typedef __m256i Integers;
INLINE Integers load_bytes(const uint8_t *p) { return _mm256_loadu_si256((const void *)p); }
INLINE Integers splat_integer(int32_t x) { return _mm256_set1_epi32(x); }
INLINE Integers lower_halves(Integers v) { return _mm256_and_si256(v, _mm256_set1_epi8(15)); }
INLINE Integers upper_halves(Integers v) { return lower_halves(_mm256_srli_epi16(v, 4)); }
INLINE Integers times_256_plus(Integers v, int32_t more) {
    return _mm256_add_epi32(_mm256_slli_epi32(v, 8), splat_integer(more));
}
INLINE Vector of_integers(Integers v) { return _mm256_cvtepi32_ps(v); }
INLINE Integers add_products(Integers sum, Integers bytes, Integers with) {
    Integers even = _mm256_and_si256(bytes, _mm256_set1_epi16(255)), odd = _mm256_srli_epi16(bytes, 8);
    Integers with_even = _mm256_srai_epi16(_mm256_slli_epi16(with, 8), 8), with_odd = _mm256_srai_epi16(with, 8);
    return _mm256_add_epi32(sum, _mm256_add_epi32(_mm256_madd_epi16(even, with_even), _mm256_madd_epi16(odd, with_odd)));
}
#else
#error "neither AVX-512 nor AVX2 with FMA"
#endif

enum { PARTS = PANEL / LANES, GROUP_PARTS = GROUP / LANES }; /* vectors of a panel's row, and of 16 lanes */

/* 16 lanes: lane j and j + 8 are added, then j and j + 4, then j and j + 2, then 0 and 1. */
INLINE float sum_of_lanes(const float *lane) {
    float eight[8], four[4];
    for (int j = 0; j < 8; j++) eight[j] = lane[j] + lane[j + 8];
    for (int j = 0; j < 4; j++) four[j] = eight[j] + eight[j + 4];
    return (four[0] + four[2]) + (four[1] + four[3]);
}

static const float LOG2_E = 1.44269504088896341f;
static const float WHOLE = 12582912.0f; /* what is added to it keeps no bits behind the point */

/* The nearest whole number, of two as near the even one; of numbers that are smaller than 2 to the 22. */
INLINE Vector rounded(Vector x) { return subtracted(added(x, splat(WHOLE)), splat(WHOLE)); }

/* e to the x, which is at most 88, as Cephes has it, within one unit of the last place; not below e to the -87. */
INLINE Vector exponential(Vector x) {
    const Vector whole = splat(WHOLE);
    x = larger(x, splat(-87.0f));
    Vector power = multiply_add(x, splat(LOG2_E), whole), n = subtracted(power, whole);
    Vector r = multiply_add(n, splat(2.12194440e-4f), multiply_add(n, splat(-0.693359375f), x));
    Vector p = multiply_add(splat(1.9875691500e-4f), r, splat(1.3981999507e-3f));
    p = multiply_add(p, r, splat(8.3334519073e-3f));
    p = multiply_add(p, r, splat(4.1665795894e-2f));
    p = multiply_add(p, r, splat(1.6666665459e-1f));
    p = multiply_add(p, r, splat(5.0000001201e-1f));
    return times_power(multiply_add(p, multiplied(r, r), added(r, splat(1.0f))), power);
}

/* 2 to the x, which is at most 127; not below 2 to the -126. What is `rough` is within a share of 3e-6 of it, else 2e-7. */
INLINE Vector power_of_two(int rough, Vector x) {
    const Vector whole = splat(WHOLE);
    x = larger(x, splat(-126.0f));
    const Vector power = added(x, whole), r = subtracted(x, subtracted(power, whole));
    Vector p;
    if (rough) {
        p = multiply_add(splat(9.5828524568e-3f), r, splat(5.5906426414e-2f));
        p = multiply_add(p, r, splat(2.4024098638e-1f));
        p = multiply_add(p, r, splat(6.9312419322e-1f));
    } else {
        p = multiply_add(splat(1.3264727253e-3f), r, splat(9.6715127858e-3f));
        p = multiply_add(p, r, splat(5.5507337445e-2f));
        p = multiply_add(p, r, splat(2.4022242083e-1f));
        p = multiply_add(p, r, splat(6.9314697760e-1f));
    }
    return times_power(multiply_add(p, r, splat(1.0f)), power);
}

INLINE Vector activated(int activation, Vector x) {
    Vector power = subtracted(splat(0.0f), x);
    if (activation == RELU_SQUARED) return multiplied(larger(x, splat(0.0f)), larger(x, splat(0.0f)));
    if (activation == GELU_TANH) { /* x (1 + tanh u) / 2 = x / (1 + e to the -2u) */
        Vector cube = multiplied(multiplied(multiplied(splat(0.044715f), x), x), x);
        power = multiplied(splat(-2.0f), multiplied(splat(0.7978845608028654f), added(x, cube)));
    }
    return divided(x, added(splat(1.0f), exponential(smaller(power, splat(88.0f)))));
}

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
