// Squared norms of single samples' gradients of weights, added to one vector per block.

INLINE V square_sum(const V* x, int n) {
    return sum(n, [=](int k) { return x[k] * x[k]; });
}

template <class L>
struct Squares;

template <int I, int O>
struct Squares<Linear<I, O>> {
    // One row a sample: an outer product, whose norm is that of its factors.
    OP void of(const V* x, const V* dy, V* to, int nb, bool weight, bool bias) {
        for (int n = 0; n < nb; n++) {
            V in = weight ? square_sum(x + n * I, I) : V{};
            to[n] += square_sum(dy + n * O, O) * (bias ? in + 1.f : in);
        }
    }

    // The same with inputs as they lie in the table, whole vectors each.
    OP void of_rows(const float* const* x, const V* dy, V* to, int nb, bool weight, bool bias) {
        for (int n = 0; n < nb; n++) {
            V in = {};
            for (int l = 0; weight && l < LANES; l++) {
                const float* row = x[n * LANES + l];
                in[l] = total(sum(I / LANES, [=](int k) { return load(row + k * LANES) * load(row + k * LANES); }));
            }
            to[n] += square_sum(dy + n * O, O) * (bias ? in + 1.f : in);
        }
    }

    template <int N, int M>
    INLINE V block(const V* x, const V* dy, int rows) {
        V acc[N][M], all = {};
        UNROLL for (int o = 0; o < N; o++) UNROLL for (int i = 0; i < M; i++) acc[o][i] = V{};
        for (int r = 0; r < rows; r++)
            UNROLL for (int o = 0; o < N; o++)
                UNROLL for (int i = 0; i < M; i++) acc[o][i] += x[r * I + i] * dy[r * O + o];
        UNROLL for (int o = 0; o < N; o++) UNROLL for (int i = 0; i < M; i++) all += acc[o][i] * acc[o][i];
        return all;
    }

    static constexpr Tile tile = best_tile(O, I, 1, 4);

    template <int N>
    static V columns(const V* x, const V* dy, int rows) {
        constexpr int whole = I / tile.m * tile.m;
        V all = {};
        for (int i = 0; i < whole; i += tile.m) all += block<N, tile.m>(x + i, dy, rows);
        if constexpr (I % tile.m != 0) all += block<N, I % tile.m>(x + whole, dy, rows);
        return all;
    }

    // Many rows a sample, over which its gradient is a sum.
    OP void of_sequence(const V* x, const V* dy, V* to, int nb, int rows, bool weight, bool bias) {
        constexpr int whole = O / tile.n * tile.n;
        for (int n = 0; n < nb; n++, x += rows * I, dy += rows * O) {
            if (weight) {
                for (int o = 0; o < whole; o += tile.n) to[n] += columns<tile.n>(x, dy + o, rows);
                if constexpr (O % tile.n != 0) to[n] += columns<O % tile.n>(x, dy + whole, rows);
            }
            for (int o = 0; bias && o < O; o++) {
                const V* from = dy + o;
                V s = sum(rows, [=](int r) { return from[r * O]; });
                to[n] += s * s;
            }
        }
    }
};

template <int I, int H, int W, int O, int KY, int KX, int SY, int SX, int PY, int PX, int DY, int DX,
          int T, int P>
struct Squares<Conv2d<I, H, W, O, KY, KX, SY, SX, PY, PX, DY, DX, T, P>> {
    typedef Conv2d<I, H, W, O, KY, KX, SY, SX, PY, PX, DY, DX, T, P> C;
    static constexpr int HP = C::HP, WP = C::WP, OY = C::OY, OX = C::OX;
    static constexpr Tile tile = C::tile;

    template <int N, int M>
    static V block(const V* x, const V* dy, int ky) {
        V acc[N][M][KX], all = {};
        UNROLL for (int o = 0; o < N; o++)
            UNROLL for (int i = 0; i < M; i++) UNROLL for (int k = 0; k < KX; k++) acc[o][i][k] = V{};
        for (int y = 0; y < OY; y++) {
            const V *row = x + (y * SY + ky * DY) * WP, *d = dy + y * OX;
            for (int c = 0; c < OX; c++) {
                V v[M][KX];
                UNROLL for (int i = 0; i < M; i++)
                    UNROLL for (int k = 0; k < KX; k++) v[i][k] = row[i * HP * WP + c * SX + k * DX];
                UNROLL for (int o = 0; o < N; o++) {
                    V g = d[o * OY * OX + c];
                    UNROLL for (int i = 0; i < M; i++) UNROLL for (int k = 0; k < KX; k++) acc[o][i][k] += v[i][k] * g;
                }
            }
        }
        UNROLL for (int o = 0; o < N; o++)
            UNROLL for (int i = 0; i < M; i++)
                UNROLL for (int k = 0; k < KX; k++) all += acc[o][i][k] * acc[o][i][k];
        return all;
    }

    template <int N>
    OP V rows(const V* x, const V* dy) {
        constexpr int whole = I / tile.m * tile.m;
        V all = {};
        for (int ky = 0; ky < KY; ky++) {
            for (int i = 0; i < whole; i += tile.m) all += block<N, tile.m>(x + i * HP * WP, dy, ky);
            if constexpr (I % tile.m != 0) all += block<N, I % tile.m>(x + whole * HP * WP, dy, ky);
        }
        return all;
    }

    // Where no bordered input is kept: N outputs, the 3 x 3 places of one input, borders left out.
    template <int N>
    OP V unbordered(const V* x, const V* dy) {
        V all = {};
        for (int ky = 0; ky < KY; ky++)
            for (int kx = 0; kx < KX; kx++) {
                V acc[N];
                UNROLL for (int o = 0; o < N; o++) acc[o] = V{};
                int first = PX - kx > 0 ? PX - kx : 0, last = W + PX - kx < OX ? W + PX - kx : OX;
                for (int y = 0; y < OY; y++) {
                    int iy = y + ky - PY;
                    if (iy < 0 || iy >= H) continue;
                    for (int c = first; c < last; c++) {
                        V v = x[iy * W + c + kx - PX];
                        UNROLL for (int o = 0; o < N; o++) acc[o] += v * dy[(o * OY + y) * OX + c];
                    }
                }
                UNROLL for (int o = 0; o < N; o++) all += acc[o] * acc[o];
            }
        return all;
    }

    // Of one block.
    OP void of(const V* x, const V* dy, const V* bordered, V* to, bool weight, bool bias) {
        if (weight) {
            if constexpr (T != 0) {
                constexpr int N = 8, whole = O / N * N;
                for (int i = 0; i < I; i++) {
                    for (int o = 0; o < whole; o += N) *to += unbordered<N>(x + i * H * W, dy + o * OY * OX);
                    if constexpr (O % N != 0) *to += unbordered<O % N>(x + i * H * W, dy + whole * OY * OX);
                }
            } else {
                constexpr int whole = O / tile.n * tile.n;
                const V* from = C::padded ? bordered : x;
                for (int o = 0; o < whole; o += tile.n) *to += rows<tile.n>(from, dy + o * OY * OX);
                if constexpr (O % tile.n != 0) *to += rows<O % tile.n>(from, dy + whole * OY * OX);
            }
        }
        for (int o = 0; bias && o < O; o++) {
            const V* from = dy + o * OY * OX;
            V s = sum(OY * OX, [=](int k) { return from[k]; });
            *to += s * s;
        }
    }
};

// v[n][k] *= by[n]
INLINE void scale_blocks(V* v, int size, const V* by, int nb) {
    for (int n = 0; n < nb; n++)
        for (int k = 0; k < size; k++) v[n * size + k] *= by[n];
}
