// Layers of sequences and whatever else works along rows: a value [T][F] is V[T * F] per block, so that a map of
// rows is the same map of T times as many blocks.

// Rows of a table by number, T numbers a sample; numbers beyond the table were refused before.
template <int COUNT, int F, int T, int SKIP>
struct Embedding {
    static constexpr int scratch = round_up(F);

    INLINE int at(V ids, int lane) {
        int id = int(ids[lane]);
        return id < 0 || id >= COUNT ? 0 : id;
    }

    OP void forward(const V* x, const float* w, V* y, int nb) {
        for (int k = 0; k < nb * T; k++) {
            const float* rows[LANES];
            for (int l = 0; l < LANES; l++) rows[l] = w + (int64_t)at(x[k], l) * F;
            gather<F>(rows, y + (int64_t)k * F);
        }
    }

    OP void backward(const V* x, const V* dy, float* dw, V* scratch, int nb, int samples) {
        for (int k = 0; k < nb * T; k++) {
            scatter<F>(dy + (int64_t)k * F, (float*)scratch);
            int used = samples - k / T * LANES;
            for (int l = 0; l < LANES && l < used; l++) {
                int id = at(x[k], l);
                if (id == SKIP) continue;
                float *to = dw + (int64_t)id * F, *from = (float*)scratch + l * round_up(F);
                for (int f = 0; f < F; f++) to[f] += from[f];
            }
        }
    }
};

// Recurrent nets --------------------------------------------------------------------------------------------

// A cell keeps KEPT * H vectors a step: its gates' inputs at first, their values after the step, their gradients on
// the way back. Gate inputs come from x (all steps in one product) and from h, GATES * H each; the first JOINT of
// the gates have the same gradient towards both, the others' towards h lies from slot OTHER on.
struct GruCell {
    static constexpr int GATES = 3, KEPT = 4, JOINT = 2, OTHER = 3, CARRY = 0;

    template <int H>
    INLINE void step(V* k, const V* from_h, const V* before, const V*, V* h, int j) {
        V r = sigmoid(k[j] + from_h[j]), z = sigmoid(k[H + j] + from_h[H + j]);
        V part = from_h[2 * H + j], c = tanh(k[2 * H + j] + r * part);
        k[j] = r, k[H + j] = z, k[2 * H + j] = c, k[3 * H + j] = part;
        h[j] = c + z * ((before ? before[j] : V{}) - c);
    }

    template <int H>
    INLINE void back(V* k, const V* before, const V*, V* dh, V*, int j) {
        V r = k[j], z = k[H + j], c = k[2 * H + j], part = k[3 * H + j], g = dh[j];
        V dc = g * (1.f - z) * (1.f - c * c);
        k[j] = dc * part * (r * (1.f - r));
        k[H + j] = g * ((before ? before[j] : V{}) - c) * (z * (1.f - z));
        k[2 * H + j] = dc, k[3 * H + j] = dc * r;
        dh[j] = g * z;
    }
};

struct LstmCell {
    static constexpr int GATES = 4, KEPT = 5, JOINT = 4, OTHER = 0, CARRY = 1;

    template <int H>
    INLINE void step(V* k, const V* from_h, const V*, const V* last, V* h, int j) {
        V i = sigmoid(k[j] + from_h[j]), f = sigmoid(k[H + j] + from_h[H + j]);
        V g = tanh(k[2 * H + j] + from_h[2 * H + j]), o = sigmoid(k[3 * H + j] + from_h[3 * H + j]);
        V c = f * (last ? last[4 * H + j] : V{}) + i * g;
        k[j] = i, k[H + j] = f, k[2 * H + j] = g, k[3 * H + j] = o, k[4 * H + j] = c;
        h[j] = o * tanh(c);
    }

    template <int H>
    INLINE void back(V* k, const V*, const V* last, V* dh, V* carry, int j) {
        V i = k[j], f = k[H + j], g = k[2 * H + j], o = k[3 * H + j], t = tanh(k[4 * H + j]);
        V dc = carry[j] + dh[j] * o * (1.f - t * t);
        k[j] = dc * g * (i * (1.f - i));
        k[H + j] = dc * (last ? last[4 * H + j] : V{}) * (f * (1.f - f));
        k[2 * H + j] = dc * i * (1.f - g * g);
        k[3 * H + j] = dh[j] * t * (o * (1.f - o));
        carry[j] = dc * f;
        dh[j] = V{};
    }
};

