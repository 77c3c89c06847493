// Layers, forward and backward, with every shape a template constant.
//
// A block is LANES samples side by side: an activation of F features is V[F], one lane per sample, and a
// chunk of `nb` blocks is V[nb][F]. Features are in PyTorch's order (channel, row, column), so flattening
// costs nothing. Gradients of parameters are sums over a whole chunk, written (`add` false) or added once
// per element, so that a chunk computed on its own and added later gives the same bits.
#include <cmath>
#include <cstdint>
#include <cstring>

#ifndef LANES
#define LANES 8
#endif
#ifdef __AVX512F__
#define ACCUMULATORS 25  // of 32 vector registers
#else
#define ACCUMULATORS 12  // of 16
#endif
#define UNROLL _Pragma("GCC unroll 32")
#define INLINE static inline __attribute__((always_inline))
#define OP static __attribute__((noinline))

typedef float V __attribute__((vector_size(4 * LANES)));
typedef float VU __attribute__((vector_size(4 * LANES), aligned(4)));
typedef int32_t VI __attribute__((vector_size(4 * LANES)));

INLINE V splat(float a) { return a - V{}; }
INLINE V load(const float* p) { return *(const VU*)p; }
INLINE void store(float* p, V v) { *(VU*)p = v; }
INLINE V pick(VI mask, V a, V b) { return (V)((mask & (VI)a) | (~mask & (VI)b)); }
INLINE V keep(VI mask, V a) { return (V)(mask & (VI)a); }
INLINE V max(V a, V b) { return a > b ? a : b; }  // b where either is not a number

INLINE float total(V v) {
    float s[LANES];
    std::memcpy(s, &v, sizeof s);
    UNROLL for (int half = LANES / 2; half; half /= 2)
        UNROLL for (int i = 0; i < half; i++) s[i] += s[i + half];
    return s[0];
}

INLINE void put(float* to, float value, bool add) { *to = add ? *to + value : value; }

// LANES x LANES, in place: log2(LANES) rounds of a perfect shuffle of rows r and r + LANES / 2.
INLINE void transpose(V* a) {
#ifdef __clang__
#define SHUFFLE(a, b, ...) __builtin_shufflevector(a, b, __VA_ARGS__)
#else
#define SHUFFLE(a, b, ...) __builtin_shuffle(a, b, VI{__VA_ARGS__})
#endif
#if LANES == 8
#define SHUFFLE_LOW(a, b) SHUFFLE(a, b, 0, 8, 1, 9, 2, 10, 3, 11)
#define SHUFFLE_HIGH(a, b) SHUFFLE(a, b, 4, 12, 5, 13, 6, 14, 7, 15)
#else
#define SHUFFLE_LOW(a, b) SHUFFLE(a, b, 0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23)
#define SHUFFLE_HIGH(a, b) SHUFFLE(a, b, 8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31)
#endif
    constexpr int half = LANES / 2;
    V b[LANES];
    UNROLL for (int round = 1; round < LANES; round *= 2) {
        UNROLL for (int r = 0; r < half; r++) {
            b[2 * r] = SHUFFLE_LOW(a[r], a[r + half]);
            b[2 * r + 1] = SHUFFLE_HIGH(a[r], a[r + half]);
        }
        UNROLL for (int r = 0; r < LANES; r++) a[r] = b[r];
    }
}

// F numbers of each row, from `first` on, one row per lane, into V[F].
template <int F>
OP void gather(const float* const* rows, V* out, int first = 0) {
    int f = 0;
    for (; f + LANES <= F; f += LANES) {
        V t[LANES];
        UNROLL for (int l = 0; l < LANES; l++) t[l] = load(rows[l] + first + f);
        transpose(t);
        UNROLL for (int l = 0; l < LANES; l++) out[f + l] = t[l];
    }
    for (; f < F; f++)
        for (int l = 0; l < LANES; l++) ((float*)(out + f))[l] = rows[l][first + f];
}

constexpr int round_up(int n) { return (n + LANES - 1) / LANES * LANES; }

