// Layers of images: convolutions and poolings.

// Correlation -----------------------------------------------------------------------------------------------

// out[o][y][x] = base[o] + sum over (i, ky, kx) of in[i][y SY + ky][x SX + kx] w[i][ky][kx][o], w packed by
// tiles of o. Only the rows first, first + GAP, ... before `last` of `in` are read: the others are zero. Places of the
// kernel lie DY and DX apart; where DY is not 1, GAP is.
template <int I, int H, int W, int O, int KY, int KX, int SY, int SX, int OY, int OX, int GAP = 1, int DY = 1, int DX = 1>
struct DirectConv {
    static constexpr Tile tile = best_tile(O, OX, 1, 4);
    static constexpr int taps = I * KY * KX;

    // w[o][i][ky][kx] at stride (so, si), turned by half a turn if `turn`, into tiles.
    static void pack(const float* w, int so, int si, bool turn, float* to) {
        for (int o0 = 0; o0 < O; o0 += tile.n) {
            int n = O - o0 < tile.n ? O - o0 : tile.n;
            for (int i = 0; i < I; i++)
                for (int k = 0; k < KY * KX; k++)
                    for (int o = 0; o < n; o++)
                        *to++ = w[(o0 + o) * so + i * si + (turn ? KY * KX - 1 - k : k)];
        }
    }

    template <int N, int M, bool ADD>
    INLINE void block(const V* in, const float* w, const float* base, V* out, int k0, int k1) {
        V acc[N][M];
        UNROLL for (int o = 0; o < N; o++)
            UNROLL for (int x = 0; x < M; x++) acc[o][x] = base ? splat(base[o]) : V{};
        for (int i = 0; i < I; i++)
            for (int ky = k0; ky < k1; ky += GAP) {
                const V* row = in + (i * H + ky * DY) * W;
                const float* at = w + (i * KY + ky) * KX * N;
                UNROLL for (int kx = 0; kx < KX; kx++) {
                    V v[M];
                    UNROLL for (int x = 0; x < M; x++) v[x] = row[x * SX + kx * DX];
                    UNROLL for (int o = 0; o < N; o++) {
                        V c = splat(at[kx * N + o]);
                        UNROLL for (int x = 0; x < M; x++) acc[o][x] += v[x] * c;
                    }
                }
            }
        UNROLL for (int o = 0; o < N; o++)
            UNROLL for (int x = 0; x < M; x++) {
                V* to = out + o * OY * OX + x;
                *to = ADD ? *to + acc[o][x] : acc[o][x];
            }
    }

    template <int N, bool ADD>
    static void rows(const V* in, const float* w, const float* base, V* out, int first, int last) {
        constexpr int whole = OX / tile.m * tile.m;
        for (int y = 0; y < OY; y++) {
            int start = first - y * SY, end = (last - y * SY + DY - 1) / DY, k1 = end < KY ? end : KY;
            int k0 = start > 0 ? (start + DY - 1) / DY : (GAP - -start % GAP) % GAP;
            const V* from = in + y * SY * W;
            V* to = out + y * OX;
            for (int x = 0; x < whole; x += tile.m)
                block<N, tile.m, ADD>(from + x * SX, w, base, to + x, k0, k1);
            if constexpr (OX % tile.m != 0)
                block<N, OX % tile.m, ADD>(from + whole * SX, w, base, to + whole, k0, k1);
        }
    }

    template <bool ADD>
    OP void run(const V* in, const float* w, const float* base, V* out, int first, int last) {
        constexpr int whole = O / tile.n * tile.n;
        for (int o = 0; o < whole; o += tile.n)
            rows<tile.n, ADD>(in, w + o * taps, base ? base + o : base, out + o * OY * OX, first, last);
        if constexpr (O % tile.n != 0)
            rows<O % tile.n, ADD>(in, w + whole * taps, base ? base + whole : base, out + whole * OY * OX, first, last);
    }
};

// The way back through a convolution of stride 1 whose rows of dx fit in registers: no border is needed, and
// none of its zeros multiplied. dx[i][y][x] = sum over (o, ky, kx) of dy[o][y + PY - ky][x + PX - kx] w[o][i][ky][kx].
template <int I, int H, int W, int O, int KY, int KX, int PY, int PX>
struct SmallConv {
    static constexpr int OY = H + 2 * PY - KY + 1, OX = W + 2 * PX - KX + 1;
    static constexpr int at_once = (ACCUMULATORS + 5) / (W + KX) < I ? (ACCUMULATORS + 5) / (W + KX) : I;

    static constexpr int useful() {
        int taps = 0;
        for (int j = 0; j < OX; j++)
            for (int k = 0; k < KX; k++) taps += j + k - PX >= 0 && j + k - PX < W;
        return taps;
    }
    static constexpr bool pays = at_once > 0 && useful() * 10 < W * KX * 8;

    template <int N, bool ADD>
    static void planes(const V* dy, const float* w, V* dx) {
        for (int y = 0; y < H; y++) {
            V acc[N][W];
            UNROLL for (int i = 0; i < N; i++)
                UNROLL for (int x = 0; x < W; x++) acc[i][x] = V{};
            int k0 = y + PY - OY + 1 > 0 ? y + PY - OY + 1 : 0, k1 = y + PY + 1 < KY ? y + PY + 1 : KY;
            for (int o = 0; o < O; o++)
                for (int ky = k0; ky < k1; ky++) {
                    const V* row = dy + (o * OY + y + PY - ky) * OX;
                    V c[N][KX];
                    UNROLL for (int i = 0; i < N; i++)
                        UNROLL for (int k = 0; k < KX; k++) c[i][k] = splat(w[((o * I + i) * KY + ky) * KX + k]);
                    UNROLL for (int j = 0; j < OX; j++)
                        UNROLL for (int i = 0; i < N; i++)
                            UNROLL for (int k = 0; k < KX; k++)
                                if (j + k - PX >= 0 && j + k - PX < W) acc[i][j + k - PX] += row[j] * c[i][k];
                }
            UNROLL for (int i = 0; i < N; i++)
                UNROLL for (int x = 0; x < W; x++) {
                    V* to = dx + (i * H + y) * W + x;
                    *to = ADD ? *to + acc[i][x] : acc[i][x];
                }
        }
    }