struct TanhCell {
    static constexpr int GATES = 1, KEPT = 1, JOINT = 1, OTHER = 0, CARRY = 0;

    template <int H>
    INLINE void step(V* k, const V* from_h, const V*, const V*, V* h, int j) {
        h[j] = k[j] = tanh(k[j] + from_h[j]);
    }

    template <int H>
    INLINE void back(V* k, const V*, const V*, V* dh, V*, int j) {
        k[j] = dh[j] * (1.f - k[j] * k[j]);
        dh[j] = V{};
    }
};

template <class Cell, int I, int H, int T, bool REVERSED>
struct Recurrent {
    static constexpr int G = Cell::GATES * H, K = Cell::KEPT * H, J = Cell::JOINT * H;
    static constexpr int kept = T * K;
    typedef Linear<I, G> Input;
    typedef Linear<H, G> Hidden;
    typedef Linear<H, J> Joint;
    typedef Linear<H, G == J ? H : G - J> Rest;
    static constexpr int most(int a, int b) { return a > b ? a : b; }
    static constexpr int scratch(int blocks) {
        return most(blocks * most(G, 2 * H), PIECE * most(Input::turned, Joint::turned));
    }

    INLINE int when(int s) { return REVERSED ? T - 1 - s : s; }

    OP void forward(const V* x, const float* wi, const float* wh, const float* bi, const float* bh, V* y, V* kept,
                    V* from_h, int nb) {
        Input::template run<I, G, 1, I, false>(x, wi, bi, kept, nb * T, I, K);
        for (int s = 0; s < T; s++) {
            int t = when(s), last = when(s - 1);
            if (s)
                Hidden::template run<H, G, 1, H, false>(y + last * H, wh, bh, from_h, nb, T * H, G);
            else
                for (int n = 0; n < nb; n++)
                    for (int j = 0; j < G; j++) from_h[n * G + j] = splat(bh ? bh[j] : 0.f);
            for (int n = 0; n < nb; n++) {
                V *k = kept + (n * T + t) * K, *h = y + (n * T + t) * H, *from = from_h + n * G;
                const V *before = s ? y + (n * T + last) * H : nullptr, *k_last = s ? kept + (n * T + last) * K : nullptr;
                for (int j = 0; j < H; j++) Cell::template step<H>(k, from, before, k_last, h, j);
            }
        }
    }

    template <bool ADD>
    OP void backward(const V* x, const V* y, const float* wi, const float* wh, const V* dy, V* dx, float* dwi,
                     float* dwh, float* dbi, float* dbh, V* kept, V* scratch, int nb) {
        V *dh = scratch, *carry = scratch + nb * H;
        std::memset((void*)scratch, 0, sizeof(V) * 2 * nb * H);
        for (int s = T - 1; s >= 0; s--) {
            int t = when(s), last = when(s - 1);
            for (int n = 0; n < nb; n++) {
                V *k = kept + (n * T + t) * K, *d = dh + n * H;
                const V *before = s ? y + (n * T + last) * H : nullptr, *k_last = s ? kept + (n * T + last) * K : nullptr;
                const V* from = dy + (n * T + t) * H;
                for (int j = 0; j < H; j++) {
                    d[j] += from[j];
                    Cell::template back<H>(k, before, k_last, d, carry + n * H, j);
                }
            }
            if (!s) break;
            Joint::template run<J, H, H, 1, true>(kept + t * K, wh, nullptr, dh, nb, T * K, H);
            if constexpr (J < G)
                Rest::template run<G - J, H, H, 1, true>(kept + t * K + Cell::OTHER * H, wh + J * H, nullptr, dh, nb, T * K,
                                                         H);
        }
        if (dx) Input::template run<G, I, I, 1, ADD>(kept, wi, nullptr, dx, nb * T, K, I);
        if (dwi) Input::weight_pieces(x, kept, dwi, scratch, nb * T, I, K);
        if (dbi) Input::bias(kept, dbi, nb * T, K, true);
        constexpr int later = REVERSED ? 0 : 1;  // the first state that follows another, in the order of the rows
        for (int n = 0; dwh && n < nb; n++) {
            const V *k = kept + (n * T + later) * K, *h = y + (n * T + 1 - later) * H;
            Joint::weight_pieces(h, k, dwh, scratch, T - 1, H, K);
            if constexpr (J < G) Rest::weight_pieces(h, k + Cell::OTHER * H, dwh + J * H, scratch, T - 1, H, K);
        }
        if (dbh) {
            Joint::bias(kept, dbh, nb * T, K, true);
            if constexpr (J < G) Rest::bias(kept + Cell::OTHER * H, dbh + J, nb * T, K, true);
        }
    }
};