// V[F] into LANES rows of round_up(F) numbers.
template <int F>
static void scatter(const V* in, float* rows) {
    for (int f = 0; f < F; f += LANES) {
        V t[LANES];
        UNROLL for (int l = 0; l < LANES; l++) t[l] = f + l < F ? in[f + l] : V{};
        transpose(t);
        UNROLL for (int l = 0; l < LANES; l++) *(V*)(rows + l * round_up(F) + f) = t[l];
    }
}

// exp to about one unit in the last place (the polynomial of Cephes), e^-87 at the least.
INLINE V exp(V x) {
    x = pick(x < -87.f, splat(-87.f), pick(x > 88.f, splat(88.f), x));
    V n = (x * 1.44269504088896341f + 12582912.f) - 12582912.f;
    V r = (x - n * 0.693359375f) + n * 2.12194440e-4f;
    V p = splat(1.9875691500e-4f);
    p = p * r + 1.3981999507e-3f;
    p = p * r + 8.3334519073e-3f;
    p = p * r + 4.1665795894e-2f;
    p = p * r + 1.6666665459e-1f;
    p = p * r + 5.0000001201e-1f;
    p = p * r * r + r + 1.f;
    VI e = (__builtin_convertvector(n, VI) + 127) << 23;
    return p * (V)e;
}

// log of positive normal numbers, to about one unit in the last place (Cephes again).
INLINE V log(V x) {
    VI bits = (VI)x - 0x3f3504f3;  // so that the fraction lies in [sqrt(1/2), sqrt(2))
    V e = __builtin_convertvector(bits >> 23, V);
    V f = (V)((bits & 0x7fffff) + 0x3f3504f3) - 1.f, z = f * f;
    V p = splat(7.0376836292e-2f);
    p = p * f - 1.1514610310e-1f;
    p = p * f + 1.1676998740e-1f;
    p = p * f - 1.2420140846e-1f;
    p = p * f + 1.4249322787e-1f;
    p = p * f - 1.6668057665e-1f;
    p = p * f + 2.0000714765e-1f;
    p = p * f - 2.4999993993e-1f;
    p = p * f + 3.3333331174e-1f;
    return (f + (p * f * z + e * -2.12194440e-4f - z * 0.5f)) + e * 0.693359375f;
}

INLINE V tanh(V x) {
    V a = (V)((VI)x & 0x7fffffff), z = x * x;
    V p = splat(-5.70498872745e-3f);
    p = p * z + 2.06390887954e-2f;
    p = p * z - 5.37397155531e-2f;
    p = p * z + 1.33314422036e-1f;
    p = p * z - 3.33332819422e-1f;
    V far = 1.f - 2.f / (exp(2.f * a) + 1.f);
    far = (V)((VI)far | ((VI)x & (VI)splat(-0.f)));
    return pick(a < 0.625f, p * z * x + x, far);
}

INLINE V sigmoid(V x) { return 1.f / (1.f + exp(-x)); }

// f(0) + ... + f(n - 1): four sums at a time, since one alone waits for itself, in short runs, since rounding grows.
template <class F>
INLINE V sum(int n, F f) {
    V all = {};
    for (int from = 0; from < n; from += 64) {
        V s[4] = {};
        int k = from, end = from + 64 < n ? from + 64 : n;
        for (; k + 4 <= end; k += 4) UNROLL for (int j = 0; j < 4; j++) s[j] += f(k + j);
        for (; k < end; k++) s[0] += f(k);
        all += (s[0] + s[1]) + (s[2] + s[3]);
    }
    return all;
}

// How to cut `n` outputs by `m` others into tiles whose sums stay in registers.
struct Tile {
    int n, m;
};

// The cheapest n x m tile of unit products: a fused multiply-add costs 1, a load 1, starting a tile `start`.
constexpr Tile best_tile(int N, int M, int each = 1, int start = 2) {
    Tile best{1, 1};
    double least = 1e300;
    for (int n = 1; n <= N && n <= 12; n++)
        for (int m = 1; m <= M && m <= 12; m++) {
            if (n * m * each > ACCUMULATORS && n * m > 1) continue;
            double sum = 0;
            for (int tail_n = 0; tail_n < 2; tail_n++)
                for (int tail_m = 0; tail_m < 2; tail_m++) {
                    int a = tail_n ? N % n : n, b = tail_m ? M % m : m;
                    double tiles = double(tail_n ? a > 0 : N / n) * (tail_m ? b > 0 : M / m);
                    double sums = a * b * each, loads = a + b * each;
                    double cycles = sums < 8 ? 8 : sums;  // a chain of additions hides behind seven others
                    sum += tiles * ((cycles > loads ? cycles : loads) + 0.15 * loads + start * 0.5);
                }
            if (sum < least) least = sum, best = {n, m};
        }
    return best;
}