    template <bool ADD>
    OP void run(const V* dy, const float* w, V* dx) {
        constexpr int whole = I / at_once * at_once;
        for (int i = 0; i < whole; i += at_once) planes<at_once, ADD>(dy, w + i * KY * KX, dx + i * H * W);
        if constexpr (I % at_once != 0) planes<I % at_once, ADD>(dy, w + whole * KY * KX, dx + whole * H * W);
    }
};

// Winograd ----------------------------------------------------------------------------------------------------

// How T outputs come from T + 2 inputs and 3 weights, y = A'[(G w)(B'x)], in one direction: `inputs` is B', `outputs` A',
// `slopes` A, `weights` G and `fold` G'. T is 2, where all is 0, 1, -1 and halves, or 4.
template <int T>
struct Points;

template <>
struct Points<2> {
    INLINE void inputs(const V* d, V* t) { t[0] = d[0] - d[2], t[1] = d[1] + d[2], t[2] = d[2] - d[1], t[3] = d[1] - d[3]; }
    INLINE void outputs(const V* m, V* y) { y[0] = m[0] + (m[1] + m[2]), y[1] = (m[1] - m[2]) - m[3]; }
    INLINE void slopes(const V* y, V* m) { m[0] = y[0], m[1] = y[0] + y[1], m[2] = y[0] - y[1], m[3] = -y[1]; }
    INLINE void weights(const V* w, V* u) {
        V half = (w[0] + w[2]) * 0.5f, odd = w[1] * 0.5f;
        u[0] = w[0], u[1] = half + odd, u[2] = half - odd, u[3] = w[2];
    }
    INLINE void fold(const V* u, V* w) {
        V even = (u[1] + u[2]) * 0.5f;
        w[0] = u[0] + even, w[1] = (u[1] - u[2]) * 0.5f, w[2] = even + u[3];
    }
};

// At 0, 3/4, -3/4, 3/2, -3/2 and infinity, which round three times less than the usual 1 and 2.
template <>
struct Points<4> {
    static constexpr float a = 0.75f, b = 1.5f, a2 = a * a, b2 = b * b, both = a2 * b2;
    static constexpr float g0 = 1 / both, ga = 1 / (2 * a2 * (a2 - b2)), gb = 1 / (2 * b2 * (b2 - a2));

    INLINE void inputs(const V* d, V* t) {
        V p = d[4] - d[2] * b2, q = (d[3] - d[1] * b2) * a, r = d[4] - d[2] * a2, s = (d[3] - d[1] * a2) * b;
        t[0] = d[0] * both - d[2] * (a2 + b2) + d[4];
        t[1] = p + q, t[2] = p - q, t[3] = r + s, t[4] = r - s;
        t[5] = d[1] * both - d[3] * (a2 + b2) + d[5];
    }
    INLINE void outputs(const V* m, V* y) {
        V p = m[1] + m[2], q = m[1] - m[2], r = m[3] + m[4], s = m[3] - m[4];
        y[0] = m[0] + p + r, y[1] = q * a + s * b, y[2] = p * a2 + r * b2, y[3] = q * (a2 * a) + s * (b2 * b) + m[5];
    }
    INLINE void slopes(const V* y, V* m) {
        V p = y[0] + y[2] * a2, q = y[1] * a + y[3] * (a2 * a), r = y[0] + y[2] * b2, s = y[1] * b + y[3] * (b2 * b);
        m[0] = y[0], m[1] = p + q, m[2] = p - q, m[3] = r + s, m[4] = r - s, m[5] = y[3];
    }
    INLINE void weights(const V* w, V* u) {
        V p = (w[0] + w[2] * a2) * ga, q = w[1] * (a * ga), r = (w[0] + w[2] * b2) * gb, s = w[1] * (b * gb);
        u[0] = w[0] * g0, u[1] = p + q, u[2] = p - q, u[3] = r + s, u[4] = r - s, u[5] = w[2];
    }
    INLINE void fold(const V* u, V* w) {
        V p = (u[1] + u[2]) * ga, q = (u[1] - u[2]) * ga, r = (u[3] + u[4]) * gb, s = (u[3] - u[4]) * gb;
        w[0] = u[0] * g0 + p + r, w[1] = q * a + s * b, w[2] = p * a2 + r * b2 + u[5];
    }
};

constexpr int across(int n, int T) { return (n + T - 1) / T; }

// A convolution of 3 x 3 and stride 1 by tiles of T x T outputs, each from E x E inputs: where there were 9 T T products
// there are E E. These places are matrix products of a panel of P tiles, [channel][tile], which stays in the cache.
template <int I, int H, int W, int O, int PY, int PX, int T, int P>
struct Winograd {
    typedef Points<T> At;
    static constexpr int E = T + 2, places = E * E;
    static constexpr int OY = H + 2 * PY - 2, OX = W + 2 * PX - 2, TY = across(OY, T), TX = across(OX, T);
    static constexpr int tiles = TY * TX, IR = round_up(I);
    static constexpr int plane = O * I + 16;  // of the places of weights, in numbers: beyond a power of two