// Where numbers lie -----------------------------------------------------------------------------------------

template <int OUTER, int DIM, int INNER, int START, int COUNT, int STEP>
struct Slice {
    OP void forward(const V* x, V* y, int nb) {
        for (int o = 0; o < nb * OUTER; o++)
            for (int k = 0; k < COUNT; k++)
                std::memcpy((void*)(y + ((int64_t)o * COUNT + k) * INNER), x + ((int64_t)o * DIM + START + k * STEP) * INNER,
                            sizeof(V) * INNER);
    }
    template <bool ADD>
    OP void backward(const V* dy, V* dx, int nb) {
        if (!ADD) std::memset((void*)dx, 0, sizeof(V) * OUTER * DIM * INNER * nb);
        for (int o = 0; o < nb * OUTER; o++)
            for (int k = 0; k < COUNT; k++) {
                V* to = dx + ((int64_t)o * DIM + START + k * STEP) * INNER;
                const V* from = dy + ((int64_t)o * COUNT + k) * INNER;
                for (int i = 0; i < INNER; i++) to[i] += from[i];
            }
    }
};

template <int OUTER, int A, int B>
struct Concat {
    OP void forward(const V* a, const V* b, V* y, int nb) {
        for (int64_t o = 0; o < nb * OUTER; o++) {
            std::memcpy((void*)(y + o * (A + B)), a + o * A, sizeof(V) * A);
            std::memcpy((void*)(y + o * (A + B) + A), b + o * B, sizeof(V) * B);
        }
    }
    template <int WHICH, bool ADD>
    OP void backward(const V* dy, V* dx, int nb) {
        constexpr int size = WHICH ? B : A;
        for (int64_t o = 0; o < nb * OUTER; o++)
            for (int i = 0; i < size; i++) {
                V g = dy[o * (A + B) + WHICH * A + i];
                dx[o * size + i] = ADD ? dx[o * size + i] + g : g;
            }
    }
};

template <int A, int B, int C, int D, int SA, int SB, int SC, int SD>
struct Permute {
    template <class F>
    INLINE void each(int nb, F f) {
        int64_t to = 0;
        for (int64_t n = 0; n < nb; n++)
            for (int a = 0; a < A; a++)
                for (int b = 0; b < B; b++)
                    for (int c = 0; c < C; c++)
                        for (int d = 0; d < D; d++)
                            f(to++, n * (A * B * C * D) + a * SA + b * SB + c * SC + d * SD);
    }
    OP void forward(const V* x, V* y, int nb) {
        each(nb, [=](int64_t to, int64_t from) { y[to] = x[from]; });
    }
    template <bool ADD>
    OP void backward(const V* dy, V* dx, int nb) {
        each(nb, [=](int64_t to, int64_t from) { dx[from] = ADD ? dx[from] + dy[to] : dy[to]; });
    }
};

template <int OUTER, int DIM, int INNER>
struct Mean {
    template <bool ADD>
    OP void forward(const V* x, V* y, float scale, int nb) {
        for (int64_t o = 0; o < nb * OUTER; o++)
            for (int i = 0; i < INNER; i++) {
                const V* from = x + o * DIM * INNER + i;
                V s = sum(DIM, [=](int k) { return from[(int64_t)k * INNER]; }) * scale;
                y[o * INNER + i] = ADD ? y[o * INNER + i] + s : s;
            }
    }
    template <bool ADD>
    OP void backward(const V* dy, V* dx, float scale, int nb) {
        for (int64_t o = 0; o < nb * OUTER; o++)
            for (int k = 0; k < DIM; k++)
                for (int i = 0; i < INNER; i++) {
                    V g = dy[o * INNER + i] * scale;
                    V* to = dx + (o * DIM + k) * INNER + i;
                    *to = ADD ? *to + g : g;
                }
    }
};

// Random zeros ----------------------------------------------------------------------------------------------