// Linear ----------------------------------------------------------------------------------------------------

template <int I, int O>
struct Linear {
    static constexpr int in_size = I, out_size = O;
    static constexpr int IR = round_up(I), OR = round_up(O);

    // out[n][c] = base[c] + sum over r of in[n][r] w[r SR + c SC], for M blocks and N columns from c on; rows lie FR
    // apart in a block that is read, columns TC in one that is written.
    template <int N, int M, int R, int C, int SR, int SC, bool ADD, int FR, int TC>
    INLINE void block(const V* in, const float* w, const float* base, V* out, int64_t from, int64_t to) {
        V acc[N][M];
        UNROLL for (int c = 0; c < N; c++)
            UNROLL for (int n = 0; n < M; n++) acc[c][n] = base ? splat(base[c]) : V{};
        for (int r = 0; r < R; r++) {
            V v[M];
            UNROLL for (int n = 0; n < M; n++) v[n] = in[n * from + r * FR];
            UNROLL for (int c = 0; c < N; c++) {
                V a = splat(w[r * SR + c * SC]);
                UNROLL for (int n = 0; n < M; n++) acc[c][n] += v[n] * a;
            }
        }
        UNROLL for (int c = 0; c < N; c++)
            UNROLL for (int n = 0; n < M; n++) {
                V* at = out + n * to + c * TC;
                *at = ADD ? *at + acc[c][n] : acc[c][n];
            }
    }

    template <int M, int R, int C, int SR, int SC, bool ADD, int FR, int TC>
    static void columns(const V* in, const float* w, const float* base, V* out, int64_t from, int64_t to) {
        constexpr int most = ACCUMULATORS / M < 12 ? ACCUMULATORS / M : 12, step = most < C ? most : C;
        constexpr int whole = C / step * step;
        for (int c = 0; c < whole; c += step)
            block<step, M, R, C, SR, SC, ADD, FR, TC>(in, w + c * SC, base ? base + c : base, out + c * TC, from, to);
        if constexpr (C % step != 0)
            block<C % step, M, R, C, SR, SC, ADD, FR, TC>(in, w + whole * SC, base ? base + whole : base, out + whole * TC,
                                                         from, to);
    }

    // Block n is read at in + n * from and written at out + n * to.
    template <int R, int C, int SR, int SC, bool ADD, int FR = 1, int TC = 1>
    OP void run(const V* in, const float* w, const float* base, V* out, int nb, int64_t from = R, int64_t to = C) {
        for (; nb >= 4; nb -= 4, in += 4 * from, out += 4 * to)
            columns<4, R, C, SR, SC, ADD, FR, TC>(in, w, base, out, from, to);
        if (nb == 3) columns<3, R, C, SR, SC, ADD, FR, TC>(in, w, base, out, from, to);
        if (nb == 2) columns<2, R, C, SR, SC, ADD, FR, TC>(in, w, base, out, from, to);
        if (nb == 1) columns<1, R, C, SR, SC, ADD, FR, TC>(in, w, base, out, from, to);
    }

    OP void forward(const V* x, const float* w, const float* b, V* y, int nb) {
        run<I, O, 1, I, false>(x, w, b, y, nb);
    }

    // N outputs of LANES samples whose rows are whole vectors: sums along the rows, turned at the end.
    template <int N>
    INLINE void dot(const float* const* x, const float* w, const float* b, V* y) {
        V acc[N][LANES];
        UNROLL for (int o = 0; o < N; o++)
            UNROLL for (int l = 0; l < LANES; l++) acc[o][l] = V{};
        for (int i = 0; i < I; i += LANES) {
            V c[N];
            UNROLL for (int o = 0; o < N; o++) c[o] = load(w + o * I + i);
            UNROLL for (int l = 0; l < LANES; l++) {
                V v = load(x[l] + i);
                UNROLL for (int o = 0; o < N; o++) acc[o][l] += v * c[o];
            }
        }
        UNROLL for (int o = 0; o < N; o++) {
            transpose(acc[o]);
            V sum = acc[o][0];
            UNROLL for (int l = 1; l < LANES; l++) sum += acc[o][l];
            y[o] = b ? sum + b[o] : sum;
        }
    }