    // f of each column, then of each row: [FROM][FROM] to [TO][TO], which lie so far apart.
    template <int FROM, int TO, class F>
    INLINE void twice(const V* from, int64_t row, int64_t column, V* to, int64_t to_row, int64_t to_column, F f) {
        V half[FROM * TO];
        for (int c = 0; c < FROM; c++) {
            V a[FROM], b[TO];
            UNROLL for (int r = 0; r < FROM; r++) a[r] = from[r * row + c * column];
            f(a, b);
            UNROLL for (int r = 0; r < TO; r++) half[r * FROM + c] = b[r];
        }
        for (int r = 0; r < TO; r++) {
            V b[TO];
            f(half + r * FROM, b);
            UNROLL for (int c = 0; c < TO; c++) to[r * to_row + c * to_column] = b[c];
        }
    }

    // Rows and columns of a tile that lie in an image of so many.
    INLINE void clip(int at, int size, int n, int& first, int& last) {
        first = at < 0 ? -at : 0, last = at + size > n ? n - at : size;
    }

    // G w G' for every output o and input i, w at o * so + i * si, turned by half a turn if `turn`.
    OP void weights(const float* w, int64_t so, int64_t si, bool turn, float* to) {
        for (int o = 0; o < O; o++)
            for (int i = 0; i < I; i += LANES) {
                const float* from[LANES];
                for (int l = 0; l < LANES; l++) from[l] = w + o * so + (i + l < I ? i + l : I - 1) * si;
                V g[9], u[places];
                for (int k = 0; k < 9; k++)
                    UNROLL for (int l = 0; l < LANES; l++) g[k][l] = from[l][turn ? 8 - k : k];
                twice<3, E>(g, 3, 1, u, E, 1, [](const V* a, V* b) { At::weights(a, b); });
                float* at = to + o * I + i;  // what a row writes beyond its end the next one writes over
                for (int k = 0; k < places; k++) store(at + k * plane, u[k]);
            }
    }

    // f(number in the panel, block, row, column) for `count` tiles from `first` on.
    template <class F>
    INLINE void each_tile(int first, int count, F f) {
        int n = first / tiles, ty = first % tiles / TX, tx = first % tiles % TX;
        for (int t = 0; t < count; t++) {
            f(t, n, ty, tx);
            if (++tx < TX) continue;
            tx = 0;
            if (++ty == TY) ty = 0, n++;
        }
    }

    // B'x B of one channel's tile, the places `apart` from each other.
    INLINE void input(const V* plane, int ty, int tx, V* to, int apart) {
        const int y = T * ty - PY, x = T * tx - PX;
        const auto f = [](const V* a, V* b) { At::inputs(a, b); };
        const V* from = plane + y * W + x;
        int top, bottom, left, right;
        clip(y, E, H, top, bottom), clip(x, E, W, left, right);
        if (bottom - top == E && right - left == E) return twice<E, E>(from, W, 1, to, E * apart, apart, f);
        V d[places] = {};
        for (int r = top; r < bottom; r++)
            for (int c = left; c < right; c++) d[r * E + c] = from[r * W + c];
        twice<E, E>(d, E, 1, to, E * apart, apart, f);
    }

    OP void inputs(const V* in, int first, int count, V* to) {
        for (int i = 0; i < I; i++)
            each_tile(first, count, [=](int t, int n, int ty, int tx) {
                input(in + ((int64_t)n * I + i) * (H * W), ty, tx, to + i * P + t, I * P + 2);
            });
    }

    // A'm A of a panel, and the bias.
    template <bool ADD>
    OP void outputs(const V* m, const float* base, int first, int count, V* out) {
        constexpr int apart = O * P + 2;
        for (int o = 0; o < O; o++) {
            const V b = splat(base ? base[o] : 0.f);
            each_tile(first, count, [=](int t, int n, int ty, int tx) {
                V y[T * T];
                twice<E, T>(m + o * P + t, E * apart, apart, y, T, 1, [](const V* a, V* b) { At::outputs(a, b); });
                V* to = out + ((int64_t)n * O + o) * (OY * OX) + T * ty * OX + T * tx;
                const int low = OY - T * ty < T ? OY - T * ty : T, right = OX - T * tx < T ? OX - T * tx : T;
                for (int r = 0; r < low; r++)
                    for (int c = 0; c < right; c++) {
                        V v = y[r * T + c] + b;
                        to[r * OX + c] = ADD ? to[r * OX + c] + v : v;
                    }
            });
        }
    }

    template <bool ADD>
    OP void run(const V* in, const float* u, const float* base, V* out, V* x, V* m, int nb) {
        constexpr int apart = I * P + 2, apart_out = O * P + 2;
        for (int first = 0; first < nb * tiles; first += P) {
            const int count = nb * tiles - first < P ? nb * tiles - first : P;
            inputs(in, first, count, x);
            for (int k = 0; k < places; k++)
                Linear<I, O>::template run<I, O, 1, I, false, P, P>(x + k * apart, u + k * plane, nullptr, m + k * apart_out,
                                                                    count, 1, 1);
            outputs<ADD>(m, base, first, count, out);
        }
    }

    // A dy A' of a panel.
    OP void slopes(const V* dy, int first, int count, V* to) {
        constexpr int apart = O * P + 2;
        for (int o = 0; o < O; o++)
            each_tile(first, count, [=](int t, int n, int ty, int tx) {
                const V* from = dy + ((int64_t)n * O + o) * (OY * OX) + T * ty * OX + T * tx;
                const auto f = [](const V* a, V* b) { At::slopes(a, b); };
                const int low = OY - T * ty < T ? OY - T * ty : T, right = OX - T * tx < T ? OX - T * tx : T;
                V* at = to + o * P + t;
                if (low == T && right == T) return twice<T, E>(from, OX, 1, at, E * apart, apart, f);
                V y[T * T] = {};
                for (int r = 0; r < low; r++)
                    for (int c = 0; c < right; c++) y[r * T + c] = from[r * OX + c];
                twice<T, E>(y, T, 1, at, E * apart, apart, f);
            });
    }

