// Recurrent nets, by blocks of samples side by side or, where they are wide, by samples as rows.

// A cell saves SAVED * H vectors a step: its gates' inputs at first, their values after the step, their gradients on
// the way back. Gate inputs come from x (all steps in one product) and from h, GATES * H each; the first JOINT of
// the gates have the same gradient towards both, the others' towards h lies from slot OTHER on.
struct GruCell {
    static constexpr int GATES = 3, SAVED = 4, JOINT = 2, OTHER = 3, CARRY = 0;

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
    static constexpr int GATES = 4, SAVED = 5, JOINT = 4, OTHER = 0, CARRY = 1;

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
    static constexpr int GATES = 1, SAVED = 1, JOINT = 1, OTHER = 0, CARRY = 0;

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

// Rows ------------------------------------------------------------------------------------------------------

// The same nets with samples as rows of numbers, row t * samples + s: vectors lie along
// the features, so that none of their places is empty, and weights are read as they come.
template <class Cell, int I, int H, int T, bool REVERSED, bool CELL>
struct RNNRows {
    static constexpr int G = Cell::GATES * H, K = Cell::SAVED * H, J = Cell::JOINT * H, IR = round_up(I), HV = H / LANES;
    static constexpr int R = T + CELL;
    typedef RowMap<I, G> Input;
    typedef RowMap<H, G> Hidden;
    typedef RowMap<J, H> Joint;
    typedef RowMap<G == J ? H : G - J, H> Rest;
    typedef RowMap<G, I> Back;
    INLINE int when(int s) { return REVERSED ? T - 1 - s : s; }

    // BLOCK rows of F numbers are a block of x, the first T of them the steps.
    template <int F, int BLOCK = T>
    INLINE void to_rows(const V* x, float* rows, int nb, int samples) {
        for (int t = 0; t < T; t++)  // what a block writes beyond its samples the next writes over
            for (int n = 0; n < nb; n++)
                scatter<F>(x + (int64_t)(n * BLOCK + t) * F, rows + (int64_t)(t * samples + n * LANES) * round_up(F));
    }

    // Empty places get the last sample's row, or the given one.
    template <int F, bool ADD, int BLOCK = T>
    INLINE void from_rows(const float* rows, V* x, int nb, int samples, const float* none) {
        for (int t = 0; t < T; t++)
            for (int n = 0; n < nb; n++) {
                const float* at[LANES];
                for (int l = 0; l < LANES; l++) {
                    const int s = n * LANES + l;
                    const float* last = none ? none : rows + (int64_t)(t * samples + samples - 1) * round_up(F);
                    at[l] = s < samples ? rows + (int64_t)(t * samples + s) * round_up(F) : last;
                }
                V* to = x + (int64_t)(n * BLOCK + t) * F;
                if (!ADD) {
                    gather<F>(at, to);
                    continue;
                }
                V more[F];
                gather<F>(at, more);
                for (int f = 0; f < F; f++) to[f] += more[f];
            }
    }

    // Room: packed weights; inputs, outputs and their gradients as rows, of one block more than there are; what comes from h,
    // or its gradient and the carry; a row of inputs.
    OP void forward(const V* x, const float* wi, const float* wh, const float* bi, const float* bh, V* y, V* saved,
                    V* packed, V* inputs, V* outputs, V*, V* state, V*, int nb, int samples) {
        float *w = (float*)packed, *xs = (float*)inputs, *hs = (float*)outputs, *from_h = (float*)state, *k = (float*)saved;
        to_rows<I>(x, xs, nb, samples);
        Input::template pack<true>(wi, w);
        Input::template run<false>(xs, IR, w, bi, k, K, T * samples);
        Hidden::template pack<true>(wh, w);
        for (int s = 0; s < T; s++) {
            const int64_t t = when(s) * (int64_t)samples, last = when(s - 1) * (int64_t)samples;
            if (s)
                Hidden::template run<false>(hs + last * H, H, w, bh, from_h, G, samples);
            else
                for (int n = 0; n < samples; n++)
                    for (int j = 0; j < G; j++) from_h[n * G + j] = bh ? bh[j] : 0.f;
            for (int n = 0; n < samples; n++) {
                V *at = (V*)(k + (t + n) * K), *h = (V*)(hs + (t + n) * H);
                const V *before = s ? (V*)(hs + (last + n) * H) : nullptr, *k_last = s ? (V*)(k + (last + n) * K) : nullptr;
                for (int j = 0; j < HV; j++) Cell::template step<HV>(at, (V*)(from_h + n * G), before, k_last, h, j);
            }
        }
        from_rows<H, false, R>(hs, y, nb, samples, nullptr);
        for (int n = 0; CELL && n < nb; n++) {
            const float* at[LANES];
            for (int l = 0; l < LANES; l++) {
                const int s = n * LANES + l < samples ? n * LANES + l : samples - 1;
                at[l] = k + (when(T - 1) * (int64_t)samples + s) * K + (Cell::SAVED - 1) * H;
            }
            gather<H>(at, y + (int64_t)(n * R + T) * H);
        }
    }