// A sample's key and the number of a place give the same bits in any block, on any thread.
struct Draw {
    VI low, high;

    Draw(const uint64_t* key, uint32_t layer) {
        for (int l = 0; l < LANES; l++) low[l] = int32_t(uint32_t(key[l]) ^ layer * 0x9e3779b9u), high[l] = int32_t(key[l] >> 32);
    }

    // 24 bits.
    INLINE V bits(const Draw& d, uint32_t place) {
        typedef uint32_t VW __attribute__((vector_size(4 * LANES)));
        VW x = (VW)d.low + place * 0x9e3779b9u;
        x = (x ^ (x >> 16)) * 0x7feb352du;
        x = (x ^ (x >> 15) ^ (VW)d.high) * 0x846ca68bu;
        x = (x ^ (x >> 16)) * 0x7feb352du;
        return __builtin_convertvector((VI)((x ^ (x >> 15)) >> 8), V);
    }

    // `scale` where the place is kept, 0 where it is dropped.
    INLINE V keep_or_drop(const Draw& d, uint32_t place, float drop, float scale) {
        return keep(bits(d, place) >= drop * 16777216.f, splat(scale));
    }
};

// EACH numbers that follow each other are dropped together; no key: nothing is.
template <int N, int EACH, uint32_t LAYER>
struct Dropout {
    OP void forward(const V* x, V* y, const uint64_t* key, float drop, float scale, int nb) {
        if (!key) {
            std::memcpy((void*)y, x, sizeof(V) * N * nb);
            return;
        }
        run<false>(x, y, key, drop, scale, nb);
    }
    template <bool ADD>
    OP void backward(const V* dy, V* dx, const uint64_t* key, float drop, float scale, int nb) {
        run<ADD>(dy, dx, key, drop, scale, nb);
    }
    template <bool ADD>
    INLINE void run(const V* x, V* y, const uint64_t* key, float drop, float scale, int nb) {
        for (int n = 0; n < nb; n++, x += N, y += N) {
            Draw d(key + n * LANES, LAYER);
            for (int g = 0; g < N / EACH; g++) {
                V a = Draw::keep_or_drop(d, g, drop, scale);
                for (int k = g * EACH; k < (g + 1) * EACH; k++) y[k] = ADD ? y[k] + x[k] * a : x[k] * a;
            }
        }
    }
};

// Norms and softmax of rows ---------------------------------------------------------------------------------

INLINE V inverse_root(V x) {
    V y;
    for (int l = 0; l < LANES; l++) y[l] = 1.f / std::sqrt(x[l]);
    return y;
}

template <int N>
struct RmsNorm {
    static constexpr int kept = 1;

    OP void forward(const V* x, const float* w, V* y, V* stats, float eps, int rows) {
        for (int64_t r = 0; r < rows; r++, x += N, y += N) {
            V scale = stats[r] = inverse_root(sum(N, [=](int k) { return x[k] * x[k]; }) * (1.f / N) + eps);
            for (int k = 0; k < N; k++) y[k] = x[k] * scale * (w ? w[k] : 1.f);
        }
    }
    template <bool ADD>
    OP void backward(const V* x, const float* w, const V* stats, const V* dy, V* dx, float* dw, V* sums, int rows,
                     bool add) {
        std::memset((void*)sums, 0, sizeof(V) * N);
        for (int64_t r = 0; r < rows; r++, x += N, dy += N) {
            V scale = stats[r];
            if (dw)
                for (int k = 0; k < N; k++) sums[k] += dy[k] * (x[k] * scale);
            if (!dx) continue;
            V along = sum(N, [=](int k) { return dy[k] * (w ? w[k] : 1.f) * x[k]; }) * scale * scale * (1.f / N);
            V* to = dx + r * N;
            for (int k = 0; k < N; k++) {
                V g = scale * (dy[k] * (w ? w[k] : 1.f) - x[k] * along);
                to[k] = ADD ? to[k] + g : g;
            }
        }
        for (int k = 0; dw && k < N; k++) put(dw + k, total(sums[k]), add);
    }
};

template <int N>
INLINE void softmax_row(V* row) {
    V top = row[0];
    for (int k = 1; k < N; k++) top = max(row[k], top);
    V all = {};
    for (int k = 0; k < N; k++) all += row[k] = exp(row[k] - top);
    V share = 1.f / all;
    for (int k = 0; k < N; k++) row[k] *= share;
}