    // B'x B of a panel with samples as rows: [place][tile and lane][channel].
    OP void turned_inputs(const V* in, int first, int count, V* to) {
        constexpr int apart = IR * P + 2;
        for (int i = 0; i < I; i += LANES)
            each_tile(first, count, [=](int t, int n, int ty, int tx) {
                V some[places][LANES];
                for (int l = 0; l < LANES; l++)
                    input(in + ((int64_t)n * I + (i + l < I ? i + l : I - 1)) * (H * W), ty, tx, &some[0][l], LANES);
                float* at = (float*)to + t * LANES * IR + i;
                for (int k = 0; k < places; k++) {
                    transpose(some[k]);
                    UNROLL for (int l = 0; l < LANES; l++) *(V*)(at + k * (apart * LANES) + l * IR) = some[k][l];
                }
            });
    }

    static constexpr Tile tile = best_tile(O, IR / LANES, 1, 4);

    // du[o][i] += sum over tiles and lanes of m[o][.] x[.][i], for N outputs and M vectors of inputs.
    template <int N, int M>
    INLINE void product(const float* x, const float* m, float* du, int count) {
        V acc[N][M];
        UNROLL for (int o = 0; o < N; o++)
            UNROLL for (int i = 0; i < M; i++) acc[o][i] = load(du + o * IR + i * LANES);
        for (int s = 0; s < count * LANES; s++) {
            V v[M];
            UNROLL for (int i = 0; i < M; i++) v[i] = *(const V*)(x + s * IR + i * LANES);
            UNROLL for (int o = 0; o < N; o++) {
                V g = splat(m[o * P * LANES + s]);
                UNROLL for (int i = 0; i < M; i++) acc[o][i] += v[i] * g;
            }
        }
        UNROLL for (int o = 0; o < N; o++)
            UNROLL for (int i = 0; i < M; i++) store(du + o * IR + i * LANES, acc[o][i]);
    }

    template <int M>
    OP void products(const float* x, const float* m, float* du, int count) {
        constexpr int whole = O / tile.n * tile.n;
        for (int o = 0; o < whole; o += tile.n) product<tile.n, M>(x, m + o * P * LANES, du + o * IR, count);
        if constexpr (O % tile.n != 0) product<O % tile.n, M>(x, m + whole * P * LANES, du + whole * IR, count);
    }

    OP void weight(const V* in, const V* dy, float* dw, float* du, V* x, V* m, int nb, bool add) {
        constexpr int apart = (IR * P + 2) * LANES, apart_out = (O * P + 2) * LANES, vectors = IR / LANES;
        constexpr int whole = vectors / tile.m * tile.m;
        std::memset((void*)du, 0, sizeof(float) * places * O * IR);
        for (int first = 0; first < nb * tiles; first += P) {
            const int count = nb * tiles - first < P ? nb * tiles - first : P;
            turned_inputs(in, first, count, x);
            slopes(dy, first, count, m);
            for (int k = 0; k < places; k++) {
                const float *xs = (float*)x + k * apart, *ms = (float*)m + k * apart_out;
                float* to = du + k * O * IR;
                for (int i = 0; i < whole; i += tile.m) products<tile.m>(xs + i * LANES, ms, to + i * LANES, count);
                if constexpr (vectors % tile.m != 0)
                    products<vectors % tile.m>(xs + whole * LANES, ms, to + whole * LANES, count);
            }
        }
        for (int o = 0; o < O; o++)
            for (int i = 0; i < I; i += LANES) {
                V e[places], g[9];
                for (int k = 0; k < places; k++) e[k] = load(du + (k * O + o) * IR + i);
                twice<E, 3>(e, E, 1, g, 3, 1, [](const V* a, V* b) { At::fold(a, b); });
                for (int l = 0; l < LANES && i + l < I; l++)
                    for (int k = 0; k < 9; k++) put(dw + ((int64_t)o * I + i + l) * 9 + k, g[k][l], add);
            }
    }
};

// Conv2d ----------------------------------------------------------------------------------------------------

// By tiles of T x T outputs and panels of P of them, or directly where T is 0. Room: packed weights; then panels of inputs and
// of outputs, or one block's gradient with its border.
template <int I, int H, int W, int O, int KY, int KX, int SY, int SX, int PY, int PX, int DY, int DX, int T, int P>
struct Conv2d {
    static_assert((DY == 1 || SY == 1) && (DX == 1 || SX == 1), "a kernel with gaps and a stride");
    static constexpr int HP = H + 2 * PY, WP = W + 2 * PX, FY = DY * (KY - 1), FX = DX * (KX - 1);
    static constexpr int OY = (HP - FY - 1) / SY + 1, OX = (WP - FX - 1) / SX + 1;
    static constexpr int HB = H + FY, WB = W + FX;  // dy, spread out and bordered for the way back
    static constexpr bool padded = PY || PX;
    static constexpr int in_size = I * H * W, out_size = O * OY * OX, saved = I * HP * WP;  // the padded input,
    static constexpr bool saves = padded && T == 0;                                          // of which tiles need none
    static constexpr int weights = O * I * KY * KX;
    typedef DirectConv<I, HP, WP, O, KY, KX, SY, SX, OY, OX, 1, DY, DX> Forward;
    typedef DirectConv<O, HB, WB, I, KY, KX, 1, 1, H, W, SY, DY, DX> Backward;
    static constexpr bool dense = DY == 1 && DX == 1;
    typedef Winograd<I, H, W, O, PY, PX, T, P> Tiles;
    typedef Winograd<O, OY, OX, I, 2 - PY, 2 - PX, T, P> TilesBack;

    static constexpr int columns = KX, first_row = PY, last_row = PY + H;  // of the kernel; of the padded input that are not zero

    static void pad(const V* x, V* to) {
        std::memset((void*)to, 0, sizeof(V) * I * HP * WP);
        for (int i = 0; i < I; i++)
            for (int y = 0; y < H; y++)
                std::memcpy((void*)(to + (i * HP + y + PY) * WP + PX), x + (i * H + y) * W, sizeof(V) * W);
    }