    // From rows of the table to V[O], without turning the inputs: for few outputs.
    OP void forward_rows(const float* const* x, const float* w, const float* b, V* y, int nb) {
        constexpr int most = LANES <= 8 && ACCUMULATORS > 16 ? 2 : 1, step = O < most ? O : most;
        for (int n = 0; n < nb; n++, x += LANES, y += O) {
            for (int o = 0; o + step <= O; o += step) dot<step>(x, w + o * I, b ? b + o : b, y + o);
            if constexpr (O % step != 0) dot<1>(x, w + (O - 1) * I, b ? b + O - 1 : b, y + O - 1);
        }
    }

    template <bool ADD>
    OP void backward_input(const V* dy, const float* w, V* dx, int nb) {
        run<O, I, I, 1, ADD>(dy, w, nullptr, dx, nb);
    }

    template <int N, int M>
    INLINE void weight_block(const float* const* x, const float* dy, int samples, float* dw, int tail, bool add) {
        V acc[N][M];
        UNROLL for (int o = 0; o < N; o++)
            UNROLL for (int i = 0; i < M; i++) acc[o][i] = V{};
        for (int s = 0; s < samples; s++) {
            V v[M];
            UNROLL for (int i = 0; i < M; i++) v[i] = load(x[s] + i * LANES);
            UNROLL for (int o = 0; o < N; o++) {
                V g = splat(dy[s * OR + o]);
                UNROLL for (int i = 0; i < M; i++) acc[o][i] += v[i] * g;
            }
        }
        UNROLL for (int o = 0; o < N; o++)
            UNROLL for (int i = 0; i < M; i++) {
                float* to = dw + o * I + i * LANES;
                if (tail && i == M - 1) {
                    for (int l = 0; l < tail; l++) put(to + l, ((float*)&acc[o][i])[l], add);
                } else {
                    store(to, add ? load(to) + acc[o][i] : acc[o][i]);
                }
            }
    }

    static constexpr Tile tile = best_tile(O, IR / LANES, 1, 4);

    template <int M>
    OP void weight_columns(const float* const* x, const float* dy, int samples, float* dw, int tail, bool add) {
        constexpr int whole = O / tile.n * tile.n;
        for (int o = 0; o < whole; o += tile.n)
            weight_block<tile.n, M>(x, dy + o, samples, dw + o * I, tail, add);
        if constexpr (O % tile.n != 0)
            weight_block<O % tile.n, M>(x, dy + whole, samples, dw + whole * I, tail, add);
    }

    // Where the rows of block n start: the blocks from `full` on have only so many samples, and the next block writes over
    // what the scatter of one writes beyond them.
    INLINE int start(int n, int full, int used) { return n < full ? n * LANES : full * LANES + (n - full) * used; }

    // x: pointers to the samples' rows, each readable to IR numbers, or to I where I is IR.
    OP void weight_rows(const float* const* x, const V* dy, float* dw, float* dyt, int nb, int samples, bool add,
                        int64_t step = O, int full = 1 << 30, int used = LANES) {
        for (int n = 0; n < nb; n++) scatter<O>(dy + n * step, dyt + start(n, full, used) * OR);
        constexpr int vectors = IR / LANES, whole = vectors / tile.m * tile.m, rest = vectors % tile.m;
        const float* at[samples];
        for (int s = 0; s < samples; s++) at[s] = x[s];
        for (int i = 0; i < whole; i += tile.m) {
            weight_columns<tile.m>(at, dyt, samples, dw + i * LANES, !rest && i + tile.m == whole ? I % LANES : 0, add);
            for (int s = 0; s < samples; s++) at[s] += tile.m * LANES;
        }
        if constexpr (rest != 0) weight_columns<rest>(at, dyt, samples, dw + whole * LANES, I % LANES, add);
    }

