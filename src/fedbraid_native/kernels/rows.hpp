// Products with samples as rows of numbers, not side by side: vectors lie along the features, so that none of their places
// is empty where a batch does not fill a block.

// A matrix [R][C] that rows of R numbers are multiplied with: packed by columns that fit into registers.
template <int R, int C>
struct RowMap {
    static constexpr int CR = round_up(C), N = ACCUMULATORS / 6, wide = N * LANES, whole = CR / wide * wide;
    static constexpr int64_t size = (int64_t)R * CR;

    // From w[c][r], or w[r][c].
    template <bool TURN>
    OP void pack(const float* w, float* to) {
        for (int c0 = 0; c0 < CR; c0 += wide) {
            const int width = CR - c0 < wide ? CR - c0 : wide;
            for (int c = c0; c < c0 + width; c += LANES) some<TURN>(w, c, to + (int64_t)c0 * R + c - c0, width);
        }
    }
    template <bool TURN>
    INLINE void some(const float* w, int c, float* to, int width) {
        int r = 0;
        for (; TURN && c + LANES <= C && r + LANES <= R; r += LANES) {
            V t[LANES];
            UNROLL for (int l = 0; l < LANES; l++) t[l] = load(w + (int64_t)(c + l) * R + r);
            transpose(t);
            UNROLL for (int l = 0; l < LANES; l++) store(to + (int64_t)(r + l) * width, t[l]);
        }
        for (; r < R; r++)
            for (int l = 0; l < LANES; l++)
                to[(int64_t)r * width + l] = c + l < C ? w[TURN ? (int64_t)(c + l) * R + r : (int64_t)r * C + c + l] : 0.f;
    }

    template <int M, int M2, bool ADD>
    INLINE void block(const float* in, int64_t from, const float* w, const float* base, float* out, int64_t to) {
        V acc[M][M2];
        UNROLL for (int m = 0; m < M; m++)
            UNROLL for (int n = 0; n < M2; n++) acc[m][n] = base ? load(base + n * LANES) : V{};
        for (int r = 0; r < R; r++) {
            V v[M2];
            UNROLL for (int n = 0; n < M2; n++) v[n] = load(w + (r * M2 + n) * LANES);
            UNROLL for (int m = 0; m < M; m++) {
                V a = splat(in[m * from + r]);
                UNROLL for (int n = 0; n < M2; n++) acc[m][n] += v[n] * a;
            }
        }
        UNROLL for (int m = 0; m < M; m++)
            UNROLL for (int n = 0; n < M2; n++) {
                float* at = out + m * to + n * LANES;
                store(at, ADD ? load(at) + acc[m][n] : acc[m][n]);
            }
    }
    template <int M, bool ADD>
    static void columns(const float* in, int64_t from, const float* w, const float* base, float* out, int64_t to) {
        for (int c = 0; c < whole; c += wide)
            block<M, N, ADD>(in, from, w + (int64_t)c * R, base ? base + c : base, out + c, to);
        if constexpr (CR % wide != 0)
            block<M, CR % wide / LANES, ADD>(in, from, w + (int64_t)whole * R, base ? base + whole : base, out + whole, to);
    }

    // Rows lie so far apart, CR numbers of each are written; base: C numbers, where C is CR.
    template <bool ADD>
    OP void run(const float* in, int64_t from, const float* w, const float* base, float* out, int64_t to, int rows) {
        while (rows > 0) {
            const int parts = (rows + 5) / 6, m = (rows + parts - 1) / parts;
            switch (m) {
                case 6: columns<6, ADD>(in, from, w, base, out, to); break;
                case 5: columns<5, ADD>(in, from, w, base, out, to); break;
                case 4: columns<4, ADD>(in, from, w, base, out, to); break;
                case 3: columns<3, ADD>(in, from, w, base, out, to); break;
                case 2: columns<2, ADD>(in, from, w, base, out, to); break;
                default: columns<1, ADD>(in, from, w, base, out, to);
            }
            rows -= m, in += m * from, out += m * to;
        }
    }
};

// dw[o][i] += sum over rows of d[.][o] x[.][i], and db[o] += sum of d[.][o].
template <int I, int O>
struct RowWeights {
    static constexpr int IR = round_up(I);
    static constexpr Tile tile = best_tile(O, IR / LANES, 1, 4);