template <int N>
struct Softmax {
    OP void forward(const V* x, V* y, int rows) {
        std::memcpy((void*)y, x, sizeof(V) * N * rows);
        for (int64_t r = 0; r < rows; r++) softmax_row<N>(y + r * N);
    }
    template <bool ADD>
    OP void backward(const V* y, const V* dy, V* dx, int rows) {
        for (int64_t r = 0; r < rows; r++, y += N, dy += N, dx += N) {
            V along = sum(N, [=](int k) { return y[k] * dy[k]; });
            for (int k = 0; k < N; k++) {
                V g = y[k] * (dy[k] - along);
                dx[k] = ADD ? dx[k] + g : g;
            }
        }
    }
};

template <int N>
struct LogSoftmax {
    OP void forward(const V* x, V* y, int rows) {
        for (int64_t r = 0; r < rows; r++, x += N, y += N) {
            V top = x[0];
            for (int k = 1; k < N; k++) top = max(x[k], top);
            V all = {};
            for (int k = 0; k < N; k++) all += exp(x[k] - top);
            V base = top + log(all);
            for (int k = 0; k < N; k++) y[k] = x[k] - base;
        }
    }
    template <bool ADD>
    OP void backward(const V* y, const V* dy, V* dx, int rows) {
        for (int64_t r = 0; r < rows; r++, y += N, dy += N, dx += N) {
            V all = sum(N, [=](int k) { return dy[k]; });
            for (int k = 0; k < N; k++) {
                V g = dy[k] - exp(y[k]) * all;
                dx[k] = ADD ? dx[k] + g : g;
            }
        }
    }
};

// Functions whose slope their argument tells ----------------------------------------------------------------

// erf to about one unit in the last place (the rational function of Eigen).
INLINE V erf(V x) {
    x = pick(x < -4.f, splat(-4.f), pick(x > 4.f, splat(4.f), x));
    V z = x * x, p = splat(-2.72614225801306e-10f);
    p = p * z + 2.77068142495902e-08f;
    p = p * z - 2.10102402082508e-06f;
    p = p * z - 5.69250639462346e-05f;
    p = p * z - 7.34990630326855e-04f;
    p = p * z - 2.95459980854025e-03f;
    p = p * z - 1.60960333262415e-02f;
    V q = splat(-1.45660718464996e-05f);
    q = q * z - 2.13374055278905e-04f;
    q = q * z - 1.68282697438203e-03f;
    q = q * z - 7.37332916720468e-03f;
    q = q * z - 1.42647390514189e-02f;
    return x * p / q;
}

struct Gelu {
    INLINE V value(V x) { return 0.5f * x * (1.f + erf(x * 0.70710678118654752f)); }
    INLINE V slope(V x, V g) {
        return g * (0.5f * (1.f + erf(x * 0.70710678118654752f)) + x * 0.39894228040143268f * exp(-0.5f * x * x));
    }
};

struct GeluTanh {
    INLINE V inner(V x) { return 0.79788456080286536f * (x + 0.044715f * x * x * x); }
    INLINE V value(V x) { return 0.5f * x * (1.f + tanh(inner(x))); }
    INLINE V slope(V x, V g) {
        V t = tanh(inner(x)), s = 0.79788456080286536f * (1.f + 0.134145f * x * x);
        return g * (0.5f * (1.f + t) + 0.5f * x * (1.f - t * t) * s);
    }
};

struct Silu {
    INLINE V value(V x) { return x * sigmoid(x); }
    INLINE V slope(V x, V g) {
        V s = sigmoid(x);
        return g * (s * (1.f + x * (1.f - s)));
    }
};

struct HardSwish {
    INLINE V value(V x) { return x * pick(x > 3.f, V{} + 1.f, max(V{}, (x + 3.f) * (1.f / 6))); }
    INLINE V slope(V x, V g) { return keep(x > -3.f, pick(x < 3.f, g * (x * (1.f / 3) + 0.5f), g)); }
};

// Between two numbers, given by their bits.
template <int32_t LOW, int32_t HIGH>
struct Clamp {
    INLINE V value(V x) {
        V low = splat(from_bits(LOW)), high = splat(from_bits(HIGH));
        return pick(x < low, low, pick(x > high, high, x));
    }
    INLINE V slope(V x, V g) {
        V low = splat(from_bits(LOW)), high = splat(from_bits(HIGH));
        return keep((x >= low) & (x <= high), g);
    }
};