    OP void bias(const V* dy, float* db, int nb, int64_t step, bool add) {
        for (int o = 0; o < O; o++) {
            V s = {};
            for (int n = 0; n < nb; n++) s += dy[n * step + o];
            put(db + o, total(s), add);
        }
    }

    // xs and ys: room for the inputs and the gradients of nb blocks with samples as rows, IR and OR numbers each.
    OP void weight(const V* x, const V* dy, float* dw, V* xs, V* ys, int nb, int samples, bool add, int64_t step_x = I,
                   int64_t step_y = O, int full = 1 << 30, int used = LANES) {
        float* xt = (float*)xs;
        const float* rows[nb * LANES];
        for (int n = 0; n < nb; n++) scatter<I>(x + n * step_x, xt + start(n, full, used) * IR);
        for (int s = 0; s < nb * LANES; s++) rows[s] = xt + s * IR;
        weight_rows(rows, dy, dw, (float*)ys, nb, samples, add, step_y, full, used);
    }

    // The same for many blocks, added to dw tile by tile, so that what is turned stays in the cache.
    static void weight_tiles(const V* x, const V* dy, float* dw, V* xs, V* ys, int nb, int64_t step_x = I,
                             int64_t step_y = O, int full = 1 << 30, int used = LANES) {
        for (int at = 0; at < nb; at += SEQ_TILE) {
            int n = nb - at < SEQ_TILE ? nb - at : SEQ_TILE, first = full - at < 0 ? 0 : full - at;
            weight(x + at * step_x, dy + at * step_y, dw, xs, ys, n, start(n, first, used), true, step_x, step_y, first, used);
        }
    }

    // For `each` rows of every sample: empty places of the last samples' blocks are left out.
    static void weight_sequence(const V* x, const V* dy, float* dw, V* xs, V* ys, int nb, int each, int samples) {
        weight_tiles(x, dy, dw, xs, ys, nb * each, I, O, samples / LANES * each, samples % LANES);
    }
};

// GroupNorm -------------------------------------------------------------------------------------------------

template <int C, int HW, int GROUPS>
struct GroupNorm {
    static constexpr int size = C * HW, each = size / GROUPS, channels = C / GROUPS;

    // stats: mean and 1 / deviation of each group of each block.
    OP void forward(const V* x, const float* w, const float* b, V* y, V* stats, float eps, int nb) {
        for (int g = 0; g < nb * GROUPS; g++) {
            const V* from = x + g * each;
            V mean = sum(each, [=](int k) { return from[k]; }) * (1.f / each);
            V var = sum(each, [=](int k) { return (from[k] - mean) * (from[k] - mean); }) * (1.f / each) + eps;
            V scale;
            for (int l = 0; l < LANES; l++) scale[l] = 1.f / std::sqrt(var[l]);
            stats[2 * g] = mean, stats[2 * g + 1] = scale;
            for (int c = 0; c < channels; c++) {
                int channel = g % GROUPS * channels + c;
                V a = scale * (w ? w[channel] : 1.f), z = splat(b ? b[channel] : 0.f);
                for (int k = c * HW; k < (c + 1) * HW; k++) y[g * each + k] = (from[k] - mean) * a + z;
            }
        }
    }

    template <bool ADD, bool INPUT>
    OP void backward(const V* x, const float* w, const V* stats, const V* dy, V* dx, float* dw, float* db, V* sums,
                     int nb, bool add) {
        V *sum_w = sums, *sum_b = sums + C;
        std::memset((void*)sums, 0, sizeof(V) * 2 * C);
        for (int g = 0; g < nb * GROUPS; g++) {
            const V *from = x + g * each, *grad = dy + g * each;
            V mean = stats[2 * g], scale = stats[2 * g + 1], all = {}, along = {};
            for (int c = 0; c < channels; c++) {
                int channel = g % GROUPS * channels + c;
                const V *xs = from + c * HW, *gs = grad + c * HW;
                V s = sum(HW, [=](int k) { return gs[k]; });
                V t = sum(HW, [=](int k) { return gs[k] * ((xs[k] - mean) * scale); });
                sum_b[channel] += s, sum_w[channel] += t;
                all += s * (w ? w[channel] : 1.f), along += t * (w ? w[channel] : 1.f);
            }
            if (!INPUT) continue;
            all *= 1.f / each, along *= 1.f / each;
            for (int c = 0; c < channels; c++) {
                float a = w ? w[g % GROUPS * channels + c] : 1.f;
                for (int k = c * HW; k < (c + 1) * HW; k++) {
                    V v = scale * (grad[k] * a - all - (from[k] - mean) * scale * along);
                    dx[g * each + k] = ADD ? dx[g * each + k] + v : v;
                }
            }
        }
        for (int c = 0; c < C; c++) {
            if (dw) put(dw + c, total(sum_w[c]), add);
            if (db) put(db + c, total(sum_b[c]), add);
        }
    }
};