    template <bool ADD>
    OP void backward(const V* x, const V* y, const float* wi, const float* wh, const V* dy, V* dx, float* dwi, float* dwh,
                     float* dbi, float* dbh, V* saved, V* packed, V* inputs, V* outputs, V* slopes, V* state, V* zeros,
                     int nb, int samples) {
        const int64_t rows = T * samples;
        float *w = (float*)packed, *xs = (float*)inputs, *hs = (float*)outputs, *ds = (float*)slopes, *k = (float*)saved;
        float *dh = (float*)state, *carry = dh + (int64_t)samples * H, *none = (float*)zeros;
        to_rows<H, R>(y, hs, nb, samples), to_rows<H, R>(dy, ds, nb, samples);
        std::memset(dh, 0, sizeof(float) * 2 * samples * H);
        for (int n = 0; CELL && n < nb; n++) scatter<H>(dy + (int64_t)(n * R + T) * H, carry + (int64_t)n * LANES * H);
        float* rest = w + Joint::size;
        Joint::template pack<false>(wh, w);
        if constexpr (J < G) Rest::template pack<false>(wh + (int64_t)J * H, rest);
        for (int s = T - 1; s >= 0; s--) {
            const int64_t t = when(s) * (int64_t)samples, last = when(s - 1) * (int64_t)samples;
            for (int n = 0; n < samples; n++) {
                V *at = (V*)(k + (t + n) * K), *d = (V*)(dh + n * H), *from = (V*)(ds + (t + n) * H);
                const V *before = s ? (V*)(hs + (last + n) * H) : nullptr, *k_last = s ? (V*)(k + (last + n) * K) : nullptr;
                for (int j = 0; j < HV; j++) {
                    d[j] += from[j];
                    Cell::template back<HV>(at, before, k_last, d, (V*)(carry + n * H), j);
                }
            }
            if (!s) break;
            Joint::template run<true>(k + t * K, K, w, nullptr, dh, H, samples);
            if constexpr (J < G) Rest::template run<true>(k + t * K + Cell::OTHER * H, K, rest, nullptr, dh, H, samples);
        }
        if (dwi) to_rows<I>(x, xs, nb, samples), RowWeights<I, G>::run(xs, IR, k, K, rows, dwi);
        if (dbi) RowWeights<I, G>::bias(k, K, rows, dbi);
        const int64_t later = REVERSED ? 0 : samples;  // the first state that follows another
        const float *states = hs + (samples - later) * H, *gates = k + later * K;
        if (dwh) {
            RowWeights<H, J>::run(states, H, gates, K, rows - samples, dwh);
            if constexpr (J < G)
                RowWeights<H, G == J ? H : G - J>::run(states, H, gates + Cell::OTHER * H, K, rows - samples, dwh + (int64_t)J * H);
        }
        if (dbh) {
            RowWeights<H, J>::bias(k, K, rows, dbh);
            if constexpr (J < G) RowWeights<H, G == J ? H : G - J>::bias(k + Cell::OTHER * H, K, rows, dbh + J);
        }
        if (!dx) return;
        std::memset(none, 0, sizeof(float) * IR);
        Back::template pack<false>(wi, w);
        Back::template run<false>(k, K, w, nullptr, xs, IR, rows);
        from_rows<I, ADD>(xs, dx, nb, samples, none);
    }
};

// Blocks ----------------------------------------------------------------------------------------------------

// With CELL, the last cell follows the outputs; with FIRST, it starts from states (and cells) that it is given.
template <class Cell, int I, int H, int T, bool REVERSED, bool CELL = false, bool FIRST = false>
struct RNN {
    static constexpr int G = Cell::GATES * H, K = Cell::SAVED * H, J = Cell::JOINT * H;
    static constexpr int R = T + CELL;
    typedef Linear<I, G> Input;
    typedef Linear<H, G> Hidden;
    typedef Linear<H, J> Joint;
    typedef Linear<H, G == J ? H : G - J> Rest;
    INLINE int when(int s) { return REVERSED ? T - 1 - s : s; }

    struct Start {  // the given states, and their gradients, which may be written or added to
        const V *h0, *c0;
        V *dh0, *dc0;
        bool add_h, add_c;
    };

    // What the first step finds before it: of block n, from the place where a cell lies in what is saved.
    INLINE const V* state(const V* h0, int n) { return FIRST ? h0 + n * H : nullptr; }
    INLINE const V* cell(const V* c0, int n) { return FIRST && c0 ? c0 + (n - Cell::SAVED + 1) * H : nullptr; }

