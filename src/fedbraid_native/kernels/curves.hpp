// Functions of each number whose slope their argument tells: a name, the value and the slope at x.
#define CURVE(NAME, VALUE, SLOPE)                        \
    struct NAME {                                        \
        INLINE V value(V x) { return VALUE; }            \
        INLINE V slope(V x, V g) { return g * (SLOPE); } \
    };
typedef int32_t Bits;  // of a number, which a template cannot take otherwise

template <class F>
INLINE V each_lane(V x, F f) {
    V y;
    for (int l = 0; l < LANES; l++) y[l] = f(x[l]);
    return y;
}

INLINE V size(V x) { return (V)((VI)x & 0x7fffffff); }
INLINE V root(V x) { return each_lane(x, [](float a) { return std::sqrt(a); }); }
INLINE V softplus(V x) { return max(V{}, x) + log(1.f + exp(-size(x))); }
INLINE V squared(V x) { return x * x; }

// Also of zero, and of numbers that have none.
INLINE V any_log(V x) { return pick(x > 0.f, log(x), pick(x == 0.f, splat(-INFINITY), splat(NAN))); }

template <int N>
INLINE V whole_power(V x) {
    V y = splat(1.f);
    UNROLL for (int k = 0; k < N; k++) y *= x;
    return y;
}

CURVE(Exp, exp(x), exp(x))
CURVE(Expm1, exp(x) - 1.f, exp(x))
CURVE(Log, any_log(x), 1.f / x)
CURVE(Log1p, any_log(1.f + x), 1.f / (1.f + x))
CURVE(Sqrt, root(x), 0.5f / root(x))
CURVE(Length, root(x), keep(x > 0.f, 0.5f / root(x)))  // of a sum of squares: level where there is none
CURVE(Rsqrt, 1.f / root(x), -0.5f / (x * root(x)))
CURVE(Reciprocal, 1.f / x, -1.f / (x * x))
CURVE(Abs, size(x), pick(x > 0.f, splat(1.f), keep(x < 0.f, splat(-1.f))))
CURVE(Sin, each_lane(x, [](float a) { return std::sin(a); }), each_lane(x, [](float a) { return std::cos(a); }))
CURVE(Cos, each_lane(x, [](float a) { return std::cos(a); }), -each_lane(x, [](float a) { return std::sin(a); }))
CURVE(LogSigmoid, -softplus(-x), sigmoid(-x))
CURVE(Mish, x * tanh(softplus(x)),
      tanh(softplus(x)) + x * sigmoid(x) * (1.f - squared(tanh(softplus(x)))))
CURVE(Softsign, x / (1.f + size(x)), 1.f / squared(1.f + size(x)))
CURVE(Tanhshrink, x - tanh(x), squared(tanh(x)))
CURVE(Hardsigmoid, pick(x > 3.f, splat(1.f), max(V{}, (x + 3.f) * (1.f / 6))), keep((x > -3.f) & (x < 3.f), splat(1.f / 6)))
template <int N>
CURVE(WholePower, whole_power<N>(x), float(N) * whole_power<N - 1>(x))
template <Bits P>
CURVE(Power, each_lane(x, [](float a) { return std::pow(a, from_bits(P)); }),
      each_lane(x, [](float a) { return from_bits(P) * std::pow(a, from_bits(P) - 1.f); }))
// A (e^(B x) - 1) below zero, C x above.
template <Bits A, Bits B, Bits C>
CURVE(Elu, pick(x > 0.f, x * from_bits(C), from_bits(A) * (exp(x * from_bits(B)) - 1.f)),
      pick(x > 0.f, splat(from_bits(C)), from_bits(A) * from_bits(B) * exp(x * from_bits(B))))
// Half the square up to D, then a line; the same divided by D.
template <Bits D>
CURVE(Huber, pick(size(x) < from_bits(D), 0.5f * x * x, from_bits(D) * (size(x) - 0.5f * from_bits(D))),
      pick(size(x) < from_bits(D), x, pick(x > 0.f, splat(from_bits(D)), splat(-from_bits(D)))))
template <Bits D>
CURVE(SmoothL1, pick(size(x) < from_bits(D), 0.5f * x * x / from_bits(D), size(x) - 0.5f * from_bits(D)),
      pick(size(x) < from_bits(D), x / from_bits(D), pick(x > 0.f, splat(1.f), splat(-1.f))))
template <Bits BETA>
CURVE(Softplus, softplus(x * from_bits(BETA)) / from_bits(BETA), sigmoid(x * from_bits(BETA)))
template <Bits AT>
CURVE(Hardshrink, keep(size(x) > from_bits(AT), x), keep(size(x) > from_bits(AT), splat(1.f)))
template <Bits AT>
CURVE(Softshrink, pick(x > from_bits(AT), x - from_bits(AT), keep(x < -from_bits(AT), x + from_bits(AT))),
      keep(size(x) > from_bits(AT), splat(1.f)))
template <Bits AT, Bits ELSE>
CURVE(Threshold, pick(x > from_bits(AT), x, splat(from_bits(ELSE))), keep(x > from_bits(AT), splat(1.f)))

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

CURVE(Erf, erf(x), 1.1283791670955126f * exp(-x * x))

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

// The same without the slope at its ends.
template <Bits LOW, Bits HIGH>
struct Hardtanh : Clamp<LOW, HIGH> {
    INLINE V slope(V x, V g) { return keep((x > from_bits(LOW)) & (x < from_bits(HIGH)), g); }
};