// BatchNorm -------------------------------------------------------------------------------------------------

// Over the samples of a chunk, which is the whole batch, and the HW places of each of C channels.
template <int C, int HW>
struct BatchNorm {
    static constexpr int size = C * HW;

    // f(place, which lanes are samples) for a channel's places: a full last block repeats its last sample.
    template <class F>
    INLINE void places(int c, int samples, int nb, F f) {
        for (int n = 0; n < nb; n++) {
            VI in;
            for (int l = 0; l < LANES; l++) in[l] = n * LANES + l < samples ? -1 : 0;
            for (int k = 0; k < HW; k++) f(n * size + c * HW + k, in);
        }
    }

    // A channel's sum of f(place) over samples and places.
    template <class F>
    INLINE float over(int c, int samples, int nb, F f) {
        V all = {};
        for (int n = 0; n < nb; n++) {
            VI in;
            for (int l = 0; l < LANES; l++) in[l] = n * LANES + l < samples ? -1 : 0;
            all += keep(in, sum(HW, [=](int k) { return f(n * size + c * HW + k); }));
        }
        return total(all);
    }

    // stats: mean, 1 / deviation and variance of each channel.
    OP void forward(const V* x, const float* w, const float* b, const float* mean, const float* var, V* y, V* stats,
                    float eps, bool train, int samples, int nb) {
        for (int c = 0; c < C; c++) {
            float m = mean[c], v = var[c];
            if (train) {
                float share = 1.f / (float(samples) * HW);
                m = over(c, samples, nb, [=](int k) { return x[k]; }) * share;
                v = over(c, samples, nb, [=](int k) { return (x[k] - m) * (x[k] - m); }) * share;
            }
            float scale = 1.f / std::sqrt(v + eps);
            stats[3 * c] = splat(m), stats[3 * c + 1] = splat(scale), stats[3 * c + 2] = splat(v);
            float a = scale * (w ? w[c] : 1.f), z = b ? b[c] : 0.f;
            for (int n = 0; n < nb; n++)
                for (int k = n * size + c * HW; k < n * size + (c + 1) * HW; k++) y[k] = (x[k] - m) * a + z;
        }
    }

    // `mean` and `var` are the running ones before, `new_mean` and `new_var` take those after.
    template <bool ADD, bool INPUT>
    OP void backward(const V* x, const float* w, const float* mean, const float* var, const V* stats, const V* dy, V* dx,
                     float* dw, float* db, float* new_mean, float* new_var, float momentum, int samples, int nb, bool add) {
        const float count = float(samples) * HW;
        for (int c = 0; c < C; c++) {
            V m = stats[3 * c], scale = stats[3 * c + 1];
            float s = over(c, samples, nb, [=](int k) { return dy[k]; });
            float t = over(c, samples, nb, [=](int k) { return dy[k] * ((x[k] - m) * scale); });
            if (dw) put(dw + c, t, add);
            if (db) put(db + c, s, add);
            float spread = stats[3 * c + 2][0] * (count > 1 ? count / (count - 1) : 1.f);
            new_mean[c] = mean[c] + momentum * (m[0] - mean[c]);
            new_var[c] = var[c] + momentum * (spread - var[c]);
            if (!INPUT) continue;
            V a = scale * (w ? w[c] : 1.f);
            places(c, samples, nb, [=](int k, VI in) {
                V g = keep(in, a * (dy[k] - s / count - (x[k] - m) * scale * (t / count)));
                dx[k] = ADD ? dx[k] + g : g;
            });
        }
    }
};