    template <int N, int M>
    INLINE void block(const float* x, int64_t sx, const float* d, int64_t sd, int rows, float* dw, int tail) {
        V acc[N][M];
        UNROLL for (int o = 0; o < N; o++)
            UNROLL for (int i = 0; i < M; i++) acc[o][i] = V{};
        for (int s = 0; s < rows; s++) {
            V v[M];
            UNROLL for (int i = 0; i < M; i++) v[i] = load(x + s * sx + i * LANES);
            UNROLL for (int o = 0; o < N; o++) {
                V g = splat(d[s * sd + o]);
                UNROLL for (int i = 0; i < M; i++) acc[o][i] += v[i] * g;
            }
        }
        UNROLL for (int o = 0; o < N; o++)
            UNROLL for (int i = 0; i < M; i++) {
                float* to = dw + (int64_t)o * I + i * LANES;
                if (tail && i == M - 1) {
                    for (int l = 0; l < tail; l++) to[l] += acc[o][i][l];
                } else {
                    store(to, load(to) + acc[o][i]);
                }
            }
    }
    template <int M>
    OP void columns(const float* x, int64_t sx, const float* d, int64_t sd, int rows, float* dw, int tail) {
        constexpr int whole = O / tile.n * tile.n;
        for (int o = 0; o < whole; o += tile.n) block<tile.n, M>(x, sx, d + o, sd, rows, dw + (int64_t)o * I, tail);
        if constexpr (O % tile.n != 0) block<O % tile.n, M>(x, sx, d + whole, sd, rows, dw + (int64_t)whole * I, tail);
    }
    static void run(const float* x, int64_t sx, const float* d, int64_t sd, int rows, float* dw) {
        constexpr int vectors = IR / LANES, whole = vectors / tile.m * tile.m, rest = vectors % tile.m, some = 256;
        for (; rows > 0; rows -= some, x += some * sx, d += some * sd) {
            const int now = rows < some ? rows : some;
            for (int i = 0; i < whole; i += tile.m)
                columns<tile.m>(x + i * LANES, sx, d, sd, now, dw + i * LANES, !rest && i + tile.m == whole ? I % LANES : 0);
            if constexpr (rest != 0) columns<rest>(x + whole * LANES, sx, d, sd, now, dw + whole * LANES, I % LANES);
        }
    }
    OP void bias(const float* d, int64_t sd, int rows, float* db) {
        for (int o = 0; o < O; o += LANES) {
            V s = {};
            for (int r = 0; r < rows; r++) s += load(d + r * sd + o);
            store(db + o, load(db + o) + s);
        }
    }
};

// A linear map of each of `each` rows of every sample, where I and O are wide whole vectors. Room: SEQ_TILE blocks of inputs
// and of outputs as rows, packed weights, a block of the wider of both, and a row of it.
template <int I, int O>
struct Sequence {
    // Whether many places of so many blocks are empty.
    INLINE bool suits(int samples, int nb) { return samples * 6 <= nb * LANES * 5; }

    OP void forward(const V* x, const float* w, const float* b, V* y, V* xs, V* ys, V* packed, V* block, V* none, int nb,
                    int each, int samples) {
        if (!suits(samples, nb)) return Linear<I, O>::forward(x, w, b, y, nb * each);
        RowMap<I, O>::template pack<true>(w, (float*)packed);
        run<I, O, false, false>(x, packed, b, y, xs, ys, block, none, nb * each, samples / LANES * each, samples % LANES);
    }

    template <bool ADD>
    OP void backward_input(const V* dy, const float* w, V* dx, V* xs, V* ys, V* packed, V* block, V* none, int nb, int each,
                           int samples) {
        if (!suits(samples, nb)) return Linear<I, O>::template backward_input<ADD>(dy, w, dx, nb * each);
        RowMap<O, I>::template pack<false>(w, (float*)packed);
        run<O, I, ADD, true>(dy, packed, nullptr, dx, ys, xs, block, none, nb * each, samples / LANES * each, samples % LANES);
    }

    // The blocks from `full` on have only so many samples; their empty places get the last one's numbers, or ZERO.
    template <int R, int C, bool ADD, bool ZERO>
    static void run(const V* x, const V* packed, const float* base, V* y, V* xs, V* ys, V* block, V* none, int nb, int full,
                    int used) {
        float *in = (float*)xs, *out = (float*)ys, *zeros = (float*)none;
        std::memset(zeros, 0, sizeof(float) * C);
        for (int at = 0; at < nb; at += SEQ_TILE, x += SEQ_TILE * R, y += SEQ_TILE * C) {
            const int n = nb - at < SEQ_TILE ? nb - at : SEQ_TILE, first = full - at < 0 ? 0 : full - at < n ? full - at : n;
            for (int k = 0; k < n; k++) scatter<R>(x + k * R, in + Linear<I, O>::start(k, first, used) * R);
            RowMap<R, C>::template run<false>(in, R, (const float*)packed, base, out, C, Linear<I, O>::start(n, first, used));
            for (int k = 0; k < n; k++) {
                const int there = k < first ? LANES : used;
                const float *from = out + Linear<I, O>::start(k, first, used) * C, *each[LANES];
                for (int l = 0; l < LANES; l++) each[l] = l < there ? from + l * C : ZERO ? zeros : from + (there - 1) * C;
                gather<C>(each, ADD ? block : y + k * C);
                for (int c = 0; ADD && c < C; c++) y[k * C + c] += block[c];
            }
        }
    }
};