    template <bool ADD = false>
    OP void forward(const V* x, const float* w, const float* b, V* y, V* room, V* packed, V* ins, V* outs, int nb) {
        float* u = (float*)packed;
        if constexpr (T != 0) {
            Tiles::weights(w, I * 9, 9, false, u);
            Tiles::template run<ADD>(x, u, b, y, ins, outs, nb);
        } else {
            forward_bordered<ADD>(x, w, b, y, room, u, nb);
        }
    }

    // A block's input with its border, made in `room` where there is one.
    static const V* bordered(const V* x, V* room) {
        if constexpr (padded) pad(x, room);
        return padded ? room : x;
    }

    template <bool ADD>
    static void forward_bordered(const V* x, const float* w, const float* b, V* y, V* room, float* u, int nb) {
        Forward::pack(w, I * KY * KX, KY * KX, false, u);
        for (int n = 0; n < nb; n++) {
            const V* from = bordered(x + n * in_size, room + n * saved);
            Forward::template run<ADD>(from, u, b, y + n * out_size, first_row, last_row);
        }
    }

    template <bool ADD>
    OP void backward_input(const V* dy, const float* w, V* dx, V* packed, V* ins, V* outs, int nb) {
        typedef SmallConv<I, H, W, O, KY, KX, PY, PX> Small;
        float* u = (float*)packed;
        if constexpr (T != 0) {
            TilesBack::weights(w, 9, I * 9, true, u);
            TilesBack::template run<ADD>(dy, u, nullptr, dx, outs, ins, nb);
        } else if constexpr (dense && SY == 1 && SX == 1 && Small::pays) {
            for (int n = 0; n < nb; n++) Small::template run<ADD>(dy + n * out_size, w, dx + n * in_size);
        } else {
            backward_bordered<ADD>(dy, w, dx, u, ins, nb);
        }
    }

    template <bool ADD>
    static void backward_bordered(const V* dy, const float* w, V* dx, float* u, V* wide, int nb) {
        constexpr int top = FY - PY, left = FX - PX;
        Backward::pack(w, KY * KX, I * KY * KX, true, u);
        std::memset((void*)wide, 0, sizeof(V) * O * HB * WB);
        constexpr int first = top > 0 ? top : (SY - -top % SY) % SY;
        constexpr int last = (OY - 1) * SY + top + 1 < HB ? (OY - 1) * SY + top + 1 : HB;
        for (int n = 0; n < nb; n++) {
            const V* from = dy + n * out_size;
            for (int o = 0; o < O; o++)
                for (int y = 0; y < OY; y++) {
                    int to_y = y * SY + top;
                    if (to_y < 0 || to_y >= HB) continue;
                    for (int x = 0; x < OX; x++) {
                        int to_x = x * SX + left;
                        if (to_x >= 0 && to_x < WB) wide[(o * HB + to_y) * WB + to_x] = from[(o * OY + y) * OX + x];
                    }
                }
            Backward::template run<ADD>(wide, u, nullptr, dx + n * in_size, first, last);
        }
    }

    static constexpr Tile tile = best_tile(O, I, KX, 4);  // of the weights: outputs by (inputs and columns)

    // acc[o][i][k] += sum over a block's places (y, c) of x[i][y SY + ky][c SX + k] dy[o][y][c].
    template <int N, int M>
    INLINE void along(V (&acc)[N][M][KX], const V* x, const V* dy, int ky) {
        for (int y = 0; y < OY; y++) {
            const V *row = x + (y * SY + ky * DY) * WP, *d = dy + y * OX;
            for (int c = 0; c < OX; c++) {
                V v[M][KX];
                UNROLL for (int i = 0; i < M; i++)
                    UNROLL for (int k = 0; k < KX; k++) v[i][k] = row[i * HP * WP + c * SX + k * DX];
                UNROLL for (int o = 0; o < N; o++) {
                    V g = d[o * OY * OX + c];
                    UNROLL for (int i = 0; i < M; i++)
                        UNROLL for (int k = 0; k < KX; k++) acc[o][i][k] += v[i][k] * g;
                }
            }
        }
    }

    template <int N, int M>
    static void weight_block(const V* x, const V* dy, int ky, int nb, float* dw, bool add) {
        V acc[N][M][KX];
        UNROLL for (int o = 0; o < N; o++)
            UNROLL for (int i = 0; i < M; i++)
                UNROLL for (int k = 0; k < KX; k++) acc[o][i][k] = V{};
        for (int n = 0; n < nb; n++) along<N, M>(acc, x + n * (I * HP * WP), dy + n * out_size, ky);
        UNROLL for (int o = 0; o < N; o++)
            UNROLL for (int i = 0; i < M; i++)
                UNROLL for (int k = 0; k < KX; k++)
                    put(dw + ((o * I + i) * KY + ky) * KX + k, total(acc[o][i][k]), add);
    }

    template <int N>
    OP void weight_rows(const V* x, const V* dy, int nb, float* dw, bool add) {
        constexpr int whole = I / tile.m * tile.m;
        for (int i = 0; i < whole; i += tile.m)
            for (int ky = 0; ky < KY; ky++)
                weight_block<N, tile.m>(x + i * HP * WP, dy, ky, nb, dw + i * KY * KX, add);
        if constexpr (I % tile.m != 0)
            for (int ky = 0; ky < KY; ky++)
                weight_block<N, I % tile.m>(x + whole * HP * WP, dy, ky, nb, dw + whole * KY * KX, add);
    }

