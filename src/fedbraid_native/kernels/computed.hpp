// What is computed from parameters alone: numbers that all samples share, as they lie in a tensor. Functions of each
// of them are those of samples, on vectors of neighbours; here are those that look at a tensor's shape.

template <int N>
struct LoadParam {
    OP void forward(const float* w, float* y) { std::memcpy(y, w, sizeof(float) * N); }
    OP void backward(const float* dy, float* dw) {
        for (int k = 0; k < N; k++) dw[k] += dy[k];
    }
};

// [OUTER][DIM][INNER] to [OUTER][INNER], a sum times a number, and back.
template <int OUTER, int DIM, int INNER>
struct Sums {
    INLINE float neighbours(const float* x) {
        V s = {};
        int d = 0;
        for (; d + LANES <= DIM; d += LANES) s += load(x + d);
        float rest = total(s);
        for (; d < DIM; d++) rest += x[d];
        return rest;
    }

    template <bool ADD>
    OP void sum(const float* x, float* y, float scale) {
        for (int o = 0; o < OUTER; o++, y += INNER)
            if constexpr (INNER == 1) {
                put(y, scale * neighbours(x + (int64_t)o * DIM), ADD);
            } else {
                for (int i = 0; !ADD && i < INNER; i++) y[i] = 0;
                for (int d = 0; d < DIM; d++, x += INNER)
                    for (int i = 0; i < INNER; i++) y[i] += scale * x[i];
            }
    }

    template <bool ADD>
    OP void spread(const float* x, float* y, float scale) {
        for (int o = 0; o < OUTER; o++, x += INNER)
            for (int d = 0; d < DIM; d++, y += INNER)
                for (int i = 0; i < INNER; i++) y[i] = ADD ? y[i] + scale * x[i] : scale * x[i];
    }
};

// [M][K] by [K][N].
template <int M, int K, int N>
struct Matmul {
    INLINE float dot(const float* a, const float* b) {
        V s = {};
        int n = 0;
        for (; n + LANES <= N; n += LANES) s += load(a + n) * load(b + n);
        float rest = total(s);
        for (; n < N; n++) rest += a[n] * b[n];
        return rest;
    }

    OP void forward(const float* a, const float* b, float* y) {
        std::memset(y, 0, sizeof(float) * M * N);
        for (int m = 0; m < M; m++)
            for (int k = 0; k < K; k++)
                for (int n = 0; n < N; n++) y[m * N + n] += a[m * K + k] * b[k * N + n];
    }
    template <bool ADD>
    OP void first(const float* b, const float* dy, float* da) {
        for (int m = 0; m < M; m++)
            for (int k = 0; k < K; k++) put(da + m * K + k, dot(dy + m * N, b + k * N), ADD);
    }
    template <bool ADD>
    OP void second(const float* a, const float* dy, float* db) {
        if (!ADD) std::memset(db, 0, sizeof(float) * K * N);
        for (int m = 0; m < M; m++)
            for (int k = 0; k < K; k++)
                for (int n = 0; n < N; n++) db[k * N + n] += a[m * K + k] * dy[m * N + n];
    }
};
