/* Vectors of 8 or 16 floats and integers, and what is computed by them: AVX2 or AVX-512. A part of `step.c`, which includes it. */

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