// Elementwise -----------------------------------------------------------------------------------------------

struct Relu {
    INLINE V value(V x) { return max(V{}, x); }
    INLINE V slope(V y, V g) { return keep(y > 0.f, g); }
};

struct Relu6 {
    INLINE V value(V x) { return pick(x > 6.f, V{} + 6.f, max(V{}, x)); }
    INLINE V slope(V y, V g) { return keep((y > 0.f) & (y < 6.f), g); }
};

INLINE float from_bits(int32_t bits) {
    float f;
    std::memcpy(&f, &bits, sizeof f);
    return f;
}

template <int32_t BITS>
struct LeakyRelu {
    INLINE V value(V x) { return pick(x > 0.f, x, x * from_bits(BITS)); }
    INLINE V slope(V y, V g) { return pick(y > 0.f, g, g * from_bits(BITS)); }
};

struct Tanh {
    INLINE V value(V x) { return tanh(x); }
    INLINE V slope(V y, V g) { return g * (1.f - y * y); }
};

struct Sigmoid {
    INLINE V value(V x) { return sigmoid(x); }
    INLINE V slope(V y, V g) { return g * (y * (1.f - y)); }
};

template <class F, int N>
struct Unary {
    OP void forward(const V* x, V* y, int nb) {
        for (int k = 0; k < N * nb; k++) y[k] = F::value(x[k]);
    }
    template <bool ADD>
    OP void backward(const V* y, const V* dy, V* dx, int nb) {
        for (int k = 0; k < N * nb; k++) dx[k] = ADD ? dx[k] + F::slope(y[k], dy[k]) : F::slope(y[k], dy[k]);
    }
};

// Functions of two numbers, and their slopes by each, times g: what Binary and BinaryParam take.
struct Add {
    INLINE V value(V a, V b) { return a + b; }
    template <int I>
    INLINE V slope(V, V, V, V g) { return g; }
};

struct Mul {
    INLINE V value(V a, V b) { return a * b; }
    template <int I>
    INLINE V slope(V a, V b, V, V g) { return (I ? a : b) * g; }
};

struct Div {
    INLINE V value(V a, V b) { return a / b; }
    template <int I>
    INLINE V slope(V, V b, V y, V g) { return (I ? -g * y : g) / b; }
};

// Equals share the gradient.
template <bool LARGER>
struct Extreme {
    INLINE V value(V a, V b) { return pick(LARGER ? a > b : a < b, a, b); }
    template <int I>
    INLINE V slope(V a, V b, V, V g) {
        V mine = I ? b : a, other = I ? a : b;
        return keep(LARGER ? mine >= other : mine <= other, pick(mine == other, g * 0.5f, g));
    }
};
typedef Extreme<true> Max;
typedef Extreme<false> Min;

template <class F, int N>
struct Binary {
    OP void forward(const V* a, const V* b, V* y, int nb) {
        for (int k = 0; k < N * nb; k++) y[k] = F::value(a[k], b[k]);
    }
    template <int I, bool ADD>
    OP void backward(const V* a, const V* b, const V* y, const V* dy, V* dx, int nb) {
        for (int k = 0; k < N * nb; k++) {
            V g = F::template slope<I>(a[k], b[k], y[k], dy[k]);
            dx[k] = ADD ? dx[k] + g : g;
        }
    }
};

// Each row and the same N numbers.
template <class F, int N>
struct BinaryParam {
    OP void forward(const V* x, const float* w, V* y, int rows) {
        for (int64_t r = 0; r < rows; r++)
            for (int k = 0; k < N; k++) y[r * N + k] = F::value(x[r * N + k], splat(w[k]));
    }
    template <bool ADD>
    OP void backward(const V* x, const float* w, const V* dy, V* dx, float* dw, int rows, bool add) {
        for (int64_t r = 0; dx && r < rows; r++)
            for (int k = 0; k < N; k++) {
                V g = F::template slope<0>(x[r * N + k], splat(w[k]), V{}, dy[r * N + k]);
                dx[r * N + k] = ADD ? dx[r * N + k] + g : g;
            }
        for (int k = 0; dw && k < N; k++) {
            V s = {};
            for (int64_t r = 0; r < rows; r++)
                s += F::template slope<1>(x[r * N + k], splat(w[k]), V{}, dy[r * N + k]);
            put(dw + k, total(s), add);
        }
    }
};