    static void weight_bordered(const V* from, const V* dy, float* dw, int nb, bool add) {
        constexpr int whole = O / tile.n * tile.n, each = I * KY * KX;
        for (int o = 0; o < whole; o += tile.n) weight_rows<tile.n>(from, dy + o * OY * OX, nb, dw + o * each, add);
        if constexpr (O % tile.n != 0)
            weight_rows<O % tile.n>(from, dy + whole * OY * OX, nb, dw + whole * each, add);
    }

    OP void backward_weight(const V* x, const V* dy, float* dw, float* db, const V* room, V* packed, V* ins, V* outs, int nb,
                            bool add) {
        if constexpr (T != 0) {
            if (dw) Tiles::weight(x, dy, dw, (float*)packed, ins, outs, nb, add);
        } else {
            if (dw) weight_bordered(padded ? room : x, dy, dw, nb, add);
        }
        if (db)
            for (int o = 0; o < O; o++) {
                V s = {};
                for (int n = 0; n < nb; n++) {
                    const V* from = dy + n * out_size + o * OY * OX;
                    s += sum(OY * OX, [=](int k) { return from[k]; });
                }
                put(db + o, total(s), add);
            }
    }
};

// A convolution the other way round: C goes from what this gives to what this gets, and shares its weights.
template <class C, int O>
struct ConvTranspose2d {
    static constexpr int plane = C::in_size / O;

    OP void forward(const V* x, const float* w, const float* b, V* y, V* packed, V* ins, V* outs, int nb) {
        C::template backward_input<false>(x, w, y, packed, ins, outs, nb);
        for (int k = 0; b && k < O * nb; k++)
            for (int i = 0; i < plane; i++) y[k * plane + i] += b[k % O];
    }

    template <bool ADD>
    OP void backward(const V* x, const float* w, const V* dy, V* dx, float* dw, float* db, V* room, V* packed, V* ins, V* outs,
                     int nb, bool add) {
        if (dx) C::template forward<ADD>(dy, w, nullptr, dx, room, packed, ins, outs, nb);
        for (int n = 0; !dx && C::saves && n < nb; n++) C::bordered(dy + n * C::in_size, room + n * C::saved);
        if (dw) C::backward_weight(dy, x, dw, nullptr, room, packed, ins, outs, nb, add);
        for (int o = 0; db && o < O; o++) {
            V s = {};
            for (int n = 0; n < nb; n++) {
                const V* from = dy + n * C::in_size + o * plane;
                s += sum(plane, [=](int k) { return from[k]; });
            }
            put(db + o, total(s), add);
        }
    }
};

// Pooling ---------------------------------------------------------------------------------------------------

// EY and EX: how far the last windows may reach beyond the border.
template <int C, int H, int W, int KY, int KX, int SY, int SX, int PY, int PX, int EY = 0, int EX = 0>
struct Pool2d {
    static constexpr int OY = (H + 2 * PY + EY - KY) / SY + 1, OX = (W + 2 * PX + EX - KX) / SX + 1;
    static constexpr int in_size = C * H * W, out_size = C * OY * OX;
    static constexpr bool apart = SY == KY && SX == KX && !PY && !PX && !EY && !EX;  // windows neither overlap nor leave the image
    static constexpr bool covers = apart && OY * KY == H && OX * KX == W;

    // f(offset of the input) for each place of the window at (y, x), in PyTorch's order.
    template <class F>
    INLINE void window(int y, int x, F f) {
        UNROLL for (int ky = 0; ky < KY; ky++)
            UNROLL for (int kx = 0; kx < KX; kx++) {
                int iy = y * SY - PY + ky, ix = x * SX - PX + kx;
                if (apart || (iy >= 0 && iy < H && ix >= 0 && ix < W)) f(iy * W + ix);
            }
    }

    template <class F>
    INLINE void planes(int nb, F f) {
        for (int c = 0; c < nb * C; c++)
            for (int y = 0; y < OY; y++)
                for (int x = 0; x < OX; x++) f(c * H * W, (c * OY + y) * OX + x, y, x);
    }

    // The largest of a window, and of 0 if RECTIFY.
    template <bool RECTIFY>
    OP void max_forward(const V* x, V* y, int nb) {
        planes(nb, [=](int plane, int at, int oy, int ox) {
            V m = RECTIFY ? V{} : splat(-INFINITY);
            window(oy, ox, [&](int k) { m = max(m, x[plane + k]); });
            y[at] = m;
        });
    }

    template <bool RECTIFY, bool ADD>
    OP void max_backward(const V* x, const V* y, const V* dy, V* dx, int nb) {
        if (!ADD && !covers) std::memset((void*)dx, 0, sizeof(V) * in_size * nb);
        planes(nb, [=](int plane, int at, int oy, int ox) {
            V m = y[at], g = RECTIFY ? keep(m > 0.f, dy[at]) : dy[at];
            window(oy, ox, [&](int k) {  // the first of equals takes it all
                VI hit = x[plane + k] == m;
                V part = keep(hit, g);
                g = keep(~hit, g);
                dx[plane + k] = !ADD && apart ? part : dx[plane + k] + part;
            });
        });
    }

    // DIVISOR 0: by how many places of the window lie inside the image.
    template <int DIVISOR>
    INLINE float share(int y, int x) {
        int count = 0;
        window(y, x, [&](int) { count++; });
        return 1.f / (DIVISOR ? DIVISOR : count);
    }

    template <int DIVISOR>
    OP void mean_forward(const V* x, V* y, int nb) {
        planes(nb, [=](int plane, int at, int oy, int ox) {
            V s = {};
            window(oy, ox, [&](int k) { s += x[plane + k]; });
            y[at] = s * share<DIVISOR>(oy, ox);
        });
    }

    template <int DIVISOR, bool ADD>
    OP void mean_backward(const V* dy, V* dx, int nb) {
        if (!ADD && !covers) std::memset((void*)dx, 0, sizeof(V) * in_size * nb);
        planes(nb, [=](int plane, int at, int oy, int ox) {
            V g = dy[at] * share<DIVISOR>(oy, ox);
            window(oy, ox, [&](int k) { dx[plane + k] = !ADD && apart ? g : dx[plane + k] + g; });
        });
    }
};

