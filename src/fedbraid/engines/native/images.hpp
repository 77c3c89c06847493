// Layers of images: convolutions and poolings.

// Correlation -----------------------------------------------------------------------------------------------

// out[o][y][x] = base[o] + sum over (i, ky, kx) of in[i][y SY + ky][x SX + kx] w[i][ky][kx][o], w packed by
// tiles of o. Only the rows first, first + GAP, ... before `last` of `in` are read: the others are zero.
template <int I, int H, int W, int O, int KY, int KX, int SY, int SX, int OY, int OX, int GAP = 1>
struct Correlate {
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
                const V* row = in + (i * H + ky) * W;
                const float* at = w + (i * KY + ky) * KX * N;
                UNROLL for (int kx = 0; kx < KX; kx++) {
                    V v[M];
                    UNROLL for (int x = 0; x < M; x++) v[x] = row[x * SX + kx];
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
            int start = first - y * SY, k1 = last - y * SY < KY ? last - y * SY : KY;
            int k0 = start > 0 ? start : (GAP - -start % GAP) % GAP;
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
struct Narrow {
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

// Tiles of a panel whose 16 places of so many channels fit into half a megabyte, and those of a weight's gradient, whose
// sums over the lanes want longer runs.
constexpr int winograd_panel(int channels) {
    int most = 8192 / LANES / channels / 4 * 4;
    return most < 8 ? 8 : most > 64 ? 64 : most;
}
constexpr int winograd_weight_panel(int channels) { return channels < 512 ? 32 : 16; }

// A convolution of 3 x 3 and stride 1 by tiles of 2 x 2 outputs, each from 4 x 4 inputs: y = A'[(G w G') (B'x B)]A takes
// 16 products where there were 36, and A and B are of 0, 1 and -1 alone. The 16 places are 16 matrix products of a panel
// of tiles, [channel][tile], which stays in the cache.
template <int I, int H, int W, int O, int PY, int PX>
struct Winograd {
    static constexpr int OY = H + 2 * PY - 2, OX = W + 2 * PX - 2, TY = (OY + 1) / 2, TX = (OX + 1) / 2;
    static constexpr int tiles = TY * TX, IR = round_up(I);
    static constexpr int P = winograd_panel(I + O), Q = winograd_weight_panel(I + O);
    static constexpr int plane = O * I + 16;  // of the 16 of weights, in numbers: beyond a power of two

    // G w G' for every output o and input i, w at o * so + i * si, turned by half a turn if `turn`.
    OP void weights(const float* w, int64_t so, int64_t si, bool turn, float* to) {
        for (int o = 0; o < O; o++)
            for (int i = 0; i < I; i += LANES) {
                const float* from[LANES];
                for (int l = 0; l < LANES; l++) from[l] = w + o * so + (i + l < I ? i + l : I - 1) * si;
                V g[9], h[4][3];
                for (int k = 0; k < 9; k++)
                    UNROLL for (int l = 0; l < LANES; l++) g[k][l] = from[l][turn ? 8 - k : k];
                UNROLL for (int c = 0; c < 3; c++) spread(g[c], g[3 + c], g[6 + c], h[0][c], h[1][c], h[2][c], h[3][c]);
                float* at = to + o * I + i;  // what a row writes beyond its end the next one writes over
                UNROLL for (int r = 0; r < 4; r++) {
                    V u[4];
                    spread(h[r][0], h[r][1], h[r][2], u[0], u[1], u[2], u[3]);
                    UNROLL for (int c = 0; c < 4; c++) store(at + (4 * r + c) * plane, u[c]);
                }
            }
    }
    INLINE void spread(V a, V b, V c, V& p, V& q, V& r, V& s) {
        V half = (a + c) * 0.5f, odd = b * 0.5f;
        p = a, q = half + odd, r = half - odd, s = c;
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

    // B'x B of a panel of width N, the 16 places `apart` from each other.
    template <int N>
    OP void inputs(const V* in, int first, int count, V* to, int apart) {
        for (int i = 0; i < I; i++)
            each_tile(first, count, [=](int t, int n, int ty, int tx) {
                const int y = 2 * ty - PY, x = 2 * tx - PX;
                const V* from = in + ((int64_t)n * I + i) * (H * W) + y * W + x;
                V d[4][4], e[4][4];
                if (y >= 0 && y + 4 <= H && x >= 0 && x + 4 <= W) {
                    UNROLL for (int r = 0; r < 4; r++)
                        UNROLL for (int c = 0; c < 4; c++) d[r][c] = from[r * W + c];
                } else {
                    UNROLL for (int r = 0; r < 4; r++)
                        UNROLL for (int c = 0; c < 4; c++) {
                            bool inside = y + r >= 0 && y + r < H && x + c >= 0 && x + c < W;
                            d[r][c] = inside ? from[r * W + c] : V{};
                        }
                }
                UNROLL for (int c = 0; c < 4; c++) {
                    e[0][c] = d[0][c] - d[2][c], e[1][c] = d[1][c] + d[2][c];
                    e[2][c] = d[2][c] - d[1][c], e[3][c] = d[1][c] - d[3][c];
                }
                V* at = to + i * N + t;
                UNROLL for (int r = 0; r < 4; r++) {
                    at[(4 * r) * apart] = e[r][0] - e[r][2], at[(4 * r + 1) * apart] = e[r][1] + e[r][2];
                    at[(4 * r + 2) * apart] = e[r][2] - e[r][1], at[(4 * r + 3) * apart] = e[r][1] - e[r][3];
                }
            });
    }

    // A'm A of a panel, and the bias.
    template <bool ADD>
    OP void outputs(const V* m, const float* base, int first, int count, V* out) {
        constexpr int apart = O * P + 2;
        for (int o = 0; o < O; o++) {
            const V b = splat(base ? base[o] : 0.f);
            each_tile(first, count, [=](int t, int n, int ty, int tx) {
                const V* at = m + o * P + t;
                V e[2][4];
                UNROLL for (int c = 0; c < 4; c++) {
                    V p = at[c * apart], q = at[(4 + c) * apart], r = at[(8 + c) * apart], s = at[(12 + c) * apart];
                    e[0][c] = p + (q + r), e[1][c] = (q - r) - s;
                }
                V* to = out + ((int64_t)n * O + o) * (OY * OX) + 2 * ty * OX + 2 * tx;
                UNROLL for (int r = 0; r < 2; r++) {
                    if (OY % 2 && r && 2 * ty + 1 == OY) continue;
                    V left = e[r][0] + (e[r][1] + e[r][2]) + b, right = (e[r][1] - e[r][2]) - e[r][3] + b;
                    to[r * OX] = ADD ? to[r * OX] + left : left;
                    if (OX % 2 && 2 * tx + 1 == OX) continue;
                    to[r * OX + 1] = ADD ? to[r * OX + 1] + right : right;
                }
            });
        }
    }

    template <bool ADD>
    OP void run(const V* in, const float* u, const float* base, V* out, V* x, int nb) {
        constexpr int apart = I * P + 2, apart_out = O * P + 2;
        V* m = x + 16 * apart;
        for (int first = 0; first < nb * tiles; first += P) {
            const int count = nb * tiles - first < P ? nb * tiles - first : P;
            inputs<P>(in, first, count, x, apart);
            for (int k = 0; k < 16; k++)
                Linear<I, O>::template run<I, O, 1, I, false, P, P>(x + k * apart, u + k * plane, nullptr, m + k * apart_out,
                                                                    count, 1, 1);
            outputs<ADD>(m, base, first, count, out);
        }
    }

    // A dy A' of a panel.
    OP void slopes(const V* dy, int first, int count, V* to) {
        constexpr int apart = O * Q + 2;
        for (int o = 0; o < O; o++)
            each_tile(first, count, [=](int t, int n, int ty, int tx) {
                const V* from = dy + ((int64_t)n * O + o) * (OY * OX) + 2 * ty * OX + 2 * tx;
                const bool low = OY % 2 == 0 || 2 * ty + 1 < OY, right = OX % 2 == 0 || 2 * tx + 1 < OX;
                V a = from[0], b = right ? from[1] : V{}, c = low ? from[OX] : V{}, d = low && right ? from[OX + 1] : V{};
                const V rows[4][2] = {{a, b}, {a + c, b + d}, {a - c, b - d}, {-c, -d}};
                V* at = to + o * Q + t;
                UNROLL for (int r = 0; r < 4; r++) {
                    V p = rows[r][0], q = rows[r][1];
                    at[(4 * r) * apart] = p, at[(4 * r + 1) * apart] = p + q;
                    at[(4 * r + 2) * apart] = p - q, at[(4 * r + 3) * apart] = -q;
                }
            });
    }

    static constexpr int together = ACCUMULATORS / LANES > 1 ? ACCUMULATORS / LANES : 1;

    // du[o][i] += sum over tiles and lanes of m[o][t] x[i][t], for N outputs and LANES inputs.
    template <int N>
    INLINE void product(const V* x, const V* m, float* du, int count) {
        V acc[N][LANES];
        UNROLL for (int o = 0; o < N; o++)
            UNROLL for (int l = 0; l < LANES; l++) acc[o][l] = V{};
        for (int t = 0; t < count; t++) {
            V g[N];
            UNROLL for (int o = 0; o < N; o++) g[o] = m[o * Q + t];
            UNROLL for (int l = 0; l < LANES; l++) {
                V v = x[l * Q + t];
                UNROLL for (int o = 0; o < N; o++) acc[o][l] += v * g[o];
            }
        }
        UNROLL for (int o = 0; o < N; o++) {
            transpose(acc[o]);
            V s = load(du + o * IR);
            UNROLL for (int l = 0; l < LANES; l++) s += acc[o][l];
            store(du + o * IR, s);
        }
    }

    OP void products(const V* x, const V* m, float* du, int count) {
        constexpr int whole = O / together * together;
        for (int i = 0; i < IR; i += LANES) {
            for (int o = 0; o < whole; o += together) product<together>(x + i * Q, m + o * Q, du + o * IR + i, count);
            if constexpr (O % together != 0)
                product<O % together>(x + i * Q, m + whole * Q, du + whole * IR + i, count);
        }
    }

    OP void weight(const V* in, const V* dy, float* dw, float* du, V* x, int nb, bool add) {
        constexpr int apart = IR * Q + 2, apart_out = O * Q + 2;
        V* m = x + 16 * apart;
        std::memset((void*)du, 0, sizeof(float) * 16 * O * IR);
        for (int first = 0; first < nb * tiles; first += Q) {
            const int count = nb * tiles - first < Q ? nb * tiles - first : Q;
            inputs<Q>(in, first, count, x, apart);
            slopes(dy, first, count, m);
            for (int k = 0; k < 16; k++) products(x + k * apart, m + k * apart_out, du + k * O * IR, count);
        }
        for (int o = 0; o < O; o++)
            for (int i = 0; i < I; i += LANES) {
                V e[3][4], g[9];
                UNROLL for (int c = 0; c < 4; c++) {
                    const float* at = du + c * O * IR + o * IR + i;
                    fold(load(at), load(at + 4 * O * IR), load(at + 8 * O * IR), load(at + 12 * O * IR), e[0][c], e[1][c], e[2][c]);
                }
                UNROLL for (int r = 0; r < 3; r++)
                    fold(e[r][0], e[r][1], e[r][2], e[r][3], g[3 * r], g[3 * r + 1], g[3 * r + 2]);
                for (int l = 0; l < LANES && i + l < I; l++)
                    for (int k = 0; k < 9; k++) put(dw + ((int64_t)o * I + i + l) * 9 + k, g[k][l], add);
            }
    }
    INLINE void fold(V p, V q, V r, V s, V& a, V& b, V& c) {
        V even = (q + r) * 0.5f;
        a = p + even, b = (q - r) * 0.5f, c = even + s;
    }
};

// Conv2d ----------------------------------------------------------------------------------------------------

template <int I, int H, int W, int O, int KY, int KX, int SY, int SX, int PY, int PX>
struct Conv {
    static constexpr int HP = H + 2 * PY, WP = W + 2 * PX;
    static constexpr int OY = (HP - KY) / SY + 1, OX = (WP - KX) / SX + 1;
    static constexpr int HB = H + KY - 1, WB = W + KX - 1;  // dy, spread out and bordered for the way back
    static constexpr bool padded = PY || PX;
    static constexpr int in_size = I * H * W, out_size = O * OY * OX;
    static constexpr int weights = O * I * KY * KX;
    typedef Correlate<I, HP, WP, O, KY, KX, SY, SX, OY, OX> Forward;
    typedef Correlate<O, HB, WB, I, KY, KX, 1, 1, H, W, SY> Backward;
    // Whether tiles pay: not for few channels, nor where many of a tile's outputs fall outside the image.
    static constexpr bool tiled = KY == 3 && KX == 3 && SY == 1 && SX == 1 && PY <= 2 && PX <= 2 && I >= 8 && O >= 8 &&
                                  3 * OY * OX >= 8 * ((OY + 1) / 2) * ((OX + 1) / 2);
    typedef Winograd<I, H, W, O, PY, PX> Tiles;
    typedef Winograd<O, OY, OX, I, 2 - PY, 2 - PX> TilesBack;
    static constexpr int panel = Tiles::P > Tiles::Q ? Tiles::P : Tiles::Q;
    static constexpr int packed = tiled ? 16 * (O * round_up(I) + 16) / LANES : weights / LANES + 1;
    static constexpr int spread = tiled ? 16 * ((round_up(I) + O) * panel + 4) : O * HB * WB;
    static constexpr int scratch = packed + spread;                    // in V
    static constexpr int kept = padded && !tiled ? I * HP * WP : 0;  // the padded input, in V per block

    static void pad(const V* x, V* to) {
        std::memset((void*)to, 0, sizeof(V) * I * HP * WP);
        for (int i = 0; i < I; i++)
            for (int y = 0; y < H; y++)
                std::memcpy((void*)(to + (i * HP + y + PY) * WP + PX), x + (i * H + y) * W, sizeof(V) * W);
    }

    OP void forward(const V* x, const float* w, const float* b, V* y, V* bordered, V* scratch, int nb) {
        if constexpr (tiled) {
            Tiles::weights(w, I * 9, 9, false, (float*)scratch);
            Tiles::template run<false>(x, (float*)scratch, b, y, scratch + packed, nb);
        } else {
            forward_bordered(x, w, b, y, bordered, scratch, nb);
        }
    }

    static void forward_bordered(const V* x, const float* w, const float* b, V* y, V* bordered, V* scratch, int nb) {
        Forward::pack(w, I * KY * KX, KY * KX, false, (float*)scratch);
        for (int n = 0; n < nb; n++) {
            if constexpr (padded) pad(x + n * in_size, bordered + n * kept);
            const V* from = padded ? bordered + n * kept : x + n * in_size;
            Forward::template run<false>(from, (float*)scratch, b, y + n * out_size, PY, PY + H);
        }
    }

    template <bool ADD>
    OP void backward_input(const V* dy, const float* w, V* dx, V* scratch, int nb) {
        typedef Narrow<I, H, W, O, KY, KX, PY, PX> Rows;
        if constexpr (tiled) {
            TilesBack::weights(w, 9, I * 9, true, (float*)scratch);
            TilesBack::template run<ADD>(dy, (float*)scratch, nullptr, dx, scratch + packed, nb);
        } else if constexpr (SY == 1 && SX == 1 && Rows::pays) {
            for (int n = 0; n < nb; n++) Rows::template run<ADD>(dy + n * out_size, w, dx + n * in_size);
        } else {
            backward_bordered<ADD>(dy, w, dx, scratch, nb);
        }
    }

    template <bool ADD>
    static void backward_bordered(const V* dy, const float* w, V* dx, V* scratch, int nb) {
        constexpr int top = KY - 1 - PY, left = KX - 1 - PX;
        V* wide = scratch + packed;
        Backward::pack(w, KY * KX, I * KY * KX, true, (float*)scratch);
        std::memset((void*)wide, 0, sizeof(V) * spread);
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
            Backward::template run<ADD>(wide, (float*)scratch, nullptr, dx + n * in_size, first, last);
        }
    }

    static constexpr Tile tile = best_tile(O, I, KX, 4);  // of the weights: outputs by (inputs and columns)

    template <int N, int M>
    static void weight_block(const V* x, const V* dy, int ky, int nb, float* dw, bool add) {
        V acc[N][M][KX];
        UNROLL for (int o = 0; o < N; o++)
            UNROLL for (int i = 0; i < M; i++)
                UNROLL for (int k = 0; k < KX; k++) acc[o][i][k] = V{};
        for (int n = 0; n < nb; n++)
            for (int y = 0; y < OY; y++) {
                const V* row = x + n * (I * HP * WP) + (y * SY + ky) * WP;
                const V* d = dy + n * out_size + y * OX;
                for (int c = 0; c < OX; c++) {
                    V v[M][KX];
                    UNROLL for (int i = 0; i < M; i++)
                        UNROLL for (int k = 0; k < KX; k++) v[i][k] = row[i * HP * WP + c * SX + k];
                    UNROLL for (int o = 0; o < N; o++) {
                        V g = d[o * OY * OX + c];
                        UNROLL for (int i = 0; i < M; i++)
                            UNROLL for (int k = 0; k < KX; k++) acc[o][i][k] += v[i][k] * g;
                    }
                }
            }
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

    OP void backward_weight(const V* x, const V* dy, float* dw, float* db, const V* bordered, V* scratch, int nb, bool add) {
        if constexpr (tiled) {
            if (dw) Tiles::weight(x, dy, dw, (float*)scratch, scratch + packed, nb, add);
        } else {
            if (dw) weight_bordered(padded ? bordered : x, dy, dw, nb, add);
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

// Pooling ---------------------------------------------------------------------------------------------------

template <int C, int H, int W, int KY, int KX, int SY, int SX, int PY, int PX>
struct Pool {
    static constexpr int OY = (H + 2 * PY - KY) / SY + 1, OX = (W + 2 * PX - KX) / SX + 1;
    static constexpr int in_size = C * H * W, out_size = C * OY * OX;
    static constexpr bool apart = SY == KY && SX == KX && !PY && !PX;  // windows neither overlap nor leave the image
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