    // Room: what comes from h, or its gradient and the carry; and what Linear::weight takes for SEQ_TILE blocks.
    OP void forward(const V* x, const V* h0, const V* c0, const float* wi, const float* wh, const float* bi, const float* bh,
                    V* y, V* saved, V* from_h, int nb) {
        Input::template run<I, G, 1, I, false>(x, wi, bi, saved, nb * T, I, K);
        for (int s = 0; s < T; s++) {
            int t = when(s), last = when(s - 1);
            if (s || FIRST)
                Hidden::template run<H, G, 1, H, false>(s ? y + last * H : h0, wh, bh, from_h, nb, s ? R * H : H, G);
            else
                for (int n = 0; n < nb; n++)
                    for (int j = 0; j < G; j++) from_h[n * G + j] = splat(bh ? bh[j] : 0.f);
            for (int n = 0; n < nb; n++) {
                V *k = saved + (n * T + t) * K, *h = y + (n * R + t) * H, *from = from_h + n * G;
                const V* before = s ? y + (n * R + last) * H : state(h0, n);
                const V* k_last = s ? saved + (n * T + last) * K : cell(c0, n);
                for (int j = 0; j < H; j++) Cell::template step<H>(k, from, before, k_last, h, j);
            }
        }
        for (int n = 0; CELL && n < nb; n++)
            std::memcpy((void*)(y + (n * R + T) * H), saved + (n * T + when(T - 1)) * K + (Cell::SAVED - 1) * H, sizeof(V) * H);
    }

    INLINE void leave(const V* from, V* to, int nb, bool add) {
        for (int j = 0; to && j < nb * H; j++) to[j] = add ? to[j] + from[j] : from[j];
    }

    template <bool ADD>
    OP void backward(const V* x, const V* y, const float* wi, const float* wh, const V* dy, V* dx, float* dwi, float* dwh,
                     float* dbi, float* dbh, V* saved, V* dh, V* xs, V* ys, int nb, Start at = {}) {
        V* carry = dh + nb * H;
        std::memset((void*)dh, 0, sizeof(V) * 2 * nb * H);
        for (int n = 0; CELL && n < nb; n++) std::memcpy((void*)(carry + n * H), dy + (n * R + T) * H, sizeof(V) * H);
        for (int s = T - 1; s >= 0; s--) {
            int t = when(s), last = when(s - 1);
            for (int n = 0; n < nb; n++) {
                V *k = saved + (n * T + t) * K, *d = dh + n * H;
                const V* before = s ? y + (n * R + last) * H : state(at.h0, n);
                const V* k_last = s ? saved + (n * T + last) * K : cell(at.c0, n);
                const V* from = dy + (n * R + t) * H;
                for (int j = 0; j < H; j++) {
                    d[j] += from[j];
                    Cell::template back<H>(k, before, k_last, d, carry + n * H, j);
                }
            }
            if (!s && !FIRST) break;
            Joint::template run<J, H, H, 1, true>(saved + t * K, wh, nullptr, dh, nb, T * K, H);
            if constexpr (J < G)
                Rest::template run<G - J, H, H, 1, true>(saved + t * K + Cell::OTHER * H, wh + J * H, nullptr, dh, nb, T * K,
                                                         H);
        }
        if (FIRST) leave(dh, at.dh0, nb, at.add_h), leave(carry, at.dc0, nb, at.add_c);
        if (dx) Input::template run<G, I, I, 1, ADD>(saved, wi, nullptr, dx, nb * T, K, I);
        if (dwi) Input::weight_tiles(x, saved, dwi, xs, ys, nb * T, I, K);
        if (dbi) Input::bias(saved, dbi, nb * T, K, true);
        constexpr int later = REVERSED ? 0 : 1;  // the first state that follows another, in the order of the rows
        for (int n = 0; dwh && n < nb; n++) {
            const V *k = saved + (n * T + later) * K, *h = y + (n * R + 1 - later) * H;
            Joint::weight_tiles(h, k, dwh, xs, ys, T - 1, H, K);
            if constexpr (J < G) Rest::weight_tiles(h, k + Cell::OTHER * H, dwh + J * H, xs, ys, T - 1, H, K);
        }
        if (FIRST && dwh) {
            const V* k = saved + when(0) * K;
            Joint::weight_tiles(at.h0, k, dwh, xs, ys, nb, H, T * K);
            if constexpr (J < G) Rest::weight_tiles(at.h0, k + Cell::OTHER * H, dwh + J * H, xs, ys, nb, H, T * K);
        }
        if (dbh) {
            Joint::bias(saved, dbh, nb * T, K, true);
            if constexpr (J < G) Rest::bias(saved + Cell::OTHER * H, dbh + J, nb * T, K, true);
        }
    }
};