// Arithmetic ------------------------------------------------------------------------------------------------

// a x + b
template <int N>
struct Affine {
    OP void forward(const V* x, V* y, float a, float b, int nb) {
        for (int k = 0; k < N * nb; k++) y[k] = x[k] * a + b;
    }
    template <bool ADD>
    OP void backward(const V* dy, V* dx, float a, int nb) {
        for (int k = 0; k < N * nb; k++) dx[k] = ADD ? dx[k] + dy[k] * a : dy[k] * a;
    }
};

template <int N>
struct Multiply {
    OP void forward(const V* a, const V* b, V* y, int nb) {
        for (int k = 0; k < N * nb; k++) y[k] = a[k] * b[k];
    }
    template <bool ADD>
    OP void backward(const V* other, const V* dy, V* dx, int nb) {
        for (int k = 0; k < N * nb; k++) dx[k] = ADD ? dx[k] + other[k] * dy[k] : other[k] * dy[k];
    }
};

template <int N>
struct Divide {
    OP void forward(const V* a, const V* b, V* y, int nb) {
        for (int k = 0; k < N * nb; k++) y[k] = a[k] / b[k];
    }
    template <bool ADD>
    OP void above(const V* b, const V*, const V* dy, V* dx, int nb) {
        for (int k = 0; k < N * nb; k++) dx[k] = ADD ? dx[k] + dy[k] / b[k] : dy[k] / b[k];
    }
    template <bool ADD>
    OP void below(const V* b, const V* y, const V* dy, V* dx, int nb) {
        for (int k = 0; k < N * nb; k++) dx[k] = ADD ? dx[k] - dy[k] * y[k] / b[k] : -dy[k] * y[k] / b[k];
    }
};

// The same N numbers added to each row.
template <int N>
struct Shift {
    OP void forward(const V* x, const float* w, V* y, int rows) {
        for (int64_t r = 0; r < rows; r++)
            for (int k = 0; k < N; k++) y[r * N + k] = x[r * N + k] + w[k];
    }
    template <bool ADD>
    OP void backward(const V* dy, V* dx, float* dw, int rows, bool add) {
        if (dx)
            for (int64_t k = 0; k < (int64_t)N * rows; k++) dx[k] = ADD ? dx[k] + dy[k] : dy[k];
        for (int k = 0; dw && k < N; k++) {
            V s = {};
            for (int64_t r = 0; r < rows; r++) s += dy[r * N + k];
            put(dw + k, total(s), add);
        }
    }
};

// Attention -------------------------------------------------------------------------------------------------

// C[i][j] = sum over k of A[i][k] B[j][k], sample by sample: all three are V, at these strides.
template <int M, int N, int K, int AI, int AK, int BJ, int BK, int CI, int CJ>
struct Product {
    static constexpr Tile tile = best_tile(M, N);

    template <int TM, int TN, bool ADD>
    INLINE void block(const V* a, const V* b, V* c) {
        V acc[TM][TN];
        UNROLL for (int i = 0; i < TM; i++)
            UNROLL for (int j = 0; j < TN; j++) acc[i][j] = V{};
        for (int k = 0; k < K; k++) {
            V u[TN];
            UNROLL for (int j = 0; j < TN; j++) u[j] = b[j * BJ + k * BK];
            UNROLL for (int i = 0; i < TM; i++) {
                V v = a[i * AI + k * AK];
                UNROLL for (int j = 0; j < TN; j++) acc[i][j] += v * u[j];
            }
        }
        UNROLL for (int i = 0; i < TM; i++)
            UNROLL for (int j = 0; j < TN; j++) {
                V* to = c + i * CI + j * CJ;
                *to = ADD ? *to + acc[i][j] : acc[i][j];
            }
    }
    template <int TM, bool ADD>
    INLINE void row(const V* a, const V* b, V* c) {
        constexpr int whole = N / tile.m * tile.m;
        for (int j = 0; j < whole; j += tile.m) block<TM, tile.m, ADD>(a, b + j * BJ, c + j * CJ);
        if constexpr (N % tile.m != 0) block<TM, N % tile.m, ADD>(a, b + whole * BJ, c + whole * CJ);
    }
    template <bool ADD>
    OP void run(const V* a, const V* b, V* c) {
        constexpr int whole = M / tile.n * tile.n;
        for (int i = 0; i < whole; i += tile.n) row<tile.n, ADD>(a + i * AI, b, c + i * CI);
        if constexpr (M % tile.n != 0) row<M % tile.n, ADD>(a + whole * AI, b, c + whole * CI);
    }
};

