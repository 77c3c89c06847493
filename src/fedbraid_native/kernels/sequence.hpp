// Layers of sequences and whatever else works along rows: a value [T][F] is V[T * F] per block, so that a map of
// rows is the same map of T times as many blocks.

// Rows of a table by number, T numbers a sample; numbers beyond the table were refused before.
template <int COUNT, int F, int T, int SKIP>
struct Embedding {
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

    OP void backward(const V* x, const V* dy, float* dw, V* rows, int nb, int samples) {
        for (int k = 0; k < nb * T; k++) {
            scatter<F>(dy + (int64_t)k * F, (float*)rows);
            int used = samples - k / T * LANES;
            for (int l = 0; l < LANES && l < used; l++) {
                int id = at(x[k], l);
                if (id == SKIP) continue;
                float *to = dw + (int64_t)id * F, *from = (float*)rows + l * round_up(F);
                for (int f = 0; f < F; f++) to[f] += from[f];
            }
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

// Moved SHIFT places along DIM of [OUTER][DIM][INNER].
template <int OUTER, int DIM, int INNER, int SHIFT>
struct Roll {
    static constexpr int64_t size = (int64_t)OUTER * DIM * INNER;

    INLINE int64_t moved(int64_t k) {
        const int64_t d = k / INNER % DIM;
        return k + ((d + SHIFT) % DIM - d) * INNER;
    }
    OP void forward(const V* x, V* y, int nb) {
        for (int64_t k = 0; k < nb * size; k++) y[moved(k)] = x[k];
    }
    template <bool ADD>
    OP void backward(const V* dy, V* dx, int nb) {
        for (int64_t k = 0; k < nb * size; k++) dx[k] = ADD ? dx[k] + dy[moved(k)] : dy[moved(k)];
    }
};

template <int OUTER, int A, int B>
struct Cat {
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
struct Reduce {
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

// Without a key, or without a seed that it was made of, nothing is dropped.
INLINE bool drops(const uint64_t* key) { return key && *key; }

// EACH numbers that follow each other are dropped together.
template <int N, int EACH, uint32_t LAYER>
struct Dropout {
    OP void forward(const V* x, V* y, const uint64_t* key, float drop, float scale, int nb) {
        if (!drops(key)) {
            std::memcpy((void*)y, x, sizeof(V) * N * nb);
            return;
        }
        run<false>(x, y, key, drop, scale, nb);
    }
    template <bool ADD>
    OP void backward(const V* dy, V* dx, const uint64_t* key, float drop, float scale, int nb) {
        if (drops(key)) return run<ADD>(dy, dx, key, drop, scale, nb);
        for (int k = 0; k < N * nb; k++) dx[k] = ADD ? dx[k] + dy[k] : dy[k];
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
struct RMSNorm {
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

// N numbers that lie STEP apart.
template <int N, int STEP = 1>
INLINE void softmax_row(V* row) {
    V top = row[0];
    for (int k = 1; k < N; k++) top = max(row[k * STEP], top);
    V all = {};
    for (int k = 0; k < N; k++) all += row[k * STEP] = exp(row[k * STEP] - top);
    V share = 1.f / all;
    for (int k = 0; k < N; k++) row[k * STEP] *= share;
}

// Along N of [N][INNER].
template <int N, int INNER>
struct Softmax {
    OP void forward(const V* x, V* y, int rows) {
        std::memcpy((void*)y, x, sizeof(V) * N * INNER * rows);
        for (int64_t r = 0; r < rows; r++)
            for (int i = 0; i < INNER; i++) softmax_row<N, INNER>(y + r * N * INNER + i);
    }
    template <bool ADD>
    OP void backward(const V* y, const V* dy, V* dx, int rows) {
        for (int64_t r = 0; r < rows; r++, y += N * INNER, dy += N * INNER, dx += N * INNER)
            for (int i = 0; i < INNER; i++) {
                V along = sum(N, [=](int k) { return y[k * INNER + i] * dy[k * INNER + i]; });
                for (int k = i; k < N * INNER; k += INNER) {
                    V g = y[k] * (dy[k] - along);
                    dx[k] = ADD ? dx[k] + g : g;
                }
            }
    }
};

template <int N, int INNER>
struct LogSoftmax {
    OP void forward(const V* x, V* y, int rows) {
        for (int64_t r = 0; r < rows; r++, x += N * INNER, y += N * INNER)
            for (int i = 0; i < INNER; i++) {
                V top = x[i];
                for (int k = 1; k < N; k++) top = max(x[k * INNER + i], top);
                V all = {};
                for (int k = 0; k < N; k++) all += exp(x[k * INNER + i] - top);
                V base = top + log(all);
                for (int k = i; k < N * INNER; k += INNER) y[k] = x[k] - base;
            }
    }
    template <bool ADD>
    OP void backward(const V* y, const V* dy, V* dx, int rows) {
        for (int64_t r = 0; r < rows; r++, y += N * INNER, dy += N * INNER, dx += N * INNER)
            for (int i = 0; i < INNER; i++) {
                V all = sum(N, [=](int k) { return dy[k * INNER + i]; });
                for (int k = i; k < N * INNER; k += INNER) {
                    V g = dy[k] - exp(y[k]) * all;
                    dx[k] = ADD ? dx[k] + g : g;
                }
            }
    }
};

// Minus the logarithm of the softmax of Z's class, at T places of C classes each: `w` weighs classes, `smooth` is the share
// that is all classes' instead, and the class SKIP costs nothing. Classes lie CS apart, places TS.
template <int C, int T, int CS, int TS, int SKIP>
struct CrossEntropyLoss {
    // The class, and what it weighs; numbers beyond were refused before.
    struct Named {
        int id[LANES];
        V mine, any;

        Named(V t, const float* w, float smooth) {
            for (int l = 0; l < LANES; l++) {
                int k = int(t[l]);
                id[l] = k < 0 || k >= C ? 0 : k;
                any[l] = k == SKIP ? 0.f : smooth / C;
                mine[l] = k == SKIP ? 0.f : (1.f - smooth) * (w ? w[id[l]] : 1.f);
            }
        }
    };

    INLINE float all(const float* w) {
        float sum = 0;
        for (int c = 0; c < C; c++) sum += w ? w[c] : 1.f;
        return sum;
    }

    OP void forward(const V* x, const V* t, const float* w, V* y, V* saved, float smooth, int nb) {
        float weights = all(w);
        for (int64_t k = 0; k < (int64_t)nb * T; k++) {
            const V* z = x + k / T * C * T + k % T * TS;
            V top = z[0], sum = {}, along = {};
            for (int c = 1; c < C; c++) top = max(z[c * CS], top);
            for (int c = 0; c < C; c++) sum += exp(z[c * CS] - top);
            V base = saved[k] = top + log(sum);
            if (smooth != 0)
                for (int c = 0; c < C; c++) along += (base - z[c * CS]) * (w ? w[c] : 1.f);
            Named at(t[k], w, smooth);
            V off;
            for (int l = 0; l < LANES; l++) off[l] = base[l] - z[at.id[l] * CS][l];
            y[k] = pick(at.mine + at.any * weights == 0.f, V{}, at.mine * off + at.any * along);
        }
    }

    template <bool ADD>
    OP void backward(const V* x, const V* t, const float* w, const V* saved, const V* dy, V* dx, float smooth, int nb) {
        float weights = all(w);
        for (int64_t k = 0; k < (int64_t)nb * T; k++) {
            const int64_t from = k / T * C * T + k % T * TS;
            Named at(t[k], w, smooth);
            V whole = (at.mine + at.any * weights) * dy[k], any = at.any * dy[k], mine = at.mine * dy[k];
            for (int c = 0; c < C; c++) {
                V g = exp(x[from + c * CS] - saved[k]) * whole - any * (w ? w[c] : 1.f);
                V& to = dx[from + c * CS];
                to = ADD ? to + g : g;
            }
            for (int l = 0; l < LANES; l++) ((float*)(dx + from + at.id[l] * CS))[l] -= mine[l];
        }
    }
};

// From [OUTER][N][INNER], by numbers [OUTER][K][INNER] of places along N; SKIP gives 0.
template <int OUTER, int N, int K, int INNER, int SKIP>
struct Gather {
    INLINE int64_t at(int64_t k, float number) {
        int id = int(number);
        return (k / (K * INNER) * N + (id < 0 || id >= N ? 0 : id)) * INNER + k % INNER;
    }
    OP void forward(const V* x, const V* t, V* y, int nb) {
        for (int64_t k = 0; k < (int64_t)nb * OUTER * K * INNER; k++)
            for (int l = 0; l < LANES; l++)
                ((float*)(y + k))[l] = int(t[k][l]) == SKIP ? 0.f : ((const float*)(x + at(k, t[k][l])))[l];
    }
    template <bool ADD>
    OP void backward(const V* t, const V* dy, V* dx, int nb) {
        if (!ADD) std::memset((void*)dx, 0, sizeof(V) * OUTER * N * INNER * nb);
        for (int64_t k = 0; k < (int64_t)nb * OUTER * K * INNER; k++)
            for (int l = 0; l < LANES; l++)
                if (int(t[k][l]) != SKIP) ((float*)(dx + at(k, t[k][l])))[l] += ((const float*)(dy + k))[l];
    }
};

// Each number of a class as C numbers, 1 in its place.
template <int N, int C>
struct OneHot {
    OP void forward(const V* t, V* y, int nb) {
        for (int64_t k = 0; k < (int64_t)N * nb; k++)
            for (int c = 0; c < C; c++) y[k * C + c] = keep(t[k] == float(c), splat(1.f));
    }
};

// The largest along DIM; the first of equals takes the gradient, or all of them share it.
template <int OUTER, int DIM, int INNER, bool SHARED>
struct Amax {
    OP void forward(const V* x, V* y, int nb) {
        for (int64_t o = 0; o < nb * OUTER; o++)
            for (int i = 0; i < INNER; i++) {
                const V* from = x + o * DIM * INNER + i;
                V top = from[0];
                for (int k = 1; k < DIM; k++) top = max(from[k * INNER], top);
                y[o * INNER + i] = top;
            }
    }
    template <bool ADD>
    OP void backward(const V* x, const V* y, const V* dy, V* dx, int nb) {
        for (int64_t o = 0; o < nb * OUTER; o++)
            for (int i = 0; i < INNER; i++) {
                const V* from = x + o * DIM * INNER + i;
                V *to = dx + o * DIM * INNER + i, top = y[o * INNER + i], g = dy[o * INNER + i];
                if (SHARED) g /= sum(DIM, [=](int k) { return keep(from[k * INNER] == top, splat(1.f)); });
                for (int k = 0; k < DIM * INNER; k += INNER) {
                    VI hit = from[k] == top;
                    V part = keep(hit, g);
                    if (!SHARED) g = keep(~hit, g);
                    to[k] = ADD ? to[k] + part : part;
                }
            }
    }
};

// Arithmetic ------------------------------------------------------------------------------------------------

// a x + b
template <int N>
struct AffineScalar {
    OP void forward(const V* x, V* y, float a, float b, int nb) {
        for (int k = 0; k < N * nb; k++) y[k] = x[k] * a + b;
    }
    template <bool ADD>
    OP void backward(const V* dy, V* dx, float a, int nb) {
        for (int k = 0; k < N * nb; k++) dx[k] = ADD ? dx[k] + dy[k] * a : dy[k] * a;
    }
};

// The same N numbers for every sample.
template <int N>
struct ExpandParam {
    OP void forward(const float* w, V* y, int nb) {
        for (int n = 0; n < nb; n++)
            for (int k = 0; k < N; k++) y[n * N + k] = splat(w[k]);
    }
    OP void backward(const V* dy, float* dw, int nb, bool add) {
        for (int k = 0; k < N; k++) {
            V s = {};
            for (int n = 0; n < nb; n++) s += dy[n * N + k];
            put(dw + k, total(s), add);
        }
    }
};

// `b` where a mask says so, else `a`; one mask for all rows of N numbers, or a sample's own.
INLINE VI on(const float* mask, int64_t k) { return (splat(mask[k]) > 0.5f); }
INLINE VI on(const V* mask, int64_t k) { return mask[k] > 0.5f; }

template <int N>
struct MaskedFill {
    template <class M>
    OP void forward(const V* x, const M* mask, float value, V* y, int rows, int64_t step) {
        for (int64_t r = 0; r < rows; r++)
            for (int k = 0; k < N; k++) y[r * N + k] = pick(on(mask, r * step + k), splat(value), x[r * N + k]);
    }
    template <bool ADD, class M>
    OP void backward(const M* mask, const V* dy, V* dx, int rows, int64_t step) {
        for (int64_t r = 0; r < rows; r++)
            for (int k = 0; k < N; k++) {
                V g = keep(~on(mask, r * step + k), dy[r * N + k]);
                dx[r * N + k] = ADD ? dx[r * N + k] + g : g;
            }
    }
};

template <int N>
struct Where {
    OP void forward(const V* mask, const V* a, const V* b, V* y, int nb) {
        for (int k = 0; k < N * nb; k++) y[k] = pick(on(mask, k), a[k], b[k]);
    }
    template <bool FIRST, bool ADD>
    OP void backward(const V* mask, const V* dy, V* dx, int nb) {
        for (int k = 0; k < N * nb; k++) {
            V g = keep(FIRST ? on(mask, k) : ~on(mask, k), dy[k]);
            dx[k] = ADD ? dx[k] + g : g;
        }
    }
};

// Attention -------------------------------------------------------------------------------------------------

// C[i][j] = sum over k of A[i][k] B[j][k], sample by sample: all three are V, at these strides.
template <int M, int N, int K, int AI, int AK, int BJ, int BK, int CI, int CJ>
struct BatchMatmul {
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

// COUNT products a sample, C[i][j] as above: A and B lie anyhow within their block, C row by row.
template <int COUNT, int M, int N, int K, int AC, int AI, int AK, int BC, int BJ, int BK>
struct Products {
    template <class F>
    INLINE void each(int nb, F f) {
        for (int64_t n = 0; n < nb; n++)
            for (int64_t c = 0; c < COUNT; c++)
                f(n * (COUNT * M * K) + c * AC, n * (COUNT * N * K) + c * BC, (n * COUNT + c) * (M * N));
    }
    OP void forward(const V* a, const V* b, V* y, int nb) {
        each(nb, [=](int64_t at, int64_t bt, int64_t to) {
            BatchMatmul<M, N, K, AI, AK, BJ, BK, N, 1>::template run<false>(a + at, b + bt, y + to);
        });
    }
    template <bool ADD>
    OP void backward_a(const V* b, const V* dy, V* da, int nb) {
        each(nb, [=](int64_t at, int64_t bt, int64_t to) {
            BatchMatmul<M, K, N, N, 1, BK, BJ, AI, AK>::template run<ADD>(dy + to, b + bt, da + at);
        });
    }
    template <bool ADD>
    OP void backward_b(const V* a, const V* dy, V* db, int nb) {
        each(nb, [=](int64_t at, int64_t bt, int64_t to) {
            BatchMatmul<N, K, M, 1, N, AK, AI, BJ, BK>::template run<ADD>(dy + to, a + at, db + bt);
        });
    }
};

// Where row r of head h of block n lies.
template <int BLOCK, int HEAD, int ROW>
struct HeadStrides {
    static constexpr int row = ROW;
    INLINE int64_t at(int64_t n, int64_t h) { return n * BLOCK + h * HEAD; }
};

// T queries and S keys of D numbers, S values of E. `mask` is added to the scores, [T][S], one for all heads or one for
// each; `absent` says which places of a sample are no keys, V[S].
template <int T, int S, int D, int E, int HEADS, class Q, class K, class W, class O, uint32_t LAYER>
struct ScaledDotProductAttention {
    OP void forward(const V* qs, const V* ks, const V* vs, const float* mask, int each, const V* absent, V* y, V* saved,
                    V* used, const uint64_t* key, float root, float drop, float scale, int nb) {
        for (int n = 0; n < nb; n++)
            for (int h = 0; h < HEADS; h++) {
                V* p = saved + (int64_t)(n * HEADS + h) * T * S;
                BatchMatmul<T, S, D, Q::row, 1, K::row, 1, S, 1>::template run<false>(qs + Q::at(n, h), ks + K::at(n, h), p);
                for (int i = 0; i < T; i++) {
                    for (int j = 0; j < S; j++) {
                        V s = p[i * S + j] * root;
                        if (mask) s += mask[h * each + i * S + j];
                        if (absent) s = pick(absent[n * S + j] > 0.5f, splat(-INFINITY), s);
                        p[i * S + j] = s;
                    }
                    softmax_row<S>(p + i * S);
                }
                if (drops(key) && drop > 0) p = dropped(p, used, key + n * LANES, h, drop, scale);
                BatchMatmul<T, E, S, S, 1, 1, W::row, O::row, 1>::template run<false>(p, vs + W::at(n, h), y + O::at(n, h));
            }
    }

    // The weights that are used, in training: some of them zero.
    INLINE V* dropped(const V* p, V* to, const uint64_t* key, int h, float drop, float scale) {
        Draw d(key, LAYER);
        for (int k = 0; k < T * S; k++) to[k] = p[k] * Draw::keep_or_drop(d, h * T * S + k, drop, scale);
        return to;
    }

    template <bool ADD_Q, bool ADD_K, bool ADD_V>
    OP void backward(const V* qs, const V* ks, const V* vs, const V* dy, V* dq, V* dk, V* dv, V* saved, V* used, V* ds,
                     const uint64_t* key, float root, float drop, float scale, int nb) {
        for (int n = 0; n < nb; n++)
            for (int h = 0; h < HEADS; h++) {
                const V *p = saved + (int64_t)(n * HEADS + h) * T * S, *o = dy + O::at(n, h);
                bool some = drops(key) && drop > 0;
                const V* u = some ? dropped(p, used, key + n * LANES, h, drop, scale) : p;
                if (dv) BatchMatmul<S, E, T, 1, S, 1, O::row, W::row, 1>::template run<ADD_V>(u, o, dv + W::at(n, h));
                if (!dq && !dk) continue;
                BatchMatmul<T, S, E, O::row, 1, W::row, 1, S, 1>::template run<false>(o, vs + W::at(n, h), ds);
                if (some) dropped(ds, ds, key + n * LANES, h, drop, scale);
                for (int i = 0; i < T; i++) {
                    const V* row = p + i * S;
                    V* to = ds + i * S;
                    V along = sum(S, [=](int j) { return row[j] * to[j]; });
                    for (int j = 0; j < S; j++) to[j] = row[j] * (to[j] - along) * root;
                }
                if (dq) BatchMatmul<T, D, S, S, 1, 1, K::row, Q::row, 1>::template run<ADD_Q>(ds, ks + K::at(n, h), dq + Q::at(n, h));
                if (dk) BatchMatmul<S, D, T, 1, S, 1, Q::row, K::row, 1>::template run<ADD_K>(ds, qs + Q::at(n, h), dk + K::at(n, h));
            }
    }
};

// 1 where a comparison with a number holds.
template <int N, char HOW>
struct CompareScalar {
    INLINE VI holds(V x, float v) {
        return HOW == '=' ? x == v : HOW == '!' ? x != v : HOW == '<' ? x < v : HOW == '>' ? x > v : HOW == 'l' ? x <= v : x >= v;
    }
    OP void forward(const V* x, V* y, float value, int nb) {
        for (int k = 0; k < N * nb; k++) y[k] = keep(holds(x[k], value), splat(1.f));
    }
};
