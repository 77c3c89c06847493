// Gradients of single samples, each clipped to a norm, their sum noised: what a client of a private algorithm takes.
namespace {

// Random words that depend on every bit of a counter and of a key: Wellons' mix of 32 bits, twice.
typedef uint32_t VW __attribute__((vector_size(4 * LANES)));

INLINE VW mixed_words(VW x) {
    x ^= x >> 16, x *= 0x7feb352du;
    x ^= x >> 15, x *= 0x846ca68bu;
    return x ^ (x >> 16);
}

// Two normal numbers for every counter (Box and Muller), as `rng.gaussian` makes them to rounding.
INLINE void normals(VW counter, uint32_t low, uint32_t high, V& a, V& b) {
    VW u = mixed_words(mixed_words(counter ^ low) ^ high);
    VW w = mixed_words(mixed_words(counter ^ (low ^ 0x9e3779b9u)) ^ high);
    V at = (__builtin_convertvector((VI)(u >> 1), V) + 0.5f) * 0x1p-31f;
    V square = max(-2.f * log(at), V{}), r;  // log may be a rounding above 0 at 1
    UNROLL for (int l = 0; l < LANES; l++) r[l] = std::sqrt(square[l]);
    V turns = __builtin_convertvector((VI)w, V) * 0x1p-32f;
    V quarters = (turns * 4.f + 12582912.f) - 12582912.f, f = turns - quarters * 0.25f, z = f * f;
    V s = splat(42.0586939f), c = splat(60.2446414f);
    s = s * z - 76.7058598f, c = c * z - 85.4568172f;
    s = s * z + 81.6052493f, c = c * z + 64.9393940f;
    s = s * z - 41.3417022f, c = c * z - 19.7392088f;
    s = s * z + 6.28318531f, c = c * z + 1.f;
    s *= f;
    VI k = __builtin_convertvector(quarters, VI), odd = -(k & 1);
    a = r * (V)((VI)pick(odd, s, c) ^ (((k + 1) & 2) << 30));
    b = r * (V)((VI)pick(odd, c, s) ^ ((k & 2) << 30));
}

INLINE void add_normals(float* g, int64_t count, V v, float deviation, float by) {
    if (count >= LANES) return store(g, (load(g) + v * deviation) * by);
    for (int l = 0; l < count; l++) g[l] = (g[l] + v[l] * deviation) * by;
}

// g <- (g + deviation * normal numbers) * by
OP void noised(float* g, int64_t d, float deviation, float by, uint64_t key) {
    const int64_t half = (d + 1) / 2;
    VW counter;
    for (int l = 0; l < LANES; l++) counter[l] = l;
    for (int64_t j = 0; j < half; j += LANES, counter += LANES) {
        V a, b;
        normals(counter, uint32_t(key), uint32_t(key >> 32), a, b);
        add_normals(g + j, half - j, a, deviation, by);
        add_normals(g + half + j, d - half - j, b, deviation, by);
    }
}

struct Examples : Gradient {
    using Gradient::Gradient;

    double chunk(Chunk& c, const float* p, float* g, bool add, V* workspace) {
        float loss[CHUNK];
        V squares[Model::blocks] = {}, factors[Model::blocks];
        double sum = 0;
        for (int s = 0; s < c.samples; s++) c.share[s] = 1;
        int blocks = c.close();
        Model::targets(c.targets, workspace, blocks);
        Model::forward(p, constants, workspace, c.inputs, c.key, blocks, c.samples);
        for (int n = 0; n < blocks; n++)
            Loss::run(workspace + Model::output + n * Model::outputs, c.targets + n * LANES, load(c.share + n * LANES),
                      loss + n * LANES, workspace + Model::output_gradient + n * Model::outputs, nullptr);
        for (int s = 0; s < c.samples; s++) sum += loss[s];
        Model::squares(p, constants, workspace, c.inputs, c.key, blocks, c.samples, squares);
        for (int n = 0; n < blocks; n++)
            for (int l = 0; l < LANES; l++) {
                float norm = std::sqrt(squares[n][l]);
                factors[n][l] = norm > clip ? clip / norm : 1.f;
            }
        Model::scaled(p, constants, g, workspace, c.inputs, c.key, blocks, c.samples, factors, add);
        return sum;
    }

    void client(int64_t i, V* workspace) {
        float* to = grads + i * Model::parameters;
        double loss = 0;
        int64_t count = 0;
        each_chunk(i, -1, [&](Chunk& c, int64_t) {
            loss += chunk(c, params + i * Model::parameters, to, count > 0, workspace);
            count += c.samples;
        });
        if (!count) std::memset(to, 0, sizeof(float) * Model::parameters);
        if (noise_keys)
            noised(to, Model::parameters, deviation, 1.f / planned[i], noise_keys[i]);
        else
            for (int64_t k = 0; k < Model::parameters; k++) to[k] *= 1.f / planned[i];
        losses[i] = count ? float(loss / count) : 0.f;
    }

    static void work(void* self, V* workspace) {
        Examples& job = *(Examples*)self;
        for (int64_t i; (i = job.next.fetch_add(1)) < job.clients && job.status == FINE;) job.client(i, workspace);
    }
};

}  // namespace

extern "C" int fedbraid_examples(const GradientJob* given) {
    try {
        Examples job(*given);
        return run(job, job.clients, job.threads);
    } catch (const std::bad_alloc&) {
        return NO_MEMORY;
    }
}