// From [T][3E], queries, keys and values side by side, to [T][E]. `mask` is added to the scores, [T][T]; `absent`
// says which places of a sample are no keys, V[T].
template <int T, int E, int HEADS, uint32_t LAYER>
struct Attention {
    static constexpr int D = E / HEADS, S = 3 * E;
    static constexpr int kept = HEADS * T * T, scratch = 2 * T * T;

    OP void forward(const V* x, const float* mask, const V* absent, V* y, V* kept, V* scratch, const uint64_t* key,
                    float drop, float scale, int nb) {
        const float root = 1.f / std::sqrt(float(D));
        for (int n = 0; n < nb; n++)
            for (int h = 0; h < HEADS; h++) {
                const V *q = x + (int64_t)n * T * S + h * D, *k = q + E, *v = k + E;
                V *p = kept + (int64_t)(n * HEADS + h) * T * T, *o = y + (int64_t)n * T * E + h * D;
                Product<T, T, D, S, 1, S, 1, T, 1>::template run<false>(q, k, p);
                for (int i = 0; i < T; i++) {
                    for (int j = 0; j < T; j++) {
                        V s = p[i * T + j] * root;
                        if (mask) s += mask[i * T + j];
                        if (absent) s = pick(absent[n * T + j] > 0.5f, splat(-INFINITY), s);
                        p[i * T + j] = s;
                    }
                    softmax_row<T>(p + i * T);
                }
                if (key && drop > 0) p = dropped(p, scratch, key + n * LANES, h, drop, scale);
                Product<T, D, T, T, 1, 1, S, E, 1>::template run<false>(p, v, o);
            }
    }

    // The weights that are used, in training: some of them zero.
    INLINE V* dropped(const V* p, V* to, const uint64_t* key, int h, float drop, float scale) {
        Draw d(key, LAYER);
        for (int k = 0; k < T * T; k++) to[k] = p[k] * Draw::keep_or_drop(d, h * T * T + k, drop, scale);
        return to;
    }

    template <bool ADD>
    OP void backward(const V* x, const V* dy, V* dx, V* kept, V* scratch, const uint64_t* key, float drop, float scale,
                     int nb) {
        const float root = 1.f / std::sqrt(float(D));
        V *ds = scratch, *used = scratch + T * T;
        for (int n = 0; n < nb; n++)
            for (int h = 0; h < HEADS; h++) {
                const V *q = x + (int64_t)n * T * S + h * D, *k = q + E, *v = k + E;
                V *dq = dx + (int64_t)n * T * S + h * D, *dk = dq + E, *dv = dk + E;
                const V *p = kept + (int64_t)(n * HEADS + h) * T * T, *o = dy + (int64_t)n * T * E + h * D;
                bool drops = key && drop > 0;
                const V* u = drops ? dropped(p, used, key + n * LANES, h, drop, scale) : p;
                Product<T, D, T, 1, T, 1, E, S, 1>::template run<ADD>(u, o, dv);
                Product<T, T, D, E, 1, S, 1, T, 1>::template run<false>(o, v, ds);
                if (drops) dropped(ds, ds, key + n * LANES, h, drop, scale);
                for (int i = 0; i < T; i++) {
                    const V* row = p + i * T;
                    V* to = ds + i * T;
                    V along = sum(T, [=](int j) { return row[j] * to[j]; });
                    for (int j = 0; j < T; j++) to[j] = row[j] * (to[j] - along) * root;
                }
                Product<T, D, T, T, 1, 1, S, S, 1>::template run<ADD>(ds, k, dq);
                Product<T, D, T, 1, T, 1, S, S, 1>::template run<ADD>(ds, q, dk);
            }
    }
};

// 1 where a number is (or is not) a certain one.
template <int N, bool EQUAL>
struct Compare {
    OP void forward(const V* x, V* y, float value, int nb) {
        for (int k = 0; k < N * nb; k++) {
            VI same = x[k] == value;
            y[k] = keep(EQUAL ? same : ~same, splat(1.f));
        }
    }
};