// The mean of windows that cut an image as evenly as can be, where they overlap.
template <int C, int H, int W, int OY, int OX>
struct AdaptiveAvgPool2d {
    static constexpr int in_size = C * H * W;

    // f(offset of the plane, of the output, window) for each output.
    template <class F>
    INLINE void each(int nb, F f) {
        for (int64_t c = 0; c < nb * C; c++)
            for (int y = 0; y < OY; y++)
                for (int x = 0; x < OX; x++)
                    f(c * (H * W), (c * OY + y) * OX + x, y * H / OY, ((y + 1) * H + OY - 1) / OY, x * W / OX,
                      ((x + 1) * W + OX - 1) / OX);
    }
    OP void forward(const V* in, V* out, int nb) {
        each(nb, [=](int64_t plane, int64_t at, int top, int bottom, int left, int right) {
            V s = {};
            for (int y = top; y < bottom; y++)
                for (int x = left; x < right; x++) s += in[plane + y * W + x];
            out[at] = s * (1.f / ((bottom - top) * (right - left)));
        });
    }
    template <bool ADD>
    OP void backward(const V* dy, V* dx, int nb) {
        if (!ADD) std::memset((void*)dx, 0, sizeof(V) * in_size * nb);
        each(nb, [=](int64_t plane, int64_t at, int top, int bottom, int left, int right) {
            V g = dy[at] * (1.f / ((bottom - top) * (right - left)));
            for (int y = top; y < bottom; y++)
                for (int x = left; x < right; x++) dx[plane + y * W + x] += g;
        });
    }
};

// [C][D][INNER] to [O][C][K][INNER]: what a window along the depth sees at each of its places.
template <int C, int D, int INNER, int O, int K, int S, int P, int A>
struct Im2colDepth {
    // f(place in x or -1, place in y) for each plane.
    template <class F>
    INLINE void planes(int nb, F f) {
        for (int n = 0; n < nb; n++)
            for (int o = 0; o < O; o++)
                for (int c = 0; c < C; c++)
                    for (int k = 0; k < K; k++) {
                        const int d = o * S - P + k * A;
                        const int64_t from = ((int64_t)(n * C + c) * D + d) * INNER;
                        f(d < 0 || d >= D ? -1 : from, ((int64_t)((n * O + o) * C + c) * K + k) * INNER);
                    }
    }
    OP void forward(const V* x, V* y, int nb) {
        planes(nb, [=](int64_t from, int64_t to) {
            if (from < 0)
                std::memset((void*)(y + to), 0, sizeof(V) * INNER);
            else
                std::memcpy((void*)(y + to), x + from, sizeof(V) * INNER);
        });
    }
    template <bool ADD>
    OP void backward(const V* dy, V* dx, int nb) {
        if (!ADD) std::memset((void*)dx, 0, sizeof(V) * C * D * INNER * nb);
        planes(nb, [=](int64_t from, int64_t to) {
            for (int j = 0; from >= 0 && j < INNER; j++) dx[from + j] += dy[to + j];
        });
    }
};

// Zeros around an image, or less of it where a border is negative: [C][H][W] to [C][OY][OX].
template <int C, int H, int W, int TOP, int LEFT, int OY, int OX>
struct ConstantPad2d {
    template <class F>
    INLINE void rows(int nb, F f) {
        constexpr int first = LEFT > 0 ? LEFT : 0, last = LEFT + W < OX ? LEFT + W : OX;
        for (int64_t c = 0; c < nb * C; c++)
            for (int y = 0; y < H; y++)
                if (y + TOP >= 0 && y + TOP < OY)
                    f((c * H + y) * W + first - LEFT, (c * OY + y + TOP) * OX + first, last - first);
    }
    OP void forward(const V* x, V* y, int nb) {
        std::memset((void*)y, 0, sizeof(V) * C * OY * OX * nb);
        rows(nb, [=](int64_t from, int64_t to, int n) { std::memcpy((void*)(y + to), x + from, sizeof(V) * n); });
    }
    template <bool ADD>
    OP void backward(const V* dy, V* dx, int nb) {
        if (!ADD) std::memset((void*)dx, 0, sizeof(V) * C * H * W * nb);
        rows(nb, [=](int64_t from, int64_t to, int n) {
            for (int k = 0; k < n; k++) dx[from + k] += dy[to + k];
        });
    }
};

// A convolution of the model's input and the largest of each window of it ---------------------------------------

// Nothing of the convolution itself is saved but which place of a window was the largest, and of its gradient there are
// only a few channels of a block at a time, so that both stay in the cache. Room: packed weights, these channels, and sums
// for their weights.
template <class C, class P, int I, int TAPS, bool RECTIFY>
struct ConvMaxPool2d {
    typedef int8_t VB __attribute__((vector_size(LANES)));
    static constexpr int O = C::out_size / (C::OY * C::OX), plane = C::OY * C::OX, pooled = P::OY * P::OX, each = I * TAPS;

    INLINE int8_t* at_block(V* places, int n) { return (int8_t*)places + (int64_t)n * P::out_size * LANES; }

    template <int N>
    static void some(const V* from, const float* w, const float* b, V* y, int8_t* at, V* full) {
        C::Forward::template rows<N, false>(from, w, b, full, C::first_row, C::last_row);
        for (int c = 0; c < N; c++)
            for (int py = 0; py < P::OY; py++)
                for (int px = 0; px < P::OX; px++, y++, at += LANES) {
                    V m = RECTIFY ? V{} : splat(-INFINITY);
                    VI which = VI{} - 1;
                    int j = 0;
                    P::window(py, px, [&](int k) {  // the first of equals takes it all
                        V v = full[c * plane + k];
                        VI more = v > m;
                        which = (more & j++) | (~more & which);
                        m = max(m, v);
                    });
                    *y = m;
                    VB bytes = __builtin_convertvector(which, VB);
                    std::memcpy(at, &bytes, LANES);
                }
    }