// Losses: one number per sample into `loss`; its gradient times `share` into dz -----------------------------

// Classes of T places, [O][T]; the mean over them.
template <int O, int T>
struct CrossEntropy {
    typedef int64_t Target;
    static constexpr int targets = T;

    static bool valid(const Target* t) {
        for (int s = 0; s < T; s++)
            if (t[s] < 0 || t[s] >= O) return false;
        return true;
    }

    // `dz` may be null. `best` takes the first largest output of the last place.
    OP void run(const V* z, const Target* const* t, V share, float* loss, V* dz, int64_t* best) {
        for (int l = 0; l < LANES; l++) loss[l] = 0;
        for (int s = 0; s < T; s++) place(z + s, t, s, share * (1.f / T), loss, dz ? dz + s : dz, best);
        for (int l = 0; l < LANES; l++) loss[l] *= 1.f / T;
    }

    INLINE void place(const V* z, const Target* const* t, int s, V share, float* loss, V* dz, int64_t* best) {
        V top = z[0];
        VI at = {};
        for (int o = 1; o < O; o++) {
            VI more = z[o * T] > top;
            top = pick(more, z[o * T], top);
            at = (more & o) | (~more & at);
        }
        V sum = {};
        for (int o = 0; o < O; o++) {
            V e = exp(z[o * T] - top);
            sum += e;
            if (dz) dz[o * T] = e;
        }
        V each = log(sum) + top;
        for (int l = 0; l < LANES; l++) {
            loss[l] += each[l] - ((const float*)(z + t[l][s] * T))[l];
            if (best) best[l] = at[l];
        }
        if (!dz) return;
        V scale = share / sum;
        for (int o = 0; o < O; o++) dz[o * T] *= scale;
        for (int l = 0; l < LANES; l++) ((float*)(dz + t[l][s] * T))[l] -= share[l];
    }
};

// One output for each label says how likely it is.
template <int O>
struct Logistic {
    typedef int64_t Target;
    static constexpr int targets = O;

    static bool valid(const Target* t) {
        for (int o = 0; o < O; o++)
            if (t[o] != 0 && t[o] != 1) return false;
        return true;
    }

    OP void run(const V* z, const Target* const* t, V share, float* loss, V* dz, int64_t* best) {
        V all = {};
        for (int o = 0; o < O; o++) {
            V one;
            for (int l = 0; l < LANES; l++) one[l] = float(t[l][o]);
            V away = z[o] - 2.f * one * z[o];  // positive where the sign is wrong
            V size = pick(away > V{}, away, -away), e = exp(-size);
            all += (size + away) * 0.5f + log(1.f + e);
            if (dz) dz[o] = share * (1.f / O) * (pick(z[o] > V{}, V{} + 1.f, e) / (1.f + e) - one);
        }
        for (int l = 0; l < LANES; l++) {
            loss[l] = all[l] * (1.f / O);
            if (best) best[l] = z[0][l] > 0;
        }
    }
};

template <int O>
struct SquaredError {
    typedef float Target;
    static constexpr int targets = O;

    static bool valid(const Target*) { return true; }

    OP void run(const V* z, const Target* const* t, V share, float* loss, V* dz, int64_t*) {
        V sum = {};
        for (int o = 0; o < O; o++) {
            V want;
            for (int l = 0; l < LANES; l++) want[l] = t[l][o];
            V off = z[o] - want;
            sum += off * off;
            if (dz) dz[o] = off * (share * (2.f / O));
        }
        sum *= 1.f / O;
        for (int l = 0; l < LANES; l++) loss[l] = sum[l];
    }
};

// What the last operation gives is the loss: the user's own, of T numbers a sample that the model's operations read.
template <int T>
struct Own {
    typedef float Target;
    static constexpr int targets = T;

    static bool valid(const Target*) { return true; }

    OP void run(const V* z, const Target* const*, V share, float* loss, V* dz, int64_t*) {
        store(loss, *z);
        if (dz) *dz = share;
    }
};