    OP void forward(const V* x, const float* w, const float* b, V* y, V* room, V* places, V* packed, V* full, V*, int nb) {
        constexpr int N = C::Forward::tile.n, whole = O / N * N;
        C::Forward::pack(w, each, TAPS, false, (float*)packed);
        const float* u = (float*)packed;
        for (int n = 0; n < nb; n++) {
            const V* from = C::bordered(x + n * C::in_size, room + (int64_t)n * C::saved);
            V* to = y + n * P::out_size;
            int8_t* at = at_block(places, n);
            for (int o = 0; o < whole; o += N)
                some<N>(from, u + o * each, b ? b + o : b, to + o * pooled, at + o * pooled * LANES, full);
            if constexpr (O % N != 0)
                some<O % N>(from, u + whole * each, b ? b + whole : b, to + whole * pooled, at + whole * pooled * LANES,
                            full);
        }
    }

    // The gradient of N channels of one block before the pooling; what they add to the bias's.
    template <int N>
    INLINE void spread(const V* dy, const int8_t* at, V* full, V* bias) {
        if (!P::covers) std::memset((void*)full, 0, sizeof(V) * N * plane);
        for (int c = 0; c < N; c++)
            for (int py = 0; py < P::OY; py++)
                for (int px = 0; px < P::OX; px++, dy++, at += LANES) {
                    VB bytes;
                    std::memcpy(&bytes, at, LANES);
                    VI which = __builtin_convertvector(bytes, VI);
                    bias[c] += keep(which >= 0, *dy);
                    int j = 0;
                    P::window(py, px, [&](int k) { full[c * plane + k] = keep(which == j++, *dy); });
                }
    }

    template <int N, int M>
    INLINE void add_up(const V* x, const V* full, int ky, V* sums) {
        constexpr int KX = C::columns;
        V acc[N][M][KX];
        UNROLL for (int o = 0; o < N; o++)
            UNROLL for (int i = 0; i < M; i++)
                UNROLL for (int k = 0; k < KX; k++) acc[o][i][k] = sums[o * each + i * TAPS + ky * KX + k];
        C::template along<N, M>(acc, x, full, ky);
        UNROLL for (int o = 0; o < N; o++)
            UNROLL for (int i = 0; i < M; i++)
                UNROLL for (int k = 0; k < KX; k++) sums[o * each + i * TAPS + ky * KX + k] = acc[o][i][k];
    }

    // What block n adds to the gradients of N channels' weights and biases, in each lane its own sample's.
    template <int N>
    INLINE void of_block(const V* x, const V* dy, V* room, V* places, int first, V* full, int n, V* sums, V* bias) {
        constexpr int M = C::tile.m, whole = I / M * M, rows = TAPS / C::columns;
        const V* from = C::padded ? room + (int64_t)n * C::saved : x + n * C::in_size;
        spread<N>(dy + n * P::out_size + first * pooled, at_block(places, n) + first * pooled * LANES, full, bias);
        for (int ky = 0; ky < rows; ky++) {
            for (int i = 0; i < whole; i += M) add_up<N, M>(from + i * (C::HP * C::WP), full, ky, sums + i * TAPS);
            if constexpr (I % M != 0)
                add_up<N, I % M>(from + whole * (C::HP * C::WP), full, ky, sums + whole * TAPS);
        }
    }

    template <int N>
    OP void weights(const V* x, const V* dy, float* dw, float* db, V* room, V* places, int first, V* full, V* sums, int nb,
                    bool add) {
        V bias[N] = {};
        std::memset((void*)sums, 0, sizeof(V) * N * each);
        for (int n = 0; n < nb; n++) of_block<N>(x, dy, room, places, first, full, n, sums, bias);
        for (int k = 0; dw && k < N * each; k++) put(dw + first * each + k, total(sums[k]), add);
        for (int o = 0; db && o < N; o++) put(db + first + o, total(bias[o]), add);
    }

    OP void backward(const V* x, const V* dy, float* dw, float* db, V* room, V* places, V*, V* full, V* sums, int nb,
                     bool add) {
        constexpr int N = C::tile.n, whole = O / N * N;
        for (int o = 0; o < whole; o += N) weights<N>(x, dy, dw, db, room, places, o, full, sums, nb, add);
        if constexpr (O % N != 0) weights<O % N>(x, dy, dw, db, room, places, whole, full, sums, nb, add);
    }

    // Squared norms of single samples' gradients of N channels, added to one vector per block.
    template <int N>
    OP void some_squares(const V* x, const V* dy, V* room, V* places, int first, V* full, V* sums, V* to, int nb, bool weight,
                         bool biased) {
        for (int n = 0; n < nb; n++) {
            V bias[N] = {};
            std::memset((void*)sums, 0, sizeof(V) * N * each);
            of_block<N>(x, dy, room, places, first, full, n, sums, bias);
            for (int k = 0; weight && k < N * each; k++) to[n] += sums[k] * sums[k];
            for (int o = 0; biased && o < N; o++) to[n] += bias[o] * bias[o];
        }
    }

    OP void squares(const V* x, const V* dy, V* room, V* places, V*, V* full, V* sums, V* to, int nb, bool weight, bool bias) {
        constexpr int N = C::tile.n, whole = O / N * N;
        for (int o = 0; o < whole; o += N) some_squares<N>(x, dy, room, places, o, full, sums, to, nb, weight, bias);
        if constexpr (O % N != 0) some_squares<O % N>(x, dy, room, places, whole, full, sums, to, nb, weight, bias);
    }
};
